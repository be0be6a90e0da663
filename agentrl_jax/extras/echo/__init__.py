"""Observation losses (ECHO): the settings loss.observation_coef and eval.observations."""

from agentrl_jax.extras.echo.section import Echo

SECTIONS = {'echo': Echo}
