"""WebArena's action grammar (arXiv:2307.13854): text to an action, or an error."""

import dataclasses
import re

from agentrl_jax.envs.hosts.answers import Unreadable

FORMS = {
    'click': r'\[(?P<element>\d+)\]',
    'hover': r'\[(?P<element>\d+)\]',
    'type': r'\[(?P<element>\d+)\]\s*\[(?P<text>.*?)\]'
    r'(?:\s*\[(?:press_enter_after=)?(?P<enter>[01])\])?',
    'press': r'\[(?P<text>.+)\]',
    'scroll': r'\[(?:direction=)?(?P<text>up|down)\]',
    'new_tab': '',
    'tab_focus': r'\[(?P<element>\d+)\]',
    'close_tab': '',
    'goto': r'\[(?P<text>.+)\]',
    'go_back': '',
    'go_forward': '',
    'stop': r'(?:\[(?P<text>.*)\])?',
    'none': '',
}
ON_A_PAGE = ('click', 'hover', 'type', 'press', 'scroll', 'none')  # actions that stay on the page


@dataclasses.dataclass(frozen=True)
class Action:
    verb: str
    element: int = 0  # of an observation, or of a tab
    text: str = ''  # the typed text, the keys, the address or the answer
    enter: bool = True  # after typing


def read_action(text: str, verbs: tuple[str, ...] = tuple(FORMS)) -> Action:
    """Parse an action; raise Unreadable unless it is valid and has one of these verbs."""
    text = text.strip()
    verb = re.match(r'\w*', text)[0].lower()
    if verb not in verbs:
        raise Unreadable(f'{verb!r} is no action; those are {", ".join(verbs)}')
    match = re.fullmatch(FORMS[verb], text[len(verb) :].strip(), re.DOTALL)
    if match is None:
        raise Unreadable(f'{verb} is written otherwise')
    parts = {name: value for name, value in match.groupdict().items() if value is not None}
    return Action(
        verb,
        int(parts['element']) if 'element' in parts else 0,
        parts['text'] if 'text' in parts else '',
        'enter' not in parts or parts['enter'] == '1',
    )
