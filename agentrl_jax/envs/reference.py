"""Measure random play and the oracle on every environment, next to published figures if any.

  python -m agentrl_jax.envs.reference [--levels=2048] [--games] [--hosts]

The published figures are for 256 boards (227 larger rooms) drawn with RAGEN's seeds. Our boards
come from the same distribution, repetitions included, so both sides have a sampling error.
Environments without published figures use their default settings and levels of the training
split. --games measures only the games. --hosts measures the host environments that can run in this
process, on their test items and within AgentGym's rounds.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from agentrl_jax.envs import (
    ENVIRONMENTS,
    GAMES,
    HOSTS,
    Bandit,
    FrozenLake,
    Sokoban,
    TextEnvironment,
)
from agentrl_jax.envs.hosts import agentgym, players
from agentrl_jax.envs.hosts.served import Served
from agentrl_jax.envs.simulation import NoExpert

BUDGETS = (5, 10, 15, 20, 25, 30, 35)

ALL_WITH_REPETITIONS = dict(split=None, unique=False)  # all splits, repetitions included


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table: success rates in per cent by budget."""

    label: str
    player: str  # random or oracle
    env: Any
    published: tuple[float, ...] = ()  # at `budgets`, measured with RAGEN's code; () = none
    boards: int = 256  # number of boards in the published measurement
    budgets: tuple[int, ...] = BUDGETS
    pool: Mapping[str, Any] = dataclasses.field(default_factory=lambda: ALL_WITH_REPETITIONS)


def lake(frozen: float, success_rate: float) -> FrozenLake:
    return FrozenLake(frozen=frozen, success_rate=success_rate)


TEN = dict(budgets=(10,))
BANDIT = dict(budgets=(1,), pool={})
ROWS = (
    Row('Sokoban 6x6, 1 box', 'random', Sokoban(), (12.3, 19.0, 23.2, 26.6, 29.4, 31.5, 33.5)),
    Row(
        'Sokoban 6x6, search depth 30',
        'random',
        Sokoban(search_depth=30),
        (11.4, 18.3, 23.2, 26.5, 29.3, 31.5, 33.1),
    ),
    Row(
        'Sokoban 8x8, 2 boxes',
        'random',
        Sokoban(dim=8, num_boxes=2, search_depth=10),
        (0.8, 3.0, 4.4, 5.7, 7.1, 8.3, 9.4),
        boards=227,
    ),
    Row('FrozenLake p .8', 'random', lake(0.8, 1 / 3), (15.7, 21.2, 24.4, 26.4, 27.8, 28.8, 29.5)),
    Row('FrozenLake p .9', 'random', lake(0.9, 0.8), (16.5, 24.3, 29.6, 33.5, 36.4, 38.7, 40.5)),
    Row(
        'FrozenLake p .8, rate 1/3',
        'oracle',
        lake(0.8, 1 / 3),
        (29.0, 48.3, 61.3, 69.8, 75.4, 79.3, 81.9),
    ),
    Row('FrozenLake p .8, rate .8', 'oracle', lake(0.8, 0.8), (89.0,), **TEN),
    Row('FrozenLake p .9, rate 1/3', 'oracle', lake(0.9, 1 / 3), (55.1,), **TEN),
    Row('FrozenLake p .9, rate .8', 'oracle', lake(0.9, 0.8), (94.4,), **TEN),
    Row('FrozenLake p .9, rate 1', 'oracle', lake(0.9, 1.0), (100.0,), **TEN),
    Row('Sokoban 6x6, 1 box', 'oracle', Sokoban(), (78.0, 100.0), budgets=(5, 10)),
    Row('Bandit', 'random', Bandit(), (50.0,), **BANDIT),
    Row('Bandit', 'oracle', Bandit(), (100.0,), **BANDIT),
)


def reference_curves(
    env: TextEnvironment,
    params: Any,
    budgets: Sequence[int],
    *,
    trials: int = 1,
    rollouts: int = 20,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Success of random play and of the expert within each action budget.

    Returns random, random_se, oracle, oracle_se, each float [budgets]; standard errors are over
    levels. Without an expert the last two are absent.
    trials: independent attempts per level, each with the full budget. If a level's success is
    measured with n rollouts instead of computed, the success within two trials is underestimated
    by at most 1 / 4n.
    """
    by_level = {'random': env.random_success(params, budgets, rollouts=rollouts, seed=seed)}
    with contextlib.suppress(NoExpert):
        by_level['oracle'] = env.oracle_success(params, budgets, seed=seed)
    result = {}
    for player, of_one in by_level.items():
        success = 1 - (1 - of_one) ** trials
        result[player] = success.mean(1)
        result[f'{player}_se'] = success.std(1) / np.sqrt(success.shape[1])
    return result


def reference_success(
    env: TextEnvironment,
    params: Any,
    budget: int,
    *,
    trials: int = 1,
    rollouts: int = 20,
) -> dict[str, float]:
    """Return reference_curves for one budget (max_actions_per_episode), as floats."""
    curves = reference_curves(env, params, [budget], trials=trials, rollouts=rollouts)
    return {name: float(curve[0]) for name, curve in curves.items()}


def measure(row: Row, levels: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return our success in per cent, its standard error, and the difference in standard errors.

    The published error is the spread over our levels, scaled to the published number of boards.
    """
    params = row.env.make_params(num_levels=levels, seed=seed, **row.pool)
    curves = reference_curves(row.env, params, row.budgets)
    if row.player not in curves:  # no expert
        return {}
    ours, error = 100 * curves[row.player], 100 * curves[f'{row.player}_se']
    if not row.published:
        return {'ours': ours, 'error': error}
    both = error * np.sqrt(1 + row.env.num_levels(params) / row.boards)
    # Published figures are rounded to 0.1.
    gap = np.maximum(np.abs(ours - np.array(row.published)) - 0.05, 0) / np.maximum(both, 1e-9)
    return {'ours': ours, 'error': error, 'apart': gap}


def unpublished(worlds: Mapping[str, type[TextEnvironment]]) -> list[Row]:
    """Return rows for the worlds without published figures."""
    known = {row.env.name for row in ROWS}
    return [
        Row(name, player, world(), pool={})
        for name, world in worlds.items()
        for player in ('random', 'oracle')
        if name not in known
    ]


def describe(row: Row, got: dict[str, np.ndarray]) -> str:
    """Return the text table of one row."""
    title = f'{row.player:6} {row.label}'
    if not got:
        return f'{title}: no expert'
    published = {'published': row.published} if row.published else {}
    table = pd.DataFrame(published | got, index=pd.Index(row.budgets, name='actions'))
    return f'{title}\n{table.T.to_string(float_format="{:.1f}".format)}'


def describe_hosts(levels: int) -> Iterator[str]:
    """Yield one line per host environment that has built-in players."""
    for name, kind in HOSTS.items():
        if issubclass(kind, Served) and (env := kind()).has_player():
            turns = agentgym.ENVIRONMENTS[name].rounds
            params = env.make_params('test', num_levels=levels)
            success = players.reference_success(env, params, turns, rollouts=1)
            shares = ', '.join(f'{player} {100 * share:.1f} %' for player, share in success.items())
            yield f'{name}: {shares}, {len(params.items)} items, {turns} turns'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--levels', type=int, default=2048)
    parser.add_argument('--games', action='store_true', help='measure only the games')
    parser.add_argument('--hosts', action='store_true', help='measure only host environments')
    args = parser.parse_args()
    if args.hosts:
        for line in describe_hosts(args.levels):
            print(line, flush=True)
        return
    rows = unpublished(GAMES) if args.games else (*ROWS, *unpublished(ENVIRONMENTS))
    for row in rows:
        print(describe(row, measure(row, args.levels)))


if __name__ == '__main__':
    main()
