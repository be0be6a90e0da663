"""Rollouts against worlds on hosts: what the host costs, and what worlds that are slow cost.

  python -m benchmarks.hosts [--json=PATH]

1. FrozenLake in threads of the host beside the same lake on the device: the same parameters, maps,
   tokens and turns, in CPU-seconds of the process that take turns. Host threads are what the
   process spends beyond the thread that drives the device.
2. Worlds that answer late, on a device that does nothing but take time: host_schedule.py.
"""

import dataclasses
import functools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs import FrozenLake
from agentrl_jax.envs.frozen_lake.levels import FROZEN, GOAL, HOLE, START
from agentrl_jax.envs.hosts.base import HostEnvironment, Items
from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.machine import sharding
from agentrl_jax.rollout import device, host
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.keepers import Pool, PoolKeeper
from agentrl_jax.rollout.rows import Player
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.run.parts import BUNDLED_TOKENIZER
from agentrl_jax.text.answer import parse_answer
from agentrl_jax.text.conversation import Conversation, build_host_task
from agentrl_jax.text.stops import build_stop_table
from agentrl_jax.text.task import build_task
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.tokens.load import load_tokenizer
from benchmarks import common, host_schedule

LEVELS, BUDGET = 64, 99
SIGNS = {FROZEN: '_', START: '_', HOLE: 'O', GOAL: 'G'}
MOVES = (0, -1), (1, 0), (0, 1), (-1, 0)  # left, down, right, up


class Lake:
    """FrozenLake without slips, as a world of a few lines; worded as on the device (brief)."""

    deterministic, instruction = True, ''

    def __init__(self, boards: np.ndarray, names: tuple[str, ...], per_turn: int):
        self.boards, self.names, self.per_turn = boards, names, per_turn

    def reset(self, item: int) -> str:
        self.board, self.used = self.boards[item], 0
        self.row, self.column = map(int, np.argwhere(self.board == START)[0])
        return self.text(warn=False)

    def text(self, *, warn: bool) -> str:
        signs = [[SIGNS[cell] for cell in row] for row in self.board.tolist()]
        here = {'_': 'P', 'O': 'X', 'G': '√'}
        signs[self.row][self.column] = here[signs[self.row][self.column]]
        grid = ''.join(''.join(row) + '\n' for row in signs)
        return f'{grid}{"Invalid." * warn}{chr(10) * warn}{BUDGET - self.used} left\n'

    def step(self, action: str) -> Reply:
        said = action.removeprefix('<think>').encode()
        matched, parts = parse_answer(
            said, list(self.names), max_actions=self.per_turn, opening='<think>'
        )
        chosen = [part for part in parts if part >= 0] if matched else []
        done = solved = False
        for part in chosen:
            if done:
                break
            self.row = min(max(self.row + MOVES[part][0], 0), len(self.board) - 1)
            self.column = min(max(self.column + MOVES[part][1], 0), len(self.board) - 1)
            self.used += 1
            solved = self.board[self.row, self.column] == GOAL
            done = solved or self.board[self.row, self.column] == HOLE
        return Reply(self.text(warn=not chosen), float(solved), bool(done), bool(solved))

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Environment(HostEnvironment):
    """What a task must know of either."""

    system: str = 'frozen_lake\n'
    name = 'hosts'


class ThreadTimes:
    """CPU-seconds of the threads of worlds, added up when each ends."""

    def __init__(self):
        self.total, self.lock = 0.0, threading.Lock()

    def pool(self, make: Any, read: Any) -> Pool:
        times = self

        class Timed(PoolKeeper):
            def run(self):
                super().run()
                with times.lock:
                    times.total += time.thread_time()

        class TimedPool(Pool):
            keeper = Timed

        return TimedPool(make, read)


def conversation(tokenizer: Any, prefix: str, longest: int) -> Conversation:
    return Conversation(build_chat(tokenizer), prefix, longest)


def collector(
    worlds: host.Worlds, tokenizer: Any, *, config: Any, read_tokens: int, **sizes: int
) -> host.HostCollect:
    strings = build_stop_table(tokenizer.token_bytes(), ())
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    return host.HostCollect(
        mesh,
        sharding.local_mesh(mesh),
        worlds,
        settings=RolloutSettings(Player(config), **sizes),
        strings=strings,
        read_tokens=read_tokens,
        policy=host.RetryPolicy(),
    )


def listed(episodes: int) -> Episodes:
    stream = np.arange(episodes, dtype=np.int32)
    return Episodes(level=stream % LEVELS, token_stream=stream, world_stream=stream)


def zero_latency(
    *, episodes: int, slots: int, turns: int, new: int, repeats: int, **shape: int
) -> dict[str, Any]:
    """Part 1."""
    tokenizer, env = load_tokenizer(BUNDLED_TOKENIZER), FrozenLake(success_rate=1.0)
    vocab = -(-tokenizer.vocab_size // 64) * 64
    config = common.model_config(vocab, **shape)
    params = common.init_params(config)
    lake = env.make_params('train', num_levels=LEVELS)
    task = build_task(
        env, lake, tokenizer, style='brief', max_turns=turns, max_actions_per_episode=BUDGET
    )
    length = task.prefix.shape[0] + turns * (task.width + new)
    shared = dict(config=config, slots=slots, serve_rows=8, max_tokens=length, max_response=new)
    spoken, times = conversation(tokenizer, '<think>', task.width), ThreadTimes()
    items = Items(np.arange(LEVELS, dtype=np.int32))
    on_host = build_host_task(Environment(), items, spoken, max_turns=turns)
    per_turn, boards = task.max_actions_per_turn, np.asarray(lake.boards)

    def make():
        return Lake(boards, env.ACTION_NAMES, per_turn)

    worlds = host.Worlds(times.pool(make, spoken.prompt), spoken)
    collect = collector(worlds, tokenizer, read_tokens=task.width, **shared)
    sizes = {name: size for name, size in shared.items() if name != 'config'}
    settings = RolloutSettings(Player(config), **sizes)
    program = jax.jit(functools.partial(device.collect, settings=settings))
    key, episodes_ = jax.random.key(0), listed(episodes)
    on_device = jax.tree.map(jnp.asarray, episodes_)
    calls = {
        'device': lambda: program(params, task, on_device, key),
        'host': lambda: collect(params, on_host, episodes_, key),
    }
    spent = common.alternate(calls, repeats)
    common.note(f'no latency: {spent}')
    (one, of_device), (two, of_host) = (jax.device_get(calls[name]()) for name in calls)
    worlds.pool.close()
    played = int(two.num_turns.sum())
    return common.compare(spent, 'device', 'host') | {
        'turns': played,
        'same_tokens': float((one.tokens == two.tokens).all(1).mean()),
        'logprob_gap': float(np.abs(one.logprobs - two.logprobs)[one.tokens == two.tokens].max()),
        'decodes': [int(of_device['decodes']), int(of_host['decodes'][0])],
        'reads': [int(of_device['serves']), int(of_host['serves'][0])],
        'world_ms_a_turn': 1000 * times.total / (played * (repeats + 2)),
    }


def show(result: dict[str, Any]) -> str:
    one, two = result['zero_latency'], result['slow_worlds']
    first = common.table(
        f'FrozenLake, {one["turns"]:,} turns; {100 * one["same_tokens"]:.0f} % of the episodes the '
        'same token for token',
        ['worlds', 'seconds', 'x the device', 'decodes', 'reads'],
        [
            ['device', one['ours_s'], 1.0, one['decodes'][0], one['reads'][0]],
            ['host', one['other_s'], one['times_as_fast'], one['decodes'][1], one['reads'][1]],
        ],
    )
    goals = [
        ['host / device, CPU-seconds', one['times_as_fast'], '<= 1.15'],
        ['ms of CPU of threads a turn', one['world_ms_a_turn'], '<= 0.5'],
        ['host / ideal, slow worlds', two['of_ideal'], '<= 1.3'],
        ['barrier / host, slow worlds', two['barrier_of_ours'], '>= 3'],
    ]
    second = common.table('goals', ['what', 'measured', 'goal'], goals)
    return '\n\n'.join([first, host_schedule.show(two), second])


def main() -> None:
    args = common.parse_arguments(
        __doc__.splitlines()[0], episodes=128, slots=64, turns=5, new=32, repeats=3
    )
    common.pin(args.core)
    sizes = dict(episodes=args.episodes, slots=args.slots)
    costs = host_schedule.Costs(step_s=0.002, read_s=0.004, call_s=0.001)
    result = {
        'slow_worlds': host_schedule.run(**sizes, costs=costs),
        'zero_latency': zero_latency(**sizes, turns=args.turns, new=args.new, repeats=args.repeats),
    }
    print(show(result))
    common.emit('hosts', result, args.json)


if __name__ == '__main__':
    main()
