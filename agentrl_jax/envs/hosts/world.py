"""The World interface of host environments: reset, step and close, one episode at a time.

A world belongs to one thread, which creates it, plays many episodes with it and closes it. It may
block. It has no access to tokens or the model.
"""

import contextlib
import dataclasses
import importlib.util
import numbers
import pathlib
import queue
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

# Characters that are invisible, reorder text or cannot be encoded, except tab and newline
UNSEEN = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff'
    '\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]'
)
UNPRINTED = re.compile(f'[\t\n]|{UNSEEN.pattern}')
LOGIN = re.compile(r'://[^/?#\s]+@')  # user:password in an address


def spelled(character: str) -> str:
    """Return the escape sequence of a character, such as \\x1b or \\u202e."""
    return ascii(character)[1:-1]


def shown(text: str) -> str:
    """Escape foreign text, such as a server's error, into one line for a terminal or a log.

    Line breaks and invisible characters become escape sequences, and addresses lose their user and
    password. The function is idempotent.
    """
    return LOGIN.sub('://', UNPRINTED.sub(lambda found: spelled(found[0]), text))


def package_folder(name: str, missing: str) -> pathlib.Path:
    """Return the folder of a package without importing it; raise ModuleNotFoundError(missing)."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(missing)
    return pathlib.Path(spec.submodule_search_locations[0])


class WorldError(RuntimeError):
    """The world failed; the policy is not to blame, and the episode does not train.

    A deterministic world is replaced by a new one that replays the actions. Otherwise, or after
    repeated failures, the episode ends with EpisodeStop.ENV_ERROR. `shown` escapes the message.
    """

    def __init__(self, sentence: str = ''):
        super().__init__(shown(sentence))


class WorldDown(WorldError):
    """The server is unreachable or full.

    The call had no effect, so it does not count as a try; the run tries again later.
    """


LARGEST = 1e6  # reward or figure: their squares and sums stay finite in float32
BOUNDS = f'must be from {-LARGEST:g} to {LARGEST:g}: scale the rewards of the environment'


def fits(value: Any) -> bool:
    """Return whether a reward or a figure is a number from -LARGEST to LARGEST.

    nan, inf, true and false are rejected.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and bool(-LARGEST <= value <= LARGEST)


def is_truth(value: Any) -> bool:
    """Return whether a success is true, false, 1, 0 or None (unknown)."""
    real = isinstance(value, bool | np.bool_ | numbers.Real)
    return value is None or (real and bool(value in (0, 1)))


ANY = -1  # instead of an item: the world draws one


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one answer is sampled; None = the run's setting."""

    temperature: float | None = None  # 0 = greedy
    top_p: float | None = None
    seed: int | None = None  # the same request with the same seed gets the same answer


@dataclasses.dataclass(frozen=True)
class Messages:
    """An observation as chat messages, and the constraints on its answer."""

    messages: tuple[dict, ...]  # as chat templates expect them
    tools: tuple[dict, ...] = ()  # that may be called
    branch: int = 0  # index of their conversation in the episode
    opens: bool = False  # they are its first messages
    stream: int = 0  # random stream of its answers within the episode's; 0 = the episode's own
    appended: str = ''  # to the previous answer, which the policy had not ended itself
    most: int = 0  # tokens of the answer; 0 = no limit
    sampling: Sampling | None = None  # of the answer; None = the run's

    def __str__(self) -> str:
        return '\n'.join(f'{one["role"]}: {one["content"]}' for one in self.messages)


class Answer(str):
    """The policy's text, with its tokens and log-probabilities."""

    ids: tuple[int, ...] = ()  # sampled tokens, including the end of the turn
    logprobs: tuple[float, ...] = ()
    pieces: tuple[bytes, ...] = ()  # texts of the tokens
    prompt: tuple[int, ...] = ()  # tokens before it
    finish: str = 'stop'  # or length
    closed: bool = True  # the policy ended the turn itself
    calls: str = 'tags'  # tool call format of its template: tokens/wording.py


@dataclasses.dataclass(frozen=True)
class Reply:
    """A world's reply to an action; a number beyond +-LARGEST is an error of the world."""

    observation: str | Messages
    reward: float = 0.0  # of this step, not a running score
    done: bool = False
    success: bool | None = None  # None: unknown; the episode's rewards decide
    figures: tuple[float, ...] = ()  # of the episode so far: its environment's FIGURES
    valid: bool | None = None  # whether the action is valid; None: unknown


class World(Protocol):
    """One world. It converts failures of its libraries to WorldErrors."""

    deterministic: bool  # the same item and actions give the same replies, in any new world
    instruction: str  # the task in words; set by reset if it depends on the item
    # offers: tuple[str, ...], the forms (HostEnvironment.forms) available now; optional

    def reset(self, item: int) -> str:
        """Start an episode on an item of the pool; return its first observation."""

    def step(self, action: str) -> Reply:
        """Reply to the policy's text. No action is sent twice."""

    def finish(self, reason: str) -> Reply:
        """Return the reward of an episode that is cut; reason: a name of EpisodeStop.

        Required only if the environment's `finishes` is set. The reply is not `done` if the episode
        continues in a shorter conversation.
        """

    def close(self) -> None:
        """Release all resources; idempotent."""


@contextlib.contextmanager
def world_errors(failed: Callable[[Exception], None]) -> Iterator[None]:
    """Run foreign code: `failed` handles any error, and the caller continues."""
    try:
        yield
    except Exception as error:
        failed(error)


class WorldThread(threading.Thread):
    """A thread that owns a world and executes one order at a time; it may block or hang."""

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
            with world_errors(self.failed):
                world.close()


class Player(World, Protocol):
    """A world of this process that can propose the next answer."""

    def best(self) -> str:
        """Return the expert's answer; '' if it has none."""

    def random(self, generator: np.random.Generator) -> str:
        """Return a random answer."""
