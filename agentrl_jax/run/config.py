"""Every setting of a run: the root config, its derived values, and how it is read.

Users change a ConfigDict (`get_config`, configs/*.py, --config.a.b=c). `read` turns it into a
Config, in which every field has a value, or reports everything that is wrong with it.
"""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Annotated, Any

import jax

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.envs import ENVIRONMENTS, GAMES, HOSTS, WORLDS
from agentrl_jax.envs.base import read_world
from agentrl_jax.imitation import trajectories
from agentrl_jax.imitation.clone import Clone
from agentrl_jax.machine import files
from agentrl_jax.machine.sharding import MeshSizes
from agentrl_jax.measure.collapse import Alarms
from agentrl_jax.models.lora import Lora
from agentrl_jax.rl.algorithm import Algorithm
from agentrl_jax.rl.curriculum import Curriculum
from agentrl_jax.rl.evol import AgentEvolSettings
from agentrl_jax.rl.learning import BatchSettings, Critic, Optim, Sampler
from agentrl_jax.run import outside, rules, sections
from agentrl_jax.run.extensions import Extras
from agentrl_jax.run.hooks import Extension
from agentrl_jax.run.usage import WrongUsage
from agentrl_jax.settings import pages, tree
from agentrl_jax.settings.marks import In, Inline, Variant


@dataclasses.dataclass(frozen=True)
class Config:
    """The config of a run."""

    seed: Annotated[int, In(low=0, high=2**63 - 1)] = 0
    steps: Annotated[int, In(low=0, high=2**31 - 1)] = 200  # cycles of a rollout and an update
    env: sections.Env = sections.Env()
    agent: sections.Agent = sections.Agent()
    reward: sections.Reward = sections.Reward()
    hosts: sections.Hosts = sections.Hosts()
    model: sections.Model = sections.Model()
    lora: Lora = Lora()
    rollout: sections.Sampling = sections.Sampling()
    curriculum: Curriculum = Curriculum()
    context: sections.Context = sections.Context()
    algorithm: Annotated[Algorithm, Variant(ALGORITHMS)] = PPO()  # or module:Class
    sampler: Sampler = Sampler()
    critic: Critic = Critic()
    optim: Optim = Optim()
    batch: BatchSettings = BatchSettings()
    mesh: MeshSizes = MeshSizes()
    clone: Clone = Clone()
    evol: AgentEvolSettings = AgentEvolSettings()
    eval: sections.Eval = sections.Eval()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    alarm: Alarms = Alarms()
    log: sections.Log = sections.Log()
    extras: Annotated[Extras, Inline()] = Extras()  # sections of extensions
    # Settings of the training environments, in the order of env
    worlds: tuple[Any, ...] = dataclasses.field(default=(), metadata=tree.NOT_A_SETTING)
    # Data shards of the mesh; rules use it
    shards: int = dataclasses.field(default=1, compare=False, metadata=tree.NOT_A_SETTING)

    @property
    def extensions(self) -> tuple[Extension, ...]:
        """The config sections of extensions that change how a run is built."""
        sections = vars(self.extras).values()
        return tuple(section for section in sections if isinstance(section, Extension))

    def answer_forms(self, world: Any) -> tuple[str, ...]:
        """Return the templates of answers to an environment on a host (text.forms); () = any."""
        return (self.hosts.forms or world.forms) if self.rollout.constrain else ()

    @property
    def most_branches(self) -> int:
        """Maximum number of conversations in an episode."""
        return max(getattr(world, 'branches', 1) for world in self.worlds)

    @property
    def on_hosts(self) -> bool:
        """Whether the environment runs on hosts; only for a run with a single environment."""
        return self.env.name in HOSTS

    @property
    def members(self) -> tuple['Config', ...]:
        """One config per environment, with its share of groups and demonstrations."""
        if not self.env.mix:
            return (self,)
        groups = self.env.apportion(self.rollout.num_groups)
        episodes = self.env.apportion(self.clone.episodes)
        return tuple(
            dataclasses.replace(
                self.of_world(world),
                rollout=dataclasses.replace(self.rollout, num_groups=num_groups),
                clone=dataclasses.replace(self.clone, episodes=num_episodes),
            )
            for world, num_groups, num_episodes in zip(self.worlds, groups, episodes, strict=True)
        )

    def of_world(self, world: Any) -> 'Config':
        """Return the same run with this environment only."""
        env = dataclasses.replace(self.env, name=world.name, mix=())
        return dataclasses.replace(self, env=env, worlds=(world,))

    @property
    def held_out(self) -> 'Config':
        """The same run with the validation environments."""
        worlds = tuple(world.for_validation() for world in self.worlds)
        return dataclasses.replace(self, worlds=worlds)

    @property
    def answer_opening(self) -> str:
        """The text that is forced at the start of acting answers."""
        if self.on_hosts:
            return self.hosts.answer_prefix
        if self.agent.name == 'react':
            return 'Thought:'
        return '<think>' if self.env.think else '<answer>'

    @property
    def max_concurrent_worlds(self) -> int:
        """Number of episodes on hosts that a run plays at once, over all processes."""
        evaluated = self.env.eval_levels * self.eval.samples  # at least at the start and the end
        limit = self.rollout.slots or max(self.rollout.episodes, evaluated)
        trained, validated = min(limit, self.rollout.episodes), min(limit, evaluated)
        if self.rollout.staleness:  # training episodes stay in flight during validation
            return trained + validated
        return max(trained, validated)

    @property
    def worlds_per_process(self) -> int:
        """max_concurrent_worlds per process, rounded up."""
        return -(-self.max_concurrent_worlds // jax.process_count())

    @property
    def shares_backbone(self) -> bool:
        """Whether the critic is a head on the policy's hidden states."""
        return self.algorithm.USES_CRITIC and self.critic.share_backbone

    @property
    def saves_initial_policy(self) -> bool:
        """Whether the policy of step 0 is kept on disk, as a reference or to restart from."""
        return self.algorithm.uses_reference or self.algorithm.EXPLORES

    def starts_iteration(self, step: int) -> bool:
        """Return whether a new iteration (AgentEvol) starts at this step."""
        return self.algorithm.EXPLORES and step > 0 and step % self.evol.iteration == 0

    @property
    def base_rows(self) -> int:
        """Number of demonstrations added to the episodes of a step (AgentEvol)."""
        return self.evol.base_rows if self.algorithm.EXPLORES else 0

    @property
    def update_rows(self) -> int:
        """Number of rows in an update."""
        episodes = self.algorithm.filter.kept(self.rollout.num_groups) * self.rollout.group_size
        return episodes + self.base_rows

    def turn_limit(self, step: int) -> int:
        """Return the maximum turns of a training episode at this step (see curriculum)."""
        return self.curriculum.turn_limit(step, self.env.max_turns)

    @property
    def fewest_turns(self) -> int:
        """The smallest turn limit of the run, of its curriculum and of its demonstrations."""
        turns = min((self.env.max_turns, *self.curriculum.rounds))
        return min(turns, self.clone.max_turns or turns)

    @property
    def acting_turns(self) -> int:
        """Number of acting turns in a trial under the smallest turn limit."""
        agent = self.agent.build()
        return agent.acting_turns(max(self.fewest_turns, agent.least_turns))


def get_config() -> Any:
    """Return the ConfigDict that configs change; algorithm-specific defaults are unset."""
    cfg = tree.config_dict(Config)
    for name, world in {**ENVIRONMENTS, **HOSTS}.items():
        cfg[name] = tree.config_dict(world, name)
    return cfg


def read_world_section(cfg: Any, name: str) -> Any:
    """Return the settings of an environment. A game's section exists only if a config adds it."""
    section = cfg[name].to_dict() if name in cfg else {}
    return read_world(WORLDS[name], files.in_mounts(section), files.in_mounts(cfg.hosts.to_dict()))


def read(cfg: Any, shards: int | None = 1) -> Config:
    """Read a ConfigDict into a Config; WrongUsage lists everything that is wrong.

    shards: number of row shards in the mesh; None skips the rules between fields.
    """
    with _impossible():
        outside.register(tree.flat(cfg))
    known = tree.flat(get_config())  # games' sections are checked when read
    for name in sorted(tree.flat(cfg).keys() - known.keys()):
        if name.partition('.')[0] not in GAMES:
            raise WrongUsage(tree.unknown_field_message(name, known))
    with _impossible():
        run = outside.with_world_names(tree.read(Config, cfg))
        worlds = tuple(read_world_section(cfg, name) for name in run.env.worlds if name in WORLDS)
    run = dataclasses.replace(run, worlds=worlds)
    return run if shards is None else check(run, shards)


def check(run: Config, shards: int) -> Config:
    """Return a run's config for a mesh; WrongUsage lists all rules between fields it breaks."""
    run = dataclasses.replace(run, shards=shards)
    if broken := rules.broken(run):
        sentences = '; '.join(rule.sentence for rule in broken)
        fields = tuple(field for rule in broken for field in rule.fields)
        raise WrongUsage(f'invalid config: {sentences}', fields)
    if run.clone.file:
        trajectories.read_records(run.clone.file)  # fail before the model is loaded
    return run


def effective(cfg: Any) -> Any:
    """Return a copy of the ConfigDict with the run's values; fields without effect are unset."""
    full = copy.deepcopy(cfg)
    with _impossible():
        outside.register(tree.flat(cfg))
        full.update_from_flattened_dict(tree.values(tree.read(Config, cfg)))
    return full


@contextlib.contextmanager
def _impossible() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise WrongUsage(f'invalid config: {error}') from error


def as_json(cfg: Any) -> dict[str, Any]:
    """Return a ConfigDict as plain JSON values."""
    return json.loads(cfg.to_json_best_effort())


def show(cfg: Any) -> str:
    """Format the effective config, one field per line, with its algorithm's values."""
    return pages.show(Config, effective(cfg), tree.flat(cfg))
