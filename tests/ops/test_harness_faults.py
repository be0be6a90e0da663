"""Hundreds of harness episodes: one in ten hangs, crashes, floods, misreports or disconnects."""

import functools
import pathlib
import subprocess
import threading

import harness_clients as clients
import host_worlds
import jax
import numpy as np
import pytest
import tiny_agents as tiny
from waiting import until

from agentrl_jax.envs.hosts.harness.endpoint import THREADS
from agentrl_jax.envs.hosts.harness.world import HarnessEnvironment, endpoint
from agentrl_jax.text import conversation
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import Episodes, EpisodeStop

COUNT = 360


def play_episodes(run, **settings):
    env = HarnessEnvironment(
        run=f'harness_clients:{run}', num_items=5000, blames=('OverflowError',), **settings
    )
    params = env.make_params(num_levels=COUNT)
    params = params._replace(items=np.arange(COUNT, dtype=np.int32))
    talk = conversation.Conversation(build_chat(tiny.tokenizer()), '', 48)
    task = conversation.build_host_task(env, params, talk, max_turns=4)
    sizes = dict(max_response=4, max_tokens=128, temperature=1.0, slots=64, serve_rows=16)
    policy = host_worlds.host.RetryPolicy(tries=1, min_healthy=0.5)
    collect = host_worlds.collector(talk, env.make, policy=policy, **sizes)
    every = np.arange(COUNT, dtype=np.int32)
    try:
        listed = Episodes(level=every, world_stream=every, token_stream=every)
        return jax.device_get(collect(tiny.untrained(), task, listed, tiny.KEY))[0]
    finally:
        collect.worlds.pool.close()


@functools.cache
def healthy():
    out = play_episodes('two_turns')
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()
    return out


def count_leftovers():
    """Count what harnesses may leave running: threads, sockets and processes."""
    thread_names = ('harness', 'request', 'world')
    threads = sum(any(name in one.name for name in thread_names) for one in threading.enumerate())
    threads -= THREADS.free._value  # idle threads of the endpoint
    sockets = sum(path.is_socket() for path in pathlib.Path('/proc/self/fd').iterdir())
    listed = subprocess.run(['ps', 'axwwo', 'args'], capture_output=True, text=True, check=True)
    marks = ('left_by_deadly', 'harness.workers')
    return np.array([threads, sockets, sum(map(listed.stdout.count, marks))])


@pytest.mark.soak
@pytest.mark.parametrize(
    ('run', 'workers'),
    [('faulty', 0), ('deadly', 8), ('faulty_messages', 0), ('deadly_responses', 8)],
)
def test_faulty_harnesses_do_not_change_their_neighbours_and_leave_nothing_running(run, workers):
    alone, before = healthy(), count_leftovers()
    out = play_episodes(run, start_s=10.0, silent_s=10.0, workers=workers, blamed_reward=-1.0)
    items = np.arange(COUNT)
    faulty = items % 10 == 0
    blamed = faulty & (clients.fault_of(items) == clients.BLAMED)
    assert ((out.episode_stop == EpisodeStop.ENV_ERROR) == faulty & ~blamed).all()
    assert blamed.sum() == 6 and (out.rewards[blamed].sum(1) == -1).all()
    assert out.action_mask[blamed].any(1).all()  # they train
    names = ('tokens', 'logprobs', 'turn', 'action_mask')
    if run in ('faulty', 'deadly'):  # other dialects do not count thoughts as text
        names += ('rewards',)
    for name in names:
        one, other = getattr(out, name), getattr(alone, name)
        np.testing.assert_array_equal(one[~faulty], other[~faulty], err_msg=name)
    assert not endpoint('127.0.0.1', 0).episodes
    # sleeping harnesses notice that their episodes are over
    until(lambda: (count_leftovers() <= before).all())
