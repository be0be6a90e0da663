"""Entropy control: PPO with one of four remedies against a fall of entropy."""

from agentrl_jax.extras.entropy_control.entropy_control import Controls, EntropyControl

ALGORITHMS = {'entropy_control': EntropyControl}
SECTIONS = {'entropy_control': Controls}
