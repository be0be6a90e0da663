"""What a purchase earns (arXiv:2207.01206, section 3 and appendix).

  r = r_type (|matched attributes| + |matched options| + [price <= limit])
      / (|attributes| + |options| + 1)

The rest is that of its code (web_agent_site/engine/goal.py at 6ba9969). r_type is 0 where the
titles share none of the wanted one's nouns and .1 where they share less than a tenth, whatever else
is the same; else 1 where the kind searched for is the same, two parts of the category are, or over
a fifth of the nouns; else .5. Matched options are counted over those that were chosen: a size must
be one of the goal's, others must be like one, or be found in a text of the product. So r may pass 1
where more was chosen than asked for. WebShop asks a model of language which words are nouns; here
they are the title's words but for STOP. Texts are alike if their token set ratio is over 85.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from agentrl_jax.envs.hosts.webshop.products import Goal, Product

ALIKE = 85
SAME_CATEGORY = 2  # parts
SAME_TITLE, LITTLE_TITLE = 0.2, 0.1
OTHER_TYPE, FAR_TYPE = 0.5, 0.1
NO_NOUNS = 0.2  # shared with a title that has none
EXACT = ('size',)  # kinds of options
WORD = re.compile(r'\w+')
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
    """Twice the letters of the longest common subsequence, in percent of all letters."""
    if not one or not other:
        return 0
    row = [0] * (len(other) + 1)
    for letter in one:
        before = row[:]
        for i, same in enumerate(other):
            row[i + 1] = before[i] + 1 if letter == same else max(before[i + 1], row[i])
    return round(200 * row[-1] / (len(one) + len(other)))


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
    asked = nouns(wanted.title)
    shared = len(asked & nouns(bought.title)) / len(asked) if asked else NO_NOUNS
    if shared == 0:
        return 0.0
    if shared < LITTLE_TITLE:
        return FAR_TYPE
    same = len(bought.categories & wanted.categories) >= SAME_CATEGORY
    same |= bought.query == wanted.query or shared > SAME_TITLE
    return 1.0 if same else OTHER_TYPE


def is_told(product: Product, words: str) -> bool:
    """Whether a text of a product holds them."""
    texts = (product.title, ' '.join(product.features), product.description)
    return any(words in text.lower() for text in texts)


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether one of its own is alike, or a text of it holds it."""
    return alike(attribute, product.attributes) or is_told(product, attribute)


def fits(bought: Product, kind: str, value: str, asked: Iterable[str]) -> bool:
    """Whether a chosen option is one that was asked for; values with plain colours."""
    found = value in asked if kind in EXACT else alike(value, asked)
    return found or is_told(bought, value)


def score(bought: Product, chosen: Mapping[str, str], goal: Goal) -> Score:
    """chosen: the values of the options that were clicked, by kind."""
    attributes = sum(has_attribute(bought, name) for name in goal.product.wanted)
    values = [plain_color(value) for _, value in goal.options]
    options = sum(fits(bought, kind, plain_color(value), values) for kind, value in chosen.items())
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
