"""A catalogue drawn from a seed, in the format of WebShop's files, which we may not redistribute.

Each kind of product has its own attributes, options and prices. Products of a kind differ only in
these, so a search finds many, and only their pages identify the right one.
"""

import functools
import random
import string
from typing import Any

from agentrl_jax.envs.hosts.webshop import products
from agentrl_jax.envs.hosts.webshop.products import Product

CHOICES = {  # an option: its values
    'color': 'black white red blue green yellow purple pink grey brown orange beige'.split(),
    'size': ['small', 'medium', 'large', 'x-large', 'xx-large'],
    'width': ['narrow', 'regular', 'wide'],
    'pack': ['1 count', '2 count', '4 count'],
    'length': ['3 feet', '6 feet', '10 feet'],
    'dimensions': ['30 x 20 inches', '40 x 30 inches', '60 x 40 inches'],
}
CLOTHES = 'machine wash|hand wash|long sleeve|short sleeve|regular fit|pure cotton|button closure'
SHOES = (
    'rubber sole|ethylene vinyl|memory foam|non slip|lace closure|arch support|quality materials'
)
CABLES = 'fast charging|high speed|gold plated|plug play|usb port|aluminum alloy|heavy duty'
HOME = 'easy clean|space saving|solid wood|easy assemble|storage space|eco friendly|living room'
FOOD = 'gluten free|sugar free|low calorie|keto friendly|non gmo|high protein|natural flavors'
CARE = 'cruelty free|paraben free|long lasting|sensitive skin|dry skin|natural ingredients|tea tree'
KINDS = {  # kind: (category, attributes, options, price range)
    "men's t-shirt": ('Clothing › Men › Shirts', CLOTHES, ('color', 'size'), (8, 45)),
    "women's blouse": ('Clothing › Women › Tops', CLOTHES, ('color', 'size'), (12, 60)),
    "men's hoodie": ('Clothing › Men › Hoodies', CLOTHES, ('color', 'size'), (18, 75)),
    "women's dress": ('Clothing › Women › Dresses', CLOTHES, ('color', 'size'), (20, 120)),
    'running shoe': ('Shoes › Sport › Running', SHOES, ('color', 'width'), (30, 160)),
    'walking sandal': ('Shoes › Summer › Sandals', SHOES, ('color', 'width'), (15, 80)),
    'slip on loafer': ('Shoes › Office › Loafers', SHOES, ('color', 'width'), (25, 110)),
    'charging cable': ('Electronics › Phones › Cables', CABLES, ('color', 'length'), (5, 30)),
    'hdmi cable': ('Electronics › Video › Cables', CABLES, ('color', 'length'), (6, 45)),
    'wall charger': ('Electronics › Phones › Chargers', CABLES, ('color',), (9, 50)),
    'bookshelf': ('Home › Furniture › Shelves', HOME, ('color', 'dimensions'), (40, 300)),
    'coffee table': ('Home › Furniture › Tables', HOME, ('color', 'dimensions'), (50, 400)),
    'area rug': ('Home › Floor › Rugs', HOME, ('color', 'dimensions'), (25, 220)),
    'protein bar': ('Food › Snacks › Bars', FOOD, ('pack',), (4, 40)),
    'granola': ('Food › Breakfast › Cereals', FOOD, ('pack',), (3, 25)),
    'trail mix': ('Food › Snacks › Nuts', FOOD, ('pack',), (5, 35)),
    'shampoo': ('Beauty › Hair › Washing', CARE, ('pack',), (6, 40)),
    'face cream': ('Beauty › Skin › Creams', CARE, ('pack',), (8, 70)),
    'lip balm': ('Beauty › Skin › Lips', CARE, ('pack',), (2, 15)),
    'body lotion': ('Beauty › Skin › Lotions', CARE, ('pack',), (5, 45)),
}
SYLLABLES = 'ba co da fe gi ho ju ka lo mi no pa ru sa te vo wi xa yo ze'.split()
LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'
STALL_KINDS = tuple(kind for kind in KINDS if len(KINDS[kind][2]) == 1)  # with one option
STALL_ASINS = tuple(f'{number:010}' for number in range(1, 9))


def draw(seed: int, count: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Draw (products, instructions by asin), the contents of WebShop's two files."""
    generator = random.Random(f'webshop {seed}')
    rows, entries = [], {}
    while len(rows) < count:
        asin = 'B0' + ''.join(generator.choices(LETTERS, k=8))
        if asin in entries:
            continue
        kind = generator.choice(list(KINDS))
        row, words = draw_product(generator, kind)
        rows.append({'asin': asin, **row})
        entries[asin] = words
    return rows, entries


def draw_stall(
    seed: int, number: int, count: int
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Draw a small shop, as `draw` does: products of different kinds, with few asins."""
    generator = random.Random(f'webshop {seed} {number}')
    kinds = generator.sample(STALL_KINDS, count)
    asins = generator.sample(STALL_ASINS, count)
    rows, entries = [], {}
    for asin, kind in zip(asins, kinds, strict=True):
        row, entries[asin] = draw_product(generator, kind)
        rows.append({'asin': asin, **row})
    return rows, entries


def draw_product(generator: random.Random, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    aisle, known, choices, (low, high) = KINDS[kind]
    brand = ''.join(generator.choices(SYLLABLES, k=3)).capitalize()
    attributes = generator.sample(known.split('|'), 3)
    titled, other, hidden = attributes  # in the title, the features and the description
    options = {}
    for name in choices:
        values = CHOICES[name]
        few = generator.sample(values, min(len(values), generator.randint(2, 4)))
        options[name] = [{'value': value} for value in values if value in few]
    price = round(generator.uniform(low, high), 2)
    more = round(price * generator.uniform(1.1, 1.6), 2)
    row = {
        'name': f'{brand} {string.capwords(kind)}, {string.capwords(titled)}',
        'pricing': f'${price}${more}' if generator.random() < 0.2 else f'${price}',
        'query': kind,
        'product_category': aisle,
        'full_description': f'{brand} makes this {kind}. It stands for {hidden}.',
        'small_description': [f'{other.capitalize()}.', f'A {kind} of {brand}.'],
        'customization_options': options,
    }
    required = sorted(generator.sample(attributes, generator.randint(1, 2)))
    return row, {
        'attributes': sorted(attributes),
        'instruction': f'Find me a {kind} with these: {", ".join(required)}',
        'instruction_attributes': required,
    }


@functools.cache
def load(seed: int, count: int) -> tuple[Product, ...]:
    return products.read_products(*draw(seed, count))
