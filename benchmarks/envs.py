"""Environment steps per second, beside gymnasium and gym-sokoban, measured in one run.

  python -m benchmarks.envs [--batch=4096] [--steps=512] [--json=PATH]

Random actions through gymnax's jitted step (restarts included). Every observation is folded into a
checksum that is returned, else XLA would delete the worlds. `lines` also computes the rows of the
text table, which is all that a prompt needs.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs import Bandit, FrozenLake, Sokoban

WORLDS = {
    'bandit': (Bandit(), {}),
    'frozen_lake 4x4': (FrozenLake(), {}),
    'sokoban 6x6, 1 box': (Sokoban(), {}),
    'sokoban 8x8, 2 boxes': (Sokoban(dim=8, num_boxes=2), dict(search_depth=10)),
}
GOAL = 1_000_000  # batched steps a second


def play(key: jax.Array, params: Any, *, env: Any, batch: int, steps: int, lines: bool):
    """Checksum int32 [] of `steps` random steps of `batch` worlds."""
    k_reset, k_steps = jax.random.split(key)
    keys = jax.random.split(k_reset, batch)
    obs, states = jax.vmap(env.reset, in_axes=(0, None))(keys, params)

    def act(carry, key):
        states, checksum = carry
        keys = jax.random.split(key, batch)
        actions = jax.random.randint(key, (batch,), 0, env.num_actions)
        step = jax.vmap(env.step, in_axes=(0, 0, 0, None))
        obs, states, reward, terminated, _, _ = step(keys, states, actions, params)
        seen = obs.astype(jnp.int32).sum() + reward.astype(jnp.int32).sum() + terminated.sum()
        if lines:
            seen += jax.vmap(env.line_ids, in_axes=(0, None))(states, params).sum()
        return (states, checksum + seen), None

    start = (states, obs.astype(jnp.int32).sum())
    return jax.lax.scan(act, start, jax.random.split(k_steps, steps))[0][1]


def best_rate(run: Callable[[int], Any], count: int, repeats: int = 3) -> float:
    """Steps per second of the fastest of `repeats` calls run(seed), after one to warm up."""
    run(0)
    times = []
    for seed in range(1, repeats + 1):
        start = time.perf_counter()
        run(seed)
        times.append(time.perf_counter() - start)
    return count / min(times)


def measure(env: Any, params: Any, batch: int, steps: int, *, lines: bool) -> float:
    program = jax.jit(functools.partial(play, env=env, batch=batch, steps=steps, lines=lines))
    return best_rate(
        lambda seed: program(jax.random.key(seed), params).block_until_ready(), batch * steps
    )


def gymnasium_lake() -> float:
    """gymnasium's FrozenLake, the bare class as RAGEN uses it."""
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    env, rng = FrozenLakeEnv(), np.random.default_rng(0)

    def run(seed):
        env.reset(seed=seed)
        for action in rng.integers(4, size=20_000):
            if env.step(int(action))[2]:
                env.reset()

    return best_rate(run, 20_000)


def gym_sokoban(dim: int, num_boxes: int, *, render: bool, params: Any) -> float:
    """gym-sokoban on rooms of our pool; it draws a picture each step unless told otherwise."""
    from gym_sokoban.envs.sokoban_env import SokobanEnv

    env = SokobanEnv(dim_room=(dim, dim), max_steps=10**9, num_boxes=num_boxes, reset=False)
    if not render:
        env.get_image = lambda *args, **kwargs: None
    rng, count = np.random.default_rng(0), 200 if render else 5000
    rooms = [(np.array(f, int), np.asarray(b), int(p)) for f, b, p in _rooms(params)]

    def run(seed):
        done = True
        for action in rng.integers(1, 5, size=count):
            if done:
                fixed, boxes, player = rooms[rng.integers(len(rooms))]
                env.room_fixed, env.room_state = fixed, np.where(boxes, 4, fixed)
                env.player_position = np.array(divmod(player, dim))
                env.room_state[tuple(env.player_position)] = 5
                env.num_env_steps = env.boxes_on_target = 0
            done = env.step(int(action))[2]

    return best_rate(run, count)


def _rooms(params: Any):
    return zip(params.fixed, params.boxes, params.player, strict=True)


def host_rates(params: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Steps per second of the originals, by world and variant."""
    six, eight = 'sokoban 6x6, 1 box', 'sokoban 8x8, 2 boxes'
    return {
        'frozen_lake 4x4': {'gymnasium': gymnasium_lake()},
        six: {
            'gym-sokoban': gym_sokoban(6, 1, render=True, params=params[six]),
            'gym-sokoban, no picture': gym_sokoban(6, 1, render=False, params=params[six]),
        },
        eight: {
            'gym-sokoban': gym_sokoban(8, 2, render=True, params=params[eight]),
            'gym-sokoban, no picture': gym_sokoban(8, 2, render=False, params=params[eight]),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--batch', type=int, default=4096)
    parser.add_argument('--steps', type=int, default=256)
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    params = {name: env.make_params(num_levels=256, **pool) for name, (env, pool) in WORLDS.items()}
    host, results = host_rates(params), {}
    print(f'{jax.device_count()} {jax.devices()[0].platform} device(s), batch {args.batch}')
    print(f'{"world":22}{"single":>12}{"batched":>14}{"with lines":>14}   against')
    for name, (env, _) in WORLDS.items():
        rates = {
            'single': measure(env, params[name], 1, args.steps, lines=False),
            'batched': measure(env, params[name], args.batch, args.steps, lines=False),
            'lines': measure(env, params[name], args.batch, args.steps, lines=True),
            'host': host[name] if name in host else {},
        }
        ratios = [f'{rates["batched"] / x:,.0f}x {other}' for other, x in rates['host'].items()]
        print(
            f'{name:22}{rates["single"]:>12,.0f}{rates["batched"]:>14,.0f}{rates["lines"]:>14,.0f}'
            f'   {"; ".join(ratios)}'
        )
        results[name] = rates
    missed = [name for name, rates in results.items() if rates['batched'] < GOAL]
    print(
        f'goal of {GOAL:,} batched steps/s: ' + (f'missed by {missed}' if missed else 'met by all')
    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + '\n')


if __name__ == '__main__':
    main()
