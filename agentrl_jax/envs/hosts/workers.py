"""Worker processes of a server: one thread per world, JSON lines over pipes.

`Worker` starts a process and talks to it from an event loop. The process ends when its input ends,
together with its worlds and everything that they have started.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from agentrl_jax.envs.hosts.world import (
    BOUNDS,
    Reply,
    World,
    WorldError,
    WorldThread,
    fits,
    shown,
    world_errors,
)
from agentrl_jax.machine import children
from agentrl_jax.settings.callables import import_module
from agentrl_jax.settings.marks import suggestion

WORLDS = {  # name -> module:class
    'textcraft': 'agentrl_jax.envs.hosts.textcraft:TextCraft',
    'sciworld': 'agentrl_jax.envs.hosts.sciworld:SciWorld',
    'search': 'agentrl_jax.envs.hosts.search.world:Search',
    'shop': 'agentrl_jax.envs.hosts.webshop.world:WebShop',
    'webshop': 'agentrl_jax.envs.hosts.webshop.world:AgentGymShop',
    'miniwob': 'agentrl_jax.envs.hosts.web.miniwob:MiniWoB',
    'web': 'agentrl_jax.envs.hosts.web.world:WebArena',
    'webarena': 'agentrl_jax.envs.hosts.web.world:AgentGymWebArena',
    'searchqa': 'agentrl_jax.envs.hosts.search.world:SearchQA',
    'babyai': 'agentrl_jax.envs.hosts.babyai:BabyAI',
    'device': 'agentrl_jax.envs.hosts.device:Device',
}
NEEDED = ('reset', 'step', 'close')  # of a World
# Settings that clients do not receive: addresses, secrets and settings of the machine
PRIVATE = ('token', 'timeout_s', 'heap_mb', 'sites', 'states', 'login')
GRACE_S = 3.0  # for worlds to close when their worker ends
MOST_CHARS = 2**20  # of an observation
LONGEST_LINE = 16 * MOST_CHARS + 2**16  # bytes: the longest JSON observation, plus a margin


def place_of(env: str) -> tuple[str, str]:
    """Return (module, class) of a name in WORLDS or of `module:class`."""
    module, _, name = (WORLDS[env] if env in WORLDS else env).partition(':')
    if not module or not name:
        close = suggestion(env, WORLDS)
        raise ValueError(f'--env={env} is not one of {", ".join(WORLDS)} or module:class{close}')
    return module, name


def maker(env: str, settings: dict) -> functools.partial[World]:
    """Return a factory of worlds from a name in WORLDS or `module:class`."""
    module, name = place_of(env)
    ours = env in WORLDS  # a package may be missing, which the command reports
    package = importlib.import_module(module) if ours else import_module(env, '--env')
    kind = getattr(package, name, None)
    if kind is None:
        raise ValueError(f'--env={env}: its module has no {name}')
    if hasattr(kind, 'check'):
        kind.check()  # whether its packages are installed
    try:
        inspect.signature(getattr(kind, 'PLAY', kind)).bind(**settings)  # PLAY: its keywords
    except TypeError as error:
        raise ValueError(f'--settings of {env}: {error}') from error
    if lacking := [call for call in NEEDED if not callable(getattr(kind, call, None))]:
        raise ValueError(f'--env={env} is not an environment: it has no {" and no ".join(lacking)}')
    return functools.partial(kind, **settings)


def shared_settings(make: functools.partial[World]) -> dict[str, Any]:
    """Return the settings that a client must share; {} without PLAY. Addresses may differ."""
    if not dataclasses.is_dataclass(getattr(make.func, 'PLAY', None)):
        return {}
    values = dataclasses.asdict(make.func.PLAY(**make.keywords))
    return {
        name: value
        for name, value in values.items()
        if name not in PRIVATE and not str(value).startswith('http')
    }


# ---- in the worker -----------------------------------------------------------------------------


def print_error(error: Exception) -> None:
    """Print a traceback; messages may be foreign text, so they are escaped by `shown`."""
    for part in traceback.format_exception(error):
        is_frame = part.startswith('  File ')
        print(part.rstrip('\n') if is_frame else shown(part.strip('\n')), file=sys.stderr)


class WorkerKeeper(WorldThread):
    """Execute orders for a world; print errors of its code, which end only this world."""

    def __init__(self, make: Callable[[], World], send: Callable[..., None]):
        super().__init__(make)
        self.send = send

    def failed(self, error: Exception) -> None:
        print_error(error)

    def play(self, order: dict) -> None:
        message = {'error': 'the environment raised an error: see the server', 'code': 'fault'}
        with world_errors(self.failed):
            try:
                answer = self.execute(order)
                json.dumps(answer, allow_nan=False)  # a value that is not JSON is the world's error
                message = answer
            except WorldError as error:
                message = {'error': str(error), 'code': 'fault'}
        self.send(seq=order['seq'], **message)

    def execute(self, order: dict) -> dict[str, Any]:
        verb = order['verb']
        if verb == 'close':
            self.close()
            return {}
        if verb == 'create':
            self.world = self.make()
            settings = shared_settings(self.make)
            return {'instruction': self.world.instruction} | (
                {'settings': settings} if settings else {}
            )
        if verb == 'step':
            return self.fields(self.world.step(order['action']))
        try:
            observation = self.world.reset(order['item'])
        except (ValueError, IndexError) as error:
            return {'error': str(error), 'code': 'no_such_item'}
        return self.fields(Reply(observation))

    def fields(self, reply: Reply) -> dict[str, Any]:
        if not fits(reply.reward):
            raise WorldError(f'reward {reply.reward!r} {BOUNDS}')
        if len(reply.observation) > MOST_CHARS:
            raise WorldError(f'an observation has over {MOST_CHARS} characters')
        message = {
            'observation': reply.observation,
            'reward': float(reply.reward),
            'done': bool(reply.done),
            'success': reply.success,
        }
        message |= {'figures': reply.figures} if reply.figures else {}
        message |= {} if reply.valid is None else {'valid': bool(reply.valid)}
        details = getattr(self.world, 'details', dict)  # additional fields of AgentGym's server
        return message | details()


def serve_pipes(make: Callable[[], World]) -> None:
    """Play worlds until the input ends."""
    orders, answers = children.take_pipes()
    lock, keepers = threading.Lock(), {}

    def send(**message: Any) -> None:
        line = json.dumps(message).encode() + b'\n'
        if len(line) > LONGEST_LINE:
            error = {'error': f'an answer of {len(line)} bytes is too long', 'code': 'fault'}
            line = json.dumps({'seq': message['seq'], **error}).encode() + b'\n'
        with lock:
            answers.write(line)
            answers.flush()

    # Exit immediately if worlds cannot be created
    with contextlib.closing(make()) as world:
        json.dumps(world.instruction)
    send(ready=True)
    for line in orders:
        order = json.loads(line)
        number = order['id']
        if order['verb'] == 'create':
            keepers[number] = WorkerKeeper(make, send)
            keepers[number].start()
        if number not in keepers:
            send(seq=order['seq'], error=f'there is no environment {number}', code='lost')
            continue
        keepers[number].orders.put(order)
        if order['verb'] == 'close':
            keepers.pop(number).orders.put(None)
    threading.Timer(GRACE_S, children.end_group).start()
    for keeper in keepers.values():
        keeper.send = lambda **message: None
        keeper.orders.put(None)
    for keeper in keepers.values():
        keeper.join()
    children.end_group()


# ---- in the server -----------------------------------------------------------------------------


class WorkerDied(RuntimeError):
    """The worker died, with all its worlds."""


class Worker:
    """A worker process, restarted when it dies."""

    def __init__(self, env: str, settings: dict):
        self.words = [env, json.dumps(settings)]
        self.life = 0  # number of starts; a world belongs to one life
        self.ready = False
        self.stillborn = False  # it ended before it was ready
        self.worlds: set[int] = set()
        self.hung: set[int] = set()  # worlds with hung threads; also in `worlds`
        self._asked: dict[int, asyncio.Future] = {}
        self._numbers = itertools.count()  # of messages
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep a process alive until cancelled; wait longer each time it dies immediately."""
        wait_s = 0.0
        while True:
            started = time.monotonic()
            await asyncio.sleep(wait_s)
            try:
                await self._live()
            except asyncio.CancelledError:
                if self._process is not None:  # give its worlds time to close
                    self._process.stdin.close()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._process.wait(), GRACE_S + 1)
                raise
            except (OSError, ValueError, LookupError, TypeError) as error:
                print_error(error)  # it did not start, or its last line was cut off when it died
            finally:
                self._bury()
            lived = time.monotonic() - started > 10
            wait_s = 0.0 if lived else min(2 * wait_s + 0.5, 10.0)

    async def _live(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            '-m',
            'agentrl_jax.envs.hosts.workers',
            *self.words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            env={**os.environ, 'JAX_PLATFORMS': 'cpu'},  # accelerators belong to the run
            start_new_session=True,
        )
        self.life += 1
        async for line in self._process.stdout:
            message = json.loads(line)
            if 'ready' in message:
                self.ready = True
            elif message['seq'] in self._asked:
                future = self._asked.pop(message['seq'])
                if not future.done():  # it may have just timed out
                    future.set_result(message)

    def _bury(self) -> None:
        self.stillborn, self.ready = not self.ready, False
        self.worlds.clear()
        self.hung.clear()
        self.kill()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(WorkerDied())
        self._asked.clear()

    def kill(self) -> None:
        """Kill the process group; `run` restarts the worker, without its worlds."""
        if self._process is not None:
            children.kill_group(self._process.pid)

    async def ask(self, verb: str, world: int, *, timeout_s: float, **rest: Any) -> dict:
        """Send an order and return the worker's answer; raise TimeoutError or WorkerDied."""
        if not self.ready:
            raise WorkerDied
        seq, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[seq] = future
        order = {'seq': seq, 'verb': verb, 'id': world, **rest}
        try:
            self._process.stdin.write(json.dumps(order).encode() + b'\n')
            return await asyncio.wait_for(future, timeout_s)
        finally:
            self._asked.pop(seq, None)

    def memory_mb(self) -> float:
        """Return the resident memory of the worker; 0 if unknown."""
        if not self.ready:
            return 0.0
        path = pathlib.Path(f'/proc/{self._process.pid}/statm')
        if not path.exists():
            return 0.0
        return int(path.read_text().split()[1]) * os.sysconf('SC_PAGESIZE') / 2**20


if __name__ == '__main__':
    try:
        serve_pipes(maker(sys.argv[1], json.loads(sys.argv[2])))
    except (ValueError, OSError, ImportError, WorldError) as error:
        # Flush now: the server kills a worker when its pipe closes
        print(
            f'error: no environment can be made: {shown(str(error))}', file=sys.stderr, flush=True
        )
        sys.exit(1)
