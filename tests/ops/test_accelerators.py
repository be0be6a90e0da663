"""Properties of the rollout and update compiled for a GPU and a TPU that are not present."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CUDA = pathlib.Path(sys.prefix) / 'gpu'  # requirements/plan-gpu.txt, installed by make cuda
TARGETS = [
    pytest.param(
        'h100',
        marks=pytest.mark.skipif(not CUDA.is_dir(), reason='make cuda installs what it needs'),
    ),
    pytest.param(
        'v5e',
        marks=pytest.mark.skipif(
            importlib.util.find_spec('libtpu') is None, reason='requirements/plan.txt'
        ),
    ),
]
ONE = {'h100': 'h100:1', 'v5e': 'v5e:1x1'}
FOUR = {'h100': 'h100:4', 'v5e': 'v5e:2x2'}
pytestmark = pytest.mark.soak


@functools.cache
def facts(topology, program, *fields):
    paths = {'PYTHONPATH': os.pathsep.join(map(str, (CUDA, ROOT, ROOT / 'tests')))}
    words = [sys.executable, str(ROOT / 'tests' / 'accelerator_facts.py'), topology, program]
    done = subprocess.run(
        [*words, *fields], env=os.environ | paths, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('target', TARGETS)
def test_a_rollout_copies_no_cache_and_attends_in_one_kernel(target):
    result = facts(ONE[target], 'collect')
    assert result['copies_of_a_cache'] == []
    assert result['fused_attention'] >= 2  # one per layer
    assert result['scores'] == []


@pytest.mark.parametrize('target', TARGETS)
def test_an_update_writes_no_scores_and_updates_its_state_in_place(target):
    result = facts(ONE[target], 'learn')
    assert result['scores'] == []
    assert result['fused_attention'] >= 2
    assert result['donated'] >= result['state']


@pytest.mark.parametrize('target', TARGETS)
def test_a_sharded_rollout_gathers_weights_before_its_loops_and_never_logits(target):
    result = facts(FOUR[target], 'collect', 'mesh.fsdp=2', 'mesh.tensor=2')
    assert result['copies_of_a_cache'] == []
    # Tensor parallelism sums hidden states of the rows in each layer
    assert result['largest_transfer'] < result['logits']


@pytest.mark.skipif(not CUDA.is_dir(), reason='make cuda installs what it needs')
def test_gpu_benchmarks_compile_without_a_gpu(tmp_path):
    words = [sys.executable, '-m', 'benchmarks.gpu', f'--out={tmp_path}', '--rehearse']
    paths = {'PYTHONPATH': os.pathsep.join(map(str, (CUDA, ROOT)))}
    subprocess.run(
        [*words, '--topology=h100:1', '--minutes=60'], env=os.environ | paths, cwd=ROOT, check=True
    )
    lines = map(json.loads, (tmp_path / 'figures.jsonl').read_text().splitlines())
    compiled = [list(line['seconds']) for line in lines if line['part'] == 'compile']
    assert compiled == [['4', '2'], *[['rollout', 'update']] * 3]
