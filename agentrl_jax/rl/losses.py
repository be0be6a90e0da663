"""Token-level losses. The one-position shift and the loss weights are each defined once, here.

Every per-token function selects before it computes, so values off the mask may be inf or nan. A
loss is sum(weights * per_token) with weights from token_weights. Their denominators are counted
over the full optimiser batch, so any split into micro-batches or devices adds up to the same value.
Entropy, KL and the critic's loss use the same weights as the surrogate. The rows of an episode (its
windows, its continuations) are one sequence: an episode has the same weight with or without splits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.text import grammar as grammars

AGGREGATIONS = ('token_mean', 'seq_mean_token_mean', 'seq_mean_token_sum', 'token_sum_norm')
KL_ESTIMATORS = ('k1', 'k2', 'k3', 'k1+', 'k3+')
MAX_K3 = 10.0  # one token at exp(20) would dominate the clipped gradient; same value as verl 0.9.1
MAX_LOG_RATIO = 20.0  # products of larger exponentials would overflow; same value as verl 0.6.1


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """How log-probabilities are computed from hidden states."""

    temperature: float = 1.0
    chunk_size: int | None = None  # maximum number of tokens with live logits; None: all
    row_tokens: int | None = None  # maximum number of masked tokens per row; None: any number
    bits: grammars.Bits | None = None  # tokens of the bits in `allowed`


@jax.custom_vjp
def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """hidden [B, C, D] @ head [D, V] -> float32 [B, C, V], accumulated in float32."""
    return jnp.einsum('bcd,dv->bcv', hidden, head, preferred_element_type=jnp.float32)


def _logits_forward(hidden, head):
    return _logits(hidden, head), (hidden, head)


def _logits_backward(saved, grad):
    # JAX would multiply the float32 cotangent by bf16 operands, so both backward products of the
    # largest matrix would run in float32. Rounding the cotangent keeps them in the compute dtype.
    hidden, head = saved
    grad = grad.astype(hidden.dtype)
    to_hidden = jnp.einsum('bcv,dv->bcd', grad, head, preferred_element_type=jnp.float32)
    to_head = jnp.einsum('bcd,bcv->dv', hidden, grad, preferred_element_type=jnp.float32)
    return to_hidden.astype(hidden.dtype), to_head.astype(head.dtype)


_logits.defvjp(_logits_forward, _logits_backward)


def _logprobs_and_entropy(targets, logits, *, with_entropy):
    """Return log-probabilities of targets and entropies (or zeros), [B, C]; logits [B, C, V]."""
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    exp = jnp.exp(logits - top)
    normaliser = exp.sum(-1)
    logsumexp = jnp.log(normaliser) + top[..., 0]
    # A comparison and a sum fuse and work on a vocabulary shard, unlike take_along_axis.
    chosen = jnp.arange(logits.shape[-1])[None, None] == targets[..., None]
    logprobs = jnp.where(chosen, logits, 0.0).sum(-1) - logsumexp
    entropy = jnp.zeros_like(logprobs)
    if with_entropy:
        entropy = logsumexp - (exp * logits).sum(-1) / normaliser
    return logprobs, entropy


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    settings: HeadSettings = HeadSettings(),
    *,
    with_entropy: bool = False,
    **masks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return log p(tokens[b, t] | tokens[b, :t]) and the entropy at t, float32 [B, T] each.

    hidden [B, T, D], head [D, V]; masks: mask and allowed of of_logits. Without with_entropy the
    entropies are zeros.
    """
    fn = functools.partial(_logprobs_and_entropy, with_entropy=with_entropy)
    return of_logits(fn, [(hidden, head)], tokens, settings, **masks)


def of_logits(
    fn: Callable,
    models: Sequence[tuple[jax.Array, jax.Array]],
    tokens: jax.Array,
    settings: HeadSettings,
    *,
    mask: jax.Array | None = None,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Return fn(tokens [B, C], logits [B, C, V] of each model) as [B, T], computed in chunks.

    models: (hidden [B, T, D], head [D, V]) of each model. The only one-position shift is here:
    position t reads hidden[b, t - 1], and t = 0 gets 0. About chunk_size tokens at most have live
    logits at a time, forward and backward: each chunk is rematerialised. Chunks are cut along T, so
    rows keep their sharding.

    With mask bool [B, T] and row_tokens, the head is applied to masked tokens only; all others get
    0. Tokens beyond row_tokens get nan, not a silent 0.

    With allowed uint32 [B, T, W], probabilities are normalised over the tokens with a set bit. If
    only few tokens have a bit, only their logits are computed.
    """
    targets, index, legal, row_tokens = tokens, None, (), settings.row_tokens
    states, heads = ([model[i] for model in models] for i in (0, 1))
    if allowed is not None:
        legal, bits = (allowed,), settings.bits
        if bits.ids:
            heads = [head[:, np.array(bits.ids)] for head in heads]
            index = np.arange(len(bits.ids))
            targets = grammars.column_of(np.array(bits.ids), tokens)
        else:
            index = bits.index(heads[0].shape[1])
    heads = [head.astype(state.dtype) for state, head in zip(states, heads, strict=True)]

    def of_chunk(*rows):
        hidden, (targets, *words) = rows[: len(heads)], rows[len(heads) :]
        pairs = zip(hidden, heads, strict=True)
        logits = [_logits(x, head) * (1.0 / settings.temperature) for x, head in pairs]
        for word in words:
            may = grammars.unpack(word, word.shape[-1] * grammars.WORD)[..., index]
            logits = [jnp.where(may, x, grammars.NEVER) for x in logits]
        return fn(targets, *logits)

    rows, length = tokens.shape
    if row_tokens is None or row_tokens >= length:
        following = map(_following, (targets, *legal))
        out = _by_chunks(of_chunk, settings.chunk_size, *states, *following)
        return tuple(map(token_values, out))
    mask = mask.at[:, 0].set(False)
    index_of = jnp.sort(jnp.where(mask, jnp.arange(length)[None], length), axis=1)[:, :row_tokens]
    before = jnp.clip(index_of - 1, 0, length - 2)
    states = [jnp.take_along_axis(x, before[:, :, None], axis=1) for x in states]
    legal = [jnp.take_along_axis(x, before[:, :, None] + 1, axis=1) for x in legal]
    targets = jnp.take_along_axis(targets, before + 1, axis=1)
    out = _by_chunks(of_chunk, settings.chunk_size, *states, targets, *legal)
    empty = jnp.where(mask & (jnp.cumsum(mask, axis=1) > row_tokens), jnp.nan, 0.0)
    row = jnp.arange(rows)[:, None]
    return tuple(empty.at[row, index_of].set(x, mode='drop') for x in out)


def _following(x: jax.Array) -> jax.Array:
    """Shift x [B, T, ...] left by one position; 0 at the last."""
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0))[: x.ndim])


def _by_chunks(fn, chunk_size, *rows):
    """Return fn over chunks of rows [B, N, ...] as [B, N], at most chunk_size tokens each."""
    count, length = rows[0].shape[:2]
    chunks = 1 if chunk_size is None else -(-count * length // chunk_size)
    width = -(-length // chunks)
    chunks = -(-length // width)
    rest = (0, chunks * width - length)
    parts = tuple(jnp.pad(x, ((0, 0), rest, (0, 0))[: x.ndim]) for x in rows)
    if chunks == 1:
        return fn(*parts)
    by_chunk = tuple(x.reshape(count, chunks, width, *x.shape[2:]).swapaxes(0, 1) for x in parts)
    stacked = jax.lax.map(jax.checkpoint(lambda xs: fn(*xs)), by_chunk)
    return tuple(x.swapaxes(0, 1).reshape(count, -1)[:, :length] for x in stacked)


def token_values(raw: jax.Array) -> jax.Array:
    """Shift raw [B, T] right by one position; 0 at t = 0.

    For a critic, position t then holds the value of the state before tokens[b, t] is chosen.
    """
    return jnp.pad(raw[:, :-1], ((0, 0), (1, 0)))


def log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """log pi - log pi_old, clamped to +-20; 0 off the mask. All [B, T]."""
    difference = jnp.where(mask, logprobs - old_logprobs, 0.0)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    log_ratios: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> jax.Array:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); at most -A dual_clip where A < 0.

    rho = exp(log_ratios). All [B, T]; 0 off the mask. PPO (arXiv:1707.06347 eq. 7), clip-higher
    (arXiv:2503.14476), dual clip (arXiv:1912.09729 eq. 5).
    """
    ratio = jnp.exp(log_ratios)
    advantages = jnp.where(mask, advantages, 0.0)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)
    return loss


def clipped_sides(
    log_ratios: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> dict[str, jax.Array]:
    """Masks of the tokens at which clipped_surrogate is flat, by metric name; bool [B, T]."""
    ratio, up, down = jnp.exp(log_ratios), advantages > 0, advantages < 0
    sides = {
        'policy/clip_frac_high': up & (ratio > 1.0 + clip_high),
        'policy/clip_frac_low': down & (ratio < 1.0 - clip_low),
    }
    if dual_clip is not None:
        sides['policy/clip_frac_dual'] = down & (ratio > dual_clip)
    return sides


def clipped_value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    *,
    clip_value: float | None = 0.5,
) -> jax.Array:
    """0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2). All [B, T]; 0 off the mask."""
    error = jnp.where(mask, values - returns, 0.0)
    if clip_value is None:
        return 0.5 * error**2
    old_values = jnp.where(mask, old_values, 0.0)
    near = jnp.clip(jnp.where(mask, values, 0.0), old_values - clip_value, old_values + clip_value)
    return 0.5 * jnp.maximum(error**2, (near - jnp.where(mask, returns, 0.0)) ** 2)


def kl_penalty(
    logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, *, estimator: str
) -> jax.Array:
    """Per-token estimate of KL(pi || ref) from samples of pi; [B, T], 0 off the mask.

    With d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = min(exp(-d) + d - 1, 10) (Schulman's note
    of 2020; tokens beyond the bound have no gradient). As a *loss*, k1 has an expected gradient of
    zero, k3 has the gradient of KL(ref || pi), and only k2 has the gradient of KL(pi || ref). 'k1+'
    and 'k3+' have the value of k1 and k3 with the gradient of k2.
    """
    d = log_ratio(logprobs, ref_logprobs, mask)
    k3 = jnp.minimum(jnp.exp(-d) + d - 1.0, MAX_K3)
    values = {'k1': d, 'k2': 0.5 * d**2, 'k3': k3}
    if not estimator.endswith('+'):
        return values[estimator]
    value = jax.lax.stop_gradient(values[estimator[:-1]] - values['k2'])
    return values['k2'] + value


def token_weights(
    mask: jax.Array,
    aggregation: str,
    *,
    norm_length: int | None = None,
    episode: jax.Array | None = None,
    episodes: int | None = None,
) -> jax.Array:
    """Return the weights of loss = sum(weights * per_token), float32 [B, T]; 0 off the mask.

    With n = trained tokens, S = sequences with trained tokens, L_s = trained tokens of sequence s:
      token_mean 1 / n | seq_mean_token_mean 1 / (S L_s) | seq_mean_token_sum 1 / S
      token_sum_norm 1 / (S norm_length), norm_length: T if None (Dr.GRPO, arXiv:2503.20783).

    episode int32 [B] in [0, episodes): rows with the same number are one sequence; None: each row
    is one. A token then has the weight that it would have with its full episode in one row, for any
    number of windows. (Weighting each row's mean by 1 / rows of its episode would be the same only
    for rows of equal length.) token_mean ignores episode: windows overlap in their prompts, but
    each sampled token is trained in one window only.
    Call this on the full optimiser batch, then split: the denominators are global.
    """
    lengths = each = mask.sum(1, keepdims=True)
    if episode is not None and aggregation != 'token_mean':
        each = jnp.zeros((episodes, 1), lengths.dtype).at[episode].add(lengths)
        lengths = each[episode]
    sequences = jnp.maximum((each > 0).sum(), 1)
    if aggregation == 'token_mean':
        denominator = jnp.maximum(each.sum(), 1)
    elif aggregation == 'seq_mean_token_mean':
        denominator = sequences * jnp.maximum(lengths, 1)
    elif aggregation == 'seq_mean_token_sum':
        denominator = sequences
    elif aggregation == 'token_sum_norm':
        denominator = sequences * (mask.shape[1] if norm_length is None else norm_length)
    else:
        raise ValueError(f'aggregation={aggregation!r} is not one of {", ".join(AGGREGATIONS)}')
    return mask / denominator.astype(jnp.float32)


def weighted_sum(weights: jax.Array, per_token: jax.Array) -> jax.Array:
    """sum(weights * per_token) over tokens with a positive weight; [B, T] -> []."""
    return jnp.sum(jnp.where(weights > 0, weights * per_token, 0.0))
