"""Readers of files that anybody may have written: whatever JSON is inside, it works or is refused.

Refused is a ValueError of one line that names the file. Everything else (TypeError, a hang, a
RecursionError) fails here.
"""

import copy
import functools
import json
import os
import pathlib
import tempfile

import fuzz_files
import pytest
import tiny_agents as tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_trajectories import record
from test_view import document, episode, reply, turn

from agentrl_jax import tables
from agentrl_jax.imitation import trajectories
from agentrl_jax.records import document as documents
from agentrl_jax.records import run_log
from agentrl_jax.records.page_html import render_page
from agentrl_jax.results import render
from agentrl_jax.results.cells import build
from agentrl_jax.results.runs import compact, load
from agentrl_jax.rollout import replies

SURROGATES = st.sampled_from(['\ud800', 'x\udfff', '\ud83d\ude00'])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**15, 10**320)
    | st.floats()
    | st.text(max_size=5)
    | SURROGATES
    | st.sampled_from(['nan', 'inf', '-inf', 'gpt', '<script>', 'a\nb', '../..'])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
DEEP = '400 levels deep'  # stands for them: hypothesis prints its examples, and cannot print those
LEVELS = functools.reduce(lambda inner, _: {'a': [inner]}, range(400), 'x')
FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def paths_of(value, path=()):
    """Paths of all values inside a JSON value, its own included."""
    yield path
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in inner:
            yield from paths_of(part, (*path, key))


@st.composite
def spoiled(draw, good):
    """A good JSON value with one or two of its parts replaced, or one field taken away."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 2))):
        *above, last = draw(st.sampled_from([path for path in paths_of(value) if path] or [(0,)]))
        if not isinstance(value, dict | list) or not value:
            return draw(JSON)
        parent = functools.reduce(lambda part, key: part[key], above, value)
        if isinstance(parent, dict) and draw(st.booleans()):
            del parent[last]
        else:
            parent[last] = draw(JSON)
    return value


def text_of(value):
    return json.dumps(value).replace(json.dumps(DEEP), json.dumps(LEVELS))


def refused_or(read, *names):
    """What `read` returns; None where it refuses with a line that has one of the names in it."""
    try:
        return read()
    except ValueError as error:
        said = str(error)
        assert any(name in said for name in names) and '\n' not in said, said
        assert not isinstance(error, UnicodeError), said
        return None


@pytest.fixture
def folder(tmp_path):
    """A folder for each example: hypothesis calls a test many times with one tmp_path."""
    return lambda: pathlib.Path(tempfile.mkdtemp(dir=tmp_path))


# ---- pages -------------------------------------------------------------------------------------

WORLDS = {'replies': 1, 'seconds': 0.5, 'slowest': 0.5, 'retries': 0, 'faults': 0}
PAGE = document(
    episode(replies=[reply(text='said')]),
    episode(row=13, turns=[turn(grid=None)]),
    title='page',
    worlds=WORLDS,
)


@FUZZ
@given(spoiled(PAGE) | JSON)
@example(document(episode(turns=None)))
@example(document(episode(), about=DEEP))
@example({'version': 1, 'title': '', 'env': '', 'episodes': [{'turns': None}]})
def test_rollout_documents(folder, value):
    path = folder() / 'page.json'
    path.write_text(text_of(value))
    found = refused_or(lambda: documents.read(path), 'page.json')
    if found is not None:
        render_page(found).encode('utf-8')


# ---- runs --------------------------------------------------------------------------------------

CONFIG = {'seed': 0, 'steps': 1, 'algorithm': 'ppo', 'env': {'name': 'bandit'}}
REFERENCE = {'random': 0.5, 'oracle': 1.0}
ROWS = [
    {'step': 0, 'time_s': 1.0, 'eval/success': 0.5, 'perf/tokens_per_s': 7.0, 'time/step_s': 1.0},
    {'step': 1, 'time_s': 2.0, 'eval/success': 0.75, 'eval/valid_format': 1.0},
]


def write_run(folder, config, reference, rows, finished):
    run = folder / 'a run'
    run.mkdir()
    (run / 'run.json').write_text(text_of(config))
    (run / 'reference.json').write_text(text_of(reference))
    lines = ''.join(text_of(row) + '\n' for row in rows) if isinstance(rows, list) else str(rows)
    (run / 'metrics.jsonl').write_text(lines, errors='replace')
    (run / 'finished.json').write_text(text_of(finished))


def show(folder):
    """Every form of the table of the runs in a folder."""
    spec = tables.make_spec({'rows': 'algorithm', 'cols': 'env.name'})
    table = build(load([folder]), spec)
    forms = (render.markdown, render.latex, render.csv_text, render.runs_csv)
    return [form(table).encode('utf-8') for form in forms]


@FUZZ
@given(
    st.one_of(
        st.tuples(
            spoiled({'config': CONFIG}) | JSON, st.just(REFERENCE), st.just(ROWS), st.just({})
        ),
        st.tuples(st.just({'config': CONFIG}), spoiled(REFERENCE) | JSON, spoiled(ROWS), JSON),
        st.tuples(st.just({'config': CONFIG}), st.just(REFERENCE), spoiled(ROWS) | JSON, st.none()),
    )
)
@example(({'config': DEEP}, REFERENCE, ROWS, {'step': 1}))
@example(({'config': CONFIG | {'seed': [0]}}, REFERENCE, ROWS, {'step': 1}))
@example(({'config': CONFIG}, REFERENCE, [ROWS[0] | {'a\n': 'b'}], {'step': 1}))
@example(({'config': CONFIG | {'steps': 'many'}}, REFERENCE, ROWS, {'step': 1}))
@example(({'config': CONFIG}, REFERENCE, [ROWS[0] | {'time/step_s': 'inf'}, ROWS[1]], {'step': 1}))
def test_runs(folder, files):
    place = folder()
    write_run(place, *files)
    refused_or(lambda: show(place), 'a run')


HEADER = {
    'fields': {'seed': 0, 'algorithm': 'ppo'},
    'reference': REFERENCE,
    'columns': ['step', 'seconds', 'eval/success'],
}
COMMON = {'fields': {'steps': 1, 'env.name': 'bandit'}}
LINES = [HEADER, [0, 0.0, 0.5], [1, 1.0, 0.75]]


@FUZZ
@given(spoiled(COMMON) | st.just(COMMON), spoiled(LINES) | JSON)
@example(COMMON, [HEADER | {'columns': 'step'}, [0]])
@example(COMMON, [HEADER, [0, 0.0, 0.5], [1, None, {}]])
def test_compact_folders(folder, common, lines):
    place = folder()
    (place / 'common.json').write_text(text_of(common))
    text = '\n'.join(map(text_of, lines)) if isinstance(lines, list) else text_of(lines)
    (place / 'seed_0.jsonl').write_text(text)
    refused_or(lambda: show(place), place.name, 'run seed_0 ')


SPEC = {
    'table': {
        'rows': ['algorithm'],
        'cols': 'env.name',
        'also': ['eval/valid_format'],
        'where': {'algorithm': 'ppo|grpo'},
        'labels': {'ppo': 'PPO'},
        'published': {'PPO': {'bandit': '12.1'}},
        'at': 'last',
        'seeds': 3,
        'overall': True,
        'curves': True,
        'baseline': 'PPO',
    }
}


@FUZZ
@given(spoiled(SPEC) | JSON)
@example({'../elsewhere': SPEC['table']})
@example({'table': {'rows': 5}})
@example({'table': SPEC['table'] | {'rows': '0\n0'}})
@example({'table': SPEC['table'] | {'at': '2' * 5000}})
def test_descriptions_of_tables(folder, value):
    place = folder()
    write_run(place, {'config': CONFIG}, REFERENCE, ROWS, {'step': 1})
    compact(load([place]), place / 'try' / 'metrics')
    (place / 'try' / 'table.json').write_text(text_of(value))
    before = set(place.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables.curves, 'write', lambda table, folder, endings: [])
        refused_or(lambda: tables.rebuild(place), 'table.json')
    assert set(place.iterdir()) == before  # nothing is written beside the experiment


# ---- trajectories ------------------------------------------------------------------------------

RECORDS = [record('P\n', 'Up'), record('O\n', '<think>x</think>', 'P\n', 'Left')]


@FUZZ
@given(spoiled(RECORDS) | JSON, st.sampled_from(['a.json', 'a.jsonl']))
@example([record('P\n', 'Up') | {'item_id': ['x' * 1000]}], 'a.json')
@example([{'item_id': 'a', 'conversations': [{'from': [1], 'loss': None, 'value': ''}]}], 'a.json')
@example([record('P\n', 'Up \ud800')], 'a.jsonl')
@example(DEEP, 'a.jsonl')
def test_trajectories(folder, value, name):
    path = folder() / name
    lines = value if isinstance(value, list) and name == 'a.jsonl' else [value]
    path.write_text('\n'.join(map(text_of, lines)))
    found = refused_or(lambda: trajectories.read_records(path), name)
    if found:
        trajectories.demonstrations_of(
            found, tiny.tokenizer(), openings=('<think>',), max_tokens=10_000
        )


# ---- models, tokenizers, templates and replies ------------------------------------------------


@pytest.fixture(scope='module')
def files_to_spoil(tmp_path_factory):
    return fuzz_files.Fuzz(tmp_path_factory.mktemp('spoiled'))


@pytest.mark.parametrize('turn', range(4))
def test_files_of_models_and_replies_are_loaded_or_refused_in_a_line(files_to_spoil, turn):
    """Some of those that `python tests/fuzz_files.py` tries, but for templates without end."""
    count = len(fuzz_files.KINDS)
    found = [files_to_spoil.try_one(number) for number in range(turn * count, (turn + 1) * count)]
    assert not fuzz_files.failures(found), fuzz_files.failures(found)
    assert {one['kind'] for one in found} == set(fuzz_files.SHARES)
    assert {one['outcome'] for one in found} == {'loaded', 'refused'}


@pytest.mark.soak
def test_two_thousand_files_are_loaded_or_refused_in_a_line():
    found = fuzz_files.run(2000)
    assert not fuzz_files.failures(found), fuzz_files.table(found)


LINE = {
    'step': 0,
    'split': 'train',
    'stream': 0,
    'trial': 0,
    'turn': 0,
    'item': 0,
    'action': 0,
    'observation': 'O',
    'instruction': '',
    'reward': 0.0,
    'done': False,
    'success': None,
    'figures': [],
    'fault': '',
    'seconds': 0.5,
    'tries': 1,
}
DAMAGED_LINES = {
    'a byte that is no text': (b'{"step": "\xff"}', 'no UTF-8 text'),
    'a line without a step': (
        json.dumps({k: v for k, v in LINE.items() if k != 'step'}).encode(),
        'no object with a step',
    ),
    'a line that is no object': (b'[0]', 'no object with a step'),
    'broken JSON': (b'{"step": 0', 'broken JSON'),
    'another type': (json.dumps(LINE | {'turn': 'x'}).encode(), 'turn is no part of a reply'),
    'nan': (json.dumps(LINE | {'reward': float('nan')}).encode(), 'no finite number'),
    'half a character': (json.dumps(LINE | {'observation': '\ud800'}).encode(), 'half of a surro'),
}


@pytest.mark.parametrize('name', DAMAGED_LINES)
def test_a_damaged_log_of_replies_is_set_aside_by_a_run_and_refused_by_a_replay(
    tmp_path, capsys, name
):
    """No run needs it, and every run stopped at it, some without the file's name."""
    damage, said = DAMAGED_LINES[name]
    good = json.dumps(LINE).encode()
    path = tmp_path / 'replies.jsonl'
    for number in (1, 2):
        path.write_bytes(b'\n'.join([good, damage, good, b'']))
        with pytest.raises(ValueError, match=f'replies.jsonl, line 2: .*{said}'):
            replies.choose(path, {'step': 0, 'split': 'train'})
        aside = replies.cut(path, 1)
        assert aside == tmp_path / f'replies.damaged_{number}.jsonl' and not path.exists()
        assert aside.read_bytes() == b'\n'.join([good, damage, good, b''])
        told = capsys.readouterr().err
        assert told.startswith(f'WARNING: {path}, line 2: ') and aside.name in told
        assert told.count('\n') == 1
    log = replies.ReplyLog(path)  # where the run goes on
    log.close()
    assert replies.newest(path, 0) == []


def test_a_whole_log_of_replies_is_cut_and_kept(tmp_path, capsys):
    path = tmp_path / 'replies.jsonl'
    assert replies.cut(path, 0) is None
    rows = [LINE | {'step': step} for step in (0, 1, 2)]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows) + '{"step": 2, "str')
    assert replies.cut(path, 2) is None
    kept = [row | {'valid': None} for row in rows[:2]]  # a field that came later
    assert replies.read_log(path) == kept and not capsys.readouterr().err


# ---- what is no regular file -------------------------------------------------------------------


@pytest.mark.parametrize(
    'name', ['run.json', 'config.json', 'reference.json', 'metrics.jsonl', 'finished.json']
)
def test_a_pipe_among_the_files_of_a_run_is_refused_or_passed_over(tmp_path, name):
    """Nobody writes into it: it was waited for for ever."""
    write_run(tmp_path, {'config': CONFIG}, REFERENCE, ROWS, {'step': 1})
    run_log.write_config(tmp_path / 'a run', CONFIG)
    (tmp_path / 'a run' / name).unlink()
    os.mkfifo(tmp_path / 'a run' / name)
    with pytest.raises(ValueError, match=f'{name} is no regular file'):
        load([tmp_path])


def test_a_pipe_in_a_compact_folder_is_refused(tmp_path):
    (tmp_path / 'common.json').write_text(text_of(COMMON))
    os.mkfifo(tmp_path / 'seed_0.jsonl')
    with pytest.raises(ValueError, match='seed_0.jsonl is no regular file'):
        load([tmp_path])
