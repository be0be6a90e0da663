"""Experts for MiniWoB++ tasks: each maps an observation to the next action."""

import ast
import dataclasses
import operator
import re
from collections.abc import Callable, Sequence

from agentrl_jax.envs.hosts.web.tree import Line

EDITED = ('textbox', 'searchbox', 'spinbutton')


class Element:
    """A line of an observation; number: its position, from 1."""

    def __init__(self, number: int, line: Line):
        self.role, self.name, self.more = line.role, line.name, dict(line.more)
        self.value = ast.literal_eval(self.more.get('value', "''"))  # its text
        self.click = f'click [{number}]'
        self.number = number

    def has(self, state: str) -> bool:
        return self.more.get(state) == 'True'


@dataclasses.dataclass(frozen=True)
class Seen:
    """An observation: the page, the task and the previous action."""

    elements: tuple[Element, ...]
    task: str
    before: str

    def named(self, name: str, *roles: str) -> Element | None:
        """Return the first element with this name and one of the roles, ignoring punctuation."""
        fitting = (e for e in self.elements if not roles or e.role in roles)
        return next((e for e in fitting if e.name.strip(' .,;"') == name.strip(' .,;"')), None)

    def of(self, *roles: str) -> list[Element]:
        return [e for e in self.elements if e.role in roles]

    @property
    def ordinal(self) -> int:
        """Position in the task text, such as 2nd, counted from 0; 0 without one."""
        match = re.search(r'(\d+)(?:st|nd|rd|th)', self.task)
        return int(match[1]) - 1 if match else 0

    def quoted(self) -> list[str]:
        return re.findall('"(.*?)"', self.task)

    def press(self, name: str = 'Submit') -> str:
        element = self.named(name, 'button')
        return element.click if element else ''


def writes(wanted: list[tuple[Element, str]], then: str) -> str:
    """Return the action that writes the next text into its field; `then` if all are written.

    Password fields show dots.
    """
    for field, text in wanted:
        if field.value in (text, '•' * len(text)):
            continue
        if not field.value or field.role == 'textbox':
            return f'type [{field.number}] [{text}] [0]'
        return field.click
    return then


def button(seen: Seen) -> str:
    """Click the only button, or the one that the task quotes."""
    names = [*seen.quoted(), 'Cancel', 'OK', 'Close']
    if len(seen.of('button')) == 1:
        return seen.of('button')[0].click
    buttons = [seen.named('Close' if n == 'x' else n, 'button') for n in names]
    return next((e.click for e in buttons if e), '')


def first_button(seen: Seen) -> str:
    return seen.press('ONE')


def buttons_in_order(seen: Seen) -> str:
    one = seen.press('ONE')
    return seen.press('TWO') if seen.before == one else one


def link(seen: Seen) -> str:
    element = seen.named(seen.quoted()[0], 'link', 'StaticText', 'generic')
    return element.click if element else ''


def tab(seen: Seen) -> str:
    return seen.named(re.search(r'Tab #\d+', seen.task)[0], 'link').click


def link_inside(role: str, shown: str) -> Callable[[Seen], str]:
    """Return an expert that opens tabs in order until it finds the link."""

    def play(seen: Seen) -> str:
        tabs, targets = seen.of('tab'), seen.of(role)
        last = next((i for i, e in enumerate(tabs) if e.has(shown)), -1)
        return link(seen) or targets[(last + 1) % len(targets)].click

    return play


tab_of_link = link_inside('link', 'selected')
section_of_link = link_inside('tab', 'expanded')


def section(seen: Seen) -> str:
    shut = [e for e in seen.of('tab') if e.more.get('expanded') == 'False' and e.name != 'Submit']
    return shut[0].click if shut else seen.press()


def option(seen: Seen) -> str:
    choice = seen.named(re.match('Select (.*) and click', seen.task)[1], 'radio')
    return seen.press() if choice.has('checked') else choice.click


def checkboxes(seen: Seen) -> str:
    names = re.match('Select (.*) and click', seen.task)[1].split(', ')
    for box in seen.of('checkbox'):
        if (box.name in names) != box.has('checked'):
            return box.click
    return seen.press()


def choice(seen: Seen) -> str:
    names = re.match('Select (.*) from the (?:scroll )?list', seen.task)[1].split(', ')
    for element in seen.of('option'):
        if element.name in names and not element.has('selected'):
            return element.click
    return seen.press()


def text(seen: Seen) -> str:
    """Write the quoted text into every field."""
    quote = seen.quoted()[0]
    if 'upper case' in seen.task:
        quote = quote.upper()
    if 'lower case' in seen.task:
        quote = quote.lower()
    return writes([(field, quote) for field in seen.of('textbox')], seen.press())


def login(seen: Seen) -> str:
    texts = list(zip(seen.of('textbox'), seen.quoted(), strict=False))
    return writes(texts, seen.press() or seen.press('Login'))


def focus(seen: Seen) -> str:
    return seen.of('textbox')[seen.ordinal].click


def sum_of(seen: Seen) -> str:
    """Solve a + b = ?, and the same for - and x."""
    problem = next(e.name for e in seen.of('StaticText') if '=' in e.name)
    one, sign, other = re.match(r'(\S+) (\S) (\S+) =', problem).groups()
    signs = {'+': operator.add, '-': operator.sub, 'x': operator.mul}
    return writes([(seen.of('textbox')[0], str(signs[sign](int(one), int(other))))], seen.press())


def unknown(seen: Seen) -> str:
    """Solve a + x = c and x + a = c, and the same for -."""
    problem = next(e.name for e in seen.of('StaticText') if re.search(r'= -?\d', e.name))
    one, sign, other, total = re.match(r'(\S+) (\S) (\S+) = (\S+)', problem).groups()
    total = int(total)
    if one == 'x':
        solution = total - int(other) if sign == '+' else total + int(other)
    else:
        solution = total - int(one) if sign == '+' else int(one) - total
    return writes([(seen.of('textbox')[0], str(solution))], seen.press())


def spinner(seen: Seen) -> str:
    """Press the up or down key until the value is right."""
    target, field = int(re.search(r'-?\d+', seen.task)[0]), seen.of('spinbutton')[0]
    if not field.has('focused'):
        return seen.press() if field.value == str(target) else field.click
    value = int(field.value or 0)
    if value == target:
        return seen.press()
    return 'press [ArrowUp]' if value < target else 'press [ArrowDown]'


def adjacent_cell(seen: Seen) -> str:
    """Copy the cell next to its label into each field; the task names the label of a lone field."""
    cells = seen.of('cell')
    rows = {a.name: b.name for a, b in zip(cells[0::2], cells[1::2], strict=True)}
    labels = [e.name.removesuffix(':') for e in seen.of('StaticText')]
    labels = labels or re.findall('value of (.*) into', seen.task)
    fields = zip(seen.of('textbox'), labels, strict=True)
    return writes([(field, rows[label]) for field, label in fields], seen.press())


def word(seen: Seen) -> str:
    words = ' '.join(e.name for e in seen.of('StaticText')).split()
    return writes([(seen.of('textbox')[0], words[seen.ordinal].strip('.,'))], seen.press())


def copy(seen: Seen) -> str:
    """Copy the text of a field into the empty one."""
    fields = seen.of('textbox')
    full, empty = [f for f in fields if f.value], [f for f in fields if not f.value]
    if not empty:
        return seen.press()
    return writes([(empty[0], full[seen.ordinal].value)], '')


def odd_or_even(seen: Seen) -> str:
    """Click the button next to each number, from the top."""
    rows = [e for e in seen.elements if e.name in ('Odd', 'Even') or e.role == 'StaticText']
    before = re.match(r'click \[(\d+)\]', seen.before)
    last = int(before[1]) if before else 0
    for odd, number, even in zip(rows[0::3], rows[1::3], rows[2::3], strict=False):
        if even.number > last and odd.number != last:
            return odd.click if int(number.name) % 2 else even.click
    return seen.press()


BY_PAGES = (  # experts and the names of their pages; items are numbered in this order
    (button, 'click-test'),
    (first_button, 'click-test-2 click-test-transfer'),
    (button, 'click-button'),
    (buttons_in_order, 'click-button-sequence'),
    (button, 'click-dialog click-dialog-2'),
    (link, 'click-link'),
    (tab, 'click-tab'),
    (tab_of_link, 'click-tab-2 click-tab-2-easy click-tab-2-medium click-tab-2-hard'),
    (section, 'click-collapsible click-collapsible-nodelay'),
    (section_of_link, 'click-collapsible-2 click-collapsible-2-nodelay'),
    (option, 'click-option'),
    (checkboxes, 'click-checkboxes click-checkboxes-large click-checkboxes-transfer'),
    (choice, 'choose-list click-scroll-list'),
    (text, 'enter-text enter-text-2 enter-text-dynamic enter-password'),
    (login, 'login-user'),
    (focus, 'focus-text focus-text-2'),
    (sum_of, 'simple-arithmetic'),
    (unknown, 'simple-algebra'),
    (spinner, 'use-spinner'),
    (adjacent_cell, 'read-table read-table-2'),
    (word, 'find-word'),
    (copy, 'copy-paste copy-paste-2'),
    (odd_or_even, 'odd-or-even'),
)
EXPERTS: dict[str, Callable[[Seen], str]] = {
    page: expert for expert, pages in BY_PAGES for page in pages.split()
}


def best(page: str, lines: Sequence[Line], task: str, before: str) -> str:
    """Return the action of a page's expert; '' if it has none.

    lines, task, before: the page, the task and the previous action.
    """
    elements = tuple(Element(number, line) for number, line in enumerate(lines, 1))
    return EXPERTS[page](Seen(elements, task, before))
