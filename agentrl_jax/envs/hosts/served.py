"""Shared settings of environments on servers."""

import atexit
import dataclasses
import functools
import json
import threading
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np

from agentrl_jax.envs.hosts import agentgym, workers
from agentrl_jax.envs.hosts.agentgym import AgentGym, Quirks, Servers
from agentrl_jax.envs.hosts.answers import Read, framed
from agentrl_jax.envs.hosts.base import HostEnvironment, hashed
from agentrl_jax.envs.hosts.connection import token_in
from agentrl_jax.envs.hosts.launch import Launched
from agentrl_jax.envs.hosts.world import World
from agentrl_jax.envs.splits import SPLITS
from agentrl_jax.settings import tree
from agentrl_jax.settings.marks import ONE, POSITIVE, ZERO, ConfigName
from agentrl_jax.settings.rules import Rule, must

STEP_S = 60.0  # minimum step timeout of a server
ONE_AT_A_TIME = threading.Lock()  # the worlds of a run are created in threads, all at once
Settings = TypeVar('Settings')


@functools.cache
def launched(env: str, settings: str, workers: int, worlds: int, step_s: float) -> Launched:
    """Return a server of this process, started when the first world needs it; step_s: timeout."""
    server = Launched(
        env, settings=json.loads(settings), workers=workers, worlds=worlds, step_s=step_s
    )
    atexit.register(server.close)
    return server


shared = functools.cache(Servers)  # state of a run's servers, shared by its threads


def checked(name: str, settings: Settings) -> Settings:
    """Validate the keywords of a world; raise one ValueError with all errors."""
    leaves = tree.leaves(type(settings), f'{name}.').values()
    values = {leaf.name: getattr(settings, leaf.attribute) for leaf in leaves}
    return tree.read(type(settings), values, f'{name}.')


@dataclasses.dataclass(frozen=True)
class Calls:
    """Settings of server calls, from the config's hosts section."""

    token: Annotated[str, ConfigName('hosts.token')] = ''
    timeout_s: Annotated[float, POSITIVE, ConfigName('hosts.call_s')] = 60.0


@dataclasses.dataclass(frozen=True)
class Remote(HostEnvironment, Calls):
    """Worlds on servers with AgentGym's protocol."""

    urls: tuple[str, ...] = ()  # of servers; () = in this process, or launch
    item_files: tuple[str, ...] = ()  # AgentGym's train, validation and test; () = our splits

    RULES = (
        must(
            'item_files',
            f'a file for each of {", ".join(SPLITS)}',
            lambda world: len(world.item_files) in (0, len(SPLITS)),
        ),
    )

    QUIRKS: ClassVar[Quirks | None] = None  # None: agentgym.ENVIRONMENTS[item_env]

    def our_items(self, split: str) -> np.ndarray:
        raise NotImplementedError

    @property
    def item_env(self) -> str:
        """The environment name in item ids."""
        return self.name

    @property
    def quirks(self) -> Quirks:
        return self.QUIRKS or agentgym.ENVIRONMENTS[self.item_env]

    @property
    def accepted(self) -> str:
        return self.quirks.accepted

    @property
    def here(self) -> bool:
        return False

    def addresses(self) -> tuple[str, ...]:
        return self.urls

    def settings(self) -> dict:
        """Return the world's keywords; our servers must use the same."""
        return {}

    def make(self) -> World:
        """Create a world on the servers."""
        with ONE_AT_A_TIME:
            servers = shared(self.addresses())
        return AgentGym(
            self.item_env,
            servers,
            instruction=self.instruction,
            quirks=self.quirks,
            settings=self.settings(),
            token=token_in(self.token),
            timeout_s=self.timeout_s,
        )

    def item_range(self, split: str) -> np.ndarray:
        if self.item_files:
            path = self.item_files[SPLITS.index(split)]
            if split != 'train':
                agentgym.warn_of_shared(self.item_files[0], path, self.item_env)
            return np.array(agentgym.read_items(path, self.item_env), np.int32)
        return self.our_items(split)


@dataclasses.dataclass(frozen=True)
class AgentGymEnvironment(Remote):
    """Any AgentGym environment, on its servers."""

    env: str = ''  # a name in agentgym.ENVIRONMENTS
    wording: Annotated[str, ConfigName('hosts.instruction')] = ''  # '' = AgentGym's, if we have it
    num_items: Annotated[int, ZERO, ConfigName('hosts.num_items')] = 0  # if there are no files

    name = 'agentgym'
    RULES = (
        Rule({'env': agentgym.ENVIRONMENTS.keys()}),
        must(
            'hosts.instruction',
            'the task in words, which this package does not have',
            lambda world: world.env not in agentgym.ENVIRONMENTS or world.instruction,
        ),
    )

    @property
    def instruction(self) -> str:
        return self.wording or self.quirks.instruction

    @property
    def item_env(self) -> str:
        return self.env

    def our_items(self, split: str) -> np.ndarray:
        return hashed(range(self.num_items), split)

    def solved(self, returned: float) -> bool:
        return returned > self.quirks.solved_above


@dataclasses.dataclass(frozen=True)
class Served(Remote):
    """Worlds in this process, or on servers that the run may start."""

    launch: Annotated[int, ZERO, ConfigName('hosts.launch')] = 0
    room: Annotated[int, ONE, ConfigName('hosts.room')] = 64

    WORLD: ClassVar[Any]  # class; its PLAY is the dataclass of its keywords
    PROMPTS: ClassVar[Mapping[str, str]] = {}  # its instructions, keyed by the field prompt
    RUN_RULES = (
        must(
            'rollout.slots',
            lambda run: f'less, or hosts.room to more (for {run.max_concurrent_worlds} episodes)',
            lambda run: not 0 < run.worlds[0].local_server_capacity < run.worlds_per_process,
        ),
    )

    @property
    def instruction(self) -> str:
        return self.PROMPTS[self.prompt]

    @property
    def forms(self) -> tuple[str, ...]:
        return framed(self.quirks.reader, getattr(self.WORLD, 'FORMS', ()))

    def settings(self) -> dict:
        names = {field.name for field in dataclasses.fields(self.WORLD.PLAY)}
        fields = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in fields if name in names}

    @property
    def here(self) -> bool:
        return not self.urls and not self.launch

    @property
    def local_server_capacity(self) -> int:
        """Number of worlds on the servers that each process of a run starts; 0 = no server."""
        return 0 if self.urls else self.launch * self.room

    def check(self) -> None:
        if not self.urls:
            self.needs()

    def needs(self) -> None:
        """Check that the packages of a world are installed."""
        if hasattr(self.WORLD, 'check'):
            self.WORLD.check()

    def world(self) -> Any:
        """Create a world of this process that takes bare actions."""
        return self.WORLD(**self.settings())

    def near(self) -> World:
        """Create a world of this process that takes full answers."""
        return Read(self.world(), self.quirks.reader)

    def addresses(self) -> tuple[str, ...]:
        if self.urls:
            return self.urls
        settings = json.dumps(self.settings(), sort_keys=True)
        place = f'{self.WORLD.__module__}:{self.WORLD.__name__}'
        kind = self.name if self.name in workers.WORLDS else place
        step_s = max(self.timeout_s, STEP_S)  # the server must not time out before this run
        return (launched(kind, settings, self.launch, self.room, step_s).url,)

    def make(self) -> World:
        return self.near() if self.here else super().make()
