"""The benchmarks measure what they say: both sides do the same work. No time is asserted."""

import micro_runs
import numpy as np
import pytest

from benchmarks import (
    common,
    decode,
    host_schedule,
    limits,
    rollout,
    step,
    update,
)
from benchmarks.peers import tunix

SHAPE = dict(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope='module', autouse=True)
def quick_limits():
    """The machine's limits are not what these tests are about."""
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, 'measure', lambda *_: limits.Limits(bandwidth=1e9, flops=1e9))
    yield
    patch.undo()


@pytest.mark.soak
@pytest.mark.slow('loads transformers')
def test_decoding_and_transformers_generate_the_same_greedy_tokens():
    pytest.importorskip('torch')
    result = decode.run(
        vocab=128, batch=2, prompt=4, new=6, repeats=1, modes='greedy,plain,nucleus', **SHAPE
    )
    assert result['modes']['greedy']['same_tokens'] == 1.0
    assert all(mode['ours_s'] > 0 and mode['hf_s'] > 0 for mode in result['modes'].values())
    assert 'nucleus' in decode.show(result)


def test_the_update_and_torch_have_the_same_gradient():
    pytest.importorskip('torch')
    result = update.run(
        vocab=128, batch=4, prompt=4, new=4, microbatches=2, chunk=8, repeats=1, **SHAPE
    )
    assert result['gradient_difference'] < 1e-4
    assert result['gradient_difference_once_a_prompt'] < 1e-5
    assert 'hf' in update.show(result)


@pytest.mark.soak
def test_both_loops_play_the_same_turns_with_the_same_number_of_tokens():
    pytest.importorskip('torch')
    result = rollout.compare(episodes=2, turns=2, new=3, repeats=1, **SHAPE)
    assert result['turns'] == 2 * 2
    # Observations depend on what was answered only through the warning after an invalid answer,
    # and three tokens are never a valid one.
    assert result['tokens'] == result['hf_tokens']


@pytest.mark.soak
def test_the_host_s_loop_is_near_the_ideal_and_a_barrier_is_not():
    """Its clock is played, so these are no times of this machine."""
    costs = host_schedule.Costs(step_s=0.002, read_s=0.004, call_s=0.001)
    result = host_schedule.run(episodes=128, slots=64, costs=costs)
    assert result['same'] and result['of_ideal'] <= 1.3 and result['barrier_of_ours'] >= 3
    assert result['seconds']['hosts'] >= max(result['bounds'].values())
    assert 'longest episode' in host_schedule.show(result)


def test_an_ideal_by_hand():
    """One episode of one row: nothing can be quicker than the episode itself."""
    costs = host_schedule.Costs(step_s=1.0, read_s=0.0, call_s=0.0)
    result = host_schedule.run(episodes=1, slots=1, costs=costs)
    turns = result['turns']
    waits = sum(host_schedule.latency_of(0, turn) for turn in range(turns + 1))
    np.testing.assert_allclose(result['seconds']['hosts'], waits + result['steps']['hosts'])
    np.testing.assert_allclose(result['of_ideal'], 1.0)
    np.testing.assert_allclose(result['seconds']['no latency'], result['bounds']['device'])


@pytest.mark.soak
@pytest.mark.slow('compiles a whole rollout')
def test_the_planned_schedule_samples_as_many_tokens_as_planned():
    result = rollout.schedule(episodes=4, turns=2, slots=2, serve_rows=(1,), repeats=1, **SHAPE)
    plan = np.random.default_rng(0).integers(rollout.SHORT, rollout.LONG + 1, (4, 2))
    assert result['serve_rows']['1']['sampled'] == plan.sum()
    assert 0 < result['serve_rows']['1']['occupancy'] <= 1


@pytest.mark.soak
def test_the_parts_of_a_step_add_up_to_it():
    cfg = micro_runs.plain('frozen_lake', algorithm='grpo')  # as a file of configs/ gives it
    result = step.run(cfg, repeats=1)
    np.testing.assert_allclose(sum(result['parts'].values()), result['seconds']['step'])
    assert result['turns'] == 16 * 2
    assert result['wanted'].keys() == {'decoded', 'read', 'trained'}
    assert all(0 < share <= 1 for share in result['wanted'].values()), result['wanted']
    assert all(x['memory_mib'] > 0 and x['compile_s'] > 0 for x in result['programs'].values())
    assert 'host share' in step.show(result)


@pytest.mark.soak
def test_the_script_for_another_library_says_what_the_policy_was_shown():
    ours = tunix.build_ours(common.model_config(1408, **SHAPE), episodes=4, turns=2, new=3)
    played, shown = ours.rollout, tunix.observations(ours.rollout)
    assert [len(episode) for episode in shown] == [2] * 4
    for row, episode in enumerate(shown):
        length = played.attention_mask[row].sum()
        first, second = episode
        answer = played.tokens[row, len(first) : len(first) + 3].tolist()
        assert played.tokens[row, : length - 3].tolist() == first + answer + second
