"""FrozenLake with a different map in every level."""

from agentrl_jax.envs.frozen_lake.world import FrozenLake

__all__ = ['FrozenLake']
