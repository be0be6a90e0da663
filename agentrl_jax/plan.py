"""Check whether a config fits: compile its real programs for other machines.

  python -m agentrl_jax.plan --config=configs/demo.py --topology=cpu:8 --config.mesh.fsdp=4
  python -m agentrl_jax.plan --config=configs/frozen_lake.py --topology=h100:8 --json
  python -m agentrl_jax.plan --config=configs/frozen_lake.py --topology=v5e:2x4 \\
      --model=Qwen2.5-0.5B --config.mesh.fsdp=8 --layers=2,4

Compiles the config's rollout (collect) and update (learn) for a TPU slice (with libtpu:
requirements/plan.txt), for GPUs of other machines (requirements/plan-gpu.txt), for CPU devices or
for this machine's GPUs. Only shapes are needed; no weights are created. Without these packages it
estimates the memory. --model selects a size instead of a checkpoint. --layers saves time: it
compiles models of two depths and extrapolates to the full depth.
"""

import os
import sys

from absl import flags, logging
from ml_collections import config_flags

from agentrl_jax.run import command, usage

if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, 'Config file, see configs/.')
    flags.DEFINE_string(
        'topology', None, 'v5e:2x4, v5p:2x2x2, h100:8, h200:1, a100:2x8, cpu:8, gpu:1, ...'
    )
    flags.DEFINE_string('model', '', "Qwen2.5-0.5B, -1.5B, -3B or -7B; '' = the config's model.")
    flags.DEFINE_list('layers', [], 'Two depths to compile instead of the full one, such as 2,4.')
    flags.DEFINE_bool('json', False, 'Print JSON.')
    command.begin(__doc__, needs=('config', 'topology'))

from agentrl_jax.planning import hardware

if __name__ == '__main__':
    # Before other imports: importing gymnax computes a constant, which starts the backend.
    try:
        hardware.prepare(sys.argv)
    except ValueError as error:
        usage.refuse(str(error))

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from typing import Any

from agentrl_jax.planning import advice, fit, work
from agentrl_jax.planning import programs as plan_programs
from agentrl_jax.planning.hardware import GIB

PROGRAMS = ('collect', 'learn')
WORTH_SAYING = GIB // 100  # bytes: a smaller saving would be printed as 0.00 GiB
# Compiled programs took up to this many times the estimate of fit.py (benchmarks/plans.md)
ESTIMATE_ERROR = 1.6


def plan(
    cfg: Any, topology: str, *, model: str = '', layers: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return the plan as a dict that JSON can hold; `text` formats it."""
    with quiet():
        where = hardware.find(topology)
    full = plan_programs.shapes(cfg, where.devices, model)
    mesh = full.mesh
    parts = [plan_programs.shapes(cfg, where.devices, model, depth) for depth in layers]
    programs = {}
    for name in PROGRAMS:
        with reporting(f'{name} for {topology}'):
            compiled = [plan_programs.compile_program(name, s) for s in parts or [full]]
        one = extrapolate(compiled, layers, full.config.num_layers) if layers else compiled[0]
        programs[name] = with_verdict(one, where.chip)
    tightest = max(PROGRAMS, key=lambda name: programs[name]['device_bytes'])
    validation = programs['collect']['device_bytes'] + of_validation(full)
    fits = all(row['fits'] for row in programs.values()) and validation <= where.chip.usable
    return {
        'topology': topology,
        'devices': mesh.devices.size,
        'mesh': dict(mesh.shape),
        'model': model or cfg.model.path or 'sizes of the config',
        'parameters': full.config.param_count(),
        'layers_compiled': list(layers) or [full.config.num_layers],
        'memory': where.chip.memory,
        'usable_bytes': int(where.chip.usable),
        'state_bytes': plan_programs.device_bytes(full.state),
        'step_flops': flops_of(full),
        'programs': programs,
        'validation_bytes': validation,
        'fits': fits,
        'tightest': tightest,
        'knobs': [
            dataclasses.asdict(knob)
            for knob in advice.knobs(full, tightest)
            if knob.saves >= WORTH_SAYING
        ],
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what libraries write to stderr: libtpu reports that this machine has no TPU."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, 'wb') as discard:
            os.dup2(discard.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@contextlib.contextmanager
def reporting(name: str) -> Iterator[None]:
    """Print to stderr when a program starts compiling and when it is done."""
    start = time.monotonic()
    print(f'compiling {name}', file=sys.stderr, flush=True)
    yield
    print(f'compiled {name}: {time.monotonic() - start:.0f} s', file=sys.stderr, flush=True)


def of_validation(shapes: Any) -> int:
    """Return the bytes per device by which validation's cache exceeds the training cache."""
    cfg, config, mesh = shapes.cfg, shapes.config, shapes.mesh
    if cfg.context.window:
        return 0
    trained = min(cfg.rollout.slots or cfg.rollout.episodes, cfg.rollout.episodes)
    cache = functools.partial(advice.cache_bytes, cfg, config, mesh)
    return max(cache(fit.rows(cfg)) - cache(trained), 0)


def flops_of(shapes: Any) -> float | None:
    """Return the FLOPs of a step whose answers and rows are as long as they may be (work.py)."""
    cfg = shapes.cfg
    rows = cfg.algorithm.filter.kept(cfg.rollout.num_groups) * cfg.rollout.group_size
    length, sampled = cfg.rollout.max_tokens, cfg.env.max_turns * cfg.rollout.max_response
    row = {'rollout/tokens': length, 'rollout/response_length': sampled, 'filter/collects': 1}
    row |= {'batch/tokens': rows * length, 'batch/trained_tokens': rows * sampled}
    return work.step_flops(cfg, shapes.config, row | {'batch/trained_rows': rows})


def on_paper(cfg: Any, topology: str, *, model: str = '') -> dict[str, Any]:
    """Estimate the memory (fit.py) without a compiler."""
    where = hardware.stand_ins(topology)
    estimate = fit.estimate(plan_programs.shapes(cfg, where.devices, model))
    return {
        'topology': topology,
        'usable_bytes': int(where.chip.usable),
        'certain_bytes': estimate.certain,
        'estimated_bytes': estimate.likely - estimate.program,  # the program is on the host
    }


def paper_text(made: dict[str, Any]) -> str:
    """Format the result of on_paper as one sentence."""
    usable, estimated = made['usable_bytes'], made['estimated_bytes']
    verdict = f'may not fit: compiled programs took up to {ESTIMATE_ERROR} times such an estimate'
    if made['certain_bytes'] > usable:
        certain = made['certain_bytes'] / GIB
        verdict = f'DOES NOT FIT: state with caches or gradients alone is {certain:.2f} GiB'
    elif ESTIMATE_ERROR * estimated <= usable:
        verdict = 'fits'
    return f'Estimate: {estimated / GIB:.2f} of {usable / GIB:.2f} GiB per device: {verdict}.'


def extrapolate(parts: list[dict[str, Any]], layers: tuple[int, ...], depth: int) -> dict[str, Any]:
    """Extrapolate the bytes of a program linearly from two depths to the depth of the model."""
    (few, many), (a, b) = parts, layers
    sizes = {
        name: int(few[name] + (many[name] - few[name]) * (depth - a) / (b - a))
        for name in ('beside', *plan_programs.SIZES)
    }
    seconds = few['compile_seconds'] + many['compile_seconds']
    refused = few['refused'] or many['refused']
    return few | sizes | {'refused': refused, 'compile_seconds': seconds}


def with_verdict(program: dict[str, Any], chip: hardware.Chip) -> dict[str, Any]:
    """Add the memory in use on a device and whether it fits."""
    used = plan_programs.bytes_in_use(program)
    return program | {'device_bytes': used, 'fits': not program['refused'] and used <= chip.usable}


def text(plan: dict[str, Any]) -> str:
    """Format the plan as text."""
    mesh = ' '.join(f'{axis}={size}' for axis, size in plan['mesh'].items())
    programs = plan['programs']
    lines = [
        f'{plan["model"]} ({plan["parameters"] / 1e6:.0f} M parameters) on {plan["topology"]}, '
        f'mesh {mesh}',
        '',
        f'{"GiB per device":<34}' + ''.join(f'{name:>10}' for name in PROGRAMS),
    ]

    def row(label, value, unit=GIB, form='.2f'):
        values = (value(programs[name]) / unit for name in PROGRAMS)
        lines.append(f'{label:<34}' + ''.join(f'{format(x, form):>10}' for x in values))

    row('state outside the program', lambda p: p['beside'])
    row('arguments', lambda p: p['arguments'])
    row('outputs (new memory)', lambda p: p['outputs'] - p['shared'])
    row('temporaries', lambda p: p['temporaries'])
    row('code', lambda p: p['code'])
    row('total', lambda p: p['device_bytes'])
    if plan['validation_bytes'] > programs['collect']['device_bytes']:
        total = f'{plan["validation_bytes"] / GIB:.2f}'
        lines.append(f'{"in validation, with a larger cache":<38}{total:>6}')
    lines.append(
        f'memory {plan["memory"]}, {plan["usable_bytes"] / GIB:.2f} GiB usable by a program: '
        f'{"fits" if plan["fits"] else "DOES NOT FIT"}'
    )
    lines += [
        f'{name}: the compiler reports "{programs[name]["refused"]}"'
        for name in PROGRAMS
        if programs[name]['refused']
    ]
    lines.append('')
    row('seconds to compile, here', lambda p: p['compile_seconds'], 1, '.0f')
    if flops := plan['step_flops']:
        lines.append(f'{"TFLOP of a step with the longest rows":<44}{flops / 1e12:>10.3g}')
    lines.append('')
    if len(plan['layers_compiled']) == 2:
        a, b = plan['layers_compiled']
        lines.append(f'Memory is extrapolated linearly from models of {a} and {b} layers.')
    if plan['knobs']:
        where = f'in {plan["tightest"]}, largest saving first (GiB per device, estimates)'
        lines.append(f'To save memory {where}:')
        lines += [f'  {k["saves"] / GIB:7.2f}  --config.{k["setting"]}' for k in plan['knobs']]
    return '\n'.join(lines)


def layer_pair(words: list[str]) -> tuple[int, ...]:
    """Parse --layers=2,4."""
    depths = tuple(int(word) for word in words if word.isdigit())
    if words and not (len(depths) == len(words) == 2 and 0 < depths[0] < depths[1]):
        raise ValueError(f'--layers={",".join(words)}: set two increasing depths, as --layers=2,4')
    return depths


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    args = flags.FLAGS
    try:
        try:
            layers = layer_pair(args.layers)
            result = plan(args.config, args.topology, model=args.model, layers=layers)
        except hardware.NotInstalled as error:
            result = on_paper(args.config, args.topology, model=args.model)
            result['not_compiled'] = str(error)
    except (ValueError, OSError) as error:
        usage.refuse(str(error))
    compiled = 'not_compiled' not in result
    if args.json:
        print(json.dumps(result, indent=2))
    elif compiled:
        print(text(result))
    else:
        print(f'{paper_text(result)}\nNot compiled: {result["not_compiled"]}')
    sys.exit((0 if result['fits'] else 1) if compiled else 2)


if __name__ == '__main__':
    main()
