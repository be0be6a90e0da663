"""Processes that play harnesses which are callables, one episode at a time.

A thread that hangs cannot be ended, but a worker can be killed with all that it has started. The
next episode starts another one.
"""

import dataclasses
import json
import sys
import threading
from typing import Any, BinaryIO

from agentrl_jax.envs.hosts.harness.episode import End
from agentrl_jax.envs.hosts.harness.task import Call, Task, reward_of
from agentrl_jax.envs.hosts.world import WorldDown, WorldError
from agentrl_jax.machine import children

WAIT_S = 30.0  # for a worker that is free, before the world counts as down and is asked again


# ---- in the worker -----------------------------------------------------------------------------


def serve(run: str) -> None:
    """Plays the tasks that come, until the input ends."""
    tasks, ends = children.take_pipes()
    for line in tasks:
        given = Task(**json.loads(line)), ends
        threading.Thread(target=play, args=(run, *given), daemon=True, name='harness').start()
    children.end_group()


def play(run: str, task: Task, ends: BinaryIO) -> None:
    end = Call(run).play(task)
    ends.write(json.dumps([plain(end.returned), end.error]).encode() + b'\n')
    ends.flush()


def plain(returned: Any) -> Any:
    """The reward and success that a harness returned, or a text if they are invalid."""
    try:
        return None if returned is None else reward_of(returned, '')
    except WorldError:
        return str(returned)[:80]


# ---- in the run --------------------------------------------------------------------------------


class Worker(children.Child):
    """A process, as the run sees it."""

    def __init__(self, run: str):
        env = {'JAX_PLATFORMS': 'cpu'}  # accelerators are the run's
        super().__init__('agentrl_jax.envs.hosts.harness.workers', run, env=env)

    def play(self, task: Task) -> End:
        """Play an episode; it also ends if the process dies or is killed."""
        try:
            returned, error = self.ask(dataclasses.asdict(task))
        except EOFError:
            return End(error=f'its process ended with exit code {self.kill()}')
        return End(returned, error)


class Workers:
    """Up to `most` workers of a callable for the worlds of a process.

    Idle workers end when the last of these worlds is closed.
    """

    def __init__(self, run: str, most: int):
        self.run, self.most = run, most
        self.idle: list[Worker] = []
        self.worlds = 0
        self._free = threading.Semaphore(most)
        self._state = threading.Lock()

    def enter(self) -> None:
        with self._state:
            self.worlds += 1

    def leave(self) -> None:
        with self._state:
            self.worlds -= 1
            over, self.idle = ([], self.idle) if self.worlds else (self.idle, [])
        for worker in over:
            worker.kill()

    def take(self) -> 'Lease':
        """Lease a worker for one episode; WorldDown if all are busy for long."""
        if not self._free.acquire(timeout=WAIT_S):
            raise WorldDown(f'all harness.workers={self.most} are at work')
        with self._state:
            self.idle = [worker for worker in self.idle if worker.alive]
            worker = self.idle.pop() if self.idle else None
        try:
            return Lease(self, worker or Worker(self.run))
        except OSError as error:
            self._free.release()
            raise WorldDown(f'no worker can be started: {error}') from error

    def give(self, worker: Worker) -> None:
        """Take a worker back after an episode, dead or alive."""
        with self._state:
            kept = worker.alive and self.worlds > 0
            if kept:
                self.idle.append(worker)
        if not kept:
            worker.kill()
        self._free.release()


class Lease:
    """A worker for one episode."""

    def __init__(self, workers: Workers, worker: Worker):
        self.workers, self.worker = workers, worker
        self.over = False  # the worker may be at another episode
        self._state = threading.Lock()

    def play(self, task: Task) -> End:
        end = self.worker.play(task)
        with self._state:
            self.over = True
        self.workers.give(self.worker)
        return end

    def stop(self) -> None:
        with self._state:
            if not self.over:
                self.worker.kill()


if __name__ == '__main__':
    serve(sys.argv[1])
