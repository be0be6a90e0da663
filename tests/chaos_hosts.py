"""Worlds behind networks and servers that fail: what of it reaches a rollout, and what training.

  make chaos-hosts [ARGS="--episodes=512 --seed=0"]

Two servers of worlds whose every reply depends on all that was said, each behind a TCP proxy
(chaos_proxy.py) that does all of its troubles to a share of the calls; one of the servers is killed
and started again while the other one is stopped for longer than anybody waits, again and again. All
is played with and without these, and compared bit for bit:
1. Rollouts of the same parameters, in which a step may fail three times: episodes are lost, the
   others are the same, and an update does not depend on what stands in those that were lost.
2. A training run in which worlds may fail as often as they do: nothing is lost, every array is the
   same.
3. Episodes of search, of the shop and of MiniWoB++'s pages that their players act, in which nothing
   is lost: each reply is that of a world in this process. Pages need Chromium.
In the end no process, thread, descriptor, browser or world of a server may be left.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
from unittest import mock

import chaos_proxy
import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import psutil
import quick_xla

from agentrl_jax import train
from agentrl_jax.envs.hosts import agentgym, served
from agentrl_jax.envs.hosts.connection import Connection
from agentrl_jax.envs.hosts.launch import Launched
from agentrl_jax.envs.hosts.players import Player
from agentrl_jax.envs.hosts.search.world import SearchEnvironment
from agentrl_jax.envs.hosts.served import Served
from agentrl_jax.envs.hosts.web import chromium, tabs
from agentrl_jax.envs.hosts.web.miniwob import MiniWoBEnvironment
from agentrl_jax.envs.hosts.webshop.world import ShopEnvironment
from agentrl_jax.envs.hosts.world import Reply, WorldError
from agentrl_jax.records import run_log
from agentrl_jax.rollout.keepers import Pool, Request
from agentrl_jax.run import streams
from benchmarks import step

CALL_S = 1.0  # a call may take: a server that is stopped for longer has hung
HUNG_S = 2.5  # that it is stopped
SHARE = 0.05  # of the calls that are troubled
LEASE_S = 30.0  # after which worlds are closed that nobody calls
WORLD = 'echo_world:Echo'
QUIRKS = agentgym.Quirks(
    reader='whole', instruction='Say something.\n', accepted='', bounds=(-0.5, 0.5)
)

ACTED = (  # worlds whose players act, each small
    SearchEnvironment(questions=('drawn',), retries=False, rewards='mt_grpo', timeout_s=CALL_S),
    ShopEnvironment(prompt='short', stalls=64, products=3, timeout_s=CALL_S),
    MiniWoBEnvironment(
        prompt='short',
        tasks=('click-dialog-2', 'click-checkboxes', 'login-user'),
        timeout_s=10.0,
    ),
)
TURNS = 6  # of their episodes, at most


def config(sites: list['Site'], **changes):
    """The smallest run against the servers behind proxies."""
    hosts = {
        'env.name': 'agentgym',
        'agentgym.env': 'echo',
        'agentgym.urls': tuple(site.proxy.url for site in sites),
        'agentgym.num_items': 1000,
        'agentgym.timeout_s': CALL_S,
        'env.max_turns': 4,
        'hosts.max_observation': 40,
        'hosts.read_tokens': 16,
        'hosts.timeout_s': 30.0,
        'hosts.min_healthy': 0.0,
        'rollout.max_tokens': 256,
        'rollout.serve_rows': 8,
        'algorithm': 'grpo',
        'eval.every': 0,
        'log.rollouts_every': 0,
    }
    return micro_runs.config('frozen_lake', **(hosts | changes))


class Troubling(chaos_proxy.Proxy):
    """Troubles a share of the calls while it is told to; all kinds equally often, in any order."""

    share = 0.0

    def __init__(self, port: int, seed: int):
        super().__init__(port, seed=seed)
        self.deck: list[str] = []

    def draw(self) -> str:
        with self._lock:
            kind = ''
            if self.luck.random() < self.share:
                kinds = chaos_proxy.TROUBLES
                self.deck = self.deck or self.luck.sample(kinds, len(kinds))
                kind = self.deck.pop()
            self.done[kind] += 1
            return kind


class Site:
    """A server, and the proxy in front of it."""

    def __init__(self, seed: int, world: str = WORLD, settings: dict | None = None):
        self.serve = functools.partial(Launched, world, settings=settings, lease_s=LEASE_S)
        self.server = self.serve()
        self.proxy = Troubling(self.port, seed)

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(':')[2])

    def kill(self) -> None:
        """Its successor is at another port, which the proxy learns when it is there."""
        self.server.process.kill()
        self.server.close()
        self.server = self.serve()
        self.proxy.port = self.port

    @contextlib.contextmanager
    def hung(self, seconds: float):
        """Stopped for as long as what is done inside takes, and at least for some seconds."""
        until = time.monotonic() + seconds
        self.server.process.send_signal(signal.SIGSTOP)
        yield
        time.sleep(max(until - time.monotonic(), 0))
        self.server.process.send_signal(signal.SIGCONT)

    def worlds(self) -> int:
        with contextlib.closing(Connection(self.server.url, timeout_s=20, most_bytes=2**20)) as at:
            return at.get('health')['worlds']

    def close_left(self, urls: list[str]) -> None:
        """Closes worlds whose close got lost, as the next one that is opened here would."""
        with contextlib.closing(Connection(self.proxy.url, timeout_s=20, most_bytes=2**20)) as at:
            for body, _ in served.shared(tuple(urls)).take_left(self.proxy.url):
                with contextlib.suppress(WorldError):
                    at.post('close', body)

    def close(self) -> None:
        self.proxy.close()
        self.server.close()


class Chaos:
    """As a context manager: from entering to leaving it the sites are in trouble."""

    def __init__(self, sites: list[Site], seed: int, pauses: tuple[float, float] = (1, 4)):
        """pauses: seconds between two blows, at least and at most."""
        self.sites, self.luck, self.pauses = sites, random.Random(seed), pauses
        self.blows: collections.Counter[str] = collections.Counter()
        self.ended = threading.Event()

    def __enter__(self) -> 'Chaos':
        for site in self.sites:
            site.proxy.share = SHARE
        self.ended.clear()
        self.thread = threading.Thread(target=self.strike)
        self.thread.start()
        return self

    def strike(self) -> None:
        """The first blow falls at once, so that no rollout has none."""
        while True:
            with self.sites[1].hung(HUNG_S):
                self.sites[0].kill()
            self.blows.update(('hung', 'killed'))
            if self.ended.wait(self.luck.uniform(*self.pauses)):
                return

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        for site in self.sites:
            site.proxy.share = 0.0

    def troubles(self) -> dict[str, int]:
        done = sum((site.proxy.done for site in self.sites), self.blows.copy())
        return {kind: done[kind] for kind in sorted(done) if kind}


@contextlib.contextmanager
def nothing_left(patience_s: float = 60.0, theirs: bool = True):
    """Of what begins inside, no process, thread or descriptor is there afterwards.

    theirs: processes that those of this one have started count as well.
    """
    me = psutil.Process()

    def held() -> tuple:
        return threading.active_count(), me.num_fds(), len(me.children(recursive=theirs))

    before = 0, 0, 0
    while before != (before := held()):
        time.sleep(0.3)  # connections of what was before are still being closed
    yield
    deadline = time.monotonic() + patience_s
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() == before, f'(threads, descriptors, processes): {held()} after {before}'


@contextlib.contextmanager
def browsers_end(patience_s: float = 60.0):
    """Of the browsers that begin inside, here and on servers, none is left: each takes its profile,
    which is in a folder of theirs, along."""
    with tempfile.TemporaryDirectory(prefix='profiles_') as folder:
        with (
            mock.patch.dict(os.environ, TMPDIR=folder),
            mock.patch.object(tempfile, 'tempdir', folder),
            mock.patch.object(tabs, 'SHARED', chromium.Shared(0.0)),
        ):
            yield
        deadline = time.monotonic() + patience_s
        while (left := os.listdir(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f'browsers: {left}'


def arrays(rollout) -> dict[str, np.ndarray]:
    fields = {name: getattr(rollout, name) for name in rollout.__dataclass_fields__}
    return {name: np.asarray(x) for name, x in fields.items() if x is not None and name != 'extra'}


def spoilt(rollout):
    """The lost episodes hold other tokens, rewards and log-probabilities."""
    lost = np.asarray(~rollout.healthy)

    def put(x, value):
        spoiled = np.where(lost.reshape(-1, *[1] * (x.ndim - 1)), value, np.asarray(x))
        return jax.device_put(spoiled.astype(x.dtype), x.sharding)

    return rollout.replace(
        tokens=put(rollout.tokens, 7),
        rewards=put(rollout.rewards, 1e6),
        logprobs=put(rollout.logprobs, -3.0),
        success=put(rollout.success, True),
    )


class Rollouts:
    """Rollouts of one policy, calm and disturbed."""

    def __init__(self, sites: list[Site], groups: int, **changes):
        shape = {'rollout.num_groups': groups, 'rollout.slots': min(4 * groups, 32)}
        self.session = step.open_session(config(sites, **({'hosts.tries': 4} | shape | changes)))
        self.lost = self.episodes = 0
        self.counted: collections.Counter[str] = collections.Counter()

    def play(self, number: int):
        run, draws = self.session.run, self.session.streams
        drawn = run.training.draw(draws.key(streams.LEVELS), number, 0)
        rollout, (counters,) = run.training.collect(
            self.session.policy, run.training.tasks, drawn, draws.key(streams.COLLECT, number)
        )
        for worlds in run.worlds.values():
            worlds.pool.close()
        return rollout, counters

    def update(self, rollout):
        """(state, metrics) behind an update with it."""
        self.session.rollout = rollout
        state, *rest = self.session.learn_arguments()
        # One program at a time: two with collectives may wait for each other's threads on CPUs
        ready = jax.block_until_ready((jax.tree.map(jnp.copy, state), *rest))
        state, measured, *_ = self.session.run.training.learn(*ready)
        return jax.device_get((state, measured))

    def compare(self, number: int, chaos: Chaos) -> None:
        calm, _ = self.play(number)
        with nothing_left():
            with chaos:
                rollout, counters = self.play(number)
        lost = np.asarray(~rollout.healthy)
        assert np.asarray(calm.healthy).all() and lost.sum() == counters['hosts/faults'].sum()
        for name, expected in arrays(calm).items():
            found = arrays(rollout)[name]
            np.testing.assert_array_equal(found[~lost], expected[~lost], err_msg=name)
        one, other = (self.update(jax.block_until_ready(x)) for x in (rollout, spoilt(rollout)))
        jax.tree.map(np.testing.assert_array_equal, one, other)
        assert one[1]['batch/trained_rows'] == (~lost).sum()
        self.lost += int(lost.sum())
        self.episodes += len(lost)
        self.counted['retries'] += int(counters['hosts/retries'].sum())


def train_both(
    sites: list[Site], folder: pathlib.Path, chaos: Chaos, groups: int, steps: int
) -> str:
    """Trains with and without chaos; a sentence about what was the same."""
    cfg = config(
        sites,
        **{
            'hosts.tries': 1000,
            'rollout.num_groups': groups,
            'rollout.slots': min(4 * groups, 32),
            'steps': steps,
        },
    )
    assert train.train(cfg, str(folder / 'calm')) == 0
    with nothing_left():
        with chaos:
            assert train.train(cfg, str(folder / 'disturbed')) == 0
    one, other = (micro_runs.saved_state(cfg, folder / name) for name in ('calm', 'disturbed'))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    rows = run_log.read_metrics(folder / 'disturbed' / 'metrics.jsonl')
    played = [row for row in rows if 'hosts/retries' in row]
    retries, lost = (sum(row[f'hosts/{name}'] for row in played) for name in ('retries', 'faults'))
    assert len(played) == steps and retries and not lost
    leaves = len(jax.tree.leaves(one))
    return f'{retries:g} retries, {lost:g} lost, {leaves} arrays have the same bits'


@dataclasses.dataclass(frozen=True)
class Acted:
    """An episode of a player in this process, which acts like its oracle or at random."""

    item: int
    actions: tuple[str, ...]
    replies: tuple[Reply, ...]  # to its beginning and to each action

    @classmethod
    def draw(cls, env: Served, player: Player, generator: np.random.Generator) -> 'Acted':
        item, actions = int(generator.choice(env.item_range('train'))), []
        replies = [Reply(player.reset(item))]
        while len(actions) < TURNS and not replies[-1].done:
            planned = player.best() if generator.random() < 0.7 else ''
            actions.append(planned or player.random(generator))
            replies.append(player.step(actions[-1]))
        return cls(item, tuple(actions), tuple(replies))


def act_again(env: Served, acted: list[Acted], chaos: Chaos) -> int:
    """Plays the episodes against disturbed sites, one world each; how often a step was repeated."""
    there = dataclasses.replace(env, urls=tuple(site.proxy.url for site in chaos.sites))
    pool, left, retries = Pool(there.make, lambda *shown: None), len(acted), 0
    with nothing_left(theirs=False), chaos:  # servers keep their browsers for a while
        for slot, each in enumerate(acted):
            pool.submit(Request(slot, slot, each.item))
        while left:
            response = pool.done.get(timeout=60)
            request, each = response.request, acted[response.request.slot]
            turn = len(request.actions)
            if response.fault:
                retries += 1
                pool.submit(dataclasses.replace(request, delay=0.1))
                continue
            assert response.reply == each.replies[turn], (response.reply, each.replies[turn])
            if turn == len(each.actions):
                left -= 1
                continue
            past = dict(actions=each.actions[: turn + 1], replies=each.replies[: turn + 1])
            pool.submit(dataclasses.replace(request, delay=0.0, **past))
        pool.close()
    return retries


def act(env: Served, episodes: int, seed: int) -> str:
    """Plays episodes of a world here, and then through chaos; a sentence about what happened."""
    generator = np.random.default_rng(seed)
    with browsers_end(), contextlib.closing(env.player()) as player:
        acted = [Acted.draw(env, player, generator) for _ in range(episodes)]
    solved = sum(bool(each.replies[-1].success) for each in acted)
    turns = sum(len(each.actions) for each in acted)
    sites_of_it = sites_in_order(seed, env.name, env.settings())
    with nothing_left(), browsers_end(), sites_of_it as sites:
        pauses = (10, 20) if env.name == 'miniwob' else (1, 4)  # Chromium has to start
        retries = act_again(env, acted, Chaos(sites, seed, pauses))
    assert solved and retries
    return (
        f'{env.name}: {episodes} episodes of {turns} turns, {solved} of them solved, {retries} '
        'retries; each reply is that of a world in this process'
    )


@contextlib.contextmanager
def sites_in_order(seed: int, world: str = WORLD, settings: dict | None = None):
    """Two sites; at their end all worlds of both have been closed."""
    sites = [Site(seed + i, world, settings) for i in range(2)]
    try:
        with mock.patch.dict(agentgym.ENVIRONMENTS, echo=QUIRKS):
            yield sites
        for site in sites:
            site.close_left([each.proxy.url for each in sites])
        deadline = time.monotonic() + 2 * LEASE_S
        while any(site.worlds() for site in sites) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(site.worlds() for site in sites), [site.worlds() for site in sites]
    finally:
        for site in sites:
            site.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--episodes', type=int, default=512, help='of disturbed rollouts; 0: none')
    parser.add_argument('--groups', type=int, default=32, help='of four episodes, in a rollout')
    parser.add_argument('--steps', type=int, default=4, help='of training; 0: none')
    parser.add_argument(
        '--acted', type=int, default=64, help='episodes of each that players act; 0: none'
    )
    names = ','.join(env.name for env in ACTED)
    parser.add_argument('--worlds', default=names, help='that players act')
    parser.add_argument('--seed', type=int, default=0, help='of troubles')
    given = parser.parse_args()
    if unknown := set(given.worlds.split(',')) - set(names.split(',')):
        parser.error(f'--worlds: {", ".join(sorted(unknown))} is none of {names}')
    jax.config.update('jax_platforms', 'cpu')
    os.environ['XLA_FLAGS'] = quick_xla.FLAGS
    os.environ['PYTHONPATH'] = f'{micro_runs.ROOT}{os.pathsep}{micro_runs.ROOT / "tests"}'
    for env in ACTED if given.acted else ():
        if env.name in given.worlds.split(','):
            print(act(env, given.acted, given.seed), flush=True)
    if given.episodes:
        echo(given.episodes, given.groups, given.steps, given.seed)
    print('0 processes, threads, descriptors and worlds left over')


def echo(episodes: int, groups: int, steps: int, seed: int) -> None:
    """Rollouts and training on worlds that say something else after each word."""
    with tempfile.TemporaryDirectory(prefix='chaos_hosts_') as folder:
        # Libraries open files and pipes once for all
        once = micro_runs.config('frozen_lake', steps=min(steps, 1))
        assert train.train(once, folder) == 0
        micro_runs.saved_state(once, pathlib.Path(folder))
    with (
        tempfile.TemporaryDirectory(prefix='chaos_hosts_') as folder,
        nothing_left(),
        sites_in_order(seed) as sites,
    ):
        chaos, rollouts = Chaos(sites, seed), Rollouts(sites, groups)
        for number in range(-(-episodes // (4 * groups))):
            began = time.monotonic()
            rollouts.compare(number, chaos)
            print(
                f'{rollouts.episodes} episodes, {rollouts.lost} lost to their worlds, '
                f'{rollouts.counted["retries"]} retries; the others have the same bits, and an '
                f'update knows nothing of the lost ones ({time.monotonic() - began:.0f} s)',
                flush=True,
            )
        if steps:
            trained = train_both(sites, pathlib.Path(folder), chaos, groups, steps)
            print(f'training: {4 * groups * steps} episodes, {trained}')
    print(', '.join(f'{kind} {count}' for kind, count in chaos.troubles().items()))


if __name__ == '__main__':
    main()
