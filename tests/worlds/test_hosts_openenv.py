"""The OpenEnv client: on a fake server, and on OpenEnv's own server if installed."""

import contextlib
import json
import socket
import threading

import pytest
import uvicorn
from websockets.sync import server as websockets_server

from agentrl_jax.envs.hosts.openenv import OpenEnv, Play
from agentrl_jax.envs.hosts.world import Reply, WorldDown, WorldError


class Sessions:
    """A server that echoes actions in openenv 0.10's messages; one session at a time."""

    def __init__(self):
        self.open = threading.Semaphore(1)
        self.received, self.answers = [], {}  # answers: raw messages that replace the right ones
        self.server = websockets_server.serve(self.session, '127.0.0.1', 0, ping_interval=0.05)
        port = self.server.socket.getsockname()[1]
        self.url = f'http://127.0.0.1:{port}'
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def session(self, socket):
        if not self.open.acquire(blocking=False):
            return socket.send(error('CAPACITY_REACHED', 'all sessions are taken'))
        with contextlib.ExitStack() as stack:
            stack.callback(self.open.release)
            for raw in socket:
                message = json.loads(raw)
                self.received.append(message)
                if message['type'] == 'close':
                    return None
                socket.send(self.answer(message))

    def answer(self, message):
        kind, data = message['type'], message['data'] if 'data' in message else {}
        if kind in self.answers:
            return self.answers.pop(kind)
        if kind == 'reset':
            return observation(f'item {data["seed"]}', None, False)
        if data['text'] == 'raise':
            return error('EXECUTION_ERROR', 'no such action')
        return observation(f'heard {data["text"]}', 1, data['text'] == 'end')

    def freed(self):
        """Return whether the session is freed in time; the server detects a close with a delay."""
        free = self.open.acquire(timeout=10)
        self.open.release()
        return free

    def close(self):
        self.server.shutdown()
        self.thread.join()


def observation(text, reward, done):
    data = {'observation': {'echo': text, 'n': 1}, 'reward': reward, 'done': done}
    return json.dumps({'type': 'observation', 'data': data})


def error(code, text):
    return json.dumps({'type': 'error', 'data': {'message': text, 'code': code}})


@pytest.fixture(scope='module')
def sessions():
    with contextlib.closing(Sessions()) as running:
        yield running


@pytest.fixture
def world(sessions):
    sessions.received.clear()
    with contextlib.closing(open_env(sessions)) as world:
        yield world
    sessions.answers.clear()


def open_env(sessions, **settings):
    chosen = dict(action_field='text', observation_field='echo', timeout_s=5.0) | settings
    return OpenEnv(Play(sessions.url, **chosen))


def test_an_episode_is_a_reset_and_steps_in_one_session(sessions, world):
    assert sessions.freed()
    assert world.reset(7) == 'item 7'
    assert world.step('go') == Reply('heard go', 1.0, False, None)
    assert world.step('end') == Reply('heard end', 1.0, True, None)
    assert world.reset(8) == 'item 8'
    world.close()
    world.close()
    assert sessions.freed()
    assert sessions.received == [
        {'type': 'reset', 'data': {'seed': 7}},
        {'type': 'step', 'data': {'text': 'go'}},
        {'type': 'step', 'data': {'text': 'end'}},
        {'type': 'reset', 'data': {'seed': 8}},
        {'type': 'close'},
    ]


def test_a_session_survives_a_long_thought(sessions, world):
    """Pings arrive every 50 ms and are answered while the client is idle."""
    assert sessions.freed()
    world.reset(0)
    threading.Event().wait(0.4)
    assert world.step('go').observation == 'heard go'


def test_a_full_server_is_down_until_a_session_is_free(sessions, world):
    assert sessions.freed()
    world.reset(0)
    other = open_env(sessions)
    with pytest.raises(WorldDown, match='all sessions are taken'):
        other.reset(1)
    world.close()
    assert sessions.freed() and other.reset(1) == 'item 1'
    other.close()
    with pytest.raises(WorldDown, match='cannot be reached'):
        OpenEnv(Play('http://127.0.0.1:9')).reset(0)


def test_an_error_of_an_action_is_a_fault_or_an_observation(sessions, world):
    assert sessions.freed()
    world.reset(0)
    with pytest.raises(WorldError, match='no such action'):
        world.step('raise')
    with pytest.raises(WorldError, match='never reset'):
        world.step('go')
    with contextlib.closing(open_env(sessions, errors_are_shown=True)) as patient:
        assert sessions.freed() and patient.reset(0)
        assert patient.step('raise') == Reply('no such action', valid=False)
        assert patient.step('go').observation == 'heard go'


def reset_when_free(world):
    for _ in range(1000):
        with contextlib.suppress(WorldDown):
            return world.reset(0)
    raise AssertionError('never any room')


@pytest.mark.parametrize(
    'answer',
    [
        'no json',
        '{"type": "state", "data": {}}',
        error('SESSION_ERROR', 'gone'),
        observation('x', float('nan'), False),
        observation('x' * 2**21, 1, False),
    ],
    ids=range(5),
)
def test_an_invalid_answer_is_an_error_and_ends_the_session(sessions, world, answer):
    assert sessions.freed() and world.reset(0)
    sessions.answers['step'] = answer
    with pytest.raises(WorldError):
        world.step('go')
    assert sessions.freed() and world.reset(0)
    assert world.step('go').observation == 'heard go'


def test_the_client_works_with_the_packages_server():
    """Runs if openenv and its dependencies are installed (make test-openenv)."""
    http_server = pytest.importorskip(
        'openenv.core.env_server.http_server', reason='make test-openenv runs it'
    )
    from openenv.core.env_server import interfaces, types

    class EchoAction(types.Action):
        text: str

    class EchoReply(types.Observation):
        echo: str

    class Echo(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = types.State()

        def reset(self, seed=None, episode_id=None, **_):
            return EchoReply(echo=f'item {seed}')

        def step(self, action, timeout_s=None, **_):
            if action.text == 'raise':
                raise ValueError('no such action')
            return EchoReply(echo=f'heard {action.text}', reward=1.0, done=action.text == 'end')

    listener = socket.create_server(('127.0.0.1', 0))
    app = http_server.create_app(Echo, EchoAction, EchoReply, max_concurrent_envs=1)
    server = uvicorn.Server(uvicorn.Config(app, log_level='error'))
    thread = threading.Thread(target=server.run, kwargs={'sockets': [listener]})
    thread.start()
    url = f'http://127.0.0.1:{listener.getsockname()[1]}'
    try:
        worlds = [
            OpenEnv(Play(url, action_field='text', observation_field='echo', errors_are_shown=True))
            for _ in range(2)
        ]
        assert worlds[0].reset(7) == 'item 7'
        with pytest.raises(WorldDown):
            worlds[1].reset(7)
        assert worlds[0].step('go') == Reply('heard go', 1.0, False)
        assert worlds[0].step('raise') == Reply('no such action', valid=False)
        assert worlds[0].step('end').done
        worlds[0].close()
        reset_when_free(worlds[1])
        worlds[1].close()
    finally:
        server.should_exit = True
        thread.join()
