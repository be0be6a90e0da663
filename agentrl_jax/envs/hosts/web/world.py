"""WebArena (arXiv:2307.13854): tasks on self-hosted websites, in a real browser.

A page is the visible part of its accessibility tree; actions are WebArena's. `stop` ends an episode
and earns the only reward (scoring.py). An item is a task's number in the file (tasks.py). Every
episode starts with an empty profile, but its changes to the sites persist.
"""

import dataclasses
import functools
import json
import pathlib
import time
from typing import Annotated, Any

import numpy as np

from agentrl_jax.envs.hosts.answers import READERS, Unreadable
from agentrl_jax.envs.hosts.base import hashed
from agentrl_jax.envs.hosts.served import Served, checked
from agentrl_jax.envs.hosts.web import actions, chromium, scoring, tabs
from agentrl_jax.envs.hosts.web.tasks import Task, read_sites, read_tasks
from agentrl_jax.envs.hosts.world import Reply, WorldError
from agentrl_jax.settings.callables import import_callable
from agentrl_jax.settings.marks import ONE, POSITIVE, ConfigName, NameIn

PROMPT = (
    'You use a web browser to reach an objective. Each round shows you the open tabs, the part of '
    'the page that is in view as lines "[id] role \'name\'", its address, the objective and your '
    'previous action; you answer with one action.\n'
    'On the page:\nclick [id]\n'
    'type [id] [text] [1] to type and press Enter, [0] at the end not to press it\n'
    'hover [id]\npress [keys], such as press [Enter] or press [Ctrl+a]\n'
    'scroll [down] or scroll [up]\n'
    'Tabs: new_tab, tab_focus [number], close_tab\n'
    'Addresses: goto [address], go_back, go_forward\n'
    'At the end: stop [answer], with the answer if the objective asks for one, and with N/A if it '
    'cannot be reached.\n'
    'Think step by step; then write the action between triple backticks, such as: In summary, the '
    'next action I will perform is ```click [12]```'
)
SHORT_PROMPT = 'Reach the objective: ```click [id]```, ```type [id] [text]```, ```stop [answer]```.'
PROMPTS = {'long': PROMPT, 'short': SHORT_PROMPT}
WINDOW = (1280, 720)


@functools.cache
def read(path: str, sites: tuple[str, ...]) -> dict[int, Task]:
    """Read the tasks of a file, once per process."""
    if not path:
        raise ValueError('set web.tasks to a file of tasks, such as test.raw.json of libwebarena')
    return read_tasks(path, read_sites(sites))


@dataclasses.dataclass(frozen=True)
class Play:
    """Settings of a world, in process or on a server."""

    tasks: str = ''  # file of tasks, such as test.raw.json of libwebarena
    sites: tuple[str, ...] = ()  # name=address: the only addresses that pages can reach
    states: str = ''  # folder of login cookies; '' = no logins
    prompt: Annotated[str, NameIn(PROMPTS), ConfigName('hosts.prompt')] = 'long'  # or short
    judge: str = ''  # module:function that compares answers that need not be literal; '' = none
    login: str = 'admin:admin1234'  # of the shop's administrator, for evaluators


class WebArena:
    """One visitor; actions are bare (`answers.py` reads replies)."""

    deterministic = False  # sites keep their state between episodes

    PLAY = Play

    def __init__(self, **settings: Any):
        play = checked('web', Play(**settings))
        self.instruction = PROMPTS[play.prompt]
        self.tasks, self.sites = read(play.tasks, play.sites), read_sites(play.sites)
        self.states, self.login = play.states, play.login
        self.judge = import_callable(play.judge, 'web.judge') if play.judge else None
        self.visitor = tabs.Visitor(tuple(self.sites.values()), WINDOW)
        self.task: Task | None = None
        self.before, self.done = 'none', True

    @classmethod
    def check(cls) -> None:
        chromium.executable()

    def reset(self, item: int) -> str:
        if item not in self.tasks:
            raise ValueError(f'item {item} is not a task on these sites')
        self.task, self.before, self.done = self.tasks[item], 'none', False
        self.visitor.begin()
        if self.states and self.task.state:
            self.visitor.take_cookies(cookies(pathlib.Path(self.states) / self.task.state))
        for place, url in enumerate(self.task.start):
            if place:
                self.visitor.open()
            self.visitor.go(url)
        self.visitor.at = 0
        self.visitor.settle()
        return self.shown()

    def step(self, action: str) -> Reply:
        if self.done:
            return Reply('The task is over.', done=True, success=False, valid=False)
        self.before, valid = ' '.join(action.split()), True
        try:
            parsed_action = actions.read_action(action)
            if parsed_action.verb == 'stop':
                return self._stop(parsed_action.text)
            self.visitor.do(parsed_action)
        except Unreadable as wrong:
            self.before += f' (not done: {wrong})'
            valid = False
        return Reply(self.shown(), success=False, valid=valid)

    def _stop(self, answer: str) -> Reply:
        self.done = True
        last = self.shown()
        how = dict(sites=self.sites, login=self.login, judge=self.judge)
        total = scoring.score(self.task, answer, self.visitor, **how)
        return Reply(last, total, done=True, success=total >= 1, valid=True)

    def shown(self) -> str:
        """Return the observation: tabs, page, address, objective and the last action."""
        visitor = self.visitor
        lines = visitor.look()
        open_tabs = ' | '.join(
            f'Tab {n}{" (current)" * (n == visitor.at)}: {title}'
            for n, title in enumerate(visitor.titles())
        )
        page = '\n'.join(line.text(n) for n, line in enumerate(lines, 1))
        page = page or 'The page is empty, or cannot be reached.'
        return (
            f'OBSERVATION:\n{open_tabs}\n\n{page}\nURL: {visitor.url()}\n'
            f'OBJECTIVE: {self.task.intent}\nPREVIOUS ACTION: {self.before}'
        )

    def close(self) -> None:
        self.visitor.close()

    def details(self) -> dict[str, Any]:
        """Return the additional fields of AgentGym's server."""
        return {'sites': list(self.task.sites), 'object': self.task.intent} if self.task else {}


class AgentGymWebArena(WebArena):
    """The world as AgentGym serves it: an action is the full answer."""

    def step(self, action: str) -> Reply:
        try:
            return super().step(READERS['in_backticks'](action))
        except Unreadable as unreadable:
            return Reply(str(unreadable), success=False)


def cookies(path: pathlib.Path) -> list[dict]:
    """Read the cookies of a storage_state file, which WebArena's auto_login.py writes."""
    try:
        entries = json.loads(path.read_text(encoding='utf-8'))['cookies']
    except (OSError, ValueError, KeyError) as error:
        raise WorldError(f'{path} has no login cookies: {error!r}') from error
    if any(0 < cookie['expires'] < time.time() for cookie in entries if 'expires' in cookie):
        raise WorldError(f'{path}: the login has expired; log in again')
    return [{k: v for k, v in cookie.items() if (k, v) != ('expires', -1)} for cookie in entries]


@dataclasses.dataclass(frozen=True)
class WebEnvironment(Served, Play):
    """WebArena's tasks, or others in its format, on the user's sites."""

    room: Annotated[int, ONE] = 16
    timeout_s: Annotated[float, POSITIVE] = 120.0

    name, WORLD, PROMPTS = 'web', WebArena, PROMPTS

    def our_items(self, split: str) -> np.ndarray:
        """Return the tasks of a split; without a judge, tasks that need one are left out."""
        known = read(self.tasks, self.sites)
        numbers = [n for n, task in known.items() if self.judge or not task.needs_judge]
        return hashed(numbers, split)
