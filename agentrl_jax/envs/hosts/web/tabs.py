"""A visitor of pages: a browser profile, its tabs and the actions in them.

There are no fixed waits. After an action, the page is polled until nothing is loading and it has
been drawn twice, for up to SETTLE_S seconds.
"""

import contextlib
import json
import re
import time
from typing import TYPE_CHECKING, Any

from agentrl_jax.envs.hosts.answers import Unreadable
from agentrl_jax.envs.hosts.web import tree
from agentrl_jax.envs.hosts.web.actions import Action
from agentrl_jax.envs.hosts.web.chromium import SHARED, Chromium, NoAnswer, Refused, origin
from agentrl_jax.envs.hosts.world import WorldError

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession, Dialog, Page

MAX_TABS = 8
SETTLE_S = 10.0  # maximum time for a page to finish loading
NOT_LOADED = 'chrome-error:'
DRAWN = (
    'new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => '
    'setTimeout(() => done(document.readyState), 0))))'
)
PLACES = 'JSON.stringify([window.scrollX, window.scrollY, window.innerWidth, window.innerHeight])'
KEYS = 'Enter Tab Backspace Delete Escape Space PageUp PageDown End Home'.split()
KEYS += [f'Arrow{way}' for way in ('Left', 'Up', 'Right', 'Down')]
NAMED = {name.lower(): name for name in KEYS}
HELD = {'alt': 'Alt', 'ctrl': 'Control', 'control': 'Control', 'shift': 'Shift'}
HELD |= {'meta': 'Control', 'cmd': 'Control'}  # as WebArena does on Linux
WITHIN = [(0.5, 0.5), *((a, b) for b in (0.2, 0.5, 0.8) for a in (0.1, 0.5, 0.9))]
UNCOVERED = """function(places) {
  const own = this.nodeType === Node.ELEMENT_NODE ? this : this.parentElement;
  return Math.max(0, places.findIndex(([x, y]) => {
    const top = document.elementFromPoint(x, y);
    return top !== null && (own.contains(top) || top.contains(own));
  }));
}"""
CHOOSE = """function() {
  const list = this.closest('select');
  if (!list) return false;
  this.selected = list.multiple ? !this.selected : true;
  list.dispatchEvent(new Event('input', {bubbles: true}));
  list.dispatchEvent(new Event('change', {bubbles: true}));
  return true;
}"""


def ends(request: dict) -> bool:
    """Return whether Chromium reports the end of a request; it does not for worker scripts."""
    if request['type'] in ('EventSource', 'Ping'):
        return False
    return request['type'] == 'Document' or '.' in request['requestId']


class Tab:
    """A page and its pending requests."""

    def __init__(self, browser: Chromium, page: 'Page'):
        self.browser, self.page = browser, page
        self.loading: set[str] = set()  # requests and frames
        self.gone = False  # it has crashed
        self.late = 0  # number of times that it was still loading at the deadline
        self.session = browser.run(self._attach())
        for domain in ('Page', 'Network', 'Accessibility', 'DOM'):
            self.call(f'{domain}.enable')

    async def _attach(self) -> 'CDPSession':
        """Return a session of the DevTools protocol; Playwright's thread must add listeners."""
        self.page.on('crash', lambda _: setattr(self, 'gone', True))
        self.page.on('dialog', close_dialog)
        session = await self.page.context.new_cdp_session(self.page)
        add, discard = self.loading.add, self.loading.discard
        session.on('Network.requestWillBeSent', lambda x: ends(x) and add(x['requestId']))
        for event in ('Finished', 'Failed'):
            session.on(f'Network.loading{event}', lambda x: discard(x['requestId']))
        for event in ('StartedLoading', 'RequestedNavigation'):
            session.on(f'Page.frame{event}', lambda x: add(f'frame {x["frameId"]}'))
        for event in ('StoppedLoading', 'Detached'):
            session.on(f'Page.frame{event}', lambda x: discard(f'frame {x["frameId"]}'))
        return session

    def call(self, method: str, *, timeout_s: float = 30.0, **params: Any) -> dict:
        """Run a command of the DevTools protocol; return its result."""
        return self.browser.run(self.session.send(method, params), timeout_s)

    def evaluate(self, code: str, **more: Any) -> Any:
        """Return the value of a JavaScript expression in the page."""
        reply = self.call('Runtime.evaluate', expression=code, returnByValue=True, **more)
        if 'exceptionDetails' in reply:
            raise Refused(f'the page: {json.dumps(reply["exceptionDetails"])[:300]}')
        return reply['result'].get('value')

    def settle(self, most_s: float = SETTLE_S) -> None:
        """Wait up to most_s seconds until nothing is loading and the page has been drawn."""
        deadline, busy = time.monotonic() + most_s, True
        while busy and time.monotonic() < deadline and not self.gone:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                state = self.evaluate(DRAWN, awaitPromise=True, timeout_s=left_s)
            except (Refused, NoAnswer):
                state = ''  # it navigated away, or does not draw
            busy = state != 'complete' or bool(self.loading)
            if busy:
                time.sleep(0.01)
        if busy:
            self.late += 1
            self.loading.clear()  # never wait again for the unfinished requests

    def go(self, url: str) -> None:
        """Go to an address; if it cannot be reached, the page is an error page."""
        # This returns when the site answers, so a slow site gets the timeout of other calls
        self.call('Page.navigate', url=url)
        self.settle()

    def turn(self, way: int) -> None:
        """Go back (-1) or forward (1) if there is a page."""
        reply = self.call('Page.getNavigationHistory')
        place = reply['currentIndex'] + way
        if 0 <= place < len(reply['entries']):
            self.call('Page.navigateToHistoryEntry', entryId=reply['entries'][place]['id'])
            self.settle()

    def lines(self) -> list[tree.Line]:
        """Return the visible lines of the page."""
        view = json.loads(self.evaluate(PLACES))
        reply = self.call('DOMSnapshot.captureSnapshot', computedStyles=[])
        document = reply['documents'][0]
        nodes, layout = document['nodes']['backendNodeId'], document['layout']
        bounds = {
            nodes[at]: tuple(box)
            for at, box in zip(layout['nodeIndex'], layout['bounds'], strict=True)
        }
        return tree.lines(self.call('Accessibility.getFullAXTree')['nodes'], bounds, tuple(view))

    # -- input

    def point(self, node: int) -> tuple[float, float]:
        """Scroll an element into view; return its middle, or a point that nothing covers."""
        try:
            self.call('DOM.scrollIntoViewIfNeeded', backendNodeId=node)
            quads = self.call('DOM.getContentQuads', backendNodeId=node)['quads']
        except Refused:
            quads = []
        if not quads:
            raise Unreadable('that element has no place on the page')
        x, y = quads[0][0::2], quads[0][1::2]
        places = [
            [min(x) + across * (max(x) - min(x)), min(y) + down * (max(y) - min(y))]
            for across, down in WITHIN
        ]
        return tuple(places[self._apply(node, UNCOVERED, places) or 0])

    def hover(self, node: int) -> tuple[float, float]:
        x, y = self.point(node)
        self.browser.run(self.page.mouse.move(x, y))
        return x, y

    def click(self, node: int) -> None:
        self.browser.run(self.page.mouse.click(*self.hover(node)))

    def choose(self, node: int) -> bool:
        """Choose an option of a select list, as headless browsers draw none; False elsewhere."""
        return self._apply(node, CHOOSE)

    def _apply(self, node: int, function: str, *arguments: Any) -> Any:
        """Call a JavaScript function with an element as `this`; return its value."""
        element = self.call('DOM.resolveNode', backendNodeId=node)['object']['objectId']
        reply = self.call(
            'Runtime.callFunctionOn',
            objectId=element,
            functionDeclaration=function,
            arguments=[{'value': value} for value in arguments],
            returnByValue=True,
        )
        return reply['result'].get('value')

    def write(self, text: str) -> None:
        """Type a text; insert line breaks directly, since the keyboard would press Enter."""
        for part in re.split(r'([\r\n]+)', text):
            keyboard = self.page.keyboard
            self.browser.run(keyboard.insert_text(part) if part.isspace() else keyboard.type(part))

    def press(self, keys: str) -> None:
        """Press keys, such as Enter or Ctrl+a."""
        *before, last = [part.strip() for part in keys.split('+')] if keys.strip() != '+' else '+'
        if any(part.lower() not in HELD for part in before):
            raise Unreadable(f'{keys!r} holds a key that cannot be held')
        if last.lower() not in NAMED and len(last) != 1:
            raise Unreadable(f'{last!r} is no key; those are letters and {", ".join(KEYS)}')
        if last.isascii():
            held = [HELD[part.lower()] for part in before]
            last = NAMED.get(last.lower(), last)
            self.browser.run(self.page.keyboard.press('+'.join([*held, last])))
        else:
            self.write(last)


async def close_dialog(dialog: 'Dialog') -> None:
    """Dismiss a dialog, but let a page be left."""
    from playwright.async_api import Error

    with contextlib.suppress(Error):  # the page has closed it
        await (dialog.accept() if dialog.type == 'beforeunload' else dialog.dismiss())


class Visitor:
    """Tabs with cookies that other visitors of the browser do not share."""

    def __init__(self, origins: tuple[str, ...], size: tuple[int, int]):
        """size: width and height of the window."""
        self.origins = tuple(map(origin, origins))
        self.size = size
        self.browser = SHARED.take(self.origins)
        self.context: BrowserContext | None = None
        self.tabs: list[Tab] = []
        self.front: Tab | None = None  # the tab that is drawn

    def begin(self) -> None:
        """Start with an empty profile and one empty tab."""
        if self.browser.dead:
            dead, self.browser = self.browser, SHARED.take(self.origins)
            SHARED.give_back(dead)
            self.context = None
        self._leave()
        self.context = self.browser.context(*self.size)
        self.tabs, self.at = [], 0
        self.seen: list[tree.Line] = []
        self.unreported = 0  # pages that Playwright does not report
        self.open()
        target = self.tab.call('Target.getTargetInfo')['targetInfo']
        self.context_id = target['browserContextId']

    def take_cookies(self, cookies: list[dict]) -> None:
        """Add cookies in Playwright's format."""
        self.browser.run(self.context.add_cookies(cookies))

    def close(self) -> None:
        if self.browser is None:
            return
        with contextlib.suppress(WorldError):  # already closed, or closed with the browser
            if not self.browser.dead:
                self._leave()
        browser, self.browser = self.browser, None
        SHARED.give_back(browser)

    def _leave(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            self.browser.run(context.close())

    @property
    def tab(self) -> Tab:
        return self.tabs[self.at]

    def open(self) -> None:
        """Open a new tab and bring it to the front."""
        if len(self.tabs) >= MAX_TABS:
            raise Unreadable(f'there are {MAX_TABS} tabs, and no more are opened')
        self._add(self.browser.run(self.context.new_page()))

    def _add(self, page: 'Page') -> None:
        self.tabs.append(Tab(self.browser, page))
        self.at = len(self.tabs) - 1
        self._to_front()

    def go(self, url: str) -> None:
        """Go to an address; raise Unreadable unless it is on the sites of the config."""
        if '://' not in url and url != 'about:blank':
            url = f'http://{url}'
        try:
            allowed = url == 'about:blank' or origin(url) in self.origins
        except ValueError:
            allowed = False
        if not allowed:
            raise Unreadable(f'{url} is none of the sites that can be visited')
        self.tab.go(url)

    def do(self, action: Action) -> None:
        """Execute an action; raise Unreadable if it is impossible here."""
        verb, tab = action.verb, self.tab
        if verb in ('click', 'hover', 'type'):
            try:
                self._at_element(action)
            except Refused as refused:
                raise Unreadable('that element is gone') from refused
        elif verb == 'press':
            tab.press(action.text)
        elif verb == 'scroll':
            way = {'up': -1, 'down': 1}[action.text]
            tab.evaluate(f'window.scrollBy({{top: {way} * innerHeight, behavior: "instant"}})')
        elif verb == 'new_tab':
            self.open()
        elif verb == 'tab_focus':
            if action.element >= len(self.tabs):
                raise Unreadable(f'there is no tab {action.element}')
            self.at = action.element
        elif verb == 'close_tab':
            self.browser.run(self.tabs.pop(self.at).page.close())
            self.at = max(self.at - 1, 0)
            if not self.tabs:
                self.open()
        elif verb == 'goto':
            self.go(action.text.strip())
        elif verb in ('go_back', 'go_forward'):
            tab.turn(1 if verb == 'go_forward' else -1)
        self.settle()

    def _at_element(self, action: Action) -> None:
        if not 1 <= action.element <= len(self.seen):
            raise Unreadable(f'there is no element {action.element} on the page')
        line, tab = self.seen[action.element - 1], self.tab
        if action.verb == 'hover':
            tab.hover(line.node)
        else:
            option = action.verb == 'click' and line.role in ('option', 'MenuListOption')
            if not (option and tab.choose(line.node)):
                tab.click(line.node)
        if action.verb == 'type':
            tab.write(action.text)
            if action.enter:
                tab.press('Enter')

    def settle(self) -> None:
        """Wait for the front page, and track tabs that pages have opened or closed."""
        self._to_front()
        self.tab.settle()
        deadline = time.monotonic() + SETTLE_S
        while (extra := self._extra_pages()) != self.unreported:
            if time.monotonic() > deadline:
                self.unreported = extra  # for example, a tab whose site answers 204
            time.sleep(0.01)
        front, pages = self.tab, self.context.pages
        self.tabs = [tab for tab in self.tabs if tab.page in pages]
        self.at = self.tabs.index(front) if front in self.tabs else max(len(self.tabs) - 1, 0)
        for page in pages:
            if page in [tab.page for tab in self.tabs]:
                continue
            if len(self.tabs) < MAX_TABS:
                self._add(page)
                self.tab.settle()
            else:
                self.browser.run(page.close())
        if not self.tabs:
            self.open()
        self._to_front()
        if self.tab.gone:
            raise WorldError('the page has crashed')

    def _extra_pages(self) -> int:
        """Return the number of pages that Playwright is still preparing."""
        return self.browser.pages(self.context_id) - len(self.context.pages)

    def _to_front(self) -> None:
        """Bring the tab to the front; Chromium draws only the front page."""
        if self.tab is not self.front:
            self.front = self.tab
            self.browser.run(self.front.page.bring_to_front())

    def look(self) -> list[tree.Line]:
        """Return the lines of the front page; later actions refer to them."""
        self.seen = [] if self.url().startswith(NOT_LOADED) else self.tab.lines()
        return self.seen

    def url(self) -> str:
        return self.tab.evaluate('location.href')

    def titles(self) -> list[str]:
        return [tab.evaluate('document.title') or '' for tab in self.tabs]
