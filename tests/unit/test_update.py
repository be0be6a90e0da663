"""update_step: invariances (splits, devices, poisoned padding) and effects."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_rollouts as toy
import updates
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.models.functions import ModelFns, split_critic
from agentrl_jax.models.qwen2 import Qwen2
from agentrl_jax.rl import losses, metrics, microbatches, score, update
from agentrl_jax.rl.learning import Optim

TX = optax.sgd(0.1)


def state_of(params, critic_params=None, tx=TX):
    return updates.state(tx, params, critic_params)


@functools.cache
def separate_critic_state(tx=TX, **kwargs):
    return state_of(toy.toy_params(0), toy.toy_params(1), tx, **kwargs)


@functools.cache
def toy_batch(seed=0, **kwargs):
    rollout = toy.random_rollout(seed, **kwargs)
    return toy.batch_of(PPO(), rollout, 4, toy.scores_of(rollout))


QUICK = {'xla_backend_optimization_level': 0}
COMPILED = jax.jit(update.update_step, static_argnames=('fns', 'settings'), compiler_options=QUICK)
SHARED = ModelFns(toy.toy_hidden, toy.toy_head, toy.toy_values)
WITH_HEAD = SHARED.replace(value_head=toy.toy_value_head)
ALONE = ModelFns(toy.toy_hidden, toy.toy_head)


def toy_update(tx=TX, fns=SHARED, **fields):
    """Run update_step on a state and a batch, with fields of updates.settings."""

    def run(state, batch, key=None):
        how = updates.settings(len(batch.tokens), tx=tx, **fields)
        return COMPILED(state, batch, key, fns=fns, settings=how)

    return run


def assert_close(a, b, atol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


EVERYTHING = dict(
    entropy_coef=0.01, kl_estimator='k3', dual_clip=3.0, clip_high=0.28, temperature=0.9
)
SEQUENCES = 'seq_mean_token_mean'


# ---- splits, devices, order ----------------------------------------------------------------------


@pytest.mark.parametrize('shared', [False, True])
def test_every_split_into_microbatches_gives_the_same_step(shared):
    """SGD has rate 0.1, so a tolerance of 1e-7 for parameters is 1e-6 for gradients."""
    state = state_of(toy.toy_params(0)) if shared else separate_critic_state()
    batch, fns = toy_batch(), WITH_HEAD if shared else SHARED
    results = [
        toy_update(num_microbatches=parts, fns=fns, **EVERYTHING)(state, batch)
        for parts in ((1, 8) if shared else (1, 4))
    ]
    assert_close(results[0][0], results[1][0], atol=1e-7)
    assert_close(results[0][1], results[1][1], atol=1e-5)


def turn_by_turn(batch, turns):
    """Return the batch with one row per turn, in which only the tokens of that turn train."""
    rows = jax.tree.map(lambda x: jnp.repeat(x, turns, axis=0), batch)
    current = rows.turn == jnp.tile(jnp.arange(turns), len(batch.turn))[:, None]
    return rows.replace(mask=rows.mask & current, value_mask=rows.value_mask & current)


@pytest.mark.soak
@pytest.mark.parametrize(
    ('aggregation', 'devices'), [('token_mean', 1), ('token_sum_norm', 1), (SEQUENCES, 4)]
)
def test_one_row_per_turn_gives_the_same_step(aggregation, devices):
    """Surrogate, entropy, KL and critic used to count turns as episodes."""
    settings = EVERYTHING | dict(aggregation=aggregation, norm_length=5, num_minibatches=2)
    state, batch = separate_critic_state(), toy_batch(rows=16, length=30, turns=4)
    batch, key = without_rows(batch, trains=[0, 1, 3, 6, 7, 8, 11, 12, 15]), jax.random.key(3)
    assert len(set(batch.turn.max(1).tolist())) > 2
    expected, measured = toy_update(**settings)(state, batch, key=key)
    rows, layout = turn_by_turn(batch, 4), None
    if devices > 1:
        kinds = (AxisType.Auto,)
        mesh = jax.make_mesh((4,), ('data',), axis_types=kinds, devices=jax.devices()[:devices])
        layout = NamedSharding(mesh, P('data'))
        state, rows = jax.device_put((state, rows), (NamedSharding(mesh, P()), layout))
    split = dict(together=4, sparse=True, num_microbatches=4, layout=layout)
    after, metrics = toy_update(**split, **settings)(state, rows, key=key)
    assert_close(expected, after, atol=3e-7)
    del measured['batch/tokens'], metrics['batch/tokens']  # separate rows have other positions
    assert_close(measured, metrics, atol=1e-5)


def test_cut_rows_give_the_same_step():
    state, batch = state_of(toy.toy_params(0)), toy_batch(rows=16, length=30, turns=4)
    lengths = microbatches.used(batch.mask)
    assert len(set(jnp.searchsorted(jnp.asarray(microbatches.menu(30, 4)), lengths).tolist())) > 1
    settings = dict(fns=WITH_HEAD, **EVERYTHING)
    expected, measured = toy_update(**settings)(state, batch)
    after, metrics = toy_update(widths=4, num_microbatches=4, **settings)(state, batch)
    assert_close(expected, after, atol=1e-7)
    assert_close(measured, metrics, atol=1e-5)


def without_rows(batch, trains):
    left = jnp.isin(jnp.arange(len(batch.mask)), jnp.array(trains))[:, None]
    return batch.replace(mask=batch.mask & left, value_mask=batch.value_mask & left)


def test_skipping_untrained_tokens_gives_the_same_step():
    state, batch = separate_critic_state(), toy_batch(rows=16, length=30, turns=4)
    batch = without_rows(batch, trains=[1, 6, 7, 12, 15])
    run = functools.partial(toy_update, num_microbatches=4, **EVERYTHING)
    expected, measured = run()(state, batch)
    for cut in ({}, {'widths': 4}):
        after, metrics = run(sparse=True, **cut)(state, batch)
        assert_close(expected, after, atol=1e-7)
        assert_close(measured, metrics, atol=1e-5)


def test_rows_on_four_devices_give_the_step_of_one():
    mesh = jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, P('data'))
    tx = optax.adam(1e-2)
    state, batch = separate_critic_state(tx=tx), toy_batch(rows=16)
    batch = without_rows(batch, trains=[0, 1, 2, 3, 4, 5, 6, 7, 9, 12])  # two of the last eight
    kwargs = dict(tx=tx, num_minibatches=2, num_microbatches=2, **EVERYTHING)
    one, metrics = toy_update(**kwargs)(state, batch)
    spread = jax.device_put((state, batch), (NamedSharding(mesh, P()), rows))
    four, metrics_four = toy_update(layout=rows, sparse=True, **kwargs)(*spread)
    assert_close(one, four)
    assert_close(metrics, metrics_four, atol=1e-5)


def test_two_minibatches_are_two_updates_in_row_order():
    state, batch = separate_critic_state(), toy_batch()
    both, _ = toy_update(num_minibatches=2)(state, batch)
    one = toy_update()
    for rows in (slice(0, 4), slice(4, 8)):
        state, _ = one(state, jax.tree.map(lambda x, r=rows: x[r], batch))
    assert_close(both.params, state.params)
    assert_close(both.critic_params, state.critic_params)
    assert both.step == 1 and state.step == 2


def test_epochs_repeat_the_minibatches():
    state, batch = separate_critic_state(), toy_batch()
    twice, _ = toy_update(epochs=2)(state, batch)
    one = toy_update()
    state = one(one(state, batch)[0], batch)[0]
    assert_close(twice.params, state.params)


def test_a_key_permutes_rows_differently_in_each_epoch():
    plain = update.minibatch_rows(None, rows=12, num_minibatches=3, epochs=2)
    np.testing.assert_array_equal(plain, np.tile(np.arange(12).reshape(3, 4), (2, 1)))
    mixed = np.asarray(
        update.minibatch_rows(jax.random.key(0), rows=12, num_minibatches=3, epochs=2)
    ).reshape(2, 12)
    for epoch in mixed:
        assert sorted(epoch) == list(range(12))
    assert (mixed[0] != mixed[1]).any() and (mixed[0] != np.arange(12)).any()


# ---- against plain autodiff ----------------------------------------------------------------------


def test_the_step_is_sgd_on_a_plain_loss():
    """Reference: the loss in five lines, with the full batch and full logits."""
    state, batch = separate_critic_state(), toy_batch()

    @jax.jit
    def plain(params):
        positions = jnp.cumsum(batch.attention_mask, 1) - 1
        hidden = toy.toy_hidden(params, batch.tokens, positions, batch.attention_mask)
        logp = jax.nn.log_softmax(hidden @ params['head'])[:, :-1]
        logp = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], 2)[:, :, 0]
        ratio = jnp.exp(logp - batch.old_logprobs[:, 1:])
        a = batch.advantages[:, 1:]
        loss = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        return jnp.where(batch.mask[:, 1:], loss, 0).sum() / batch.mask.sum()

    new, metrics = toy_update()(state, batch)
    gradient = jax.grad(plain)(state.params)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradient)
    assert_close(new.params, want)
    np.testing.assert_allclose(metrics['policy/loss'], plain(state.params), atol=1e-6)
    np.testing.assert_allclose(metrics['policy/grad_norm'], optax.tree.norm(gradient), rtol=1e-5)


def test_a_shared_backbone_learns_from_both_losses():
    state, batch = state_of(toy.toy_params(0)), toy_batch()
    separate = toy_update(fns=ALONE)(state, batch)[0]
    with_head, metrics = toy_update(fns=WITH_HEAD, value_coef=0.5)(state, batch)
    np.testing.assert_array_equal(separate.params['value'], state.params['value'])
    assert (with_head.params['value'] != state.params['value']).any()
    assert metrics['value/loss'] > 0

    @jax.jit
    def value(params):
        raw = toy.toy_values(
            params,
            None,
            batch.tokens,
            jnp.cumsum(batch.attention_mask, 1) - 1,
            batch.attention_mask,
        )
        weights = losses.token_weights(batch.value_mask, 'token_mean')
        return update.value_loss(raw, batch, weights, clip_value=0.5)[0]

    # the joint step changes parameters by the policy's step plus half of the value's step
    gradient = jax.grad(value)(state.params)
    want = jax.tree.map(lambda p, g: p - 0.1 * 0.5 * g, separate.params, gradient)
    assert_close(with_head.params, want)


def test_the_critic_is_updated_before_the_policy_and_independently():
    state, batch = separate_critic_state(), toy_batch()
    both, metrics = toy_update()(state, batch)
    alone, _ = toy_update(fns=ALONE)(state_of(state.params), batch)
    assert_close(both.params, alone.params)
    assert (both.critic_params['value'] != state.critic_params['value']).any()
    assert metrics['value/grad_norm'] > 0


def test_two_critic_steps_equal_two_updates_with_a_fixed_policy():
    state, batch = separate_critic_state(), toy_batch()
    one, _ = toy_update(critic_warmup=9)(state, batch)
    two, measured = toy_update(critic_warmup=9)(one, batch)
    both, same = toy_update(critic_warmup=9, critic_updates=2)(state, batch)
    assert 'value/clip_frac' in same
    assert_close(two.critic_params, both.critic_params, atol=1e-7)
    assert_close(measured['value/loss'], same['value/loss'])
    assert_same(both.params, state.params)


def nested(flat):
    """Return the toy critic with its embedding in place of attention."""
    rest = {name: x for name, x in flat.items() if name != 'embed'}
    return {'layer': {'self_attn': {'embed': flat['embed']}}, 'rest': rest}


def nested_values(params, critic, *rows):
    return toy.toy_values(params, critic['rest'] | critic['layer']['self_attn'], *rows)


def test_freezing_attention_does_not_change_the_step_of_the_rest():
    state, batch = separate_critic_state(), toy_batch()
    fns = SHARED.replace(values=nested_values)
    tx = optax.sgd(0.1, momentum=0.9)
    full = state_of(state.params, nested(state.critic_params), tx)
    trained, fixed = split_critic(full.critic_params, freeze_attention=True)
    assert trained.keys() == {'rest'} and fixed.keys() == {'layer'}
    frozen = full.replace(critic_opt_state=tx.init(trained))
    both, measured = toy_update(tx, fns)(full, batch)
    part, less = toy_update(tx, fns, freeze_attention=True)(frozen, batch)
    assert_same(part.critic_params['layer'], full.critic_params['layer'])
    moved = jax.tree.map(lambda x, y: (x != y).any(), both.critic_params['layer'], fixed['layer'])
    assert all(jax.tree.leaves(moved))
    assert_close(part.critic_params['rest'], both.critic_params['rest'])
    assert_close(part.params, both.params)
    assert less['value/grad_norm'] < measured['value/grad_norm']  # of trained parameters
    momenta = [x.size for x in jax.tree.leaves(part.critic_opt_state) if x.ndim]
    assert sum(momenta) == sum(x.size for x in jax.tree.leaves(trained))


def test_steps_of_a_policy_in_warmup_do_not_count_as_skipped():
    before, run = separate_critic_state(), toy_update(critic_warmup=1)
    state, first = run(before, toy_batch())
    assert_same(state.params, before.params)
    assert (state.critic_params['value'] != before.critic_params['value']).any()
    assert np.isnan(first['update/applied']) and first['update/critic_applied'] == 1
    after, second = run(state, toy_batch())
    assert (after.params['head'] != state.params['head']).any()
    assert second['update/applied'] == second['update/critic_applied'] == 1


def test_skipped_critic_steps_are_reported_separately_from_the_policy():
    """update/applied was 1 because one of the two had moved."""
    state, batch = separate_critic_state(), toy_batch()
    wrong = batch.replace(returns=jnp.where(batch.mask, 1e30, 0.0))  # its square is inf
    new, metrics = toy_update(num_minibatches=2)(state, wrong)
    assert_same(new.critic_params, state.critic_params)
    assert metrics['update/critic_applied'] == 0 and metrics['update/applied'] == 1
    assert metrics['update/skipped'] == 2


# ---- excluded rows and tokens ------------------------------------------------------------------


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_poisoned_padding_changes_neither_parameters_nor_metrics(poison):
    state, batch = separate_critic_state(), toy_batch(faulty=(1,))
    fields = ('old_logprobs', 'ref_logprobs', 'advantages', 'returns', 'old_values')
    bad = batch.replace(
        **{name: jnp.where(batch.mask, getattr(batch, name), poison) for name in fields}
    )
    run = toy_update(num_microbatches=2, **EVERYTHING)
    assert_same(run(state, batch), run(state, bad))


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_step_that_is_not_finite_is_skipped_and_counted(bad):
    tx = optax.adam(1e-2)
    state, batch = separate_critic_state(tx), toy_batch()
    first = int(jnp.argmax(batch.mask[0]))
    wrong = batch.replace(advantages=batch.advantages.at[0, first].set(bad))
    new, metrics = toy_update(tx, num_minibatches=2)(state, wrong)
    # only the policy's first mini-batch is skipped, not its second or the critic's two
    assert new.skipped == 1 and metrics['update/skipped'] == 1 and new.step == 1
    assert metrics['update/applied'] == 0.5 and metrics['update/critic_applied'] == 1
    assert np.isfinite(metrics['policy/loss']) and np.isfinite(metrics['policy/grad_norm'])
    second = jax.tree.map(lambda x: x[4:], batch)
    want, _ = toy_update(tx, fns=ALONE)(state_of(state.params, tx=tx), second)
    assert_close(new.params, want.params)
    assert_close(new.opt_state, want.opt_state)


def test_a_batch_without_trained_tokens_changes_nothing():
    """With a zero gradient, Adam with momentum and weight decay would still move parameters."""
    tx = Optim().tx(1e-2)
    state = separate_critic_state(tx)
    state, _ = toy_update(tx)(state, toy_batch())
    empty = toy_batch(faulty=range(8))
    new, metrics = toy_update(tx)(state, empty)
    assert_same(new.replace(step=state.step), state)
    assert metrics['batch/trained_tokens'] == 0 and metrics['update/skipped'] == 0
    measured = {name for name, x in metrics.items() if np.isfinite(x)}
    assert measured == {
        'batch/trained_tokens',
        'batch/tokens',
        'batch/trained_rows',
        'batch/advantage_std',
        'value/explained_variance',
        'update/skipped',
    }  # values that are not computed are nan, not 0


def test_an_update_with_only_skipped_steps_reports_no_loss():
    """Loss and gradient norm were 0.0, which hid the failure."""
    state, batch = state_of(toy.toy_params(0)), toy_batch()
    wrong = batch.replace(advantages=jnp.where(batch.mask, jnp.nan, 0.0))
    new, metrics = toy_update(fns=ALONE, num_minibatches=2)(state, wrong)
    assert_same(new.params, state.params)
    assert metrics['update/skipped'] == 2 and metrics['update/applied'] == 0
    assert np.isnan(metrics['policy/loss']) and np.isnan(metrics['policy/grad_norm'])
    good = batch.replace(advantages=batch.advantages.at[:4].set(jnp.nan))
    _, metrics = toy_update(fns=ALONE, num_minibatches=2)(state, good)
    assert metrics['update/applied'] == 0.5 and np.isfinite(metrics['policy/loss'])


def test_means_over_optimiser_steps_by_hand():
    steps = {
        'policy/loss': jnp.array([jnp.nan, 1.0, 3.0]),
        'policy/ratio_max': jnp.array([1.0, jnp.nan, 1.5]),
        'sampler/logprob_gap': jnp.array([jnp.nan, 0.25, 9.0]),  # of the first trained episode
        'policy/entropy': jnp.full(3, jnp.nan),
    }
    out = metrics.reduce_steps(steps)
    assert (out['policy/loss'], out['policy/ratio_max'], out['sampler/logprob_gap']) == (
        2,
        1.5,
        0.25,
    )
    assert np.isnan(out['policy/entropy'])


# ---- pieces -----------------------------------------------------------------------------------


def test_several_critic_steps_count_as_one_step_of_its_schedule():
    """With two critic steps per policy step, its schedule ended halfway through the run."""
    optim = Optim(schedule='linear', schedule_steps=4, warmup_steps=2)
    alone, twice = optim.rate(0.3), optim.rate(0.3, 2)
    assert [twice(k) for k in range(12)] == [alone(k // 2) for k in range(12)]
    assert Optim().rate(0.3, 2) == 0.3


def test_the_optimizer_clips_gradients_and_decays_weights():
    params, tx = {'w': jnp.array([3.0])}, Optim(weight_decay=0.5, beta1=0.9).tx(0.1)
    updates, state = tx.update({'w': jnp.zeros(1)}, tx.init(params), params)
    np.testing.assert_allclose(updates['w'], [-0.1 * 0.5 * 3.0], rtol=1e-6)
    _, state = tx.update({'w': jnp.array([50.0])}, state, params)
    np.testing.assert_allclose(optax.tree.get(state, 'mu')['w'], [0.1 * 1.0], rtol=1e-6)


@pytest.mark.parametrize('schedule', ['constant', 'linear', 'cosine'])
def test_the_logged_rate_is_the_rate_of_the_optimiser(schedule):
    """Adam without memory steps by the rate; skipped steps do not count."""
    settings = dict(warmup_steps=2, schedule=schedule, schedule_steps=4, final_lr=0.1)
    optim = Optim(lr=0.1, critic_lr=0.3, weight_decay=0.0, beta1=0.0, beta2=0.0, **settings)
    tx = optim.tx(0.1)
    params, logged, applied = {'w': jnp.array([3.0])}, [], []
    state = state_of(params, critic_params=params, tx=tx)
    state = state.replace(critic_opt_state=tx.init(params))
    for finite in (True, False, True, True, True, True, True, True):
        rates = metrics.learning_rates(state, optim)
        assert rates['optim/critic_lr'] == pytest.approx(0.3 / 2)  # no step
        moved, opt_state, _, _, took = update.apply_if_finite(
            tx,
            {'w': jnp.array([50.0 if finite else jnp.nan])},
            state.opt_state,
            state.params,
            jnp.float32(0.0),
            True,
        )
        logged += [float(rates['optim/lr'])] if took else []
        applied += [float((state.params['w'] - moved['w'])[0])] if took else []
        state = state.replace(params=moved, opt_state=opt_state)
    np.testing.assert_allclose(logged, applied, rtol=1e-4)
    assert logged[:2] == pytest.approx([0.05, 0.1])
    ends = {'constant': 0.1, 'linear': 0.1 * 0.1, 'cosine': 0.1 * 0.1}
    assert logged[-1] == pytest.approx(ends[schedule])
    alone = metrics.learning_rates(state.replace(critic_params=None), optim)
    assert list(alone) == ['optim/lr']


def test_explained_variance_by_hand():
    # returns 1 3 (var 1), values 1 2: residuals 0 1 (var .25) -> .75
    rollout = toy.rollout_of([[(1, 2)]], [[1.0]], length=3)
    batch = toy.batch_of(PPO(), rollout, 1, toy.scores_of(rollout))
    batch = batch.replace(returns=jnp.array([[0.0, 1, 3]]), old_values=jnp.array([[0.0, 1, 2]]))
    measured = metrics.batch_metrics(batch, True)
    assert measured['value/explained_variance'] == pytest.approx(0.75)
    assert measured['batch/tokens'] == batch.attention_mask.sum() > measured['batch/trained_tokens']
    dropped = batch.replace(mask=jnp.zeros_like(batch.mask))  # untrained rows
    assert metrics.batch_metrics(dropped, True)['batch/tokens'] == 0
    assert 'value/explained_variance' not in metrics.batch_metrics(batch, False)
    equal = batch.replace(returns=jnp.array([[0.0, -0.1, -0.1 - 1e-8]]))  # except for rounding
    assert metrics.batch_metrics(equal, True)['value/explained_variance'] == 0


@pytest.mark.parametrize(
    'count, limit, size', [(250, 8, 8), (24, 16, 8), (6, 16, 6), (7, 4, 4), (8, 4, 4), (1, 4, 1)]
)
def test_rows_that_the_microbatch_does_not_divide_are_scored_in_slices_of_its_size(
    count, limit, size
):
    """250 levels in microbatches of 8 were scored two at a time."""
    sizes = []

    def double(x):
        sizes.append(len(x))
        return 2 * x

    x = jnp.arange(2 * count).reshape(count, 2)
    np.testing.assert_array_equal(score.score_rows(double, (x,), limit), 2 * x)
    assert set(sizes) == {size}


# ---- with the real model -------------------------------------------------------------------------

TINY = Qwen2(
    vocab_size=toy.VOCAB,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    tie_embeddings=True,
)


def test_a_bf16_qwen_keeps_float32_masters_and_donates_its_state():
    config = dataclasses.replace(TINY, dtype='bfloat16', remat=True)
    params = jax.jit(config.init)(jax.random.key(0))
    how = updates.settings(8, num_microbatches=2, head_chunk=32)
    tx = how.optim.tx(1e-6)
    fns = ModelFns(hidden=config.forward, head=config.head_kernel)
    step = functools.partial(update.update_step, fns=fns, settings=how)
    run = jax.jit(step, donate_argnums=0, compiler_options=QUICK)
    state = state_of(params, tx=tx)
    before = jax.device_get(state.params)
    new, metrics = run(state, toy_batch())
    for old, leaf in zip(jax.tree.leaves(before), jax.tree.leaves(new.params), strict=True):
        assert leaf.dtype == jnp.float32
        # a step of 1e-6 would be rounded away in bfloat16
        assert (np.asarray(leaf) != old).mean() > 0.5
    assert np.isfinite(metrics['policy/loss']) and metrics['policy/entropy'] > 0
