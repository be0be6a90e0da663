"""The named host environments as a config builds them."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
import types
from concurrent import futures

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from agentrl_jax.envs.base import build, read_world
from agentrl_jax.envs.hosts import gymnasium_text, players, sciworld, served, workers
from agentrl_jax.envs.hosts.agentgym import AgentGym
from agentrl_jax.envs.hosts.base import Items
from agentrl_jax.envs.hosts.device import Device
from agentrl_jax.envs.hosts.launch import Launched
from agentrl_jax.envs.hosts.search import world as search
from agentrl_jax.envs.hosts.search.world import Search
from agentrl_jax.envs.hosts.textcraft import TextCraft
from agentrl_jax.envs.hosts.web.world import WebArena
from agentrl_jax.envs.hosts.webshop.world import WebShop
from agentrl_jax.envs.hosts.world import WorldError
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.parts import build_environment
from configs import base

ROOT = pathlib.Path(__file__).resolve().parents[2]


def build_env(name, **settings):
    cfg = base.get_config()
    cfg.env.name = name
    for field, value in settings.items():
        section = cfg[name] if field in cfg[name] else cfg.hosts
        section[field] = value
    return build_environment(read_config(cfg), 'train')


MT_GRPO = dict(dialect='mt_grpo', rewards='mt_grpo', retries=False, hops=(1,))


def test_a_world_runs_in_process_or_on_a_server_of_the_run():
    env, params = build_env('search', **MT_GRPO)
    far = dataclasses.replace(env, launch=1)
    assert {*params.items} <= {*env.our_items('train')}
    with contextlib.closing(env.make()) as near, contextlib.closing(far.make()) as there:
        assert isinstance(near, Search) and isinstance(there, AgentGym)
        item = int(params.items[0])
        assert near.reset(item) == there.reset(item)
        assert near.instruction == there.instruction == env.instruction
        for action in ('what?', '<reasoning>\n!\n</reasoning>\n<answer>\nOslo', *near.plan()):
            reply = near.step(action)
            assert there.step(action) == reply
        assert reply.success and len(reply.figures) == 4
    few = Items(params.items[:8])
    assert players.reference_success(env, few, 3, rollouts=1)['oracle'] == 1.0
    served.launched('search', json.dumps(far.settings(), sort_keys=True), 1, 64, 60.0).close()
    served.launched.cache_clear()


def test_a_server_with_other_settings_is_a_fault_that_names_them():
    """The policy read MT-GRPO's prompt, the server expected plain calls: all were invalid."""
    settings = {'questions': ['drawn'], 'timeout_s': 9.0, 'corpus': ''}
    with Launched('search', settings=settings) as server:
        env = search.SearchEnvironment(questions=('drawn',), urls=(server.url,), timeout_s=20.0)
        with contextlib.closing(env.make()) as world:
            assert world.reset(0)
        other = dataclasses.replace(env, dialect='mt_grpo', calls=2).make()
        with pytest.raises(WorldError, match='same --settings') as raised:
            other.reset(0)
        names = {'search.dialect', 'search.calls', 'timeout_s'}
        assert {name for name in names if name in str(raised.value)} == names - {'timeout_s'}


def test_local_and_secret_settings_are_not_sent_to_clients():
    make = functools.partial(WebArena, login='me:secret', sites=['shop=http://me'])
    assert workers.shared_settings(make) == {'tasks': '', 'prompt': 'long', 'judge': ''}
    make = functools.partial(Search, corpus='http://one:1', token='file', calls=2)
    assert workers.shared_settings(make).keys() & {'corpus', 'token', 'timeout_s', 'calls'} == {
        'calls'
    }
    assert workers.shared_settings(functools.partial(Device, name='bandit')) == {}


def test_worlds_created_at_the_same_time_share_one_server(monkeypatch):
    """Each thread of a run creates a world; the first threads each started a server."""
    started = []

    def slow(*words, **more):
        started.append(words)
        time.sleep(0.2)
        return types.SimpleNamespace(url=f'http://a:{len(started)}', close=lambda: None)

    monkeypatch.setattr(served, 'Launched', slow)
    served.launched.cache_clear()
    env = dataclasses.replace(build_env('textcraft')[0], launch=1)
    with futures.ThreadPoolExecutor(8) as threads:
        worlds = list(threads.map(lambda _: env.make(), range(8)))
    served.launched.cache_clear()
    assert len(started) == 1
    assert len({id(world.servers) for world in worlds}) == 1


class Recorder(gymnasium.Env):
    """An environment whose reward and observation are the action."""

    observation_space = gymnasium.spaces.Text(9)

    def __init__(self, space):
        self.action_space = space

    def reset(self, *, seed=None, options=None):
        return '', {}

    def step(self, action):
        assert self.action_space.contains(action)
        return f'{action!r}', 0.0, False, False, {}


@pytest.mark.parametrize(
    'space, names, answers',
    [
        (spaces.Discrete(2, start=5), (), {'5': '5', '<answer>6</answer>': '6', '0': None}),
        (spaces.Discrete(2, start=1), ('Stop', 'Go'), {'stop': '1', 'GO': '2', '1': None}),
        (spaces.Text(9), (), {' Go ': "'Go'"}),
        (spaces.Text(9), ('Stop', 'Go'), {'go': "'Go'", 'run': None}),
    ],
    ids=str,
)
def test_an_answer_selects_its_gymnasium_action(space, names, answers):
    """With Discrete(n, start=k), every action was k too low."""
    world = gymnasium_text.GymnasiumWorld(Recorder(space), names)
    for answer, action in answers.items():
        reply = world.step(answer)
        assert (reply.observation == action) if action else 'No such action' in reply.observation
        assert reply.valid == (None if not world._names else bool(action))
    with pytest.raises(ValueError):  # it has an n, like Discrete
        gymnasium_text.GymnasiumWorld(Recorder(spaces.MultiBinary(3)), names)


def test_splits_are_hashed_or_read_from_agentgyms_files(tmp_path):
    env, params = build_env('sciworld', scale=0.01)
    splits = [set(env.item_range(split)) for split in ('train', 'validation', 'test')]
    assert sum(map(len, splits)) == len(set.union(*splits)) == len(sciworld.games())
    assert sorted(splits[2])[:3] == [6, 41, 58]  # another hash would move levels between splits
    assert env.solved(1.0) and not env.solved(0.99)
    assert gymnasium_text.Gymnasium().item_range('test')[0] == 2 * 10**9
    paths = []
    for number in range(3):
        paths.append(str(tmp_path / str(number)))
        listed = [{'item_id': f'textcraft_{3 * number + index}'} for index in range(2)]
        (tmp_path / str(number)).write_text(json.dumps(listed))
    env, params = build_env('textcraft', item_files=tuple(paths))
    np.testing.assert_array_equal(np.sort(params.items), [0, 1])
    np.testing.assert_array_equal(env.item_range('test'), [6, 7])
    with pytest.raises(ValueError, match='textcraft.item_files'):
        build_env('textcraft', item_files=('one',))


def test_held_out_items_that_are_also_trained_on_are_counted(tmp_path, capsys):
    """They silently inflated the success on levels that were also trained on."""

    def listed(name, *numbers):
        path = tmp_path / f'{name}.json'
        path.write_text(json.dumps([{'item_id': f'webshop_{number}'} for number in numbers]))
        return str(path)

    train, test, other = listed('train', 0, 1, 2), listed('test', 2, 1, 7, 7), listed('other', 8)
    env, _ = build_env('shop', item_files=(train, test, test))
    for _ in range(2):
        assert [*env.item_range('validation')] == [*env.item_range('test')] == [2, 1, 7, 7]
    warning = capsys.readouterr().err
    assert warning.startswith('warning: 2 of the 3 items') and warning.count('\n') == 1
    gone = dataclasses.replace(env, item_files=('gone.json', other, other))
    assert [*gone.item_range('test')] == [8]  # an evaluation reads only its own file
    assert capsys.readouterr().err == ''
    with pytest.raises(ValueError, match='textcraft'):
        build_env('textcraft', item_files=(train, test, test))


def test_agentgym_and_openenv_are_built_from_addresses():
    far = dict(urls=('http://a:1',), num_items=50)
    env, params = build_env('agentgym', env='searchqa', **far)
    assert env.accepted == 'Ok.' and '<search>' in env.instruction and len(params.items) > 20
    assert env.make().quirks.item == 'id' and env.solved(1.0) and not env.solved(0.9)
    for wrong, field in (('chess', 'agentgym.env'), ('babyai', 'hosts.instruction')):
        with pytest.raises(ValueError, match=field):
            build_env('agentgym', env=wrong, **far)
    maze = build_env('agentgym', env='maze', instruction='Leave the maze.', **far)[0]
    assert maze.instruction == 'Leave the maze.'
    assert (
        build_env('openenv', url='http://a:1', action_field='text')[0].make().url == 'ws://a:1/ws'
    )


@pytest.mark.parametrize(
    ('world', 'settings', 'item'),
    [
        (TextCraft, {'distractors': -1}, 0),
        (Search, {'questions': ('drawn',), 'known': 17}, 0),
        (Search, {}, -1),
        (WebShop, {'products': 60}, -1),
        (WebShop, {'products': 9, 'stalls': 4}, 0),
    ],
)
def test_invalid_settings_and_items_of_worlds_are_reported_by_name(world, settings, item):
    name = f'item {item}' if item else list(settings)[0 if 'questions' not in settings else -1]
    with pytest.raises(ValueError, match=name):
        world(**settings).reset(item)


DIGEST = """
import hashlib, sys
from agentrl_jax.envs.hosts.search.world import Search
from agentrl_jax.envs.hosts.textcraft import TextCraft
from agentrl_jax.envs.hosts.webshop.world import WebShop
craft, find, shop = TextCraft(), Search(rewards='mt_grpo'), WebShop(products=60)
texts = [craft.reset(item) for item in range(0, 544, 16)]
for play, items in ((find, range(0, 9900, 330)), (shop, range(0, len(shop.shop.goals), 9))):
    for item in items:
        texts += [play.reset(item), *(repr(play.step(action)) for action in play.plan())]
print(hashlib.sha256(repr(texts).encode()).hexdigest(), {'jax', 'flax'} & {*sys.modules})
"""


def output(program, **environment):
    paths = os.pathsep.join([str(ROOT), str(ROOT / 'tests'), *sys.path])
    environment |= {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': paths}
    return subprocess.run(
        [sys.executable, '-c', program],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def test_texts_do_not_depend_on_hash_seeds_or_file_order():
    """Worlds also import no JAX, which bm25s would use if it were imported."""
    shuffled = (
        'import pathlib; glob = pathlib.Path.glob; '
        'pathlib.Path.glob = lambda *words: sorted(glob(*words), key=hash)'
    )
    digests = [output(DIGEST, PYTHONHASHSEED='1'), output(shuffled + DIGEST, PYTHONHASHSEED='2')]
    assert digests[0] == digests[1] and digests[0].endswith(' set()')


GUESS = """
import dataclasses
from typing import Annotated
from agentrl_jax.envs.hosts.agentgym import Quirks
from agentrl_jax.envs.hosts.base import hashed
from agentrl_jax.envs.hosts.served import Served, checked
from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.settings.marks import ONE

@dataclasses.dataclass(frozen=True)
class Play:
    highest: Annotated[int, ONE] = 100

class Guess:
    deterministic, instruction, PLAY = True, 'Guess.', Play

    def __init__(self, **settings):
        self.play = checked('guess', Play(**settings))

    def reset(self, item):
        self.number = 1 + item % self.play.highest
        return f'From 1 to {self.play.highest}.'

    def step(self, action):
        right = action == str(self.number)
        return Reply('Right.' if right else 'No.', float(right), right, right)

    def close(self):
        pass

@dataclasses.dataclass(frozen=True)
class GuessEnvironment(Served, Play):
    name, instruction, WORLD = 'guess', 'Guess.', Guess
    QUIRKS = Quirks(reader='first_action', accepted='')

    def our_items(self, split):
        return hashed(range(50), split)
"""


def test_a_single_file_world_runs_in_process_and_on_a_server_of_the_run(tmp_path, monkeypatch):
    (tmp_path / 'guess_world.py').write_text(GUESS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    import guess_world

    far = read_world(guess_world.GuessEnvironment, {'highest': 9}, {'launch': 1})
    env, params = build(dataclasses.replace(far, launch=0), 'test', num_levels=3, seed=0)
    assert params.items.tolist() == far.make_params('test', num_levels=3).items.tolist()
    with contextlib.closing(env.make()) as near, contextlib.closing(far.make()) as there:
        assert there.reset(7) == near.reset(7) == 'From 1 to 9.'
        for action in ('Action: 3', 'Action: 8'):
            assert there.step(action) == dataclasses.replace(near.step(action), valid=None)
        assert near.step('8').success
    served.launched('guess_world:Guess', '{"highest": 9}', 1, 64, 60.0).close()
    served.launched.cache_clear()
    with pytest.raises(ValueError, match='guess.highest=0 must be at least 1'):
        read_world(guess_world.GuessEnvironment, {'highest': 0})
