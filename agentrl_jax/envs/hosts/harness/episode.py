"""A harness episode: its conversations and pending requests.

A request that extends an earlier conversation of its episode continues it; any other request opens
a branch (`Episode.place`).
"""

import dataclasses
import hashlib
import json
import queue
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.calls import END_OF_THOUGHT
from agentrl_jax.envs.hosts.harness.wire import Completion, ParsedRequest, Refused, Said
from agentrl_jax.envs.hosts.world import Answer, Messages, fits, is_truth

CHARS_PER_TOKEN = 4  # an estimate
OVER = Refused(410, 'episode_over', 'this episode is over or unknown')  # SDKs retry a 409


@dataclasses.dataclass(eq=False)
class Request:
    """A turn waiting for its answer."""

    asked: ParsedRequest
    branch: 'Branch'
    new: Messages
    answer: Future = dataclasses.field(default_factory=Future)


@dataclasses.dataclass(frozen=True)
class End:
    """How a harness ended."""

    returned: Any = None
    error: str = ''  # type and message


@dataclasses.dataclass(eq=False)
class Branch:
    """A conversation of an episode; it is one row of tokens."""

    number: int
    tools: tuple[dict, ...]
    drops: bool = False  # the template keeps only the thoughts of the last answer
    opening: bytes = b''  # digest of its first request
    stream: int = 0  # random stream of its answers, see Messages
    refusal: Refused | None = None  # of all further requests
    known: list[list[Said]] = dataclasses.field(default_factory=list)  # forms of each message
    sampled: dict[int, bool] = dataclasses.field(default_factory=dict)  # index of each answer ->
    # whether the policy ended it
    tokens: int = 0  # up to the newest answer

    def refuse(self, refusal: Refused, new: Messages) -> None:
        """Reject all requests that extend the conversation, and forget these new messages."""
        self.refusal = refusal
        if not new.opens:
            del self.known[len(self.known) - len(new.messages) :]

    def extended_by(self, asked: ParsedRequest) -> str | None:
        """Return the text that a request appends to the newest answer; None if it differs."""
        count = len(self.known)
        if asked.tools != self.tools or len(asked.messages) <= count:
            return None
        answers = (form.content for at in self.sampled for form in self.known[at])
        if self.drops and any(END_OF_THOUGHT in content for content in answers):
            return None
        for at, (one, forms) in enumerate(zip(asked.messages, self.known, strict=False)):
            if one in forms or one.bare in [form.bare for form in forms]:  # the cheap test first
                continue
            if at != count - 1 or self.sampled.get(at, True) or one.calls:
                return None
            starts = [form.content for form in forms if one.content.startswith(form.content)]
            return one.content[len(max(starts, key=len)) :] if starts else None
        return ''


@dataclasses.dataclass(eq=False)
class Caller:
    """A client waiting for an answer."""

    streams: bool = False  # the answer is a stream
    left: bool = False  # it closed its connection before the answer was delivered


@dataclasses.dataclass(eq=False)
class Call:
    """A request, answered or waiting."""

    caller: Caller
    answer: Future = dataclasses.field(default_factory=Future)


def digest_of(raw: bytes, dialect: str) -> bytes:
    return hashlib.blake2b(raw, digest_size=16, person=dialect.encode()).digest()


class Episode:
    """Conversations and requests of one episode."""

    def __init__(self, stops: Sequence[str] = (), branches: int = 1, drops: bool = False):
        """stops: strings that may end answers; branches: maximum number of conversations; drops: a
        request after a thought opens a conversation."""
        self.drops = drops
        self.secret = secrets.token_urlsafe(18)
        self.stops, self.most_branches = tuple(stops), branches
        self.events: queue.SimpleQueue = queue.SimpleQueue()  # Requests, and one End
        self.branches: list[Branch] = []
        self.refusal: Refused | None = None  # of all further requests
        self.reward: Any = None  # posted
        self.bad_calls = 0  # that could not be parsed
        self.refused: list[Refused] = []  # errors of rejected requests
        self.pending: Request | None = None
        self._calls: dict[bytes, Call] = {}  # by request digest
        self.histories: dict[str, tuple[Said, ...]] = {}  # by the name of their last answer
        self._turns = 0
        self._state = threading.Lock()
        self._one = threading.Lock()  # parallel requests are answered one after another

    def ask(
        self,
        raw: bytes,
        retried: bool = False,
        caller: Caller | None = None,
        dialect: str = 'chat',
    ) -> bytes:
        """Wait for the answer to a request, as JSON or server-sent events."""
        try:
            request = self.resolve(wire.read(raw, self.stops, dialect))
            return self.answer_once(request, digest_of(raw, dialect), retried, caller or Caller())
        except Refused as refused:
            self.refused.append(refused)
            raise

    def resolve(self, request: ParsedRequest) -> ParsedRequest:
        """Return a request in which messages replace references to earlier answers."""
        if not request.answers:
            return request
        messages = [
            self.histories[one.answer][-1] if one.answer in self.histories else one
            for one in request.messages
        ]
        own = request.instructions
        messages[own:own] = self.histories.get(request.previous, ())
        for name in request.answers:
            if name not in self.histories:
                sentence = f'the answer {name!r:.80} is not one of this conversation'
                field = 'previous_response_id' if name == request.previous else 'input'
                raise Refused(400, 'previous_response_not_found', sentence, field)
        return dataclasses.replace(request, messages=tuple(messages), previous='')

    def count(self, raw: bytes) -> int:
        """Return about how many tokens a request has.

        A conversation is counted up to its newest answer. There is no tokenizer for the rest.
        """
        request = wire.read_count(raw)
        branches = [one for one in self.branches if one.extended_by(request) is not None]
        branch = max(branches, key=lambda one: len(one.known), default=Branch(0, ()))
        said = [one.content + one.calls for one in request.messages[len(branch.known) :]]
        if not branch.known:
            said.append(json.dumps(request.tools))
        return branch.tokens + sum(map(len, said)) // CHARS_PER_TOKEN

    def repeats(self, digest: bytes, retried: bool) -> bool:
        """Return whether a request repeats an earlier one."""
        with self._state:
            return self._earlier(digest, retried) is not None

    def _earlier(self, digest: bytes, retried: bool) -> Call | None:
        call = self._calls.get(digest)
        return call if call is not None and (retried or call.caller.left) else None

    def answer_once(
        self, asked: ParsedRequest, digest: bytes, retried: bool, caller: Caller
    ) -> bytes:
        """Answer a request; a repeated request gets the same answer.

        A request is repeated if it is marked as retried, or if the client left before the first
        answer was delivered.
        """
        caller.streams = asked.streams
        with self._state:  # register it now, since it may wait long before it is placed
            call = self._earlier(digest, retried)
            repeated = call is not None
            if repeated:
                call.caller = caller
            else:
                call = self._calls[digest] = Call(caller)
        if repeated:
            return call.answer.result()
        try:
            call.answer.set_result(self._answered(asked))
        except Refused as refused:
            with self._state:  # a retry may get an answer
                if self._calls[digest] is call:
                    del self._calls[digest]
            call.answer.set_exception(refused)
        finally:
            call.answer.cancel()  # waiters must not hang if this thread ends early
        return call.answer.result()

    def _answered(self, asked: ParsedRequest) -> bytes:
        with self._one:
            with self._state:
                if self.refusal is not None:
                    raise self.refusal
                request = self.place(asked)
                self.pending = request
                self.events.put(request)
            return request.answer.result()

    def place(self, asked: ParsedRequest) -> Request:
        """Place a request in the longest branch that it extends, or in a new branch."""
        matches = [(branch, branch.extended_by(asked)) for branch in self.branches]
        matches = [one for one in matches if one[1] is not None]
        if matches:
            branch, appended = max(matches, key=lambda one: len(one[0].known))
            if branch.refusal is not None:
                raise branch.refusal
        elif len(self.branches) < self.most_branches:
            branch, appended = self._opened(asked), ''
            self.branches.append(branch)
        else:
            sentence = 'the request extends no conversation: increase harness.branches='
            raise Refused(400, 'history_rewritten', f'{sentence}{self.most_branches}')
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
            most=asked.token_limit,
            sampling=asked.sampling,
        )
        return Request(asked, branch, messages)

    def _opened(self, asked: ParsedRequest) -> Branch:
        """Open a branch; its random stream depends on its first messages, not on timing.

        Branches with the same first messages are numbered in order.
        """
        opening = hashlib.blake2b(repr((asked.messages, asked.tools)).encode(), digest_size=16)
        opening, stream = opening.digest(), 0
        if self.most_branches > 1:
            before = sum(branch.opening == opening for branch in self.branches)
            stream = 1 + (int.from_bytes(opening[:4]) + before) % (2**31 - 1)
        return Branch(len(self.branches), asked.tools, self.drops, opening, stream)

    def answer(self, answer: Answer) -> Completion:
        """Answer the pending request."""
        with self._state:
            request, self.pending = self.pending, None
            self._turns += 1
            asked, name = request.asked, f'{self.secret[:8]}-{self._turns}'
            completion = wire.complete(answer, asked, name)
            branch = request.branch
            branch.sampled[len(branch.known)] = answer.closed
            branch.known.append(list(completion.forms))
            branch.tokens = len(answer.prompt) + len(answer.ids)
            known = branch.known[asked.instructions :]
            self.histories[name] = tuple(forms[0] for forms in known)
            self.bad_calls += completion.bad_calls
        encode = asked.dialect.stream if asked.streams else asked.dialect.encode
        request.answer.set_result(encode(completion.body, asked))
        return completion

    def refuse(self, refusal: Refused, *, branch: bool = False) -> None:
        """Reject the pending request and all later ones, with the first reason.

        branch: reject only requests of its conversation.
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
        """Store a posted reward."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        reward = body.get('reward') if isinstance(body, dict) else None
        if not fits(reward) or not is_truth(body.get('success')):
            raise Refused(400, 'invalid_reward', 'post {"reward": 1.0, "success": true}')
        self.reward = body
