"""DPO: the better episode of a pair gains on the worse one (arXiv:2305.18290, eq. 7).

  s_b = sum over the episode's sampled tokens of log pi - log pi_ref
  loss = mean over pairs of -log sigmoid(beta (s_better - s_worse))
Pairs are made inside a group, whose episodes share their prompt: best with worst, second best with
second worst, ... up to `pairs`; equal returns (min_gap) make no pair, so a group without spread
gives none. group_size // 2 pairs use every episode; the others are carried along untrained.
beta .1 is the default of AgentGym's trainer, its script has .5, a reward gap of .01 (WebShop .1),
learning rate 5e-7 and 3 epochs; there one pair of an item is made off-line, of an expert's and an
own trajectory. Here pairs are of the policy's own episodes and fresh at every step. Observation
tokens between turns belong to the context, never to the sum. The reference is the policy of step 0.

A loss couples the two rows of a pair, so they must be in one micro-batch: `order_rows` puts them
side by side, make_batch pairs what is there, and ROWS_PER_PAIR = 2 keeps such rows together;
a half pair gives nan, so that its step is skipped and counted instead of being wrong. A[b, t] is
+-beta. Each row of a pair has the whole loss of the pair on its last token: with seq_mean_token_sum
(1 / trained rows), which is always used with it, that is the mean over pairs. clip_* and dual_clip
do not apply.
Tables: none of the papers'; AgentGym ships it as an example (examples/dpo).
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL_IN_LOSS, Algorithm, Weights, build_batch, trained
from agentrl_jax.settings.marks import ONE, POSITIVE, ZERO, At
from agentrl_jax.settings.rules import Rule, must
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class DPO(Algorithm):
    weights: Weights = Weights('seq_mean_token_sum')
    beta: Annotated[float, POSITIVE, At('dpo.beta')] = 0.1  # how much log-ratios to the start
    # policy count
    pairs: Annotated[int, ONE, At('dpo.pairs')] = 1  # of a group: best with worst, second with
    # second, ...
    min_gap: Annotated[float, ZERO, At('dpo.min_gap')] = 0.01  # returns of a pair differ by more

    RULES = (
        Rule({'loss.aggregation': 'seq_mean_token_sum'}, 'the loss is a mean over pairs'),
        Rule(KL_IN_LOSS, 'returns are compared'),
        must('rollout.group_size', 'an even number', lambda run: run.rollout.group_size % 2 == 0),
        must(
            'batch.microbatch_rows',
            'an even number',
            lambda run: run.batch.microbatch_rows % 2 == 0,
        ),
    )
    HAS_RATIO = False
    WHOLE_EPISODES = True
    ROWS_PER_PAIR = 2

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """Advantages are beta on the tokens of the better episode of a pair, -beta on the worse's.

        The rows are those of order_rows.
        """
        rows, mask = trained(rollout, keep)
        rows = rows & mask.any(1)
        returns, scale = self.episode_returns(rollout, scores, mask, kl_coef)
        largest = jnp.where(rows, scale, 0.0).reshape(-1, group_size).max(1, keepdims=True)
        min_gap = jnp.maximum(self.min_gap, adv.ROUNDING * largest)
        pair, sign = preferences(
            returns, rows, group_size=group_size, pairs=self.pairs, min_gap=min_gap
        )
        mask = mask & (pair > 0)[:, None]
        batch = build_batch(rollout, scores, mask, self.beta * sign[:, None] * mask)
        return batch.replace(pair=pair)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """-log sigmoid(margin) of its pair on the last trained token of each row; [B, T]."""
        gained = jnp.where(batch.mask, logprobs - batch.ref_logprobs, 0.0)
        gain = (jnp.where(batch.mask, batch.advantages, 0.0) * gained).sum(1)
        same = (batch.pair[:, None] == batch.pair[None]) & (batch.pair > 0)[None]  # [B, B]
        margin = jnp.where(same, gain[None], 0.0).sum(1)
        complete = same.sum(1) == 2
        per_row = jnp.where(complete, jax.nn.softplus(-margin), jnp.nan)
        return jnp.where(adv.episode_ends(batch.mask), per_row[:, None], 0.0)

    def order_rows(self, returns: jax.Array, rows: jax.Array, *, group_size: int) -> jax.Array:
        """int32 [B]: the rows of a batch, those of a pair side by side."""
        return order_rows(returns, rows, group_size=group_size)

    @property
    def uses_reference(self) -> bool:
        return True


def slots(returns: jax.Array, rows: jax.Array, *, group_size: int) -> tuple[jax.Array, jax.Array]:
    """(slot int32 [P, G] of each member, number of pairs int32 [P, 1]) of groups.

    Slots 2j and 2j + 1 are the j-th best and j-th worst of the n members in `rows`; after these
    n // 2 pairs comes the middle one of an odd n, then those outside `rows`. Ties keep their order.
    """
    r, ok = returns.reshape(-1, group_size), rows.reshape(-1, group_size)
    best_first = jnp.argsort(jnp.where(ok, -r, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(best_first, axis=1)  # where each member came in
    count = ok.sum(1, keepdims=True)
    pairs = count // 2
    from_the_end = count - 1 - rank
    slot = jnp.where(rank < pairs, 2 * rank, 2 * from_the_end + 1)
    slot = jnp.where((rank == pairs) & (count % 2 == 1), count - 1, slot)
    return jnp.where(rank < count, slot, rank).astype(jnp.int32), pairs


def order_rows(returns: jax.Array, rows: jax.Array, *, group_size: int) -> jax.Array:
    """int32 [B]: the rows of a batch, the pairs of each (even) group side by side."""
    slot, _ = slots(returns, rows, group_size=group_size)
    first = jnp.arange(slot.shape[0], dtype=jnp.int32)[:, None] * group_size
    return (first + jnp.argsort(slot, axis=1).astype(jnp.int32)).reshape(-1)


def preferences(
    returns: jax.Array,
    rows: jax.Array,
    *,
    group_size: int,
    pairs: int,
    min_gap: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(pair int32 [B], 0 = none; sign float32 [B], 1 better, -1 worse, 0 none) of ordered rows.

    Members 2j and 2j + 1 of a group are its j-th pair, the better one first: order_rows put them
    there. Ranking them anew would part pairs, since equal returns come out in another order.
    """
    place = jnp.arange(group_size)
    partner = jnp.minimum(place ^ 1, group_size - 1)  # the last one of an odd group has none
    r, ok = jnp.where(rows, returns, 0.0).reshape(-1, group_size), rows.reshape(-1, group_size)
    better = jnp.where(place % 2 == 0, 1.0, -1.0)[None]
    gap = better * (r - r[:, partner])
    used = ok & ok[:, partner] & (gap > min_gap) & (place // 2 < pairs)[None]
    first = group_size * jnp.arange(len(r), dtype=jnp.int32)[:, None]
    pair = jnp.where(used, 1 + first + place[None] // 2, 0)
    return pair.reshape(-1), jnp.where(used, better, 0.0).reshape(-1)
