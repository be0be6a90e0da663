"""GSPO with one ratio per turn, on MT-GRPO's advantage per turn (gspo.turn_loss, mt_grpo)."""

from agentrl_jax.algorithms import gspo, mt_grpo

USES_CRITIC = False
SETTINGS = mt_grpo.SETTINGS
make_batch = mt_grpo.make_batch
loss, clipped = gspo.turn_loss, gspo.turn_clipped
