"""The benchmarks measure what they say: both sides do the same work. No time is asserted."""

import numpy as np
import pytest

from benchmarks import decode, host_schedule, update

SHAPE = dict(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1)


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


@pytest.mark.soak
def test_the_update_and_torch_have_the_same_gradient():
    pytest.importorskip('torch')
    result = update.run(
        vocab=128, batch=4, prompt=4, new=4, microbatches=2, chunk=8, repeats=1, **SHAPE
    )
    assert result['gradient_difference'] < 1e-4
    assert result['gradient_difference_once_a_prompt'] < 1e-5
    assert 'hf' in update.show(result)


def test_an_ideal_by_hand():
    """One episode of one row: nothing can be quicker than the episode itself."""
    costs = host_schedule.Costs(step_s=1.0, read_s=0.0, call_s=0.0)
    result = host_schedule.run(episodes=1, slots=1, costs=costs)
    turns = result['turns']
    waits = sum(host_schedule.latency_of(0, turn) for turn in range(turns + 1))
    np.testing.assert_allclose(result['seconds']['hosts'], waits + result['steps']['hosts'])
    np.testing.assert_allclose(result['of_ideal'], 1.0)
    np.testing.assert_allclose(result['seconds']['no latency'], result['bounds']['device'])
