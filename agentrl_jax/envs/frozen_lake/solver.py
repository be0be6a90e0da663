"""Optimal and random play of FrozenLake by dynamic programming."""

import numpy as np

from agentrl_jax.envs.frozen_lake.levels import GOAL, HOLE

LEFT, DOWN, RIGHT, UP = range(4)
MOVES = np.array([(0, -1), (1, 0), (0, 1), (-1, 0)])
HASTE = 1e-6  # discount per move in plans: prefer the shortest of equally safe paths


def lake_values(
    boards: np.ndarray,
    success_rate: float,
    horizon: int,
    *,
    play: str = 'best',
    discount: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Finite-horizon dynamic programming over many maps at once (int [maps, n, n]).

    Returns float [horizon + 1, maps, cells], the probability of reaching the goal with h moves
    left, and int [horizon + 1, maps, cells], the best action (row 0 is unused: all 0).
    V_h(s) = discount max_a [rate V_{h-1}(s a) + (1 - rate) / 2 (V_{h-1}(s a-1) + V_{h-1}(s a+1))],
    or the mean over a with play='random'.
    """
    tiles, n = np.asarray(boards).reshape(len(boards), -1), len(boards[0])
    row, column = np.divmod(np.arange(n * n), n)
    rows, columns = (x[:, None] + move for x, move in zip((row, column), MOVES.T, strict=True))
    after = np.clip(rows, 0, n - 1) * n + np.clip(columns, 0, n - 1)  # [cells, 4]  without a slip
    values = np.zeros((horizon + 1, *tiles.shape))
    values[:] = tiles == GOAL
    actions = np.zeros((horizon + 1, *tiles.shape), np.int8)
    ends = (tiles == GOAL) | (tiles == HOLE)
    for left in range(1, horizon + 1):
        reached = values[left - 1][:, after]  # [maps, cells, 4]
        turned = np.roll(reached, 1, axis=2) + np.roll(reached, -1, axis=2)
        quality = discount * (success_rate * reached + (1.0 - success_rate) / 2.0 * turned)
        value = quality.max(2) if play == 'best' else quality.mean(2)
        values[left] = np.where(ends, values[left], value)
        actions[left] = quality.argmax(2)
    return values, actions


def lake_plans(
    boards: np.ndarray, position: np.ndarray, success_rate: float, left: np.ndarray
) -> list[list[int]]:
    """Return the finite-horizon optimal actions, assuming that no move slips.

    Equally safe paths are ranked by length. If the goal is out of reach, the plan is the first part
    of a path to it. boards int [N, n, n]; position int [N]; left int [N]: remaining actions.
    """
    n = boards.shape[1]
    enough = max(int(left.max(initial=0)), n * n)
    values, best = lake_values(boards, success_rate, enough, discount=1.0 - HASTE)
    all_plans = []
    for i, cell in enumerate(map(int, position)):
        tiles, plan = boards[i].reshape(-1), []
        while len(plan) < left[i] and tiles[cell] not in (GOAL, HOLE):
            moves = left[i] - len(plan)
            plan.append(int(best[moves if values[moves, i, cell] else enough, i, cell]))
            row, column = np.clip(np.add(divmod(cell, n), MOVES[plan[-1]]), 0, n - 1)
            cell = int(row * n + column)
        all_plans.append(plan)
    return all_plans
