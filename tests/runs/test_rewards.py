"""Custom rewards: a function of rollouts on the device, of texts on hosts."""

import importlib
import json
import pathlib
import re

import host_worlds as hosts
import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy
from host_worlds import OBJECTS as HOSTS

from agentrl_jax import train
from agentrl_jax.records import run_log
from agentrl_jax.rollout import rewards
from agentrl_jax.run import collecting, loading
from agentrl_jax.run.build import build

README = pathlib.Path(loading.__file__).parents[1] / 'rollout' / 'README.md'
(SOURCE,) = re.findall(r'```python\n(.*?)```', README.read_text(encoding='utf-8'), re.DOTALL)
ROWS = [[(2, 2), (1, 1), (1, 2)], [(2, 2)], [(2, 2), (1, 1)]]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The README's module on Python's path."""
    (tmp_path / 'own_rewards.py').write_text(SOURCE, encoding='utf-8')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(importlib.sys.modules, 'own_rewards', raising=False)
    return importlib.import_module('own_rewards')


def custom(function, *components):
    return rewards.CustomReward("reward.function='x:y'", function, components)


def rollout(faulty=()):
    world = [[1.0, 0.5, 0.25], [2.0, 0.0, 0.0], [0.0, 4.0, 0.0]]
    made = toy.rollout_of(ROWS, world, length=12, faulty=faulty)
    return made.replace(success=jnp.array([True, False, True]))


# ---- on the device -------------------------------------------------------------------------------


def test_rewards_of_turns_that_were_not_played_and_of_faulty_episodes_are_zero():
    found, counted = rewards.of_rollout(
        rollout(faulty=[2]), None, custom(lambda played, task: played.rewards + 1)
    )
    np.testing.assert_allclose(found.rewards, [[2, 1.5, 1.25], [3, 0, 0], [0, 0, 0]])
    assert int(counted['reward_faults'][0]) == 0 and found.success.tolist() == [True, False, True]


def test_the_readme_s_outcome_is_paid_at_the_last_turn_by_hand(own):
    found, _ = rewards.of_rollout(rollout(), None, custom(own.outcome))
    assert found.rewards.dtype == jnp.float32
    np.testing.assert_allclose(found.rewards, [[0, 0, 1], [0, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize('bad', [np.nan, np.inf, -2e6])
def test_a_reward_that_is_no_reward_is_counted_and_ends_the_run(bad):
    function = lambda played, task: played.rewards.at[0, 1].set(bad).at[1, 2].set(bad)  # noqa: E731
    found, counted = rewards.of_rollout(rollout(), None, custom(function))
    assert int(counted['reward_faults'][0]) == 1  # the second one is past the end
    assert np.isfinite(found.rewards).all()
    with pytest.raises(ValueError, match='gave 1 rewards that are not finite or beyond 1e') as said:
        collecting.check_counters([counted | {'overflow': np.zeros(1)}])
    assert str(float(np.float32(bad))) in str(said.value)


@pytest.mark.parametrize(
    'function, words',
    [
        (lambda played, task: played.rewards.sum(1), r'float32 \[3\] and must return .*3, 3'),
        (lambda played: played.rewards, 'TypeError'),
        (lambda played, task: {'a': played.rewards}, r"\['a'\] and reward.components is \(\)"),
    ],
)
def test_a_function_that_is_none_of_rollouts_is_refused_from_shapes_in_one_line(function, words):
    shapes = jax.eval_shape(rollout)
    with pytest.raises(ValueError, match=f"^reward.function='x:y'.*{words}") as said:
        rewards.check_traced(custom(function), shapes, None)
    assert '\n' not in str(said.value)


def test_rewards_by_name_add_up_and_are_kept_apart():
    def parts(played, task):
        return {'two': jnp.full_like(played.rewards, 2.0), 'own': played.rewards}

    reward = custom(parts, 'own', 'two')
    rewards.check_traced(reward, jax.eval_shape(rollout), None)
    found, _ = rewards.of_rollout(rollout(faulty=[2]), None, reward)
    np.testing.assert_allclose(found.rewards, [[3, 2.5, 2.25], [4, 0, 0], [0, 0, 0]])
    apart = found.extra[rewards.COMPONENTS]
    np.testing.assert_allclose(apart['own'], [[1, 0.5, 0.25], [2, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(apart['two'], [[2, 2, 2], [2, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match='reward.components'):
        rewards.check_traced(custom(parts, 'own'), jax.eval_shape(rollout), None)


# ---- on hosts ------------------------------------------------------------------------------------


def test_an_episode_is_shown_as_what_was_said(monkeypatch):
    """Item, texts, rewards and success are the same as in a fresh environment."""
    seen = []

    def count(episode):
        seen.append(episode)
        return [float(number) for number in range(len(episode.turns))]

    plain, _ = hosts.play()
    played, _ = hosts.play(reward=rewards.CustomReward('mine', count))
    for name, before in hosts.arrays(plain).items():
        if name != 'rewards':
            np.testing.assert_array_equal(hosts.arrays(played)[name], before, err_msg=name)
    turns = np.arange(plain.rewards.shape[1])[None]
    inside = turns < plain.num_turns[:, None]
    np.testing.assert_array_equal(played.rewards, np.where(inside, turns, 0))
    assert len(seen) == 16 and len({episode.item for episode in seen}) > 1
    for b, episode in enumerate(sorted(seen, key=lambda one: one.item)[:3]):
        world = hosts.Echo()
        assert episode.turns[0].shown == world.reset(episode.item), b
        for turn in episode.turns:
            reply = world.step(turn.said)
            assert (turn.reply, turn.reward, turn.acts) == (reply.observation, reply.reward, True)
        assert episode.success == reply.success and episode.figures[0] == len(episode.turns)


def test_rewards_by_name_of_episodes_are_kept_apart():
    def parts(episode):
        turns = len(episode.turns)
        return {'first': [1.0] + [0.0] * (turns - 1), 'each': [0.5] * turns}

    played, _ = hosts.play(reward=rewards.CustomReward('mine', parts, ('each', 'first')))
    inside = np.arange(played.rewards.shape[1])[None] < np.asarray(played.num_turns)[:, None]
    apart = played.extra[rewards.COMPONENTS]
    np.testing.assert_array_equal(apart['each'], np.where(inside, 0.5, 0.0))
    np.testing.assert_array_equal(np.asarray(apart['first']).sum(1), np.ones(len(inside)))
    np.testing.assert_array_equal(played.rewards, apart['each'] + apart['first'])
    turn = rewards.Turn('shown', 'said', 'reply', 0.5, True, 0)
    with pytest.raises(ValueError, match="^mine returned .*'each'.* reward.components is \\(\\)"):
        rewards.of_episode(
            rewards.Episode(7, '', (turn,), True, ()), rewards.CustomReward('mine', parts)
        )


@pytest.mark.parametrize(
    'function, words',
    [
        (lambda episode: [1.0], 'returned 1 rewards for an episode of 2 turns'),
        (lambda episode: [0.0, np.nan], 'returned nan for an episode'),
        (lambda episode: episode.steps, 'AttributeError'),
    ],
)
def test_what_a_function_of_episodes_gives_is_checked(function, words):
    turn = rewards.Turn('shown', 'said', 'reply', 0.5, True, 0)
    episode = rewards.Episode(7, '', (turn, turn), True, ())
    with pytest.raises(ValueError, match=f'^mine.*item 7.*{words}|^mine {words}.*item 7') as said:
        rewards.of_episode(episode, rewards.CustomReward('mine', function))
    assert '\n' not in str(said.value)


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
def test_a_run_trains_on_the_rewards_of_its_own_and_its_success_is_the_world_s(own, tmp_path):
    """Metrics, validation and pages use the function's rewards."""
    # A random policy solves nothing: each played turn gets a reward, turns past the end do not
    own.steady = lambda rollout, task: jnp.full(rollout.rewards.shape, 0.25)
    changes = {'steps': 1, 'algorithm': 'grpo', 'env.format_penalty': 0.0, 'env.max_turns': 3}
    changes |= {'reward.function': 'own_rewards:steady', 'eval.samples': 2}
    cfg = micro_runs.config('frozen_lake', **changes)
    assert train.train(cfg, str(tmp_path)) == 0
    row = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)[0]
    assert row['rollout/return'] == pytest.approx(0.25 * row['rollout/turns'], abs=1e-6)
    assert 0.25 <= row['eval/return'] <= 0.75 and row['eval/success'] == 0 == row['rollout/success']
    saved = json.loads((tmp_path / run_log.CONFIG_FILE).read_text())
    assert 'own_rewards:steady' in json.dumps(saved)
    page = next((tmp_path / 'rollouts').glob('*.html')).read_text()
    assert 'own_rewards:steady' in page


@pytest.mark.parametrize(
    'name, changes, words',
    [
        ('own_rewards:long', {}, 'reward.function'),
        ('own_rewards:brief', {}, 'reward.function'),  # a function for hosts
        ('own_rewards:short', HOSTS, 'reward.function'),
        ('a:b', {'env.mix': (('bandit', 0.5), ('textcraft', 0.5))}, 'reward.function'),
    ],
)
def test_what_is_no_reward_function_ends_a_run_before_a_model_is_made(
    own, name, changes, words, monkeypatch
):
    monkeypatch.setattr(loading, 'build_model', None)
    with pytest.raises(ValueError, match=words):
        build(micro_runs.config('bandit', **changes | {'reward.function': name}))
