"""GSPO with one ratio per turn, on MT-GRPO's advantage per turn (gspo.turn_loss, mt_grpo).

No paper's: the clip ranges are those of GSPO.
"""

from agentrl_jax.algorithms import gspo, mt_grpo

USES_CRITIC = False
SETTINGS = mt_grpo.SETTINGS
DEFAULTS = mt_grpo.DEFAULTS | {
    'loss.clip_low': 3e-4,
    'loss.clip_high': 4e-4,
    'loss.aggregation': 'seq_mean_token_mean',
}
make_batch = mt_grpo.make_batch
loss, clipped = gspo.turn_loss, gspo.turn_clipped
