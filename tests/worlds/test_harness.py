"""Harnesses: what their requests ask, how their conversations become rows, and what is played."""

import asyncio
import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import threading
import time
import types
import weakref

import harness_clients as clients
import host_worlds
import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny
from llama_vocabulary import llama_tokenizer

from agentrl_jax import evaluate
from agentrl_jax.envs.hosts.harness import boxes, wire, workers
from agentrl_jax.envs.hosts.harness import task as task_of_harness
from agentrl_jax.envs.hosts.harness.endpoint import Episode
from agentrl_jax.envs.hosts.harness.task import Task, reward_of
from agentrl_jax.envs.hosts.harness.wire import Refused, Said
from agentrl_jax.envs.hosts.harness.world import CUT, HarnessEnvironment, endpoint
from agentrl_jax.envs.hosts.players import reference_success
from agentrl_jax.envs.hosts.world import Answer, Reply, WorldDown, WorldError
from agentrl_jax.imitation import demonstrations
from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.rollout import host, host_rollout, rewards, windows
from agentrl_jax.rollout.host import counters_of
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.rollout.replies import LoggedPool, ReplyLog, read_log
from agentrl_jax.rollout.world_calls import WorldsFailed
from agentrl_jax.run import cloning
from agentrl_jax.run.config import read as read_config
from agentrl_jax.settings.rules import broken_by
from agentrl_jax.text import agents, conversation
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import EpisodeStop, TurnStop

PREFIX = 1


def answer(text, closed=True, finish='stop'):
    said = Answer(text)
    said.closed, said.finish = closed, finish
    return said


def body(*messages, **more):
    return json.dumps({'model': 'm', 'messages': list(messages)} | more).encode()


def ask(episode, raw, said, retried=False):
    """(what the world is shown, the body that the client gets)."""
    found = []
    thread = threading.Thread(target=lambda: found.append(episode.ask(raw, retried)))
    thread.start()
    request = episode.events.get(timeout=5)
    episode.answer(said)
    thread.join()
    return request.new, found[0][1]


U, V = clients.user('U'), clients.user('V')
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'


def said_with(calls):
    return {'role': 'assistant', 'content': '', 'tool_calls': calls}


# ---- the wire ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('raw', 'code'),
    [
        (b'no', 'invalid_json'),
        (b'[' * 100_000, 'invalid_json'),
        (b'{}', 'invalid_request'),
        (body(), 'unsupported_prefill'),
        (body(U, {'role': 'assistant', 'content': 'A'}), 'unsupported_prefill'),
        (body(U, n=2), 'unsupported_n'),
        (body({'role': 'elf', 'content': ''}), 'invalid_role'),
        (body({'role': 'user', 'content': [{'type': 'image_url'}]}), 'unsupported_content'),
        (body(U, stop=['###']), 'unknown_stop'),
        (body(U, max_tokens='many'), 'invalid_request'),
        (body(U, tools=['look']), 'invalid_request'),
        (body(U, tools=5), 'invalid_request'),
        (body(U, stop=5), 'invalid_request'),
        (body(U, stop=[5]), 'invalid_request'),
        (body({'role': ['user'], 'content': ''}), 'invalid_role'),
        (body(said_with(5), U), 'invalid_request'),
        (body(said_with([{'function': 'x'}]), U), 'invalid_request'),
    ],
    ids=str,
)
def test_what_cannot_be_given_is_refused(raw, code):
    with pytest.raises(Refused) as refused:
        wire.read(raw, ('\n',))
    assert refused.value.code == code and refused.value.status == 400
    assert refused.value.body['error']['code'] == code


def test_arguments_too_deep_to_read_stay_a_text():
    call = {'function': {'name': 'look', 'arguments': '[' * 5000}}
    assert '[[[' in wire.read(body(said_with([call]), U), ()).messages[0].calls


def test_a_request_is_read():
    asked = wire.read(
        body(
            {'role': 'developer', 'content': [{'type': 'text', 'text': 'S'}]},
            U,
            tools=[clients.TOOL],
            stop='\n',
            max_completion_tokens=7,
            temperature=0.3,
            tool_choice='required',
            response_format={'type': 'json_object'},
            stream=True,
            stream_options={'include_usage': True},
        ),
        ('\n',),
    )
    assert asked.messages == (Said('system', 'S'), Said('user', 'U'))
    assert (asked.stop, asked.most, asked.stream, asked.usage) == (('\n',), 7, True, True)
    assert set(asked.ignored) == {'temperature', 'tool_choice', 'response_format'}
    assert wire.read(body(U, tools=[clients.TOOL], tool_choice='none'), ()).tools == ()


def test_calls_become_tool_calls_and_those_that_cannot_be_read_stay_text():
    asked = wire.read(body(U, tools=[clients.TOOL]), ())
    made = wire.complete(answer(f'Let me see. {CALL}'), asked, 'x')
    (choice,) = made.body['choices']
    (call,) = choice['message']['tool_calls']
    assert choice['finish_reason'] == 'tool_calls' and choice['message']['content'] == 'Let me see.'
    assert json.loads(call['function']['arguments']) == {'place': 'here'} and not made.bad_calls
    for bad in (
        '<tool_call>{"name": "look"',
        '<tool_call>\n[]\n</tool_call>',
        CALL + '<tool_call>',
    ):
        made = wire.complete(answer(bad), asked, 'x')
        message = made.body['choices'][0]['message']
        assert made.bad_calls == 1 and message == {'role': 'assistant', 'content': bad}
    plain = wire.complete(answer(CALL), wire.read(body(U), ()), 'x')
    assert 'tool_calls' not in plain.body['choices'][0]['message']


def in_llama_s_words(text):
    said = answer(text)
    said.calls = 'object'
    return said


@pytest.mark.parametrize(
    ('text', 'content'),
    [
        ('{"name": "look", "parameters": {"place": "here"}}', None),
        ('\n{"type": "function", "name": "look", "parameters": {"place": "here"}} ', None),
        ('<|python_tag|>{"name": "look", "parameters": {"place": "here"}}', None),
        ('Let me see.\n{"name" : "look", "arguments": {"place": "here"}}', 'Let me see.'),
    ],
)
def test_llama_calls_with_nothing_but_an_object(text, content):
    asked = wire.read(body(U, tools=[clients.TOOL]), ())
    made = wire.complete(in_llama_s_words(text), asked, 'x')
    message = made.body['choices'][0]['message']
    assert message['content'] == content and not made.bad_calls
    (call,) = message['tool_calls']
    assert call['function'] == {'name': 'look', 'arguments': '{"place": "here"}'}
    assert 'tool_calls' not in wire.complete(answer(text), asked, 'x').body['choices'][0]['message']


@pytest.mark.parametrize(
    ('text', 'bad'),
    [
        ('{"name": "look", "parameters": {', 1),
        ('{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}', 1),
        ('<|python_tag|>look.call(place="here")', 1),
        ('<|python_tag|>[]', 1),
        ('I see: {"name": "look"', 1),
        ('{name: look}', 1),
        ('{"answer": 5}', 0),  # an answer in JSON
        ('Nothing, {really}.', 0),
    ],
)
def test_what_llama_writes_that_is_no_call_stays_text_and_counts_if_it_was_to_be_one(text, bad):
    asked = wire.read(body(U, tools=[clients.TOOL]), ())
    made = wire.complete(in_llama_s_words(text), asked, 'x')
    message = made.body['choices'][0]['message']
    assert made.bad_calls == bad and message == {'role': 'assistant', 'content': text}


def test_a_stream_says_the_same():
    asked = wire.read(body(U, tools=[clients.TOOL]), ())
    made = wire.complete(answer(CALL), asked, 'x').body
    lines = wire.streamed(made, usage=True).decode().strip().split('\n\n')
    assert lines[-1] == 'data: [DONE]'
    first, last, usage = (json.loads(line.removeprefix('data: ')) for line in lines[:-1])
    assert first['choices'][0]['delta']['tool_calls'][0]['function']['name'] == 'look'
    assert (
        last['choices'][0]['finish_reason'] == 'tool_calls' and usage['usage']['total_tokens'] == 0
    )


# ---- conversations -------------------------------------------------------------------------------


def said_of(text='A', calls=None, **more):
    return {'role': 'assistant', 'content': text} | ({'tool_calls': calls} if calls else {}) | more


@pytest.mark.parametrize(
    'copy',
    [
        said_of(),
        said_of(' A\n'),
        said_of([{'type': 'text', 'text': 'A'}]),
        said_of(refusal=None, audio=None, function_call=None),
    ],
    ids=str,
)
def test_a_copy_that_says_the_same_goes_on_with_the_conversation(copy):
    episode = Episode()
    shown, _ = ask(episode, body(U), answer('A'))
    assert shown.opens and shown.branch == 0
    shown, _ = ask(episode, body(U, copy, V), answer('B'))
    assert shown.messages == ({'role': 'user', 'content': 'V'},) and not shown.opens


def test_a_copy_of_a_call_may_spell_its_json_otherwise():
    episode, tools = Episode(), [clients.TOOL]
    _, made = ask(episode, body(U, tools=tools), answer(CALL))
    echo = made['choices'][0]['message']
    echo['content'] = ''
    echo['tool_calls'][0]['function']['arguments'] = '{ "place" :"here" }'
    result = {'role': 'tool', 'tool_call_id': echo['tool_calls'][0]['id'], 'content': 'a wall'}
    shown, _ = ask(episode, body(U, echo, result, tools=tools), answer('B'))
    assert [one['role'] for one in shown.messages] == ['tool'] and not shown.opens


@pytest.mark.parametrize('stop', ['A', 'A\n'])
def test_a_stop_string_may_be_cut_or_there_again(stop):
    episode = Episode(stops=('\n',))
    _, made = ask(episode, body(U, stop=['\n']), answer('A\n', closed=False))
    assert made['choices'][0]['message']['content'] == 'A'
    shown, _ = ask(episode, body(U, said_of(stop), V), answer('B'))
    assert not shown.opens and not shown.appended


@pytest.mark.parametrize(
    ('later', 'more'),
    [
        ((U, said_of('other'), V), {}),
        ((V, said_of(), V), {}),
        ((U, said_of(), V), {'tools': [clients.TOOL]}),
        (({'role': 'system', 'content': 'S'}, U, said_of(), V), {}),
        ((U, said_of('A and more'), V), {}),  # the policy had ended its turn
    ],
)
def test_what_says_something_else_opens_a_branch_or_is_refused(later, more):
    episode = Episode(branches=2)
    ask(episode, body(U), answer('A'))
    shown, _ = ask(episode, body(*later, **more), answer('B'))
    assert shown.opens and shown.branch == 1 and len(shown.messages) == len(later)
    shown, _ = ask(episode, body(U, said_of(), V), answer('C'))
    assert shown.branch == 0 and not shown.opens
    with pytest.raises(Refused, match='harness.branches allows no further one'):
        episode.ask(body(clients.user('W')), False)
    assert [one.code for one in episode.refused] == ['history_rewritten']


def test_a_turn_after_a_thought_opens_a_branch_where_thoughts_are_dropped():
    said = said_of('<think>so</think>A')
    for drops in (False, True):
        episode = Episode(branches=3, drops=drops)
        ask(episode, body(U), answer('<think>so</think>A'))
        shown, _ = ask(episode, body(U, said, V), answer('B'))
        assert shown.opens == drops and shown.branch == drops
        shown, _ = ask(episode, body(U, said, V, said_of('B'), U), answer('C'))
        assert not shown.opens  # B had no thought


def test_text_added_to_an_answer_that_was_cut_is_part_of_its_message():
    episode = Episode()
    ask(episode, body(U, max_tokens=1), answer('A', closed=False, finish='length'))
    shown, _ = ask(episode, body(U, said_of('A and more'), V), answer('B'))
    assert shown.appended == ' and more' and not shown.opens
    shown, _ = ask(episode, body(U, said_of('A and more'), V, said_of('B'), U), answer('C'))
    assert not shown.appended and not shown.opens


def test_what_is_sent_again_is_answered_by_the_same_answer():
    episode = Episode()
    _, made = ask(episode, body(U), answer('A'))
    assert episode.ask(body(U), retried=True)[1] is made and episode.events.empty()
    first, second = [], []
    one = threading.Thread(target=lambda: first.append(episode.ask(body(U, said_of(), V), False)))
    one.start()
    episode.events.get(timeout=5)
    two = threading.Thread(target=lambda: second.append(episode.ask(body(U, said_of(), V), True)))
    two.start()
    episode.answer(answer('B'))
    one.join(), two.join()
    assert first[0][1] is second[0][1] and episode.events.empty()


def test_what_is_sent_again_before_it_was_placed_is_answered_once():
    """It waited for another one, and was answered twice: in two branches."""
    episode, found = Episode(branches=4), {}

    def sends(name, raw, retried):
        def send():
            found[name] = episode.ask(raw, retried)[1]

        thread = threading.Thread(target=send)
        thread.start()
        return thread

    first = sends('a', body(U), False)
    episode.events.get(timeout=5)
    waiting = sends('b', body(V), False)
    while len(episode._calls) < 2:
        time.sleep(0.01)
    again = sends('again', body(V), True)
    episode.answer(answer('A'))
    episode.events.get(timeout=5)
    episode.answer(answer('B'))
    for thread in (first, waiting, again):
        thread.join(5)
    assert found['b'] is found['again'] is not found['a']
    assert len(episode.branches) == 2 and episode.events.empty()


def test_after_the_end_and_from_elsewhere_nobody_is_answered():
    server, episode = endpoint('127.0.0.1', 0), Episode()
    address = server.open(episode)
    client = clients.Client(Task(0, f'{address}/v1', 'k'))
    assert client.reward(reward=0.5)[0] == 200 and episode.reward == {'reward': 0.5}
    for wrong in (dict(reward='much'), dict(reward=1, success='false')):
        status, said = client.reward(**wrong)
        assert status == 400 and said['error']['code'] == 'invalid_reward'
    assert episode.reward == {'reward': 0.5}
    assert client.post('/episodes/guess/v1/chat/completions', body(U))[0] == 410
    assert client.post(f'{client.path}/embeddings', body(U))[0] == 404
    server.close(episode)
    status, said = client.post(f'{client.path}/chat/completions', body(U))
    assert status == 410 and said['error']['code'] == 'episode_over'
    assert client.post('/v1/chat/completions', body(U))[0] == 404  # of no episode


def test_an_episode_whose_request_was_refused_is_freed():
    """Refusals that live as long as the module kept its frames, and with them all that was said."""
    server, episode = endpoint('127.0.0.1', 0), Episode()
    client = clients.Client(Task(0, f'{server.open(episode)}/v1', 'k'))
    episode.refuse(CUT['TURN_BUDGET'])
    status, _ = client.post(f'{client.path}/chat/completions', body(U))
    assert status == CUT['TURN_BUDGET'].status
    server.close(episode)
    gone = weakref.ref(episode)
    del episode
    until = time.monotonic() + 30  # the thread that answered has to leave its frames
    while gone() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert gone() is None


@pytest.mark.parametrize(
    ('earned', 'reward'),
    [
        (0.5, (0.5, None)),
        (True, (1.0, True)),
        ((2, False), (2.0, False)),
        ({'reward': 1, 'success': True}, (1.0, True)),
        ((0.5, np.False_), (0.5, False)),
        ((0.5, 1.0), (0.5, True)),
        ([0.5, None], (0.5, None)),
    ],
)
def test_rewards_are_numbers_pairs_or_mappings(earned, reward):
    assert reward_of(earned, '') == reward


@pytest.mark.parametrize('error', [SystemExit, KeyboardInterrupt, asyncio.CancelledError, KeyError])
def test_whatever_a_harness_raises_ends_its_episode(error, monkeypatch):
    def run(task):
        raise error('over')

    monkeypatch.setattr(task_of_harness, 'import_callable', lambda *_: run)
    end = task_of_harness.Call('x:y').play(Task(0, 'http://x', 'k'))
    assert error.__name__ in end.error and 'over' in end.error


@pytest.mark.parametrize('earned', [None, 'good', float('nan'), 1e9, {}, ('a', 'b')])
def test_what_is_no_reward_is_a_fault(earned):
    with pytest.raises(WorldError, match='which is no reward'):
        reward_of(earned, '')


@pytest.mark.parametrize('success', [{'steps': 5}, 'false', 2, float('nan'), [], np.ones(2)])
def test_what_is_no_success_is_a_fault(success):
    """Whatever was true in Python, such as an info beside the reward, was a success."""
    for earned in ((0.0, success), {'reward': 0.0, 'success': success}):
        with pytest.raises(WorldError, match='of its success'):
            reward_of(earned, '')
        assert isinstance(workers.plain(earned), str)  # no reward, in a worker too


# ---- played --------------------------------------------------------------------------------------


@functools.cache
def played(
    run,
    max_tokens=420,
    max_response=6,
    max_turns=6,
    log='',
    replay='',
    tokenizer=tiny.tokenizer,
    ahead=False,
    **settings,
):
    """(rollout of 16 episodes by random weights, task).

    log: a file for what harnesses say; replay: one that answers in their place. ahead: that of the
    second of two steps, whose episodes begin beside those of the first.
    """
    env = HarnessEnvironment(run=f'harness_clients:{run}', num_items=200, **settings)
    params = env.make_params(num_levels=16)
    params = params._replace(items=np.sort(params.items))
    talk = conversation.Conversation(build_chat(tokenizer()), '', 48)
    task = conversation.build_host_task(env, params, talk, max_turns=max_turns)
    sizes = dict(max_response=max_response, max_tokens=max_tokens, temperature=1.0)
    pool = LoggedPool(read_log(replay), talk.prompt) if replay else None
    collect = host_worlds.collector(talk, env.make, pool=pool, **sizes)
    if log:
        collect.worlds.log = ReplyLog(log)
        collect.worlds.log.about = {'step': 0}
    try:
        listed, params = tiny.episodes('frozen_lake'), tiny.untrained()
        if not ahead:
            return jax.device_get(collect(params, task, listed, tiny.KEY))[0], task
        for step in (0, 1):
            out, _ = collect.collect_ahead(
                params,
                task,
                lambda of: listed.replace(token_stream=16 * of + listed.token_stream),
                tiny.KEY,
                step=step,
                last=1,
                staleness=1,
            )
        return jax.device_get(out), task
    finally:
        collect.worlds.close()


def scored(rollout, count, width=0):
    """Log-probabilities of the trainer, a row for each conversation."""
    rollout = jax.tree.map(jnp.asarray, rollout)
    found = windows.Branches(count, PREFIX, width).windows(rollout)
    tokens, attention = windows.split_turns((rollout.tokens, rollout.attention_mask), found)
    states = tiny.hidden(tiny.untrained(), tokens, positions_of(attention), attention)
    logprobs, _ = losses.token_logprobs(states, tiny.head(tiny.untrained()), tokens)
    return np.asarray(windows.put_back(logprobs, found, rollout.tokens.shape[1])), found


@pytest.mark.parametrize(
    ('run', 'branches', 'ahead'),
    [
        ('two_turns', 1, False),
        ('branching', 4, False),
        ('branching', 4, True),
        ('limited', 1, False),
        ('parallel', 2, False),
    ],
)
def test_the_trainer_has_the_samplers_probabilities(run, branches, ahead):
    out, _ = played(run, branches=branches, max_tokens=1600, ahead=ahead)
    assert not ahead or out.staleness.any()
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()
    logprobs, found = scored(out, branches)
    gap = np.where(out.action_mask, logprobs - out.logprobs, 0.0)
    assert out.action_mask.sum() > 50 and np.abs(gap).max() <= 1e-5
    # Each sampled token trains once
    rows = windows.own_rows(jnp.asarray(out.action_mask), found)
    assert int(rows.sum()) == out.action_mask.sum()


@pytest.mark.parametrize('run', ['two_turns', 'branching'])
def test_what_conversations_share_is_read_once_and_changes_no_bit(run, monkeypatch):
    """Tools and a system message in front of all; the clock decides who copies from whom."""
    sizes = dict(branches=4, max_tokens=1600)
    counted = []

    def counting(playing):
        counted.append(dict(playing.counted))
        return counters_of(playing)

    monkeypatch.setattr(host, 'counters_of', counting)
    shared = played.__wrapped__(run, **sizes)[0]
    monkeypatch.setattr(host_rollout.HostRollout, 'donor', lambda *_: (None, 0))
    alone = played.__wrapped__(run, **sizes)[0]
    host_worlds.assert_same(shared, alone)
    assert counted[0]['shared'] >= 200 and 'shared' not in counted[1]
    assert counted[0]['reads'] < counted[1]['reads']


def texts_of(out, branch, tokenizer=tiny.tokenizer):
    """The text of a conversation of each episode."""
    found = []
    for b in range(len(out.tokens)):
        own = (out.turn[b] >= 0) & (out.branch[b][np.maximum(out.turn[b], 0)] == branch)
        own |= np.arange(len(own)) < PREFIX
        found.append(tokenizer().decode(out.tokens[b][own].tolist(), show_special=True))
    return found


def test_a_row_is_the_conversation_in_the_words_of_the_template():
    out, task = played('two_turns')
    for b, text in enumerate(texts_of(out, 0)):
        item = task.env_params.items[out.level[b]]
        assert text.startswith(
            f'<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nItem {item}.<|im_end|>\n'
            '<|im_start|>assistant\n'
        )
        assert '<|im_end|>\n<|im_start|>user\nMore 0.<|im_end|>\n<|im_start|>assistant\n' in text
    assert (out.num_turns == 2).all() and (out.rewards[:, 0] == 0).all()


def test_a_row_of_llama_3_is_in_its_own_words():
    out, task = played('two_turns', tokenizer=llama_tokenizer, max_tokens=640)
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()
    opened = '<|start_header_id|>{}<|end_header_id|>\n\n{}'
    first = opened.format('system', 'Today: 26 Jul 2024\n\nBe brief.<|eot_id|>')
    later = (
        '<|eot_id|>' + opened.format('user', 'More 0.<|eot_id|>') + opened.format('assistant', '')
    )
    for b, text in enumerate(texts_of(out, 0, llama_tokenizer)):
        item = f'Item {task.env_params.items[out.level[b]]}.<|eot_id|>'
        asked = opened.format('user', item) + opened.format('assistant', '')
        assert text.startswith(f'<|begin_of_text|>{first}{asked}') and later in text
    logprobs, _ = scored(out, 1)
    gap = np.where(out.action_mask, logprobs - out.logprobs, 0.0)
    assert out.action_mask.sum() > 50 and np.abs(gap).max() <= 1e-5


def test_branches_are_conversations_of_their_own():
    out, task = played('branching', branches=4, max_tokens=1600)
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
def test_the_order_of_requests_of_several_conversations_changes_no_answer(other):
    sizes = dict(branches=3, max_tokens=1000)
    one, other = played('in_turn', **sizes)[0], played(other, **sizes)[0]

    def said(out, episode):
        """(text, log-probabilities) of the conversations of an episode, by their texts."""
        texts = [texts_of(out, branch)[episode] for branch in range(3)]
        of = windows.branch_of(out.turn, out.branch, np)[episode]
        sampled = [out.logprobs[episode][(of == n) & out.action_mask[episode]] for n in range(3)]
        return sorted(zip(texts, map(tuple, sampled), strict=True))

    for b in range(len(one.tokens)):
        for (text, logprobs), (again, others) in zip(said(one, b), said(other, b), strict=True):
            assert text == again
            np.testing.assert_allclose(logprobs, others, atol=1e-5)
    # What begins in the same way is drawn anew
    assert any(
        not texts_of(one, 0)[b].startswith(texts_of(one, 2)[b].removesuffix('<|im_end|>'))
        for b in range(len(one.tokens))
    )


def test_an_episode_of_one_conversation_is_drawn_from_the_stream_of_the_episode():
    for most, plain in ((1, True), (2, False)):
        episode = Episode(branches=most)
        shown, _ = ask(episode, body(U), answer('A'))
        assert (shown.stream == 0) == plain
    later, _ = ask(episode, body(U, said_of(), V), answer('B'))
    again, _ = ask(episode, body(U), answer('C'))
    assert later.stream == shown.stream and again.stream == shown.stream + 1


def test_a_harness_that_swallows_a_refusal_is_counted_and_reported_once(capsys):
    endpoint('127.0.0.1', 0).warned.clear()
    out, _ = played('swallowing')
    assert (out.success & (out.rewards[:, 0] == 1)).all()
    assert (out.figures[:, 2] == 1).all()  # refused
    said = capsys.readouterr().err
    assert said.count('WARNING: a harness earned a reward although a request was refused') == 1
    assert '(unknown_stop: ' in said
    out, _ = played('talkative', max_turns=3)  # what ends for want of turns is none of its doing
    assert (out.figures[:, 2] == 0).all()


def test_the_first_tool_call_that_cannot_be_parsed_is_printed(capsys):
    endpoint('127.0.0.1', 0).warned.clear()
    harness = HarnessEnvironment(run='agentrl_jax.envs.hosts.harness.boxes:play').make()
    for bad in ('one', 'two'):
        harness.reset(0)
        assert not harness.step(answer(f'<tool_call>\n{bad}\n</tool_call>')).valid
    harness.close()
    printed = capsys.readouterr().err
    assert printed.count('WARNING: the first tool call that cannot be parsed') == 1
    assert r'<tool_call>\none\n</tool_call>' in printed


def test_a_field_that_training_ignores_is_reported_once_by_name(capsys):
    """temperature of a request vanished without a word."""
    endpoint('127.0.0.1', 0).warned.clear()
    world = HarnessEnvironment(run='harness_clients:hot').make()
    for item in range(2):
        world.reset(item)
        assert world.step(answer('A')).done
    said = capsys.readouterr().err
    assert said.count('WARNING') == said.count('the harness set temperature, which training') == 1
    world.close()


def test_a_reward_function_sees_what_a_cut_episode_earned():
    def replied(text, reward=0.0, done=False, **of):
        request = Request(slot=0, stream=0, item=1, **of)
        return Response(request, Reply(text, reward=reward, done=done), 'Do.')

    events = [
        replied('begin'),
        (agents.ACT, 'one'),
        replied('next', 0.5, actions=('one',)),
        replied('shorter', 0.25, actions=('one',), cut='TOKEN_BUDGET'),  # it goes on
        replied('', 0.25, True, actions=('one',), cut='TURN_BUDGET'),
    ]
    told = dict(item=1, success=True, figures=(), trials=np.zeros(3, np.int32))
    (turn,) = rewards.episode_of(events, **told).turns
    assert turn.reward == 0.75 and turn.reply == 'next'


def test_an_episode_that_is_cut_still_earns():
    out, _ = played('talkative', max_turns=3)
    assert (out.episode_stop == EpisodeStop.TURN_BUDGET).all()
    np.testing.assert_allclose(out.rewards.sum(1), 0.3, atol=1e-6)
    out, _ = played('talkative', max_turns=12, max_tokens=150)
    assert (out.episode_stop == EpisodeStop.TOKEN_BUDGET).all() and (out.num_turns < 12).all()
    np.testing.assert_allclose(out.rewards.sum(1), out.num_turns / 10, atol=1e-6)


COMPACT = dict(branches=8, context=100, max_tokens=700, max_turns=14)


def test_a_harness_goes_on_with_a_summary_where_its_conversation_is_too_long(tmp_path):
    log = str(tmp_path / 'replies.jsonl')
    out, _ = played('compacting', **COMPACT, log=log)
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()
    np.testing.assert_allclose(out.rewards.sum(1), 0.7, atol=1e-6)
    assert (out.branch.max(1) >= 2).all() and (out.num_turns > 7).all()
    of = windows.branch_of(out.turn, out.branch, np)
    lengths = PREFIX + (of[:, None] == np.arange(8)[:, None]).sum(2)
    assert lengths.max() <= 100 and (out.attention_mask.sum(1) > 200).all()
    # The policy's own summaries train in their rows, which are no wider than a conversation
    summaries = texts_of(out, 1)
    assert all(text.startswith('<|im_start|>user\nSum up ') for text in summaries)
    assert all((out.action_mask[b] & (of[b] == 1)).any() for b in range(len(of)))
    logprobs, found = scored(out, 8, 100)
    assert found.index.shape[2] == 100
    gap = np.where(out.action_mask, logprobs - out.logprobs, 0.0)
    assert np.abs(gap).max() <= 1e-5
    host_worlds.assert_same(played('compacting', **COMPACT, replay=log)[0], out)


def test_the_row_of_all_conversations_bounds_them_too():
    """What an episode has earned counts, also where nothing is left for a summary."""
    out, _ = played('compacting', **COMPACT | {'max_tokens': 150}, blamed_reward=-1.0)
    assert (out.episode_stop == EpisodeStop.TOKEN_BUDGET).all()
    assert (out.rewards.sum(1) == -1).all() and (out.attention_mask.sum(1) <= 150).all()


def test_a_conversation_that_is_refused_leaves_others_their_turns():
    episode = Episode(branches=2)
    ask(episode, body(U), answer('A'))
    refused = []

    def too_long():
        with pytest.raises(Refused, match='context') as error:
            episode.ask(body(U, said_of(), V), False)
        refused.append(error.value.code)

    thread = threading.Thread(target=too_long)
    thread.start()
    episode.events.get(timeout=5)
    episode.refuse(CUT['TOKEN_BUDGET'], branch=True)
    thread.join()
    too_long()  # at once: the conversation is refused, and no event of the episode
    assert refused == ['context_length_exceeded'] * 2 and episode.events.empty()
    shown, _ = ask(episode, body(V), answer('B'))
    assert shown.opens and shown.branch == 1
    assert len(episode.refused) == 2


def test_an_answer_has_no_more_tokens_than_its_client_wants():
    out, _ = played('limited')
    first = (out.action_mask & (out.turn == 0)).sum(1)
    assert (first <= 2).all() and (first == 2).any()
    cut = out.turn_stop[:, 0] == TurnStop.LENGTH
    assert cut.any()
    for text in np.array(texts_of(out, 0))[cut]:
        assert ' (cut)<|im_end|>\n<|im_start|>user\nOn.' in text


def test_a_crash_costs_its_episode_unless_the_policy_is_to_blame():
    out, task = played('crashing')
    odd = task.env_params.items[out.level] % 2 == 1
    assert odd.any() and not odd.all()
    assert ((out.episode_stop == EpisodeStop.ENV_ERROR) == odd).all()
    out, _ = played('crashing', blames=('OverflowError',), blamed_reward=-1.0)
    assert (out.episode_stop == EpisodeStop.TERMINATED).all()
    assert (out.rewards[odd, 0] == -1).all() and (out.rewards[~odd, 0] == 1).all()


def test_a_harness_that_leaves_its_program_is_a_fault():
    with pytest.raises(WorldsFailed, match='16 of 16 episodes were lost .*SystemExit: 3'):
        played('leaving')


def test_neighbours_of_a_harness_that_hangs_are_the_same_to_the_bit():
    out, task = played('silent', start_s=0.5)
    alone, _ = played('two_turns')
    hangs = task.env_params.items[out.level] % 2 == 1
    assert (out.episode_stop[hangs] == EpisodeStop.ENV_ERROR).all()
    assert (out.tokens[~hangs] == alone.tokens[~hangs]).all()
    assert (out.logprobs[~hangs] == alone.logprobs[~hangs]).all()


# ---- workers -------------------------------------------------------------------------------------


def running():
    """The command lines of all processes."""
    found = subprocess.run(['ps', 'axwwo', 'args'], capture_output=True, text=True, check=True)
    return found.stdout


def gone(mark):
    """Waits until no process has the mark in its command line: killed ones take a moment."""
    until = time.monotonic() + 20
    while mark in running():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_workers_play_what_threads_play_and_end_with_the_pool():
    out, _ = played('two_turns', workers=3)
    host_worlds.assert_same(out, played('two_turns')[0])
    gone('harness.workers harness_clients:two_turns')


def test_a_worker_that_hangs_or_dies_is_replaced_and_its_neighbours_are_the_same_to_the_bit():
    out, task = played('dangerous', workers=4, silent_s=2.0, blames=('OverflowError',))
    kind, alone = clients.dangers(task.env_params.items[out.level]), played('two_turns')[0]
    assert set(kind) == {0, 1, 2, 3}
    lost = out.episode_stop == EpisodeStop.ENV_ERROR
    assert (lost == ((kind == 1) | (kind == 2))).all()
    assert (out.rewards[kind == 3] == 0).all()  # blamed
    for name in ('tokens', 'logprobs', 'rewards'):
        assert (getattr(out, name)[kind == 0] == getattr(alone, name)[kind == 0]).all()
    gone('left_by_worker')
    gone('harness.workers harness_clients:dangerous')


RUN = """
import sys, threading
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.envs.hosts.harness.workers import Workers
workers = Workers('harness_clients:alone', 1)
workers.enter()
print(workers.take().play(Task(0, 'http://127.0.0.1:1/v1', 'k')).returned, flush=True)
workers.take().play(Task(1, 'http://127.0.0.1:1/v1', 'k'))
"""


def test_a_worker_and_all_that_it_has_started_end_with_a_run_that_is_killed():
    paths = os.pathsep.join(sys.path)
    run = subprocess.Popen(
        [sys.executable, '-c', RUN],
        env=os.environ | {'PYTHONPATH': paths},
        stdout=subprocess.PIPE,
    )
    assert run.stdout.readline() == b'[0.25, True]\n'
    until = time.monotonic() + 20
    while 'left_by_alone' not in running():
        assert time.monotonic() < until
        time.sleep(0.1)
    run.kill(), run.wait(), run.stdout.close()
    gone('left_by_alone')
    gone('harness.workers harness_clients:alone')


def test_an_episode_waits_for_a_worker_and_no_more_than_all_are_started(monkeypatch):
    monkeypatch.setattr(workers, 'WAIT_S', 0.01)
    pool = workers.Workers('harness_clients:alone', 1)
    pool.enter()
    lease = pool.take()
    with pytest.raises(WorldDown, match='all harness.workers=1 are at work'):
        pool.take()
    lease.stop()
    assert 'exit code' in lease.play(Task(0, 'http://127.0.0.1:1/v1', 'k')).error
    fresh = pool.take()  # in the place of the one that was killed
    assert fresh.play(Task(0, 'http://127.0.0.1:1/v1', 'k')).returned == [0.25, True]
    fresh.stop()  # its episode is over: the worker may be at another
    assert pool.idle == [fresh.worker] and fresh.worker.alive
    pool.leave()
    assert not pool.idle and not fresh.worker.alive


@pytest.mark.parametrize(
    ('returned', 'sent'),
    [(True, (1.0, True)), (0.5, (0.5, None)), (None, None), ('much', 'much'), ({}, '{}')],
)
def test_what_a_worker_sends_of_what_was_returned(returned, sent):
    assert workers.plain(returned) == sent


@pytest.mark.parametrize(
    'settings, field',
    [
        (dict(command=()), 'run'),
        (dict(run='harness_clients:two_turns'), 'run'),
        (dict(command=(), run='harness_clients:nobody'), 'run'),
        (dict(command=(), run='harness_clients:two_turns', thoughts='drop'), 'thoughts'),
        (dict(context=9), 'context'),
        (dict(workers=2), 'workers'),
        (dict(public_url='http://me'), 'port'),
        (dict(public_url='me', port=80), 'public_url'),
    ],
)
def test_settings_of_a_harness_that_do_not_go_together_are_rejected(settings, field):
    (broken,) = broken_by(HarnessEnvironment(**dict(command=('x',)) | settings))
    assert f'harness.{field}' in broken.fields


@pytest.mark.parametrize(
    ('code', 'why'),
    [
        ('import no_such_client', "No module named 'no_such_client'"),
        ('raise RuntimeError("no key")', 'RuntimeError: no key'),
    ],
)
def test_a_module_of_a_harness_that_cannot_be_imported_is_named(code, why, tmp_path, monkeypatch):
    """'my_agent:play' was said to be no module and callable, though its import of openai failed."""
    (tmp_path / 'broken_agent.py').write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (broken,) = broken_by(HarnessEnvironment(run='broken_agent:play'))
    assert 'the import of broken_agent failed' in broken.sentence and why in broken.sentence


def test_dataclasses_of_the_wire_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Said('user', 'U').role = 'tool'


# ---- experts -------------------------------------------------------------------------------------

BOXES = dict(
    run='agentrl_jax.envs.hosts.harness.boxes:play',
    expert='agentrl_jax.envs.hosts.harness.boxes:expert',
)


def demonstrated(episodes, **settings):
    """(texts of rows, texts of what trains in them) of demonstrations by an expert, which fit."""
    found, cut = demonstrated_within(2000, episodes, **settings)
    assert not cut
    return found


def demonstrated_within(max_tokens, episodes, **settings):
    """The same, as far as they fit; how many do not."""
    env = HarnessEnvironment(num_items=200, **settings)
    talk = conversation.Conversation(build_chat(tiny.tokenizer()), '', 48)
    task = conversation.build_host_task(env, env.make_params(num_levels=16), talk, max_turns=6)
    how = dict(seed=0, episodes=episodes, oracle=1.0, max_tokens=max_tokens)
    found, cut = demonstrations.demonstrate_on_hosts(task, talk, env.player(), **how)
    found = jax.device_get(found)

    def texts(masks):
        rows = zip(found.tokens, masks, strict=True)
        return [tiny.tokenizer().decode(row[mask], show_special=True) for row, mask in rows]

    return (texts(found.attention_mask), texts(found.mask)), cut


def test_an_expert_answers_in_the_place_of_the_policy():
    rows, trained = demonstrated(12, **BOXES)
    call = '<tool_call>\n{{"name": "open", "arguments": {{"box": "{}"}}}}\n</tool_call><|im_end|>'
    assert len(rows) == 12
    for row, said in zip(rows, trained, strict=True):
        hinted = 'It is like' in row
        if hinted:
            (prize,) = (b for b, h in zip(boxes.BOXES, boxes.HINTS, strict=True) if h in row)
            assert said == call.format(prize)
        elif 'Empty. The' in row:
            prize = row.partition('Empty. The ')[2].partition(' one')[0]
            assert said == call.format('red') + call.format(prize)
        assert row.count(said[-20:]) and row.endswith(said[-40:])
    assert any('Empty. The' in row for row in rows) and any('It is like' in row for row in rows)


def test_the_oracle_column_of_a_harness_is_its_experts_and_nobody_plays_at_random():
    env = HarnessEnvironment(num_items=200, **BOXES)
    params = env.make_params('validation', num_levels=8)
    assert reference_success(env, params, 3) == {'oracle': 1.0}
    assert env.quick and env.has_player() and not HarnessEnvironment(run=BOXES['run']).quick


def test_demonstrations_of_several_conversations_are_a_row_each():
    rows, trained = demonstrated(
        2, run='harness_clients:branching', expert='harness_clients:polite', branches=4
    )
    assert len(rows) == 6
    assert (
        trained == ['Yes 2.<|im_end|>Yes 4.<|im_end|>', 'Yes 3.<|im_end|>', 'Yes 4.<|im_end|>'] * 2
    )


def test_demonstrations_that_do_not_fit_are_counted_and_leave_no_empty_rows():
    """They vanished without a word, and a run in which none fitted divided by zero."""
    _, whole = demonstrated(12, **BOXES)
    twice = [said.count('<|im_end|>') for said in whole].count(2)
    (_, trained), cut = demonstrated_within(560, 12, **BOXES)  # one answer each
    assert cut == twice == 8 and [said.count('<|im_end|>') for said in trained] == [1] * 12
    (_, trained), cut = demonstrated_within(538, 12, **BOXES)  # two answers have no more tokens
    assert cut == 10 and len(trained) == 2 and all(trained)
    with pytest.raises(ValueError, match='no demonstrated answer fits into rollout.max_tokens=20'):
        demonstrated_within(20, 12, **BOXES)
    branching = dict(run='harness_clients:branching', expert='harness_clients:polite')
    with pytest.raises(ValueError, match='fits into harness.context=9: raise it'):
        demonstrated_within(2000, 2, branches=4, context=9, **branching)


def test_a_run_says_how_many_demonstrations_do_not_fit(capsys):
    changes = {f'harness.{name}': value for name, value in BOXES.items()}
    changes |= {'clone.episodes': 12, 'clone.oracle': 1.0, 'env.max_turns': 6}
    changes |= {'rollout.max_tokens': 560, 'harness.num_items': 200}
    cfg = read_config(micro_runs.plain('harness', **changes), None)
    talk = conversation.Conversation(build_chat(tiny.tokenizer()), '', 48)
    env = cfg.worlds[0]
    task = conversation.build_host_task(env, env.make_params(num_levels=16), talk, max_turns=6)
    worlds = {'harness': types.SimpleNamespace(conversation=talk)}
    cloning.own_demonstrations(types.SimpleNamespace(worlds=worlds), cfg, task)
    said = capsys.readouterr().err
    assert 'WARNING: 8 of 12 demonstrated episodes of harness do not fit into' in said
    assert 'rollout.max_tokens=560' in said


def test_episodes_of_a_harness_are_no_trajectories(tmp_path, monkeypatch):
    """Tools came back twice or not at all, and files were written that cloning refused."""
    monkeypatch.setattr(evaluate.hosts, 'playing', None)  # not reached
    for changes in ({}, {'harness.branches': 2}):
        cfg = micro_runs.plain('harness', **{'harness.run': BOXES['run']} | changes)
        with pytest.raises(ValueError, match='--trajectories: episodes of harness are chats'):
            evaluate.evaluate(cfg, '', str(tmp_path), None, str(tmp_path / 'played.jsonl'))
    assert not list(tmp_path.iterdir())


def test_an_expert_that_says_nothing_is_a_fault():
    player = HarnessEnvironment(**BOXES | {'expert': 'harness_clients:mute'}).player()
    player.reset(0)
    with pytest.raises(WorldError, match='harness_clients:mute.* answers None'):
        player.best()
    player.close()


def test_what_cloning_from_a_harness_needs_is_said():
    def refused(**changes):
        with pytest.raises(ValueError) as error:
            config = micro_runs.plain('harness', **{'harness.run': BOXES['run']} | changes)
            read_config(config)
        return str(error.value)

    assert 'clone.episodes=4' in refused(**{'clone.episodes': 4})
    known = {'clone.episodes': 4, 'harness.expert': BOXES['expert'], 'clone.oracle': 0.5}
    assert 'clone.oracle=0.5' in refused(**known)
    longer = {'harness.branches': 2, 'harness.context': 10**6}
    assert 'harness.context=1000000' in refused(**longer)


def test_patience_that_a_run_does_not_have_is_refused():
    """A slot was given up after hosts.timeout_s=120, whatever harness.silent_s said."""

    def config(**changes):
        return micro_runs.plain('harness', **{'harness.run': BOXES['run']} | changes)

    for field in ('start_s', 'silent_s'):
        with pytest.raises(ValueError, match=f'hosts.timeout_s=.*harness.{field}=600'):
            read_config(config(**{f'harness.{field}': 600.0}))
        read_config(config(**{f'harness.{field}': 600.0, 'hosts.timeout_s': 600.0}))


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


@functools.cache
def programs(tmp):
    path = tmp / 'program.py'
    path.write_text(PROGRAM)
    env = HarnessEnvironment(
        command=(sys.executable, str(path), '{item}'),
        silent_s=4.0,
        blames=('OverflowError',),
        blamed_reward=-1.0,
    )
    return env


def test_programs_post_rewards_crash_and_are_killed_with_their_children(tmp_path):
    env = programs(tmp_path)
    talk = conversation.Conversation(build_chat(tiny.tokenizer()), '', 48)
    params = env.make_params(num_levels=16)
    params = params._replace(items=np.arange(16, dtype=np.int32) % 3)
    task = conversation.build_host_task(env, params, talk, max_turns=4)
    sizes = dict(max_response=6, max_tokens=200, temperature=1.0)
    collect = host_worlds.collector(talk, env.make, **sizes)
    try:
        listed = tiny.episodes('frozen_lake')
        out = jax.device_get(collect(tiny.untrained(), task, listed, tiny.KEY))[0]
    finally:
        collect.worlds.pool.close()
    kind = task.env_params.items[out.level]
    assert set(kind) == {0, 1, 2}
    assert out.success[kind == 0].all() and (out.rewards[kind == 0, 0] == 0.5).all()
    assert (out.rewards[kind == 1, 0] == -1).all()
    assert (out.episode_stop[kind == 2] == EpisodeStop.ENV_ERROR).all()
    gone('left_alone')
