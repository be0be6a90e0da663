"""Questions about countries and their regions, and documents that answer them.

The facts come from the package `countryinfo` (MIT), read when the first world is created. Each of
the 231 countries is a document, and each of their regions. A one-hop question needs one document:
  What is the capital of Kenya?    Which country does the region Nyanza belong to?
A two-hop question needs two:
  What is the capital of the country that the region Nyanza belongs to?
No question has two answers. All questions about a country are in one split, and so are all
questions about a region.
"""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator

from agentrl_jax.envs.hosts.search import retrieval
from agentrl_jax.envs.hosts.search.questions import Question
from agentrl_jax.envs.hosts.world import package_folder

# SHA-256 of the questions and answers from countryinfo 1.0.1, in the order of their items
MANIFEST = '9f11ff375d2163d93e005d3ccece77adc49e4d8bb47f4cb1f91c7af2cfb59efb'
COUNTRY, REGION = 'country', 'region'  # kinds of subjects
HOLDER = 'the country that the region {} belongs to'
ASKED = 'Which country does the region {} belong to?'
SAID = '{} is a region that belongs to the country {}.'
QUERY = '{} region belongs'


@dataclasses.dataclass(frozen=True)
class Fact:
    """A kind of fact about countries, with its templates."""

    key: str  # in the package's files
    says: str  # sentence of the document
    asks: str
    query: str  # that finds the fact
    asks_back: str = ''  # question for the country


FACTS = (
    Fact(
        'capital',
        'Its capital is {}.',
        'What is the capital of {}?',
        '{} capital',
        'Which country has the capital {}?',
    ),
    Fact(
        'demonym',
        'Its people are called {}.',
        'What are the people of {} called?',
        '{} people called',
        'In which country are the people called {}?',
    ),
    Fact(
        'tld',
        'Its domain on the internet is {}.',
        'What is the internet domain of {}?',
        '{} domain internet',
    ),
    Fact('subregion', 'It lies in {}.', 'In which part of the world does {} lie?', '{} lies'),
    Fact('currencies', 'Its currency is {}.', 'What is the currency of {}?', '{} currency'),
    Fact(
        'callingCodes',
        'Its calling code is {}.',
        'What calling code does {} have?',
        '{} calling code',
    ),
)


@dataclasses.dataclass(frozen=True)
class Country:
    name: str
    facts: tuple[str, ...]  # values of FACTS; '' = unknown
    regions: tuple[str, ...]


def read_country(content: str) -> Country | None:
    """Parse a file of the package; None if the record is incomplete."""
    record, facts = json.loads(content), []
    for fact in FACTS:
        known = record.get(fact.key) or ''
        known = known[0] if isinstance(known, list) and len(known) == 1 else known
        facts.append(known if isinstance(known, str) else '')
    if 'population' not in record or not all(facts[:4]):
        return None
    names = [name.partition('(')[0].strip() for name in record.get('provinces') or ()]
    return Country(record['name'], tuple(facts), tuple(dict.fromkeys(filter(None, names))))


@functools.cache
def load() -> tuple[Country, ...]:
    """Load the countries, sorted by name."""
    missing = (
        'questions about countries need the package countryinfo: pip install countryinfo==1.0.1'
    )
    files = sorted((package_folder('countryinfo', missing) / 'data').glob('*.json'))
    countries = filter(None, (read_country(file.read_text(encoding='utf-8')) for file in files))
    return tuple(sorted(countries, key=lambda country: country.name))


def documents() -> list[retrieval.Document]:
    """Return a document per country, then one per region of each country."""
    texts = []
    for country in load():
        known = zip(FACTS, country.facts, strict=True)
        sentences = [fact.says.format(x) for fact, x in known if x]
        texts.append((country.name, f'{country.name} is a country. {" ".join(sentences)}'))
    for country in load():
        texts += [(region, SAID.format(region, country.name)) for region in country.regions]
    return retrieval.as_rows(texts)


@functools.cache
def index() -> retrieval.Index:
    return retrieval.Index.build(documents())


def unique(names: list[str]) -> set[str]:
    return {name for name, count in collections.Counter(names).items() if count == 1}


def ask() -> Iterator[Question]:
    """Yield all questions, first those about countries."""
    countries = load()
    only = [unique([country.facts[i] for country in countries]) for i in range(len(FACTS))]
    for country in countries:
        name = country.name
        for fact, known, once in zip(FACTS, country.facts, only, strict=True):
            if known:
                queries = (fact.query.format(name),)
                yield Question(fact.asks.format(name), (known,), queries, name, COUNTRY)
            if fact.asks_back and known in once:
                queries = (fact.query.format(known),)
                yield Question(fact.asks_back.format(known), (name,), queries, name, COUNTRY)
    names = unique([name for country in countries for name in (country.name, *country.regions)])
    for country in countries:
        for region in country.regions:
            if region in names:
                yield from ask_of_region(country, region)


def ask_of_region(country: Country, region: str) -> Iterator[Question]:
    """Ask for the country of a region, and for a fact chosen by a digest of the region."""
    first = QUERY.format(region)
    yield Question(ASKED.format(region), (country.name,), (first,), region, REGION)
    known = [(fact, x) for fact, x in zip(FACTS, country.facts, strict=True) if x]
    digest = hashlib.sha256(region.encode()).digest()
    fact, answer = known[int.from_bytes(digest[:4], 'big') % len(known)]
    queries = (first, fact.query.format(country.name))
    yield Question(fact.asks.format(HOLDER.format(region)), (answer,), queries, region, REGION)


@functools.cache
def questions() -> tuple[Question, ...]:
    """Return all questions; raise ValueError if they differ from countryinfo 1.0.1's."""
    result = tuple(ask())
    lines = '\n'.join(f'{question.text}\t{question.answers[0]}' for question in result)
    if hashlib.sha256(lines.encode()).hexdigest() != MANIFEST:
        raise ValueError(
            'the installed countryinfo gives different questions than version 1.0.1: install 1.0.1'
        )
    return result
