"""Pages in a browser: what they show, what is done on them, what they cannot reach, and tasks."""

import contextlib
import hashlib
import http.server
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import fastapi
import host_worlds as hosts
import numpy as np
import pytest
from fastapi.testclient import TestClient

from agentrl_jax.envs.hosts import server
from agentrl_jax.envs.hosts.answers import READERS, Unreadable
from agentrl_jax.envs.hosts.web import actions, chromium, experts, scoring, tabs, tasks, tree, world
from agentrl_jax.envs.hosts.web.actions import Action, read_action
from agentrl_jax.envs.hosts.web.miniwob import MiniWoB, MiniWoBEnvironment
from agentrl_jax.envs.hosts.web.world import WebArena, WebEnvironment
from agentrl_jax.envs.hosts.world import WorldError
from agentrl_jax.envs.splits import SPLITS
from agentrl_jax.rollout import keepers

ROOT = pathlib.Path(__file__).resolve().parents[2]
needs_chromium = pytest.mark.skipif(
    not any(map(shutil.which, chromium.NAMES)), reason='apt-get install chromium'
)
needs_miniwob = pytest.mark.skipif(
    importlib.util.find_spec('miniwob') is None, reason='pip install -r requirements-test.txt'
)


@pytest.mark.parametrize(
    'text, action',
    [
        ('click [12]', Action('click', 12)),
        ('type [3] [a [b] c] [0]', Action('type', 3, 'a [b] c', False)),
        ('type [3] [x ] [press_enter_after=1]', Action('type', 3, 'x ')),
        ('scroll [direction=down]', Action('scroll', text='down')),
        ('press [Ctrl+a]', Action('press', text='Ctrl+a')),
        ('stop', Action('stop')),
        ('stop [two\nlines]', Action('stop', text='two\nlines')),
    ],
)
def test_actions_are_read_as_webarena_writes_them(text, action):
    assert read_action(text) == action
    assert READERS['in_backticks'](f'I think.\n```{text}``` and ```none```') == text.strip()


@pytest.mark.parametrize('text', ['', 'click', 'click [a]', 'press []', 'scroll [left]', 'fly [1]'])
def test_text_without_an_action_is_unreadable(text):
    for verbs in (tuple(actions.FORMS), actions.ON_A_PAGE):
        with pytest.raises(Unreadable):
            read_action(text, verbs)


def node(number, role, name='', children=(), ignored=False, **told):
    """As Accessibility.getFullAXTree writes them; backend numbers are 10 x number."""
    value = {'value': {'value': told.pop('value')}} if 'value' in told else {}
    return {
        'nodeId': str(number),
        'backendDOMNodeId': 10 * number,
        'ignored': ignored,
        'role': {'value': role},
        'name': {'value': name},
        'childIds': [str(child) for child in children],
        'properties': [{'name': k, 'value': {'value': v}} for k, v in told.items()],
    } | value


def test_a_page_is_the_lines_of_its_accessibility_tree():
    nodes = [
        node(1, 'RootWebArea', 'Title', [2, 9]),
        node(2, 'generic', '', [3, 4, 6], focusable=False),
        node(3, 'none', ignored=True, children=[5]),
        node(4, 'textbox', 'Name', [7], value='Ann', focusable=True, focused=True),
        node(5, 'link', "It's", [8], focusable=True),
        node(6, 'checkbox', 'Yes', checked='false', focusable=True),
        node(7, 'StaticText', 'Ann'),
        node(8, 'StaticText', "It's"),
        node(9, 'StaticText', 'far  below'),
    ]
    found = tree.lines(nodes, {90: (0, 800, 10, 10)}, (0, 0, 100, 100))
    assert [line.text(n) for n, line in enumerate(found, 1)] == [
        '[1] link "It\'s"',
        "[2] textbox 'Name' focused: True value: 'Ann'",
        "[3] checkbox 'Yes' checked: False",
    ]
    assert [line.node for line in found] == [50, 40, 60]
    scrolled = tree.lines(nodes, {90: (0, 800, 10, 10)}, (0, 750, 100, 100))
    assert scrolled[-1] == tree.Line(0, 90, 'StaticText', 'far below')


# ---- tasks and scores ----------------------------------------------------------------------------


def row(number, intent, **told):
    """A task as WebArena's file has it."""
    start = told.pop('start', '__SHOP__/')
    return {
        'sites': told.pop('sites', ['shop']),
        'task_id': number,
        'require_login': True,
        'storage_state': './.auth/shop_state.json',
        'start_url': start,
        'geolocation': None,
        'intent': intent,
        'require_reset': False,
        'eval': {
            'eval_types': ['string_match'],
            'reference_answers': {'exact_match': 'yes'},
            'reference_url': '',
            'program_html': [],
        }
        | told,
    }


NOTE = {
    'url': '__SHOP__/notes',
    'locator': "document.querySelector('#notes').outerText",
    'required_contents': {'must_include': ['buy a lamp |OR| buy lamps', 'high']},
}
ORDER = {
    'url': 'func:shopping_get_latest_order_url()',
    'locator': '',
    'required_contents': {'must_include': ['Order 17']},
}
POST = {
    'url': "func:reddit_get_post_url('__last_url__')",
    'locator': "document.querySelector('h1').textContent",
    'prep_actions': ["document.querySelector('h1').click()"],
    'required_contents': {'exact_match': 'Post 7, seen'},
}
RATING = {
    'url': 'last',
    'locator': "func:shopping_get_sku_latest_review_rating('B1')",
    'required_contents': {'must_include': ['80']},
}
ROWS = [
    row(0, 'What does the lamp cost?', reference_answers={'must_include': ['20']}),
    row(
        1,
        'Open the page of the lamp.',
        eval_types=['url_match'],
        reference_url='__SHOP__/item?of=lamp |OR| __SHOP__/nowhere',
        url_note='GOLD in PRED',
    ),
    row(
        2, 'Note at high priority to buy a lamp.', eval_types=['program_html'], program_html=[NOTE]
    ),
    row(
        3,
        'Open a comment.',
        start='__SHOP__/f/books/7/comment/1 |AND| __SHOP__/item?of=lamp',
        eval_types=['program_html'],
        program_html=[POST, ORDER, RATING],
    ),
    row(4, 'Where is the moon?', reference_answers={'fuzzy_match': 'N/A'}, string_note='too far'),
    row(5, 'Why?', reference_answers={'fuzzy_match': ['because']}),
    row(6, 'Elsewhere', sites=['elsewhere']),
    row(7, 'Elsewhere, too', start='__ELSEWHERE__'),
]


@pytest.fixture(scope='module')
def read_rows(tmp_path_factory):
    """Reads rows as tasks of a shop at a port."""
    folder = tmp_path_factory.mktemp('web')

    def read(rows, port=80):
        path = folder / f'{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:8]}.json'
        path.write_text(json.dumps(rows), encoding='utf-8')
        return str(path), (f'shop=http://127.0.0.1:{port}', f'shopping=http://127.0.0.1:{port}/')

    return read


def test_tasks_of_listed_sites_are_read(read_rows):
    path, sites = read_rows(ROWS)
    found = world.read(path, sites)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert found[3].start == (
        'http://127.0.0.1:80/f/books/7/comment/1',
        'http://127.0.0.1:80/item?of=lamp',
    )
    assert found[0].state == 'shop_state.json' and found[0].answers == (('must_include', ('20',)),)
    assert found[2].targets[0].contents == ('buy a lamp |OR| buy lamps', 'high')
    assert [task.number for task in found.values() if task.needs_judge] == [5]
    alone, judged = (
        {number for split in SPLITS for number in world.items(split, path, sites, judge)}
        for judge in ('', 'module:judge')
    )
    assert judged - alone == {5} and judged == found.keys()


NOTHING = NOTE | {'required_contents': {'must_include': ['a |OR| ']}}


@pytest.mark.parametrize(
    'field, changes',
    [
        ('eval_types', dict(eval_types=['taste'])),
        ('reference_answers', dict(reference_answers={'guess': 'x'})),
        ('url_note', dict(url_note='exact')),
        ('locator', dict(program_html=[NOTE | {'locator': 'lambda: 1'}])),
        ('required_contents', dict(program_html=[{'url': 'last'}])),
        ('shop', dict(sites=['elsewhere'])),
        # Any stop would solve these: an evaluator with nothing to compare scored 1
        ('reference_answers', dict(reference_answers=None)),
        ('reference_answers', dict(reference_answers={'must_include': []})),
        ('reference_answers', dict(reference_answers={'must_include': ['a', ' ']})),
        ('reference_url', dict(eval_types=['string_match', 'url_match'], reference_url='')),
        ('reference_url', dict(eval_types=['url_match'], reference_url='__SHOP__/a |OR| ')),
        ('program_html', dict(eval_types=['program_html'], program_html=[])),
        ('required_contents', dict(eval_types=['program_html'], program_html=[NOTHING])),
    ],
)
def test_tasks_that_cannot_be_scored_are_rejected_by_field(read_rows, field, changes):
    path, sites = read_rows([row(0, 'x', **changes)])
    with pytest.raises(ValueError, match=field):
        tasks.read_tasks(path, tasks.read_sites(sites))


def test_a_program_may_want_a_part_of_a_page_to_be_empty():
    target = {'url': 'last', 'locator': '', 'required_contents': {'exact_match': ''}}
    assert tasks.read_target(target).contents == ('',)


def test_sites_are_names_and_addresses():
    for site in ('shop', 'Shop=http://a', 'shop=ftp://a', 'shop=a', 'shop=http://me:secret@host'):
        with pytest.raises(ValueError) as raised:
            tasks.read_sites([site])
        assert 'secret' not in str(raised.value)
    assert chromium.origin('https://a.b/c?d') == 'https://a.b:443'
    assert chromium.origin('http://[::1]:80/') == 'http://[::1]:80'
    with pytest.raises(ValueError, match='web.tasks'):
        world.read('', ())


def scored(answers, answer, judge=None, reason=''):
    told = row(0, 'Why?', reference_answers=answers, string_note=reason)
    return scoring.string_score(tasks.read_task(told, {'shop': 'http://a'}), answer, judge)


@pytest.mark.parametrize(
    'wanted, answer, score',
    [
        ({'exact_match': 'Two Lamps'}, ' "two lamps" ', 1),
        ({'exact_match': 'Two Lamps'}, 'two lamps, red', 0),
        ({'must_include': ['lamp', '20']}, 'The LAMP costs 20.00', 1),
        ({'must_include': ['lamp', '20']}, 'The lamp', 0),
        # One phrase of one character is a separate word; one of several is not
        ({'must_include': ['0']}, '10', 0),
        ({'must_include': ['0']}, '0.', 1),
        ({'must_include': ['0', '1']}, '10', 1),
        ({'fuzzy_match': 'N/A'}, 'n/a', 1),
        ({'fuzzy_match': 'N/A'}, 'no', 0),
    ],
)
def test_answers_are_scored_as_webarena_does(wanted, answer, score):
    assert scored(wanted, answer) == score


def test_words_of_one_character_are_those_of_nltk():
    lines = (ROOT / 'tests/data/webarena_words.tsv').read_text(encoding='utf-8').splitlines()
    rows = [line.split('\t') for line in lines if not line.startswith('#')]
    assert len(rows) > 600
    for found, character, text in rows:
        score = scored({'must_include': [character]}, json.loads(text))
        assert score == int(found), (character, text)


def test_a_judge_receives_answer_reference_and_intent():
    calls = []

    def judge(*words):
        calls.append(words)
        return words[0] == 'it is'

    assert scored({'fuzzy_match': ['so', 'yes']}, 'It is', judge) == 1
    assert scored({'fuzzy_match': ['so']}, '', judge) == 0
    assert scored({'fuzzy_match': 'N/A'}, 'cannot', judge, 'too far') == 0
    assert calls[0] == ('it is', 'so', 'Why?') and calls[-1] == ('cannot', 'too far', 'Why?')
    with pytest.raises(WorldError, match='web.judge'):
        scored({'fuzzy_match': ['so']}, 'x')
    with pytest.raises(ValueError, match='web.judge'):
        world.judge_of('judge')


def test_addresses_are_scored_by_path_and_query():
    wanted = ('http://a/b', 'http://a/c?d=1', 'http://a/c?d=2')
    assert scoring.url_score('http://a/c/e/?d=2&f=3', wanted) == 1
    assert scoring.url_score('http://a/c?d=3', wanted) == 0
    assert scoring.url_score('http://a/b', wanted) == 0  # the query of another one is missing
    assert scoring.url_score('http://b/b?d=1', wanted) == 0
    assert scoring.post_of('http://a/f/books/7/x/-/comment/9') == 'http://a/f/books/7/'
    assert scoring.post_of('http://a/other') == 'http://a/other'


# ---- a site --------------------------------------------------------------------------------------

PAGES = {
    '/': """<title>Shop</title><h1>Shop</h1><a href=/login>Log in</a> <a href=/notes>Notes</a>
        <form action=/item><input name=of aria-label=Search><button>Find</button></form>
        <ul><li><a href=/item?of=lamp>Lamp</a><li><a href=/item?of=desk target=_blank>Desk</a></ul>
        <a href=#end>Down</a> <a href=/nothing>Nothing</a> <a href=/file>File</a>
        <p style="margin-top: 2000px" id=end>The end</p>""",
    '/item': """<title>Item</title><h1>QUERY</h1><p>It costs $20.</p>""",
    '/login': """<title>Login</title><form method=post>
        <label>Name <input name=name></label> <label>Word <input name=word type=password></label>
        <button>Enter</button></form>""",
    '/notes': """<title>Notes</title><form method=post>
        <textarea name=note aria-label=Note></textarea>
        <select name=priority aria-label=Priority><option>low<option>high</select>
        <input type=checkbox name=sure aria-label=Sure><button>Add</button></form>
        <div id=notes>NOTES</div>""",
    '/f/books/7/': '<h1 onclick="this.textContent += \', seen\'">Post 7</h1>',
    '/f/books/7/comment/1': '<h1>A comment</h1>',
    '/sales/order/view/order_id/17/': '<p>Order 17</p>',
    '/tricks': """<title>Tricks</title><h1>Tricks</h1><a href="http://127.0.0.1:OTHER/link">Away</a>
        <a href="file:///etc/passwd">File</a> <a href="/moved">Moved</a>
        <img src="http://127.0.0.1:OTHER/image"><iframe src="http://127.0.0.1:OTHER/frame"></iframe>
        <script>
        fetch('http://127.0.0.1:OTHER/fetch', {mode: 'no-cors'}).catch(() => 0);
        fetch('http://localhost:OTHER/name', {mode: 'no-cors'}).catch(() => 0);
        navigator.sendBeacon('http://127.0.0.1:OTHER/beacon');
        new WebSocket('ws://127.0.0.1:OTHER/socket');
        new Worker(URL.createObjectURL(new Blob(
            ["fetch('http://127.0.0.1:OTHER/worker', {mode: 'no-cors'})"])));
        const peer = new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.1:UDP'}]});
        peer.createDataChannel('x');
        peer.createOffer().then(offer => peer.setLocalDescription(offer));
        alert('stop');
        </script>""",
}
JSONS = {
    '/rest/V1/orders': {'items': [{'increment_id': '0017'}]},
    '/rest/V1/products/B1/reviews': [{'nickname': 'A', 'ratings': [{'percent': 80}]}],
}


class Site(http.server.BaseHTTPRequestHandler):
    """Pages, a login that is a cookie, and notes of those who are logged in."""

    def answer(self, text, kind='text/html', status=200, **headers):
        body = text.encode()
        self.send_response(status)
        for name, value in {'Content-Type': kind, 'Content-Length': len(body), **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        url, cookie = urllib.parse.urlsplit(self.path), self.headers['Cookie'] or ''
        if url.path in JSONS:
            assert self.headers['Authorization'] == 'Bearer key'
            self.answer(json.dumps(JSONS[url.path]), 'application/json')
        elif url.path == '/nothing':
            self.answer('', status=204)
        elif url.path == '/file':
            self.answer('text', Content_Disposition='attachment; filename=x.txt')
        elif url.path == '/moved':
            self.answer('', status=302, Location=f'http://127.0.0.1:{self.server.other}/moved')
        elif url.path == '/notes' and 'user=ann' not in cookie:
            self.answer('', status=302, Location='/login')
        elif url.path in PAGES:
            page = PAGES[url.path].replace('QUERY', url.query)
            page = page.replace('OTHER', str(self.server.other)).replace(
                'UDP', str(self.server.udp)
            )
            self.answer(page.replace('NOTES', '<br>'.join(self.server.notes)))
        else:
            self.answer('', status=404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length'])).decode()
        said = dict(urllib.parse.parse_qsl(body))
        if self.path == '/rest/default/V1/integration/admin/token':
            right = json.loads(body) == {'username': 'admin', 'password': 'admin1234'}
            self.answer(json.dumps('key' if right else ''), 'application/json')
        elif self.path == '/login':
            name = 'ann' if said == {'name': 'ann', 'word': 'secret'} else ''
            self.answer('', status=303, Location='/notes', Set_Cookie=f'user={name}; Path=/')
        else:
            self.server.notes.append(' '.join(said.values()))
            self.answer('', status=303, Location='/notes')

    def log_message(self, *_):
        pass


class Forbidden(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.hits.append(self.path)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(handler):
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope='module')
def site():
    with (
        served(Forbidden) as other,
        served(Site) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(('127.0.0.1', 0))
        udp.setblocking(False)
        server.other, server.udp = other.server_port, udp.getsockname()[1]
        server.notes, other.hits = [], []
        server.away, server.datagrams = other, udp
        yield server


@pytest.fixture(scope='module')
def arena(site, read_rows):
    path, sites = read_rows(ROWS, site.server_port)
    with contextlib.closing(WebArena(tasks=path, sites=sites)) as play:
        yield play


def number(text, line):
    """Of the element whose line begins so."""
    found = [one for one in text.split('\n') if f'] {line}' in one]
    assert found, f'{line!r} is not in:\n{text}'
    return found[0].strip().partition(']')[0][1:]


def click(play, text, line):
    return play.step(f'click [{number(text, line)}]').observation


def write(play, text, name, said, enter):
    field = number(text, f'textbox {name!r}')
    return play.step(f'type [{field}] [{said}] [{enter}]').observation


@needs_chromium
def test_an_answer_is_found_in_a_list_and_scored(arena, site):
    text = arena.reset(0)
    assert text.startswith("OBSERVATION:\nTab 0 (current): Shop\n\n[1] heading 'Shop'\n")
    assert text.endswith(
        f'URL: http://127.0.0.1:{site.server_port}/\nOBJECTIVE: What does the lamp cost?\n'
        'PREVIOUS ACTION: none'
    )
    assert 'The end' not in text  # it is below the window
    for _ in range(3):
        reply = arena.step('scroll [down]')
    assert 'The end' in reply.observation
    text = arena.step('scroll [up]').observation
    arena.step('scroll [up]')
    text = arena.step('scroll [up]').observation
    text = click(arena, text, "link 'Lamp'")
    assert 'It costs $20.' in text and not reply.done
    reply = arena.step('stop [$20]')
    assert (reply.reward, reply.done, reply.success) == (1.0, True, True)
    assert arena.step('none').done


@needs_chromium
def test_tabs_addresses_and_history_are_moved_through(arena, site):
    text, here = arena.reset(1), f'http://127.0.0.1:{site.server_port}'
    text = click(arena, text, "link 'Desk'")
    assert text.startswith('OBSERVATION:\nTab 0: Shop | Tab 1 (current): Item\n')
    assert arena.step('close_tab').observation.startswith('OBSERVATION:\nTab 0 (current): Shop\n')
    text = arena.step('none').observation
    text = write(arena, text, 'Search', 'a lamp', '1')
    assert f'URL: {here}/item?of=a+lamp\n' in text  # Enter sent the form
    assert f'URL: {here}/\n' in arena.step('go_back').observation
    assert f'URL: {here}/item?of=a+lamp\n' in arena.step('go_forward').observation
    assert 'Tab 1 (current): ' in arena.step('new_tab').observation
    assert f'URL: {here}/item?of=lamp\n' in arena.step(f'goto [{here}/item?of=lamp]').observation
    for wrong in ('tab_focus [9]', 'click [99]', 'press [Hyper+a]', 'fly [1]'):
        reply = arena.step(wrong)
        assert f'PREVIOUS ACTION: {wrong} (not done: ' in reply.observation and not reply.done
        assert reply.valid is False
    assert arena.step('stop').success
    arena.reset(1)
    assert arena.step('stop').success is False


@needs_chromium
def test_links_that_lead_to_no_other_page_are_not_waited_for(arena):
    for name in ('Nothing', 'File', 'Down'):
        text = arena.reset(0)
        text = click(arena, text, f"link '{name}'")
        assert 'Tab 0 (current): Shop' in text and arena.visitor.tab.late == 0, name
    assert 'The end' in text


@needs_chromium
def test_a_form_behind_a_login_is_filled_in_and_a_program_looks(arena, site):
    site.notes.clear()
    text = arena.reset(2)
    text = click(arena, text, "link 'Notes'")
    assert '/login\n' in text
    text = write(arena, text, 'Name', 'ann', '0')
    text = write(arena, text, 'Word', 'secret', '1')
    assert '/notes\n' in text
    text = write(arena, text, 'Note', 'Buy a lamp', '0')
    text = click(arena, text, "option 'high'")
    assert "combobox 'Priority'" in text and "option 'high' selected: True" in text
    text = click(arena, text, "checkbox 'Sure'")
    assert "checkbox 'Sure' focused: True checked: True" in text
    text = click(arena, text, "button 'Add'")
    assert site.notes == ['Buy a lamp high on'] and 'Buy a lamp high on' in text
    assert arena.step('stop [done]').success
    # The next episode is nobody's, though the note is still there
    text = arena.reset(2)
    assert '/login\n' in click(arena, text, "link 'Notes'")
    assert arena.step('stop').success is False


@needs_chromium
def test_a_login_may_come_from_a_file(site, read_rows, tmp_path):
    path, sites = read_rows(ROWS, site.server_port)
    site.notes[:] = ['high: buy lamps']
    cookie = {'name': 'user', 'value': 'ann', 'domain': '127.0.0.1', 'path': '/', 'expires': -1}
    state = tmp_path / 'shop_state.json'
    with contextlib.closing(WebArena(tasks=path, sites=sites, states=str(tmp_path))) as play:
        with pytest.raises(WorldError, match='shop_state.json'):
            play.reset(2)
        state.write_text(json.dumps({'cookies': [cookie | {'expires': 5}], 'origins': []}))
        with pytest.raises(WorldError, match='shop_state.json'):
            play.reset(2)
        state.write_text(json.dumps({'cookies': [cookie], 'origins': []}))
        play.reset(2)
        assert play.step('stop').success


@needs_chromium
def test_programs_call_what_webarena_has(arena):
    text = arena.reset(3)
    assert text.startswith('OBSERVATION:\nTab 0 (current): ') and '| Tab 1: Item' in text
    assert arena.step('stop').success
    for wrong in ('func:open("x")', 'func:1 + 1'):
        with pytest.raises(ValueError):
            scoring.call(wrong, '', arena.visitor, arena.sites, arena.login)


@needs_chromium
def test_a_program_that_leads_away_from_the_sites_scores_0_and_ends_the_episode(site, read_rows):
    """`stop` was taken for a bad action, of an episode that was over all the same."""
    away = NOTE | {'url': 'http://elsewhere/', 'required_contents': {'exact_match': ''}}
    task = row(0, 'x', eval_types=['program_html'], program_html=[away])
    path, sites = read_rows([task], site.server_port)
    with contextlib.closing(WebArena(tasks=path, sites=sites)) as play:
        play.reset(0)
        reply = play.step('stop [done]')
    assert (reply.reward, reply.done, reply.success, reply.valid) == (0.0, True, False, True)


@needs_chromium
def test_pages_reach_no_address_that_is_not_listed(arena, site):
    arena.reset(0)
    here, there = (f'http://127.0.0.1:{port}' for port in (site.server_port, site.other))
    text = arena.step(f'goto [{here}/tricks]').observation
    for name in ('Away', 'Moved'):
        shown = click(arena, text, f"link '{name}'")
        assert 'The page is empty, or cannot be reached.' in shown
        text = arena.step(f'goto [{here}/tricks]').observation
    assert '/tricks\n' in click(arena, text, "link 'File'")
    for url in (f'{there}/x', 'file:///etc/passwd', 'chrome://version', 'view-source:' + here):
        assert 'none of the sites' in arena.step(f'goto [{url}]').observation
    time.sleep(0.3)  # for what would still be on its way
    assert site.away.hits == []
    with pytest.raises(BlockingIOError):
        site.datagrams.recv(100)


# ---- processes -----------------------------------------------------------------------------------


def wait_until(true):
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    """The folder for temporary files of browsers that start in this test."""
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    monkeypatch.setattr(tabs, 'SHARED', chromium.Shared(0.0))
    yield tmp_path
    wait_until(lambda: not list(tmp_path.glob('playwright*')))


@needs_chromium
@needs_miniwob
def test_worlds_share_a_browser_that_outlives_them_for_a_while(arena, miniwob, profiles):
    """Rollouts close their worlds: a browser for each rollout would be started again and again."""
    miniwob.reset(0)
    assert miniwob.visitor.browser is not arena.visitor.browser
    tabs.SHARED.linger_s = 60.0
    with contextlib.closing(MiniWoB()) as one, contextlib.closing(MiniWoB()) as other:
        kept = one.visitor.browser
        assert kept is other.visitor.browser is not miniwob.visitor.browser
        one.reset(0)
        assert other.reset(1) and one.step('click [1]').done
        one.close()
        one.close()
    assert not kept.dead and list(profiles.iterdir())
    tabs.SHARED.linger_s = 0.0
    with contextlib.closing(MiniWoB()) as again:
        assert again.visitor.browser is kept and again.reset(0)
    wait_until(lambda: ended(kept.pid))


@needs_chromium
def test_a_browser_that_dies_fails_its_worlds_and_is_started_again(site, read_rows, profiles):
    path, sites = read_rows(ROWS[:3], site.server_port)
    with contextlib.closing(WebArena(tasks=path, sites=sites)) as play:
        play.reset(0)
        dead = play.visitor.browser
        os.killpg(dead.pid, signal.SIGKILL)
        with pytest.raises(WorldError):
            play.step('scroll [down]')
        assert dead.dead and 'Shop' in play.reset(0)


@needs_chromium
@needs_miniwob
def test_an_episode_whose_browser_is_killed_is_played_on_in_another_one(profiles):
    made = []

    def make():
        made.append(MiniWoB(tasks=('click-option',)))
        return made[-1]

    pool = keepers.Pool(make, lambda text, instruction: text)

    def play(*actions, replies=()):
        pool.submit(keepers.Request(slot=0, stream=0, item=3, actions=actions, replies=replies))
        return pool.done.get(timeout=60)

    first = play()
    chosen = play('click [1]', replies=(first.reply,))
    assert play().reply == first.reply and 'checked: True' in chosen.reply.observation
    os.killpg(made[0].visitor.browser.pid, signal.SIGKILL)
    lost = play('click [1]', replies=(first.reply,))
    assert lost.reply is None and lost.deterministic and lost.fault
    again = play('click [1]', replies=(first.reply,))
    assert again.reply == chosen.reply and not again.fault
    pool.close()


@needs_chromium
def test_a_browser_that_hangs_is_replaced(profiles, monkeypatch):
    monkeypatch.setattr(chromium, 'PROBE_S', 0.5)
    hung = tabs.SHARED.take(())
    os.killpg(hung.pid, signal.SIGSTOP)
    with pytest.raises(WorldError):
        hung.run(hung._session.send('Browser.getVersion'), timeout_s=0.5)
    fresh = tabs.SHARED.take(())
    assert fresh is not hung and fresh.pages('') == 0
    for browser in (hung, fresh):
        tabs.SHARED.give_back(browser)
        wait_until(lambda pid=browser.pid: ended(pid))


def test_no_chromium_is_a_clear_error(monkeypatch):
    monkeypatch.setenv('PATH', '')
    for start in (WebArena.check, chromium.Chromium):
        with pytest.raises(FileNotFoundError, match='apt-get install chromium'):
            start()


@needs_chromium
@needs_miniwob
def test_a_page_that_hangs_is_waited_for_as_long_as_settings_say(profiles):
    """It was 30 s, and a fault."""
    with contextlib.closing(MiniWoB()) as play:
        play.reset(0)
        tab = play.visitor.tab
        tab.evaluate('setTimeout(() => {while (true);}, 0)')
        start = time.monotonic()
        tab.settle(0.2)
        assert time.monotonic() - start < 2 and tab.late == 1


PLAYED = """
import json, os
from agentrl_jax.envs.hosts.web.miniwob import MiniWoB, Player
play = Player(MiniWoB())
texts = [[play.reset(item), play.step(play.best()).observation] for item in (43, 62, 65)]
print(json.dumps([texts, play.world.visitor.browser.pid]), flush=True)
os.kill(os.getpid(), 9)
"""
STARTING = """
import os, threading, time
from agentrl_jax.envs.hosts.web.chromium import Chromium
threading.Thread(target=Chromium).start()
while not any(name.startswith('playwright_') for name in os.listdir(os.environ['TMPDIR'])):
    time.sleep(0.001)
os.kill(os.getpid(), 9)
"""


def killed(code, folder):
    """What a process prints that kills itself."""
    more = {'PYTHONHASHSEED': '12345', 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
    other = subprocess.run(
        [sys.executable, '-c', code],
        env=os.environ | more | {'TMPDIR': str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.returncode == -signal.SIGKILL
    return other.stdout


@needs_chromium
@needs_miniwob
def test_a_killed_process_leaves_no_browser_and_pages_are_the_same_there(miniwob, profiles):
    texts, group = json.loads(killed(PLAYED, profiles))
    assert texts == [played(miniwob, item)[1][:2] for item in (43, 62, 65)]
    wait_until(lambda: ended(group))


@needs_chromium
def test_a_process_killed_while_its_browser_starts_leaves_none(profiles):
    killed(STARTING, profiles)


# ---- MiniWoB++ -----------------------------------------------------------------------------------

SOLVED = {expert: name for name, expert in experts.EXPERTS.items()}.values()  # one of each


def played(play, item):
    """(last reply, texts seen) of the expert."""
    text = play.reset(item)
    seen, task = [text], play.details()['task']
    for _ in range(20):
        reply = play.step(experts.best(task, seen[-1]))
        seen.append(reply.observation)
        if reply.done:
            break
    return reply, seen


@pytest.fixture(scope='module')
def miniwob():
    with contextlib.closing(MiniWoB()) as play:
        yield play


@needs_chromium
@needs_miniwob
def test_experts_solve_more_than_twenty_tasks_of_miniwob(miniwob):
    failed = []
    for number, task in enumerate(miniwob.tasks):
        if task in SOLVED:
            reply, seen = played(miniwob, number + len(miniwob.tasks))
            if not (reply.success and reply.reward == 1.0):
                failed.append((task, seen))
    assert not failed and len(SOLVED) > 20


@needs_chromium
@needs_miniwob
def test_a_wrong_click_costs_and_ends_the_task(miniwob):
    with pytest.raises(ValueError, match='miniwob.tasks'):
        MiniWoB(tasks=('../x',))
    with contextlib.closing(MiniWoB(tasks=('click-test', 'button-delay'))) as timed:
        assert miniwob.deterministic and not timed.deterministic
    miniwob.reset(miniwob.tasks.index('click-test-2'))
    reply = miniwob.step('click [2]')
    assert (reply.reward, reply.done, reply.success) == (-1.0, True, False)
    miniwob.reset(0)
    assert 'not done' in miniwob.step('goto [http://a]').observation


@needs_chromium
@needs_miniwob
def test_a_click_meets_an_element_whose_middle_another_one_covers(miniwob):
    miniwob.reset(6 * len(miniwob.tasks) + miniwob.tasks.index('click-test-2'))
    assert miniwob.step('click [1]').reward == 1.0  # it was -1: TWO lies over the middle of ONE


@needs_chromium
@needs_miniwob
def test_an_element_that_is_gone_and_keys_are_said_to_the_policy(miniwob):
    miniwob.reset(miniwob.tasks.index('enter-text'))
    assert "value: 'ab'" in miniwob.step('type [1] [ab] [0]').observation
    miniwob.step('press [Ctrl+a]')
    assert 'value' not in miniwob.step('press [Backspace]').observation
    assert "value: 'é+'" in miniwob.step('type [1] [é+] [0]').observation
    miniwob.visitor.tab.evaluate('document.querySelector("input").remove()')
    gone = miniwob.step('click [1]')
    assert 'not done, that element' in gone.observation and gone.valid is False


# ---- as environments and servers have it ---------------------------------------------------------


@needs_chromium
@needs_miniwob
def test_a_run_s_environment_of_miniwob_has_items_and_players():
    env = MiniWoBEnvironment(tasks=('click-test-2', 'enter-text'), seeds=20, prompt='short')
    pools = [set(env.item_range(split).tolist()) for split in SPLITS]
    assert set.union(*pools) == set(range(40)) and sum(map(len, pools)) == 40
    generator = np.random.default_rng(0)
    with contextlib.closing(env.player()) as player:
        assert player.instruction == env.instruction
        for item in (0, 1):
            player.reset(item)
            while not (reply := player.step(player.best())).done:
                pass
            assert reply.success and player.best() == ''
        text = player.reset(1)
        said = {player.random(generator) for _ in range(50)}
        assert all(actions.read_action(READERS['in_backticks'](one)) for one in said)
        typed = [one for one in said if one.startswith('```type')]
        assert typed and all(f'type [{number(text, "textbox")}]' in one for one in typed)
        assert player.step('no action').observation.startswith('Cannot parse action')
        assert len(said) > 5 and env.accepted == '' and MiniWoBEnvironment().accepted == 'Ok.'


@needs_chromium
def test_a_run_s_environment_of_the_web_has_the_tasks_of_its_sites(read_rows, site):
    path, sites = read_rows(ROWS, site.server_port)
    env = WebEnvironment(tasks=path, sites=sites)
    assert sorted(sum((env.item_range(s).tolist() for s in SPLITS), [])) == [0, 1, 2, 3, 4]
    with contextlib.closing(env.make()) as play:
        play.reset(0)
        assert play.step('It is on the page: ```stop [20]```').success
    with pytest.raises(ValueError, match='web.tasks'):
        WebEnvironment().item_range('train')


@needs_chromium
def test_agentgym_s_client_of_webarena_finds_the_calls_it_makes(read_rows, site):
    path, sites = read_rows(ROWS, site.server_port)
    app = fastapi.FastAPI()
    with contextlib.closing(world.AgentGymWebArena(tasks=path, sites=sites)) as play:
        server.BY_INDEX['webarena'].add(app, hosts.Kept(play))
        client = TestClient(app)

        def post(path, **body):
            return client.post(path, json=body).json()

        assert client.post('/create').json() == {'env_idx': 5}
        told = post('/reset', env_idx=5, idx=0, seed=0)
        assert told['sites'] == ['shop'] and told['object'] == 'What does the lamp cost?'
        assert client.get('/observation?env_idx=5').json() == told['observation']
        told = post('/step', env_idx=5, action='Nothing in backticks')
        assert told['observation'].startswith('Cannot parse action') and not told['terminated']
        told = post('/step', env_idx=5, action='The next action is ```stop [20]```')
        assert told['reward'] == 1.0 and told['terminated'] and not told['truncated']
        assert post('/close', env_idx=5) is True
