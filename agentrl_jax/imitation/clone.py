"""Behaviour cloning: demonstrations in the tokens of a rollout, then cross-entropy on answers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import masked_sum
from agentrl_jax.rl.score import positions_of
from agentrl_jax.rl.update import accumulate
from agentrl_jax.text import task as text
from agentrl_jax.types import EpisodeStop, Params


@struct.dataclass
class Demonstrations:
    """Episodes to imitate; mask marks the tokens of the answers, end-of-turn tokens included."""

    tokens: jax.Array  # int32 [N, T]
    attention_mask: jax.Array  # bool [N, T]
    mask: jax.Array  # bool [N, T]

    @property
    def action_mask(self) -> jax.Array:
        """bool [N, T]: the name by which score.score knows the mask."""
        return self.mask

    @property
    def logprobs(self) -> jax.Array:
        """float32 [N, T]: zeros, since no policy of ours sampled these tokens."""
        return jnp.zeros(self.tokens.shape, jnp.float32)


def answer_text(names: list[str], think: str, with_think: bool) -> str:
    """What follows the forced prefix: the rest of the thought and the answer."""
    head = f'{think}</think><answer>' if with_think else ''
    return f'{head}{" || ".join(names)}</answer>'


def mixed_plans(rng, oracle_plans, *, oracle: float, per_turn: int, names: int) -> list[list[int]]:
    """Each plan is the oracle's with probability `oracle`, else 1 to per_turn random actions."""
    plans = []
    for plan in oracle_plans:
        if plan and rng.random() < oracle:
            plans.append(list(plan[:per_turn]))
        else:
            plans.append(rng.integers(names, size=rng.integers(1, per_turn + 1)).tolist())
    return plans


def demonstrate(
    task: text.TextTask,
    tokenizer: Any,
    expert: Callable[[Any, int], list[list[int]]],
    *,
    seed: int,
    episodes: int,
    oracle: float,
    max_tokens: int,
    report: Callable[[], None] = lambda: None,
) -> Demonstrations:
    """Plays `episodes` training levels; expert(states, used) plans one list of actions a state.

    The words of a demonstration are the environment's own prompts and answer_text(...), tokenised
    piece by piece as in a rollout. report() is called after each turn of all episodes.
    """
    rng = np.random.default_rng(seed)
    level = rng.integers(task.env.num_levels(task.env_params), size=episodes)
    prefix = np.asarray(task.prefix)
    rows = [list(prefix) for _ in range(episodes)]
    trained = [[False] * len(prefix) for _ in range(episodes)]
    worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.asarray(level, jnp.int32))
    show = jax.jit(jax.vmap(lambda t, w: text.turn_tokens(t, w, True), in_axes=(None, 0)))
    play = jax.jit(jax.vmap(text.play_turn, in_axes=(None, 0, 0, 0, 0)))
    playing = np.ones(episodes, bool)
    keys = jax.random.split(jax.random.key(seed), episodes)
    for _ in range(task.max_turns):
        prompt, count = jax.device_get(show(task, worlds))
        host = jax.device_get(worlds.state)
        plans = mixed_plans(
            rng,
            expert(host, np.asarray(worlds.used)),
            oracle=oracle,
            per_turn=task.max_actions_per_turn,
            names=len(task.env.ACTION_NAMES),
        )
        parts = np.full((episodes, task.max_actions_per_turn), -2, np.int32)
        for i in np.flatnonzero(playing):
            answer = [*answer_tokens(task, tokenizer, plans[i]), int(task.eos_ids[0])]
            new = [*prompt[i, : count[i]].tolist(), *answer]
            if len(rows[i]) + len(new) > max_tokens:
                playing[i] = False
                continue
            rows[i] += new
            trained[i] += [False] * int(count[i]) + [True] * len(answer)
            parts[i, : len(plans[i])] = plans[i]
        worlds, outcome = play(task, keys, worlds, jnp.asarray(parts), jnp.ones(episodes, bool))
        playing &= np.asarray(outcome.stop) == EpisodeStop.NONE
        report()
        if not playing.any():
            break
    return pad_rows(rows, trained, max_tokens, task.pad_id)


def answer_tokens(task: text.TextTask, tokenizer: Any, plan: list[int]) -> list[int]:
    """Tokens of the answer that executes the plan, without the end-of-turn token."""
    names = [task.env.ACTION_NAMES[i] for i in plan]
    return tokenizer.encode(answer_text(names, '', task.with_think))


def pad_rows(rows, trained, max_tokens, pad_id) -> Demonstrations:
    """Token lists and their trained flags as arrays, as wide as the longest (in steps of 8)."""
    width = min(max_tokens, -(-max(map(len, rows)) // 8) * 8)
    tokens = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    attention = np.zeros((len(rows), width), bool)
    for i, (row, train) in enumerate(zip(rows, trained, strict=True)):
        tokens[i, : len(row)], mask[i, : len(row)] = row, train
        attention[i, : len(row)] = True
    return Demonstrations(*map(jnp.asarray, (tokens, attention, mask)))


def clone_loss(
    params: Params,
    batch: Demonstrations,
    *,
    hidden_fn,
    head_fn,
    chunk_size: int,
    count: jax.Array | None = None,
) -> jax.Array:
    """Sum of -log p over the answers' tokens / count; None: their number, which makes it a mean."""
    positions = positions_of(batch.attention_mask)
    hidden = hidden_fn(params, batch.tokens, positions, batch.attention_mask)
    logprobs, _ = losses.token_logprobs(
        hidden, head_fn(params), batch.tokens, chunk_size=chunk_size, with_entropy=False
    )
    count = jnp.maximum(batch.mask.sum(), 1) if count is None else count
    return -(masked_sum(logprobs, batch.mask) / count)


def clone(
    params: Params,
    demonstrations: Demonstrations,
    key: jax.Array,
    *,
    hidden_fn,
    head_fn,
    tx,
    steps: int,
    batch_size: int,
    chunk_size: int,
    report: Callable[[int, float], None],
    microbatch_rows: int | None = None,
    row_sharding: Any = None,
) -> Params:
    """`steps` optimiser steps on random batches; report(step, loss) is called after each.

    microbatch_rows: episodes per forward and backward pass, None = all of a batch at once.
    """
    settings = dict(hidden_fn=hidden_fn, head_fn=head_fn, chunk_size=chunk_size)
    parts = batch_size // (microbatch_rows or batch_size)

    @jax.jit
    def step(params, opt_state, data, key):
        rows = jax.random.randint(key, (batch_size,), 0, data.tokens.shape[0])
        batch = jax.tree.map(lambda x: x[rows], data)
        count = jnp.maximum(batch.mask.sum(), 1)  # of the whole batch, before it is split

        def loss_fn(params, part):
            return clone_loss(params, part, count=count, **settings), {}

        loss, _, gradient = accumulate(
            loss_fn, params, (batch,), parts=parts, sharding=row_sharding
        )
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.jit(tx.init)(params)
    for i in range(steps):
        params, opt_state, loss = step(
            params, opt_state, demonstrations, jax.random.fold_in(key, i)
        )
        report(i, loss)
    return params
