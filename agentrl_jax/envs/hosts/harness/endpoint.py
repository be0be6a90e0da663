"""The HTTP server that harnesses call: one per process, with an address for each episode.

  POST /episodes/<secret>/v1/chat/completions, responses, messages    a turn
  POST /episodes/<secret>/v1/messages/count_tokens
  POST /episodes/<secret>/reward                 {"reward": 1.0, "success": true}; the last counts
  GET  /episodes/<secret>/v1/models
  GET  /health

A served policy has the same paths without /episodes/<secret>, except for the reward. Each
completion request has a thread that waits for the answer.
"""

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, Protocol

import fastapi
import uvicorn
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from agentrl_jax.envs.hosts import gate
from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.episode import OVER, Caller, Episode
from agentrl_jax.envs.hosts.harness.wire import Refused
from agentrl_jax.machine import files

MOST_BYTES = 2**26  # of a request
STREAM_AFTER_S = 0.5  # delay before a stream starts; earlier errors keep their HTTP status
COMMENT_EVERY_S = 15.0  # interval of stream comments, since clients time out on silent servers
CLOSED_S = 0.001  # for the event loop to notice that a client closed its connection
MODEL = {  # in the formats of both vendors
    'id': 'policy',
    'object': 'model',
    'created': 0,
    'owned_by': 'agentrl_jax',
    'type': 'model',
    'display_name': 'policy',
    'created_at': '1970-01-01T00:00:00Z',
}
MODELS = {'object': 'list', 'data': [MODEL], 'has_more': False}
MODELS |= {'first_id': MODEL['id'], 'last_id': MODEL['id']}
JSON = {'Content-Type': 'application/json'}
EVENTS = {'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache'}
# (body, is a retry, client, dialect) -> answer, for one episode or many conversations
Ask = Callable[[bytes, bool, Caller, str], bytes]


class Desk(Protocol):
    """Answers the requests of many conversations, like an episode those of its own."""

    ask: Ask
    count: Callable[[bytes], int]  # tokens of a request


CODES = {404: 'not_found', 405: 'method_not_allowed'}


async def read_body(request: fastapi.Request) -> bytes:
    """Return the body of a request; reject it if it is compressed or too large."""
    coding = request.headers.get('content-encoding', 'identity')
    if coding != 'identity':
        sentence = f'Content-Encoding={coding!r:.50} is not supported: send plain JSON'
        raise Refused(415, 'invalid_request', sentence)
    too_large = Refused(413, 'too_large', f'the body has more than {MOST_BYTES} bytes')
    if int(request.headers.get('content-length', 0)) > MOST_BYTES:
        raise too_large
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MOST_BYTES:
            raise too_large
    return bytes(raw)


class Threads:
    """Daemon threads that call functions; a waiting request must not keep the process alive.

    Threads are used again, since starting one costs more than reading a request.
    """

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.free = threading.Semaphore(0)  # threads without a job

    def call(self, function: Callable, *args: Any) -> Future:
        """Call a function in a thread that is free, or in a new one."""
        answer: Future = Future()
        self.jobs.put((answer, function, args))
        if not self.free.acquire(blocking=False):
            threading.Thread(target=self.work, daemon=True, name='request').start()
        return answer

    def work(self) -> None:
        while True:
            answer, function, args = self.jobs.get()
            try:
                answer.set_result(function(*args))
            except BaseException as error:
                answer.set_exception(error)
            del answer, function, args  # an idle thread must not keep an episode alive
            self.free.release()


THREADS = Threads()


async def watch(request: fastapi.Request, caller: Caller) -> None:
    """Wait until the client closes its connection; call it after reading the body."""
    while (await request.receive())['type'] != 'http.disconnect':
        pass
    caller.left = True


def dialect_at(path: str) -> str:
    """Return the dialect of the errors of a path."""
    return next((name for name, end in wire.PATHS.items() if f'/v1/{end}' in path), 'chat')


async def complete(ask: Ask, request: fastapi.Request) -> Response:
    """Answer a turn, as one response or as a stream."""
    dialect = dialect_at(request.url.path)
    raw = await read_body(request)
    retried = (request.headers.get('x-stainless-retry-count') or '0') != '0'
    caller = Caller()
    answer = asyncio.wrap_future(THREADS.call(ask, raw, retried, caller, dialect))
    answer.add_done_callback(asyncio.Future.exception)  # asyncio logs unread errors
    watching = asyncio.create_task(watch(request, caller))
    await asyncio.wait([answer], timeout=STREAM_AFTER_S)
    while not answer.done() and not caller.streams:
        await asyncio.wait([answer], timeout=COMMENT_EVERY_S)
    if not answer.done():
        return StreamingResponse(stream(answer, watching, dialect), headers=EVENTS)
    try:
        body = await answer
    finally:
        await delivered(watching)
    return Response(body, headers=EVENTS if caller.streams else JSON)


async def counted(count: Callable[[bytes], int], request: fastapi.Request) -> dict:
    """Answer a request for the number of its tokens."""
    raw = await read_body(request)
    return {'input_tokens': await asyncio.wrap_future(THREADS.call(count, raw))}


async def stream(
    answer: asyncio.Future, watching: asyncio.Task, dialect: str
) -> AsyncIterator[bytes]:
    """Yield comments until the answer is ready, then the answer or its error."""
    while not answer.done():
        yield b': waiting for the policy\n\n'
        await asyncio.wait([answer], timeout=COMMENT_EVERY_S)
    try:
        events = await answer
    except Refused as refused:
        events = refused.event(dialect)
        refused.__traceback__ = None  # see on_refusal
    await delivered(watching)
    yield events


async def delivered(watching: asyncio.Task) -> None:
    """Stop watching a client, as its answer is sent now; if it closed earlier, it has left."""
    await asyncio.wait([watching], timeout=CLOSED_S)
    watching.cancel()


def local_address() -> str:
    """Return this machine's address in its network; the loopback address without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(('192.0.2.1', 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return '127.0.0.1'


class Endpoint:
    """The server; its threads end with the process."""

    def __init__(
        self,
        host: str = '127.0.0.1',
        port: int = 0,
        *,
        desk: Desk | None = None,  # for paths without an episode
        setting: str = 'harness.port',  # flag or field of the port
    ):
        self.episodes: dict[str, Episode] = {}  # by secret
        self.warned: set[str] = set()  # error codes and fields that were reported
        self._warning = threading.Lock()
        listener = gate.listening(host, port, setting)
        self.port = listener.getsockname()[1]
        self.url = gate.url_of(listener).replace('//0.0.0.0', f'//{local_address()}')
        config = uvicorn.Config(
            self.app(desk),
            http='h11',
            ws='none',
            lifespan='off',
            log_level='critical',
            timeout_keep_alive=600,
        )
        args = ([listener],)
        serve = uvicorn.Server(config).run
        threading.Thread(target=serve, args=args, daemon=True, name='endpoint').start()

    def app(self, desk: Desk | None) -> fastapi.FastAPI:
        """Build the app with its routes."""
        app = fastapi.FastAPI(openapi_url=None)

        @app.exception_handler(Refused)
        async def on_refusal(request: fastapi.Request, refused: Refused) -> Response:
            refused.__traceback__ = None  # module-level errors would keep episodes alive
            return JSONResponse(refused.body(dialect_at(request.url.path)), refused.status)

        @app.exception_handler(HTTPException)
        async def on_unknown(request: fastapi.Request, error: HTTPException) -> Response:
            headers = error.headers or {}
            sentence = f'{request.method} {request.url.path:.100}: {error.detail}'
            if 'allow' in (name.lower() for name in headers):
                sentence += f': use {", ".join(headers.values())}'
            code = CODES.get(error.status_code, 'invalid_request')
            refused = Refused(error.status_code, code, sentence)
            body = refused.body(dialect_at(request.url.path))
            return JSONResponse(body, refused.status, headers)

        @app.exception_handler(ClientDisconnect)
        async def on_disconnect(request: fastapi.Request, error: ClientDisconnect) -> Response:
            return Response()

        def episode(secret: str) -> Episode:
            if secret not in self.episodes:
                raise OVER
            return self.episodes[secret]

        async def turn(request: fastapi.Request) -> Response:
            return await complete(episode(request.path_params['secret']).ask, request)

        for end in wire.PATHS.values():
            app.router.add_route(f'/episodes/{{secret}}/v1/{end}', turn, ['POST'])

        @app.post('/episodes/{secret}/v1/messages/count_tokens')
        async def count(secret: str, request: fastapi.Request) -> dict:
            return await counted(episode(secret).count, request)

        @app.post('/episodes/{secret}/reward')
        async def reward(secret: str, request: fastapi.Request) -> dict:
            episode(secret).post(await read_body(request))
            return {}

        @app.get('/episodes/{secret}/v1/models')
        @app.get('/v1/models')
        async def models() -> dict:
            return MODELS

        @app.get('/health')
        async def health() -> dict:
            return {'status': 'ok'}

        async def conversation(request: fastapi.Request) -> Response:
            return await complete(desk.ask, request)

        async def conversation_count(request: fastapi.Request) -> dict:
            return await counted(desk.count, request)

        if desk is not None:
            for end in wire.PATHS.values():
                app.router.add_route(f'/v1/{end}', conversation, ['POST'])
            app.post('/v1/messages/count_tokens')(conversation_count)

        return app

    def warn_once(self, key: str, sentence: str) -> None:
        """Print a warning once per key."""
        with self._warning:
            if key in self.warned:
                return
            self.warned.add(key)
        files.warn(sentence)

    def open(self, episode: Episode, url: str = '') -> str:
        """Register an episode and return its address, without /v1; url: overrides the server's."""
        self.episodes[episode.secret] = episode
        return f'{url.rstrip("/") or self.url}/episodes/{episode.secret}'

    def close(self, episode: Episode) -> None:
        """Remove an episode and reject its pending request."""
        self.episodes.pop(episode.secret, None)
        episode.refuse(OVER)
