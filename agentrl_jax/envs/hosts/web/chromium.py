"""Chromium without a window, spoken to in the Chrome DevTools Protocol over a pipe.

A pipe needs no package and no port that others could connect to. The shell in front of it waits on
another pipe, which closes with this process however it dies, then kills Chromium and removes its
profile; by itself one that is still starting would live on. One Chromium serves all the worlds of a
process that may reach the same addresses.

Addresses are shut off by Chromium's network service, not by its pages: what is not listed is sent
to a proxy that does not exist, and no other name is looked up. So redirects, frames, workers, web
sockets and prefetches are shut off as well.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from agentrl_jax.envs.hosts.connection import split
from agentrl_jax.envs.hosts.world import WorldError

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
START_S, END_S = 60.0, 10.0
# Its standard error is a pipe from which nothing comes until this process has ended. Chromium's
# children write to the profile until they have seen that it is gone.
STARTED = """
dir=$1; shift; exec 3<&0 4>&1 5<&2 </dev/null >/dev/null 2>&1
"$@" 5<&- & exec 3<&- 4>&-
read -r end <&5
kill -9 $!; wait
rm -rf "$dir"; sleep 1; rm -rf "$dir"
kill -9 0
"""
NOBODY = 'nobody.invalid'  # a name that never has an address (RFC 6761)
FLAGS = (
    '--headless',
    '--no-sandbox',  # it needs user namespaces, which containers seldom have
    '--disable-gpu',
    '--disable-dev-shm-usage',
    '--disable-extensions',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-crash-reporter',
    '--disable-breakpad',
    '--disable-default-apps',
    '--disable-domain-reliability',
    '--disable-sync',
    '--disable-quic',
    '--disable-site-isolation-trials',  # else every site of a page has a process of its own
    '--disable-features=site-per-process,SpareRendererForSitePerProcess,Translate,MediaRouter',
    '--disable-renderer-backgrounding',
    '--disable-background-timer-throttling',
    '--disable-backgrounding-occluded-windows',
    '--force-webrtc-ip-handling-policy=disable_non_proxied_udp',
    '--webrtc-ip-handling-policy=disable_non_proxied_udp',
    '--force-device-scale-factor=1',
    '--hide-scrollbars',
    '--lang=en-US',
    '--mute-audio',
    '--no-first-run',
    '--no-pings',
    '--no-startup-window',
    '--remote-debugging-pipe',
)

Listener = Callable[[str, dict], None]  # of a session: method and parameters of an event


class NoAnswer(WorldError):
    """Of Chromium, within the time of a call."""


class Refused(WorldError):
    """Chromium says that it cannot do what was asked; it and its pages live on."""


def executable() -> str:
    """The path of Chromium; FileNotFoundError that says how to get it."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    raise FileNotFoundError(
        f'no Chromium: none of {", ".join(NAMES)} is in PATH. Debian: apt-get install chromium'
    )


def origin(url: str) -> str:
    """'http://host:port' of an address with its port; ValueError for one that is none."""
    parts = split(url, ('http', 'https'), 'a site')
    host = f'[{parts.hostname}]' if ':' in parts.hostname else parts.hostname
    port = parts.port or {'http': 80, 'https': 443}[parts.scheme]
    return f'{parts.scheme}://{host}:{port}'


def network_flags(origins: tuple[str, ...]) -> list[str]:
    """What keeps Chromium from all other addresses."""
    places = [address.partition('://')[2] for address in origins]
    hosts = [place.rpartition(':')[0] for place in places]
    rules = ['MAP * ~NOTFOUND', *(f'EXCLUDE {host}' for host in dict.fromkeys(hosts))]
    return [
        f'--proxy-server=http://{NOBODY}:1',
        f'--proxy-bypass-list={";".join(["<-loopback>", *places])}',
        f'--host-resolver-rules={", ".join(rules)}',
    ]


class Chromium:
    """A browser process; its calls may come from any thread."""

    def __init__(self, origins: tuple[str, ...] = ()):
        """origins: of which pages may be loaded, as origin() writes them."""
        found = executable()
        self.profile = tempfile.mkdtemp(prefix='chromium-')
        flags = [*FLAGS, *network_flags(origins), f'--user-data-dir={self.profile}']
        lives, self._lives = os.pipe()
        self.process = subprocess.Popen(
            ['/bin/sh', '-c', STARTED, 'sh', self.profile, found, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=lives,
            env={**os.environ, 'TMPDIR': self.profile},  # else it leaves a folder of its own
            process_group=0,  # Ctrl-C is for the run; and the whole group can be killed
        )
        os.close(lives)
        self._lock = threading.Lock()
        self._number = 0
        self._asked: dict[int, concurrent.futures.Future] = {}
        self._listeners: dict[str, Listener] = {}
        self.dead = False
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.version = self.call('Browser.getVersion', timeout_s=START_S)['product']
        except WorldError:
            self.close()
            raise

    def call(
        self, method: str, *, session: str = '', timeout_s: float = 30.0, **params: Any
    ) -> dict:
        """The result of a command of the protocol."""
        asked = self.send(method, session=session, **params)
        try:
            reply = asked.result(timeout_s)
        except TimeoutError:
            if not session:  # not a page but all of it hangs: the next world gets another one
                self.dead = True
                self.kill()
            raise NoAnswer(f'{method}: Chromium did not answer within {timeout_s:g} s') from None
        if 'error' in reply:
            raise Refused(f'{method}: {reply["error"]["message"]}')
        return reply['result']

    def send(self, method: str, *, session: str = '', **params: Any) -> concurrent.futures.Future:
        """A command whose answer may be waited for, or not."""
        asked: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            if self.dead:
                raise WorldError(f'{method}: Chromium has ended')
            self._number += 1
            self._asked[self._number] = asked
            message = {'id': self._number, 'method': method, 'params': params}
            message |= {'sessionId': session} if session else {}
            try:
                self.process.stdin.write(json.dumps(message).encode() + b'\0')
                self.process.stdin.flush()
            except OSError as error:  # the reader has not met the end of its pipe yet
                self.dead = True
                del self._asked[self._number]
                raise WorldError(f'{method}: Chromium has ended: {error}') from error
        return asked

    def listen(self, session: str, listener: Listener | None) -> None:
        """Who hears the events of a session, in the thread that reads: it must not wait."""
        if listener is None:
            self._listeners.pop(session, None)
        else:
            self._listeners[session] = listener

    def _read(self) -> None:
        left = b''
        try:
            while some := os.read(self.process.stdout.fileno(), 2**20):
                *whole, left = (left + some).split(b'\0')
                for line in whole:
                    self._heard(json.loads(line))
        finally:  # else everybody would wait for a thread that is gone
            with self._lock:
                self.dead = True
                waiting = list(self._asked.values())
                self._asked.clear()
            for asked in waiting:
                asked.set_exception(WorldError('Chromium has ended'))

    def _heard(self, reply: dict[str, Any]) -> None:
        if 'id' in reply:
            self._asked.pop(reply['id']).set_result(reply)
            return
        listener = self._listeners.get(reply['sessionId']) if 'sessionId' in reply else None
        if listener is not None:
            listener(reply['method'], reply['params'])

    def memory_mb(self) -> float:
        """Of all its processes; pages that several share are counted once (PSS)."""
        total = 0
        for path in pathlib.Path('/proc').glob('[0-9]*/smaps_rollup'):
            with contextlib.suppress(OSError, ProcessLookupError):
                if os.getpgid(int(path.parent.name)) == self.process.pid:
                    found = [line for line in path.read_text().split('\n') if 'Pss:' in line]
                    total += int(found[0].split()[1])
        return total / 1024

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends all its processes; may be called more than once."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.kill()
        if self._lives >= 0:
            os.close(self._lives)
            self._lives = -1
        self.process.wait(END_S)
        deadline = time.monotonic() + END_S
        while os.path.exists(self.profile) and time.monotonic() < deadline:
            shutil.rmtree(self.profile, ignore_errors=True)  # while its last processes die


class Shared:
    """Browsers of this process: one for each list of addresses, while worlds need it and longer."""

    def __init__(self, linger_s: float):
        """linger_s: that a browser waits for its next world; rollouts close theirs in between."""
        self.linger_s = linger_s
        self._lock = threading.Lock()
        self._running: dict[tuple[str, ...], Chromium] = {}
        self._users: dict[Chromium, int] = {}
        self._ends: dict[Chromium, threading.Timer] = {}

    def take(self, origins: tuple[str, ...]) -> Chromium:
        """The browser for these addresses; a new one where there is none or it has died."""
        with self._lock:
            if origins not in self._running or self._running[origins].dead:
                self._running[origins] = Chromium(origins)
            browser = self._running[origins]
            self._users[browser] = self._users[browser] + 1 if browser in self._users else 1
            if browser in self._ends:
                self._ends.pop(browser).cancel()
            return browser

    def give_back(self, browser: Chromium) -> None:
        """Without users it ends after a while, and at once where it is dead."""
        with self._lock:
            self._users[browser] -= 1
            if not self._users[browser]:
                after_s = 0.0 if browser.dead else self.linger_s
                end = threading.Timer(after_s, self._end, (browser,))
                end.daemon = True  # else a program would wait for it
                self._ends[browser] = end
                end.start()

    def _end(self, browser: Chromium) -> None:
        with self._lock:
            if self._users.get(browser) != 0:
                return  # somebody took it meanwhile, or it has ended already
            del self._users[browser]
            self._ends.pop(browser).cancel()
            self._running = {k: v for k, v in self._running.items() if v is not browser}
        browser.close()


LINGER_S = 300.0
SHARED = Shared(LINGER_S)


@contextlib.contextmanager
def browser(*origins: str) -> Iterator[Chromium]:
    """A browser of one's own, to try things."""
    made = Chromium(tuple(map(origin, origins)))
    try:
        yield made
    finally:
        made.close()
