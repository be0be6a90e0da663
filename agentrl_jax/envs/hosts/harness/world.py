"""Any agent that calls OpenAI's chat completions, as a world.

A harness is a function or a program that gets an address. Its requests are the observations, and
its end is the end of the episode. It returns or posts the reward.
"""

import dataclasses
import functools
import queue
import re
import threading
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment, hashed
from agentrl_jax.envs.hosts.harness.episode import End, Episode, Request
from agentrl_jax.envs.hosts.harness.programs import Program
from agentrl_jax.envs.hosts.harness.task import Call, Task, reward_of
from agentrl_jax.envs.hosts.harness.wire import Refused
from agentrl_jax.envs.hosts.harness.workers import Lease, Workers
from agentrl_jax.envs.hosts.world import Answer, Messages, Reply, WorldError, shown
from agentrl_jax.settings.callables import import_callable
from agentrl_jax.settings.marks import MANY, ONE, POSITIVE, ZERO, At, In
from agentrl_jax.settings.rules import Rule, exclude, importable, must

if TYPE_CHECKING:
    from agentrl_jax.envs.hosts.harness.endpoint import Endpoint

CUT = {  # why an episode is cut -> what its next request is answered
    'TOKEN_BUDGET': Refused(
        400, 'context_length_exceeded', "This model's maximum context length is exceeded."
    ),
    'TURN_BUDGET': Refused(400, 'turns_exceeded', 'No turn of this conversation is left.'),
}
FIGURES = ('requests', 'branches', 'refused', 'bad_calls')


@functools.cache
def endpoint(host: str, port: int) -> 'Endpoint':
    """The server of this process."""
    from agentrl_jax.envs.hosts.harness.endpoint import Endpoint

    return Endpoint(host, port)


@functools.cache
def workers(run: str, most: int) -> Workers:
    """The workers of this process."""
    return Workers(run, most)


class Harness:
    """One run of a harness at a time."""

    instruction = ''
    deterministic = False

    def __init__(self, settings: 'HarnessEnvironment'):
        self.settings = settings
        self.endpoint = endpoint(settings.host, settings.port)
        self.workers = workers(settings.run, settings.workers) if settings.workers else None
        if self.workers is not None:
            self.workers.enter()
        self.episode: Episode | None = None
        self.player: Call | Lease | Program | None = None
        self.turns = 0
        self.cut = False  # its last request was rejected for lack of turns or tokens

    def reset(self, item: int) -> Messages:
        self.leave()
        settings = self.settings
        if self.workers is not None:
            player = self.workers.take()
        elif settings.run:
            player = Call(settings.run)
        else:
            player = Program(settings.command, settings.blames)
        episode = Episode(settings.stop, settings.branches, settings.thoughts == 'drop')
        address = self.endpoint.open(episode, settings.public_url)
        self.episode, self.player = episode, player
        self.turns, self.cut = 0, False
        task = Task(int(item), f'{address}/v1', episode.secret)

        def play() -> None:
            episode.events.put(player.play(task))

        threading.Thread(target=play, daemon=True, name='harness').start()
        event = self._next(settings.start_s)
        if isinstance(event, End):
            raise WorldError(f'the harness ended before its first request: {event.error or "-"}')
        return event.new

    def step(self, action: Answer) -> Reply:
        self.turns, self.cut = self.turns + 1, False
        made = self.episode.answer(action)
        if made.bad_calls:
            self.endpoint.warn_once(
                'bad_calls',
                'the first tool call that cannot be parsed (harness/bad_calls counts them): '
                f'{shown(str(action)):.300}',
            )
        return dataclasses.replace(self._reply(), valid=not made.bad_calls)

    def finish(self, reason: str) -> Reply:
        """Reject the pending request; the harness ends, and its reward counts.

        If the conversation is too long, it may start another, such as a summary.
        """
        self.cut = True
        self.episode.refuse(CUT[reason], branch=reason == 'TOKEN_BUDGET')
        return self._reply()

    def leave(self) -> None:
        """End the episode: kill its process; a thread gets no more answers."""
        episode, self.episode = self.episode, None
        player, self.player = self.player, None
        if episode is not None:
            self.endpoint.close(episode)
            player.stop()

    def close(self) -> None:
        self.leave()
        shared, self.workers = self.workers, None
        if shared is not None:
            shared.leave()

    @property
    def refused(self) -> list[Refused]:
        """Rejected requests, except for lack of turns or tokens: no mistake of the harness."""
        return [one for one in self.episode.refused if one not in CUT.values()]

    def _figures(self) -> tuple[float, ...]:
        episode = self.episode
        figures = (self.turns, len(episode.branches), len(self.refused), episode.bad_calls)
        return tuple(map(float, figures))

    def _next(self, patience_s: float) -> Request | End:
        """The next request or the end; reports each ignored field of requests once."""
        try:
            event = self.episode.events.get(timeout=patience_s)
        except queue.Empty:
            self.leave()
            raise WorldError(
                f'the harness neither asked nor ended within {patience_s:g} s (harness.start_s of '
                'the first request, harness.silent_s of others)'
            ) from None
        for name in event.asked.ignored if isinstance(event, Request) else ():
            self.endpoint.warn_once(
                name,
                f'requests of the harness set {shown(name)}, which training ignores: the '
                'sampling of the run applies',
            )
        return event

    def _reply(self) -> Reply:
        event = self._next(self.settings.silent_s)
        if isinstance(event, End):
            return self._over(event)
        return Reply(event.new, figures=self._figures())

    def _over(self, end: End) -> Reply:
        """The reply to the last answer of an episode."""
        earned = end.returned if self.episode.reward is None else self.episode.reward
        blamed = end.error.partition(':')[0] in self.settings.blames
        if earned is None and end.error and (self.cut or blamed):
            earned = self.settings.blamed_reward  # the policy is to blame
        reward, success = reward_of(earned, end.error)
        for one in [] if end.error else self.refused:
            self.endpoint.warn_once(
                one.code,
                'a harness earned a reward although a request was refused '
                f'({one.code}: {shown(str(one))}); harness/refused counts such requests',
            )
        reply = Reply('', reward, done=True, success=success, figures=self._figures())
        self.leave()
        return reply


class Played(Harness):
    """A harness whose requests an expert answers, as a player of worlds."""

    def __init__(self, settings: 'HarnessEnvironment'):
        super().__init__(settings)
        self.expert = import_callable(settings.expert, 'harness.expert')
        self.item = 0

    def reset(self, item: int) -> Messages:
        self.item = int(item)
        return super().reset(item)

    def step(self, action: str) -> Reply:
        return super().step(Answer(action))

    def best(self) -> str:
        asked = self.episode.pending.asked
        messages = [one.message for one in asked.messages]
        said = self.expert(messages, list(asked.tools), self.item)
        if not isinstance(said, str) or not said:
            raise WorldError(f'harness.expert={self.settings.expert!r} answers {said!r:.80}')
        return said


@dataclasses.dataclass(frozen=True)
class HarnessEnvironment(HostEnvironment):
    """Runs of a harness; an item is a number that it is given."""

    run: str = ''  # package.module:callable, which gets a Task and returns the reward
    command: tuple[str, ...] = ()  # or a program, which posts it; {item} in a word is the item
    workers: Annotated[int, ZERO] = 0  # processes that call run, an episode at a time each, and are
    # killed where they hang; 0 = threads of the run
    expert: str = ''  # package.module:function, which answers in the policy's place in order to be
    # cloned: of (messages, tools, item), the text of an answer; '' = nobody
    num_items: Annotated[int, MANY, At('hosts.num_items')] = 1000
    branches: Annotated[int, ONE] = 1  # conversations of an episode: a request that extends none
    # opens another
    context: Annotated[int, ZERO] = 0  # tokens of one of them; 0 = as many as of all together,
    # rollout.max_tokens
    thoughts: Literal['keep', 'drop'] = 'keep'  # in front of </think>, in earlier answers; drop, as
    # Qwen3's template: each turn after one opens a conversation without it
    start_s: Annotated[float, POSITIVE] = 100.0  # until its first request
    silent_s: Annotated[float, POSITIVE] = 60.0  # between others, and to the end
    blames: tuple[str, ...] = ()  # names of its errors that the policy is to blame for, ...
    blamed_reward: float = 0.0  # ... and what the episode then earns
    stop: Annotated[tuple[str, ...], At('hosts.stop')] = ()
    host: Literal['127.0.0.1', '0.0.0.0'] = '127.0.0.1'  # that the endpoint listens on
    port: Annotated[int, In(low=0, high=65535)] = 0  # 0 = any
    public_url: str = ''  # where harnesses reach the endpoint, such as https://proxy:8443; '' =
    # http://<host>:<port>, with the address of this machine for 0.0.0.0

    name = 'harness'
    FIGURES = FIGURES
    chats = finishes = True
    plays_at_random = False
    RULES = (
        must(
            'run',
            'a function, or command to a program',
            lambda world: bool(world.run) != bool(world.command),
        ),
        must('workers', '0 without harness.run', lambda world: not world.workers or world.run),
        *exclude({'branches': In(low=2)}, {'thoughts': 'keep', 'context': 0}),
        must(
            'public_url',
            'an http:// or https:// address',
            lambda world: re.match('$|https?://', world.public_url),
        ),
        Rule({'public_url': '', 'port': In(low=1)}, 'the address is of a fixed port'),
        importable('run', optional=True),
        importable('expert', optional=True),
    )
    RUN_RULES = (
        Rule({'context.window': 0}, 'a harness shows the conversation'),
        Rule({'agent.name': {'act', 'react'}}, 'a harness shows the conversation'),
        Rule({'agent.trials': 1}, 'a harness shows the conversation'),
        must(
            'hosts.timeout_s',
            'harness.start_s and harness.silent_s or more',
            lambda run: (
                max(run.worlds[0].start_s, run.worlds[0].silent_s) <= run.hosts.policy.timeout_s
            ),
        ),
        must(
            'harness.context',
            'at most rollout.max_tokens',
            lambda run: run.worlds[0].context <= run.rollout.max_tokens,
        ),
    )

    def make(self) -> Harness:
        return Harness(self)

    def player(self) -> Played:
        return Played(self)

    def has_player(self) -> bool:
        return bool(self.expert)

    @property
    def quick(self) -> bool:
        return self.has_player()

    def item_range(self, split: str) -> np.ndarray:
        return hashed(range(self.num_items), split)
