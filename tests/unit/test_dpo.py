"""DPO on pairs of a group: who meets whom, the loss, and that micro-batches never part a pair."""

import collections
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_rollouts as toy
import updates
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.algorithms import dpo
from agentrl_jax.algorithms.dpo import DPO
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import update
from agentrl_jax.rl.masked import positions_of


@pytest.mark.parametrize(
    'returns, rows, slots, pairs',
    [
        # best 9 (row 3) with 0 (row 4), then 5 (row 5) with 1 (row 1), 3 with 2
        ([3, 1, 2, 9, 0, 5], [1] * 6, [4, 3, 5, 0, 1, 2], 3),
        # row 1 does not count: 3 2 0 remain, 3 with 0; 2 is the middle, row 1 the last
        ([3, np.nan, 2, 0], [1, 0, 1, 1], [0, 3, 2, 1], 1),
        ([1, 1, 1, 1], [1] * 4, [0, 2, 3, 1], 2),  # ties keep their order
        ([1, 2], [0, 0], [0, 1], 0),
    ],
)
def test_best_meets_worst_and_second_best_second_worst(returns, rows, slots, pairs):
    given = jnp.array(returns, jnp.float32), jnp.array(rows, bool)
    slot, count = dpo.slots(*given, group_size=len(returns))
    assert (slot[0].tolist(), int(count[0, 0])) == (slots, pairs)


def test_pairs_are_side_by_side_after_ordering():
    order = dpo.order_rows(jnp.array([0.0, 2, 1, 5, 4, 3, 8, 7]), jnp.ones(8, bool), group_size=4)
    assert order.tolist() == [3, 0, 1, 2, 6, 5, 7, 4]


def preferences(returns, group_size, **kwargs):
    rows = jnp.ones(len(returns), bool)
    chosen = dict(pairs=1, min_gap=0.01) | kwargs
    pair, sign = dpo.preferences(jnp.array(returns), rows, group_size=group_size, **chosen)
    return pair.tolist(), sign.tolist()


def ordered(rollout, *more, group_size):
    """Trees of rows in the order in which learn.prepare hands them to make_batch."""
    usable = rollout.healthy & rollout.action_mask.any(1)
    order = DPO().order_rows(rollout.returns, usable, group_size=group_size)
    return jax.tree.map(lambda x: x[order], (rollout, *more))


def test_groups_without_spread_give_no_pair():
    returns = [1.0, 1, 1, 1, 2, 0, 1, 1]  # as order_rows has them
    assert preferences(returns, 4) == ([0, 0, 0, 0, 5, 5, 0, 0], [0, 0, 0, 0, 1, -1, 0, 0])
    # The second pair of the second group would be 1 with 1.
    assert preferences(returns, 4, pairs=2) == preferences(returns, 4)
    assert preferences([0.0, 0.3], 2, min_gap=0.5) == ([0, 0], [0, 0])


def test_a_batch_and_its_loss_by_hand():
    # returns 1 0 | 2 2: the first group is a pair, the second is none
    layouts = [[(1, 2)], [(2, 1)], [(1, 1)], [(1, 1)]]
    rollout, how = toy.rollout_of(layouts, [[1.0], [0], [2], [2]], length=4), DPO(beta=0.5)
    reference = jnp.array([[0, 0.2, -0.1, 0], [0, 0, -0.1, 0], [9, 9, 9, 9], [9, 9, 9, 9]])
    scores = toy.scores_of(rollout).replace(ref_logprobs=reference)
    batch = how.make_batch(rollout, scores, group_size=2)
    want = [[0, 0.5, 0.5, 0], [0, 0, -0.5, 0], [0] * 4, [0] * 4]
    np.testing.assert_array_equal(batch.advantages, want)
    np.testing.assert_array_equal(batch.mask, np.array(want) != 0)
    assert batch.pair.tolist() == [1, 1, 0, 0]
    # gains: row 0 (.3 + .1) - (.2 - .1) = .3, row 1 -.5 - (-.1) = -.4; beta .5: margin
    # .5 * (.3 + .4) = .35; -log sigmoid(.35) = ln(1 + e^-.35), on both rows' last tokens
    logprobs = jnp.array([[9, 0.3, 0.1, 9], [9, 9, -0.5, 9], [9] * 4, [9] * 4])
    value = np.log1p(np.exp(-0.35))
    want = [[0, 0, value, 0], [0, 0, value, 0], [0] * 4, [0] * 4]
    np.testing.assert_allclose(how.loss(logprobs, batch), want, rtol=1e-6)
    # half of the rows' sum is the mean over pairs; its gradient is -+ beta sigmoid(-margin)
    gradient = jax.grad(lambda x: how.loss(x, batch).sum() / 2)(logprobs)
    g = 0.5 / (1 + np.exp(0.35))
    np.testing.assert_allclose(gradient[:2], [[0, -g, -g, 0], [0, 0, g, 0]], rtol=1e-6)


ordered_rows = jax.jit(dpo.order_rows, static_argnames='group_size')
preferred = jax.jit(dpo.preferences, static_argnames=('group_size', 'pairs', 'min_gap'))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    group_size=st.sampled_from([2, 4, 16]),
    pairs=st.sampled_from([1, 8]),
    faults=st.integers(0, 5),
)
def test_pairs_of_binary_returns_are_side_by_side(seed, group_size, pairs, faults):
    """Equal returns were ranked twice, and came out in another order the second time: [1, 1, 0, 0]
    was laid out as [1, 0, 1, 0] and then paired as 1 0 0 1, one row of a pair in each half."""
    rng = np.random.default_rng(seed)
    returns, usable = rng.integers(0, 2, 32).astype(np.float32), np.ones(32, bool)
    usable[rng.integers(0, 32, faults)] = False
    order = np.asarray(ordered_rows(returns, usable, group_size=group_size))
    returns, usable = returns[order], usable[order]
    pair, sign = jax.device_get(
        preferred(returns, usable, group_size=group_size, pairs=pairs, min_gap=0.01)
    )
    np.testing.assert_array_equal(pair[0::2], pair[1::2])  # side by side or not at all
    np.testing.assert_array_equal(sign[0::2], -sign[1::2])
    used = np.asarray(pair[0::2] > 0)
    np.testing.assert_array_equal((returns[0::2] - returns[1::2])[used], 1.0)
    # as many as there are: the smaller of good and bad ones of each group, at most `pairs`
    good, bad = ((usable & (returns == value)).reshape(-1, group_size).sum(1) for value in (1, 0))
    np.testing.assert_array_equal(
        used.reshape(-1, group_size // 2).sum(1), np.minimum(np.minimum(good, bad), pairs)
    )
    assert len(set(pair[0::2][used].tolist())) == used.sum()


# ---- against a slow reference --------------------------------------------------------------------


def slow_loss(returns, healthy, sampled, logprobs, ref, group_size, beta, pairs, min_gap):
    """Mean over pairs and gradient by float64 loops."""
    total, gradient, found = 0.0, np.zeros(logprobs.shape), 0
    for first in range(0, len(returns), group_size):
        rows = [b for b in range(first, first + group_size) if healthy[b] and sampled[b].any()]
        rows.sort(key=lambda b: -returns[b])
        for j in range(min(pairs, len(rows) // 2)):
            better, worse = rows[j], rows[-1 - j]
            if not returns[better] - returns[worse] > min_gap:
                continue
            gain = {b: (logprobs[b] - ref[b])[sampled[b]].sum() for b in (better, worse)}
            margin = beta * (gain[better] - gain[worse])
            total += np.log1p(np.exp(-margin))
            slope = beta / (1 + np.exp(margin))
            gradient[better] -= slope * sampled[better]
            gradient[worse] += slope * sampled[worse]
            found += 1
    return total / max(found, 1), gradient / max(found, 1)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    beta=st.sampled_from([0.1, 0.5, 2.0]),
    pairs=st.integers(1, 3),
    group_size=st.sampled_from([2, 3, 6]),
)
def test_loss_and_gradient_are_those_of_float64_loops(seed, beta, pairs, group_size):
    rng = np.random.default_rng(seed)
    rollout = toy.random_rollout(seed, rows=12, faulty=rng.integers(0, 12, 2))
    whole = rng.integers(0, 3, rollout.rewards.shape)  # ties are common
    rollout = rollout.replace(rewards=jnp.where(rollout.rewards != 0, whole, 0.0))
    scores, logprobs = toy.scores_of(rollout, seed), -rng.random(rollout.tokens.shape)
    current = jnp.asarray(logprobs, jnp.float32)
    placed, placed_scores, current = ordered(rollout, scores, current, group_size=group_size)
    how = DPO(beta=beta, pairs=pairs, min_gap=0.5)
    batch = how.make_batch(placed, placed_scores, group_size=group_size)

    def mean(x):  # 1 / trained rows: seq_mean_token_sum
        return how.loss(x, batch).sum() / jnp.maximum(batch.mask.any(1).sum(), 1)

    value, gradient = jax.value_and_grad(mean)(current)
    want, slope = slow_loss(
        np.asarray(rollout.returns, np.float64),
        np.asarray(rollout.healthy),
        np.asarray(rollout.action_mask),
        logprobs,
        np.asarray(scores.ref_logprobs, np.float64),
        group_size,
        beta,
        pairs,
        0.5,
    )
    np.testing.assert_allclose(value, want, atol=1e-6, rtol=1e-6)
    (slope,) = ordered(rollout, slope, group_size=group_size)[1:]
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


def trl_loss(trl, torch, batch, current, beta):
    """What the installed DPOTrainer makes of log-probabilities [B, T], chosen rows at even places.

    Only the model is replaced: its outputs are the given numbers.
    """
    rows = np.r_[0 : len(current) : 2, 1 : len(current) : 2]  # TRL: chosen ones first
    mask = torch.tensor(np.asarray(batch.mask)[rows])
    logprobs = torch.where(mask, current[rows], 0.0)[:, 1:]
    same = torch.zeros_like(logprobs)
    outputs = types.SimpleNamespace(
        log_probs=logprobs, entropy=same, mean_logits=same, is_top1=same.bool()
    )
    reference = np.asarray(batch.ref_logprobs, np.float64).sum(1)
    accelerator = types.SimpleNamespace(
        device='cpu', gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    trainer = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=accelerator,
        beta=beta,
        f_divergence_type='reverse_kl',
        loss_types=['sigmoid'],
        loss_weights=[1.0],
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        use_weighting=False,
        ld_alpha=None,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={'train': collections.defaultdict(list)},
    )
    inputs = dict(
        input_ids=torch.tensor(np.asarray(batch.tokens)[rows]).long(),
        attention_mask=torch.ones_like(mask),
        completion_mask=mask.long(),
        ref_chosen_logps=torch.tensor(reference[0::2]),
        ref_rejected_logps=torch.tensor(reference[1::2]),
    )
    return trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)


def test_loss_and_gradient_are_those_of_the_trl_package():
    """Runs where it is installed (make test-reference)."""
    torch = pytest.importorskip('torch')
    trl = pytest.importorskip('trl.trainer.dpo_trainer', exc_type=ImportError)
    rollout, how = toy.random_rollout(11, rows=8), DPO(beta=0.3)
    better = (np.arange(8) % 2 == 0).astype(np.float32)
    rollout = rollout.replace(rewards=jnp.zeros_like(rollout.rewards).at[:, 0].set(better))
    batch = how.make_batch(rollout, toy.scores_of(rollout), group_size=2)
    logprobs = np.asarray(rollout.logprobs) - 0.4 * np.random.default_rng(0).random((8, 14))
    current = torch.tensor(logprobs, requires_grad=True)
    loss = trl_loss(trl, torch, batch, current, beta=0.3)
    loss.backward()
    value, gradient = jax.value_and_grad(lambda x: how.loss(x, batch).sum() / 8)(
        jnp.asarray(logprobs, jnp.float32)
    )
    np.testing.assert_allclose(value, loss.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient, current.grad, atol=1e-7)


# ---- what must not matter ------------------------------------------------------------------------

TX = optax.sgd(0.5)
COMPILED = jax.jit(
    update.update_step,
    static_argnames=('fns', 'how'),
    compiler_options={'xla_backend_optimization_level': 0},
)


@dataclasses.dataclass(frozen=True)
class Apart(DPO):
    """Without the promise that the rows of a pair share a micro-batch."""

    ROWS_PER_PAIR = 1


def ordered_batch(seed=0, poison=None, binary=False):
    """Eight rows, four pairs (if no returns are tied), laid out as learn.prepare does."""
    rollout = toy.random_rollout(seed, rows=8)
    if binary:
        solved = jnp.array([0.0, 1, 1, 0, 1, 1, 0, 0])
        rollout = rollout.replace(rewards=jnp.zeros_like(rollout.rewards).at[:, 0].set(solved))
    rollout, scores = ordered(rollout, toy.scores_of(rollout), group_size=4)
    batch = DPO(pairs=2).make_batch(rollout, scores, group_size=4)
    if poison is None:
        return batch
    fields = ('old_logprobs', 'ref_logprobs', 'advantages', 'returns', 'old_values')
    return batch.replace(
        **{name: jnp.where(batch.mask, getattr(batch, name), poison) for name in fields}
    )


def run(batch, key=None, how=DPO(pairs=2), **fields):  # noqa: B008
    """(parameters, metrics) after an update from the same start."""
    params = toy.toy_params(0)
    state = updates.state(TX, params)
    how = updates.settings(8, tx=TX, algorithm=how, **fields)
    new, measured = COMPILED(state, batch, key, fns=ModelFns(toy.toy_hidden, toy.toy_head), how=how)
    return new.params, measured


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)


@pytest.mark.parametrize('seed, binary', [(0, False), (2, True)])
def test_every_split_and_shuffle_trains_the_same(seed, binary):
    """With ties, losses were nan and every step was skipped as soon as a batch was split."""
    batch = ordered_batch(seed, binary=binary)
    one, measured = run(batch)
    assert measured['update/skipped'] == 0 and measured['batch/trained_rows'] == 8
    assert measured['policy/grad_norm'] > 1e-3
    for parts in (2, 4):
        other, again = run(batch, num_microbatches=parts)
        assert_close(one, other)
        np.testing.assert_allclose(measured['policy/loss'], again['policy/loss'], atol=1e-6)
    assert_close(one, run(batch, jax.random.key(0), num_microbatches=4)[0])
    for key in range(3):  # optimiser steps of one pair, in any order
        _, measured = run(batch, jax.random.key(key), num_minibatches=4)
        assert measured['update/skipped'] == 0 and measured['policy/grad_norm'] > 1e-3


def test_every_step_on_a_batch_sees_the_margin_of_its_own_policy():
    """Two epochs are two plain gradient steps on the written loss."""
    batch, params = ordered_batch(1), toy.toy_params(0)

    def plain(params):
        hidden = toy.toy_hidden(
            params, batch.tokens, positions_of(batch.attention_mask), batch.attention_mask
        )
        logp = jax.nn.log_softmax(hidden @ params['head'])[:, :-1]
        logp = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], 2)[:, :, 0]
        gain = jnp.where(batch.mask[:, 1:], logp - batch.ref_logprobs[:, 1:], 0).sum(1)
        return -jax.nn.log_sigmoid(0.1 * (gain[0::2] - gain[1::2])).mean()

    both, _ = run(batch, epochs=2, num_microbatches=2)
    for _ in range(2):
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(plain)(params))
    assert_close(both, params)


def test_a_parted_pair_is_skipped_and_counted():
    """Row by row: rows 0 and 2 meet, which are of different pairs."""
    new, measured = run(ordered_batch(), how=Apart(pairs=2), num_microbatches=4)
    assert measured['update/skipped'] == 1
    jax.tree.map(np.testing.assert_array_equal, new, toy.toy_params(0))


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_poisoned_padding_changes_nothing(poison):
    clean, dirty = (run(ordered_batch(poison=x), num_microbatches=2)[0] for x in (None, poison))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
