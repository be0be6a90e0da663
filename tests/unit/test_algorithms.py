"""make_batch and the losses of each algorithm: by hand, and invariances."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy
from toy_rollouts import batch_of

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.algorithms.agent_evol import AgentEvol
from agentrl_jax.algorithms.cispo import CISPO
from agentrl_jax.algorithms.dapo import DAPO
from agentrl_jax.algorithms.dppo import DPPO
from agentrl_jax.algorithms.dr_grpo import DrGRPO
from agentrl_jax.algorithms.gigpo import GiGPO
from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.algorithms.gspo import GSPO, segment_mean
from agentrl_jax.algorithms.gspo_turn import GSPOTurn
from agentrl_jax.algorithms.maxrl import MaxRL
from agentrl_jax.algorithms.mt_grpo import MTGRPO, split_rewards
from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.algorithms.reinforce_pp import ReinforcePP
from agentrl_jax.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from agentrl_jax.algorithms.rloo import RLOO
from agentrl_jax.algorithms.sapo import SAPO
from agentrl_jax.extras.distillation.opd import OPD
from agentrl_jax.extras.gdpo.gdpo import GDPO
from agentrl_jax.measure import metrics
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import losses, score, turn_credit
from agentrl_jax.rl.algorithm import KL, Clip, Comparison, Filter, Range
from agentrl_jax.rl.learning import BatchSettings, UpdateSettings
from agentrl_jax.rollout import windows
from agentrl_jax.types import EpisodeStop

CLIP = Clip(0.2, 0.28)


def two_episodes(**kwargs):
    """Group of two: turns (1 obs, 2 act), (2 obs, 1 act) with rewards .5, 1; and one turn, -1."""
    return toy.rollout_of(
        [[(1, 2), (2, 1)], [(1, 2)]], [[0.5, 1.0], [-1.0, 0.0]], length=7, **kwargs
    )


@functools.partial(jax.jit, static_argnums=0)
def loss_of(how, logprobs, batch):
    return how.loss(logprobs, batch)


@functools.partial(jax.jit, static_argnums=0)
def gradient_of(how, logprobs, batch):
    return jax.grad(lambda x: how.loss(x, batch).sum())(logprobs)


# ---- PPO -----------------------------------------------------------------------------------------


def test_ppo_turn_rewards_by_hand():
    # tokens: o a a o o a .  row 0: reward .5 at t=2, 1 at t=5; V = 0, gamma = lam = 1
    rollout = two_episodes(penalties=[[0, -0.1], [0, 0]])
    batch = batch_of(PPO(whiten=False), rollout, 2)
    want = [[0, 1.4, 1.4, 0, 0, 0.9, 0], [0, -1, -1, 0, 0, 0, 0]]
    np.testing.assert_allclose(batch.advantages, want, rtol=1e-6)
    np.testing.assert_allclose(batch.returns, want, rtol=1e-6)
    np.testing.assert_array_equal(batch.mask, rollout.action_mask)
    np.testing.assert_array_equal(batch.value_mask, batch.mask)
    half = batch_of(PPO(whiten=False, gamma=0.5), rollout, 2)  # .5 + .9 / 2, then half of it
    np.testing.assert_allclose(half.advantages[0], [0, 0.475, 0.95, 0, 0, 0.9, 0], rtol=1e-6)


def test_ppo_episode_placement_and_values_by_hand():
    # return 1.5 at t=5; V .2 .3 .5 at t=1, 2, 5; lam .5:
    # A5 = 1; A2 = .5 - .3 + .5 * 1 = .7; A1 = .3 - .2 + .5 * .7 = .45; targets A + V
    rollout = two_episodes()
    values = jnp.zeros((2, 7)).at[0, jnp.array([1, 2, 5])].set(jnp.array([0.2, 0.3, 0.5]))
    scores = toy.zero_scores(rollout).replace(values=values)
    batch = batch_of(PPO(whiten=False, reward_on='episode', lam=0.5), rollout, 2, scores)
    np.testing.assert_allclose(batch.advantages[0], [0, 0.45, 0.7, 0, 0, 1.0, 0], rtol=1e-6)
    np.testing.assert_allclose(batch.returns[0], [0, 0.65, 1.0, 0, 0, 1.5, 0], rtol=1e-6)
    np.testing.assert_allclose(batch.old_values[0], values[0])
    # returns 1.5 and -1: mean .25
    how = PPO(whiten=False, reward_on='episode', reward_normalization='mean')
    np.testing.assert_allclose(batch_of(how, rollout, 2).advantages[:, 1], [1.25, -1.25])


def test_ppo_whitens_over_trained_tokens_of_healthy_selected_episodes():
    rollout = toy.random_rollout(0, faulty=(2,))
    batch = batch_of(PPO(), rollout, 4, toy.scores_of(rollout), keep=jnp.arange(8) != 5)
    values = np.asarray(batch.advantages)[np.asarray(batch.mask)]
    np.testing.assert_allclose([values.mean(), values.std(ddof=1)], [0, 1], atol=1e-5)
    assert not batch.mask[jnp.array([2, 5])].any()
    assert not np.asarray(batch.advantages)[~np.asarray(batch.mask)].any()
    assert not np.asarray(batch.returns)[~np.asarray(batch.mask)].any()


def test_ppo_turn_estimator_trains_values_at_turn_ends_only():
    rollout = toy.random_rollout(1)
    how = PPO(estimator='turn', turn_gamma=0.9)
    batch = batch_of(how, rollout, 4, toy.scores_of(rollout))
    ends = adv.turn_ends(rollout.action_mask, rollout.turn)
    np.testing.assert_array_equal(batch.value_mask, ends)
    assert not np.asarray(batch.returns)[~np.asarray(ends)].any()
    values = np.asarray(batch.advantages)[np.asarray(ends)]
    np.testing.assert_allclose([values.mean(), values.std(ddof=1)], [0, 1], atol=1e-5)


@pytest.mark.parametrize('estimator', ['turn', 'bi_level'])
def test_the_kl_of_inner_tokens_reaches_every_earlier_turn(estimator):
    """Only the KL of a turn's last token did: 1000 nats on other tokens changed nothing else."""
    rollout = toy.rollout_of([[(1, 2), (1, 2)]], [[0.5, 1.0]], length=6)
    scores = toy.zero_scores(rollout).replace(old_logprobs=jnp.array([[9.0, 0, 0, 9, 1000, 0]]))
    how = PPO(estimator=estimator, whiten=False, kl=KL(0.001, 'reward'))
    batch = batch_of(how, rollout, 1, scores)
    # rewards .5 at t = 2 and 1 at t = 5, KL 1 at t = 4: 1.5 - 1 in the first turn, and after the
    # token with the KL 1 (bi_level) or the turn's own 1 - 1 (turn)
    last = 0.0 if estimator == 'turn' else 1.0
    np.testing.assert_allclose(batch.advantages, [[0, 0.5, 0.5, 0, 0, last]], atol=1e-6)


@pytest.mark.parametrize('estimator', ['token', 'turn', 'bi_level'])
def test_bootstrap_truncated_adds_the_value_after_an_exhausted_budget(estimator):
    # row 0: two turns and a goal; row 1: one turn, then the turn budget ends. Rewards 1 2 | .5,
    # values 0, after the tokens at t = 2 of row 0: .25, and of row 1: 4
    rollout = toy.rollout_of([[(1, 2), (1, 2)], [(1, 2)]], [[1.0, 2], [0.5, 0]], length=6)
    stops = jnp.array([EpisodeStop.TERMINATED, EpisodeStop.TURN_BUDGET])
    rollout = rollout.replace(episode_stop=stops)
    after = jnp.zeros((2, 6)).at[0, 2].set(0.25).at[0, 5].set(9).at[1, 2].set(4)
    scores = toy.zero_scores(rollout).replace(next_values=after)
    plain = PPO(whiten=False, estimator=estimator)
    bootstrapped = dataclasses.replace(plain, bootstrap_truncated=True)
    over, cut = (batch_of(how, rollout, 2, scores) for how in (plain, bootstrapped))
    np.testing.assert_allclose(over.advantages, [[0, 3, 3, 0, 2, 2], [0, 0.5, 0.5, 0, 0, 0]])
    np.testing.assert_allclose(cut.advantages, [[0, 3, 3, 0, 2, 2], [0, 4.5, 4.5, 0, 0, 0]])
    # at t = 3 the critic's target is the return of the next turn; none after the last turns
    assert np.argwhere(cut.value_mask ^ over.value_mask).tolist() == [[0, 3]]
    assert cut.returns[0, 3] == 2 and cut.old_values[0, 3] == 0.25
    for stop in (EpisodeStop.ACTION_BUDGET, EpisodeStop.TERMINATED):
        other = rollout.replace(episode_stop=jnp.full(2, stop))
        assert batch_of(bootstrapped, other, 2, scores).advantages[1, 2] == 0.5
    gamma = 'gamma' if estimator == 'token' else 'turn_gamma'
    half = batch_of(dataclasses.replace(bootstrapped, **{gamma: 0.5}), rollout, 2, scores)
    assert half.advantages[1, 2] == 0.5 + 0.5 * 4


def test_next_values_equal_the_values_of_the_next_tokens():
    rollout, params = toy.random_rollout(4), toy.toy_params(0)
    scores = score.score(
        params,
        None,
        None,
        rollout,
        fns=ModelFns(toy.toy_hidden, toy.toy_head, toy.toy_values, None),
        settings=UpdateSettings(
            PPO(bootstrap_truncated=True), batch=BatchSettings(microbatch_rows=4)
        ),
        recompute=False,
    )
    both = np.asarray(rollout.action_mask[:, :-1] & rollout.action_mask[:, 1:])
    assert both.any()
    np.testing.assert_allclose(scores.next_values[:, :-1][both], scores.values[:, 1:][both])


# ---- groups --------------------------------------------------------------------------------------


def test_grpo_by_hand():
    # returns 1.5 and -1: mean .25, std 1.25 * sqrt(2); A = +-1 / sqrt(2) on every action token
    batch = batch_of(GRPO(), two_episodes(), 2)
    a = 0.5**0.5
    want = [[0, a, a, 0, 0, a, 0], [0, -a, -a, 0, 0, 0, 0]]
    np.testing.assert_allclose(batch.advantages, want, rtol=1e-5)
    assert not batch.value_mask.any() and not batch.returns.any()


def test_grpo_counts_format_penalties_and_excludes_faulty_episodes():
    rollout = one_turn_group([1.0, 1, 50], penalties=[[-1], [0], [0]], faulty=(2,))
    # healthy returns 0 and 1
    want = [-(0.5**0.5), 0.5**0.5, 0]
    np.testing.assert_allclose(first_advantages(GRPO(), rollout), want, rtol=1e-5)


def test_the_std_makes_a_step_penalty_as_large_as_success():
    # All solve the level, with 4 or 5 moves at -.1: 10.6 and 10.5, mean 10.55, std .05 sqrt(4 / 3)
    rollout = one_turn_group([10.6, 10.6, 10.5, 10.5])
    for norm, size in (('std', 0.75**0.5), ('mean', 0.05)):
        got = first_advantages(GRPO(comparison=Comparison(norm)), rollout)
        np.testing.assert_allclose(got, [size, size, -size, -size], rtol=1e-4)


def test_kl_in_the_reward_by_hand():
    # old - ref = .5 on all tokens, coefficient .2: each trained token costs .1
    rollout = two_episodes()
    scores = toy.zero_scores(rollout).replace(old_logprobs=jnp.full((2, 7), 0.5))
    kl = KL(0.2, 'reward')
    batch = batch_of(PPO(whiten=False, kl=kl), rollout, 2, scores)
    want = [0, 1.5 - 0.3, 1.5 - 0.2, 0, 0, 1 - 0.1, 0]
    np.testing.assert_allclose(batch.advantages[0], want, rtol=1e-6)
    batch = batch_of(DrGRPO(kl=kl), rollout, 2, scores)  # returns 1.5 - .3 and -1 - .2
    np.testing.assert_allclose(batch.advantages[:, 1], [1.2, -1.2], rtol=1e-5)
    for other in (KL(0.2, 'loss'), KL(0.0, 'reward')):
        batch = batch_of(DrGRPO(kl=other), rollout, 2, scores)
        np.testing.assert_allclose(batch.advantages[:, 1], [1.25, -1.25])


def one_turn_group(rewards, **kwargs):
    """Return a group of episodes with one observation and two action tokens."""
    return toy.rollout_of([[(1, 2)]] * len(rewards), [[r] for r in rewards], length=4, **kwargs)


def first_advantages(how, rollout):
    return batch_of(how, rollout, len(rollout.tokens)).advantages[:, 1]


def test_group_baselines_by_hand():
    # (1, 2, 6): mean 3, leave-one-out means 4, 3.5, 1.5
    rollout = one_turn_group([1.0, 2, 6])
    np.testing.assert_allclose(first_advantages(DrGRPO(), rollout), [-2, -1, 3])
    np.testing.assert_allclose(first_advantages(RLOO(), rollout), [-3, -1.5, 4.5])
    # centred, then whitened over six tokens: var (4 + 1 + 9) * 2 / 5
    want = np.array([-2, -1, 3]) / (28 / 5) ** 0.5
    np.testing.assert_allclose(first_advantages(ReinforcePPBaseline(), rollout), want, rtol=1e-6)


def test_reinforce_pp_by_hand():
    # row 0: reward .5 at t=2 and 1 at t=5, gamma .5: t=1: .5 * (.5 + .5) = .5, t=2: 1, t=5: 1
    # row 1: -1 at t=2: -.5, -1.  mean .2, squares .09 .64 .64 .49 1.44 = 3.3, var .825
    batch = batch_of(ReinforcePP(gamma=0.5), two_episodes(), 2)
    want = np.array([[0, 0.3, 0.8, 0, 0, 0.8, 0], [0, -0.7, -1.2, 0, 0, 0, 0]]) / 0.825**0.5
    np.testing.assert_allclose(batch.advantages, want, rtol=1e-5)
    # full returns: 1.5 three times, -1 twice; mean .5, squares 3 * 1 + 2 * 2.25, var 1.875
    batch = batch_of(ReinforcePP(reward_on='episode'), two_episodes(), 2)
    want = np.array([[0, 1, 1, 0, 0, 1, 0], [0, -1.5, -1.5, 0, 0, 0, 0]]) / 1.875**0.5
    np.testing.assert_allclose(batch.advantages, want, rtol=1e-5)


def test_dapo_penalises_long_episodes_before_comparing():
    # limit 3, buffer 2: two tokens: -(2 - 1) / 2 = -.5; one token: 0; rewards equal
    rollout = toy.rollout_of([[(1, 2)], [(1, 1)]], [[1.0], [1.0]], length=3)
    long = DAPO(max_length=3, overlong_buffer=2)
    a = 0.5**0.5
    np.testing.assert_allclose(first_advantages(long, rollout), [-a, a], rtol=1e-5)
    np.testing.assert_array_equal(first_advantages(DAPO(max_length=0), rollout), [0, 0])
    # three times the penalty: -1.5, not divided by the std: -.75 and .75
    raw = dataclasses.replace(long, overlong_coef=3.0, comparison=Comparison('mean'))
    np.testing.assert_allclose(first_advantages(raw, rollout), [-0.75, 0.75])


# ---- turns ---------------------------------------------------------------------------------------


def test_mt_grpo_places_turn_advantages_on_tokens():
    """Golden vector of the paper's code: first turn .7 .2 0 .7, answer 1.9 .4 1.9 .9."""
    rewards = [[0.7, 1.9], [0.2, 0.4], [0.0, 1.9], [0.7, 0.9]]
    rollout = toy.rollout_of([[(1, 2), (2, 1)]] * 4, rewards, length=7)
    batch = batch_of(MTGRPO(outcome='final'), rollout, 4)
    first, second = [1.67591, -1.72830, -0.29037, 0.34276], [0.83322, -1.16651, 0.83322, -0.49993]
    zero = np.zeros(4)
    want = np.stack([zero, first, first, zero, zero, second, zero], 1)
    np.testing.assert_allclose(batch.advantages, want, atol=2e-5)


def test_mt_grpo_has_four_kinds_of_outcome():
    rollout = two_episodes(penalties=[[0, -0.1], [0, 0]])
    ends = jnp.array([EpisodeStop.TERMINATED, EpisodeStop.TURN_BUDGET])
    rollout = rollout.replace(success=jnp.array([True, False]), episode_stop=ends)
    expected = {
        'success': ([[0.5, 0.9], [-1, 0]], [1, 0]),
        'return': ([[0.5, 0.9], [-1, 0]], [1.4, -1]),
        'final': ([[0.5, 0], [0, 0]], [0.9, -1]),  # row 1: the outcome is the only reward
        'answer': ([[0.5, 0], [-1, 0]], [0.9, 0]),  # row 1 has no answer
    }
    for outcome, want in expected.items():
        for x, y in zip(split_rewards(rollout, outcome), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_mt_grpo_with_one_turn_and_its_return_is_grpo():
    rollout = one_turn_group([1.0, 2, 6, 0])
    for how in (MTGRPO(outcome='final'), MTGRPO(outcome='return', mode='or')):
        how = dataclasses.replace(how, comparison=Comparison(eps=1e-6))
        got = first_advantages(how, rollout)
        np.testing.assert_allclose(got, first_advantages(GRPO(), rollout), atol=1e-6)


def test_gigpo_by_hand():
    # two episodes of two turns, rewards 0 1 and 0 0; equal first, different second observations.
    # gamma .5: G = (.5, 1), (0, 0). A_E = +-.5; A_S = +-.25 in turn 0, none in turn 1
    rollout = toy.rollout_of([[(1, 1), (1, 1)]] * 2, [[0, 1.0], [0, 0]], length=4)
    rollout = rollout.replace(anchor=jnp.array([[3, 4], [3, 5]], jnp.uint32))
    batch = batch_of(GiGPO(turn_gamma=0.5), rollout, 2)
    np.testing.assert_allclose(batch.advantages, [[0, 0.75, 0, 0.5], [0, -0.75, 0, -0.5]])
    # each part divided by its std: A_E +-.5 / sqrt(.5), A_S +-.25 / sqrt(.125)
    parts = batch_of(GiGPO(norm='std', turn_gamma=0.5), rollout, 2).advantages[0]
    np.testing.assert_allclose(parts, [0, 2 * 0.5**0.5, 0, 0.5**0.5], rtol=1e-5)
    # the second turn of row 0 has the state of the first turns, in another prompt: G .5 1 0,
    # mean .5
    again = rollout.replace(anchor=jnp.array([[3, 3], [3, 5]], jnp.uint32))
    batch = batch_of(GiGPO(turn_gamma=0.5), again, 2)
    np.testing.assert_allclose(batch.advantages, [[0, 0.5, 0, 1], [0, -1, 0, -0.5]], atol=1e-6)


# ---- losses --------------------------------------------------------------------------------------


def ratio_batch(advantages):
    rollout = toy.rollout_of([[(1, 2), (1, 1)]], [[1.0, 1.0]], length=6)
    batch = batch_of(GRPO(), rollout, 1)
    return batch.replace(advantages=jnp.where(batch.mask, advantages, 0.0))


def test_gspo_by_hand():
    # log-ratios .1 .3 | -.4 at t = 1 2 | 4: row mean 0, turn means .2, -.4; A = 1, clip .9 to 1.1
    batch, clip = ratio_batch(1.0), Clip(0.1, 0.1)
    logp = jnp.array([[0, 0.1, 0.3, 0, -0.4, 0]])
    loss = loss_of(GSPO(clip=clip), logp, batch)
    np.testing.assert_allclose(loss, [[0, -1, -1, 0, -1, 0]], atol=1e-6)
    # turn 0: e^.2 = 1.22, clipped to 1.1; turn 1: e^-.4 = .67, no lower clip for A > 0
    by_turn = GSPOTurn(clip=clip)
    turn = loss_of(by_turn, logp, batch)
    np.testing.assert_allclose(turn, [[0, -1.1, -1.1, 0, -np.exp(-0.4), 0]], rtol=1e-5)
    gradient = gradient_of(by_turn, logp, batch)
    np.testing.assert_allclose(gradient, [[0, 0, 0, 0, -np.exp(-0.4), 0]], atol=1e-5)


def test_cispo_by_hand():
    # ratios e^.5 = 1.65 (weight 1.28), e^-.5 = .61 (.8), e^.1: loss -w A log p, gradient -w A
    batch, how = ratio_batch(jnp.array([[0, 2.0, -1, 0, 1, 0]])), CISPO(clip=Range(0.2, 0.28))
    logp = jnp.array([[0, 0.5, -0.5, 0, 0.1, 0]])
    want = [[0, -1.28 * 2 * 0.5, 0.8 * -0.5, 0, -np.exp(0.1) * 0.1, 0]]
    np.testing.assert_allclose(loss_of(how, logp, batch), want, rtol=1e-5)
    gradient = gradient_of(how, logp, batch)
    np.testing.assert_allclose(gradient, [[0, -2.56, 0.8, 0, -np.exp(0.1), 0]], rtol=1e-5)
    clipped = how.clipped(logp, batch)  # weights for both signs of the advantage
    assert np.flatnonzero(clipped['policy/clip_frac_high']).tolist() == [1]
    assert np.flatnonzero(clipped['policy/clip_frac_low']).tolist() == [2]


def test_sapo_by_hand():
    # 4 / tau sigmoid(tau (rho - 1)): slope rho at rho = 1, smaller on both sides
    batch, how = ratio_batch(jnp.array([[0, 2.0, -1, 0, 1, 0]])), SAPO()
    logp = jnp.array([[0, 0.5, -0.5, 0, 0.0, 0]])
    ratio = np.exp([0.5, -0.5, 0.0])
    tau, advantage = np.array([1.0, 1.05, 1.0]), np.array([2.0, -1.0, 1.0])
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    want = np.zeros((1, 6))
    want[0, [1, 2, 4]] = -advantage * 4 / tau * gate
    np.testing.assert_allclose(loss_of(how, logp, batch), want, rtol=1e-5)
    gradient = gradient_of(how, logp, batch)
    slope = np.zeros((1, 6))
    slope[0, [1, 2, 4]] = -advantage * 4 * gate * (1 - gate) * ratio
    np.testing.assert_allclose(gradient, slope, rtol=1e-4)
    assert slope[0, 4] == pytest.approx(-1.0) and not how.clipped(logp, batch)


def test_dppo_by_hand():
    """Moving a probability from .5 to .75 or .25 is too far if the advantage pushes it further;
    a ratio of 30 is not if the probability is still small."""
    half, rare = math.log(0.5), math.log(1e-3)
    batch = ratio_batch(jnp.array([[0, 1.0, -1.0, 0, 1.0, 0]]))
    before = jnp.array([[0, half, half, 0, rare, 0]])
    batch = batch.replace(old_logprobs=before)
    how = DPPO()
    for now, dropped in (
        ([math.log(0.75), math.log(0.25), rare + math.log(30)], [1, 2]),
        ([math.log(0.25), math.log(0.75), rare], []),  # back towards the trust region
        ([math.log(0.69), math.log(0.31), rare], []),
    ):
        logp = jnp.zeros((1, 6)).at[0, jnp.array([1, 2, 4])].set(jnp.array(now))
        ratio = np.minimum(np.exp(np.array(now) - np.array([half, half, rare])), 20.0)
        want = np.zeros((1, 6))
        want[0, [1, 2, 4]] = -np.array([1.0, -1.0, 1.0]) * ratio * np.array(now)
        want[0, dropped] = 0.0
        np.testing.assert_allclose(loss_of(how, logp, batch), want, rtol=1e-4, atol=1e-6)
        gradient = gradient_of(how, logp, batch)
        assert set(np.flatnonzero(gradient)) == {1, 2, 4} - set(dropped)
        clipped = how.clipped(logp, batch)
        assert np.flatnonzero(clipped['policy/clip_frac_high']).tolist() == dropped[:1]
        assert np.flatnonzero(clipped['policy/clip_frac_low']).tolist() == dropped[1:]


def test_maxrl_gives_more_weight_to_groups_that_rarely_succeed():
    rollout = one_turn_group([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, -1, -1, 0, 1])
    advantages = batch_of(MaxRL(), rollout, 4).advantages[:, 1]
    want = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(advantages, want, atol=1e-6)
    cancel = one_turn_group([0.1, 0.2, -0.3, 0.0])  # with a non-zero float32 mean
    assert not batch_of(MaxRL(), cancel, 4).advantages.any()


def test_segment_means_by_hand():
    segment = jnp.array([[0, 0, 0, 1, 1, -1]])
    mask = jnp.array([[False, True, True, False, True, False]])
    x = jnp.array([[9.0, 1, 3, 9, 7, jnp.nan]])
    np.testing.assert_allclose(segment_mean(x, segment, mask), [[0, 2, 2, 0, 7, 0]])
    np.testing.assert_allclose(adv.per_turn(x, segment, mask, turns=3), [[4, 7, 0]])


# ---- all -----------------------------------------------------------------------------------------

EVERY = pytest.mark.parametrize('how', [cls() for cls in ALGORITHMS.values()], ids=ALGORITHMS)
RATIOS = [cls for cls in ALGORITHMS.values() if hasattr(cls(), 'clip')]


COMPARE_EPISODES = [  # not GDPO, which compares rewards and penalties separately
    *(
        cls()
        for cls in ALGORITHMS.values()
        if cls.COMPARES_GROUPS and cls not in (MTGRPO, GiGPO, GDPO)
    ),
    *(MTGRPO(mode=mode, outcome='return') for mode in turn_credit.MODES),
    *(cls(reward_on='episode') for cls in (PPO, ReinforcePP)),
    *(GiGPO(norm=norm) for norm in ('mean', 'std')),
    OPD(reward_coef=1.0),
]


@pytest.mark.soak
@pytest.mark.parametrize('how', COMPARE_EPISODES, ids=lambda how: type(how).__name__)
def test_rewards_that_differ_by_rounding_train_nothing(how):
    """Returns of 1000 that were equal except for rounding led to advantages of 1."""
    rng = np.random.default_rng(0)
    for size in (1e-3, 1.0, 1e6):
        penalties = -size * rng.uniform(0.1, 20, (8, 10)).astype(np.float32)
        rewards = np.float32(size * np.arange(1, 11)) - penalties
        rewards = np.nextafter(rewards, np.float32(rng.choice([-np.inf, np.inf], (8, 10))))
        rollout = toy.rollout_of([[(0, 1)] * 10] * 8, rewards, length=10, penalties=penalties)
        assert len(np.unique(rollout.returns)) > 1
        assert not np.asarray(batch_of(how, rollout, 4).advantages).any()
        # a thousandth of all terms is a signal, also in the filter and the metrics
        better = rollout.replace(rewards=rollout.rewards.at[4].mul(1.002))
        assert np.asarray(batch_of(how, better, 4).advantages)[4].any()
        for episodes, varied in ((rollout, [False, False]), (better, [False, True])):
            for rule in (Filter('varied'), Filter('min_p', p=0.0), Filter('top_p', p=1.0)):
                _, rows = rule.keep_rows(episodes, groups=2, group_size=4)
                np.testing.assert_array_equal(rows, np.repeat(varied, 4))
            measured = metrics.rollout_metrics(episodes, group_size=4)
            assert measured['group/zero_std_frac'] == 1 - np.mean(varied)


@pytest.mark.parametrize('how', [cls() for cls in ALGORITHMS.values() if cls is not OPD])
def test_a_reward_on_the_last_turn_reaches_its_action_tokens(how):
    """AgentGym-RL puts the return on a masked observation token if the environment ends it."""
    layouts = [[(2, 2), (1, 2)]] * 4  # the last turn ends the episode
    rollout = toy.rollout_of(layouts, [[0, 1], [0, 0], [0, 1], [0, 0]], length=9)
    batch = batch_of(how, rollout, 4)
    last = (rollout.turn == 1) & rollout.action_mask
    better = np.asarray(batch.advantages)[0][np.asarray(last)[0]]
    worse = np.asarray(batch.advantages)[1][np.asarray(last)[1]]
    assert (better > worse).all() and (better > 0).all()


@EVERY
def test_permuting_groups_permutes_the_batch_and_dropping_equals_zero_weight(how):
    rollout = toy.random_rollout(3, rows=12, faulty=(1,))
    scores = toy.scores_of(rollout)
    every = np.ones(12, bool)
    batch = batch_of(how, rollout, 4, scores, keep=every)
    rows = (np.array([2, 0, 1])[:, None] * 4 + np.arange(4)).reshape(-1)
    moved = batch_of(how, *moved_by(rows, rollout, scores), keep=every)
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(np.asarray(a)[rows], b, atol=1e-5)
    rows = np.arange(4, 12)
    weighed = batch_of(how, rollout, 4, scores, keep=np.arange(12) >= 4)
    compact = batch_of(how, *moved_by(rows, rollout, scores))
    for field in ('mask', 'value_mask', 'advantages', 'returns'):
        a, b = np.asarray(getattr(weighed, field)), np.asarray(getattr(compact, field))
        np.testing.assert_allclose(a[rows], b, atol=1e-6)
        assert not a[:4].any()


@EVERY
def test_advantages_do_not_depend_on_the_number_of_rows_of_an_episode(how):
    """An episode of three conversations, in three rows or one: each token trains once."""
    rollout = toy.random_rollout(4, turns=4, length=24, faulty=(1,))
    scores = toy.scores_of(rollout)
    branch = jnp.asarray(np.random.default_rng(0).integers(0, 3, rollout.rewards.shape), jnp.int32)
    single = batch_of(how, rollout, 4, scores)
    several = batch_of(how, rollout.replace(branch=branch), 4, scores)
    jax.tree.map(np.testing.assert_array_equal, single, several)
    mask, back = map(np.asarray, trained_in_rows(several, rollout.replace(branch=branch)))
    expected = np.asarray(single.mask)
    assert mask.sum() == expected.sum() and mask.any(1).sum() > expected.any(1).sum()
    np.testing.assert_array_equal(back, np.where(expected, single.advantages, 0.0))


@jax.jit
def trained_in_rows(batch, rollout):
    """Return the mask of one row per conversation, and advantages of one row per episode."""
    conversations = windows.ConversationSpec(3, 0).windows(rollout)
    rows = windows.split_batch(batch, conversations)
    trained = jnp.where(rows.mask, rows.advantages, 0.0)
    return rows.mask, windows.scatter_back(trained, conversations, rollout.tokens.shape[1])


def moved_by(rows, rollout, scores):
    """Return the arguments of batch_of for these rows of groups of four."""
    rollout, scores = jax.tree.map(lambda x: np.asarray(x)[rows], (rollout, scores))
    return rollout, 4, scores


@EVERY
def test_unhealthy_and_poisoned_rows_change_nothing(how):
    rollout = toy.random_rollout(5, faulty=(3,))
    scores = toy.scores_of(rollout)
    clean = batch_of(how, rollout, 4, scores)
    bad = rollout.replace(rewards=rollout.rewards.at[3].set(jnp.nan))
    mask = rollout.action_mask & rollout.healthy[:, None]
    dirty = batch_of(how, bad, 4, jax.tree.map(lambda x: jnp.where(mask, x, jnp.inf), scores))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@EVERY
def test_nothing_to_train_on_gives_zeros(how):
    rollout = toy.random_rollout(6, faulty=range(8))
    batch = batch_of(how, rollout, 4, toy.scores_of(rollout))
    assert not batch.mask.any() and not batch.advantages.any() and not batch.returns.any()
    assert not loss_of(how, rollout.logprobs, batch).any()


@pytest.mark.parametrize('cls', ALGORITHMS.values())
def test_first_gradient_is_the_policy_gradient(cls):
    """At pi = pi_old, the gradient of every surrogate is -A of its token."""
    rollout, how = toy.random_rollout(7), cls()
    batch = batch_of(how, rollout, 4, toy.scores_of(rollout))

    @jax.jit
    def gradient(x):
        weights = batch.mask.astype(jnp.float32)
        return jax.grad(lambda x: losses.weighted_sum(weights, how.loss(x, batch)))(x)

    got = gradient(batch.old_logprobs)
    np.testing.assert_allclose(got, np.where(batch.mask, -batch.advantages, 0), atol=1e-5)


@pytest.mark.parametrize(
    'cls', [cls for cls in RATIOS if isinstance(cls().clip, Clip) and cls is not OPD]
)
def test_clip_metrics_count_the_tokens_that_lose_their_gradient(cls):
    """They used token ratios for every algorithm: 26 % clipped at sequence ratios of exactly 1."""
    rollout, how = toy.random_rollout(8), cls(clip=Clip(0.2, 0.28, 3.0))
    batch = batch_of(how, rollout, 4, toy.scores_of(rollout))
    noise = np.random.default_rng(0).normal(size=batch.mask.shape)
    logprobs = batch.old_logprobs + jnp.asarray(noise, jnp.float32)
    gradient = gradient_of(how, logprobs, batch)
    flat = batch.mask & (batch.advantages != 0) & (gradient == 0)
    clipped = functools.reduce(jnp.logical_or, how.clipped(logprobs, batch).values())
    assert flat.any() and (~flat & batch.mask).any()
    np.testing.assert_array_equal(clipped & batch.mask, flat)


@pytest.mark.soak
def test_sequences_of_ratio_one_are_not_clipped_for_any_token_ratios():
    batch = ratio_batch(1.0)
    logprobs = jnp.array([[0, 0.5, -0.5, 0, 0.0, 0]])  # mean 0 over the row and over each turn
    for how in (GSPO(), GSPOTurn()):
        assert not any(x.any() for x in how.clipped(logprobs, batch).values())
    assert GRPO(clip=GSPO().clip).clipped(logprobs, batch)['policy/clip_frac_high'].any()
    assert AgentEvol().clipped(logprobs, batch) == {}
