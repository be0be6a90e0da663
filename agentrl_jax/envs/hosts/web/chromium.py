"""Headless Chromium, driven by Playwright.

Playwright's asynchronous interface runs in one thread per browser, so worlds may call from any
thread and do not wait for each other. Worlds of a process with the same allowed addresses share one
Chromium. Playwright's driver ends Chromium and removes its profile when this process ends, even
after SIGKILL.

Addresses are blocked by flags of Chromium's network service, not by a Playwright route: unlisted
addresses go to a proxy that does not exist, and no other name is resolved. This covers redirects,
frames, workers, service workers, web sockets, beacons and WebRTC; a route covers only some of them.
"""

import asyncio
import importlib.util
import os
import re
import shutil
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_jax.envs.hosts.connection import split
from agentrl_jax.envs.hosts.world import WorldError
from agentrl_jax.machine.children import kill_group

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

T = TypeVar('T')
NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
START_S, END_S, PROBE_S = 60.0, 10.0, 5.0
SOCKET_FOLDER = 55  # maximum length of TMPDIR: Chromium adds about 46; a socket path may have 107
NOBODY = 'nobody.invalid'  # a name that never resolves (RFC 6761)
FLAGS = (  # in addition to Playwright's
    '--no-sandbox',  # the sandbox needs user namespaces, which containers seldom have
    '--disable-gpu',
    '--disable-domain-reliability',
    '--disable-quic',
    '--disable-site-isolation-trials',  # otherwise each site of a page gets its own process
    '--force-webrtc-ip-handling-policy=disable_non_proxied_udp',
    '--webrtc-ip-handling-policy=disable_non_proxied_udp',
    '--lang=en-US',
    '--no-pings',
)
LEFT_OUT = ['--disable-popup-blocking', '--enable-unsafe-swiftshader']  # of Playwright's flags


class NoAnswer(WorldError):
    """Chromium did not answer a call in time."""


class Refused(WorldError):
    """Chromium rejected a call; the browser and its pages are still running."""


def executable() -> str:
    """Return the path of Chromium; raise an error with an install hint if it is missing."""
    if importlib.util.find_spec('playwright') is None:
        raise ModuleNotFoundError('Playwright drives Chromium: pip install playwright')
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise FileNotFoundError(
            f'{", ".join(NAMES)} are not in PATH. On Debian: apt-get install chromium'
        )
    return path


def origin(url: str) -> str:
    """Return 'http://host:port' of an address; raise ValueError if it is invalid."""
    parts = split(url, ('http', 'https'), 'a site')
    host = f'[{parts.hostname}]' if ':' in parts.hostname else parts.hostname
    port = parts.port or {'http': 80, 'https': 443}[parts.scheme]
    return f'{parts.scheme}://{host}:{port}'


def network_flags(origins: tuple[str, ...]) -> list[str]:
    """Return the flags that block all other addresses."""
    places = [address.partition('://')[2] for address in origins]
    hosts = [place.rpartition(':')[0] for place in places]
    rules = ['MAP * ~NOTFOUND', *(f'EXCLUDE {host}' for host in dict.fromkeys(hosts))]
    return [
        f'--proxy-server=http://{NOBODY}:1',
        f'--proxy-bypass-list={";".join(["<-loopback>", *places])}',
        f'--host-resolver-rules={", ".join(rules)}',
    ]


class Loop(asyncio.SelectorEventLoop):
    """An event loop that starts Playwright's driver in a new session.

    The driver survives a kill of this process group, then ends Chromium and removes the profile.
    """

    async def subprocess_exec(self, *args: Any, **more: Any) -> tuple:
        return await super().subprocess_exec(*args, start_new_session=True, **more)


class Chromium:
    """A browser process; its calls may come from any thread."""

    def __init__(self, origins: tuple[str, ...] = ()):
        """origins: the allowed sites, in the format of origin()."""
        path = executable()
        self.users, self.ending = 0, threading.Timer(0.0, self.close)  # for Shared
        self.dead, self.pid = False, 0
        self._lock, self._closed, self._playwright = threading.Lock(), False, None
        self._loop = Loop()
        threading.Thread(target=self._serve, daemon=True).start()
        try:
            self.run(self._start(path, [*FLAGS, *network_flags(origins)]), START_S)
        except WorldError:
            self.close()
            raise

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _start(self, path: str, flags: list[str]) -> None:
        from playwright.async_api import async_playwright

        long = len(os.environ.get('TMPDIR', '')) > SOCKET_FOLDER
        self._playwright = await async_playwright().start()
        self._browser = await self._playwright.chromium.launch(
            executable_path=path,
            args=flags,
            ignore_default_args=LEFT_OUT,
            env=os.environ | ({'TMPDIR': '/tmp'} if long else {}),
            handle_sigint=False,  # Ctrl-C goes to the run
            timeout=1000 * START_S,
        )
        self._browser.on('disconnected', lambda _: setattr(self, 'dead', True))
        self._session = await self._browser.new_browser_cdp_session()
        processes = (await self._session.send('SystemInfo.getProcessInfo'))['processInfo']
        command = (await self._session.send('SystemInfo.getInfo'))['commandLine']
        self._profile = Path(re.search(r'--user-data-dir=(.+?)(?: --|$)', command)[1])
        self.pid = next(each['id'] for each in processes if each['type'] == 'browser')

    def run(self, work: Coroutine[None, None, T], timeout_s: float = 30.0) -> T:
        """Run a Playwright call and return its result; raise WorldError if it fails."""
        from playwright.async_api import Error

        if self.dead:
            work.close()
            raise WorldError('Chromium has ended')
        reply = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return reply.result(timeout_s)
        except TimeoutError:  # not cancelled: Playwright cannot handle replies to cancelled calls
            failure: WorldError = NoAnswer(f'Chromium did not answer within {timeout_s:g} s')
        except Error as error:
            first, *log = error.message.splitlines()
            fatal = [line.strip() for line in log if 'FATAL' in line][:1]
            failure = Refused(f'Chromium: {". ".join([first, *fatal])}')
        if not self._answers():
            self.dead = True
            self.kill()  # the next world gets another browser
            failure = WorldError(f'Chromium has ended: {failure}')
        raise failure

    def _answers(self) -> bool:
        """Return whether the browser is alive, even if a page has ended or hangs."""
        from playwright.async_api import Error

        if not self.pid or self.dead:
            return False
        probe = self._session.send('Browser.getVersion')
        reply = asyncio.run_coroutine_threadsafe(probe, self._loop)
        try:
            return bool(reply.result(PROBE_S))
        except (TimeoutError, Error):
            return False

    def context(self, width: int, height: int) -> 'BrowserContext':
        """Return an empty profile with this window size."""
        new_context = self._browser.new_context(
            viewport={'width': width, 'height': height}, timezone_id='UTC', accept_downloads=False
        )
        return self.run(new_context)

    def pages(self, context: str) -> int:
        """Return the number of pages in a context, including pages that are being prepared."""
        targets = self.run(self._session.send('Target.getTargets'))['targetInfos']
        return sum(x['type'] == 'page' and x.get('browserContextId') == context for x in targets)

    def kill(self) -> None:
        if self.pid:
            kill_group(self.pid)

    def close(self) -> None:
        """End all its processes; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.dead and self.pid:
            self.kill()
            end = time.monotonic() + END_S
            while self._profile.exists() and time.monotonic() < end:
                time.sleep(0.02)  # the driver would leave the profile if stopped now
        self.dead = True
        if self._playwright is not None:  # its driver ends Chromium and removes the profile
            stopping = asyncio.run_coroutine_threadsafe(self._playwright.stop(), self._loop)
            try:
                stopping.result(END_S)
            except TimeoutError:
                self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)


class Shared:
    """The browsers of this process, one per list of addresses, kept for a while after use."""

    def __init__(self, linger_s: float):
        """linger_s: time that an idle browser is kept, since rollouts close and reopen worlds."""
        self.linger_s = linger_s
        self._lock = threading.Lock()
        self._running: dict[tuple[str, ...], Chromium] = {}

    def take(self, origins: tuple[str, ...]) -> Chromium:
        """Return the browser for these addresses; start one if needed."""
        with self._lock:
            browser = self._running.get(origins)
            if browser is None or browser.dead:
                browser = self._running[origins] = Chromium(origins)
            browser.users += 1
            browser.ending.cancel()
            return browser

    def give_back(self, browser: Chromium) -> None:
        """Release a browser; without users it ends after a while, a dead one immediately."""
        with self._lock:
            browser.users -= 1
            if not browser.users:
                after_s = 0.0 if browser.dead else self.linger_s
                browser.ending = threading.Timer(after_s, self._end, (browser,))
                browser.ending.daemon = True  # otherwise process exit would wait for it
                browser.ending.start()

    def _end(self, browser: Chromium) -> None:
        with self._lock:
            if browser.users:
                return  # a world has taken it in the meantime
            self._running = {k: v for k, v in self._running.items() if v is not browser}
        browser.close()


SHARED = Shared(linger_s=300.0)
