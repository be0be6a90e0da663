"""Rollouts against worlds on hosts: what the host costs, and what worlds that are slow cost.

  python -m benchmarks.hosts [--json=PATH]

1. FrozenLake in threads of the host beside the same lake on the device: the same parameters, maps,
   tokens and turns, in CPU-seconds of the process that take turns. Host threads are what the
   process spends beyond the thread that drives the device.
2. Worlds that answer after a lognormal time (mean 200 ms, and 5 s once in a hundred), answers of a
   geometric length: as they are played, and with a barrier after every turn, as most trainers play
   them, in seconds of the wall clock. The ideal is the longest of three times that no schedule can
   undercut: all tokens sampled in full batches, the longest episode alone, and the mean row.
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
from agentrl_jax.envs.hosts.base import HostEnvironment, Items
from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.machine import sharding
from agentrl_jax.rollout import device, game, host
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.keepers import Keeper, Pool
from agentrl_jax.run.parts import BUNDLED_TOKENIZER
from agentrl_jax.text.answer import parse_answer
from agentrl_jax.text.conversation import Conversation, HostTask, build_host_task
from agentrl_jax.text.stops import build_stop_table
from agentrl_jax.text.task import build_task
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.tokens.tokenizer import load_tokenizer
from benchmarks import common

LEVELS, BUDGET = 64, 99
MOVES = (0, -1), (1, 0), (0, 1), (-1, 0)  # left, down, right, up
MEAN_S, SPREAD, STRAGGLER_S, STRAGGLERS = 0.2, 1.0, 5.0, 0.01
MEAN_ANSWER = 39  # tokens


class Lake:
    """FrozenLake without slips, as a world of a few lines; worded as on the device (brief)."""

    deterministic, instruction = True, ''

    def __init__(self, boards: np.ndarray, names: tuple[str, ...], per_turn: int):
        self.boards, self.names, self.per_turn = boards, names, per_turn

    def reset(self, item: int) -> str:
        self.board, self.used = self.boards[item], 0
        self.row, self.column = map(int, np.argwhere(self.board == 0)[0])
        return self.text(warn=False)

    def text(self, *, warn: bool) -> str:
        signs = [list('__OG'[cell] for cell in row) for row in self.board.tolist()]
        here = {'_': 'P', 'O': 'X', 'G': '√'}
        signs[self.row][self.column] = here[signs[self.row][self.column]]
        grid = ''.join(''.join(row) + '\n' for row in signs)
        return f'{grid}{"Invalid." * warn}{chr(10) * warn}{BUDGET - self.used} left\n'

    def step(self, action: str) -> Reply:
        said = action.removeprefix('<think>').encode()
        matched, parts = parse_answer(
            said, list(self.names), max_actions=self.per_turn, with_think=True
        )
        chosen = [part for part in parts if part >= 0] if matched else []
        done = solved = False
        for part in chosen:
            if done:
                break
            self.row = min(max(self.row + MOVES[part][0], 0), len(self.board) - 1)
            self.column = min(max(self.column + MOVES[part][1], 0), len(self.board) - 1)
            self.used += 1
            solved = self.board[self.row, self.column] == 3
            done = solved or self.board[self.row, self.column] == 2
        return Reply(self.text(warn=not chosen), float(solved), bool(done), bool(solved))

    def close(self) -> None:
        pass


class Talk:
    """A world that says a hundred words or so after a while; episodes of one to ten turns."""

    deterministic, instruction = True, ''
    words = ('up', 'down', 'left', 'right', 'a wall', 'the box', 'a target', 'you')

    def __init__(self, latency: bool, spent: list[float]):
        self.latency, self.spent = latency, spent

    def reply(self, observations: int) -> str:
        luck = np.random.default_rng([self.item, observations])
        if self.latency:
            wait = luck.lognormal(np.log(MEAN_S) - SPREAD**2 / 2, SPREAD)
            wait = STRAGGLER_S if luck.random() < STRAGGLERS else wait
            self.spent.append(wait)
            time.sleep(wait)
        return ' '.join(luck.choice(self.words, luck.integers(20, 60)))

    def reset(self, item: int) -> str:
        self.item, self.turn = item, 0
        self.turns = int(np.random.default_rng(item).integers(1, 11))
        return self.reply(0)

    def step(self, action: str) -> Reply:
        self.turn += 1
        return Reply(self.reply(self.turn), done=self.turn >= self.turns)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Environment(HostEnvironment):
    """What a task must know of either."""

    system: str = 'frozen_lake\n'
    name = 'hosts'


class Barrier(game.Game):
    """All rows sample until the last has answered, then all worlds step, then all are read."""

    def play(self, episodes: list[int]) -> None:
        self.episodes.extend(episodes)
        for seat in self.seats:
            self.begin(seat)
        while self.under_way:
            while self.under_way:
                self.hear()
            while any(self.ready):
                self.read()
            while self.live.any() or self.left.any():
                self.decode()


class ThreadTimes:
    """CPU-seconds of the threads of worlds, added up when each ends."""

    def __init__(self):
        self.total, self.lock = 0.0, threading.Lock()

    def pool(self, make: Any, read: Any) -> Pool:
        times = self

        class Timed(Keeper):
            def run(self):
                super().run()
                with times.lock:
                    times.total += time.thread_time()

        class TimedPool(Pool):
            keeper = Timed

        return TimedPool(make, read)


def conversation(tokenizer: Any, prefix: str, longest: int) -> Conversation:
    return Conversation(build_chat(tokenizer), prefix, longest)


def collector(worlds: host.Worlds, tokenizer: Any, **settings: Any) -> host.HostCollect:
    strings = build_stop_table(tokenizer.token_bytes(), ())
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    return host.HostCollect(
        mesh,
        sharding.local_mesh(mesh),
        worlds,
        strings=strings,
        patience=game.Patience(),
        **settings,
    )


def listed(episodes: int) -> Episodes:
    stream = np.arange(episodes, dtype=np.int32)
    return Episodes(level=stream % LEVELS, token_stream=stream, world_stream=stream)


def zero_latency(*, episodes: int, slots: int, turns: int, new: int, repeats: int) -> dict:
    """Part 1."""
    tokenizer, env = load_tokenizer(BUNDLED_TOKENIZER), FrozenLake()
    vocab = -(-tokenizer.vocab_size // 64) * 64
    config = common.model_config(vocab)
    params = common.init_params(config)
    lake = env.make_params('train', num_levels=LEVELS, success_rate=1.0)
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
    collect = collector(worlds, tokenizer, read_tokens=32, **shared)
    program = jax.jit(functools.partial(device.collect, **shared))
    key, episodes_ = jax.random.key(0), listed(episodes)
    on_device = jax.tree.map(jnp.asarray, episodes_)
    calls = {
        'device': lambda: program(params, task, on_device, key),
        'host': lambda: collect(params, on_host, episodes_, key),
    }
    spent = common.alternate(calls, repeats)
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


def slow_worlds(*, episodes: int, slots: int, new: int, barrier: bool) -> dict[str, Any]:
    """Part 2."""
    tokenizer = load_tokenizer(BUNDLED_TOKENIZER)
    vocab = -(-tokenizer.vocab_size // 64) * 64
    config = common.model_config(vocab)
    params, spoken = common.init_params(config), conversation(tokenizer, '', 128)
    items = Items(np.arange(LEVELS, dtype=np.int32))
    task: HostTask = build_host_task(Environment(), items, spoken, max_turns=10)
    ends = np.random.default_rng(0).choice(vocab, vocab // MEAN_ANSWER, replace=False)
    task = task.replace(eos_ids=ends.astype(np.int32))
    length = task.prefix.shape[0] + 10 * (task.width + new)
    results, outs = {}, {}
    for name, latency, schedule in (
        ('no latency', False, game.Game),
        ('hosts', True, game.Game),
        ('barrier', True, Barrier),
    ):
        if name == 'barrier' and not barrier:
            continue
        spent: list[float] = []
        pool = Pool(lambda latency=latency, spent=spent: Talk(latency, spent), spoken.prompt)
        collect = collector(
            host.Worlds(pool, spoken),
            tokenizer,
            config=config,
            slots=slots,
            serve_rows=8,
            read_tokens=32,
            max_tokens=length,
            max_response=new,
        )
        collect.game = schedule
        if name == 'no latency':  # compiles
            collect(params, task, listed(slots), jax.random.key(1))
        began, cpu = time.perf_counter(), time.process_time()
        out, counters = collect(params, task, listed(episodes), jax.random.key(0))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        pool.close()
        outs[name] = jax.device_get(out)
        results[name] = {
            'wall_s': wall,
            'cpu_s': cpu,
            'decodes': int(counters['decodes'][0]),
            'reads': int(counters['serves'][0]),
            'idle_slots': float(counters['hosts/idle_slots'][0]),
            'waited_s': float(counters['hosts/waited_s'][0]),
            'latency_s': sum(spent),
        }
    out = outs['hosts']
    results['ideal_s'] = ideal(results, out, slots)
    results['same'] = all(
        np.array_equal(getattr(out, name), getattr(other, name))
        for other in outs.values()
        for name in out.__dataclass_fields__
    )
    return results


def ideal(results: dict[str, Any], out: Any, slots: int) -> dict[str, float]:
    """Seconds that no schedule can undercut, from the costs of the run without latency."""
    calm, generated = results['no latency'], out.action_mask.sum(1)
    steps = calm['decodes'] + 2 * calm['reads']  # a block of 8 x 32 tokens is about two steps
    step_s = calm['wall_s'] / steps
    device_s = step_s * (generated.sum() / slots + 2 * calm['reads'])
    latency = [
        latencies_of(int(level), int(turns))
        for level, turns in zip(out.level, out.num_turns, strict=True)
    ]
    chains = np.array(latency) + step_s * generated
    return {
        'step_s': step_s,
        'device_s': device_s,
        'longest_episode_s': float(chains.max()),
        'mean_slot_s': float(chains.sum() / slots),
        'ideal_s': max(device_s, float(chains.max()), float(chains.sum() / slots)),
    }


def latencies_of(item: int, turns: int) -> float:
    """Seconds that the worlds of an episode took together."""
    spent: list[float] = []
    for observations in range(turns + 1):
        luck = np.random.default_rng([item, observations])
        wait = luck.lognormal(np.log(MEAN_S) - SPREAD**2 / 2, SPREAD)
        spent.append(STRAGGLER_S if luck.random() < STRAGGLERS else wait)
    return sum(spent)


def show(result: dict[str, Any]) -> str:
    one, two = result['zero_latency'], result['slow_worlds']
    first = common.table(
        f'FrozenLake, {one["turns"]:,} turns; {100 * one["same_tokens"]:.0f} % of them the same',
        ['worlds', 'seconds', 'x the device', 'decodes', 'reads'],
        [
            ['device', one['ours_s'], 1.0, one['decodes'][0], one['reads'][0]],
            ['host', one['other_s'], one['times_as_fast'], one['decodes'][1], one['reads'][1]],
        ],
    )
    names = ['wall_s', 'cpu_s', 'decodes', 'reads', 'idle_slots', 'waited_s']
    rows = [
        [name, *(x[n] for n in names)]
        for name, x in two.items()
        if name in ('no latency', 'hosts', 'barrier')
    ]
    second = common.table(f'slow worlds; the same bits: {two["same"]}', ['played', *names], rows)
    against = two['ideal_s']
    lines = [
        first,
        f'threads of worlds: {one["world_ms_a_turn"]:.2f} ms of CPU a turn',
        second,
        f'ideal {against["ideal_s"]:.1f} s (device {against["device_s"]:.1f}, longest episode '
        f'{against["longest_episode_s"]:.1f}, mean row {against["mean_slot_s"]:.1f}); hosts / '
        f'ideal {two["hosts"]["wall_s"] / against["ideal_s"]:.2f}',
    ]
    if 'barrier' in two:
        lines.append(f'barrier / hosts {two["barrier"]["wall_s"] / two["hosts"]["wall_s"]:.2f}')
    return '\n\n'.join(lines)


def main() -> None:
    args = common.parse_arguments(
        __doc__.splitlines()[0],
        episodes=128,
        slots=64,
        turns=5,
        new=32,
        longest=160,
        repeats=3,
        barrier=1,
    )
    common.pin(args.core)
    result = {
        'zero_latency': zero_latency(
            episodes=args.episodes,
            slots=args.slots,
            turns=args.turns,
            new=args.new,
            repeats=args.repeats,
        ),
        'slow_worlds': slow_worlds(
            episodes=args.episodes,
            slots=args.slots,
            new=args.longest,
            barrier=bool(args.barrier),
        ),
    }
    print(show(result))
    common.emit('hosts', result, args.json)


if __name__ == '__main__':
    main()
