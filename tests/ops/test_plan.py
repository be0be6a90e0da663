"""Plans: programs compiled from shapes, their cost counted, machines that are not there."""

import dataclasses
import importlib.util
import json
import time
import types

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
from tiny_models import TINY

from agentrl_jax import plan
from agentrl_jax.models import sizes
from agentrl_jax.planning import advice, gpus, hardware, hlo, limit, programs
from agentrl_jax.planning import cost as plan_cost
from agentrl_jax.run import params as run_params
from agentrl_jax.run import parts
from agentrl_jax.run import state as start
from agentrl_jax.run.build import build
from agentrl_jax.run.cloning import draw_base
from agentrl_jax.run.config import read as read_config
from agentrl_jax.types import Demonstrations, Frozen

NO_LIBTPU = importlib.util.find_spec('libtpu') is None
MACHINE = plan_cost.Machine('cpu', 100.0, 10.0, (3.0, 2.0), data=2, fsdp=2, tensor=1)


def arrays(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def cost(function, *shapes, weights=(), machine=MACHINE):
    marks = [i in weights for i in range(len(shapes))]
    return plan_cost.count(jax.make_jaxpr(function)(*arrays(*shapes)), marks, machine)


def test_a_topology_is_a_kind_and_its_axes_and_others_are_refused():
    known = {'v5e:2x4': ('v5e', (2, 4)), 'v5p:2x2x1': ('v5p', (2, 2, 1)), 'cpu:8': ('cpu', (8,))}
    known |= {'tpu7x:2x2x1': ('tpu7x', (2, 2, 1))}
    known |= {'h100:8': ('h100', (8,)), 'a100:2x8': ('a100', (2, 8))}
    assert {name: hardware.parse(name) for name in known} == known
    for name in ('v5e', 'v5e:8', 'v5p:2x4', 'v9:2x2', 'cpu:2x2', 'cpu:0', 'h100:1x2x8', ''):
        with pytest.raises(ValueError, match='say v5e:2x4'):
            hardware.parse(name)
    with pytest.raises(ValueError, match='needs a GPU'):
        hardware.find('gpu:1')
    with pytest.raises(ValueError, match='8 CPU devices; set jax_num_cpu_devices to 16'):
        hardware.find('cpu:16')


def test_a_tpu7x_chip_is_two_devices():
    """2,307 TFLOP/s, 192 GiB and 7,380 GB/s a chip: docs.cloud.google.com/tpu/docs/tpu7x."""
    assert hardware.count_devices('tpu7x', (2, 2, 1)) == 8
    assert hardware.count_devices('v5p', (2, 2, 1)) == 4
    half = hardware.chip('tpu7x')
    assert (2 * half.flops, 2 * half.bandwidth) == (2307e12, 7380e9) and half.usable < 96 * 2**30
    assert hardware.peak_flops(types.SimpleNamespace(device_kind='TPU7x')) == half.flops


def test_named_sizes_have_the_published_number_of_parameters():
    """Billions, table 1 of arXiv:2412.15115 and the model cards."""
    for name, published in {'0.5B': 0.49, '1.5B': 1.54, '3B': 3.09, '7B': 7.61}.items():
        count = sizes.named(f'Qwen2.5-{name}').param_count()
        assert count / 1e9 == pytest.approx(published, abs=0.006)
    with pytest.raises(ValueError, match='not one of Qwen2.5-0.5B'):
        sizes.named('Qwen2.5-8B')


def test_a_product_costs_two_flops_a_term_and_its_arrays_once():
    found = cost(lambda a, b: a @ b, (8, 16), (16, 4))
    assert found.flops == 2 * 8 * 16 * 4 / 4  # 4 devices
    assert found.bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4) / 4
    assert found.seconds == max(256 / 100, 224 / 10)


def test_every_device_reads_all_of_a_weight_whatever_its_form():
    found = cost(lambda a, b: a @ b.T.astype(jnp.float32), (8, 16), (4, 16), weights={1})
    assert found.bytes == 4 * (8 * 16 + 8 * 4) / 4 + 4 * 16 * 4


def test_a_scan_counts_as_long_as_it_is_and_moves_its_carry():
    def run(a, b):
        return jax.lax.scan(lambda carry, _: (carry @ b, None), a, None, length=5)[0]

    found = cost(run, (8, 8), (8, 8))
    assert found.flops == 5 * 2 * 8**3 / 4
    assert found.bytes == 5 * (3 * 256 / 4 + 2 * 256 / 2)  # the carry is split over fsdp


def test_nested_while_loops_count_as_often_as_assumed_and_small_ones_once():
    def inner(x):
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, x)

    def run(x):
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: inner(x @ x), x)

    assert cost(run, (8, 8)).flops == 3 * (1 + 2) * 2 * 8**3 / 4
    small = cost(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, jnp.sin, x), (8, 8))
    assert small.flops == 0


def test_of_branches_the_one_of_the_platform_counts_else_the_most_expensive():
    def by_platform(x):
        return jax.lax.platform_dependent(x, tpu=lambda x: x @ x @ x, default=lambda x: x @ x)

    for platform, products in (('cpu', 1), ('tpu', 2)):
        machine = plan_cost.Machine(platform, 100.0, 10.0, (), 1, 1, 1)
        assert cost(by_platform, (4, 4), machine=machine).flops == products * 2 * 4**3
    either = cost(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x), (4, 4))
    assert either.flops == 2 * 2 * 4**3 / 4


def test_nested_branches_count_as_often_as_they_are_taken():
    def widths(x):
        which = x[0, 0].astype(int)
        return jax.lax.switch(which, [lambda: x, lambda: x @ x, lambda: x @ x @ x @ x])

    def run(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: widths(x @ x))  # true, false

    taken = dataclasses.replace(MACHINE, branches=((0.75, 0.25), (0.5, 0.0, 0.5)))
    once = 2 * 4**3 / 4
    assert cost(run, (4, 4), machine=taken).flops == 0.75 * (1 + 0.5 * 3) * once
    # With other numbers of branches it is not these that were meant
    other = dataclasses.replace(MACHINE, branches=((0.5, 0.2, 0.2, 0.1),))
    assert cost(run, (4, 4), machine=other).flops == 4 * once


def test_remat_computes_the_forward_products_again():
    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))

    plain = cost(jax.grad(loss), (8, 8), (8, 8)).flops
    assert plain == 2 * 8**3 * (2 + 3) / 4  # no gradient of x
    again = cost(jax.grad(jax.checkpoint(loss)), (8, 8), (8, 8)).flops
    assert again == plain + 2 * 2 * 8**3 / 4


def cost_of_forward(config, rows, length, machine):
    params = jax.eval_shape(config.init, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    mask = jax.ShapeDtypeStruct((rows, length), jnp.bool_)
    traced = jax.jit(lambda *a: config.forward(a[0], *a[1:])).trace(params, ids, ids, mask)
    marks = [True] * len(jax.tree.leaves(params)) + [False] * 3
    return plan_cost.count(traced.jaxpr, marks, machine)


def test_the_forward_pass_of_a_model_costs_two_flops_a_parameter_and_token_plus_attention():
    config, rows, length = sizes.named('Qwen2.5-0.5B'), 4, 256
    machine = plan_cost.Machine('tpu', 1.0, 1.0, (), 1, 1, 1)
    found = cost_of_forward(config, rows, length, machine).flops
    d, f, kv = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    kernels = config.num_layers * (2 * d * d + 2 * d * kv + 3 * d * f)
    attention = config.num_layers * 2 * 2 * rows * length**2 * d
    assert found == 2 * kernels * rows * length + attention


def test_a_loop_over_layers_costs_its_layers_and_the_states_it_carries():
    rows, length = 4, 16
    loop, unrolled = (
        cost_of_forward(dataclasses.replace(TINY, scan_layers=scan), rows, length, MACHINE)
        for scan in (True, False)
    )
    assert loop.flops == unrolled.flops > 0
    states = 4 * rows * length * TINY.hidden_size  # read and written in each layer, split over fsdp
    assert loop.bytes == unrolled.bytes + 2 * TINY.num_layers * states / 2


MESH = {'mesh.fsdp': 4, 'mesh.tensor': 2}


@pytest.fixture(scope='module')
def cfg():
    return micro_runs.config('frozen_lake', **MESH)


@pytest.fixture(scope='module')
def shapes(cfg):
    return programs.shapes(cfg, jax.devices())


def assert_laid_out_alike(one, other):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert one.sharding.is_equivalent_to(other.sharding, other.ndim)


@pytest.mark.parametrize('rank', [0, 4])
def test_shapes_are_those_of_a_real_run(rank):
    cfg = micro_runs.config('frozen_lake', **MESH, **{'lora.rank': rank, 'loss.kl_coef': 0.1})
    shapes = programs.shapes(cfg, jax.devices())
    run = build(cfg)
    state = start.start_state(run, run.params)
    base = run.params if rank else {}
    real = (state, Frozen(base, run_params.policy_of(state.params, {})))
    planned = (shapes.state, shapes.frozen)
    jax.tree.map(assert_laid_out_alike, planned, real)
    device = jax.devices()[0]
    held = sum(
        part.data.nbytes
        for x in jax.tree.leaves(real)
        for part in x.addressable_shards
        if part.device == device
    )
    assert programs.device_bytes(planned) == held
    policy = programs.device_bytes(run_params.player_of(shapes.state, shapes.frozen.model))
    assert programs.beside('collect', shapes) == held - policy


def test_the_update_of_a_plan_has_the_demonstrations_that_join_it():
    changes = {'algorithm': 'agent_evol', 'evol.base_rows': 8, 'clone.episodes': 8, 'mesh.data': 4}
    cfg = micro_runs.config('frozen_lake', **changes)
    shapes = programs.shapes(cfg, jax.devices()[:4])
    rows = Demonstrations(np.ones((9, 60), np.int32), *np.ones((2, 9, 60), bool))
    run = types.SimpleNamespace(
        cfg=shapes.cfg, mesh=shapes.mesh, tokenizer=parts.build_tokenizer(read_config(cfg, None))
    )
    planned = shapes.learn[1][-1]
    jax.tree.map(assert_laid_out_alike, planned, draw_base(run, rows, 0))
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
    assert knob.saves == pytest.approx(weights, rel=0.1)  # norms and scalars stay whole


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
def test_a_program_that_the_compiler_refuses_for_its_size_is_an_answer(message, used):
    fields = programs.refused('learn', message)
    costs = dict.fromkeys(('flops', 'bytes', 'seconds', 'compile_seconds', 'beside'), 0)
    found = programs.Compiled(name='learn', **fields, **costs)
    assert found.total == used * 2**30 and found.refused
    assert not plan.program_row(found, hardware.TPU['v6e'])['fits']
    with pytest.raises(ValueError, match='learn does not compile: UNIMPLEMENTED'):
        programs.refused('learn', 'UNIMPLEMENTED: sort')


def test_two_depths_make_a_line():
    def made(depth):
        costs = dict.fromkeys(('flops', 'bytes', 'seconds', 'xla_flops', 'xla_bytes'), depth + 0.5)
        known = {'name': 'learn', 'beside': 0, 'outputs': 5, 'shared': 5, 'code': 0}
        made = {'arguments': 10 * depth, 'temporaries': 7 + 3 * depth, 'compile_seconds': 9.0}
        return programs.Compiled(**known, **made, **costs)

    line = plan.extrapolate([made(2), made(4)], (2, 4), 24)
    assert (line.arguments, line.temporaries, line.total) == (240, 79, 240 + 79)
    assert (line.flops, line.compile_seconds) == (24.5, 18.0)
    assert plan.layer_pair(['2', '4']) == (2, 4) and plan.layer_pair([]) == ()
    for words in (['2'], ['4', '2'], ['a', 'b']):
        with pytest.raises(ValueError, match='--layers'):
            plan.layer_pair(words)


def test_the_loops_of_a_rollout_run_as_often_as_its_turns_need():
    cfg = micro_runs.config('frozen_lake')  # 16 episodes of 2 turns, served 4 at a time
    assert plan_cost.trips(cfg, 2, answer_tokens=6) == (6.0, 2.0)  # (8 x 2 + 8) / 4; 2 x 6 / 6
    cfg.rollout.slots = 8  # 4 a shard: two rounds; (16 + 4) / 4 serves
    assert plan_cost.trips(cfg, 2, answer_tokens=6) == (5.0, 24 / 5)


def check(made):
    for row in made['programs'].values():
        assert row['fits'] and 0 < row['device_bytes'] < 2**30 and row['flops'] > 0
        assert row['arguments'] > 0 and row['compile_seconds'] > 0
    assert made['programs']['learn']['arguments'] >= made['state_bytes']
    assert json.loads(json.dumps(made)) == made
    page = plan.text(made)
    assert 'fits' in page and made['topology'] in page


@pytest.mark.mesh
def test_the_programs_compile_for_cpu_devices(cfg):
    cfg.env.eval_levels, cfg.eval.samples = 16, 4  # of which 64 episodes play at once
    made = plan.plan(cfg, 'cpu:8')
    check(made)
    model = cfg.model
    entry = 2 * model.num_layers * model.num_kv_heads * model.hidden_size // model.num_heads
    # float32, 4 shards of rows, whose two devices both have the one key head
    more = 4 * entry * cfg.rollout.max_tokens * (64 - 16) // 4
    assert made['validation_bytes'] - made['programs']['collect']['device_bytes'] == more
    assert 'of validation, whose cache is larger' in plan.text(made)
    assert made['step_seconds'] is None and 'No time is estimated' in plan.text(made)


@pytest.mark.soak
@pytest.mark.skipif(NO_LIBTPU, reason='libtpu is not installed (requirements/plan.txt)')
def test_rollout_and_update_compile_for_a_tpu_slice_that_is_not_there(cfg):
    made = plan.plan(cfg, 'v5e:2x4')
    check(made)
    assert made['devices'] == 8 and made['step_seconds'] > 0
    assert made['usable_bytes'] == 15.75 * 2**30


@pytest.mark.skipif(not NO_LIBTPU, reason='libtpu is installed')
def test_without_libtpu_the_error_says_what_to_install(cfg):
    with pytest.raises(ValueError, match='requirements/plan.txt'):
        hardware.find('v5e:2x4')


NO_CUDA = importlib.util.find_spec(gpus.PACKAGE) is None


@pytest.mark.skipif(not NO_CUDA, reason="CUDA's compiler is installed")
def test_without_cuda_s_compiler_the_error_says_what_to_install():
    with pytest.raises(hardware.NotInstalled, match='--no-deps -r requirements/plan-gpu.txt'):
        hardware.find('h100:8')


@pytest.fixture
def main(cfg, monkeypatch):
    """main(topology, **flags): the command for a topology that no package compiles for."""

    def find(name):
        raise hardware.NotInstalled('pip install')

    def call(topology, **given):
        flags = {'model': '', 'layers': [], 'answer_tokens': 0, 'json': False} | given
        values = types.SimpleNamespace(config=cfg, topology=topology, **flags)
        monkeypatch.setattr(plan.flags, 'FLAGS', values)
        with pytest.raises(SystemExit) as error:
            plan.main()
        return error.value.code

    monkeypatch.setattr(hardware, 'find', find)
    return call


@pytest.mark.parametrize('topology', ['h100:8', 'v5e:2x4'])
def test_without_a_compiler_plan_says_whether_the_config_fits(topology, main, cfg, capsys):
    """It printed the least seconds only."""
    assert main(topology) == 2
    said = capsys.readouterr().out
    assert 'GiB a device: fits.' in said and 'Not compiled: pip install' in said
    assert 'without padding' in said and plan.NOT_MEASURED in said
    assert main(topology, json=True) == 2
    made = json.loads(capsys.readouterr().out)
    assert set(made['limit']) == {'collect', 'learn'} and min(made['limit'].values()) > 0
    usable = hardware.chip(topology.partition(':')[0]).usable
    for estimated, certain, words in (
        (usable, usable + 1, 'DOES NOT FIT: state'),
        (0.7 * usable, 0.5 * usable, 'may not fit: compiled programs'),
    ):
        sizes = {'estimated_bytes': estimated, 'certain_bytes': certain}
        assert words in plan.paper_text(made | sizes)


def test_a_model_without_a_name_is_one_line_without_a_compiler_too(main, capsys):
    """It was a traceback of two errors."""
    assert main('v5e:2x4', model='Qwen2.5-9B') == 2
    said = capsys.readouterr().err
    assert said == (
        "error: model 'Qwen2.5-9B' is not one of Qwen2.5-0.5B, Qwen2.5-1.5B, Qwen2.5-3B, "
        'Qwen2.5-7B; did you mean Qwen2.5-7B?\n'
    )


def test_a_program_that_compiles_for_long_is_reported(monkeypatch, capsys):
    """Nothing was printed for 20 minutes."""
    monkeypatch.setattr(plan, 'HEARTBEAT_S', 0.01)
    with plan.reporting('learn for v5e:2x4'):
        time.sleep(0.1)
    first, again, *_, last = capsys.readouterr().err.splitlines()
    assert first == 'compiling learn for v5e:2x4: 0 s'
    assert again == 'still compiling learn for v5e:2x4: 0 s'
    assert last == 'compiled learn for v5e:2x4: 0 s'


def test_a_gpu_is_described_with_the_bandwidth_that_plans_count_with(monkeypatch):
    monkeypatch.delenv(hardware.FRACTION, raising=False)
    assert hardware.chip('h200').usable == pytest.approx(0.75 * 151397597184)  # what jax takes
    monkeypatch.setenv(hardware.FRACTION, '.9')
    chip = hardware.chip('h200')
    text = gpus.description(gpus.GPUS['h200'], chip.bandwidth)
    assert f'memory_bandwidth: {4.8e12:.0f}\n' in text and 'H200' in text
    assert chip.usable == pytest.approx(0.9 * 151397597184)


def test_the_least_seconds_are_those_of_the_lengths_and_a_design_costs_more(cfg):
    run = read_config(cfg, None)
    machine = dataclasses.replace(MACHINE, flops=1e6, bandwidth=1e6, data=1, fsdp=1)
    model = parts.random_model_config(run, parts.build_tokenizer(run))

    def seconds(length, design=limit.IDEAL):
        found = limit.seconds(run, model, machine, length=length, answer_tokens=4, design=design)
        return np.array([found['collect'], found['learn']])

    assert (seconds(60) < seconds(90)).all()
    plain = limit.Design(widths=1, fused=False, remat=True, launch_s=1e-3)
    assert (seconds(60, plain) > seconds(60)).all()
    half = dataclasses.replace(limit.IDEAL, arithmetic=0.5, bandwidth=0.5)
    np.testing.assert_allclose(seconds(60, half), 2 * seconds(60))
    assert limit.Design(widths=4).columns(756, 3072) == 768
    assert limit.Design(widths=4).columns(769, 3072) == 1536
    assert limit.IDEAL.columns(756, 3072) == 756


HLO = """
%fused (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %inside = f32[8,8]{1,0} copy(%p)
}

%body (arg: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %arg = (s32[], f32[8,8]{1,0}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%arg), index=1
  %moved = f32[8,8]{0,1} copy(%x)
  %all = bf16[4,8]{1,0} all-gather-start(%x), dimensions={0}
  %flash = bf16[4,8]{1,0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %out = (s32[], f32[8,8]{1,0}) tuple(%x, %moved)
}

%cond (arg: (s32[], f32[8,8])) -> pred[] {
  ROOT %less = pred[] compare(%arg, %arg), direction=LT
}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %once = f32[8,8]{0,1} copy(%a)
  %scores = f32[2,8,8]{2,1,0} fusion(%a), kind=kLoop, calls=%fused
  %loop = (s32[], f32[8,8]{1,0}) while(%a), condition=%cond, body=%body
  ROOT %end = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_what_is_in_a_loop_and_what_is_in_memory_is_read_off_the_text():
    program = hlo.read(HLO)
    assert program.entry == 'main' and program.bodies == {'body'}
    assert [one.name for one in hlo.copies(program, 256)] == ['moved']  # 8 x 8 x 4 bytes
    assert hlo.copies(program, 257) == []
    assert [one.bytes for one in hlo.collectives_in_loops(program)] == [64]
    assert hlo.square_arrays(program, 8) == {'f32[8,8]', 'f32[2,8,8]'}
    assert [one.name for one in hlo.decode_step(program)] == ['moved', 'all', 'flash']
    assert hlo.facts(HLO) == {
        'kernels_of_a_step': 3,
        'largest_copy_in_a_loop': 256,
        'collectives_in_loops': 1,
        'largest_in_a_loop': 256,
        'fused_attention': 1,
    }
