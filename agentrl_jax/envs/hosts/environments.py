"""The named worlds on hosts as a run knows them: settings, splits, words, and how to make one."""

import atexit
import dataclasses
import functools
import importlib
import json
import threading

import numpy as np

from agentrl_jax.envs.hosts import agentgym, sciworld, textcraft
from agentrl_jax.envs.hosts.agentgym import AgentGym, Servers
from agentrl_jax.envs.hosts.answers import Read
from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.envs.hosts.connection import token_in
from agentrl_jax.envs.hosts.gymnasium_text import Gymnasium
from agentrl_jax.envs.hosts.launch import Launched
from agentrl_jax.envs.hosts.objects import Objects
from agentrl_jax.envs.hosts.openenv import OpenEnv
from agentrl_jax.envs.hosts.sciworld import SciWorld, SciWorldPlayer
from agentrl_jax.envs.hosts.search import retrieval
from agentrl_jax.envs.hosts.search import world as search
from agentrl_jax.envs.hosts.search.dialects import DIALECTS
from agentrl_jax.envs.hosts.textcraft import TextCraft, TextCraftPlayer
from agentrl_jax.envs.hosts.web import miniwob
from agentrl_jax.envs.hosts.web import world as web
from agentrl_jax.envs.hosts.web.experts import EXPERTS
from agentrl_jax.envs.hosts.webshop import world as webshop
from agentrl_jax.envs.hosts.world import Player, World
from agentrl_jax.envs.splits import SPLITS, level_split

SERVER = ('fastapi', 'uvicorn')  # what a server of this machine imports
ONE_AT_A_TIME = threading.Lock()  # the worlds of a run are made in threads, all at once


@functools.cache
def launched(env: str, settings: str, workers: int, worlds: int) -> Launched:
    """A server of this process, started when the first world needs it."""
    made = Launched(env, settings=json.loads(settings), workers=workers, worlds=worlds)
    atexit.register(made.close)
    return made


@functools.cache
def shared(urls: tuple[str, ...]) -> Servers:
    """What the threads of a run know of its servers."""
    return Servers(urls)


def freeze(settings: HostEnvironment) -> None:
    """From JSON come lists, and settings must be hashable."""
    for field in dataclasses.fields(settings):
        if isinstance(getattr(settings, field.name), list):
            object.__setattr__(settings, field.name, tuple(getattr(settings, field.name)))


def hashed(items: range, split: str) -> np.ndarray:
    return np.array([i for i in items if level_split(str(i).encode()) == split], np.int32)


@dataclasses.dataclass(frozen=True)
class Remote(HostEnvironment):
    """Worlds behind servers of AgentGym's protocol."""

    urls: tuple[str, ...] = ()  # of servers
    token: str = ''  # file whose first line the servers ask for
    timeout_s: float = 60.0  # of a call to a server
    item_files: tuple[str, ...] = ()  # AgentGym's, of train, validation and test; () = our splits

    def __post_init__(self):
        freeze(self)
        if self.item_files and len(self.item_files) != len(SPLITS):
            raise ValueError(f'{self.name}.item_files names one file for each of {SPLITS}')

    def our_items(self, split: str) -> np.ndarray:
        raise NotImplementedError

    @property
    def here(self) -> bool:
        return False

    def addresses(self) -> tuple[str, ...]:
        return self.urls

    def connect(self, env: str) -> AgentGym:
        """A world of the servers, which call its kind `env`."""
        with ONE_AT_A_TIME:
            servers = shared(self.addresses())
        return AgentGym(
            env,
            servers,
            instruction=self.instruction,
            token=token_in(self.token),
            timeout_s=self.timeout_s,
        )

    def item_range(self, split: str) -> np.ndarray:
        if self.item_files:
            path = self.item_files[SPLITS.index(split)]
            return np.array(agentgym.read_items(path), np.int32)
        return self.our_items(split)


@dataclasses.dataclass(frozen=True)
class Served(Remote):
    """Worlds that may stand in this process too, or behind servers that the run starts."""

    launch: int = 0  # processes of a server that the run starts for itself, where there is no url
    room: int = 64  # worlds that each of them holds

    accepted = agentgym.ACCEPTED

    def settings(self) -> dict:
        """Keywords of the world."""
        return {}

    @property
    def here(self) -> bool:
        return not self.urls and not self.launch

    def check(self) -> None:
        if self.urls:
            return
        self.needs()
        for module in SERVER if self.launch else ():
            importlib.import_module(module)

    def needs(self) -> None:
        """As check, of a world in a process of this machine."""

    def near(self) -> World:
        """A world in this process."""
        raise NotImplementedError

    def addresses(self) -> tuple[str, ...]:
        if self.urls:
            return self.urls
        settings = json.dumps(self.settings(), sort_keys=True)
        return (launched(self.name, settings, self.launch, self.room).url,)

    def make(self) -> World:
        return self.connect(self.name) if self.urls or self.launch else self.near()


@dataclasses.dataclass(frozen=True)
class TextCraftEnvironment(Served):
    prompt: str = 'agentgym'  # or 'short'
    wording: str = 'agentgym'  # or 'plain', or 'drawn'
    distractors: int = 10  # recipes shown that the goal does not need
    depths: tuple[int, ...] = (1, 2, 3, 4)  # of the goals of our splits
    most_recipes: int = 0  # shown that such a goal needs; 0 = any number
    most_commands: int = 0  # of the planner to such a goal; 0 = any number
    variants: int = 1  # items of such a goal, each among other recipes that it does not need

    name, quick = 'textcraft', True

    @property
    def instruction(self) -> str:
        return textcraft.PROMPTS[self.prompt]

    @property
    def accepted(self) -> str:
        return agentgym.ACCEPTED if self.prompt == 'agentgym' else ''

    def needs(self) -> None:
        textcraft.packaged()

    def settings(self) -> dict:
        return dict(prompt=self.prompt, wording=self.wording, distractors=self.distractors)

    def near(self) -> World:
        return Read(TextCraft(**self.settings()), 'only_action')

    def player(self) -> Player:
        return TextCraftPlayer(TextCraft(**self.settings()))

    def our_items(self, split: str) -> np.ndarray:
        names = ('depths', 'most_recipes', 'most_commands', 'variants')
        chosen = {name: getattr(self, name) for name in names}
        return np.array(textcraft.items(split, **chosen), np.int32)


@dataclasses.dataclass(frozen=True)
class SciWorldEnvironment(Served):
    max_moves: int = 100
    scale: float = 1.0  # of rewards, whose sum is 100 at the end of a task
    shifted: bool = False
    heap_mb: int = 1024

    name = 'sciworld'
    instruction = sciworld.AGENTGYM_PROMPT

    def needs(self) -> None:
        SciWorld.check()

    def settings(self) -> dict:
        names = ('max_moves', 'scale', 'shifted', 'heap_mb')
        return {name: getattr(self, name) for name in names}

    def near(self) -> World:
        SciWorld.check()
        return Read(SciWorld(**self.settings()), 'last_action')

    def player(self) -> Player:
        SciWorld.check()
        return SciWorldPlayer(SciWorld(**self.settings()))

    def our_items(self, split: str) -> np.ndarray:
        return hashed(range(len(sciworld.games(self.shifted))), split)

    def solved(self, returned: float) -> bool:
        return returned >= sciworld.SOLVED * self.scale


@dataclasses.dataclass(frozen=True)
class SearchEnvironment(Served):
    dialect: str = 'plain'  # or agentgym, search_r1, mt_grpo
    rewards: str = 'exact'  # or format, mt_grpo, mt_ppo
    normaliser: str = 'squad'  # of answers that are compared; or triviaqa, as_written
    retries: bool = True  # a wrong answer may be followed by another
    turns: int = 0  # of an episode, whose last one earns the outcome; 0 = env.max_turns cuts it
    calls: int = 0  # end an episode, the last one not carried out; 0 = any number
    topk: int = 0  # documents of a result; 0 = the dialect's
    corpus: str = ''  # of documents: a server, an index or a file; '' = countries
    questions: tuple[str, ...] = ()  # files of train, validation and test; () = countries
    hops: tuple[int, ...] = (1, 2)  # of the questions about countries
    about: tuple[str, ...] = search.KINDS  # what these ask about
    longest_name: int = 0  # letters of that, of one word of A to Z; 0 = any name

    name, FIGURES = 'search', search.FIGURES

    def __post_init__(self):
        super().__post_init__()
        if self.dialect not in DIALECTS:
            raise ValueError(f'search.dialect={self.dialect!r} is one of {", ".join(DIALECTS)}')

    @property
    def instruction(self) -> str:
        return DIALECTS[self.dialect].instruction

    @property
    def accepted(self) -> str:
        return DIALECTS[self.dialect].accepted

    def needs(self) -> None:
        if not self.corpus.startswith('http'):
            retrieval.check()

    def settings(self) -> dict:
        names = 'dialect rewards normaliser retries turns calls topk corpus questions timeout_s'
        return {name: getattr(self, name) for name in [*names.split(), 'token']}

    def near(self) -> Player:
        return search.Search(**self.settings())

    @property
    def quick(self) -> bool:
        """Documents of this process are found at once."""
        return not self.corpus.startswith('http')

    def player(self) -> Player:
        return self.near()

    def our_items(self, split: str) -> np.ndarray:
        chosen = {name: getattr(self, name) for name in ('hops', 'about', 'longest_name')}
        return np.array(search.items(split, files=self.questions, **chosen), np.int32)


@dataclasses.dataclass(frozen=True)
class ShopEnvironment(Served):
    prompt: str = 'long'  # or 'short'
    rewards: str = 'score'  # or success: 1 for a score of 1, else 0
    list_actions: bool = True  # below each page; AgentGym's does not
    files: tuple[str, ...] = ()  # WebShop's, of products and of instructions; () = the seed's
    products: int = 1000  # that the seed draws
    seed: int = 0
    stalls: int = 0  # each item has one of so many shops to itself, of few products; 0 = one shop

    name, quick, FIGURES = 'shop', True, webshop.FIGURES
    accepted = 'Ok.'

    @property
    def instruction(self) -> str:
        return webshop.PROMPTS[self.prompt]

    def needs(self) -> None:
        webshop.WebShop.check()

    def settings(self) -> dict:
        names = ('prompt', 'rewards', 'list_actions', 'files', 'products', 'seed', 'stalls')
        return {name: getattr(self, name) for name in names}

    def near(self) -> World:
        return Read(webshop.WebShop(**self.settings()), 'last_action')

    def player(self) -> Player:
        return webshop.Player(webshop.WebShop(**self.settings()))

    def our_items(self, split: str) -> np.ndarray:
        webshop.WebShop.check()
        if self.stalls:
            return np.array(webshop.stalls_of(split, self.stalls), np.int32)
        shop = webshop.open_shop(self.files, self.products, self.seed)
        return np.array(webshop.items(split, shop), np.int32)


@dataclasses.dataclass(frozen=True)
class MiniWoBEnvironment(Served):
    prompt: str = 'long'  # or 'short'
    rewards: str = 'score'  # -1 to 1 as the page says; or success: 1 for a score of 1, else 0
    tasks: tuple[str, ...] = ()  # names of pages; () = those that the expert knows
    seeds: int = 100  # of each task, an item each
    settle_s: float = 10.0  # that a page may take to come to rest

    name = 'miniwob'

    @property
    def instruction(self) -> str:
        return miniwob.PROMPTS[self.prompt]

    @property
    def accepted(self) -> str:
        return 'Ok.' if self.prompt == 'long' else ''

    def needs(self) -> None:
        miniwob.MiniWoB.check()

    def settings(self) -> dict:
        return {name: getattr(self, name) for name in ('prompt', 'rewards', 'tasks', 'settle_s')}

    def near(self) -> World:
        return Read(miniwob.MiniWoB(**self.settings()), 'in_backticks')

    def player(self) -> Player:
        return miniwob.Player(miniwob.MiniWoB(**self.settings()))

    def our_items(self, split: str) -> np.ndarray:
        return hashed(range(self.seeds * len(self.tasks or EXPERTS)), split)


@dataclasses.dataclass(frozen=True)
class WebEnvironment(Served):
    """WebArena's tasks, or others of its form, on sites of the user's."""

    tasks: str = ''  # file of tasks
    sites: tuple[str, ...] = ()  # name=address: the only addresses that pages can reach
    states: str = ''  # folder of cookies of those who are logged in; '' = nobody is
    prompt: str = 'long'  # or 'short'
    judge: str = ''  # module:function of answers that need not be literal; '' = none
    login: str = 'admin:admin1234'  # of the shop's administrator, for programs that ask it
    settle_s: float = 10.0  # that a page may take to come to rest

    name, accepted = 'web', 'Ok.'

    @property
    def instruction(self) -> str:
        return web.PROMPTS[self.prompt]

    def needs(self) -> None:
        web.WebArena.check()

    def settings(self) -> dict:
        names = ('tasks', 'sites', 'states', 'prompt', 'judge', 'login', 'settle_s')
        return {name: getattr(self, name) for name in names}

    def near(self) -> World:
        return Read(web.WebArena(**self.settings()), 'in_backticks')

    def our_items(self, split: str) -> np.ndarray:
        return np.array(web.items(split, self.tasks, self.sites, self.judge), np.int32)


@dataclasses.dataclass(frozen=True)
class AgentGymEnvironment(Remote):
    """Any environment of AgentGym behind servers of its own."""

    env: str = ''  # of agentgym.ENVIRONMENTS
    instruction: str = ''  # '' = AgentGym's, where this package knows it
    num_items: int = 0  # items 0 .. num_items - 1 where there are no files

    name = 'agentgym'

    def __post_init__(self):
        super().__post_init__()
        if self.env not in agentgym.ENVIRONMENTS:
            known = ', '.join(agentgym.ENVIRONMENTS)
            raise ValueError(f'agentgym.env={self.env!r} is one of {known}')
        quirks = agentgym.ENVIRONMENTS[self.env]
        object.__setattr__(self, 'instruction', self.instruction or quirks.instruction)
        object.__setattr__(self, 'accepted', quirks.accepted)

    def make(self) -> World:
        return self.connect(self.env)

    def our_items(self, split: str) -> np.ndarray:
        return hashed(range(self.num_items), split)

    def solved(self, returned: float) -> bool:
        return returned > agentgym.ENVIRONMENTS[self.env].solved_above


@dataclasses.dataclass(frozen=True)
class OpenEnvEnvironment(HostEnvironment):
    """Any environment of OpenEnv behind a server."""

    url: str = ''
    action_field: str = ''  # of its Action that takes what the policy writes
    observation_field: str = ''  # of its Observation that is shown; '' = all of it, as JSON
    item_field: str = 'seed'  # of reset that takes the item
    instruction: str = ''
    deterministic: bool = False
    errors_are_shown: bool = False  # what an action raises there is an observation, and no fault
    num_items: int = 1000
    timeout_s: float = 60.0

    name, here = 'openenv', False

    def check(self) -> None:
        importlib.import_module('websockets')

    def make(self) -> World:
        names = ('action_field', 'observation_field', 'item_field', 'instruction')
        names += ('deterministic', 'errors_are_shown', 'timeout_s')
        return OpenEnv(self.url, **{name: getattr(self, name) for name in names})

    def item_range(self, split: str) -> np.ndarray:
        return hashed(range(self.num_items), split)


HOSTS = {  # env.name -> class; the settings are the section of that name in a config
    'gymnasium': Gymnasium,
    'objects': Objects,
    'textcraft': TextCraftEnvironment,
    'sciworld': SciWorldEnvironment,
    'search': SearchEnvironment,
    'shop': ShopEnvironment,
    'miniwob': MiniWoBEnvironment,
    'web': WebEnvironment,
    'agentgym': AgentGymEnvironment,
    'openenv': OpenEnvEnvironment,
}
