"""Every setting of a run: the root of the tree, what follows from it, and how it is read.

Users change a ConfigDict (`get_config`, configs/*.py, --config.a.b=c). `read` makes the Config of
it, in which every field has a value, or says everything that is wrong with it.
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
from agentrl_jax.imitation.clone import LIMITS, Clone
from agentrl_jax.machine import files
from agentrl_jax.machine.sharding import MeshSizes
from agentrl_jax.measure.collapse import Alarms
from agentrl_jax.models.lora import Lora
from agentrl_jax.rl.algorithm import Algorithm
from agentrl_jax.rl.curriculum import Curriculum
from agentrl_jax.rl.evol import Evolution
from agentrl_jax.rl.learning import Batching, Critic, Optim, Sampler
from agentrl_jax.run import outside, rules, sections
from agentrl_jax.run.extensions import Extras
from agentrl_jax.run.hooks import Extension
from agentrl_jax.run.usage import WrongUsage
from agentrl_jax.settings import pages, tree
from agentrl_jax.settings.marks import (
    Chosen,
    In,
    Inline,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A run."""

    seed: Annotated[int, In(low=0, high=2**63 - 1)] = 0
    steps: Annotated[int, In(low=0, high=2**31 - 1)] = 200  # rollout-update cycles
    env: sections.Env = sections.Env()
    agent: sections.Agent = sections.Agent()
    reward: sections.Reward = sections.Reward()
    hosts: sections.Hosts = sections.Hosts()
    model: sections.Model = sections.Model()
    lora: Lora = Lora()
    rollout: sections.Sampling = sections.Sampling()
    curriculum: Curriculum = Curriculum()
    context: sections.Context = sections.Context()
    algorithm: Annotated[Algorithm, Chosen(ALGORITHMS)] = PPO()  # or module:Class
    sampler: Sampler = Sampler()
    critic: Critic = Critic()
    optim: Optim = Optim()
    batch: Batching = Batching()
    mesh: MeshSizes = MeshSizes()
    clone: Clone = Clone()
    evol: Evolution = Evolution()
    eval: sections.Eval = sections.Eval()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    alarm: Alarms = Alarms()
    log: sections.Log = sections.Log()
    extras: Annotated[Extras, Inline()] = Extras()  # sections of extensions
    # Sections of the worlds that train, by their names in env
    worlds: tuple[Any, ...] = dataclasses.field(default=(), metadata=tree.APART)
    # Data shards of the mesh, for rules
    shards: int = dataclasses.field(default=1, compare=False, metadata=tree.APART)

    @property
    def extensions(self) -> tuple[Extension, ...]:
        """The sections of extensions that change how a run is built."""
        sections = vars(self.extras).values()
        return tuple(section for section in sections if isinstance(section, Extension))

    @property
    def algorithm_name(self) -> str:
        return Chosen(ALGORITHMS).key(self.algorithm)

    def forms_of(self, world: Any) -> tuple[str, ...]:
        """What answers to a world on a host must look like (text.forms); () = any text."""
        return (self.hosts.forms or world.forms) if self.rollout.constrain else ()

    @property
    def most_branches(self) -> int:
        """Conversations of an episode, at most."""
        return max(getattr(world, 'branches', 1) for world in self.worlds)

    @property
    def on_hosts(self) -> bool:
        """Whether episodes of this one world are played against worlds on hosts."""
        return self.env.name in HOSTS

    @property
    def members(self) -> tuple['Config', ...]:
        """A run of each world alone, with its share of groups and demonstrations."""
        if not self.env.mix:
            return (self,)
        groups = self.env.apportion(self.rollout.num_groups)
        shown = self.env.apportion(self.clone.episodes)
        return tuple(
            dataclasses.replace(
                self.of_world(world),
                rollout=dataclasses.replace(self.rollout, num_groups=own_groups),
                clone=dataclasses.replace(self.clone, episodes=own_episodes),
            )
            for world, own_groups, own_episodes in zip(self.worlds, groups, shown, strict=True)
        )

    def of_world(self, world: Any) -> 'Config':
        """The same run of another world alone."""
        env = dataclasses.replace(self.env, name=world.name, mix=())
        return dataclasses.replace(self, env=env, worlds=(world,))

    @property
    def held_out(self) -> 'Config':
        """The same run with the worlds of validation."""
        worlds = tuple(world.for_validation() for world in self.worlds)
        return dataclasses.replace(self, worlds=worlds)

    @property
    def with_clone_limits(self) -> 'Config':
        """With the limits of expert demonstrations in the place of the run's."""
        parts = {}
        for name, section in LIMITS.items():
            part = parts.get(section, getattr(self, section))
            limit = getattr(self.clone, name) or getattr(part, name)
            parts[section] = dataclasses.replace(part, **{name: limit})
        return dataclasses.replace(self, **parts)

    @property
    def answer_opening(self) -> str:
        """What is forced in front of answers that act."""
        if self.on_hosts:
            return self.hosts.answer_prefix
        if self.agent.name == 'react':
            return 'Thought:'
        return '<think>' if self.env.think else '<answer>'

    @property
    def worlds_at_once(self) -> int:
        """Episodes on hosts that a run plays side by side, all of its processes together."""
        evaluated = self.env.eval_levels * self.eval.samples  # at the start and the end at least
        most = self.rollout.slots or max(self.rollout.episodes, evaluated)
        trained, validated = min(most, self.rollout.episodes), min(most, evaluated)
        if self.rollout.staleness:  # episodes are in flight while others are validated
            return trained + validated
        return max(trained, validated)

    @property
    def worlds_per_process(self) -> int:
        """worlds_at_once of one process."""
        return -(-self.worlds_at_once // jax.process_count())

    @property
    def shares_backbone(self) -> bool:
        """Whether the critic is a head on the policy's own hidden states."""
        return self.algorithm.USES_CRITIC and self.critic.share_backbone

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term or a teacher compares with the policy of step 0."""
        return self.algorithm.uses_reference

    @property
    def explores(self) -> bool:
        """Whether episodes are played by the policy of an iteration's beginning (AgentEvol)."""
        return self.algorithm.EXPLORES

    @property
    def starts_at_random(self) -> bool:
        """Whether training starts from random weights: nothing is loaded or cloned."""
        return not self.model.path and not self.clone.demonstrates

    @property
    def keeps_start(self) -> bool:
        """Whether the policy of step 0 is kept on disk: as a reference, or to begin again from."""
        return self.needs_reference or self.explores

    def begins_iteration(self, step: int) -> bool:
        """AgentEvol: whether explorer and learner change before the step."""
        return self.explores and step > 0 and step % self.evol.iteration == 0

    @property
    def base_rows(self) -> int:
        """Demonstrations that join the episodes of a step (AgentEvol)."""
        return self.evol.base_rows if self.explores else 0

    @property
    def update_rows(self) -> int:
        """Rows of an update."""
        kept = self.algorithm.filter.kept(self.rollout.num_groups) * self.rollout.group_size
        return kept + self.base_rows

    def turn_limit(self, step: int) -> int:
        """Turns an episode of a training step may take: those of the curriculum, or all."""
        return self.curriculum.turn_limit(step, self.env.max_turns)

    @property
    def fewest_turns(self) -> int:
        """The turns of the shortest episodes: the curriculum and the clone have limits too."""
        turns = min((self.env.max_turns, *self.curriculum.rounds))
        return min(turns, self.clone.max_turns or turns)

    @property
    def acting_turns(self) -> int:
        """Turns that act in a trial of the shortest episodes."""
        agent = self.agent.build()
        return agent.acting_turns(max(self.fewest_turns, agent.least_turns))

    @property
    def continuations(self) -> int:
        """Continuations that an episode of a rollout can have; 0 = it is never forked."""
        return self.algorithm.continuations(self.env.max_turns)


def get_config() -> Any:
    """The ConfigDict that configs change: every field with its default, unset where algorithms'
    differ."""
    cfg = tree.config_dict(Config)
    for name, world in {**ENVIRONMENTS, **HOSTS}.items():
        cfg[name] = tree.config_dict(world, name)
    return cfg


def section_of(cfg: Any, name: str) -> Any:
    """The settings of a world; games have a section only in a config that sets something."""
    section = cfg[name].to_dict() if name in cfg else {}
    return read_world(WORLDS[name], files.in_mounts(section), files.in_mounts(cfg.hosts.to_dict()))


def read(cfg: Any, shards: int | None = 1) -> Config:
    """The settings of a ConfigDict; WrongUsage with everything that is wrong.

    shards: of rows over the mesh; None leaves rules between fields unchecked.
    """
    with _impossible():
        outside.register(tree.flat(cfg))
    known = tree.flat(get_config())  # sections of games are checked as they are read
    for name in sorted(tree.flat(cfg).keys() - known.keys()):
        if name.partition('.')[0] not in GAMES:
            raise WrongUsage(tree.no_field(name, known))
    with _impossible():
        run = _with_world_names(tree.read(Config, cfg))
        worlds = tuple(section_of(cfg, name) for name in run.env.worlds if name in WORLDS)
    run = dataclasses.replace(run, worlds=worlds, shards=shards or 1)
    if shards is not None and (broken := rules.broken(run)):
        sentences = '; '.join(rule.sentence for rule in broken)
        fields = tuple(field for rule in broken for field in rule.fields)
        raise WrongUsage(f'impossible configuration: {sentences}', fields)
    if shards is not None and run.clone.file:
        trajectories.read_records(run.clone.file)  # before the model is loaded
    return run


def _with_world_names(run: Config) -> Config:
    """With the names of worlds outside the package in the place of module:Class."""
    mix = tuple((outside.world_name(name), share) for name, share in run.env.mix)
    name = run.env.name if mix else outside.world_name(run.env.name)
    return dataclasses.replace(run, env=dataclasses.replace(run.env, name=name, mix=mix))


def effective(cfg: Any) -> Any:
    """A copy of the ConfigDict with the values that the run has; unset: without effect."""
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
        raise WrongUsage(f'impossible configuration: {error}') from error


def as_json(cfg: Any) -> dict[str, Any]:
    """A ConfigDict as plain values."""
    return json.loads(cfg.to_json_best_effort())


def show(cfg: Any) -> str:
    """The effective config, a field a line, with the values of its algorithm."""
    return pages.show(Config, effective(cfg), tree.flat(cfg))
