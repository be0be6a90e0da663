"""What partial rollouts gain: steps that train episodes begun under older weights.

  python -m benchmarks.staleness [--worlds=drawn,textcraft,search,sciworld,miniwob]

First real worlds are played by their experts, every second turn at random, and timed: turns of an
episode, seconds of a reply; `drawn` are the times of host_schedule.py in their place. Then the real
scheduler (rollout/partial.py) plays steps on a clock that stands for device and worlds, with those
times and a device as in host_schedule.py. Staleness 0 is a rollout that ends before its update
begins. The gain of s is steps a second over those of 0; idle is the share of time in which the
device has nothing to do; stale, the updates between the weights that sampled a turn and those that
train on it, in the mean.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from agentrl_jax.envs import HOSTS
from agentrl_jax.rollout.keepers import Request
from agentrl_jax.rollout.partial import PartialRollout
from benchmarks import common, host_schedule
from benchmarks.host_schedule import Costs

STALENESS = (0, 1, 2, 4)
STEPS = 24  # that are scheduled, of which the first quarter fills the rows
NO_END = 2**20  # the last step: others follow those that are scheduled
CAPS = {'sciworld': 20, 'textcraft': 20, 'search': 5, 'miniwob': 10}  # turns of an episode
SETTINGS: dict[str, dict[str, Any]] = {'search': {'questions': ('drawn',)}}
DEVICES = {  # as in host_schedule: about 0.5B on a GPU, and a larger model
    '2 ms': Costs(step_s=0.002, read_s=0.004, call_s=0.001),
    '12 ms': Costs(step_s=0.012, read_s=0.015, call_s=0.001),
}


class Turn(NamedTuple):
    """What happens before an answer; the last one of an episode is answered by nothing."""

    wait_s: float  # of the world
    shown: int  # tokens to read


def played(world: str, episodes: int, seed: int = 0) -> list[list[float]]:
    """Seconds of the replies of each episode, the reset first."""
    if world == 'drawn':
        return [
            [host_schedule.latency_of(item, k) for k in range(host_schedule.turns_of(item) + 1)]
            for item in range(episodes)
        ]
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


def episodes_of(waits: list[list[float]], seed: int = 0) -> Iterator[list[Turn]]:
    """Episodes without end, drawn from the times."""
    luck = np.random.default_rng(seed)
    while True:
        times = waits[luck.integers(len(waits))]
        shown = luck.integers(20, 120, len(times))
        yield [Turn(*turn) for turn in zip(times, map(int, shown), strict=True)]


class Played(host_schedule.Worlds):
    """A pool that plays episodes without end; streams count them."""

    def __init__(self, clock: host_schedule.Clock, source: Iterator[list[Turn]]):
        super().__init__(clock, slow=True)
        self.source, self.episodes = source, []

    def reply_to(self, request: Request) -> tuple[float, int, bool]:
        while len(self.episodes) <= request.stream:
            self.episodes.append(next(self.source))
        turns, turn = self.episodes[request.stream], len(request.actions)
        return *turns[turn], turn == len(turns) - 1


def schedule(
    source: Iterator[list[Turn]],
    *,
    said: float,
    rows: int,
    costs: Costs,
    staleness: int,
    learn_s: float = 0.0,
) -> tuple[float, float, float]:
    """(seconds of a step, share in which the device waits, staleness of a turn in the mean).

    After a quarter of the steps. said: tokens of an answer in the mean; rows: episodes at once, and
    episodes of a step.
    """
    clock, stale = host_schedule.Clock(), []
    device = host_schedule.Device(clock, rows, costs, said)
    with host_schedule.playing(clock):
        player = host_schedule.begin(
            PartialRollout,
            device,
            Played(clock, source),
            episodes=(staleness + 1) * rows,
            turns=max(CAPS.values()),
            staleness=staleness,
            first=0,
        )
        own = np.arange(rows, dtype=np.int32)
        for step in range(STEPS):
            if step == STEPS // 4:
                began, busy_s = clock.now, device.busy_s
            out, version = player.collect(
                None, step, NO_END, lambda of: (own, (of * rows + own).astype(np.int32))
            )
            device.work(learn_s)
            stale += out.staleness[version >= 0].tolist() if step >= STEPS // 4 else []
    took, busy_s = clock.now - began, device.busy_s - busy_s
    return took / (STEPS - STEPS // 4), 1 - busy_s / took, float(np.mean(stale))


def gains(waits: list[list[float]], *, said: float, rows: int, costs: Costs) -> list[list[float]]:
    """[seconds of a step, gain, idle share, mean staleness] of each staleness.

    An update takes half as long as a rollout of worlds that reply at once.
    """
    setting = dict(said=said, rows=rows, costs=costs)
    calm = [[0.0] * len(times) for times in waits]
    learn_s = schedule(episodes_of(calm), staleness=0, **setting)[0] / 2
    found = []
    for staleness in STALENESS:
        more = dict(staleness=staleness, learn_s=learn_s)
        took, idle, stale = schedule(episodes_of(waits), **setting, **more)
        found.append([took, (found[0][0] if found else took) / took, idle, stale])
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
        [name, staleness, f'{took:.2f}', f'{gain:.2f}', f'{100 * idle:.0f}', f'{stale:.1f}']
        for name, cells in found.items()
        for staleness, (took, gain, idle, stale) in zip(STALENESS, cells, strict=True)
    ]
    names = ['a token', 'staleness', 's a step', 'gain', 'idle %', 'stale']
    return common.table(title, names, lines)


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
