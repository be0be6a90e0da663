"""Plans: memory of programs compiled from shapes, for hardware that is not present."""

import importlib.util
import json
import types

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax import plan
from agentrl_jax.models import sizes
from agentrl_jax.planning import advice, gpus, hardware, programs
from agentrl_jax.run import loading
from agentrl_jax.run import params as run_params
from agentrl_jax.run import state as start
from agentrl_jax.run.build import build
from agentrl_jax.run.cloning import draw_base
from agentrl_jax.run.config import read as read_config
from agentrl_jax.types import Demonstrations, FrozenParams

NO_LIBTPU = importlib.util.find_spec('libtpu') is None


def test_a_topology_is_a_kind_with_axes_and_others_are_rejected():
    known = {'v5e:2x4': ('v5e', (2, 4)), 'v5p:2x2x1': ('v5p', (2, 2, 1)), 'cpu:8': ('cpu', (8,))}
    known |= {'tpu7x:2x2x1': ('tpu7x', (2, 2, 1))}
    known |= {'h100:8': ('h100', (8,)), 'a100:2x8': ('a100', (2, 8))}
    assert {name: hardware.parse(name) for name in known} == known
    for name in ('v5e', 'v5e:8', 'v5p:2x4', 'v9:2x2', 'cpu:2x2', 'cpu:0', 'h100:1x2x8', ''):
        with pytest.raises(ValueError, match='Use v5e:2x4'):
            hardware.parse(name)
    assert hardware.count_devices('tpu7x', (2, 2, 1)) == 8  # a chip is two devices
    with pytest.raises(ValueError, match='needs a GPU'):
        hardware.find('gpu:1')
    with pytest.raises(ValueError, match='8 such devices'):
        hardware.find('cpu:16')


def test_named_sizes_have_the_published_number_of_parameters():
    """Billions, table 1 of arXiv:2412.15115 and the model cards."""
    for name, published in {'0.5B': 0.49, '1.5B': 1.54, '3B': 3.09, '7B': 7.61}.items():
        count = sizes.named(f'Qwen2.5-{name}').param_count()
        assert count / 1e9 == pytest.approx(published, abs=0.006)
    with pytest.raises(ValueError, match='not one of Qwen2.5-0.5B'):
        sizes.named('Qwen2.5-8B')


MESH = {'mesh.fsdp': 4, 'mesh.tensor': 2}


@pytest.fixture(scope='module')
def cfg():
    return micro_runs.config('frozen_lake', **MESH)


@pytest.fixture(scope='module')
def shapes(cfg):
    return programs.shapes(cfg, jax.devices())


def assert_same_layout(one, other):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert one.sharding.is_equivalent_to(other.sharding, other.ndim)


@pytest.mark.soak
@pytest.mark.parametrize('rank', [0, 4])
def test_shapes_match_a_real_run(rank):
    cfg = micro_runs.config('frozen_lake', **MESH, **{'lora.rank': rank, 'loss.kl_coef': 0.1})
    shapes = programs.shapes(cfg, jax.devices())
    run = build(cfg)
    state = start.start_state(run, run.params)
    base = run.params if rank else {}
    real = (state, FrozenParams(base, run_params.policy_of(state.params, {})))
    planned = (shapes.state, shapes.frozen)
    jax.tree.map(assert_same_layout, planned, real)
    device = jax.devices()[0]
    expected = sum(
        part.data.nbytes
        for x in jax.tree.leaves(real)
        for part in x.addressable_shards
        if part.device == device
    )
    assert programs.device_bytes(planned) == expected
    policy = programs.device_bytes(run_params.policy_of(shapes.state.actor, shapes.frozen.model))
    assert programs.beside('collect', shapes) == expected - policy


def test_a_planned_update_includes_its_demonstrations():
    changes = {'algorithm': 'agent_evol', 'evol.base_rows': 8, 'clone.episodes': 8, 'mesh.data': 4}
    cfg = micro_runs.config('frozen_lake', **changes)
    shapes = programs.shapes(cfg, jax.devices()[:4])
    rows = Demonstrations(np.ones((9, 60), np.int32), *np.ones((2, 9, 60), bool))
    tokenizer = loading.build_tokenizer(read_config(cfg, None))
    run = types.SimpleNamespace(config=shapes.cfg, mesh=shapes.mesh, tokenizer=tokenizer)
    planned = shapes.learn[1][-1]
    jax.tree.map(assert_same_layout, planned, draw_base(run, rows, 0))
    assert planned.tokens.shape == (8, cfg.rollout.max_tokens)


def test_knobs_are_sorted_and_the_saving_of_fsdp_is_exact(cfg, shapes):
    for name in plan.PROGRAMS:
        saved = [knob.saves for knob in advice.knobs(shapes, name)]
        assert saved and min(saved) > 0 and saved == sorted(saved, reverse=True)
    spread = micro_runs.config('frozen_lake', **{'mesh.fsdp': 1, 'mesh.tensor': 2})
    before = programs.shapes(spread, jax.devices())
    knob = next(k for k in advice.knobs(before, 'learn') if 'fsdp' in k.setting)
    assert knob.setting == 'mesh.fsdp=4'
    weights = programs.device_bytes(before.state) - programs.device_bytes(shapes.state)
    assert knob.saves == pytest.approx(weights, rel=0.1)  # norms and scalars are replicated


@pytest.mark.parametrize(
    'message, used',
    [
        (
            'RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory '
            'space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.',
            20.5,
        ),
        (
            'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO '
            'temporaries (256.00G) exceeds available HBM (15.75G).',
            256.0,
        ),
    ],
)
def test_a_program_that_is_too_large_to_compile_is_a_valid_answer(message, used):
    needed, reason = programs.out_of_memory('learn', message)
    assert needed == used * 2**30 and reason
    sizes = dict.fromkeys(('beside', *programs.SIZES), 0) | {'temporaries': needed}
    assert not plan.with_verdict(sizes | {'refused': reason}, hardware.TPU['v6e'])['fits']
    with pytest.raises(ValueError, match='learn does not compile: UNIMPLEMENTED'):
        programs.out_of_memory('learn', 'UNIMPLEMENTED: sort')


def test_two_depths_extrapolate_linearly():
    def figures(depth):
        known = {'refused': '', 'beside': 0, 'outputs': 5, 'shared': 5, 'code': 0}
        figures = {'arguments': 10 * depth, 'temporaries': 7 + 3 * depth, 'compile_seconds': 9.0}
        return known | figures

    line = plan.extrapolate([figures(2), figures(4)], (2, 4), 24)
    assert (line['arguments'], line['temporaries']) == (240, 79)
    assert programs.bytes_in_use(line) == 240 + 79 and line['compile_seconds'] == 18.0
    assert plan.layer_pair(['2', '4']) == (2, 4) and plan.layer_pair([]) == ()
    for words in (['2'], ['4', '2'], ['a', 'b']):
        with pytest.raises(ValueError, match='--layers'):
            plan.layer_pair(words)


def check(report):
    for row in report['programs'].values():
        assert row['fits'] and 0 < row['device_bytes'] < 2**30
        assert row['arguments'] > 0 and row['compile_seconds'] > 0
    assert report['programs']['learn']['arguments'] >= report['state_bytes']
    assert json.loads(json.dumps(report)) == report
    page = plan.text(report)
    assert 'fits' in page and report['topology'] in page


@pytest.mark.soak
@pytest.mark.mesh
def test_the_programs_compile_for_cpu_devices(cfg):
    cfg.env.eval_levels, cfg.eval.samples = 16, 4  # 64 concurrent episodes
    report = plan.plan(cfg, 'cpu:8')
    check(report)
    model = cfg.model
    entry = 2 * model.num_layers * model.num_kv_heads * model.hidden_size // model.num_heads
    # float32, 4 shards of rows; both devices of a shard hold the single key head
    more = 4 * entry * cfg.rollout.max_tokens * (64 - 16) // 4
    assert report['validation_bytes'] - report['programs']['collect']['device_bytes'] == more
    assert 'in validation, with a larger cache' in plan.text(report)


@pytest.mark.soak
@pytest.mark.skipif(NO_LIBTPU, reason='libtpu is not installed (requirements/plan.txt)')
def test_rollout_and_update_compile_for_a_tpu_slice_that_is_not_present(cfg):
    report = plan.plan(cfg, 'v5e:2x4')
    check(report)
    assert report['devices'] == 8
    assert report['usable_bytes'] == 15.75 * 2**30


@pytest.mark.parametrize(
    'topology, package, file',
    [('v5e:2x4', 'libtpu', 'plan.txt'), ('h100:8', gpus.PACKAGE, 'plan-gpu.txt')],
)
def test_without_a_compiler_the_error_names_the_requirements_file(topology, package, file):
    if importlib.util.find_spec(package):
        pytest.skip(f'{package} is installed')
    with pytest.raises(hardware.NotInstalled, match=f'requirements/{file}'):
        hardware.find(topology)


@pytest.fixture
def main(cfg, monkeypatch):
    """Return main(topology, **flags): the command, with no package for any topology."""

    def find(name):
        raise hardware.NotInstalled('pip install')

    def call(topology, **changes):
        flags = {'model': '', 'layers': [], 'json': False} | changes
        values = types.SimpleNamespace(config=cfg, topology=topology, **flags)
        monkeypatch.setattr(plan.flags, 'FLAGS', values)
        with pytest.raises(SystemExit) as error:
            plan.main()
        return error.value.code

    monkeypatch.setattr(hardware, 'find', find)
    return call


@pytest.mark.parametrize('topology', ['h100:8', 'v5e:2x4'])
def test_without_a_compiler_plan_reports_whether_the_config_fits(topology, main, cfg, capsys):
    assert main(topology) == 2
    out = capsys.readouterr().out
    assert 'GiB per device: fits.' in out and 'Not compiled: pip install' in out
    assert main(topology, json=True) == 2
    report = json.loads(capsys.readouterr().out)
    usable = hardware.chip(topology.partition(':')[0]).usable
    for estimated, certain, words in (
        (usable, usable + 1, 'DOES NOT FIT: state'),
        (0.7 * usable, 0.5 * usable, 'may not fit: compiled programs'),
    ):
        sizes = {'estimated_bytes': estimated, 'certain_bytes': certain}
        assert words in plan.paper_text(report | sizes)


def test_an_unknown_model_is_a_one_line_error_without_a_compiler_too(main, capsys):
    """Previously it was a traceback of two errors."""
    assert main('v5e:2x4', model='Qwen2.5-9B') == 2
    err = capsys.readouterr().err
    assert err.startswith("error: model 'Qwen2.5-9B'") and err.count('\n') == 1


def test_a_gpu_is_described_with_its_bandwidth_and_the_memory_that_jax_uses(monkeypatch):
    monkeypatch.delenv(hardware.FRACTION, raising=False)
    assert hardware.chip('h200').usable == pytest.approx(0.75 * 151397597184)  # jax's default
    monkeypatch.setenv(hardware.FRACTION, '.9')
    chip = hardware.chip('h200')
    text = gpus.description('h200')
    assert f'memory_bandwidth: {4.8e12:.0f}\n' in text and 'H200' in text
    assert chip.usable == pytest.approx(0.9 * 151397597184)
