"""Training speed of a scout, compared with PPO of rejax and of stable-baselines3.

  make bench-scout ARGS='--repeats=7'     in a separate environment (requirements/scout.txt)
  python -m benchmarks.scout --success=50,200,600 --seeds=0,1,2 [--configs=demo_babyai,games:leduc]

1. All three train on the same world of this package with the same sizes. rejax (a kept PPO like
   purejaxrl's) trains in one jitted program. stable-baselines3 steps the world as one jitted batch,
   but its policy is torch and its loop is Python, so it pays for the border of host and device.
   Both have separate networks for policy and value. A scout has one network, which is half the
   arithmetic, so a second, wider scout has the arithmetic of two. Scores are not compared.
2. --success: greedy play on held-out levels after a number of CPU-seconds of training. Each budget
   is a separate training, because the learning rate falls to 0. A probe measures the speed, which
   gives the number of steps. Both parts exclude compile time.
"""

import dataclasses
import functools
import importlib
import itertools
import statistics
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.envs.base import spaces
from agentrl_jax.envs.reference import reference_success
from agentrl_jax.imitation import scout
from agentrl_jax.imitation.scout import Game, ScoutSettings
from agentrl_jax.run import config, parts, scouting
from benchmarks import common

CONFIGS = (  # all worlds on the device
    'demo_scout,scout_sokoban,demo_bandit,demo_library,demo_babyai,'
    'games:catch,games:connect_four,games:game_2048,games:leduc,games:minesweeper'
)
PROBE = 10  # updates


@dataclasses.dataclass(frozen=True)
class GymnaxGame:
    """A game as an environment of gymnax before 1.0: `step` restarts and returns five values."""

    game: Game
    default_params = None  # the pool is passed instead

    def observation_space(self, pool: Any) -> spaces.Box:
        return spaces.Box(0, 1, jax.eval_shape(self.reset, jax.random.key(0), pool)[0].shape)

    def action_space(self, pool: Any) -> spaces.Discrete:
        return spaces.Discrete(self.game.actions)

    def reset(self, key: jax.Array, pool: Any) -> tuple[jax.Array, Any]:
        state = self.game.reset(key, pool), jnp.int32(0)
        return self.game.view(*state, pool), state

    def step(self, key: jax.Array, state: Any, action: jax.Array, pool: Any) -> tuple:
        k_world, k_reset = jax.random.split(key)
        after, reward, over = self.game.act(k_world, *state, action, pool)
        fresh = self.game.reset(k_reset, pool), jnp.int32(0)
        state = jax.tree.map(lambda x, y: jnp.where(over, x, y), fresh, (after, state[1] + 1))
        return self.game.view(*state, pool), state, reward, over, {}


@functools.cache
def load(name: str) -> tuple[Game, Any, Any]:
    """Return (game, training pool, held-out pool) of configs/MODULE.py; name: MODULE[:argument]."""
    module, *arguments = name.split(':')
    cfg = config.read(importlib.import_module(f'configs.{module}').get_config(*arguments))
    held_out = parts.build_environment(cfg.held_out, 'validation')[1]
    return scouting.game_of(cfg), parts.build_environment(cfg, 'train')[1], held_out


def scout_updates(game: Game, pool: Any, settings: ScoutSettings) -> Callable[[int], Any]:
    """Return a call that continues a scout's training by n updates and returns its network."""
    state = jax.jit(scout.start, static_argnums=(0, 2))(game, pool, settings)

    def call(updates: int) -> Any:
        nonlocal state
        until = state.update + updates
        state, _ = scout.train(state, pool, until, game=game, settings=settings)
        return state.net

    return call


def width_of_two(features: int, hidden: int) -> int:
    """Return w with features * w + w^2 = 2 (features * hidden + hidden^2): two networks in one."""
    return round((features**2 + 8 * hidden * (features + hidden)) ** 0.5 / 2 - features / 2)


def compare(name: str, settings: ScoutSettings, updates: int, repeats: int) -> list[dict[str, Any]]:
    """Part 1: world steps per second of exploring and learning, and ratios of the times."""
    peers = common.import_optional('benchmarks.peers.ppo', 'it with `make bench-scout`')
    game, pool, _ = load(name)
    world = GymnaxGame(game)
    ours = scout_updates(game, pool, settings)
    width = width_of_two(world.observation_space(pool).shape[0], settings.hidden)
    wide = scout_updates(game, pool, dataclasses.replace(settings, hidden=width))
    calls = {
        f'scout, jax {version("jax")}': lambda: ours(updates),
        f'scout, width {width}': lambda: wide(updates),
        f'rejax {version("rejax")}': peers.rejax_updates(world, pool, settings, updates),
        f'stable-baselines3 {version("stable-baselines3")}, torch {version("torch")}': (
            peers.sb3_updates(world, pool, settings, updates)
        ),
    }
    times, steps = common.alternate(calls, repeats, 2), updates * settings.envs * settings.length
    pairs = {ppo: common.compare(times, next(iter(calls)), ppo) for ppo in calls}
    return [{'ppo': x, 'steps_per_s': steps / pair['other_s'], **pair} for x, pair in pairs.items()]


@functools.cache
def probe(name: str) -> tuple[float, dict[str, float]]:
    """Return (CPU-seconds of an update, success of random play and the oracle) of a config."""
    game, pool, held_out = load(name)
    call = functools.partial(scout_updates(game, pool, ScoutSettings()), PROBE)
    return common.timed(call, 3) / PROBE, reference_success(game.env, held_out, game.budget)


def success_after(budget: float, name: str, seeds: list[int]) -> dict[str, Any]:
    """Part 2: success after about `budget` CPU-seconds, next to random play and the oracle."""
    (game, pool, held_out), (second, reference), runs = load(name), probe(name), []
    updates = max(round(budget / second), 1)
    steps = updates * ScoutSettings.envs * ScoutSettings.length
    for seed in seeds:
        train = scout_updates(game, pool, ScoutSettings(seed=seed, steps=steps))
        train(0)  # compile
        seconds = common.seconds(functools.partial(train, updates))
        runs.append((seconds, float(scout.evaluate(train(0), held_out, game=game))))
    seconds, success = map(list, zip(*runs, strict=True))
    row = {'config': name, 'seconds': statistics.mean(seconds), 'steps': steps}
    row |= {'success': statistics.mean(success), **reference, 'by seed': success}
    common.note(str(row))
    return row


def run(*, configs: str, success: str, seeds: str, updates: int, repeats: int) -> dict[str, Any]:
    """Return the rows of part 1, or of part 2 if `success` lists CPU-seconds."""
    if not success:
        return {'rows': compare(configs or 'scout_sokoban', ScoutSettings(), updates, repeats)}
    seeds = [int(x) for x in seeds.split(',')]
    pairs = itertools.product((configs or CONFIGS).split(','), map(float, success.split(',')))
    return {'rows': [success_after(budget, name, seeds) for name, budget in pairs]}


def show(result: dict[str, Any]) -> str:
    rows = result['rows']
    return common.table('', list(rows[0]), [[row.get(x) for x in rows[0]] for row in rows])


if __name__ == '__main__':
    defaults = dict(configs='', success='', seeds='0', updates=5, repeats=5)
    common.main('scout', __doc__, run, show, **defaults)
