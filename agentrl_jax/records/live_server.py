"""The page of a run over HTTP, for browsers on this machine alone.

  /run/<name>/                    the page: of the run, or of another one in the same folder
  /run/<name>/sections            its sections, which the page asks for again and again
  /run/<name>/rollouts/<file>     a rollout page
  /live_page.js

Only names that are in a folder at that moment are answered, and nothing is written.
"""

import contextlib
import http.server
import importlib.resources
import threading
import urllib.parse
from pathlib import Path
from typing import Any

from agentrl_jax.envs.hosts.connection import listening_at
from agentrl_jax.machine import files
from agentrl_jax.records import live_page, run_log
from agentrl_jax.records.live_run import Looker, RunFiles, is_run

LOOPBACK = '127.0.0.1'
NAMES_OF_LOOPBACK = ('127.0.0.1', 'localhost', '[::1]')  # through a tunnel the port is another one
MOST_RUNS = 20  # beside a run, the newest ones
IDLE_S = 30.0  # that a connection may say nothing
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "frame-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
ROLLOUT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'self'"
)


class Runs:
    """A run and those beside it, looked at by one thread at a time."""

    def __init__(self, workdir: Path):
        self.workdir = workdir.absolute()
        self._lookers: dict[str, Looker] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Runs in the folder of the run, those that measured something last first."""
        found = {self.workdir.name: 0.0}
        for folder in self.workdir.parent.iterdir():
            with contextlib.suppress(OSError):  # one that this user may not enter
                if folder.is_dir() and is_run(folder):
                    path = folder / run_log.METRICS_FILE
                    found[folder.name] = path.stat().st_mtime if path.exists() else 0.0
        return sorted(found, key=lambda name: (-found[name], name))

    def folder(self, name: str) -> Path | None:
        """The workdir of a run, by its name alone: no name leads out of the folder."""
        return self.workdir.parent / name if name in self.names() else None

    def look(self, name: str) -> tuple[RunFiles, list[RunFiles], int]:
        """(a run, those beside it, how many more there are)."""
        with self._lock:
            others = [other for other in self.names() if other != name]
            shown = others[:MOST_RUNS]
            return self._look(name), [self._look(x) for x in shown], len(others) - len(shown)

    def _look(self, name: str) -> RunFiles:
        if name not in self._lookers:
            self._lookers[name] = Looker(self.workdir.parent / name)
        return self._lookers[name].look()


def path_of(runs: Runs) -> str:
    """Where on a server the page of the run is."""
    return f'/run/{urllib.parse.quote(runs.workdir.name, safe="")}/'


def address(server: http.server.HTTPServer) -> str:
    """Where the page of the run is."""
    return f'http://{LOOPBACK}:{server.server_address[1]}{path_of(server.runs)}'


def serve(workdir: Path, port: int = 0) -> http.server.HTTPServer:
    """A server of the page that listens already; port 0: a free one. serve_forever() answers."""
    with listening_at(LOOPBACK, port, '--port'):
        server = http.server.ThreadingHTTPServer((LOOPBACK, port), Handler)
    server.daemon_threads = True
    server.runs = Runs(workdir)
    return server


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request of a connection, so that none is left when the server ends."""

    server_version, sys_version = 'agentrl', ''
    timeout = IDLE_S

    def do_GET(self) -> None:  # noqa: N802 (the name is http.server's)
        host = self.headers.get('Host', '')
        if host.rpartition(':')[0] not in NAMES_OF_LOOPBACK and host not in NAMES_OF_LOOPBACK:
            self._answer(403, 'text/plain', b'this page is for browsers on this machine\n')
            return  # a site of the web whose name was made to lead here
        if self.path == '/':
            self._answer(302, 'text/plain', b'', location=path_of(self.server.runs))
            return
        try:
            found = self._find(urllib.parse.urlsplit(self.path))
        except (OSError, ValueError) as error:
            text = files.in_words(error).encode('utf-8', 'replace')
            self._answer(500, 'text/plain', text + b'\n')
            return
        if found is None:
            self._answer(404, 'text/plain', b'there is no such page\n')
        else:
            self._answer(200, *found)

    do_HEAD = do_GET  # noqa: N815

    def _find(self, url: urllib.parse.SplitResult) -> tuple[str, bytes, str] | None:
        """(kind, contents, policy) of a page."""
        parts = [urllib.parse.unquote(part) for part in url.path.split('/')[1:]]
        runs = self.server.runs
        if parts == ['live_page.js']:
            script = importlib.resources.files('agentrl_jax.records').joinpath('live_page.js')
            return 'text/javascript', script.read_bytes(), POLICY
        if len(parts) < 3 or parts[0] != 'run' or runs.folder(parts[1]) is None:
            return None
        name, rest = parts[1], parts[2:]
        if rest in ([''], ['sections']):
            axis = urllib.parse.parse_qs(url.query).get('x', ['step'])[0]
            axis = axis if axis in live_page.AXES else 'step'
            draw = live_page.sections if rest[0] else live_page.render
            return 'text/html', draw(*runs.look(name), axis).encode('utf-8'), POLICY
        if len(rest) == 2 and rest[0] == 'rollouts':
            run, _, _ = runs.look(name)
            if rest[1] in run.pages:
                path = runs.folder(name) / 'rollouts' / rest[1]
                return 'text/html', files.read_bytes(path), ROLLOUT_POLICY
        return None

    def _answer(
        self, code: int, kind: str, contents: bytes, policy: str = POLICY, location: str = ''
    ) -> None:
        self.send_response(code)
        if location:
            self.send_header('Location', location)
        self.send_header('Content-Type', f'{kind}; charset=utf-8')
        self.send_header('Content-Length', str(len(contents)))
        self.send_header('Content-Security-Policy', policy)
        self.send_header('Cache-Control', 'no-store')
        self.send_header('X-Content-Type-Options', 'nosniff')
        self.send_header('Referrer-Policy', 'no-referrer')
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(contents)

    def log_message(self, format: str, *values: Any) -> None:
        """A page that renews itself would fill the terminal."""
