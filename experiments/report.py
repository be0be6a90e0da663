"""The ten claims of experiments/REPORT.md: our effect for each, from committed metrics.

  python -m experiments.report    writes claims.png and the table in README.md

An effect is the mean difference of two arms in runs of one seed, with Student's 95 % interval.
"""

import dataclasses
import json
import re
import sys
import textwrap
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
PAGE = 'README.md'
TITLE_WIDTH = 44  # letters


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
            Effect(*TRAP, 'PPO, filter alone', 'PPO', 'filter minus none, Sokoban', SOKOBAN),
            Effect(
                *RATE,
                'most varied quarter, 0.001',
                'PPO, 2 x 4 updates, 0.001',
                'filter minus none, again (3 seeds)',
            ),
            Effect(
                *RATE,
                'most varied quarter, 0.001',
                'random quarter, 0.001',
                'filter minus a random quarter',
            ),
            Effect(
                *RATE,
                'PPO, 2 x 4 updates, 0.00025',
                'StarPO-S, 0.00025',
                'PPO minus StarPO-S, 1/4 of the rate',
            ),
            Effect(
                *TRAP,
                'PPO, filter alone',
                'PPO, fewer updates alone',
                'filter minus fewer updates, Sokoban',
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
            Effect(*TURNS, f'growing, {PAID}', f'long, {PAID}', f'growing minus long, {CARDS}'),
            Effect(*TURNS, f'growing, {PAID}', f'short, {PAID}', f'growing minus short, {CARDS}'),
            Effect(
                'horizon',
                'outcome_tokens',
                'growing, outcome, 0.00025',
                'long, outcome, 0.00025',
                'growing minus long, outcome only',
            ),
            Effect(
                'scaling_inter',
                'equal_tokens',
                'growing',
                'fixed long',
                f'growing minus long, {LAKE}',
                LAKE,
            ),
        ),
    ),
    Claim(
        'RL beats imitation',
        'RAGEN; AgentGym-RL',
        EXPLAINED.format('too few demonstrations'),
        (
            Effect('from_nothing', 'last', 'nothing', 'clone', 'RL minus clone, unlimited expert'),
            Effect(
                'scout_sokoban',
                'last',
                'short clone, RL',
                'longer clone',
                'RL minus longer clone, Sokoban',
            ),
            Effect(
                'scout_slippery',
                'last',
                'short clone, RL',
                'longer clone',
                'RL minus longer clone, slippery lake',
            ),
            Effect(
                'beyond_clone',
                'lake',
                'clone, then RL',
                'clone',
                'RL minus clone, 256 demonstrations',
            ),
            Effect(
                'beyond_clone', 'sokoban', 'clone, then RL', 'clone', 'RL minus clone, 32, Sokoban'
            ),
            Effect(
                'beyond_clone',
                'library',
                'clone, then RL',
                'clone',
                'RL minus clone, 16, catalogue',
            ),
            Effect(*SHOWN, 'PPO', 'AgentEvol', 'PPO minus AgentEvol, 256', '256 episodes'),
            Effect(*SHOWN, 'PPO', 'AgentEvol', 'PPO minus AgentEvol, 1,024', '1,024 episodes'),
            Effect(*SHOWN, 'AgentEvol', 'clone', 'AgentEvol minus clone, 256', '256 episodes'),
            Effect(*SHOWN, 'AgentEvol', 'clone', 'AgentEvol minus clone, 1,024', '1,024 episodes'),
        ),
    ),
    Claim(
        'the outcome alone stops calling the tool',
        'MT-GRPO, version 1',
        'where all answers are known',
        (
            *(
                Effect(*KNOWN, 'GRPO-OR', 'GRPO-MR', f'searches, outcome minus sum, {share}', share)
                for share in ('all known', 'half known', 'none known')
            ),
            Effect(
                'known_facts',
                'success',
                'GRPO-OR',
                'GRPO-MR',
                'exact match, outcome minus sum',
                'all known',
            ),
        ),
    ),
    Claim(
        'rewards on their turns beat their sum',
        'MT-GRPO',
        'with a critic',
        (
            Effect('mtgrpo_credit_again', 'binary', 'MT', 'MR', f'MT-GRPO minus sum, {CARDS}'),
            Effect(
                'mtgrpo_credit_again', 'binary', 'turn GRPO', 'MR', f'turn GRPO minus sum, {CARDS}'
            ),
            Effect(*CRITIC, 'binary', 'MT', 'flattened MT', 'MT-GRPO minus one sum'),
            Effect(*CRITIC, 'binary', 'MT-PPO', 'flattened MT-PPO', 'MT-PPO minus all at the end'),
            Effect(
                *CRITIC,
                'graded',
                'MT-PPO',
                'flattened MT-PPO',
                'MT-PPO minus all at the end, graded',
            ),
        ),
    ),
    Claim(
        'GRPO beats REINFORCE++',
        'AgentGym-RL',
        NOT_HERE,
        (
            Effect(
                *RIVALS, 'GRPO, 0.00025', 'REINFORCE++, 0.00025', f'GRPO minus REINFORCE++, {LAKE}'
            ),
            Effect(
                *RIVALS, 'GRPO, 0.001', 'REINFORCE++, 0.001', 'GRPO minus REINFORCE++, 4 x the rate'
            ),
        ),
    ),
    Claim(
        'four answers a prompt are best',
        'RAGEN, Table 2',
        NOT_HERE,
        (
            Effect(*DIVERSE, 'PPO, 4, 0.00025', 'PPO, 1, 0.00025', '4 answers minus 1'),
            Effect(*DIVERSE, 'PPO, 4, 0.00025', 'PPO, 16, 0.00025', '4 answers minus 16'),
            Effect(
                *DIVERSE,
                'PPO, quarter kept, 4, 0.00025',
                'PPO, quarter kept, 2, 0.00025',
                '4 answers minus 2, a quarter kept',
            ),
        ),
    ),
    Claim(
        'fresh rollouts are better',
        'RAGEN, Fig 10',
        NOT_HERE,
        (
            Effect(
                *FRESH,
                'online 1, 0.001',
                'online 10, 0.001',
                'k = 1 minus k = 10 updates a rollout',
            ),
            Effect(
                *FRESH,
                'online 1, 0.00025',
                'online 10, 0.00025',
                'k = 1 minus k = 10, 1/4 of the rate',
            ),
        ),
    ),
    Claim(
        'thinking before an answer helps',
        'RAGEN, Table 4',
        'not on FrozenLake; open elsewhere',
        (
            Effect(
                'thinking_again',
                'ten',
                'think, 36 steps',
                'act',
                f'think minus act, {LAKE}, 4/5 tokens',
            ),
            Effect(*CLEAN, 'think', 'act', f'think minus act, {LAKE}, equal steps', LAKE),
            Effect(*CLEAN, 'think', 'act', f'think minus act, {SOKOBAN}', SOKOBAN),
            Effect(*SPOILT, 'think', 'act', f'informed thoughts minus act, {LAKE}', LAKE),
            Effect(*SPOILT, 'think', 'act', f'informed thoughts minus act, {SOKOBAN}', SOKOBAN),
            Effect('thinking', 'half', 'think', 'act', f'informed, equal steps, {LAKE}', LAKE),
            Effect(
                'thinking', 'half', 'think', 'act', f'informed, equal steps, {SOKOBAN}', SOKOBAN
            ),
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
    panels = {
        textwrap.fill(f'{number}. {claim.text}: {claim.verdict}', TITLE_WIDTH): rows
        for number, claim, rows in effects()
        if rows
    }
    forest.draw(panels, FOLDER / 'claims', what='difference in points', endings=('png',))
    path, text = FOLDER / PAGE, table()
    files.write_atomic(path, BLOCK.sub(rf'\g<1>{text}\g<2>', files.read_text(path)))
    return 0


if __name__ == '__main__':
    sys.exit(main())
