"""The benchmarks measure what they say: both sides do the same work. No time is asserted."""

import numpy as np
import pytest

from benchmarks import common, decode, limits, rollout, update

SHAPE = dict(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope='module', autouse=True)
def quick_limits():
    """The machine's limits are not what these tests are about."""
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, 'measure', lambda: limits.Limits(bandwidth=1e9, flops=1e9))
    yield
    patch.undo()


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
    assert 'hf' in update.show(result)


def test_both_loops_play_the_same_turns_with_the_same_number_of_tokens():
    pytest.importorskip('torch')
    result = rollout.compare(episodes=2, turns=2, new=3, repeats=1, **SHAPE)
    assert result['turns'] == 2 * 2
    # Observations depend on what was answered only through the warning after an invalid answer,
    # and three tokens are never a valid one.
    assert result['tokens'] == result['hf_tokens']


def test_the_planned_schedule_samples_as_many_tokens_as_planned():
    result = rollout.schedule(
        episodes=4, turns=2, slots=2, serve_rows=(1,), repeats=1, **SHAPE
    )  # fmt: skip
    plan = np.random.default_rng(0).integers(rollout.SHORT, rollout.LONG + 1, (4, 2))
    assert result['serve_rows']['1']['sampled'] == plan.sum()
    assert 0 < result['serve_rows']['1']['occupancy'] <= 1


def test_runs_take_turns_and_the_median_counts():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in 'ab'}
    times = common.alternate(calls, 2)
    assert order == list('ababab')  # one round to warm up, two that count
    assert {name: len(x) for name, x in times.items()} == {'a': 2, 'b': 2}
    assert common.medians({'x': [3.0, 1.0, 2.0]}) == {'x': 2.0}
