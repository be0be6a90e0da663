"""The client of AgentGym's protocol: on our servers over TCP, and on recorded answers."""

import contextlib
import http.client
import json
import random
import threading

import chaos_proxy
import host_worlds as hosts
import psutil
import pytest

from agentrl_jax.envs.hosts import agentgym, answers, connection, textcraft
from agentrl_jax.envs.hosts.agentgym import AgentGym, Servers
from agentrl_jax.envs.hosts.answers import Read
from agentrl_jax.envs.hosts.connection import Connection
from agentrl_jax.envs.hosts.launch import Launched
from agentrl_jax.envs.hosts.textcraft import TextCraft
from agentrl_jax.envs.hosts.world import Reply, WorldDown, WorldError

SECONDS = 0.3  # timeout in tests of unanswered calls
ROUNDS = 6  # of an episode in tests of network faults
LIMITS = dict(timeout_s=1, most_bytes=2**20)


@pytest.fixture(scope='module')
def launched():
    with Launched('textcraft') as server:
        yield server


def port_of(url):
    return int(url.rpartition(':')[2])


def get(url):
    with contextlib.closing(Connection(url, timeout_s=20, most_bytes=2**20)) as there:
        return there.get('health')


def as_answer(command):
    return f'Thought:\nas planned\n\nAction:\n{command}'


def guesses(text, seed, count):
    return random.Random(seed).choices(textcraft.commands_named(text), k=count)


# ---- against our server ------------------------------------------------------------------------


def test_worlds_give_the_same_replies_through_the_client_as_in_process(launched):
    near, far = Read(TextCraft(), 'only_action'), AgentGym('textcraft', Servers([launched.url]))
    assert near.instruction == far.instruction and near.deterministic == far.deterministic
    with contextlib.closing(far):
        for item in (3, 130, 500, 540):
            text = near.reset(item)
            assert far.reset(item) == text
            plan = near.world.plan()
            for command in [*guesses(text, item, 5), 'inventory', '', *plan]:
                reply = near.step(as_answer(command))
                assert far.step(as_answer(command)) == reply
            assert reply.success and reply.done
        two = 'Action: inventory\nAction: inventory'
        observation = near.step(two).observation
        assert far.step(two) == near.step(two) == Reply(observation, success=True, valid=False)
        assert near.reset(3) == far.reset(3)
        assert far.step(two) == near.step(two) == Reply(observation, success=False, valid=False)


def test_agentgyms_client_can_play_on_our_server(launched):
    """Make the client's calls in its order; every field that it reads is present."""
    there = Connection(launched.url, timeout_s=20, most_bytes=2**20)
    body = {'minecraft_dir': 'agentenv_textcraft/', 'commands': None, 'goal': None}
    created = there.post('create', body)
    assert {'id', 'observation', 'reward', 'done'} <= created.keys()
    assert created['observation'] == TextCraft().reset(created['id'])
    assert there.post('reset', {'id': created['id'], 'data_idx': 3})['observation']
    stepped = there.post('step', {'id': created['id'], 'action': 'get 1 birch logs'})
    assert (
        stepped.items() >= {'observation': 'Got 1 birch logs', 'reward': 0, 'done': False}.items()
    )
    craft = {'id': created['id'], 'action': 'craft 4 birch planks using 1 birch logs'}
    assert there.post('step', craft)['done']
    assert there.post('step', craft)['observation'].startswith('Could not find enough')  # no error
    assert there.post('close', {'id': created['id']}) is True
    there.close()


def test_worlds_spread_over_servers_and_skip_one_that_is_down(launched):
    gone = 'http://127.0.0.1:9'  # discard port: no server
    servers = Servers([gone, launched.url])
    worlds = [AgentGym('textcraft', servers) for _ in range(3)]
    for world in worlds:
        world.reset(0)
    assert servers.candidates() == [launched.url, gone]
    for world in worlds:
        world.close()
        world.close()
    with pytest.raises(WorldDown):
        AgentGym('textcraft', Servers([gone])).reset(0)
    with hosts.Table([('create', 503, {'error': 'full', 'code': 'no_room'})]) as table:
        with pytest.raises(WorldDown):
            AgentGym('textcraft', Servers([table.url])).reset(0)


def test_errors_do_not_contain_the_password_of_an_address():
    down = 'http://me:secret@127.0.0.1:9'
    with hosts.Table([('create', 500, f'no {down}')]) as table:
        for url in (down, table.url.replace('://', '://me:secret@')):
            with pytest.raises(WorldError, match='127.0.0.1') as raised:
                AgentGym('textcraft', Servers([url])).reset(0)
            assert 'secret' not in str(raised.value)
    for make, url in (
        (lambda url: Servers([url, url]), 'http://me:secret@host'),
        (lambda url: Connection(url, **LIMITS), 'ftp://me:secret@host'),
        (lambda url: Connection(url, **LIMITS), 'me:secret@host'),
    ):
        with pytest.raises(ValueError, match='host') as raised:
            make(url)
        assert 'secret' not in str(raised.value)


# ---- network faults ------------------------------------------------------------------------------


def play_through(make, item, commands):
    """Return the replies of an episode; after a failure, a new world replays the actions."""
    world, replies, tries = make(), [], 0
    while len(replies) <= len(commands):
        try:
            again = [world.reset(item)]
            again += [world.step(as_answer(command)) for command in commands[: len(replies)]]
            assert again[:-1] == replies[: len(again) - 1]
            replies.append(again[-1])
            for command in commands[len(replies) - 1 :]:
                replies.append(world.step(as_answer(command)))
        except WorldError:
            tries += 1
            assert tries < 200
            world.close()
            world = make()
    world.close()
    return replies, tries


def expected(item, commands):
    world = Read(TextCraft(), 'only_action')
    return [world.reset(item), *(world.step(as_answer(command)) for command in commands)]


def script(item):
    return [*guesses(TextCraft().reset(item), item, ROUNDS - 1), 'inventory']


def test_a_server_that_is_down_is_detected_by_its_first_connection(monkeypatch):
    """Opening a world waited for a full call timeout, and again for each world left open."""
    tried = []

    def connect(self):
        tried.append(self.timeout)
        raise TimeoutError('timed out')

    monkeypatch.setattr(http.client.HTTPConnection, 'connect', connect)
    servers = Servers(['http://gone'], rest_s=0)
    for number in range(5):
        servers.left('http://gone', {'id': number})
    with pytest.raises(WorldDown):
        AgentGym('textcraft', servers, timeout_s=60.0).reset(0)
    assert len(tried) == 2 and max(tried) <= connection.CONNECT_S < 60  # a close and a create
    assert len(servers.take_left('http://gone')) == 5


@pytest.mark.parametrize('trouble', ['silent', 'dripping', 'huge', 'delayed', 'twice'])
def test_a_network_fault_is_an_error_or_harmless(launched, trouble, monkeypatch):
    monkeypatch.setattr(agentgym, 'CLOSE_S', SECONDS)
    waits = trouble in ('silent', 'dripping', 'huge')
    proxy = chaos_proxy.Proxy(port_of(launched.url), seed=1, chances={trouble: 0.15})
    rounds = 2 if waits else ROUNDS
    with contextlib.closing(proxy):
        servers = Servers([proxy.url], rest_s=0)

        def make():
            return AgentGym('textcraft', servers, timeout_s=SECONDS if waits else 20.0)

        failed = 0
        for item in range(0, 120 if waits else 240, 60):
            replies, tries = play_through(make, item, script(item)[:rounds])
            assert replies == expected(item, script(item)[:rounds])
            failed += tries
    assert proxy.done[trouble]
    if trouble == 'delayed':
        assert not failed
    elif trouble != 'twice':  # a double reply costs a connection and sometimes an error
        assert failed


def test_all_network_faults_at_once_leak_no_descriptors_or_threads(launched):
    threads, files = threading.active_count(), psutil.Process().num_fds()
    worlds = get(launched.url)['worlds']
    quick = [each for each in chaos_proxy.TROUBLES if each not in ('silent', 'dripping', 'huge')]
    proxy = chaos_proxy.Proxy(port_of(launched.url), seed=2, chances=dict.fromkeys(quick, 0.02))
    servers = Servers([proxy.url], rest_s=0)
    with contextlib.closing(proxy):
        for item in range(0, 500, 20):
            replies, _ = play_through(
                lambda: AgentGym('textcraft', servers), item, script(item)[:4]
            )
            assert replies == expected(item, script(item)[:4])
    assert all(proxy.done[each] for each in quick)
    assert get(launched.url)['worlds'] <= worlds + 1  # the last world, if its close was lost
    assert threading.active_count() == threads and psutil.Process().num_fds() == files


# ---- against recorded replies of other servers ---------------------------------------------------


BABYAI = {'observation': 'o', 'reward': 0, 'score': 0.0, 'deleted': False, 'done': False}
SCENE = {'task_description': 'Boil.', 'observation': 'A room.', 'score': 0}
ROOM = {'id': 0, 'observation': 'A room', 'available_actions': ['look', 'go']}
TREE = {'observation': 'tree', 'sites': [], 'object': 'buy'}
NO_END = {'terminated': False, 'truncated': False, 'info': {}}


def step_of(text, reward, done, field='observation', **more):
    return {field: text, 'reward': reward, 'done': done, **more}


DIALOGUES = {  # env: answers to create, reset and look; first text; a step and its reply
    'babyai': (
        [{'id': 4}, BABYAI],
        'o',
        step_of('p', 0.9, True, score=0.9),
        Reply('p', 0.9, True, True),
    ),
    'sciworld': (
        [{'id': 0}, SCENE],
        'Boil.\nA room.',
        step_of('p', -100, True, score=-100),
        Reply('p', -100.0, True, False),
    ),
    'webarena': (
        [{'env_idx': 1}, TREE, 'OBSERVATION: tree'],
        'OBSERVATION: tree',
        {'observation': 'p', 'reward': 0.5} | NO_END,
        Reply('p', 0.0, False, False),
    ),
    'webshop': (
        [3, ['', None], 'Instruction: buy'],
        'Instruction: buy',
        step_of('bought', 1.0, True, 'state', info=None),
        Reply('bought', 1.0, True, True),
    ),
    'alfworld': (
        [{'id': 0}, ROOM],
        'A room\nAVAILABLE ACTIONS: look,go',
        step_of('won', True, True, available_actions=[]),
        Reply('won', 1.0, True, True),
    ),
    'wordle': (
        [{'id': 0}, {'observation': ''}, ['crane', 'shire']],
        'crane\nshire',
        step_of('b b y b b', 0, False),
        Reply('b b y b b', 0.0, False, False),
    ),
    'weather': ([0, 'rain?'], 'rain?', step_of('p', 0.5, True), Reply('p', 0.5, True, True)),
}


@pytest.mark.parametrize('env', DIALOGUES)
def test_each_environment_has_its_request_format(env):
    answers, first, stepped, reply = DIALOGUES[env]
    quirks = agentgym.ENVIRONMENTS[env]
    number = answers[0][quirks.created] if quirks.created else answers[0]
    paths = ['create', 'reset', f'{quirks.look}?{quirks.id}={number}'][: len(answers)]
    rows = zip([*paths, 'step'], [*answers, stepped], strict=True)
    rows = [(quirks.prefix + path, 200, answer) for path, answer in rows]
    with hosts.Table([*rows, ('', 200, True)]) as table:
        world = AgentGym(env, Servers([table.url]))
        assert world.reset(5) == first
        assert world.step('Action: ```do it```') == reply
        world.close()
    assert table.asked[0] == (rows[0][0], quirks.create)
    assert table.asked[1][1] == {quirks.id: number, quirks.item: 5, **quirks.reset}
    assert table.asked[len(paths)][1].keys() == {quirks.id, 'action'}
    assert (table.asked[-1][0] == 'close') == quirks.closes


STEP_BODY = {'observation': 'p', 'reward': 0, 'done': False}


@contextlib.contextmanager
def reset_world(env, *steps, first=STEP_BODY | {'observation': 'o', 'error': None}):
    """Yield a reset world on a server with these step answers, and the server's table."""
    steps = [step if isinstance(step, tuple) else ('step', 200, step) for step in steps]
    with hosts.Table([('create', 200, {'id': 0}), ('reset', 200, first), *steps]) as table:
        world = AgentGym(env, Servers([table.url]))
        assert world.reset(0)
        yield world, table


def scene(score):
    """Return the first replies of ScienceWorld."""
    return {'task_description': 'Light it.', 'observation': 'A room.', 'score': score}


@pytest.mark.parametrize(
    'env, first, scores, rewards, successes',
    [
        ('babyai', BABYAI, [0.25, 0.5, 0.5], [0.25, 0.25, 0.0], [True, True, True]),
        # The score of the initial state is not a reward of the first action
        ('sciworld', scene(7), [7, 20, 100], [0.0, 13.0, 80.0], [False, False, True]),
    ],
)
def test_running_scores_become_differences(env, first, scores, rewards, successes):
    steps = [{'observation': 'p', 'reward': 0, 'score': n, 'done': n == 100} for n in scores]
    with reset_world(env, *steps, first=first) as (world, _):
        replies = [world.step('Action: look') for _ in steps]
    assert [reply.reward for reply in replies] == rewards
    assert [reply.success for reply in replies] == successes


def test_an_unreadable_answer_does_not_undo_a_success():
    """The last reply decides, so the episode counted as failed."""
    with reset_world('babyai', BABYAI | {'score': 0.4}, first=BABYAI) as (world, _):
        two = 'Action: toggle\nAction: toggle'
        assert world.step(two).success is False
        assert world.step('Action: toggle').success
        assert world.step(two).success and not world.step(two).valid


def test_the_validity_of_an_action_is_reported_by_the_server_or_unknown():
    """Our servers report it, AgentGym's do not; an unreadable answer is never valid."""
    fields = {}, {'valid': True}, {'valid': False}, {'valid': None, 'error': None}, {'valid': 'no'}
    with reset_world('textcraft', *(STEP_BODY | more for more in fields)) as (world, _):
        assert world.step('Action: a\nAction: b').valid is False
        assert [world.step('Action: a').valid for _ in range(4)] == [None, True, False, None]
        with pytest.raises(WorldError):
            world.step('Action: a')


WRONG = [
    {'error': 'The id 0 is not valid.'},  # AgentGym's errors are 200s
    {'observation': None, 'reward': 0, 'done': False},
    {'observation': 'p', 'reward': 2.0, 'done': False},  # above TextCraft's bounds
    {'observation': 'p', 'reward': 0, 'done': 'no'},
    {'observation': 'p', 'reward': 0, 'done': False, 'turn': 2},
    b'{"observation": "p", "reward": Infinity, "done": false}',
    b'[' * 100_000,
    b'\xff\xfe',
]


@pytest.mark.parametrize('answer', WRONG, ids=lambda answer: str(answer)[:50])
def test_an_invalid_answer_is_an_error_and_the_world_reopens(answer):
    again = [('close', 200, True), ('create', 200, {'id': 0}), ('reset', 200, STEP_BODY)]
    with reset_world('textcraft', answer, *again) as (world, table):
        with pytest.raises(WorldError):
            world.step('Action: inventory')
        with pytest.raises(WorldError):
            world.step('Action: inventory')
        assert world.reset(0) == 'p'
        assert [path for path, _ in table.asked][-3:] == ['close', 'create', 'reset']


@pytest.mark.parametrize(
    'reset, looks', [({}, 1), ({'observation': 'TimeoutError', 'object': 'Error'}, 0)]
)
def test_texts_that_report_a_fault_are_faults(reset, looks):
    """After a failed reset, the previous episode's page became the first observation."""
    rows = [('create', 200, {'env_idx': 1}), ('reset', 200, reset), ('obs', 200, 'TimeoutError')]
    with hosts.Table(rows) as table:
        with pytest.raises(WorldError, match='TimeoutError'):
            AgentGym('webarena', Servers([table.url])).reset(0)
        assert len(table.rows) == 1 - looks


# ---- answers, items ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    'reader, text, action',
    [
        ('whole', ' a\n', ' a\n'),
        ('only_action', as_answer('get 2 oak-log (x)!'), 'get 2 oaklog x'),
        ('only_action', 'Action: get 1 a,  2 b\nmore', 'get 1 a, 2 b'),
        ('only_action', 'nothing', ''),
        ('last_action', 'Action: a\nAction: look around \n', 'look around'),
        ('last_action', 'hm', ''),
        ('last_action', 'click[Buy Now]', 'click[Buy Now]'),
        ('first_action', 'Action: move up\nAction: move down', 'move up'),
        ('first_action', 'move up', 'move up'),
        ('sql_block', 'so\n```sql\nSELECT 1\n``` done', 'SELECT 1'),
        ('with_backticks', 'I do ```click [3]```', 'I do ```click [3]```'),
    ],
)
def test_actions_are_parsed_as_in_agentgyms_clients(reader, text, action):
    assert answers.READERS[reader](text) == action


@pytest.mark.parametrize(
    'env, name',
    [
        ('textcraft', 'textcraft'),
        ('search', 'searchqa'),
        ('maze', 'lmrlgym_maze'),
    ],
)
def test_agentgyms_item_files_are_read_and_files_of_other_environments_rejected(
    env, name, tmp_path
):
    path = tmp_path / 'items.json'
    path.write_text(json.dumps([{'item_id': f'{name}_12'}, {'item_id': f'{name}_3'}]))
    assert agentgym.item_of(f'{name}_12') == (name, 12)
    assert agentgym.read_items(path, env) == [12, 3]
    with pytest.raises(ValueError, match=name):
        agentgym.read_items(path, 'sciworld')
    with pytest.raises(ValueError, match='textcraft'):
        agentgym.item_of('textcraft')
