"""What fits where and what a step takes: Qwen2.5 sizes on GPUs and TPUs that are not there.

  python -m benchmarks.plans [--only=0.5B]   compiles what benchmarks/plans.jsonl lacks
  python -m benchmarks.plans --render        the tables of what is there: benchmarks/plans.md

A case takes 4 to 10 CPU-minutes; what was compiled is kept, so it can be interrupted. --depth=2
compiles models of two layers instead. Needs requirements/plan.txt and, without dependencies,
requirements/plan-gpu.txt.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator

from agentrl_jax.planning import hardware

if __name__ == '__main__':
    hardware.prepare(['--topology=cpu:8'])  # eight devices stand in on paper

import jax

from agentrl_jax import plan
from agentrl_jax.models import sizes
from agentrl_jax.planning import fit, limit
from agentrl_jax.planning import programs as plan_programs
from agentrl_jax.planning.hardware import GIB
from agentrl_jax.run import parts
from agentrl_jax.run.config import read
from configs import frozen_lake

FOLDER = pathlib.Path(__file__).resolve().parent
RECORDS, TABLE = FOLDER / 'plans.jsonl', FOLDER / 'plans.md'
ANSWER_TOKENS = 80  # RAGEN's answers, about (of up to 400)
BEFORE = 'before: '  # of records: attention in several steps, one width, heads apart in the cache
SHARES = dict(arithmetic=0.5, bandwidth=0.8)  # of the peaks, assumed
LAUNCH_S = {'gpu': 2e-6, 'tpu': 0.0}  # of a kernel within a graph, assumed; a TPU has none
MODELS = ('0.5B', '1.5B', '3B', '7B')
MACHINES = {  # topology -> devices; the mesh splits parameters over all; v5p-8 has four chips
    'h100:1': 1,
    'h200:1': 1,
    'h100:8': 8,
    'v5e:2x4': 8,
    'v5p:2x2x1': 4,
    'v6e:2x4': 8,
}
STARPO_S = {'filter.keep': 0.25, 'critic.share_backbone': False}
PPO = {'filter.keep': 1.0, 'batch.minibatch_rows': 128}


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    topology: str
    settings: tuple[tuple[str, object], ...]  # beside configs/frozen_lake.py

    def config(self):
        cfg = frozen_lake.get_config()
        # A pool of levels of any size takes little memory. Each width of an update takes memory
        # (four 5.5 GiB, one 4.4, of 0.5B on v5e:2x4), and as long to compile as the first.
        few = {'env.train_levels': 64, 'batch.widths': 1}
        cfg.update_from_flattened_dict(dict(self.settings) | few)
        return cfg

    def key(self, depth: int, name: str, *, before: bool = False) -> str:
        settings = ' '.join(f'{field}={value}' for field, value in self.settings)
        return f'{BEFORE * before}{self.model} {self.topology} {settings} depth={depth} {name}'


def cases() -> list[Case]:
    """PPO with a critic, 128 episodes of 3072 tokens; the mesh and, where needed, less memory."""
    whole = (('mesh.fsdp', 8),)
    halved = (('mesh.fsdp', 4), ('mesh.tensor', 2))
    quarters = (('mesh.fsdp', 2), ('mesh.tensor', 4))
    shared = (('critic.share_backbone', True),)
    adapters = (('lora.rank', 64),)
    v5e, v6e, v5p = 'v5e:2x4', 'v6e:2x4', 'v5p:2x2x2'
    return [
        Case('Qwen2.5-0.5B', 'h100:1', ()),
        Case('Qwen2.5-7B', 'h100:8', whole + adapters),
        Case('Qwen2.5-7B', v5p, whole + adapters),
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


def row_of(case: Case, records: dict, *, before: bool) -> str | None:
    """A line of the table: the deepest model of which both programs were compiled; None: none."""
    whole = sizes.named(case.model).num_layers
    settings = ', '.join(f'`{field}={value}`' for field, value in case.settings)
    start = f'| {case.model} | {case.topology} | {settings} | {"before" if before else "now"} |'
    for depth in range(whole, 0, -1):
        keys = [case.key(depth, name, before=before) for name in plan.PROGRAMS]
        if all(key in records for key in keys):
            programs = [plan_programs.Compiled(**records[key]) for key in keys]
            return f'{start} {depth} of {whole} | {figures(case, programs, depth == whole)} |'
    return None


def figures(case: Case, programs: list, whole: bool) -> str:
    chip = hardware.chip(case.topology.partition(':')[0])
    gib = ' | '.join(f'{program.total / GIB:.2f}' for program in programs)
    fits = all(plan.program_row(program, chip)['fits'] for program in programs)
    answer = ('yes' if fits else 'no') if whole else 'not known'
    seconds = ' + '.join(f'{program.seconds:.2g}' for program in programs)
    return f'{gib} | {answer}, of {chip.usable / GIB:.2f} | {seconds}'


def compiled_table(records: dict) -> Iterator[str]:
    """What was compiled, before and now."""
    yield (
        '| model | devices | settings | design | layers compiled | collect, GiB | learn, GiB |'
        ' fits | roofline, collect + learn |'
    )
    yield '| --- | --- | --- | --- | --- | --- | --- | --- | --- |'
    for case in cases():
        for before in (True, False):
            if row := row_of(case, records, before=before):
                yield row


@functools.cache
def task():
    """The world of every case; its levels are no part of what is counted."""
    cfg = read(Case('', '', ()).config(), None)
    return parts.build_text_task(cfg, parts.build_tokenizer(cfg), 'train', None)


def on_paper(model: str, topology: str, rank: int) -> str:
    """A line of the table on paper."""
    count = MACHINES[topology]
    settings = {'mesh.fsdp': count} | ({'lora.rank': rank} if rank else {})
    where, name = hardware.stand_ins(topology), f'Qwen2.5-{model}'
    platform = 'tpu' if topology.startswith('v') else 'gpu'
    design = limit.Design(widths=4, remat=True, launch_s=LAUNCH_S[platform], **SHARES)
    old = dataclasses.replace(design, widths=1, fused=False)
    cells = []
    for algorithm in (STARPO_S, PPO):
        given = Case(name, topology, tuple((settings | algorithm).items())).config()
        cfg = read(given, None)
        mesh = parts.build_mesh(cfg, where.devices)
        config = plan_programs.sizes_of(cfg, name)
        machine = plan.machine_of(given, where, mesh, ANSWER_TOKENS)
        length = limit.row_tokens(cfg, task(), ANSWER_TOKENS)
        for how in (limit.IDEAL, old, design):
            found = limit.seconds(
                cfg,
                config,
                machine,
                length=length,
                answer_tokens=ANSWER_TOKENS,
                design=how,
            )
            cells.append(f'{sum(found.values()):.2g}')
    state, frozen = plan_programs.state_of(cfg, config, mesh, parts.build_optimisers(cfg))
    shapes = plan_programs.Shapes(cfg, config, mesh, state, frozen, (), ())
    memory = fit.estimate(shapes).likely  # both have the same state and caches
    answer = 'yes' if memory <= where.chip.usable else 'no'
    head = f'| {name} | {topology} | {"LoRA 64" if rank else "full"} '
    return f'{head}| {memory / GIB:.1f}, {answer} | ' + ' | '.join(cells) + ' |'


def paper_table() -> Iterator[str]:
    """What a step takes on paper, before and now."""
    yield (
        '| model | devices | training | GiB, fits | StarPO-S: limit | before | now | PPO: limit |'
        ' before | now |'
    )
    yield '| --- ' * 10 + '|'
    for model in MODELS:
        for topology in MACHINES:
            for rank in (0, 64):
                yield on_paper(model, topology, rank)


PAGE = """# What fits where, and what a step takes

Nothing here was run on a GPU or a TPU. Made by `python -m benchmarks.plans`: bfloat16 compute,
float32 parameters and moments, remat, 128 episodes of at most 3072 tokens, 5 turns of up to 400
tokens (`configs/frozen_lake.py`), a critic of its own, micro-batches of 8 rows unless said
otherwise, nine tenths of a GPU's memory (XLA_PYTHON_CLIENT_MEM_FRACTION=.9), validation left out.

## On paper

Arithmetic (`agentrl_jax/planning/limit.py`), nothing compiled: seconds of a step with answers of
{answer} tokens. StarPO-S trains 32 of the 128 rows, PPO all. `limit`: full speed of the data sheet,
rows as long as they are, nothing moved or computed twice. `before` and `now` assume
{arithmetic:.0%} of the arithmetic and {bandwidth:.0%} of the bandwidth, {launch:.0f} us to launch
a kernel on GPUs; `before` is the design in which attention's scores go through memory and rows are
as wide as the token budget, `now` that of one kernel, a cache read by length and four widths. GiB a
device are an estimate, too (`agentrl_jax/planning/fit.py`), against what a program may use.

{paper}

## Compiled

GiB are those of one device while the program runs, all state included, as the compiler says: libtpu
0.0.42, XLA of jax 0.10.2 for CUDA 13. The roofline is that of whole arrays
(`agentrl_jax/planning/cost.py`), a lower bound for rows as wide as their arrays. `before`: compiled
at earlier commits, with attention in several steps. Where fewer layers than the model has were
compiled, all figures are of that smaller model. All have `batch.widths=1`: with the four widths of
`configs/frozen_lake.py` the update of 0.5B on v5e:2x4 takes 5.50 GiB instead of 4.43.

{compiled}
"""


def page(records: dict) -> str:
    """benchmarks/plans.md."""
    return PAGE.format(
        answer=ANSWER_TOKENS,
        launch=1e6 * LAUNCH_S['gpu'],
        paper='\n'.join(paper_table()),
        compiled='\n'.join(compiled_table(records)),
        **SHARES,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', default='', help='cases whose name has this in it')
    parser.add_argument('--depth', type=int, default=0, help='layers; 0 = all')
    parser.add_argument('--render', action='store_true', help='only write the table')
    given = parser.parse_args()
    chosen = [case for case in cases() if given.only in case.key(0, '')]
    for case in chosen if not given.render else ():
        compile_missing(case, given.depth or sizes.named(case.model).num_layers)
    TABLE.write_text(page(load()), encoding='utf-8')
    print(TABLE.read_text(encoding='utf-8'))


if __name__ == '__main__':
    main()
