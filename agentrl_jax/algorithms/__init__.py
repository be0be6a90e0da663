"""Algorithms by name. Each is a module with

make_batch(rollout, scores, *, group_size, keep, kl_coef, kl_in_reward, ...) -> Batch
loss(logprobs, batch, *, clip_low, clip_high, dual_clip) -> float32 [B, T], per token
clipped(the same) -> {metric: bool [B, T]}, the tokens that the loss clips
SETTINGS      further keywords of make_batch: fields of cfg.loss, turn_credit, fork, evol or dpo
DEFAULTS      {field: value}: every field of a config that it takes, with the value of its paper
USES_CRITIC   whether scores.values are needed
"""

from agentrl_jax.algorithms import (
    agent_evol,
    cispo,
    dapo,
    dpo,
    dr_grpo,
    gigpo,
    grpo,
    gspo,
    gspo_turn,
    mt_grpo,
    ppo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    turn_grpo,
    vine,
)

ALGORITHMS = {
    'ppo': ppo,
    'grpo': grpo,
    'dr_grpo': dr_grpo,
    'dapo': dapo,
    'rloo': rloo,
    'reinforce_pp': reinforce_pp,
    'reinforce_pp_baseline': reinforce_pp_baseline,
    'turn_grpo': turn_grpo,
    'vine': vine,
    'mt_grpo': mt_grpo,
    'gspo': gspo,
    'gspo_turn': gspo_turn,
    'cispo': cispo,
    'gigpo': gigpo,
    'agent_evol': agent_evol,
    'dpo': dpo,
}
