"""Algorithms by name. Each is a module with

make_batch(rollout, scores, *, group_size, keep, kl_coef, kl_in_reward, ...) -> Batch
loss(logprobs, batch, *, clip_low, clip_high, dual_clip) -> float32 [B, T], per token
SETTINGS      names of the further keywords of make_batch
USES_CRITIC   whether scores.values are needed
"""

from agentrl_jax.algorithms import grpo, ppo

ALGORITHMS = {'ppo': ppo, 'grpo': grpo}
