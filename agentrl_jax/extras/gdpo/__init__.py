"""GDPO: several rewards, compared one by one (algorithm=gdpo)."""

from agentrl_jax.extras.gdpo.gdpo import GDPO

ALGORITHMS = {'gdpo': GDPO}
