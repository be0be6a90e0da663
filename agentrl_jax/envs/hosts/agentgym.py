"""A world on a server with AgentGym's protocol (arXiv:2406.04151, 2509.08755).

One class covers all AgentGym environments; a row of ENVIRONMENTS holds the quirks of each. Servers
are started by AgentGym's packages or by `python -m agentrl_jax.serve`. The latter also sends the
turn, the item and success, which are checked.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentrl_jax.envs.hosts import agentgym_prompts
from agentrl_jax.envs.hosts.answers import READERS, Unreadable
from agentrl_jax.envs.hosts.connection import Connection, Number, StepReply, Text, read
from agentrl_jax.envs.hosts.search import dialects
from agentrl_jax.envs.hosts.world import Reply, WorldDown, WorldError, shown
from agentrl_jax.machine import files

ACCEPTED = "OK. I'll follow your instructions and try my best to solve the task."
CLOSE_S, CLOSE_TRIES = 2.0, 3  # for a close; otherwise the lease of the world expires
MOST_BYTES = 2**20  # per reply
MAX_UNCLOSED = 1000  # worlds per server that are remembered for closing
SAME = (('search', 'searchqa'), ('shop', 'webshop'), ('web', 'webarena'))  # our names, AgentGym's


@dataclasses.dataclass(frozen=True)
class Quirks:
    """Quirks of an environment's server and client. The defaults are TextCraft's."""

    reader: str = 'only_action'  # of answers.READERS
    instruction: str = ''  # AgentGym's instruction, if this package has it
    accepted: str = ACCEPTED  # the fixed answer to it
    prefix: str = ''  # of paths
    create: dict | None = None  # body of /create
    id: str = 'id'  # field of the world id
    created: str = 'id'  # field of the world id in /create's reply; '': the reply is the id
    item: str = 'data_idx'  # field of /reset
    reset: dict = dataclasses.field(default_factory=dict)  # other fields of /reset
    first: Callable[[Any], Any] = lambda reply: reply['observation']  # text of /reset's reply
    look: str = ''  # GET path of the first observation; '': from /reset's reply
    text: str = 'observation'  # fields of /step's reply
    reward: str = 'reward'
    done: str = 'done'
    truth: bool = False  # the reward may be a bool; otherwise a bool is an error
    running: bool = False  # the reward is a running score: a step gets the difference, ...
    scale: float = 1.0  # ... times this
    last_only: bool = False  # only the reward of the last step counts
    bounds: tuple[float, float] = (-1e6, 1e6)  # of the reward field
    solved_above: float = 0.99  # score; AgentEvol's thresholds if it has one
    faults: tuple[str, ...] = ()  # texts of status-200 replies that are errors
    closes: bool = True  # /close exists
    deterministic: bool = True
    rounds: int = 30  # turns per episode in AgentGym-RL's scripts


_TOOL = Quirks(
    reader='whole',
    accepted='Ok.',
    create={'id': 0},
    id='env_idx',
    created='',
    item='id',
    first=lambda reply: reply,
    closes=False,
    deterministic=False,
    rounds=15,
)
_WEB = dataclasses.replace(_TOOL, create=None, item='session_id', look='observation', text='state')
ENVIRONMENTS = {
    'textcraft': Quirks(
        instruction=agentgym_prompts.TEXTCRAFT, create={}, bounds=(0, 1), rounds=30
    ),
    'sciworld': Quirks(
        reader='last_action',
        instruction=agentgym_prompts.SCIWORLD,
        first=lambda reply: '\n'.join((reply['task_description'], reply['observation'])),
        reward='score',
        running=True,
        bounds=(-100, 100),
        solved_above=99,
        rounds=20,
    ),
    # Its score keeps growing after a late success, so it is unbounded.
    'babyai': Quirks(reward='score', running=True, solved_above=0, rounds=20),
    'searchqa': dataclasses.replace(
        _TOOL,
        instruction=dialects.AGENTGYM.instruction,
        bounds=(0, 1),
        closes=True,
        deterministic=True,
        rounds=5,
    ),
    # SearchQA on our servers, with any dialect and rewards
    'search': Quirks(reader='whole', bounds=(-100, 100), rounds=5),
    'webarena': Quirks(
        reader='with_backticks',
        accepted='Ok.',
        id='env_idx',
        created='env_idx',
        item='idx',
        reset={'seed': 0},
        look='observation',
        first=lambda reply: reply,
        done='terminated',
        last_only=True,
        faults=('TimeoutError',),
        deterministic=False,
        rounds=15,
    ),
    'webshop': dataclasses.replace(_WEB, reader='last_action', rounds=10),
    # WebShop on our servers, which report success and close worlds
    'shop': Quirks(reader='last_action', accepted='Ok.', bounds=(0, 1), rounds=10),
    'miniwob': Quirks(reader='in_backticks', accepted='Ok.', bounds=(-1, 1), rounds=10),
    # WebArena on our servers
    'web': Quirks(
        reader='in_backticks', accepted='Ok.', bounds=(0, 1), deterministic=False, rounds=15
    ),
    'sqlgym': dataclasses.replace(_WEB, reader='sql_block', item='item_id', rounds=1),
    'alfworld': Quirks(
        reader='last_action',
        item='game',
        reset={'world_type': 'Text'},
        first=lambda reply: (
            f'{reply["observation"]}\nAVAILABLE ACTIONS: {",".join(reply["available_actions"])}'
        ),
        truth=True,
        closes=False,
        rounds=30,
    ),
    'maze': Quirks(reader='first_action', prefix='maze/', item='game', closes=False, rounds=15),
    'wordle': Quirks(
        reader='first_action',
        prefix='wordle/',
        item='seed',
        look='filtered_vocab',
        first='\n'.join,
        closes=False,
        rounds=8,
    ),
    # Their reward is the best progress so far, repeated at every step
    'weather': dataclasses.replace(_TOOL, running=True, solved_above=0, rounds=10),
    'movie': dataclasses.replace(_TOOL, running=True, rounds=12),
    'academia': dataclasses.replace(_TOOL, running=True, rounds=12),
    'todo': dataclasses.replace(_TOOL, running=True),
    'sheet': dataclasses.replace(_TOOL, running=True),
}


class Servers:
    """Servers of one environment, shared by threads; new worlds go to the least used server."""

    def __init__(self, urls: Sequence[str], *, rest_s: float = 10.0):
        """rest_s: time for which a server that is down or full is tried last."""
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f'{list(map(shown, urls))} must be one or more distinct addresses')
        self.rest_s = rest_s
        self._open = dict.fromkeys(urls, 0)  # worlds there
        self._rests_until = dict.fromkeys(urls, 0.0)
        self._left: dict[str, list[tuple[dict, int]]] = {url: [] for url in urls}
        self._lock = threading.Lock()

    def candidates(self) -> list[str]:
        """Return the servers, fewest worlds first; resting servers are last."""
        now = time.monotonic()
        with self._lock:
            return sorted(
                self._open, key=lambda url: (self._rests_until[url] > now, self._open[url])
            )

    def count(self, url: str, change: int) -> None:
        """Record a world that was opened (1) or closed (-1)."""
        with self._lock:
            self._open[url] += change

    def failed(self, url: str) -> None:
        self._rests_until[url] = time.monotonic() + self.rest_s

    def left(self, url: str, body: dict, tries: int = CLOSE_TRIES) -> None:
        """Remember a world that could not be closed; the next world opened there tries again."""
        with self._lock:
            if tries:
                self._left[url] = [*self._left[url][-MAX_UNCLOSED:], (body, tries - 1)]

    def take_left(self, url: str) -> list[tuple[dict, int]]:
        with self._lock:
            left, self._left[url] = self._left[url], []
            return left


class AgentGym:
    """One world on one of several servers, opened by the first reset and kept until it fails."""

    def __init__(
        self,
        env: str,
        servers: Servers,
        *,
        instruction: str = '',  # '': AgentGym's
        quirks: Quirks | None = None,  # of an environment that is not in ENVIRONMENTS
        settings: dict | None = None,  # of the worlds; our servers must use the same
        token: str = '',
        timeout_s: float = 60.0,  # per call
    ):
        self.env, self.servers = env, servers
        self.quirks = quirks or ENVIRONMENTS[env]
        self.instruction = instruction or self.quirks.instruction
        self.deterministic = self.quirks.deterministic
        self.settings = json.loads(json.dumps(settings or {}))  # with lists for tuples
        self._calls = dict(token=token, timeout_s=timeout_s, most_bytes=MOST_BYTES)
        self._server: Connection | None = None
        self._id: int | None = None
        self._failed = False
        self._turn, self._score, self._success = 0, 0.0, False

    def reset(self, item: int) -> str:
        if self._failed:
            self.close()
        if self._server is None:
            self._open()
        self._turn, self._score, self._success = 0, 0.0, False
        quirks = self.quirks
        with self._tried():
            reply = self._call('reset', {quirks.item: item, **quirks.reset})
            self._check('reset', reply, {quirks.item: item})
            if quirks.running and isinstance(reply, dict) and quirks.reward in reply:
                # The score of the initial state, which no action has earned
                self._score = self._bounded(read(Number, reply[quirks.reward], 'reset'))
            if quirks.look:
                reply = self._server.get(f'{quirks.prefix}{quirks.look}?{quirks.id}={self._id}')
            try:
                text = read(Text, quirks.first(reply), 'reset')
            except (KeyError, TypeError) as error:
                raise WorldError(f'reset: {error!r} in {reply!r:.200}') from error
            self._check('reset', {quirks.text: text}, {})
            return text

    def step(self, action: str) -> Reply:
        try:
            action = READERS[self.quirks.reader](action)
        except Unreadable as unreadable:
            return Reply(str(unreadable), success=self._success, valid=False)
        if self._server is None or self._failed:
            raise WorldError('step: the environment has failed or was never reset')
        with self._tried():
            reply = self._call('step', {'action': action})
            self._turn += 1
            self._check('step', reply, {'turn': self._turn})
            return self._reply(reply)

    def _reply(self, reply: Any) -> Reply:
        quirks, names = self.quirks, ('observation', 'reward', 'done')
        theirs = (quirks.text, quirks.reward, quirks.done)
        if not isinstance(reply, dict) or not reply.keys() >= {*theirs}:
            raise WorldError(f'step: no {", ".join(theirs)} in {reply!r:.200}')
        fields = reply | {name: reply[other] for name, other in zip(names, theirs, strict=True)}
        if quirks.truth and isinstance(fields['reward'], bool):
            fields['reward'] = float(fields['reward'])
        step = read(StepReply, fields, 'step')
        reward = self._bounded(step.reward)
        reward = 0.0 if quirks.last_only and not step.done else reward
        if quirks.running:
            reward, self._score = quirks.scale * (reward - self._score), reward
        else:
            self._score += reward
        self._success = self._score > quirks.solved_above if step.success is None else step.success
        return Reply(
            step.observation, reward, step.done, self._success, tuple(step.figures), step.valid
        )

    def _bounded(self, reward: float | None) -> float:
        low, high = self.quirks.bounds
        if reward is None or not low <= reward <= high:
            raise WorldError(f'reward {reward} is not in {self.quirks.bounds}')
        return reward

    def close(self) -> None:
        if self._server is None:
            return
        server, self._server, self._failed = self._server, None, False
        self.servers.count(server.url, -1)
        with contextlib.closing(server):
            self._close(server, {self.quirks.id: self._id}, CLOSE_TRIES)

    def _close(self, server: Connection, body: dict, tries: int) -> bool:
        """Close a world, or postpone it to a later try; return False if the server is down."""
        if self.quirks.closes:
            try:
                server.post(f'{self.quirks.prefix}close', body, timeout_s=CLOSE_S)
            except WorldError as error:
                self.servers.left(server.url, body, tries)
                return not isinstance(error, WorldDown)
        return True

    def _open(self) -> None:
        """Create the world on the first server with a free world."""
        downs: list[str] = []
        for url in self.servers.candidates():
            server = Connection(url, **self._calls)
            try:
                self._id = self._created(server)
            except WorldError as error:
                server.close()
                self.servers.failed(url)
                if not isinstance(error, WorldDown):
                    raise
                downs.append(str(error))
            else:
                self._server = server
                self.servers.count(url, 1)
                return
        raise WorldDown('; '.join(downs))

    def _created(self, server: Connection) -> int:
        left = self.servers.take_left(server.url)
        while left and self._close(server, *left[0]):
            left.pop(0)
        for body, tries in left[1:]:  # the server is down: postpone the other closes, too
            self.servers.left(server.url, body, tries + 1)
        key = secrets.token_hex(8)  # identifies the world on our servers if their reply is lost
        path, headers = f'{self.quirks.prefix}create', {'X-World-Key': key}
        try:
            reply = server.post(path, self.quirks.create, headers=headers)
            fields = reply if isinstance(reply, dict) else {}
            number = fields.get(self.quirks.created, reply)
            if isinstance(number, bool) or not isinstance(number, int):
                raise WorldError(f'{server.name} create: no environment id in {reply!r:.200}')
            if fields.get('key', key) != key:
                raise WorldError(f'{server.name} create: the environment belongs to another client')
            self._compare(server.name, fields.get('settings'))
        except WorldDown:
            raise
        except WorldError:
            self.servers.left(server.url, {'key': key})
            raise
        return number

    def _compare(self, server: str, theirs: Any) -> None:
        """Raise WorldError if one of our servers uses other settings than the run."""
        differ = [
            f'{self.env}.{name}={value!r:.40} (there {theirs[name]!r:.40})'
            for name, value in self.settings.items()
            if isinstance(theirs, dict) and name in theirs and theirs[name] != value
        ]
        if differ:
            raise WorldError(
                f'{server}: start this server with the same --settings as the run, which has '
                f'{", ".join(differ)}'
            )

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        """Mark the world as failed after an error, since the state of the server is unknown."""
        try:
            yield
        except WorldDown:
            self.servers.failed(self._server.url)
            raise
        except WorldError:
            self._failed = True
            raise

    def _call(self, path: str, body: dict) -> Any:
        return self._server.post(f'{self.quirks.prefix}{path}', {self.quirks.id: self._id, **body})

    def _check(self, path: str, reply: Any, sent: dict[str, int]) -> None:
        """Raise WorldError for an error in a 200 reply, or a reply to another call."""
        if not isinstance(reply, dict):
            return
        if reply.get('error') is not None:  # null: no error
            raise WorldError(f'{path}: {reply["error"]!s:.200}')
        for name, value in {self.quirks.id: self._id, **sent}.items():
            if reply.get(name, value) != value:
                raise WorldError(f'{path}: the reply has {name}={reply[name]!r:.50}, not {value}')
        if reply.get(self.quirks.text) in self.quirks.faults:
            raise WorldError(f'{path}: {reply[self.quirks.text]}')


def item_of(item_id: str) -> tuple[str, int]:
    """Split AgentGym's 'textcraft_12' into ('textcraft', 12)."""
    env, _, number = item_id.rpartition('_')
    if not env or not number.isdecimal():
        raise ValueError(f'{item_id!r} is not an item id such as textcraft_12')
    return env, int(number)


def read_items(path: str | pathlib.Path, env: str) -> list[int]:
    """Read the items of env from AgentGym's JSON list of {"item_id": "textcraft_12", ...}."""
    listed = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    known = [item_of(entry['item_id']) for entry in listed]
    ours = {env, *(name for pair in SAME if env in pair for name in pair)}
    others = sorted({name for name, _ in known if not ours & {name, *name.split('_')}})
    if others:
        raise ValueError(
            f'{path} holds items of {", ".join(others)}, not only of {env}: use a file of {env}'
        )
    return [item for _, item in known]


@functools.cache
def warn_of_shared(train: str, held_out: str, env: str) -> None:
    """Warn once about items of a held-out file that are also trained on."""
    if not pathlib.Path(train).exists():  # an evaluation may have only the held-out file
        return
    items = {*read_items(held_out, env)}
    shared = len(items & {*read_items(train, env)})
    if shared:
        files.warn(
            f'{shared} of the {len(items)} items in {held_out} are trained on, since {train} also '
            'has them: remove them from one of the files'
        )
