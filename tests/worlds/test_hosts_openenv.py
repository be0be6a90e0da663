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
        self.heard, self.answers = [], {}  # answers: raw messages that replace the right ones
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
                self.heard.append(message)
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
        """Return whether the session is freed in time; the server notices an end later."""
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
    with contextlib.closing(Sessions()) as made:
        yield made


@pytest.fixture
def world(sessions):
    sessions.heard.clear()
    with contextlib.closing(made(sessions)) as world:
        yield world
    sessions.answers.clear()


def made(sessions, **settings):
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
    assert sessions.heard == [
        {'type': 'reset', 'data': {'seed': 7}},
        {'type': 'step', 'data': {'text': 'go'}},
        {'type': 'step', 'data': {'text': 'end'}},
        {'type': 'reset', 'data': {'seed': 8}},
        {'type': 'close'},
    ]


def test_a_session_lives_through_a_long_thought(sessions, world):
    """Pings arrive every 50 ms and are answered while the client is idle."""
    assert sessions.freed()
    world.reset(0)
    threading.Event().wait(0.4)
    assert world.step('go').observation == 'heard go'


def test_a_full_server_is_down_until_there_is_room(sessions, world):
    assert sessions.freed()
    world.reset(0)
    other = made(sessions)
    with pytest.raises(WorldDown, match='all sessions are taken'):
        other.reset(1)
    world.close()
    assert sessions.freed() and other.reset(1) == 'item 1'
    other.close()
    with pytest.raises(WorldDown, match='cannot be reached'):
        OpenEnv(Play('http://127.0.0.1:9')).reset(0)


def test_what_an_action_raises_is_a_fault_or_shown(sessions, world):
    assert sessions.freed()
    world.reset(0)
    with pytest.raises(WorldError, match='no such action'):
        world.step('raise')
    with pytest.raises(WorldError, match='never reset'):
        world.step('go')
    with contextlib.closing(made(sessions, errors_are_shown=True)) as patient:
        assert sessions.freed() and patient.reset(0)
        assert patient.step('raise') == Reply('no such action', valid=False)
        assert patient.step('go').observation == 'heard go'


def until_there_is_room(world):
    for _ in range(1000):
        with contextlib.suppress(WorldDown):
            return world.reset(0)
    raise AssertionError('never any room')


@pytest.mark.parametrize(
    'told',
    [
        'no json',
        '{"type": "state", "data": {}}',
        error('SESSION_ERROR', 'gone'),
        observation('x', float('nan'), False),
        observation('x' * 2**21, 1, False),
    ],
    ids=range(5),
)
def test_an_answer_that_is_none_is_an_error_and_the_session_ends(sessions, world, told):
    assert sessions.freed() and world.reset(0)
    sessions.answers['step'] = told
    with pytest.raises(WorldError):
        world.step('go')
    assert sessions.freed() and world.reset(0)
    assert world.step('go').observation == 'heard go'


def test_the_packages_own_server_is_understood():
    """Runs if openenv and its dependencies are installed (make test-openenv)."""
    http_server = pytest.importorskip(
        'openenv.core.env_server.http_server', reason='make test-openenv runs it'
    )
    from openenv.core.env_server import interfaces, types

    class Said(types.Action):
        text: str

    class Heard(types.Observation):
        echo: str

    class Echo(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = types.State()

        def reset(self, seed=None, episode_id=None, **_):
            return Heard(echo=f'item {seed}')

        def step(self, action, timeout_s=None, **_):
            if action.text == 'raise':
                raise ValueError('no such action')
            return Heard(echo=f'heard {action.text}', reward=1.0, done=action.text == 'end')

    listener = socket.create_server(('127.0.0.1', 0))
    app = http_server.create_app(Echo, Said, Heard, max_concurrent_envs=1)
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
        until_there_is_room(worlds[1])
        worlds[1].close()
    finally:
        server.should_exit = True
        thread.join()
