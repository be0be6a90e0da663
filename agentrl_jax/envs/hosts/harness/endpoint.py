"""The endpoint that harnesses call: one server of a process, an address for each episode.

  POST /episodes/<secret>/v1/chat/completions    a turn
  POST /episodes/<secret>/reward                 {"reward": 1.0, "success": true}, the last counts
  GET  /episodes/<secret>/v1/models

  GET  /health

A request waits in the thread of its connection until its answer is there. One that extends an
earlier conversation of its episode goes on with it; any other opens a branch (`Episode.place`).
"""

import collections
import dataclasses
import hashlib
import json
import queue
import re
import secrets
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.calls import END_OF_THOUGHT
from agentrl_jax.envs.hosts.harness.wire import Asked, Completion, Refused, Said
from agentrl_jax.envs.hosts.world import Answer, Messages, fits, is_truth

MOST_BYTES = 2**26  # of a request
STREAM_AFTER_S = 0.5  # a stream starts then; an error before keeps its HTTP status
COMMENT_EVERY_S = 15.0  # comments of a stream until the answer: clients give up silent servers
CHUNK = re.compile(rb'([0-9a-fA-F]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n')
METHODS = {'v1/chat/completions': 'POST', 'reward': 'POST', 'v1/models': 'GET', 'health': 'GET'}
OVER = Refused(410, 'episode_over', 'this episode is over, or never was')  # not 409: SDKs try
# that again


@dataclasses.dataclass(eq=False)
class Request:
    """A turn that waits for its answer."""

    asked: Asked
    branch: 'Branch'
    new: Messages
    answer: Future = dataclasses.field(default_factory=Future)


@dataclasses.dataclass(frozen=True)
class End:
    """How a harness ended."""

    returned: Any = None
    error: str = ''  # its type and what it says


@dataclasses.dataclass(eq=False)
class Branch:
    """A conversation of an episode, as the row of its tokens holds it."""

    number: int
    tools: tuple[dict, ...]
    drops: bool = False  # the template leaves thoughts out of all answers but the last
    opening: bytes = b''  # digest of its first request
    stream: int = 0  # of its answers' draws, see Messages
    refusal: Refused | None = None  # of all further requests
    known: list[list[Said]] = dataclasses.field(default_factory=list)  # forms of each message
    sampled: dict[int, bool] = dataclasses.field(default_factory=dict)  # messages that are answers
    # -> whether the policy ended them itself

    def refuse(self, refusal: Refused, new: Messages) -> None:
        """Refuses all that extends the conversation as it was before these messages."""
        self.refusal = refusal
        if not new.opens:
            del self.known[len(self.known) - len(new.messages) :]

    def extended_by(self, asked: Asked) -> str | None:
        """What a request appends to the newest answer, mostly ''; None: it says something else."""
        count = len(self.known)
        if asked.tools != self.tools or len(asked.messages) <= count:
            return None
        answers = (form.content for at in self.sampled for form in self.known[at])
        if self.drops and any(END_OF_THOUGHT in content for content in answers):
            return None
        for at, (one, forms) in enumerate(zip(asked.messages, self.known, strict=False)):
            # The same is quickly seen
            if one in forms or one.bare in [form.bare for form in forms]:
                continue
            if at != count - 1 or self.sampled.get(at, True) or one.calls:
                return None
            starts = [form.content for form in forms if one.content.startswith(form.content)]
            return one.content[len(max(starts, key=len)) :] if starts else None
        return ''


class Caller:
    """Who waits for an answer; here, a caller of this process."""

    def left(self) -> bool:
        """Whether it left before it got its answer."""
        return False

    def wait(self, ready: Callable[[float | None], bool], stream: bool) -> None:
        """Waits until ready(seconds) is true."""
        ready(None)


@dataclasses.dataclass(eq=False)
class Call:
    """A request that is being answered, or was."""

    caller: Caller
    answer: Future = dataclasses.field(default_factory=Future)


def _is_done(future: Future) -> Callable[[float | None], bool]:
    """ready() of Caller.wait for a future."""

    def ready(seconds: float | None) -> bool:
        try:
            future.exception(seconds)
        except TimeoutError:
            return False
        except CancelledError:
            pass
        return True

    return ready


def digest_of(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


class Episode:
    """What the endpoint knows of an episode."""

    def __init__(
        self,
        stops: Sequence[str] = (),
        branches: int = 1,
        drops: bool = False,
        serving: bool = False,
    ):
        """stops: strings that may end answers; branches: conversations that it may hold; drops: a
        request that follows a thought opens one, for the template leaves the thought out; serving:
        requests set their sampling (wire.read)."""
        self.drops, self.serving = drops, serving
        self.secret = secrets.token_urlsafe(18)
        self.stops, self.most_branches = tuple(stops), branches
        self.events: queue.SimpleQueue = queue.SimpleQueue()  # Requests, and one End
        self.branches: list[Branch] = []
        self.refusal: Refused | None = None  # of all further requests
        self.reward: Any = None  # posted
        self.counted: collections.Counter = collections.Counter()
        self.refused: list[Refused] = []  # what requests got instead of an answer
        self.pending: Request | None = None
        self._calls: dict[bytes, Call] = {}  # by digests of requests
        self._turns = 0
        self._state = threading.Lock()
        self._one = threading.Lock()  # parallel requests are answered one after another

    def ask(
        self, raw: bytes, retried: bool = False, caller: Caller | None = None
    ) -> tuple[Asked, dict]:
        """The completion that answers a request; waits for it.

        A request that a client repeats, because it did not get the answer, has the same answer:
        retried, or the connection of the earlier one was closed before its answer.
        """
        try:
            return self._ask(raw, retried, caller or Caller())
        except Refused as refused:
            self.refused.append(refused)
            raise

    def repeats(self, digest: bytes, retried: bool) -> bool:
        """Whether a request repeats one that is being answered, or was."""
        with self._state:
            return self._earlier(digest, retried) is not None

    def _earlier(self, digest: bytes, retried: bool) -> Call | None:
        call = self._calls.get(digest)
        return call if call is not None and (retried or call.caller.left()) else None

    def _ask(self, raw: bytes, retried: bool, caller: Caller) -> tuple[Asked, dict]:
        digest, call = digest_of(raw), Call(caller)
        with self._state:  # from here on, for it may wait long before it is placed
            before = self._earlier(digest, retried)
            if before is None:
                self._calls[digest] = call
            else:
                before.caller = caller
        if before is not None:
            asked = wire.read(raw, self.stops, serving=self.serving)
            caller.wait(_is_done(before.answer), asked.stream)
            return before.answer.result()
        try:
            asked = wire.read(raw, self.stops, serving=self.serving)
            call.answer.set_result(self._answered(asked, caller))
        except Refused as refused:
            with self._state:  # asked again it may get an answer
                if self._calls[digest] is call:
                    del self._calls[digest]
            call.answer.set_exception(refused)
        finally:
            call.answer.cancel()  # if this thread ends early, its waiters must not hang
        return call.answer.result()

    def _answered(self, asked: Asked, caller: Caller) -> tuple[Asked, dict]:
        caller.wait(self._enter, asked.stream)
        try:
            with self._state:
                if self.refusal is not None:
                    raise self.refusal
                request = self.place(asked)
                self.pending = request
                self.events.put(request)
            caller.wait(_is_done(request.answer), asked.stream)
            return asked, request.answer.result()
        finally:
            self._one.release()

    def _enter(self, seconds: float | None) -> bool:
        return self._one.acquire(timeout=-1 if seconds is None else seconds)

    def place(self, asked: Asked) -> Request:
        """The request in the longest branch that it extends, or in a new one."""
        found = [(branch, branch.extended_by(asked)) for branch in self.branches]
        found = [one for one in found if one[1] is not None]
        if found:
            branch, appended = max(found, key=lambda one: len(one[0].known))
            if branch.refusal is not None:
                raise branch.refusal
        elif len(self.branches) < self.most_branches:
            branch, appended = self._opened(asked), ''
            self.branches.append(branch)
        else:
            raise Refused(
                400,
                'history_rewritten',
                f'the request extends none of the {len(self.branches)} conversations of its '
                'episode, and harness.branches allows no further one',
            )
        count = len(branch.known)
        if appended:
            branch.known[-1].append(asked.messages[count - 1])
        new = asked.messages[count:]
        branch.known += [[one] for one in new]
        messages = Messages(
            tuple(one.message for one in new),
            tools=asked.tools,
            branch=branch.number,
            opens=not count,
            stream=branch.stream,
            appended=appended,
            most=asked.most,
            sampling=asked.sampling,
        )
        return Request(asked, branch, messages)

    def _opened(self, asked: Asked) -> Branch:
        """A new branch; what is drawn in it depends on what it begins with, not on when.

        Of those that begin in the same way it depends on their order.
        """
        opening = hashlib.blake2b(repr((asked.messages, asked.tools)).encode(), digest_size=16)
        opening, stream = opening.digest(), 0
        if self.most_branches > 1:
            before = sum(branch.opening == opening for branch in self.branches)
            stream = 1 + (int.from_bytes(opening[:4]) + before) % (2**31 - 1)
        return Branch(len(self.branches), asked.tools, self.drops, opening, stream)

    def answer(self, answer: Answer) -> Completion:
        """Answers the request that waits."""
        with self._state:
            request, self.pending = self.pending, None
            self._turns += 1
            made = wire.complete(answer, request.asked, f'{self.secret[:8]}-{self._turns}')
            branch = request.branch
            branch.sampled[len(branch.known)] = answer.closed
            branch.known.append(list(made.forms))
            self.counted['bad calls'] += made.bad_calls
        request.answer.set_result(made.body)
        return made

    def refuse(self, refusal: Refused, *, branch: bool = False) -> None:
        """Refuses the request that waits and all further ones; the first reason stays.

        branch: those of its conversation alone.
        """
        with self._state:
            request, self.pending = self.pending, None
            if branch:
                request.branch.refuse(refusal, request.new)
            else:
                self.refusal = refusal = self.refusal or refusal
        if request is not None:
            request.answer.set_exception(refusal)

    def post(self, raw: bytes) -> None:
        """Takes a posted reward."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        reward = body.get('reward') if isinstance(body, dict) else None
        if not fits(reward) or not is_truth(body.get('success')):
            raise Refused(400, 'invalid_reward', 'post {"reward": 1.0, "success": true}')
        self.reward = body


class Connected(Caller):
    """The client of an HTTP request."""

    def __init__(self, handler: 'Handler'):
        self.handler: Handler | None = handler  # None: the answer was delivered

    def left(self) -> bool:
        handler = self.handler
        return handler is not None and handler.is_closed()

    def wait(self, ready: Callable[[float | None], bool], stream: bool) -> None:
        if not stream:
            ready(None)
            return
        seconds = COMMENT_EVERY_S if self.handler.streaming else STREAM_AFTER_S
        while not ready(seconds):
            self.handler.keep_streaming()
            seconds = COMMENT_EVERY_S


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    wbufsize = 2**16
    timeout = 600
    endpoint: 'Endpoint'
    streaming = False  # the headers of a stream were sent

    def log_message(self, *_: Any) -> None:
        pass

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()  # curl waits for it before it sends a large body
        return True

    def respond(self) -> None:
        self.streaming, caller = False, Connected(self)
        try:
            raw = self.read_body()
            episode, where = self.route()
            method = METHODS.get(where)
            if method is None:
                raise Refused(404, 'not_found', f'no such path; there are {", ".join(METHODS)}')
            if method != self.command:
                self.send(405, method_error(self.command, method).body, Allow=method)
            elif where == 'v1/chat/completions':
                self.complete(episode, raw, caller)
            elif where == 'reward':
                if episode is None:
                    raise OVER
                episode.post(raw)
                self.send(200, {})
            elif where == 'health':
                self.send(200, {'status': 'ok'})
            else:
                model = {'id': 'policy', 'object': 'model', 'created': 0, 'owned_by': 'agentrl_jax'}
                self.send(200, {'object': 'list', 'data': [model]})
        except Refused as refused:
            if self.streaming:
                self.end_stream(wire.stream_error(refused))
            else:
                self.send(refused.status, refused.body)
            refused.__traceback__ = None  # some live as long as the module, and would keep episodes

    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = respond

    def read_body(self) -> bytes:
        """The body of a request, with a length or in chunks."""
        coding = self.headers.get('Transfer-Encoding', '').strip().lower()
        length = self.headers.get('Content-Length', '0').strip()
        keeps, self.close_connection = self.close_connection, True  # unless all of it was read
        if coding == 'chunked':
            raw = b''.join(self.read_chunks())
        elif coding:
            raise Refused(501, 'invalid_request', f'Transfer-Encoding={coding!r:.50} is unknown')
        elif not re.fullmatch('[0-9]{1,18}', length):
            raise Refused(400, 'invalid_request', f'Content-Length={length!r:.50} is not a length')
        else:
            raw = self.rfile.read(bounded(int(length)))
            if len(raw) < int(length):
                raise ConnectionError('the body ended early')
        self.close_connection = keeps
        if (packed := self.headers.get('Content-Encoding', 'identity')) != 'identity':
            sentence = f'Content-Encoding={packed!r:.50} is not supported: send plain JSON'
            raise Refused(415, 'invalid_request', sentence)
        return raw

    def read_chunks(self) -> Iterator[bytes]:
        """The parts of a body in Transfer-Encoding: chunked (RFC 9112, section 7.1)."""
        total = 0
        while True:
            head = CHUNK.fullmatch(self.rfile.readline(4096))
            if head is None:
                raise Refused(400, 'invalid_request', 'a chunk of the body has no size')
            size = int(head[1], 16)
            total = bounded(total + size)
            if not size:
                break
            yield self.rfile.read(size)
            if self.rfile.readline(3) not in (b'\r\n', b'\n'):
                raise Refused(400, 'invalid_request', 'a chunk of the body has another size')
        for _ in range(100):  # trailers
            if not self.rfile.readline(4096).strip():
                return
        raise Refused(400, 'invalid_request', 'too many trailers')

    def complete(self, episode: Episode | None, raw: bytes, caller: Connected) -> None:
        if episode is None:
            raise OVER
        retried = (self.headers.get('x-stainless-retry-count') or '0') != '0'
        asked, body = episode.ask(raw, retried, caller)
        left = caller.left()
        if self.streaming:
            sent = self.end_stream(wire.streamed(body, asked.usage))
        elif asked.stream:
            sent = self.send(200, wire.streamed(body, asked.usage), 'text/event-stream')
        else:
            sent = self.send(200, body)
        if sent and not left:
            caller.handler = None

    def is_closed(self) -> bool:
        """Whether the client closed the connection; may be called from another thread."""
        try:
            waiting = select.poll()
            waiting.register(self.connection, select.POLLIN)
            return bool(waiting.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def route(self) -> tuple[Episode | None, str]:
        """(episode, the path within it)."""
        path = self.path.partition('?')[0].strip('/')
        first, _, rest = path.partition('/')
        if first != 'episodes':
            return None, path if METHODS.get(path) == 'GET' else ''
        secret, _, where = rest.partition('/')
        return self.endpoint.episodes.get(secret), where

    def keep_streaming(self) -> None:
        """Starts a stream, or adds a comment to it, while the answer is not there."""
        if not self.streaming:
            self.streaming = True
            self.send_response(200)
            self.send_header('Content-Type', 'text/event-stream')
            self.send_header('Cache-Control', 'no-cache')
            if self.request_version == 'HTTP/1.0':
                self.close_connection = True
            else:
                self.send_header('Transfer-Encoding', 'chunked')
            self.end_headers()
        self.write_chunk(b': waiting for the policy\n\n')

    def end_stream(self, data: bytes) -> bool:
        return self.write_chunk(data, last=True)

    def write_chunk(self, data: bytes, last: bool = False) -> bool:
        if self.request_version != 'HTTP/1.0':
            data = b'%x\r\n%s\r\n' % (len(data), data) + (b'0\r\n\r\n' if last else b'')
        return self.write(data)

    def write(self, data: bytes) -> bool:
        """Whether the data was written: the client may be gone."""
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:
            self.close_connection = True
            return False
        return True

    def send(self, status: int, body: Any, kind: str = 'application/json', **headers: str) -> bool:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers |= {'Content-Type': kind, 'Content-Length': str(len(data))}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header('Connection', 'close')
        self.end_headers()
        return self.write(b'' if self.command == 'HEAD' else data)


def bounded(size: int) -> int:
    """The size of a body; an error 413 if it is too large."""
    if size > MOST_BYTES:
        raise Refused(413, 'too_large', f'the body has more than {MOST_BYTES} bytes')
    return size


def method_error(method: str, allowed: str) -> Refused:
    return Refused(405, 'method_not_allowed', f'{method} is not allowed here: use {allowed}')


def local_address() -> str:
    """The address of this machine in its network; the loopback address without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(('192.0.2.1', 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return '127.0.0.1'


class Endpoint:
    """The server; its threads end with the process."""

    def __init__(self, host: str = '127.0.0.1', port: int = 0, handler: type = Handler):
        self.episodes: dict[str, Episode] = {}  # by their secrets
        self.warned: set[str] = set()  # error codes and fields that were reported
        self._warning = threading.Lock()

        class Listening(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

            def handle_error(self, *_: Any) -> None:
                """A client that went away is no error of ours."""

        self.http = Listening((host, port), type('Bound', (handler,), {'endpoint': self}))
        self.http.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address, port = self.http.server_address[:2]
        self.url = f'http://{local_address() if address == "0.0.0.0" else address}:{port}'
        threading.Thread(target=self.http.serve_forever, daemon=True, name='endpoint').start()

    def warn_once(self, key: str, sentence: str) -> None:
        """Prints the first warning with a key."""
        with self._warning:
            if key in self.warned:
                return
            self.warned.add(key)
        print(f'WARNING: {sentence}', file=sys.stderr, flush=True)

    def open(self, episode: Episode, url: str = '') -> str:
        """The address of an episode, to which /v1 is added; url: of the server, if not its own."""
        self.episodes[episode.secret] = episode
        return f'{url.rstrip("/") or self.url}/episodes/{episode.secret}'

    def close(self, episode: Episode) -> None:
        """Nobody reaches the episode any more."""
        self.episodes.pop(episode.secret, None)
        episode.refuse(OVER)
