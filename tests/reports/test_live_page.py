"""The page of a run that may be training: what it reads, draws, shows and answers; in Chromium."""

import contextlib
import http.client
import json
import math
import os
import re
import socket
import threading
import time

import numpy as np
import pytest
from browser import Tab, needs_chromium
from golden_text import assert_golden
from test_view import HOSTILE, Page

from agentrl_jax import view
from agentrl_jax.envs.hosts import gate
from agentrl_jax.envs.hosts.harness.world import endpoint as endpoint_of_harness
from agentrl_jax.envs.hosts.web import chromium
from agentrl_jax.machine import lock
from agentrl_jax.records import live_charts, live_page, live_server, run_log
from agentrl_jax.records.beacon import Beacon
from agentrl_jax.records.live_run import NOW_FILE, Looker, is_run
from agentrl_jax.run.config import effective
from configs import demo_cloned


def row(step, **changes):
    made = {
        'step': step,
        'time_s': 2.0 * step + 1,
        'rollout/success': 0.3 + 0.01 * step,
        'policy/entropy': 0.5,
        'optim/lr': 1e-6,
        'progress/tokens': 1000 * (step + 1),
    }
    if step % 2 == 0:
        made |= {'eval/success': 0.4, 'eval/success_low': 0.3, 'eval/success_high': 0.5}
    return made | {name.replace('__', '/'): value for name, value in changes.items()}


def make_run(folder, steps=5, config=True, pages=(), **changes):
    folder.mkdir(parents=True, exist_ok=True)
    if config:
        cfg = effective(demo_cloned.get_config())
        run_log.write_config(folder, cfg, ['train.py', '--config=configs/demo.py'])
    (folder / run_log.REFERENCE_FILE).write_text('{"random": 0.25, "oracle": 1.0}')
    if steps:
        rows = ''.join(run_log.json_line(row(step, **changes)) for step in range(steps))
        (folder / run_log.METRICS_FILE).write_text(rows)
    for name in pages:
        (folder / 'rollouts').mkdir(exist_ok=True)
        (folder / 'rollouts' / name).write_text(f'<!doctype html><title>r</title><p>{name}</p>')
    return folder


def sections(folder, x='step', others=()):
    looked = [Looker(other).look() for other in others]
    return live_page.sections(Looker(folder).look(), looked, 0, x)


# ---- reading -----------------------------------------------------------------------------------


def test_rows_are_read_on_while_they_are_written(tmp_path):
    path = make_run(tmp_path / 'a', steps=3) / run_log.METRICS_FILE
    looker = Looker(tmp_path / 'a')
    assert [r['step'] for r in looker.read_rows()] == [0, 1, 2]
    line = run_log.json_line(row(3))
    with path.open('a') as file:
        file.write(line[:20])
        file.flush()
        assert len(looker.read_rows()) == 3  # half a line
        file.write(line[20:])
    assert [r['step'] for r in looker.read_rows()] == [0, 1, 2, 3]
    run_log.RunLog(tmp_path / 'a', resume_step=2).close()  # writes the file anew
    assert [r['step'] for r in looker.read_rows()] == [0, 1]
    path.unlink()
    assert looker.read_rows() == []


def test_files_that_cannot_be_read_are_named_and_the_rest_is_shown(tmp_path):
    folder = make_run(tmp_path / 'a')
    (folder / run_log.CONFIG_FILE).write_text('{"config": ')
    (folder / 'roll_backs.json').write_text('[1, {"at_step": 3}]')
    with (folder / run_log.METRICS_FILE).open('a') as file:
        file.write('{"step": 5, "time_s": "<i>"}\n')
    looker = Looker(folder)
    assert len(looker.look().problems) == 2  # the same at the next look
    found = looker.look()
    assert len(found.problems) == 2 and found.config is None and found.steps is None
    text = Page(sections(folder)).text
    assert 'broken JSON' in text and "'time_s' is no number" in text
    (folder / run_log.METRICS_FILE).unlink()
    os.mkfifo(folder / run_log.METRICS_FILE)  # nobody writes into it: do not wait for it
    assert 'is no regular file' in Looker(folder).look().problems[-1]


@pytest.mark.parametrize('text', ['5', 'true', '{"a": 1}', 'null'])
def test_one_file_of_another_shape_breaks_no_page(tmp_path, text):
    folder = make_run(tmp_path / 'a')
    (folder / 'roll_backs.json').write_text(text)
    path = folder / run_log.CONFIG_FILE
    document = json.loads(path.read_text())
    for alarm in ({'std_drop': 5}, {'std_drop': {'action': 'warn', 'limit': 'x', 'patience': []}}):
        document['config']['alarm'] = {'baseline_steps': 10} | alarm
        path.write_text(json.dumps(document))
        assert Looker(folder).look().roll_backs == []
        assert Page(sections(folder, others=[make_run(tmp_path / 'b')])).text


def test_what_state_a_run_is_in(tmp_path):
    folder = make_run(tmp_path / 'a', steps=0, config=False)
    assert is_run(folder) and Looker(folder).look().state == 'not started'
    assert not is_run(tmp_path)
    held = lock.take(folder)
    assert Looker(folder).look().state == 'training'
    lease = json.loads((folder / lock.LEASE_FILE).read_text())
    held.release()
    make_run(folder)
    assert Looker(folder).look().state == 'stopped'
    for other, state in (
        ({}, 'stopped'),  # killed
        ({'host': 'tpu-0', 'kernel': 'x'}, 'training on tpu-0'),
    ):
        (folder / lock.LEASE_FILE).write_text(json.dumps(lease | other))
        assert Looker(folder).look().state == state
    old = (folder / lock.LEASE_FILE).stat().st_mtime - 2 * lock.STALE_S
    os.utime(folder / lock.LEASE_FILE, (old, old))
    assert Looker(folder).look().state == 'stopped'
    run_log.write_finished(folder, 5)
    assert Looker(folder).look().state == 'finished'


def test_what_a_training_does_now_is_in_a_file_while_it_lives(tmp_path):
    folder, told = make_run(tmp_path / 'a'), [{'job': 'training', 'worlds': {'waited for': 7}}]
    held = lock.take(folder)
    with Beacon(folder, lambda: told[0], every_s=0.01):
        for waiting in (7, 9):
            told[0] = {'job': 'training', 'worlds': {'waited for': waiting, 'slowest': '<b>'}}
            said = f'worlds in flight waited for {waiting}  slowest <b>'
            deadline = time.monotonic() + 10
            while said not in Page(sections(folder)).text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    held.release()
    assert not (folder / NOW_FILE).exists() and 'in flight' not in sections(folder)
    (folder / NOW_FILE).write_text('{"worlds": {"waited for": 7}}')  # of a run that was killed
    assert 'in flight' not in sections(folder)


# ---- charts ------------------------------------------------------------------------------------


def test_ticks_and_labels_by_hand():
    def axis(low, high, **more):
        return live_charts.Axis(low, high, 0, 1, **more).ticks()

    assert axis(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert axis(51, 137) == [60, 80, 100, 120]
    assert axis(0.5, 2000, log=True) == [1, 10, 100, 1000]
    assert len(axis(1e-6, 1.1e-6)) >= 4
    assert [live_charts.short(x) for x in (0.25, 12345, 1.5e9, 3e-5, 1234)] == [
        '0.25',
        '12.3k',
        '1.5G',
        '3e-05',
        '1234',
    ]
    assert live_charts.labels([1.411e9, 1.412e9]) == ['1.411G', '1.412G']


def test_a_chart_has_its_line_band_references_and_other_runs():
    rows = [row(step) for step in range(5)]
    svg = live_charts.chart(
        rows, 'eval/success', references={'random': 0.25}, others=[('o0', rows[:3])]
    )
    page = Page(svg)
    assert [len(page.having(css)) for css in ('own', 'band', 'reference', 'o0')] == [1, 1, 1, 1]
    assert 'random 0.25' in page.text
    places = next(a['data-points'] for tag, a in page.elements if tag == 'svg').split(' ')
    assert [place.split(',')[2:] for place in places] == [['0', '0.4'], ['2', '0.4'], ['4', '0.4']]
    assert live_charts.chart(rows, 'value/loss') == ''
    # One point has no line.
    assert '<circle class="own"' in live_charts.chart(rows[:1], 'rollout/success')


def texts_of(svg, css):
    """(x, y, text) of the texts of a class."""
    found = re.findall(rf'<text class="{css}" x="([^"]+)" y="([^"]+)">([^<]*)<', svg)
    return [(float(x), float(y), text) for x, y, text in found]


@pytest.mark.parametrize('scale', [1.0, -1.25e-7, 1e3, 12345.6789e9])
def test_ticks_are_inside_the_chart(scale):
    """Labels such as -1.25e-05 were cut off at the left, and the last step at the right."""
    rows = [
        row(step, value__loss=scale * (1 + 1e-4 * step), progress__tokens=1e5 * step)
        for step in range(9)
    ]
    for x in ('step', 'progress/tokens'):
        svg = live_charts.chart(rows, 'value/loss', x=x)
        ys, xs = texts_of(svg, 'y'), texts_of(svg, 'x')
        assert len(ys) > 1 and len(xs) > 1
        assert all(end >= live_charts.CHARACTER * len(text) for end, _, text in ys)
        half = live_charts.CHARACTER / 2
        assert all(at + half * len(text) <= live_charts.WIDTH for at, _, text in xs)


def test_the_name_of_a_line_is_where_no_curve_is():
    """The oracle's name was written over the newest successes."""
    high = [row(step, eval__success=0.1 + 0.8 * step / 8) for step in range(9)]
    lines = {'random': 0.1, 'oracle': 0.9}
    svg = live_charts.chart(high, 'eval/success', references=lines)
    assert [text for _, _, text in texts_of(svg, 'name left')] == ['oracle 0.9']
    assert [text for _, _, text in texts_of(svg, 'name')] == ['random 0.1']
    close = live_charts.chart(high, 'eval/success', references={f'l{k}': 0.5 for k in range(9)})
    places = [(x, y) for css in ('name', 'name left') for x, y, _ in texts_of(close, css)]
    assert 1 <= len(places) == len(set(places)) <= 4


def test_a_port_in_use_is_named_with_how_to_choose_another_one(tmp_path, capsys):
    """The error was [Errno 98], without the port and the flag."""
    workdir = make_run(tmp_path / 'a')
    with contextlib.closing(socket.create_server(('127.0.0.1', 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            view.main([str(workdir), f'--port={port}'])
        said = f'error: port {port} is in use: set --port to another one, or to 0 for any free one'
        assert ended.value.code == 2 and capsys.readouterr().err == said + '\n'
        for serve, setting in ((gate.listening, '--port'), (endpoint_of_harness, 'harness.port')):
            with pytest.raises(ValueError, match=f'port {port} is in use: set {setting} to'):
                serve('127.0.0.1', port)


@pytest.mark.parametrize(
    'words, said',
    [
        (['runs/dmeo'], 'runs/dmeo does not exist; did you mean demo?'),
        (['runs/other'], 'runs/other does not exist; a training makes it when it starts'),
        (['--workdir=runs/demo'], "unknown flag '--workdir=runs/demo'; did you mean runs/demo?"),
        (['runs/demo', '--prot=3'], "unknown flag '--prot=3'; did you mean --port?"),
        (['runs/demo', '--port=70000'], '--port=70000 must be in 0..65535'),
        (['runs/demo', '--port=x'], "argument --port: invalid int value: 'x'"),
        (['runs/demo', 'runs/demo'], 'unrecognized arguments: runs/demo'),
        ([], 'the following arguments are required: source'),
    ],
)
def test_mistakes_of_view_are_one_line(tmp_path, monkeypatch, capsys, words, said):
    make_run(tmp_path / 'runs' / 'demo')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        view.main(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith(f'error: {said}') and err.count('\n') == 1


@pytest.mark.parametrize('value', [1e-6, 0.0, -3.0, 1e9, 5e-9])
def test_a_value_that_stays_has_an_axis_of_its_own_size(value):
    """A learning rate of 1e-6 was drawn at 0 between -0.1 and 0.1."""
    low, high = live_charts.limits(np.full(3, value), False)
    assert low < value < high and high - low <= max(0.2 * abs(value), 0.2 * (value == 0)) * 1.01


def test_numbers_of_every_kind_are_drawn_inside_the_chart():
    values = [1e-300, 3.0, math.nan, 1e6, math.inf, 2.0, 5.0]
    rows = [row(step, policy__grad_norm=x) for step, x in enumerate(values)]
    svg = live_charts.chart(rows, 'policy/grad_norm')
    (line,) = re.findall(r'class="line own" d="M([^"]+)"', svg)
    xy = np.array([[float(x) for x in place.split(' ')] for place in line.split('L')])
    assert len(xy) == 5 and np.isfinite(xy).all()
    assert (xy >= 0).all() and (xy[:, 1] <= live_charts.HEIGHT).all() and 'nan' not in svg


# ---- the page ----------------------------------------------------------------------------------


def test_pages_are_the_golden_ones(tmp_path):
    """Sections of a run with alarms beside another, without rows, of another version, finished."""
    pages = ('step_000000.html', 'step_000050.html')
    alarmed = make_run(tmp_path / 'alarmed', 40, rollout__token_budget_stop=0.5, pages=pages)
    (alarmed / 'roll_backs.json').write_text(
        json.dumps([{'at_step': 9, 'to_step': 4, 'signal': 's', 'reason': 'it spiked'}])
    )
    begun, other = make_run(tmp_path / 'begun', steps=0), make_run(tmp_path / 'other')
    for folder in (alarmed, begun):
        path = folder / run_log.CONFIG_FILE
        known = json.loads(path.read_text()) | {'commit': 'c0ffee', 'machine': '1 x cpu'}
        path.write_text(json.dumps(known))
    (other / run_log.CONFIG_FILE).write_text('{"config": {"steps": "many", "alarm": {}}}')
    done = make_run(tmp_path / 'done', 7, config=False, eval_test__success=0.25)
    run_log.write_finished(done, 6)
    parts = {
        'alarms, rollouts, another run': sections(alarmed, others=[other]),
        'nothing measured': sections(begun),
        'a config of another version': sections(other),
        'finished, over tokens': sections(done, x='tokens'),
    }
    readable = {title: text.replace('><', '>\n<') for title, text in parts.items()}
    assert_golden('live_pages.html', readable)


@pytest.mark.parametrize('text', HOSTILE)
def test_hostile_text_in_any_file_is_shown_and_never_markup(tmp_path, text):
    clean, folder = make_run(tmp_path / 'clean', steps=30), make_run(tmp_path / 'a', steps=30)
    for where, said in ((clean, 'plain'), (folder, text)):
        document = json.loads((where / run_log.CONFIG_FILE).read_text())
        document |= {'commit': said, 'machine': said, 'argv': [said, f'--config={said}']}
        document['config']['env']['name'] = document['config']['model']['path'] = said
        (where / run_log.CONFIG_FILE).write_text(json.dumps(document))
        (where / 'roll_backs.json').write_text(
            json.dumps([{'at_step': said, 'to_step': said, 'reason': said}])
        )
        with (where / run_log.METRICS_FILE).open('a') as file:
            file.write(json.dumps(row(30) | {said: 3.0}) + '\n')
    found = sections(folder, others=[clean])
    found.encode('utf-8')
    page, plain = Page(found), Page(sections(clean, others=[clean]))
    tags = [tag for tag, attributes in page.elements if attributes != {'class': 'esc'}]
    assert set(tags) <= {tag for tag, _ in plain.elements}
    assert not [n for _, a in page.elements for n in a if n.startswith('on') or n == 'autofocus']
    assert page.duplicates == []


def test_the_newest_figure_is_shown_also_where_it_is_no_number(tmp_path):
    """The last finite value stayed on the page for ever."""
    folder = make_run(tmp_path / 'a')
    odd = {'rollout__success': math.nan, 'eval__success': math.nan, 'optim__lr': math.inf}
    with (folder / run_log.METRICS_FILE).open('a') as file:
        file.write(run_log.json_line(row(5, **odd)))
    text = Page(sections(folder)).text
    assert 'success in trainingnan %' in text and 'success, held outnan %' in text
    assert 'learning rateinf' in text and 'optim/lrinf' in text


@pytest.mark.parametrize(
    'x, validated, trained',
    [
        ('step', ['0', '2', '4'], ['0', '1', '2', '3', '4']),
        ('tokens', ['0', '2000', '4000'], ['1000', '2000', '3000', '4000', '5000']),
        ('seconds', ['0', '3', '7'], ['1', '3', '5', '7', '9']),
    ],
)
def test_a_validation_is_drawn_where_its_step_began(tmp_path, x, validated, trained):
    """It was drawn after the tokens and the seconds of the step that it came before."""
    page, places = Page(sections(make_run(tmp_path / 'a'), x)), {}
    for tag, found in page.elements:
        if tag == 'svg' and 'data-points' in found:
            marks = found['data-points'].split(' ')
            places[found['aria-label'].split(':')[0]] = [mark.split(',')[2] for mark in marks]
    assert places['eval/success'] == validated and places['rollout/success'] == trained


# ---- the server ----------------------------------------------------------------------------------


@contextlib.contextmanager
def served(workdir):
    """(server, address) of a page."""
    server = live_server.serve(workdir)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(server, path, method='GET', **headers):
    """(status, headers, body) of a request, sent as it is."""
    connection = http.client.HTTPConnection('127.0.0.1', server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode('utf-8')
    connection.close()
    return found


def test_the_server_answers_what_is_there_and_nothing_else(tmp_path):
    run = make_run(tmp_path / 'runs' / 'a b', pages=('step_000001.html',))
    make_run(tmp_path / 'runs' / 'other')
    (tmp_path / 'runs' / 'no run').mkdir()
    (tmp_path / 'secret.html').write_text('secret')
    (run / 'rollouts' / 'note.txt').write_text('secret')
    with served(run) as server:
        assert server.server_address[0] == '127.0.0.1'
        status, headers, _ = ask(server, '/')
        assert status == 302 and headers['Location'] == '/run/a%20b/'
        status, headers, body = ask(server, '/run/a%20b/?x=tokens')
        assert status == 200 and '<b>tokens</b>' in body and 'a b' in body
        policy = headers['Content-Security-Policy']
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert 'unsafe-inline' not in policy.split('style-src')[0] and 'http' not in policy
        assert ask(server, '/run/other/sections')[0] == 200
        assert ask(server, '/live_page.js')[1]['Content-Type'].startswith('text/javascript')
        status, headers, body = ask(server, '/run/a%20b/rollouts/step_000001.html')
        assert status == 200 and 'step_000001' in body
        assert 'script-src' not in headers['Content-Security-Policy']
        assert ask(server, '/run/a%20b/', method='HEAD')[2] == ''
        assert ask(server, '/run/a%20b/', method='POST')[0] == 501
        for path in (
            '/run/none/',
            '/run/no%20run/',
            '/run/../',
            '/run/..%2f/',
            '/run/a%20b/rollouts/..%2f..%2f..%2fsecret.html',
            '/run/a%20b/rollouts/../../../secret.html',
            '/run/a%20b/rollouts/note.txt',
            '/run/a%20b/config.json',
            '/run/a%20b',
            '/etc/passwd',
            '/%00',
        ):
            status, _, body = ask(server, path)
            assert status == 404 and 'secret' not in body, path


def test_a_neighbour_that_may_not_be_entered_breaks_no_page(tmp_path, monkeypatch):
    """Every page was answered with an error 500 and the name of that folder."""
    run, locked = make_run(tmp_path / 'a'), make_run(tmp_path / 'locked')

    def looked_into(folder):
        if folder == locked:
            raise PermissionError(13, 'Permission denied', str(folder))
        return is_run(folder)

    monkeypatch.setattr(live_server, 'is_run', looked_into)
    with served(run) as server:
        status, _, body = ask(server, '/run/a/')
    assert status == 200 and 'locked' not in body


@pytest.mark.parametrize(
    'host, status',
    [('localhost:9', 200), ('127.0.0.1', 200), ('[::1]:80', 200), ('evil.example:80', 403)],
)
def test_a_site_of_the_web_is_not_answered_under_its_own_name(tmp_path, host, status):
    with served(make_run(tmp_path / 'a')) as server:
        assert ask(server, '/run/a/', Host=host)[0] == status


def test_of_many_runs_the_newest_are_beside_it(tmp_path):
    for k in range(24):
        path = make_run(tmp_path / f'run{k:02d}', config=False) / run_log.METRICS_FILE
        os.utime(path, (1e9 + k, 1e9 + k))
    with served(tmp_path / 'run03') as server:
        page = Page(ask(server, '/run/run03/sections')[2])
    names = re.findall(r'run\d\d', page.text[page.text.index('Runs beside it') :])
    assert names == ['run03', *(f'run{k:02d}' for k in range(23, 3, -1))]
    assert '3 older runs left out' in page.text and len(page.having('other')) == live_page.COLOURS


def test_the_command_says_where_the_page_is(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stopped:
        view.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert 'is no folder of a run' in capsys.readouterr().err

    def answer(server):
        assert ask_in_thread(server, '/run/a/') == 200
        raise KeyboardInterrupt

    def ask_in_thread(server, path):
        found = []
        thread = threading.Thread(target=lambda: found.append(ask(server, path)[0]))
        thread.start()
        server.handle_request()
        thread.join()
        return found[0]

    monkeypatch.setattr(live_server.http.server.ThreadingHTTPServer, 'serve_forever', answer)
    view.main([str(make_run(tmp_path / 'a'))])
    assert re.match(r'http://127\.0\.0\.1:\d+/run/a/ ', capsys.readouterr().out)


# ---- in a real browser -------------------------------------------------------------------------


@needs_chromium
def test_the_page_renews_itself_in_a_browser(tmp_path):
    folder = make_run(tmp_path / 'runs' / 'a', pages=('step_000001.html',))
    make_run(tmp_path / 'runs' / 'b')
    with served(folder) as server:
        where = live_server.address(server)
        with chromium.browser(where) as browser:
            tab = Tab(browser, where)
            assert '5 of 200' in tab.text() and tab.seen('.chart') >= 4
            assert tab.seen('.o0') >= 2  # the run beside it: a curve and a swatch
            # The value below the pointer.
            tab.move('.wide .chart')
            tab.wait("document.querySelectorAll('.cursor').length === 1")
            assert re.search(
                r'0\.4 at \d', tab.evaluate("document.querySelector('.cursor').textContent")
            )
            # A rollout on the page, which stays open while the rest is renewed.
            tab.click('#newest summary')
            tab.wait("document.querySelector('iframe').checkVisibility()")
            tab.evaluate("document.querySelector('iframe').mine = 'kept'")
            with (folder / run_log.METRICS_FILE).open('a') as file:
                file.write(run_log.json_line(row(5)))
            tab.wait("document.body.innerText.includes('6 of 200')")
            assert tab.evaluate("document.querySelector('iframe').mine") == 'kept'
            tab.click('#curves a')
            tab.wait("location.search === '?x=tokens' && document.readyState === 'complete'")
            tab.click('#runs a')
            tab.wait("location.pathname === '/run/b/' && document.readyState === 'complete'")
            assert tab.faults == []


@needs_chromium
def test_a_browser_says_when_the_server_has_ended_and_shows_nothing_of_what_it_was_told(tmp_path):
    folder = make_run(tmp_path / '<img src=x onerror=window.hit=1>')
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(folder))
        where = live_server.address(server)
        tab = Tab(stack.enter_context(chromium.browser(where)), where)
        assert '<img src=x' in tab.text('#head') and tab.seen('#gone') == 0
        assert tab.evaluate('window.hit === undefined') and tab.faults == []
        server.shutdown()
        server.server_close()
        tab.wait("!document.getElementById('gone').hidden")
        assert tab.seen('.chart') >= 4
