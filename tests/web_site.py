"""A shop for browsers: WebArena-style tasks, its pages, and a forbidden server."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse


def row(number, intent, **fields):
    """Return a task in WebArena's format."""
    start = fields.pop('start', '__SHOP__/')
    return {
        'sites': fields.pop('sites', ['shop']),
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
            'reference_url': '__SHOP__/unread',  # only url_match compares it
            'program_html': [],
        }
        | fields,
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


def write_rows(folder, rows, port=80):
    """Write tasks of a shop at a port; return web.tasks and web.sites."""
    text = json.dumps(rows)
    path = folder / f'{hashlib.sha256(text.encode()).hexdigest()[:8]}.json'
    path.write_text(text, encoding='utf-8')
    return str(path), (f'shop=http://127.0.0.1:{port}', f'shopping=http://127.0.0.1:{port}/')


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
        navigator.serviceWorker.register('/service.js');
        const peer = new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.1:UDP'}]});
        peer.createDataChannel('x');
        peer.createOffer().then(offer => peer.setLocalDescription(offer));
        alert('stop');
        </script>""",
    '/service.js': "fetch('http://127.0.0.1:OTHER/service', {mode: 'no-cors'})",
}
JSONS = {
    '/rest/V1/orders': {'items': [{'increment_id': '0017'}]},
    '/rest/V1/products/B1/reviews': [{'nickname': 'A', 'ratings': [{'percent': 80}]}],
}


class Site(http.server.BaseHTTPRequestHandler):
    """Pages, a cookie login, and notes of logged-in visitors."""

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
            notes, other, udp = self.server.notes, self.server.other, self.server.udp
            words = {'QUERY': url.query, 'OTHER': other, 'UDP': udp, 'NOTES': '<br>'.join(notes)}
            page = re.sub('|'.join(words), lambda word: str(words[word[0]]), PAGES[url.path])
            self.answer(page, 'text/javascript' if url.path.endswith('.js') else 'text/html')
        else:
            self.answer('', status=404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length'])).decode()
        form = dict(urllib.parse.parse_qsl(body))
        if self.path == '/rest/default/V1/integration/admin/token':
            right = json.loads(body) == {'username': 'admin', 'password': 'admin1234'}
            self.answer(json.dumps('key' if right else ''), 'application/json')
        elif self.path == '/login':
            name = 'ann' if form == {'name': 'ann', 'word': 'secret'} else ''
            self.answer('', status=303, Location='/notes', Set_Cookie=f'user={name}; Path=/')
        else:
            self.server.notes.append(' '.join(form.values()))
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
