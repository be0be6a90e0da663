"""Worker processes for harness callables, one episode at a time each.

A hung thread cannot be stopped, but a worker can be killed with all its child processes. The next
episode then starts a new worker.
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

WAIT_S = 30.0  # for a free worker; after that, the world counts as down and is retried


# ---- in the worker -----------------------------------------------------------------------------


def serve(run: str) -> None:
    """Play the tasks from the input until it ends."""
    tasks, ends = children.take_pipes()
    for line in tasks:
        args = Task(**json.loads(line)), ends
        threading.Thread(target=play, args=(run, *args), daemon=True, name='harness').start()
    children.end_group()


def play(run: str, task: Task, ends: BinaryIO) -> None:
    end = Call(run).play(task)
    ends.write(json.dumps([plain(end.returned), end.error]).encode() + b'\n')
    ends.flush()


def plain(returned: Any) -> Any:
    """Return the reward and success that a harness returned, or a text if they are invalid."""
    try:
        return None if returned is None else reward_of(returned, '')
    except WorldError:
        return str(returned)[:80]


# ---- in the run --------------------------------------------------------------------------------


class Worker(children.Child):
    """The run's handle of a worker process."""

    def __init__(self, run: str):
        env = {'JAX_PLATFORMS': 'cpu'}  # accelerators belong to the run
        super().__init__('agentrl_jax.envs.hosts.harness.workers', run, env=env)

    def play(self, task: Task) -> End:
        """Play an episode; it also ends if the process dies or is killed."""
        try:
            returned, error = self.ask(dataclasses.asdict(task))
        except EOFError:
            return End(error=f'its process ended with exit code {self.kill()}')
        return End(returned, error)


class Workers:
    """A pool of up to `most` workers of a callable, shared by the worlds of a process.

    Idle workers end when the last world is closed.
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
        """Lease a worker for one episode; raise WorldDown if none is free within WAIT_S."""
        if not self._free.acquire(timeout=WAIT_S):
            raise WorldDown(f'all harness.workers={self.most} are busy')
        with self._state:
            self.idle = [worker for worker in self.idle if worker.alive]
            worker = self.idle.pop() if self.idle else None
        try:
            return Lease(self, worker or Worker(self.run))
        except OSError as error:
            self._free.release()
            raise WorldDown(f'no worker can be started: {error}') from error

    def give(self, worker: Worker) -> None:
        """Return a worker to the pool after an episode, dead or alive."""
        with self._state:
            is_reusable = worker.alive and self.worlds > 0
            if is_reusable:
                self.idle.append(worker)
        if not is_reusable:
            worker.kill()
        self._free.release()


class Lease:
    """A worker for one episode."""

    def __init__(self, workers: Workers, worker: Worker):
        self.workers, self.worker = workers, worker
        self.over = False  # if set, the worker may be playing another episode
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
