"""Parity switches: by hand what each changes, and that nothing changes without it."""

import dataclasses
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
from agentrl_jax.rl import learn, parity, update
from agentrl_jax.rl.learning import Learning, Parity, Sampler, recomputes
from agentrl_jax.rollout import episodes
from agentrl_jax.run import build
from agentrl_jax.run import parts as assemble
from agentrl_jax.run.config import read as read_config
from agentrl_jax.tokens.tokenizer import IM_START

START = 9
# <s> sys \n <s> usr obs \n <s> asst think ACT END \n <s> usr obs \n <s> asst think ACT pad
TOKENS = [9, 1, 0, 9, 2, 5, 0, 9, 3, 4, 6, 8, 0, 9, 2, 5, 0, 9, 3, 4, 9, 7]
SAMPLED = [10, 11, 20]  # the policy once samples <s> itself: it opens no message
LENGTH = 21


def conversation():
    """(tokens, attention, sampled) of one row; its last token is padding."""
    place = np.arange(len(TOKENS))
    return jnp.array([TOKENS]), jnp.array([place < LENGTH]), jnp.array([np.isin(place, SAMPLED)])


def test_ragen_s_masks_by_hand():
    mask = functools.partial(parity.message_mask, *conversation(), start_id=START)
    # Behind the user's <s> at 3: its predecessor lies in the system message, so it does not train.
    everything = list(range(4, 21))
    assert np.flatnonzero(mask(answers_only=False)[0]).tolist() == everything
    # asst think ACT END \n and the next <s>; then asst think ACT
    answers = [8, 9, 10, 11, 12, 13, 18, 19, 20]
    assert np.flatnonzero(mask(answers_only=True)[0]).tolist() == answers
    leaked = sorted(set(answers) - set(SAMPLED))
    assert [TOKENS[t] for t in leaked] == [3, 4, 0, 9, 3, 4]


def learning_of(**changes):
    run = read_config(micro_runs.config('frozen_lake', algorithm='grpo', **changes))
    return build.build_learning(run, assemble.build_mesh(run), None, tiny.tokenizer())


def test_every_switch_is_off():
    how = learning_of()
    assert how.parity == Parity('sampled', microbatch_means=False, filter_normalised=False)
    assert not recomputes(how.sampler, how.parity) and how.head['row_tokens'] == 12


def trained_texts(out, mask, b):
    """Runs of trained tokens of an episode as texts, special tokens spelled out."""
    places = np.flatnonzero(mask[b])
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    names = {tiny.tokenizer().special(name): name for name in tiny.SPECIALS}

    def spelled(ids):
        return ''.join(names[i] if i in names else tiny.tokenizer().decode([i]) for i in ids)

    return [spelled(out.tokens[b][run].tolist()) for run in runs]


@pytest.fixture(scope='module')
def played():
    return tiny.played('frozen_lake')[0]


def test_what_trains_of_a_real_conversation(played):
    """RAGEN's leak: chat markers around every answer; in `all` everything the user said as well."""
    found = {}
    for where in ('answers', 'all'):
        start = tiny.tokenizer().special(IM_START)
        out = parity.train_on(played, start_id=start, answers_only=where == 'answers')
        found[where] = np.asarray(out.action_mask)
    b = int(np.argmax(played.num_turns))
    turns = int(played.num_turns[b])
    assert turns >= 2
    texts = trained_texts(played, found['answers'], b)
    assert len(texts) == turns and all(t.startswith('assistant\n<think>') for t in texts)
    assert all(t.endswith('<|im_end|>\n<|im_start|>') for t in texts[:-1])
    (whole,) = trained_texts(played, found['all'], b)
    assert whole.startswith('user\n') and whole.count('<|im_start|>assistant\n<think>') == turns
    for mask in found.values():
        assert (mask[played.action_mask]).all() and not mask[~played.attention_mask].any()


def test_answers_are_where_the_policy_speaks_whatever_comes_before():
    """Every other message, after a system's: where none begins, the worlds' were the answers."""
    start = 9  # user, assistant (of the world), user, assistant: two answers
    tokens = np.array([[9, 1, 9, 2, 9, 3, 9, 4, 9, 5, 9, 6]])
    sampled = np.isin(tokens, (4, 6))
    everywhere = np.ones_like(sampled)
    found = parity.message_mask(tokens, everywhere, sampled, start_id=start, answers_only=True)
    assert tokens[np.asarray(found)].tolist() == [4, 9, 6]


def test_tokens_that_nobody_sampled_train_with_the_trainer_s_log_probabilities(played):
    """Ratio 1 at all of them before the first step: the loss is minus the mean advantage."""
    how = learning_of(**{'parity.loss_on': 'all'})
    assert recomputes(how.sampler, how.parity) and how.head['row_tokens'] is None
    how = dataclasses.replace(how, batch=dataclasses.replace(how.batch, microbatch_rows=16))
    out = played.replace(rewards=jnp.asarray(played.rewards).at[::3, 0].add(1.0))
    fns = ModelFns(hidden=tiny.hidden, head=tiny.head, values=None, value_head=None)
    state = tiny_steps.fresh().replace(params=tiny.cloned('frozen_lake')[0])
    program = functools.partial(learn.prepare, fns=fns, how=how)
    program = jax.jit(program, compiler_options=tiny.QUICK)
    batch = jax.device_get(program(state, tiny_steps.NOTHING_FROZEN, out)[0])
    assert batch.mask.sum() > 2 * played.action_mask.sum()
    # The sampler's own where it has any, a log-probability everywhere else.
    where = played.action_mask
    np.testing.assert_allclose(batch.old_logprobs[where], played.logprobs[where], atol=1e-5)
    assert (batch.old_logprobs[batch.mask & ~where] < 0).mean() > 0.99
    per_row = np.where(batch.mask, batch.advantages, np.nan)
    np.testing.assert_allclose(np.nanmax(per_row, 1), np.nanmin(per_row, 1))


# ---- micro-batch means ---------------------------------------------------------------------------


def test_micro_batch_means_by_hand():
    # Rows of 1, 3, 2 and 0 tokens; two micro-batches: rows 0 and 2 (3 tokens), 1 and 3 (3 tokens).
    # In three: row i is in part i % parts, so with four parts each row is its own.
    lengths = np.array([1, 3, 2, 0])
    mask = jnp.arange(3)[None] < lengths[:, None]
    one, two, four = (
        update.make_token_weights('token_mean', None, parts)(mask) for parts in (1, 2, 4)
    )
    np.testing.assert_allclose(one, mask / 6)
    np.testing.assert_allclose(two, mask / 6)  # 1 / (2 parts x 3 tokens)
    # A quarter each, whatever the row's length; the empty one is lost: the sum is 3/4
    np.testing.assert_allclose(four, mask / (4 * np.maximum(lengths, 1))[:, None])
    assert float(four.sum()) == pytest.approx(0.75)


def test_token_mean_over_micro_batches_of_one_row_is_a_mean_of_rows():
    """RAGEN's default: with micro-batches of one, token_mean is seq_mean_token_mean."""
    returns = tiny_steps.RETURNS
    layouts = [[(1, 1 + b % 3)] for b in range(16)]
    out = tiny_steps.toy.rollout_of(layouts, returns[:, None], length=5)

    def params(**changes):
        parts = tiny_steps.parts_of('grpo', changes)
        size = dataclasses.replace(parts['how'].batch, microbatch_rows=1)
        parts['how'] = dataclasses.replace(parts['how'], batch=size)
        step = jax.jit(functools.partial(learn.learn, **parts))
        state = step(tiny_steps.fresh(), tiny_steps.NOTHING_FROZEN, out)[0]
        return jax.tree.leaves(state.params)

    by_rows = params(**{'loss.aggregation': 'seq_mean_token_mean'})
    by_parts = params(**{'loss.aggregation': 'token_mean', 'parity.microbatch_means': True})
    by_tokens = params(**{'loss.aggregation': 'token_mean'})
    for a, b in zip(by_rows, by_parts, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(by_tokens, by_parts, strict=True)) > 1e-5


# ---- normalised scores ---------------------------------------------------------------------------


def test_a_filter_of_normalised_returns_cannot_tell_groups_apart():
    """Stds .5 0 1.5 1: of at least .9 times the largest is one group, or all that vary at all."""
    rule = {'filter.rule': 'min_p', 'filter.p': 0.9}
    _, kept, measured = tiny_steps.prepare(**rule)
    assert kept == tiny_steps.groups(2) and measured['filter/group_std_max'] == pytest.approx(1.5)
    _, kept, measured = tiny_steps.prepare(**rule, **{'parity.filter_normalised': True})
    assert kept == tiny_steps.groups(0, 2, 3)
    assert measured['filter/group_std_max'] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    'changes, message',
    [
        (
            {'parity.loss_on': 'words'},
            'parity.loss_on',
        ),
        ({'parity.loss_on': 'all', 'context.window': 1}, 'context.window'),
        (
            {'parity.loss_on': 'answers', 'algorithm': 'dapo', 'loss.max_length': 9},
            'loss.max_length',
        ),
        (
            {'parity.loss_on': 'all', 'loss.sampler_correction': 'tis'},
            'loss.sampler_correction',
        ),
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
    whole, _ = correct('icepop', None, None, True)  # one factor for the row
    np.testing.assert_allclose(whole.advantages, [[0, 0.75, 0.75, 0.75]], rtol=1e-6)


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
    how = build.build_learning(run, mesh, None, tiny.tokenizer())
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
