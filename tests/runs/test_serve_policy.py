"""A served policy answers as in its run, and answers every client."""

import contextlib
import json
import re
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import micro_runs
import pytest
from waiting import until

from agentrl_jax import serve_policy
from agentrl_jax.envs.hosts.harness.clients import FORMATS, PATHS
from agentrl_jax.envs.hosts.harness.wire import Refused
from agentrl_jax.envs.hosts.world import Answer
from agentrl_jax.run.config import read as read_config


def served_answer(served, **body):
    return post(served, **body)['choices'][0]['message']['content']


def post(served, path='chat/completions', **body):
    if path == 'chat/completions':
        body = {'messages': [{'role': 'user', 'content': 'Where?'}]} | body
    request = urllib.request.Request(
        f'{served.url}/{path}',
        json.dumps(body).encode(),
        {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def rejected(served, **body):
    """Return the error of a request that fails with status 400."""
    with pytest.raises(urllib.error.HTTPError) as error:
        post(served, **body)
    assert error.value.code == 400
    return json.loads(error.value.read())['error']


def serve(env, changes, slots, devices=micro_runs.one_device):
    with devices():
        cfg = read_config(micro_runs.plain(env, **changes), None)
        served = serve_policy.Served(cfg, slots=slots)
    threading.Thread(target=served.run, daemon=True).start()
    return served


RUN = {'harness.run': 'harness_clients:two_turns'}


@pytest.mark.soak
def test_answers_start_with_the_forced_prefix_of_the_run():
    """The prefix was missing, although the policy never learnt to write it."""
    changes = {'hosts.answer_prefix': 'Go: ', 'rollout.constrain': 'any'}
    changes['hosts.forms'] = ('Go: Up', 'Go: Down')
    answer = served_answer(serve('harness', RUN | changes, 8, contextlib.nullcontext))
    assert answer in ('Go: Up', 'Go: Down')


@pytest.mark.parametrize(
    ('constrain', 'think'), [('own', False), pytest.param('any', True, marks=pytest.mark.soak)]
)
def test_a_policy_of_a_device_world_answers_as_in_its_run(constrain, think):
    """The opening and the grammar were missing, so answers were noise. A request's temperature,
    top_p and seed were ignored, too."""
    changes = {'env.think': think, 'rollout.constrain': constrain, 'rollout.max_response': 24}
    changes['rollout.stop_at_answer'] = not constrain
    served = serve('frozen_lake', changes, 4)
    names = '(Up|Down|Left|Right)'
    action = rf'<answer>{names}( \|\| {names})?</answer>'
    form = rf'<think>[\s\S]*</think>{action}' if think else action
    for _ in range(4):
        output = served_answer(served)
        assert not constrain or re.fullmatch(form, output), output
        assert output.startswith('<think>' if think else '<answer>')
    greedy = {served_answer(served, temperature=0, seed=seed) for seed in range(3)}
    narrow = {served_answer(served, top_p=0, seed=seed) for seed in range(3)}
    assert greedy == narrow and len(greedy) == 1
    output, prompts = set(), set()
    for dialect, (write, read) in FORMATS.items():
        fields = {'model': 'm', 'temperature': 0, 'return_token_ids': True}
        reply = post(served, PATHS[dialect], **write([user('Where?')], fields))
        output.add(read(reply)['content'])
        prompts.add(tuple(reply['prompt_token_ids']))
    texts = {one.rpartition('</think>')[2] for one in greedy | output}  # without its thought
    assert len(texts) == len(prompts) == 1
    counted = FORMATS['messages'][0]([user('Where?')], {'model': 'm'})
    counted = post(served, 'messages/count_tokens', **counted)
    assert counted['input_tokens'] == len(prompts.pop())
    drawn = [served_answer(served, temperature=2, seed=seed) for seed in (5, 6, 7, 5, 6, 7)]
    assert drawn[:3] == drawn[3:] and len(set(drawn)) > 1
    for field, value in (('top_k', 5), ('tool_choice', 'required'), ('top_logprobs', 3)):
        assert rejected(served, **{field: value})['param'] == field
    url = served.url.removesuffix('/v1')
    with urllib.request.urlopen(f'{url}/health', timeout=30) as response:
        assert json.loads(response.read()) == {'status': 'ok'}


def user(text):
    return {'role': 'user', 'content': text}


def desk_answer(desk, messages):
    body = json.loads(desk.ask(json.dumps({'messages': messages}).encode(), False))
    return body['choices'][0]['message']['content']


def play(desk, slots, *, go=None, text='a'):
    """Slots that give every client the same answer; go: an event that each answer waits for."""

    def one():
        client, reply = serve_policy.Client(desk), None
        while True:
            if reply is None or reply.done:
                client.reset(0)
            if go is not None:
                go.wait()
            reply = client.step(Answer(text))

    for _ in range(slots):
        threading.Thread(target=one, daemon=True).start()


def test_parallel_continuations_of_a_conversation_are_all_answered():
    """The second failed with history_rewritten, and ended the first without freeing its slot."""
    desk, go = serve_policy.Desk(4, ()), threading.Event()
    play(desk, 4, go=go)
    go.set()
    history = [user('Where?')]
    history += [{'role': 'assistant', 'content': desk_answer(desk, history)}, user('And now?')]
    go.clear()
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(desk_answer, desk, history) for _ in range(3)]
        until(lambda: len(desk.asking) == 3)
        go.set()
        assert [one.result(60) for one in answers] == ['a'] * 3
    assert len(desk.open) == 3 and not desk.asking
    assert desk_answer(desk, [user('Who?')]) == 'a'


def test_a_repeated_request_returns_the_first_answer():
    """Each retry was a new conversation, and the first answer was discarded."""
    desk, go = serve_policy.Desk(2, ()), threading.Event()
    play(desk, 1, go=go)
    raw = json.dumps({'messages': [user('Where?')]}).encode()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(desk.ask, raw, False)
        until(lambda: len(desk.asking) == 1)
        again = pool.submit(desk.ask, raw, True)
        time.sleep(0.1)
        go.set()
        assert first.result(60) is again.result(60)
    assert desk.ask(raw, True) is first.result() and len(desk.open) == 1


def test_a_response_continues_an_earlier_one_in_its_conversation():
    desk = serve_policy.Desk(2, ())
    play(desk, 2)

    def respond(**fields):
        raw = json.dumps({'model': 'm'} | fields).encode()
        return json.loads(desk.ask(raw, dialect='responses'))['id']

    first = respond(input='Where?')
    respond(input='Who?')
    respond(input='And now?', previous_response_id=first)
    assert len(desk.open) == 2
    with pytest.raises(Refused, match='not one of') as error:
        respond(input='And now?', previous_response_id='resp_other')
    assert error.value.param == 'previous_response_id'


def test_unreadable_messages_are_rejected_with_the_reason_and_use_no_slot():
    def read(observation):
        if 'tools' in str(observation):
            raise ValueError('the chat template of x knows no tools')

    desk = serve_policy.Desk(1, (), read=read)
    play(desk, 1)
    history = [user('Where?')]
    history.append({'role': 'assistant', 'content': desk_answer(desk, history)})
    for messages in ([user('tools')], [*history, user('tools')], [user('tools')]):
        with pytest.raises(Refused, match='knows no tools') as error:
            desk_answer(desk, messages)
        assert (error.value.status, error.value.code) == (400, 'unsupported_messages')
    assert desk_answer(desk, [user('Who?')]) == 'a' and len(desk.open) == 1


def test_a_failed_world_leaves_no_client_waiting():
    desk = serve_policy.Desk(1, ())
    client = serve_policy.Client(desk)
    client.close()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(desk_answer, desk, [user('Where?')])
        client.reset(0)
        client.close()
        with pytest.raises(Refused, match='over'):
            answer.result(60)
    assert not desk.open


@pytest.mark.soak
def test_stop_strings_and_thoughts_match_the_run():
    """Answers continued after the run's stop strings, and contexts kept thoughts that it drops."""
    changes = {'harness.branches': 2, 'harness.thoughts': 'drop', 'hosts.stop': ('END',)}
    cfg = read_config(micro_runs.plain('harness', **RUN | changes), None)
    served = serve_policy.Served(cfg, slots=8, stops=('STOP',))
    assert served.desk.stops == ('END', 'STOP') and served.desk.drops
    history = [user('Where?')]
    for drops, conversations in ((True, 2), (False, 1)):
        desk = serve_policy.Desk(4, (), drops=drops)
        play(desk, 4, text='<think>x</think>a')
        answer = {'role': 'assistant', 'content': desk_answer(desk, history)}
        desk_answer(desk, [*history, answer, user('And now?')])
        assert len(desk.open) == conversations
