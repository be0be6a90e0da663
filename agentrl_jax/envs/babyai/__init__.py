"""BabyAI: MiniGrid's rules, its instructions, levels exported by minigrid, texts and the expert."""

from agentrl_jax.envs.babyai.world import BabyAI

__all__ = ['BabyAI']
