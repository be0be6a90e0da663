"""Shared parts of the world servers: middleware, errors and addresses.

A request is JSON of limited size, with a token if the server has one; /health needs none. Errors
are {error, code} with a status.
"""

import collections
import contextlib
import hmac
import json
import socket
from collections.abc import Callable
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATUS = {
    'unauthorized': 401,
    'not_found': 404,
    'unknown_id': 404,
    'busy': 409,
    'not_reset': 409,
    'finished': 409,
    'closed': 410,  # closed, or its lease ended
    'lost': 410,  # with its worker
    'too_large': 413,
    'invalid': 422,
    'no_such_item': 422,
    'left': 499,  # the client has disconnected
    'fault': 500,  # of the world
    'no_room': 503,
    'timeout': 504,  # the world did not reply in time
}
CODES = {404: 'not_found', 405: 'not_found', 413: 'too_large'}  # of Starlette's errors
MOST_BYTES = 2**20  # of a request
LONGEST_ERROR = 1000  # characters of an error message


class Refused(Exception):
    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code, self.fields = code, {'error': text, 'code': code}


class Answer(JSONResponse):
    """JSON that can always be encoded: a lone surrogate becomes a question mark."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
        return text.encode('utf-8', 'replace')


def refusal(refused: Refused) -> Answer:
    return Answer(refused.fields, status_code=STATUS[refused.code])


class Gate:
    """Middleware that checks the token and the size of each request and counts the answers."""

    def __init__(self, app: ASGIApp, *, token: str, counts: collections.Counter[str]):
        """counts: responses by status."""
        self.app, self.token, self.counts = app, token.encode(), counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] != 'http':
            return await self.app(scope, receive, send)
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get('body', b''))
            if size > MOST_BYTES:
                raise HTTPException(413, f'the request has over {MOST_BYTES} bytes')
            return message

        async def counted(message: Message) -> None:
            if message['type'] == 'http.response.start':
                self.counts[f'responses_{message["status"]}'] += 1
            await send(message)

        authorization = dict(scope['headers']).get(b'authorization', b'')
        allowed = scope['path'] == '/health' or hmac.compare_digest(
            authorization, b'Bearer ' + self.token
        )
        app = self.app
        if self.token and not allowed:
            app = refusal(Refused('unauthorized', 'a token is needed: Authorization: Bearer TOKEN'))
        await app(scope, bounded, counted)


def build_app(
    title: str, running: Callable[[], contextlib.AbstractAsyncContextManager]
) -> fastapi.FastAPI:
    """Create an app without routes that answers errors as JSON; running: its lifespan context."""
    app = fastapi.FastAPI(
        title=title,
        lifespan=lambda app: running(),
        openapi_url=None,  # and no pages of documentation
        default_response_class=Answer,
    )

    @app.exception_handler(Refused)
    async def on_refusal(request: fastapi.Request, refused: Refused) -> JSONResponse:
        return refusal(refused)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: fastapi.Request, error: RequestValidationError) -> JSONResponse:
        problems = [f'{".".join(map(str, one["loc"]))}: {one["msg"]}' for one in error.errors()]
        return refusal(Refused('invalid', '; '.join(problems)[:LONGEST_ERROR]))

    @app.exception_handler(HTTPException)
    async def on_unknown(request: fastapi.Request, error: HTTPException) -> JSONResponse:
        sentence = f'{request.method} {request.url.path[:LONGEST_ERROR]}: {error.detail}'
        code = CODES.get(error.status_code, 'invalid')
        return Answer({'error': sentence, 'code': code}, status_code=error.status_code)

    return app


# ---- addresses -----------------------------------------------------------------------------------


def resolved(address: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return (family, number) of a listening address, IPv4 first; raise ValueError if invalid."""
    try:
        infos = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(f'--address={address} is not a local address: {error}') from error
    known = [(family, place[0]) for family, _, _, _, place in infos]
    return sorted(known, key=lambda one: one[0] != socket.AF_INET)


def listening(address: str, port: int, setting: str = '--port') -> socket.socket:
    """Open a listening socket; setting: the flag or field of the port, for errors."""
    family, number = resolved(address)[0]
    try:
        listener = socket.create_server((number, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f'{setting}={port} at {address}: {error}; set {setting} to another port, or to 0 for '
            'any free port'
        ) from error
    # Without it, a response body waits 40 ms on Linux for the client to acknowledge the headers.
    # asyncio sets it only on sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    return f'http://[{address}]:{port}' if ':' in address else f'http://{address}:{port}'
