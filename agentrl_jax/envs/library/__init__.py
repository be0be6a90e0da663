"""A card catalogue that must be queried before answering: tool use on the device."""

from agentrl_jax.envs.library.world import Library

__all__ = ['Library']
