"""WebArena's evaluators (arXiv:2307.13854). The score of an episode is their product.

string_match compares the answer of `stop`, url_match the address of the last page, and program_html
the contents of the pages it visits. Answers that need not be literal are compared by a judge that
the user provides; WebArena uses a model.
"""

import ast
import contextlib
import html
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from agentrl_jax.envs.hosts.answers import Unreadable
from agentrl_jax.envs.hosts.web import words
from agentrl_jax.envs.hosts.web.chromium import Refused
from agentrl_jax.envs.hosts.web.tabs import Visitor
from agentrl_jax.envs.hosts.web.tasks import EITHER, NOT_POSSIBLE, Target, Task
from agentrl_jax.envs.hosts.world import WorldError

Judge = Callable[[str, str, str], bool]  # (answer, reference or reason, intent) -> same meaning
TIMEOUT_S = 30.0
ROLE = """(name => {
  const cells = [...document.querySelectorAll(
    'td[data-label="Account"] span.gl-avatar-labeled-sublabel')];
  const row = cells.findIndex(cell => cell.outerText === '@' + name);
  return document.querySelectorAll('td.col-max-role span')[row].outerText;
})(%s)"""


def score(
    task: Task, answer: str, visitor: Visitor, *, sites: Mapping[str, str], login: str, judge: Any
) -> float:
    """Return 1 if the task is solved, else 0. Programs navigate away from the last page."""
    total = 1.0
    programs = Programs(visitor, sites, login)
    if 'string_match' in task.evaluators:
        total *= string_score(task, answer, judge)
    if total and 'url_match' in task.evaluators:
        total *= url_score(programs.last, task.urls)
    if total and 'program_html' in task.evaluators:
        total *= all(programs.holds(target) for target in task.targets)
    return total


# ---- answers -------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Lowercase a text and strip surrounding blanks and one pair of quotes."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in '\'"':
        text = text[1:-1]
    return text.lower()


def includes(text: str, part: str, *, as_word: bool = False) -> bool:
    """Return whether a text contains a part; as_word: a single character must be a word."""
    text, part = plain(text), plain(part)
    return words.has_word(text, part) if as_word and len(part) == 1 else part in text


def string_score(task: Task, answer: str, judge: Judge | None) -> float:
    right, answer = True, plain(answer)
    for kind, references in task.answers:
        if kind == 'exact_match':
            right &= answer == plain(references[0])
        elif kind == 'must_include':
            alone = len(references) == 1
            right &= all(includes(answer, part, as_word=alone) for part in references)
        elif references == (NOT_POSSIBLE,):
            literal = answer == plain(NOT_POSSIBLE)
            right &= literal or judge is not None and bool(judge(answer, task.reason, task.intent))
        elif judge is None:
            raise WorldError(f'task {task.number} needs an answer judge: set web.judge')
        else:
            right &= bool(answer) and all(judge(answer, part, task.intent) for part in references)
    return float(right)


# ---- addresses -----------------------------------------------------------------------------------


def url_score(url: str, wanted: tuple[str, ...]) -> float:
    """Return 1 if the address has a reference's host and path and matches every query field."""
    place, query = parts(url)
    known = [parts(one) for one in wanted]
    values: dict[str, set[str]] = {}
    for _, more in known:
        for name, options in more.items():
            values.setdefault(name, set()).update(options)
    in_place = any(base in place for base, _ in known)
    in_query = all(name in query and options & set(query[name]) for name, options in values.items())
    return float(in_place and in_query)


def parts(url: str) -> tuple[str, dict[str, list[str]]]:
    split = urllib.parse.urlsplit(url.rstrip('/'))
    return (split.netloc + split.path).rstrip('/'), urllib.parse.parse_qs(split.query)


# ---- pages ---------------------------------------------------------------------------------------


def has_contents(target: Target, found: str) -> bool:
    """Return whether a text has the contents that a target requires."""
    found = html.unescape(found)
    if target.kind == 'exact_match':
        return plain(found) == plain(target.contents[0])
    return all(any(includes(found, part) for part in one.split(EITHER)) for one in target.contents)


class Programs:
    """Programs that inspect pages after an episode, in the browser session that played it."""

    def __init__(self, visitor: Visitor, sites: Mapping[str, str], login: str):
        self.visitor, self.sites, self.login = visitor, sites, login
        self.last = visitor.url()  # address of the episode's last page

    def holds(self, target: Target) -> bool:
        try:
            return has_contents(target, self.found_by(target))
        except Unreadable:  # its address cannot be visited
            return False

    def found_by(self, target: Target) -> str:
        """Return the text that a program reads; '' if the page does not have it."""
        goes_to = target.url
        if goes_to.startswith('func:'):
            goes_to = self.call(goes_to)
        if goes_to != 'last':
            self.visitor.go(goes_to)
            self.visitor.settle()
        if target.locator.startswith('func:'):
            return self.call(target.locator)
        tab = self.visitor.tab
        with contextlib.suppress(Refused):  # on another page; the contents decide
            for code in target.prepare:
                tab.evaluate(f'void ({code})')
        try:
            code = target.locator or 'document.documentElement.outerHTML'
            return str(tab.evaluate(f'({code})'))
        except Refused:
            return ''

    def call(self, text: str) -> str:
        """Return the value of func:name(arguments), a call of one of WebArena's functions."""
        node = ast.parse(text.removeprefix('func:').strip(), mode='eval').body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError(f'{text!r} is not a function call')
        name = node.func.id
        args = [
            ast.literal_eval(a) for a in node.args if not (isinstance(a, ast.Name) and '__' in a.id)
        ]
        args = [one.replace('__last_url__', self.last) for one in args]
        if name == 'reddit_get_post_url':
            return post_of(*args)
        if name == 'gitlab_get_project_memeber_role':  # WebArena's spelling
            try:
                return str(self.visitor.tab.evaluate(ROLE % json.dumps(args[0])))
            except Refused:
                return ''
        if name == 'shopping_get_latest_order_url':
            return latest_order(self.sites['shopping'], self.login)
        reviews = 'shopping_get_sku_latest_review_'
        if name not in (f'{reviews}author', f'{reviews}rating'):
            raise ValueError(f'{name} is not a function of WebArena')
        url = f'{self.sites["shopping"]}/rest/V1/products/{args[0]}/reviews'
        entries = asked(url, self.login)
        if not entries:
            return ''
        last = entries[-1]
        return last['nickname'] if name.endswith('author') else str(last['ratings'][0]['percent'])


def post_of(url: str) -> str:
    """Return the address of a post, /f/forum/number/, from its address or a comment's."""
    split = urllib.parse.urlsplit(url)
    match = re.match(r'/f/([^/]*)/([^/]*)', split.path)
    return f'{split.scheme}://{split.netloc}/f/{match[1]}/{match[2]}/' if match else url


def latest_order(shop: str, login: str) -> str:
    query = urllib.parse.urlencode(
        {
            'searchCriteria[sortOrders][0][field]': 'created_at',
            'searchCriteria[sortOrders][0][direction]': 'DESC',
            'searchCriteria[pageSize]': '1',
        }
    )
    order = asked(f'{shop}/rest/V1/orders?{query}', login)['items'][0]
    return f'{shop}/sales/order/view/order_id/{int(order["increment_id"])}/'


def asked(url: str, login: str) -> Any:
    """Return JSON from the shop's REST API, as its administrator (login: name:password)."""
    split = urllib.parse.urlsplit(url)
    name, _, password = login.partition(':')
    request = urllib.request.Request(
        f'{split.scheme}://{split.netloc}/rest/default/V1/integration/admin/token',
        json.dumps({'username': name, 'password': password}).encode(),
        {'Content-Type': 'application/json'},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            token = json.load(response)
        request = urllib.request.Request(url, headers={'Authorization': f'Bearer {token}'})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return json.load(response)
    except (OSError, ValueError) as error:
        raise WorldError(f'{url}: {error}') from error
