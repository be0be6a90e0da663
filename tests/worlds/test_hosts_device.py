"""Served device environments: the same rules, and the same randomness in a new world."""

import dataclasses

import jax
import numpy as np
import pytest

from agentrl_jax.envs import simulation
from agentrl_jax.envs.hosts import device, workers


def walk(world, item, actions):
    return [world.reset(item), *(world.step(action) for action in actions)]


@pytest.mark.parametrize('name', ['catch', 'frozen_lake'])
def test_a_new_world_gives_the_same_replies_to_the_same_actions(name):
    make = workers.maker('device', {'name': name, 'levels': 8})
    one, other = make(), make()
    rng = np.random.default_rng(0)
    actions = rng.choice([*one.actions], size=4).tolist()
    walk(one, 2, actions)  # other episodes have no effect
    assert walk(one, 5, actions) == walk(other, 5, actions)
    assert one.instruction == one.env.instruction


def test_an_expert_wins_and_the_reply_reports_it():
    world = device.Device('catch', {'rows': 5, 'columns': 5}, levels=4)
    world.reset(3)
    for _ in range(4):
        states = jax.tree.map(lambda x: np.asarray(x)[None], world.state)
        plan = world.env.plans(states, np.zeros(1, int), 4, world.params)[0]
        reply = world.step(world.env.ACTION_NAMES[plan[0]])
    assert (reply.reward, reply.done, reply.success) == (1.0, True, True)


def test_an_unknown_action_changes_nothing_and_the_step_limit_ends_an_episode():
    world = device.Device('sokoban', levels=2)
    with pytest.raises(ValueError, match='item 2'):
        world.reset(2)
    before = world.reset(0)
    unknown = world.step('Jump')
    assert unknown.valid is False and unknown.reward == 0 == world.played
    assert world.env.observation_text(world.state) == before
    limit = world.params.max_steps_in_episode
    replies = [world.step('Up') for _ in range(limit)]
    assert [reply.done for reply in replies] == [False] * (limit - 1) + [True]
    assert replies[0].valid and replies[-1].success is False


def test_splits_share_no_level_and_config_settings_are_used():
    first = {
        split: device.Device('sokoban', {'dim': 6}, split=split, levels=4).reset(0)
        for split in ('train', 'validation', 'test')
    }
    assert len(set(first.values())) == 3
    assert device.Device('frozen_lake', {'size': 6}, levels=2).reset(1).count('\n') == 6


def test_random_play_wins_nothing_after_the_step_limit():
    world = device.Device('frozen_lake', levels=32)
    short = dataclasses.replace(world.params, max_steps_in_episode=2)
    won = simulation.simulate_random(world.env, short, 20, rollouts=8, seed=0)
    assert won[2].any() and (won[2:] == won[2]).all()
