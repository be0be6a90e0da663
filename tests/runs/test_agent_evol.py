"""AgentEvol: weights of episodes and demonstrations. Full runs are in test_runs.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toy_rollouts as toy
import updates
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.algorithms.agent_evol import AgentEvol
from agentrl_jax.rl import evol, losses
from agentrl_jax.types import Demonstrations

# ---- the loss ----------------------------------------------------------------------------------


def test_weights_by_hand():
    # returns above .2 are 1 and 3 (mean 2): weights .5 and 1.5; the last episode is not healthy
    returns, rows = jnp.array([1.0, 0.2, 3, -1, 9]), jnp.array([True] * 4 + [False])
    for algorithm, expected in [
        (AgentEvol(threshold=0.2), [0.5, 0, 1.5, 0, 0]),
        (AgentEvol(threshold=0.2, weigh_by='equal'), [1, 0, 1, 0, 0]),
        (AgentEvol(threshold=5.0), [0] * 5),
    ]:
        np.testing.assert_allclose(algorithm.episode_weights(returns, rows), expected)


def test_the_loss_by_hand():
    # returns 2 and 1 have weights 4/3 and 2/3, 0 is dropped; log p -.5, -.25 | -1 | -2
    rollout = toy.rollout_of([[(1, 2)], [(2, 1)], [(1, 1)]], [[2.0], [1], [0]], length=4)
    batch = toy.batch_of(AgentEvol(), rollout, 3, toy.scores_of(rollout))
    np.testing.assert_array_equal(batch.mask.sum(1), [2, 1, 0])
    logprobs = jnp.array([[0, -0.5, -0.25, 0], [0, 0, -1.0, 0], [0, -2.0, 0, 0]])
    loss = AgentEvol().loss(logprobs, batch)
    want = [[0, 2 / 3, 1 / 3, 0], [0, 0, 2 / 3, 0], [0] * 4]
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    weights = losses.token_weights(batch.mask, 'token_mean')
    np.testing.assert_allclose(losses.weighted_sum(weights, loss), (5 / 3) / 3, rtol=1e-6)


def slow_loss(returns, healthy, sampled, logprobs, threshold, weights):
    """Return the mean over tokens of selected episodes and its gradient, with float64 loops."""
    selected = [b for b in range(len(returns)) if healthy[b] and returns[b] > threshold]
    tokens = sum(int(sampled[b].sum()) for b in selected)
    mean = sum(returns[b] for b in selected) / max(len(selected), 1)
    total, gradient = 0.0, np.zeros(logprobs.shape)
    for b in selected:
        weight = returns[b] / mean if weights == 'reward' else 1.0
        for t in np.flatnonzero(sampled[b]):
            total -= weight * logprobs[b, t] / tokens
            gradient[b, t] = -weight / tokens
    return total, gradient


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    threshold=st.sampled_from([0.0, 0.5, 3.0]),
    weights=st.sampled_from(['reward', 'equal']),
)
def test_loss_and_gradient_match_float64_loops(seed, threshold, weights):
    rng = np.random.default_rng(seed)
    rollout = toy.random_rollout(seed, faulty=rng.integers(0, 8, 2))
    rollout = rollout.replace(rewards=2.0 * rollout.rewards)
    algorithm = AgentEvol(threshold=threshold, weigh_by=weights)
    batch = toy.batch_of(algorithm, rollout, 4, toy.scores_of(rollout))
    logprobs = -rng.random(batch.tokens.shape)
    share = losses.token_weights(batch.mask, 'token_mean')

    def mean(x):
        return losses.weighted_sum(share, algorithm.loss(x, batch))

    value, gradient = jax.value_and_grad(mean)(jnp.asarray(logprobs, jnp.float32))
    expected, slope = slow_loss(
        np.asarray(rollout.returns, np.float64),
        np.asarray(rollout.healthy),
        np.asarray(rollout.action_mask),
        logprobs,
        threshold,
        weights,
    )
    np.testing.assert_allclose(value, expected, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


# ---- demonstrations in a batch -----------------------------------------------------------------


def toy_demonstrations(rows, width):
    tokens = np.arange(rows * width).reshape(rows, width) % toy.VOCAB
    attention = np.arange(width)[None] < np.full((rows, 1), width - 1)
    return Demonstrations(tokens, attention, attention & (np.arange(width) > 1)[None])


def test_demonstrations_are_drawn_without_repetition_and_padded():
    data = toy_demonstrations(6, 5)
    drawn = evol.draw(data, jax.random.key(0), rows=6, max_tokens=8, pad_id=99)
    assert sorted(map(tuple, drawn.tokens[:, :5])) == sorted(map(tuple, data.tokens))
    assert drawn.tokens.shape == drawn.mask.shape == (6, 8) and (drawn.tokens[:, 5:] == 99).all()
    assert not drawn.attention_mask[:, 5:].any() and not drawn.mask[:, 5:].any()
    assert evol.draw(data, jax.random.key(0), rows=9, max_tokens=5, pad_id=0).tokens.shape == (9, 5)


def test_demonstrations_are_spread_over_the_batch_with_weight_one():
    rollout = toy.random_rollout(0, rows=6, length=8)
    scores = toy.scores_of(rollout)
    batch = toy.batch_of(AgentEvol(), rollout, 3, scores)
    data = evol.draw(toy_demonstrations(3, 8), jax.random.key(1), rows=3, max_tokens=8, pad_id=0)
    demo_batch = evol.demonstration_batch(data, jax.tree.map(lambda x: x[:3] - 1.0, scores))
    mixed = evol.join(batch, demo_batch)
    demonstrated = [any((row == d).all() for d in data.tokens) for row in mixed.tokens]
    assert demonstrated == [False, True, False] * 3  # one in each third
    np.testing.assert_array_equal(mixed.tokens[0::3], batch.tokens[0::2])
    np.testing.assert_array_equal(mixed.tokens[2::3], batch.tokens[1::2])
    np.testing.assert_array_equal(mixed.advantages[1::3], data.mask.astype(np.float32))
    np.testing.assert_array_equal(mixed.mask[1::3], data.mask)
    assert not np.asarray(demo_batch.old_logprobs)[~data.mask].any()


# ---- iterations and cloning ----------------------------------------------------------------------


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_an_iteration_restarts_from_the_base_policy():
    """The optimiser state is reset; the current policy becomes the explorer."""
    params, base = toy.toy_params(0), toy.toy_params(1)
    tx = optax.adam(0.1)
    _, moved = tx.update(params, tx.init(params), params)
    state = updates.state(tx, params, step=jnp.int32(7), opt_state=moved, explorer=base)
    again = evol.begin_iteration(state, tx, base)
    assert same(again.explorer, params) and same(again.params, base) and again.step == 7
    assert same(again.opt_state, tx.init(base))
    # The explorer must be a copy: an update may donate the policy's buffers.
    pairs = zip(jax.tree.leaves(again.explorer), jax.tree.leaves(params), strict=True)
    assert all(a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() for a, b in pairs)
