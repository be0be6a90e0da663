"""DAPO: GRPO with a soft penalty for long answers (arXiv:2503.14476).

  A as in GRPO, of R + min(0, (L_max - buffer - length) / buffer) overlong_coef
The other pieces are settings: clip_high=0.28, aggregation='token_mean', no KL, and dynamic
sampling (the filter rule 'varied': groups whose returns are all equal are not trained on;
filter.refill plays others in their place). length counts the sampled tokens of an episode; L_max is
the most it can sample and the buffer a fifth of that, unless set; max_length 0 leaves the penalty
out.
"""

import jax

from agentrl_jax.algorithms import common, grpo
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective
from agentrl_jax.types import Batch, Rollout, Scores

USES_CRITIC = False
SETTINGS = (*grpo.SETTINGS, 'max_length', 'overlong_buffer', 'overlong_coef')
DEFAULTS = common.DEFAULTS | {
    'loss.clip_high': 0.28,
    'loss.aggregation': 'token_mean',
    'loss.norm': 'std',
    'loss.eps': 1e-6,
    'loss.std_floor': 0.0,
    'loss.max_length': lambda longest: longest,
    'loss.overlong_buffer': lambda longest: longest // 5,  # 4096 of 20480 tokens
    'loss.overlong_coef': 1.0,
    'filter.rule': 'varied',
    'filter.refill': 9,  # ten rollouts at most, as its recipe has it
}
loss = objective.clipped_loss
clipped = objective.clipped_tokens


def make_batch(
    rollout: Rollout,
    scores: Scores,
    *,
    group_size: int,
    keep: jax.Array | None = None,
    kl_coef: jax.Array | float = 0.0,
    kl_in_reward: bool = False,
    norm: str = 'std',
    eps: float = 1e-6,
    std_floor: float = 0.0,
    max_length: int = 0,
    overlong_buffer: int = 0,
    overlong_coef: float = 1.0,
) -> Batch:
    """One advantage per episode; keep bool [B] marks the rows a filter kept."""
    rows, mask = common.trained(rollout, keep)
    returns = common.episode_returns(rollout, scores, mask, kl_coef, kl_in_reward)
    if max_length:
        returns = returns + adv.overlong_penalty(
            rollout.action_mask.sum(1),
            max_length=max_length,
            buffer=overlong_buffer,
            coef=overlong_coef,
        )
    per_episode = adv.compare(
        returns, rows, group_size=group_size, norm=norm, eps=eps, std_floor=std_floor
    )
    return common.build_batch(rollout, scores, mask, per_episode[:, None] * mask)
