"""The sections of a run's config that no algorithm and no world owns.

A field has its default, bound or choice and meaning here and nowhere else (agentrl_jax/settings).
Rules between fields are in rules.py.
"""

import dataclasses
from typing import Annotated, Literal

from agentrl_jax.rollout.world_calls import RetryPolicy
from agentrl_jax.settings.marks import (
    MANY,
    ONE,
    PART,
    POSITIVE,
    WORD,
    ZERO,
    In,
    Inline,
    OneOf,
    Words,
)
from agentrl_jax.text import agents

SPLITS = ('train', 'validation', 'test')
DTYPES = Literal['float32', 'bfloat16']
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


@dataclasses.dataclass(frozen=True)
class Agent:
    """Turns beside those that act, and trials of a level."""

    name: Annotated[str, OneOf(agents.NAMES)] = 'act'  # plan (a plan is written before a trial's
    # first action), reflect (after a failed trial what went wrong is written); act and react: none
    trials: Annotated[int, ONE] = 1  # times that a level is tried, which share env.max_turns evenly
    plan_every: Annotated[int, ZERO] = 0  # a plan is written anew after n turns that act; 0 = never

    def build(self) -> agents.Agent:
        return agents.build_agent(self.name, trials=self.trials, plan_every=self.plan_every)


@dataclasses.dataclass(frozen=True)
class Reward:
    """Rewards of your own."""

    function: str = ''  # module:name of a function whose rewards take the place of the world's
    # (agentrl_jax/rollout/README.md); '' = those that the world pays


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Rollouts against worlds on hosts (agentrl_jax.envs.HOSTS)."""

    answer_prefix: str = ''  # forced in front of each answer, such as '<think>'
    stop: tuple[str, ...] = ()  # texts that end a turn once the policy has written them;
    # requests of a harness may name them
    forms: tuple[str, ...] = ()  # with rollout.constrain: what answers must look like, {} for any
    # text, such as 'Action: {}'; () = what the world says
    max_observation: Annotated[int, ONE] = 512  # tokens of a text of a world; the middle of longer
    # ones is cut
    read_tokens: Annotated[int, ONE] = 32  # of a row in a block: longer texts are read in several
    # blocks
    instruction: str = ''  # what the task is, for worlds that do not say it
    prompt: str | None = None  # wording of what worlds with several ask, such as short; unset: the
    # usual one
    deterministic: bool | None = None  # the same item and actions give the same replies; unset:
    # True, of openenv False
    num_items: Annotated[int | None, ZERO] = None  # items 0 .. num_items - 1 of worlds without item
    # files; unset: 1000, of agentgym 0
    token: str = ''  # file whose first line the servers of worlds ask for
    call_s: Annotated[float | None, POSITIVE] = None  # timeout of a call to them; unset: 60, of web
    # 120
    launch: Annotated[int, ZERO] = 0  # processes of a server that the run starts for itself
    room: Annotated[int | None, ONE] = None  # worlds in each of them; unset: 64, of web and miniwob
    # 16
    policy: Annotated[RetryPolicy, Inline()] = RetryPolicy()


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

    @property
    def narrowest(self) -> int:
        """The narrowest side of a matrix of random weights."""
        heads = self.hidden_size // self.num_heads * self.num_kv_heads
        return min(self.hidden_size, self.intermediate_size, heads)


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
    staleness: Annotated[int, ZERO] = 0  # worlds on hosts: episodes of as many later steps begin
    # while a step waits for its own, and go on under its new weights

    @property
    def episodes(self) -> int:
        """Episodes of a rollout."""
        return self.num_groups * self.group_size


@dataclasses.dataclass(frozen=True)
class Context:
    """What the policy sees of a conversation."""

    window: Annotated[int, ZERO] = 0  # turns that it sees, this one included; 0 = all of them
    summary: Annotated[int, ZERO] = 0  # with window=1: earlier turns that each prompt lists in
    # words


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
    also: Annotated[
        tuple[str, ...], OneOf(SPLITS)
    ] = ()  # further splits to play at every validation, such as ('test',)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is kept of a run."""

    every: Annotated[int, ONE] = 50  # steps
    keep: Annotated[int, ONE] = 2  # newest ones kept
    best: bool = False  # keep the policy of the best eval/success too, in workdir/best


@dataclasses.dataclass(frozen=True)
class Log:
    """Where figures go beside metrics.jsonl."""

    tensorboard: bool = False
    wandb_project: str = ''  # '' = off
    profile_steps: Annotated[int, ZERO] = 0  # steps to trace once compiled, after every start; 0 =
    # none
    rollouts_every: Annotated[int, ZERO] = 50  # steps between saved rollout pages; 0 = only the
    # last
