"""The scout's PPO: advantages, episodes, legal actions, plans, and bit-identical resumption."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.envs import BabyAI, Bandit, FrozenLake, Library, Sokoban
from agentrl_jax.envs.base import TextEnvironment
from agentrl_jax.imitation import scout

DRY = FrozenLake(success_rate=1.0, frozen=0.9)
TINY = scout.ScoutSettings(steps=192, envs=4, length=8, hidden=8, epochs=2, minibatches=2)


def game_of(env, budget=5, levels=8):
    return scout.Game(env, budget), env.make_params('train', num_levels=levels, seed=0)


def test_advantages_by_hand():
    """discount .5, lambda .5; the first episode ends with step 1, the second continues."""
    reward = jnp.array([[1.0], [2.0], [4.0]])
    value = jnp.array([[2.0], [6.0], [8.0]])
    over = jnp.array([[False], [True], [False]])
    # t=2: 4 + .5 * 10 - 8 = 1. t=1: 2 - 6 = -4. t=0: 1 + .5 * 6 - 2 = 2, plus .25 * -4
    advantages = scout.gae(reward, value, over, jnp.array([10.0]), 0.5, 0.5)
    np.testing.assert_allclose(advantages[:, 0], [1.0, -4.0, 1.0])


def test_illegal_actions_are_never_sampled_and_have_no_gradient():
    net = scout.init_net(jax.random.key(0), 3, 4, 8)
    view, legal = jnp.ones((2, 3)), jnp.array([[True, False, True, False]] * 2)
    logprobs, _ = scout.forward(net, view, legal)
    np.testing.assert_allclose(jnp.exp(logprobs).sum(1), 1, rtol=1e-6)
    assert (jnp.exp(logprobs)[:, 1::2] == 0).all()
    zero, action = jnp.zeros(2), jnp.array([0, 2])
    steps = scout.Steps(view, legal, action, zero, zero, zero, zero > 0, zero > 0)
    gradient = jax.grad(scout.loss)(net, steps, jnp.ones(2), zero, 0.1, TINY)
    kernel, bias = gradient['policy']
    assert (kernel[:, 1::2] == 0).all() and (bias[1::2] == 0).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_the_weight_of_the_entropy_falls_to_a_tenth_in_six_updates():
    np.testing.assert_allclose(TINY.entropy_schedule(np.array([0, 2, 6])), [0.1, 0.07, 0.01])


def test_the_bandit_offers_the_two_arms_of_its_question():
    game, pool = game_of(Bandit(), budget=1)
    state = game.env.reset_level(jnp.int32(3), pool)
    names = {game.env.ACTION_NAMES[i] for i in np.flatnonzero(game.legal(state))}
    assert names == set(game.env.names_of(3, pool))


def test_an_episode_ends_at_the_goal_or_without_actions_left_and_a_new_one_starts():
    game, pool = game_of(DRY)
    settings = dataclasses.replace(TINY, length=40)
    before = scout.start(game, pool, settings)
    key = jax.random.key(1)
    after, steps, _ = jax.jit(scout.explore, static_argnums=(3, 4))(
        key, before, pool, game, settings
    )
    over, used = np.asarray(steps.over), np.zeros(4, int)
    for t in range(40):  # view: features, one-hot of the actions left, their share
        np.testing.assert_allclose(steps.view[t, :, -1], (5 - used) / 5, rtol=1e-6)
        assert (over[t] >= (used == 4)).all()
        used = np.where(over[t], 0, used + 1)
    assert over.any() and (used == np.asarray(after.used)).all()
    assert (np.asarray(steps.reward)[~over] == 0).all()
    assert ((np.asarray(steps.reward) == 1) == np.asarray(steps.success)).all()


def test_training_in_parts_is_bit_identical_to_one_training():
    game, pool = game_of(DRY)
    start = scout.start(game, pool, TINY)
    assert TINY.updates == 6
    one, _ = scout.train(start, pool, 6, game=game, settings=TINY)
    two, _ = scout.train(start, pool, 2, game=game, settings=TINY)
    two, _ = scout.train(jax.device_get(two), pool, 6, game=game, settings=TINY)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    other = dataclasses.replace(TINY, seed=1)
    assert (scout.start(game, pool, other).net['first'][0] != start.net['first'][0]).any()


def test_a_plan_is_a_greedy_episode():
    """The episode is played here step by step, with the environment's functions."""
    game, pool = game_of(DRY)
    net = scout.start(game, pool, TINY).net
    states = jax.vmap(DRY.reset_level, (0, None))(jnp.arange(8), pool)
    plans = scout.plan(net, states, jnp.full(8, 2), pool, game=game, count=4)
    for level, plan in enumerate(np.asarray(plans)):
        state, names = DRY.reset_level(jnp.int32(level), pool), []
        for used in (2, 3, 4):
            if not DRY.is_terminated(state, pool):
                view = game.view(state, jnp.int32(used), pool)
                logprobs, _ = scout.forward(net, view[None], game.legal(state)[None])
                names.append(int(logprobs.argmax()))
                state = DRY.step_env(jax.random.key(0), state, jnp.int32(names[-1]), pool)[1]
        assert plan.tolist() == names + [-1] * (4 - len(names))


@pytest.mark.parametrize('env', [DRY, Sokoban(search_depth=10), Bandit(), Library(), BabyAI()])
def test_features_are_finite_rows_of_fixed_length_that_distinguish_levels(env):
    _, pool = game_of(env)
    states = jax.vmap(env.reset_level, (0, None))(jnp.arange(4), pool)
    rows = np.asarray(jax.vmap(env.features, (0, None))(states, pool))
    assert rows.dtype == np.float32 and rows.ndim == 2 and np.isfinite(rows).all()
    assert len(np.unique(rows, axis=0)) > 1 and set(np.unique(rows)) == {0, 1}


def test_a_world_that_inherits_observe_has_a_feature_per_line_up_to_a_limit():
    @dataclasses.dataclass(frozen=True)
    class Lines(TextEnvironment):
        name = 'lines'
        size: int = 3

        def line_slots(self, params):
            return [range(0, 2), range(2, 2 + self.size)]

        def line_ids(self, state, params):
            return jnp.array([-1, 3])

    assert Lines().features(None, None).tolist() == [0, 0, 0, 1, 0]
    with pytest.raises(ValueError, match='20,002 features.*Implement Lines.features'):
        Lines(20_000).features(None, None)
