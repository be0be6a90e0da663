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
def readme_module(tmp_path, monkeypatch):
    """Import the README's module from a folder on Python's path."""
    (tmp_path / 'own_rewards.py').write_text(SOURCE, encoding='utf-8')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(importlib.sys.modules, 'own_rewards', raising=False)
    return importlib.import_module('own_rewards')


def custom(function, *components):
    return rewards.CustomReward("reward.function='x:y'", function, components)


def rollout(faulty=()):
    world = [[1.0, 0.5, 0.25], [2.0, 0.0, 0.0], [0.0, 4.0, 0.0]]
    out = toy.rollout_of(ROWS, world, length=12, faulty=faulty)
    return out.replace(success=jnp.array([True, False, True]))


# ---- on the device -------------------------------------------------------------------------------


def test_rewards_past_the_end_and_of_faulty_episodes_are_zero():
    result, counted = rewards.of_rollout(
        rollout(faulty=[2]), None, custom(lambda out, task: out.rewards + 1)
    )
    np.testing.assert_allclose(result.rewards, [[2, 1.5, 1.25], [3, 0, 0], [0, 0, 0]])
    assert int(counted['reward_faults'][0]) == 0 and result.success.tolist() == [True, False, True]


def test_the_outcome_of_the_readme_is_paid_at_the_last_turn(readme_module):
    result, _ = rewards.of_rollout(rollout(), None, custom(readme_module.outcome))
    assert result.rewards.dtype == jnp.float32
    np.testing.assert_allclose(result.rewards, [[0, 0, 1], [0, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize('bad', [np.nan, np.inf, -2e6])
def test_an_invalid_reward_is_counted_and_ends_the_run(bad):
    function = lambda out, task: out.rewards.at[0, 1].set(bad).at[1, 2].set(bad)  # noqa: E731
    result, counted = rewards.of_rollout(rollout(), None, custom(function))
    assert int(counted['reward_faults'][0]) == 1  # the second one is past the end
    assert np.isfinite(result.rewards).all()
    with pytest.raises(ValueError, match='gave 1 rewards that are not finite or beyond 1e') as err:
        collecting.check_counters([counted | {'overflow': np.zeros(1)}])
    assert str(float(np.float32(bad))) in str(err.value)


@pytest.mark.parametrize(
    'function, words',
    [
        (lambda out, task: out.rewards.sum(1), r'float32 \[3\] and must return .*3, 3'),
        (lambda out: out.rewards, 'TypeError'),
        (lambda out, task: {'a': out.rewards}, r"\['a'\] and reward.components is \(\)"),
    ],
)
def test_an_invalid_function_of_rollouts_is_a_one_line_error_from_shapes(function, words):
    shapes = jax.eval_shape(rollout)
    with pytest.raises(ValueError, match=f"^reward.function='x:y'.*{words}") as error:
        rewards.check_traced(custom(function), shapes, None)
    assert '\n' not in str(error.value)


def test_named_rewards_are_summed_and_stored_separately():
    def parts(out, task):
        return {'two': jnp.full_like(out.rewards, 2.0), 'own': out.rewards}

    reward = custom(parts, 'own', 'two')
    rewards.check_traced(reward, jax.eval_shape(rollout), None)
    result, _ = rewards.of_rollout(rollout(faulty=[2]), None, reward)
    np.testing.assert_allclose(result.rewards, [[3, 2.5, 2.25], [4, 0, 0], [0, 0, 0]])
    components = result.extra[rewards.COMPONENTS]
    np.testing.assert_allclose(components['own'], [[1, 0.5, 0.25], [2, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(components['two'], [[2, 2, 2], [2, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match='reward.components'):
        rewards.check_traced(custom(parts, 'own'), jax.eval_shape(rollout), None)


# ---- on hosts ------------------------------------------------------------------------------------


def test_a_function_of_episodes_receives_their_texts(monkeypatch):
    """Item, texts, rewards and success are the same as in a fresh environment."""
    episodes = []

    def count(episode):
        episodes.append(episode)
        return [float(number) for number in range(len(episode.turns))]

    plain, _ = hosts.play()
    rewarded, _ = hosts.play(reward=rewards.CustomReward('mine', count))
    for name, before in hosts.arrays(plain).items():
        if name != 'rewards':
            np.testing.assert_array_equal(hosts.arrays(rewarded)[name], before, err_msg=name)
    turns = np.arange(plain.rewards.shape[1])[None]
    inside = turns < plain.num_turns[:, None]
    np.testing.assert_array_equal(rewarded.rewards, np.where(inside, turns, 0))
    assert len(episodes) == 16 and len({episode.item for episode in episodes}) > 1
    for b, episode in enumerate(sorted(episodes, key=lambda one: one.item)[:3]):
        world = hosts.Echo()
        assert episode.turns[0].shown == world.reset(episode.item), b
        for turn in episode.turns:
            reply = world.step(turn.said)
            assert (turn.reply, turn.reward, turn.acts) == (reply.observation, reply.reward, True)
        assert episode.success == reply.success and episode.figures[0] == len(episode.turns)


def test_named_rewards_of_episodes_are_stored_separately():
    def parts(episode):
        turns = len(episode.turns)
        return {'first': [1.0] + [0.0] * (turns - 1), 'each': [0.5] * turns}

    out, _ = hosts.play(reward=rewards.CustomReward('mine', parts, ('each', 'first')))
    inside = np.arange(out.rewards.shape[1])[None] < np.asarray(out.num_turns)[:, None]
    components = out.extra[rewards.COMPONENTS]
    np.testing.assert_array_equal(components['each'], np.where(inside, 0.5, 0.0))
    np.testing.assert_array_equal(np.asarray(components['first']).sum(1), np.ones(len(inside)))
    np.testing.assert_array_equal(out.rewards, components['each'] + components['first'])
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
def test_invalid_results_of_a_function_of_episodes_are_errors(function, words):
    turn = rewards.Turn('shown', 'said', 'reply', 0.5, True, 0)
    episode = rewards.Episode(7, '', (turn, turn), True, ())
    with pytest.raises(ValueError, match=f'^mine.*item 7.*{words}|^mine {words}.*item 7') as error:
        rewards.of_episode(episode, rewards.CustomReward('mine', function))
    assert '\n' not in str(error.value)


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
def test_a_run_trains_on_custom_rewards_but_keeps_the_success_of_the_world(readme_module, tmp_path):
    """Metrics, validation and pages use the function's rewards."""
    # A random policy solves nothing: each played turn gets a reward, turns past the end do not
    readme_module.steady = lambda rollout, task: jnp.full(rollout.rewards.shape, 0.25)
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
def test_an_invalid_reward_function_ends_a_run_before_a_model_is_built(
    readme_module, name, changes, words, monkeypatch
):
    monkeypatch.setattr(loading, 'build_model', None)
    with pytest.raises(ValueError, match=words):
        build(micro_runs.config('bandit', **changes | {'reward.function': name}))
