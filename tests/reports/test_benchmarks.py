"""Both sides of each benchmark do the same work. No time is asserted."""

import json

import jax
import numpy as np
import pytest

from agentrl_jax.imitation.scout import ScoutSettings
from benchmarks import decode, gpu, host_schedule, scout, update

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


@pytest.mark.soak
def test_gpu_benchmarks_can_be_rehearsed(tmp_path):
    session = gpu.Session(gpu.arguments([f'--out={tmp_path}', '--rehearse', '--minutes=60']))
    gpu.run(session)
    lines = [json.loads(line) for line in (tmp_path / 'figures.jsonl').read_text().splitlines()]
    assert 'failed' not in [line['part'] for line in lines], lines
    by_part = {
        part: [line for line in lines if line['part'] == part]
        for part in ('decoding', 'rollout', 'update', 'memory', 'profile')
    }
    assert [len(x) for x in by_part.values()] == [2, 3, 3, 3, 1]
    assert [x['rows'] for x in by_part['update']] == [4, 16, 4]  # a quarter, all, a quarter
    for line in by_part['rollout']:
        assert line['sampled'] == 4 * 4 * 2 * 8  # groups, episodes, turns, tokens
    for line in by_part['decoding'] + by_part['rollout'] + by_part['update']:
        assert line['share_of_limit'] > 0 and line['tokens_per_s'] > 0
    assert list((tmp_path / 'profile').rglob('*.pb'))
    assert '68.7 s' in gpu.show(lines)


@pytest.mark.soak
def test_no_gpu_benchmark_starts_after_its_time_limit(tmp_path):
    session = gpu.Session(gpu.arguments([f'--out={tmp_path}', '--rehearse', '--minutes=0']))
    gpu.run(session)
    assert [line['part'] for line in session.figures] == ['device', 'limits', 'stopped']


@pytest.mark.soak
def test_a_scout_solves_the_bandit_within_a_second():
    (row,) = scout.run(configs='demo_bandit', success='1', seeds='0', updates=1, repeats=1)['rows']
    assert row['random'] == 0.5 < row['success'] == row['oracle'] == 1.0


def test_a_scout_and_two_libraries_train_on_the_same_game():
    pytest.importorskip('rejax', reason='make bench-scout runs it')
    sizes = ScoutSettings(envs=4, length=4, hidden=8, minibatches=2)
    with jax.numpy_rank_promotion('allow'):
        rows = scout.compare('demo_bandit', sizes, updates=2, repeats=1)
    assert [row['steps_per_s'] > 0 for row in rows] == [True] * 4
