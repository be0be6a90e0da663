"""SciWorld: AgentGym's games and scores from simulators in one JVM; skipped without Java."""

import contextlib
import dataclasses
import gc
import shutil

import numpy as np
import pytest

from agentrl_jax.envs.hosts import sciworld
from agentrl_jax.envs.hosts.launch import Launched
from agentrl_jax.envs.hosts.sciworld import SciWorld, SciWorldEnvironment, SciWorldPlayer
from agentrl_jax.envs.hosts.world import WorldError

WITH_JAVA = pytest.mark.skipif(
    shutil.which('java') is None, reason='SciWorld needs Java 17: openjdk-17-jre-headless'
)
HEAP_MB = 256
ACTIONS = ('open door to kitchen', 'go to kitchen', 'look around', 'wait1', 'nonsense', '')
BOIL, FIND_ANIMAL = 0, 3836


def open_world(**settings):
    return contextlib.closing(SciWorld(heap_mb=HEAP_MB, **settings))


def replies(world, item, actions):
    return [world.reset(item), *map(world.step, actions)]


def test_items_are_agentgyms_games():
    games = sciworld.games()
    assert len(games) == 4639
    # first items of tasks in AgentGym's list
    firsts = {games[item][0]: item for item in reversed(range(len(games)))}
    assert firsts['use-thermometer'] == 120 and firsts['find-animal'] == FIND_ANIMAL
    assert games[1436] == ('test-conductivity', 0) and games[4638][1] == 9
    shifted = sciworld.games(shifted=True)
    assert len(shifted) == 4639 - 300 and shifted[:1096] == games[:1096]
    assert shifted[1096:] == games[1396:]


@WITH_JAVA
def test_every_task_has_the_number_of_variations_in_the_table():
    with open_world() as world:
        counts = [world.simulator.getTaskMaxVariations(task) for task, _ in sciworld.TASKS]
    assert counts == [count for _, count in sciworld.TASKS]


@WITH_JAVA
def test_replies_match_the_package(monkeypatch):
    """Play as on AgentGym's server, but without the list of valid actions, which it drops."""
    from scienceworld import ScienceWorldEnv

    monkeypatch.setattr(ScienceWorldEnv, 'get_valid_action_object_combinations', lambda self: [])
    theirs = ScienceWorldEnv()
    theirs.load(*sciworld.games()[FIND_ANIMAL])
    first = f'{theirs.get_task_description()}\n{theirs.step("look around")[0]}'
    with open_world() as ours:
        path = ours.gold(FIND_ANIMAL)
        assert ours.reset(FIND_ANIMAL) == first
        score = 0
        for action in [*ACTIONS, *path]:
            reply = ours.step(action)
            text, gained, done, info = theirs.step(action)
            assert (reply.observation, reply.reward, reply.done) == (text, gained, done)
            score += reply.reward
            assert info['score'] == score == ours.details()['score']
            if done:
                break
    theirs.close()
    del theirs  # its finaliser closes it again: collect it now, not in the middle of a test
    gc.collect()
    assert reply.success and score == 100


@WITH_JAVA
def test_the_score_of_the_initial_state_is_not_a_reward_of_the_first_action():
    """reset left the score at 0, and the first action earned the 7 of the initial state."""
    item = sciworld.games().index(('power-component', 15))
    with open_world() as world:
        world.reset(item)
        assert world.details()['score'] == 7
        assert world.step('look around').reward == 0
        assert world.score == 7
        path = world.gold(item)
        world.reset(item)
        gained = [world.step(action).reward for action in path]
        assert 7 + sum(gained) == world.score > 7


@WITH_JAVA
def test_actions_that_the_simulator_does_not_support_are_invalid():
    with open_world() as world:
        world.reset(BOIL)
        for action, valid in (
            ('nonsense', False),
            ('', False),
            ('pick up', False),
            ('look around', True),
            ('open door', True),  # ambiguous: it lists the doors
            ('0', True),
            ('eat stove', False),  # it is not in this room
        ):
            assert world.step(action).valid is valid, action


@WITH_JAVA
def test_simulators_in_one_jvm_are_independent():
    with contextlib.ExitStack() as stack:
        worlds = [stack.enter_context(open_world()) for _ in range(3)]
        items = [BOIL, 1436, 4638]
        serial = [replies(world, item, ACTIONS) for world, item in zip(worlds, items, strict=True)]
        interleaved = [[world.reset(item)] for world, item in zip(worlds, items, strict=True)]
        for action in ACTIONS:
            for episode, world in zip(interleaved, worlds, strict=True):
                episode.append(world.step(action))
        assert interleaved == serial
        assert worlds[0].machine._gateway is worlds[2].machine._gateway


@WITH_JAVA
def test_a_wrong_focus_ends_an_episode_and_so_does_waiting(monkeypatch):
    with open_world() as world:
        world.reset(FIND_ANIMAL)
        results = [world.step(f'{action} kitchen') for action in ('open door to', 'go to')]
        results.append(world.step('focus on stove'))
        assert results[-1].done and not results[-1].success
        assert sum(reply.reward for reply in results) == -100  # earlier gains are lost
    monkeypatch.setattr(sciworld, 'MAX_MOVES', 10)
    with open_world(scale=0.01) as world:
        world.reset(BOIL)
        waits = [world.step('wait1') for _ in range(6)]  # counts two moves each
        assert [reply.done for reply in waits] == [False] * 5 + [True]
        world.reset(FIND_ANIMAL)
        assert world.step('focus on air').reward == -1


@WITH_JAVA
def test_scaled_rewards_are_the_same_in_process_and_on_a_server():
    """The client used differences of the unscaled score, which are 100 times as large."""
    env = SciWorldEnvironment(scale=0.01, heap_mb=HEAP_MB)
    with (
        Launched('sciworld', settings=env.settings()) as server,
        contextlib.closing(env.make()) as near,
        contextlib.closing(dataclasses.replace(env, urls=(server.url,)).make()) as far,
    ):
        assert far.reset(FIND_ANIMAL) == near.reset(FIND_ANIMAL)
        for action in ('open door to kitchen', 'go to kitchen', 'focus on stove'):
            reply = near.step(f'Action: {action}')
            assert far.step(f'Action: {action}') == reply
        assert reply.done and reply.reward < -1


@WITH_JAVA
def test_a_player_follows_the_gold_path_and_draws_random_steps_from_it():
    player = SciWorldPlayer(SciWorld(heap_mb=HEAP_MB), 'last_action')
    with contextlib.closing(player):
        player.reset(4629)
        action = player.random(np.random.default_rng(0))
        assert action.removeprefix('Action: ') in player.path
        while action := player.best():
            reply = player.step(action)
    assert reply.done and reply.success and player.world.score == 100
    with pytest.raises(ValueError, match='item 4639'):
        player.world.reset(4639)


@pytest.mark.soak
@WITH_JAVA
def test_a_dead_jvm_is_a_fault_and_the_next_world_starts_a_new_one():
    with open_world() as world:
        world.reset(BOIL)
        process = world.machine._gateway.java_process
        process.kill()
        process.wait()
        with pytest.raises(WorldError, match='ScienceWorld'):
            world.step('look around')
    with open_world() as world:
        assert world.reset(BOIL).startswith('Your task is to boil water')
