"""Oracle plans for demonstrations: from any state, the actions the best player would announce."""

from typing import Any

import numpy as np

from agentrl_jax.envs import solvers
from agentrl_jax.envs.bandit import Bandit
from agentrl_jax.envs.frozen_lake.world import GOAL, HOLE, MOVES, FrozenLake
from agentrl_jax.envs.library.world import Library, next_action
from agentrl_jax.envs.sokoban import Sokoban


def plans(env: Any, env_params: Any, states: Any, used: np.ndarray, budget: int) -> list[list[int]]:
    """For each of N host states (stacked) a list of indices into ACTION_NAMES; [] = no way out.

    A plan assumes that every move goes where it should. used int [N]: actions already spent of
    `budget`.
    """
    if isinstance(env, FrozenLake):
        return lake_plans(states, float(env_params.success_rate), budget - used)
    if isinstance(env, Sokoban):
        rooms = zip(states.fixed, states.boxes, states.player, strict=True)
        return [list(solvers.solve_sokoban(*room) or ()) for room in rooms]
    if isinstance(env, Bandit):
        names = env._pair_names()
        return [[int(names[pair][1])] for pair in states.pair]
    if isinstance(env, Library):  # what comes after the next card is not known before it is seen
        tables = zip(states.cards, states.start, states.seen, strict=True)
        return [[next_action(*map(np.asarray, table))] for table in tables]
    raise ValueError(f'no expert for {env.name}')


def lake_plans(states: Any, success_rate: float, left: np.ndarray) -> list[list[int]]:
    """Actions of the finite-horizon optimum, followed along the intended moves."""
    boards, position = np.asarray(states.board), np.asarray(states.position)
    n = boards.shape[1]
    # A hair of slipping breaks ties: of equally safe ways the shortest one comes out first.
    _, best = solvers.lake_values(boards, min(success_rate, 0.999), int(left.max(initial=0)))
    all_plans = []
    for i, cell in enumerate(map(int, position)):
        tiles, plan = boards[i].reshape(-1), []
        while len(plan) < left[i] and tiles[cell] not in (GOAL, HOLE):
            plan.append(int(best[left[i] - len(plan), i, cell]))
            row, column = np.clip(np.add(divmod(cell, n), MOVES[plan[-1]]), 0, n - 1)
            cell = int(row * n + column)
        all_plans.append(plan)
    return all_plans
