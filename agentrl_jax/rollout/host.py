"""collect: batched multi-turn episodes against worlds on hosts.

The device holds rows of tokens (programs.py); the host holds the episodes (host_rollout.py) and
a world in a thread for each row (keepers.py), asks again where one fails (world_calls.py) and keeps
what they say (replies.py).

The clock decides when something happens, never what: chunks begin where an observation begins and
have one width, and a token depends on parameters, key, episode and position only. Latencies,
retries and the order of replies change no bit. A timeout is the one exception, and is logged.
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
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.host_rollout import HostRollout
from agentrl_jax.rollout.partial import PartialRollout
from agentrl_jax.rollout.programs import Ends, Programs, build_programs
from agentrl_jax.rollout.replies import LogOfSteps, ReplyLog
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.rollout.world_calls import RetryPolicy, WorldCalls
from agentrl_jax.text import stops
from agentrl_jax.text.conversation import Conversation, HostTask
from agentrl_jax.types import Params, Rollout


def on_local_mesh(params: Params, mesh: jax.sharding.Mesh, local: jax.sharding.Mesh) -> Params:
    """Parameters that no row axis splits, as arrays of the local part of the mesh; no copies."""
    if local is mesh:
        return params

    def one(x):
        layout = NamedSharding(local, x.sharding.spec)
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, layout, parts)

    return jax.tree.map(one, params)


def local_rows(x: Any) -> tuple[np.ndarray, list[int]]:
    """(an array [E] of which only this process's rows are filled, those rows)."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x), list(range(len(x)))
    found, rows = np.zeros(x.shape, x.dtype), set()
    for shard in x.addressable_shards:
        found[shard.index] = shard.data
        rows.update(range(*shard.index[0].indices(len(x))))
    return found, sorted(rows)


def never() -> bool:
    return False


@dataclasses.dataclass(eq=False)
class Worlds:
    """The worlds of a run, which its rollouts of all kinds share, and the log of what they say."""

    pool: Any
    conversation: Conversation
    log: Any = dataclasses.field(default_factory=ReplyLog)
    rollout: HostRollout | None = None  # that is being played, for those who watch
    asked: Callable[[], bool] = never  # whether the run should stop
    plan: Callable[[int, int], versions.Plan] | None = None  # of the first step and its episodes:
    # which weights sample what, for episodes in flight
    ahead: PartialRollout | None = None  # episodes in flight, with worlds of their own
    version_log: Path | None = None  # the log of the weights that sampled their turns
    restarted: int = 0  # episodes that were in flight when the run was ended, and begin again

    @contextlib.contextmanager
    def watched(self, playing: HostRollout) -> Iterator[None]:
        """A context in which a live line may look at the rollout."""
        self.rollout = playing
        try:
            yield
        finally:
            self.rollout = None

    def close(self) -> None:
        """Closes the worlds; what is in flight is over."""
        self.pool.close()
        if self.ahead is not None:
            self.ahead.calls.pool.close()
        self.ahead = None


@dataclasses.dataclass(eq=False)
class HostCollect:
    """collect(params, task, episodes, key) -> (Rollout, counters) against a pool of worlds.

    As device.collect_on_mesh, but that worlds answer from hosts: parameters are those of the whole
    mesh (sharding.rollout_rules), and each process plays its own rows on its own devices.
    """

    mesh: jax.sharding.Mesh
    local: jax.sharding.Mesh  # the part of the mesh that this process has
    worlds: Worlds
    _: dataclasses.KW_ONLY
    settings: RolloutSettings  # slots: rows of the whole mesh
    strings: stops.StopTable
    read_tokens: int  # of a chunk of an observation
    policy: RetryPolicy
    poll: int = 8
    prepare: Callable[[Params], Params] = lambda params: params  # from those trained to the actor's
    reward: tuple[str, Callable] | None = None  # the name of a function of an episode, and itself,
    # whose rewards take the place of the worlds'

    def __post_init__(self):
        slots = self.settings.slots
        if slots % self.shards:
            raise ValueError(f'rollout.slots={slots} must be a multiple of {self.shards} shards')
        self.strings = jax.device_put(self.strings, NamedSharding(self.local, P()))

    @property
    def shards(self) -> int:
        return self.mesh.shape['data'] * self.mesh.shape['fsdp']

    def programs(self, task: HostTask) -> Programs:
        settings = self.settings
        longest = task.env.context or settings.max_tokens
        return build_programs(
            self.local,
            dataclasses.replace(settings, slots=settings.slots // self.shards),
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
        """The same of one step of a run, while episodes of the next ones are played (partial.py).

        draw(step): its episodes, whose streams follow those of the step before; key: one for the
        run; last: the last step of the run.
        """
        worlds, params = self.worlds, self.actor(params)

        def drawn(of):
            episodes = draw(of)
            return local_rows(episodes.level)[0], local_rows(episodes.token_stream)[0]

        if worlds.ahead is None:
            episodes = len(drawn(step)[0])
            worlds.ahead = self.begin(
                PartialRollout,
                params,
                task,
                *np.zeros((2, (staleness + 1) * episodes), np.int32),
                key,
                pool=worlds.pool.another(),
                log=LogOfSteps(worlds.log, episodes),
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
        """Those that play, of those that train."""
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
        """A rollout that is about to be played; level, stream: int32 [E] of its episodes."""
        task = jax.tree.map(lambda x: np.asarray(x), task)
        calls = WorldCalls(pool, self.policy, log=log, say=say, asked=self.worlds.asked)
        ends = Ends(task.eos_ids, self.strings, task.grammar, task.answer)
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
        """(the rollout over the mesh, counters) of what was played; events: of its rows."""
        if self.reward is not None:
            name, function = self.reward
            rewards.replace(out, events, playing.items, function, name=name)
        layout = NamedSharding(self.mesh, P(('data', 'fsdp')))

        def whole(x):
            return jax.make_array_from_callback(x.shape, layout, lambda index: x[index])

        sampled = out.action_mask
        nonfinite = sampled & ~np.isfinite(out.logprobs)
        illegal = out.no_legal_token
        counted = {'generated': sampled, 'nonfinite': nonfinite, 'no_legal_token': illegal}
        return jax.tree.map(whole, out), counters_of(playing) | {
            name: whole(x.sum(1, dtype=np.int32)) for name, x in counted.items()
        }


def counters_of(played: HostRollout) -> dict[str, np.ndarray]:
    """Counters as of a rollout on the device, and what hosts add; those are of this process."""
    counted, steps = played.counted, played.counted['steps']
    slots = steps * len(played.slots)
    found = {
        'decodes': steps,
        'serves': counted['reads'],
        'overflow': 0,
        'hosts/reply_s': counted['reply_s'] / max(counted['replies'], 1),
        'hosts/idle_slots': 1 - counted['generated'] / slots if slots else 0.0,
    }
    plain = ('waited_s', 'slowest_s', 'retries', 'timeouts', 'faults', 'cut')
    found |= {f'hosts/{name}': counted[name] for name in plain}
    return {name: np.asarray([x]) for name, x in found.items()}


def say(sentence: str) -> None:
    print(shown(sentence), file=sys.stderr, flush=True)
