"""make_batch and the losses of each algorithm: by hand, and what must not matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.algorithms import ALGORITHMS, common, grpo, ppo
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import losses, objective, score
from agentrl_jax.types import EpisodeStop


def two_episodes(**kwargs):
    """Group of two: turns (1 obs, 2 act), (2 obs, 1 act) with rewards .5, 1; and one turn, -1."""
    return toy.rollout_of(
        [[(1, 2), (2, 1)], [(1, 2)]], [[0.5, 1.0], [-1.0, 0.0]], length=7, **kwargs
    )


def zero_scores(rollout):
    return jax.tree.map(jnp.zeros_like, toy.scores_of(rollout))


# ---- PPO -----------------------------------------------------------------------------------------


def test_ppo_turn_rewards_by_hand():
    # tokens: o a a o o a .  row 0: reward .5 at t=2, 1 at t=5; V = 0, gamma = lam = 1
    rollout = two_episodes(penalties=[[0, -0.1], [0, 0]])
    batch = ppo.make_batch(rollout, zero_scores(rollout), group_size=2, whiten=False)
    want = [[0, 1.4, 1.4, 0, 0, 0.9, 0], [0, -1, -1, 0, 0, 0, 0]]
    np.testing.assert_allclose(batch.advantages, want, rtol=1e-6)
    np.testing.assert_allclose(batch.returns, want, rtol=1e-6)
    np.testing.assert_array_equal(batch.mask, rollout.action_mask)
    np.testing.assert_array_equal(batch.value_mask, batch.mask)


def test_ppo_episode_placement_and_values_by_hand():
    # return 1.5 at t=5; V .2 .3 .5 at t=1, 2, 5; lam .5:
    # A5 = 1; A2 = .5 - .3 + .5 * 1 = .7; A1 = .3 - .2 + .5 * .7 = .45; targets A + V
    rollout = two_episodes()
    values = jnp.zeros((2, 7)).at[0, jnp.array([1, 2, 5])].set(jnp.array([0.2, 0.3, 0.5]))
    scores = zero_scores(rollout).replace(values=values)
    batch = ppo.make_batch(
        rollout, scores, group_size=2, whiten=False, reward_on='episode', lam=0.5
    )
    np.testing.assert_allclose(batch.advantages[0], [0, 0.45, 0.7, 0, 0, 1.0, 0], rtol=1e-6)
    np.testing.assert_allclose(batch.returns[0], [0, 0.65, 1.0, 0, 0, 1.5, 0], rtol=1e-6)
    np.testing.assert_allclose(batch.old_values[0], values[0])


def test_ppo_whitens_over_trained_tokens_of_healthy_kept_episodes():
    rollout = toy.random_rollout(0, faulty=(2,))
    keep = jnp.arange(8) != 5
    batch = ppo.make_batch(rollout, toy.scores_of(rollout), group_size=4, keep=keep)
    values = np.asarray(batch.advantages)[np.asarray(batch.mask)]
    np.testing.assert_allclose([values.mean(), values.std(ddof=1)], [0, 1], atol=1e-5)
    assert not batch.mask[jnp.array([2, 5])].any()
    assert not np.asarray(batch.advantages)[~np.asarray(batch.mask)].any()
    assert not np.asarray(batch.returns)[~np.asarray(batch.mask)].any()


def test_ppo_normalises_returns_only_when_they_are_placed_at_the_end():
    rollout = two_episodes()
    make = functools.partial(
        ppo.make_batch, rollout, zero_scores(rollout), group_size=2, whiten=False
    )
    # returns 1.5 and -1: mean .25
    batch = make(reward_on='episode', reward_normalization='mean')
    np.testing.assert_allclose(batch.advantages[:, 1], [1.25, -1.25])
    with pytest.raises(ValueError, match='episode'):
        make(reward_normalization='mean')
    with pytest.raises(ValueError, match='reward_on'):
        make(reward_on='token')
    with pytest.raises(ValueError, match='estimator'):
        make(estimator='archer')


def test_ppo_turn_estimator_trains_values_at_turn_ends_only():
    rollout = toy.random_rollout(1)
    scores = toy.scores_of(rollout)
    batch = ppo.make_batch(rollout, scores, group_size=4, estimator='turn', turn_gamma=0.9)
    ends = adv.turn_ends(rollout.action_mask, rollout.turn)
    np.testing.assert_array_equal(batch.value_mask, ends)
    assert not np.asarray(batch.returns)[~np.asarray(ends)].any()
    values = np.asarray(batch.advantages)[np.asarray(ends)]
    np.testing.assert_allclose([values.mean(), values.std(ddof=1)], [0, 1], atol=1e-5)


def test_ppo_bi_level_equals_its_function():
    rollout = toy.random_rollout(2)
    scores = toy.scores_of(rollout)
    batch = ppo.make_batch(
        rollout,
        scores,
        group_size=4,
        estimator='bi_level',
        gamma=0.9,
        turn_gamma=0.95,
        lam=0.8,
        whiten=False,
    )
    placed = adv.place_on_turn_ends(rollout.rewards, rollout.action_mask, rollout.turn)
    want = adv.bi_level_gae(
        placed,
        scores.values,
        rollout.action_mask,
        rollout.turn,
        gamma=0.9,
        turn_gamma=0.95,
        lam=0.8,
    )
    np.testing.assert_allclose(batch.advantages, want)


@pytest.mark.parametrize('estimator', ['turn', 'bi_level'])
def test_the_kl_of_inner_tokens_reaches_every_turn_before_it(estimator):
    """Only that of a turn's last token did: 1000 nats on the others changed no other advantage."""
    rollout = toy.rollout_of([[(1, 2), (1, 2)]], [[0.5, 1.0]], length=6)
    scores = zero_scores(rollout).replace(old_logprobs=jnp.array([[9.0, 0, 0, 9, 1000, 0]]))
    kl = dict(group_size=1, kl_coef=0.001, kl_in_reward=True, whiten=False)
    batch = ppo.make_batch(rollout, scores, estimator=estimator, **kl)
    # rewards .5 at t = 2 and 1 at t = 5, KL 1 at t = 4: 1.5 - 1 in the first turn, and behind the
    # token with the KL 1 (bi_level) or the turn's own 1 - 1 (turn)
    last = 0.0 if estimator == 'turn' else 1.0
    want = [0, 0.5, 0.5, 0, 0, last]
    np.testing.assert_allclose(batch.advantages, [want], atol=1e-6)


@pytest.mark.parametrize('estimator', ['token', 'turn', 'bi_level'])
def test_an_episode_cut_by_a_budget_goes_on_with_the_value_behind_it_if_asked(estimator):
    # row 0: two turns and a goal; row 1: one turn, then its turns are used up. Rewards 1 2 | .5,
    # values 0, behind the tokens at t = 2 of row 0: .25, and of row 1: 4
    rollout = toy.rollout_of([[(1, 2), (1, 2)], [(1, 2)]], [[1.0, 2], [0.5, 0]], length=6)
    stops = jnp.array([EpisodeStop.TERMINATED, EpisodeStop.TURN_BUDGET])
    rollout = rollout.replace(episode_stop=stops)
    behind = jnp.zeros((2, 6)).at[0, 2].set(0.25).at[0, 5].set(9).at[1, 2].set(4)
    scores = zero_scores(rollout).replace(next_values=behind)
    make = functools.partial(
        ppo.make_batch, rollout, scores, group_size=2, whiten=False, estimator=estimator
    )
    over, cut = make(), make(bootstrap_truncated=True)
    np.testing.assert_allclose(over.advantages, [[0, 3, 3, 0, 2, 2], [0, 0.5, 0.5, 0, 0, 0]])
    np.testing.assert_allclose(cut.advantages, [[0, 3, 3, 0, 2, 2], [0, 4.5, 4.5, 0, 0, 0]])
    # the critic learns at t = 3 what the next turn returns; nothing is known behind the last turns
    assert np.argwhere(cut.value_mask ^ over.value_mask).tolist() == [[0, 3]]
    assert cut.returns[0, 3] == 2 and cut.old_values[0, 3] == 0.25
    for stop in (EpisodeStop.ACTION_BUDGET, EpisodeStop.TERMINATED):
        other = rollout.replace(episode_stop=jnp.full(2, stop))
        batch = ppo.make_batch(other, scores, group_size=2, whiten=False, bootstrap_truncated=True)
        assert batch.advantages[1, 2] == 0.5


def test_values_behind_tokens_are_those_before_the_next_ones():
    rollout, params = toy.random_rollout(4), toy.toy_params(0)
    scores = score.score(
        params,
        None,
        None,
        rollout,
        hidden_fn=toy.toy_hidden,
        head_fn=toy.toy_head,
        values_fn=toy.toy_values,
        microbatch_rows=4,
        temperature=1.0,
        chunk_size=64,
        recompute=False,
        with_next=True,
    )
    both = np.asarray(rollout.action_mask[:, :-1] & rollout.action_mask[:, 1:])
    assert both.any()
    np.testing.assert_allclose(scores.next_values[:, :-1][both], scores.values[:, 1:][both])


# ---- GRPO ----------------------------------------------------------------------------------------


def test_grpo_by_hand():
    # returns 1.5 and -1: mean .25, std 1.25 * sqrt(2); A = +-1 / sqrt(2) on every action token
    rollout = two_episodes()
    batch = grpo.make_batch(rollout, zero_scores(rollout), group_size=2)
    a = 0.5**0.5
    want = [[0, a, a, 0, 0, a, 0], [0, -a, -a, 0, 0, 0, 0]]
    np.testing.assert_allclose(batch.advantages, want, rtol=1e-5)
    assert not batch.value_mask.any() and not batch.returns.any()


def test_grpo_counts_format_penalties_and_leaves_faulty_episodes_out():
    layouts, rewards = [[(1, 1)]] * 3, [[1.0], [1.0], [50.0]]
    rollout = toy.rollout_of(layouts, rewards, length=3, penalties=[[-1], [0], [0]], faulty=(2,))
    batch = grpo.make_batch(rollout, zero_scores(rollout), group_size=3)
    # healthy returns 0 and 1
    np.testing.assert_allclose(batch.advantages[:, 1], [-(0.5**0.5), 0.5**0.5, 0], rtol=1e-5)


def test_kl_in_the_reward_by_hand():
    # old - ref = .5 on all tokens, coefficient .2: each trained token costs .1
    rollout = two_episodes()
    scores = zero_scores(rollout).replace(old_logprobs=jnp.full((2, 7), 0.5))
    kl = dict(group_size=2, kl_coef=jnp.float32(0.2), kl_in_reward=True)
    batch = ppo.make_batch(rollout, scores, whiten=False, **kl)
    np.testing.assert_allclose(
        batch.advantages[0], [0, 1.5 - 0.3, 1.5 - 0.2, 0, 0, 1 - 0.1, 0], rtol=1e-6
    )
    batch = grpo.make_batch(rollout, scores, **kl)  # returns 1.5 - .3 and -1 - .2
    np.testing.assert_allclose(batch.advantages[:, 1], [0.5**0.5, -(0.5**0.5)], rtol=1e-5)


# ---- the others ----------------------------------------------------------------------------------


def one_turn_group(rewards, **kwargs):
    """A group of episodes with one observation and two action tokens."""
    return toy.rollout_of([[(1, 2)]] * len(rewards), [[r] for r in rewards], length=4, **kwargs)


def first_advantages(name, rollout, group_size, **kwargs):
    batch = ALGORITHMS[name].make_batch(
        rollout, zero_scores(rollout), group_size=group_size, **kwargs
    )
    return batch.advantages[:, 1]


def test_group_baselines_by_hand():
    # (1, 2, 6): mean 3, others' means 4, 3.5, 1.5
    rollout = one_turn_group([1.0, 2, 6])
    np.testing.assert_allclose(first_advantages('dr_grpo', rollout, 3), [-2, -1, 3])
    np.testing.assert_allclose(first_advantages('rloo', rollout, 3), [-3, -1.5, 4.5])
    # centred, then whitened over six tokens: var (4 + 1 + 9) * 2 / 5
    np.testing.assert_allclose(
        first_advantages('reinforce_pp_baseline', rollout, 3),
        np.array([-2, -1, 3]) / (28 / 5) ** 0.5,
        rtol=1e-6,
    )


def test_reinforce_pp_by_hand():
    # row 0: reward .5 at t=2 and 1 at t=5, gamma .5: t=1: .5 * (.5 + .5) = .5, t=2: 1, t=5: 1
    # row 1: -1 at t=2: -.5, -1.  mean .2, squares .09 .64 .64 .49 1.44 = 3.3, var .825
    rollout = two_episodes()
    batch = ALGORITHMS['reinforce_pp'].make_batch(
        rollout, zero_scores(rollout), group_size=2, gamma=0.5
    )
    want = np.array([[0, 0.3, 0.8, 0, 0, 0.8, 0], [0, -0.7, -1.2, 0, 0, 0, 0]]) / 0.825**0.5
    np.testing.assert_allclose(batch.advantages, want, rtol=1e-5)


def test_dapo_penalises_long_episodes_before_comparing():
    # limit 3, buffer 2: two tokens: -(2 - 1) / 2 = -.5; one token: 0; rewards equal
    rollout = toy.rollout_of([[(1, 2)], [(1, 1)]], [[1.0], [1.0]], length=3)
    out = first_advantages('dapo', rollout, 2, max_length=3, overlong_buffer=2)
    np.testing.assert_allclose(out, [-(0.5**0.5), 0.5**0.5], rtol=1e-5)
    np.testing.assert_array_equal(first_advantages('dapo', rollout, 2), [0, 0])


def test_mt_grpo_places_turn_advantages_on_tokens():
    """Golden vector of the paper's code: first turn .7 .2 0 .7, answer 1.9 .4 1.9 .9."""
    rewards = [[0.7, 1.9], [0.2, 0.4], [0.0, 1.9], [0.7, 0.9]]
    rollout = toy.rollout_of([[(1, 2), (2, 1)]] * 4, rewards, length=7)
    batch = ALGORITHMS['mt_grpo'].make_batch(
        rollout, zero_scores(rollout), group_size=4, outcome='final'
    )
    first, second = [1.67591, -1.72830, -0.29037, 0.34276], [0.83322, -1.16651, 0.83322, -0.49993]
    zero = np.zeros(4)
    want = np.stack([zero, first, first, zero, zero, second, zero], 1)
    np.testing.assert_allclose(batch.advantages, want, atol=2e-5)


def test_mt_grpo_knows_four_kinds_of_outcome():
    split = ALGORITHMS['mt_grpo'].split_rewards
    rollout = two_episodes(penalties=[[0, -0.1], [0, 0]])
    rollout = rollout.replace(success=jnp.array([True, False]))
    rewards, outcome = split(rollout, 'success')
    np.testing.assert_allclose(rewards, [[0.5, 0.9], [-1, 0]])
    np.testing.assert_allclose(outcome, [1, 0])
    rewards, outcome = split(rollout, 'final')  # row 1 has one turn: its reward is the outcome
    np.testing.assert_allclose(rewards, [[0.5, 0], [0, 0]])
    np.testing.assert_allclose(outcome, [0.9, -1])
    np.testing.assert_allclose(split(rollout, 'return')[1], [1.4, -1], rtol=1e-6)
    ends = jnp.array([EpisodeStop.TERMINATED, EpisodeStop.TURN_BUDGET])
    rewards, outcome = split(rollout.replace(episode_stop=ends), 'answer')  # row 1 gave none
    np.testing.assert_allclose(rewards, [[0.5, 0], [-1, 0]])
    np.testing.assert_allclose(outcome, [0.9, 0])
    with pytest.raises(ValueError, match='best'):
        split(rollout, 'best')


def test_mt_grpo_with_one_turn_and_its_return_is_grpo():
    rollout = one_turn_group([1.0, 2, 6, 0])
    want = first_advantages('grpo', rollout, 4)
    got = first_advantages('mt_grpo', rollout, 4, outcome='final', eps=1e-6)
    np.testing.assert_allclose(got, want, atol=1e-6)
    got = first_advantages('mt_grpo', rollout, 4, outcome='return', mode='or', eps=1e-6)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_gigpo_by_hand():
    # two episodes of two turns, rewards 0 1 and 0 0; equal first, different second observations.
    # gamma .5: G = (.5, 1), (0, 0). A_E = +-.5; A_S = +-.25 in turn 0, none in turn 1
    rollout = toy.rollout_of([[(1, 1), (1, 1)]] * 2, [[0, 1.0], [0, 0]], length=4)
    rollout = rollout.replace(anchor=jnp.array([[3, 4], [3, 5]], jnp.uint32))
    make = functools.partial(
        ALGORITHMS['gigpo'].make_batch, rollout, zero_scores(rollout), group_size=2, turn_gamma=0.5
    )
    np.testing.assert_allclose(make().advantages, [[0, 0.75, 0, 0.5], [0, -0.75, 0, -0.5]])
    np.testing.assert_allclose(
        make(step_coef=2.0).advantages[:, 1], [0.5 + 2 * 0.25, -0.5 - 2 * 0.25]
    )
    # the second turn of row 0 in the state of the first ones, whatever its prompt says: G .5 1 0,
    # mean .5
    again = rollout.replace(anchor=jnp.array([[3, 3], [3, 5]], jnp.uint32))
    batch = ALGORITHMS['gigpo'].make_batch(again, zero_scores(again), group_size=2, turn_gamma=0.5)
    np.testing.assert_allclose(batch.advantages, [[0, 0.5, 0, 1], [0, -1, 0, -0.5]], atol=1e-6)


def ratio_batch(advantages, layout=((1, 2), (1, 1))):
    rollout = toy.rollout_of([list(layout)], [[1.0] * len(layout)], length=6)
    batch = grpo.make_batch(rollout, zero_scores(rollout), group_size=1)
    return batch.replace(advantages=jnp.where(batch.mask, advantages, 0.0))


def test_gspo_by_hand():
    # log-ratios .1 .3 | .2 at t = 1 2 | 4: row mean .2, turn means .2 and .2 -> use -.4 in turn 1:
    # row mean 0, turn means .2, -.4; A = 1, clip .9 to 1.1
    batch = ratio_batch(1.0)
    logp = jnp.array([[0, 0.1, 0.3, 0, -0.4, 0]])
    clip = dict(clip_low=0.1, clip_high=0.1, dual_clip=None)
    row = ALGORITHMS['gspo'].loss(logp, batch, **clip)
    np.testing.assert_allclose(row, [[0, -1, -1, 0, -1, 0]], atol=1e-6)
    turn = ALGORITHMS['gspo_turn'].loss(logp, batch, **clip)
    # turn 0: e^.2 = 1.22, clipped to 1.1; turn 1: e^-.4 = .67, not clipped from below at A > 0
    np.testing.assert_allclose(turn, [[0, -1.1, -1.1, 0, -np.exp(-0.4), 0]], rtol=1e-5)
    gradient = jax.grad(lambda x: ALGORITHMS['gspo_turn'].loss(x, batch, **clip).sum())(logp)
    np.testing.assert_allclose(gradient, [[0, 0, 0, 0, -np.exp(-0.4), 0]], atol=1e-5)


def test_cispo_by_hand():
    # ratios e^.5 = 1.65 (weight 1.28), e^-.5 = .61 (.8), e^.1: loss -w A log p, gradient -w A
    batch = ratio_batch(jnp.array([[0, 2.0, -1, 0, 1, 0]]))
    logp = jnp.array([[0, 0.5, -0.5, 0, 0.1, 0]])
    clip = dict(clip_low=0.2, clip_high=0.28, dual_clip=None)
    loss = ALGORITHMS['cispo'].loss(logp, batch, **clip)
    np.testing.assert_allclose(
        loss, [[0, -1.28 * 2 * 0.5, 0.8 * -0.5, 0, -np.exp(0.1) * 0.1, 0]], rtol=1e-5
    )
    gradient = jax.grad(lambda x: ALGORITHMS['cispo'].loss(x, batch, **clip).sum())(logp)
    np.testing.assert_allclose(gradient, [[0, -2.56, 0.8, 0, -np.exp(0.1), 0]], rtol=1e-5)
    with pytest.raises(ValueError, match='dual_clip'):
        ALGORITHMS['cispo'].loss(logp, batch, clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def test_segment_means_by_hand():
    segment = jnp.array([[0, 0, 0, 1, 1, -1]])
    mask = jnp.array([[False, True, True, False, True, False]])
    x = jnp.array([[9.0, 1, 3, 9, 7, jnp.nan]])
    np.testing.assert_allclose(common.segment_mean(x, segment, mask), [[0, 2, 2, 0, 7, 0]])
    np.testing.assert_allclose(adv.per_turn(x, segment, mask, turns=3), [[4, 7, 0]])


# ---- all -----------------------------------------------------------------------------------------

EVERY = pytest.mark.parametrize('name', sorted(ALGORITHMS))


@EVERY
def test_module_says_what_it_needs(name):
    module = ALGORITHMS[name]
    assert isinstance(module.USES_CRITIC, bool) and isinstance(module.SETTINGS, tuple)
    assert module.__doc__ and callable(module.loss) and callable(module.clipped)


@EVERY
def test_a_reward_on_the_last_turn_reaches_its_action_tokens(name):
    """AgentGym-RL puts the return of an episode the world ended on a masked observation token."""
    layouts = [[(2, 2), (1, 2)]] * 4  # the last turn ends the episode
    # best and worst side by side, as DPO wants them
    rollout = toy.rollout_of(layouts, [[0, 1], [0, 0], [0, 1], [0, 0]], length=9)
    batch = ALGORITHMS[name].make_batch(rollout, zero_scores(rollout), group_size=4)
    last = (rollout.turn == 1) & rollout.action_mask
    better = np.asarray(batch.advantages)[0][np.asarray(last)[0]]
    worse = np.asarray(batch.advantages)[1][np.asarray(last)[1]]
    assert (better > worse).all() and (better > 0).all()


@EVERY
def test_permuting_groups_permutes_the_batch(name):
    rollout = toy.random_rollout(3, rows=12, faulty=(1,))
    scores = toy.scores_of(rollout)
    rows = (np.array([2, 0, 1])[:, None] * 4 + np.arange(4)).reshape(-1)
    make = functools.partial(ALGORITHMS[name].make_batch, group_size=4)
    batch = make(rollout, scores)
    moved = make(*jax.tree.map(lambda x: x[rows], (rollout, scores)))
    batch, moved = batch.replace(pair=None), moved.replace(pair=None)  # which are numbered in order
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(a[rows], b, atol=1e-5)


@EVERY
def test_dropping_rows_equals_weighing_them_zero(name):
    rollout = toy.random_rollout(4, rows=12)
    scores = toy.scores_of(rollout)
    rows = np.arange(4, 12)
    make = functools.partial(ALGORITHMS[name].make_batch, group_size=4)
    weighed = make(rollout, scores, keep=jnp.arange(12) >= 4)
    compact = make(*jax.tree.map(lambda x: x[rows], (rollout, scores)))
    for field in ('mask', 'value_mask', 'advantages', 'returns'):
        a, b = np.asarray(getattr(weighed, field)), np.asarray(getattr(compact, field))
        np.testing.assert_allclose(a[rows], b, atol=1e-6)
        assert not a[:4].any()


@EVERY
def test_unhealthy_and_poisoned_rows_change_nothing(name):
    rollout = toy.random_rollout(5, faulty=(3,))
    scores = toy.scores_of(rollout)
    make = functools.partial(ALGORITHMS[name].make_batch, group_size=4)
    clean = make(rollout, scores)
    bad = rollout.replace(rewards=rollout.rewards.at[3].set(jnp.nan))
    mask = rollout.action_mask & rollout.healthy[:, None]
    dirty = make(bad, jax.tree.map(lambda x: jnp.where(mask, x, jnp.inf), scores))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)


@EVERY
def test_nothing_to_train_on_gives_zeros(name):
    rollout = toy.random_rollout(6, faulty=range(8))
    batch = ALGORITHMS[name].make_batch(rollout, toy.scores_of(rollout), group_size=4)
    assert not batch.mask.any() and not batch.advantages.any() and not batch.returns.any()
    loss = ALGORITHMS[name].loss(
        rollout.logprobs, batch, clip_low=0.2, clip_high=0.2, dual_clip=None
    )
    assert not np.asarray(loss).any()


@pytest.mark.parametrize('name', sorted(ALGORITHMS.keys() - {'dpo'}))
def test_first_gradient_is_the_policy_gradient(name):
    """At pi = pi_old every surrogate has the gradient -A of its token (DPO is none)."""
    rollout = toy.random_rollout(7)
    batch = ALGORITHMS[name].make_batch(rollout, toy.scores_of(rollout), group_size=4)

    def total(logprobs):
        loss = ALGORITHMS[name].loss(logprobs, batch, clip_low=0.2, clip_high=0.28, dual_clip=None)
        return losses.weighted_sum(batch.mask.astype(jnp.float32), loss)

    got = jax.grad(total)(batch.old_logprobs)
    np.testing.assert_allclose(got, np.where(batch.mask, -batch.advantages, 0), atol=1e-5)


@pytest.mark.parametrize('kl_in', ['loss', 'elsewhere'])
def test_policy_loss_adds_entropy_and_kl_by_hand(kl_in):
    """A model without layers: hidden is 1, logits [0, ln 3], so p = (1/4, 3/4) everywhere.

    A KL term in the reward, or DPO, has a reference too: its KL was not measured.
    """
    kl = dict(kl_estimator='k1' if kl_in == 'loss' else None, has_reference=True)
    rollout = toy.rollout_of([[(1, 2)]], [[1.0]], length=3)
    rollout = rollout.replace(tokens=jnp.array([[0, 0, 1]]))
    batch = grpo.make_batch(rollout, zero_scores(rollout), group_size=1)  # A = 1 (group of one)
    logp = np.log([0.25, 0.75])
    batch = batch.replace(
        old_logprobs=jnp.array([[0.0, *logp]], jnp.float32),
        ref_logprobs=jnp.array([[0.0, *(logp - 0.5)]], jnp.float32),
    )
    loss, (sums, _) = objective.policy_loss(
        {},
        batch,
        losses.token_weights(batch.mask, 'token_mean'),
        0.2,
        hidden_fn=lambda *_: jnp.ones((1, 3, 1)),
        head_fn=lambda _: jnp.log(jnp.array([[1.0, 3]])),
        entropy_coef=0.1,
        **kl,
        clip_high=0.28,
    )
    entropy = -(np.exp(logp) * logp).sum()
    # ratio 1: -1 per token; entropy the same for both; k1 = .5, k3 = e^-.5 + .5 - 1
    in_loss = kl_in == 'loss'
    np.testing.assert_allclose(loss, -1 - 0.1 * entropy + 0.2 * 0.5 * in_loss, rtol=1e-5)
    np.testing.assert_allclose(sums['policy/entropy'], 2 * entropy, rtol=1e-5)
    measured = 1.0 if in_loss else 2 * (np.exp(-0.5) - 0.5)
    np.testing.assert_allclose(sums['policy/kl_ref'], measured, rtol=1e-5)
    assert sums['policy/clip_frac_low'] == sums['policy/clip_frac_high'] == 0


def test_ratio_metrics_by_hand():
    # ratios 2 (A > 0: clipped high), .5 (A < 0: clipped low), 4 (A < 0: only a dual clip), 1
    rollout = toy.rollout_of([[(1, 4)]], [[1.0]], length=5)
    batch = grpo.make_batch(rollout, zero_scores(rollout), group_size=1)
    batch = batch.replace(advantages=jnp.array([[0.0, 1, -1, -1, 1]]))
    logprobs = jnp.log(jnp.array([[9.0, 2, 0.5, 4, 1]]))
    sums = objective.ratio_sums(logprobs, batch)
    assert sums['policy/ratio_max'] == pytest.approx(4.0)
    np.testing.assert_allclose(sums['policy/kl_old'], -np.log(4), rtol=1e-5)  # of 2 .5 4 1
    # r - 1 - ln r: 1 - ln 2, -1/2 + ln 2, 3 - ln 4, 0
    np.testing.assert_allclose(sums['policy/kl_old_k3'], 3.5 - np.log(4), rtol=1e-4)
    clip = dict(clip_low=0.2, clip_high=0.28)
    found = objective.clipped_tokens(logprobs, batch, dual_clip=3.0, **clip)
    assert {name: np.flatnonzero(tokens).tolist() for name, tokens in found.items()} == {
        'policy/clip_frac_high': [1],
        'policy/clip_frac_low': [2],
        'policy/clip_frac_dual': [3],
    }
    assert 'policy/clip_frac_dual' not in objective.clipped_tokens(
        logprobs, batch, dual_clip=None, **clip
    )


CLIPPING = sorted(ALGORITHMS.keys() - {'dpo', 'agent_evol', 'cispo'})


@pytest.mark.parametrize('name', CLIPPING)
def test_clip_metrics_are_of_the_tokens_that_lose_their_gradient(name):
    """They were token ratios for every algorithm: 26 % clipped at sequence ratios of exactly 1."""
    rollout = toy.random_rollout(8)
    module, rng = ALGORITHMS[name], np.random.default_rng(0)
    batch = module.make_batch(rollout, toy.scores_of(rollout), group_size=4)
    logprobs = batch.old_logprobs + jnp.asarray(rng.normal(size=batch.mask.shape), jnp.float32)
    clip = dict(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    gradient = jax.grad(lambda x: module.loss(x, batch, **clip).sum())(logprobs)
    flat = batch.mask & (batch.advantages != 0) & (gradient == 0)
    found = module.clipped(logprobs, batch, **clip)
    assert flat.any() and (~flat & batch.mask).any()
    np.testing.assert_array_equal(
        functools.reduce(jnp.logical_or, found.values()) & batch.mask, flat
    )


def test_sequences_of_ratio_one_are_not_clipped_whatever_their_tokens_do():
    batch = ratio_batch(1.0)
    logprobs = jnp.array([[0, 0.5, -0.5, 0, 0.0, 0]])  # mean 0 over the row and over each turn
    clip = dict(clip_low=3e-4, clip_high=4e-4, dual_clip=None)
    for name in ('gspo', 'gspo_turn'):
        assert not any(x.any() for x in ALGORITHMS[name].clipped(logprobs, batch, **clip).values())
    assert objective.clipped_tokens(logprobs, batch, **clip)['policy/clip_frac_high'].any()


def test_cispo_reports_the_weights_it_bounds_and_losses_without_a_ratio_nothing():
    batch = ratio_batch(-1.0)
    logprobs = jnp.array([[0, 0.5, -0.5, 0, 0.0, 0]])
    found = ALGORITHMS['cispo'].clipped(
        logprobs, batch, clip_low=0.2, clip_high=0.28, dual_clip=None
    )
    assert np.flatnonzero(found['policy/clip_frac_high']).tolist() == [1]
    assert np.flatnonzero(found['policy/clip_frac_low']).tolist() == [2]
    for name in ('dpo', 'agent_evol'):
        assert (
            ALGORITHMS[name].clipped(logprobs, batch, clip_low=0, clip_high=0, dual_clip=None) == {}
        )
