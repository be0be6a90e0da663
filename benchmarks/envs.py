"""Environment steps per second, beside gymnasium, gym-sokoban and minigrid, measured in one run.

  python -m benchmarks.envs [--batch=4096] [--steps=512] [--worlds=babyai] [--hosts] [--json=PATH]

Random actions through gymnax's jitted step (restarts included). Every observation is folded into a
checksum that is returned, else XLA would delete the worlds. `lines` also computes the rows of the
text table, which is all that a prompt needs; for this program the seconds to compile it and the
memory that it takes beside its arguments are printed too. --hosts: worlds on hosts instead, one in
this process, which random play steps and resets.
"""

import argparse
import contextlib
import functools
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs import GAMES, BabyAI, Bandit, FrozenLake, Library, Sokoban
from agentrl_jax.envs.babyai.export import level_maker
from agentrl_jax.envs.hosts import HOSTS, agentgym

BABYAI = ('GoToLocalS8N7', 'PickupLoc', 'Open', 'BossLevel')  # levels that minigrid is timed on
WORLDS = {
    'bandit': Bandit(),
    'frozen_lake 4x4': FrozenLake(),
    'sokoban 6x6, 1 box': Sokoban(),
    'sokoban 8x8, 2 boxes': Sokoban(dim=8, num_boxes=2, search_depth=10),
    'babyai, 40 levels': BabyAI(),
    'babyai, macro': BabyAI(actions='macro'),
    'library': Library(),
    **{name: world() for name, world in GAMES.items()},
}
HOST_WORLDS = {'textcraft': 4000, 'search': 1000, 'shop': 1000, 'sciworld': 100, 'miniwob': 50}
GOALS = {'babyai, 40 levels': 50_000, 'babyai, macro': 5_000}  # with lines; an action is a way
GOAL = 1_000_000  # batched steps a second of RAGEN's worlds
RAGENS = ('bandit', 'frozen_lake', 'sokoban')


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


def measure(env: Any, params: Any, batch: int, steps: int, *, lines: bool) -> dict[str, float]:
    """Steps per second, seconds to compile and megabytes of the program beside its arguments."""
    program = jax.jit(functools.partial(play, env=env, batch=batch, steps=steps, lines=lines))
    start = time.perf_counter()
    compiled = program.lower(jax.random.key(0), params).compile()
    seconds = time.perf_counter() - start
    rate = best_rate(
        lambda seed: compiled(jax.random.key(seed), params).block_until_ready(), batch * steps
    )
    megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
    return dict(rate=rate, compile_s=seconds, megabytes=megabytes)


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


def minigrid(name: str, count: int = 2000) -> float:
    """minigrid's own BabyAI with its image, restarts included."""
    env, rng = level_maker(name)(0), np.random.default_rng(0)

    def run(seed):
        env.reset(seed=seed)
        for action in rng.integers(6, size=count):
            _, _, terminated, truncated, _ = env.step(int(action))
            if terminated or truncated:
                env.reset()

    with contextlib.redirect_stdout(io.StringIO()):  # it prints each rejected draw
        return best_rate(run, count)


def _rooms(params: Any):
    return zip(params.fixed, params.boxes, params.player, strict=True)


def host_rates(name: str, params: Any) -> dict[str, float]:
    """Steps per second of the originals of one world."""
    if name == 'frozen_lake 4x4':
        return {'gymnasium': gymnasium_lake()}
    if name.startswith('sokoban'):
        dim, boxes = (6, 1) if name.startswith('sokoban 6x6') else (8, 2)
        return {
            'gym-sokoban': gym_sokoban(dim, boxes, render=True, params=params),
            'gym-sokoban, no picture': gym_sokoban(dim, boxes, render=False, params=params),
        }
    if name == 'babyai, 40 levels':
        return {f'minigrid {level}': minigrid(level) for level in BABYAI}
    return {}


def host_world(name: str) -> float:
    """Steps per second of one world on hosts in this process, by random play, resets included.

    An episode has at most the turns of AgentGym's.
    """
    env, count = HOSTS[name](), HOST_WORLDS[name]
    turns = agentgym.ENVIRONMENTS[name].rounds
    items = env.item_range('train')
    with contextlib.closing(env.player()) as player:

        def run(seed):
            generator, played = np.random.default_rng(seed), 0
            for _ in range(count):
                if not played:
                    player.reset(int(generator.choice(items)))
                reply = player.step(player.random(generator))
                played = 0 if reply.done else (played + 1) % turns

        return best_rate(run, count)


def measured(name: str, batch: int, steps: int) -> dict[str, Any]:
    """All figures of one world."""
    env = WORLDS[name]
    params = env.make_params(num_levels=256)
    host = host_rates(name, params)
    runs = {
        'single': measure(env, params, 1, steps, lines=False),
        'batched': measure(env, params, batch, steps, lines=False),
        'lines': measure(env, params, batch, steps, lines=True),
    }
    program = {key: runs['lines'][key] for key in ('compile_s', 'megabytes')}
    return {key: run['rate'] for key, run in runs.items()} | program | {'host': host}


def misses(name: str, rates: dict[str, Any]) -> bool:
    if name in GOALS:
        return rates['lines'] < GOALS[name]
    return name.startswith(RAGENS) and rates['batched'] < GOAL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--batch', type=int, default=4096)
    parser.add_argument('--steps', type=int, default=256)
    parser.add_argument('--worlds', default='', help='only worlds whose name begins so')
    parser.add_argument('--hosts', action='store_true', help='worlds on hosts')
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    if args.hosts:
        names = [name for name in HOST_WORLDS if name.startswith(args.worlds)]
        rates = {name: host_world(name) for name in names}
        print('\n'.join(f'{name:22}{rate:>12,.0f} steps/s' for name, rate in rates.items()))
        if args.json:
            args.json.write_text(json.dumps(rates, indent=1) + '\n')
        return
    print(f'{jax.device_count()} {jax.devices()[0].platform} device(s), batch {args.batch}')
    columns = ('single', 'batched', 'with lines', 'compile s', 'MB')
    print(f'{"world":22}' + ''.join(f'{name:>12}' for name in columns) + '   against')
    results = {}
    for name in WORLDS:
        if name.startswith(args.worlds):
            results[name] = rates = measured(name, args.batch, args.steps)
            ratios = [f'{rates["batched"] / x:,.0f}x {other}' for other, x in rates['host'].items()]
            print(
                f'{name:22}{rates["single"]:>12,.0f}{rates["batched"]:>12,.0f}'
                f'{rates["lines"]:>12,.0f}{rates["compile_s"]:>12.1f}{rates["megabytes"]:>12.1f}'
                f'   {"; ".join(ratios)}',
                flush=True,
            )
    missed = [name for name, rates in results.items() if misses(name, rates)]
    print('goals of steps/s: ' + (f'missed by {missed}' if missed else 'met by all'))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + '\n')


if __name__ == '__main__':
    main()
