"""Questions about invented regions, which require a search.

Each question has eight documents that assign regions to countries, worded as in countries.py. The
names come from two short lists, and each question draws its own assignment, so it cannot be
memorised. The first regions of the list may have a fixed country, which a policy can memorise.
"""

import functools
import random

from agentrl_jax.envs.hosts.search import countries, retrieval
from agentrl_jax.envs.hosts.search.questions import Question

NAME = 'drawn'  # in search.questions instead of files
QUESTIONS, DOCUMENTS = 4096, 8
REGIONS = (
    'Aldra Borin Cesta Dormel Elvin Farro Gelda Hurne Istrel Jorva Kelma Lunde Morra Nesko Orlin '
    'Pavra'
).split()
COUNTRIES = (
    'Avelia Bomoria Cadria Dovania Eskaria Folmia Gavonia Hestria Ilvania Jurelia Kolmaria '
    'Lestonia Medravia Norvelia Ostaria Pelmonia'
).split()


def draw(number: int, known: int = 0) -> Question:
    """Draw a question by number; known: how many of the REGIONS have a fixed country."""
    generator = random.Random(f'search {number}')
    regions = generator.sample(REGIONS, DOCUMENTS)
    chosen = generator.sample(COUNTRIES, DOCUMENTS)
    fixed = dict(zip(REGIONS[:known], COUNTRIES, strict=False))
    reserved = {fixed[region] for region in regions if region in fixed}
    free = iter([country for country in chosen if country not in reserved])
    chosen = [fixed.get(region) or next(free) for region in regions]
    texts = [(a, countries.SAID.format(a, b)) for a, b in zip(regions, chosen, strict=True)]
    place = generator.randrange(DOCUMENTS)
    return Question(
        countries.ASKED.format(regions[place]),
        (chosen[place],),
        (countries.QUERY.format(regions[place]),),
        subject=f'{NAME} {number}',
        documents=tuple(retrieval.as_rows(texts)),
        by_heart=regions[place] in fixed,
    )


@functools.cache
def questions(known: int) -> tuple[Question, ...]:
    return tuple(draw(number, known) for number in range(QUESTIONS))
