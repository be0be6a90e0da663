"""What our servers share: the gate that every request passes, and how one is refused.

A request is JSON in UTF-8 of a bounded size, with a token where the server has one; /health answers
without. Errors are {error, code} with a status, and every answer has RFC 9530's Content-Digest.
"""

import collections
import contextlib
import hmac
import ipaddress
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from agentrl_jax.envs.hosts.connection import content_digest, listening_at, token_in

STATUS = {
    'unauthorized': 401,
    'not_found': 404,
    'unknown_id': 404,
    'busy': 409,
    'not_reset': 409,
    'finished': 409,
    'closed': 410,  # closed or its lease ended
    'lost': 410,  # with its worker
    'too_large': 413,
    'invalid': 422,
    'no_such_item': 422,
    'left': 499,  # the client has, and hears of it no more
    'fault': 500,  # of the world
    'no_room': 503,
    'timeout': 504,  # the world does not come back
}
HALF_CHARACTER = re.compile(r'\\u[dD][89a-fA-F]')  # may be half, or one of a pair
HELD = 64  # requests of the largest size whose bytes may be held at once
LONGEST_ERROR = 1000  # characters of what is wrong with a request
LEAST_TOKEN = 16  # characters


class Refused(Exception):
    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code


class Answer(JSONResponse):
    """JSON that can always be sent: of half a surrogate pair a question mark is."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
        return text.encode('utf-8', 'replace')


def refusal(refused: Refused) -> Answer:
    said = {'error': str(refused), 'code': refused.code}
    return Answer(said, status_code=STATUS[refused.code])


def is_text(body: bytes) -> bool:
    """Whether a body is UTF-8 whose strings of JSON are text: no half of a surrogate pair."""
    try:
        text = body.decode('utf-8')
        if '\0' in text:  # UTF-16, which Python's JSON would read
            return False
        if HALF_CHARACTER.search(text):
            json.dumps(json.loads(text), ensure_ascii=False).encode('utf-8')
    except (UnicodeDecodeError, UnicodeEncodeError):
        return False
    except (ValueError, RecursionError):
        return True  # no JSON, as is said where it is read
    return True


class Gate:
    """What every request passes: its token, its size, its count; and the digest of the answer."""

    def __init__(
        self, app: Callable, *, most_bytes: int, token: str, counts: collections.Counter[str]
    ):
        """most_bytes: of a request; counts: of answers, by their status."""
        self.app, self.most_bytes, self.token = app, most_bytes, token.encode()
        self.counts, self.held = counts, 0  # bytes of the requests that are being answered

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope['type'] != 'http':
            return await self.app(scope, receive, send)
        headers = dict(scope['headers'])
        given = headers.get(b'authorization', b'')
        allowed = scope['path'] == '/health' or hmac.compare_digest(given, b'Bearer ' + self.token)
        if self.token and not allowed:
            refused = Refused('unauthorized', 'a token is needed: Authorization: Bearer TOKEN')
            return await self._respond(refusal(refused), scope, receive, send)
        parts: list[bytes] = []
        try:
            await self._admitted(parts, scope, receive, send)
        finally:
            self.held -= sum(map(len, parts))

    async def _admitted(
        self, parts: list[bytes], scope: dict, receive: Callable, send: Callable
    ) -> None:
        """Reads the body into parts and has it answered."""
        size, more = 0, True
        while more:
            message = await receive()
            if message['type'] == 'http.disconnect':
                return None
            parts.append(message.get('body', b''))
            size, more = size + len(parts[-1]), message.get('more_body', False)
            self.held += len(parts[-1])
            refused = None
            if size > self.most_bytes:
                refused = Refused('too_large', f'a request of over {self.most_bytes} bytes')
            elif self.held > HELD * self.most_bytes:
                refused = Refused('no_room', 'too much is being asked at once')
            if refused:
                return await self._respond(refusal(refused), scope, receive, send)
        body = b''.join(parts)
        if not is_text(body):
            refused = Refused('invalid', 'a request is UTF-8, without halves of surrogate pairs')
            return await self._respond(refusal(refused), scope, receive, send)
        messages = [{'type': 'http.request', 'body': body, 'more_body': False}]

        async def again() -> dict:
            return messages.pop() if messages else await receive()

        await self._respond(self.app, scope, again, send)

    async def _respond(self, app: Callable, scope: dict, receive: Callable, send: Callable) -> None:
        start: dict = {}

        async def signed(message: dict) -> None:
            """Holds the headers back until the body, mostly one piece, has given its digest."""
            if message['type'] == 'http.response.start':
                start.update(message)
                self.counts[f'responses_{message["status"]}'] += 1
                return
            if start:
                sent = [*start.pop('headers')]
                if not message.get('more_body', False):
                    digest = content_digest(message.get('body', b''))
                    sent.append((b'content-digest', digest.encode()))
                await send({**start, 'headers': sent})
                start.clear()
            await send(message)

        await app(scope, receive, signed)


def gated(
    title: str,
    *,
    most_bytes: int,
    token: str = '',
    counts: collections.Counter[str] | None = None,
    running: Callable[[], contextlib.AbstractAsyncContextManager] = contextlib.nullcontext,
) -> fastapi.FastAPI:
    """An app without routes behind a Gate, which refuses as all our servers do.

    running: what is open while the app runs.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        async with running():
            yield

    app = fastapi.FastAPI(
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        title=title,
        default_response_class=Answer,
    )
    counts = collections.Counter() if counts is None else counts
    app.add_middleware(Gate, most_bytes=most_bytes, token=token, counts=counts)

    @app.exception_handler(Refused)
    async def on_refusal(request: fastapi.Request, refused: Refused) -> JSONResponse:
        return refusal(refused)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: fastapi.Request, error: RequestValidationError) -> JSONResponse:
        problems = [f'{".".join(map(str, one["loc"]))}: {one["msg"]}' for one in error.errors()]
        return refusal(Refused('invalid', '; '.join(problems)[:LONGEST_ERROR]))

    @app.exception_handler(HTTPException)
    async def on_unknown(request: fastapi.Request, error: HTTPException) -> JSONResponse:
        said = f'{request.method} {request.url.path[:LONGEST_ERROR]}: {error.detail}'
        return Answer({'error': said, 'code': 'not_found'}, status_code=error.status_code)

    return app


# ---- addresses -----------------------------------------------------------------------------------


def resolved(address: str) -> list[tuple[socket.AddressFamily, str]]:
    """(family, number) of an address to listen at, IPv4 first; ValueError where it is none."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(f'--address={address} is no address of this machine: {error}') from error
    known = [(family, place[0]) for family, _, _, _, place in found]
    return sorted(known, key=lambda one: one[0] != socket.AF_INET)


def is_loopback(address: str) -> bool:
    """Whether an address is reached from this machine alone."""
    return all(ipaddress.ip_address(number).is_loopback for _, number in resolved(address))


def listening(address: str, port: int) -> socket.socket:
    family, number = resolved(address)[0]
    with listening_at(address, port, '--port'):
        listener = socket.create_server((number, port), family=family, backlog=1024)
    # Else an answer's body waits for the client to acknowledge its headers, 40 ms on Linux; asyncio
    # sets it only on sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    return f'http://[{address}]:{port}' if ':' in address else f'http://{address}:{port}'


def read_token(path: str) -> str:
    """The token that clients must show, the first line of a file; '' of no file."""
    token = token_in(path)
    if path and len(token) < LEAST_TOKEN:
        raise ValueError(
            f'{path}: the first line must be a token of {LEAST_TOKEN} characters or more'
        )
    return token
