"""Train every run of a sweep in its own folder; the same command resumes.

  python -m agentrl_jax.sweep --config=configs/demo.py \\
      --sweep=configs/sweeps/demo_algorithms.py --workdir=runs/algorithms --jobs=2
  python -m agentrl_jax.sweep ... --only=algorithm=grpo --retries=0
  python -m agentrl_jax.sweep ... --launcher=slurm --submit --sbatch=--gres=gpu:1

--config.field=value applies to all runs. Exit codes: 0 all done, 1 some failed, 75 stopped by
SIGTERM or Ctrl-C (the runs have saved).
"""

if __name__ == '__main__':
    from agentrl_jax.run import interrupts

    interrupts.exit_on_signals()

from agentrl_jax.run import command, usage
from agentrl_jax.sweeps.options import define_flags

if __name__ == '__main__':
    define_flags()
    command.begin(__doc__, needs=('config', 'sweep', 'workdir'))

import jax

if __name__ == '__main__':
    # Imports may start a backend (gymnax computes a constant): leave accelerators to the runs.
    jax.config.update('jax_platforms', 'cpu')

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from agentrl_jax.machine import files, processes
from agentrl_jax.records import run_log
from agentrl_jax.sweeps import local, spec, status
from agentrl_jax.sweeps.board import Board
from agentrl_jax.sweeps.status import Overrides, Run

SCRIPT_FILE = 'sweep.sbatch'
GRACE_S = 120  # seconds between SLURM's warning and a task's time limit
PROGRAM = (sys.executable, '-m', 'agentrl_jax.sweep')
MAX_NAMES = 3


def chosen(runs: Sequence[Run], only: Sequence[str]) -> list[Run]:
    """Return the runs that any of the texts selects, in the sweep's order; all without a text.

    A text is a run's name; or fields with their values, such as `seed=1` or
    `algorithm=grpo,seed=1` (spec.matches); or a prefix of names. The first interpretation that
    matches a run is used.
    """
    names_to_run: set[str] = set()
    for text in only:
        ways = (
            [run for run in runs if run.name == text],
            [run for run in runs if spec.matches(run, text)],
            [run for run in runs if run.name.startswith(text) and text],
        )
        matches = next((way for way in ways if way), [])
        if not matches:
            names = ', '.join(run.name for run in runs)
            raise ValueError(
                f'--only={text} matches no run of this sweep: use a name, a prefix of names, or '
                f'field=value. The runs are: {names}'
            )
        names_to_run |= {run.name for run in matches}
    return [run for run in runs if run.name in names_to_run] if only else list(runs)


def slots(jobs: int, gpus: str) -> list[dict[str, str]]:
    """Return the environment variables of each concurrent run: its share of the GPUs, if any."""
    if not gpus:
        return [{}] * jobs
    listed = gpus.split(',')
    share, rest = divmod(len(listed), jobs)
    if rest:
        raise ValueError(f'--gpus={gpus}: {len(listed)} GPUs are not a multiple of --jobs={jobs}')
    parts = [listed[share * job : share * (job + 1)] for job in range(jobs)]
    return [{'CUDA_VISIBLE_DEVICES': ','.join(part)} for part in parts]


def prepare(
    workdir: str, runs: Sequence[Run], config_file: str, common: Overrides
) -> tuple[Path, str]:
    """Create a folder with a run.json for each run; returns (workdir, a notice or '').

    They all exist before the first run starts, so that a table can list missing runs.
    """
    root = files.check_workdir(workdir)
    if (root / run_log.METRICS_FILE).exists():
        raise ValueError(f'{workdir} is the folder of a run; use another one for the sweep')
    for run in runs:
        folder = root / run.name
        folder.mkdir(exist_ok=True)
        words = spec.command(run, config_file, workdir.rstrip('/'), common)
        document = {
            'name': run.name,
            'overrides': run.overrides,
            'config': run.config,
            'hash': files.config_hash(run.config),
            'command': shlex.join(words),
        }
        text = json.dumps(run_log.redact(document), indent=2, sort_keys=True) + '\n'
        path = folder / status.RUN_FILE
        if not path.exists() or path.read_text(encoding='utf-8') != text:
            files.write_atomic(path, text)
    existing = {path.parent.name for path in root.glob(f'*/{status.RUN_FILE}')}
    others = sorted(existing - {run.name for run in runs})
    names = ', '.join(others[:MAX_NAMES]) + (', ...' if len(others) > MAX_NAMES else '')
    notice = f'also holds {len(others)} runs of other sweeps or configs: {names}; not changed'
    return root, f'{workdir} {notice}' if others else ''


def print_commands(runs: Sequence[Run], config_file: str, workdir: str, common: Overrides) -> None:
    """Print a shell line for each run, or a comment if it is finished; write no file.

    The number of lines stays the same, so runs can be distributed by line number.
    """
    for run in runs:
        if status.is_done(run, Path(workdir) / run.name):
            print(f'# {run.name} is done')
            continue
        words = spec.command(run, config_file, workdir.rstrip('/'), common, python=sys.executable)
        print(shlex.join(words))


def slurm_script(
    runs: Sequence[Run], root: Path, words: Sequence[str], *, jobs: int, options: Sequence[str]
) -> str:
    """Return the script of an array job: each task is a sweep of one run, requeued on exit code 75.

    words: this sweep's command without --launcher. Tasks select runs by name, so a changed sweep
    file causes an error instead of starting a different run.
    """
    spec.check_one_line([*words, *options, str(root), str(Path.cwd())])
    lines = [
        '#!/bin/bash',
        f'#SBATCH --job-name={shlex.quote(root.name)}',
        f'#SBATCH --array=0-{len(runs) - 1}%{jobs}',
        f'#SBATCH --output={shlex.quote(str(root))}/slurm-%A_%a.txt',
        '#SBATCH --open-mode=append',
        '#SBATCH --requeue',
        f'#SBATCH --signal=B:TERM@{GRACE_S}',
        *(f'#SBATCH {option}' for option in options),
        f'cd {shlex.quote(str(Path.cwd()))} || exit 1',
        'runs=(',
        *(f'  {shlex.quote(run.name)}' for run in runs),
        ')',
        f'{shlex.join(words)} --launcher=local --jobs=1 --only="${{runs[SLURM_ARRAY_TASK_ID]}}" &',
        'child=$! asked=',
        "trap 'asked=yes; kill -TERM $child' TERM",
        'wait $child; code=$?',
        '# A signal ends a wait with 143; the next one returns how the child ended. 127: the child',
        '# ended before it handled signals, so its exit code is not known.',
        'while [ $code -eq 143 ]; do wait $child; code=$?; done',
        f'if [ $code -eq {processes.EXIT_PREEMPTED} ] || [ "$asked$code" = yes127 ]; then',
        '  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        'fi',
        'exit $code',
    ]
    return '\n'.join(lines) + '\n'


def launch_slurm(root: Path, script: str, submit: bool) -> int:
    """Write the script and print its submit command; run it if `submit` is set."""
    path = root / SCRIPT_FILE
    files.write_atomic(path, script)
    words = ['sbatch', str(path)]
    print(shlex.join(words))
    if not submit:
        return 0
    if shutil.which('sbatch') is None:
        raise ValueError('--submit needs sbatch, which was not found on this machine')
    # sbatch passes the environment on, but this process's JAX_PLATFORMS is not for the jobs
    variables = {
        name: value
        for name, value in os.environ.items()
        if name != command.PLATFORMS or command.PLATFORM_WAS_SET
    }
    return subprocess.run(words, check=False, env=variables).returncode


def run_sweep(args: flags.FlagValues) -> int:
    """Run a sweep with these flags and return its exit code."""
    holder = args['config']
    config_file, common = holder.config_filename, dict(holder.override_values)
    listed = spec.load(args.sweep)
    everything = spec.expand(args.config, listed, source=args.sweep, taken=common)
    # Printed commands may be for other machines; their buckets need not be mounted here
    printed = args.launcher == 'print'
    root = Path(args.workdir) if printed else files.local_path(args.workdir)
    everything = status.under_existing_names(everything, root)
    runs = chosen(everything, args.only)
    if args.launcher != 'slurm' and (args.submit or args.sbatch):
        raise ValueError('--submit and --sbatch need --launcher=slurm: set it or remove them')
    if args.launcher == 'slurm' and args.gpus:
        raise ValueError('--gpus needs --launcher=local: use --sbatch=--gpus=1 instead')
    if printed:
        print_commands(runs, config_file, args.workdir, common)
        return 0
    environments = slots(args.jobs, args.gpus)
    root, others = prepare(args.workdir, everything, config_file, common)
    if others:
        print(others, file=sys.stderr)
    if args.launcher == 'slurm':
        words = [
            *PROGRAM,
            f'--config={config_file}',
            *(f'--{name}={args[name].value}' for name in ('sweep', 'workdir', 'retries')),
            *spec.arguments(common),
        ]
        script = slurm_script(runs, root, words, jobs=args.jobs, options=args.sbatch)
        return launch_slurm(root, script, args.submit)

    def words_of(run):
        return spec.command(run, config_file, str(root), common, python=sys.executable)

    plan = local.Plan(runs, root, words_of, environments, args.retries)
    with Board() as board:
        return local.train_all(plan, board)


def main() -> None:
    command.show_frames_of(flags.FLAGS.sweep)
    with usage.one_line_errors(flags.FLAGS.workdir):
        code = run_sweep(flags.FLAGS)
    sys.exit(code)


if __name__ == '__main__':
    main()
