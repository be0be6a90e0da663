"""BabyAI: MiniGrid's rules and instructions, levels exported by minigrid, texts and the expert."""

from agentrl_jax.envs.babyai.world import BabyAI

__all__ = ['BabyAI']
