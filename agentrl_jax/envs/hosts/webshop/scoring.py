"""What a purchase earns (arXiv:2207.01206, section 3 and appendix).

  r = r_type (|matched attributes| + |matched options| + [price <= limit])
      / (|attributes| + |options| + 1)

r_type is 1 where the kind searched for is the same, two parts of the category are, or the titles
share over a fifth of their nouns; else .5, below a tenth .1, and 0 without any. WebShop asks a
model of language which words are nouns; here they are the title's words but for STOP. Texts are
alike if the token set ratio is over 85, as in its code.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable

from agentrl_jax.envs.hosts.webshop.products import Goal, Product

ALIKE = 85
SAME_CATEGORY = 2  # parts
SAME_TITLE, LITTLE_TITLE = 0.2, 0.1
OTHER_TYPE, FAR_TYPE = 0.5, 0.1
WORD = re.compile(r'[a-z0-9]+')
STOP = frozenset('a an and by for from in of on or the to with'.split())
# The first of these in an option stands for it: 'dark blue' is blue
COLORS = (
    'black white red blue green yellow purple pink grey gray brown orange beige gold silver navy '
    'khaki ivory teal turquoise maroon olive cream tan violet'
).split()


@dataclasses.dataclass(frozen=True)
class Score:
    total: float
    type: float
    attributes: float  # shares
    options: float
    price: float


def ratio(one: str, other: str) -> int:
    """100 for equal texts, 0 for those without a common letter."""
    return round(100 * difflib.SequenceMatcher(None, one, other).ratio())


def token_set_ratio(one: str, other: str) -> int:
    """The best ratio of: the common words, and these with the other words of either text."""
    first, second = ({*WORD.findall(text.lower())} for text in (one, other))
    if not first or not second:
        return 0
    common = ' '.join(sorted(first & second))
    left = ' '.join(filter(None, (common, ' '.join(sorted(first - second)))))
    right = ' '.join(filter(None, (common, ' '.join(sorted(second - first)))))
    return max(ratio(common, left), ratio(common, right), ratio(left, right))


def alike(one: str, others: Iterable[str]) -> bool:
    return any(token_set_ratio(one, other) > ALIKE for other in others)


def plain_color(value: str) -> str:
    return next((color for color in COLORS if color in value), value)


def nouns(title: str) -> set[str]:
    return {word for word in WORD.findall(title.lower()) if word not in STOP}


def type_factor(bought: Product, wanted: Product) -> float:
    if bought.query == wanted.query:
        return 1.0
    if len(bought.categories & wanted.categories) >= SAME_CATEGORY:
        return 1.0
    asked = nouns(wanted.title)
    shared = len(asked & nouns(bought.title)) / max(len(asked), 1)
    if shared > SAME_TITLE:
        return 1.0
    if shared == 0:
        return 0.0
    return FAR_TYPE if shared < LITTLE_TITLE else OTHER_TYPE


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether one of its own is alike, or a text of it holds it."""
    texts = (product.title, ' '.join(product.features), product.description)
    return alike(attribute, product.attributes) or any(attribute in x.lower() for x in texts)


def score(bought: Product, chosen: Iterable[str], goal: Goal) -> Score:
    """chosen: the values of the options that were clicked."""
    attributes = sum(has_attribute(bought, name) for name in goal.product.wanted)
    chosen = [plain_color(value) for value in chosen]
    options = sum(alike(plain_color(value), chosen) for _, value in goal.options)
    price = float(bought.price <= goal.most)
    kind = type_factor(bought, goal.product)
    asked = len(goal.product.wanted), len(goal.options)
    return Score(
        total=kind * (attributes + options + price) / (sum(asked) + 1),
        type=kind,
        attributes=attributes / max(asked[0], 1),
        options=options / asked[1] if asked[1] else 1.0,
        price=price,
    )
