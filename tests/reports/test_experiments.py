"""The plans of experiments/: every run builds, cells differ in what they name, figures add up."""

import importlib
import json
import os
import pathlib
import signal
import sys

import pytest
from absl import flags

from agentrl_jax import sweep
from agentrl_jax.envs.hosts.search import world as search
from agentrl_jax.results import runs as tables_runs
from agentrl_jax.results.cells import build
from agentrl_jax.results.spec import make_spec
from agentrl_jax.run.config import effective
from agentrl_jax.sweeps import options, spec
from experiments import (
    common,
    mtgrpo_credit,
    mtgrpo_search,
    report,
    scaling_inter,
    transfer,
    turn_credit,
)

NAMES = sorted(
    path.stem
    for path in common.FOLDER.glob('*.py')
    if '\nSCALES = ' in path.read_text() and path.stem not in ('common', 'transfer')
)
MODULES = {name: importlib.import_module(f'experiments.{name}') for name in NAMES}
OFTEN = [(name, common.TINY) for name in ('ragen_starpo_vs_s', 'mtgrpo_credit', 'scaling_inter')]
PLANS = [
    pytest.param(name, scale, marks=[] if (name, scale) in OFTEN else pytest.mark.soak)
    for name in NAMES
    for scale in (*MODULES[name].SCALES, common.SECONDS)
]


def make_plan(name, scale):
    return common.make_plan(MODULES[name].SCALES, scale)


def fields(name, scale):
    """The resolved configs of one seed."""
    plan = make_plan(name, scale)
    base = common.load_config(plan.config)
    return [spec.resolve(base, cell, name)[0] for cell in plan.cells]


def changed(base, cell):
    return {field for field in base.keys() | cell.keys() if base.get(field) != cell.get(field)}


@pytest.mark.parametrize('name, scale', PLANS)
def test_every_run_passes_the_config_check_and_has_a_place_in_a_table(name, scale):
    """sweep_spec.expand refuses impossible configs and duplicates; build refuses mixed cells."""
    plan = make_plan(name, scale)
    listed = common.list_runs(plan, range(2))
    expanded = spec.expand(common.load_config(plan.config), listed, source=name)
    assert [run.config['seed'] for run in expanded] == [0, 1] * len(plan.cells)
    configs = {run.name: tables_runs.flatten(run.config) for run in expanded}
    runs = [tables_runs.Run(name, flat, [], {}) for name, flat in configs.items()]
    in_tables = set()
    for given in plan.tables.values():
        table = build(runs, make_spec(given | {'seeds': 2}))
        assert (table.entries.groupby(['row', 'column']).size() == 2).all()
        in_tables |= set(table.entries.run)
        labels = {label for label, _ in table.lines('runs')}
        if 'env.max_actions_per_turn' not in given['rows']:
            # every row has the name of a cell, not a list of values
            assert labels <= set(make_spec(given).labels.values())
    assert in_tables == configs.keys()
    if scale == common.SECONDS:
        assert max(run.steps for run in expanded) <= 8


def test_seeds_are_as_asked_and_the_command_line_wins_over_the_plan():
    plan = common.Plan('configs/demo.py', ({'steps': 3, 'optim.lr': 1e-3}, {'steps': 4}), {})
    assert common.list_runs(plan, range(100, 102), taken={'optim.lr'}) == [
        {'seed': 100, 'steps': 3},
        {'seed': 101, 'steps': 3},
        {'seed': 100, 'steps': 4},
        {'seed': 101, 'steps': 4},
    ]
    words = ['--config.optim.lr=3e-4', '--gpus=0', '--config.model.path=/a=b']
    assert common.given_fields(words) == {'optim.lr', 'model.path'}
    with pytest.raises(ValueError, match='--config.steps makes arms 1 and 3 the same run'):
        cells = ({'steps': 3}, {'optim.lr': 1.0}, {'steps': 4})
        common.list_runs(common.Plan('configs/demo.py', cells, {}), range(1), taken={'steps'})


def test_horizons_end_alike_and_see_as_many_episodes():
    for scale in scaling_inter.SCALES:
        short, long, growing = fields('scaling_inter', scale)
        rounds = growing.curriculum.rounds
        assert len(rounds) == 3 and short.curriculum.rounds == rounds[:1]
        assert long.curriculum.rounds == rounds[-1:] == (long.env.max_turns,)
        for cfg in (short, long):
            cfg.curriculum.rounds = rounds
            assert cfg.to_dict() == growing.to_dict()  # nothing else differs
        assert growing.steps > 2 * growing.curriculum.stage_steps  # the last stage is reached


def test_credit_arms_differ_in_nothing_but_credit():
    arms = mtgrpo_credit.ARMS
    modes = [arm for arm in arms.values() if arm['algorithm'] == 'mt_grpo']
    assert all(changed(modes[0], arm) == {'turn_credit.mode'} for arm in modes[1:])
    assert changed(arms['MT-PPO'], arms['flattened MT-PPO']) == {'loss.reward_on'}
    paper = fields('mtgrpo_credit', 'paper')
    v1 = paper[0]
    assert v1.rollout.num_groups * v1.rollout.group_size == v1.batch.minibatch_rows == 336
    assert v1.rollout.num_groups * v1.steps == 2400
    assert paper[-1].rollout.num_groups * paper[-1].rollout.group_size == 512


def test_arms_of_a_search_engine_differ_in_credit_only():
    credit = {'algorithm', 'turn_credit', 'loss', 'critic'}
    configs = [effective(cfg) for cfg in fields('mtgrpo_search', 'tiny')]
    first, *others = [tables_runs.flatten(cfg.to_dict()) for cfg in configs]
    for other in others:
        assert {name.split('.')[0] for name in changed(first, other)} <= credit
    assert {cfg.search.rewards for cfg in configs} == {'mt_grpo'}
    *_, mt, ppo = fields('mtgrpo_search', 'paper')
    assert mt.rollout.num_groups * mt.rollout.group_size == 336 and mt.turn_credit.mode == 'mt_v1'
    assert ppo.rollout.num_groups * ppo.rollout.group_size == 512
    assert ppo.search.rewards == 'mt_ppo' and ppo.loss.reward_on == 'turn'
    table = mtgrpo_search.tiny().tables['equal_tokens']
    assert set(mtgrpo_search.FOUR) == {f'eval/{name}' for name in search.FIGURES}
    assert table['also'].split(',') == [*mtgrpo_search.FOUR]


def test_arms_of_turn_credit_differ_in_credit_only():
    """Presets would add KL terms, entropy bonuses and weights of rows to the comparison."""
    credit = {'algorithm', 'estimator', 'mode', 'outcome', 'norm', 'lam'}
    credit |= {'turn_coef', 'outcome_coef', 'turn_gamma', 'scale', 'whiten', 'gamma'}
    credit |= {'reward_on', 'reward_normalization', 'bootstrap_truncated', 'kl_in'}
    credit |= {'turns', 'continuations', 'train'}  # of vine, which plays fewer episodes
    configs = fields('turn_credit', 'tiny')
    worlds = {cfg.env.name for cfg in configs}
    assert worlds == {'library', 'sokoban', 'frozen_lake'}
    assert len(configs) == len(worlds) * len(turn_credit.ARMS)
    for world in worlds:
        first, *others = [
            tables_runs.flatten(effective(cfg).to_dict())
            for cfg in configs
            if cfg.env.name == world
        ]
        for other in others:
            sizes = {'num_groups', 'group_size', 'minibatch_rows', 'microbatch_rows'}
            own = sizes if other['algorithm'] == 'vine' else set()
            assert {name.split('.')[-1] for name in changed(first, other)} <= credit | own
    catalogue = next(cfg for cfg in configs if cfg.env.name == 'library')
    assert catalogue.library.lookup_cost > 0 == catalogue.library.tool_reward


# ---- the command -------------------------------------------------------------------------------

METRICS = {'time/step_s': 1.0, 'perf/tokens_per_s': 8.0, 'eval/success': 0.5}
METRICS |= {'eval/success_low': 0.4, 'eval/success_high': 0.6}
DEMO = str(common.FOLDER.parent / 'configs' / 'demo.py')
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')


def fake_sweep(words, environment):
    """Stand in for the sweep's process: write what the sweep and its first run write."""
    options = dict(word.removeprefix('--').split('=', 1) for word in words[3:])
    base = common.config_of(words[3:])
    for number, run in enumerate(spec.expand(base, spec.load(options['sweep']), source='')):
        folder = pathlib.Path(options['workdir']) / run.name
        folder.mkdir(exist_ok=True)
        (folder / 'run.json').write_text(json.dumps({'config': run.config}))
        rows = [{'step': step, 'time_s': step} | METRICS for step in range(run.steps + 1)]
        if number == 0:
            (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return 0


def small(**fields):
    """The scales of an experiment of one cell and one table."""
    table = {'rows': 'algorithm', 'curves': False} | fields
    return {'tiny': lambda: common.Plan(DEMO, ({'steps': 3},), {'last': table})}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(scales, *words) -> exit code of an experiment `small`, whose sweep is a fake."""
    monkeypatch.setattr(common, 'wait_for', fake_sweep)
    monkeypatch.setattr(common, 'FOLDER', tmp_path / 'experiments')
    words = ['--scale=tiny', '--seeds=1', f'--workdir={tmp_path}/w']
    return lambda scales, *more: common.main('small.py', 'Why?', scales, [*words, *more])


def test_the_command_trains_shows_and_publishes(start, tmp_path, capsys):
    assert start(small(signals='rollout/success'), '--seeds=2', '--publish') == 0
    assert '| ppo | 50.0 [40.0, 60.0]ʷ (1/2, 1 unfinished) |' in capsys.readouterr().out
    folder = tmp_path / 'experiments' / 'small_tiny'
    page = (folder / 'README.md').read_text()
    assert page.startswith('# Why?') and '| ppo |' in page
    before = {path: path.read_bytes() for path in folder.rglob('*.*') if path.is_file()}
    common.tables.rebuild(folder.parent)  # what `make tables` does
    assert before == {path: path.read_bytes() for path in folder.rglob('*.*') if path.is_file()}
    assert start(small(metric='eval/answers')) == 1
    assert 'eval/answers' in capsys.readouterr().err


def test_runs_with_other_fields_in_the_same_workdir_are_in_no_table(start, tmp_path, capsys):
    """A smoke test of two steps made the tables fail after hours of training."""
    assert start(small(), '--config.steps=2') == 0
    assert start(small(), '--publish') == 0
    assert len(list((tmp_path / 'w').glob('*/run.json'))) == 2
    assert capsys.readouterr().out.count('| ppo | 50.0 [40.0, 60.0]ʷ (1/1) |') == 2
    (path,) = (tmp_path / 'experiments' / 'small_tiny' / 'metrics').glob('*.jsonl')
    assert path.stem.startswith('seed=0,steps=3-')


def test_published_runs_are_not_replaced_by_runs_with_other_fields(start, tmp_path, capsys):
    assert start(small(), '--publish', '--config.optim.lr=0.1') == 0
    folder = tmp_path / 'experiments' / 'small_tiny'
    assert '--config.optim.lr=0.1' in (folder / 'README.md').read_text()
    before = {path: path.read_bytes() for path in (folder / 'metrics').iterdir()}
    with pytest.raises(SystemExit) as error:
        start(small(), '--publish', '--config.optim.lr=0.2')
    assert error.value.code == 2 and 'optim.lr' in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (folder / 'metrics').iterdir()}
    assert start(small(), '--publish') == 0


def test_runs_are_named_as_the_sweep_names_them(tmp_path, monkeypatch, capsys):
    listed = [{'seed': seed, 'steps': 3} for seed in range(2)]
    (tmp_path / 'sweep.py').write_text(common.sweep_file(listed, 'a test'))
    words = [f'--config={DEMO}', f'--sweep={tmp_path}/sweep.py', '--workdir=w']
    words += ['--launcher=print', '--retries', '1', '--config.optim.lr', '0.1']
    words += ['--config.curriculum.rounds=(2, 3)']
    monkeypatch.setattr(sys, 'argv', ['sweep', *words])
    values = flags.FlagValues()
    options.define_flags(values)
    values(sys.argv)
    assert sweep.run_sweep(values) == 0
    printed = capsys.readouterr().out.split()
    names = {word[len('--workdir=w/') :] for word in printed if word.startswith('--workdir=w/')}
    assert common.run_names(listed, words, tmp_path) == names and len(names) == 2
    assert common.run_names(listed, words[:3], tmp_path).isdisjoint(names)


@pytest.mark.parametrize(
    'words, field',
    [
        (['--scale=tiny', '--workdir=/dev/null/x'], 'workdir'),
        (['--scale=0.5b'], '--config.model.path'),
        (['--scale=seconds', '--publish'], '--publish'),
    ],
)
def test_wrong_words_are_an_error_that_names_them(words, field, capsys, monkeypatch):
    monkeypatch.delenv('AGENTRL_GCS', raising=False)
    monkeypatch.setattr(common, 'wait_for', lambda *_: 0)
    with pytest.raises(SystemExit) as error:
        common.main('scaling_inter.py', '', scaling_inter.SCALES, words)
    assert error.value.code == 2 and field in capsys.readouterr().err


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_sweep(number):
    program = (
        'import os, signal, time; '
        f'signal.signal({int(number)}, lambda *_: os._exit(75)); '
        f'os.kill(os.getppid(), {int(number)}); time.sleep(60)'
    )
    assert common.wait_for([sys.executable, '-c', program], os.environ) == 75


@pytest.mark.parametrize('page', report.PAGES)
def test_the_claims_are_those_of_the_committed_metrics(page):
    text = (report.FOLDER / page).read_text(encoding='utf-8')
    assert f'<!-- claims -->\n{report.table()}<!-- end of claims -->' in text
    assert len(report.CLAIMS) == 10


def test_the_tables_of_transfer_are_those_of_its_records():
    page, found = transfer.FOLDER / 'README.md', transfer.tables(transfer.load())
    text = page.read_text(encoding='utf-8')
    assert transfer.embed(text, found) == text and len(found) == 6
    home = transfer.values(transfer.load(), 'success')['sokoban', 'act', 'RL', transfer.HOME]
    assert transfer.spread(home.values()) in found['sokoban_rules'] and set(home) == {0, 1, 2}


# ---- pretrained models -------------------------------------------------------------------------
