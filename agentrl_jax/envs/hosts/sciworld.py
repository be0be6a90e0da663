"""SciWorld: ScienceWorld (arXiv:2203.07540) with AgentGym's games, texts and scores.

The simulator is the package `scienceworld`, which needs Java 17. One JVM with a capped heap holds
the simulators of all worlds of a process. A step does not compute the list of valid actions, which
would take thirty times as long as the step and which AgentGym never shows.
"""

import collections
import contextlib
import dataclasses
import functools
import operator
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from agentrl_jax.envs.hosts import agentgym_prompts
from agentrl_jax.envs.hosts.agentgym import Quirks
from agentrl_jax.envs.hosts.answers import Read
from agentrl_jax.envs.hosts.base import hashed
from agentrl_jax.envs.hosts.served import Served, checked
from agentrl_jax.envs.hosts.world import Reply, WorldError, package_folder
from agentrl_jax.settings.marks import ONE

# AgentGym's tasks in its order, with their number of variations; items number all variations.
TASKS = (
    ('boil', 30),
    ('melt', 30),
    ('freeze', 30),
    ('change-the-state-of-matter-of', 30),
    ('use-thermometer', 540),
    ('measure-melting-point-known-substance', 436),
    ('measure-melting-point-unknown-substance', 300),
    ('power-component', 20),
    ('power-component-renewable-vs-nonrenewable-energy', 20),
    ('test-conductivity', 900),
    ('test-conductivity-of-unknown-substances', 600),
    ('find-living-thing', 300),
    ('find-non-living-thing', 300),
    ('find-plant', 300),
    ('find-animal', 300),
    ('chemistry-mix', 32),
    ('chemistry-mix-paint-secondary-color', 36),
    ('chemistry-mix-paint-tertiary-color', 36),
    ('lifespan-longest-lived', 125),
    ('lifespan-shortest-lived', 125),
    ('lifespan-longest-lived-then-shortest-lived', 125),
    ('identify-life-stages-1', 14),
    ('identify-life-stages-2', 10),
)
LEFT_OUT = 'measure-melting-point-unknown-substance'  # missing from one of AgentGym's item files
SOLVED = 100
MAX_MOVES = 100  # per game
UNKNOWN = ('No known action matches', 'Unknown action')  # prefixes of replies to invalid actions
INTERFACE = 'scienceworld.runtime.pythonapi.PythonInterface'


@functools.cache
def games(shifted: bool = False) -> tuple[tuple[str, int], ...]:
    """Return (task, variation) of each item. shifted: skip one task, as an AgentGym file does.

    From 1096 on, the items of that file are 300 below those of AgentGym's server.
    """
    return tuple(
        (task, variation)
        for task, count in TASKS
        if not (shifted and task == LEFT_OUT)
        for variation in range(count)
    )


def jar() -> str:
    missing = 'SciWorld is the package scienceworld with py4j: pip install scienceworld==1.2.3'
    package_folder('py4j', missing)
    return str(package_folder('scienceworld', missing) / 'scienceworld.jar')


def java() -> str:
    """Return the path of the Java executable."""
    home = os.environ.get('JAVA_HOME', '')
    path = shutil.which('java', path=f'{home}/bin' if home else None)
    if path is None:
        raise FileNotFoundError(
            'SciWorld needs Java 17, but java was not found: apt-get install '
            'openjdk-17-jre-headless, or set JAVA_HOME'
        )
    return path


class Machine:
    """The JVM of this process; started with the first simulator and restarted if it died."""

    def __init__(self, heap_mb: int):
        self.heap_mb = heap_mb
        self._gateway: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix='sciworld_')  # the jar writes a table
        self._lock = threading.Lock()

    def simulator(self) -> Any:
        with self._lock:
            if self._gateway is not None and self._gateway.java_process.poll() is not None:
                self._gateway.close()
                self._gateway = None
            if self._gateway is None:
                self._gateway = self._started()
            interface = operator.attrgetter(INTERFACE)(self._gateway.jvm)
        with faults():
            return interface()

    def forget(self, thing: Any) -> None:
        """Release a Java object, so that the JVM can collect it."""
        with contextlib.suppress(WorldError), faults():
            self._gateway.detach(thing)

    def _started(self) -> Any:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        with faults():
            port, process = launch_gateway(
                classpath=jar(),
                java_path=java(),
                javaopts=[
                    f'-Xmx{self.heap_mb}m',
                    '-XX:+UseSerialGC',
                    '-XX:TieredStopAtLevel=1',
                    '-XX:+ExitOnOutOfMemoryError',
                ],
                cwd=self._folder.name,
                die_on_exit=True,  # the JVM reads our pipe and exits when it closes
                return_proc=True,
            )
        # forget() releases objects instead of finalizers, which Python may run in any thread
        parameters = GatewayParameters(port=port, auto_field=True, enable_memory_management=False)
        return JavaGateway(gateway_parameters=parameters, java_process=process)


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Convert errors of the Java bridge to WorldErrors."""
    from py4j.protocol import Py4JError

    try:
        yield
    except (Py4JError, OSError) as error:
        raise WorldError(f'ScienceWorld: {error}'[:400]) from error


machine = functools.cache(Machine)  # of this process, by heap_mb


@dataclasses.dataclass(frozen=True)
class Play:
    """Settings of a world."""

    scale: float = 1.0  # of rewards, which sum to 100 if the task is solved
    shifted: bool = False  # items of AgentGym's file that skips a task: see games
    heap_mb: Annotated[int, ONE] = 1024  # of the JVM, shared by all worlds of a process


class SciWorld:
    """One simulator; actions are its commands (`answers.py` reads replies).

    Rewards are differences of a score from 0 to 100. The score of the initial state is not earned,
    and a wrong focus sets the score to -100. An episode ends if the task is completed, the score is
    negative, or more than MAX_MOVES moves were made; looking is not a move.
    """

    deterministic = True

    PLAY = Play

    def __init__(self, **settings: Any):
        self.play = checked('sciworld', Play(**settings))
        self.check()
        self.instruction = agentgym_prompts.SCIWORLD
        self.games = games(self.play.shifted)
        self.machine = machine(self.play.heap_mb)
        self.simulator = self.machine.simulator()
        self._details: dict[str, Any] = {}

    @staticmethod
    def check() -> None:
        """Raise an error that names a missing dependency."""
        jar()
        java()

    def reset(self, item: int, *, gold: bool = False) -> str:
        """Start a game; return the task and the surroundings."""
        if not 0 <= item < len(self.games):
            raise ValueError(f'item {item} is not in 0..{len(self.games) - 1}')
        task, variation = self.games[item]
        with faults():
            self.simulator.load(task, variation, '', gold)
            described = self.simulator.getTaskDescription()
        surroundings, self.score, _ = self._said('look around')
        self._details = {
            'observation': surroundings,  # AgentGym sends it separately
            'task_description': described,
            'task_name': task,
            'var_num': variation,
            'score': self.score,
            'deleted': False,
        }
        return f'{described}\n{surroundings}'

    def step(self, action: str) -> Reply:
        text, score, done = self._said(action)
        reward, self.score = self.play.scale * (score - self.score), score
        self._details = {'score': score}
        valid = not text.startswith(UNKNOWN)
        return Reply(text, reward, done, success=score >= SOLVED, valid=valid)

    def details(self) -> dict[str, Any]:
        """Return the additional fields of AgentGym's server."""
        return self._details

    def close(self) -> None:
        if self.simulator is not None:
            simulator, self.simulator = self.simulator, None
            self.machine.forget(simulator)

    def gold(self, item: int) -> list[str]:
        """Return the simulator's solution of a game; it is not always the same."""
        self.reset(item, gold=True)
        with faults():
            sequence = self.simulator.getGoldActionSequence()
            actions = list(map(str, sequence))
        self.machine.forget(sequence)
        return actions

    def _said(self, action: str) -> tuple[str, int, bool]:
        with faults():
            text = self.simulator.step(action)
            score = round(100 * self.simulator.getScore())
            moves, completed = self.simulator.getNumMoves(), self.simulator.getCompleted()
        return text, score, bool(completed) or moves > MAX_MOVES or score < 0


class SciWorldPlayer(Read):
    """ScienceWorld with the simulator's solution as the expert.

    The solution is fixed, so it may fail after a different action. Random play draws its actions.
    """

    def reset(self, item: int) -> str:
        self.path = self.world.gold(item)
        self.left = collections.deque(self.path)
        return super().reset(item)

    def best(self) -> str:
        return f'Action: {self.left.popleft()}' if self.left else ''

    def random(self, generator: np.random.Generator) -> str:
        return f'Action: {generator.choice(self.path)}'


@dataclasses.dataclass(frozen=True)
class SciWorldEnvironment(Served, Play):
    name, WORLD = 'sciworld', SciWorld
    instruction = agentgym_prompts.SCIWORLD

    @property
    def quirks(self) -> Quirks:
        return dataclasses.replace(super().quirks, scale=self.scale)

    def player(self) -> SciWorldPlayer:
        return SciWorldPlayer(self.world(), self.quirks.reader)

    def our_items(self, split: str) -> np.ndarray:
        return hashed(range(len(games(self.shifted))), split)
