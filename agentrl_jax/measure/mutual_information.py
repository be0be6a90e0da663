"""Mutual information of prompts and reasoning: RAGEN-2's cross-scoring (arXiv:2604.06268).

X is the text before an answer, with the forced <think>; Z is the sampled text up to </think> (or
the full answer). A sample of answers z_i is scored under each of N prompts x_j:
  l[i, j] = log p(z_i | x_j)              matched_i = l[i, own_i]
  marginal_i = logsumexp_j l[i, j] - log N
  I(X; Z) = mean(matched - marginal) <= log N,   H(Z | X) = -mean matched,   H(Z) = -mean marginal
under the uniform distribution over the N prompts. Reasoning that fits every prompt has I = 0, even
if it is varied: template collapse, which entropy does not detect.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.measure.collapse import STD_EPS, quadrant
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import masked_mean, masked_var, positions_of
from agentrl_jax.text import answer as answers
from agentrl_jax.types import Params, Rollout

TIE = 1e-4  # nats: log-probabilities closer than this differ by float32 rounding only
PAIRS = 64  # answers scored under every prompt
TOP = (1, 2, 4, 8)  # retrieval accuracy among the k best prompts


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the scoring. Defaults and bounds are in collapse.Alarms."""

    group_size: int
    text: str  # 'reasoning' or 'answer'
    microbatch_rows: int
    head: losses.HeadSettings  # row_tokens: maximum number of tokens of an answer
    pairs: int = PAIRS  # answers scored under every prompt


@struct.dataclass
class Pairs:
    """M answers and N prompts, as positions in a rollout."""

    row: jax.Array  # int32 [M]
    start: jax.Array  # int32 [M]  first token of the answer = length of its prompt
    length: jax.Array  # int32 [M]  scored tokens of the answer
    own: jax.Array  # int32 [M]  column of the answer's prompt
    used: jax.Array  # bool [M]   the episode is healthy and has tokens to score
    prompt_row: jax.Array  # int32 [N]
    prompt_length: jax.Array  # int32 [N]
    prompt_used: jax.Array  # bool [N]


def choose_pairs(
    key: jax.Array,
    rollout: Rollout,
    table: answers.AnswerTable,
    eos_ids: jax.Array,
    settings: Settings,
) -> Pairs:
    """Draw up to `pairs` answers: the same number of first turns from each group.

    The columns are the prompts of the groups; with more groups than pairs, of random groups.
    """
    group_size, pairs = settings.group_size, settings.pairs
    _, k_group, k_row = jax.random.split(key, 3)
    rows = rollout.tokens.shape[0]
    start, length = _first_answers(rollout, table, eos_ids, settings)
    used = rollout.healthy & (length > 0)
    order = jax.random.uniform(k_row, (rows,)) + ~used  # unusable rows last
    groups = rows // group_size
    columns = min(groups, pairs)
    members = min(pairs // columns, group_size)
    group = jnp.sort(jax.random.permutation(k_group, groups)[:columns])
    member = jnp.argsort(order.reshape(groups, group_size), axis=1)[:, :members]
    row = (group[:, None] * group_size + member[group]).astype(jnp.int32)
    columns_of = jnp.repeat(jnp.arange(columns, dtype=jnp.int32), members)
    row, prompt_row = row.reshape(-1), row[:, 0]
    return Pairs(
        row=row,
        start=start[row],
        length=length[row],
        own=columns_of,
        used=used[row],
        prompt_row=prompt_row,
        prompt_length=start[prompt_row],
        prompt_used=used[prompt_row],
    )


def _first_answers(rollout, table, eos_ids, settings):
    """Return (first token, number of scored tokens) of each row's first turn, int32 [B] each."""
    sampled = rollout.action_mask & (rollout.turn == 0)
    start = jnp.argmax(sampled, axis=1).astype(jnp.int32)
    place = jnp.arange(settings.head.row_tokens)[None]
    live = place < sampled.sum(1)[:, None]
    if settings.text == 'answer':
        return start, live.sum(1).astype(jnp.int32)
    at = jnp.minimum(start[:, None] + place, rollout.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(rollout.tokens, at, axis=1)
    live &= ~jnp.isin(tokens, eos_ids)
    return start, answers.reasoning_length(table, tokens, live)


def cross_logprobs(
    params: Params, rollout: Rollout, pairs: Pairs, width: int, settings: Settings, fns: ModelFns
) -> jax.Array:
    """Return l[i, j] = sum of log p over the tokens of answer i after prompt j, float32 [M, N].

    Scores M N rows of `width` tokens, microbatch_rows at a time.
    """
    microbatch_rows = settings.microbatch_rows
    count, prompts = pairs.row.shape[0], pairs.prompt_row.shape[0]
    slices = -(-count * prompts // microbatch_rows)
    place = jnp.arange(width)[None]

    def score(index):
        i, j = index // prompts, index % prompts
        prompt, answer = pairs.prompt_length[j][:, None], pairs.length[i][:, None]
        inside = place < prompt
        row = jnp.where(inside, pairs.prompt_row[j][:, None], pairs.row[i][:, None])
        column = jnp.where(inside, place, pairs.start[i][:, None] + place - prompt)
        attention = place < prompt + answer
        tokens = jnp.where(attention, rollout.tokens.at[row, column].get(mode='clip'), 0)
        mask = attention & ~inside
        hidden = fns.hidden(params, tokens, positions_of(attention), attention)
        allowed = rollout.allowed
        if allowed is not None:
            allowed = allowed.at[row, column].get(mode='clip')
        logprobs, _ = losses.token_logprobs(
            hidden, fns.head(params), tokens, settings.head, mask=mask, allowed=allowed
        )
        return jnp.sum(jnp.where(mask, logprobs, 0.0), axis=1)

    index = jnp.minimum(jnp.arange(slices * microbatch_rows), count * prompts - 1)
    sums = jax.lax.map(score, index.reshape(slices, microbatch_rows))
    return sums.reshape(-1)[: count * prompts].reshape(count, prompts)


def equal_prompts(rollout: Rollout, pairs: Pairs, width: int) -> jax.Array:
    """Return which prompts have the same tokens; bool [N, N]."""
    place = jnp.arange(width)[None]
    tokens = rollout.tokens[pairs.prompt_row][:, :width]
    tokens = jnp.where(place < pairs.prompt_length[:, None], tokens, -1)
    return jnp.all(tokens[:, None] == tokens[None], axis=-1)


def reduce_matrix(sums: jax.Array, pairs: Pairs, same: jax.Array) -> dict[str, jax.Array]:
    """Return the metrics of a matrix l [M, N]; same bool [N, N]: equal prompts.

    mi is of full answers (nats). mi_token, the entropies and the z-score use l / length, as in
    RAGEN-2. With fewer than two different prompts, or without answers, all are nan.
    """
    column, used, prompt_used = pairs.own, pairs.used, pairs.prompt_used
    per_token = sums / jnp.maximum(pairs.length, 1)[:, None]
    prompts = prompt_used.sum()
    matched, marginal = _matched_and_marginal(sums, column, prompt_used)
    matched_token, marginal_token = _matched_and_marginal(per_token, column, prompt_used)
    mi = masked_mean(matched - marginal, used)
    mi_token = masked_mean(matched_token - marginal_token, used)
    copies = (same & prompt_used[None]).sum(1)  # columns with the same prompt
    max_mi = masked_mean(jnp.log(prompts / jnp.maximum(copies[column], 1)), used)
    share = mi / jnp.where(max_mi > 0, max_mi, 1.0)
    std = jnp.sqrt(masked_var(marginal_token, used))
    metrics = {
        'collapse/mi': mi,
        'collapse/mi_share': share,
        'collapse/mi_token': mi_token,
        'collapse/mi_z': mi_token / (std + STD_EPS),
        'collapse/marginal_std': std,
        'collapse/conditional_entropy': -masked_mean(matched_token, used),
        'collapse/marginal_entropy': -masked_mean(marginal_token, used),
        'collapse/quadrant': quadrant(share, -masked_mean(matched_token, used)),
        **_retrieval(sums, column, used, prompt_used, same),
    }
    different = jnp.any(~same & prompt_used[None] & prompt_used[:, None])
    is_defined = different & jnp.any(used)
    return {
        name: jnp.where(is_defined, x, jnp.nan).astype(jnp.float32) for name, x in metrics.items()
    }


def _matched_and_marginal(matrix, own, prompt_used):
    matched = jnp.take_along_axis(matrix, own[:, None], axis=1)[:, 0]
    scores = jnp.where(prompt_used[None], matrix, -jnp.inf)
    return matched, jax.nn.logsumexp(scores, axis=1) - jnp.log(jnp.maximum(prompt_used.sum(), 1))


def _retrieval(sums, own, used, prompt_used, same):
    """Share of answers with their prompt (or an equal one) among the k best; random ties."""
    mine = same[own] & prompt_used[None]  # [M, N]
    best = jnp.max(jnp.where(mine, sums, -jnp.inf), axis=1, keepdims=True)
    better = jnp.sum(prompt_used[None] & (sums > best + TIE), axis=1)
    tied = jnp.sum(prompt_used[None] & (jnp.abs(sums - best) <= TIE), axis=1)
    equal = jnp.sum(mine & (jnp.abs(sums - best) <= TIE), axis=1)
    out = {}
    for k in TOP:
        name = 'collapse/retrieval_accuracy' + (f'_{k}' if k > 1 else '')
        out[name] = masked_mean(_drawn(tied, equal, k - better, k), used)
    chance = masked_mean(_drawn(prompt_used.sum(), mine.sum(1), jnp.int32(1), 1), used)
    out['collapse/retrieval_chance'] = chance
    out['collapse/retrieval_above_chance'] = out['collapse/retrieval_accuracy'] - chance
    return out


def _drawn(total, good, draws, most):
    """Return the probability that `draws` (at most `most`) of `total` items include a good one."""
    miss = jnp.float32(1.0)
    for already in range(most):
        left = jnp.maximum(total - already, 1)
        miss = jnp.where(already < draws, miss * jnp.maximum(left - good, 0) / left, miss)
    return 1.0 - miss


def information(
    params: Params,
    task: Any,
    rollout: Rollout,
    key: jax.Array,
    settings: Settings,
    *,
    fns: ModelFns,
    layout: jax.sharding.Sharding | None = None,
) -> dict[str, jax.Array]:
    """Return the metrics of a rollout under its policy.

    layout: replicates the rollout on every device, because the pairs use all of its rows.
    """
    if layout is not None:
        rollout = jax.lax.with_sharding_constraint(rollout, layout)
    pairs = choose_pairs(key, rollout, task.answer, task.eos_ids, settings)
    width = rollout.tokens.shape[1]
    # First prompts are far shorter than episodes
    width = min(width, task.prefix.shape[0] + task.width + settings.head.row_tokens)
    sums = cross_logprobs(params, rollout, pairs, width, settings, fns)
    return reduce_matrix(sums, pairs, equal_prompts(rollout, pairs, width))
