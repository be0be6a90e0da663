"""Agents that call the API of OpenAI or Anthropic, as environments.

A harness is a function or a program that receives an address. Its requests are the observations,
and the episode ends when it ends. It returns or posts the reward.
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
from agentrl_jax.settings.marks import MANY, ONE, POSITIVE, ZERO, ConfigName, In
from agentrl_jax.settings.rules import Rule, exclude, importable, must

if TYPE_CHECKING:
    from agentrl_jax.envs.hosts.harness.endpoint import Endpoint

CUT = {  # reason for cutting an episode -> answer to its next request
    'TOKEN_BUDGET': Refused(
        400, 'context_length_exceeded', "This model's maximum context length is exceeded."
    ),
    'TURN_BUDGET': Refused(400, 'turns_exceeded', 'No turn of this conversation is left.'),
}
FIGURES = ('requests', 'branches', 'refused', 'bad_calls')


@functools.cache
def endpoint(host: str, port: int) -> 'Endpoint':
    """Return the server of this process."""
    from agentrl_jax.envs.hosts.harness.endpoint import Endpoint

    return Endpoint(host, port)


workers = functools.cache(Workers)  # of this process


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
        self.cut = False  # its last request was rejected because turns or tokens ran out

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
        completion = self.episode.answer(action)
        if completion.bad_calls:
            self.endpoint.warn_once(
                'bad_calls',
                'the first tool call that cannot be parsed (harness/bad_calls counts them): '
                f'{shown(str(action)):.300}',
            )
        return dataclasses.replace(self._reply(), valid=not completion.bad_calls)

    def finish(self, reason: str) -> Reply:
        """Reject the pending request; the harness ends, and its reward counts.

        If the conversation is too long, it may start another one, such as a summary.
        """
        self.cut = True
        self.episode.refuse(CUT[reason], branch=reason == 'TOKEN_BUDGET')
        return self._reply()

    def leave(self) -> None:
        """End the episode: kill its process, or give its thread no more answers."""
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
        """Rejected requests, except those for lack of turns or tokens, which are not errors."""
        return [one for one in self.episode.refused if one not in CUT.values()]

    def _figures(self) -> tuple[float, ...]:
        episode = self.episode
        figures = (self.turns, len(episode.branches), len(self.refused), episode.bad_calls)
        return tuple(map(float, figures))

    def _next(self, patience_s: float) -> Request | End:
        """Wait for the next request or the end; report each ignored request field once."""
        try:
            event = self.episode.events.get(timeout=patience_s)
        except queue.Empty:
            self.leave()
            raise WorldError(
                f'the harness neither sent a request nor ended within {patience_s:g} s '
                '(harness.start_s for the first request, harness.silent_s for later ones)'
            ) from None
        for name in event.asked.ignored if isinstance(event, Request) else ():
            self.endpoint.warn_once(
                name,
                f'harness requests set {shown(name)}, which training ignores: the sampling '
                'settings of the run apply',
            )
        return event

    def _reply(self) -> Reply:
        event = self._next(self.settings.silent_s)
        if isinstance(event, End):
            return self._over(event)
        return Reply(event.new, figures=self._figures())

    def _over(self, end: End) -> Reply:
        """Return the reply to the last answer of an episode."""
        earned = end.returned if self.episode.reward is None else self.episode.reward
        blamed = end.error.partition(':')[0] in self.settings.blames
        if earned is None and end.error and (self.cut or blamed):
            earned = self.settings.blamed_reward  # the policy is to blame
        reward, success = reward_of(earned, end.error)
        for one in [] if end.error else self.refused:
            self.endpoint.warn_once(
                one.code,
                'a harness earned a reward although a request was rejected '
                f'({one.code}: {shown(str(one))}); harness/refused counts rejected requests',
            )
        reply = Reply('', reward, done=True, success=success, figures=self._figures())
        self.leave()
        return reply


class Played(Harness):
    """A harness that an expert plays instead of the policy."""

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
        request = self.episode.pending.asked
        messages = [one.message for one in request.messages]
        answer = self.expert(messages, list(request.tools), self.item)
        if not isinstance(answer, str) or not answer:
            raise WorldError(f'harness.expert={self.settings.expert!r} returned {answer!r:.80}')
        return answer


@dataclasses.dataclass(frozen=True)
class HarnessEnvironment(HostEnvironment):
    """Runs of a harness; an item is a number passed to it."""

    run: str = ''  # package.module:callable that takes a Task and returns the reward
    command: tuple[str, ...] = ()  # or a program that posts it; {item} is replaced by the item
    workers: Annotated[int, ZERO] = 0  # processes that call run, one episode at a time each, and
    # are killed if they hang; 0 = threads of the run
    expert: str = ''  # package.module:function that answers instead of the policy, for behaviour
    # cloning: (messages, tools, item) -> the text of an answer; '' = none
    num_items: Annotated[int, MANY, ConfigName('hosts.num_items')] = 1000
    branches: Annotated[int, ONE] = 1  # conversations per episode; a request that extends no
    # conversation opens a new one
    context: Annotated[int, ZERO] = 0  # tokens per conversation; 0 = rollout.max_tokens, the limit
    # of all conversations together
    thoughts: Literal['keep', 'drop'] = 'keep'  # text before </think> in earlier answers; drop, as
    # in Qwen3's template: each turn after a thought opens a conversation without it
    start_s: Annotated[float, POSITIVE] = 100.0  # until the first request
    silent_s: Annotated[float, POSITIVE] = 60.0  # between later requests, and until the end
    blames: tuple[str, ...] = ()  # names of harness errors that count as errors of the policy, ...
    blamed_reward: float = 0.0  # ... and the reward of such an episode
    stop: Annotated[tuple[str, ...], ConfigName('hosts.stop')] = ()
    host: Literal['127.0.0.1', '0.0.0.0'] = '127.0.0.1'  # listening address of the endpoint
    port: Annotated[int, In(low=0, high=65535)] = 0  # 0 = any
    public_url: str = ''  # address of the endpoint for harnesses, such as https://proxy:8443; '' =
    # http://<host>:<port>, with the address of this machine for 0.0.0.0

    name = 'harness'
    FIGURES = FIGURES
    chats = finishes = True
    plays_at_random = False
    RULES = (
        must(
            'run',
            'a function, or set command to a program',
            lambda world: bool(world.run) != bool(world.command),
        ),
        must('workers', '0 without harness.run', lambda world: not world.workers or world.run),
        *exclude({'branches': In(low=2)}, {'thoughts': 'keep', 'context': 0}),
        must(
            'public_url',
            'an http:// or https:// address',
            lambda world: re.match('$|https?://', world.public_url),
        ),
        Rule({'public_url': '', 'port': In(low=1)}, 'a public address needs a fixed port'),
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
