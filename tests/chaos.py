"""Kill training runs of every kind at random moments; the results must not change by a bit.

  make chaos [ARGS="--kills=50 --seed=0"]

Each round tests one kind of run (KINDS): an algorithm, a mixture of environments, an agent that
plans or tries its levels twice, adapters, a saved best policy, worlds on servers that the run
starts, or two processes. It trains an undisturbed twin once. Then it starts the same run
repeatedly and disturbs it at a random moment: some seconds after its start, after some step, or
during a save. Finally the run may finish. Its metrics (except times), every array of the newest
checkpoint and of the best policy, the pages and the replies of host environments must equal the
twin's. A round ends after --a_run kills. All kinds are tested in turn, in random order.

Disturbances are SIGKILL; SIGTERM or SIGINT, which must be obeyed; SIGTERM and then SIGKILL, as in a
preemption; and SIGSTOP for a while, then SIGKILL. With two processes, one is killed, terminated,
or stopped for good, like a hung host. The other process must then end by itself and report it.
World servers must end with the run that started them, however it ended.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import folders  # noqa: F401
import jax
import micro_runs
import numpy as np
import psutil
import quick_xla
from test_multiprocess import variables_of

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.machine import checkpoint, processes
from agentrl_jax.records import run_log
from agentrl_jax.rollout import replies
from agentrl_jax.run.config import effective
from agentrl_jax.run.params import BEST_FOLDER

KILL, TERM, INT, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP
BLOWS = ((KILL,), (KILL,), (KILL,), (TERM,), (INT,), (TERM, KILL), (STOP, signal.SIGCONT, KILL))
PAIR_BLOWS = ((KILL,), (KILL,), (TERM,), (STOP,))
OBEYED = (0, processes.EXIT_PREEMPTED)  # exit codes of a run that received SIGTERM
ALL = {'clone.episodes': 128, 'clone.steps': 60, 'filter.max_empty': 20}  # for some successes
OWN = {  # settings that an algorithm needs or rejects in the micro run
    'dapo': {'filter.keep': 1.0},
    'gdpo': {'filter.keep': 1.0},
    'maxrl': {'env.format_penalty': 0.0},
    'agent_evol': {'evol.iteration': 4, 'loss.kl_coef': 0.0},
}
SERVED = {  # worlds on a server that the run starts
    'steps': 12,
    'algorithm': 'grpo',
    'env.name': 'textcraft',
    'hosts.launch': 1,
    'hosts.prompt': 'short',
    'textcraft.distractors': 0,
    'hosts.max_observation': 48,
    'rollout.max_tokens': 256,
    'clone.episodes': 0,
    'clone.steps': 0,
    'loss.entropy_coef': 0.01,  # the reward teaches nothing in so few steps
}
TWICE = {'agent.trials': 2, 'env.max_turns': 5, 'curriculum.rounds': (5,)}  # two tries per level
MARK = 'CHAOS_RUN'  # environment variable of all processes of a run, including its servers
SERVERS_S = 30  # time for the servers of a killed run to end
HEARTBEAT_S = 10  # silence after which a process of a pair counts as dead
PATIENCE_S = 400  # time for a blocked process to end; jax waits 300 s for a missing peer


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run."""

    changes: dict[str, Any]  # of the micro run's config
    processes: int = 1


def of_algorithm(name: str) -> Kind:
    return Kind(ALL | {'algorithm': name} | OWN.get(name, {}))


GRPO = of_algorithm('grpo')
KINDS = {name: of_algorithm(name) for name in sorted(ALGORITHMS.keys() - {'opd', 'rae'})} | {  # no
    # teacher, and no game of two players
    'pair': Kind({}, processes=2),
    'mix': Kind(
        GRPO.changes | {'env.mix': (('frozen_lake', 0.5), ('library', 0.5)), 'filter.keep': 1.0}
    ),
    'plan': Kind(GRPO.changes | TWICE | {'agent.name': 'plan', 'rollout.max_tokens': 320}),
    'reflect': Kind(GRPO.changes | TWICE | {'agent.name': 'reflect', 'rollout.max_tokens': 320}),
    'lora': Kind(
        GRPO.changes | {'lora.rank': 2, 'lora.alpha': 8.0, 'lora.targets': 'q_proj,down_proj'}
    ),
    'best': Kind(ALL | {'checkpoint.best': True, 'eval.every': 2, 'eval.samples': 3}),
    'hosts': Kind(SERVED),
    'hosts_mix': Kind(
        SERVED
        | {
            'env.mix': (('frozen_lake', 0.5), ('textcraft', 0.5)),
            'model.tokenizer': 'agentrl_jax/tokens/textcraft.model',
            'rollout.max_tokens': 400,
        }
    ),
    'hosts_pair': Kind(SERVED, processes=2),
}


def config_of(changes: dict[str, Any]):
    cfg = micro_runs.get_config()
    cfg.update_from_flattened_dict(changes)
    return effective(cfg)


def without_waiting(x: Any) -> Any:
    """Return a page's document without waiting times and retry counts of worlds."""
    waited = ('seconds', 'slowest', 'tries', 'retries', 'commit')  # HEAD may change meanwhile
    if isinstance(x, dict):
        return {name: without_waiting(part) for name, part in x.items() if name not in waited}
    return [without_waiting(part) for part in x] if isinstance(x, list) else x


def pages_of(workdir: pathlib.Path) -> dict[str, Any]:
    """Return the pages of a run by name, with their HTML unless the run waited for worlds."""
    paths = sorted((workdir / 'rollouts').iterdir())
    pages = {path.name: json.loads(path.read_text()) for path in paths if path.suffix == '.json'}
    if not replies_of(workdir):
        commit = re.compile('<dt>commit</dt><dd>[^<]*</dd>')
        drawn = {path.name: path.read_text() for path in paths if path.suffix == '.html'}
        pages |= {name: commit.sub('', text) for name, text in drawn.items()}
    return without_waiting(pages)


def replies_of(workdir: pathlib.Path) -> dict[str, list[str]]:
    """Return the replies of host environments by file, sorted, since their order varies."""
    return {
        path.name: sorted(json.dumps(without_waiting(row)) for row in replies.read_log(path))
        for path in workdir.glob('replies*.jsonl')
    }


def kept_best(workdir: pathlib.Path) -> dict[str, Any]:
    """Return steps of the best policy (one or none) and the metadata of their checkpoints."""
    folder = pathlib.Path(workdir, BEST_FOLDER, checkpoint.FOLDER)
    return {step: checkpoint.read_extra(folder, step=step) for step in checkpoint.steps(folder)}


def rows_of(workdir: pathlib.Path) -> int:
    """Return the rows of metrics that a run has written."""
    path = workdir / run_log.METRICS_FILE
    return path.read_bytes().count(b'\n') if path.exists() else 0


def saves_of(workdir: pathlib.Path) -> set[pathlib.Path]:
    """Return the checkpoints that a run is writing."""
    return {*workdir.glob('checkpoints/*.new*')}


class Chaos:
    """Runs in a folder, their undisturbed twins, and the tally."""

    def __init__(self, folder: pathlib.Path, seed: int):
        self.folder, self.rng = folder, random.Random(seed)
        self.tally: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.codes: collections.Counter[tuple[str, int]] = collections.Counter()
        self.compared: collections.Counter[str] = collections.Counter()
        self.late, self.rounds, self.leaves, self.quickest = 0, 0, 0, float('inf')  # s of a run
        self.started: list[subprocess.Popen] = []

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

    def of(self, name: str, kills: int) -> None:
        """Disturb one run up to `kills` times, then compare it with its twin."""
        kind = KINDS[name]
        twin, workdir = self.folder / f'twin_{name}', self.folder / f'round_{self.rounds}'
        if not twin.exists():
            began = time.monotonic()
            self.finish(name, twin, self.train(kind, twin))
            self.quickest = min(self.quickest, time.monotonic() - began)
        for _ in range(kills):
            process = self.train(kind, workdir)
            moment = self.wait_for_moment(process, workdir, rows_of(twin))
            struck = process.strike(self.rng)
            assert_alone(workdir)
            blow, codes = struck or ('', [0])
            if codes[0] == 0:
                self.late += 1
                break
            self.tally[name, moment, blow] += 1
            self.codes.update((blow, code) for code in codes)
            if blow in ('SIGTERM', 'SIGINT') and moment != 'time':
                assert codes[0] in OBEYED, f'{name}: {blow} at a {moment} led to {codes}'
        self.finish(name, workdir, self.train(kind, workdir))
        self.compare(kind.changes, workdir, twin)
        self.rounds += 1
        shutil.rmtree(workdir)

    def finish(self, name: str, workdir: pathlib.Path, process: 'Running') -> None:
        code = process.wait()
        assert code == 0, f'{name}: exit code {code} at its end, see {self.folder / "log"}'
        assert_alone(workdir)

    def wait_for_moment(self, process: 'Running', workdir: pathlib.Path, rows: int) -> str:
        """Wait until a random moment of the run, or its end; return the kind of moment."""
        there = rows_of(workdir)
        kind = self.rng.choice(('time', 'step', 'save') if there < rows else ('time',))
        if kind == 'time':
            # The twin has already compiled the programs, which takes about half of its time.
            target, more = time.monotonic() + self.rng.uniform(0, self.quickest / 2), 0.0
        else:
            target, more = self.rng.randint(there + 1, rows), self.rng.uniform(0, 0.2)
        killed = saves_of(workdir)  # of the previous start
        while not process.has_ended():
            killed &= saves_of(workdir)
            if kind == 'time' and time.monotonic() >= target:
                break
            if kind == 'step' and rows_of(workdir) >= target:
                break
            if kind == 'save' and saves_of(workdir) - killed:
                break
            time.sleep(0.01)
        time.sleep(more)
        return kind

    def compare(self, changes: dict[str, Any], workdir: pathlib.Path, twin: pathlib.Path) -> None:
        """Fail unless both runs have the same rows, arrays, pages and replies."""
        rows, expected = (
            micro_runs.without_times(run_log.read_metrics(w / run_log.METRICS_FILE))
            for w in (workdir, twin)
        )
        assert rows == expected, f'{workdir}: rows differ from {twin}'
        assert any(row.get('policy/grad_norm', 0) > 0 for row in rows), f'{twin}: nothing trained'
        for read in (replies_of, pages_of, kept_best):
            result, expected = read(workdir), read(twin)
            differ = {name for name in result | expected if result.get(name) != expected.get(name)}
            assert not differ, f'{workdir}: {sorted(differ)} of {read.__name__} differ from {twin}'
            self.compared[read.__name__] += len(result)
        cfg = config_of(changes)
        one, other = (micro_runs.saved_state(cfg, w) for w in (workdir, twin))
        jax.tree.map(np.testing.assert_array_equal, one, other)
        self.leaves += len(jax.tree.leaves(one))

    def train(self, kind: Kind, workdir: pathlib.Path) -> 'Running':
        """Start a run."""
        words = ['-m', 'agentrl_jax.train', '--config=tests/micro_runs.py', f'--workdir={workdir}']
        words += [f'--config.{name}={value}' for name, value in kind.changes.items()]
        mark = {MARK: f'{workdir}'}
        if kind.processes == 1:
            return Running(self.start(*words, **mark))
        mark |= {'JAX_NUM_CPU_DEVICES': '1', 'AGENTRL_HEARTBEAT_S': f'{HEARTBEAT_S}'}
        words.append(f'--config.mesh.data={kind.processes}')
        both = variables_of(kind.processes)
        return Running(*(self.start(*words, **mark, **variables) for variables in both))

    def end(self) -> None:
        """End all processes that are still running."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, KILL)

    def table(self) -> str:
        """Return the number of disturbances by kind, signal and moment, and the exit codes."""
        lines = []
        for column, title in enumerate(('subject', 'moment', 'signal')):
            result = collections.Counter()
            for key, number in self.tally.items():
                result[key[column]] += number
            counts = ', '.join(f'{name} {number}' for name, number in sorted(result.items()))
            lines.append(f'by {title}: {counts}')
        codes = ', '.join(
            f'{blow} -> {code}: {n}' for (blow, code), n in sorted(self.codes.items())
        )
        return '\n'.join([*lines, f'exit codes: {codes}'])


def assert_alone(workdir: pathlib.Path) -> None:
    """Check that no child process outlives its run."""
    marked, left = {MARK: f'{workdir}'}, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if marked.items() <= process.environ().items():
                left.append(process)
    _, left = psutil.wait_procs(left, SERVERS_S)
    assert not left, f'{left} were left over'


def strike(process: subprocess.Popen, blow: tuple[int, ...], rng: random.Random) -> str:
    """Send the signals with pauses between them; return their names."""
    for number in blow:
        if process.poll() is None:
            os.killpg(process.pid, number)
        if number != blow[-1]:
            time.sleep(rng.uniform(0, 1))
    return '+'.join(signal.Signals(number).name for number in blow)


class Running:
    """The processes of one run; one of them is disturbed."""

    def __init__(self, *processes: subprocess.Popen):
        self.processes = list(processes)

    def has_ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def wait(self) -> int:
        """Return 0, or the first other exit code."""
        return max((process.wait() for process in self.processes), key=abs)

    def strike(self, rng: random.Random) -> tuple[str, list[int]] | None:
        """Disturb one process; return (signals, exit codes), or None if it had already ended.

        The second code belongs to the undisturbed process, which must end by itself.
        """
        several = len(self.processes) > 1
        if self.has_ended():
            code = self.wait()
            assert code == 0 or not several
            return None
        index = rng.randrange(len(self.processes)) if several else 0
        blow = rng.choice(PAIR_BLOWS if several else BLOWS)
        others = list(self.processes)
        struck = others.pop(index)
        name = strike(struck, blow, rng)
        for other in others:
            other.wait(PATIENCE_S)
        if struck.poll() is None and blow == (STOP,):
            os.killpg(struck.pid, KILL)
        struck.wait(PATIENCE_S)
        codes = [process.returncode for process in (struck, *others)]
        assert not several or codes[1] != 0 or codes[0] == 0, f'{name} led to 0 of the other'
        return f'{name} to process {index}' if several else name, codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kills', type=int, default=50, help='processes to end, in all')
    parser.add_argument('--a_run', type=int, default=3, help='of which a run gets at most so many')
    parser.add_argument('--seed', type=int, default=0, help='of what happens when')
    parser.add_argument(
        '--only',
        default='',
        help=f"with commas, of {', '.join(KINDS)}; '' = all",
    )
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix='chaos_'))
    os.environ |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        'XLA_FLAGS': quick_xla.FLAGS,
    }
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(folder / 'programs'))
    # Children inherit ignored signals, as in a shell's background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chaos = Chaos(folder, args.seed)
    names = args.only.split(',') if args.only else [*KINDS]
    waiting: list[str] = []
    try:
        while (done := chaos.tally.total()) < args.kills:
            waiting = waiting or chaos.rng.sample(names, len(names))
            name, began = waiting.pop(), time.monotonic()
            chaos.of(name, min(args.a_run, args.kills - done))
            print(
                f'{name}: the same bits after {chaos.tally.total()} kills in all '
                f'({chaos.late} came too late), {time.monotonic() - began:.0f} s',
                flush=True,
            )
    finally:
        chaos.end()
        print(chaos.table())
    kills = chaos.tally.total()
    pages, logs, best = (
        chaos.compared[read.__name__] for read in (pages_of, replies_of, kept_best)
    )
    print(
        f'{kills} kills, {chaos.rounds} runs, {chaos.leaves} arrays, {pages} pages, {logs} logs of '
        f'replies and {best} best policies equal, 0 bits lost'
    )
    shutil.rmtree(folder)


if __name__ == '__main__':
    main()
