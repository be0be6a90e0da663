"""The reward of a purchase (arXiv:2207.01206, section 3 and appendix).

  r = r_type (|matched attributes| + |matched options| + [price <= limit])
      / (|attributes| + |options| + 1)  <= 1

The rules follow WebShop's code (web_agent_site/engine/goal.py, 64fa2a5; AgentGym's copy at 3ef9235
agrees; tests/data/webshop_scores.json was recorded with them). r_type is 0 if the bought title has
no noun of the goal's title, and .1 if it has less than a tenth of them. Otherwise it is 1 if the
queries are equal, two parts of the category match or over a fifth of the nouns match, else .5. An
option of the goal matches if any chosen option is similar; other choices do not count. Options that
contain a colour are compared by colour. WebShop finds the nouns of a title with a language model;
here all words except STOP are nouns.

Texts match if their token set ratio is above 85. Words are split as in thefuzz 0.19.0, which both
pin: Latin-1 letters beyond ASCII are dropped, and an underscore is a letter.
"""

import re
from collections.abc import Iterable, Mapping

from agentrl_jax.envs.hosts.webshop.products import Goal, Product

ALIKE = 85
SAME_CATEGORY = 2  # parts
SAME_TITLE, LITTLE_TITLE = 0.2, 0.1
OTHER_TYPE, FAR_TYPE = 0.5, 0.1
NO_NOUNS = 0.2  # shared with a title that has none
WORD = re.compile(r'\w+')
NO_WORD = re.compile(r'\W')
STOP = frozenset('a an and by for from in of on or the to with'.split())
LATIN = dict.fromkeys(range(128, 256))
# A value is compared by the first of these in it: 'dark blue' is blue, 'dark wood' is dark
COLORS = (
    'alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown '
    'burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee '
    'cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia '
    'gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender '
    'lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor '
    'mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red '
    'rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan '
    'taupe teal tiger turquoise violet walnut wheat white wine yellow'
).split()


def words(text: str) -> set[str]:
    """Return the words of a text for comparisons."""
    return {*NO_WORD.sub(' ', text.translate(LATIN)).lower().split()}


def token_set_ratio(one: str, other: str) -> int:
    """Return a percentage: the best ratio of the common words and each text's words."""
    import rapidfuzz  # needed only by WebShop

    first, second = (' '.join(words(text)) for text in (one, other))
    return round(rapidfuzz.fuzz.token_set_ratio(first, second))


def alike(one: str, others: Iterable[str]) -> bool:
    return any(token_set_ratio(one, other) > ALIKE for other in others)


def colour_in(choice: str | tuple[str, str]) -> str:
    """Return the colour in a value, or the kind or value that is one; else the choice as text."""
    return next((color for color in COLORS if color in choice), str(choice))


def nouns(title: str) -> list[str]:
    return [word for word in WORD.findall(title.lower()) if word not in STOP]


def type_factor(bought: Product, wanted: Product) -> float:
    goal_nouns = nouns(wanted.title)
    shared = (
        len({*goal_nouns} & {*nouns(bought.title)}) / len(goal_nouns) if goal_nouns else NO_NOUNS
    )
    if shared == 0:
        return 0.0
    if shared < LITTLE_TITLE:
        return FAR_TYPE
    same = len(bought.categories & wanted.categories) >= SAME_CATEGORY
    same |= bought.query == wanted.query or shared > SAME_TITLE
    return 1.0 if same else OTHER_TYPE


def has_attribute(product: Product, attribute: str) -> bool:
    """Return whether a product has an attribute, in a text or as a similar attribute."""
    texts = (product.title, ' '.join(product.features), product.description)
    held = any(attribute in text.lower() for text in texts)
    return held or alike(attribute, product.attributes)


def matches(bought: Product, chosen: Mapping[str, str], goal: Goal) -> tuple[int, int, bool]:
    """Return the number of matched attributes and options, and whether the price is low enough."""
    attributes = sum(has_attribute(bought, name) for name in goal.product.wanted)
    values = list(map(colour_in, chosen.values()))
    options = sum(alike(colour_in(option), values) for option in goal.options)
    return attributes, options, bought.price <= goal.most


def score(bought: Product, chosen: Mapping[str, str], goal: Goal) -> float:
    """Score a purchase; chosen: the clicked option values, by kind."""
    parts = len(goal.product.wanted) + len(goal.options) + 1
    return type_factor(bought, goal.product) * (sum(matches(bought, chosen, goal)) / parts)
