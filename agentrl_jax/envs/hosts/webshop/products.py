"""Products and goals from the files of WebShop (arXiv:2207.01206).

  items_shuffle_1000.json   a list of products: asin, name, pricing ('$9.99' or '$9.99$19.99'),
                            query, product_category ('A › B › C'), full_description,
                            small_description (lines), customization_options
                            ({'color': [{'value': ...}, ...], ...} or null)
  items_ins_v2_1000.json    asin -> {attributes, instruction, instruction_attributes}

Rules follow its loader: the first product of an asin counts, a range of prices is sampled, and a
missing price is 100 dollars. A value that an option lists twice counts twice, and a product with an
empty option has no goal. Digests replace the loader's random draws of prices and limits.
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

ASIN = 10  # letters of a product's name
NO_PRICE = 100.0
LIMITS = tuple(10.0 * n for n in range(1, 100))  # that a goal's price may have
NEAREST = 4  # of these above the price, among which the limit is
ANY_PRICE = 1_000_000.0
SHUFFLED = 233  # AgentGym's and WebShop's seed of the order of the goals
MOST_GOALS = 2**24


@dataclasses.dataclass(frozen=True)
class Product:
    asin: str
    title: str
    price: float
    price_tag: str
    query: str  # kind, as its sellers were searched for
    categories: frozenset[str]
    description: str
    features: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # what must be chosen: kind -> values, lower case; some
    # are listed twice
    attributes: tuple[str, ...]
    instruction: str  # of a customer; '' = no goal
    wanted: tuple[str, ...]  # attributes that the instruction speaks of


@dataclasses.dataclass(frozen=True)
class Goal:
    product: Product
    options: tuple[tuple[str, str], ...]  # kind and value
    most: float  # dollars

    @property
    def text(self) -> str:
        """The instruction, the options and the price in a sentence."""
        chosen = ', and '.join(f'{kind}: {value}' for kind, value in self.options)
        price = '' if self.most == ANY_PRICE else f', and price lower than {self.most:.2f} dollars'
        return self.product.instruction + (f' with {chosen}' if chosen else '') + price


def drawn(*words: str) -> random.Random:
    """A random generator per purpose, seeded by words."""
    return random.Random(hashlib.sha256('\0'.join(words).encode()).digest())


def read_price(pricing: str | None, asin: str) -> tuple[float, str]:
    """(price, price tag)."""
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
    """A row of the list of products; said: its entry in the file of instructions."""
    if not isinstance(row, dict) or not isinstance(row.get('asin'), str):
        raise ValueError('a product is an object with an asin')
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
    """The first product of each valid asin of a list."""
    found: dict[str, Product] = {}
    for number, row in enumerate(rows):
        try:
            asin = row['asin'] if isinstance(row, dict) and 'asin' in row else ''
            if asin not in found and (not asin or len(asin) <= ASIN and asin != 'nan'):
                found[asin] = read_product(row, instructions.get(asin, {}))
        except ValueError as error:
            raise ValueError(f'product {number}: {error}') from error
    if not found:
        raise ValueError('there are no products')
    return tuple(found.values())


def limit_of(product: Product, options: Sequence[tuple[str, str]]) -> float:
    """The dollars that a goal may cost: any, where hardly a limit is above the price."""
    above = [limit for limit in LIMITS if limit > product.price][:NEAREST]
    if len(above) < 2:
        return ANY_PRICE
    return max(drawn('limit', product.asin, *itertools.chain(*options)).sample(above, 2))


def goals_of(products: Sequence[Product]) -> tuple[Goal, ...]:
    """A goal for each choice of options of each product that is wanted, in WebShop's order."""
    found = []
    for product in products:
        if product.instruction and product.wanted:
            kinds = sorted(product.options)
            for values in itertools.product(*(product.options[kind] for kind in kinds)):
                options = tuple(zip(kinds, values, strict=True))
                found.append(Goal(product, options, limit_of(product, options)))
    if not found:
        raise ValueError('nothing in the shop is wanted: no product has an instruction')
    if len(found) > MOST_GOALS:
        raise ValueError(f'{len(found)} goals are more than {MOST_GOALS}')
    random.Random(SHUFFLED).shuffle(found)
    return tuple(found)


def read_json(path: str) -> Any:
    try:
        return json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    except json.JSONDecodeError as error:
        raise ValueError(f'{path}: broken JSON ({error})') from error


@functools.cache
def read_files(products: str, instructions: str) -> tuple[Product, ...]:
    """Products of a file, with the instructions of another file."""
    rows, said = read_json(products), read_json(instructions)
    if not isinstance(rows, list) or not isinstance(said, dict):
        raise ValueError(
            f'{products} must hold a list of products, and {instructions} an object whose keys are '
            'their asins'
        )
    try:
        return read_products(rows, said)
    except ValueError as error:
        raise ValueError(f'{products}, {error}') from error
