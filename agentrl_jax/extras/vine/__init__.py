"""Continuations of episodes: the algorithm `vine`, and a critic that is measured by them."""

from agentrl_jax.extras.vine.section import Forks
from agentrl_jax.extras.vine.vine import Vine

ALGORITHMS = {'vine': Vine}
SECTIONS = {'forks': Forks}
