"""Draw tables of the card catalogue on the host: chains of cards, and distractor cards."""

import numpy as np

from agentrl_jax.envs.splits import level_split

# Words of one or few tokens in the bundled tokenizer.
PEOPLE = tuple(
    'Artist Banker Cashier Clerk Dentist Engineer Gardener Gambler Mechanic Musician Nurse Pilot '
    'Plumber Postman Tailor Teacher'.split()
)
EMPTY = -1  # marks a missing card
TRIES = 2000  # draws per level before the pool counts as exhausted


def draw_pool(
    split: str | None, num_levels: int, seed: int, *, boxes: int, cards: int, hops: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Draw distinct levels of a split: cards [levels, people], start, answer and hops [levels].

    Every len(PEOPLE) * boxes levels contain each (person, answer) pair once, in random order. A
    guess from the question alone is therefore right only once in `boxes` levels.
    """
    rng = np.random.default_rng(seed)
    pairs = len(PEOPLE) * boxes
    rows, known = [], set()
    for index in range(num_levels):
        if index % pairs == 0:
            order = rng.permutation(pairs)
        start, answer = divmod(int(order[index % pairs]), boxes)
        for _ in range(TRIES):
            needed = int(rng.integers(hops[0], hops[1] + 1))
            table = draw_table(rng, start, answer, needed, boxes=boxes, cards=cards)
            key = bytes([start, *(table + 1)])
            if key not in known and split in (None, level_split(key)):
                break
        else:
            raise ValueError(
                f'num_levels={num_levels} exceeds the number of distinct tables with '
                f'cards={cards}. Use more cards or fewer levels'
            )
        known.add(key)
        rows.append((table, start, answer, needed))
    columns = zip(*rows, strict=True)
    return dict(zip(('cards', 'start', 'answer', 'hops'), map(np.asarray, columns), strict=True))


def draw_table(
    rng: np.random.Generator, start: int, answer: int, hops: int, *, boxes: int, cards: int
) -> np.ndarray:
    """Draw int [people]: a chain of `hops` cards from start to the answer, and distractors.

    Half of the distractors lead to a card drawn earlier, half to a wrong box.
    """
    others = rng.permutation(np.delete(np.arange(len(PEOPLE)), start))
    people = [start, *others[: cards - 1]]
    table = np.full(len(PEOPLE), EMPTY)
    for place, who in enumerate(people):
        if place < hops - 1:
            table[who] = people[place + 1]
        elif place == hops - 1:
            table[who] = len(PEOPLE) + answer
        elif rng.random() < 0.5:
            table[who] = people[rng.integers(place)]
        else:
            table[who] = len(PEOPLE) + (answer + rng.integers(1, boxes)) % boxes
    return table
