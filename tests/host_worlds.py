"""Host environments for tests: small and exact; slow, faulty or silent on demand."""

import dataclasses
import functools
import hashlib
import http.server
import itertools
import json
import threading
import time

import jax
import numpy as np
import tiny_agents as tiny

from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.envs.hosts.world import Reply, WorldError
from agentrl_jax.machine import sharding
from agentrl_jax.rollout import host
from agentrl_jax.rollout.keepers import Pool
from agentrl_jax.rollout.replies import ReplyLog
from agentrl_jax.text.answer import parse_answer
from agentrl_jax.text.conversation import Conversation, build_host_task
from agentrl_jax.text.stops import build_stop_table
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import EpisodeStop


class Echo:
    """A world with replies of 3 to 40 words, hashed from the item and all text; 1 to 8 turns."""

    deterministic, instruction = True, ''

    def reset(self, item):
        self.said = [str(item)]
        return self.words()

    def step(self, action):
        self.said.append(action)
        digest = self.digest()
        done = len(self.said) > 1 + digest[0] % 8
        return Reply(
            self.words(),
            reward=digest[1] / 255 - 0.5,
            done=done,
            success=digest[2] > 127,
            figures=(float(len(self.said) - 1), digest[3] / 255),
        )

    def digest(self):
        return hashlib.sha256('\0'.join(self.said).encode()).digest()

    def words(self):
        digest = self.digest()
        return ' '.join(('up', 'down', 'left', 'a wall')[x % 4] for x in digest * 2)[
            : 9 + digest[3]
        ]

    def close(self):
        pass


class Troubled:
    """A world with connection faults, drawn from a seed and a clock."""

    def __init__(self, world, seed, *, latency=0.0, crash=0.0, hang=0.0, release=None):
        self.world, self.deterministic = world, world.deterministic
        self.instruction = world.instruction
        self.latency, self.crash, self.hang = latency, crash, hang
        self.release = release  # set at the end, to release hung threads
        self.rng = np.random.default_rng([seed, time.monotonic_ns() % 2**32])

    def trouble(self):
        if self.latency:
            time.sleep(self.rng.exponential(self.latency))
        if self.rng.random() < self.crash:
            raise WorldError('crashed on purpose')
        if self.rng.random() < self.hang:
            self.release.wait()
            raise WorldError('hung on purpose')

    def reset(self, item):
        self.trouble()
        return self.world.reset(item)

    def step(self, action):
        self.trouble()
        return self.world.step(action)

    def close(self):
        self.world.close()


def troubled(seed, world=Echo, **trouble):
    """Return a factory of worlds with faults, each with its own seed."""
    seeds = itertools.count(1000 * seed)
    return lambda: Troubled(world(), next(seeds), **trouble)


class Lake:
    """FrozenLake of tiny.task('frozen_lake', ...) on the host, worded as on the device."""

    deterministic, instruction = True, ''

    def __init__(self, task):
        self.task = task

    def reset(self, item):
        self.state = tiny._host_steps(self.task.env)[2](item, self.task.env_params)
        self.turn, self.used, self.key = 0, 0, tiny.KEY
        return self.text(False)

    def text(self, warn):
        left = self.task.max_actions_per_episode - self.used
        warning = 'Invalid.\n' if warn else ''
        return f'{self.task.env.observation_text(self.state)}{warning}{left} left\n'

    def step(self, action):
        matched, parts = parse_answer(
            action.removeprefix('<think>').encode(),
            self.task.env.ACTION_NAMES,
            max_actions=self.task.max_actions_per_turn,
            opening='<think>',
        )
        did = tiny.play_by_hand(
            self.task, self.state, self.key, self.turn, self.used, matched, parts
        )
        self.state, self.used, self.turn = did['state'], did['used'], self.turn + 1
        done = did['stop'] in (EpisodeStop.TERMINATED, EpisodeStop.ACTION_BUDGET)
        obs = self.text(did['warn'])
        return Reply(obs, float(did['reward']), done, did['success'], figures=(self.turn, 0.5))

    def close(self):
        pass


class Kept:
    """The interface of a server's worlds for its routes, with one world in this process."""

    def __init__(self, play):
        self.play, self.counts, self.last = play, dict(created=0, resets=0, steps=0), {}

    async def create(self, lease_s, key=''):
        return 5, {}

    async def reset(self, number, item):
        self.last = {'observation': self.play.reset(item)} | self.details()
        return self.last

    async def step(self, number, action):
        reply = self.play.step(action)
        self.last = {name: getattr(reply, name) for name in ('observation', 'reward', 'done')}
        self.last |= self.details()
        return self.last

    def details(self):
        return getattr(self.play, 'details', dict)()

    def reply(self, number):
        return self.last

    def close(self, number):
        return number == 5


class Table:
    """A server that answers calls in order from a table of (path, status, answer)."""

    def __init__(self, rows):
        self.rows, self.asked, self.tokens = list(rows), [], []
        table = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def answer(self):
                length = int(self.headers['Content-Length'] or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                path, status, reply = table.rows.pop(0)
                table.asked.append((self.path.lstrip('/'), body))
                table.tokens.append(self.headers['Authorization'])
                assert self.path.lstrip('/').startswith(path), (self.path, path)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header('Content-Length', str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@dataclasses.dataclass(frozen=True)
class Tests(HostEnvironment):
    """Any of the worlds above as an environment."""

    world: type = Echo
    name = 'echo'
    instruction = 'Say something.'
    FIGURES = ('said', 'last')

    def make(self):
        return self.world()

    def item_range(self, split):
        start = 100 * ('train', 'validation', 'test').index(split)
        return range(start, start + 40)


@functools.cache
def conversation_of(env, max_turns=4, answer_prefix='', max_observation=48):
    """Return (task, conversation) on 16 items in order."""
    params = env.make_params(num_levels=16)
    params = params._replace(items=np.sort(params.items))
    conversation = Conversation(build_chat(tiny.tokenizer()), answer_prefix, max_observation)
    return build_host_task(env, params, conversation, max_turns=max_turns), conversation


@functools.cache
def table(*strings):
    return build_stop_table(tiny.tokenizer().token_bytes(), strings)


SETTINGS = dict(
    slots=8,
    temperature=1.4,
    serve_rows=3,
    read_tokens=16,
    max_tokens=320,
    max_response=3,
    policy=host.RetryPolicy(),
)


def collector(conversation, make, *, strings=(), pool=None, mesh=None, **settings):
    """Return a HostCollect on one device with worlds from `make`."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1]) if mesh is None else mesh
    pool = Pool(make, conversation.prompt) if pool is None else pool
    chosen = dict(strings=table(*strings)) | SETTINGS | settings
    fields = {field.name for field in dataclasses.fields(host.HostCollect)}
    of_rollout = {name: chosen.pop(name) for name in chosen.keys() - fields}
    local, worlds = sharding.local_mesh(mesh), host.Worlds(pool, conversation)
    return host.HostCollect(mesh, local, worlds, settings=tiny.settings(**of_rollout), **chosen)


def play(
    env=Tests(),
    make=Echo,
    *,
    params=None,
    task=None,
    key=tiny.KEY,
    listed=None,
    log=None,
    **settings,
):
    """Play 16 episodes and close the worlds; return (Rollout of host arrays, counters)."""
    built, conversation = conversation_of(env)
    collect = collector(conversation, make, **settings)
    if log:
        collect.worlds.log = ReplyLog(log)
        collect.worlds.log.about = {'step': 0}
    try:
        params = tiny.cloned('frozen_lake')[0] if params is None else params
        listed = tiny.episodes('frozen_lake') if listed is None else listed
        return jax.device_get(collect(params, task or built, listed, key))
    finally:
        collect.worlds.pool.close()
        collect.worlds.log.close()


def arrays(rollout):
    """Return the arrays of a rollout by field name."""
    fields = {name: getattr(rollout, name) for name in rollout.__dataclass_fields__}
    return {name: np.asarray(x) for name, x in fields.items() if x is not None and name != 'extra'}


def assert_same(one, other, rows=slice(None)):
    """Compare every array of two rollouts, bit for bit."""
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[rows], y[rows]), one, other)


OBJECTS = {  # config changes for a run with the world above
    'env.name': 'objects',
    'objects.make_object': 'host_worlds:Echo',
    'hosts.instruction': 'Say something.\n',
    'hosts.max_observation': 40,
    'hosts.read_tokens': 16,
    'rollout.max_tokens': 160,
    'algorithm': 'grpo',
}
