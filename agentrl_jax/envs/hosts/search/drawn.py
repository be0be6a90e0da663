"""Questions about regions that do not exist, which nobody can answer by heart.

Each question brings eight documents of its own, which say to which country a region belongs, in
the words of countries.py. The names are those of two short lists, and what belongs where is drawn
anew for each question: it must be looked up, also by a policy that has seen all others. The first
regions of the list can be made to belong to one country always, which a policy can learn by heart.
"""

import functools
import random

from agentrl_jax.envs.hosts.search import countries, retrieval
from agentrl_jax.envs.hosts.search.questions import Question

NAME = 'drawn'  # in search.questions, in the place of files
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
    """The question of a number, and where its answer is found.

    known: how many of REGIONS belong to the country of the same place in every question.
    """
    generator = random.Random(f'search {number}')
    regions = generator.sample(REGIONS, DOCUMENTS)
    chosen = generator.sample(COUNTRIES, DOCUMENTS)
    fixed = dict(zip(REGIONS[:known], COUNTRIES, strict=False))
    taken = {fixed[region] for region in regions if region in fixed}
    free = iter([country for country in chosen if country not in taken])
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
