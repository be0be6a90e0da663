"""PPO of rejax and of stable-baselines3 on a scout's game, for benchmarks.scout.

Sizes are those of ScoutSettings, and the rest are defaults, which hardly change the speed. Each
function returns a call that continues a training by a number of updates.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import gymnax
import jax
import numpy as np
import rejax
import stable_baselines3
import torch
from stable_baselines3.common.vec_env import VecEnv

from agentrl_jax.envs.base import spaces
from agentrl_jax.imitation.scout import ScoutSettings

gymnax.environments.spaces = spaces  # rejax reads it; envs/base.py imports it without the package


def rejax_updates(world: Any, pool: Any, settings: ScoutSettings, updates: int) -> Callable:
    """rejax's training as one jitted program, without its evaluation."""
    count = updates * settings.length * settings.envs
    algorithm = rejax.PPO.create(
        env=world,
        env_params=pool,
        agent_kwargs=dict(activation='relu', hidden_layer_sizes=(settings.hidden,) * 2),
        num_envs=settings.envs,
        num_steps=settings.length,
        num_epochs=settings.epochs,
        num_minibatches=settings.minibatches,
        total_timesteps=count,
        eval_freq=count,
        skip_initial_evaluation=True,
    ).replace(eval_callback=lambda *_: jax.numpy.int32(0))
    train = jax.jit(lambda algorithm, state: algorithm.train(train_state=state)[0])
    state = algorithm.init_state(jax.random.key(0))

    def call():
        nonlocal state
        state = train(algorithm, state)
        return state.actor_ts.params

    return call


def sb3_updates(world: Any, pool: Any, settings: ScoutSettings, updates: int) -> Callable:
    """stable-baselines3's `learn` on one thread of the CPU."""
    torch.set_num_threads(1)
    count = settings.length * settings.envs
    agent = stable_baselines3.PPO(
        'MlpPolicy',
        BatchedWorld(world, pool, settings.envs),
        n_steps=settings.length,
        n_epochs=settings.epochs,
        batch_size=count // settings.minibatches,
        policy_kwargs=dict(net_arch=[settings.hidden] * 2, activation_fn=torch.nn.ReLU),
        device='cpu',
    )
    return lambda: agent.learn(updates * count, reset_num_timesteps=False).num_timesteps


class BatchedWorld(VecEnv):
    """A world on the device, stepped as one jitted batch, for stable-baselines3."""

    # PPO calls none of these.
    set_attr = env_method = env_is_wrapped = close = step_async = step_wait = None

    def __init__(self, world: Any, pool: Any, envs: int):
        key = jax.random.key(0)
        self.first, self.state = jax.vmap(world.reset, (0, None))(jax.random.split(key, envs), pool)
        seen = gymnasium.spaces.Box(0, 1, self.first.shape[1:], np.float32)
        super().__init__(envs, seen, gymnasium.spaces.Discrete(world.game.actions))

        @jax.jit
        def step(count, state, actions, pool):
            keys = jax.random.split(jax.random.fold_in(key, count), envs)
            return jax.vmap(world.step, (0, 0, 0, None))(keys, state, actions, pool)

        self.pool, self.count, self.jitted_step = pool, 0, step

    def reset(self):
        return np.array(self.first)

    def step(self, actions):
        self.count += 1
        out = self.jitted_step(self.count, self.state, actions, self.pool)
        seen, self.state, reward, over, _ = out
        return np.array(seen), np.array(reward), np.array(over), [{}] * self.num_envs

    def get_attr(self, attr_name, indices=None):
        return [None] * self.num_envs
