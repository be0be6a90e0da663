"""On-policy distillation: two estimators of a gradient, over all tokens and sampled tokens."""

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

from agentrl_jax.extras.distillation.distilling import Distilling, divergence, reverse_kl
from agentrl_jax.extras.distillation.opd import OPD
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses, update
from agentrl_jax.rl.algorithm import Clip
from agentrl_jax.rl.learning import Learner, UpdateSettings
from agentrl_jax.text.grammar import Bits
from agentrl_jax.types import FrozenParams, Scores

pytestmark = pytest.mark.soak

SAMPLED, FULL = OPD(divergence='sampled'), OPD()
TOY = ModelFns(toy.toy_hidden, toy.toy_head)


def teacher(seed, width):
    """Return the parameters of a toy model of another width."""
    rng = np.random.default_rng(seed)
    shapes = dict(embed=(toy.VOCAB, width), mix=(width, width), head=(width, toy.VOCAB))
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


TEACHERS = (teacher(1, 3), teacher(2, 6))


def test_reverse_kl_by_hand():
    # p = 1/4 3/4, q = 1/2 1/2: 1/4 ln 1/2 + 3/4 ln 3/2; with a second teacher of 1/4 3/4 the
    # mixture is 3/8 5/8: 1/4 ln 2/3 + 3/4 ln 6/5
    p, q = jnp.log(jnp.array([0.25, 0.75])), jnp.log(jnp.array([0.5, 0.5]))
    np.testing.assert_allclose(reverse_kl(p, [q]), 0.130812, rtol=1e-4)
    np.testing.assert_allclose(reverse_kl(p, [q, p]), 0.035375, rtol=1e-4)
    # in z = (ln 1, ln 3) its slope is p_v (log p_v / q_v - KL): 1/4 (-.693147 - .130812) and back
    slope = jax.grad(lambda z: reverse_kl(jax.nn.log_softmax(z), [q]))(p)
    np.testing.assert_allclose(slope, [-0.205990, 0.205990], rtol=1e-4)


@pytest.mark.parametrize('grammar', ['', 'few', 'classes'])
@pytest.mark.parametrize('chunk', [None, 4])
def test_the_kl_of_all_tokens_equals_a_loop(grammar, chunk):
    """Over the allowed tokens, with teachers of other widths, shifted once."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    tokens = rng.integers(7, size=(3, 6)).astype(np.int32)
    models = [(draw(3, 6, width), draw(width, 7)) for width in (4, 2, 5)]
    mask = rng.random((3, 6)) < 0.5
    few, classes = (1, 2, 5), np.zeros(7, np.int32)
    bits = None
    if grammar == 'few':
        tokens, bits = np.int32(few)[tokens % 3], Bits(ids=few)
        classes[:] = 31  # no bit
        classes[list(few)] = range(3)
    elif grammar:
        classes = np.int32([0, 1, 1, 2, 2, 2, 0])
        bits = Bits(classes=classes.tobytes())
    word = rng.integers(1, 8, size=(3, 6, 1)).astype(np.uint32)
    allowed = jnp.asarray(word) if grammar else None
    for selected, row_tokens in ((None, None), (jnp.asarray(mask), int(mask.sum(1).max()))):
        (kl,) = losses.of_logits(
            divergence,
            jax.tree.map(jnp.asarray, models),
            jnp.asarray(tokens),
            losses.HeadSettings(0.7, chunk, row_tokens, bits),
            mask=selected,
            allowed=allowed,
        )
        for b, t in np.argwhere(mask[:, 1:]) + [0, 1]:
            legal = [v for v in range(7) if not grammar or word[b, t, 0] >> classes[v] & 1]
            each = []
            for hidden, head in models:
                odds = np.exp((hidden[b, t - 1] @ head / 0.7)[legal])
                each.append(odds / odds.sum())
            p, q = each[0], (each[1] + each[2]) / 2
            assert kl[b, t] == pytest.approx((p * np.log(p / q)).sum(), abs=1e-5)


# ---- one state, seven tokens ---------------------------------------------------------------------

V = toy.VOCAB
ONE = ModelFns(lambda params, tokens, *_: jnp.ones((*tokens.shape, 1)), lambda params: params[None])
STUDENT, OTHER = (jnp.asarray(np.random.default_rng(s).normal(size=V), jnp.float32) for s in (3, 4))


def every_token(how, teacher_logits):
    """Return the expected (loss, gradient), from one row per token that can be sampled."""
    rollout = toy.rollout_of([[(1, 1)]] * V, np.zeros((V, 1)), length=2)
    rollout = rollout.replace(tokens=jnp.stack([jnp.zeros(V, jnp.int32), jnp.arange(V)], axis=1))
    old, ref = (
        jnp.stack([jnp.zeros(V), jax.nn.log_softmax(z)], axis=1) for z in (STUDENT, teacher_logits)
    )
    batch = how.make_batch(rollout, Scores(old, ref, jnp.zeros_like(old)), group_size=V)
    weights = jnp.where(batch.mask, jnp.exp(old), 0.0)
    settings = UpdateSettings(algorithm=how, extras=(Distilling(how.divergence == 'full', (ONE,)),))
    learner = Learner(ONE, FrozenParams({}, None, {'teachers': (teacher_logits,)}), settings)
    (extra,) = settings.extras
    total = batch.mask.sum()
    extra_loss = functools.partial(extra.loss, total=total, learner=learner)

    def loss(params):
        inputs = (batch, weights, None, ONE, settings, [extra_loss])
        return update.policy_loss(params, *inputs)

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(STUDENT)
    return value, gradient, sums


def test_the_sampled_form_has_the_gradient_of_the_full_form_in_expectation():
    (value, gradient, sums), (_, estimate, estimated) = (
        every_token(how, OTHER) for how in (FULL, SAMPLED)
    )
    p, q = (np.asarray(jax.nn.softmax(z)) for z in (STUDENT, OTHER))
    kl = (p * np.log(p / q)).sum()
    np.testing.assert_allclose(value, kl, rtol=1e-5)
    np.testing.assert_allclose(gradient, p * (np.log(p / q) - kl), atol=1e-6)
    np.testing.assert_allclose(gradient, estimate, atol=1e-6)
    np.testing.assert_allclose(sums['policy/kl_teacher'], V * kl, rtol=1e-5)  # the same in each row
    np.testing.assert_allclose(estimated['policy/kl_teacher'], np.log(p / q).sum(), rtol=1e-5)


@pytest.mark.parametrize('how', [FULL, SAMPLED])
def test_a_teacher_equal_to_the_student_teaches_nothing(how):
    value, gradient, _ = every_token(how, STUDENT)
    assert value == 0 and not gradient.any()  # exactly, or Adam would follow rounding


def test_advantages_add_teacher_log_ratios_and_returns():
    rollout = toy.rollout_of([[(1, 2)], [(1, 1)]], [[3.0], [1.0]], length=3)
    scores = Scores(*jnp.array([[[9.0, -2, -3], [9, -1, 9]], [[9, -1.5, -5], [9, -1, 9]]]), 0.0)
    scores = scores.replace(values=jnp.zeros((2, 3)))
    # log q - log p: .5, -2 | 0; returns 3 and 1 minus their mean 2, times .5
    for how, want in (
        (SAMPLED, [[0, 0.5, -2], [0, 0, 0]]),
        (dataclasses.replace(SAMPLED, reward_coef=0.5), [[0, 1, -1.5], [0, -0.5, 0]]),
        (dataclasses.replace(FULL, reward_coef=0.5), [[0, 0.5, 0.5], [0, -0.5, 0]]),
        (FULL, [[0, 0, 0], [0, 0, 0]]),
    ):
        batch = how.make_batch(rollout, scores, group_size=2)
        np.testing.assert_allclose(batch.advantages, want, atol=1e-6)


# ---- full updates --------------------------------------------------------------------------------

FROZEN = FrozenParams({}, None, {'teachers': TEACHERS})
LEARN = jax.jit(
    update.learn,
    static_argnames=('fns', 'settings'),
    compiler_options={'xla_backend_optimization_level': 0},
)


def step(how, *, frozen=FROZEN, teachers=(TOY, TOY), prefix=0, rollout=None, devices=1, **fields):
    """Return parameters and metrics after an SGD step on eight toy episodes."""
    mesh = jax.make_mesh(
        (devices,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P('data'))
    params, tx = toy.toy_params(0), optax.sgd(0.1)
    state = updates.state(tx, params)
    settings = updates.settings(
        8 * fields.pop('rows', 1),
        tx=tx,
        algorithm=how,
        together=2 if 'context' in fields else 1,
        num_groups=2,
        group_size=4,
        max_turns=2,
        layout=rows if devices > 1 else None,
        extras=(Distilling(how.divergence == 'full', teachers, prefix),),
        **fields,
    )
    inputs = jax.device_put((state, frozen), replicated)
    rollout = toy.random_rollout(1) if rollout is None else rollout
    state, measured, *_ = LEARN(*inputs, jax.device_put(rollout, rows), fns=TOY, settings=settings)
    return jax.device_get((state.params, measured['policy/kl_teacher'], measured['policy/loss']))


@functools.cache
def plain(how):
    return step(how)


OPEN = dataclasses.replace(SAMPLED, clip=Clip(1.0, 9.0))  # toy episodes are far off-policy


@pytest.mark.parametrize(
    'how, changes',
    [
        (FULL, {'num_microbatches': 4, 'head_chunk': 8}),
        (OPEN, {'num_microbatches': 4, 'head_chunk': 8}),
        (FULL, {'devices': 4}),
    ],
    ids=['full in chunks', 'sampled in chunks', 'mesh'],
)
def test_splitting_a_batch_changes_nothing(how, changes):
    params, *_ = plain(how)
    assert max(np.abs(params[name] - x).max() for name, x in toy.toy_params(0).items()) > 1e-3
    split = step(how, **changes)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), plain(how), split)
