"""Documents found and questions answered in a second, on one core.

  python -m benchmarks.search [--documents=10000] [--words=90] [--json=PATH]

Documents of words that are as frequent as Zipf's law has them, queries of two to six of these. The
questions are those about countries: the oracle plays them in the world, and random play beside it.
"""

import tempfile
from pathlib import Path

import jax
import numpy as np

from agentrl_jax.envs.hosts.search import retrieval
from agentrl_jax.envs.hosts.search.world import Search
from benchmarks import common

VOCABULARY, QUERIES, EPISODES, REPEATS = 30_000, 1000, 500, 3
GOAL = 200  # queries a second at 10,000 documents


def draw_texts(count: int, words: tuple[int, int], seed: int) -> list[str]:
    """Texts of a number of words within `words`."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, VOCABULARY + 1)
    lengths = generator.integers(*words, size=count)
    drawn = generator.choice(VOCABULARY, size=lengths.sum(), p=weights / weights.sum())
    parts = np.split(drawn, np.cumsum(lengths)[:-1])
    return [' '.join(f'w{word}' for word in part) for part in parts]


def played(play: Search, item: int, seed: int | None) -> tuple[int, bool]:
    """(turns, solved) of an episode of five turns at the most: of the oracle, or of random play."""
    play.reset(item)
    generator = np.random.default_rng(seed)
    for _ in range(5):
        reply = play.step(play.best() if seed is None else play.random(generator))
        if reply.done:
            break
    return len(play.steps), reply.success


def main() -> None:
    args = common.parse_arguments(__doc__, documents=10_000, words=90)
    common.pin(args.core)
    jax.config.update('jax_platforms', 'cpu')
    texts = draw_texts(args.documents, (args.words // 2, 3 * args.words // 2), seed=0)
    rows = retrieval.as_rows(zip(map(str, range(len(texts))), texts, strict=True))
    began = common.clock()
    index = retrieval.Index.build(rows)
    build_s = common.clock() - began
    queries = draw_texts(QUERIES, (2, 7), seed=1)
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / 'index')
        size = sum(path.stat().st_size for path in Path(folder).rglob('*.npy'))
        mapped = retrieval.Index.load(Path(folder) / 'index')
        times = common.medians(
            common.alternate(
                {
                    'one at a time': lambda: [index.search([query], 3) for query in queries],
                    'all in one call': lambda: index.search(queries, 3),
                    'memory-mapped': lambda: mapped.search(queries, 3),
                },
                REPEATS,
            )
        )
    speeds = {name: QUERIES / seconds for name, seconds in times.items()}
    play, steps = Search(retries=False), {}
    items = np.random.default_rng(2).integers(len(play.bank), size=EPISODES).tolist()
    solved = {}
    for name in ('oracle', 'random'):
        began = common.clock()
        outcomes = [played(play, item, None if name == 'oracle' else item) for item in items]
        steps[name] = sum(turns for turns, _ in outcomes) / (common.clock() - began)
        solved[name] = sum(right for _, right in outcomes) / EPISODES
    print(
        common.table(
            f'{args.documents:,} documents (built in {build_s:.3g} s, {size / 2**20:.3g} MiB)',
            ['queries', 'a second', 'goal'],
            [[name, speed, GOAL] for name, speed in speeds.items()],
        )
    )
    print(
        common.table(
            f'{EPISODES} questions about countries',
            ['play', 'turns a second', 'solved'],
            [[name, steps[name], solved[name]] for name in steps],
        )
    )
    result = dict(build_s=build_s, index_bytes=size, queries_per_s=speeds)
    result |= dict(documents=args.documents, turns_per_s=steps, solved=solved)
    common.emit('search', result, args.json)


if __name__ == '__main__':
    main()
