"""MiniWoB++ (arXiv:1802.08802): small one-page tasks, as text with numbered elements.

The pages come from the package `miniwob`, which is not imported. An item is tasks x seed + task.
Tasks have no time limit, rewards do not decay, and jQuery does not animate, so timing matters only
for the tasks in TIMED.
"""

import dataclasses
import pathlib
import re
from typing import Annotated, Any

import numpy as np

from agentrl_jax.envs.hosts.answers import Read, Unreadable
from agentrl_jax.envs.hosts.base import hashed
from agentrl_jax.envs.hosts.served import Served, checked
from agentrl_jax.envs.hosts.web import actions, chromium, experts, tabs
from agentrl_jax.envs.hosts.world import Reply, WorldError, package_folder
from agentrl_jax.settings.marks import ONE, ConfigName, NameIn

PROMPT = (
    'You use a web page. Each round shows you the task and the page as lines "[id] role \'name\'"; '
    'you answer with one action on it:\n'
    'click [id]\nhover [id]\ntype [id] [text] [1] to type and press Enter, [0] not to\n'
    'press [keys], such as press [Enter] or press [Ctrl+a]\nscroll [up] or scroll [down]\n'
    'Think first; the action stands last, between triple backticks: ```click [3]```'
)
SHORT_PROMPT = 'Do the task on the page: ```click [id]```, ```type [id] [text] [0]```.'
PROMPTS = {'long': PROMPT, 'short': SHORT_PROMPT}
SIZE = (500, 320)
TIMED = frozenset(  # tasks that move on their own or measure time
    'ascending-numbers book-flight book-flight-nodelay button-delay chase-circle click-pie '
    'click-pie-nodelay hover-shape moving-items simon-says stock-market terminal'.split()
)
BEGIN = """(() => {
  core.EPISODE_MAX_TIME = 2147483647;
  if (window.jQuery) jQuery.fx.off = true;
  const style = document.createElement('style');
  style.textContent = '#reward-display, #click-canvas {display: none !important} ' +
    '* {transition: none !important; animation: none !important}';
  document.head.appendChild(style);
  document.getElementById('query').setAttribute('aria-hidden', 'true');  // it is the TASK
  Math.seedrandom(SEED);
  core.startEpisodeReal();
})()"""
GOAL = '(said => typeof said === "string" ? said : said.utterance)(core.getUtterance())'
STATE = '({done: WOB_DONE_GLOBAL, score: WOB_RAW_REWARD_GLOBAL})'


def pages() -> pathlib.Path:
    """Return the folder of the task pages; raise ModuleNotFoundError without the package."""
    missing = 'MiniWoB++ needs its pages: pip install miniwob==1.1.0'
    return package_folder('miniwob', missing) / 'html' / 'miniwob'


def filling_words() -> list[str]:
    """Return the filler words of pages, sorted and without commas."""
    text = (pages().parent / 'common' / 'ui_utils.js').read_text(encoding='utf-8')
    listed = re.search(r'ui_utils\.lorem_words = \[(.*?)\];', text, re.DOTALL)[1]
    return sorted(set(re.findall('"([a-z]+),?"', listed)))


@dataclasses.dataclass(frozen=True)
class Play:
    """Settings of a world, in process or on a server."""

    prompt: Annotated[str, NameIn(PROMPTS), ConfigName('hosts.prompt')] = 'long'  # or short
    tasks: tuple[str, ...] = ()  # names of pages; () = all that have an expert


class MiniWoB:
    """One page at a time; actions are bare (`answers.py` reads replies)."""

    PLAY = Play

    def __init__(self, **settings: Any):
        play = checked('miniwob', Play(**settings))
        self.instruction = PROMPTS[play.prompt]
        self.tasks = play.tasks or tuple(experts.EXPERTS)
        self.deterministic = TIMED.isdisjoint(self.tasks)
        self.folder = pages()
        for task in self.tasks:
            if not (self.folder / f'{task}.html').exists():
                raise ValueError(f'miniwob.tasks: {task!r} is not a page of MiniWoB++')
        self.visitor = tabs.Visitor((), SIZE)
        self.task, self.goal, self.before, self.done = '', '', 'none', True

    @classmethod
    def check(cls) -> None:
        pages()
        chromium.executable()

    def reset(self, item: int) -> str:
        if item < 0:
            raise ValueError(f'item {item} is negative')
        seed, number = divmod(item, len(self.tasks))
        self.task = self.tasks[number]
        known = self.visitor.tabs
        if self.visitor.browser.dead or len(known) != 1 or known[0].gone:
            self.visitor.begin()
        tab = self.visitor.tab
        tab.go((self.folder / f'{self.task}.html').as_uri())
        tab.evaluate(BEGIN.replace('SEED', str(seed)))
        self.visitor.settle()
        self.goal, self.before, self.done = tab.evaluate(GOAL), 'none', False
        return self.shown()

    def step(self, action: str) -> Reply:
        if self.done:
            return Reply('The task is over.', done=True, success=False, valid=False)
        valid = True
        try:
            self.visitor.do(actions.read_action(action, actions.ON_A_PAGE))
            self.before = ' '.join(action.split())
        except Unreadable as wrong:
            self.before, valid = f'not done, {wrong}', False
        state = self.visitor.tab.evaluate(STATE)
        if not isinstance(state, dict):
            raise WorldError(f'{self.task}: the page has lost its task')
        if not state['done']:
            return Reply(self.shown(), success=False, valid=valid)
        self.done = True
        score, success = float(state['score']), state['score'] >= 1
        text = f'The task is over, its score {score:g}.'
        return Reply(text, score, done=True, success=success, valid=valid)

    def shown(self) -> str:
        """Return the observation: the page, the task and the last action."""
        lines = [line.text(n) for n, line in enumerate(self.visitor.look(), 1)]
        return '\n'.join([*lines, f'TASK: {self.goal}', f'PREVIOUS ACTION: {self.before}'])

    def close(self) -> None:
        self.visitor.close()

    def details(self) -> dict[str, Any]:
        return {'task': self.task}


class Player(Read):
    """A world with its expert and random play."""

    def best(self) -> str:
        world = self.world
        if world.done or world.task not in experts.EXPERTS:
            return ''
        action = experts.best(world.task, world.visitor.seen, world.goal, world.before)
        return f'```{action}```' if action else ''

    def random(self, generator: np.random.Generator) -> str:
        """Click any element; in a field, usually type a word of the task."""
        elements = self.world.visitor.seen
        element = generator.integers(1, max(len(elements), 1) + 1)
        field = bool(elements) and elements[element - 1].role in experts.EDITED
        if not field or generator.random() < 0.3:
            return f'```click [{element}]```'
        words = re.findall(r'[\w-]+', self.world.goal) or ['x']
        return f'```type [{element}] [{words[generator.integers(len(words))]}] [0]```'


@dataclasses.dataclass(frozen=True)
class MiniWoBEnvironment(Served, Play):
    seeds: Annotated[int, ONE] = 100  # items per task
    room: Annotated[int, ONE] = 16

    name, WORLD, PROMPTS = 'miniwob', MiniWoB, PROMPTS

    @property
    def accepted(self) -> str:
        return super().accepted if self.prompt == 'long' else ''

    def player(self) -> Player:
        return Player(self.world(), self.quirks.reader)

    def our_items(self, split: str) -> np.ndarray:
        return hashed(range(self.seeds * len(self.tasks or experts.EXPERTS)), split)
