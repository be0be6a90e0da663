"""Turn advantages from continuations."""

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import recursions, turn_credit


def continued(
    turn: jax.Array, returns: jax.Array, usable: jax.Array, *, turns: int
) -> tuple[jax.Array, jax.Array]:
    """Return (sum of returns, number) of the continuations from each turn; [B, turns].

    turn, returns, usable [B, F]: first turn, return from there on, whether it counts.
    """
    at = (turn[:, :, None] == jnp.arange(turns)[None, None]) & usable[:, :, None]
    return jnp.where(at, returns[:, :, None], 0.0).sum(1), at.sum(1)


def vine_advantages(
    rewards: jax.Array,
    num_turns: jax.Array,
    healthy: jax.Array,
    turn: jax.Array,
    returns: jax.Array,
    usable: jax.Array,
    *,
    group_size: int,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compare turn k with alternatives that were played from the same state.

    Returns (advantages of the trunk's turns [B, K], of each continuation's first turn [B, F],
    continuations of each turn int32 [B, K]). With M continuations from the start of turn k:
      target of the trunk        r_k + mean return from the start of turn k + 1, over its
                                 continuations and the trunk
      target of a continuation   its return from turn k on
      advantage                  target minus the mean target of the M others; for the trunk these
                                 are the M continuations, so the baseline excludes its return
    A turn without continuations, such as the first, is compared with the other group members, which
    count as 0 after they stop (leave_one_out_to_go). scales [B, K], [B, F]: magnitudes of the terms
    of rewards and returns; None: |rewards| and |returns|.
    """
    turns = rewards.shape[1]
    reached = turn_credit.reached_turns(num_turns, healthy, turns)
    usable = usable & healthy[:, None]
    scales = (jnp.abs(rewards), jnp.abs(returns)) if scales is None else scales

    def sums(r, earned):
        r = jnp.where(reached, r, 0.0)
        total, count = continued(turn, earned, usable, turns=turns)
        start = (total + recursions.linear_recursion(r, jnp.ones_like(r))) / (count + 1)
        return r + jnp.pad(start[:, 1:], ((0, 0), (0, 1))), total, count

    target, total, count = sums(rewards, returns)
    target_scale, total_scale, _ = sums(*scales)
    members = jnp.broadcast_to(healthy[:, None], reached.shape)
    alone = adv.leave_one_out(target, members, group_size=group_size, scale=target_scale)
    several = jnp.maximum(count, 1)
    trunk = adv.drop_rounding(target - total / several, target_scale + total_scale / several)
    trunk = jnp.where(count > 0, trunk, alone)

    def there(x):
        return jnp.take_along_axis(x, turn, axis=1)

    others = (there(total) - returns + there(target)) / there(several)
    forked = adv.drop_rounding(returns - others, there(total_scale + target_scale))
    forked = jnp.where(usable & (turn > 0), forked, 0.0)
    return jnp.where(reached, trunk, 0.0), forked, count
