"""The config sections that belong to neither an algorithm nor an environment.

Each field's default, bounds and meaning are defined only here (agentrl_jax/settings). Rules
between fields are in rules.py.
"""

import dataclasses
from typing import Annotated, Literal

from agentrl_jax.rollout.world_calls import RetryPolicy
from agentrl_jax.settings.marks import (
    MANY,
    ONE,
    POSITIVE,
    POSITIVE_FRACTION,
    WORD,
    ZERO,
    In,
    Inline,
    MustBe,
    NameIn,
    Neutral,
    OnlyIf,
)
from agentrl_jax.text import agents

DTYPES = Literal['float32', 'bfloat16']
MIX = MustBe(
    "pairs of an environment and its share, such as (('frozen_lake', .5), ('sokoban', .5))"
)


@dataclasses.dataclass(frozen=True)
class Env:
    """The environment and its prompts."""

    name: str = 'frozen_lake'  # a name in agentrl_jax.envs or envs.hosts, or module:Class
    mix: Annotated[tuple[tuple[str, float], ...], MIX] = ()  # ((name, share of the groups), ...):
    # several environments; replaces name
    prompt: str = 'ragen'  # prompt wording: a name in agentrl_jax.text.prompts.STYLES
    hint: Literal['none', 'plan'] = 'none'  # start of the first prompt; plan: the expert's actions
    # from the start of the level
    think: bool = True  # answers start with <think>; False: with <answer>
    max_turns: Annotated[int, ONE] = 5
    max_actions_per_turn: Annotated[int, ONE] = 5  # further actions in an answer are dropped
    max_actions_per_episode: Annotated[int, ONE] = 10
    format_penalty: Annotated[float, In(high=0)] = -0.1  # for a turn with a malformed answer
    max_words: Annotated[int, ONE] = 100  # only mentioned in the prompt
    train_levels: Annotated[int, MANY] = 4096  # size of the training pool
    eval_levels: Annotated[int, MANY] = 256  # size of the validation and test pools, and levels
    # played at each validation
    pool_seed: Annotated[int, WORD] = 0  # seed of the pools; different splits never share a map

    def __post_init__(self):
        if self.mix:
            object.__setattr__(self, 'name', '+'.join(self.worlds))

    @property
    def worlds(self) -> tuple[str, ...]:
        """Names of the training environments."""
        return tuple(name for name, _ in self.mix) or (self.name,)

    def apportion(self, total: int) -> tuple[int, ...]:
        """Split a total into integers by the environments' shares.

        Shares are rounded down; the rest goes to the largest remainders.
        """
        exact = [share * total for _, share in self.mix] or [total]
        parts = [int(part + 1e-6) for part in exact]
        order = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])  # ties: the first
        return tuple(part + (i in order[: total - sum(parts)]) for i, part in enumerate(parts))


@dataclasses.dataclass(frozen=True)
class Agent:
    """Turns that plan or reflect, and trials of a level."""

    name: Annotated[str, NameIn(agents.NAMES)] = 'act'  # plan: write a plan before a trial's first
    # action; reflect: write a reflection after a failed trial; act and react: neither
    trials: Annotated[int, ONE] = 1  # attempts at a level, which share env.max_turns evenly

    def build(self) -> agents.Agent:
        return agents.build_agent(self.name, trials=self.trials)


@dataclasses.dataclass(frozen=True)
class Reward:
    """Custom rewards."""

    function: str = ''  # module:name of a function that replaces the environment's rewards
    # (agentrl_jax/rollout/README.md); '' = the environment's rewards
    components: Annotated[
        tuple[str, ...], Neutral(()), OnlyIf(lambda reward: reward.function, 'a reward.function')
    ] = ()  # names in the dict that the function returns; () = it returns plain rewards


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Rollouts against environments on hosts (agentrl_jax.envs.HOSTS)."""

    answer_prefix: str = ''  # forced at the start of each answer, such as '<think>'
    stop: tuple[str, ...] = ()  # strings that end a turn once the policy has written them; requests
    # of a harness may use them
    forms: tuple[str, ...] = ()  # with rollout.constrain: templates of answers, with {} for any
    # text, such as 'Action: {}'; () = the environment's templates
    max_observation: Annotated[int, ONE] = 512  # tokens of an environment's text; longer ones are
    # cut in the middle
    read_tokens: Annotated[int, ONE] = 32  # tokens per row that are read at once; longer texts are
    # read in several blocks
    instruction: str = ''  # task description, for environments without one
    prompt: str | None = None  # prompt wording of environments that offer several, such as short;
    # unset: the default one
    deterministic: bool | None = None  # whether the same item and actions give the same replies;
    # unset: True (openenv: False)
    num_items: Annotated[int | None, ZERO] = None  # items 0 .. num_items - 1, for environments
    # without item files; unset: 1000 (agentgym: 0)
    token: str = ''  # file with the servers' access token in its first line
    call_s: Annotated[float | None, POSITIVE] = None  # timeout of a server call in seconds; unset:
    # 60 (web: 120)
    launch: Annotated[int, ZERO] = 0  # server processes that the run starts itself
    room: Annotated[int | None, ONE] = None  # environments per server process; unset: 64 (web and
    # miniwob: 16)
    policy: Annotated[RetryPolicy, Inline()] = RetryPolicy()


@dataclasses.dataclass(frozen=True)
class Model:
    """The policy's architecture and weights, and how they compute."""

    path: str = ''  # HuggingFace folder (hf download ...), .gguf, or the workdir of a run (or its
    # folder best); '' = random weights with the sizes below
    tokenizer: str = ''  # folder, .gguf or .model; '' = the one at path, or the bundled one
    dtype: DTYPES = 'float32'  # compute dtype; parameters and optimiser stay float32
    remat: bool = False  # recompute activations in the backward pass, layer by layer
    attention: Literal['auto', 'plain'] = 'auto'  # auto: a fused kernel if there is one (cuDNN
    # on GPUs, Pallas on TPUs; bfloat16, heads of 64 or 128 channels); plain: unfused
    scan_layers: bool | None = None  # training loops over the layers, which keeps the program of a
    # deep model small; unset: with remat and at least 8 layers
    hidden_size: Annotated[int, In(low=2)] = 128
    intermediate_size: Annotated[int, ONE] = 256
    num_layers: Annotated[int, ONE] = 4
    num_heads: Annotated[int, ONE] = 4
    num_kv_heads: Annotated[int, ONE] = 2
    tie_embeddings: bool = True  # one matrix for the embedding and the output head
    rope_theta: Annotated[float, In(low=1)] = 1e6  # base of the rotary embeddings

    @property
    def narrowest(self) -> int:
        """The smallest dimension of any randomly initialised matrix."""
        heads = self.hidden_size // self.num_heads * self.num_kv_heads
        return min(self.hidden_size, self.intermediate_size, heads)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sizes of a rollout and how its tokens are sampled."""

    num_groups: Annotated[int, MANY] = 8  # different levels (prompts) per step
    group_size: Annotated[int, MANY] = 16  # episodes per level
    max_tokens: Annotated[int, ONE] = 3072  # tokens per episode, including prompts
    max_response: Annotated[int, ONE] = 400  # sampled tokens per turn
    temperature: Annotated[float, In(low=0.01, high=100)] = 1.0  # below .01, log-probabilities of
    # tokens other than the best leave the range of float32
    sampler_dtype: Literal['', 'float32', 'bfloat16'] = ''  # compute dtype of rollouts; '' =
    # model.dtype
    slots: Annotated[int, ZERO] = 0  # episodes played at once; 0 = all
    serve_rows: Annotated[int, ONE] = 8  # maximum number of waiting slots served together
    stop_at_answer: bool = False  # end a turn at </answer>, not at the end-of-turn token
    constrain: Literal['', 'own', 'any'] = ''  # sample only tokens that can still form a legal
    # answer; the trainer normalises over the same tokens. own: answers in the tokenizer's own
    # spelling; any: in any spelling; '' = no constraint
    staleness: Annotated[int, ZERO] = 0  # environments on hosts: while a step waits for its
    # episodes, episodes of up to this many later steps start, and continue with its new weights

    @property
    def episodes(self) -> int:
        """Number of episodes in a rollout."""
        return self.num_groups * self.group_size


@dataclasses.dataclass(frozen=True)
class Context:
    """The part of a conversation that the policy sees."""

    window: Annotated[int, ZERO] = 0  # turns that the policy sees, including this one; 0 = all
    summary: Annotated[int, ZERO] = 0  # with window=1: number of earlier turns that each prompt
    # lists in words


@dataclasses.dataclass(frozen=True)
class Eval:
    """Validation."""

    every: Annotated[int, ZERO] = 10  # steps between validations; 0 = only at the start and the end
    split: Literal['validation', 'test'] = 'validation'
    temperature: Annotated[float, In(low=0.01, high=100, also=(0,))] = (
        0.5  # as in RAGEN; 0 = greedy
    )
    top_k: Annotated[int, ZERO] = 0  # 0 = all
    top_p: Annotated[float, POSITIVE_FRACTION] = 1.0
    samples: Annotated[int, ONE] = 1  # episodes per level: eval/success is their mean (mean@k),
    # eval/pass_at_k the share of levels that at least one of them solves


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Which checkpoints a run keeps."""

    every: Annotated[int, ONE] = 50  # steps between checkpoints
    keep: Annotated[int, ONE] = 2  # number of newest checkpoints kept
    best: bool = False  # also keep the policy with the best eval/success, in workdir/best


@dataclasses.dataclass(frozen=True)
class Log:
    """Logs in addition to metrics.jsonl."""

    tensorboard: bool = False
    wandb_project: str = ''  # '' = off
    profile_steps: Annotated[int, ZERO] = 0  # steps to trace after compilation, at every start;
    # 0 = none
    rollouts_every: Annotated[int, ZERO] = 50  # steps between saved rollout pages; 0 = only the
    # last
