"""The host loop with slow environments on a simulated device that only takes time.

  python -m benchmarks.host_schedule [--step-ms=2 --read-ms=4 --call-ms=1]

The loop is the real one (rollout/host_rollout.py). A clock simulates the device and the
environments, so the figures are reproducible and independent of the machine. Environments reply
after a lognormal time (mean 200 ms), or after 5 s in 1 % of cases. Answers have a geometric length
(mean 39 tokens), observations 60 to 180 tokens, episodes 1 to 10 turns. The loop is compared with a
barrier after every turn, as in most trainers, and with an ideal, the largest of three lower bounds:
all tokens in full batches, the longest episode alone, and the mean row.
"""

import contextlib
import dataclasses
import heapq
import queue
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.rollout import host_rollout, world_calls
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.rollout.programs import REPORT_HEADER
from agentrl_jax.rollout.replies import ReplyLog
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import Prompt
from agentrl_jax.types import TurnStop
from benchmarks import common

MEAN_S, SPREAD, STRAGGLER_S, STRAGGLERS = 0.2, 1.0, 5.0, 0.01
MEAN_ANSWER, LONGEST_ANSWER, OBSERVATION, TURNS = 39, 160, (60, 180), 10
LINES, CHUNK, PREFIX = 8, 32, 8  # rows and columns of a block; tokens of the prefix


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the simulated device."""

    step_s: float  # per token of all rows
    read_s: float  # per block of LINES x CHUNK tokens
    call_s: float  # per program, including its report


class Clock:
    """Replaces the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def luck(*what: int) -> np.random.Generator:
    return np.random.default_rng(what)


def latency_of(item: int, turn: int) -> float:
    """Seconds until an environment replies."""
    drawn = luck(1, item, turn)
    wait = float(drawn.lognormal(np.log(MEAN_S) - SPREAD**2 / 2, SPREAD))
    return STRAGGLER_S if drawn.random() < STRAGGLERS else wait


def turns_of(item: int) -> int:
    """Turns of an episode."""
    return int(luck(3, item).integers(1, TURNS + 1))


class Worlds:
    """A pool of environments and its queue: replies arrive when they are due."""

    def __init__(self, clock: Clock, *, slow: bool):
        self.clock, self.slow, self.done = clock, slow, self
        self.coming: list[tuple[float, int, Response]] = []

    def reply_to(self, request: Request) -> tuple[float, int, bool]:
        """(seconds until the reply, tokens of the observation, whether the episode is over)."""
        item, turn = request.item, len(request.actions)
        length = int(luck(2, item, turn).integers(*OBSERVATION))
        return latency_of(item, turn) if self.slow else 0.0, length, turn >= turns_of(item)

    def submit(self, request: Request) -> None:
        seconds, length, done = self.reply_to(request)
        prompt = Prompt([1 + request.stream] * length, anchor=0)
        response = Response(request, Reply('', done=done), prompt=prompt, deterministic=True)
        response.seconds = seconds
        heapq.heappush(self.coming, (self.clock.now + response.seconds, request.stream, response))

    def get_nowait(self) -> Response:
        return self.get(0.0)

    def get(self, timeout: float) -> Response:
        if not self.coming or self.coming[0][0] > self.clock.now + timeout:
            self.clock.now += timeout
            raise queue.Empty
        self.clock.now = max(self.clock.now, self.coming[0][0])
        return heapq.heappop(self.coming)[-1]


class Device:
    """Simulates rollout/programs.Programs without tokens; it holds the state."""

    shards, width = 1, CHUNK

    def __init__(self, clock: Clock, slots: int, costs: Costs):
        self.clock, self.slots, self.costs = clock, slots, costs
        self.settings = RolloutSettings(
            None,  # no model samples
            slots=slots,
            serve_rows=LINES,
            max_tokens=PREFIX + TURNS * (OBSERVATION[1] + LONGEST_ANSWER),
            max_response=LONGEST_ANSWER,
        )
        self.left, self.count = np.zeros((2, slots), int)
        self.live, self.stopped = np.zeros((2, slots), bool)

    def start(self, params: Any, prefix: np.ndarray, ends: Any) -> None:
        pass

    def copy(self, state: None, ends: Any, lines: np.ndarray) -> None:
        pass  # no two conversations start with the same prompt

    def work(self, seconds: float) -> None:
        self.clock.now += seconds

    def read(self, state: None, params: Any, ends: Any, block: np.ndarray) -> None:
        self.work(self.costs.read_s)
        for row, _, _, length, stream, last in block[:, :6]:
            if last:
                answer = luck(4, stream, length).geometric(1 / MEAN_ANSWER)
                self.left[row], self.count[row] = min(answer, LONGEST_ANSWER), 0
                self.live[row] = True

    def decode(
        self, state: None, params: Any, ends: Any, key: Any, until: int, limit: int
    ) -> tuple[None, np.ndarray]:
        steps = 0
        while self.live.any() and self.stopped.sum() < until and steps < limit:
            steps += 1
            self.left -= self.live
            self.count += self.live
            self.stopped |= self.live & (self.left == 0)
            self.live &= self.left > 0
        self.work(steps * self.costs.step_s + self.costs.call_s)
        report = np.zeros((LINES + 1, REPORT_HEADER + 2 * LONGEST_ANSWER), np.int32)
        report[:, 0] = self.slots
        for line, row in enumerate(np.flatnonzero(self.stopped)[:LINES]):
            report[line, :REPORT_HEADER] = row, self.count[row], TurnStop.EOS
            self.stopped[row] = False
        report[-1, :REPORT_HEADER] = steps, self.live.sum(), self.stopped.sum()
        return None, report


class Barrier(host_rollout.HostRollout):
    """All rows sample until the last is done, then all environments step, then all are read."""

    def play(self, episodes: list[int]) -> None:
        self.episodes.extend(episodes)
        for slot in self.slots:
            self.begin_episode(slot)
        while self.calls.under_way:
            self.poll_replies()
            while any(self.ready):
                self.read()
            while self.is_sampling():
                self.decode()

    def is_due(self) -> bool:
        """Never read before all environments have replied."""
        return False


@contextlib.contextmanager
def playing(clock: Clock) -> Iterator[None]:
    """Let the loop use the simulated clock."""
    with (
        mock.patch.object(host_rollout, 'time', clock),
        mock.patch.object(world_calls, 'time', clock),
    ):
        yield


def begin(
    schedule: type[host_rollout.HostRollout],
    device: Device,
    worlds: Worlds,
    *,
    episodes: int,
) -> host_rollout.HostRollout:
    """Return a rollout that is ready to play."""
    items = np.arange(episodes, dtype=np.int32)
    env = types.SimpleNamespace(
        solved=lambda returned: False, FIGURES=(), chats=False, finishes=False, context=0
    )
    task = types.SimpleNamespace(
        prefix=np.zeros(PREFIX, np.int32),
        pad_id=0,
        max_turns=TURNS,
        turn_limit=TURNS,
        env=env,
        env_params=types.SimpleNamespace(items=items),
        agent=agents.ONLY_ACTS,
    )
    calls = world_calls.WorldCalls(
        worlds, world_calls.RetryPolicy(), log=ReplyLog(), say=common.note, asked=lambda: False
    )
    return schedule(
        device,
        types.SimpleNamespace(said=lambda ids, part=0: '', chat=types.SimpleNamespace(end_id=0)),
        calls,
        params=None,
        key=None,
        task=task,
        ends=types.SimpleNamespace(words=(0, 0)),
        level=items,
        stream=items,
        poll=8,
    )


def play(
    schedule: type[host_rollout.HostRollout], *, episodes: int, slots: int, costs: Costs, slow: bool
) -> tuple[float, host_rollout.HostRollout]:
    """Play all episodes; return (seconds, rollout)."""
    clock = Clock()
    with playing(clock):
        worlds = Worlds(clock, slow=slow)
        rollout = begin(schedule, Device(clock, slots, costs), worlds, episodes=episodes)
        rollout.play(list(range(episodes)))
    return clock.now, rollout


def ideal(played: host_rollout.HostRollout, slots: int, costs: Costs) -> dict[str, float]:
    """Lower bounds of the seconds of any schedule."""
    out = played.out
    generated = out.action_mask.sum(1)
    is_prompt = out.attention_mask & ~out.action_mask
    is_prompt[:, :PREFIX] = False
    tokens = [np.bincount(turn[row]) for turn, row in zip(out.turn, is_prompt, strict=True)]
    chunks = sum(int(np.ceil(one / CHUNK).sum()) for one in tokens)
    waits = [
        sum(latency_of(item, turn) for turn in range(turns + 1))
        for item, turns in enumerate(out.num_turns)
    ]
    chains = np.array(waits) + costs.step_s * generated
    return {
        'device': float(costs.step_s * generated.sum() / slots + costs.read_s * chunks / LINES),
        'longest episode': float(chains.max()),
        'mean row': float(chains.sum() / slots),
    }


def run(*, episodes: int, slots: int, costs: Costs) -> dict[str, Any]:
    """Seconds without latency, with latency, and with a barrier; lower bounds; ratios."""
    setting = dict(episodes=episodes, slots=slots, costs=costs)
    calm_s, calm = play(host_rollout.HostRollout, slow=False, **setting)
    ours_s, ours = play(host_rollout.HostRollout, slow=True, **setting)
    barrier_s, barrier = play(Barrier, slow=True, **setting)
    bounds = ideal(ours, slots, costs)
    return {
        'turns': int(ours.out.num_turns.sum()),
        'seconds': {'no latency': calm_s, 'hosts': ours_s, 'barrier': barrier_s},
        'steps': {
            name: one.counted['steps']
            for name, one in (('no latency', calm), ('hosts', ours), ('barrier', barrier))
        },
        'bounds': bounds,
        'of_ideal': ours_s / max(bounds.values()),
        'barrier_of_ours': barrier_s / ours_s,
        'same': all(
            np.array_equal(one, two)
            for other in (calm, barrier)
            for one, two in zip(*map(jax.tree.leaves, (ours.out, other.out)), strict=True)
        ),
    }


def show(result: dict[str, Any]) -> str:
    bounds = ', '.join(f'{name} {seconds:.1f} s' for name, seconds in result['bounds'].items())
    rows = [[name, result['seconds'][name], result['steps'][name]] for name in result['seconds']]
    rows.append(['ideal', max(result['bounds'].values()), ''])
    title = f'slow environments, {result["turns"]:,} turns; bounds: {bounds}'
    return common.table(title, ['played', 'seconds', 'steps'], rows)


def main() -> None:
    args = common.parse_arguments(
        __doc__.splitlines()[0], episodes=128, slots=64, step_ms=2.0, read_ms=4.0, call_ms=1.0
    )
    costs = Costs(args.step_ms / 1000, args.read_ms / 1000, args.call_ms / 1000)
    result = run(episodes=args.episodes, slots=args.slots, costs=costs)
    print(show(result))
    print(
        f'hosts / ideal {result["of_ideal"]:.2f}, barrier / hosts {result["barrier_of_ours"]:.2f}'
    )
    common.emit('host_schedule', result, args.json)


if __name__ == '__main__':
    main()
