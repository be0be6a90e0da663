"""Weights by role: the settings loss.thought_weight and loss.action_uncertainty."""

from agentrl_jax.extras.role_weights.role_weights import RoleWeights

SECTIONS = {'role_weights': RoleWeights}
