"""The worlds on the device by their names."""

from agentrl_jax.envs.babyai import BabyAI
from agentrl_jax.envs.bandit import Bandit
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
