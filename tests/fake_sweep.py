"""A local sweep of fake runs, as a process that tests can kill.

python fake_sweep.py <workdir> <runs> <jobs> <retries> <steps> <seconds of a step> [fault step]
"""

import pathlib
import sys

from agentrl_jax.sweeps import local, status
from agentrl_jax.sweeps.board import Board

TRAINING = pathlib.Path(__file__).with_name('fake_training.py')


def plan(workdir, runs, jobs, retries, steps, step_s, *fault):
    """Return a Plan of runs run-0, run-1, ... with existing folders."""
    workdir = pathlib.Path(workdir)
    entries = [status.Run(f'run-{i}', {}, {}, int(steps)) for i in range(int(runs))]
    for run in entries:
        (workdir / run.name).mkdir(parents=True, exist_ok=True)

    def command(run):
        # -S -E: starts in 20 ms
        words = [workdir / run.name, run.steps, step_s, *fault]
        return [sys.executable, '-S', '-E', str(TRAINING), *map(str, words)]

    return local.Plan(entries, workdir, command, [{}] * int(jobs), int(retries))


if __name__ == '__main__':
    with Board(plain_every_s=1.0) as board:
        sys.exit(local.train_all(plan(*sys.argv[1:]), board, poll_s=0.02, refresh_s=0.1))
