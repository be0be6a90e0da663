"""A world server with AgentGym's protocol, leases, limits and metrics.

  POST /create {lease_s?}           {id, key, instruction, settings, ...}; 503 if the server is full
  POST /reset {id, data_idx}        {id, observation, reward, done, success, turn, data_idx, ...}
  POST /step {id, action}           the same after a step; valid: whether the action is valid
  POST /close {id} or {key}         true; false if it was closed before
  GET /observation /detail ?id      the last reply again
  GET /health /metrics /            for monitoring; /health needs no token

--env=searchqa, webshop and webarena serve search, shop and web with the calls of AgentGym's clients
for SearchQA, WebShop and WebArena (see WORDINGS): a world is env_idx, and items have other names.

A create request may have a header X-World-Key. The key can close the world if the answer was lost.
World ids start at a random number, so clients of an earlier server at this address get an error.

A world without calls for lease_s is closed; a client may choose a shorter lease. Errors are {error,
code}: 4xx for an invalid call or a world that is gone, 5xx if a world or its worker failed; that
world is then closed. Worker processes hold the worlds and restart when they hang, die or use too
much memory. Each worker creates one world before it is ready.
"""

import asyncio
import collections
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, NoReturn

import fastapi
import pydantic
from fastapi.responses import JSONResponse, PlainTextResponse

from agentrl_jax.envs.hosts import gate
from agentrl_jax.envs.hosts.agentgym import ENVIRONMENTS, Quirks
from agentrl_jax.envs.hosts.gate import Refused
from agentrl_jax.envs.hosts.workers import Worker, WorkerDied
from agentrl_jax.envs.hosts.world import ANY
from agentrl_jax.settings import tree
from agentrl_jax.settings.marks import In

FINISHED = {'textcraft': False}  # whether a step after the end is an error; default True (AgentGym)
SWEEP_S = 0.5


# Rejects lone surrogates, which UTF-8 cannot encode
Text = Annotated[str, pydantic.AfterValidator(lambda text: text.encode().decode())]


class Create(pydantic.BaseModel):
    lease_s: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)
    commands: None = None  # AgentGym's TextCraft accepts a goal here; this server does not
    goal: None = None


DAY_S = 86400


@dataclasses.dataclass(frozen=True)
class Limits:
    workers: Annotated[int, In(1, 1024)] = 1  # processes
    worlds: Annotated[int, In(1, 65536)] = 64  # open worlds per worker
    lease_s: Annotated[float, In(0.1, 7 * DAY_S)] = 600.0  # idle time until a world is closed
    start_s: Annotated[float, In(0.1, DAY_S)] = 60.0  # for a worker to be ready
    step_s: Annotated[float, In(0.1, DAY_S)] = 60.0  # of a reset or step, then the world is lost
    worker_mb: Annotated[float, In(64, 2**24)] = 4096.0  # resident; above it, the worker restarts

    def __post_init__(self):
        for name, (_, marks) in tree.hints(Limits).items():
            if not marks[In].holds(getattr(self, name)):
                raise ValueError(f'--{name}={getattr(self, name)} must be {marks[In]}')


@dataclasses.dataclass
class Session:
    worker: Worker
    life: int
    lease_s: float
    called: float  # time of the last call
    key: str = ''  # chosen by its client
    busy: bool = False
    turn: int = 0
    reply: dict | None = None  # the last reply


class Worlds:
    """The worlds of all workers by number."""

    def __init__(self, env: str, settings: dict, limits: Limits):
        self.env, self.limits = env, limits
        self.workers = [Worker(env, settings) for _ in range(limits.workers)]
        self.sessions: dict[int, Session] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.first_id = secrets.randbits(40) << 12  # JSON's numbers are exact up to 2^53
        self.next_id = self.first_id
        self._closing: set[asyncio.Task] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(worker.run()) for worker in self.workers]
        tasks.append(asyncio.create_task(self._sweep()))
        try:
            yield
        finally:
            for task in [*tasks, *self._closing]:
                task.cancel()
            await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    async def create(self, lease_s: float | None, key: str = '') -> tuple[int, dict]:
        """Create a world; return (number, its worker's reply). lease_s=None: the server's."""
        if lease_s is not None and lease_s > self.limits.lease_s:
            limit_s = self.limits.lease_s
            raise Refused('invalid', f'lease_s={lease_s:g} is above the server limit, {limit_s:g}')
        deadline = time.monotonic() + self.limits.start_s
        while not (ready := [worker for worker in self.workers if worker.ready]):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        worker = min(ready, key=lambda worker: len(worker.worlds), default=None)
        if worker is None or len(worker.worlds) >= self.limits.worlds:
            raise Refused('no_room', f'all {len(self.sessions)} environments are in use')
        number, self.next_id = self.next_id, self.next_id + 1
        worker.worlds.add(number)
        session = Session(
            worker, worker.life, lease_s or self.limits.lease_s, time.monotonic(), key, busy=True
        )
        self.sessions[number] = session
        return number, await self._asked(number, session, 'create')

    async def reset(self, number: int, item: int) -> dict:
        session = self._session(number)
        reply = await self._asked(number, session, 'reset', item=item)
        session.turn = 0
        session.reply = {'id': number, **reply, 'turn': 0, 'data_idx': item}
        return session.reply

    async def step(self, number: int, action: str) -> dict:
        session = self._session(number)
        if self.reply(number)['done'] and FINISHED.get(self.env, True):
            raise Refused('finished', f'The task with environment {number} has finished.')
        started = time.monotonic()
        reply = await self._asked(number, session, 'step', action=action)
        self.counts['step_seconds'] += time.monotonic() - started
        session.turn += 1
        session.reply = {'id': number, **reply, 'turn': session.turn}
        return session.reply

    def close(self, number: int) -> bool:
        if not self._known(number):
            return False
        self._drop(number)
        self.counts['closed'] += 1
        return True

    def close_key(self, key: str) -> bool:
        """Close the worlds that a client created under a key."""
        named = [number for number, session in self.sessions.items() if session.key == key]
        return any([self.close(number) for number in named]) if key else False

    def reply(self, number: int) -> dict:
        reply = self._session(number).reply
        if reply is None:
            raise Refused('not_reset', f'environment {number} has not been reset')
        return reply

    def _known(self, number: int) -> bool:
        """Return whether a world is open; raise Refused if it never was."""
        if not self.first_id <= number < self.next_id:
            raise Refused('unknown_id', f'The id {number} is not valid.')
        return number in self.sessions

    def _session(self, number: int) -> Session:
        if not self._known(number):
            raise Refused('closed', f'The task with environment {number} has been deleted.')
        session = self.sessions[number]
        if session.life != session.worker.life or number not in session.worker.worlds:
            self._drop(number)
            raise Refused('lost', f'environment {number} was lost with its worker')
        if session.busy:
            raise Refused('busy', f'environment {number} is still busy with its last call')
        return session

    async def _asked(self, number: int, session: Session, verb: str, **rest: Any) -> dict:
        session.busy = True
        ask = session.worker.ask(verb, number, timeout_s=self.limits.step_s, **rest)
        try:
            reply = await ask
        except TimeoutError:
            session.worker.hung.add(number)
            text = f'environment {number}: no answer in {self.limits.step_s:g} s'
            self._lose(number, 'timeout', text)
        except WorkerDied:
            self._lose(number, 'lost', f'environment {number} was lost with its worker')
        finally:
            session.busy = False
            session.called = time.monotonic()
        if 'error' in reply and reply['code'] == 'fault':
            self._lose(number, 'fault', reply['error'])
        if 'error' in reply:
            raise Refused(reply['code'], reply['error'])
        return {name: value for name, value in reply.items() if name != 'seq'}

    def _lose(self, number: int, code: str, text: str) -> NoReturn:
        self._drop(number)
        self.counts[code] += 1
        raise Refused(code, text)

    def _drop(self, number: int) -> None:
        """Forget a world; its slot is free once its thread has closed it."""
        session = self.sessions.pop(number, None)
        # None: closed during its last call; another life: it died with its worker
        if session is not None and session.life == session.worker.life:
            task = asyncio.create_task(self._closed(number, session.worker, session.life))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _closed(self, number: int, worker: Worker, life: int) -> None:
        with contextlib.suppress(WorkerDied, TimeoutError):
            await worker.ask('close', number, timeout_s=self.limits.lease_s)
        if life == worker.life:
            worker.worlds.discard(number)
            worker.hung.discard(number)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for number, session in list(self.sessions.items()):
                if not session.busy and now - session.called > session.lease_s:
                    self._drop(number)
                    self.counts['expired'] += 1
            for worker in self.workers:
                open_there = min(len(worker.worlds), self.limits.worlds)
                stuck = 2 * len(worker.hung) > open_there
                if stuck or worker.memory_mb() > self.limits.worker_mb:
                    self.counts['worker_restarts'] += 1
                    worker.kill()

    def health(self) -> dict:
        ready = sum(worker.ready for worker in self.workers)
        return {
            'status': 'ok' if ready else 'starting',
            'env': self.env,
            'workers': len(self.workers),
            'ready': ready,
            'worlds': len(self.sessions),
            'room': self.limits.worlds * len(self.workers)
            - sum(len(worker.worlds) for worker in self.workers),
        }

    def metrics(self) -> str:
        """Return the metrics in Prometheus text format."""
        gauges = {
            'worlds': len(self.sessions),
            'worlds_hung': sum(len(worker.hung) for worker in self.workers),
            'workers_ready': sum(worker.ready for worker in self.workers),
            'worker_memory_mb': sum(worker.memory_mb() for worker in self.workers),
        }
        lines = [f'# TYPE agentrl_{name} gauge\nagentrl_{name} {n:g}' for name, n in gauges.items()]
        lines += [
            f'# TYPE agentrl_{name}_total counter\nagentrl_{name}_total {count:g}'
            for name, count in sorted(self.counts.items())
        ]
        return '\n'.join(lines) + '\n'


def build_app(env: str, settings: dict, *, limits: Limits, token: str = '') -> fastapi.FastAPI:
    worlds = Worlds(env, settings, limits)
    app = gate.build_app(env, worlds.running)
    app.add_middleware(gate.Gate, token=token, counts=worlds.counts)
    app.state.worlds = worlds
    add_routes(app, worlds, WORDINGS.get(env, Wording()))

    @app.get('/')
    async def hello() -> str:
        return f'This is environment {env}.'

    @app.get('/health')
    async def health() -> JSONResponse:
        known = worlds.health()
        return gate.Answer(known, status_code=200 if known['ready'] else 503)

    @app.get('/metrics')
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(worlds.metrics(), media_type='text/plain; version=0.0.4')

    return app


@dataclasses.dataclass(frozen=True)
class Wording:
    """Answers to an AgentGym client, in the fields of its Quirks."""

    quirks: Quirks = Quirks()
    default: Any = 0  # item of a /reset without one; ... = the field is required
    first: Callable[[dict], Any] = dict  # builds the answer of /reset
    rest: dict | None = None  # additional fields of /step's answer; None = all of ours
    looks: tuple[str, ...] = ()  # additional fields of the last reply for GET
    resets: bool = False  # /create resets the world to the item of its number

    def created(self, made: dict) -> Any:
        if self.rest is None:
            return made
        return {self.quirks.created: made['id']} if self.quirks.created else made['id']

    def stepped(self, reply: dict) -> dict:
        if self.rest is None:
            return reply
        quirks = self.quirks
        names = {quirks.text: 'observation', quirks.reward: 'reward', quirks.done: 'done'}
        return {name: reply[ours] for name, ours in names.items()} | self.rest


WORDINGS = {
    'textcraft': Wording(resets=True),
    'searchqa': Wording(
        ENVIRONMENTS['searchqa'],
        default=...,
        first=lambda reply: reply['observation'],
        rest={'info': None},
    ),
    'webshop': Wording(
        ENVIRONMENTS['webshop'],
        default=ANY,
        first=lambda reply: [reply['observation'], None],
        rest={'info': None},
        looks=('available_actions', 'instruction_text'),
    ),
    'webarena': Wording(
        ENVIRONMENTS['webarena'],
        default=...,
        first=lambda reply: {name: reply[name] for name in ('observation', 'sites', 'object')},
        rest={'truncated': False, 'info': {}},
    ),
}


def add_routes(app: fastapi.FastAPI, worlds: Worlds, wording: Wording) -> None:
    """Add the routes that a client calls."""
    names = wording.quirks
    fields = pydantic.AliasChoices(names.id, 'id')

    class Named(pydantic.BaseModel):
        number: int = pydantic.Field(validation_alias=fields)

    class Close(pydantic.BaseModel):
        number: int | None = pydantic.Field(default=None, validation_alias=fields)
        key: str = pydantic.Field(default='', max_length=64)

    class Reset(Named):
        item: int | None = pydantic.Field(
            default=wording.default, validation_alias=wording.quirks.item
        )

    class Step(Named):
        action: Text

    Number = Annotated[int, fastapi.Query(alias=names.id)]
    Key = Annotated[str, fastapi.Header()]

    @app.post('/create')
    async def create(x_world_key: Key = '', body: Create | None = None) -> Any:
        lease_s = None if body is None else body.lease_s
        number, created = await worlds.create(lease_s, x_world_key[:64])
        worlds.counts['created'] += 1
        reply = await worlds.reset(number, number) if wording.resets else {}
        return wording.created({'id': number, 'key': x_world_key, **created, **reply})

    @app.post('/reset')
    async def reset(body: Reset) -> Any:
        worlds.counts['resets'] += 1
        item = ANY if body.item is None else body.item
        return wording.first(await worlds.reset(body.number, item))

    @app.post('/step')
    async def step(body: Step) -> dict:
        worlds.counts['steps'] += 1
        return wording.stepped(await worlds.step(body.number, body.action))

    @app.post('/close')
    async def close(body: Close) -> bool:
        if body.number is None:
            return worlds.close_key(body.key)
        return worlds.close(body.number)

    @app.get('/detail')
    async def detail(number: Number) -> dict:
        return {**worlds.reply(number), 'deleted': False}

    def look(name: str) -> None:
        @app.get(f'/{name}')
        async def field(number: Number) -> Any:
            return worlds.reply(number)[name]

    for name in ('observation', *wording.looks):
        look(name)
