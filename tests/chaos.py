"""Kills training runs of all algorithms, and sweeps, at random moments: not a bit may be lost.

  make chaos [ARGS="--kills=50 --seed=0"]

Each round takes an algorithm, trains its undisturbed twin once, then starts the same run again and
again and ends it by a random signal at a random moment: SIGKILL, SIGTERM, SIGINT, or SIGSTOP for a
while. At last it may finish; rows of metrics (times aside) and every array of the newest checkpoint
must be the twin's. Every fifth round the parent of a sweep of two runs is killed instead, every
seventh one of the two processes of a run, the first as well as the other: killed, asked to stop, or
stopped for good, as by a host that hangs. The other one must then end by itself.
"""

import argparse
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import jax
import micro_runs
import numpy as np

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.records import run_log

SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
OWN = {  # what an algorithm needs or refuses of the micro run
    'agent_evol': {'evol.iteration': 4, 'loss.kl_coef': 0.0, 'loss.kl_target': 0.0},
    'dpo': {'loss.kl_target': 0.0, 'loss.kl_coef': 0.0, 'filter.keep': 1.0},
}
PAIR = 'pair'  # a round of two processes
HEARTBEAT_S = 10  # a process of a pair that is silent for so long is taken for dead
PATIENCE_S = 120  # within which the other one has ended
SWEEP = """
def sweep(add):
    add(seed=0)
    add(seed=1)
"""


def overrides(algorithm: str) -> dict:
    return {'algorithm': algorithm} | OWN.get(algorithm, {})


def config_of(algorithm: str):
    cfg = micro_runs.get_config()
    cfg.update_from_flattened_dict(overrides(algorithm))
    return cfg


class Chaos:
    """Runs below a folder, their undisturbed twins, and the tally."""

    def __init__(self, folder: pathlib.Path, seed: int):
        self.folder, self.rng = folder, random.Random(seed)
        self.kills, self.late, self.rounds, self.leaves = 0, 0, 0, 0
        self.seconds: dict[str, float] = {}
        (folder / 'two_seeds.py').write_text(SWEEP)

    def start(self, *words: str, **variables: str) -> subprocess.Popen:
        with (self.folder / 'log').open('ab') as log:
            return subprocess.Popen(
                [sys.executable, '-m', *words],
                cwd=micro_runs.ROOT,
                env=micro_runs.environment(**variables),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def train(self, algorithm: str, workdir: pathlib.Path) -> subprocess.Popen:
        words = [f'--config.{name}={value}' for name, value in overrides(algorithm).items()]
        config = ['--config=tests/micro_runs.py', f'--workdir={workdir}']
        return self.start('agentrl_jax.train', *config, *words)

    def twin(self, name: str, start) -> pathlib.Path:
        """The undisturbed run, made once; its second start says how long one takes."""
        workdir = self.folder / f'twin_{name}'
        if name not in self.seconds:
            for _ in range(2):  # the first one compiles
                shutil.rmtree(workdir, ignore_errors=True)
                began = time.monotonic()
                code = start(workdir).wait()
                assert code == 0, f'{name} undisturbed: exit code {code}, see {self.folder / "log"}'
                self.seconds[name] = time.monotonic() - began
        return workdir

    def disturb(self, process: 'subprocess.Popen | Pair', seconds: float) -> bool:
        """Waits a random while and ends the process group; False if it had ended by itself."""
        if isinstance(process, Pair):
            return process.disturb(self.rng, seconds)
        number = self.rng.choice(SIGNALS)
        time.sleep(self.rng.uniform(0, 1.1 * seconds))
        if process.poll() is not None:
            return False
        os.killpg(process.pid, number)
        if number == signal.SIGSTOP:  # a host that hangs, and comes back
            time.sleep(self.rng.uniform(0, 2))
            os.killpg(process.pid, signal.SIGCONT)
            number = signal.SIGKILL
            time.sleep(self.rng.uniform(0, 0.5))
            if process.poll() is None:
                os.killpg(process.pid, number)
        process.wait()
        return True

    def round(self, name: str, start, compare, kills: int) -> None:
        """One run, killed `kills` times at most, then compared with its twin."""
        twin, workdir = self.twin(name, start), self.folder / f'round_{self.rounds}'
        for _ in range(kills):
            ended = self.disturb(start(workdir), self.seconds[name])
            self.kills += ended
            self.late += not ended
        code = start(workdir).wait()
        assert code == 0, f'{name}: exit code {code} at its end, see {self.folder / "log"}'
        compare(workdir, twin)
        self.rounds += 1
        shutil.rmtree(workdir)

    def same_run(self, cfg):
        def compare(workdir, twin):
            rows, expected = (
                micro_runs.without_times(run_log.read_metrics(w / run_log.METRICS_FILE))
                for w in (workdir, twin)
            )
            assert rows == expected, f'{workdir}: rows differ from {twin}'
            one, other = (micro_runs.saved_state(cfg, w) for w in (workdir, twin))
            jax.tree.map(np.testing.assert_array_equal, one, other)
            self.leaves += len(jax.tree.leaves(one))

        return compare

    def of_algorithm(self, name: str, kills: int) -> None:
        def start(workdir):
            return self.train(name, workdir)

        self.round(name, start, self.same_run(config_of(name)), kills)

    def of_pair(self, kills: int) -> None:
        def start(workdir):
            return Pair(self, workdir)

        self.round(PAIR, start, self.same_run(micro_runs.get_config()), kills)

    def of_sweep(self, kills: int) -> None:
        def start(workdir):
            sweep = f'--sweep={self.folder / "two_seeds.py"}'
            config = ['--config=tests/micro_runs.py', f'--workdir={workdir}', '--jobs=2']
            return self.start('agentrl_jax.sweep', sweep, *config)

        def compare(workdir, twin):
            runs = sorted(path.parent.name for path in twin.glob('*/finished.json'))
            assert len(runs) == 2
            for name in runs:
                cfg = micro_runs.get_config()
                cfg.seed = int(name.split('seed=')[1][0])
                self.same_run(cfg)(workdir / name, twin / name)

        self.round('sweep', start, compare, kills)


class Pair:
    """Two processes of one run."""

    def __init__(self, chaos: Chaos, workdir: pathlib.Path):
        with socket.socket() as probe:
            probe.bind(('localhost', 0))
            port = probe.getsockname()[1]
        joined = {
            'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
            'JAX_NUM_PROCESSES': '2',
            'JAX_NUM_CPU_DEVICES': '1',
            'AGENTRL_HEARTBEAT_S': str(HEARTBEAT_S),
        }
        config = ['--config=tests/micro_runs.py', f'--workdir={workdir}', '--config.mesh.data=2']
        self.both = [
            chaos.start('agentrl_jax.train', *config, **joined, JAX_PROCESS_ID=str(index))
            for index in range(2)
        ]

    def wait(self) -> int:
        """0, or the exit code that is not."""
        return max((process.wait() for process in self.both), key=abs)

    def disturb(self, rng: random.Random, seconds: float) -> bool:
        """Ends one of them; the other must follow by itself. False if one had ended before."""
        struck, other = rng.sample(self.both, 2)
        time.sleep(rng.uniform(0, 1.1 * seconds))
        if struck.poll() is not None or other.poll() is not None:
            self.wait()
            return False
        os.killpg(struck.pid, rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)))
        other.wait(PATIENCE_S)
        if struck.poll() is None:
            os.killpg(struck.pid, signal.SIGKILL)
            struck.wait()
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kills', type=int, default=50, help='processes to end, in all')
    parser.add_argument('--a_run', type=int, default=5, help='of which a run gets at most so many')
    parser.add_argument('--seed', type=int, default=0, help='of what happens when')
    parser.add_argument('--only', default='', help="algorithms, sweep, pair, with commas; '' = all")
    given = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix='chaos_'))
    os.environ |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'programs'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        'XLA_FLAGS': '--xla_backend_optimization_level=0',
    }
    chaos, names = Chaos(folder, given.seed), sorted(ALGORITHMS)
    while chaos.kills < given.kills:
        kills = min(given.a_run, given.kills - chaos.kills)
        if given.only:
            name = chaos.rng.choice(given.only.split(','))
        else:
            name = chaos.rng.choice(names)
            name = 'sweep' if chaos.rounds % 5 == 4 else name
            name = PAIR if chaos.rounds % 7 == 3 else name
        began = time.monotonic()
        if name == 'sweep':
            chaos.of_sweep(kills)
        elif name == PAIR:
            chaos.of_pair(kills)
        else:
            chaos.of_algorithm(name, kills)
        print(
            f'{name}: the same bits after {chaos.kills} ended processes in all '
            f'({chaos.late} signals came too late), {time.monotonic() - began:.0f} s',
            flush=True,
        )
    print(f'{chaos.kills} kills, {chaos.rounds} runs, {chaos.leaves} arrays equal, 0 bits lost')
    shutil.rmtree(folder)


if __name__ == '__main__':
    main()
