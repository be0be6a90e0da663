"""The rollout page and the live page: content, escaping and server."""

import json
import math
import os

import pytest
from fastapi.testclient import TestClient
from test_documents import Page, small_document
from waiting import until

from agentrl_jax import view
from agentrl_jax.machine import lock
from agentrl_jax.records import document as documents
from agentrl_jax.records import live_charts, live_page, live_server, run_log
from agentrl_jax.records.page_html import MAX_TOKENS, render_page
from agentrl_jax.records.progress import beacon
from agentrl_jax.run.config import effective
from configs import demo_cloned

HOSTILE = (
    '<script>alert(1)</script>',
    '</pre></details></body><img src=x onerror=alert(2)>',
    '" onmouseover="alert(3)',
    "' autofocus onfocus='alert(4)",
    '&lt;b&gt; &#60;i&#62; ]]> <!-- <style>*{display:none}</style>',
    'right\u202eto\u2066left\u200bzero\ufeff',
    'control\x00\x07\x1b[31m\x7f\x9b\r',
    'lone \ud800 surrogate \udfff',
    '\u2028\u2029\U000e0041',
    '$title $$ ${episodes} {0} %s',
)
DOCUMENT = small_document(group_size=2)
EPISODE = DOCUMENT['episodes'][0]


def document(*episodes, **changes):
    return DOCUMENT | {'episodes': list(episodes)} | changes


def episode(**changes):
    return EPISODE | changes


def turn(**changes):
    return EPISODE['turns'][0] | changes


def token(s='a', **changes):
    return EPISODE['tokens'][2] | {'s': s} | changes


def reply(turn=1, **changes):
    return {'turn': turn, 'seconds': 0.25, 'tries': 1, 'fault': '', 'text': ''} | changes


# ---- rollout page --------------------------------------------------------------------------------


@pytest.mark.parametrize('text', HOSTILE)
def test_the_rollout_page_escapes_all_text_and_loads_nothing(text):
    def render(text):
        turns = [turn(stop=text, actions=[text], grid=[['wall', text], ['box', 'x']])]
        changed = EPISODE | {
            'episode_stop': text,
            'turns': turns,
            'tokens': [EPISODE['tokens'][0] | {'s': text}, token(text)],
            'replies': [reply(2, text=text), reply(3, fault=text)],
        }
        return render_page(document(changed, title=text, env=text, about={'model': text}))

    page, clean = Page(render(text)), Page(render('clean'))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in clean.elements]
    assert page.duplicates == [] and not {'script', 'img', 'link'} & {t for t, _ in page.elements}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith('on') or name == 'autofocus']
        assert not {'src', 'action', 'srcset'} & attributes.keys()
    visible = ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    assert page.text.count(visible) >= 6


def test_the_rollout_page_shows_its_figures():
    counts = {'episodes': 256, 'faulty': 6, 'solved': 50, 'turns': 500, 'invalid': 125}
    episodes = [
        EPISODE | {'turns': [turn(), turn(index=1, part='plan', actions=[], staleness=2)]},
        EPISODE | {'row': 1, 'episode_stop': 'env_error', 'replies': [reply(2, fault='lost')]},
        EPISODE | {'row': 2, 'group': 3, 'turns': [turn(valid=None)], 'final_grid': [['goal']]},
    ]
    groups = [DOCUMENT['groups'][0] | {'episodes': 4, 'advantages': 1.5}]
    doc = document(*episodes, every=128, totals=DOCUMENT['totals'] | counts, groups=groups)
    text = ' '.join(Page(render_page(doc, links={'step 1': 'step_000001.html'})).text.split())
    for words in (
        *('20.0 %', '50 of 250', '125 of 500 turns', 'one in 128; 253 are left out', 'step 1'),
        *('1 of 4 solved', 'return 0.4 ± 0.71', 'advantages 1.5 apart', '2 of 4 shown'),
        *('plan', 'weights of 2 updates ago', 'lost', 'faulty', 'the world at the end'),
    ):
        assert words in text, words
    assert 'shows 1 of them' in render_page(doc, max_episodes=1)
    long = episode(tokens=[token()] * (MAX_TOKENS // 2 + 1))
    assert render_page(document(long, long)).count('class="episode ') == 1


def test_tokens_carry_their_numbers_and_a_class_for_each_heat_map():
    tokens = [
        token(lp=-0.005, ratio=1.0, adv=2.0),
        token(lp=-20.0, ratio=0.5, adv=-1.2),
        token(lp=-0.2, ratio=None, adv=None),
    ]
    page = Page(render_page(document(episode(tokens=tokens))))
    spans = [a for a in page.having('t') if 'title' in a]
    # -log p: 0.005 below the first edge, 20 above the last; |log 0.5| = 0.69; |-1.2 / 2| = 0.6.
    assert [a['class'] for a in spans] == ['t l0 rp0 ap4', 't l7 rn4 an3', 't l2']
    assert spans[1]['title'] == 'token 1; log p -20 (p 2.06e-09); ratio 0.5; advantage -1.2'


@pytest.mark.parametrize(
    'wrong, field',
    [
        ([], r'is \[\]'),
        ({'version': 2}, ': version'),
        (document(episode(level=10**30)), ': episodes.0.level'),
        (document(episode(turns=[turn(grid=[3])])), ': episodes.0.turns.0.grid.0'),
        (document(EPISODE, episode(tokens=[token(lp='low')])), ': episodes.1.tokens.0.lp'),
    ],
)
def test_wrong_documents_name_the_field(wrong, field):
    with pytest.raises(ValueError, match=f'document ?{field}'):
        documents.check(wrong)


# ---- live page -----------------------------------------------------------------------------------


def row(step, **changes):
    metrics = {'step': step, 'time_s': 2.0 * step + 1, 'progress/tokens': 1000 * (step + 1)}
    metrics |= {'rollout/success': 0.3 + 0.01 * step, 'optim/lr': 1e-6}
    if step % 2 == 0:
        metrics |= {'eval/success': 0.4, 'eval/success_low': 0.3, 'eval/success_high': 0.5}
    return metrics | {name.replace('__', '/'): value for name, value in changes.items()}


def make_run(folder, steps=5, pages=(), **changes):
    (folder / 'rollouts').mkdir(parents=True)
    cfg = effective(demo_cloned.get_config())
    run_log.write_config(folder, cfg, ['train.py', '--config=configs/demo.py'])
    (folder / run_log.REFERENCE_FILE).write_text('{"random": 0.25, "oracle": 1.0}')
    rows = ''.join(run_log.json_line(row(step, **changes)) for step in range(steps))
    (folder / run_log.METRICS_FILE).write_text(rows)
    for name in pages:
        (folder / 'rollouts' / name).write_text(f'<p>{name}</p>')
    return folder


def live(folder, x='step', others=()):
    others = [live_page.read(other) for other in others]
    return live_page.render(live_page.read(folder), others, 0, x)


@pytest.mark.parametrize('x', ['step', 'tokens', 'seconds'])
def test_the_live_page_shows_its_figures(tmp_path, x):
    names = ('step_000001.html', 'no "page.html')
    folder = make_run(tmp_path / 'a', 40, names, rollout__token_budget_stop=0.5)
    text = Page(live(folder, x, [make_run(tmp_path / 'b')])).text
    for words in (
        *('StarPO-S on frozen_lake', '40 of 200', '40.0 % 30.0 to 50.0', 'random 0.25', '69 %'),
        *('alarm: episodes cut by', 'step 1', 'stopped'),
    ):
        assert words in ' '.join(text.split()), words
    assert 'no "page' not in text
    page = Page(live(make_run(tmp_path / 'c'), x, [tmp_path / 'b']))
    charts = {a['aria-label'].split(':')[0]: a for a in page.having('chart')}
    marks = [mark.split(',') for mark in charts['eval/success']['data-points'].split(' ')]
    # Validation is the first part of a step, so it is drawn where its step starts.
    starts = {'step': ['0', '2', '4'], 'tokens': ['0', '2000', '4000'], 'seconds': ['0', '3', '7']}
    assert [mark[2:] for mark in marks] == [[start, '0.4'] for start in starts[x]]
    assert [len(page.having(css)) for css in ('band', 'reference', 'line o0')] == [1, 2, 0]
    assert len(page.having('other')) == 1


@pytest.mark.parametrize('text', [text for text in HOSTILE if '\ud800' not in text])
def test_the_live_page_escapes_all_text(tmp_path, text):
    def render(name, text):
        folder = make_run(tmp_path / name)
        path = folder / run_log.CONFIG_FILE
        record = json.loads(path.read_text())
        record |= {'commit': text, 'machine': text, 'argv': [text, f'--config={text}']}
        record['config']['env']['name'] = text
        path.write_text(json.dumps(record))
        with (folder / run_log.METRICS_FILE).open('a') as file:
            file.write(json.dumps(row(5) | {f'a/{text}': 1}) + '\n')
        return Page(live(folder))

    page, clean = render('a', text), render('b', 'clean')
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in clean.elements]
    assert not [n for _, a in page.elements for n in a if n.startswith('on') or n == 'autofocus']


@pytest.mark.parametrize('text', ['5', '{"a": 1}', 'null', '{"config": {"steps": "x"}}', '{"a'])
def test_broken_files_break_no_page(tmp_path, text):
    folder = make_run(tmp_path / 'a')
    for name in (run_log.CONFIG_FILE, run_log.REFERENCE_FILE):
        (folder / name).write_text(text)
    assert bool(live_page.read(folder).problems) == (text == '{"a') and Page(live(folder)).text
    (folder / run_log.METRICS_FILE).write_text('{"step": 5, "time_s": "<i>"}\n')
    assert "'time_s' is not a number" in Page(live(folder)).text


def test_the_state_of_a_run(tmp_path):
    folder = make_run(tmp_path / 'a')
    handle = lock.take(folder)
    assert live_page.read(folder).state == 'training'
    lease = json.loads((folder / lock.LEASE_FILE).read_text())
    handle.release()
    assert live_page.read(folder).state == 'stopped'
    (folder / lock.LEASE_FILE).write_text(json.dumps(lease | {'host': 'tpu-0', 'kernel': 'x'}))
    assert live_page.read(folder).state == 'training on tpu-0'
    (folder / lock.LEASE_FILE).unlink()
    run_log.write_finished(folder, 5)
    assert live_page.read(folder).state == 'finished'
    with (folder / run_log.METRICS_FILE).open('a') as file:
        file.write(run_log.json_line(row(5)) + '{"step": 6, "ti')
    assert len(live_page.read(folder).rows) == 6
    assert live_page.is_run(folder) and not live_page.is_run(tmp_path)


def test_the_beacon_writes_the_activity_of_a_live_run(tmp_path):
    folder, now = make_run(tmp_path / 'a'), {'worlds': {'waited for': 7, 'slowest': '<b>'}}
    handle = lock.take(folder)
    with beacon(folder, lambda: now, every_s=0.01):
        until(lambda: 'worlds in flight waited for 7' in Page(live(folder)).text)
    handle.release()
    assert not (folder / run_log.NOW_FILE).exists() and 'in flight' not in live(folder)


@pytest.mark.parametrize('scale', [1.0, -1.25e-7, 1e3, 12345.6789e9])
def test_charts_stay_inside_their_box(scale):
    values = [scale * (1 + 1e-4 * step) for step in range(9)]
    rows = [row(step, a__b=x) for step, x in enumerate([*values, math.nan, math.inf])]
    svg = live_charts.chart(rows, 'a/b')
    (attributes,) = Page(svg).having('chart')
    top, bottom, left, right = map(float, attributes['data-box'].split(','))
    marks = [mark.split(',') for mark in attributes['data-points'].split(' ')]
    assert len(marks) == 9 and 'nan' not in svg
    assert all(left <= float(x) <= right and top <= float(y) <= bottom for x, y, *_ in marks)
    assert live_charts.chart(rows, 'value/loss') == ''
    assert '<circle class="own"' in live_charts.chart(rows[:1], 'a/b')
    labels = live_charts.ticks(min(values), max(values)).values()
    assert len(set(labels)) == len(labels) > 1
    assert list(live_charts.ticks(0.5, 2000, log=True).values()) == ['1', '10', '100', '1000']


def test_the_server_serves_only_runs_and_their_pages(tmp_path):
    run = make_run(tmp_path / 'runs' / 'a b', pages=('step_000001.html', 'note.txt'))
    for k in range(24):
        path = make_run(tmp_path / 'runs' / f'run{k:02d}', 1) / run_log.METRICS_FILE
        os.utime(path, (1e9 + k, 1e9 + k))
    (tmp_path / 'runs' / 'no run').mkdir()
    (tmp_path / 'secret.html').write_text('secret')
    client = TestClient(live_server.build_app(run), 'http://127.0.0.1:9', follow_redirects=False)
    assert client.get('/').headers['Location'] == '/run/a%20b/'
    page = client.get('/run/a%20b/?x=tokens')
    assert '<b>tokens</b>' in page.text and '4 older runs left out' in page.text
    assert 'run04' in page.text and 'run03' not in page.text
    policy = page.headers['Content-Security-Policy']
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert client.get('/live_page.js').headers['Content-Type'].startswith('text/javascript')
    rollout = client.get('/run/a%20b/rollouts/step_000001.html')
    assert 'step_000001' in rollout.text
    assert 'script-src' not in rollout.headers['Content-Security-Policy']
    for path in (
        *('/run/none/', '/run/no%20run/', '/run/..%2f/', '/run/a%20b/config.json', '/etc/passwd'),
        *('/run/a%20b/rollouts/..%2f..%2f..%2fsecret.html', '/run/a%20b/rollouts/note.txt', '/%00'),
    ):
        answer = client.get(path)
        assert answer.status_code == 404 and 'secret' not in answer.text, path
    assert client.get('/', headers={'Host': 'evil.example'}).status_code == 400


@pytest.mark.parametrize(
    'words', [['runs/dmeo'], ['--workdir=runs/a'], ['runs/a', '--port=70000'], ['runs'], []]
)
def test_wrong_arguments_of_view_are_a_one_line_error(tmp_path, monkeypatch, capsys, words):
    make_run(tmp_path / 'runs' / 'a')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        view.main(words)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.startswith('error: ') and err.count('\n') == 1
