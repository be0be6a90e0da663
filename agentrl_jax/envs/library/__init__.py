"""Tool use on the device: a card catalogue that must be queried before answering."""

from agentrl_jax.envs.library.world import Library

__all__ = ['Library']
