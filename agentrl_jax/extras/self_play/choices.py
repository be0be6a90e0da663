"""The policy as a distribution over actions: exact probabilities of what it would do in a state.

With context.window=1, one action a turn and answers that the grammar spells in one way
(rollout.constrain=own, no thoughts) an action is one sequence of tokens, so its probability is that
of the sequence: no game is sampled.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import task as text
from agentrl_jax.text.answer import FORMS
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params


def unknown(run: Any) -> str:
    """Why a policy of this config has no such probabilities, and what to set; '' = it has."""
    env = run.env
    if run.on_hosts or env.mix or run.context.window != 1 or run.context.summary:
        return 'one world on the device and context.window=1 without a summary'
    if run.rollout.constrain != 'own' or env.think or run.agent.name != 'act':
        return "rollout.constrain='own', env.think=False and agent.name='act'"
    if not run.eval.temperature or run.eval.top_k or run.eval.top_p < 1:
        return 'eval.temperature above 0, eval.top_k=0 and eval.top_p=1'
    if env.max_actions_per_turn != 1:
        return 'env.max_actions_per_turn=1'
    plies = getattr(run.worlds[0], 'PLIES', 0)
    if min(env.max_turns, env.max_actions_per_episode) < plies:
        both = 'env.max_turns and env.max_actions_per_episode'
        return f'{both} of {plies} or more, the plies of both players'
    return ''


def spelled(task: text.TextTask, tokenizer: Tokenizer) -> np.ndarray:
    """int32 [A, L]: the answer of each action with the end of the turn; -1 after it."""
    form = FORMS[task.opening]
    texts = [form.text.format(think='', actions=name) for name in task.env.ACTION_NAMES]
    rows = [[*tokenizer.encode(one), int(task.eos_ids[0])] for one in texts]
    found = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for row, ids in zip(found, rows, strict=True):
        row[: len(ids)] = ids
    return found


def prompts(task: text.TextTask, worlds: text.Episode) -> tuple[jax.Array, jax.Array]:
    """What a policy with window 1 reads of the current turn of N worlds, the prefix included.

    (tokens int32 [N, P + width], count int32 [N]).
    """

    def one(world):
        tokens, count = text.turn_tokens(task, world, jnp.bool_(True))
        opening = text.opening_length(task, world, jnp.bool_(True))
        opening = jnp.where(world.turn > 0, opening, 0)
        own = jnp.roll(tokens, -opening)
        return jnp.concatenate([task.prefix, own]), task.prefix.shape[0] + count - opening

    return jax.vmap(one)(worlds)


def action_probabilities(
    params: Params,
    task: text.TextTask,
    worlds: text.Episode,
    answers: jax.Array,
    *,
    hidden_fn: Callable,
    head_fn: Callable,
    bits: grammars.Bits,
    temperature: float,
) -> jax.Array:
    """float32 [N, A]: of each action in N worlds, 0 where it is not on offer; answers: spelled."""
    tokens, count = prompts(task, worlds)
    (rows, width), (actions, length) = tokens.shape, answers.shape
    column = jnp.arange(width + length)[None, None]
    place = column - count[:, None, None]  # in the answer
    said = jnp.broadcast_to(answers[None], (rows, actions, length))
    at = jnp.broadcast_to(jnp.clip(place, 0, length - 1), (rows, actions, width + length))
    said = jnp.take_along_axis(said, at, axis=2)
    shown = jnp.pad(tokens, ((0, 0), (0, length)))[:, None]
    mask = (place >= 0) & (place < length) & (said >= 0)
    whole = jnp.where(place < 0, shown, jnp.where(mask, said, task.pad_id))
    attention = mask | (place < 0)
    offered = jax.vmap(text.offered, in_axes=(None, 0))(task, worlds.state)
    legal = jnp.repeat(grammars.pack(offered), actions, axis=0)
    allowed = _allowed(task.grammar, legal, jnp.tile(answers, (rows, 1)))  # [N A, L, W]
    allowed = jnp.take_along_axis(allowed, at.reshape(-1, width + length)[..., None], axis=1)
    whole, attention, mask = (x.reshape(-1, width + length) for x in (whole, attention, mask))
    logprobs, _ = losses.token_logprobs(
        hidden_fn(params, whole, positions_of(attention), attention),
        head_fn(params),
        whole,
        temperature=temperature,
        bits=bits,
        allowed=allowed,
    )
    total = jnp.where(mask, logprobs, 0.0).sum(1).reshape(rows, actions)
    return jnp.where(offered, jnp.exp(total), 0.0)


def _allowed(grammar: grammars.Grammar, offered: jax.Array, answers: jax.Array) -> jax.Array:
    """uint32 [R, L, W]: what may be sampled at each token of answers int32 [R, L]."""
    place = grammars.begin(grammar, jnp.zeros(len(answers), jnp.int32), offered)

    def step(place, token):
        legal = grammars.pack(grammars.allowed(grammar, place))
        live = token >= 0
        place = grammars.advance(grammar, place, jnp.maximum(token, 0), live, answers.shape[1])
        return place, legal

    return jax.lax.scan(step, place, answers.T)[1].swapaxes(0, 1)
