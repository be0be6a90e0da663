"""Tables of runs with known figures: by hand, from folders, compacted and committed."""

import json
import lzma
import math
import pathlib

import numpy as np
import pytest
from golden_text import assert_golden

from agentrl_jax import tables
from agentrl_jax.measure import stats
from agentrl_jax.records import run_log
from agentrl_jax.results import curves, forest, render
from agentrl_jax.results.cells import build
from agentrl_jax.results.runs import Run, compact, flatten, load
from agentrl_jax.run.config import as_json, effective, get_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANDOM = {'bandit': 0.5, 'sokoban': 0.2}
CLEAN = {'clone': {'episodes': 64, 'oracle': 1.0}}  # a clone of the expert


def write_run(folder, seed, successes, *, algorithm='ppo', env='sokoban', steps=20, **more):
    """Write the folder of a run like a sweep and training, with a validation every 10 steps."""
    config = {'seed': seed, 'steps': steps, 'algorithm': algorithm, 'env': {'name': env}} | more
    folder.mkdir(parents=True)
    text = json.dumps({'name': folder.name, 'overrides': {'seed': seed}, 'config': config})
    (folder / 'run.json').write_text(text)
    (folder / 'reference.json').write_text(json.dumps({'random': RANDOM[env], 'oracle': 1.0}))
    rows = [measured(step, successes, steps) for step in range(10 * len(successes) - 9)]
    if successes:
        (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def measured(step, successes, steps):
    row = {'step': step, 'time_s': 0.3 * (step + 1), 'time/step_s': 0.3, 'perf/recompiles': 0}
    row['group/return_std'] = 1 / (step + 3)
    if step < steps:
        row['perf/tokens_per_s'] = 7 / 0.3  # 7 tokens a step
    if step % 10 == 0:
        p = successes[step // 10]
        low, high = stats.wilson_interval(round(100 * p), 100)
        row |= {'eval/success': p, 'eval/success_low': low, 'eval/success_high': high}
        row |= {'eval/valid_format': 1 - p / 10, 'eval/return': 10 * p}
    return row


def rewrite(folder, change, rows=slice(None)):
    """Change rows of a run; change: row -> row."""
    path = folder / 'metrics.jsonl'
    read = run_log.read_metrics(path)
    for row in read[rows]:
        change(row)
    path.write_text(''.join(run_log.json_line(row) for row in read))


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    """Two algorithms on two environments, seeds 0 to 2; on sokoban grpo lacks some."""
    folder = tmp_path_factory.mktemp('sweep')
    finals = {
        ('ppo', 'bandit'): (0.9, 0.8, 0.7),
        ('grpo', 'bandit'): (0.7, 0.75, 0.6),
        ('ppo', 'sokoban'): (0.3, 0.4, 0.35),
    }
    for (algorithm, env), values in finals.items():
        for seed, p in enumerate(values):
            successes = [0.1 + 0.01 * seed, p + 0.05, p]
            name = f'{algorithm}-{env}-{seed}'
            write_run(folder / name, seed, successes, algorithm=algorithm, env=env)
    write_run(folder / 'grpo-sokoban-0', 0, [0.1, 0.25, 0.2], algorithm='grpo')
    write_run(folder / 'grpo-sokoban-1', 1, [0.11, 0.31], algorithm='grpo')  # ends at step 10
    (folder / 'notes').mkdir()  # no run
    return folder


@pytest.fixture(scope='module')
def clones(tmp_path_factory):
    """Clones on sokoban and another size of it, seeds 0 and 7; one was trained further."""
    folder = tmp_path_factory.mktemp('clones')
    for seed in (0, 7):
        write_run(folder / f'clone-{seed}', seed, [0.8 + 0.01 * seed], steps=0, **CLEAN)
    write_run(folder / 'two boxes', 0, [0.6], steps=0, sokoban={'num_boxes': 2}, **CLEAN)
    write_run(folder / 'trained', 0, [0.6, 0.7, 0.9], **CLEAN)
    write_run(folder / 'random weights', 0, [0.1], steps=0)
    write_run(folder / 'noisy', 0, [0.2], steps=0, clone={'episodes': 64, 'oracle': 0.5})
    return folder


@pytest.fixture
def two(tmp_path):
    """Runs of seeds 0 and 1, updates in steps 0 to 19."""
    for seed in (0, 1):
        write_run(tmp_path / f'run{seed}', seed, [0.1, 0.2, 0.4])
        rewrite(tmp_path / f'run{seed}', train, slice(20))
    return tmp_path


def train(row):
    row.update({'update/skipped': 0.0, 'policy/grad_norm': 0.5})


def skip(norm):
    return lambda row: row.update({'update/skipped': 2.0, 'policy/grad_norm': norm})


def table_of(folder, *, clones=(), runs=None, **fields):
    spec = tables.make_spec({'rows': 'algorithm', 'cols': 'env.name'} | fields)
    runs = load([folder], tables.metrics_of(spec)) if runs is None else runs
    return build(runs, spec, clones)


def cells(table):
    return {(cell['row'], cell['column']): cell for cell in table.cells.to_dict('records')}


def values(table, row='ppo', column='sokoban'):
    return cells(table)[row, column]['values']


def texts(table):
    [[header, *lines]] = render.figures(table)
    return {(line[0], name): text for line in lines for name, text in zip(header, line)}  # noqa: B905


# ---- cells -------------------------------------------------------------------------------------


def test_a_cell_by_hand(sweep):
    cell = cells(table_of(sweep))['ppo', 'bandit']
    # 0.9, 0.8, 0.7: mean and IQM (nothing is cut of three) 0.8, variance (.01 + 0 + .01) / 2.
    # All three redrawn runs are 0.9 in 1 of 27 cases, 3.7 % > 2.5 %: the interval is the range.
    figures = [cell[name] for name in ('mean', 'std', 'iqm', 'low', 'high')]
    np.testing.assert_allclose(figures, (0.8, 0.1, 0.8, 0.7, 0.9))
    assert cell['interval'] == 'bootstrap' and cell['planned'] == 3
    assert cell['eval/valid_format'] == pytest.approx(1 - 0.08)  # mean of .91, .92, .93


@pytest.mark.parametrize(
    'at, expected',
    [
        ('last', [0.9, 0.8, 0.7]),
        ('best-validation', [0.95, 0.85, 0.75]),
        ('last-three', [1.95 / 3, 1.76 / 3, 1.57 / 3]),
    ],
)
def test_the_step_at_which_runs_are_read(sweep, at, expected):
    np.testing.assert_allclose(values(table_of(sweep, at=at), column='bandit'), expected)


@pytest.fixture
def longer(tmp_path):
    """grpo samples 10 tokens per step, ppo 7: at the end 200 and 140."""
    write_run(tmp_path / 'short', 0, [0.1, 0.2, 0.4])
    write_run(tmp_path / 'long', 0, [0.1, 0.3, 0.5], algorithm='grpo')
    rewrite(tmp_path / 'long', lambda row: row.update({'perf/tokens_per_s': 10 / 0.3}), slice(20))
    return tmp_path


@pytest.mark.parametrize(
    'at, ppo, grpo',
    [
        # 100 tokens at .3 and 200 at .5: .38 at 140
        ('equal-tokens', 0.4, 0.38),
        # (.1 + .2) / 2 x 70 + (.2 + .4) / 2 x 70 = 31.5 of 140;
        # (.1 + .3) / 2 x 100 + (.3 + .38) / 2 x 40 = 33.6 of 140
        ('area', 0.225, 0.24),
    ],
)
def test_runs_are_compared_at_the_smallest_number_of_tokens(longer, at, ppo, grpo):
    """An arm with longer episodes has more tokens to learn from at the same step."""
    table = table_of(longer, at=at, baseline='ppo')
    cell = cells(table)['grpo', 'sokoban']
    assert table.tokens == {'sokoban': 140}
    np.testing.assert_allclose([*values(table), *cell['values']], [ppo, grpo])
    assert cell['eval/valid_format'] == pytest.approx(1 - grpo / 10)
    assert cell['gain'] == pytest.approx(grpo - ppo)
    # A run that is not finished sets no limit
    write_run(longer / 'early', 1, [0.1, 0.2])
    assert table_of(longer, at=at).tokens == {'sokoban': 140}
    rewrite(longer / 'early', lambda row: row.pop('perf/tokens_per_s'))
    with pytest.raises(ValueError, match='run early'):
        table_of(longer, at=at)


def test_probability_of_improvement_and_the_column_over_all(sweep):
    table = table_of(sweep, baseline='grpo', overall=True)
    by_cell = cells(table)
    bandit, sokoban, total = (by_cell['ppo', column] for column in ('bandit', 'sokoban', 'all'))
    # (.9, .8, .7) against (.7, .75, .6): 3 + 3 + (tie, loss, win) = 7.5 of 9 pairs.
    assert bandit['p_better'] == pytest.approx(7.5 / 9)
    assert 0 <= bandit['p_low'] < bandit['p_better'] < bandit['p_high'] <= 1
    assert sokoban['p_better'] == 1 and np.isnan(sokoban['p_low'])  # 1 in every draw
    assert total['p_better'] == pytest.approx((7.5 / 9 + 1) / 2)
    # Seed by seed .9 - .7, .8 - .75, .7 - .6; one pair has no interval.
    assert bandit['gain'] == pytest.approx(0.35 / 3)
    assert sokoban['gain'] > 0 and np.isnan(sokoban['gain_low'])
    assert np.isnan(by_cell['grpo', 'bandit']['gain'])
    # .3 .35 .4 .7 .8 .9 without one at either end: 2.25 / 4.
    assert total['iqm'] == pytest.approx(2.25 / 4)
    # Three runs in one column and one in the other: rows cannot be compared.
    assert np.isnan(by_cell['grpo', 'all']['iqm'])
    assert by_cell['random play', 'all']['mean'] == pytest.approx(0.35)


def test_differences_from_the_baseline_are_tested_together(tmp_path):
    """Without correction, one in twenty comparisons at 5 % would report a false difference."""
    ends = {
        ('ppo', 'bandit'): (0.5, 0.6, 0.7),
        ('grpo', 'bandit'): (0.51, 0.6, 0.69),  # .01, 0, -.01
        ('rloo', 'bandit'): (0.6, 0.8, 1.0),  # .1, .2, .3
        ('ppo', 'sokoban'): (0.2, 0.2, 0.2),
        ('grpo', 'sokoban'): (0.3, 0.3, 0.31),  # .1, .1, .11
        ('rloo', 'sokoban'): (0.3,),
    }
    for (algorithm, env), successes in ends.items():
        for seed, p in enumerate(successes):
            folder = tmp_path / f'{algorithm}{env}{seed}'
            write_run(folder, seed, [0.1, p, p], algorithm=algorithm, env=env)
    table = table_of(tmp_path, baseline='ppo', margin=0.02, overall=True)
    by_cell = cells(table)
    # Three tests; a single pair has no test. rloo has t = 2 sqrt 3, p = 1 - sqrt(12 / 14).
    # grpo on sokoban has mean .31 / 3 and error .01 / 3, t = 31: p = 1 - sqrt(961 / 963)
    least = 1 - np.sqrt(961 / 963)
    tested = [('grpo', 'bandit'), ('rloo', 'bandit'), ('grpo', 'sokoban')]
    expected = [1, 2 * (1 - np.sqrt(12 / 14)), 3 * least]
    p = {key: cell['p_holm'] for key, cell in by_cell.items() if cell['p_holm'] >= 0}
    np.testing.assert_allclose([p.pop(key) for key in tested], expected, rtol=1e-9)
    assert not p
    # .01, 0, -.01: the 90 % interval is +- 2.919986 x .01 / sqrt 3 = .0169
    assert [key for key, cell in by_cell.items() if cell['same']] == [('grpo', 'bandit')]
    assert not table_of(tmp_path, baseline='ppo').cells.same.any()


def test_tables_match_the_golden_text(sweep, tmp_path):
    table = table_of(sweep, baseline='grpo', overall=True, margin=0.3, seeds=4)
    forms = (render.markdown, render.latex, render.csv_text, render.runs_csv)
    parts = {form.__name__: form(table) for form in forms}
    # Rows by number that start from different policies; one planned run has not started
    method = {'loss': {'kl_coef': 0.0, 'clip_low': 0.2, 'clip_high': 0.28}}
    method |= {'curriculum': {'rounds': []}}
    for i, keep in enumerate((1.0, 0.25, 0.5)):
        more = method | {'filter': {'keep': keep, 'rule': 'top_k', 'smallest': False}}
        write_run(tmp_path / f'{i}', 0, [0.1 + keep / 10, 0.2, 0.3], **more)
    write_run(tmp_path / '3', 1, [], **more)
    parts['methods by size'] = render.markdown(
        table_of(tmp_path, rows='method,filter.keep', cols='')
    )
    assert_golden('tables.txt', parts)


def test_markup_in_a_name_stays_text(sweep):
    hostile = '<script>alert(1)</script>\n[x](javascript:1) &lt;b&gt; < 3'
    only = {'algorithm': 'ppo', 'seed': '0'}
    text = render.markdown(table_of(sweep, labels={'ppo': hostile}, where=only))
    assert '<script' not in text and '](' not in text
    assert '| &lt;script>alert(1)&lt;/script> [x]\\(javascript:1) &amp;lt;b&amp;gt; < 3 |' in text
    text = render.latex(table_of(sweep, labels={'ppo': 'a_b & 5 % {x}\n\\input{x}'}))
    assert r'a\_b \& 5 \% \{x\} \textbackslash{}input\{x\} &' in text


# ---- clones ------------------------------------------------------------------------------------


def clone_rows(runs, clones, **fields):
    table = table_of(None, runs=runs, clones=clones, **fields)
    return {label: [len(cell['values']) for cell in x] for label, x in table.lines('clone')}


def test_a_clone_is_compared_with_runs_of_the_same_environment(sweep, clones):
    runs, known = load([sweep]), load([clones])
    table = table_of(None, runs=runs, clones=known)
    entries = table.entries_of('expert clone', 'sokoban', 'clone')
    assert [(entry['run'], entry['value']) for entry in entries] == [('clone-0', 0.8)]
    assert clone_rows(runs, known) == {'expert clone': [0, 1]}
    again = next(run for run in known if run.name == 'clone-0')._replace(name='again')
    with pytest.raises(ValueError, match='clone-0, again'):
        table_of(None, runs=runs, clones=[*known, again])
    for fields in ({'metric': 'eval/return'}, {'at': 'area'}):
        assert not clone_rows(runs, known, **fields)
    boxes = {'ppo': 2, 'grpo': 1}
    runs = [
        run._replace(fields=run.fields | {'sokoban.num_boxes': boxes[run.fields['algorithm']]})
        for run in runs
    ]
    known = [run._replace(fields={'sokoban.num_boxes': 1} | run.fields) for run in known]
    assert [*clone_rows(runs, known)] == ['grpo: expert clone', 'ppo: expert clone']


# ---- excluded runs -----------------------------------------------------------------------------


def faults(table):
    """Return the faults of the runs by seed."""
    return {entry['seed']: entry['fault'] for entry in table.entries_of('ppo', 'sokoban')}


@pytest.mark.parametrize('norm', [0.0, math.nan])
def test_a_run_whose_updates_were_skipped_is_rejected(two, norm):
    """Previously it counted like any other run, with the success of its initial policy."""
    assert texts(table_of(two))['ppo', 'sokoban'].endswith('(2/2)')
    rewrite(two / 'run1', skip(norm), slice(1, 20))
    table = table_of(two)
    assert texts(table)['ppo', 'sokoban'].endswith('(1/2, 1 rejected)')
    assert values(table).tolist() == [0.4] and 'the last 19 of its 20' in faults(table)[1]
    rewrite(two / 'run1', skip(norm), slice(20))
    assert 'all its 20 updates' in faults(table_of(two))[1]
    # Runs that recovered count; so does one whose updates were skipped in part.
    for change, rows in ((train, slice(19, 20)), (skip(0.3), slice(20))):
        rewrite(two / 'run1', change, rows)
        assert texts(table_of(two))['ppo', 'sokoban'].endswith('(2/2)')


def test_a_figure_that_is_not_finite_is_rejected(two):
    rewrite(two / 'run0', lambda row: row.update({'eval/success': math.nan}), slice(20, 21))
    table = table_of(two)
    assert values(table).tolist() == [0.4] and 'nan at step 20' in faults(table)[0]
    best = table_of(two, at='best-validation')
    assert values(best).tolist() == [0.2, 0.4]  # the best finite ones


def test_missing_rows_are_a_fault(two):
    path = two / 'run0' / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    for remaining, fault in (
        (lines[3:], 'steps 0 to 2 are missing'),
        (lines[:4] + lines[6:], 'steps 4 to 5 are missing'),
        (lines + lines[-1:], 'several rows are of one step'),
    ):
        path.write_text(''.join(remaining))
        assert fault in faults(table_of(two))[0]
    path.write_text(''.join(lines[:13]))
    (two / 'run0' / 'finished.json').write_text('{"step": 20}')
    assert 'steps 13 to 20 are missing' in faults(table_of(two))[0]
    (two / 'run0' / 'finished.json').unlink()
    path.unlink()
    (two / 'run0' / 'checkpoints' / '12').mkdir(parents=True)
    runs = load([two])
    assert 'steps 0 to 11 are missing' in runs[0].fault
    compact(runs, two / 'compact')  # a rejected run stays rejected
    assert load([two / 'compact']) == runs


# ---- errors ------------------------------------------------------------------------------------


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path):
    for seed, rate in ((0, 1e-3), (1, 1e-4)):
        write_run(tmp_path / str(seed), seed, [0.1, 0.2, 0.3], optim={'lr': rate})
    with pytest.raises(ValueError, match='differ in optim.lr'):
        table_of(tmp_path)
    assert table_of(tmp_path, where={'optim.lr': '0.001'})
    write_run(tmp_path / 'again', 0, [0.1, 0.2, 0.3], optim={'lr': 1e-3})
    with pytest.raises(ValueError, match='same config: 0, again'):
        table_of(tmp_path, where={'optim.lr': '0.001'})


@pytest.mark.parametrize(
    'older, newer, differ',
    [
        ({}, {}, ''),  # a field that was added later has its default
        ({}, {'env.hint': 'plan'}, 'env.hint'),
        ({'batch.widths': [1]}, {}, 'batch.widths'),  # configs that cannot be read are compared
        ({'batch': 1}, {}, 'batch'),
        ({'gone.field': 1}, {}, 'gone.field'),
    ],
)
def test_runs_of_two_versions_are_compared(tmp_path, older, newer, differ):
    later = 'env.hint'  # a field that is absent in the run of seed 0
    for seed, changes in enumerate((older, newer)):
        cfg = get_config()
        cfg.update_from_flattened_dict({'seed': seed, 'steps': 20, 'algorithm': 'grpo'})
        write_run(tmp_path / str(seed), seed, [0.1, 0.2, 0.3])
        config = flatten(as_json(effective(cfg))) | changes
        config = {name: x for name, x in config.items() if seed or name != later}
        (tmp_path / str(seed) / 'run.json').write_text(json.dumps({'config': config}))
    if differ:
        with pytest.raises(ValueError, match=f'differ in .*{differ}'):
            table_of(tmp_path)
    else:
        name = next(iter(cells(table_of(tmp_path))))
        assert len(values(table_of(tmp_path), *name)) == 2


@pytest.mark.parametrize(
    'fields, message',
    [
        ({'rows': ''}, 'rows'),
        ({'row': 'seed'}, 'row'),
        ({'at': 'first'}, 'first'),
        ({'at': '7'}, '7'),
        ({'margin': 0.05}, 'margin'),
        ({'baseline': 'dapo'}, 'dapo'),
        ({'rows': 'env.nam'}, 'env.nam'),
        ({'metric': 'eval/sucess'}, 'eval/sucess'),
        ({'where': {'algorithm': 'dapo'}}, 'dapo'),
    ],
)
def test_errors_of_tables_name_the_field(sweep, fields, message):
    with pytest.raises(ValueError, match=message):
        table_of(sweep, **fields)


@pytest.mark.parametrize('name', ['run.json', 'config.json', 'reference.json', 'metrics.jsonl'])
def test_a_broken_file_of_a_run_is_named(tmp_path, name):
    write_run(tmp_path / 'a', 0, [0.1, 0.2, 0.3])
    if name == 'config.json':  # as training leaves it, without a sweep
        (tmp_path / 'a' / 'run.json').unlink()
    (tmp_path / 'a' / name).write_text('{"config"\n{}\n')
    with pytest.raises(ValueError, match=f'a/{name}[:,]'):
        load([tmp_path])


# ---- reading and compacting --------------------------------------------------------------------


def test_a_compact_folder_gives_the_same_runs_and_tables(sweep, tmp_path):
    runs, folder = load([sweep]), tmp_path / 'compact'
    path = compact(runs, folder)
    assert load([folder]) == runs and len(runs) == 11
    common, header, *_ = map(json.loads, lzma.decompress(path.read_bytes()).splitlines())
    assert common['fields'] == {'steps': 20}
    assert header['fields'] == {'algorithm': 'grpo', 'env.name': 'bandit', 'seed': 0}
    before = path.read_bytes()
    compact(load([folder]), folder)
    assert path.read_bytes() == before
    compact(runs[:5], folder)
    assert load([folder]) == runs[:5]


def test_compacting_keeps_inf_and_needs_one_name_per_run(tmp_path):
    run = Run('a', {'seed': 0, 'steps': 1}, [{'step': 0, 'x': math.inf}, {'step': 1}], {})
    path = compact([run], tmp_path)
    assert load([tmp_path]) == [run]
    with pytest.raises(ValueError, match='several runs are named a'):
        compact([run, run], tmp_path / 'b')
    lines = lzma.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(lzma.compress(b''.join(lines[:-1])))
    with pytest.raises(ValueError, match='runs.jsonl.xz: 1 rows of a are missing'):
        load([tmp_path])
    path.write_bytes(lzma.compress(b''.join(lines).replace(b'"rows": 2', b'"rows": -1')))
    with pytest.raises(ValueError, match='runs.jsonl.xz: rows is -1: '):  # was an endless loop
        load([tmp_path])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match='runs.jsonl.xz'):
        load([tmp_path])


@pytest.mark.parametrize('folder', ['.', 'run0'])
def test_runs_are_not_compacted_into_a_sweep_or_a_run(two, folder):
    """Previously, without the last argument, a sweep became a compact folder that hid its runs."""
    with pytest.raises(ValueError, match='is a run'):
        compact(load([two]), two / folder)
    assert not list(two.rglob('runs.jsonl.xz'))


# ---- files -------------------------------------------------------------------------------------


def test_curves_are_drawn_over_steps_and_tokens(two):
    assert set(curves.figures(table_of(two))) == {'curves_step', 'curves_tokens'}


@pytest.fixture
def no_figures(monkeypatch):
    for module in (curves, forest):
        monkeypatch.setattr(module, 'figures', lambda table: {})


def test_the_command_line(sweep, tmp_path, capsys, no_figures):
    out = tmp_path / 'out'
    words = ['--rows=algorithm', '--cols=env.name', f'--out={out}']
    words += ['--where=env.name=bandit|sokoban', '--where=algorithm=ppo']
    tables.main([str(sweep), *words])
    printed = capsys.readouterr().out
    assert printed == (out / 'table.md').read_text()
    assert '| ppo |' in printed and '| grpo' not in printed
    tables.main(['--compact', str(sweep), str(tmp_path / 'compact')])
    assert capsys.readouterr().out.startswith('11 runs, ')


@pytest.mark.parametrize(
    'words, message',
    [
        ('--rows= {sweep}', 'rows'),
        ('--compact {sweep}', '--compact'),
        ('--rows=a --where=b .', '--where'),
        ('--compact {sweep} {tmp}/gone {tmp}/out', 'gone'),
        ('--rebuild {tmp}', 'no experiment'),
    ],
)
def test_wrong_arguments_end_with_a_reason(sweep, tmp_path, words, message, capsys):
    with pytest.raises(SystemExit) as error:
        tables.main(words.format(sweep=sweep, tmp=tmp_path).split())
    assert error.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


# ---- committed experiments ---------------------------------------------------------------------


@pytest.mark.parametrize('clones', ['nobody', '../try', 'try,try'])
def test_clones_that_are_not_an_experiment_are_rejected(sweep, tmp_path, clones):
    compact(load([sweep]), tmp_path / 'try')
    spec = {'main': {'rows': 'algorithm', 'cols': 'env.name', 'clones': clones}}
    (tmp_path / 'try' / 'table.json').write_text(json.dumps(spec))
    with pytest.raises(ValueError, match='table.json, main: .*clones='):
        tables.rebuild(tmp_path)


def test_experiments_are_rebuilt_one_by_one_or_together(sweep, tmp_path, monkeypatch, capsys):
    def draw(path, endings):
        path.with_name(f'{path.name}.{endings[0]}').write_text('drawn')
        return [path]

    monkeypatch.setattr(tables, 'figures', lambda table: {'curves_step': draw, 'signals': draw})
    for name in ('one', 'two'):
        compact(load([sweep]), tmp_path / name)
        spec = {'main': {'rows': 'algorithm', 'cols': 'env.name', 'clones': 'two'}}
        (tmp_path / name / 'table.json').write_text(json.dumps(spec))
    readme = tmp_path / 'one' / 'README.md'
    page = 'Before\n![x](main/signals.png)\n<!-- table main -->\n{}<!-- end of table -->\nAfter\n'
    readme.write_text(page.format('old\n'))
    for here, folder in ((tmp_path, 'one'), (tmp_path / 'one', '.')):
        monkeypatch.chdir(here)
        tables.main(['--rebuild', folder])
    assert [path.name for path in (tmp_path / 'one' / 'main').iterdir()] == ['signals.png']
    text = readme.read_text()
    assert text == page.format(render.markdown(tables.experiment(tmp_path / 'one')['main']))
    tables.rebuild(tmp_path)
    assert readme.read_text() == text and not (tmp_path / 'two' / 'main').exists()


@pytest.mark.parametrize(
    'path',
    [
        pytest.param(path, marks=[] if path.parent.name == 'demo_cloned' else pytest.mark.soak)
        for path in sorted((ROOT / 'experiments').glob(f'*/{tables.SPEC_FILE}'))
    ],
    ids=lambda path: path.parent.name,
)
def test_committed_tables_match_their_runs(path):
    """Byte for byte; make tables writes them again, and the figures."""
    page = (path.parent / 'README.md').read_text()
    for name, table in tables.experiment(path.parent).items():
        text = render.markdown(table)
        assert f'<!-- table {name} -->\n{text}<!-- end of table -->' in page
