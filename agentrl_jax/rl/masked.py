"""Masked reductions. Values off the mask may be inf or nan; they are replaced first."""

import jax
import jax.numpy as jnp


def masked_sum(
    x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None
) -> jax.Array:
    """Sum of x over mask; 0 for an empty mask."""
    return jnp.sum(jnp.where(mask, x, 0.0), axis=axis)


def masked_mean(
    x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None
) -> jax.Array:
    """Mean of x over mask; 0 for an empty mask."""
    return masked_sum(x, mask, axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)


def masked_var(x: jax.Array, mask: jax.Array, axis: int | None = None, ddof: int = 0) -> jax.Array:
    """Variance of x over mask with `ddof` lost degrees of freedom; 0 for at most one value."""
    mean = masked_sum(x, mask, axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)
    centred = jnp.where(mask, x - (mean if axis is None else jnp.expand_dims(mean, axis)), 0.0)
    return jnp.sum(centred**2, axis=axis) / jnp.maximum(jnp.sum(mask, axis=axis) - ddof, 1)


def masked_max(x: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
    """Maximum of x over mask; -inf for an empty mask."""
    return jnp.max(jnp.where(mask, x, -jnp.inf), axis=axis)


def masked_min(x: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
    """Minimum of x over mask; inf for an empty mask."""
    return jnp.min(jnp.where(mask, x, jnp.inf), axis=axis)


def positions_of(attention_mask: jax.Array) -> jax.Array:
    """int32 [B, T]: 0, 1, 2 ... over the real tokens of each row."""
    return jnp.maximum(jnp.cumsum(attention_mask, axis=1) - 1, 0)
