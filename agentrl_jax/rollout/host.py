"""collect: batched multi-turn episodes with environments on hosts.

The device holds rows of tokens (programs.py). The host holds the episodes (host_rollout.py) and one
environment thread per row (keepers.py), retries failed requests (world_calls.py) and logs all
replies (replies.py).

Timing decides when something happens, never what: chunks start with an observation and have a fixed
width, and a token depends only on parameters, key, episode and position. Latencies, retries and the
order of replies do not change a bit. Timeouts are the only exception, and they are logged.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.envs.hosts.world import shown
from agentrl_jax.rollout import rewards, versions
from agentrl_jax.rollout.host_rollout import HostRollout
from agentrl_jax.rollout.partial import PartialRollout
from agentrl_jax.rollout.programs import Programs, StopRules, build_programs
from agentrl_jax.rollout.replies import PerStepLog, ReplyLog
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.rollout.world_calls import RetryPolicy, WorldCalls
from agentrl_jax.text import stops
from agentrl_jax.text.conversation import Conversation, HostTask
from agentrl_jax.types import Episodes, Params, Rollout


def on_local_mesh(params: Params, mesh: jax.sharding.Mesh, local: jax.sharding.Mesh) -> Params:
    """Return parameters on the local mesh without copies; no row axis may split them."""
    if local is mesh:
        return params

    def one(x):
        layout = NamedSharding(local, x.sharding.spec)
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, layout, parts)

    return jax.tree.map(one, params)


def local_rows(x: Any) -> tuple[np.ndarray, list[int]]:
    """Return (an array [E] filled only in this process's rows, the numbers of these rows)."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x), list(range(len(x)))
    rows_of_process, rows = np.zeros(x.shape, x.dtype), set()
    for shard in x.addressable_shards:
        rows_of_process[shard.index] = shard.data
        rows.update(range(*shard.index[0].indices(len(x))))
    return rows_of_process, sorted(rows)


def never() -> bool:
    return False


@dataclasses.dataclass(eq=False)
class Worlds:
    """The environments of a run, shared by all of its rollouts, and the log of their replies."""

    pool: Any
    conversation: Conversation
    log: Any = dataclasses.field(default_factory=ReplyLog)
    rollout: HostRollout | None = None  # the one in progress, for status lines
    asked: Callable[[], bool] = never  # whether the run should stop
    plan: Callable[[int, int], versions.Plan] | None = None  # (first step, episodes per step) ->
    # the recorded weights of each turn, to replay episodes in flight
    ahead: PartialRollout | None = None  # episodes in flight, in separate environments
    version_log: Path | None = None  # logs which weights sampled each turn of `ahead`
    restarted: int = 0  # episodes in flight when the run stopped, which start over

    @contextlib.contextmanager
    def watched(self, playing: HostRollout) -> Iterator[None]:
        """Expose the rollout to status lines within a context."""
        self.rollout = playing
        try:
            yield
        finally:
            self.rollout = None

    def close(self) -> None:
        """Close the environments and discard the episodes in flight."""
        self.pool.close()
        if self.ahead is not None:
            self.ahead.calls.pool.close()
        self.ahead = None


@dataclasses.dataclass(eq=False)
class HostCollect:
    """collect(params, task, episodes, key) -> (Rollout, counters) with a pool of environments.

    The host version of device.collect_on_mesh. Parameters are distributed over the full mesh
    (sharding.rollout_rules), and each process plays its own rows on its own devices.
    """

    mesh: jax.sharding.Mesh
    local: jax.sharding.Mesh  # this process's part of the mesh
    worlds: Worlds
    _: dataclasses.KW_ONLY
    settings: RolloutSettings  # slots: rows of the full mesh
    strings: stops.StopTable
    read_tokens: int  # tokens per chunk of an observation
    policy: RetryPolicy
    poll: int = 8
    prepare: Callable[[Params], Params] = lambda params: params  # trained -> actor parameters
    reward: rewards.CustomReward | None = None  # replaces the rewards of the environments

    def __post_init__(self):
        self.strings = jax.device_put(self.strings, NamedSharding(self.local, P()))

    def programs(self, task: HostTask) -> Programs:
        settings = self.settings
        longest = task.env.context or settings.max_tokens
        return build_programs(
            self.local,
            settings.of_shard(self.mesh),
            width=self.read_tokens,
            cache_tokens=settings.context(task).cache_tokens(longest),
        )

    def __call__(
        self, params: Params, task: HostTask, episodes: Episodes, key: jax.Array
    ) -> tuple[Rollout, dict[str, np.ndarray]]:
        level, rows = local_rows(episodes.level)
        stream = local_rows(episodes.token_stream)[0]
        params = self.actor(params)
        log = self.worlds.log
        pool = self.worlds.pool.of_rollout(log.about)
        playing = self.begin(HostRollout, params, task, level, stream, key, pool=pool, log=log)
        with self.worlds.watched(playing):
            playing.play_until_healthy(rows)
        return self.given(playing, playing.out, playing.events)

    def collect_ahead(
        self,
        params: Params,
        task: HostTask,
        draw: Callable[[int], Episodes],
        key: jax.Array,
        *,
        step: int,
        last: int,
        staleness: int,
    ) -> tuple[Rollout, dict[str, np.ndarray]]:
        """Collect one step of a run while episodes of the next steps are in flight (partial.py).

        draw(step): the episodes of a step, with consecutive streams across steps. key: the same in
        all steps. last: the last step of the run.
        """
        worlds, params = self.worlds, self.actor(params)

        def drawn(of):
            episodes = draw(of)
            level, rows = local_rows(episodes.level)
            return level, local_rows(episodes.token_stream)[0], rows

        if worlds.ahead is None:
            episodes = len(drawn(step)[0])
            worlds.ahead = self.begin(
                PartialRollout,
                params,
                task,
                *np.zeros((2, (staleness + 1) * episodes), np.int32),
                key,
                pool=worlds.pool.another(),
                log=PerStepLog(worlds.log, episodes),
                staleness=staleness,
                first=step,
                plan=worlds.plan and worlds.plan(step, episodes),
            )
        playing = worlds.ahead
        if playing.plan:
            last = playing.plan.last_of(step, last)
        with worlds.watched(playing):
            out, version = playing.collect(params, step, last, drawn)
        if worlds.version_log:
            versions.write(worlds.version_log, step, version)
        rollout, counters = self.given(playing, out, playing.events_of(step))
        restarted, worlds.restarted = worlds.restarted, 0
        return rollout, counters | {'restarted': np.asarray([restarted])}

    def actor(self, params: Params) -> Params:
        """Return the actor's parameters on the local mesh, from the trained ones."""
        return on_local_mesh(self.prepare(params), self.mesh, self.local)

    def begin(
        self,
        kind: type[HostRollout],
        params: Params,
        task: HostTask,
        level: np.ndarray,
        stream: np.ndarray,
        key: jax.Array,
        *,
        pool: Any,
        log: Any,
        **more: Any,
    ) -> HostRollout:
        """Create a rollout without playing it. level, stream: int32 [E] of its episodes."""
        task = jax.tree.map(lambda x: np.asarray(x), task)
        calls = WorldCalls(pool, self.policy, log=log, say=say, asked=self.worlds.asked)
        ends = StopRules(task.eos_ids, self.strings, task.grammar, task.answer)
        return kind(
            self.programs(task),
            self.worlds.conversation,
            calls,
            params=params,
            key=key,
            task=task,
            ends=jax.device_put(ends, NamedSharding(self.local, P())),
            level=level,
            stream=stream,
            poll=self.poll,
            remember=self.reward is not None,
            **more,
        )

    def given(
        self, playing: HostRollout, out: Rollout, events: dict[int, list]
    ) -> tuple[Rollout, dict[str, np.ndarray]]:
        """Return (the rollout on the mesh, counters). events: by row of the rollout."""
        if self.reward is not None:
            rewards.replace(out, events, playing.items, self.reward)
        layout = NamedSharding(self.mesh, P(('data', 'fsdp')))

        def global_array(x):
            return jax.make_array_from_callback(x.shape, layout, lambda index: x[index])

        sampled = out.action_mask
        nonfinite = sampled & ~np.isfinite(out.logprobs)
        illegal = out.no_legal_token
        counted = {'generated': sampled, 'nonfinite': nonfinite, 'no_legal_token': illegal}
        return jax.tree.map(global_array, out), counters_of(playing) | {
            name: global_array(x.sum(1, dtype=np.int32)) for name, x in counted.items()
        }


def counters_of(played: HostRollout) -> dict[str, np.ndarray]:
    """Return the counters of a device rollout plus hosts/ counters, for this process."""
    counted, steps = played.counted, played.counted['steps']
    slots = steps * len(played.slots)
    counters = {
        'decodes': steps,
        'serves': counted['reads'],
        'overflow': 0,
        'hosts/reply_s': counted['reply_s'] / max(counted['replies'], 1),
        'hosts/idle_slots': 1 - counted['generated'] / slots if slots else 0.0,
    }
    plain = ('waited_s', 'slowest_s', 'retries', 'timeouts', 'faults', 'cut')
    counters |= {f'hosts/{name}': counted[name] for name in plain}
    return {name: np.asarray([x]) for name, x in counters.items()}


def say(sentence: str) -> None:
    print(shown(sentence), file=sys.stderr, flush=True)
