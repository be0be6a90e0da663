"""The ten claims of experiments/REPORT.md: our effect for each, from committed metrics.

  python -m experiments.report    writes claims.png and the tables in REPORT.md and README.md

An effect is the mean difference of two arms in runs of one seed, with Student's 95 % interval.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl_jax import tables
from agentrl_jax.machine import files
from agentrl_jax.results import forest
from agentrl_jax.results.cells import build
from agentrl_jax.results.runs import load
from agentrl_jax.results.spec import make_spec

FOLDER = Path(__file__).parent
BLOCK = re.compile('(<!-- claims -->\n).*?(<!-- end of claims -->)', re.DOTALL)
PAGES = ('REPORT.md', 'README.md')


@dataclasses.dataclass(frozen=True)
class Effect:
    """Difference of two rows of a committed table."""

    folder: str  # of experiments/
    table: str  # of its table.json
    row: str
    less: str  # the row that is subtracted
    label: str
    column: str = ''  # '' if the table has only one


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper, our verdict and the effects that support it."""

    text: str
    source: str
    verdict: str
    effects: tuple[Effect, ...] = ()


EXPLAINED, NOT_HERE, OPEN = 'explained by {}', 'not here', 'cannot say here'
LAKE, SOKOBAN, CARDS = 'FrozenLake', 'Sokoban', 'catalogue'
TRAP, RATE = ('ragen_starpo_vs_s', 'last'), ('echo_trap', 'last')
FRESH, DIVERSE = ('freshness_again', 'ten'), ('diversity', 'last')
CRITIC = ('mtgrpo_credit',)
SHOWN = ('demonstrations', 'last')
TURNS, PAID = ('horizon_again', 'ten'), 'lookups, 0.00025'
KNOWN = ('known_facts', 'tools')
RIVALS = ('estimators', 'last')
CLEAN, SPOILT = ('thinking', 'clean'), ('agents', 'one_trial')
CLAIMS = (
    Claim(
        'keeping the groups that vary most prevents collapse',
        'RAGEN, Figs 7 to 9',
        'no more than smaller steps do',
        (
            Effect(*TRAP, 'PPO, filter alone', 'PPO', 'the filter, Sokoban', SOKOBAN),
            Effect(
                *RATE,
                'most varied quarter, 0.001',
                'PPO, 2 x 4 updates, 0.001',
                '... once more, 3 seeds',
            ),
            Effect(
                *RATE,
                'most varied quarter, 0.001',
                'random quarter, 0.001',
                '... less a random quarter',
            ),
            Effect(
                *RATE,
                'PPO, 2 x 4 updates, 0.00025',
                'StarPO-S, 0.00025',
                'PPO less StarPO-S, 1/4 of the rate',
            ),
            Effect(
                *TRAP,
                'PPO, filter alone',
                'PPO, fewer updates alone',
                '... less fewer updates, Sokoban',
                SOKOBAN,
            ),
        ),
    ),
    Claim(
        'a falling std of returns foretells collapse',
        'RAGEN, Fig 6',
        'hardly more than success does',
    ),
    Claim(
        'a horizon that grows beats a long one',
        'AgentGym-RL, ScalingInter',
        'where lookups are paid',
        (
            Effect(*TURNS, f'growing, {PAID}', f'long, {PAID}', f'growing less long, {CARDS}'),
            Effect(*TURNS, f'growing, {PAID}', f'short, {PAID}', '... less short'),
            Effect(
                'horizon',
                'outcome_tokens',
                'growing, outcome, 0.00025',
                'long, outcome, 0.00025',
                '... less long, outcome alone',
            ),
            Effect(
                'scaling_inter',
                'equal_tokens',
                'growing',
                'fixed long',
                f'growing less long, {LAKE}',
                LAKE,
            ),
        ),
    ),
    Claim(
        'RL beats imitation',
        'RAGEN; AgentGym-RL',
        EXPLAINED.format('too few demonstrations'),
        (
            Effect('from_nothing', 'last', 'nothing', 'clone', 'less clone, expert at will'),
            Effect('beyond_clone', 'lake', 'clone, then RL', 'clone', 'less clone, 256 episodes'),
            Effect('beyond_clone', 'sokoban', 'clone, then RL', 'clone', '... 32 of Sokoban'),
            Effect('beyond_clone', 'library', 'clone, then RL', 'clone', '... 16 of the catalogue'),
            Effect(*SHOWN, 'PPO', 'AgentEvol', 'PPO less AgentEvol, 256 episodes', '256 episodes'),
            Effect(*SHOWN, 'PPO', 'AgentEvol', '... 1,024', '1,024 episodes'),
            Effect(*SHOWN, 'AgentEvol', 'clone', 'AgentEvol less clone, 256', '256 episodes'),
            Effect(*SHOWN, 'AgentEvol', 'clone', '... 1,024', '1,024 episodes'),
        ),
    ),
    Claim(
        'the outcome alone stops calling the tool',
        'MT-GRPO, version 1',
        'where all answers are known',
        (
            Effect(*KNOWN, 'GRPO-OR', 'GRPO-MR', 'searches, OR less MR, all known', 'all known'),
            Effect(*KNOWN, 'GRPO-OR', 'GRPO-MR', '... half known', 'half known'),
            Effect(*KNOWN, 'GRPO-OR', 'GRPO-MR', '... none known', 'none known'),
            Effect(
                'known_facts',
                'success',
                'GRPO-OR',
                'GRPO-MR',
                'exact match, all known',
                'all known',
            ),
        ),
    ),
    Claim(
        'rewards on their turns beat their sum',
        'MT-GRPO',
        'with a critic',
        (
            Effect('mtgrpo_credit_again', 'binary', 'MT', 'MR', f'MT less MR, {CARDS}'),
            Effect(
                'mtgrpo_credit_again', 'binary', 'turn GRPO', 'MR', f'turn GRPO less MR, {CARDS}'
            ),
            Effect(*CRITIC, 'binary', 'MT', 'flattened MT', 'MT less all in one sum, all content'),
            Effect(*CRITIC, 'binary', 'MT-PPO', 'flattened MT-PPO', 'MT-PPO less all at the end'),
            Effect(*CRITIC, 'graded', 'MT-PPO', 'flattened MT-PPO', '... graded answers'),
        ),
    ),
    Claim(
        'GRPO beats REINFORCE++',
        'AgentGym-RL',
        NOT_HERE,
        (
            Effect(*RIVALS, 'GRPO, 0.00025', 'REINFORCE++, 0.00025', f'less REINFORCE++, {LAKE}'),
            Effect(*RIVALS, 'GRPO, 0.001', 'REINFORCE++, 0.001', '... at 4 times the rate'),
        ),
    ),
    Claim(
        'four answers a prompt are best',
        'RAGEN, Table 2',
        NOT_HERE,
        (
            Effect(*DIVERSE, 'PPO, 4, 0.00025', 'PPO, 1, 0.00025', 'PPO, 4 less 1'),
            Effect(*DIVERSE, 'PPO, 4, 0.00025', 'PPO, 16, 0.00025', 'PPO, 4 less 16'),
            Effect(
                *DIVERSE,
                'PPO, quarter kept, 4, 0.00025',
                'PPO, quarter kept, 2, 0.00025',
                'a quarter kept, 4 less 2',
            ),
        ),
    ),
    Claim(
        'fresh rollouts are better',
        'RAGEN, Fig 10',
        NOT_HERE,
        (
            Effect(*FRESH, 'online 1, 0.001', 'online 10, 0.001', 'k = 1 less 10'),
            Effect(*FRESH, 'online 1, 0.00025', 'online 10, 0.00025', '... at 1/4 of the rate'),
        ),
    ),
    Claim(
        'thinking before an answer helps',
        'RAGEN, Table 4',
        'not on FrozenLake, else cannot say',
        (
            Effect(
                'thinking_again',
                'ten',
                'think, 36 steps',
                'act',
                'think less act, 4/5 of tokens',
            ),
            Effect(*CLEAN, 'think', 'act', '... after as many steps', LAKE),
            Effect(*CLEAN, 'think', 'act', f'... {SOKOBAN}', SOKOBAN),
            Effect(*SPOILT, 'think', 'act', f'thoughts know more, {LAKE}', LAKE),
            Effect(*SPOILT, 'think', 'act', f'... {SOKOBAN}', SOKOBAN),
            Effect('thinking', 'half', 'think', 'act', '... again, as many steps', LAKE),
            Effect('thinking', 'half', 'think', 'act', f'... {SOKOBAN}', SOKOBAN),
        ),
    ),
)


def difference(effect: Effect) -> forest.Difference:
    """Return an effect in points: its row against `less` as the table's baseline."""
    folder = FOLDER / effect.folder
    fields = json.loads(files.read_text(folder / tables.SPEC_FILE))[effect.table]
    fields |= {'baseline': effect.less}
    spec = make_spec(fields)
    table = build(load([folder], (spec.metric,)), spec)
    matches = [
        row
        for column, rows in forest.differences(table).items()
        for row in rows
        if row.row == effect.row and effect.column in ('', column)
    ]
    if len(matches) != 1:
        raise ValueError(f'{effect} matches {len(matches)} cells of its table, not 1')
    return matches[0]._replace(row=effect.label)


def effects() -> Iterator[tuple[int, Claim, list[forest.Difference]]]:
    """Yield (number, claim, its differences)."""
    for number, claim in enumerate(CLAIMS, 1):
        yield number, claim, [difference(effect) for effect in claim.effects]


def table() -> str:
    """Return the claims as a Markdown table."""
    lines = [
        '| | claim | paper | our effect, points | verdict |',
        '| --- | --- | --- | --- | --- |',
    ]
    for number, claim, rows in effects():
        texts = [f'{row.row}: {row.mean:+.1f} [{row.low:+.1f}, {row.high:+.1f}]' for row in rows]
        effect = '<br>'.join(texts) or '—'
        cells = (str(number), claim.text, claim.source, effect, f'**{claim.verdict}**')
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def main() -> int:
    rows = [
        row._replace(row=f'{number}  {row.row}') for number, _, group in effects() for row in group
    ]
    forest.draw({'': rows}, FOLDER / 'claims', what='points', endings=('png',))
    text = table()
    for page in PAGES:
        path = FOLDER / page
        files.write_atomic(path, BLOCK.sub(rf'\g<1>{text}\g<2>', files.read_text(path)))
    return 0


if __name__ == '__main__':
    sys.exit(main())
