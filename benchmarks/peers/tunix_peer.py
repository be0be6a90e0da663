"""Tunix's side of benchmarks.peers.tunix: its model, sampler, loss and agentic learner (0.1.7).

The policy has our weights. Text is a list of numbers, one per token, so that both sides read the
same tokens and tokenising costs Tunix almost nothing. No token ends an answer.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen2 import model as tunix_qwen2
from tunix.rl import algo_core, rl_cluster
from tunix.rl.agentic import agentic_grpo_learner
from tunix.rl.agentic.agents import agent_types, base_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.agentic.parser.chat_template_parser import parser as chat_parser
from tunix.rl.common import TrainExample
from tunix.rl.rollout import base_rollout

from agentrl_jax.models import Model
from agentrl_jax.types import Batch

NEVER = 10**9  # steps
MODES = {
    'greedy': dict(temperature=0.0),
    'plain': dict(temperature=1.0, top_p=1.0, top_k=None),
    'nucleus': dict(temperature=1.0, top_p=0.95, top_k=None),
}


class Numbers:
    """A tokenizer: '12 7 99' is the tokens 12, 7, 99. Token 0 is padding; there is no end token."""

    def __init__(self, vocab: int):
        self.end = vocab + 7

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Iterable[int], **_) -> str:
        return ' '.join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        return 0  # so that Tunix adds no token

    def eos_id(self) -> int:
        return self.end

    def pad_id(self) -> int:
        return 0


def our_path(path: tuple) -> tuple[str, ...]:
    """Our path of a parameter of Tunix's Qwen2."""
    match path:
        case ('embedder', 'input_embedding'):
            return 'model', 'embed_tokens', 'embedding'
        case ('final_norm', 'w'):
            return 'model', 'norm', 'scale'
        case ('layers', i, 'attn', name, 'w'):
            return 'model', f'layers_{i}', 'self_attn', name, 'kernel'
        case ('layers', i, 'attn', name):
            return 'model', f'layers_{i}', 'self_attn', name.replace('_bias', '_proj'), 'bias'
        case ('layers', i, 'mlp', name, 'kernel'):
            return 'model', f'layers_{i}', 'mlp', name, 'kernel'
        case ('layers', i, name, 'w'):
            return 'model', f'layers_{i}', name, 'scale'
    raise ValueError(f'the Qwen2 of this Tunix has a parameter {path}, which 0.1.7 does not have')


def build_model(params: Any, config: Model) -> Any:
    """Tunix's Qwen2 with copies of our parameters (with tied embeddings)."""
    sizes = tunix_qwen2.ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        rope_theta=int(config.rope_theta),
        norm_eps=config.rms_norm_eps,
        use_tied_embedding=True,
    )
    model = tunix_qwen2.Qwen2(sizes, rngs=nnx.Rngs(0))

    def ours(path, variable):
        value = functools.reduce(lambda tree, name: tree[name], our_path(path), params)
        return variable.replace(jnp.array(value.reshape(variable.get_value().shape)))

    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    nnx.update(model, nnx.from_flat_state([(path, ours(path, x)) for path, x in flat]))
    return model


def build_sampler(model: Any, config: Model, length: int) -> Sampler:
    sizes = CacheConfig(
        cache_size=length,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    return Sampler(model, Numbers(config.vocab_size), sizes)


def sample(
    sampler: Sampler, texts: list[str], *, new: int, width: int, **mode: Any
) -> list[np.ndarray]:
    """Sample `new` tokens after each text; texts are padded to `width` tokens."""
    out = sampler(
        input_strings=texts,
        max_generation_steps=new,
        max_prompt_length=width,
        echo=False,
        eos_tokens=[sampler.tokenizer.eos_id()],
        **mode,
    )
    return [np.asarray(row) for row in out.tokens]


def build_generate(model: Any, config: Model, prompt: np.ndarray, new: int) -> Callable:
    """generate(mode) -> tokens [B, new] after prompt int32 [B, P], in one call of its Sampler."""
    width = prompt.shape[1]
    sampler = build_sampler(model, config, width + new)
    texts = [' '.join(map(str, row)) for row in prompt]
    return lambda mode: np.stack(sample(sampler, texts, new=new, width=width, **MODES[mode]))


def grpo_config(clip: float, **changes: Any) -> Any:
    config = agentic_grpo_learner.GRPOConfig(
        num_iterations=1, beta=0.0, epsilon=clip, system_prompt='', **changes
    )
    config.temperature = 1.0
    return config


def build_update(model: Any, batch: Batch, tx: Any, *, prompt: int, clip: float) -> Callable:
    """step() -> gradient norm of its jitted GRPO loss with our optimiser, on our batch."""
    settings = grpo_config(clip, num_generations=2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    example = TrainExample(
        prompt_ids=batch.tokens[:, :prompt],
        prompt_mask=jnp.ones((len(batch.tokens), prompt), bool),
        completion_ids=batch.tokens[:, prompt:],
        completion_mask=batch.mask[:, prompt:].astype(jnp.int32),
        advantages=batch.advantages[:, -1],
        ref_per_token_logps=None,
        old_per_token_logps=batch.old_logprobs[:, prompt:],
    )

    def loss(model, example):
        never = model.config.vocab_size + 7
        return algo_core.grpo_loss_fn(model, example, settings, pad_id=0, eos_id=never)

    @functools.partial(nnx.jit, donate_argnames=('optimizer',))
    def step(model, optimizer, example):
        _, grads = nnx.value_and_grad(loss, has_aux=True)(model, example)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))
        optimizer.update(model, grads)
        return norm

    step = nnx.cached_partial(step, model, optimizer)
    return lambda: step(example)


@dataclasses.dataclass(frozen=True)
class Script:
    """Fixed observations, independent of the answers, of each turn of each episode."""

    turns: list[list[str]]  # [E][K], group-major
    group_size: int
    new: int  # tokens of an answer
    longest: int  # tokens of the longest conversation before its last answer
    response: int  # tokens of the longest conversation after its first prompt


class Replay(base_environment.BaseTaskEnv):
    """Replays its lines of the script; the reward is 1 for answers that start with an odd token."""

    def __init__(self, task: Any, script: Script, group_id: int, pair_index: int):
        groups = len(script.turns) // script.group_size
        row = group_id % groups * script.group_size + pair_index
        self.lines, self.turn = script.turns[row], 0
        super().__init__(
            task=task, max_steps=len(self.lines), group_id=group_id, pair_index=pair_index
        )

    def _initial_observation(self) -> dict[str, str]:
        return {'prompts': self.lines[0]}

    def _step_impl(self, action: Any) -> Any:
        self.turn += 1
        done = self.turn == len(self.lines)
        answer = action if isinstance(action, str) else action.action
        return base_environment.EnvStepResult(
            observation='' if done else self.lines[self.turn],
            reward=float(int(answer.split(maxsplit=1)[0]) % 2),
            done=done,
            info={},
        )


class Echo(base_agent.ConversationAgentBase):
    """An agent that returns the model's response as its action."""

    def update_from_model(self, response: str, **_) -> Any:
        self._messages.append({'role': 'assistant', 'content': response})
        action = agent_types.Action(action=response)
        self._trajectory.steps.append(agent_types.Step(action=action, model_response=response))
        self.step += 1
        return action


class Plain(chat_parser.BaseChatTemplateParser):
    """Joins the messages of a conversation; the script contains the chat markers."""

    def _init_tokens(self) -> Any:
        return chat_parser.TokenConfig(message_separator=' ')

    def _init_generation_prompt(self) -> str:
        return ''

    def parse(self, messages, add_generation_prompt=False, is_first_msg=False) -> str:
        text = ' '.join(x['content'] for x in messages if x['content'])
        return text if is_first_msg else f' {text}'


class Learner(agentic_grpo_learner.GRPOLearner):
    """Its agentic GRPO learner with a limit on tokens per turn, which it lacks."""

    def _model_call(self, chat_lists, env=None, max_generation_steps=None):
        return super()._model_call(chat_lists, env, max_generation_steps=self.turn_tokens)


def build_learner(model: Any, script: Script, tx: Any, *, clip: float, concurrency: int) -> Learner:
    """A learner on one device, with the prompt length and the smallest cache for the script."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
    groups = len(script.turns) // script.group_size
    roles = rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
        rollout_engine='vanilla',
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=tx,
            eval_every_n_steps=NEVER,
            max_steps=NEVER,
            mini_batch_size=groups,
            train_micro_batch_size=groups,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=script.response,
            max_prompt_length=script.longest,
            kv_cache_size=script.longest + script.new,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            eos_tokens=None,
            return_logprobs=True,
        ),
    )
    tokenizer = Numbers(model.config.vocab_size)
    cluster = rl_cluster.RLCluster(
        actor=model, reference=None, tokenizer=tokenizer, cluster_config=config
    )
    learner = Learner(
        rl_cluster=cluster,
        reward_fns=None,
        chat_parser=Plain(tokenizer),
        algo_config=grpo_config(
            clip,
            num_generations=script.group_size,
            max_response_length=script.response,
            max_concurrency=concurrency,
        ),
        agent_class=Echo,
        env_class=Replay,
        env_kwargs={'script': script},
    )
    learner.turn_tokens = script.new
    return learner


def prompts(script: Script) -> dict[str, np.ndarray]:
    """A batch of its data set; the environments ignore the prompts."""
    groups = len(script.turns) // script.group_size
    return {'prompts': np.array([str(i + 1) for i in range(groups)])}


def collect(learner: Learner, script: Script) -> list[dict]:
    """Trajectories of all episodes without an update, as in its validation."""

    async def play():
        groups = learner._orchestrator_producer(
            learner._build_orchestrator(),
            [{'prompts': x} for x in prompts(script)['prompts']],
            num_generations=script.group_size,
        )
        return [item.traj async for group in groups for item in group]

    return asyncio.run_coroutine_threadsafe(play(), learner.loop).result()


def collect_batched(sampler: Sampler, script: Script) -> list[str]:
    """The same turns with its Sampler, all episodes in one call; its learners do not do this."""
    rows = [''] * len(script.turns)
    for turn in range(len(script.turns[0])):
        rows = [f'{row} {lines[turn]}' for row, lines in zip(rows, script.turns, strict=True)]
        answers = sample(
            sampler,
            rows,
            new=script.new,
            width=script.longest,
            return_logprobs=True,
            seed=turn,
            **MODES['plain'],
        )
        rows = [f'{row} {" ".join(map(str, x))}' for row, x in zip(rows, answers, strict=True)]
    return rows


def parameters(learner: Learner) -> Any:
    """The parameters after its update, to wait for."""
    return nnx.state(learner.rl_cluster.actor_trainer.model, nnx.Param)
