"""The environments of a run, each in a thread (envs.hosts.world.WorldThread), with their requests.

A keeper takes requests and puts responses into the pool's queue. It reports faults and leaves their
handling to the rollout. It closes an environment that failed and creates a new one for the next
request. An environment that hangs is abandoned with its thread and replaced.
"""

import dataclasses
import numbers
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from agentrl_jax.envs.hosts.world import (
    BOUNDS,
    Messages,
    Reply,
    World,
    WorldDown,
    WorldError,
    WorldThread,
    fits,
    shown,
    world_errors,
)

MAX_FAULT_CHARS = 400  # maximum length of a fault, in characters


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A request for the reply to an episode's last action, or for its first observation."""

    slot: int
    stream: int  # random stream of the episode's tokens: identifies an episode of a rollout
    item: int
    actions: tuple[str, ...] = ()
    replies: tuple[Reply, ...] = ()  # the first observation, and replies to all previous actions
    delay: float = 0.0  # seconds to wait first
    trial: int = 0  # of the episode
    turn: int = 0  # of the episode: starts with the reply
    cut: str = ''  # requests the final reward of a truncated episode: its EpisodeStop by name
    cuts: int = 0  # number of these requests so far, this one included; 0 = not truncated


@dataclasses.dataclass(eq=False)
class Response:
    """The result of a request: a reply, or a fault with its reason.

    Environments are third-party code. Any error that they raise is logged and fails the episode,
    not the run; a run stops only if too many episodes are faulty.
    """

    request: Request
    reply: Reply | None = None
    instruction: str = ''  # of the item
    prompt: Any = None  # read(observation, instruction)
    offers: tuple[str, ...] = ()  # the forms of answers on offer; () = all of the environment's
    fault: str = ''
    down: bool = False  # the server was unreachable; no state has changed
    deterministic: bool | None = None  # None: the environment could not be created
    seconds: float = 0.0

    def say(self, reply: Reply, world: World) -> None:
        self.reply = reply
        self.instruction = '' if self.request.actions else without_surrogates(world.instruction)
        self.offers = tuple(map(without_surrogates, getattr(world, 'offers', ())))

    def fail(self, error: Exception) -> None:
        self.reply, self.prompt = None, None
        self.fault = shown(f'{type(error).__name__}: {error}')[:MAX_FAULT_CHARS]
        self.down = isinstance(error, WorldDown)


class PooledWorldThread(WorldThread):
    """Owns the environment of a slot, and creates a new one after each fault."""

    def __init__(
        self,
        make: Callable[[], World],
        read: Callable,
        done: queue.SimpleQueue,
        closing: threading.Event,
    ):
        """read(observation, instruction) -> prompt: tokenises in this thread.

        closing: is set when no more responses are needed.
        """
        super().__init__(make)
        self._read, self._done, self._closing = read, done, closing

    def play(self, request: Request) -> None:
        if not self._closing.wait(request.delay):
            self._done.put(self._respond(request))

    def _respond(self, request: Request) -> Response:
        began, response = time.monotonic(), Response(request)
        with world_errors(response.fail):
            reply = self._ask(request)
            response.say(reply, self.world)
            response.prompt = self._read(reply.observation, response.instruction)
        if self.world is not None:
            response.deterministic = bool(self.world.deterministic)
        if response.fault:
            self.close()
        response.seconds = time.monotonic() - began
        return response

    def _ask(self, request: Request) -> Reply:
        fresh = self.world is None
        if fresh:
            self.world = self.make()
        if not request.actions and not request.cut:
            return self._checked(Reply(self.world.reset(request.item)), request)
        if fresh:
            self._repeat(request)
        if request.cut:
            return self._checked(self.world.finish(request.cut), request)
        return self._checked(self.world.step(request.actions[-1]), request)

    def _checked(self, reply: Reply, request: Request) -> Reply:
        """Return a reply after checks, with text that can be encoded."""
        check_reply(reply, f'{type(self.world).__name__}, item {request.item}')
        return dataclasses.replace(reply, observation=without_surrogates(reply.observation))

    def _repeat(self, request: Request) -> None:
        """Replay the episode so far in a fresh environment."""
        if not self.world.deterministic:
            raise WorldError('the environment failed and cannot be replayed: not deterministic')
        rerun = [Reply(self.world.reset(request.item)), *map(self.world.step, request.actions[:-1])]
        rerun = [self._checked(reply, request) for reply in rerun]
        for turn, (now, before) in enumerate(zip(rerun, request.replies, strict=True)):
            if now != before:
                raise WorldError(
                    f'a fresh environment did not repeat reply {turn} of item {request.item}'
                )


def without_surrogates(said: Any) -> Any:
    """Replace lone surrogates in all texts of a reply, because they cannot be encoded."""
    if isinstance(said, str):
        return said.encode('utf-8', 'replace').decode()
    if isinstance(said, Messages):
        texts = {'messages': said.messages, 'tools': said.tools, 'appended': said.appended}
        return dataclasses.replace(said, **without_surrogates(texts))
    if isinstance(said, dict):
        return {without_surrogates(name): without_surrogates(one) for name, one in said.items()}
    return type(said)(map(without_surrogates, said)) if isinstance(said, list | tuple) else said


def check_reply(reply: Reply, world: str) -> None:
    """Raise WorldError if a field of a reply is invalid. world: its source, for the message."""
    for name, kinds in (
        ('observation', (str, Messages)),
        ('reward', numbers.Real),
        ('done', bool),
        ('success', (bool, type(None))),
        ('figures', tuple),
        ('valid', (bool, type(None))),
    ):
        if not isinstance(getattr(reply, name, None), kinds):
            value = getattr(reply, name, 'missing')
            raise WorldError(f'{world}: {name} of a reply is {value!r}'[:MAX_FAULT_CHARS])
    if not fits(reply.reward):
        raise WorldError(f'{world}: reward of a reply is {reply.reward!s:.100}, which {BOUNDS}')
    for figure in reply.figures:
        if not fits(figure):
            raise WorldError(f'{world}: figure of a reply is {figure!r:.100}, which {BOUNDS}')


class Pool:
    """The environments of a run; its rollouts use the slots one after another."""

    keeper = PooledWorldThread

    def __init__(self, make: Callable[[], World], read: Callable):
        self.done: queue.SimpleQueue = queue.SimpleQueue()  # Responses, also late ones
        self._make, self._read = make, read
        self._keepers: dict[int, PooledWorldThread] = {}
        self._closing = threading.Event()  # of these keepers

    def of_rollout(self, about: dict[str, int | str]) -> 'Pool':
        """Return the pool for one rollout; about: as in its lines of a log."""
        del about
        return self

    def another(self) -> 'Pool':
        """Return a new pool of the same kind, for rollouts that run at the same time as others."""
        return type(self)(self._make, self._read)

    def submit(self, request: Request) -> None:
        if request.slot not in self._keepers:
            keeper = self.keeper(self._make, self._read, self.done, self._closing)
            self._keepers[request.slot] = keeper
            keeper.start()
        self._keepers[request.slot].orders.put(request)

    def abandon(self, slot: int) -> None:
        """Abandon an environment that hangs; its thread closes it if it ever returns."""
        self._keepers.pop(slot).orders.put(None)

    def close(self, patience_s: float = 10.0) -> None:
        """Close the environments in their threads; abandon them after `patience_s` seconds."""
        keepers, self._keepers = list(self._keepers.values()), {}
        self._closing.set()
        self._closing = threading.Event()
        for keeper in keepers:
            keeper.orders.put(None)
        until = time.monotonic() + patience_s
        for keeper in keepers:
            keeper.join(max(until - time.monotonic(), 0.0))
