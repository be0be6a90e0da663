"""What partial rollouts could gain: steps that train episodes begun under older weights.

  python -m benchmarks.staleness [--worlds=textcraft,search,sciworld,miniwob]

First real worlds are played by their experts, every second turn at random, and timed: turns of an
episode, seconds of a reply. Then steps are scheduled on a clock that plays device and worlds, with
those times and a device as in host_schedule.py. A step trains E episodes in the order in which
they were begun, so no short one is preferred, and up to s steps of further episodes may have begun
before it: staleness 0 is a rollout that ends before its update begins. The gain of s is steps a
second over those of 0; idle is the share of time in which the device has nothing to do.
"""

import dataclasses
import heapq
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from agentrl_jax.envs import HOSTS
from benchmarks import common
from benchmarks.host_schedule import CHUNK, LINES, Costs

STALENESS = (0, 1, 2, 4)
STEPS = 24  # that are scheduled, of which the first quarter fills the rows
CAPS = {'sciworld': 20, 'textcraft': 20, 'search': 5, 'miniwob': 10}  # turns of an episode
SETTINGS: dict[str, dict[str, Any]] = {'search': {'questions': ('drawn',)}}
DEVICES = {  # as in host_schedule: about 0.5B on a GPU, and a larger model
    '2 ms': Costs(step_s=0.002, read_s=0.004, call_s=0.001),
    '12 ms': Costs(step_s=0.012, read_s=0.015, call_s=0.001),
}


class Turn(NamedTuple):
    """What happens before an answer, and the answer; the last one of an episode answers nothing."""

    wait_s: float  # of the world
    shown: int  # tokens to read
    said: int  # tokens to sample


def played(world: str, episodes: int, seed: int = 0) -> list[list[float]]:
    """Seconds of the replies of each episode, the reset first."""
    env = HOSTS[world](**SETTINGS.get(world, {}))
    env.check()
    player, luck = env.player(), np.random.default_rng(seed)
    items = env.make_params('train', num_levels=episodes, seed=seed).items
    player.reset(int(items[0]))  # what is loaded once costs no episode
    found = []
    for item in items:
        began = time.monotonic()
        player.reset(int(item))
        waits = [time.monotonic() - began]
        for turn in range(CAPS[world]):
            said = player.random(luck) if turn % 2 else player.best()
            began = time.monotonic()
            reply = player.step(said)
            waits.append(time.monotonic() - began)
            if reply.done:
                break
        found.append(waits)
    player.close()
    return found


def episodes_of(waits: list[list[float]], said: float, seed: int = 0) -> Iterator[list[Turn]]:
    """Episodes without end, drawn from the times; said: tokens of an answer in the mean."""
    luck = np.random.default_rng(seed)
    while True:
        times = waits[luck.integers(len(waits))]
        answers = [*luck.geometric(1 / said, len(times) - 1), 0]
        shown = luck.integers(20, 120, len(times))
        yield [Turn(*turn) for turn in zip(times, shown, map(int, answers), strict=True)]


@dataclasses.dataclass
class Clock:
    """Rows that play episodes in order, and a device that reads, samples and trains."""

    source: Iterator[list[Turn]]
    costs: Costs
    rows: int  # episodes at once, and episodes of a step
    staleness: int
    learn_s: float = 0.0

    def __post_init__(self) -> None:
        self.now = self.busy_s = 0.0
        self.begun = self.trained = 0  # episodes, steps
        self.left: dict[int, int] = {}  # episodes of a step that are not over
        self.coming: list[tuple[float, int]] = []  # replies
        self.under_way: dict[int, list[Turn]] = {}  # what is left of each episode
        self.reads: list[int] = []
        self.live: dict[int, int] = {}  # tokens that are left of an answer

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.busy_s += seconds

    def begin(self) -> None:
        """Starts episodes where there are rows, unless their step is too far ahead."""
        while len(self.under_way) < self.rows:
            step = self.begun // self.rows
            if step > self.trained + self.staleness:
                return
            episode = next(self.source)
            self.under_way[self.begun] = episode
            self.left[step] = self.left.get(step, self.rows)
            heapq.heappush(self.coming, (self.now + episode[0].wait_s, self.begun))
            self.begun += 1

    def arrive(self) -> None:
        """Takes the replies whose time has come."""
        while self.coming and self.coming[0][0] <= self.now:
            number = heapq.heappop(self.coming)[1]
            if self.under_way[number][0].said:
                self.reads.append(number)
            else:
                del self.under_way[number]
                self.left[number // self.rows] -= 1

    def step(self) -> None:
        """The next thing that the device does, or a wait."""
        if self.left.get(self.trained) == 0:
            self.work(self.learn_s)
            self.trained += 1
        elif self.reads:
            lines, blocks = self.reads[:LINES], 0
            self.reads = self.reads[LINES:]
            for number in lines:
                blocks = max(blocks, -(-self.under_way[number][0].shown // CHUNK))
                self.live[number] = self.under_way[number][0].said
            self.work(blocks * self.costs.read_s)
        elif self.live:
            count = min(self.live.values())
            if self.coming:
                due = (self.coming[0][0] - self.now) / self.costs.step_s
                count = int(min(count, max(np.ceil(due), 1)))
            self.work(count * self.costs.step_s)
            for number in list(self.live):
                self.live[number] -= count
                if not self.live[number]:
                    del self.live[number], self.under_way[number][0]
                    wait_s = self.under_way[number][0].wait_s
                    heapq.heappush(self.coming, (self.now + wait_s, number))
        else:
            self.now = max(self.now, self.coming[0][0])

    def run(self, steps: int) -> tuple[float, float]:
        """(seconds of a step, share in which the device waits), after a quarter of the steps."""
        first = None
        while self.trained < steps:
            if first is None and self.trained >= steps // 4:
                first = self.now, self.busy_s, self.trained
            self.begin()
            self.arrive()
            self.step()
        took, busy = self.now - first[0], self.busy_s - first[1]
        return took / (steps - first[2]), 1 - busy / took


def gains(waits: list[list[float]], *, said: float, rows: int, costs: Costs) -> list[list[float]]:
    """[seconds of a step, gain, idle share] of each staleness.

    An update takes half as long as a rollout of worlds that reply at once.
    """
    calm = [[0.0] * len(times) for times in waits]
    rollout_s, _ = Clock(episodes_of(calm, said), costs, rows, 0).run(STEPS)
    found = []
    for staleness in STALENESS:
        clock = Clock(episodes_of(waits, said), costs, rows, staleness, rollout_s / 2)
        took, idle = clock.run(STEPS)
        found.append([took, (found[0][0] if found else took) / took, idle])
    return found


def show(world: str, waits: list[list[float]], found: dict[str, list[list[float]]]) -> str:
    turns = np.array([len(times) - 1 for times in waits])
    replies = 1000 * np.concatenate([times[1:] for times in waits])
    middle, late, latest = np.percentile(replies, (50, 90, 100))
    title = (
        f'{world}: {len(waits)} episodes of {turns.mean():.1f} turns ({turns.min()} to '
        f'{turns.max()}), replies after {middle:.1f} ms (90 %: {late:.1f}, longest {latest:.0f})'
    )
    lines = [
        [name, staleness, f'{took:.2f}', f'{gain:.2f}', f'{100 * idle:.0f}']
        for name, cells in found.items()
        for staleness, (took, gain, idle) in zip(STALENESS, cells, strict=True)
    ]
    return common.table(title, ['a token', 'staleness', 's a step', 'gain', 'idle %'], lines)


def main() -> None:
    args = common.parse_arguments(
        __doc__.splitlines()[0],
        worlds='textcraft,search',
        episodes=64,
        rows=64,
        said=39.0,
    )
    result = {}
    for world in args.worlds.split(','):
        waits = played(world, args.episodes)
        setting = dict(said=args.said, rows=args.rows)
        result[world] = {
            name: gains(waits, costs=costs, **setting) for name, costs in DEVICES.items()
        }
        print(show(world, waits, result[world]), flush=True)
    common.emit('staleness', result, args.json)


if __name__ == '__main__':
    main()
