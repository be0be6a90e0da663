"""Echo-trap monitors of the sampled text: repetition and loss of variety."""

import jax
import jax.numpy as jnp


def repeated_ngrams(
    tokens: jax.Array, action_mask: jax.Array, turn: jax.Array, *, n: int = 4
) -> tuple[jax.Array, jax.Array]:
    """Return (1 - distinct / all, number) of the n-grams of sampled tokens in each row.

    tokens, action_mask, turn: [B, T]; returns (float32 [B], int32 [B]); 0 for rows without any.
    An n-gram is within one answer and never contains observations. Exact, not hashed.
    """
    width = tokens.shape[1] - n + 1
    if width < 1:
        nothing = jnp.zeros(tokens.shape[0])
        return nothing, nothing.astype(jnp.int32)
    places = [slice(i, i + width) for i in range(n)]
    inside = jnp.stack([action_mask[:, s] for s in places]).all(0)
    inside &= jnp.stack([turn[:, s] == turn[:, :width] for s in places]).all(0)
    # Sorting puts equal n-grams next to each other, and -1, which is not a token, first.
    keys = [jnp.where(inside, tokens[:, s], -1) for s in places]
    in_order = jnp.stack(jax.lax.sort(keys, dimension=1, num_keys=n))
    differs = jnp.any(in_order[:, :, 1:] != in_order[:, :, :-1], axis=0)
    first = jnp.pad(differs, ((0, 0), (1, 0)), constant_values=True)
    distinct = jnp.sum(first & (in_order[0] >= 0), axis=1)
    count = jnp.sum(inside, axis=1)
    return 1.0 - (distinct / jnp.maximum(count, 1) + (count == 0)), count.astype(jnp.int32)


def distinct_action_rate(
    actions: jax.Array, healthy: jax.Array, *, group_size: int
) -> tuple[jax.Array, jax.Array]:
    """Return (distinct action sequences / healthy members, healthy members) of each group.

    actions: int32 [B, K, A] (-1 = none); healthy: bool [B]; returns (float32 [P], int32 [P]).
    """
    plays = actions.reshape(-1, group_size, actions.shape[1] * actions.shape[2])
    healthy = healthy.reshape(-1, group_size)
    same = jnp.all(plays[:, :, None] == plays[:, None, :], axis=-1) & healthy[:, None, :]
    earlier = jnp.tril(jnp.ones((group_size, group_size), bool), -1)
    repeat = jnp.any(same & earlier[None], axis=-1)
    members = healthy.sum(1)
    distinct = jnp.sum(healthy & ~repeat, axis=1)
    return distinct / jnp.maximum(members, 1), members
