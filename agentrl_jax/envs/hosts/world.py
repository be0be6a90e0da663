"""Worlds on hosts: one conversation partner at a time, with reset, step and close.

A world belongs to one thread, which makes it, plays many episodes with it in turn and closes it. It
may block. It has no access to tokens or the model.
"""

import dataclasses
import importlib.util
import numbers
import pathlib
import queue
import re
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

# Characters that do not show, reorder text or cannot be encoded; tab and newline are not among them
UNSEEN = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff'
    '\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]'
)
UNPRINTED = re.compile(f'[\t\n]|{UNSEEN.pattern}')
LOGIN = re.compile(r'://[^/?#\s]+@')  # user:password of an address


def spelled(character: str) -> str:
    """A character by its number: \\x1b, \\u202e."""
    return ascii(character)[1:-1]


def shown(text: str) -> str:
    """Escape foreign text, such as a server's error, into one line for a terminal or a log.

    Line breaks and invisible characters are spelled out, and addresses lose user and password. The
    function is idempotent.
    """
    return LOGIN.sub('://', UNPRINTED.sub(lambda found: spelled(found[0]), text))


def package_folder(name: str, missing: str) -> pathlib.Path:
    """The folder of an installed package, which is not imported; ModuleNotFoundError(missing)."""
    found = importlib.util.find_spec(name)
    if found is None:
        raise ModuleNotFoundError(missing)
    return pathlib.Path(found.submodule_search_locations[0])


class WorldError(RuntimeError):
    """The world failed; the policy is not to blame, and the episode does not train.

    A deterministic world is replaced by a fresh one that gets the same actions. Otherwise, or after
    repeated failures, the episode ends with EpisodeStop.ENV_ERROR. The message is `shown`.
    """

    def __init__(self, sentence: str = ''):
        super().__init__(shown(sentence))


class WorldDown(WorldError):
    """The server is unreachable or full.

    Nothing has happened, so it does not count as a try; the run tries again later.
    """


LARGEST = 1e6  # reward or figure: they are kept as float32, whose squares and sums are finite then
BOUNDS = f'must be from {-LARGEST:g} to {LARGEST:g}: scale what the world pays'


def fits(value: Any) -> bool:
    """Whether a reward or a figure is a number from -LARGEST to LARGEST.

    nan and inf are not, and true and false are no numbers.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and bool(-LARGEST <= value <= LARGEST)


def is_truth(value: Any) -> bool:
    """Whether a success is true, false, 1, 0 or None (unknown)."""
    real = isinstance(value, bool | np.bool_ | numbers.Real)
    return value is None or (real and bool(value in (0, 1)))


ANY = -1  # instead of an item: the world draws one


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one answer is sampled; None = the run's setting."""

    temperature: float | None = None  # 0 = greedy
    top_p: float | None = None
    seed: int | None = None  # the same request with the same seed has the same answer


@dataclasses.dataclass(frozen=True)
class Messages:
    """An observation that is messages of a chat, and how they may be answered."""

    messages: tuple[dict, ...]  # as chat templates expect them
    tools: tuple[dict, ...] = ()  # that may be called
    branch: int = 0  # conversation of the episode that they belong to
    opens: bool = False  # they are its first messages
    stream: int = 0  # random stream of its answers within the episode's; 0 = the episode's own
    appended: str = ''  # to the answer before, which the policy had not ended itself
    most: int = 0  # tokens of the answer; 0 = no limit
    sampling: Sampling | None = None  # of the answer; None = the run's

    def __str__(self) -> str:
        return '\n'.join(f'{one["role"]}: {one["content"]}' for one in self.messages)


class Answer(str):
    """The policy's text, with its tokens and log-probabilities."""

    ids: tuple[int, ...] = ()  # that were sampled, the end of the turn included
    logprobs: tuple[float, ...] = ()
    pieces: tuple[bytes, ...] = ()  # texts of the tokens
    prompt: tuple[int, ...] = ()  # tokens in front of it
    finish: str = 'stop'  # or length
    closed: bool = True  # the policy ended the turn itself
    calls: str = 'tags'  # how its template words calls of tools: tokens/wording.py


@dataclasses.dataclass(frozen=True)
class Reply:
    """A world's reply to an action; numbers beyond +-LARGEST are a fault of the world."""

    observation: str | Messages
    reward: float = 0.0  # of this step alone, not a running score
    done: bool = False
    success: bool | None = None  # None: unknown; the episode's rewards decide
    figures: tuple[float, ...] = ()  # of the episode so far: its environment's FIGURES
    valid: bool | None = None  # whether the world knows the action; None: unknown


class World(Protocol):
    """One world. It turns failures of its libraries into WorldErrors."""

    deterministic: bool  # the same item and actions give the same replies, in any fresh world
    instruction: str  # what the task is, in words; set by reset where it depends on the item
    # offers: tuple[str, ...], the forms (HostEnvironment.forms) on offer now; optional

    def reset(self, item: int) -> str:
        """Start an episode on an item of the pool; return its first observation."""

    def step(self, action: str) -> Reply:
        """Reply to the policy's text. No action is sent twice."""

    def finish(self, reason: str) -> Reply:
        """Return the reward of an episode that is cut; reason: a name of EpisodeStop.

        Only worlds whose environment `finishes` have it. The reply is not `done` if the episode
        continues in a shorter conversation.
        """

    def close(self) -> None:
        """Releases all resources; idempotent."""


class Foreign:
    """A context for foreign code: `failed` gets any error, and the run or server continues."""

    def __init__(self, failed: Callable[[Exception], None]):
        self.failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.failed(error)
        return isinstance(error, Exception)


class Keeper(threading.Thread):
    """A thread that owns a world, which may block or hang, and executes one order at a time."""

    def __init__(self, make: Callable[[], World]):
        super().__init__(daemon=True, name='world')
        self.orders: queue.SimpleQueue = queue.SimpleQueue()  # None: close the world and end
        self.make, self.world = make, None

    def run(self) -> None:
        for order in iter(self.orders.get, None):
            self.play(order)
        self.close()

    def play(self, order: Any) -> None:
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """Handle an error in close; by default it is ignored."""

    def close(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            with Foreign(self.failed):
                world.close()


class Player(World, Protocol):
    """A world of this process that can propose the next answer."""

    def best(self) -> str:
        """The expert's answer; '' if it has none."""

    def random(self, generator: np.random.Generator) -> str:
        """A random answer."""
