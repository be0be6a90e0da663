"""Harnesses: requests, conversations as rows, and rollouts."""

import functools
import os
import subprocess
import sys

import harness_clients as clients
import host_worlds
import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny
from waiting import until

from agentrl_jax.envs.hosts.harness import boxes, workers
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.envs.hosts.harness.world import HarnessEnvironment, endpoint
from agentrl_jax.envs.hosts.players import reference_success
from agentrl_jax.envs.hosts.world import Answer, Reply, WorldDown, WorldError
from agentrl_jax.imitation import demonstrations
from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.rollout import host, host_rollout, rewards, windows
from agentrl_jax.rollout.host import counters_of
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.rollout.replies import LoggedPool, ReplyLog, read_log
from agentrl_jax.run.config import read as read_config
from agentrl_jax.text import agents, conversation
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import EpisodeStop, TurnStop

PREFIX = 1
BOXES = dict(
    run='agentrl_jax.envs.hosts.harness.boxes:play',
    expert='agentrl_jax.envs.hosts.harness.boxes:expert',
)
HOT = 'harness_clients:hot'


# ---- rollouts ------------------------------------------------------------------------------------


@functools.cache
def play_harness(
    run, *, max_tokens=420, max_turns=6, log='', replay='', ahead=False, kinds=0, **settings
):
    """Return (rollout of 16 episodes with random weights, task).

    log: file for the replies of harnesses; replay: file that replaces them. ahead: return the
    second of two steps, with episodes that start during the first. kinds: number of items.
    """
    run = f'harness_clients:{run}' if run else ''
    env = HarnessEnvironment(run=run, num_items=200, **settings)
    params = env.make_params(num_levels=16)
    items = np.arange(16, dtype=np.int32) % kinds if kinds else np.sort(params.items)
    talk = conversation.Conversation(build_chat(tiny.tokenizer()), '', 48)
    task = conversation.build_host_task(
        env, params._replace(items=items), talk, max_turns=max_turns
    )
    sizes = dict(max_response=6, max_tokens=max_tokens, temperature=1.0)
    pool = LoggedPool(read_log(replay), talk.prompt) if replay else None
    collect = host_worlds.collector(talk, env.make, pool=pool, **sizes)
    if log:
        collect.worlds.log = ReplyLog(log)
        collect.worlds.log.about = {'step': 0}
    try:
        listed, weights = tiny.episodes('frozen_lake'), tiny.untrained()
        if not ahead:
            return jax.device_get(collect(weights, task, listed, tiny.KEY))[0], task

        def later(step):
            return listed.replace(token_stream=16 * step + listed.token_stream)

        for step in (0, 1):
            where = dict(step=step, last=1, staleness=1)
            out, _ = collect.collect_ahead(weights, task, later, tiny.KEY, **where)
        return jax.device_get(out), task
    finally:
        collect.worlds.close()


def trainer_logprobs(rollout, count, width=0):
    """Return the trainer's log-probabilities, one row per conversation."""
    return jax.device_get(trainer_logprobs_of(tiny.untrained(), rollout, count, width))


@functools.partial(jax.jit, static_argnums=(2, 3))
def trainer_logprobs_of(params, rollout, count, width):
    samples = windows.ConversationSpec(count, PREFIX, width).windows(rollout)
    tokens, attention = windows.split_turns((rollout.tokens, rollout.attention_mask), samples)
    states = tiny.hidden(params, tokens, positions_of(attention), attention)
    logprobs, _ = losses.token_logprobs(states, tiny.head(params), tokens)
    return windows.scatter_back(logprobs, samples, rollout.tokens.shape[1]), samples


@pytest.mark.parametrize(
    ('run', 'branches', 'ahead'),
    [
        pytest.param('branching', 4, False, marks=pytest.mark.soak),
        pytest.param('branching', 4, True, marks=pytest.mark.soak),
        ('limited', 1, False),
        ('limited_responses', 1, False),
        ('limited_messages', 1, False),
    ],
)
def test_the_trainer_has_the_samplers_probabilities(run, branches, ahead):
    out, _ = play_harness(run, branches=branches, max_tokens=1600, ahead=ahead)
    assert not ahead or out.staleness.any()
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()
    logprobs, samples = trainer_logprobs(out, branches)
    gap = np.where(out.action_mask, logprobs - out.logprobs, 0.0)
    assert out.action_mask.sum() > 50 and np.abs(gap).max() <= 1e-5
    # Each sampled token is trained once
    rows = windows.own_turn_mask(jnp.asarray(out.action_mask), samples)
    assert int(rows.sum()) == out.action_mask.sum()


def test_a_shared_prefix_is_read_once_without_changing_a_bit(monkeypatch):
    """All start with tools and a system message; timing determines which slot copies which."""
    sizes = dict(branches=4, max_tokens=1600)
    counted = []

    def counting(playing):
        counted.append(dict(playing.counted))
        return counters_of(playing)

    monkeypatch.setattr(host, 'counters_of', counting)
    shared = play_harness.__wrapped__('branching', **sizes)[0]
    monkeypatch.setattr(host_rollout.HostRollout, 'donor', lambda *_: (None, 0))
    separate = play_harness.__wrapped__('branching', **sizes)[0]
    host_worlds.assert_same(shared, separate)
    assert counted[0]['shared'] >= 200 and 'shared' not in counted[1]
    assert counted[0]['reads'] < counted[1]['reads']


def texts_of(out, branch):
    """Return the text of one conversation per episode."""
    texts = []
    for b in range(len(out.tokens)):
        mask = (out.turn[b] >= 0) & (out.branch[b][np.maximum(out.turn[b], 0)] == branch)
        mask |= np.arange(len(mask)) < PREFIX
        texts.append(tiny.tokenizer().decode(out.tokens[b][mask].tolist(), show_special=True))
    return texts


def test_a_row_is_the_conversation_in_the_chat_template():
    out, task = play_harness('two_turns')
    for b, text in enumerate(texts_of(out, 0)):
        item = task.env_params.items[out.level[b]]
        assert text.startswith(
            f'<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nItem {item}.<|im_end|>\n'
            '<|im_start|>assistant\n'
        )
        assert '<|im_end|>\n<|im_start|>user\nMore 0.<|im_end|>\n<|im_start|>assistant\n' in text
    assert (out.num_turns == 2).all() and (out.rewards[:, 0] == 0).all()


@pytest.mark.soak
def test_branches_are_separate_conversations():
    out, task = play_harness('branching', branches=4, max_tokens=1600)
    assert (out.num_turns == 4).all() and (out.branch[:, :4] == [0, 1, 0, 2]).all()
    for text in texts_of(out, 1):
        assert text.startswith('<|im_start|>system\nA helper.\n\n# Tools') and 'Item' not in text
    for text in texts_of(out, 0):
        assert text.count('<|im_start|>assistant') == 2 and 'Help' not in text
    for text in texts_of(out, 2):
        assert '<|im_start|>assistant\nsomething else<|im_end|>' in text
    items = task.env_params.items[out.level]
    assert (out.success == (items % 2 == 0)).all() and (out.figures[:, 1] == 3).all()


@pytest.mark.parametrize('other', ['the_other_first', 'one_after_the_other'])
def test_answers_do_not_depend_on_the_request_order_across_conversations(other):
    sizes = dict(branches=4, max_tokens=1600)
    one, other = play_harness('in_turn', **sizes)[0], play_harness(other, **sizes)[0]

    def conversations(out, episode):
        """Return (text, log-probabilities) of the conversations of an episode, sorted by text."""
        texts = [texts_of(out, branch)[episode] for branch in range(3)]
        ids = windows.branch_of(out.turn, out.branch, np)[episode]
        sampled = [out.logprobs[episode][(ids == n) & out.action_mask[episode]] for n in range(3)]
        return sorted(zip(texts, map(tuple, sampled), strict=True))

    for b in range(len(one.tokens)):
        for (text, logprobs), (again, others) in zip(
            conversations(one, b), conversations(other, b), strict=True
        ):
            assert text == again
            np.testing.assert_allclose(logprobs, others, atol=1e-5)
    # Conversations with the same start are sampled independently
    assert any(
        not texts_of(one, 0)[b].startswith(texts_of(one, 2)[b].removesuffix('<|im_end|>'))
        for b in range(len(one.tokens))
    )


def test_harness_faults_are_counted_and_each_kind_is_reported_once(capsys):
    warned = endpoint('127.0.0.1', 0).warned
    warned.clear()
    out, _ = play_harness('swallowing')
    assert (out.success & (out.rewards[:, 0] == 1)).all()
    assert (out.figures[:, 2] == 1).all()  # rejected
    out, _ = play_harness('talkative', max_turns=3)  # a rejection for lack of turns is not an error
    assert (out.figures[:, 2:] == 0).all()
    boxes_, hot = (HarnessEnvironment(run=run).make() for run in (BOXES['run'], HOT))
    for world, text in 2 * [(boxes_, '<tool_call>\none\n</tool_call>'), (hot, 'A')]:
        world.reset(0)
        assert world.step(Answer(text)).valid == (world is hot)
    boxes_.close(), hot.close()
    assert warned == {'unknown_stop', 'bad_calls', 'temperature'}
    assert capsys.readouterr().err.count('warning: ') == 3


def test_a_truncated_episode_still_earns_its_reward():
    out, _ = play_harness('talkative', max_turns=3)
    assert (out.episode_stop == EpisodeStop.TURN_BUDGET).all()
    np.testing.assert_allclose(out.rewards.sum(1), 0.3, atol=1e-6)
    out, _ = play_harness('talkative', max_turns=12, max_tokens=150)
    assert (out.episode_stop == EpisodeStop.TOKEN_BUDGET).all() and (out.num_turns < 12).all()
    np.testing.assert_allclose(out.rewards.sum(1), out.num_turns / 10, atol=1e-6)


def test_a_reward_function_receives_the_reward_of_a_truncated_episode():
    def response(text, reward=0.0, done=False, **fields):
        request = Request(slot=0, stream=0, item=1, **fields)
        return Response(request, Reply(text, reward=reward, done=done), 'Do.')

    events = [
        response('begin'),
        (agents.ACT, 'one'),
        response('next', 0.5, actions=('one',)),
        response('shorter', 0.25, actions=('one',), cut='TOKEN_BUDGET'),  # it continues
        response('', 0.25, True, actions=('one',), cut='TURN_BUDGET'),
    ]
    settings = dict(item=1, success=True, figures=(), trials=np.zeros(3, np.int32))
    (turn,) = rewards.episode_of(events, **settings).turns
    assert turn.reward == 0.75 and turn.reply == 'next'


COMPACT = dict(branches=8, context=100, max_tokens=700, max_turns=14)
BLAMES = dict(blames=('OverflowError',), blamed_reward=-1.0)


@pytest.mark.parametrize('dialect', ['responses', 'messages'])
@pytest.mark.parametrize(
    ('run', 'sizes'),
    [
        ('limited', {}),
        ('talkative', dict(max_turns=12, max_tokens=150)),
        ('crashing', BLAMES),
        pytest.param('in_turn', dict(branches=4, max_tokens=1600), marks=pytest.mark.soak),
        pytest.param('branching', dict(branches=4, max_tokens=1600), marks=pytest.mark.soak),
        pytest.param('compacting', COMPACT, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_rollout_is_bit_identical_in_all_dialects(run, sizes, dialect):
    """The tests of chat completions in this file therefore hold for all of them."""
    out = [play_harness(name, **sizes)[0] for name in (run, f'{run}_{dialect}')]
    host_worlds.assert_same(*out)


@pytest.mark.soak
@pytest.mark.parametrize('run', ['compacting', 'compacting_responses', 'compacting_messages'])
def test_a_harness_continues_with_a_summary_if_its_conversation_is_too_long(tmp_path, run):
    log = str(tmp_path / 'replies.jsonl')
    out, _ = play_harness(run, **COMPACT, log=log)
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()
    np.testing.assert_allclose(out.rewards.sum(1), 0.7, atol=1e-6)
    assert (out.branch.max(1) >= 2).all() and (out.num_turns > 7).all()
    branch_ids = windows.branch_of(out.turn, out.branch, np)
    lengths = PREFIX + (branch_ids[:, None] == np.arange(8)[:, None]).sum(2)
    assert lengths.max() <= 100 and (out.attention_mask.sum(1) > 200).all()
    # The policy's summaries are trained in their rows, at most one conversation wide
    summaries = texts_of(out, 1)
    assert all(text.startswith('<|im_start|>user\nSum up ') for text in summaries)
    assert all((out.action_mask[b] & (branch_ids[b] == 1)).any() for b in range(len(branch_ids)))
    logprobs, samples = trainer_logprobs(out, 8, 100)
    assert samples.index.shape[2] == 100
    gap = np.where(out.action_mask, logprobs - out.logprobs, 0.0)
    assert np.abs(gap).max() <= 1e-5
    host_worlds.assert_same(play_harness(run, **COMPACT, replay=log)[0], out)


def test_the_length_of_the_row_also_limits_its_conversations():
    """The reward of an episode counts even if there are no tokens left for a summary."""
    out, _ = play_harness('compacting', **COMPACT | {'max_tokens': 150}, blamed_reward=-1.0)
    assert (out.episode_stop == EpisodeStop.TOKEN_BUDGET).all()
    assert (out.rewards.sum(1) == -1).all() and (out.attention_mask.sum(1) <= 150).all()


def test_an_answer_is_limited_to_the_tokens_that_its_client_requested():
    out, _ = play_harness('limited')
    first = (out.action_mask & (out.turn == 0)).sum(1)
    assert (first <= 2).all() and (first == 2).any()
    cut = out.turn_stop[:, 0] == TurnStop.LENGTH
    assert cut.any()
    for text in np.array(texts_of(out, 0))[cut]:
        assert ' (cut)<|im_end|>\n<|im_start|>user\nOn.' in text


def test_a_crash_discards_its_episode_unless_the_policy_is_to_blame():
    out, task = play_harness('crashing')
    odd = task.env_params.items[out.level] % 2 == 1
    assert odd.any() and not odd.all()
    assert ((out.episode_stop == EpisodeStop.ENV_ERROR) == odd).all()
    out, _ = play_harness('crashing', blames=('OverflowError',), blamed_reward=-1.0)
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()
    assert (out.rewards[odd, 0] == -1).all() and (out.rewards[~odd, 0] == 1).all()


# ---- workers -------------------------------------------------------------------------------------


def wait_for(mark, *, running):
    """Wait until a process has the mark in its command line, or until no process has it."""
    processes = functools.partial(subprocess.check_output, ['ps', 'axwwo', 'args'], text=True)
    until(lambda: (mark in processes()) == running)


@pytest.mark.soak
def test_replacing_a_hung_or_dead_worker_leaves_other_episodes_bit_identical():
    out, task = play_harness('dangerous', workers=4, silent_s=2.0, blames=('OverflowError',))
    kind, clean = clients.dangers(task.env_params.items[out.level]), play_harness('two_turns')[0]
    assert set(kind) == {0, 1, 2, 3}
    failed = out.episode_stop == EpisodeStop.ENV_ERROR
    assert (failed == ((kind == 1) | (kind == 2))).all()
    assert (out.rewards[kind == 3] == 0).all()  # blamed
    for name in ('tokens', 'logprobs', 'rewards'):
        assert (getattr(out, name)[kind == 0] == getattr(clean, name)[kind == 0]).all()
    wait_for('left_by_worker', running=False)
    wait_for('harness.workers harness_clients:dangerous', running=False)


RUN = """
import sys, threading
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.envs.hosts.harness.workers import Workers
workers = Workers('harness_clients:alone', 1)
workers.enter()
print(workers.take().play(Task(0, 'http://127.0.0.1:1/v1', 'k')).returned, flush=True)
workers.take().play(Task(1, 'http://127.0.0.1:1/v1', 'k'))
"""


def test_killing_a_run_ends_its_worker_and_the_processes_of_the_worker():
    env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, '-c', RUN], env=env, stdout=subprocess.PIPE)
    assert run.stdout.readline() == b'[0.25, True]\n'
    wait_for('left_by_alone', running=True)
    run.kill(), run.wait(), run.stdout.close()
    wait_for('left_by_alone', running=False)
    wait_for('harness.workers harness_clients:alone', running=False)


def test_an_episode_waits_for_a_free_worker_and_a_killed_one_is_replaced(monkeypatch):
    monkeypatch.setattr(workers, 'WAIT_S', 0.01)
    pool = workers.Workers('harness_clients:alone', 1)
    pool.enter()
    lease = pool.take()
    with pytest.raises(WorldDown, match='all harness.workers=1 are busy'):
        pool.take()
    lease.stop()
    assert 'exit code' in lease.play(Task(0, 'http://127.0.0.1:1/v1', 'k')).error
    fresh = pool.take()  # replaces the killed worker
    assert fresh.play(Task(0, 'http://127.0.0.1:1/v1', 'k')).returned == [0.25, True]
    fresh.stop()  # its episode is over: the worker may play another one
    assert pool.idle == [fresh.worker] and fresh.worker.alive
    pool.leave()
    assert not pool.idle and not fresh.worker.alive


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'harness.command': ('x',)}, 'harness.run'),
        ({'clone.episodes': 4, 'harness.expert': BOXES['expert'], 'clone.oracle': 0.5}, 'oracle'),
        ({'harness.branches': 2, 'harness.context': 10**6}, 'harness.context'),
        ({'harness.silent_s': 600.0}, 'harness.silent_s'),  # hosts.timeout_s would expire first
    ],
    ids=str,
)
def test_a_run_that_contradicts_its_harness_is_rejected(changes, field):
    config = micro_runs.plain('harness', **{'harness.run': BOXES['run']} | changes)
    with pytest.raises(ValueError, match=field):
        read_config(config)


# ---- experts -------------------------------------------------------------------------------------


def demonstrate(episodes, max_tokens=2000, **settings):
    """Return (texts of rows, their trained texts, number of demonstrations that do not fit)."""
    env = HarnessEnvironment(num_items=200, **settings)
    talk = conversation.Conversation(build_chat(tiny.tokenizer()), '', 48)
    task = conversation.build_host_task(env, env.make_params(num_levels=16), talk, max_turns=6)
    options = dict(seed=0, episodes=episodes, oracle=1.0, max_tokens=max_tokens)
    batch, cut = demonstrations.demonstrate_on_hosts(task, talk, env.player(), **options)
    batch = jax.device_get(batch)

    def texts(masks):
        rows = zip(batch.tokens, masks, strict=True)
        return [tiny.tokenizer().decode(row[mask], show_special=True) for row, mask in rows]

    return texts(batch.attention_mask), texts(batch.mask), cut


def test_an_expert_answers_instead_of_the_policy():
    rows, trained, cut = demonstrate(12, **BOXES)
    call = '<tool_call>\n{{"name": "open", "arguments": {{"box": "{}"}}}}\n</tool_call><|im_end|>'
    box = dict(zip(boxes.HINTS, boxes.BOXES, strict=True))
    hinted = [next((box[hint] for hint in box if hint in row), '') for row in rows]
    assert len(rows) == 12 and not cut and any(hinted) and not all(hinted)
    for row, text, prize in zip(rows, trained, hinted, strict=True):
        answers = [prize]
        if not prize:
            empty = 'Empty. The ' in row  # a wrong box names the right one
            prize = row.partition('Empty. The ')[2].partition(' one')[0]
            answers = ['red', prize] if empty else ['red']
        assert text == ''.join(map(call.format, answers)) and row.endswith(text[-40:])


def test_the_expert_is_the_oracle_and_must_return_an_answer():
    env = HarnessEnvironment(num_items=200, **BOXES)
    params = env.make_params('validation', num_levels=8)
    assert reference_success(env, params, 3) == {'oracle': 1.0}
    assert env.quick and env.has_player() and not HarnessEnvironment(run=BOXES['run']).quick
    player = HarnessEnvironment(**BOXES | {'expert': 'harness_clients:mute'}).player()
    player.reset(0)
    with pytest.raises(WorldError, match='harness_clients:mute'):
        player.best()
    player.close()


BRANCHING = dict(run='harness_clients:branching', expert='harness_clients:polite', branches=4)


def test_each_conversation_of_a_demonstration_is_one_row():
    rows, trained, _ = demonstrate(2, **BRANCHING)
    answers = ['Yes 2.<|im_end|>Yes 4.<|im_end|>', 'Yes 3.<|im_end|>', 'Yes 4.<|im_end|>']
    assert len(rows) == 6 and trained == 2 * answers


def test_demonstrations_that_do_not_fit_are_counted_and_leave_no_empty_rows():
    """They were dropped silently, and a run without a fitting demonstration divided by zero."""
    _, trained, cut = demonstrate(12, 560, **BOXES)  # one answer each
    assert cut == 8 and [text.count('<|im_end|>') for text in trained] == [1] * 12
    _, trained, cut = demonstrate(12, 538, **BOXES)  # two answers do not fit
    assert cut == 10 and len(trained) == 2 and all(trained)
    with pytest.raises(ValueError, match='rollout.max_tokens'):
        demonstrate(12, 20, **BOXES)
    with pytest.raises(ValueError, match='harness.context'):
        demonstrate(2, context=9, **BRANCHING)


# ---- programs ------------------------------------------------------------------------------------

PROGRAM = """
import json, os, subprocess, sys, time, urllib.request

def post(url, body):
    headers = {'Content-Type': 'application/json'}
    made = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(made))

item = int(sys.argv[1])
assert item == int(os.environ['AGENTRL_ITEM'])
messages = [{'role': 'user', 'content': f'Item {item}.'}]
said = post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', {'messages': messages})
if item % 3 == 0:  # leaves a process that holds its stderr
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)  # left_alone'])
    post(os.environ['AGENTRL_REWARD_URL'], {'reward': 0.5, 'success': True})
elif item % 3 == 1:
    raise OverflowError('too much')
else:
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)  # left_alone'])
    time.sleep(99)
"""


@pytest.mark.soak
def test_programs_post_rewards_crash_and_are_killed_with_their_children(tmp_path):
    path = tmp_path / 'program.py'
    path.write_text(PROGRAM)
    command = (sys.executable, str(path), '{item}')
    blames = dict(blames=('OverflowError',), blamed_reward=-1.0)
    out, task = play_harness('', command=command, silent_s=4.0, **blames, kinds=3)
    kind = task.env_params.items[out.level]
    assert set(kind) == {0, 1, 2}
    assert out.success[kind == 0].all() and (out.rewards[kind == 0, 0] == 0.5).all()
    assert (out.rewards[kind == 1, 0] == -1).all()
    assert (out.episode_stop[kind == 2] == EpisodeStop.ENV_ERROR).all()
    wait_for('left_alone', running=False)
