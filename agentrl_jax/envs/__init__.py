"""Worlds on the device: gymnax environments that can also show themselves as text."""

from agentrl_jax.envs.babyai import BabyAI
from agentrl_jax.envs.bandit import Bandit
from agentrl_jax.envs.base import SPLITS, TextEnvironment
from agentrl_jax.envs.frozen_lake import FrozenLake
from agentrl_jax.envs.library import Library
from agentrl_jax.envs.sokoban import Sokoban

ENVIRONMENTS = {  # env.name -> class; the settings are the section of that name in a config
    'frozen_lake': FrozenLake,
    'sokoban': Sokoban,
    'bandit': Bandit,
    'library': Library,
    'babyai': BabyAI,
}

__all__ = [
    'ENVIRONMENTS',
    'SPLITS',
    'BabyAI',
    'Bandit',
    'FrozenLake',
    'Library',
    'Sokoban',
    'TextEnvironment',
]
