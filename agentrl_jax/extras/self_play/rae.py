"""RAE, role-conditioned advantages in self-play: a baseline per seat (arXiv:2506.24119).

  A[b, k] = R[b, s] - mean over the other healthy members c of the group of R[c, s],  s = seat[b, k]
  R[b, s] = +- sum_k r[b, k] + penalties in the turns of seat s - their KL, if it is in the reward
  + for seat 0, which moved first, - for seat 1: the game is zero-sum
Every token of a seat's turns has the advantage of the seat, and the loss sums over tokens (the
paper sums log-probabilities over the turns of each seat). With a common baseline for both seats,
the mean of R and -R would be near 0 for any advantage of the first move.

The paper's baseline is a moving average (decay 0.95) per game and role over earlier steps. Here it
has no state: it is the mean of the seat over the other members of the group. They share the deal,
as in duplicate poker, so the value of the cards also cancels. The baseline does not depend on
episode b, so it adds no bias, and it follows the policy immediately. With few members it is noisier
than an average over many steps. Failed episodes are excluded. The ratio and its clip range apply
from the second optimiser step of a rollout on, as in every algorithm here.

If a snapshot plays the other seat (self_play.snapshots), only the policy's turns train, and a seat
is compared among the members in which the policy has it. With one seat only, this is RLOO without
the KL.
"""

import dataclasses

import jax
import jax.numpy as jnp

from agentrl_jax.extras.self_play.player import LEARNER, SEATS
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import ClippedSurrogate, Weights, build_batch, trained
from agentrl_jax.settings.rules import must


@dataclasses.dataclass(frozen=True)
class RAE(ClippedSurrogate):
    weights: Weights = Weights('seq_mean_token_sum')

    RULES = (
        must(
            'filter.rule',
            "'all', since filters rank groups by the returns of one seat",
            lambda run: not run.algorithm.filter.drops_groups,
        ),
    )
    CREDITS_SEATS = True

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per seat."""
        rows, mask = trained(rollout, keep)
        kl, _ = turn_credit.turn_kl(self, rollout, scores, mask)
        seat_terms = rollout.penalties - kl
        _, scale = self.episode_returns(rollout, scores, mask)
        seats = rollout.extra.get(SEATS, jnp.zeros_like(rollout.num_actions))
        returns = seat_returns(rollout.rewards, seat_terms, seats, rollout.num_turns)
        comparison = dict(group_size=group_size, norm='leave_one_out', scale=scale)
        per_seat = []
        for seat in range(2):
            plays = rows & (rollout.extra[LEARNER] == seat) if LEARNER in rollout.extra else rows
            per_seat.append(adv.compare(returns[:, seat], plays, **comparison))
        per_turn = jnp.take_along_axis(jnp.stack(per_seat, 1), seats, axis=1)
        return build_batch(rollout, scores, mask, adv.to_tokens(per_turn, rollout.turn, mask))


def seat_returns(
    rewards: jax.Array, own: jax.Array, seats: jax.Array, num_turns: jax.Array
) -> jax.Array:
    """Return the returns [B, 2] of both seats of a zero-sum game.

    rewards [B, K]: of seat 0, seat 1 earns minus these; own [B, K]: terms for the seat of a turn
    only, such as penalties; seats int32 [B, K].
    """
    is_turn = jnp.arange(rewards.shape[1])[None] < num_turns[:, None]
    paid = jnp.where(is_turn, rewards, 0.0).sum(1)
    mine = [jnp.where(is_turn & (seats == seat), own, 0.0).sum(1) for seat in range(2)]
    return jnp.stack([paid + mine[0], mine[1] - paid], axis=1)
