"""examples/one_step.py gives the results of the package without importing it."""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax import types
from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.models.qwen2 import Qwen2
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import KL
from agentrl_jax.rl.masked import positions_of

PATH = pathlib.Path(__file__).parents[2] / 'examples' / 'one_step.py'
GROUP = 4


@pytest.fixture(autouse=True, scope='module')
def broadcasting():
    """Allow NumPy's broadcasting, as outside of the tests, which require equal ranks."""
    with jax.numpy_rank_promotion('allow'):
        yield


@pytest.fixture(scope='module')
def one(broadcasting):
    spec = importlib.util.spec_from_file_location('one_step', PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope='module')
def episodes(one):
    """Return (parameters, rollout): groups with different returns, and one with equal returns."""
    params = one.init(jax.random.key(0))
    rollout = one.collect(params, np.repeat(np.arange(4), GROUP), jax.random.key(1))
    rollout.rewards[::3, 0] += 1.0
    rollout.rewards[:GROUP] = -0.1
    return params, rollout


def model(one):
    return Qwen2(len(one.VOCAB), one.HIDDEN, one.MLP, one.LAYERS, one.HEADS, one.KV_HEADS, one.HEAD)


def logprobs_of(one, params, rollout):
    """Return log-probabilities of the package's model and token_logprobs."""
    tokens, attention = jnp.asarray(rollout.tokens), jnp.asarray(rollout.turn >= 0)
    hidden = model(one).forward(params, tokens, positions_of(attention), attention)
    head = params['model']['embed_tokens']['embedding'].T
    return losses.token_logprobs(hidden, head, tokens)[0]


def package_batch(rollout, old_logprobs):
    """Return the package's GRPO batch for the episodes of the example."""
    empty = types.Rollout.empty(
        jnp.zeros(len(rollout.tokens), jnp.int32),
        jnp.zeros(1, jnp.int32),
        pad_id=0,
        max_tokens=rollout.tokens.shape[1],
        max_turns=rollout.rewards.shape[1],
        max_actions=1,
    )
    known = dict(tokens=rollout.tokens, action_mask=rollout.mask, turn=rollout.turn)
    full = empty.replace(**known, attention_mask=rollout.turn >= 0, rewards=rollout.rewards)
    full = jax.tree.map(jnp.asarray, full)
    scores = toy.zero_scores(full).replace(old_logprobs=old_logprobs)
    return toy.batch_of(GRPO(kl=KL(0.0)), full, GROUP, scores)


@pytest.mark.soak
def test_sampler_trainer_and_package_agree_on_log_probabilities(one, episodes):
    params, rollout = episodes
    package = np.where(rollout.mask, logprobs_of(one, params, rollout), 0.0)
    trainer = np.where(rollout.mask, one.token_logprobs(params, rollout.tokens), 0.0)
    assert rollout.mask.sum() > 50
    np.testing.assert_allclose(trainer, package, atol=2e-6)
    np.testing.assert_allclose(rollout.logprobs, package, atol=2e-6)


def test_advantages_loss_and_gradient_equal_those_of_the_package(one, episodes):
    params, rollout = episodes
    rng = np.random.default_rng(2)  # an older policy: ratios on both sides of the clip
    old = np.where(rollout.mask, rollout.logprobs + rng.normal(0, 0.3, rollout.mask.shape), 0.0)
    batch, algorithm = package_batch(rollout, jnp.float32(old)), GRPO(kl=KL(0.0))
    advantages = one.group_advantages(rollout.returns, GROUP)
    assert not advantages[:GROUP].any() and (abs(advantages) > 0.1).any()
    each = jnp.where(rollout.mask, advantages[:, None], 0.0)
    np.testing.assert_allclose(each, batch.advantages, atol=2e-5)

    def package_loss(params):
        weights = losses.token_weights(batch.mask, algorithm.weights.aggregation)
        per_token = algorithm.loss(logprobs_of(one, params, rollout), batch)
        return losses.weighted_sum(weights, per_token)

    inputs = params, rollout.tokens, rollout.mask, jnp.float32(old), advantages
    ours = jax.jit(jax.value_and_grad(one.loss))(*inputs)
    theirs = jax.jit(jax.value_and_grad(package_loss))(params)
    assert abs(float(theirs[0])) > 1e-3
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-6), ours, theirs)


@pytest.mark.soak
def test_it_learns(one, capsys):
    one.main(steps=11, groups=16, group_size=8, seed=0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if 'success' in line]
    first, last = (float(line[3]) for line in (lines[0], lines[-1]))
    assert first < 0.2 and last > 0.3


@pytest.mark.soak
def test_it_runs_without_jit(one, capsys):
    with jax.disable_jit():
        one.main(steps=1, groups=1, group_size=2, seed=0)
    assert 'largest gap' in capsys.readouterr().out
