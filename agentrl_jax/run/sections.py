"""The sections of a run's config that no algorithm and no world owns, with the rules of each.

A field has its default, bound or choice and meaning here and nowhere else (agentrl_jax/settings).
`problems` are rules of a section alone, `conflicts` rules between it and the rest of the run.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jax

from agentrl_jax.envs import ENVIRONMENTS, GAMES, HOSTS, WORLDS
from agentrl_jax.rollout.world_calls import RetryPolicy
from agentrl_jax.settings.marks import (
    MANY,
    ONE,
    PART,
    WORD,
    ZERO,
    In,
    Inline,
    OneOf,
    Words,
    suggestion,
)
from agentrl_jax.text import agents

DTYPES = Literal['float32', 'bfloat16']
TWO_PLAYERS = tuple(name for name, world in GAMES.items() if hasattr(world, 'seat'))
MIX = Words("pairs of a world and its share, such as (('frozen_lake', .5), ('sokoban', .5))")


@dataclasses.dataclass(frozen=True)
class Env:
    """What is played."""

    name: str = 'frozen_lake'  # a world of agentrl_jax.envs or envs.hosts, or module:Class
    mix: Annotated[tuple[tuple[str, float], ...], MIX] = ()  # ((world, share of the groups), ...):
    # several worlds, in the place of name
    prompt: str = 'ragen'  # wording: a name in agentrl_jax.text.prompts.STYLES
    hint: Literal['none', 'plan'] = 'none'  # with which the first prompt begins: plan, what the
    # best player does from the start of the level
    think: bool = True  # answers open with <think>; False: with <answer>
    max_turns: Annotated[int, ONE] = 5
    max_actions_per_turn: Annotated[int, ONE] = 5  # further actions of an answer are cut
    max_actions_per_episode: Annotated[int, ONE] = 10
    format_penalty: Annotated[float, In(high=0)] = -0.1  # for a turn whose answer is not well
    # formed
    max_words: Annotated[int, ONE] = 100  # named in the prompt only
    train_levels: Annotated[int, MANY] = 4096  # size of the training pool
    eval_levels: Annotated[int, MANY] = 256  # size of the validation and test pools, and episodes
    # played
    pool_seed: Annotated[int, WORD] = 0  # pools of different splits never share a map

    def __post_init__(self):
        if self.mix:
            object.__setattr__(self, 'name', '+'.join(self.worlds))

    @property
    def worlds(self) -> tuple[str, ...]:
        """Names of the worlds that train."""
        return tuple(name for name, _ in self.mix) or (self.name,)

    def apportion(self, total: int) -> tuple[int, ...]:
        """Whole parts of a total for each world, by its share.

        Rounded down; the rest goes to those that lost most.
        """
        exact = [share * total for _, share in self.mix] or [total]
        parts = [int(part + 1e-6) for part in exact]
        lost = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])  # of equals the first
        return tuple(part + (i in lost[: total - sum(parts)]) for i, part in enumerate(parts))

    def problems(self) -> Iterator[str]:
        shares = [share for _, share in self.mix]
        if not self.mix and self.name not in WORLDS:
            close = suggestion(self.name, WORLDS)
            yield f'env.name={self.name!r} is not one of {", ".join(WORLDS)}{close}'
        elif not set(self.worlds) <= set(WORLDS) or len(set(self.worlds)) < len(self.worlds):
            close = ''.join(suggestion(x, WORLDS) for x in self.worlds if x not in WORLDS)
            yield f'env.mix={self.mix!r} must name different worlds: {", ".join(WORLDS)}{close}'
        elif shares and not (min(shares) > 0 and abs(sum(shares) - 1) < 1e-6):
            yield f'env.mix={self.mix!r}: shares must be above 0 and sum to 1'

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        """What does not go with hints, nor with the worlds of a mixture."""
        if self.hint != 'none':
            hosts = [name for name in self.worlds if name in HOSTS]
            if hosts:
                yield (
                    f'env.hint={self.hint!r} needs the plans of worlds on the device, and '
                    f'{", ".join(hosts)} is on hosts: set it to none'
                )
            if run.context.window:
                yield (
                    f'env.hint={self.hint!r} is read in the first turn, which context.window='
                    f'{run.context.window} hides from later ones: set one of them to nothing'
                )
        if not self.mix:
            return
        groups, mix = self.apportion(run.rollout.num_groups), f'env.mix={self.mix!r}'
        rows = [count * run.rollout.group_size for count in groups]
        several = 'does not go with several worlds (env.mix)'
        if min(groups) < 1:
            yield f'{mix} leaves a world none of rollout.num_groups={run.rollout.num_groups}'
        if any(count % shards for count in rows):
            yield (
                f'{mix} gives the worlds {", ".join(map(str, rows))} episodes, which must be '
                f'multiples of the {shards} data shards of the mesh'
            )
        if run.context.window:
            yield (
                f'context.window={run.context.window} {several}, whose prompts differ in length: '
                'set it to 0'
            )
        if run.algorithm.filter.refill:
            yield (
                f'filter.refill={run.algorithm.filter.refill} {several}: what it fills a batch '
                'with would undo their shares; set it to 0'
            )
        if run.alarm.mi_every:
            yield (
                f'alarm.mi_every={run.alarm.mi_every} {several}: it compares answers to the '
                'prompts of one; set it to 0'
            )


@dataclasses.dataclass(frozen=True)
class Agent:
    """Turns beside those that act, and trials of a level."""

    name: Annotated[str, OneOf(agents.NAMES)] = 'act'  # plan (a plan is written before a trial's
    # first action), reflect (after a failed trial what went wrong is written); act and react: none
    trials: Annotated[int, ONE] = 1  # times that a level is tried, which share env.max_turns evenly
    plan_every: Annotated[int, ZERO] = 0  # a plan is written anew after n turns that act; 0 = never

    def build(self) -> agents.Agent:
        return agents.build_agent(self.name, trials=self.trials, plan_every=self.plan_every)

    def problems(self) -> Iterator[str]:
        if self.name == 'reflect' and self.trials == 1:
            yield 'agent.name=reflect writes between trials: set agent.trials to 2 or more'
        if self.plan_every and self.name != 'plan':
            yield (
                f'agent.plan_every={self.plan_every} has no effect on agent.name={self.name!r}: '
                'set it to 0'
            )

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        del shards
        built, trial = self.build(), f'agent.name={self.name!r} with agent.trials={self.trials}'
        turns = min((run.env.max_turns, *run.curriculum.rounds))
        turns = min(turns, run.clone.max_turns or turns)
        needed = built.trials * (1 + built.plans) + (built.trials - 1) * built.reflects
        acting = built.acting_turns(max(turns, needed))
        if self.name == 'react' and not run.env.think:
            yield 'agent.name=react writes its thoughts: set env.think=True'
        if self.name == 'react' and run.rollout.stop_at_answer:
            yield (
                'rollout.stop_at_answer has no effect on agent.name=react, whose answers end with '
                'the turn: set it to False'
            )
        if turns < needed:
            yield (
                f'{trial} takes {needed} turns at least, and env.max_turns, curriculum.rounds or '
                f'clone.max_turns allow {turns}'
            )
        for world in run.worlds:
            if world.name == 'search' and world.turns > acting:
                yield (
                    f'search.turns={world.turns} is when the outcome is earned, and {trial} has '
                    f'{acting} turns that act in a trial (env.max_turns, curriculum.rounds): set '
                    'it to at most that'
                )
        if run.context.summary and (built.writes or built.trials > 1):
            yield (
                f'context.summary={run.context.summary} lists turns of a single trial that all '
                "act: set it to 0, or agent.name='act' and agent.trials=1"
            )
        if run.alarm.mi_every and built.writes:
            yield (
                f'alarm.mi_every={run.alarm.mi_every} compares answers of one kind, and '
                f'agent.name={self.name!r} writes others: set it to 0'
            )


@dataclasses.dataclass(frozen=True)
class Reward:
    """Rewards of your own."""

    function: str = ''  # module:name of a function whose rewards take the place of the world's
    # (agentrl_jax/rollout/README.md); '' = those that the world pays

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        del shards
        asked = f'reward.function={self.function!r}'
        if self.function and len({name in HOSTS for name in run.env.worlds}) > 1:
            yield (
                f'{asked} is a function of rollouts on the device and of texts on hosts, and '
                f'env.mix={run.env.mix!r} has both kinds of worlds'
            )


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Rollouts against worlds on hosts (agentrl_jax.envs.hosts.HOSTS)."""

    answer_prefix: str = ''  # forced in front of each answer, such as '<think>'
    stop: tuple[str, ...] = ()  # texts that end a turn once the policy has written them
    forms: tuple[str, ...] = ()  # with rollout.constrain: what answers must look like, {} for any
    # text, such as 'Action: {}'; () = what the world says
    max_observation: Annotated[int, ONE] = 512  # tokens of a text of a world; the middle of longer
    # ones is cut
    read_tokens: Annotated[int, ONE] = 32  # of a row in a block: longer texts are read in several
    # blocks
    poll: Annotated[int, ONE] = 8  # tokens that are sampled at most before replies are looked for
    policy: Annotated[RetryPolicy, Inline()] = RetryPolicy()

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        """What needs a world on the device; what is for the device alone passes mixtures by."""
        del shards
        for member in run.members:
            if member.on_hosts:
                yield from self._of_world(member, all(name in HOSTS for name in run.env.worlds))

    def _of_world(self, run: Any, alone: bool) -> Iterator[str]:
        (world,), clone, agent = run.worlds, run.clone, run.agent.build()
        name = f'env.name={run.env.name!r}'
        if clone.episodes and not world.has_player():
            yield (
                f'clone.episodes={clone.episodes} needs an expert, and {name} has none: set it to '
                '0, or name trajectories in clone.file'
            )
        if clone.episodes and clone.oracle < 1 and not world.plays_at_random:
            yield (
                f'clone.oracle={clone.oracle:g} has {name} answered at random, which nobody knows '
                'how to: set it to 1.0'
            )
        if clone.episodes and (agent.writes or agent.trials > 1):
            yield (
                f'clone.episodes={clone.episodes} plays one trial of turns that act on hosts, and '
                f'agent.name={run.agent.name!r} with agent.trials={agent.trials} has others: set '
                'it to 0, or name trajectories in clone.file'
            )
        if world.chats and (run.context.window or agent.writes or agent.trials > 1):
            yield (
                f'{name} shows what its harness shows, once: set context.window to 0, agent.name '
                "to 'act' and agent.trials to 1"
            )
        if world.context > run.rollout.max_tokens:
            yield (
                f'harness.context={world.context} is more than all conversations of an episode '
                f'have, rollout.max_tokens={run.rollout.max_tokens}: lower the one or raise the '
                'other'
            )
        if world.chats and run.env.mix:
            yield f'env.mix={run.env.mix!r} cannot hold {name}: set it to ()'
        if run.agent.name == 'react':
            yield (
                f'agent.name=react words the prompts of worlds on the device, and {name} brings '
                "its own: set hosts.answer_prefix='Thought:' and agent.name='act'"
            )
        if run.alarm.mi_every:
            yield (
                f'alarm.mi_every={run.alarm.mi_every} needs answers of a known form, and those to '
                f'{name} are free text: set it to 0'
            )
        if run.context.summary:
            yield (
                f'context.summary={run.context.summary} needs lines of a world on the device, and '
                f'{name} is on hosts: set it to 0'
            )
        if run.eval.worlds:
            yield (
                f'eval.worlds={run.eval.worlds} are on the device, and {name} is on hosts: '
                'evaluate the run on them by itself'
            )
        if run.rollout.stop_at_answer and alone:
            yield (f"rollout.stop_at_answer has no effect on {name}: set hosts.stop=('</answer>',)")
        for field in ('start_s', 'silent_s', *(() if world.here else ('timeout_s',))):
            if getattr(world, field, 0.0) > self.policy.timeout_s:
                yield (
                    f'{world.name}.{field}={getattr(world, field):g} has no effect beyond '
                    f'hosts.timeout_s={self.policy.timeout_s:g}, when a world is given up: lower '
                    'the one or raise the other'
                )
        room, needed = world.local_server_capacity, -(-run.worlds_at_once // jax.process_count())
        if 0 < room < needed:
            yield (
                f'{world.name}.launch and {world.name}.room hold {room} worlds, and {needed} '
                f'episodes are played at once: raise {world.name}.room, or lower rollout.slots'
            )


@dataclasses.dataclass(frozen=True)
class Model:
    """The policy's architecture and weights, and how they compute."""

    path: str = ''  # HuggingFace folder (hf download ...), .gguf, or the workdir of a run (or its
    # folder best); '' = random weights of the sizes below
    tokenizer: str = ''  # folder, .gguf or .model; '' = that of path, or the bundled one
    dtype: DTYPES = 'float32'  # compute dtype; parameters and optimiser stay float32
    remat: bool = False  # recompute activations in the backward pass, layer by layer
    attention: Literal['auto', 'plain'] = 'auto'  # auto: as one kernel where there is one
    # (cuDNN's on GPUs, Pallas' on TPUs; bfloat16, heads of 64 or 128 channels); plain: in steps
    scan_layers: bool | None = None  # training runs the layers as one loop, which makes a small
    # program of a deep model; unset: with remat, from 8 layers on
    hidden_size: Annotated[int, In(low=2)] = 128
    intermediate_size: Annotated[int, ONE] = 256
    num_layers: Annotated[int, ONE] = 4
    num_heads: Annotated[int, ONE] = 4
    num_kv_heads: Annotated[int, ONE] = 2
    tie_embeddings: bool = True  # one matrix for the embedding and the output head
    rope_theta: Annotated[float, In(low=1)] = 1e6  # base of the rotary positions

    def problems(self) -> Iterator[str]:
        if not self.path and self.hidden_size % (2 * self.num_heads):
            yield (
                f'model.hidden_size={self.hidden_size} must be a multiple of '
                f'2 x model.num_heads={self.num_heads}'
            )
        if not self.path and self.num_heads % self.num_kv_heads:
            yield (
                f'model.num_heads={self.num_heads} must be a multiple of '
                f'model.num_kv_heads={self.num_kv_heads}'
            )


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How episodes are played."""

    num_groups: Annotated[int, MANY] = 8  # different levels (prompts) per step
    group_size: Annotated[int, MANY] = 16  # episodes per level
    max_tokens: Annotated[int, ONE] = 3072  # tokens of an episode, prompts included
    max_response: Annotated[int, ONE] = 400  # sampled tokens of a turn
    temperature: Annotated[float, In(low=0.01, high=100)] = 1.0  # below .01 log-probabilities of
    # other tokens than the best leave float32
    sampler_dtype: Literal['', 'float32', 'bfloat16'] = ''  # compute dtype of playing; '' =
    # model.dtype
    slots: Annotated[int, ZERO] = 0  # episodes played at once; 0 = all
    serve_rows: Annotated[int, ONE] = 8  # waiting slots that are served together
    stop_at_answer: bool = False  # end a turn at </answer>; else at the end-of-turn token
    constrain: Literal['', 'own', 'any'] = ''  # only tokens that can still become a legal answer
    # are sampled, and the trainer's probabilities are among them: own, answers as the tokenizer
    # spells them; any, by any tokens; '' = any token may be sampled
    common_random_numbers: bool = False  # members of a group share the world's random numbers
    staleness: Annotated[int, ZERO] = 0  # worlds on hosts: episodes of as many later steps begin
    # while a step waits for its own, and go on under its new weights

    @property
    def episodes(self) -> int:
        """Episodes of a rollout."""
        return self.num_groups * self.group_size

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        if self.episodes % shards:
            yield (
                f'{self.episodes} episodes (rollout.num_groups x rollout.group_size) must be a '
                f'multiple of the {shards} data shards of the mesh'
            )
        if self.slots % shards:
            yield (
                f'rollout.slots={self.slots} must be a multiple of the {shards} data shards of the '
                'mesh'
            )
        if self.group_size == 1 and run.algorithm.COMPARES_GROUPS:
            yield (
                f'rollout.group_size=1 leaves algorithm={run.algorithm_name!r} nothing to compare '
                'an episode with: set it to 2 or more'
            )
        kept = run.algorithm.filter
        if self.group_size == 1 and kept.drops_groups:
            yield (
                f'rollout.group_size=1 leaves filter.rule={kept.rule!r} no spread '
                'to go by: set filter.rule=all, or rollout.group_size to 2 or more'
            )
        if self.constrain:
            yield from self._unconstrained(run)
        if self.staleness:
            yield from self._cannot_be_stale(run)

    def _cannot_be_stale(self, run: Any) -> Iterator[str]:
        """What a step must know before the ones before it are over, or would train wrongly."""
        given, on_device = f'rollout.staleness={self.staleness} ', not run.on_hosts
        if on_device or run.env.mix:
            yield (
                f'{given}is for one world on hosts, which is waited for, and env.name='
                f'{run.env.name!r} is none: set it to 0'
            )
        if run.curriculum.rounds:
            yield (
                f'{given}begins episodes before their step, and curriculum.rounds='
                f'{run.curriculum.rounds} changes the turns that they may take: set it to ()'
            )
        if run.algorithm.filter.refill:
            yield (
                f'{given}plays one rollout a step, and filter.refill={run.algorithm.filter.refill} '
                'plays more: set it to 0'
            )
        if not run.algorithm.HAS_RATIO:
            yield (
                f'{given}trains on what older weights sampled, and algorithm='
                f'{run.algorithm_name!r} has no ratio that corrects for it: set it to 0'
            )
        if run.parity.loss_on != 'sampled':
            yield (
                f'{given}needs the log-probabilities of the weights that sampled, and '
                f"parity.loss_on={run.parity.loss_on!r} takes others: set it to 'sampled'"
            )
        if jax.process_count() > 1:
            yield f'{given}is for one process, and this run has {jax.process_count()}: set it to 0'

    def _unconstrained(self, run: Any) -> Iterator[str]:
        """What trains or plays answers of which no grammar is known."""
        given = f'rollout.constrain={self.constrain!r} '
        for world in run.worlds:
            if world.name not in HOSTS:
                continue
            known = run.forms_of(world)
            if not known:
                yield (
                    f'{given}needs to know what answers look like, and {world.name} does not say: '
                    "set hosts.forms, such as ('Action: {}',), or rollout.constrain to ''"
                )
            if self.constrain == 'own' and any('{}' in form for form in known):
                yield (
                    f'{given}spells known answers, and those to {world.name} have free text: set '
                    'it to any'
                )
        if run.base_rows:
            yield (
                f'{given}does not go with evol.base_rows, demonstrations that train: set one of '
                'them to nothing'
            )
        if run.parity.loss_on != 'sampled':
            yield f"{given}needs parity.loss_on='sampled': other tokens had no choice"


@dataclasses.dataclass(frozen=True)
class Context:
    """What the policy sees of a conversation."""

    window: Annotated[int, ZERO] = 0  # turns that it sees, this one included; 0 = all of them
    summary: Annotated[int, ZERO] = 0  # with window=1: earlier turns that each prompt lists in
    # words

    def problems(self) -> Iterator[str]:
        if self.summary and self.window != 1:
            yield (
                f'context.summary={self.summary} lists turns that the policy does not see: set '
                'context.window=1'
            )


@dataclasses.dataclass(frozen=True)
class Eval:
    """Validation."""

    every: Annotated[int, ZERO] = 10  # steps; 0 = only at the start and the end
    split: Literal['validation', 'test'] = 'validation'
    temperature: Annotated[float, In(low=0.01, high=100, also=(0,))] = 0.5  # RAGEN; 0 = greedy
    top_k: Annotated[int, ZERO] = 0  # 0 = all
    top_p: Annotated[float, PART] = 1.0
    samples: Annotated[int, ONE] = 1  # episodes a level: eval/success is their mean (mean@k),
    # eval/pass_at_k the share of levels that one of them solves
    also: tuple[str, ...] = ()  # further splits to play at every validation, such as ('test',)
    worlds: tuple[str, ...] = ()  # and other worlds, such as ('sokoban',), with their sections

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        del shards
        if not set(self.also) <= {'train', 'validation', 'test'} - {self.split}:
            yield (
                f'eval.also={self.also} must name splits of train, validation, test other than '
                f'eval.split={self.split!r}'
            )
        if not set(self.worlds) <= set(ENVIRONMENTS) - set(run.env.worlds):
            yield (
                f'eval.worlds={self.worlds} must name worlds of {", ".join(ENVIRONMENTS)} other '
                f'than env.name={run.env.name!r}'
            )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is kept of a run."""

    every: Annotated[int, ONE] = 50  # steps
    keep: Annotated[int, ONE] = 2  # newest ones kept
    best: bool = False  # keep the policy of the best eval/success too, in workdir/best

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        del shards
        if self.best and run.eval.split == 'test':
            yield (
                'checkpoint.best chooses by eval.split, and a policy chosen on the test split has '
                'no test figure left: set eval.split=validation'
            )


@dataclasses.dataclass(frozen=True)
class Log:
    """Where figures go beside metrics.jsonl."""

    tensorboard: bool = False
    wandb_project: str = ''  # '' = off
    profile_steps: Annotated[int, ZERO] = 0  # steps to trace once compiled, after every start; 0 =
    # none
    rollouts_every: Annotated[int, ZERO] = 50  # steps between saved rollout pages; 0 = only the
    # last

    def problems(self) -> Iterator[str]:
        """Loggers whose package is not installed."""
        asked = {'log.wandb_project': bool(self.wandb_project), 'log.tensorboard': self.tensorboard}
        for name, package in {
            'log.wandb_project': 'wandb',
            'log.tensorboard': 'tensorboardX',
        }.items():
            if asked[name] and importlib.util.find_spec(package) is None:
                yield f'{name} needs {package}, which is not installed: pip install {package}'
