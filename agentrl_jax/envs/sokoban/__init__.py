"""Sokoban: the world and its texts, levels after RAGEN's generator."""

from agentrl_jax.envs.sokoban.world import Sokoban

__all__ = ['Sokoban']
