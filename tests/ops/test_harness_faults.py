"""A thousand episodes of harnesses: one in ten hangs, crashes, floods, lies or goes away."""

import threading
import time

import host_worlds
import jax
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.envs.hosts.harness.world import HarnessEnvironment, endpoint
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.text import conversation
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import EpisodeStop

COUNT = 1000


def played(run):
    env = HarnessEnvironment(run=f'harness_clients:{run}', num_items=5000, start_s=2.0)
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


@pytest.mark.soak
def test_neighbours_of_faulty_harnesses_are_the_same_to_the_bit_and_nothing_is_left():
    healthy = played('two_turns')
    assert (healthy.episode_stop == EpisodeStop.TERMINATED).all()
    out = played('faulty')
    faulty = np.arange(COUNT) % 10 == 0
    assert ((out.episode_stop == EpisodeStop.ENV_ERROR) == faulty).all()
    for name in ('tokens', 'logprobs', 'rewards', 'turn', 'action_mask'):
        one, other = getattr(out, name), getattr(healthy, name)
        np.testing.assert_array_equal(one[~faulty], other[~faulty], err_msg=name)
    assert not endpoint('127.0.0.1', 0).episodes
    until = time.monotonic() + 40  # those that sleep find their episodes over
    while any(thread.name == 'harness' for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.5)
