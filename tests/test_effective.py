"""Effective configs: a name does what its paper does, what is set wins, nothing is set in vain."""

import importlib
import inspect
import json
import pathlib
import subprocess
import sys

import jax
import micro_runs
import pytest

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.run import bounds, check, parts, settings
from agentrl_jax.run.effective import CONDITIONS, NEUTRAL, effective, show
from agentrl_jax.sweeps import spec
from configs import base, small
from experiments import common

ROOT = pathlib.Path(__file__).resolve().parent.parent
EVERY = pytest.mark.parametrize('name', ALGORITHMS)
GIVEN = {'rollout', 'scores', 'group_size', 'keep', 'kl_coef', 'kl_in_reward'}


def config(algorithm, **changes):
    cfg = small.get_config()
    cfg.algorithm = algorithm
    cfg.update_from_flattened_dict(changes)
    return cfg


# ---- defaults ------------------------------------------------------------------------------------


@EVERY
def test_a_field_that_an_algorithm_decides_on_has_no_value_in_the_base_config(name):
    cfg = base.get_config()
    assert all(bounds.field(cfg, field) is None for field in ALGORITHMS[name].DEFAULTS)


@EVERY
def test_defaults_and_keywords_of_make_batch_are_the_same_values(name):
    module = ALGORITHMS[name]
    fields = {field.split('.')[1]: value for field, value in module.DEFAULTS.items()}
    keywords = inspect.signature(module.make_batch).parameters
    for setting in module.SETTINGS:
        assert callable(fields[setting]) or fields[setting] == keywords[setting].default
    assert set(keywords) - GIVEN == set(module.SETTINGS)


@EVERY
def test_every_field_that_has_an_effect_has_a_value_and_a_second_time_changes_nothing(name):
    given = config(name)
    before = given.to_dict()
    full = effective(given)
    assert given.to_dict() == before
    for field in ALGORITHMS[name].DEFAULTS:
        applies = field not in CONDITIONS or CONDITIONS[field][0](full)
        assert (bounds.field(full, field) is not None) == applies, field
    assert effective(full).to_dict() == full.to_dict()
    check.check(given)


PAPERS = [
    ('gspo', 'clip_low=0.0003 clip_high=0.0004 aggregation=seq_mean_token_mean norm=std'),
    ('dr_grpo', 'aggregation=token_sum_norm norm_length=39 kl_coef=0.0 clip_high=0.2'),
    ('dapo', 'clip_low=0.2 clip_high=0.28 aggregation=token_mean kl_coef=0.0 max_length=39'),
    ('dapo', 'overlong_buffer=7 overlong_coef=1.0 rule=varied refill=9'),
    ('cispo', 'clip_low=1.0 clip_high=4.0 aggregation=token_mean kl_coef=0.0'),
    ('grpo', 'kl_coef=0.04 kl_in=loss kl_estimator=k3 aggregation=seq_mean_token_mean norm=std'),
    ('rloo', 'kl_coef=0.05 kl_in=reward kl_estimator=None aggregation=seq_mean_token_sum'),
    ('reinforce_pp', 'kl_coef=0.01 kl_in=reward gamma=1.0'),
    ('reinforce_pp_baseline', 'kl_in=loss kl_estimator=k2 kl_coef=1e-05'),
    ('mt_grpo', 'outcome=answer mode=mt_cumulative eps=0.0001 kl_coef=0.0 turn_gamma=None'),
    ('gigpo', 'norm=mean turn_gamma=0.95 step_coef=1.0 kl_coef=0.01'),
    ('ppo', 'gamma=1.0 lam=1.0 entropy_coef=0.001 kl_coef=0.0 clip_high=0.2 turn_gamma=None'),
    ('agent_evol', 'threshold=0.0 weights=reward kl_coef=0.0 clip_high=None entropy_coef=0.0'),
    ('dpo', 'beta=0.1 aggregation=seq_mean_token_sum clip_low=None entropy_coef=None'),
]


@pytest.mark.parametrize('algorithm, values', PAPERS)
def test_a_name_does_what_its_paper_does(algorithm, values):
    """GSPO had PPO's clip range, Dr.GRPO the advantage alone, DAPO one of its four pieces, CISPO a
    closed lower side."""
    full = effective(config(algorithm)).to_dict()
    fields = {
        leaf: x for part in full.values() if isinstance(part, dict) for leaf, x in part.items()
    }
    for word in values.split():
        leaf, value = word.split('=')
        assert str(fields[leaf]) == value, word


def test_what_is_set_wins():
    full = effective(config('gspo', **{'loss.clip_high': 0.3, 'loss.kl_coef': 0.5}))
    assert (full.loss.clip_low, full.loss.clip_high, full.loss.kl_coef) == (3e-4, 0.3, 0.5)
    assert full.loss.kl_estimator == 'k3'  # which the KL term now needs
    full = effective(config('dapo', **{'filter.rule': 'all', 'loss.max_length': 0}))
    assert full.filter.refill is None and full.loss.overlong_buffer is None


def test_configs_of_methods_are_the_methods():
    """The command for AgentEvol trained on a quarter of the groups and imitated random play; "GRPO
    as in the paper" had a filter, clip-higher and a fivefold entropy bonus."""
    cfg = effective(common.load_config('configs/agent_evol.py'))
    check.check(cfg)
    assert (cfg.filter.keep, cfg.clone.oracle, cfg.loss.kl_coef, cfg.loss.entropy_coef) == (
        1,
        1,
        0,
        0,
    )
    assert cfg.evol.restart and cfg.steps == 4 * cfg.evol.iteration
    assert cfg.evol.base_rows % cfg.batch.microbatch_rows == 0 < cfg.evol.base_rows
    cfg = effective(common.load_config('configs/scaling_inter.py'))
    loss = cfg.loss
    assert (cfg.algorithm, cfg.filter.keep, loss.clip_low, loss.clip_high) == ('grpo', 1, 0.2, 0.2)
    assert (loss.kl_coef, loss.kl_estimator, loss.kl_in) == (0.001, 'k3', 'loss')
    assert (loss.entropy_coef, loss.aggregation) == (0.001, 'seq_mean_token_mean')


# ---- what was measured before --------------------------------------------------------------------


def listed():
    """(source, its configs) of every published result."""
    for path in ('demo', 'demo_library', 'demo_library_mt', 'demo_sokoban', 'demo_bandit'):
        yield f'configs/{path}.py', [common.load_config(f'configs/{path}.py')]
    for path in ('frozen_lake', 'sokoban', 'bandit', 'library'):
        yield f'configs/{path}.py', [common.load_config(f'configs/{path}.py')]
    demo = common.load_config('configs/demo.py')
    for path in ('configs/sweeps/demo_ablation.py', 'configs/sweeps/demo_algorithms.py'):
        yield path, [spec.resolve(demo, cell, path)[0] for cell in spec.load(ROOT / path)]
    for name in ('ragen_starpo_vs_s', 'ragen_actions', 'scaling_inter', 'mtgrpo_credit'):
        for scale, make_plan in importlib.import_module(f'experiments.{name}').SCALES.items():
            plan = make_plan()
            start = common.load_config(plan.config)
            cells = [spec.resolve(start, cell, name)[0] for cell in plan.cells]
            yield f'experiments/{name}.py {scale}', cells


def behaviour(cfg, mesh):
    """What the functions of an update are called with."""
    cfg = effective(cfg)
    keywords = inspect.signature(ALGORITHMS[cfg.algorithm].make_batch).parameters
    own = {name: keywords[name].default for name in ALGORITHMS[cfg.algorithm].SETTINGS}
    step = settings.build_update(cfg, mesh, (None, None)).keywords
    keep = settings.build_keep(cfg).keywords
    names = (
        'clip_low clip_high dual_clip entropy_coef kl_estimator aggregation value_clip value_coef '
        'num_minibatches num_microbatches epochs'
    )
    return {name: step[name] for name in names.split()} | {
        'make_batch': own | settings.algorithm_options(cfg),
        'kl_coef': cfg.loss.kl_coef,
        'rule': keep['rule'],
        'keep': keep['keep'],
        'refill': cfg.filter.refill or 0,
    }


def test_published_results_have_the_effective_configs_they_were_measured_with():
    """tests/data/effective.json was written when every field had one default for all algorithms;
    what trains with turn_grpo came later."""
    kept = json.loads((ROOT / 'tests' / 'data' / 'effective.json').read_text())
    mesh, seen = parts.build_mesh(base.get_config(), jax.devices()[:1]), set()
    for source, configs in listed():
        wanted = [kept['behaviours'][index] for index in kept['configs'][source]]
        for number, (cfg, want) in enumerate(zip(configs, wanted, strict=True)):
            found = behaviour(cfg, mesh)
            # Keywords that came later are as if they were not there
            later = {'bootstrap_truncated': False}
            found['make_batch'] = {
                name: value
                for name, value in found['make_batch'].items()
                if (name, value) not in later.items()
            }
            assert found == want, (source, number)
        seen.add(source)
    assert seen == set(kept['configs'])


# ---- fields without effect -----------------------------------------------------------------------

USELESS = [
    ('grpo', {'loss.gamma': 0.9}, r'loss.gamma=0.9 has no effect on .*ppo, reinforce_pp'),
    ('grpo', {'loss.lam': 0.9}, 'loss.lam=0.9 has no effect'),
    ('grpo', {'loss.reward_on': 'episode'}, "loss.reward_on='episode' has no effect .*'?turn'?"),
    ('rloo', {'loss.whiten': True}, 'loss.whiten=True has no effect'),
    ('ppo', {'loss.estimator': 'turn', 'loss.gamma': 0.9}, 'estimator=token or bi_level'),
    ('ppo', {'turn_credit.turn_gamma': 0.9}, 'turn_gamma=0.9 has no effect: it needs loss.estim'),
    ('mt_grpo', {'turn_credit.turn_gamma': 0.9}, 'turn_credit.mode=gtpo or hybrid'),
    (
        'grpo',
        {'loss.kl_in': 'reward', 'loss.kl_estimator': 'k1'},
        'kl_estimator=.k1. has no effect',
    ),
    ('gspo', {'loss.kl_estimator': 'k1'}, 'it needs loss.kl_coef > 0'),
    ('gspo', {'loss.kl_target': 0.1}, 'kl_target=0.1 has no effect without loss.kl_coef > 0'),
    ('grpo', {'loss.norm': 'mean', 'loss.eps': 0.5}, 'loss.eps=0.5 has no effect'),
    ('dpo', {'loss.entropy_coef': 0.01}, 'loss.entropy_coef=0.01 has no effect on .*dpo'),
    ('dpo', {'loss.aggregation': 'token_mean'}, 'mean over pairs'),
    ('agent_evol', {'loss.clip_high': 0.3}, 'loss.clip_high=0.3 has no effect'),
    ('cispo', {'loss.dual_clip': 3.0}, 'loss.dual_clip=3.0 has no effect'),
    ('dapo', {'filter.keep': 0.5}, "filter.keep=0.5 has no effect on filter.rule='varied'"),
    ('grpo', {'loss.norm_length': 10}, 'token_sum_norm'),
    (
        'agent_evol',
        {'clone.episodes': 64, 'evol.base_rows': 16, 'batch.minibatch_rows': 136},
        'evol.base_rows=16 must be a multiple of batch.microbatch_rows=32',
    ),
]


@pytest.mark.parametrize('algorithm, changes, words', USELESS)
def test_a_field_that_would_do_nothing_is_refused(algorithm, changes, words):
    with pytest.raises(ValueError, match=words):
        check.check(config(algorithm, **changes))


def test_a_value_that_says_nothing_goes_with_every_algorithm():
    for name in ALGORITHMS:
        check.check(config(name, **NEUTRAL | {'filter.rule': 'top_k'}))


def test_an_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="algorithm='archer' is not one of ppo, grpo"):
        check.check(config('archer'))


# ---- shown ---------------------------------------------------------------------------------------


def test_the_shown_config_says_what_is_the_algorithm_s_own_and_what_was_set():
    lines = show(config('gspo', **{'loss.clip_high': 0.3})).splitlines()
    assert 'loss.clip_low = 0.0003  # gspo' in lines
    assert 'loss.clip_high = 0.3  # gspo: 0.0004' in lines
    assert "env.name = 'frozen_lake'" in lines and 'loss.gamma = None' in lines


def test_the_command_shows_the_config_without_a_workdir():
    words = '-m agentrl_jax.train --config=configs/small.py --config.algorithm=dapo --show_config'
    done = subprocess.run(
        [sys.executable, *words.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=micro_runs.environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "filter.rule = 'varied'  # dapo" in done.stdout.splitlines()
