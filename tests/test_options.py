"""Options of algorithms as fields of a config: all can be reached, and none is ignored."""

import inspect

import jax
import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax import train
from agentrl_jax.algorithms import ALGORITHMS, dpo
from agentrl_jax.rl import losses, objective, update
from agentrl_jax.run import check, derived, parts, settings, state
from agentrl_jax.run import params as run_params
from agentrl_jax.run.build import build
from agentrl_jax.run.streams import Streams
from configs import base

GIVEN = {'rollout', 'scores', 'group_size', 'keep', 'kl_coef', 'kl_in_reward'}
OWN_TESTS = pytest.mark.parametrize('name', ALGORITHMS)


@OWN_TESTS
def test_every_keyword_of_make_batch_is_a_setting_and_every_setting_a_field(name):
    module, cfg = ALGORITHMS[name], base.get_config()
    keywords = set(inspect.signature(module.make_batch).parameters) - GIVEN
    assert keywords == set(module.SETTINGS)
    for setting in module.SETTINGS:
        assert sum(setting in cfg[name] for name in derived.OPTION_SECTIONS) == 1


def test_every_keyword_of_an_update_is_given_by_a_config():
    functions = {
        'batch',
        'state',
        'params',
        'weights',
        'kl_coef',
        'hidden_fn',
        'head_fn',
        'values_fn',
        'value_head_fn',
        'tx',
        'critic_tx',
        'policy',
    }
    asked = set().union(
        *(inspect.signature(f).parameters for f in (update.update_step, objective.policy_loss))
    )
    cfg = micro_runs.config('frozen_lake')
    given = settings.build_update(cfg, parts.build_mesh(cfg), (None, None)).keywords
    of_the_step = {'key', 'lr_scale'}  # functions of seed and step, and of roll backs
    assert asked - functions == (set(given) - functions) | of_the_step


# ---- from a field to the batch -------------------------------------------------------------------


def options_of(algorithm, **changes):
    """What make_batch is called with: fields checked as train.build does."""
    cfg = micro_runs.config('frozen_lake', algorithm=algorithm, **changes)
    check.check(cfg)
    return settings.algorithm_options(cfg)


def batch_of(algorithm, rollout, options):
    options = dict(kl_in_reward=False) | options
    if algorithm == 'dpo':  # its pairs stand side by side
        order = dpo.order_rows(rollout.returns, rollout.action_mask.any(1), group_size=4)
        rollout = jax.tree.map(lambda x: x[order], rollout)
    return ALGORITHMS[algorithm].make_batch(
        rollout, toy.scores_of(rollout), group_size=4, **options
    )


@OWN_TESTS
def test_a_config_that_names_no_option_leaves_the_algorithm_its_own_defaults(name):
    rollout = toy.random_rollout(0)
    by_config = batch_of(name, rollout, options_of(name))
    jax.tree.map(np.testing.assert_array_equal, by_config, batch_of(name, rollout, {}))


FIELDS = [
    ('grpo', {'loss.norm': 'mean'}),
    ('gspo', {'loss.norm': 'none'}),
    ('cispo', {'loss.eps': 0.5}),
    ('grpo', {'loss.std_floor': 2.0}),
    ('dapo', {'loss.norm': 'mean', 'loss.max_length': 4, 'loss.overlong_buffer': 2}),
    ('dapo', {'loss.max_length': 4, 'loss.overlong_buffer': 3, 'loss.overlong_coef': 3.0}),
    ('ppo', {'loss.gamma': 0.5}),
    ('ppo', {'loss.lam': 0.5}),
    ('ppo', {'loss.reward_on': 'episode'}),
    ('ppo', {'loss.whiten': False}),
    ('ppo', {'loss.estimator': 'turn'}),
    ('ppo', {'loss.estimator': 'bi_level', 'turn_credit.turn_gamma': 0.5}),
    ('ppo', {'loss.reward_on': 'episode', 'loss.reward_normalization': 'asym_clip'}),
    ('reinforce_pp', {'loss.gamma': 0.5}),
    ('gigpo', {'turn_credit.step_coef': 0.0}),
    ('gigpo', {'turn_credit.turn_gamma': 0.1}),
    ('gigpo', {'loss.norm': 'std'}),
    ('mt_grpo', {'turn_credit.outcome': 'return'}),
    ('turn_grpo', {'turn_credit.scale': 'none'}),
    ('vine', {'turn_credit.scale': 'none'}),
    ('mt_grpo', {'turn_credit.turn_coef': 0.5}),
    ('mt_grpo', {'turn_credit.outcome_coef': 0.5}),
    ('mt_grpo', {'turn_credit.mode': 'gtpo', 'turn_credit.turn_gamma': 0.3}),
    ('gspo_turn', {'turn_credit.mode': 'hybrid', 'loss.norm': 'mean'}),
    ('mt_grpo', {'loss.eps': 0.5, 'loss.std_floor': 1.0}),
    ('agent_evol', {'evol.threshold': 1.0}),
    ('agent_evol', {'evol.weights': 'equal'}),
    ('dpo', {'dpo.beta': 0.5}),
    ('dpo', {'dpo.pairs': 2}),
    ('dpo', {'dpo.min_gap': 3.0}),
]


@pytest.mark.parametrize('algorithm, changes', FIELDS)
def test_a_field_is_the_keyword_of_its_name_and_changes_the_batch(algorithm, changes):
    rollout = toy.random_rollout(1)
    rollout = rollout.replace(success=rollout.rewards.sum(1) > 0.5)
    typed = {name.split('.')[1]: value for name, value in changes.items()}
    options = options_of(algorithm, **changes)
    assert typed.items() <= options.items()
    by_config = batch_of(algorithm, rollout, options)
    direct = batch_of(algorithm, rollout, typed)
    jax.tree.map(np.testing.assert_array_equal, by_config, direct)
    own = batch_of(algorithm, rollout, {})
    assert np.abs(np.asarray(by_config.advantages - own.advantages)).max() > 1e-3


@pytest.mark.parametrize('mode', ['or', 'mr', 'mt_v1', 'mt_local', 'gtpo', 'hybrid', 'flattened'])
def test_a_mode_of_turn_credit_is_chosen_by_its_name(mode):
    rollout = toy.random_rollout(2, turns=3, length=20)
    rollout = rollout.replace(success=rollout.rewards.sum(1) > 0)
    chosen = batch_of('mt_grpo', rollout, options_of('mt_grpo', **{'turn_credit.mode': mode}))
    default = batch_of('mt_grpo', rollout, options_of('mt_grpo'))
    assert np.abs(np.asarray(chosen.advantages - default.advantages)).max() > 1e-3


def test_the_constant_of_token_sum_norm_comes_from_the_config():
    # 2 rows of 1 and 3 tokens; S = 2, constant 10: each token weighs 1 / 20
    cfg = micro_runs.config(
        'frozen_lake', **{'loss.aggregation': 'token_sum_norm', 'loss.norm_length': 10}
    )
    given = settings.build_update(cfg, parts.build_mesh(cfg), (None, None)).keywords
    mask = np.array([[True, False, False], [True, True, True]])
    weights = losses.token_weights(mask, given['aggregation'], norm_length=given['norm_length'])
    np.testing.assert_allclose(weights, mask / 20)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    'changes, message',
    [
        (
            {'algorithm': 'grpo', 'turn_credit.mode': 'gtpo'},
            "turn_credit.mode='gtpo' has no effect on algorithm='grpo', only on mt_grpo, gspo_turn",
        ),
        ({'loss.norm': 'mean'}, "loss.norm='mean' has no effect on algorithm='ppo', only on grpo"),
        ({'algorithm': 'grpo', 'loss.max_length': 5}, 'only on dapo: leave it unset'),
        ({'algorithm': 'rloo', 'loss.estimator': 'turn'}, 'only on ppo: leave it unset'),
        ({'algorithm': 'mt_grpo', 'turn_credit.mode': 'turn'}, 'is not one of or, mr, mt_v1'),
        ({'algorithm': 'mt_grpo', 'turn_credit.outcome': 'win'}, 'not one of success, final, ret'),
        ({'algorithm': 'grpo', 'loss.norm': 'rank'}, "loss.norm='rank' is not one of std, mean"),
        ({'algorithm': 'gigpo', 'loss.norm': 'none'}, "one of std, mean for algorithm='gigpo'"),
        ({'loss.estimator': 'archer'}, "loss.estimator='archer' is not one of token, turn, bi_l"),
        ({'loss.reward_normalization': 'mean'}, 'it needs loss.reward_on=episode'),
        ({'turn_credit.turn_gamma': 0.9}, 'it needs loss.estimator=turn or bi_level'),
        ({'loss.gamma': 1.1}, r'loss.gamma=1.1 must be in \[0, 1\]'),
        ({'algorithm': 'grpo', 'loss.eps': -1.0}, 'loss.eps=-1.0 must be at least 0'),
        ({'algorithm': 'cispo', 'loss.dual_clip': 3.0}, "no effect on algorithm='cispo'"),
        ({'loss.norm_length': 9}, 'it needs loss.aggregation=token_sum_norm'),
        (
            {'algorithm': 'dapo', 'loss.max_length': 0, 'loss.overlong_coef': 2.0},
            'it needs loss.max_length',
        ),
        (
            {'algorithm': 'dapo', 'loss.max_length': 4, 'loss.overlong_buffer': 4},
            'loss.overlong_buffer=4 must be smaller than loss.max_length=4',
        ),
        ({'critic.warmup_steps': 3, 'critic.share_backbone': True}, 'needs a critic of its own'),
        ({'critic.warmup_steps': 3, 'algorithm': 'grpo'}, 'needs a critic of its own'),
    ],
)
def test_an_option_that_would_do_nothing_or_harm_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check.check(micro_runs.config('frozen_lake', **changes))


# ---- a whole step --------------------------------------------------------------------------------


NOTHING_FROZEN = run_params.Frozen(model={}, reference=None)
OPENED = state.Opened(state=None, frozen=NOTHING_FROZEN, base=None, streams=Streams(seed=0))


def test_shuffled_mini_batches_are_a_function_of_seed_and_step():
    """The same step twice is the same update; without the key it is another."""
    changes = {
        'algorithm': 'mt_grpo',
        'turn_credit.mode': 'gtpo',
        'turn_credit.outcome': 'return',
        'loss.norm': 'none',  # the untrained answer badly, all alike
        'batch.shuffle': True,
        'batch.epochs': 2,
        'env.eval_levels': 8,
    }
    run = build(micro_runs.config('frozen_lake', **changes))

    def fresh():
        return state.start_state(run, run.params)

    one, measured, _, played = train.train_step(run, OPENED, fresh(), 0, first=False)
    assert measured['policy/grad_norm'] > 0 and measured['update/skipped'] == 0
    again = train.train_step(run, OPENED, fresh(), 0, first=False)[0]
    jax.tree.map(np.testing.assert_array_equal, one, again)
    ordered = run.training.learn(fresh(), NOTHING_FROZEN, played.rollout)[0]
    same = jax.tree.map(np.array_equal, one.params, ordered.params)
    assert not all(jax.tree.leaves(same))
