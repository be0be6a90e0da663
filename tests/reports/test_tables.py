"""Tables of runs whose figures are known: by hand, from folders, compacted and committed."""

import json
import math
import pathlib
import re

import matplotlib.image
import numpy as np
import pytest
from golden_text import assert_golden

from agentrl_jax import tables
from agentrl_jax.measure import stats
from agentrl_jax.records import run_log
from agentrl_jax.results import curves, forest, render
from agentrl_jax.results.cells import build
from agentrl_jax.results.runs import Run, compact, flatten, load, rounded
from agentrl_jax.run.config import as_json, effective, get_config
from configs import base, connect_four

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / 'experiments').glob(f'*/{tables.SPEC_FILE}'))
RANDOM = {'bandit': 0.5, 'sokoban': 0.2}


def write_run(folder, seed, successes, *, algorithm='ppo', env='sokoban', steps=20, **more):
    """A run's folder as a sweep and training leave it; a validation every 10 steps."""
    config = {'seed': seed, 'steps': steps, 'algorithm': algorithm, 'env': {'name': env}} | more
    folder.mkdir(parents=True)
    text = json.dumps({'name': folder.name, 'overrides': {'seed': seed}, 'config': config})
    (folder / 'run.json').write_text(text)
    (folder / 'reference.json').write_text(json.dumps({'random': RANDOM[env], 'oracle': 1.0}))
    if successes:
        rows = [measured(step, successes, steps) for step in range(10 * len(successes) - 9)]
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
            name = f'{algorithm}-{env}-{seed}'
            start = 0.1 + 0.01 * seed
            write_run(folder / name, seed, [start, p + 0.05, p], algorithm=algorithm, env=env)
    settings = {'algorithm': 'grpo', 'env': 'sokoban'}
    write_run(folder / 'grpo-sokoban-0', 0, [0.1, 0.25, 0.2], **settings)
    write_run(folder / 'grpo-sokoban-1', 1, [0.11, 0.31], **settings)  # stands at step 10
    (folder / 'notes').mkdir()  # no run
    return folder


def table_of(folder, **given):
    spec = tables.make_spec({'rows': 'algorithm', 'cols': 'env.name'} | given)
    return build(load([folder], tables.metrics_of(spec)), spec)


@pytest.fixture(scope='module')
def clones(tmp_path_factory):
    """Of sokoban and of another size of it, seeds 0 and 7; one that was trained further."""
    folder = tmp_path_factory.mktemp('clones')
    clean = {'clone': {'episodes': 64, 'oracle': 1.0}}
    for seed in (0, 7):
        write_run(folder / f'clone-{seed}', seed, [0.8 + 0.01 * seed], steps=0, **clean)
    write_run(folder / 'two boxes', 0, [0.6], steps=0, sokoban={'num_boxes': 2}, **clean)
    write_run(folder / 'trained', 0, [0.6, 0.7, 0.9], **clean)
    write_run(folder / 'random weights', 0, [0.1], steps=0)
    write_run(folder / 'noisy', 0, [0.2], steps=0, clone={'episodes': 64, 'oracle': 0.5})
    return folder


def test_a_clone_stands_beside_the_runs_that_see_what_it_sees(sweep, clones):
    spec = tables.make_spec({'rows': 'algorithm', 'cols': 'env.name', 'clones': str(clones)})
    runs, given = load([sweep]), load(spec.clones)
    again = next(run for run in given if run.name == 'clone-0')._replace(name='again')
    with pytest.raises(ValueError, match='clone-0, again see the same'):
        build(runs, spec, [*given, again])
    found = cells(build(runs, spec, given))  # of one box, which is what they do not say
    clone = found['expert clone', 'sokoban']
    assert not found['expert clone', 'bandit'].entries
    assert [entry.run for entry in clone.entries] == ['clone-0']
    assert clone.figure.mean == 0.8
    assert math.isnan(clone.also[0])


@pytest.mark.parametrize(
    'change',
    [
        {'eval.temperature': 0.0},
        {'eval.top_k': 4},
        {'eval.top_p': 0.9},
        {'context.window': 1},
        {'context.summary': 2},
        {'env.hint': 'plan'},
        {'model.path': 'some_model'},
        {'model.intermediate_size': 512},
        {'lora.rank': 8},
        {'rollout.stop_at_answer': True},
        {'agent.plan_every': 3},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize('changed', ['runs', 'clones'])
def test_a_clone_of_another_measurement_view_or_model_is_not_shown(sweep, clones, change, changed):
    """It was, whether or not the older ones of the two said what they do."""
    spec = tables.make_spec({'rows': 'algorithm', 'where': {'env.name': 'sokoban'}})
    both = {'runs': load([sweep]), 'clones': load([clones])}

    def shown(runs, clones):
        return [line for line in build(runs, spec, clones).lines if line.kind == 'clone']

    assert shown(**both)
    both[changed] = [run._replace(fields=run.fields | change) for run in both[changed]]
    assert not shown(**both)


def test_a_clone_that_differs_between_rows_is_shown_for_each(sweep, clones):
    spec = tables.make_spec({'rows': 'algorithm', 'where': {'env.name': 'sokoban'}})
    boxes = {'ppo': 2, 'grpo': 1}
    runs = [
        run._replace(fields=run.fields | {'sokoban.num_boxes': boxes[run.fields['algorithm']]})
        for run in load([sweep])
    ]
    given = [run._replace(fields={'sokoban.num_boxes': 1} | run.fields) for run in load([clones])]
    labels = [line.label for line in build(runs, spec, given).lines if line.kind == 'clone']
    assert labels == ['grpo: expert clone', 'ppo: expert clone']


@pytest.mark.parametrize('given', [{'metric': 'eval/return'}, {'at': 'area'}])
def test_a_clone_has_no_return_of_other_rewards_and_no_area(sweep, clones, given):
    spec = tables.make_spec({'rows': 'algorithm', 'cols': 'env.name'} | given)
    lines = build(load([sweep]), spec, load([clones])).lines
    assert not [line for line in lines if line.kind == 'clone']


@pytest.mark.parametrize('at', ['area', 'equal-tokens'])
def test_a_clone_among_the_rows_has_no_tokens_to_be_equal_at(sweep, clones, at):
    spec = tables.make_spec({'rows': 'algorithm,steps', 'where': {'env.name': 'sokoban'}, 'at': at})
    runs = [
        run
        for run in load([sweep, clones])
        if run.name not in ('two boxes', 'trained', 'noisy', 'random weights')
    ]
    with pytest.raises(ValueError, match='run clone-0 sampled no token before its last eval/succ'):
        build(runs, spec)


def cells(table):
    return {
        (line.label, column): cell
        for line in table.lines
        for column, cell in zip(table.columns, line.cells, strict=True)
    }


def texts(table):
    header, *lines = render.matrix(table)
    return {(line[0], name): text for line in lines for name, text in zip(header, line)}  # noqa: B905


# ---- cells -------------------------------------------------------------------------------------


def test_a_cell_by_hand(sweep):
    found = cells(table_of(sweep))['ppo', 'bandit']
    # 0.9, 0.8, 0.7: mean and IQM (nothing is cut of three) 0.8, variance (.01 + 0 + .01) / 2.
    np.testing.assert_allclose(found.figure[:3], (0.8, 0.1, 0.8))
    # All three redrawn runs are 0.9 in 1 of 27 cases, 3.7 % > 2.5 %: the interval is the range.
    np.testing.assert_allclose(found.figure[3:5], (0.7, 0.9))
    assert found.figure.interval == 'bootstrap' and found.planned == 3
    np.testing.assert_allclose(found.also, [1 - 0.08])  # valid format: mean of .91, .92, .93


def test_where_the_value_is_taken(sweep):
    def value(at):
        return cells(table_of(sweep, at=at))['ppo', 'bandit'].values

    np.testing.assert_allclose(value('last'), [0.9, 0.8, 0.7])
    np.testing.assert_allclose(value('best-validation'), [0.95, 0.85, 0.75])
    np.testing.assert_allclose(value('0'), [0.1, 0.11, 0.12])
    assert any('biased upwards' in x for x in render.notes(table_of(sweep, at='best-validation')))
    # grpo's run that stands at step 10 has reached it.
    assert len(cells(table_of(sweep, at='10'))['grpo', 'sokoban'].values) == 2
    with pytest.raises(ValueError, match=r'at step 7, only at \[0, 10, 20\]'):
        table_of(sweep, at='7')


def test_runs_are_read_where_the_one_that_sampled_fewest_ends(tmp_path):
    """An arm whose episodes are longer had more tokens to learn from at the same step."""
    for seed in (0, 1):
        write_run(tmp_path / f'short{seed}', seed, [0.1, 0.2, 0.3])  # 70, 140 tokens
        write_run(tmp_path / f'long{seed}', seed, [0.1, 0.3, 0.5], algorithm='grpo')
        rewrite(
            tmp_path / f'long{seed}',
            lambda row: row.update({'perf/tokens_per_s': 10 / 0.3}),
            slice(20),
        )
    write_run(tmp_path / 'bandit', 0, [0.1, 0.2, 0.3], env='bandit')
    table = table_of(tmp_path, at='equal-tokens', baseline='ppo')
    found = cells(table)
    assert table.tokens == {'sokoban': 140, 'bandit': 140}
    # 100 tokens at .3 and 200 at .5: .38 at 140
    np.testing.assert_allclose(found['grpo', 'sokoban'].values, [0.38, 0.38])
    np.testing.assert_allclose(found['grpo', 'sokoban'].also, [1 - 0.038])
    np.testing.assert_allclose(found['ppo', 'sokoban'].values, [0.3, 0.3])
    assert found['grpo', 'sokoban'].gain[0] == pytest.approx(0.08)
    assert any(
        note.startswith('Sampled tokens: bandit 140, sokoban 140, where the run')
        for note in render.notes(table)
    )
    # A run that is not finished sets no limit, unless such runs count
    write_run(tmp_path / 'short2', 2, [0.1, 0.2])
    assert table_of(tmp_path, at='equal-tokens').tokens['sokoban'] == 140
    counted = table_of(tmp_path, at='equal-tokens', unfinished='count')
    assert counted.tokens['sokoban'] == 70
    np.testing.assert_allclose(cells(counted)['ppo', 'sokoban'].values, [0.2, 0.2, 0.2])
    rewrite(tmp_path / 'short2', lambda row: row.pop('perf/tokens_per_s'))
    with pytest.raises(ValueError, match='run short2 does not say what it sampled'):
        table_of(tmp_path, at='equal-tokens')


def test_what_a_roll_back_undid_was_sampled_too(tmp_path):
    """A run that went back from step 15 to 5 played on for nothing at equal tokens."""
    folder = tmp_path / 'run'
    write_run(folder, 0, [0.1, 0.2, 0.3])
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    lost = ''.join(json.dumps(row) + '\n' for row in rows[5:16])
    (folder / 'metrics_abandoned_1.jsonl').write_text(lost)
    undone = [{'at_step': 15, 'to_step': 5, 'signal': 'x', 'reason': 'y'}]
    (folder / 'roll_backs.json').write_text(json.dumps(undone))
    (run,) = load([tmp_path], ['eval/success'])
    assert [row['tokens'] for row in run.rows] == [7 * k + 77 * (k >= 5) for k in range(21)]
    seconds = [0.3 * k + 3.3 * (k >= 5) for k in range(21)]
    np.testing.assert_allclose([row['seconds'] for row in run.rows], seconds, rtol=1e-5)


def test_the_last_three_validations_are_averaged(two):
    write_run(two / 'run2', 2, [0.1, 0.2, 0.3, 0.7], steps=40)  # stands at step 30
    table = table_of(two, at='last-three', pooled='steps')
    found = cells(table)['ppo', 'sokoban']
    # (.1 + .2 + .4) / 3, also of valid format: 1 - .7 / 30
    np.testing.assert_allclose(found.values, [0.7 / 3, 0.7 / 3])
    np.testing.assert_allclose(found.also, [1 - 0.7 / 30])
    assert texts(table)['ppo', 'sokoban'].endswith('(2/3, 1 unfinished)')
    first, *others = render.notes(table)
    assert first.startswith(
        '`eval/success` in per cent as the mean of the last three validations of a run: '
    )
    assert 'Valid format: mean over the same runs, in the same way.' in others
    counted = table_of(two, at='last-three', pooled='steps', unfinished='count')
    np.testing.assert_allclose(cells(counted)['ppo', 'sokoban'].values[2], 0.4)  # .2 .3 .7
    assert 'Unfinished, counted by their last validations' in render.notes(counted)[-1]
    # Two validations are averaged where there are no more; one that is nan is a fault
    write_run(two / 'run3', 3, [0.1, 0.4], steps=10)
    rewrite(two / 'run0', lambda row: row.update({'eval/success': math.nan}), slice(10, 11))
    table = table_of(two, at='last-three', pooled='steps')
    np.testing.assert_allclose(cells(table)['ppo', 'sokoban'].values, [0.7 / 3, 0.25])
    assert any('seed 0: eval/success is nan' in note for note in render.notes(table))


def test_the_area_under_success_is_its_mean_over_equal_tokens(tmp_path):
    write_run(tmp_path / 'short', 0, [0.1, 0.2, 0.4])  # 70, 140 tokens
    write_run(tmp_path / 'long', 0, [0.1, 0.3, 0.5], algorithm='grpo')
    rewrite(tmp_path / 'long', lambda row: row.update({'perf/tokens_per_s': 10 / 0.3}), slice(20))
    table = table_of(tmp_path, at='area', baseline='ppo')
    found = cells(table)
    assert table.tokens == {'sokoban': 140}
    # (.1 + .2) / 2 x 70 + (.2 + .4) / 2 x 70 = 31.5 of 140
    np.testing.assert_allclose(found['ppo', 'sokoban'].values, [0.225])
    # .38 at 140 tokens: (.1 + .3) / 2 x 100 + (.3 + .38) / 2 x 40 = 33.6 of 140
    np.testing.assert_allclose(found['grpo', 'sokoban'].values, [0.24])
    np.testing.assert_allclose(found['grpo', 'sokoban'].also, [1 - 0.024])
    notes = render.notes(table)
    assert notes[0].startswith(
        '`eval/success` in per cent as the mean over sampled tokens of a run'
    )
    assert any('ends; the others are summed up to there, linearly' in note for note in notes)
    # What does not change has its own value as mean, wherever it ends
    write_run(tmp_path / 'flat', 0, [0.3, 0.3, 0.3], algorithm='rloo')
    np.testing.assert_allclose(cells(table_of(tmp_path, at='area'))['rloo', 'sokoban'].values, 0.3)
    # A run that is not finished sets no limit, unless such runs count
    write_run(tmp_path / 'stands', 1, [0.1, 0.2])
    table = table_of(tmp_path, at='area')
    assert table.tokens == {'sokoban': 140} and len(cells(table)['ppo', 'sokoban'].values) == 1
    counted = table_of(tmp_path, at='area', unfinished='count')
    assert counted.tokens == {'sokoban': 70}
    np.testing.assert_allclose(cells(counted)['ppo', 'sokoban'].values, [0.15, 0.15])
    rewrite(tmp_path / 'flat', lambda row: row.pop('eval/success'), slice(1))
    with pytest.raises(ValueError, match='at=area: run flat has no eval/success at step 0'):
        table_of(tmp_path, at='area')


def test_probability_of_improvement_and_the_column_over_all(sweep):
    table = table_of(sweep, baseline='grpo', overall=True, where={'env.name': 'bandit|sokoban'})
    found = cells(table)
    # (.9, .8, .7) against (.7, .75, .6): 3 + 3 + (tie, loss, win) = 7.5 of 9 pairs.
    assert found['ppo', 'bandit'].better[0] == pytest.approx(7.5 / 9)
    assert found['ppo', 'sokoban'].better[0] == 1  # all three above 0.2
    assert found['ppo', 'all'].better[0] == pytest.approx((7.5 / 9 + 1) / 2)
    assert texts(table)['ppo', 'P(> grpo)'] == '0.92 [0.72, 1.00]'  # of the last column: all
    assert np.isnan(found['ppo', 'sokoban'].better[1])  # redrawn, it is 1 every time
    p, low, high = found['ppo', 'bandit'].better
    assert 0 <= low < p < high <= 1
    # Seed by seed .9 - .7, .8 - .75, .7 - .6; of one pair there is no interval.
    assert found['ppo', 'bandit'].gain[0] == pytest.approx(0.35 / 3)
    one = cells(table_of(sweep, baseline='grpo'))['ppo', 'sokoban'].gain
    assert one[0] > 0 and np.isnan(one[1]) and found['grpo', 'bandit'].gain is None
    # .3 .35 .4 .7 .8 .9 without one at either end: 2.25 / 4.
    assert found['ppo', 'all'].figure.iqm == pytest.approx(2.25 / 4)
    # Three runs on one and one on the other: nothing over both that a row could be compared by.
    assert np.isnan(found['grpo', 'all'].figure.iqm)
    assert found['random play', 'all'].figure.mean == pytest.approx(0.35)
    assert found['grpo', 'bandit'].better is None
    header = render.matrix(table)[0]
    compared = ['P(> grpo)', 'less grpo', 'p (Holm)']
    assert header[:6] == ['algorithm', 'bandit', 'valid format', *compared]
    assert header[-3:] == ['all', 'valid format', 'P(> grpo)']
    with pytest.raises(ValueError, match="baseline 'dapo' is no row"):
        table_of(sweep, baseline='dapo')


def test_differences_from_the_baseline_are_tested_together(tmp_path):
    """Of many comparisons at 5 % one in twenty would be found where there is nothing."""
    ends = {
        ('ppo', 'bandit'): (0.5, 0.6, 0.7),
        ('grpo', 'bandit'): (0.51, 0.6, 0.69),  # .01, 0, -.01
        ('rloo', 'bandit'): (0.6, 0.8, 1.0),  # .1, .2, .3
        ('ppo', 'sokoban'): (0.2, 0.2, 0.2),
        ('grpo', 'sokoban'): (0.3, 0.3, 0.31),  # .1, .1, .11
        ('rloo', 'sokoban'): (0.3,),
    }
    for (algorithm, env), values in ends.items():
        for seed, p in enumerate(values):
            write_run(
                tmp_path / f'{algorithm}{env}{seed}',
                seed,
                [0.1, p, p],
                algorithm=algorithm,
                env=env,
            )
    table = table_of(tmp_path, baseline='ppo', margin=0.02, overall=True)
    found = cells(table)
    # Three tests; of one pair there is none. rloo has t = 2 sqrt 3, p = 1 - sqrt(12 / 14).
    # grpo on sokoban has mean .31 / 3 and error .01 / 3, t = 31: p = 1 - sqrt(961 / 963)
    least = 1 - np.sqrt(961 / 963)
    np.testing.assert_allclose(
        [found[key].p for key in [*ends][1:3] + [*ends][4:5]],
        [1, 2 * (1 - np.sqrt(12 / 14)), 3 * least],
        rtol=1e-9,
    )
    assert all(np.isnan(found[key].p) for key in [('rloo', 'sokoban'), ('rloo', 'all')])
    # .01, 0, -.01: the 90 % interval is +- 2.919986 x .01 / sqrt 3 = .0169
    assert [key for key, cell in found.items() if cell.same] == [('grpo', 'bandit')]
    header, *lines = render.matrix(table)
    line = dict(zip(header[:6], lines[0], strict=False))
    assert line['algorithm'] == 'grpo' and line['p (Holm)'] == '1.000'
    assert re.fullmatch(r'-?0\.0 \[-2\.5, \+2\.5\] same', line['less ppo'])
    assert lines[0][10] == '0.003' and lines[2][5] == '0.148' and lines[2][10] == ''
    notes = render.notes(table)
    assert any('of the table (Holm, n = 3)' in note for note in notes)
    assert 'same: the 90 % interval of the difference lies within ±2.0 (two' in '\n'.join(notes)
    # Of one seed there is nothing to test
    alone = render.matrix(table_of(tmp_path, baseline='ppo', where={'seed': '0'}))[0]
    assert 'less ppo' in alone and 'p (Holm)' not in alone
    # Without a margin nothing is the same
    table = table_of(tmp_path, baseline='ppo')
    assert not any(cell.same for cell in cells(table).values())
    assert 'same' not in render.markdown(table).replace('the same runs, at the same step', '')


NAMES = {'ppo': 'PPO', 'grpo': 'GRPO'}
FORMS = (render.markdown, render.latex, render.csv_text, render.runs_csv)
TABLES = {  # what it shows -> (its spec, its forms)
    'unfinished and missing runs': ({}, FORMS),
    'a baseline and a column of all': ({'baseline': 'grpo', 'overall': True}, FORMS),
    'a margin': (
        {'baseline': 'grpo', 'margin': 0.3, 'where': {'env.name': 'bandit'}},
        (render.markdown, render.csv_text),
    ),
    'unfinished runs count, and five are planned': ({'unfinished': 'count', 'seeds': 5}, FORMS[:1]),
    'the best step, chosen on what it is reported on': ({'at': 'best-validation'}, FORMS[:1]),
    'a step that all have reached': ({'at': '10'}, FORMS[:1]),
    'figures of others, rows by their names': (
        {'labels': NAMES, 'published': {'PPO': {'sokoban': '12.1'}, 'ppo': {'bandit': '7'}}},
        FORMS[:1],
    ),
    'another metric without references': ({'metric': 'eval/return', 'also': ''}, FORMS[:2]),
    'one row, of which nothing is best': ({'where': {'algorithm': 'ppo'}}, FORMS[:2]),
    'no more is better': ({'metric': 'group/return_std'}, FORMS[1:2]),
    'signs that Markdown and LaTeX know': ({'labels': {'ppo': r'a_b & 5 % {x} | $y$'}}, FORMS[:2]),
}


def test_tables_are_the_golden_ones(sweep, tmp_path):
    parts = {
        f'{title}: {form.__name__}': form(table_of(sweep, **given))
        for title, (given, forms) in TABLES.items()
        for form in forms
    }
    only = {'algorithm': 'grpo', 'env.name': 'sokoban'}
    runs = [run for run in load([sweep]) if not only.items() <= run.fields.items()]
    spec = tables.make_spec({'rows': 'algorithm', 'cols': 'env.name'})
    parts['a cell without a run'] = render.markdown(build(runs, spec))
    # Rows by number that start from different policies; one run was planned and has not begun
    method = {'loss': {'kl_coef': 0.0, 'clip_low': 0.2, 'clip_high': 0.28}}
    method |= {'curriculum': {'rounds': []}}
    for i, keep in enumerate((1.0, 0.25, 0.5)):
        more = method | {'filter': {'keep': keep, 'rule': 'top_k', 'smallest': False}}
        write_run(tmp_path / f'{i}', 0, [0.1 + keep / 10, 0.2, 0.3], **more)
    write_run(tmp_path / '3', 1, [], **more)
    second = {'eval/success_first': 0.25}
    rewrite(tmp_path / '0', lambda row: row.update(second if 'eval/success' in row else {}))
    given = {'rows': 'method,filter.keep', 'cols': '', 'also': 'eval/success_first'}
    parts['methods by size'] = render.markdown(table_of(tmp_path, **given))
    assert_golden('tables.txt', parts)


# ---- runs that are in no figure ----------------------------------------------------------------


def rewrite(folder, change, rows=slice(None)):
    """Changes rows of a run; change: row -> row."""
    path = folder / 'metrics.jsonl'
    found = run_log.read_metrics(path)
    for row in found[rows]:
        change(row)
    path.write_text(''.join(run_log.json_line(row) for row in found))


def skip(norm):
    return lambda row: row.update({'update/skipped': 2.0, 'policy/grad_norm': norm})


def train(row):
    row.update({'update/skipped': 0.0, 'policy/grad_norm': 0.5})


@pytest.fixture
def two(tmp_path):
    """Runs of seeds 0 and 1, updates in steps 0 to 19."""
    for seed in (0, 1):
        write_run(tmp_path / f'run{seed}', seed, [0.1, 0.2, 0.4])
        rewrite(tmp_path / f'run{seed}', train, slice(20))
    return tmp_path


@pytest.mark.parametrize('norm', [0.0, math.nan])
def test_a_run_whose_updates_were_skipped_is_refused_with_the_reason(two, norm):
    """It counted like any other, with the success of the policy it had started from."""
    assert texts(table_of(two))['ppo', 'sokoban'].endswith('(2/2)')
    rewrite(two / 'run1', skip(norm), slice(1, 20))
    for unfinished in ('leave-out', 'count'):
        table = table_of(two, unfinished=unfinished)
        assert texts(table)['ppo', 'sokoban'].endswith('(1/2, 1 refused)')
        assert cells(table)['ppo', 'sokoban'].values.tolist() == [0.4]
        assert render.notes(table)[-1] == (
            'Refused, in no figure: ppo / sokoban, seed 1: the last 19 of its 20 updates were '
            'skipped: nothing was trained.'
        )
        assert render.details(table)[1][-1] == '40.0, — (refused)'
    rewrite(two / 'run1', skip(norm), slice(20))
    assert 'seed 1: all its 20 updates were' in render.notes(table_of(two))[-1]
    # Runs that recovered, or lost some steps on the way, count; so does one whose updates were
    # skipped in part.
    rewrite(two / 'run1', train, slice(19, 20))
    assert texts(table_of(two))['ppo', 'sokoban'].endswith('(2/2)')
    rewrite(two / 'run1', skip(0.3), slice(20))
    assert texts(table_of(two))['ppo', 'sokoban'].endswith('(2/2)')


def test_a_figure_that_is_not_finite_is_refused(two):
    rewrite(two / 'run0', lambda row: row.update({'eval/success': math.nan}), slice(20, 21))
    table = table_of(two)
    assert cells(table)['ppo', 'sokoban'].values.tolist() == [0.4]
    assert 'seed 0: eval/success is nan at step 20' in render.notes(table)[-1]
    best = cells(table_of(two, at='best-validation'))['ppo', 'sokoban']
    assert best.values.tolist() == [0.2, 0.4]  # of those that were measured


def test_rows_that_are_missing_are_said(two):
    path = two / 'run0' / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    for kept, said in (
        (lines[3:], 'the rows of steps 0 to 2 are missing'),
        (lines[:4] + lines[6:], 'the rows of steps 4 to 5 are missing'),
        (lines + lines[-1:], 'several rows are of one step'),
    ):
        path.write_text(''.join(kept))
        table = table_of(two)
        assert f'seed 0: {said}' in render.notes(table)[-1]
        assert texts(table)['ppo', 'sokoban'].endswith('(1/2, 1 refused)')
    path.unlink()
    (two / 'run0' / 'checkpoints' / '12').mkdir(parents=True)
    assert 'seed 0: the rows of steps 0 to 11 are missing' in render.notes(table_of(two))[-1]
    path.write_text(''.join(lines[:13]))
    (two / 'run0' / 'finished.json').write_text('{"step": 20}')
    table = table_of(two)
    assert 'seed 0: the rows of steps 13 to 20 are missing' in render.notes(table)[-1]
    assert not any(note.startswith('Unfinished') for note in render.notes(table))


def test_a_refused_run_stays_refused_when_it_is_compacted(two):
    rewrite(two / 'run1', skip(0.0), slice(20))
    (two / 'run0' / 'metrics.jsonl').unlink()
    (two / 'run0' / 'checkpoints' / '12').mkdir(parents=True)
    runs = load([two])
    compact(runs, two / 'metrics')
    again = load([two / 'metrics'])
    assert again == runs and all(run.fault for run in again)


# ---- what is refused ---------------------------------------------------------------------------


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path):
    for seed, rate in ((0, 1e-3), (1, 1e-4)):
        write_run(tmp_path / str(seed), seed, [0.1, 0.2, 0.3], optim={'lr': rate})
    with pytest.raises(ValueError, match='differ in optim.lr, not only in their seeds'):
        table_of(tmp_path)
    assert table_of(tmp_path, pooled='optim.lr').lines
    with pytest.raises(ValueError, match='pooled=optim.lrr: no run has this field'):
        table_of(tmp_path, pooled='optim.lr,optim.lrr')
    with pytest.raises(ValueError, match='seeds=-1 must be a whole number, 0 or more'):
        table_of(tmp_path, seeds=-1)
    assert table_of(tmp_path, where={'optim.lr': '0.001'}).lines


LATER = ('self_play', 'env.hint', 'loss.observation_coef')


def versions(tmp_path, cfg=None, old=(), **changes):
    """The table of a run older than LATER, with `old` fields, and of a new one with changes.

    cfg: the ConfigDict of both; None = the default one.
    """
    cfg = get_config() if cfg is None else cfg
    for seed, fields in enumerate((dict(old), changes)):
        cfg.update_from_flattened_dict({'seed': seed, 'steps': 20, 'algorithm': 'grpo'})
        write_run(tmp_path / str(seed), seed, [0.1, 0.2, 0.3])
        config = flatten(as_json(effective(cfg))) | fields
        config = {
            name: value
            for name, value in config.items()
            if seed or not any(name == later or name.startswith(f'{later}.') for later in LATER)
        }
        (tmp_path / str(seed) / 'run.json').write_text(json.dumps({'config': config}))
    return table_of(tmp_path)


@pytest.mark.parametrize('config', [base, connect_four], ids=['plain', 'a section of a game'])
def test_a_run_from_before_a_field_is_averaged_with_runs_at_its_default(tmp_path, config):
    (line,) = [
        line for line in versions(tmp_path, config.get_config()).lines if line.kind == 'runs'
    ]
    assert [entry.seed for entry in line.cells[0].entries] == [0, 1]


@pytest.mark.parametrize('change', [{'env.hint': 'plan'}, {'loss.observation_coef': 0.1}])
def test_a_run_from_before_a_field_is_not_one_that_sets_it(tmp_path, change):
    (name,) = change
    with pytest.raises(ValueError, match=f'differ in {name}, not only in their seeds'):
        versions(tmp_path, **change)


@pytest.mark.parametrize(
    'old',
    [
        {'batch.widths': 'x'},
        {'batch.widths': [1]},
        {'env.mix': 5},
        {'clone.steps': int('9' * 400)},
        {'batch': 1},
        {'gone.field': 1},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_read_is_compared_as_it_is(tmp_path, old):
    (name,) = old
    with pytest.raises(ValueError, match=f'differ in .*{name}'):
        versions(tmp_path, old=old)


def test_the_same_config_twice_is_refused(tmp_path):
    for name in 'ab':
        write_run(tmp_path / name, 0, [0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match='runs of the same config: a, b'):
        table_of(tmp_path)


@pytest.mark.parametrize(
    'given, message',
    [
        ({'rows': ''}, 'needs rows'),
        ({'row': 'seed'}, 'a table has no row; it has'),
        ({'at': 'first'}, 'at=first must be'),
        ({'unfinished': 'drop'}, 'unfinished=drop must be'),
        ({'margin': 0.05}, 'margin=0.05 is of differences from a baseline'),
        ({'margin': -1}, 'margin=-1 must be a number, 0 or more'),
        ({'rows': 'env.nam'}, 'has no field env.nam'),
        ({'metric': 'eval/sucess'}, 'no run has the metric eval/sucess'),
        ({'signals': 'policy/kl'}, 'no run has the metric policy/kl'),
        ({'where': {'algorithm': 'dapo'}}, 'none of 11 runs'),
    ],
)
def test_a_table_that_cannot_be_made_says_why(sweep, given, message):
    with pytest.raises(ValueError, match=message):
        table_of(sweep, **given)


def test_folders_without_runs_or_experiments_are_no_success(tmp_path):
    with pytest.raises(FileNotFoundError, match='holds no experiment'):
        tables.rebuild(tmp_path)
    with pytest.raises(FileNotFoundError, match='no runs in .*: a run has run.json'):
        load([tmp_path])


@pytest.mark.parametrize('words', [['--rows=algorithm'], ['--compact'], ['--clones']])
def test_every_folder_that_is_named_must_hold_a_run(sweep, tmp_path, words, capsys):
    """Of two folders one that was misspelt was left out without a word."""
    (tmp_path / 'empty').mkdir()
    wrong = [str(tmp_path / name) for name in ('gone', 'empty')]
    argv = [*words, str(sweep), *wrong, *[str(tmp_path / 'out')] * ('--compact' in words)]
    if '--clones' in words:
        argv = ['--rows=algorithm', '--cols=env.name', '--clones', ','.join(wrong), str(sweep)]
    with pytest.raises(SystemExit) as error:
        tables.main(argv)
    assert error.value.code == 2
    assert f'no runs in {wrong[0]}, {wrong[1]}: a run has' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('name', ['run.json', 'config.json', 'reference.json', 'metrics.jsonl'])
def test_a_broken_file_of_a_run_is_named(tmp_path, name):
    write_run(tmp_path / 'a', 0, [0.1, 0.2, 0.3])
    if name == 'config.json':  # as training leaves it, without a sweep
        (tmp_path / 'a' / 'run.json').unlink()
    (tmp_path / 'a' / name).write_text('{"config"\n{}\n')
    with pytest.raises(ValueError, match=f'a/{name}[:,]') as error:
        load([tmp_path])
    assert '\n' not in str(error.value)


# ---- reading and compacting --------------------------------------------------------------------


def test_axes_are_what_was_spent_before_a_step(sweep):
    (run,) = load([sweep / 'ppo-bandit-0'])
    assert [row['tokens'] for row in run.rows[:3]] == [0, 7, 14]
    np.testing.assert_allclose([row['seconds'] for row in run.rows], 0.3 * np.arange(21))
    assert 'perf/recompiles' not in run.rows[0]


def test_config_json_serves_where_there_is_no_run_json(tmp_path):
    write_run(tmp_path / 'a', 0, [0.1, 0.2, 0.3])
    config = json.loads((tmp_path / 'a' / 'run.json').read_text())['config']
    (tmp_path / 'a' / 'run.json').unlink()
    run_log.write_config(tmp_path / 'a', config | {'model': {'path': '/home/me/weights/Qwen'}})
    (run,) = load([tmp_path / 'a'])
    assert run.fields['env.name'] == 'sokoban' and run.fields['model.path'] == 'Qwen'


def test_numbers_keep_six_digits_and_paths_their_last_name():
    assert rounded(0.123456789) == 0.123457 and rounded(1234567) == 1234567
    assert rounded(1e-9 / 3) == 3.33333e-10 and math.isnan(rounded(math.nan))
    assert flatten({'a': {'b': 1, 'c': '/x/y'}, 'd': 'x/y'}) == {'a.b': 1, 'a.c': 'y', 'd': 'x/y'}


def test_a_compact_folder_gives_the_same_runs_and_tables(sweep, tmp_path):
    runs = load([sweep])
    written = compact(runs, tmp_path / 'metrics')
    assert load([tmp_path / 'metrics']) == runs and len(written) == len(runs) == 11
    common = json.loads((tmp_path / 'metrics' / 'common.json').read_text())['fields']
    assert common == {'steps': 20}
    header = json.loads(written[0].read_text().splitlines()[0])
    assert header['fields'] == {'algorithm': 'grpo', 'env.name': 'bandit', 'seed': 0}
    texts = [render.markdown(table_of(x, baseline='grpo')) for x in (sweep, tmp_path / 'metrics')]
    assert texts[0] == texts[1]
    # Compacting what is compact changes nothing, and runs that are gone disappear.
    before = [path.read_bytes() for path in written[:5]]
    compact(load([tmp_path / 'metrics'])[:5], tmp_path / 'metrics')
    assert [path.read_bytes()[-500:] for path in written[:5]] == [text[-500:] for text in before]
    assert len(list((tmp_path / 'metrics').glob('*.jsonl'))) == 5


def test_compacting_keeps_not_a_number_and_does_not_delete_what_is_not_its_own(tmp_path):
    run = Run('a', {'seed': 0, 'steps': 1}, [{'step': 0, 'x': math.inf}, {'step': 1}], {})
    compact([run], tmp_path)
    assert load([tmp_path]) == [run]
    (tmp_path / 'common.json').unlink()
    with pytest.raises(ValueError, match='holds .jsonl files that are not compacted runs'):
        compact([run], tmp_path)
    with pytest.raises(ValueError, match='several runs are named a'):
        compact([run, run], tmp_path / 'b')


@pytest.mark.parametrize('folder, name', [('.', 'run[01]'), ('run0', 'run0'), ('run1', 'run1')])
def test_runs_are_not_compacted_into_a_sweep_or_a_run(two, folder, name):
    """With the last folder forgotten a sweep became a compact folder, which hid its runs."""
    runs = load([two])
    (two / 'run1' / 'run.json').rename(two / 'run1' / 'config.json')
    before = {path: path.read_bytes() for path in two.rglob('*.*')}
    with pytest.raises(ValueError, match=f'/{name} is a run: .* a folder of their own'):
        compact(runs, two / folder)
    assert before == {path: path.read_bytes() for path in two.rglob('*.*')}


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.slow('draws every figure twice')
def test_the_same_runs_give_the_same_bytes(sweep, tmp_path):
    given = {'baseline': 'grpo', 'overall': True, 'signals': 'group/return_std'}
    written = [tables.write(table_of(sweep, **given), tmp_path / name) for name in 'ab']
    names = [path.name for path in written[0]]
    stems = (
        'curves_step',
        'curves_tokens',
        'signals',
        'forest',
    )  # nobody knows what machines they ran on
    assert names == ['table.md', 'table.tex', 'table.csv', 'runs.csv'] + [
        f'{stem}.{ending}' for stem in stems for ending in ('png', 'svg')
    ]
    for first, second in zip(*written, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_the_forest_has_the_differences_and_the_margin(sweep, tmp_path):
    table = table_of(sweep, baseline='grpo', margin=0.05, overall=True)
    found = forest.differences(table)
    (bandit,), (sokoban,) = found['bandit'], found['sokoban']
    assert [*found] == ['bandit', 'sokoban'] and bandit.row == sokoban.row == 'ppo'
    # .2, .05, .1: 11.67 points, error 100 sqrt(.005833 / 3) = 4.41; Student's t of 2 is 4.303
    np.testing.assert_allclose(bandit[1:], (11.667, -7.306, 30.640), atol=1e-3)
    assert sokoban.mean == pytest.approx(10) and np.isnan(sokoban.low)  # of one pair
    png, svg = forest.write(table, tmp_path)
    assert (png.name, svg.name) == ('forest.png', 'forest.svg') and png.stat().st_size < 60_000
    labels = re.findall(r'<!-- (.*?) -->', svg.read_text())
    assert {'bandit', 'sokoban', 'ppo', 'success less grpo, points'} <= set(labels)
    assert any(label.endswith('grey: ±5') for label in labels) and 'all' not in labels
    returns = table_of(sweep, baseline='grpo', metric='eval/return', where={'env.name': 'bandit'})
    assert forest.differences(returns)['bandit'][0].mean == pytest.approx(7 / 6)  # no share


def test_curves_that_are_drawn_no_more_are_removed(two):
    (two / 'out').mkdir()
    for name in ('curves_seconds.png', 'forest.svg', 'signals.svg', 'curves_notes.txt', 'own.png'):
        (two / 'out' / name).touch()
    tables.write(table_of(two), two / 'out')
    names = {path.name for path in (two / 'out').iterdir()}
    assert {'curves_step.png', 'curves_notes.txt', 'own.png'} <= names
    assert not {'curves_seconds.png', 'signals.svg', 'forest.svg', 'forest.png'} & names
    tables.write(table_of(two, curves=False), two / 'out')  # another table has them
    assert not list((two / 'out').glob('curves_*.png'))


def test_markup_in_a_name_stays_text(sweep):
    hostile = '<script>alert(1)</script>\n[x](javascript:1) &lt;b&gt; < 3'
    table = table_of(sweep, labels={'ppo': hostile}, where={'algorithm': 'ppo', 'seed': '0'})
    text = render.markdown(table)
    assert '<script' not in text and '](' not in text
    assert '| &lt;script>alert(1)&lt;/script> [x]\\(javascript:1) &amp;lt;b&amp;gt; < 3 |' in text
    lines = render.latex(table_of(sweep, labels={'ppo': 'a\n\\input{x}'})).splitlines()
    assert not any(line.startswith('\\input') for line in lines)


def test_all_curves_have_one_range_and_say_how_many_seeds(sweep, tmp_path):
    table = table_of(sweep)
    svgs = [path for path in curves.write(table, tmp_path) if path.suffix == '.svg']
    for svg in svgs:
        labels = re.findall(r'<!-- (.*?) -->', svg.read_text())
        assert 'ppo (n = 3)' in labels and 'grpo (n = 3 | 1 of 3)' in labels
        assert {'random play 0.5', 'random play 0.2', 'oracle 1', 'bandit', 'sokoban'} <= set(
            labels
        )
        assert any('dotted: unfinished' in label for label in labels)


def test_seconds_are_drawn_where_all_runs_had_one_machine(two):
    """Seconds of different machines were one axis."""

    def axes():
        drawn = curves.write(table_of(two), two / 'out')
        return sorted({path.stem for path in drawn})

    def note(seed, machine):
        path = two / f'run{seed}' / 'config.json'
        path.write_text(json.dumps({'config': {}, 'machine': machine}))

    assert axes() == ['curves_step', 'curves_tokens']
    note(0, '1 x a')
    assert 'curves_seconds' not in axes()
    note(1, '1 x a')
    assert 'curves_seconds' in axes()
    compact(load([two]), two / 'metrics')
    assert load([two / 'metrics']) == load([two])
    for other in ('1 x b', '1 x a; 1 x b'):
        note(1, other)
        assert 'curves_seconds' not in axes()


def test_the_command_line(sweep, tmp_path, capsys):
    out = tmp_path / 'out'
    tables.main(
        [
            str(sweep),
            '--rows=algorithm',
            '--cols=env.name',
            f'--out={out}',
            '--where=env.name=bandit|sokoban',
            '--where=algorithm=ppo',
        ]
    )
    printed = capsys.readouterr().out
    assert printed == (out / 'table.md').read_text()
    assert '| ppo |' in printed and 'grpo' not in printed.split('\n- ')[0]
    tables.main(['--compact', str(sweep), str(tmp_path / 'metrics')])
    assert capsys.readouterr().out.startswith('11 runs, ')
    for wrong in (
        ['--rows=', str(sweep)],
        ['--compact', str(sweep)],
        ['--rows=a', '--where=b', '.'],
        ['--rows=seed', '--where=seed=0', '--where=seed=1', str(sweep)],
        ['--compact', '--where=seed=0', str(sweep), str(tmp_path / 'some')],
    ):
        with pytest.raises(SystemExit) as error:
            tables.main(wrong)
        assert error.value.code == 2


def test_tables_may_be_written_to_a_bucket(sweep, tmp_path, monkeypatch):
    """They went to a folder named gs: on the disk of this machine."""
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'b').symlink_to('disk')
    monkeypatch.setenv('AGENTRL_GCS', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(curves, 'write', lambda table, folder, endings: [])
    tables.main(['--compact', str(sweep), 'gs://b/kept'])
    tables.main(['--rows=algorithm', '--cols=env.name', '--out=gs://b/out', 'gs://b/kept'])
    assert (tmp_path / 'disk' / 'out' / 'table.md').exists()
    assert {path.name for path in tmp_path.iterdir()} == {'disk', 'b'}


# ---- committed experiments ---------------------------------------------------------------------


@pytest.mark.parametrize(
    'clones, message',
    [
        ('nobody', 'nobody/metrics holds no runs'),
        ('../try', 'must be different names of experiments'),
        ('try,try', 'must be different names of experiments'),
    ],
)
def test_clones_that_are_no_experiment_are_refused(sweep, tmp_path, clones, message):
    compact(load([sweep]), tmp_path / 'try' / 'metrics')
    spec = {'main': {'rows': 'algorithm', 'cols': 'env.name', 'clones': clones}}
    (tmp_path / 'try' / 'table.json').write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=f'table.json, main: .*{message}'):
        tables.rebuild(tmp_path)


def test_clones_that_see_something_else_are_said(sweep, clones):
    spec = tables.make_spec({'rows': 'algorithm', 'cols': 'env.name', 'clones': str(clones)})
    runs = [run._replace(fields=run.fields | {'sokoban.num_boxes': 3}) for run in load([sweep])]
    assert 'sees what these runs see' in render.markdown(build(runs, spec, load([clones])))


def test_rebuilding_writes_tables_into_the_readme(sweep, tmp_path, monkeypatch):
    compact(load([sweep]), tmp_path / 'try' / 'metrics')
    spec = {
        'main': {'rows': ['algorithm'], 'cols': ['env.name']},
        'one': {'rows': 'env.name,algorithm'},
    }
    (tmp_path / 'try' / 'table.json').write_text(json.dumps(spec))
    readme = tmp_path / 'try' / 'README.md'
    readme.write_text('Before\n<!-- table main -->\nold\n<!-- end of table -->\nAfter\n')
    (tmp_path / 'try' / 'one').mkdir()
    (tmp_path / 'try' / 'one' / 'curves_step.svg').touch()  # what a README shows is enough
    written = tables.rebuild(tmp_path)
    assert readme in written and (tmp_path / 'try' / 'one' / 'curves_step.png') in written
    assert not list(tmp_path.rglob('*.svg'))
    text, table = readme.read_text(), (tmp_path / 'try' / 'main' / 'table.md').read_text()
    assert text == f'Before\n<!-- table main -->\n{table}<!-- end of table -->\nAfter\n'
    monkeypatch.setattr(curves, 'write', lambda table, folder, endings: [])
    tables.rebuild(tmp_path)
    assert readme.read_text() == text


def test_one_experiment_is_rebuilt_from_its_own_folder(sweep, tmp_path, monkeypatch, capsys):
    """`--rebuild experiments/demonstrations_tiny` said that it holds no experiment."""
    for name in ('one', 'two'):
        compact(load([sweep]), tmp_path / name / 'metrics')
        spec = {'main': {'rows': 'algorithm', 'cols': 'env.name', 'clones': 'two'}}
        (tmp_path / name / 'table.json').write_text(json.dumps(spec))
    for here, given in ((tmp_path, 'one'), (tmp_path / 'one', '.'), (tmp_path, 'one/')):
        monkeypatch.chdir(here)
        tables.main(['--rebuild', given])
        (path,) = (x for x in capsys.readouterr().out.split() if x.endswith('main/table.md'))
        assert (here / path).samefile(tmp_path / 'one' / 'main' / 'table.md')
    assert not (tmp_path / 'two' / 'main').exists()


assert ROOT / 'experiments' / 'demo_cloned' / 'table.json' in EXPERIMENTS
SMALL = ('demo_cloned', 'algorithms', 'smollm2')  # the others take longer to draw


@pytest.mark.slow('draws every committed curve')
@pytest.mark.parametrize(
    'path',
    [
        pytest.param(path, marks=[] if path.parent.name in SMALL else pytest.mark.soak)
        for path in EXPERIMENTS
    ],
    ids=lambda path: path.parent.name,
)
def test_committed_tables_are_what_their_metrics_give(path, tmp_path):
    """Texts byte for byte. PNGs by pixels: how they are compressed varies by machine."""
    folder = path.parent
    copy = tmp_path / folder.name
    copy.mkdir()
    for name in (tables.SPEC_FILE, 'README.md'):
        (copy / name).write_bytes((folder / name).read_bytes())
    shown = json.loads((folder / tables.SPEC_FILE).read_text()).values()
    for name in {folder.name, *(table['clones'] for table in shown if 'clones' in table)}:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / 'metrics').symlink_to(folder.parent / name / 'metrics')
    for made in tables.rebuild(tmp_path):
        committed = folder / made.relative_to(copy)
        assert committed.is_file(), f'{committed} is missing: make tables'
        if made.suffix == '.png':
            images = [matplotlib.image.imread(image) for image in (made, committed)]
            np.testing.assert_array_equal(*images, err_msg=f'{committed}: make tables')
        else:
            assert made.read_bytes() == committed.read_bytes(), f'{committed}: make tables'
