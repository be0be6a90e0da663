"""Best play and random play: what every success rate is compared with (host, numpy)."""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.frozen_lake.world import GOAL, HOLE, MOVES

_WALL, _TARGET = 0, 2  # codes of sokoban.EnvState.fixed


def solve_sokoban(fixed: np.ndarray, boxes: np.ndarray, player: int) -> tuple[int, ...] | None:
    """Shortest run of actions (up, down, left, right = 0..3) that solves the room; None = stuck.

    fixed int [n, n], boxes bool [n, n], player = row * n + column. Breadth first.
    """
    start = (int(player), tuple(np.flatnonzero(np.asarray(boxes).reshape(-1)).tolist()))
    fixed = np.asarray(fixed, np.int8)
    return _solve(fixed.tobytes(), fixed.shape[0], *start)


@functools.lru_cache(maxsize=1 << 16)
def _solve(fixed: bytes, dim: int, player: int, boxes: tuple[int, ...]) -> tuple[int, ...] | None:
    is_open = [code != _WALL for code in fixed]
    targets = {cell for cell, code in enumerate(fixed) if code == _TARGET}
    start = (player, frozenset(boxes))
    parents: dict = {start: None}
    queue = deque([start] if len(start[1] - targets) else [])
    if not queue:
        return ()
    while queue:
        state = queue.popleft()
        for action, after in _moves(is_open, dim, *state):
            if after in parents:
                continue
            parents[after] = (state, action)
            if after[1] <= targets:
                return _path(parents, after)
            queue.append(after)
    return None


def _moves(is_open: list[bool], dim: int, player: int, boxes: frozenset):
    """(action, next state) of every action that moves the player."""
    for action, step in enumerate((-dim, dim, -1, 1)):
        ahead = player + step
        if not is_open[ahead]:
            continue
        if ahead not in boxes:
            yield action, (ahead, boxes)
        elif is_open[ahead + step] and ahead + step not in boxes:
            yield action, (ahead, boxes - {ahead} | {ahead + step})


def _path(parents: dict, state: tuple) -> tuple[int, ...]:
    actions = []
    while parents[state] is not None:
        state, action = parents[state]
        actions.append(action)
    return tuple(reversed(actions))


def lake_values(
    boards: np.ndarray, success_rate: float, horizon: int, *, play: str = 'best'
) -> tuple[np.ndarray, np.ndarray]:
    """Finite-horizon dynamic programming over many maps at once (int [maps, n, n]).

    Returns the probability float [horizon + 1, maps, cells] of being on the goal when h moves are
    left, and the best action int [horizon + 1, maps, cells] then (row 0 is empty: all 0).
    V_h(s) = max_a [rate V_{h-1}(s a) + (1 - rate) / 2 (V_{h-1}(s a-1) + V_{h-1}(s a+1))], or the
    mean over a with play='random'.
    """
    tiles = np.asarray(boards).reshape(len(boards), -1)
    n = np.asarray(boards).shape[1]
    row, column = np.divmod(np.arange(n * n), n)
    after = np.stack(
        [np.clip(row + dr, 0, n - 1) * n + np.clip(column + dc, 0, n - 1) for dr, dc in MOVES], 1
    )  # [cells, 4]
    values = np.zeros((horizon + 1, *tiles.shape))
    values[:] = tiles == GOAL
    actions = np.zeros((horizon + 1, *tiles.shape), np.int8)
    ends = (tiles == GOAL) | (tiles == HOLE)
    for left in range(1, horizon + 1):
        reached = values[left - 1][:, after]  # [maps, cells, 4]
        turned = np.roll(reached, 1, axis=2) + np.roll(reached, -1, axis=2)
        quality = success_rate * reached + (1.0 - success_rate) / 2.0 * turned
        value = quality.max(2) if play == 'best' else quality.mean(2)
        values[left] = np.where(ends, values[left], value)
        actions[left] = quality.argmax(2)
    return values, actions


def reference_curves(
    env: Any, params: Any, budgets: Sequence[int], *, rollouts: int = 20, seed: int = 0
) -> dict[str, np.ndarray]:
    """Success of uniform random actions and of the best player within each budget of actions.

    Keys random, random_se, oracle, oracle_se, each float [budgets]; the errors are over levels.
    Exact but for Sokoban, whose random play is simulated `rollouts` times a level.
    """
    curves = {
        'bandit': _bandit_curves,
        'frozen_lake': _lake_curves,
        'library': _library_curves,
        'sokoban': _sokoban_curves,
    }
    if env.name not in curves:
        raise ValueError(
            f'what random and best play reach in {env.name!r} is not known; add a function for it '
            'to reference_curves in agentrl_jax/envs/solvers.py'
        )
    by_level = curves[env.name](env, params, np.asarray(budgets), rollouts, seed)
    result = {}
    for player, success in zip(('random', 'oracle'), by_level, strict=True):
        result[player] = success.mean(1)
        result[f'{player}_se'] = success.std(1) / np.sqrt(success.shape[1])
    return result


def reference_success(
    env: Any, params: Any, budget: int, *, rollouts: int = 20, seed: int = 0
) -> dict[str, float]:
    """reference_curves for one budget (max_actions_per_episode), as floats."""
    curves = reference_curves(env, params, [budget], rollouts=rollouts, seed=seed)
    return {name: float(curve[0]) for name, curve in curves.items()}


def _bandit_curves(env, params, budgets, rollouts, seed):
    """Half the random choices are right; the oracle knows the arms. [budgets, levels] each."""
    shape = (len(budgets), env.num_levels(params))
    return np.full(shape, 0.5), np.ones(shape)


def _lake_curves(env, params, budgets, rollouts, seed):
    boards, levels = np.asarray(params.boards), env.num_levels(params)
    states = jax.vmap(env.reset_level, in_axes=(0, None))(jnp.arange(levels), params)
    start = np.asarray(states.position)
    horizon, rate = int(budgets.max()), float(params.success_rate)
    for play in ('random', 'best'):
        values = lake_values(boards, rate, horizon, play=play)[0]
        yield values[budgets][:, np.arange(levels), start]


def _library_curves(env, params, budgets, rollouts, seed):
    """Random play names a box sooner or later, each with the same probability; [budgets, levels].

    The best player never guesses: it solves a level if there is an action left behind its lookups.
    """
    hops, names = np.asarray(params.hops), env.num_boxes
    random = (1 - (1 - names / env.num_actions) ** budgets) / names
    yield np.repeat(random[:, None], len(hops), axis=1)
    yield hops[None] < budgets[:, None]


def _sokoban_curves(env, params, budgets, rollouts, seed):
    won = simulate_random(env, params, int(budgets.max()), rollouts=rollouts, seed=seed)
    yield won[budgets].mean(2)
    yield np.asarray(params.optimal_length)[None] <= budgets[:, None]


def simulate_random(env: Any, params: Any, horizon: int, *, rollouts: int, seed: int) -> np.ndarray:
    """bool [horizon + 1, levels, rollouts]: success after 0, 1, ... uniformly random actions."""
    levels = env.num_levels(params)
    level = jnp.repeat(jnp.arange(levels), rollouts)
    states = jax.vmap(env.reset_level, in_axes=(0, None))(level, params)
    success = jax.vmap(env.success, in_axes=(0, None))

    def act(states, key):
        k_action, k_world = jax.random.split(key)
        action = jax.random.randint(k_action, level.shape, 0, env.num_actions)
        keys = jax.random.split(k_world, len(level))
        states = jax.vmap(env.step_env, in_axes=(0, 0, 0, None))(keys, states, action, params)[1]
        return states, success(states, params)

    keys = jax.random.split(jax.random.key(seed), horizon)
    won = jax.jit(lambda states: jax.lax.scan(act, states, keys)[1])(states)
    won = np.concatenate([np.asarray(success(states, params))[None], np.asarray(won)])
    return won.reshape(horizon + 1, levels, rollouts)
