"""Corrections for a sampler that differs from the trainer."""

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
from agentrl_jax.rl import correction, update
from agentrl_jax.rl.learning import Sampler, UpdateSettings
from agentrl_jax.run import build
from agentrl_jax.run import parts as assemble
from agentrl_jax.run.config import read as read_config
from agentrl_jax.types import Episodes


def test_corrections_by_hand():
    # ratios trainer / sampler 1, 3, .25 on three trained tokens, advantages 1
    out = tiny_steps.toy.rollout_of([[(1, 3)]], [[1.0]], length=4)
    old = jnp.log(jnp.array([[1.0, 0.5, 0.75, 0.125]]))
    sampled = old - jnp.log(jnp.array([[1.0, 1.0, 3.0, 0.25]]))
    scores = tiny_steps.toy.scores_of(out).replace(old_logprobs=old)
    batch = GRPO().make_batch(out, scores, group_size=1)

    def correct(*fields):
        how = UpdateSettings(algorithm=GRPO(), sampler=Sampler(*fields))
        return correction.correct(batch, sampled, how)

    tis, measured = correct('tis')  # at most 2
    np.testing.assert_allclose(tis.advantages, [[0, 1, 2, 0.25]], rtol=1e-6)
    assert measured['sampler/outside'] == pytest.approx(1 / 3)
    assert measured['sampler/weight'] == pytest.approx(3.25 / 3)
    assert measured['sampler/logprob_gap'] == pytest.approx(np.log(4), rel=1e-6)
    icepop, _ = correct('icepop')  # 0 outside .5 and 5
    np.testing.assert_allclose(icepop.advantages, [[0, 1, 3, 0]], rtol=1e-6)


@functools.cache
def batch_of(sampler, **correction):
    """Return (batch, metrics, rollout) of a sampler with this dtype and a float32 trainer."""
    params, play_in = tiny.cloned('frozen_lake')[0], tiny.config()
    fields = dict(correction['fields']) | {'rollout.sampler_dtype': sampler}
    run = read_config(micro_runs.config('frozen_lake', algorithm='grpo', **fields))
    mesh = assemble.build_mesh(run)
    play = assemble.build_collect(run, play_in, mesh, training=True)
    stream = jnp.arange(16, dtype=jnp.int32)
    listed = Episodes(level=stream // 4, token_stream=stream, world_stream=stream)
    task = tiny.task('frozen_lake', max_turns=2, max_actions_per_turn=2, max_actions_per_episode=4)
    out, _ = play(params, task, listed, jax.random.key(3))
    out = out.replace(rewards=jnp.zeros_like(out.rewards).at[::3, 0].set(1.0))
    fns = ModelFns(hidden=tiny.hidden, head=tiny.head, values=None, value_head=None)
    how = build.build_update_settings(run, mesh, None)
    program = functools.partial(update.prepare, fns=fns, settings=how)
    state = tiny_steps.fresh().replace(params=params)
    batch, _, _, measured = jax.jit(program, compiler_options=tiny.QUICK)(
        state, tiny_steps.NOTHING_FROZEN, out
    )
    return jax.device_get((batch, measured, out))


def corrected(sampler, **fields):
    fields = {'loss.' + name: value for name, value in fields.items()}
    return batch_of(sampler, fields=tuple(fields.items()))


def factors(batch, plain):
    """Return the factors by which the correction scaled the non-zero advantages."""
    nonzero = plain.mask & (np.abs(plain.advantages) > 1e-3)
    return batch.advantages[nonzero] / plain.advantages[nonzero]


@pytest.mark.soak
def test_a_bfloat16_sampler_is_corrected_within_bounds():
    plain, measured, out = corrected('bfloat16')
    assert 'sampler/weight' not in measured
    np.testing.assert_array_equal(plain.old_logprobs, np.where(plain.mask, out.logprobs, 0))
    batch, measured, _ = corrected('bfloat16', sampler_correction='tis', sampler_high=1.002)
    # Another precision: the factors are not 1, and none is above its bound.
    scales = factors(batch, plain)
    assert np.abs(scales - 1).max() > 1e-3 and scales.max() <= 1.002 + 1e-6
    assert measured['sampler/logprob_gap'] > 1e-3 and 0 < measured['sampler/outside'] < 1
    exact = np.exp(batch.old_logprobs - out.logprobs)[plain.mask]
    assert measured['sampler/weight'] == pytest.approx(np.minimum(exact, 1.002).mean(), rel=1e-5)
    bounds = dict(sampler_low=0.998, sampler_high=1.002)
    batch, measured, _ = corrected('bfloat16', sampler_correction='icepop', **bounds)
    scales = factors(batch, plain)
    inside = scales[scales != 0]
    assert 0 < len(inside) < len(scales) and (np.abs(inside - 1) <= 0.002 + 1e-6).all()


def test_in_bfloat16_the_sampler_rounds_like_the_trainer():
    """The gap was 2.8e-3: rounded attention weights, and XLA's excess precision."""
    cfg = micro_runs.config('frozen_lake', algorithm='grpo', **{'model.dtype': 'bfloat16'})
    run = build.build(cfg)
    key, training = jax.random.key(3), run.training
    [episodes] = training.draw(key, 0)
    out, _ = training.collects[0](run.params, training.tasks[0], episodes, key)
    gap = np.abs(training.rescore(run.params, out) - out.logprobs)[np.asarray(out.action_mask)]
    assert len(gap) > 100 and gap.max() <= 1e-5
