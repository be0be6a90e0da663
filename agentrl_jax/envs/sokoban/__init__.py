"""Sokoban with levels from RAGEN's generator."""

from agentrl_jax.envs.sokoban.world import Sokoban

__all__ = ['Sokoban']
