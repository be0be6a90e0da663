"""Continuations of episodes: the algorithm `vine` and the measurement of a critic."""

from agentrl_jax.extras.vine.section import Forks
from agentrl_jax.extras.vine.vine import Vine

ALGORITHMS = {'vine': Vine}
SECTIONS = {'forks': Forks}
