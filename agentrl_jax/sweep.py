"""Train every run of a sweep: each in its own folder, resumed by the same command.

  python -m agentrl_jax.sweep --config=configs/demo.py \\
      --sweep=configs/sweeps/demo_algorithms.py --workdir=runs/algorithms --jobs=2

--config.field=value holds for all runs. Exit codes: 0 all done, 1 some failed, 75 asked to stop
(SIGTERM or Ctrl-C; the runs have saved).
"""

if __name__ == '__main__':
    from agentrl_jax.run import interrupts

    interrupts.stop_when_asked()

from agentrl_jax.run import command, usage
from agentrl_jax.sweeps.options import define_flags

if __name__ == '__main__':
    define_flags()
    command.begin(__doc__, needs=('config', 'sweep', 'workdir'))

import jax

if __name__ == '__main__':
    # Imports may start a backend (gymnax computes a constant); accelerators are for the children.
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
GRACE_S = 120  # seconds before the end of its time that SLURM warns a task
PROGRAM = (sys.executable, '-m', 'agentrl_jax.sweep')
SHOWN_NAMES = 3


def chosen(runs: Sequence[Run], only: Sequence[str]) -> list[Run]:
    """The runs that any of the texts names, in the order of the sweep; all if there is no text.

    A text is the name of a run; or fields with their values, `seed=1` or
    `algorithm=grpo,seed=1` (spec.matches); or the beginning of names. Only the first of these
    that matches a run is used.
    """
    wanted: set[str] = set()
    for text in only:
        ways = (
            [run for run in runs if run.name == text],
            [run for run in runs if spec.matches(run, text)],
            [run for run in runs if run.name.startswith(text) and text],
        )
        found = next((way for way in ways if way), [])
        if not found:
            names = ', '.join(run.name for run in runs)
            raise ValueError(
                f'--only={text} is no run of this sweep: neither the name of one or its beginning, '
                f'nor field=value of one; there are: {names}'
            )
        wanted |= {run.name for run in found}
    return [run for run in runs if run.name in wanted] if only else list(runs)


def slots(jobs: int, gpus: str) -> list[dict[str, str]]:
    """Environment of each of the runs that train at once: its share of the GPUs, if any."""
    if not gpus:
        return [{}] * jobs
    listed = gpus.split(',')
    share, rest = divmod(len(listed), jobs)
    if rest:
        raise ValueError(f'--gpus={gpus} are {len(listed)} GPUs, no multiple of --jobs={jobs}')
    parts = [listed[share * job : share * (job + 1)] for job in range(jobs)]
    return [{'CUDA_VISIBLE_DEVICES': ','.join(part)} for part in parts]


def prepare(
    workdir: str, runs: Sequence[Run], config_file: str, common: Overrides
) -> tuple[Path, str]:
    """Makes a folder for each run with a run.json that describes it; (workdir, a notice or '').

    All of them exist before the first run starts, so a table can show what is missing.
    """
    root = files.check_workdir(workdir)
    if (root / run_log.METRICS_FILE).exists():
        raise ValueError(f'{workdir} is the folder of a run; a sweep needs one of its own')
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
    found = {path.parent.name for path in root.glob(f'*/{status.RUN_FILE}')}
    others = sorted(found - {run.name for run in runs})
    names = ', '.join(others[:SHOWN_NAMES]) + (', ...' if len(others) > SHOWN_NAMES else '')
    notice = f'also holds {len(others)} runs of other sweeps or configs: {names}; left alone'
    return root, f'{workdir} {notice}' if others else ''


def print_commands(runs: Sequence[Run], config_file: str, workdir: str, common: Overrides) -> None:
    """A shell line for each run, a comment for finished runs; no file is written.

    So the number of lines, by which runs are shared out, stays the same.
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
    """An array job: each task is a sweep of one run, requeued when it exits with 75.

    words: the command of this sweep without --launcher. Names rather than numbers choose the run,
    so a sweep file that has changed since is an error, not another run.
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
        '# A signal ends a wait with 143, and the next wait says how the child ended; 127: nothing',
        '# more is known, as it was stopped before it listened to signals.',
        'while [ $code -eq 143 ]; do wait $child; code=$?; done',
        f'if [ $code -eq {processes.EXIT_PREEMPTED} ] || [ "$asked$code" = yes127 ]; then',
        '  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        'fi',
        'exit $code',
    ]
    return '\n'.join(lines) + '\n'


def launch_slurm(root: Path, script: str, submit: bool) -> int:
    """Writes the script, says how to submit it, and does so if asked to."""
    path = root / SCRIPT_FILE
    files.write_atomic(path, script)
    words = ['sbatch', str(path)]
    print(shlex.join(words))
    if not submit:
        return 0
    if shutil.which('sbatch') is None:
        raise ValueError('--submit needs sbatch, which was not found on this machine')
    # sbatch hands the environment on, and what holds here does not hold where the jobs will run
    found = {
        name: value
        for name, value in os.environ.items()
        if name != command.PLATFORMS or command.CHOSEN
    }
    return subprocess.run(words, check=False, env=found).returncode


def run_sweep(args: flags.FlagValues) -> int:
    """The exit code of a sweep with these flags."""
    holder = args['config']
    config_file, common = holder.config_filename, dict(holder.override_values)
    listed = spec.load(args.sweep)
    everything = spec.expand(args.config, listed, source=args.sweep, taken=common)
    # The commands that are printed may be for other machines, whose buckets are not mounted here
    printed = args.launcher == 'print'
    root = Path(args.workdir) if printed else files.local_path(args.workdir)
    everything = status.under_existing_names(everything, root)
    runs = chosen(everything, args.only)
    if args.launcher != 'slurm' and (args.submit or args.sbatch):
        raise ValueError('--submit and --sbatch are of --launcher=slurm: without it leave them out')
    if args.launcher == 'slurm' and args.gpus:
        raise ValueError('--gpus is of --launcher=local: ask for them as --sbatch=--gpus=1')
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
    try:
        with usage.checked():
            code = run_sweep(flags.FLAGS)
    except (ValueError, OSError) as error:
        usage.end(files.in_words(error, flags.FLAGS.workdir), error)
    sys.exit(code)


if __name__ == '__main__':
    main()
