"""Digests of full runs and lowered programs, to compare a refactoring with the previous commit.

  export PYTHONPATH=.:tests
  python tests/goldens.py write BEFORE          in a checkout of the previous commit
  python tests/goldens.py write AFTER           in the new one, on the same machine
  python tests/goldens.py compare BEFORE AFTER

A run's file has every row of metrics.jsonl without times, and a digest of each array of the final
state. `programs.json` has a digest of the StableHLO text of learn and collect for every algorithm
and option. Bits depend on the processor type: compare files from one machine.
"""

import argparse
import hashlib
import json
import os
import pathlib
import sys
import tempfile

if __name__ == '__main__':  # before the import of gymnax, which starts the backend
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ['XLA_FLAGS'] = (
        '--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false'
    )

import jax
import micro_runs

from agentrl_jax import train
from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.records import run_log
from agentrl_jax.run import parts
from agentrl_jax.run.build import build
from agentrl_jax.run.params import actor_params
from agentrl_jax.run.state import start_state
from agentrl_jax.types import FrozenParams

CLONED = {'clone.episodes': 32, 'clone.steps': 12}
# name: (environment or config file, changes)
RUNS = {
    'demo': ('configs.demo_cloned', {'steps': 30, 'eval.every': 15}),
    'catalogue': ('configs.demo_library', {'steps': 10, 'clone.steps': 60, 'eval.every': 5}),
    'ppo': ('frozen_lake', {'filter.keep': 0.5, 'critic.warmup_steps': 1, **CLONED}),
    'lora': ('frozen_lake', {'lora.rank': 4, 'algorithm': 'grpo', **CLONED}),
    'vine': ('library', {'algorithm': 'vine', 'env.max_turns': 3, **CLONED}),
    'trials': (
        'frozen_lake',
        {'agent.name': 'reflect', 'agent.trials': 2, 'env.max_turns': 5, 'rollout.max_tokens': 224}
        | CLONED,
    ),
    'mixture': (
        'frozen_lake',
        {
            'env.mix': (('frozen_lake', 0.5), ('library', 0.5)),
            'env.max_actions_per_turn': 1,
            'rollout.max_tokens': 144,
            **CLONED,
        },
    ),
    'curriculum': ('frozen_lake', {'curriculum.rounds': (1, 2), 'curriculum.stage_steps': 2}),
    'window': ('library', {'context.window': 1, 'env.max_turns': 3, **CLONED}),
    'hosts': ('configs.demo_textcraft', {'steps': 3, 'clone.steps': 30, 'eval.every': 3}),
    'agent_evol': ('frozen_lake', {'algorithm': 'agent_evol', 'evol.iteration': 2, **CLONED}),
}
OPTIONS = (
    {},
    {'filter.keep': 0.5},
    {'filter.rule': 'varied'},
    {'context.window': 1},
    {'batch.epochs': 2, 'batch.minibatch_rows': 8},
    {'lora.rank': 4},
    {'loss.kl_coef': 0.01},
    {'batch.widths': 2},
)


def config(name, changes):
    """Return the config of a run: from a file, or a micro run of an environment."""
    if not name.startswith('configs.'):
        return micro_runs.plain(name, **changes)
    module = __import__(name, fromlist=['get_config'])
    cfg = module.get_config()
    cfg.update_from_flattened_dict(changes)
    return cfg


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def play(name, devices):
    """Return rows and digests of the final arrays of a run."""
    cfg = config(*RUNS[name])
    make = parts.build_mesh
    parts.build_mesh = lambda cfg, given=None: make(cfg, given or jax.devices()[:devices])
    with tempfile.TemporaryDirectory() as workdir:
        code = train.train(cfg, workdir)
        rows = run_log.read_metrics(pathlib.Path(workdir) / run_log.METRICS_FILE)
        state = micro_runs.saved_state(build(cfg).config_dict, workdir)
    parts.build_mesh = make
    arrays = {
        jax.tree_util.keystr(path): digest(x.tobytes())
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }
    return {'code': code, 'rows': micro_runs.without_times(rows), 'state': arrays}


def programs():
    """Return {algorithm and options: (digest of collect, digest of learn)}, or the error."""
    found = {}
    for algorithm in ALGORITHMS:
        for changes in OPTIONS:
            name = f'{algorithm} {json.dumps(changes)}'
            base = {'algorithm': algorithm, 'env.max_turns': 3, **CLONED}
            try:
                run = build(micro_runs.plain('library', **base, **changes))
            except ValueError as error:
                found[name] = f'refused: {digest(str(error).encode())}'
                continue
            found[name] = lowered(run)
    return found


def lowered(run):
    """Return digests of the StableHLO text of collect and learn."""
    key = jax.random.key(0)
    state = start_state(run, run.params)
    model = run.params if run.config.lora.rank else {}
    frozen = FrozenParams(
        model=model, reference=state.params if run.config.needs_reference else None
    )
    task, collect = run.training.tasks[0], run.training.collects[0]
    (episodes,) = run.training.draw(key, 0)
    policy = actor_params(state, frozen.model)
    played = collect.lower(policy, task, episodes, key).as_text()
    rollout = jax.eval_shape(collect, policy, task, episodes, key)[0]
    base = None
    if run.config.base_rows:
        return [digest(played.encode()), 'demonstrations join']
    learn = run.training.learn.lower(state, frozen, rollout, key, 1.0, base).as_text()
    return [digest(played.encode()), digest(learn.encode())]


def differences(before, after):
    """Return lines that describe the differences of two files."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            if name not in before or name not in after:
                yield f'{name}: only {"after" if name in after else "before"}'
                continue
            yield from (f'{name}: {line}' for line in differences(before[name], after[name]))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from (f'[{index}] {line}' for line in differences(*pair))
    elif before != after and not (before != before and after != after):
        yield f'{before!r} -> {after!r}'


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('action', choices=('write', 'compare'))
    parser.add_argument('folders', nargs='+', type=pathlib.Path)
    parser.add_argument('--only', default='', help='names of runs, with commas; programs')
    args = parser.parse_args()
    names = args.only.split(',') if args.only else [*RUNS, 'mesh', 'programs']
    if args.action == 'write':
        args.folders[0].mkdir(parents=True, exist_ok=True)
        for name in names:
            if name == 'programs':
                found = programs()
            else:
                found = play('ppo' if name == 'mesh' else name, 8 if name == 'mesh' else 1)
            (args.folders[0] / f'{name}.json').write_text(json.dumps(found, indent=1))
            print(f'{name}: written', flush=True)
        return 0
    bad = 0
    for name in names:
        pair = [json.loads((folder / f'{name}.json').read_text()) for folder in args.folders]
        lines = list(differences(*pair))
        bad += bool(lines)
        print(f'{name}: {len(lines)} differences', *lines[:10], sep='\n  ')
    return int(bad > 0)


if __name__ == '__main__':
    sys.exit(main())
