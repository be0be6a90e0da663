"""The plans of experiments/: every run builds, cells differ in what they name, figures add up."""

import importlib
import json
import pathlib
import re

import pytest

from agentrl_jax.results import runs as tables_runs
from agentrl_jax.results.cells import build
from agentrl_jax.results.spec import make_spec
from agentrl_jax.sweeps import spec
from experiments import common, report
from experiments.transfer import __main__ as transfer
from experiments.zero_shot import __main__ as zero_shot

NAMES = sorted(
    path.parent.name
    for path in common.FOLDER.glob('*/__main__.py')
    if '\nSCALES = ' in path.read_text()
)
MODULES = {name: importlib.import_module(f'experiments.{name}.__main__') for name in NAMES}
OFTEN = ('scaling_inter', common.TINY)
PLANS = [
    pytest.param(name, scale, marks=[] if (name, scale) == OFTEN else pytest.mark.soak)
    for name in NAMES
    for scale in MODULES[name].SCALES
]


def make_plan(name, scale):
    return common.make_plan(MODULES[name].SCALES, scale)


@pytest.mark.parametrize('name, scale', PLANS)
def test_every_run_passes_the_config_check_and_is_in_a_table(name, scale):
    """sweep_spec.expand rejects invalid configs and duplicates; build rejects mixed cells."""
    plan = make_plan(name, scale)
    listed = common.list_runs(plan, range(2))
    expanded = spec.expand(common.load_config(plan.config), listed, source=name)
    assert [run.config['seed'] for run in expanded] == [0, 1] * len(plan.cells)
    configs = {run.name: tables_runs.flatten(run.config) for run in expanded}
    runs = [tables_runs.Run(name, flat, [], {}) for name, flat in configs.items()]
    in_tables = set()
    for fields in plan.tables.values():
        table = build(runs, make_spec(fields | {'seeds': 2}))
        assert (table.entries.groupby(['row', 'column']).size() == 2).all()
        in_tables |= set(table.entries.run)
        labels = {label for label, _ in table.lines('runs')}
        if 'env.max_actions_per_turn' not in fields['rows']:
            # every row has the name of a cell, not a list of values
            assert labels <= set(make_spec(fields).labels.values())
    assert in_tables == configs.keys()


def test_runs_have_the_requested_seeds_and_the_command_line_overrides_the_plan():
    plan = common.Plan('configs/demo.py', ({'steps': 3, 'optim.lr': 1e-3}, {'steps': 4}), {})
    assert common.list_runs(plan, range(100, 102), taken={'optim.lr'}) == [
        {'seed': 100, 'steps': 3},
        {'seed': 101, 'steps': 3},
        {'seed': 100, 'steps': 4},
        {'seed': 101, 'steps': 4},
    ]
    words = ['--config.optim.lr=3e-4', '--gpus=0', '--config.model.path=/a=b']
    assert common.overridden_fields(words) == {'optim.lr', 'model.path'}
    with pytest.raises(ValueError, match='--config.steps makes arms 1 and 3 the same run'):
        cells = ({'steps': 3}, {'optim.lr': 1.0}, {'steps': 4})
        common.list_runs(common.Plan('configs/demo.py', cells, {}), range(1), taken={'steps'})


# ---- the command -------------------------------------------------------------------------------

METRICS = {'time/step_s': 1.0, 'perf/tokens_per_s': 8.0, 'eval/success': 0.5}
METRICS |= {'eval/success_low': 0.4, 'eval/success_high': 0.6}
DEMO = str(common.FOLDER.parent / 'configs' / 'demo.py')
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')


def fake_sweep(words, environment):
    """Replace the process of a sweep: write the files of the sweep and its first run."""
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
    """start(scales, *words) -> exit code of an experiment `small` with a fake sweep."""
    monkeypatch.setattr(common, 'wait_for', fake_sweep)
    monkeypatch.setattr(common, 'FOLDER', tmp_path / 'experiments')
    words = ['--scale=tiny', '--seeds=1', f'--workdir={tmp_path}/w']
    return lambda scales, *more: common.main('small/__main__.py', 'Why?', scales, [*words, *more])


def test_the_command_trains_shows_and_publishes(start, tmp_path, capsys):
    assert start(small(signals='rollout/success'), '--seeds=2', '--publish') == 0
    assert '| ppo | 50.0 [40.0, 60.0]ʷ (1/2, 1 unfinished) |' in capsys.readouterr().out
    folder = tmp_path / 'experiments' / 'small'
    page = (folder / 'README.md').read_text()
    assert page.startswith('# Why?') and '| ppo |' in page
    before = {path: path.read_bytes() for path in folder.rglob('*.*') if path.is_file()}
    common.tables.rebuild(folder.parent)  # what `make tables` does
    assert before == {path: path.read_bytes() for path in folder.rglob('*.*') if path.is_file()}
    assert common.main('small/__main__.py', 'Why?', {}, ['--show']) == 0
    assert '| ppo |' in capsys.readouterr().out
    assert start(small(metric='eval/answers')) == 1
    assert 'eval/answers' in capsys.readouterr().err


def test_published_runs_are_not_replaced_by_runs_with_other_fields(start, tmp_path, capsys):
    assert start(small(), '--publish', '--config.optim.lr=0.1') == 0
    folder = tmp_path / 'experiments' / 'small'
    assert '--config.optim.lr=0.1' in (folder / 'README.md').read_text()
    before = (folder / 'runs.jsonl.xz').read_bytes()
    with pytest.raises(SystemExit) as error:
        start(small(), '--publish', '--config.optim.lr=0.2')
    assert error.value.code == 2 and 'optim.lr' in capsys.readouterr().err
    assert before == (folder / 'runs.jsonl.xz').read_bytes()
    assert start(small(), '--publish') == 0


@pytest.mark.soak
def test_the_claims_match_the_committed_metrics():
    text = (report.FOLDER / report.PAGE).read_text(encoding='utf-8')
    assert f'<!-- claims -->\n{report.table()}<!-- end of claims -->' in text


def test_pages_with_separate_results_show_them(capsys, monkeypatch):
    """transfer and zero_shot have no runs: their tables come from results.jsonl."""
    page = transfer.FOLDER.joinpath('README.md').read_text()
    assert transfer.embed(page, transfer.tables(transfer.load())) == page
    monkeypatch.setattr('sys.argv', ['zero_shot', '--show'])
    zero_shot.main()
    figures = re.findall(r'\d+\.\d \[\d+\.\d, \d+\.\d\]', capsys.readouterr().out)
    page = zero_shot.RESULTS.with_name('README.md').read_text()
    assert len(figures) == 12 and all(figure in page for figure in figures)
