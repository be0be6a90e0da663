"""FrozenLake: the world and its texts, a map of its own in every level."""

from agentrl_jax.envs.frozen_lake.world import FrozenLake

__all__ = ['FrozenLake']
