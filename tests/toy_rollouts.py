"""Small rollouts and a toy model for tests of algorithms and updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.vine.forks import CONTINUATIONS, Continuations
from agentrl_jax.types import EpisodeStop, Rollout, Scores

VOCAB, WIDTH = 7, 4


def lay_out(turns, length):
    """Return (action_mask, turn, attention) of one row; turns: (observation, action) counts."""
    action, turn = np.zeros(length, bool), np.full(length, -1, np.int32)
    t = 0
    for k, (observed, acted) in enumerate(turns):
        turn[t : t + observed + acted] = k
        action[t + observed : t + observed + acted] = True
        t += observed + acted
    return action, turn, np.arange(length) < t


def rollout_of(layouts, rewards, *, length, penalties=None, faulty=(), seed=0):
    """Return a Rollout with these turns and rewards [B, K], and random tokens and log-probs."""
    rng = np.random.default_rng(seed)
    rows, turns = np.shape(rewards)
    action, turn, attention = map(
        np.stack, zip(*(lay_out(layout, length) for layout in layouts), strict=True)
    )
    stop = np.full(rows, EpisodeStop.TERMINATED, np.int32)
    stop[list(faulty)] = EpisodeStop.ENV_ERROR
    empty = Rollout.empty(
        np.zeros(rows, np.int32),
        np.zeros(0, np.int32),
        pad_id=0,
        max_tokens=length,
        max_turns=turns,
        max_actions=1,
        xp=np,
    )
    rollout = empty.replace(
        tokens=rng.integers(0, VOCAB, (rows, length)).astype(np.int32),
        logprobs=np.where(action, -rng.random((rows, length)), 0).astype(np.float32),
        attention_mask=attention,
        action_mask=action,
        turn=turn,
        anchor=np.tile(np.arange(turns, dtype=np.uint32), (rows, 1)),
        rewards=np.asarray(rewards, np.float32),
        penalties=empty.penalties if penalties is None else np.asarray(penalties, np.float32),
        valid=np.ones((rows, turns), bool),
        num_turns=np.array([len(layout) for layout in layouts], np.int32),
        episode_stop=stop,
    )
    return jax.tree.map(jnp.asarray, rollout)


def forked(rollout, turns, *, rewards=None, faulty=(), seed=0):
    """Return the rollout with a continuation from each reached turn.

    Each repeats the tokens of its episode and earns rewards [B, F, K], by default random.
    faulty: (row, number) of continuations that failed.
    """
    turns = np.asarray(turns, np.int32)
    count = len(turns)
    turn = np.where(turns[None] < np.asarray(rollout.num_turns)[:, None], turns[None], 0)
    reached = turn > 0
    # NumPy, since jnp would compile a program for each of these lines.
    out = jax.tree.map(lambda x: np.repeat(np.asarray(x)[:, None], count, axis=1), rollout)
    continued = out.turn >= turn[:, :, None]
    k = np.arange(rollout.rewards.shape[1])[None, None]
    rewarded = (k >= turn[:, :, None]) & (k < out.num_turns[:, :, None]) & reached[:, :, None]
    if rewards is None:
        rewards = jax.random.normal(jax.random.key(seed), out.rewards.shape)
    stop = out.episode_stop
    for row, number in faulty:
        stop[row, number] = EpisodeStop.ENV_ERROR
    action_mask = out.action_mask & continued & reached[:, :, None]
    out = out.replace(
        action_mask=action_mask,
        logprobs=np.where(action_mask, out.logprobs, np.float32(0)),
        rewards=np.where(rewarded, np.asarray(rewards, np.float32), np.float32(0)),
        penalties=np.where(rewarded, out.penalties, np.float32(0)),
        num_turns=np.where(reached, out.num_turns, np.int32(0)),
        episode_stop=stop,
    )
    continuations = Continuations(turn=turn, rollout=out)
    return rollout.replace(extra={CONTINUATIONS: jax.tree.map(jnp.asarray, continuations)})


def random_rollout(seed, *, rows=8, length=14, turns=2, faulty=()):
    """Return random turns (1 to 3 observation and 1 to 3 action tokens each) and rewards."""
    rng = np.random.default_rng(seed)
    layouts = [rng.integers(1, 4, (rng.integers(1, turns + 1), 2)).tolist() for _ in range(rows)]
    rewards = rng.normal(size=(rows, turns))
    for row, layout in zip(rewards, layouts, strict=True):
        row[len(layout) :] = 0
    return rollout_of(layouts, rewards, length=length, faulty=faulty, seed=seed)


def scores_of(rollout, seed=0):
    rng = np.random.default_rng(seed)
    mask, logprobs = np.asarray(rollout.action_mask), np.asarray(rollout.logprobs)
    noise, values = (rng.normal(size=logprobs.shape).astype(np.float32) for _ in range(2))
    return Scores(
        old_logprobs=rollout.logprobs,
        ref_logprobs=jnp.asarray(np.where(mask, logprobs + noise * np.float32(0.3), 0)),
        values=jnp.asarray(np.where(mask, values, 0)),
    )


def zero_scores(rollout):
    return Scores(*[jnp.zeros_like(rollout.logprobs)] * 3)


@functools.partial(jax.jit, static_argnums=(0, 2))
def batch_of(how, rollout, group_size, scores=None, **kwargs):
    """Return the batch of an algorithm; without scores these are zero."""
    scores = zero_scores(rollout) if scores is None else scores
    return how.make_batch(rollout, scores, group_size=group_size, **kwargs)


def toy_params(seed):
    """Return a causal model: mean of embeddings so far, a hidden layer, a head, a value head."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = dict(embed=(VOCAB, WIDTH), mix=(WIDTH, WIDTH), head=(WIDTH, VOCAB), value=(WIDTH, 1))
    return {
        name: 0.7 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def toy_hidden(params, tokens, positions, attention_mask):
    embedded = jnp.where(attention_mask[:, :, None], params['embed'][tokens], 0.0)
    mean = jnp.cumsum(embedded, axis=1) / (positions[:, :, None] + 1.0)
    return jnp.tanh(mean @ params['mix'])


def toy_head(params):
    return params['head']


def toy_value_head(params, hidden):
    return (hidden @ params['value'])[:, :, 0]


def toy_values(params, critic_params, tokens, positions, attention_mask):
    model = params if critic_params is None else critic_params
    return toy_value_head(model, toy_hidden(model, tokens, positions, attention_mask))
