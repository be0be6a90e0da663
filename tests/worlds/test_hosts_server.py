"""`python -m agentrl_jax.serve` over real TCP: protocol, errors and clean-up."""

import concurrent.futures
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest
from fastapi import testclient
from waiting import until

from agentrl_jax import serve
from agentrl_jax.envs.hosts import gate, server, workers
from agentrl_jax.envs.hosts.launch import Launched

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLDS = 4  # of each of two workers
TOKEN = 'a-token-that-is-long-enough'


@pytest.fixture(scope='module', autouse=True)
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('PYTHONPATH', f'{ROOT}/tests', prepend=os.pathsep)
        yield


@pytest.fixture(scope='module')
def url(tmp_path_factory):
    log = tmp_path_factory.mktemp('server') / 'log'
    with Launched(
        'hostile_worlds:Hostile', workers=2, worlds=WORLDS, step_s=1.5, log=log
    ) as launched:
        until(lambda: get(launched.url, 'health')[1]['ready'] == 2)
        yield launched.url
        started = [psutil.Process(launched.process.pid), *children(launched.process.pid)]
        launched.process.send_signal(signal.SIGTERM)
        launched.process.wait(20)
    assert not psutil.wait_procs(started, 20)[1]


def call(url, path, body=None, method='POST', raw=None):
    """Return (status, answer), for errors as well."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {'Content-Type': 'application/json'}
    request = urllib.request.Request(f'{url}/{path}', data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            status, sent, content = response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, sent, content = error.code, error.headers, error.read()
    return status, json.loads(content) if 'json' in sent['Content-Type'] else content.decode()


def get(url, path):
    return call(url, path, method='GET')


def create_world(url, item=0, **body):
    """Create and reset a world."""
    status, answer = call(url, 'create', body)
    assert status == 200
    assert call(url, 'reset', {'id': answer['id'], 'data_idx': item})[0] == 200
    return answer['id']


def step(url, world, action):
    return call(url, 'step', {'id': world, 'action': action})


def close(url, *worlds):
    for world in worlds:
        assert call(url, 'close', {'id': world})[0] == 200


def children(pid):
    """Return all descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def test_a_world_follows_agentgyms_protocol(url):
    status, created = call(url, 'create')  # AgentGym's clients of most environments send no body
    world = created['id']
    assert status == 200 and created == {'id': world, 'key': '', 'instruction': 'Count.'}
    first = {'observation': 'item 3', 'reward': 0, 'done': False, 'success': None}
    ids = {'id': world, 'turn': 0}
    status, error = step(url, world, 'go')
    assert (status, error['code']) == (409, 'not_reset')
    status, error = call(url, 'reset', {'id': world, 'data_idx': -1})
    assert (status, error['code']) == (422, 'no_such_item')  # the world is still open
    answer = call(url, 'reset', {'id': world, 'data_idx': 3})
    assert answer == (200, {**first, **ids, 'data_idx': 3})
    assert get(url, f'observation?id={world}') == (200, 'item 3')
    second = {'observation': '3: step 1 go', 'reward': 0.5, 'done': False, 'success': None}
    assert step(url, world, 'go') == (200, {**second, 'id': world, 'turn': 1})
    assert get(url, f'detail?id={world}') == (
        200,
        {**second, 'id': world, 'turn': 1, 'deleted': False},
    )
    _, last = step(url, world, 'end')
    assert last['done'] and last['success'] and last['turn'] == 2
    status, error = step(url, world, 'more')
    assert (status, error['code']) == (409, 'finished')
    assert call(url, 'reset', {'id': world, 'data_idx': 0})[1]['observation'] == 'item 0'
    assert [call(url, 'close', {'id': world}) for _ in range(3)] == [
        (200, True),
        (200, False),
        (200, False),
    ]
    assert step(url, world, 'go') == (
        410,
        {'error': f'The task with environment {world} has been deleted.', 'code': 'closed'},
    )
    assert get(url, '')[1] == 'This is environment hostile_worlds:Hostile.'


@pytest.mark.parametrize(
    'path, body, status, code',
    [
        ('step', {'id': 10**6, 'action': 'go'}, 404, 'unknown_id'),
        ('create', {'lease_s': 601}, 422, 'invalid'),
        ('create', {'lease_s': float('nan')}, 422, 'invalid'),
        ('create', {'commands': 'craft', 'goal': 'x'}, 422, 'invalid'),
        ('nowhere', {}, 404, 'not_found'),
    ],
)
def test_errors_have_a_status_and_a_code(url, path, body, status, code):
    actual, answer = call(url, path, body)
    assert (actual, answer['code']) == (status, code) and answer['error']


def test_malformed_and_too_large_requests_are_rejected_and_not_echoed(url):
    """A lone surrogate caused a 500 after the step, and the world stayed open."""
    world = create_world(url)
    half = json.dumps({'id': world, 'action': '\ud800'})
    spelled = json.dumps({'id': world, 'action': '\ud800'}, ensure_ascii=False)
    wrong = json.dumps({'id': 'x' * 100_000, 'action': ''}).encode()
    large = b'{"id": 0, "action": "' + b'x' * 2**20 + b'"}'
    halves = half.encode(), spelled.encode('utf-8', 'surrogatepass'), half.encode('utf-16')
    for raw in (b'{"id": ', wrong, large, *halves):
        status, reply = call(url, 'step', raw=raw)
        assert (status, reply['code']) == ((413, 'too_large') if raw is large else (422, 'invalid'))
        assert reply['error'] and len(reply['error']) <= 1000 and 'xxx' not in reply['error']
    assert step(url, world, '\U0001f600')[1]['observation'] == '0: step 1 \U0001f600'  # a pair
    close(url, world)


def test_replies_and_prints_of_a_world_reach_only_its_client(url):
    """Worlds use the CPU and leave accelerators to the run."""
    world = create_world(url)
    assert step(url, world, 'platform')[1]['observation'] == 'cpu'
    assert step(url, world, 'half')[1]['observation'] == 'half of a pair: ?'
    assert step(url, world, 'print')[1]['turn'] == 3
    assert step(url, world, 'go')[1]['turn'] == 4
    close(url, world)


@pytest.mark.parametrize('action', ['fault', 'raise', 'nan', 'numpy', 'huge', 'long fault'])
def test_a_world_that_fails_is_closed_and_the_others_continue(url, action):
    worlds = [create_world(url), create_world(url)]
    status, answer = step(url, worlds[0], action)
    assert (status, answer['code']) == (500, 'fault')
    assert ('out of order' in answer['error']) == (action == 'fault')
    assert step(url, worlds[0], 'go')[0] == 410
    assert step(url, worlds[1], 'go')[1]['observation'] == '0: step 1 go'
    close(url, *worlds)


def test_an_unused_lease_expires_and_its_world_can_still_be_closed(url):
    world, leased = create_world(url, lease_s=0.2), create_world(url, lease_s=30)
    open_now = get(url, 'health')[1]['worlds']
    until(lambda: get(url, 'health')[1]['worlds'] < open_now)
    assert step(url, world, 'go')[1]['code'] == 'closed'
    assert call(url, 'close', {'id': world}) == (200, False)
    assert step(url, leased, 'go')[0] == 200
    assert 'agentrl_expired_total 1' in get(url, 'metrics')[1]
    close(url, leased)


def test_a_world_can_be_closed_by_its_key_without_its_id(url):
    create = urllib.request.Request(f'{url}/create', headers={'X-World-Key': 'mine'}, method='POST')
    with urllib.request.urlopen(create, timeout=20) as response:
        created = json.loads(response.read())
    assert created['key'] == 'mine'
    answers = [call(url, 'close', {'key': key}) for key in ('', 'other', 'mine', 'mine')]
    assert answers == [(200, False), (200, False), (200, True), (200, False)]
    assert step(url, created['id'], 'go')[0] == 410


def test_the_server_opens_exactly_the_configured_number_of_worlds(url):
    until(lambda: get(url, 'health')[1]['room'] == 2 * WORLDS)
    worlds = [create_world(url) for _ in range(2 * WORLDS)]
    status, answer = call(url, 'create')
    assert (status, answer['code']) == (503, 'no_room')
    close(url, worlds.pop())
    until(lambda: get(url, 'health')[1]['room'] == 1)
    worlds.append(create_world(url))
    close(url, *worlds)


def test_a_world_rejects_a_call_during_another_one(url):
    world = create_world(url)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda action: step(url, world, action), ['slow', 'slow']))
    assert sorted(status for status, _ in answers) == [200, 409]
    assert step(url, world, 'go')[1]['turn'] == 2
    close(url, world)


def test_a_world_can_be_closed_during_its_last_call(url):
    world = create_world(url)

    def last_call():
        while (answer := step(url, world, 'slow fault'))[0] == 409:
            pass  # the other thread's call was first
        return answer

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        last = pool.submit(last_call)
        until(lambda: step(url, world, 'go')[0] == 409)
        assert call(url, 'close', {'id': world}) == (200, True)
        assert last.result()[1] == {'error': 'out of order', 'code': 'fault'}


@pytest.mark.parametrize('action', ['exit', 'half a line'])
def test_worlds_of_a_dead_worker_do_not_reach_its_replacement(url, action):
    until(lambda: get(url, 'health')[1]['room'] == 2 * WORLDS)
    old = [create_world(url) for _ in range(8)]
    status, answer = step(url, old[0], action)
    assert (status, answer['code']) == (410, 'lost')
    assert step(url, old[1], 'go')[0] == 200  # the other worker's
    assert step(url, old[1], action)[1]['code'] == 'lost'
    until(lambda: get(url, 'health')[1]['room'] == 2 * WORLDS)
    until(lambda: get(url, 'health')[1]['ready'] == 2)
    fresh = [create_world(url, item) for item in range(4)]
    for world in old[2:]:  # one is stepped, the rest are closed
        assert world == old[2] and step(url, world, 'go')[0] == 410 or close(url, world) is None
    assert [step(url, world, 'go')[0] for world in fresh] == [200] * 4
    close(url, *fresh)


def test_a_world_that_hangs_times_out_and_its_worker_restarts(url):
    until(lambda: get(url, 'health')[1]['room'] == 2 * WORLDS)
    world = create_world(url)
    status, answer = step(url, world, 'hang')
    assert (status, answer['code']) == (504, 'timeout')
    until(lambda: 'agentrl_worker_restarts_total' in get(url, 'metrics')[1])
    until(lambda: get(url, 'health')[1]['room'] == 2 * WORLDS)
    close(url, create_world(url))


def test_every_path_except_health_needs_the_token():
    app = server.build_app('textcraft', {}, limits=server.Limits(), token=TOKEN)
    client = testclient.TestClient(app)  # not as a context: no worker starts
    tokens = ('', 'Bearer wrong', f'Bearer {TOKEN}')
    responses = [client.get('/metrics', headers={'Authorization': token}) for token in tokens]
    assert [response.status_code for response in responses] == [401, 401, 200]
    assert client.get('/health').status_code == 503


def test_the_second_half_of_an_answer_does_not_wait_for_an_acknowledgement():
    with gate.listening('127.0.0.1', 0) as listener:
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_other_machines_are_accepted_only_with_a_token(tmp_path):
    for address in ('127.0.0.1', '::1', 'localhost'):
        assert serve.token_of('', address) == ''
    (tmp_path / 'short').write_text('secret\n')
    (tmp_path / 'good').write_text(f'{TOKEN}\nmore\n')
    for path in ('', str(tmp_path / 'short')):
        with pytest.raises(ValueError, match='token'):
            serve.token_of(path, '0.0.0.0')
    assert serve.token_of(str(tmp_path / 'good'), '0.0.0.0') == TOKEN


def test_a_world_that_cannot_be_created_ends_the_server(tmp_path):
    """/health was ok, but every /create returned 500."""
    with pytest.raises(RuntimeError, match='exit code 1'):
        Launched('hostile_worlds:Hostile', settings={'broken': 'no'}, log=tmp_path / 'log')
    (line,) = set((tmp_path / 'log').read_text().splitlines())
    assert line.startswith('error: ') and r'no\ntraining 200/200 success 1.0' in line


@pytest.mark.parametrize(
    'world, settings, error, reason',
    [
        ('hostile_worlds:Unbuildable', {}, ModuleNotFoundError, 'unobtainium'),
        ('hostile_worlds:Hostile', {'depth': 3}, ValueError, "'depth'"),
        ('json:JSONDecoder', {}, ValueError, 'reset'),
    ],
)
def test_invalid_worlds_are_errors_with_a_reason(world, settings, error, reason):
    with pytest.raises(error, match=reason):
        workers.maker(world, settings)


@pytest.mark.soak
def test_a_server_and_its_workers_end_if_their_parent_is_killed():
    program = (
        'import time; from agentrl_jax.envs.hosts.launch import Launched; '
        'made = Launched("hostile_worlds:Hostile"); print(made.process.pid, flush=True); '
        'time.sleep(600)'
    )
    starter = subprocess.Popen([sys.executable, '-c', program], cwd=ROOT, stdout=subprocess.PIPE)
    pid = int(starter.stdout.readline())
    started = [psutil.Process(pid), *children(pid)]
    assert len(started) >= 2  # the server and its worker
    starter.kill()
    starter.wait()
    starter.stdout.close()
    assert not psutil.wait_procs(started, 30)[1]
