"""Products and goals from the files of WebShop (arXiv:2207.01206).

  items_shuffle_1000.json   a list of products: asin, name, pricing ('$9.99' or '$9.99$19.99'),
                            query, product_category ('A › B › C'), full_description,
                            small_description (lines), customization_options
                            ({'color': [{'value': ...}, ...], ...} or null)
  items_ins_v2_1000.json    asin -> {attributes, instruction, instruction_attributes}

The rules follow WebShop's loader: the first product of an asin counts, a price is sampled from a
price range, and a missing price is 100 dollars. A value listed twice in an option counts twice, and
a product with an empty option has no goal. Digests replace the loader's random prices and limits.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

ASIN = 10  # maximum length of an asin
NO_PRICE = 100.0
LIMITS = tuple(10.0 * n for n in range(1, 100))  # possible price limits of a goal
NEAREST = 4  # number of limits above the price from which one is drawn
ANY_PRICE = 1_000_000.0
SHUFFLED = 233  # seed of the goal order in AgentGym and WebShop
MAX_GOALS = 2**24


@dataclasses.dataclass(frozen=True)
class Product:
    asin: str
    title: str
    price: float
    price_tag: str
    query: str  # search query of its kind of product
    categories: frozenset[str]
    description: str
    features: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # kind -> values in lower case, possibly repeated
    attributes: tuple[str, ...]
    instruction: str  # of a customer; '' = no goal
    wanted: tuple[str, ...]  # attributes that the instruction requires


@dataclasses.dataclass(frozen=True)
class Goal:
    product: Product
    options: tuple[tuple[str, str], ...]  # kind and value
    most: float  # dollars

    @property
    def text(self) -> str:
        """The instruction, the options and the price limit in a sentence."""
        chosen = ', and '.join(f'{kind}: {value}' for kind, value in self.options)
        price = '' if self.most == ANY_PRICE else f', and price lower than {self.most:.2f} dollars'
        return self.product.instruction + (f' with {chosen}' if chosen else '') + price


def drawn(*words: str) -> random.Random:
    """Return a random generator seeded by words."""
    return random.Random(hashlib.sha256('\0'.join(words).encode()).digest())


def read_price(pricing: str | None, asin: str) -> tuple[float, str]:
    """Return (price, price tag)."""
    parts = [re.sub(r'[^\d.]', '', part) for part in (pricing or '').split('$')[1:3]]
    prices = [float(part) for part in parts if part]
    if not prices:
        return NO_PRICE, f'${NO_PRICE}'
    if len(prices) == 1:
        return prices[0], f'${prices[0]}'
    return drawn('price', asin).uniform(*prices), f'${prices[0]} to ${prices[1]}'


def read_options(row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {
        kind.lower(): tuple(one['value'].strip().replace('/', ' | ').lower() for one in values)
        for kind, values in (row.get('customization_options') or {}).items()
        if values is not None
    }


def read_product(row: Any, said: Mapping[str, Any]) -> Product:
    """Parse a row of the product list; said: its entry in the file of instructions."""
    if not isinstance(row, dict) or not isinstance(row.get('asin'), str):
        raise ValueError('a product must be an object with an asin')
    for name in ('name', 'query', 'product_category'):
        if not isinstance(row.get(name), str):
            raise ValueError(f'{row["asin"]} has no {name}')
    price, tag = read_price(row.get('pricing'), row['asin'])
    lines = row.get('small_description') or ()
    return Product(
        asin=row['asin'],
        title=row['name'],
        price=price,
        price_tag=tag,
        query=row['query'].lower().strip(),
        categories=frozenset(part.strip() for part in row['product_category'].split('›')),
        description=row.get('full_description') or '',
        features=tuple(lines) if isinstance(lines, list | tuple) else (lines,),
        options=read_options(row),
        attributes=tuple(said.get('attributes') or ()),
        instruction=(said.get('instruction') or '').strip().removesuffix('.'),
        wanted=tuple(said.get('instruction_attributes') or ()),
    )


def read_products(rows: Sequence[Any], instructions: Mapping[str, Any]) -> tuple[Product, ...]:
    """Parse a list; keep the first product of each valid asin."""
    by_asin: dict[str, Product] = {}
    for number, row in enumerate(rows):
        try:
            asin = row['asin'] if isinstance(row, dict) and 'asin' in row else ''
            if asin not in by_asin and (not asin or len(asin) <= ASIN and asin != 'nan'):
                by_asin[asin] = read_product(row, instructions.get(asin, {}))
        except ValueError as error:
            raise ValueError(f'product {number}: {error}') from error
    if not by_asin:
        raise ValueError('there are no products')
    return tuple(by_asin.values())


def limit_of(product: Product, options: Sequence[tuple[str, str]]) -> float:
    """Draw a goal's price limit; ANY_PRICE if fewer than two limits are above the price."""
    above = [limit for limit in LIMITS if limit > product.price][:NEAREST]
    if len(above) < 2:
        return ANY_PRICE
    return max(drawn('limit', product.asin, *itertools.chain(*options)).sample(above, 2))


def goals_of(products: Sequence[Product]) -> tuple[Goal, ...]:
    """Return a goal per choice of options of each product with an instruction, shuffled."""
    goals = []
    for product in products:
        if product.instruction and product.wanted:
            kinds = sorted(product.options)
            for values in itertools.product(*(product.options[kind] for kind in kinds)):
                options = tuple(zip(kinds, values, strict=True))
                goals.append(Goal(product, options, limit_of(product, options)))
    if not goals:
        raise ValueError('the shop has no goals: no product has an instruction')
    if len(goals) > MAX_GOALS:
        raise ValueError(f'{len(goals)} goals exceed the maximum of {MAX_GOALS}')
    random.Random(SHUFFLED).shuffle(goals)
    return tuple(goals)


def read_json(path: str) -> Any:
    try:
        return json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    except json.JSONDecodeError as error:
        raise ValueError(f'{path}: invalid JSON ({error})') from error


@functools.cache
def read_files(products: str, instructions: str) -> tuple[Product, ...]:
    """Read products from one file and their instructions from another."""
    rows, entries = read_json(products), read_json(instructions)
    if not isinstance(rows, list) or not isinstance(entries, dict):
        raise ValueError(
            f'{products} must hold a list of products, and {instructions} an object whose keys are '
            'their asins'
        )
    try:
        return read_products(rows, entries)
    except ValueError as error:
        raise ValueError(f'{products}, {error}') from error
