"""What fits where: Qwen2.5 sizes on TPU slices, compiled from shapes; makes benchmarks/plans.md.

  python -m benchmarks.plans [--only=0.5B]   compiles what benchmarks/plans.jsonl lacks
  python -m benchmarks.plans --render        the table of what is there

A case takes some 4 to 6 CPU-minutes; what was compiled is kept, so it can be interrupted.
--depth=2 compiles models of two layers instead. Needs requirements-plan.txt.
"""

import argparse
import dataclasses
import json
import pathlib

from agentrl_jax.planning import hardware

if __name__ == '__main__':
    hardware.prepare(['--topology=v5e:2x4'])  # every case: the backend is the CPU

import jax

from agentrl_jax import plan
from agentrl_jax.models import sizes
from agentrl_jax.planning import programs as plan_programs
from agentrl_jax.planning.hardware import GIB
from configs import frozen_lake

FOLDER = pathlib.Path(__file__).resolve().parent
RECORDS, TABLE = FOLDER / 'plans.jsonl', FOLDER / 'plans.md'
ANSWER_TOKENS = 80  # RAGEN's answers, about (of up to 400)


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    topology: str
    settings: tuple[tuple[str, object], ...]  # beside configs/frozen_lake.py

    def config(self):
        cfg = frozen_lake.get_config()
        # The pool of levels is small beside the rest, whatever its size.
        cfg.update_from_flattened_dict(dict(self.settings) | {'env.train_levels': 64})
        return cfg

    def key(self, depth: int, name: str) -> str:
        settings = ' '.join(f'{field}={value}' for field, value in self.settings)
        return f'{self.model} {self.topology} {settings} depth={depth} {name}'


def cases() -> list[Case]:
    """PPO with a critic, 128 episodes of 3072 tokens; the mesh and, where needed, less memory."""
    whole = (('mesh.fsdp', 8),)
    halved = (('mesh.fsdp', 4), ('mesh.tensor', 2))
    quarters = (('mesh.fsdp', 2), ('mesh.tensor', 4))
    shared = (('critic.share_backbone', True),)
    adapters = (('lora.rank', 64),)
    v5e, v6e, v5p = 'v5e:2x4', 'v6e:2x4', 'v5p:2x2x2'
    return [
        Case('Qwen2.5-0.5B', v5e, whole),
        Case('Qwen2.5-7B', v5e, quarters + adapters + (('batch.microbatch_rows', 4),)),
        Case('Qwen2.5-1.5B', v5e, whole),
        Case('Qwen2.5-7B', v6e, halved + adapters),
        Case('Qwen2.5-7B', v6e, quarters + shared),
        Case('Qwen2.5-7B', 'v5p:2x2x1', (('mesh.fsdp', 4),)),
        Case('Qwen2.5-7B', 'v5e:4x4', (('mesh.fsdp', 4), ('mesh.tensor', 4)) + shared),
        Case('Qwen2.5-3B', v5e, halved + shared),
        Case('Qwen2.5-3B', v6e, whole),
        Case('Qwen2.5-3B', v5p, whole),
        Case('Qwen2.5-1.5B', v6e, whole),
        Case('Qwen2.5-1.5B', v5p, whole),
        Case('Qwen2.5-0.5B', v6e, whole),
        Case('Qwen2.5-0.5B', v5p, whole),
        Case('Qwen2.5-7B', v5p, whole),
    ]


def load() -> dict[str, dict]:
    if not RECORDS.exists():
        return {}
    rows = [json.loads(line) for line in RECORDS.read_text(encoding='utf-8').splitlines()]
    return {row.pop('key'): row for row in rows}


def compile_missing(case: Case, depth: int) -> None:
    """Appends what the records lack of a case, program by program."""
    cfg, where = case.config(), hardware.find(case.topology)
    missing = [name for name in plan.PROGRAMS if case.key(depth, name) not in load()]
    if not missing:
        return
    shapes = plan_programs.shapes(cfg, where.devices, case.model, depth)
    machine = plan.machine_of(cfg, where, shapes.mesh, ANSWER_TOKENS)
    for name in missing:
        print(case.key(depth, name), flush=True)
        made = plan_programs.compile_program(name, shapes, machine)
        row = {'key': case.key(depth, name)} | dataclasses.asdict(made)
        with RECORDS.open('a', encoding='utf-8') as file:
            file.write(json.dumps(row) + '\n')
        jax.clear_caches()


def row_of(case: Case, records: dict) -> str:
    """A line of the table: the deepest model of which both programs were compiled."""
    whole = sizes.named(case.model).num_layers
    settings = ', '.join(f'`{field}={value}`' for field, value in case.settings)
    start = f'| {case.model} | {case.topology} | {settings} |'
    for depth in range(whole, 0, -1):
        keys = [case.key(depth, name) for name in plan.PROGRAMS]
        if all(key in records for key in keys):
            programs = [plan_programs.Compiled(**records[key]) for key in keys]
            return f'{start} {depth} of {whole} | {figures(case, programs, depth == whole)} |'
    return f'{start} none | | | | |'


def figures(case: Case, programs: list, whole: bool) -> str:
    chip = hardware.TPU[case.topology.partition(':')[0]]
    gib = ' | '.join(f'{program.total / GIB:.2f}' for program in programs)
    fits = all(plan.program_row(program, chip)['fits'] for program in programs)
    answer = ('yes' if fits else 'no') if whole else 'not known'
    seconds = ' + '.join(f'{program.seconds:.2g}' for program in programs)
    return f'{gib} | {answer}, of {chip.usable / GIB:.2f} | {seconds}'


def table(records: dict) -> str:
    """The page benchmarks/plans.md."""
    head = (
        'Made by `python -m benchmarks.plans` from `benchmarks/plans.jsonl`: PPO with a critic,\n'
        'bfloat16 compute, float32 parameters and moments, remat, 128 episodes of 3072 tokens,\n'
        '5 turns of up to 400 tokens (`configs/frozen_lake.py`), micro-batches of 8 rows unless\n'
        'said otherwise. Compiled\n'
        'by libtpu 0.0.42 and jax 0.10.2 on a CPU; nothing was run on a TPU. GiB are those of one\n'
        'chip while the program runs, all state included. Seconds are the roofline of\n'
        f'`agentrl_jax/planning/cost.py` with answers of {ANSWER_TOKENS} tokens, a lower bound.\n'
        'Where fewer layers than the model has were compiled, all figures are of that smaller\n'
        'model.'
    )
    columns = (
        '| model | slice | settings | layers compiled | collect, GiB | learn, GiB | fits |'
        ' seconds, collect + learn |'
    )
    rule = '| --- | --- | --- | --- | --- | --- | --- | --- |'
    rows = [row_of(case, records) for case in cases()]
    return '\n'.join(['# What fits where', '', head, '', columns, rule, *rows]) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', default='', help='cases whose name has this in it')
    parser.add_argument('--depth', type=int, default=0, help='layers; 0 = all')
    parser.add_argument('--render', action='store_true', help='only write the table')
    given = parser.parse_args()
    chosen = [case for case in cases() if given.only in case.key(0, '')]
    for case in chosen if not given.render else ():
        compile_missing(case, given.depth or sizes.named(case.model).num_layers)
    TABLE.write_text(table(load()), encoding='utf-8')
    print(TABLE.read_text(encoding='utf-8'))


if __name__ == '__main__':
    main()
