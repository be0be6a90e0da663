"""The named worlds on hosts as a config builds them."""

import contextlib
import dataclasses
import json
import pathlib
import time
import types
from concurrent import futures

import numpy as np
import pytest

from agentrl_jax.envs.hosts import players, sciworld, served, textcraft
from agentrl_jax.envs.hosts.agentgym import AgentGym
from agentrl_jax.envs.hosts.answers import Read
from agentrl_jax.envs.hosts.base import Items
from agentrl_jax.envs.hosts.search import world as search
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.parts import build_environment
from agentrl_jax.sweeps import spec
from configs import base, deepsearch
from configs import search as search_config

ROOT = pathlib.Path(__file__).resolve().parent.parent


def built(name, **settings):
    cfg = base.get_config()
    cfg.env.name = name
    with cfg.unlocked():
        cfg[name].update(settings)
    return build_environment(cfg, 'train')


def test_textcraft_is_played_in_process_or_on_a_server_of_the_run():
    env, params = built('textcraft', depths=(1,), prompt='short')
    assert env.instruction == textcraft.SHORT_PROMPT
    assert {*params.items} == {*textcraft.items('train', depths=(1,))}
    far, _ = built('textcraft', depths=(1,), prompt='short', launch=1)
    with contextlib.closing(env.make()) as near, contextlib.closing(far.make()) as there:
        assert isinstance(near, Read) and isinstance(there, AgentGym)
        item = int(params.items[0])
        assert near.reset(item) == there.reset(item)
        assert near.instruction == there.instruction == env.instruction
        assert near.step('Action: inventory') == there.step('Action: inventory')
    settings = json.dumps(far.settings(), sort_keys=True)
    server = served.launched('textcraft', settings, 1, 64)
    server.close()
    served.launched.cache_clear()


def test_search_is_played_in_process_or_on_a_server_of_the_run():
    env, params = built('search', dialect='mt_grpo', rewards='mt_grpo', retries=False, hops=(1,))
    assert env.quick and not dataclasses.replace(env, corpus='http://a:1').quick
    assert env.accepted == '' and '<tool>' in env.instruction
    assert {*params.items} <= {*search.items('train', hops=(1,))}
    assert env.FIGURES == ('tool_success', 'answer_presence', 'exact_match', 'format')
    few = Items(params.items[:8])
    assert players.reference_success(env, few, 3, rollouts=1)['oracle'] == 1.0
    far = dataclasses.replace(env, launch=1)
    item = int(params.items[0])
    with contextlib.closing(env.make()) as near, contextlib.closing(far.make()) as there:
        assert isinstance(near, search.Search) and isinstance(there, AgentGym)
        assert near.reset(item) == there.reset(item)
        assert near.instruction == there.instruction == env.instruction
        for action in ('what?', *near.plan()):
            said = near.step(action)
            assert there.step(action) == said
        assert said.done and said.success and len(said.figures) == 4
    served.launched('search', json.dumps(far.settings(), sort_keys=True), 1, 64).close()
    served.launched.cache_clear()
    with pytest.raises(ValueError, match="search.dialect='x' must be one of plain, agentgym"):
        built('search', dialect='x')


def test_the_paper_s_arms_of_search_are_possible_in_its_sizes():
    cfg = search_config.get_config()
    assert (cfg.rollout.num_groups, cfg.rollout.group_size) == (16, 21)
    assert cfg.batch.minibatch_rows == 16 * 21 and cfg.search.turns == cfg.env.max_turns
    path = 'configs/sweeps/search.py'
    cells = [spec.resolve(cfg, cell, path)[0] for cell in spec.load(ROOT / path)]
    modes = [cell.turn_credit.mode for cell in cells]
    assert modes == ['or', 'mr', 'mt_v1', None]
    deep = deepsearch.get_config()
    assert (deep.rollout.num_groups, deep.rollout.group_size, deep.env.max_turns) == (32, 4, 5)
    for cell in (cfg, deep, *cells):
        read_config(cell)
        room = cell.env.max_turns * (cell.rollout.max_response + cell.hosts.max_observation + 16)
        assert room + 320 <= cell.rollout.max_tokens
    mt_ppo = cells[-1]
    assert (mt_ppo.algorithm, mt_ppo.search.rewards, mt_ppo.search.turns) == ('ppo', 'mt_ppo', 5)


def test_worlds_that_are_made_at_once_share_one_server(monkeypatch):
    """Each thread of a run makes a world; the first ones all found no server and started one."""
    started = []

    def slow(*words, **more):
        started.append(words)
        time.sleep(0.2)
        return types.SimpleNamespace(url=f'http://a:{len(started)}', close=lambda: None)

    monkeypatch.setattr(served, 'Launched', slow)
    served.launched.cache_clear()
    env, _ = built('textcraft', launch=1)
    with futures.ThreadPoolExecutor(8) as threads:
        worlds = list(threads.map(lambda _: env.make(), range(8)))
    served.launched.cache_clear()
    assert len(started) == 1
    assert len({id(world.servers) for world in worlds}) == 1


def test_splits_are_hashed_or_read_from_agentgyms_files(tmp_path):
    env, params = built('sciworld', scale=0.01)
    splits = [set(env.item_range(split)) for split in ('train', 'validation', 'test')]
    assert sum(map(len, splits)) == len(set.union(*splits)) == len(sciworld.games())
    assert env.solved(1.0) and not env.solved(0.99)
    paths = []
    for number in range(3):
        paths.append(str(tmp_path / str(number)))
        listed = [{'item_id': f'textcraft_{3 * number + index}'} for index in range(2)]
        (tmp_path / str(number)).write_text(json.dumps(listed))
    env, params = built('textcraft', item_files=tuple(paths))
    np.testing.assert_array_equal(np.sort(params.items), [0, 1])
    np.testing.assert_array_equal(env.item_range('test'), [6, 7])
    with pytest.raises(ValueError, match='one file for each'):
        built('textcraft', item_files=('one',))


def test_agentgym_and_openenv_are_built_from_addresses():
    env, params = built('agentgym', env='searchqa', urls=('http://a:1',), num_items=50)
    assert env.accepted == 'Ok.' and '<search>' in env.instruction and len(params.items) > 20
    assert env.make().quirks.item == 'id' and env.solved(1.0) and not env.solved(0.9)
    with pytest.raises(ValueError, match='must be one of textcraft'):
        built('agentgym', env='chess')
    env, _ = built('openenv', url='http://a:1', action_field='text')
    assert env.make().url == 'ws://a:1/ws'
