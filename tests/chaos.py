"""Kills training runs of all algorithms, and sweeps, at random moments: not a bit may be lost.

  make chaos [ARGS="--kills=50 --seed=0"]

Each round takes an algorithm, a sweep of two runs, a run of two processes, one whose worlds are on
servers that it starts, whose clock jumps, whose disk is slow, or whose disk is full; trains its
undisturbed twin once; then starts the same again and again and disturbs it at a random moment: some
seconds after its start, behind some step, or while a checkpoint is being saved. At last it may
finish; rows of metrics (times aside) and every array of the newest checkpoint must be the twin's. A
round is over after --a_run kills, and all are taken in turn, in random order (a full disk only
where this user may mount one).

Disturbances are SIGKILL; SIGTERM or SIGINT, to be obeyed; SIGTERM and soon SIGKILL, a preemption;
SIGSTOP for a while and then SIGKILL. Of two processes one is killed, asked to stop, or stopped for
good, as by a host that hangs: the other one must then end by itself, and say so. So must a run
whose disk has filled. A run with servers is always killed in the end, and they must end with it.
"""

import argparse
import collections
import contextlib
import functools
import json
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
import psutil

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.machine import processes
from agentrl_jax.records import run_log
from agentrl_jax.rollout import replies

KILL, TERM, INT, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP
BLOWS = ((KILL,), (KILL,), (KILL,), (TERM,), (INT,), (TERM, KILL), (STOP, signal.SIGCONT, KILL))
PAIR_BLOWS = ((KILL,), (KILL,), (TERM,), (STOP,))
HOST_BLOWS = ((KILL,), (KILL,), (KILL,), (TERM, KILL), (STOP, signal.SIGCONT, KILL))
OBEYED = (0, processes.EXIT_PREEMPTED)  # exit codes of a run that was asked to stop
ALL = {'clone.episodes': 128, 'clone.steps': 60, 'filter.max_empty': 20}  # so that some succeed
OWN = {  # what an algorithm needs or refuses of the micro run
    'dapo': {'filter.keep': 1.0},
    'agent_evol': {'evol.iteration': 4, 'loss.kl_coef': 0.0, 'loss.kl_target': 0.0},
    'dpo': {'loss.kl_target': 0.0, 'loss.kl_coef': 0.0, 'filter.keep': 1.0},
}
SWEEP, PAIR, HOSTS, CLOCK, SLOW, FULL = 'sweep', 'pair', 'hosts', 'clock', 'slow', 'full'  # others
SERVED = {  # training against worlds of a server that the run starts
    'steps': 12,
    'algorithm': 'grpo',
    'env.name': 'textcraft',
    'textcraft.launch': 1,
    'textcraft.prompt': 'short',
    'textcraft.distractors': 0,
    'hosts.max_observation': 48,
    'rollout.max_tokens': 256,
    'clone.episodes': 0,
    'clone.steps': 0,
}
MARK = 'CHAOS_RUN'  # variable that all processes of a run with servers have
DISK = 'size=24m'  # of which a run takes half
SERVERS_S = 30  # within which the servers of a run that was killed have ended
HEARTBEAT_S = 10  # a process of a pair that is silent for so long is taken for dead
PATIENCE_S = 400  # within which what cannot go on has ended; jax waits 300 for one that never came
TWO_SEEDS = """
def sweep(add):
    add(seed=0)
    add(seed=1)
"""
JUMPING = """
import random, runpy, sys, time
tell, jumps = time.time, random.Random(0)
def jumping():
    return tell() + jumps.choice((-1e8, -3600.0, -1.0, 0.0, 1.0, 3600.0, 1e8))
time.time, time.time_ns = jumping, lambda: int(1e9 * jumping())
runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)
"""
WAITING = """
import os, runpy, sys, time
def late(act):
    return lambda *args, **more: time.sleep(0.2) or act(*args, **more)
os.fsync, os.replace, os.rename, os.mkdir = map(late, (os.fsync, os.replace, os.rename, os.mkdir))
runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)
"""


def overrides(algorithm: str) -> dict:
    return ALL | {'algorithm': algorithm} | OWN.get(algorithm, {})


def config_of(algorithm: str):
    cfg = micro_runs.get_config()
    cfg.update_from_flattened_dict(overrides(algorithm))
    return cfg


def rows_below(folder: pathlib.Path) -> int:
    """Rows of metrics that the runs of a folder have written."""
    paths = [*folder.glob('metrics.jsonl'), *folder.glob('*/metrics.jsonl')]
    return sum(path.read_bytes().count(b'\n') for path in paths)


def saves_below(folder: pathlib.Path) -> set[pathlib.Path]:
    """Checkpoints that the runs of a folder are writing."""
    # Not by **, which would look into folders while they vanish.
    return {*folder.glob('checkpoints/*.new*'), *folder.glob('*/checkpoints/*.new*')}


class Chaos:
    """Runs below a folder, their undisturbed twins, and the tally."""

    def __init__(self, folder: pathlib.Path, seed: int):
        self.folder, self.rng = folder, random.Random(seed)
        self.tally: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.codes: collections.Counter[tuple[str, int]] = collections.Counter()
        self.late, self.rounds, self.leaves, self.quickest = 0, 0, 0, float('inf')  # s of a run
        self.started: list[subprocess.Popen] = []
        (folder / 'two_seeds.py').write_text(TWO_SEEDS)

    def start(self, *words: str, **variables: str) -> subprocess.Popen:
        with (self.folder / 'log').open('ab') as log:
            log.write(f'--- {words} {variables}\n'.encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=micro_runs.ROOT,
                env=micro_runs.environment(**variables),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started = [other for other in self.started if other.poll() is None] + [process]
        return process

    def round(
        self, name, start, compare, kills: int, *, twin='', place: pathlib.Path | None = None
    ):
        """One run, disturbed `kills` times at most, then compared with its twin."""
        twin = self.folder / f'twin_{twin or name}'
        workdir = place or self.folder / f'round_{self.rounds}'
        if not twin.exists():
            began = time.monotonic()
            self.finish(name, start(twin))
            self.quickest = min(self.quickest, time.monotonic() - began)
        for _ in range(kills):
            process = start(workdir)
            moment = self.wait_for_moment(process, workdir, rows_below(twin))
            struck = process.strike(self.rng)
            blow, codes = struck or ('', [0])
            if codes[0] == 0:
                self.late += 1
                break
            self.tally[name, moment, blow] += 1
            self.codes.update((blow, code) for code in codes)
            if blow in ('SIGTERM', 'SIGINT') and moment != 'time' and not isinstance(process, Pair):
                assert codes[0] in OBEYED, f'{name}: {blow} at a {moment} led to {codes}'
        self.finish(name, start(workdir))
        compare(workdir, twin)
        self.rounds += 1
        if place is None:
            shutil.rmtree(workdir)

    def finish(self, name: str, process: 'One | Pair') -> None:
        code = process.wait()
        assert code == 0, f'{name}: exit code {code} at its end, see {self.folder / "log"}'

    def wait_for_moment(self, process: 'One | Pair', workdir: pathlib.Path, rows: int) -> str:
        """Returns at a random moment of the run, or when it has ended; what kind of moment."""
        there = rows_below(workdir)
        kind = self.rng.choice(('time', 'step', 'save') if there < rows else ('time',))
        if kind == 'time':
            # What the twin compiled need not be compiled again, which is about half of its time.
            wanted, more = time.monotonic() + self.rng.uniform(0, self.quickest / 2), 0.0
        else:
            wanted, more = self.rng.randint(there + 1, rows), self.rng.uniform(0, 0.2)
        killed = saves_below(workdir)  # of the start before
        while not process.has_ended():
            killed &= saves_below(workdir)
            if kind == 'time' and time.monotonic() >= wanted:
                break
            if kind == 'step' and rows_below(workdir) >= wanted:
                break
            if kind == 'save' and saves_below(workdir) - killed:
                break
            time.sleep(0.01)
        time.sleep(more)
        return kind

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

    def train(self, algorithm: str, workdir: pathlib.Path, *through: str) -> 'One':
        words = [f'--config.{name}={value}' for name, value in overrides(algorithm).items()]
        config = ['--config=tests/micro_runs.py', f'--workdir={workdir}']
        how = through or ('-m',)
        return One(self.start(*how, 'agentrl_jax.train', *config, *words))

    def of_algorithm(self, name: str, kills: int) -> None:
        start = functools.partial(self.train, name)
        self.round(name, start, self.same_run(config_of(name)), kills)

    def of_strange(self, kills: int, *, name: str, program: str) -> None:
        """A machine on which something is odd; the twin's is in order."""

        def start(workdir):
            through = () if workdir.name.startswith('twin') else ('-c', program)
            return self.train('grpo', workdir, *through)

        self.round(name, start, self.same_run(config_of('grpo')), kills, twin='grpo')

    def of_full(self, kills: int) -> None:
        """Its disk fills, it ends by itself, there is room again, the same command goes on."""
        place = self.folder / 'disk'
        place.mkdir(exist_ok=True)
        subprocess.run(['mount', '-t', 'tmpfs', '-o', DISK, 'none', str(place)], check=True)

        def start(workdir):
            here = workdir if workdir.name.startswith('twin') else place
            return Filled(self, self.train('grpo', here).process, place)

        def compare(_, twin):
            self.same_run(config_of('grpo'))(place, twin)

        try:
            self.round(FULL, start, compare, kills, twin='grpo', place=place)
        finally:
            subprocess.run(['umount', '-l', str(place)], check=True)

    def of_hosts(self, kills: int) -> None:
        """Worlds on a server that the run starts; what they say is the same too."""
        words = [f'--config.{name}={value}' for name, value in SERVED.items()]
        cfg = micro_runs.get_config()
        cfg.update_from_flattened_dict(SERVED)
        same_run = self.same_run(cfg)

        def start(workdir):
            config = ['--config=tests/micro_runs.py', f'--workdir={workdir}', *words]
            mark = {MARK: f'{workdir}'}
            process = self.start('-m', 'agentrl_jax.train', *config, **mark)
            return Serving(process, mark)

        def compare(workdir, twin):
            same_run(workdir, twin)
            said, expected = (
                sorted(json.dumps(row | {'seconds': 0}) for row in replies.read_log(path))
                for path in (workdir / 'replies.jsonl', twin / 'replies.jsonl')
            )
            assert said == expected, f'{workdir}: replies differ from {twin}'

        self.round(HOSTS, start, compare, kills)

    def of_pair(self, kills: int) -> None:
        def start(workdir):
            return Pair(self, workdir)

        self.round(PAIR, start, self.same_run(micro_runs.get_config()), kills)

    def of_sweep(self, kills: int) -> None:
        def start(workdir):
            sweep = f'--sweep={self.folder / "two_seeds.py"}'
            config = ['--config=tests/micro_runs.py', f'--workdir={workdir}', '--jobs=2']
            return One(self.start('-m', 'agentrl_jax.sweep', sweep, *config))

        def compare(workdir, twin):
            runs = sorted(path.parent.name for path in twin.glob('*/finished.json'))
            assert len(runs) == 2
            for name in runs:
                cfg = micro_runs.get_config()
                cfg.seed = int(name.split('seed=')[1][0])
                self.same_run(cfg)(workdir / name, twin / name)

        self.round(SWEEP, start, compare, kills)

    def of(self, name: str, kills: int) -> None:
        strange = functools.partial(self.of_strange, name=name)
        others = {
            SWEEP: self.of_sweep,
            PAIR: self.of_pair,
            HOSTS: self.of_hosts,
            CLOCK: functools.partial(strange, program=JUMPING),
            SLOW: functools.partial(strange, program=WAITING),
            FULL: self.of_full,
        }
        if name in others:
            others[name](kills)
        else:
            self.of_algorithm(name, kills)

    def end(self) -> None:
        """Of what is still running."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, KILL)

    def table(self) -> str:
        """Who was struck how often, by what and when; exit codes of what was struck."""
        lines = []
        for column, title in enumerate(('subject', 'moment', 'signal')):
            found = collections.Counter()
            for key, number in self.tally.items():
                found[key[column]] += number
            counts = ', '.join(f'{name} {number}' for name, number in sorted(found.items()))
            lines.append(f'by {title}: {counts}')
        codes = ', '.join(
            f'{blow} -> {code}: {n}' for (blow, code), n in sorted(self.codes.items())
        )
        return '\n'.join([*lines, f'exit codes: {codes}'])


def strike(process: subprocess.Popen, blow: tuple[int, ...], rng: random.Random) -> str:
    """Sends the signals with pauses between them; their names."""
    for number in blow:
        if process.poll() is None:
            os.killpg(process.pid, number)
        if number != blow[-1]:
            time.sleep(rng.uniform(0, 1))
    return '+'.join(signal.Signals(number).name for number in blow)


class One:
    """A process that is struck."""

    def __init__(self, process: subprocess.Popen):
        self.process = process

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> int:
        return self.process.wait()

    def strike(self, rng: random.Random) -> tuple[str, list[int]] | None:
        """(signals, exit codes), or None if it had ended by itself."""
        if self.has_ended():
            self.wait()
            return None
        name = strike(self.process, rng.choice(BLOWS), rng)
        return name, [self.process.wait()]


class Serving(One):
    """A process with servers of worlds, which end with it."""

    def __init__(self, process: subprocess.Popen, mark: dict[str, str]):
        super().__init__(process)
        self.mark = mark

    def wait(self) -> int:
        code = super().wait()
        self.assert_alone()
        return code

    def strike(self, rng: random.Random) -> tuple[str, list[int]] | None:
        if self.has_ended():
            self.wait()
            return None
        name = strike(self.process, rng.choice(HOST_BLOWS), rng)
        return f'{name} ({len(self.marked())} processes)', [self.wait()]

    def marked(self) -> list[psutil.Process]:
        """Processes that the run has started, and they."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self.mark.items() <= process.environ().items():
                    found.append(process)
        return found

    def assert_alone(self) -> None:
        _, left = psutil.wait_procs(self.marked(), SERVERS_S)
        assert not left, f'{left} were left over'


class Filled(One):
    """A process whose disk fills."""

    def __init__(self, chaos: Chaos, process: subprocess.Popen, disk: pathlib.Path):
        super().__init__(process)
        self.log, self.disk = chaos.folder / 'log', disk
        self.begin = self.log.stat().st_size

    def strike(self, rng: random.Random) -> tuple[str, list[int]] | None:
        if self.has_ended():
            self.wait()
            return None
        filler = self.disk / 'filler'
        with contextlib.suppress(OSError), filler.open('wb', buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        code = self.process.wait(PATIENCE_S)
        filler.unlink()
        said = self.log.read_bytes()[self.begin :].decode()
        assert code == 0 or 'ree space' in said, said
        return 'full', [code]


class Pair:
    """Two processes of one run, of which one is struck."""

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
        words = ['-m', 'agentrl_jax.train', *config]
        self.both = [chaos.start(*words, **joined, JAX_PROCESS_ID=str(i)) for i in range(2)]

    def has_ended(self) -> bool:
        return any(process.poll() is not None for process in self.both)

    def wait(self) -> int:
        """0, or the exit code that is not."""
        return max((process.wait() for process in self.both), key=abs)

    def strike(self, rng: random.Random) -> tuple[str, list[int]] | None:
        """Strikes one of them; the other must follow by itself. None if one had ended before."""
        if self.has_ended():
            assert self.wait() == 0
            return None
        index, blow = rng.randrange(2), rng.choice(PAIR_BLOWS)
        struck, other = self.both[index], self.both[1 - index]
        name = strike(struck, blow, rng)
        other.wait(PATIENCE_S)
        if struck.poll() is None and blow == (STOP,):
            os.killpg(struck.pid, KILL)
        struck.wait(PATIENCE_S)
        # The second code is of the one that was left alone.
        assert other.returncode != 0 or struck.returncode == 0, f'{name} led to 0 of the other'
        return f'{name} to process {index}', [struck.returncode, other.returncode]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kills', type=int, default=50, help='processes to end, in all')
    parser.add_argument('--a_run', type=int, default=3, help='of which a run gets at most so many')
    parser.add_argument('--seed', type=int, default=0, help='of what happens when')
    parser.add_argument(
        '--only',
        default='',
        help="algorithms, sweep, pair, hosts, clock, slow, full, with commas; '' = all",
    )
    given = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix='chaos_'))
    os.environ |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        'XLA_FLAGS': '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false',
    }
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(folder / 'programs'))
    # Children inherit signals that are ignored, as in a shell's background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chaos = Chaos(folder, given.seed)
    others = [SWEEP, PAIR, HOSTS, CLOCK, SLOW, *[FULL] * (os.geteuid() == 0)]
    all_names = [*sorted(ALGORITHMS), *others]
    names = given.only.split(',') if given.only else all_names
    waiting: list[str] = []
    try:
        while (done := chaos.tally.total()) < given.kills:
            waiting = waiting or chaos.rng.sample(names, len(names))
            name, began = waiting.pop(), time.monotonic()
            chaos.of(name, min(given.a_run, given.kills - done))
            print(
                f'{name}: the same bits after {chaos.tally.total()} kills in all '
                f'({chaos.late} came too late), {time.monotonic() - began:.0f} s',
                flush=True,
            )
    finally:
        chaos.end()
        print(chaos.table())
    kills = chaos.tally.total()
    print(f'{kills} kills, {chaos.rounds} runs, {chaos.leaves} arrays equal, 0 bits lost')
    shutil.rmtree(folder)


if __name__ == '__main__':
    main()
