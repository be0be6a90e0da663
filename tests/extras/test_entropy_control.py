"""Entropy control: which tokens each method selects, and the loss."""

import jax.numpy as jnp
import numpy as np
import pytest
import test_update as toy_updates
import toy_rollouts as toy

from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.extras.entropy_control import entropy_control as control
from agentrl_jax.extras.entropy_control.entropy_control import EntropyControl, EntropyTerm
from agentrl_jax.run.build import check
from agentrl_jax.run.config import effective, read
from configs import base

PLAYED = toy.rollout_of([[(0, 4)]] * 2, np.zeros((2, 1)), length=4)
# mean A = 0, mean log pi_old = -2 over six tokens; c = (A - 0) (log pi_old + 2)
BATCH = toy.batch_of(PPO(), PLAYED, 2, toy.zero_scores(PLAYED)).replace(
    mask=jnp.array([[True, True, True, False]] * 2),
    advantages=jnp.array([[2.0, -2.0, 1.0, jnp.nan], [-1.0, 3.0, -3.0, jnp.nan]]),
    old_logprobs=jnp.array([[-1.0, -4.0, -1.0, 9.0], [-2.0, -2.0, -2.0, -9.0]]),
)
COVARIANCES = np.array([[2.0, 4.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_kl_cov_penalises_the_largest_covariances_by_hand():
    """A third of six tokens, c = 4 and 2: at log ratio x the loss gains |x|, clipped or not."""
    np.testing.assert_allclose(control.covariances(BATCH), COVARIANCES, atol=1e-6)
    how = EntropyControl(method='kl_cov', share=0.34)
    batch = BATCH.replace(extra={control.SELECTED: how.selected(BATCH)})
    for x, moved in ((x, batch.old_logprobs + x) for x in (0.1, -0.1, 0.5)):
        more = how.loss(moved, batch) - PPO().loss(moved, batch)
        np.testing.assert_allclose(more, abs(x) * (COVARIANCES > 1.5), atol=1e-6)


def test_clip_cov_draws_from_the_covariances_between_the_bounds_by_hand():
    """Bounds 1 and 5, both excluded: the candidates are c = 2 and 4."""
    whole, one = (EntropyControl(method='clip_cov', share=share) for share in (1.0, 0.1))
    np.testing.assert_array_equal(whole.selected(BATCH), COVARIANCES > 1.5)
    draws = np.stack([one.selected(BATCH.replace(tokens=BATCH.tokens + n)) for n in range(12)])
    assert (draws.sum((1, 2)) == 1).all()  # a tenth of six tokens: at least one
    np.testing.assert_array_equal(draws.any(0), COVARIANCES > 1.5)
    flat = BATCH.replace(advantages=jnp.zeros((2, 4)))  # equal values: only as many as asked for
    assert EntropyControl(method='kl_cov', share=0.34).selected(flat).sum() == 2


@pytest.mark.parametrize('method', ['clip_cov', 'kl_cov'])
def test_selected_tokens_are_trained_and_clip_cov_omits_them(method):
    rollout = toy.random_rollout(0, faulty=(3,))
    scores = toy.scores_of(rollout)
    scores = scores.replace(old_logprobs=scores.old_logprobs * 8.0)  # larger covariances
    plain, how = (
        toy.batch_of(PPO(), rollout, 4, scores),
        EntropyControl(method=method, share=0.1),
    )
    batch, selected = toy.batch_of(how, rollout, 4, scores), how.selected(plain)
    assert selected.sum() == int(0.1 * plain.mask.sum()) and not (selected & ~plain.mask).any()
    dropped = selected & (method == 'clip_cov')
    np.testing.assert_array_equal(batch.advantages, jnp.where(dropped, 0.0, plain.advantages))


@pytest.mark.parametrize('split', [{}, {'num_microbatches': 4, 'widths': 2}])
@pytest.mark.parametrize('case', ['top', 'above', 'below'])
def test_a_step_trains_uncertain_tokens_or_has_its_bonus_below_the_target(case, split):
    how = EntropyControl(method='top' if case == 'top' else 'target', entropy_coef=0.05, share=0.4)
    state, rollout = toy_updates.state_of(toy.toy_params(0)), toy.random_rollout(0)
    batch = toy.batch_of(how, rollout, 4, toy.scores_of(rollout))
    batch = batch.replace(extra={control.SATISFIED: jnp.full(8, float(case == 'above'))})
    given = dict(algorithm=how, fns=toy_updates.ALONE, extras=(EntropyTerm(how),))
    got, _ = toy_updates.toy_update(**given, **split)(state, batch)
    if case == 'top':
        falling = np.where(batch.mask, -toy.toy_entropies(state.params, batch), 9.0)
        count = np.maximum((0.4 * np.asarray(batch.mask.sum(1))).astype(int), 1)
        best = falling.argsort(1).argsort(1) < count[:, None]
        batch = batch.replace(advantages=batch.advantages * best)
    plain = dict(algorithm=PPO(entropy_coef=0.0 if case == 'above' else 0.05))
    want, _ = toy_updates.toy_update(**plain, fns=toy_updates.ALONE)(state, batch)
    for name, x in want.params.items():
        np.testing.assert_allclose(got.params[name], x, atol=3e-7)


def test_the_entropy_of_a_rollout_decides_about_the_bonus_by_hand():
    rollout = toy.rollout_of([[(1, 2)]] * 2, np.zeros((2, 1)), length=3)
    rollout = rollout.replace(logprobs=-jnp.array([[0.0, 0.2, 0.4], [0.0, 0.6, 9.0]]))
    mask = rollout.action_mask.at[1, 2].set(False)  # mean of .2, .4, .6 is .4
    for target, satisfied in ((0.39, 1.0), (0.41, 0.0)):
        term = EntropyTerm(EntropyControl(method='target', target=target))
        found = term.arrays(rollout, mask, None)[control.SATISFIED]
        np.testing.assert_array_equal(found, [satisfied] * 2)


def test_a_target_without_a_bonus_is_rejected():
    cfg = base.get_config()
    cfg.algorithm, cfg.entropy.method = 'entropy_control', 'target'
    check(read(effective(cfg), None), 1)
    cfg.loss.entropy_coef = 0.0
    with pytest.raises(ValueError, match='loss.entropy_coef'):
        check(read(effective(cfg), None), 1)
