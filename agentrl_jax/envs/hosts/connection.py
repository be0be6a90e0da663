"""JSON over HTTP to unreliable servers: every call ends in time, with a reply or an error.

A reply to another call, a truncated reply, invalid numbers and endless headers raise WorldError. A
call is never sent twice, since the server may have executed it.
"""

import contextlib
import functools
import http.client
import io
import json
import pathlib
import selectors
import socket
import time
import urllib.parse
from typing import Annotated, Any, NoReturn

import pydantic

from agentrl_jax.envs.hosts.world import LARGEST, WorldDown, WorldError, shown

FULL = 503  # status of a full server
CONNECT_S = 10.0  # seconds to connect, before a server counts as down
SHOWN = 200  # maximum characters of an error


class Connection:
    """One connection, opened when needed and kept between calls; not thread-safe."""

    def __init__(self, url: str, *, timeout_s: float, most_bytes: int, token: str = ''):
        """timeout_s: from connecting to the last byte of a call; most_bytes: per reply."""
        parts = split(url, ('http', 'https'))
        self.url, self.timeout_s, self.most_bytes = url, timeout_s, most_bytes
        self.name = shown(url)  # in errors
        secure = parts.scheme == 'https'
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self.prefix = parts.path.rstrip('/')
        self.headers = {'Authorization': f'Bearer {token}'} if token else {}
        self.http = kind(parts.hostname, parts.port)
        self.http.auto_open = 0
        self.bounded: Bounded | None = None

    def post(
        self, path: str, body: Any = None, *, headers: dict | None = None, timeout_s: float = 0.0
    ) -> Any:
        """Send a POST and return the JSON reply; body=None sends no body."""
        data = b'' if body is None else json.dumps(body, allow_nan=False).encode()
        kind = {} if body is None else {'Content-Type': 'application/json'}
        headers = (headers or {}) | kind
        return self._call('POST', path, data, headers, timeout_s or self.timeout_s)

    def get(self, path: str) -> Any:
        return self._call('GET', path, b'', {}, self.timeout_s)

    def close(self) -> None:
        self.http.close()
        if self.bounded is not None:
            self.bounded.raw.close()
            self.bounded = None

    def _call(self, method: str, path: str, data: bytes, headers: dict, timeout_s: float) -> Any:
        where, complete = f'{self.name} {path}', False
        try:
            self._open(time.monotonic() + timeout_s)
            self.http.request(method, f'{self.prefix}/{path}', data, headers | self.headers)
            response = self.http.getresponse()
            body = self._body(response, where)
            complete = not response.will_close
        except TimeoutError:
            raise WorldError(f'{where}: no answer within {timeout_s:g} s') from None
        except (OSError, http.client.HTTPException) as error:
            raise WorldError(f'{where}: {error!r}'[:SHOWN]) from error
        finally:
            if not complete:
                self.close()  # late bytes must not become the next reply
        if response.status != 200:
            kind = WorldDown if response.status == FULL else WorldError
            text = body[:SHOWN].decode('utf-8', 'replace')
            raise kind(f'{where} answered {response.status}: {text}')
        return parsed(body, where)

    def _open(self, deadline: float) -> None:
        if self.bounded is not None and can_be_read(self.bounded.raw, 0):
            self.close()  # unexpected bytes or the end
        if self.bounded is None:
            try:
                self.http.timeout = min(max(deadline - time.monotonic(), 0.001), CONNECT_S)
                self.http.connect()
            except OSError as error:
                raise WorldDown(f'{self.name} cannot be reached: {error}') from error
            self.bounded = self.http.sock = Bounded(self.http.sock)
        self.bounded.deadline = deadline

    def _body(self, response: http.client.HTTPResponse, where: str) -> bytes:
        if response.length is None and not response.chunked:
            raise WorldError(f'{where}: a reply without a length may be truncated')
        body = response.read(self.most_bytes + 1)
        if len(body) > self.most_bytes:
            raise WorldError(f'{where}: the reply has more than {self.most_bytes} bytes')
        if response.length:  # read(n) does not raise if the rest is missing
            raise http.client.IncompleteRead(body, response.length)
        return body


class Bounded(io.RawIOBase):
    """A socket for http.client with one deadline for all calls, even if bytes arrive slowly."""

    def __init__(self, raw: socket.socket):
        self.raw, self.deadline = raw, 0.0

    def sendall(self, data: bytes) -> None:
        self._wait()
        self.raw.sendall(data)  # its timeout covers all of the data

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._wait()
        return self.raw.recv_into(buffer)

    def close(self) -> None:
        """Do nothing: http.client closes before reading the body. Connection closes `raw`."""

    def _wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.raw.settimeout(left)


def can_be_read(source: Any, timeout_s: float) -> bool:
    """Return whether data or EOF arrives in time; select() rejects descriptors above 1,023."""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def split(url: str, schemes: tuple[str, ...], of: str = 'a server') -> urllib.parse.SplitResult:
    """Split an address; raise ValueError, without the password, if it is invalid."""
    with contextlib.suppress(ValueError):  # for example, a port that is not a number
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in schemes and parts.hostname and parts.port != 0:
            return parts
    address = shown(url).rpartition('@')[2]
    raise ValueError(f'{address!r} is not an address of {of}: start it with http:// or https://')


def token_in(path: str) -> str:
    """Read the token in the first line of a file; '' without a file."""
    return pathlib.Path(path).read_text(encoding='utf-8').partition('\n')[0].strip() if path else ''


# ---- contents of replies -----------------------------------------------------------------------

# A lone surrogate, which UTF-8 cannot encode, becomes a question mark
Text = Annotated[
    pydantic.InstanceOf[str],
    pydantic.AfterValidator(lambda text: text.encode('utf-8', 'replace').decode()),
]
Number = Annotated[float, pydantic.Field(strict=True, ge=-LARGEST, le=LARGEST)]


class StepReply(pydantic.BaseModel, strict=True):
    """A server's reply to a step; the fields with defaults are from our own servers."""

    observation: Text
    reward: Number | None
    done: bool
    success: bool | None = None
    figures: list[Number] = []
    valid: bool | None = None


adapter = functools.cache(pydantic.TypeAdapter)


def read(kind: Any, value: Any, where: str) -> Any:
    """Validate a value of a reply as a pydantic type; raise WorldError if it is invalid."""
    try:
        return adapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        problems = [f'{".".join(map(str, one["loc"]))} {one["msg"]}' for one in error.errors()]
        raise WorldError(f'{where}: {"; ".join(problems)} in {value!r:.200}') from error


def parsed(body: bytes | str, where: str) -> Any:
    """Parse strict JSON; raise WorldError for anything else."""

    def reject(word: str) -> NoReturn:
        raise ValueError(f'{word} is not a number')

    try:
        return json.loads(body, parse_constant=reject)
    except (ValueError, RecursionError) as error:
        raise WorldError(f'{where}: not JSON: {error}'[:SHOWN]) from error
