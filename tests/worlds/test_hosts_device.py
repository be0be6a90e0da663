"""Worlds on the device that are served: the rules of the world, the same luck in a fresh one."""

import dataclasses

import jax
import numpy as np
import pytest

from agentrl_jax.envs import FrozenLake, Sokoban, simulation
from agentrl_jax.envs.hosts import device, workers

NAMES = ('catch', 'minesweeper', 'frozen_lake', 'sokoban')


def walk(world, item, actions):
    return [world.reset(item), *(world.step(action) for action in actions)]


@pytest.mark.parametrize('name', NAMES)
def test_a_fresh_world_says_the_same_to_the_same_actions(name):
    make = workers.maker('device', {'name': name, 'levels': 8})
    one, other = make(), make()
    rng = np.random.default_rng(0)
    actions = rng.choice([*one.actions], size=4).tolist()
    walk(one, 2, actions)  # other episodes leave nothing behind
    assert walk(one, 5, actions) == walk(other, 5, actions)
    assert one.instruction == one.env.instruction


def test_an_expert_wins_and_the_reply_says_so():
    world = device.Device('catch', {'rows': 5, 'columns': 5}, levels=4)
    world.reset(3)
    for _ in range(4):
        states = jax.tree.map(lambda x: np.asarray(x)[None], world.state)
        plan = world.env.plans(states, np.zeros(1, int), 4, world.params)[0]
        reply = world.step(world.env.ACTION_NAMES[plan[0]])
    assert (reply.reward, reply.done, reply.success) == (1.0, True, True)


def test_splits_share_no_level_and_settings_are_those_of_a_config():
    first = {
        split: device.Device('sokoban', {'dim': 6}, split=split, levels=4).reset(0)
        for split in ('train', 'validation', 'test')
    }
    assert len(set(first.values())) == 3
    assert device.Device('frozen_lake', {'size': 6}, levels=2).reset(1).count('\n') == 6


def test_what_is_not_there_is_said():
    with pytest.raises(ValueError, match="name='chess' is not one of frozen_lake, "):
        device.Device('chess')
    with pytest.raises(ValueError, match='frozen_lake.sides'):
        device.Device('frozen_lake', {'sides': 4})
    world = device.Device('sokoban', levels=2)
    with pytest.raises(ValueError, match=r'item 2 is not in 0\.\.1'):
        world.reset(2)
    before = world.reset(0)
    said = world.step('Jump')
    assert said.observation == f'{device.UNKNOWN}Up, Down, Left, Right.' and said.reward == 0
    assert said.valid is False and world.step('Up').valid is True
    world.reset(0)
    assert world.env.observation_text(world.state) == before and world.played == 0
    assert isinstance(world.env, Sokoban) and not isinstance(world.env, FrozenLake)


def test_an_episode_ends_with_the_limit_of_its_world():
    world = device.Device('sokoban', levels=2)
    world.reset(0)
    limit = world.params.max_steps_in_episode
    replies = [world.step('Up') for _ in range(limit)]
    assert [reply.done for reply in replies] == [False] * (limit - 1) + [True]
    assert replies[-1].success is False


def test_random_play_wins_nothing_after_the_limit_of_its_world():
    world = device.Device('frozen_lake', levels=32)
    short = dataclasses.replace(world.params, max_steps_in_episode=2)
    found = simulation.simulate_random(world.env, short, 20, rollouts=8, seed=0)
    assert found[2].any() and (found[2:] == found[2]).all()
