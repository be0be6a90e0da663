"""Play of minigrid's BabyAI, recorded and replayed on the device: what differs?

  python -m benchmarks.babyai [--episodes=200] [--json=PATH]

Plays `episodes` episodes of every family of levels in minigrid (a third follows our expert, a third
does so with random actions in between, a third is random), replays the actions on the device, and
counts the steps after which something differs: view, pose, what is carried, reward, either kind of
end. Needs minigrid (requirements-test.txt).
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.babyai import BabyAI, pool
from agentrl_jax.envs.babyai.export import first_state, level_maker
from agentrl_jax.envs.babyai.planner import plan
from agentrl_jax.envs.babyai.words import COLOURS, KINDS, SIDE

FAMILIES = {  # by the first and the last of AgentGym's level numbers
    'go to': range(1, 12),
    'open': range(12, 17),
    'pick up': range(17, 22),
    'put next': range(22, 24),
    'unlock': range(24, 30),
    'others': range(30, 35),
    'synthetic': range(35, 41),
}
MOST_STEPS = 150  # of a recorded episode; one in ten is played to the time limit
WEIGHTS = (0.17, 0.17, 0.34, 0.12, 0.1, 0.1)  # of random actions: left, right, forward, ...


@dataclasses.dataclass(frozen=True)
class Step:
    """What minigrid answers to one action."""

    action: int
    image: np.ndarray  # uint8 [7, 7, 3]
    pose: tuple[int, int]  # cell, direction
    held: int  # kind * 6 + colour, -1 = nothing
    reward: float
    terminated: bool
    truncated: bool


def record(env: Any, actions: Sequence[int]) -> list[Step]:
    """An episode of a reset environment of minigrid, up to its end."""
    steps = []
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(int(action))
        x, y = map(int, env.agent_pos)
        held = env.carrying
        name = -1 if held is None else KINDS.index(held.type) * 6 + COLOURS.index(held.color)
        pose = (y * SIDE + x, int(env.agent_dir))
        steps.append(Step(action, obs['image'], pose, name, reward, terminated, truncated))
        if terminated or truncated:
            break
    return steps


def some_actions(rng: np.random.Generator, best: Sequence[int], max_steps: int) -> np.ndarray:
    """Actions of one of three players; `best` is the expert's plan."""
    count = max_steps if rng.random() < 0.1 else min(max_steps, MOST_STEPS)
    actions = rng.choice(6, size=count, p=WEIGHTS)
    player = rng.integers(3)
    if player:
        known = np.array(best[:count], int)
        follows = rng.random(len(known)) < (1.0 if player == 1 else 0.93)
        actions[: len(known)] = np.where(follows, known, actions[: len(known)])
    return actions


def recorded(params: Any, rng: np.random.Generator, count: int) -> tuple[np.ndarray, list]:
    """(levels of the pool, their episodes in minigrid)."""
    chosen = rng.permutation(len(params.data_idx))[:count]
    episodes = []
    for level in chosen:
        seed, index = divmod(int(params.data_idx[level]), len(pool.LEVELS))
        env = level_maker(pool.LEVELS[index])(seed)
        arrays = {key: values[seed] for key, values in pool.block(pool.LEVELS[index], 0).items()}
        best = plan(first_state(arrays))
        episodes.append(record(env, some_actions(rng, best, env.max_steps)))
    return chosen, episodes


def replay(env: BabyAI, params: Any, level: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
    """Our answers to actions int32 [T, N], -1 = none: arrays [T, N, ...]."""

    def step(states, action):
        one = jax.vmap(env.step_env, (None, 0, 0, None))
        image, states, reward, terminated, _ = one(jax.random.key(0), states, action, params)
        held = jnp.take_along_axis(states.name, jnp.maximum(states.held, 0)[:, None], 1)[:, 0]
        truncated = jax.vmap(env.is_truncated, (0, None))(states, params)
        return states, dict(
            image=image,
            cell=states.agent,
            direction=states.direction,
            held=jnp.where(states.held < 0, -1, held),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
        )

    states = jax.vmap(env.reset_level, (0, None))(level, params)
    return jax.lax.scan(step, states, actions)[1]


REPLAY = jax.jit(replay, static_argnums=0)


def differences(episodes: list[list[Step]], ours: dict[str, np.ndarray]) -> dict[str, int]:
    """Steps after which something differs, by what does."""
    counts = dict.fromkeys(('view', 'pose', 'carrying', 'reward', 'termination'), 0)
    for row, steps in enumerate(episodes):
        for t, step in enumerate(steps):
            mine = {key: values[t, row] for key, values in ours.items()}
            ends = (bool(mine['terminated']), bool(mine['truncated']))
            counts['view'] += not np.array_equal(mine['image'], step.image)
            counts['pose'] += (int(mine['cell']), int(mine['direction'])) != step.pose
            counts['carrying'] += int(mine['held']) != step.held
            counts['reward'] += abs(float(mine['reward']) - step.reward) > 1e-6
            counts['termination'] += ends != (step.terminated, step.truncated)
    return counts


def padded(episodes: list[list[Step]], length: int) -> np.ndarray:
    """Actions int32 [length, N], -1 behind the end of an episode."""
    actions = np.full((length, len(episodes)), -1, np.int32)
    for row, steps in enumerate(episodes):
        actions[: len(steps), row] = [step.action for step in steps]
    return actions


def compare(names: Sequence[str], count: int, seed: int = 0) -> dict[str, Any]:
    """Differences in `count` episodes of the named levels."""
    env, rng = BabyAI(levels=','.join(names)), np.random.default_rng(seed)
    per_level = -(-count // len(names)) * len(names)
    params = env.make_params(None, num_levels=per_level, seed=seed)
    level, episodes = recorded(params, rng, count)
    longest = -(-max(map(len, episodes)) // 64) * 64
    ours = jax.device_get(REPLAY(env, params, level, padded(episodes, longest)))
    return dict(
        episodes=len(episodes),
        steps=sum(map(len, episodes)),
        solved=sum(steps[-1].reward > 0 for steps in episodes),
        truncated=sum(steps[-1].truncated for steps in episodes),
        differences=differences(episodes, ours),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--episodes', type=int, default=200)
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    results = {}
    for family, numbers in FAMILIES.items():
        names = [pool.LEVELS[number - 1] for number in numbers]
        results[family] = got = compare(names, args.episodes)
        found = ', '.join(f'{key} {count}' for key, count in got['differences'].items())
        print(
            f'{family:10}{got["episodes"]:5} episodes, {got["solved"]:4} solved, '
            f'{got["truncated"]:3} out of time, {got["steps"]:6} steps; differences: {found}',
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + '\n')


if __name__ == '__main__':
    main()
