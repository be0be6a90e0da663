"""Readers of untrusted files either work or raise an error, for any JSON content.

The error must be a one-line ValueError that names the file. Anything else (TypeError, a hang, a
RecursionError) fails here.
"""

import copy
import functools
import json

import pytest
import tiny_agents as tiny
from test_trajectories import record
from test_view import document, episode, reply, turn

from agentrl_jax import tables
from agentrl_jax.imitation import trajectories
from agentrl_jax.records import document as documents
from agentrl_jax.records.page_html import render_page
from agentrl_jax.results import render
from agentrl_jax.results.cells import build
from agentrl_jax.results.runs import load
from agentrl_jax.rollout import replies

DEEP = functools.reduce(lambda inner, _: {'a': [inner]}, range(400), 'x')


WRONG = [None, -1, float('nan'), 10**320, '\ud800', 'a\nb', [], {}, DEEP]


def corruptions(good):
    """Yield wrong JSON values, then the good value with one part replaced by each of them."""
    yield from WRONG
    if isinstance(good, dict | list):
        for key in good if isinstance(good, dict) else range(len(good)):
            for value in WRONG:
                changed = copy.copy(good)
                changed[key] = value
                yield changed


def read_or_reject(read, *names):
    """Return read(), or None if it raises a one-line ValueError that contains one of the names."""
    try:
        return read()
    except ValueError as error:
        message = str(error)
        assert any(name in message for name in names) and '\n' not in message, message
        assert not isinstance(error, UnicodeError), message
        return None


WORLDS = {'replies': 1, 'seconds': 0.5, 'slowest': 0.5, 'retries': 0, 'faults': 0}
PAGE = document(
    episode(replies=[reply(text='said')]),
    episode(row=13, turns=[turn(grid=None)]),
    title='page',
    worlds=WORLDS,
)


def test_rollout_documents(tmp_path):
    path = tmp_path / 'page.json'
    for value in (document(episode(turns=None)), *corruptions(PAGE)):
        path.write_text(json.dumps(value))
        page = read_or_reject(lambda: documents.read(path), 'page.json')
        if page is not None:
            render_page(page).encode('utf-8')


CONFIG = {'seed': 0, 'steps': 1, 'algorithm': 'ppo', 'env': {'name': 'bandit'}}
REFERENCE = {'random': 0.5, 'oracle': 1.0}
ROWS = [
    {'step': 0, 'time_s': 1.0, 'eval/success': 0.5, 'perf/tokens_per_s': 7.0, 'time/step_s': 1.0},
    {'step': 1, 'time_s': 2.0, 'eval/success': 0.75, 'eval/valid_format': 1.0},
]
GOOD_RUN = {'run': {'config': CONFIG}, 'reference': REFERENCE, 'rows': ROWS, 'end': {'step': 1}}


def write_run(folder, *, run, reference, rows, end):
    folder = folder / 'a run'
    folder.mkdir(exist_ok=True)
    (folder / 'run.json').write_text(json.dumps(run))
    (folder / 'reference.json').write_text(json.dumps(reference))
    lines = [json.dumps(row) for row in rows] if isinstance(rows, list) else [str(rows)]
    (folder / 'metrics.jsonl').write_text('\n'.join([*lines, '']), errors='replace')
    (folder / 'finished.json').write_text(json.dumps(end))


def show(folder):
    """Render the table of the runs in a folder in every format."""
    spec = tables.make_spec({'rows': 'algorithm', 'cols': 'env.name'})
    table = build(load([folder]), spec)
    forms = (render.markdown, render.latex, render.csv_text, render.runs_csv)
    return [form(table).encode('utf-8') for form in forms]


def test_runs(tmp_path):
    write_run(tmp_path, **GOOD_RUN)
    show(tmp_path)
    cases = [{name: value} for name, good in GOOD_RUN.items() for value in corruptions(good)]
    for changes in cases:
        write_run(tmp_path, **GOOD_RUN | changes)
        read_or_reject(lambda: show(tmp_path), 'a run')


RECORDS = [record('P\n', 'Up'), record('O\n', '<think>x</think>', 'P\n', 'Left')]


@pytest.mark.parametrize('name', ['a.json', 'a.jsonl'])
def test_trajectories(tmp_path, name):
    path = tmp_path / name
    for value in (*corruptions(RECORDS), *([one] for one in corruptions(RECORDS[0]))):
        lines = value if isinstance(value, list) and name == 'a.jsonl' else [value]
        path.write_text('\n'.join(map(json.dumps, lines)))
        records = read_or_reject(lambda: trajectories.read_records(path), name)
        if records:
            trajectories.demonstrations_of(
                records, tiny.tokenizer(), openings=('<think>',), max_tokens=10_000
            )


LINE = (
    dict.fromkeys(('step', 'stream', 'trial', 'turn', 'item', 'action'), 0)
    | {'split': 'train', 'observation': 'O', 'instruction': '', 'reward': 0.5, 'done': False}
    | {'success': None, 'figures': [], 'fault': '', 'seconds': 0.25, 'tries': 1}
    | {'valid': None, 'messages': None, 'offers': [], 'cuts': 0}
)
DAMAGED_LINES = [
    b'{"step": "\xff"}',
    b'{"step": 0',
    json.dumps(LINE | {'reward': float('nan')}).encode(),
]


def test_a_damaged_log_of_replies_is_set_aside_by_a_run_and_rejected_by_a_replay(tmp_path):
    good, path = json.dumps(LINE).encode(), tmp_path / 'replies.jsonl'
    for number, damage in enumerate(DAMAGED_LINES, 1):
        written = b'\n'.join([good, damage, good, b''])
        path.write_bytes(written)
        with pytest.raises(ValueError, match='replies.jsonl, line 2: '):
            replies.read_log(path)
        aside = replies.cut(path, 1)
        assert aside == tmp_path / f'replies.damaged_{number}.jsonl' and not path.exists()
        assert aside.read_bytes() == written


def test_an_undamaged_log_of_replies_is_truncated_in_place(tmp_path, capsys):
    path = tmp_path / 'replies.jsonl'
    assert replies.cut(path, 0) is None
    rows = [LINE | {'step': step} for step in (0, 1, 2)]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows) + '{"step": 2, "str')
    assert replies.cut(path, 2) is None
    assert replies.read_log(path) == rows[:2] and not capsys.readouterr().err
