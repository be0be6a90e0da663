"""Losses against hand arithmetic, float64 loops and exact distributions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import correction, losses

SETTINGS = settings(max_examples=25, deadline=None)


def head_case(seed, rows=3, length=7, width=5, vocab=11):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(rows, length, width)).astype(np.float32)
    head = rng.normal(size=(width, vocab)).astype(np.float32)
    tokens = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    return hidden, head, tokens


def reference_logprobs(hidden, head, tokens, temperature):
    """Return log-probabilities by a double loop in float64."""
    logprobs, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for b in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            logits = hidden[b, t - 1].astype(np.float64) @ head.astype(np.float64) / temperature
            p = np.exp(logits - logits.max())
            p /= p.sum()
            logprobs[b, t] = np.log(p[tokens[b, t]])
            entropy[b, t] = -(p * np.log(p)).sum()
    return logprobs, entropy


@pytest.mark.parametrize('chunk_size', [None, 1, 6])
def test_token_logprobs_equal_the_loop_at_any_chunk_size(chunk_size):
    hidden, head, tokens = head_case(0)
    out = losses.token_logprobs(
        hidden, head, tokens, losses.HeadSettings(0.7, chunk_size), with_entropy=True
    )
    for got, want in zip(out, reference_logprobs(hidden, head, tokens, 0.7), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_token_logprobs_shift_by_hand():
    # logits of position 0 are [0, ln 3]: p = [1/4, 3/4]; tokens[0, 1] = 1 has log 3/4.
    hidden = jnp.array([[[np.log(3.0)], [5.0]]], jnp.float32)
    head = jnp.array([[0.0, 1.0]])
    logprobs, entropy = losses.token_logprobs(hidden, head, jnp.array([[0, 1]]), with_entropy=True)
    np.testing.assert_allclose(logprobs, [[0.0, np.log(0.75)]], rtol=1e-6)
    want = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    np.testing.assert_allclose(entropy, [[0.0, want]], rtol=1e-6)


@pytest.mark.parametrize('row_tokens', [4, 6])
@pytest.mark.parametrize('chunk_size', [None, 5])
def test_only_masked_tokens_reach_the_head(chunk_size, row_tokens):
    hidden, head, tokens = head_case(2)
    mask = jnp.asarray(np.random.default_rng(0).random(tokens.shape) < 0.4).at[0].set(False)
    mask = mask.at[1, -4:].set(True).at[1, :3].set(False)
    hidden = jnp.asarray(hidden).at[0].set(jnp.nan)  # of the row without trained tokens

    def run(hidden, limit=None, **selection):
        settings = losses.HeadSettings(0.7, chunk_size, limit)
        out = losses.token_logprobs(hidden, head, tokens, settings, with_entropy=True, **selection)
        logprobs, entropy = (jnp.where(mask, x, 0.0) for x in out)
        return (jnp.sin(logprobs) + entropy**2).sum(), (logprobs, entropy, out)

    program = jax.jit(jax.value_and_grad(run, has_aux=True), static_argnums=1)
    (_, (*few, raw)), gradient = program(hidden, row_tokens, mask=mask)
    (_, (*every, _)), expected = program(hidden.at[0].set(0.0))
    np.testing.assert_allclose(np.stack(few)[:, :, 1:], np.stack(every)[:, :, 1:], atol=2e-6)
    np.testing.assert_allclose(gradient[1:], expected[1:], atol=2e-5)
    assert not np.asarray(raw)[:, ~np.asarray(mask)].any()


def test_the_head_is_not_computed_for_more_than_row_tokens():
    hidden, head, tokens = head_case(3)

    def run(hidden):
        mask, settings = jnp.ones(tokens.shape, bool), losses.HeadSettings(row_tokens=2)
        return losses.token_logprobs(hidden, head, tokens, settings, mask=mask)[0]

    assert not losses.token_logprobs(hidden, head, tokens)[1].any()  # no entropy
    text = str(jax.make_jaxpr(run)(hidden))
    assert 'f32[3,2,11]' in text and 'f32[3,7,11]' not in text
    # tokens 3 to 6 of each row exceed the declared number
    np.testing.assert_array_equal(np.isnan(run(hidden)), np.arange(7)[None].repeat(3, 0) > 2)


@pytest.mark.parametrize('with_entropy', [False, True])
def test_chunked_gradient_equals_autodiff_of_log_softmax(with_entropy):
    hidden, head, tokens = head_case(2)
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(2, *tokens.shape)).astype(np.float32)
    weight[:, :, 0] = 0

    def ours(hidden, head, chunk_size):
        out = losses.token_logprobs(
            hidden, head, tokens, losses.HeadSettings(1.3, chunk_size), with_entropy=with_entropy
        )
        return sum((w * x).sum() for w, x in zip(weight, out, strict=True))

    def plain(hidden, head):
        logp = jax.nn.log_softmax((hidden @ head) / 1.3)
        entropy = -(jnp.exp(logp) * logp).sum(-1)[:, :-1]
        chosen = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return (weight[0, :, 1:] * chosen).sum() + with_entropy * (weight[1, :, 1:] * entropy).sum()

    want = jax.jit(jax.grad(plain, (0, 1)))(hidden, head)
    for chunk_size in (None, 5):
        got = jax.jit(jax.grad(ours, (0, 1)), static_argnums=2)(hidden, head, chunk_size)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, atol=5e-6)


def test_full_logits_never_exist_when_chunked():
    """With 8 chunks, forward and backward programs have no array of size T x V."""
    hidden, head, tokens = head_case(4, rows=1, length=64, width=8, vocab=512)

    def loss(hidden, head):
        settings = losses.HeadSettings(chunk_size=8)
        return losses.token_logprobs(hidden, head, tokens, settings, with_entropy=True)[0].sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 512 * 4


def test_bfloat16_hidden_keeps_float32_logits():
    hidden, head, tokens = head_case(5)
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    settings = losses.HeadSettings(chunk_size=4)
    logprobs, _ = losses.token_logprobs(hidden, head, tokens, settings)
    assert logprobs.dtype == jnp.float32
    rounded = jnp.asarray(head, jnp.bfloat16)
    want, _ = reference_logprobs(np.float64(hidden), np.float64(rounded), tokens, 1.0)
    np.testing.assert_allclose(logprobs, want, atol=2e-5)
    grads = jax.grad(lambda h, w: losses.token_logprobs(h, w, tokens, settings)[0].sum(), (0, 1))(
        hidden, jnp.asarray(head)
    )
    assert grads[0].dtype == jnp.bfloat16 and grads[1].dtype == jnp.float32


def test_token_values_are_of_the_state_before_the_token():
    np.testing.assert_array_equal(losses.token_values(jnp.array([[1.0, 2.0, 3.0]])), [[0, 1, 2]])


def test_clipped_surrogate_by_hand():
    # clip to [0.8, 1.28]; ratio 1.5, A 2: -2 * 1.28 = -2.56.  ratio 0.5, A 2: not clipped, -1.
    # ratio 0.5, A -2: max(1, 1.6) = 1.6.  ratio 1.5, A -2: 3.  ratio 5, A -2: 10, dual clip 3: 6.
    ratio = jnp.array([[1.5, 0.5, 0.5, 1.5, 5.0, 5.0]])
    advantages = jnp.array([[2.0, 2.0, -2.0, -2.0, -2.0, 2.0]])
    mask = jnp.ones_like(ratio, bool)
    for dual, bounded in ((None, 10.0), (3.0, 6.0)):
        clip = dict(clip_low=0.2, clip_high=0.28, dual_clip=dual)
        loss = losses.clipped_surrogate(jnp.log(ratio), advantages, mask, **clip)
        np.testing.assert_allclose(loss, [[-2.56, -1.0, 1.6, 3.0, bounded, -2.56]], rtol=1e-6)


def test_log_ratio_is_clamped_at_twenty():
    mask = jnp.ones((1, 2), bool)
    ratio = losses.log_ratio(jnp.array([[0.0, -90.0]]), jnp.array([[-30.0, 0.0]]), mask)
    np.testing.assert_array_equal(ratio, [[20.0, -20.0]])


def test_clipped_value_loss_by_hand():
    # v 2, v_old 1, R 0, clip .5: clip(v) = 1.5; max(4, 2.25) / 2 = 2.
    # v 0, v_old 1, R 0: clip(v) = .5; max(0, .25) / 2 = .125
    ones = jnp.ones((1, 2))
    mask = jnp.ones((1, 2), bool)
    values = jnp.array([[2.0, 0.0]])
    loss = losses.clipped_value_loss(values, ones, 0 * ones, mask, clip_value=0.5)
    np.testing.assert_allclose(loss, [[2.0, 0.125]])
    loss = losses.clipped_value_loss(values, ones, 0 * ones, mask, clip_value=None)
    np.testing.assert_allclose(loss, [[2.0, 0.0]])


def test_one_token_far_from_the_reference_does_not_dominate_the_kl():
    """d = -18 led to a value of 6.6e7 and a gradient of the same size."""
    d, mask = jnp.array([[-18.0, -2.0, 18.0]]), jnp.ones((1, 3), bool)
    kl = functools.partial(losses.kl_penalty, ref_logprobs=jnp.zeros_like(d), mask=mask)
    # e^2 - 2 - 1 = 4.389; e^-18 + 18 - 1 = 17 is also above 10
    np.testing.assert_allclose(kl(d, estimator='k3'), [[10, np.exp(2) - 3, 10]], rtol=1e-6)
    gradient = jax.grad(lambda x: kl(x, estimator='k3').sum())(d)
    np.testing.assert_allclose(gradient, [[0, 1 - np.exp(2), 0]], rtol=1e-5)
    np.testing.assert_allclose(kl(d, estimator='k3+'), kl(d, estimator='k3'), rtol=1e-5)
    gradient = jax.grad(lambda x: kl(x, estimator='k3+').sum())(d)
    np.testing.assert_allclose(gradient, d)


def test_kl_estimators_have_the_expected_values_and_gradients_on_five_tokens():
    """Exact expectation over pi: E k1 = E k3 = KL; gradients as in the docstring."""
    rng = np.random.default_rng(0)
    logits, ref_logits = rng.normal(size=(2, 5)).astype(np.float32)
    ref = jax.nn.log_softmax(ref_logits)

    def exact(logits):
        logp = jax.nn.log_softmax(logits)
        return (jnp.exp(logp) * (logp - ref)).sum()

    def reverse(logits):
        return (jnp.exp(ref) * (ref - jax.nn.log_softmax(logits))).sum()

    def expected(logits, estimator):
        logp = jax.nn.log_softmax(logits)[None]
        p = jax.lax.stop_gradient(jnp.exp(logp))
        kl = losses.kl_penalty(logp, ref[None], jnp.ones((1, 5), bool), estimator=estimator)
        return (p * kl).sum()

    kl = float(exact(logits))
    for estimator in ('k1', 'k3', 'k1+', 'k3+'):
        np.testing.assert_allclose(expected(logits, estimator), kl, rtol=1e-5)
    want = jax.grad(exact)(logits)
    for estimator in ('k2', 'k1+', 'k3+'):
        np.testing.assert_allclose(jax.grad(expected)(logits, estimator), want, atol=1e-6)
    np.testing.assert_allclose(jax.grad(expected)(logits, 'k1'), np.zeros(5), atol=1e-6)
    np.testing.assert_allclose(
        jax.grad(expected)(logits, 'k3'), jax.grad(reverse)(logits), atol=1e-6
    )


def test_token_weights_by_hand():
    # rows with 3, 1 and 0 trained tokens: n = 4, S = 2
    mask = jnp.array([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    x = jnp.array([[9, 1, 2, 3], [9, 9, 10, 9], [9, 9, 9, 9]], jnp.float32)

    def total(aggregation, **kwargs):
        return float(losses.weighted_sum(losses.token_weights(mask, aggregation, **kwargs), x))

    assert total('token_mean') == pytest.approx(16 / 4)
    assert total('seq_mean_token_mean') == pytest.approx((6 / 3 + 10) / 2)
    assert total('seq_mean_token_sum') == pytest.approx(16 / 2)
    assert total('token_sum_norm', norm_length=8) == pytest.approx(16 / 2 / 8)
    assert total('token_sum_norm') == pytest.approx(16 / 2 / 4)
    with pytest.raises(ValueError, match='micro_mean'):
        losses.token_weights(mask, 'micro_mean')


def test_an_episode_of_three_rows_weighs_as_much_as_one_of_one_row():
    """Rows counted as sequences, so an episode of three turns had three quarters of the loss."""
    # an episode of one turn and one of three; two trained tokens in each turn; between them a row
    # of an untrained episode
    trains = jnp.array([1, 0, 1, 1, 1], bool)
    mask = trains[:, None] & jnp.array([[0, 1, 1]], bool)
    episode = jnp.array([0, 1, 2, 2, 2])

    def shares(aggregation, **kwargs):
        weights = losses.token_weights(mask, aggregation, episode=episode, episodes=3, **kwargs)
        rows = weights.sum(1)
        return [float(rows[0]), float(rows[2:].sum())]

    assert shares('seq_mean_token_mean') == pytest.approx([1 / 2, 1 / 2])
    # sums over the tokens of an episode; the second has three times the tokens of the first
    assert shares('seq_mean_token_sum') == pytest.approx([2 / 2, 6 / 2])
    assert shares('token_sum_norm', norm_length=8) == pytest.approx([2 / 2 / 8, 6 / 2 / 8])
    assert shares('token_mean') == pytest.approx([2 / 8, 6 / 8])


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
@pytest.mark.parametrize('seed', range(2))
def test_splitting_an_episode_into_rows_in_any_order_changes_no_weight(aggregation, seed):
    rng = np.random.default_rng(seed)
    unsplit = rng.random((6, 5 * 4)) < rng.random((6, 1))
    unsplit[2] = False
    order = rng.permutation(6 * 5)
    rows = unsplit.reshape(6 * 5, 4)[order]
    of_episode = functools.partial(losses.token_weights, aggregation=aggregation, norm_length=9)
    split = of_episode(jnp.asarray(rows), episode=jnp.asarray(order // 5), episodes=6)
    want = np.asarray(of_episode(jnp.asarray(unsplit))).reshape(6 * 5, 4)[order]
    np.testing.assert_array_equal(split, want)
    empty = of_episode(jnp.zeros((2, 3), bool))
    assert not empty.any() and losses.weighted_sum(empty, jnp.full((2, 3), jnp.nan)) == 0


def reference_policy_loss(logp, old, adv, mask, low, high, dual):
    out = np.zeros(logp.shape)
    for b, t in np.argwhere(mask):
        ratio = np.exp(np.clip(logp[b, t] - old[b, t], -20, 20))
        a = adv[b, t]
        loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
        out[b, t] = min(loss, -a * dual) if a < 0 else loss
    return out


@SETTINGS
@given(seed=st.integers(0, 2**31), low=st.floats(0.05, 0.5), high=st.floats(0.05, 0.5))
def test_policy_and_value_loss_equal_float64_loops(seed, low, high):
    rng = np.random.default_rng(seed)
    logp, old, adv, returns = rng.normal(size=(4, 3, 5)) * 0.7
    mask = rng.random((3, 5)) < 0.6
    with jax.enable_x64(True):
        loss = losses.clipped_surrogate(
            losses.log_ratio(logp, old, mask),
            adv,
            mask,
            clip_low=low,
            clip_high=high,
            dual_clip=3.0,
        )
        value = losses.clipped_value_loss(logp, old, returns, mask, clip_value=low)
    np.testing.assert_allclose(
        loss, reference_policy_loss(logp, old, adv, mask, low, high, 3.0), atol=1e-6
    )
    near = np.clip(logp, old - low, old + low)
    want = 0.5 * np.maximum((logp - returns) ** 2, (near - returns) ** 2)
    np.testing.assert_allclose(value, np.where(mask, want, 0), atol=1e-6)


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_poisoned_padding_changes_neither_value_nor_gradient(poison):
    rng = np.random.default_rng(7)
    arrays = rng.normal(size=(4, 3, 6)).astype(np.float32)
    mask = rng.random((3, 6)) < 0.5
    weights = losses.token_weights(mask, 'token_mean')

    def total(logp, others):
        old, adv, ref = others
        ratios = losses.log_ratio(logp, old, mask)
        clip = dict(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
        per_token = losses.clipped_surrogate(ratios, adv, mask, **clip)
        for estimator in losses.KL_ESTIMATORS:
            per_token += losses.kl_penalty(logp, ref, mask, estimator=estimator)
        per_token += losses.clipped_value_loss(logp, old, ref, mask)
        return losses.weighted_sum(weights, per_token)

    poisoned = np.where(mask, arrays, poison)
    program = jax.jit(jax.value_and_grad(total))
    clean, dirty = (program(inputs[0], inputs[1:]) for inputs in (arrays, poisoned))
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    assert np.isfinite(dirty[1]).all()


def test_sampler_weights_by_hand():
    # ratios 3, .1, 1.5, (masked); truncated to [0, 2]: 2, .1, 1.5; IcePop [.5, 5]: 3, 0, 1.5
    old = jnp.log(jnp.array([[3.0, 0.1, 1.5, 7.0]]))
    mask = jnp.array([[True, True, True, False]])
    truncated = correction.sampler_weights(old, 0 * old, mask, low=0.0, high=2.0, drop=False)
    np.testing.assert_allclose(truncated, [[2, 0.1, 1.5, 0]], rtol=1e-6)
    icepop = correction.sampler_weights(old, 0 * old, mask, low=0.5, high=5.0, drop=True)
    np.testing.assert_allclose(icepop, [[3, 0, 1.5, 0]], rtol=1e-6)
