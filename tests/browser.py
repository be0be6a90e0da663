"""A tab of a real browser for tests of pages: it clicks, reads, and keeps what goes wrong."""

import json
import shutil
import time

import pytest

from agentrl_jax.envs.hosts.web import chromium

MISSING = not any(map(shutil.which, chromium.NAMES))
needs_chromium = pytest.mark.skipif(MISSING, reason='Chromium is not installed')
PATIENCE_S = 20.0
SIZE = dict(width=1300, height=1000, deviceScaleFactor=1, mobile=False)
CENTRE = """
(() => {
  const found = document.querySelector(%s);
  found.scrollIntoView({block: 'center', behavior: 'instant'});
  const {x, y, width, height} = found.getBoundingClientRect();
  return [x + width / 2, y + height / 2];
})()
"""


class Tab:
    """One tab; `faults` are exceptions, console errors and requests that failed or were blocked."""

    def __init__(self, browser, url):
        self.browser, self.faults = browser, []
        self.target = browser.call('Target.createTarget', url='about:blank')['targetId']
        attached = browser.call('Target.attachToTarget', targetId=self.target, flatten=True)
        self.session = attached['sessionId']
        browser.listen(self.session, self._heard)
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.call(f'{domain}.enable')
        self.call('Emulation.setDeviceMetricsOverride', **SIZE)
        self.call('Page.navigate', url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def close(self):
        self.browser.listen(self.session, None)
        self.browser.call('Target.closeTarget', targetId=self.target)

    def call(self, method, **params):
        return self.browser.call(method, session=self.session, **params)

    def _heard(self, method, told):
        if method == 'Runtime.exceptionThrown':
            self.faults.append(json.dumps(told['exceptionDetails'])[:300])
        elif method == 'Runtime.consoleAPICalled' and told['type'] in ('error', 'assert'):
            self.faults.append(json.dumps(told['args'])[:300])
        elif method == 'Log.entryAdded' and told['entry']['level'] in ('error', 'warning'):
            self.faults.append(told['entry']['text'])
        elif method == 'Network.loadingFailed':
            self.faults.append(f'{told["type"]}: {told["errorText"]}')

    def evaluate(self, expression):
        """The value of JavaScript in the page."""
        told = self.call('Runtime.evaluate', expression=expression, returnByValue=True)
        assert 'exceptionDetails' not in told, told
        return told['result'].get('value')

    def wait(self, expression):
        """Until it is true in the page."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (expression, self.faults)
            time.sleep(0.05)

    def move(self, selector):
        """The pointer to the middle of an element."""
        x, y = self.evaluate(CENTRE % json.dumps(selector))
        self.call('Input.dispatchMouseEvent', type='mouseMoved', x=x, y=y)
        return x, y

    def click(self, selector):
        x, y = self.move(selector)
        for kind in ('mousePressed', 'mouseReleased'):
            self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

    def text(self, selector='body'):
        return self.evaluate(f'document.querySelector({json.dumps(selector)}).innerText')

    def seen(self, selector):
        """How many elements show, those outside of the window included."""
        return self.evaluate(
            f'[...document.querySelectorAll({json.dumps(selector)})]'
            '.filter((x) => x.checkVisibility()).length'
        )
