"""Settings: methods match their papers, explicit values win, settings without effect fail."""

import importlib
import json
import math
import os
import pathlib
import re
import typing

import micro_runs
import numpy as np
import pytest

from agentrl_jax import train
from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.envs import ENVIRONMENTS
from agentrl_jax.measure import collapse
from agentrl_jax.records import run_log
from agentrl_jax.rl.filtering import share
from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.run import config, migration
from agentrl_jax.run.config import Config, effective
from agentrl_jax.settings import tree
from agentrl_jax.settings.callables import import_callable
from agentrl_jax.settings.marks import In, NameIn, Neutral
from agentrl_jax.sweeps import spec
from configs import small
from experiments import common

ROOT = pathlib.Path(__file__).resolve().parents[2]
DRAWS = int(os.environ.get('CONFIG_DRAWS', '6'))
LEAVES = tree.defaults(Config)  # every field except environment settings
FIELDS = {name: tree.leaves(cls) for name, cls in ALGORITHMS.items()}
EVERY = pytest.mark.parametrize('name', ALGORITHMS)


def config_for(algorithm, **changes):
    cfg = small.get_config()
    cfg.algorithm = algorithm
    if algorithm == 'opd':
        cfg.opd.teachers = ('another',)
    if algorithm == 'maxrl':
        cfg.env.format_penalty = 0.0
    if algorithm == 'rae':
        cfg.leduc = {'opponent': 'self'}
        cfg.env.name, cfg.env.max_actions_per_turn = 'leduc', 1
        cfg.context.window, cfg.clone.episodes = 1, 0
    cfg.update_from_flattened_dict(changes)
    return cfg


# ---- bounds and choices --------------------------------------------------------------------------


@pytest.mark.parametrize(
    'interval, inside, outside, text',
    [
        (In(low=1), [1, 7], [0, -3, math.nan, math.inf], 'at least 1'),
        (In(low=0, open_low=True), [1e-30], [0.0, -1.0], 'above 0'),
        (In(low=0, high=1, open_high=True), [0, 0.5], [1.0], 'in [0, 1)'),
        (In(low=1, also=(-1,)), [-1, 1], [0, -2], 'at least 1 or -1'),
        (In(high=0), [-5, 0], [0.1, -math.inf], 'at most 0'),
        (In(), [-1e9], [math.nan], 'finite'),
    ],
)
def test_bounds_by_hand(interval, inside, outside, text):
    assert all(map(interval.holds, inside)) and not any(map(interval.holds, outside))
    assert str(interval) == text


def choices(leaf):
    """Return the allowed strings of a field; () if it has none."""
    literal = typing.get_origin(leaf.hint) is typing.Literal
    return (
        typing.get_args(leaf.hint) if literal else tuple(leaf.marks.get(NameIn, NameIn(())).names)
    )


def test_each_bound_and_choice_is_enforced():
    for name, leaf in LEAVES.items():
        if choices(leaf):
            good, bad = choices(leaf), ['nothing', 5]
            if leaf.kind is tuple:
                good, bad = [(), *((one,) for one in good)], [*bad, ('nothing',)]
        elif leaf.kind in (int, float):
            interval = leaf.marks.get(In, In())
            ends = [(interval.low, -1, interval.open_low), (interval.high, 1, interval.open_high)]
            ends = [end for end in ends if math.isfinite(end[0])]
            good = [leaf.kind(end) for end, _, is_open in ends if not is_open]
            bad = [leaf.kind(end + (0 if is_open else step)) for end, step, is_open in ends]
            bad += ['1', True] + ([math.nan, math.inf] if leaf.kind is float else [0.5])
        else:
            continue
        assert all(leaf.take(value) == value for value in good), name
        for value in bad:
            with pytest.raises(ValueError, match=re.escape(f'{name}={value!r} must be ')) as error:
                leaf.take(value)
            assert '\n' not in str(error.value)


# ---- values --------------------------------------------------------------------------------------

PAPERS = [
    ('gspo', 'clip_low=0.0003 clip_high=0.0004 aggregation=seq_mean_token_mean norm=std'),
    ('gspo_turn', 'clip_low=0.0003 clip_high=0.0004 aggregation=seq_mean_token_mean'),
    ('dr_grpo', 'aggregation=token_sum_norm norm_length=39 kl_coef=0.0 clip_high=0.2'),
    ('dapo', 'clip_low=0.2 clip_high=0.28 aggregation=token_mean kl_coef=0.0 max_length=39'),
    ('dapo', 'overlong_buffer=7 overlong_coef=1.0 rule=varied refill=9'),
    ('cispo', 'clip_low=1.0 clip_high=4.0 aggregation=token_mean kl_coef=0.0'),
    ('sapo', 'tau_pos=1.0 tau_neg=1.05 aggregation=seq_mean_token_mean kl_coef=0.0 clip_high=None'),
    ('dppo', 'tv_low=0.2 tv_high=0.2 tv_bound=20.0 aggregation=token_mean clip_high=None'),
    ('sao', 'clip_low=0.3 clip_high=5.0 lam_alpha=1.5 gamma=1.0 aggregation=token_mean lam=None'),
    ('maxrl', 'clip_low=0.2 clip_high=0.2 aggregation=token_mean kl_coef=0.0 norm=None'),
    ('grpo', 'kl_coef=0.04 kl_in=loss kl_estimator=k3 aggregation=seq_mean_token_mean norm=std'),
    ('rloo', 'kl_coef=0.05 kl_in=reward kl_estimator=None aggregation=seq_mean_token_sum'),
    ('reinforce_pp', 'kl_coef=0.01 kl_in=reward gamma=1.0 dual_clip=0.0'),
    ('reinforce_pp_baseline', 'kl_in=loss kl_estimator=k2 kl_coef=1e-05'),
    ('mt_grpo', 'outcome=answer mode=mt_cumulative kl_coef=0.0 turn_gamma=None'),
    ('turn_grpo', 'scale=rms kl_coef=0.0 clip_low=0.2 clip_high=0.2 aggregation=token_mean'),
    ('gigpo', 'norm=mean turn_gamma=0.95 kl_coef=0.01'),
    ('ppo', 'gamma=1.0 lam=1.0 entropy_coef=0.001 kl_coef=0.0 clip_high=0.2 turn_gamma=None'),
    ('ppo', 'kl_in=reward estimator=token whiten=True reward_on=turn bootstrap_truncated=False'),
    ('agent_evol', 'threshold=0.0 weights=reward kl_coef=0.0 clip_high=None entropy_coef=0.0'),
    ('opd', 'divergence=full reward_coef=0.0 aggregation=seq_mean_token_mean kl_coef=0.0'),
]


@pytest.mark.parametrize('algorithm, values', PAPERS)
def test_an_algorithm_has_the_settings_of_its_paper(algorithm, values):
    """GSPO had PPO's clip range, Dr.GRPO only the advantage, DAPO one of its four parts, CISPO a
    lower bound."""
    full = tree.flat(effective(config_for(algorithm)))
    parts = ('loss', 'turn_credit', 'evol', 'opd', 'filter')
    fields = {n.split('.')[1]: x for part in reversed(parts) for n, x in of(part, full).items()}
    for word in values.split():
        leaf, value = word.split('=')
        assert str(fields[leaf]) == value, word


def of(section, full):
    return {name: x for name, x in full.items() if name.split('.')[0] == section}


@EVERY
def test_effective_sets_the_fields_of_the_algorithm_and_is_idempotent(name):
    cfg = config_for(name)
    before = cfg.to_dict()
    full = effective(cfg)
    assert cfg.to_dict() == before and effective(full).to_dict() == full.to_dict()
    values = tree.flat(full)
    lacking = {n for _, _, every in tree.variants(Config) for n in every} - FIELDS[name].keys()
    assert all(values[n] is None for n in lacking if LEAVES[n].default is None)
    run = config.read(cfg)
    assert run == config.read(full) and hash(run.algorithm) == hash(config.read(full).algorithm)
    saved = json.loads(full.to_json_best_effort())  # with lists instead of tuples
    assert config.read(migration.migrate(saved)) == run


def test_saved_configs_with_removed_fields_are_read_unless_a_removed_field_had_an_effect():
    saved = json.loads(effective(config_for('grpo')).to_json_best_effort())
    removed = {n: off for fields in migration.REMOVED.values() for n, off in fields.items()}
    for name, off in removed.items():
        section, _, field = name.rpartition('.')
        saved.setdefault(section, {})[field] = min(off) if isinstance(off, set) else off
    del saved['alarm']['off'], saved['alarm']['stop']
    saved['alarm']['std_drop.action'] = 'roll_back'
    saved['alarm']['cut.action'] = 'off'
    saved['env']['name'] = 'textcraft'
    saved['textcraft'] |= {'launch': 2, 'room': 64}
    saved['web'] |= {'room': 3}
    saved['babyai']['brief'] = True
    now = {
        'alarm.off': ('cut',),
        'alarm.stop': ('std_drop', 'skipped', 'critic_skipped'),
        'env.name': 'textcraft',
        'hosts.launch': 2,
    }
    expected = config.read(config_for('grpo', **now), None)
    assert config.read(migration.migrate(saved), None) == expected
    saved['filter']['soft'] = True
    with pytest.raises(ValueError, match='sets filter.soft=True, .* use commit 55cb303'):
        migration.migrate(saved)


def test_fields_of_earlier_versions_on_a_command_line(capsys):
    words = ['--workdir=x', '--config.textcraft.launch=2', '--config.alarm.std_drop.action=off']
    words += ['--config.seed=1', '--config.alarm.cut.limit=.3', '--config.env.mix=()']
    assert sorted(migration.arguments(words)) == [
        "--config.alarm.off=('std_drop',)",
        "--config.alarm.stop=('skipped', 'critic_skipped')",
        '--config.env.mix=()',
        '--config.hosts.launch=2',
        '--config.seed=1',
        '--workdir=x',
    ]
    assert capsys.readouterr().err.count('\n') == 1
    assert migration.arguments(['--config=a.py', '--config.filter.soft=False']) == ['--config=a.py']
    with pytest.raises(ValueError, match='filter.soft'):
        migration.arguments(['--config.filter.soft=True'])


def test_configs_of_methods_match_the_methods():
    """The command for AgentEvol trained on a quarter of the groups and imitated random play. "GRPO
    as in the paper" had a filter, clip-higher and a fivefold entropy bonus."""
    run = config.read(common.load_config('configs/agent_evol.py'))
    how = run.algorithm
    assert (how.filter.keep, run.clone.oracle, how.kl.coef, how.entropy_coef) == (1, 1, 0, 0)
    assert run.steps == 4 * run.evol.iteration
    assert run.evol.base_rows % run.batch.microbatch_rows == 0 < run.evol.base_rows
    run = config.read(common.load_config('configs/scaling_inter.py'))
    how = run.algorithm
    assert (type(how), how.filter.keep, how.clip.low, how.clip.high) == (
        ALGORITHMS['grpo'],
        1,
        0.2,
        0.2,
    )
    assert (how.kl.coef, how.kl.estimator, how.kl.where) == (0.001, 'k3', 'loss')
    assert (how.entropy_coef, how.weights.aggregation) == (0.001, 'seq_mean_token_mean')


# ---- published results ---------------------------------------------------------------------------


def published_configs():
    """Yield (source, its configs) of every published result."""
    plain = 'demo_cloned demo_library demo_library_mt demo_sokoban demo_bandit frozen_lake sokoban'
    for path in (*plain.split(), 'bandit', 'library'):
        yield f'configs/{path}.py', [common.load_config(f'configs/{path}.py')]
    demo = common.load_config('configs/demo_cloned.py')
    for path in ('configs/sweeps/demo_ablation.py', 'configs/sweeps/demo_algorithms.py'):
        yield path, [spec.resolve(demo, cell, path)[0] for cell in spec.load(ROOT / path)]
    for name in ('ragen_starpo_vs_s', 'ragen_actions', 'scaling_inter', 'mtgrpo_credit'):
        for scale, make_plan in importlib.import_module(
            f'experiments.{name}.__main__'
        ).SCALES.items():
            plan = make_plan()
            start = common.load_config(plan.config)
            cells = [spec.resolve(start, cell, name)[0] for cell in plan.cells]
            yield f'experiments/{name}.py {scale}', cells


def behaviour(run):
    """Return the settings of an update in the format of tests/data/effective.json."""
    how, rows, size = run.algorithm, run.rollout, run.batch
    trained_rows = how.filter.kept(rows.num_groups) * rows.group_size + run.base_rows
    known = {n: x.default for n, x in tree.leaves(type(how), default=how).items()}
    named = {name.split('.')[1]: x for name, x in known.items() if not name.startswith('filter.')}
    constants = {'eps': how.comparison.eps, 'std_floor': 0.0} if hasattr(how, 'comparison') else {}
    return (
        named
        | constants
        | {
            'kl_estimator': how.kl.estimator if how.kl.in_loss else None,
            'kl_in_reward': how.kl.in_reward,
            'entropy_coef': how.entropy_coef,
            'clip_low': named.get('clip_low'),
            'clip_high': named.get('clip_high'),
            'dual_clip': named.get('dual_clip') or None,
            'value_clip': run.critic.clip or None,
            'value_coef': run.critic.coef,
            'num_minibatches': trained_rows // size.minibatch_rows,
            'num_microbatches': UpdateSettings.of(run).microbatches,
            'epochs': size.epochs,
            'rule': how.filter.rule,
            'keep': share(how.filter.keep, rows.num_groups),
            'refill': how.filter.refill,
        }
    )


@pytest.mark.soak
def test_published_results_still_have_the_effective_configs_of_their_runs():
    """tests/data/effective.json is from when fields had the same default for all algorithms;
    results with turn_grpo were added later."""
    saved, sources = json.loads((ROOT / 'tests' / 'data' / 'effective.json').read_text()), set()
    for source, configs in published_configs():
        expected = [saved['behaviours'][index] for index in saved['configs'][source]]
        for number, (cfg, want) in enumerate(zip(configs, expected, strict=True)):
            actual = behaviour(config.read(cfg, None))
            want = want | want['make_batch']
            del want['make_batch']
            assert {name: actual[name] for name in want} == want, (source, number)
            assert not actual.get('bootstrap_truncated')  # added later
        sources.add(source)
    assert sources == set(saved['configs'])


# ---- rejected configs ----------------------------------------------------------------------------
# Rules between the sections of a run: test_refusals.py

REJECTED = [
    # fields that the algorithm does not have
    ('grpo', {'loss.gamma': 0.9}, 'loss.gamma'),
    ('grpo', {'turn_credit.mode': 'gtpo'}, 'turn_credit.mode'),
    ('cispo', {'loss.dual_clip': 3.0}, 'loss.dual_clip'),
    # fields that need others
    ('ppo', {'loss.estimator': 'turn', 'loss.gamma': 0.9}, 'loss.estimator'),
    ('mt_grpo', {'turn_credit.turn_gamma': 0.9}, 'turn_credit.turn_gamma'),
    ('grpo', {'loss.kl_in': 'reward', 'loss.kl_estimator': 'k1'}, 'loss.kl_estimator'),
    ('dapo', {'loss.max_length': 0, 'loss.overlong_coef': 2.0}, 'loss.max_length'),
    ('dapo', {'filter.keep': 0.5}, 'filter.keep'),
    # invalid combinations
    ('dapo', {'loss.max_length': 4, 'loss.overlong_buffer': 4}, 'loss.overlong_buffer'),
    ('ppo', {'critic.warmup_steps': 3, 'critic.share_backbone': True}, 'critic.share_backbone'),
    ('archer', {}, 'algorithm'),
]


@pytest.mark.parametrize('algorithm, changes, words', REJECTED)
def test_useless_or_harmful_settings_are_rejected(algorithm, changes, words):
    with pytest.raises(ValueError, match=words) as error:
        config.read(config_for(algorithm, **changes))
    assert '\n' not in str(error.value)


@EVERY
def test_neutral_values_are_valid_for_every_algorithm(name):
    neutral = {n: x.marks[Neutral].value for n, x in LEAVES.items() if Neutral in x.marks}
    read = config.read(config_for(name, **neutral | {'filter.rule': 'top_k'}))
    assert type(read.algorithm) is ALGORITHMS[name] and len(neutral) > 5


# ---- output --------------------------------------------------------------------------------------


def test_the_printed_config_marks_algorithm_defaults_and_changes():
    lines = config.show(config_for('gspo', **{'loss.clip_high': 0.3})).splitlines()
    assert 'loss.clip_low = 0.0003  # gspo' in lines
    assert 'loss.clip_high = 0.3  # gspo: 0.0004' in lines
    assert "env.name = 'frozen_lake'" in lines and 'loss.gamma = None' in lines


# ---- accepted configs train ----------------------------------------------------------------------

SMALL = {'clone.steps': 2, 'log.profile_steps': 1, 'evol.iteration': 2}  # larger ones are slow


def value_of(leaf, default, rng):
    """Return a value at its bounds, near the default, or (rarely) out of bounds."""
    interval, kind = leaf.marks.get(In, In()), leaf.kind
    if rng.random() < 0.15:
        return kind(rng.choice([-1, 0] if kind is int else [-1.0, math.nan, 2.0]))
    ends = [end for end in (interval.low, interval.high) if math.isfinite(end) and abs(end) < 2**10]
    near = [default, default * 2, default / 2] if default else [1, 2]
    value = rng.choice([*ends, *interval.also, *near])
    return kind(min(value, SMALL.get(leaf.name, math.inf)))


def random_config(seed):
    """Return a config of a micro run with eight random fields."""
    rng = np.random.default_rng(seed)
    cfg = micro_runs.plain(
        rng.choice(list(ENVIRONMENTS)).item(), **{'steps': 2, 'log.rollouts_every': 0}
    )
    algorithm = rng.choice(list(ALGORITHMS)).item()
    lacking = {n for _, _, every in tree.variants(Config) for n in every} - FIELDS[algorithm].keys()
    known = {n: x for n, x in (LEAVES | FIELDS[algorithm]).items() if n not in lacking}  # defaults
    defaults = {n: x for n, x in tree.flat(cfg).items() if x is not None}
    numbers = sorted(n for n, x in known.items() if x.kind in (int, float) and n != 'steps')
    words = sorted(n for n, x in known.items() if choices(x))
    changes = {'algorithm': algorithm}
    for name in rng.choice(numbers, 5, replace=False):
        changes[str(name)] = value_of(
            known[name], defaults.get(name, known[name].default) or 0, rng
        )
    for name in rng.choice(words, 3, replace=False):
        word = str(rng.choice(choices(known[name])))
        changes[str(name)] = (word,) if known[name].kind is tuple else word
    cfg.update_from_flattened_dict(changes)
    return cfg, changes


@pytest.mark.soak
@pytest.mark.parametrize('seed', range(DRAWS))
def test_a_random_config_trains_two_steps_or_is_rejected_in_one_line(seed, tmp_path):
    """CONFIG_DRAWS=200 tests more configs."""
    cfg, changes = random_config(seed)
    try:
        code = train.train(cfg, str(tmp_path))
    except ValueError as error:
        assert '\n' not in str(error) and len(str(error)) > 20, changes
        return
    rows = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert len(rows) == 3 and code == bool(collapse.untrained(rows)), changes
    for row in rows[:2]:
        for name in ('rollout/return', 'policy/loss', 'policy/grad_norm', 'policy/entropy'):
            trained = not row['filter/empty']
            assert math.isfinite(row[name]) or not trained, (changes, name)


@pytest.mark.parametrize(
    'name, words',
    [
        ('play', 'not package.module:callable'),
        ('nowhere:play', 'not package.module:callable'),
        ('needy:play', 'import of needy failed'),
        ('own:paly', 'no attribute'),
        ('own:three', 'cannot be called'),
    ],
)
def test_each_kind_of_failing_import_has_a_distinct_error(name, words, tmp_path, monkeypatch):
    """'my_agent:play' was reported as not a module:callable because it imports openai."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'own.py').write_text('three = 3\n')
    (tmp_path / 'needy.py').write_text('import nowhere.at_all\n')
    with pytest.raises(ValueError, match=f'^harness.run.*{words}'):
        import_callable(name, 'harness.run')
    assert import_callable('json:loads', 'harness.run') is json.loads
