"""A TCP proxy that simulates network and server faults in HTTP, drawn from a seed.

Each request and its reply pass through as bytes; each kind of fault has a probability. The proxy
decides once per request, and `done` counts its decisions.
"""

import collections
import json
import random
import re
import select
import socket
import threading
import time

CUT_AT = 0.5  # fraction of a cut reply's bytes that pass
TROUBLES = (
    'dropped_before',  # the connection closes before the server gets the request
    'dropped_after',  # ... after the server has handled the request
    'delayed',
    'error_500',
    'half',  # the reply ends in the middle, and the connection with it
    'other',  # the reply to an earlier request
    'twice',  # the reply is sent twice
    'nan',  # a reward of nan, in the format of Python servers
    'huge',  # an observation of 10 MB
    'no_json',
    'silent',  # no reply, but the connection stays open
    'dripping',  # one byte of the reply at a time
)


class Proxy:
    """Listen on a free loopback port for one server."""

    def __init__(self, port: int, *, seed: int = 0, chances: dict[str, float] | None = None):
        self.port, self.rng, self.chances = port, random.Random(seed), dict(chances or {})
        self.done: collections.Counter[str] = collections.Counter()
        self.delay_s = 0.05
        self._last: dict[str, bytes] = {}  # path -> an earlier reply
        self._lock, self._open = threading.Lock(), set()
        self._ended = threading.Event()
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.url = f'http://127.0.0.1:{self._listener.getsockname()[1]}'
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self):
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._open:
                each.close()
        for thread in self._threads:
            thread.join(10)

    def draw(self):
        """Draw the fault of the next request, or ''."""
        with self._lock:
            kinds, chances = list(self.chances), list(self.chances.values())
            kind = self.rng.choices([*kinds, ''], [*chances, max(0, 1 - sum(chances))])[0]
            self.done[kind] += 1
            return kind

    def _accept(self):
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client):
        with self._lock:
            self._open.add(client)
        try:
            while not self._ended.is_set() and self._one(client):
                pass
        except OSError:
            pass  # a side closed in the middle
        finally:
            with self._lock:
                self._open.discard(client)
            client.close()

    def _one(self, client) -> bool:
        """Pass on a request and its reply; False ends the connection."""
        request = message(client)
        if not request:
            return False
        path = request.split(b' ', 2)[1].decode().partition('?')[0]
        trouble = self.draw()
        if trouble == 'dropped_before':
            return False
        if trouble == 'error_500':
            client.sendall(response(b'{"error": "out of order"}', '500 Internal Server Error'))
            return True
        with socket.create_connection(('127.0.0.1', self.port), timeout=30) as server:
            server.sendall(request)
            reply = message(server)
        if not reply:
            return False
        with self._lock:
            other = self._last[path] if path in self._last else reply
            self._last[path] = reply
        return self._answer(client, reply, trouble, other)

    def _answer(self, client, reply, trouble, other) -> bool:
        body = reply.partition(b'\r\n\r\n')[2]
        if trouble == 'dropped_after':
            return False
        if trouble == 'silent':  # until the client times out
            while not self._ended.wait(0.02) and not select.select([client], [], [], 0)[0]:
                pass
            return False
        if trouble == 'delayed':
            time.sleep(self.delay_s)
        if trouble == 'half':
            client.sendall(reply[: len(reply) - len(body) + int(CUT_AT * len(body))])
            return False
        if trouble == 'dripping':
            for byte in reply:
                client.sendall(bytes([byte]))
                if self._ended.wait(0.05):
                    return False
        if trouble in ('nan', 'huge', 'no_json'):
            reply = response(changed(body, trouble))
        if trouble == 'other':
            reply = other
        if trouble != 'dripping':
            client.sendall(reply * (2 if trouble == 'twice' else 1))
        return True


def changed(body: bytes, trouble: str) -> bytes:
    """Return the body of a reply after a fault."""
    if trouble == 'no_json':
        return b'<html>busy</html>'
    reply = json.loads(body)
    if not isinstance(reply, dict) or 'observation' not in reply:
        return b'null'
    if trouble == 'nan':
        return json.dumps(reply | {'reward': float('nan')}).encode()
    return json.dumps(reply | {'observation': 'x' * 10_000_000}).encode()


def response(body: bytes, status: str = '200 OK') -> bytes:
    head = f'HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}'
    return head.encode() + b'\r\n\r\n' + body


def message(connection) -> bytes:
    """Read one complete HTTP message; b'' if the other side has closed."""
    data = b''
    while b'\r\n\r\n' not in data:
        more = connection.recv(65536)
        if not more:
            return b''
        data += more
    head, _, body = data.partition(b'\r\n\r\n')
    match = re.search(rb'content-length: *(\d+)', head, re.IGNORECASE)
    length = int(match[1]) if match else 0
    while len(body) < length:
        more = connection.recv(65536)
        if not more:
            return b''
        body += more
    return head + b'\r\n\r\n' + body
