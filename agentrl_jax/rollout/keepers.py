"""The worlds of a run, each in a thread (envs.hosts.world.Keeper): requests and responses.

A keeper is given requests and puts responses into the pool's queue. It never decides what a rollout
does about a fault: it reports what happened, and a world that failed is closed and made anew for
the next request. One that hangs is abandoned with its thread, and another takes its place.
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
    Foreign,
    Keeper,
    Messages,
    Reply,
    World,
    WorldDown,
    WorldError,
    fits,
    shown,
)

REASON = 400  # characters of a fault that are kept


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Asks for the reply to the last of an episode's actions; without any, for its first one."""

    slot: int
    stream: int  # of the episode's tokens, which tells episodes of a rollout apart
    item: int
    actions: tuple[str, ...] = ()
    replies: tuple[Reply, ...] = ()  # so far: to the beginning and to all actions but the last
    delay: float = 0.0  # seconds to wait before
    trial: int = 0  # of the episode
    turn: int = 0  # of the episode, that the reply opens
    cut: str = ''  # EpisodeStop's name: asks what an episode has earned that is cut
    cuts: int = 0  # of which this is the last; 0 = it is not cut


@dataclasses.dataclass(eq=False)
class Response:
    """What came of a request: a reply, or the reason why there is none.

    The world is foreign code: whatever error it raises is its fault and costs its episode, not the
    run. The reason is logged, and a run in which too many episodes are faulty ends.
    """

    request: Request
    reply: Reply | None = None
    instruction: str = ''  # of the item
    prompt: Any = None  # what read() made of the reply
    offers: tuple[str, ...] = ()  # the forms of answers on offer; () = all of the world's
    fault: str = ''
    down: bool = False  # nobody was there: nothing has happened
    deterministic: bool | None = None  # None: there was no world to ask
    seconds: float = 0.0

    def say(self, reply: Reply, world: World) -> None:
        self.reply = reply
        self.instruction = '' if self.request.actions else in_characters(world.instruction)
        self.offers = tuple(map(in_characters, getattr(world, 'offers', ())))

    def fail(self, error: Exception) -> None:
        self.reply, self.prompt = None, None
        self.fault = shown(f'{type(error).__name__}: {error}')[:REASON]
        self.down = isinstance(error, WorldDown)


class PoolKeeper(Keeper):
    """Owns the world of a slot, made anew after each fault."""

    def __init__(
        self,
        make: Callable[[], World],
        read: Callable,
        done: queue.SimpleQueue,
        closing: threading.Event,
    ):
        """read(observation, instruction) -> prompt: tokenising, done here rather than by all.

        closing: nobody waits for an answer any more.
        """
        super().__init__(make)
        self._read, self._done, self._closing = read, done, closing

    def play(self, request: Request) -> None:
        if not self._closing.wait(request.delay):
            self._done.put(self._respond(request))

    def _respond(self, request: Request) -> Response:
        began, response = time.monotonic(), Response(request)
        with Foreign(response.fail):
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
            return self._taken(Reply(self.world.reset(request.item)), request)
        if fresh:
            self._repeat(request)
        if request.cut:
            return self._taken(self.world.finish(request.cut), request)
        return self._taken(self.world.step(request.actions[-1]), request)

    def _taken(self, reply: Reply, request: Request) -> Reply:
        """A reply as the run has it: checked, and of text that can be written."""
        check_reply(reply, f'{type(self.world).__name__}, item {request.item}')
        return dataclasses.replace(reply, observation=in_characters(reply.observation))

    def _repeat(self, request: Request) -> None:
        """Replays the episode so far in a fresh world."""
        if not self.world.deterministic:
            raise WorldError('the world failed, and is not one that repeats itself')
        said = [Reply(self.world.reset(request.item)), *map(self.world.step, request.actions[:-1])]
        said = [self._taken(reply, request) for reply in said]
        for turn, (now, before) in enumerate(zip(said, request.replies, strict=True)):
            if now != before:
                raise WorldError(
                    f'a fresh world did not repeat reply {turn} of item {request.item}'
                )


def in_characters(said: Any) -> Any:
    """The texts in what a world says without halves of surrogate pairs, which no file can hold."""
    if isinstance(said, str):
        return said.encode('utf-8', 'replace').decode()
    if isinstance(said, Messages):
        texts = {'messages': said.messages, 'tools': said.tools, 'appended': said.appended}
        return dataclasses.replace(said, **in_characters(texts))
    if isinstance(said, dict):
        return {in_characters(name): in_characters(one) for name, one in said.items()}
    return type(said)(map(in_characters, said)) if isinstance(said, list | tuple) else said


def check_reply(reply: Reply, world: str) -> None:
    """WorldError where a world's reply is not what it must be; world: whose it is, in words."""
    for name, kinds in (
        ('observation', (str, Messages)),
        ('reward', numbers.Real),
        ('done', bool),
        ('success', (bool, type(None))),
        ('figures', tuple),
        ('valid', (bool, type(None))),
    ):
        if not isinstance(getattr(reply, name, None), kinds):
            given = getattr(reply, name, 'missing')
            raise WorldError(f'{world}: {name} of a reply is {given!r}'[:REASON])
    if not fits(reply.reward):
        raise WorldError(f'{world}: reward of a reply is {reply.reward!s:.100}, which {BOUNDS}')
    for figure in reply.figures:
        if not fits(figure):
            raise WorldError(f'{world}: figure of a reply is {figure!r:.100}, which {BOUNDS}')


class Pool:
    """The worlds of a run; its rollouts take the slots in turn."""

    keeper = PoolKeeper

    def __init__(self, make: Callable[[], World], read: Callable):
        self.done: queue.SimpleQueue = queue.SimpleQueue()  # Responses, late ones of others too
        self._make, self._read = make, read
        self._keepers: dict[int, PoolKeeper] = {}
        self._closing = threading.Event()  # of these keepers

    def of_rollout(self, about: dict[str, int | str]) -> 'Pool':
        """What answers a rollout; about: as of its lines in a log."""
        del about
        return self

    def another(self) -> 'Pool':
        """Further worlds of the same kind, for rollouts that are in flight beside others."""
        return type(self)(self._make, self._read)

    def submit(self, request: Request) -> None:
        if request.slot not in self._keepers:
            keeper = self.keeper(self._make, self._read, self.done, self._closing)
            self._keepers[request.slot] = keeper
            keeper.start()
        self._keepers[request.slot].orders.put(request)

    def abandon(self, slot: int) -> None:
        """Leaves a world that hangs to its thread, which closes it should it ever come back."""
        self._keepers.pop(slot).orders.put(None)

    def close(self, patience_s: float = 10.0) -> None:
        """Closes the worlds, each in its thread; those that take longer are abandoned."""
        keepers, self._keepers = list(self._keepers.values()), {}
        self._closing.set()
        self._closing = threading.Event()
        for keeper in keepers:
            keeper.orders.put(None)
        until = time.monotonic() + patience_s
        for keeper in keepers:
            keeper.join(max(until - time.monotonic(), 0.0))
