"""The endpoint that harnesses call: one server of a process, an address for each episode.

  POST /episodes/<secret>/v1/chat/completions    a turn
  POST /episodes/<secret>/reward                 {"reward": 1.0, "success": true}, the last counts
  GET  /episodes/<secret>/v1/models

A request waits in the thread of its connection until its answer is there. One that extends an
earlier conversation of its episode goes on with it; any other opens a branch (`Episode.place`).
"""

import collections
import dataclasses
import hashlib
import json
import queue
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.wire import Asked, Completion, Refused, Said
from agentrl_jax.envs.hosts.world import Answer, Messages, fits, is_truth

MOST_BYTES = 2**26  # of a request
THOUGHT = '</think>'
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
        if self.drops and any(THOUGHT in content for content in answers):
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


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


class Episode:
    """What the endpoint knows of an episode."""

    def __init__(self, stops: Sequence[str] = (), branches: int = 1, drops: bool = False):
        """stops: strings that may end answers; branches: conversations that it may hold; drops: a
        request that follows a thought opens one, for the template leaves the thought out."""
        self.drops = drops
        self.secret = secrets.token_urlsafe(18)
        self.stops, self.most_branches = tuple(stops), branches
        self.events: queue.SimpleQueue = queue.SimpleQueue()  # Requests, and one End
        self.branches: list[Branch] = []
        self.refusal: Refused | None = None  # of all further requests
        self.reward: Any = None  # posted
        self.counted: collections.Counter = collections.Counter()
        self.refused: list[Refused] = []  # what requests got instead of an answer
        self.pending: Request | None = None
        self._calls: dict[bytes, Future] = {}  # what comes, or came, of a request, by its digest
        self._turns = 0
        self._state = threading.Lock()
        self._one = threading.Lock()  # parallel requests are answered one after another

    def ask(self, raw: bytes, retried: bool) -> tuple[Asked, dict]:
        """The completion that answers a request; waits for it.

        What a client sends again, because it did not get the answer, is answered by the same one.
        """
        try:
            return self._ask(raw, retried)
        except Refused as refused:
            self.refused.append(refused)
            raise

    def heard(self, raw: bytes) -> bool:
        """Whether a request is being answered, or was."""
        with self._state:
            return _digest(raw) in self._calls

    def _ask(self, raw: bytes, retried: bool) -> tuple[Asked, dict]:
        digest, call = _digest(raw), Future()
        with self._state:  # from here on, for it may wait long before it is placed
            before = self._calls.get(digest) if retried else None
            if before is None:
                self._calls[digest] = call
        if before is not None:
            return before.result()
        try:
            call.set_result(self._answered(wire.read(raw, self.stops)))
        except Refused as refused:
            with self._state:  # asked again it may get an answer
                if self._calls[digest] is call:
                    del self._calls[digest]
            call.set_exception(refused)
        finally:
            call.cancel()  # nobody waits for a thread that is gone
        return call.result()

    def _answered(self, asked: Asked) -> tuple[Asked, dict]:
        with self._one:
            with self._state:
                if self.refusal is not None:
                    raise self.refusal
                request = self.place(asked)
                self.counted.update(f'ignored {name}' for name in asked.ignored)
                self.pending = request
                self.events.put(request)
            return asked, request.answer.result()

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


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    wbufsize = 2**16
    timeout = 600
    endpoint: 'Endpoint'

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get('Content-Length') or -1)
        except ValueError:
            length = -1
        if not 0 <= length <= MOST_BYTES:
            self.close_connection = True
            self.send(413, Refused(413, 'too_large', f'more than {MOST_BYTES} bytes').body)
            return
        raw = self.rfile.read(length)
        try:
            episode, where = self.route()
            if where == 'reward' and episode is not None:
                episode.post(raw)
                self.send(200, {})
            elif where == 'v1/chat/completions':
                self.complete(episode, raw)
            else:
                raise Refused(404, 'not_found', 'only v1/chat/completions are answered')
        except Refused as refused:
            self.send(refused.status, refused.body)
            refused.__traceback__ = None  # some live as long as the module, and would keep episodes

    def complete(self, episode: Episode | None, raw: bytes) -> None:
        if episode is None:
            raise OVER
        retried = (self.headers.get('x-stainless-retry-count') or '0') != '0'
        asked, body = episode.ask(raw, retried)
        if asked.stream:
            self.send(200, wire.streamed(body, asked.usage), 'text/event-stream')
        else:
            self.send(200, body)

    def do_GET(self) -> None:
        if self.path.endswith('/models'):
            self.send(200, {'object': 'list', 'data': [{'id': 'policy', 'object': 'model'}]})
        else:
            self.send(404, Refused(404, 'not_found', 'only v1/models can be got').body)

    def route(self) -> tuple[Episode | None, str]:
        """(episode, the path within it)."""
        first, _, rest = self.path.strip('/').partition('/')
        secret, _, where = rest.partition('/')
        episode = self.endpoint.episodes.get(secret) if first == 'episodes' else None
        return episode, where

    def send(self, status: int, body: Any, kind: str = 'application/json') -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header('Content-Type', kind)
            self.send_header('Content-Length', str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:  # the client is gone
            self.close_connection = True


class Endpoint:
    """The server; its threads end with the process."""

    def __init__(self, host: str = '127.0.0.1', port: int = 0, handler: type = Handler):
        self.episodes: dict[str, Episode] = {}  # by their secrets
        self.warned: set[str] = set()  # codes of refusals that were reported

        class Listening(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

            def handle_error(self, *_: Any) -> None:
                """A client that went away is no error of ours."""

        self.http = Listening((host, port), type('Bound', (handler,), {'endpoint': self}))
        self.http.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = 'http://{}:{}'.format(*self.http.server_address[:2])
        threading.Thread(target=self.http.serve_forever, daemon=True, name='endpoint').start()

    def open(self, episode: Episode) -> str:
        """The address of an episode, to which /v1 is added."""
        self.episodes[episode.secret] = episode
        return f'{self.url}/episodes/{episode.secret}'

    def close(self, episode: Episode) -> None:
        """Nobody reaches the episode any more."""
        self.episodes.pop(episode.secret, None)
        episode.refuse(OVER)
