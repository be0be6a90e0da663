"""Rollouts on hosts: timing never changes results."""

import dataclasses
import functools
import threading
import warnings

import host_worlds as hosts
import jax
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.machine import sharding
from agentrl_jax.machine.processes import CompileCounter
from agentrl_jax.measure import metrics, validation
from agentrl_jax.rollout import host, host_rollout, programs
from agentrl_jax.rollout.host_slots import figures_of
from agentrl_jax.text.conversation import Conversation, build_host_task
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import EpisodeStop, TurnStop

END = tiny.tokenizer().special('<|im_end|>')


@functools.cache
def calm():
    """Echo environments without faults."""
    return hosts.play()


def test_episodes_end_in_every_way_that_the_tests_below_cover():
    out, counters = calm()
    assert len(set(out.num_turns)) > 2 and out.num_turns.max() == 4
    assert {EpisodeStop.TERMINATED, EpisodeStop.TURN_BUDGET} <= set(out.episode_stop)
    assert {TurnStop.EOS, TurnStop.LENGTH} <= set(out.turn_stop.ravel())
    assert counters['generated'].sum() == out.action_mask.sum() and not counters['hosts/faults'][0]


def test_environment_metrics_are_those_of_the_last_replies():
    out, _ = calm()
    np.testing.assert_array_equal(out.figures[:, 0], out.num_turns)
    env, half = hosts.Tests(), out.episode_stop == EpisodeStop.TERMINATED
    out = out.replace(episode_stop=np.where(half, out.episode_stop, EpisodeStop.ENV_ERROR))
    task, _ = hosts.conversation_of(env)
    measured = metrics.environment_metrics(out, task)
    assert measured.keys() == {'echo/said', 'echo/last'}
    np.testing.assert_allclose(measured['echo/said'], out.num_turns[half].mean(), rtol=1e-6)
    counted = validation.count(out, task, levels=16)
    np.testing.assert_allclose(counted['own']['said'], out.num_turns[half].sum())


def test_missing_figures_are_nan_and_a_wrong_number_of_them_is_an_error():
    env = hosts.Tests()
    np.testing.assert_array_equal(figures_of(Reply('', figures=(3.0, 0.5)), env), [3.0, 0.5])
    assert np.isnan(figures_of(Reply(''), env)).all()
    with pytest.raises(ValueError, match='echo: a reply has 1 figures, expected said, last'):
        figures_of(Reply('', figures=(1.0,)), env)


def test_the_sampler_is_the_trainer():
    out, _ = calm()
    assert tiny.gap(tiny.cloned('frozen_lake')[0], out, 1.4) <= 1e-5
    assert (out.logprobs[~out.action_mask] == 0).all() and (out.logprobs <= 0).all()


@pytest.mark.parametrize('poll', [1, 64])
def test_latency_and_schedule_do_not_change_results(poll):
    out, _ = hosts.play(make=hosts.troubled(poll, latency=0.004), poll=poll)
    hosts.assert_same(out, calm()[0])


@pytest.mark.parametrize('read_tokens', [64, 16], ids=['one chunk', 'chunks'])
def test_the_first_observation_of_a_group_is_read_once_with_the_same_bits(read_tokens, monkeypatch):
    """The other three episodes of each group do not read it, for any chunk size."""
    counted, counters_of = [], host.counters_of

    def counting(playing):
        counted.append(dict(playing.counted))
        return counters_of(playing)

    monkeypatch.setattr(host, 'counters_of', counting)
    settings = dict(slots=16, read_tokens=read_tokens)
    out, _ = hosts.play(make=hosts.troubled(6, latency=0.004), **settings)
    monkeypatch.setattr(host_rollout.HostRollout, 'donor', lambda *_: (None, 0))
    alone, _ = hosts.play(**settings)
    hosts.assert_same(out, alone)
    first = ((out.turn == 0) & ~out.action_mask).sum(1).reshape(4, 4)
    first -= len(hosts.conversation_of(hosts.Tests())[0].prefix)
    assert (first == first[:, :1]).all() and first.max() > 16
    assert counted[0]['shared'] == 3 * first[:, 0].sum() and 'shared' not in counted[1]
    assert counted[0]['reads'] < counted[1]['reads']


class Waits:
    """First replies are the same; each environment waits until another one received an answer."""

    deterministic, instruction = True, ''
    first, second = threading.Event(), threading.Event()  # answers were received

    def reset(self, item):
        items = hosts.conversation_of(hosts.Tests())[0].env_params.items.tolist()
        self.place = items.index(item)
        if self.place:
            assert (self.first if self.place == 1 else self.second).wait(20)
        return 'The same to all.'

    def step(self, action):
        if self.place == 0:
            self.first.set()
            assert self.second.wait(20)
        self.second.set()
        return Reply('', done=True)

    def close(self):
        pass


def test_a_row_that_copied_its_opening_samples_while_all_other_worlds_wait():
    """The row waited for another reply, which never arrived if it depended on the row's answer."""
    listed = tiny.episodes('frozen_lake')
    few = jax.tree.map(lambda x: x[:3], tiny.episodes('frozen_lake'))
    listed = dataclasses.replace(few, level=np.arange(3, dtype=np.int32))
    out, counters = hosts.play(make=Waits, listed=listed, slots=3)
    assert not counters['hosts/retries'][0]
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()


def test_worlds_that_hang_are_abandoned_without_changing_results():
    release = threading.Event()
    try:
        out, counters = hosts.play(
            make=hosts.troubled(5, hang=0.15, release=release),
            policy=host.RetryPolicy(timeout_s=0.3, tries=50, min_healthy=0),
        )
    finally:
        release.set()
    assert counters['hosts/timeouts'][0] > 0 and not counters['hosts/faults'][0]
    hosts.assert_same(out, calm()[0])


def test_a_running_rollout_reports_its_progress():
    _, conversation = hosts.conversation_of(hosts.Tests())
    reports = []

    class Watched(hosts.Echo):
        def step(self, action):
            reports.append(collect.worlds.rollout.in_flight())
            return super().step(action)

    collect = hosts.collector(conversation, Watched)
    assert collect.worlds.rollout is None
    task = hosts.conversation_of(hosts.Tests())[0]
    collect(tiny.cloned('frozen_lake')[0], task, tiny.episodes('frozen_lake'), tiny.KEY)
    collect.worlds.pool.close()
    assert collect.worlds.rollout is None and len(reports) >= 16
    for now in reports:  # 16 episodes, 8 rows; the rollout waits for the environment with this step
        assert now['waited for'] >= 1 and now['waited for'] + now['on the device'] <= 8
        assert now['to begin'] <= 8 and now['retries'] == now['faults'] == 0
    assert reports[0]['to begin'] == 8 and reports[-1]['to begin'] == 0


def test_only_three_programs_are_compiled():
    """For any seeds, environments, turn limits and lists of episodes."""
    task, conversation = hosts.conversation_of(hosts.Tests())
    collect = hosts.collector(conversation, hosts.Echo, slots=4, poll=3)
    params = tiny.cloned('frozen_lake')[0]
    try:
        with CompileCounter() as counter:
            collect(params, task, tiny.episodes('frozen_lake', groups=2), jax.random.key(1))
            first = counter.count
            collect(
                params, task.replace(turn_limit=np.int32(2)), tiny.episodes('frozen_lake'), tiny.KEY
            )
            before = counter.count
            collect(params, task, tiny.episodes('frozen_lake', groups=3), tiny.KEY)
    finally:
        collect.worlds.pool.close()
    compiled = collect.programs(task)
    sizes = [p._cache_size() for p in (compiled.start, compiled.decode, compiled.read)]
    assert sizes == [1, 1, 1], (first, before, counter.count)


def test_rows_are_changed_in_place():
    """Decoding and reading write into the cache that they receive and do not copy it."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    settings = tiny.settings(slots=4, serve_rows=2, max_tokens=2048, max_response=4)
    built = programs.build_programs(mesh, settings, width=8, cache_tokens=2048)
    ends = programs.StopRules(np.full(1, END, np.int32), hosts.table('</'))
    state = jax.eval_shape(built.start, tiny.untrained(), np.zeros(5, np.int32), ends)
    block = np.zeros((2, programs.READ_HEADER + 8), np.int32)
    state_bytes, bound = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)), np.int32(1)
    for program, *rest in (built.decode, ends, tiny.KEY, bound, bound), (built.read, ends, block):
        with warnings.catch_warnings():
            warnings.simplefilter('error')  # about donated buffers that are not used
            memory = program.lower(state, tiny.untrained(), *rest).compile().memory_analysis()
        assert memory.alias_size_in_bytes == state_bytes
        assert memory.temp_size_in_bytes < state_bytes


@pytest.mark.soak
def test_frozen_lake_on_a_host_matches_frozen_lake_on_the_device():
    """All tokens match. The prefix ends at the system message on hosts, after 'user' on devices."""
    env, _ = tiny.environment('frozen_lake')
    env_params = dataclasses.replace(env, success_rate=1.0).make_params(num_levels=16)
    on_device = tiny.build_task(env, env_params, tiny.tokenizer(), style='brief', **tiny.BUDGETS)
    params = tiny.cloned('frozen_lake')[0]
    expected, _ = tiny.play('frozen_lake', params, tiny.KEY, task_=on_device)

    class Env(hosts.Tests):
        name, instruction, system = 'frozen_lake', '', 'frozen_lake\n'

        def make_params(self, **_):
            return super().make_params()._replace(items=np.arange(16, dtype=np.int32))

    conversation = Conversation(build_chat(tiny.tokenizer()), '<think>', 100)
    task = build_host_task(Env(), Env().make_params(), conversation, max_turns=3)
    collect = hosts.collector(
        conversation,
        lambda: hosts.Lake(on_device),
        max_tokens=160,
        max_response=12,
        temperature=1.0,
    )
    out, _ = jax.device_get(collect(params, task, tiny.episodes('frozen_lake'), tiny.KEY))
    collect.worlds.pool.close()
    same = (
        'tokens attention_mask action_mask turn turn_stop num_turns rewards success level'.split()
    )
    for name in same:
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    shift = expected.begin - out.begin
    in_episode = np.arange(3)[None] < out.num_turns[:, None]
    assert set(shift[in_episode]) == {3} and (shift[~in_episode] == 0).all()
    assert (out.episode_stop == EpisodeStop.TERMINATED).any()


def test_sampled_tokens_without_a_finite_log_probability_are_counted_on_hosts():
    params = jax.tree.map(lambda x: x * 1e19, tiny.cloned('frozen_lake')[0])
    _, counters = hosts.play(params=params)
    assert counters['nonfinite'].sum() == counters['generated'].sum() > 0
    assert hosts.play()[1]['nonfinite'].sum() == 0
