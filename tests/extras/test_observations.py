"""Observation losses: which tokens count, each of them once, and the loss term."""

import functools
import re

import host_worlds as hosts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_context as context_runs
import test_update as toy_updates
import tiny_agents as tiny
import toy_rollouts as toy

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.extras.echo import observations
from agentrl_jax.extras.echo.observations import Markers, ObservationLoss
from agentrl_jax.extras.echo.section import markers_of
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.learning import BatchSettings, Forward, Learner, UpdateSettings
from agentrl_jax.rollout import windows
from agentrl_jax.types import EpisodeStop

pytestmark = pytest.mark.soak

# <s> sys END | <s> usr obs END <s> asst ACT END | <s> usr obs obs END <s> asst ACT | END <s> ...
START, END, PLAIN = 9, 8, Markers(9, 8, 1)
TOKENS = [9, 1, 8, 9, 2, 5, 8, 9, 3, 6, 8, 9, 2, 5, 7, 8, 9, 3, 6, 8, 9, 2, 4, 8, 9, 3, 6, 0]
TURN = [0] * 11 + [1] * 8 + [2] * 8 + [-1]
SAMPLED = [9, 10, 18, 26]  # the second answer was cut: its END is a prompt token of turn 2


def conversation(**changes):
    """Return one row of three turns and a padding token."""
    place = np.arange(len(TOKENS))
    rollout = toy.rollout_of([[(1, 1)] * 3], [[0.0, 0, 0]], length=len(TOKENS))
    return rollout.replace(
        tokens=jnp.array([TOKENS]),
        turn=jnp.array([TURN]),
        attention_mask=jnp.array([place < len(TOKENS) - 1]),
        action_mask=jnp.array([np.isin(place, SAMPLED)]),
        **changes,
    )


def places(mask):
    return np.flatnonzero(np.asarray(mask)[0]).tolist()


BRANCHES = {'one': None, 'returns': [[0, 1, 0]], 'stays': [[0, 1, 1]]}  # turn 1 opens a second


@pytest.mark.parametrize(
    ('branch', 'role', 'after', 'want'),
    [
        ('one', 1, 0, [13, 14, 22]),
        ('one', 1, [1], [22]),
        ('one', 2, 0, [14]),
        ('returns', 1, 0, [22]),
        ('stays', 1, 0, [22]),
    ],
)
def test_observations_of_a_conversation_by_hand(branch, role, after, want):
    """Excludes the first observation, markers, roles, answers, padding and forced ends."""
    rollout = conversation(branch=BRANCHES[branch] and jnp.array(BRANCHES[branch]))
    markers, after = PLAIN._replace(role=role), jnp.array(after)
    assert places(observations.written(rollout, markers, after)) == want
    spoilt = rollout.tokens.at[0, 18].set(START)  # sampled markers change nothing
    rollout = rollout.replace(tokens=spoilt)
    assert places(observations.written(rollout, markers, after)) == want


@functools.cache
def rollouts(name):
    """Return (rollout, forced start of answers) of real environments."""
    if name == 'echo':
        return hosts.play()[0]
    if name == 'ragen':
        task = tiny.task('frozen_lake', style='ragen')
        return tiny.play(
            'frozen_lake', tiny.cloned('frozen_lake')[0], tiny.KEY, task_=task, max_tokens=640
        )[0]
    return tiny.played(name)[0]


@pytest.mark.parametrize('name', ['frozen_lake', 'ragen', 'echo'])
def test_observation_texts_of_real_worlds_are_their_user_messages(name):
    """Compare with regular expressions over the decoded conversation."""
    out, tokenizer = rollouts(name), tiny.tokenizer()
    mask = np.asarray(observations.written(out, markers_of(tokenizer)))
    assert out.num_turns.max() > 1 and mask.any()
    for b in range(len(out.tokens)):
        parts = np.split(out.tokens[b], np.flatnonzero(np.diff(mask[b].astype(int))) + 1)
        selected = [tokenizer.decode(part.tolist(), show_special=True) for part in parts[1::2]]
        real = out.tokens[b][out.attention_mask[b]]
        text = tokenizer.decode(real.tolist(), show_special=True)
        messages = re.findall(r'<\|im_start\|>user\n(.*?)<\|im_end\|>', text, re.DOTALL)
        assert selected == messages[1:] and len(selected) == out.num_turns[b] - 1
    assert not (mask & out.action_mask).any() and not (mask & ~out.attention_mask).any()


def test_each_observation_token_is_learnt_once_across_windows():
    out, turn_windows = context_runs.played(2)
    mask = observations.written(out, markers_of(tiny.tokenizer()))
    rows = windows.own_turn_mask(mask, turn_windows)
    assert out.num_turns.max() > 2 and int(rows.sum()) == int(mask.sum()) > 0
    tokens = np.asarray(windows.split_turns(out.tokens, turn_windows))[np.asarray(rows)]
    assert sorted(tokens) == sorted(np.asarray(out.tokens)[np.asarray(mask)])


# ---- the loss ------------------------------------------------------------------------------------


def batch_of(rollout, group_size):
    return GRPO().make_batch(rollout, toy.scores_of(rollout), group_size=group_size)


def test_the_loss_adds_the_mean_cross_entropy_by_hand():
    """A model without layers: logits [0, ln 3], so tokens 0 and 1 have 1/4 and 3/4."""
    rollout = toy.rollout_of([[(1, 1), (2, 1)]], [[0.0, 1.0]], length=6)
    rollout = rollout.replace(tokens=jnp.array([[0, 1, 1, 0, 0, 1]]))
    observed = jnp.array([[False, False, True, True, False, False]])
    batch = batch_of(rollout, 1).replace(extra={'observed': observed})
    fns = ModelFns(lambda *_: None, lambda _: jnp.log(jnp.array([[1.0, 3.0]])))
    extra = ObservationLoss(0.5, PLAIN)
    how = UpdateSettings(algorithm=GRPO(), temperature=0.7)
    inputs = Forward({}, jnp.ones((1, 6, 1)), None), batch, None, extra.reads(batch).sum()
    term, sums = extra.loss(*inputs, Learner(fns, None, how))
    # At temperature 1, for any sampling temperature: -ln(3/4) - ln(1/4) = 1.673976
    np.testing.assert_allclose(sums['policy/observation_nll'], 1.673976, rtol=1e-5)
    np.testing.assert_allclose(term, 0.5 * 1.673976 / 2, rtol=1e-5)


def observed_batch(seed=0):
    """Return a toy batch with some tokens of later turns as observations; two rows have none."""
    batch = toy_updates.toy_batch(seed)
    observed = batch.attention_mask & ~batch.mask & (batch.turn > 0)
    return batch.replace(extra={'observed': observed.at[:2].set(False)})


def reference_gradient(params, batch, coef):
    """Return the gradient of coef * mean cross-entropy, with a plain log_softmax."""

    def loss(params):
        place = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
        states = toy.toy_hidden(params, batch.tokens, place, batch.attention_mask)
        logits = jax.nn.log_softmax(states @ toy.toy_head(params))
        total = 0.0
        for b, t in zip(*np.nonzero(batch.extra['observed']), strict=True):
            total -= logits[b, t - 1, batch.tokens[b, t]]
        return coef * total / batch.extra['observed'].sum()

    return jax.grad(loss)(params)


MESH = jax.make_mesh((4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec('data'))
UPDATE = functools.partial(toy_updates.toy_update, fns=toy_updates.ALONE)
SPLITS = [{'num_microbatches': 4, 'widths': 2}, {'layout': ROWS}]


@pytest.mark.parametrize('split', SPLITS, ids=['microbatches', 'mesh'])
def test_a_step_adds_the_gradient_of_the_batch_mean(split):
    """With SGD, the difference of two steps is the rate times the reference gradient."""
    state, batch = toy_updates.state_of(toy.toy_params(0)), observed_batch()
    alone, measured = UPDATE()(state, batch)
    assert 'policy/observation_nll' not in measured
    placed = jax.device_put(batch, ROWS) if 'layout' in split else batch
    both, measured = UPDATE(extras=(ObservationLoss(0.3, PLAIN),), **split)(state, placed)
    change = jax.tree.map(lambda a, b: (a - b) / 0.1, alone.params, jax.device_get(both.params))
    want = reference_gradient(state.params, batch, 0.3)
    for name, x in change.items():
        np.testing.assert_allclose(x, want[name], atol=3e-6)
    assert float(measured['policy/observation_nll']) > 0.5


# ---- held-out observations -----------------------------------------------------------------------


@pytest.mark.parametrize('window', [0, 2])
def test_observation_likelihoods_equal_those_of_the_full_softmax(window):
    out, turn_windows = context_runs.played(window)
    markers = markers_of(tiny.tokenizer())
    task = tiny.task(context_runs.NAME)
    params = tiny.cloned(context_runs.NAME)[0]
    measure = functools.partial(
        observations.measure,
        params,
        fns=ModelFns(tiny.hidden, tiny.head),
        markers=markers,
        context=windows.Context.of(task, window, tiny.MAX_RESPONSE) if window else None,
        rows=12,
        batch=BatchSettings(microbatch_rows=24, head_chunk=256),  # 16 rows, or 48 with windows
    )
    sums = measure(jax.tree.map(jnp.asarray, out))
    mask = np.asarray(observations.written(out, markers)) & (np.arange(16) < 12)[:, None]
    tokens, attention = jnp.asarray(out.tokens), jnp.asarray(out.attention_mask)
    if window:
        mask = np.asarray(windows.own_turn_mask(jnp.asarray(mask), turn_windows))
        tokens, attention = windows.split_turns((tokens, attention), turn_windows)
    place = jnp.maximum(jnp.cumsum(attention, axis=1) - 1, 0)
    logits = tiny.hidden(params, tokens, place, attention) @ tiny.head(params)
    logprobs = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))
    rows, columns = np.nonzero(mask)
    want = -logprobs[rows, columns - 1, np.asarray(tokens)[rows, columns]]
    assert int(sums['observation_nll/count']) == len(want) > 20
    np.testing.assert_allclose(sums['observation_nll/total'], want.sum(), rtol=1e-4)
    failed = out.replace(episode_stop=np.full_like(out.episode_stop, EpisodeStop.ENV_ERROR))
    sums = measure(jax.tree.map(jnp.asarray, failed))
    assert int(sums['observation_nll/count']) == 0 == float(sums['observation_nll/total'])
