"""What RAGEN trains beside the sampled tokens, and corrections for a sampler that differs."""

import functools

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import test_filter_configs as tiny_steps
import tiny_agents as tiny

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import learn
from agentrl_jax.rl.learning import Learning, Sampler
from agentrl_jax.rollout import episodes
from agentrl_jax.run import build
from agentrl_jax.run import parts as assemble
from agentrl_jax.run.config import read as read_config

START = 9
# <s> sys \n <s> usr obs \n <s> asst think ACT END \n <s> usr obs \n <s> asst think ACT pad
TOKENS = [9, 1, 0, 9, 2, 5, 0, 9, 3, 4, 6, 8, 0, 9, 2, 5, 0, 9, 3, 4, 9, 7]
SAMPLED = [10, 11, 20]  # the policy once samples <s> itself: it opens no message
LENGTH = 21


def conversation():
    """(tokens, attention, sampled) of one row; its last token is padding."""
    place = np.arange(len(TOKENS))
    return np.array([TOKENS]), place[None] < LENGTH, np.isin(place, SAMPLED)[None]


def message_mask(tokens, attention_mask, sampled, *, start_id, answers_only):
    """Tokens that RAGEN (arXiv:2504.20073) trains, whose predecessor is in a trained message.

    Message m begins at the m-th <|im_start|> that the policy did not sample (1: system, 2: user).
    All messages but the system's train (branch v0423), or those that hold a sampled token.
    """
    message = np.cumsum((tokens == start_id) & attention_mask & ~sampled, axis=1)
    before = np.pad(message[:, :-1], ((0, 0), (1, 0)))
    trains = (before > 1) & attention_mask
    if not answers_only:
        return trains
    answers = [
        np.isin(row, own[mask]) for row, own, mask in zip(before, message, sampled, strict=True)
    ]
    return trains & np.array(answers)


def test_ragen_s_masks_by_hand():
    mask = functools.partial(message_mask, *conversation(), start_id=START)
    # Behind the user's <s> at 3: its predecessor lies in the system message, so it does not train.
    everything = list(range(4, 21))
    assert np.flatnonzero(mask(answers_only=False)[0]).tolist() == everything
    # asst think ACT END \n and the next <s>; then asst think ACT
    answers = [8, 9, 10, 11, 12, 13, 18, 19, 20]
    assert np.flatnonzero(mask(answers_only=True)[0]).tolist() == answers
    leaked = sorted(set(answers) - set(SAMPLED))
    assert [TOKENS[t] for t in leaked] == [3, 4, 0, 9, 3, 4]


# ---- a sampler that is not the trainer -----------------------------------------------------------


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'rollout.sampler_dtype': 'int8'}, 'rollout.sampler_dtype'),
        ({'loss.sampler_correction': 'clip'}, 'loss.sampler_correction'),
        ({'loss.sampler_high': 3.0}, 'loss.sampler_high'),
        ({'loss.sampler_correction': 'tis', 'loss.sampler_high': 0.5}, 'loss.sampler_high'),
        ({'loss.sampler_correction': 'icepop', 'loss.sampler_low': 1.5}, 'loss.sampler_low'),
    ],
)
def test_switches_that_exclude_something_say_so(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(micro_runs.config('frozen_lake', **changes))


# ---- a sampler that is not the trainer -----------------------------------------------------------


def test_corrections_by_hand():
    # ratios trainer / sampler 1, 3, .25 on three trained tokens, advantages 1
    out = tiny_steps.toy.rollout_of([[(1, 3)]], [[1.0]], length=4)
    old = jnp.log(jnp.array([[1.0, 0.5, 0.75, 0.125]]))
    sampled = old - jnp.log(jnp.array([[1.0, 1.0, 3.0, 0.25]]))
    scores = tiny_steps.toy.scores_of(out).replace(old_logprobs=old)
    batch = GRPO().make_batch(out, scores, group_size=1)

    def correct(*fields):
        how = Learning(algorithm=GRPO(), sampler=Sampler(*fields))
        return learn.correct(batch, sampled, how)

    tis, measured = correct('tis')  # at most 2
    np.testing.assert_allclose(tis.advantages, [[0, 1, 2, 0.25]], rtol=1e-6)
    assert measured['sampler/outside'] == pytest.approx(1 / 3)
    assert measured['sampler/weight'] == pytest.approx(3.25 / 3)
    assert measured['sampler/logprob_gap'] == pytest.approx(np.log(4), rel=1e-6)
    icepop, _ = correct('icepop')  # 0 outside .5 and 5
    np.testing.assert_allclose(icepop.advantages, [[0, 1, 3, 0]], rtol=1e-6)


@functools.cache
def batch_of(sampler, **correction):
    """(batch, metrics) of a rollout of a sampler of that dtype, whose trainer is float32."""
    params, play_in = tiny.cloned('frozen_lake')[0], tiny.config()
    fields = dict(correction['fields']) | {'rollout.sampler_dtype': sampler}
    run = read_config(micro_runs.config('frozen_lake', algorithm='grpo', **fields))
    mesh = assemble.build_mesh(run)
    play = assemble.build_collect(run, play_in, mesh, training=True)
    stream = jnp.arange(16, dtype=jnp.int32)
    listed = episodes.Episodes(level=stream // 4, token_stream=stream, world_stream=stream)
    task = tiny.task('frozen_lake', max_turns=2, max_actions_per_turn=2, max_actions_per_episode=4)
    out, _ = play(params, task, listed, jax.random.key(3))
    out = out.replace(rewards=jnp.zeros_like(out.rewards).at[::3, 0].set(1.0))
    fns = ModelFns(hidden=tiny.hidden, head=tiny.head, values=None, value_head=None)
    how = build.build_learning(run, mesh, None)
    program = functools.partial(learn.prepare, fns=fns, how=how)
    state = tiny_steps.fresh().replace(params=params)
    batch, _, _, measured = jax.jit(program, compiler_options=tiny.QUICK)(
        state, tiny_steps.NOTHING_FROZEN, out
    )
    return jax.device_get((batch, measured, out))


def corrected(sampler, **fields):
    fields = {'loss.' + name: value for name, value in fields.items()}
    return batch_of(sampler, fields=tuple(fields.items()))


def factors(batch, plain):
    """What the advantages that are not 0 were multiplied by."""
    own = plain.mask & (np.abs(plain.advantages) > 1e-3)
    return batch.advantages[own] / plain.advantages[own]


def test_a_bfloat16_sampler_is_corrected_within_bounds():
    plain, measured, out = corrected('bfloat16')
    assert 'sampler/weight' not in measured
    np.testing.assert_array_equal(plain.old_logprobs, np.where(plain.mask, out.logprobs, 0))
    batch, measured, _ = corrected('bfloat16', sampler_correction='tis', sampler_high=1.002)
    # Another precision: the factors are not 1, and none is above its bound.
    found = factors(batch, plain)
    assert np.abs(found - 1).max() > 1e-3 and found.max() <= 1.002 + 1e-6
    assert measured['sampler/logprob_gap'] > 1e-3 and 0 < measured['sampler/outside'] < 1
    exact = np.exp(batch.old_logprobs - out.logprobs)[plain.mask]
    assert measured['sampler/weight'] == pytest.approx(np.minimum(exact, 1.002).mean(), rel=1e-5)
    bounds = dict(sampler_low=0.998, sampler_high=1.002)
    batch, measured, _ = corrected('bfloat16', sampler_correction='icepop', **bounds)
    found = factors(batch, plain)
    inside = found[found != 0]
    assert 0 < len(inside) < len(found) and (np.abs(inside - 1) <= 0.002 + 1e-6).all()
