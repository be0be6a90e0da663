"""A visitor of pages: a profile of its own in a browser, its tabs, and what can be done in them.

Nothing here waits for a fixed time. After an action a page is asked until it has nothing left to
load and has drawn twice, at most settle_s seconds.
"""

import json
import time
from typing import Any

from agentrl_jax.envs.hosts.answers import Unreadable
from agentrl_jax.envs.hosts.web import tree
from agentrl_jax.envs.hosts.web.actions import Action
from agentrl_jax.envs.hosts.web.chromium import SHARED, NoAnswer, Refused, origin
from agentrl_jax.envs.hosts.world import WorldError

MOST_TABS = 8
NOT_LOADED = 'chrome-error:'
DRAWN = (
    'new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => '
    'setTimeout(() => done(document.readyState), 0))))'
)
PLACES = 'JSON.stringify([window.scrollX, window.scrollY, window.innerWidth, window.innerHeight])'
KEYS = {  # name in the grammar -> key of the protocol, its code, its text
    'enter': ('Enter', 13, '\r'),
    'tab': ('Tab', 9, ''),
    'backspace': ('Backspace', 8, ''),
    'delete': ('Delete', 46, ''),
    'escape': ('Escape', 27, ''),
    'space': (' ', 32, ' '),
    'pageup': ('PageUp', 33, ''),
    'pagedown': ('PageDown', 34, ''),
    'end': ('End', 35, ''),
    'home': ('Home', 36, ''),
    'arrowleft': ('ArrowLeft', 37, ''),
    'arrowup': ('ArrowUp', 38, ''),
    'arrowright': ('ArrowRight', 39, ''),
    'arrowdown': ('ArrowDown', 40, ''),
}
HELD = {'alt': 1, 'ctrl': 2, 'control': 2, 'meta': 4, 'cmd': 4, 'shift': 8}
HELD_KEYS = {1: ('Alt', 18), 2: ('Control', 17), 4: ('Meta', 91), 8: ('Shift', 16)}
EDITS = {'a': 'selectAll', 'c': 'copy', 'v': 'paste', 'x': 'cut', 'z': 'undo'}
WITHIN = [(0.5, 0.5), *((a, b) for b in (0.2, 0.5, 0.8) for a in (0.1, 0.5, 0.9))]
UNCOVERED = """function(places) {
  const own = this.nodeType === Node.ELEMENT_NODE ? this : this.parentElement;
  return Math.max(0, places.findIndex(([x, y]) => {
    const top = document.elementFromPoint(x, y);
    return top !== null && (own.contains(top) || top.contains(own));
  }));
}"""
CHOOSE = """function() {
  const list = this.closest('select'), multiple = list.multiple;
  this.selected = multiple ? !this.selected : true;
  list.dispatchEvent(new Event('input', {bubbles: true}));
  list.dispatchEvent(new Event('change', {bubbles: true}));
}"""


def ends(request: dict) -> bool:
    """Whether a page will hear the end of a request that it has made.

    It does not of a worker's script, which is known by a number like those of documents.
    """
    if request['type'] in ('EventSource', 'Ping'):
        return False
    return request['type'] == 'Document' or '.' in request['requestId']


class Tab:
    """A page, and what it is still loading."""

    def __init__(self, browser: Any, target: str):
        self.browser, self.target = browser, target
        self.session = browser.call('Target.attachToTarget', targetId=target, flatten=True)[
            'sessionId'
        ]
        self.loading: set[str] = set()  # requests and frames
        self.gone = False  # it has crashed
        self.late = 0  # times that it did not come to rest
        browser.listen(self.session, self._heard)
        for domain in ('Page', 'Network', 'Accessibility', 'DOM'):
            self.call(f'{domain}.enable')

    def call(self, method: str, *, timeout_s: float = 30.0, **params: Any) -> dict:
        return self.browser.call(method, session=self.session, timeout_s=timeout_s, **params)

    def evaluate(self, code: str, **more: Any) -> Any:
        """The value of an expression of JavaScript, in the page."""
        reply = self.call('Runtime.evaluate', expression=code, returnByValue=True, **more)
        if 'exceptionDetails' in reply:
            raise Refused(f'the page: {json.dumps(reply["exceptionDetails"])[:300]}')
        return reply['result'].get('value')

    def _heard(self, method: str, reply: dict) -> None:
        if method == 'Network.requestWillBeSent' and ends(reply):
            self.loading.add(reply['requestId'])
        elif method in ('Network.loadingFinished', 'Network.loadingFailed'):
            self.loading.discard(reply['requestId'])
        elif method in ('Page.frameStartedLoading', 'Page.frameRequestedNavigation'):
            self.loading.add(f'frame {reply["frameId"]}')
        elif method in ('Page.frameStoppedLoading', 'Page.frameDetached'):
            self.loading.discard(f'frame {reply["frameId"]}')
        elif method == 'Page.javascriptDialogOpening':
            leave = reply['type'] == 'beforeunload'
            self.browser.send('Page.handleJavaScriptDialog', session=self.session, accept=leave)
        elif method in ('Inspector.targetCrashed', 'Inspector.detached'):
            self.gone = True

    def settle(self, most_s: float) -> None:
        """Until nothing is loading and the page has been drawn, at most most_s seconds."""
        deadline, busy = time.monotonic() + most_s, True
        while busy and time.monotonic() < deadline and not self.gone:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                state = self.evaluate(DRAWN, awaitPromise=True, timeout_s=left_s)
            except (Refused, NoAnswer):
                state = ''  # it went to another page meanwhile, or does not draw
            busy = state != 'complete' or bool(self.loading)
            if busy:
                time.sleep(0.01)
        if busy:
            self.late += 1
            self.loading.clear()  # what did not end by now is not waited for again

    def go(self, url: str, settle_s: float) -> None:
        """To an address; one that cannot be reached is a page that says so."""
        # Answered when the site has: a slow one is waited for as for any call
        self.call('Page.navigate', url=url, timeout_s=max(settle_s, 30.0))
        self.settle(settle_s)

    def turn(self, way: int, settle_s: float) -> None:
        """Back (-1) or forward (1), where there is a page."""
        reply = self.call('Page.getNavigationHistory')
        place = reply['currentIndex'] + way
        if 0 <= place < len(reply['entries']):
            self.call('Page.navigateToHistoryEntry', entryId=reply['entries'][place]['id'])
            self.settle(settle_s)

    def lines(self) -> list[tree.Line]:
        """What is seen of the page."""
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
        """Of an element, scrolled into view: its middle, or a place where nothing covers it."""
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
        known = self.call('DOM.resolveNode', backendNodeId=node)['object']['objectId']
        reply = self.call(
            'Runtime.callFunctionOn',
            objectId=known,
            functionDeclaration=UNCOVERED,
            arguments=[{'value': places}],
            returnByValue=True,
        )
        return tuple(places[reply['result'].get('value', 0)])

    def hover(self, node: int) -> tuple[float, float]:
        x, y = self.point(node)
        self.call('Input.dispatchMouseEvent', type='mouseMoved', x=x, y=y)
        return x, y

    def click(self, node: int) -> None:
        x, y = self.hover(node)
        for kind in ('mousePressed', 'mouseReleased'):
            self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

    def choose(self, node: int) -> None:
        """An option of a list, whose own window no headless browser draws."""
        known = self.call('DOM.resolveNode', backendNodeId=node)['object']['objectId']
        self.call('Runtime.callFunctionOn', objectId=known, functionDeclaration=CHOOSE)

    def write(self, text: str) -> None:
        for letter in text:
            self.key(letter) if letter.isascii() and letter.isprintable() else self.call(
                'Input.insertText', text=letter
            )

    def key(self, letter: str, held: int = 0) -> None:
        """A letter, or a name of KEYS."""
        commands = {}
        if letter.lower() in KEYS and len(letter) > 1:
            name, code, text = KEYS[letter.lower()]
        else:
            name, text = letter, letter
            code = ord(letter.upper()) if letter.isalnum() else 0
        if held & 6:
            text = ''
            commands = {'commands': [EDITS[letter.lower()]]} if letter.lower() in EDITS else {}
        reply = dict(key=name, windowsVirtualKeyCode=code, modifiers=held)
        kind = 'keyDown' if text else 'rawKeyDown'
        self.call('Input.dispatchKeyEvent', type=kind, text=text, **reply, **commands)
        self.call('Input.dispatchKeyEvent', type='keyUp', **reply)

    def press(self, keys: str) -> None:
        """Such as Enter, or Ctrl+a."""
        *before, last = [part.strip() for part in keys.split('+')] if keys.strip() != '+' else '+'
        if any(part.lower() not in HELD for part in before):
            raise Unreadable(f'{keys!r} holds a key that cannot be held')
        if last.lower() not in KEYS and len(last) != 1:
            raise Unreadable(f'{last!r} is no key; those are letters and {", ".join(KEYS)}')
        held = sum(HELD[part.lower()] for part in before)
        for bit, (name, code) in HELD_KEYS.items():
            if held & bit:
                self.call(
                    'Input.dispatchKeyEvent',
                    type='rawKeyDown',
                    key=name,
                    windowsVirtualKeyCode=code,
                    modifiers=held,
                )
        self.key(last, held)
        for bit, (name, code) in HELD_KEYS.items():
            if held & bit:
                self.call(
                    'Input.dispatchKeyEvent', type='keyUp', key=name, windowsVirtualKeyCode=code
                )


class Visitor:
    """Tabs with cookies of their own; another visitor of the browser sees none of them."""

    def __init__(self, origins: tuple[str, ...], *, width: int, height: int, settle_s: float):
        if not settle_s > 0:
            raise ValueError(f'settle_s={settle_s} must be above 0')
        self.origins = tuple(map(origin, origins))
        self.size, self.settle_s = (width, height), settle_s
        self.browser = SHARED.take(self.origins)
        self.context, self.tabs, self.at = '', [], 0
        self.seen: list[tree.Line] = []
        self.front: Tab | None = None  # the one that is drawn

    def begin(self) -> None:
        """An empty profile with one empty tab."""
        if self.browser.dead:
            dead, self.browser = self.browser, SHARED.take(self.origins)
            SHARED.give_back(dead)
            self.context = ''
        self._leave()
        made = self.browser.call('Target.createBrowserContext', disposeOnDetach=True)
        self.context = made['browserContextId']
        self.browser.call(
            'Browser.setDownloadBehavior', behavior='deny', browserContextId=self.context
        )
        self.tabs, self.at, self.seen = [], 0, []
        self.open()

    def take_cookies(self, cookies: list[dict]) -> None:
        """As the protocol and Playwright write them."""
        self.browser.call('Storage.setCookies', cookies=cookies, browserContextId=self.context)

    def close(self) -> None:
        if self.browser is None:
            return
        browser, self.browser = self.browser, None
        try:
            if self.context and not browser.dead:
                browser.call('Target.disposeBrowserContext', browserContextId=self.context)
        except WorldError:
            pass  # it is ended, or it ends with the browser
        finally:
            SHARED.give_back(browser)

    def _leave(self) -> None:
        for tab in self.tabs:
            self.browser.listen(tab.session, None)
        if self.context:
            self.browser.call('Target.disposeBrowserContext', browserContextId=self.context)
            self.context = ''

    @property
    def tab(self) -> Tab:
        return self.tabs[self.at]

    def open(self) -> None:
        """A new tab, which comes to the front."""
        if len(self.tabs) >= MOST_TABS:
            raise Unreadable(f'there are {MOST_TABS} tabs, and no more are opened')
        made = self.browser.call(
            'Target.createTarget', url='about:blank', browserContextId=self.context
        )
        self._add(made['targetId'])

    def _add(self, target: str) -> None:
        tab = Tab(self.browser, target)
        width, height = self.size
        tab.call(
            'Emulation.setDeviceMetricsOverride',
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        tab.call('Emulation.setFocusEmulationEnabled', enabled=True)
        tab.call('Emulation.setTimezoneOverride', timezoneId='UTC')
        self.tabs.append(tab)
        self.at = len(self.tabs) - 1
        self._to_front()

    def allows(self, url: str) -> bool:
        if url == 'about:blank':
            return True
        try:
            return origin(url) in self.origins
        except ValueError:
            return False

    def go(self, url: str) -> None:
        """To an address that the config lists."""
        if '://' not in url and url != 'about:blank':
            url = f'http://{url}'
        if not self.allows(url):
            raise Unreadable(f'{url} is none of the sites that can be visited')
        self.tab.go(url, self.settle_s)

    def do(self, action: Action) -> None:
        """Unreadable for what cannot be done here."""
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
            self._close_tab()
        elif verb == 'goto':
            self.go(action.text.strip())
        elif verb in ('go_back', 'go_forward'):
            tab.turn(1 if verb == 'go_forward' else -1, self.settle_s)
        self.settle()

    def _at_element(self, action: Action) -> None:
        if not 1 <= action.element <= len(self.seen):
            raise Unreadable(f'there is no element {action.element} on the page')
        line, tab = self.seen[action.element - 1], self.tab
        if action.verb == 'hover':
            tab.hover(line.node)
        elif action.verb == 'click' and line.role in ('option', 'MenuListOption'):
            tab.choose(line.node) if 'select' in self._tag(line.node) else tab.click(line.node)
        else:
            tab.click(line.node)
        if action.verb == 'type':
            tab.write(action.text)
            if action.enter:
                tab.key('enter')

    def _tag(self, node: int) -> str:
        reply = self.tab.call('DOM.describeNode', backendNodeId=node)['node']
        return 'select' if reply['nodeName'] == 'OPTION' else ''

    def _close_tab(self) -> None:
        gone = self.tabs.pop(self.at)
        self.browser.listen(gone.session, None)
        self.browser.call('Target.closeTarget', targetId=gone.target)
        self.at = max(self.at - 1, 0)
        if not self.tabs:
            self.open()

    def settle(self) -> None:
        """The page at the front, and whatever tabs pages have opened or closed."""
        self._to_front()
        self.tab.settle(self.settle_s)
        reply = self.browser.call('Target.getTargets')['targetInfos']
        mine = [
            info['targetId']
            for info in reply
            if info['type'] == 'page' and info.get('browserContextId') == self.context
        ]
        front = self.tab
        self.tabs = [tab for tab in self.tabs if tab.target in mine]
        self.at = self.tabs.index(front) if front in self.tabs else max(len(self.tabs) - 1, 0)
        known = {tab.target for tab in self.tabs}
        for target in mine:
            if target in known:
                continue
            if len(self.tabs) < MOST_TABS:
                self._add(target)
                self.tab.settle(self.settle_s)
            else:
                self.browser.call('Target.closeTarget', targetId=target)
        if not self.tabs:
            self.open()
        self._to_front()
        if self.tab.gone:
            raise WorldError('the page has crashed')

    def _to_front(self) -> None:
        """A page behind another one is not drawn."""
        if self.tab is not self.front:
            self.front = self.tab
            self.front.call('Page.bringToFront')

    def look(self) -> list[tree.Line]:
        """Lines of the page at the front; actions name them from now on."""
        self.seen = [] if self.url().startswith(NOT_LOADED) else self.tab.lines()
        return self.seen

    def url(self) -> str:
        return self.tab.evaluate('location.href')

    def titles(self) -> list[str]:
        return [tab.evaluate('document.title') or '' for tab in self.tabs]
