"""Any agent that calls OpenAI's chat completions, as a world: it asks, and the policy answers.

A harness is a function, or a program. Its requests are the observations, its end is the end of the
episode, and what it returns or posts is the reward. It knows no more of training than an address.
"""

import asyncio
import dataclasses
import functools
import inspect
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment, hashed
from agentrl_jax.envs.hosts.harness.endpoint import End, Endpoint, Episode
from agentrl_jax.envs.hosts.harness.wire import Refused
from agentrl_jax.envs.hosts.objects import import_callable
from agentrl_jax.envs.hosts.world import Answer, Foreign, Messages, Reply, WorldError, fits
from agentrl_jax.settings.marks import MANY, ONE, POSITIVE, In

CUT = {  # why an episode is cut -> what its next request is answered
    'TOKEN_BUDGET': Refused(
        400, 'context_length_exceeded', "This model's maximum context length is exceeded."
    ),
    'TURN_BUDGET': Refused(400, 'turns_exceeded', 'No turn of this conversation is left.'),
}
FIGURES = ('requests', 'branches', 'refused', 'bad_calls')


@dataclasses.dataclass(frozen=True)
class Task:
    """What a harness is given."""

    item: int
    base_url: str  # of an OpenAI client
    api_key: str
    model: str = 'policy'


@functools.cache
def endpoint(host: str, port: int) -> Endpoint:
    """The server of this process."""
    return Endpoint(host, port)


class Harness:
    """One run of a harness at a time."""

    instruction = ''
    deterministic = False

    def __init__(self, settings: 'HarnessEnvironment', stops: tuple[str, ...]):
        self.settings, self.stops = settings, stops
        self.endpoint = endpoint(settings.host, settings.port)
        self.episode: Episode | None = None
        self.process: subprocess.Popen | None = None
        self.turns = 0

    def reset(self, item: int) -> Messages:
        self.close()
        drops = self.settings.thoughts == 'drop'
        episode = self.episode = Episode(self.stops, self.settings.branches, drops)
        address, self.turns = self.endpoint.open(episode), 0
        task = Task(int(item), f'{address}/v1', episode.secret)
        start = self._call if self.settings.run else self._spawn
        run = functools.partial(start, episode, task)
        threading.Thread(target=run, daemon=True, name='harness').start()
        event = self._next(self.settings.start_s)
        if isinstance(event, End):
            raise WorldError(f'the harness ended before its first request: {event.error or "-"}')
        return event.new

    def step(self, action: Answer) -> Reply:
        self.turns += 1
        made = self.episode.answer(action)
        event = self._next(self.settings.silent_s)
        valid = not made.bad_calls
        if isinstance(event, End):
            return dataclasses.replace(self._over(event), valid=valid)
        return Reply(event.new, figures=self._figures(), valid=valid)

    def finish(self, reason: str) -> Reply:
        """Refuses the request that waits; harnesses end then, and what they earned counts."""
        self.episode.refuse(CUT[reason])
        event = self._next(self.settings.silent_s)
        while not isinstance(event, End):
            event = self._next(self.settings.silent_s)
        return self._over(event)

    def close(self) -> None:
        """Leaves the episode: a process is killed, a thread finds that nobody answers any more."""
        episode, self.episode = self.episode, None
        process, self.process = self.process, None
        if episode is not None:
            self.endpoint.close(episode)
        if process is not None:
            kill(process)

    def _figures(self) -> tuple[float, ...]:
        counted, branches = self.episode.counted, len(self.episode.branches)
        return tuple(map(float, (self.turns, branches, counted['refused'], counted['bad calls'])))

    def _next(self, patience_s: float) -> Any:
        try:
            return self.episode.events.get(timeout=patience_s)
        except queue.Empty:
            self.close()
            raise WorldError(
                f'the harness neither asked nor ended within {patience_s:g} s (harness.start_s of '
                'the first request, harness.silent_s of others)'
            ) from None

    def _over(self, end: End) -> Reply:
        """The reply to the last answer of an episode."""
        cut = self.episode.refusal is not None
        earned = end.returned if self.episode.reward is None else self.episode.reward
        blamed = end.error.partition(':')[0] in self.settings.blames
        if earned is None and end.error and (cut or blamed):
            earned = self.settings.blamed_reward  # the policy is to blame
        reward, success = reward_of(earned, end.error)
        reply = Reply('', reward, done=True, success=success, figures=self._figures())
        self.close()
        return reply

    def _call(self, episode: Episode, task: Task) -> None:
        def failed(error: BaseException) -> None:
            episode.events.put(End(error=f'{type(error).__name__}: {error}'))

        with Foreign(failed):
            try:
                returned = import_callable(self.settings.run, 'harness.run')(task)
                if inspect.iscoroutine(returned):
                    returned = asyncio.run(returned)
                episode.events.put(End(returned))
            except SystemExit as error:
                failed(error)

    def _spawn(self, episode: Episode, task: Task) -> None:
        address = task.base_url.removesuffix('/v1')
        given = {
            'OPENAI_BASE_URL': task.base_url,
            'OPENAI_API_BASE': task.base_url,
            'OPENAI_API_KEY': task.api_key,
            'OPENAI_MODEL': task.model,
            'AGENTRL_ITEM': str(task.item),
            'AGENTRL_REWARD_URL': f'{address}/reward',
        }
        words = [word.replace('{item}', str(task.item)) for word in self.settings.command]
        try:
            process = subprocess.Popen(
                words,
                env=os.environ | given,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            episode.events.put(End(error=f'{type(error).__name__}: {error}'))
            return
        self.process = process
        if self.episode is not episode:  # it was left in the meantime
            kill(process)
        kept = []
        reader = threading.Thread(
            target=lambda: kept.append(last_line(process.stderr)), daemon=True
        )
        reader.start()
        code = process.wait()
        kill(process)  # what it has left: it may hold stderr open, too
        reader.join(timeout=1.0)
        last = kept[0] if kept else ''
        error = last if last.partition(':')[0] in self.settings.blames else ''
        episode.events.put(End(error=error or (f'exit code {code}: {last}' if code else '')))


def kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started, which may have outlived it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_line(stream: Any) -> str:
    """The last line that a process writes before it ends; of floods no more than an end is kept."""
    kept = b''
    while some := stream.read1(2**16):
        kept = (kept + some)[-2000:]
    lines = kept.decode('utf-8', 'replace').strip().splitlines()
    return lines[-1] if lines else ''


def reward_of(earned: Any, error: str) -> tuple[float, bool | None]:
    """(reward, success) of what a harness returned or posted; WorldError where it is none.

    A number, true or false, a pair (reward, success), or a mapping of both.
    """
    if isinstance(earned, bool | np.bool_):
        return float(earned), bool(earned)
    success = None
    if isinstance(earned, Mapping):
        earned, success = earned.get('reward'), earned.get('success')
    elif isinstance(earned, tuple | list) and len(earned) == 2:
        earned, success = earned
    if not fits(earned):
        said = error or f'the harness returned {earned!r:.80}, which is no reward'
        raise WorldError(said)
    return float(earned), None if success is None else bool(success)


@dataclasses.dataclass(frozen=True)
class HarnessEnvironment(HostEnvironment):
    """Runs of a harness; an item is a number that it is given."""

    run: str = ''  # package.module:callable, which gets a Task and returns the reward
    command: tuple[str, ...] = ()  # or a program, which posts it; {item} in a word is the item
    num_items: Annotated[int, MANY] = 1000  # items 0 .. num_items - 1
    branches: Annotated[int, ONE] = 1  # conversations of an episode: a request that extends none
    # opens another
    thoughts: Literal['keep', 'drop'] = 'keep'  # in front of </think>, in earlier answers; drop, as
    # Qwen3's template: each turn after one opens a conversation without it
    start_s: Annotated[float, POSITIVE] = 100.0  # until its first request
    silent_s: Annotated[float, POSITIVE] = 60.0  # between others, and to the end
    blames: tuple[str, ...] = ()  # names of its errors that the policy is to blame for, ...
    blamed_reward: float = 0.0  # ... and what the episode then earns
    stop: tuple[str, ...] = ()  # stop strings that its requests may name; they end every answer
    host: Literal['127.0.0.1', '0.0.0.0'] = '127.0.0.1'  # that the endpoint listens on
    port: Annotated[int, In(low=0, high=65535)] = 0  # 0 = any

    name = 'harness'
    FIGURES = FIGURES
    chats = finishes = True

    def problems(self) -> Iterator[str]:
        if bool(self.run) == bool(self.command):
            yield (
                'harness.run=package.module:function or harness.command=(program, ...) says what '
                f'is run: name one of them, not {"both" if self.run else "none"}'
            )
        if self.thoughts == 'drop' and self.branches == 1:
            yield (
                'harness.thoughts=drop opens a conversation after each thought, and '
                'harness.branches=1 allows one: set it to the turns of an episode'
            )
        if self.run:
            try:
                import_callable(self.run, 'harness.run')
            except ValueError as error:
                yield str(error)

    def make(self) -> Harness:
        return Harness(self, self.stop)

    def item_range(self, split: str) -> np.ndarray:
        return hashed(range(self.num_items), split)
