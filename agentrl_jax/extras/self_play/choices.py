"""Exact action probabilities of a policy.

With context.window=1, one action per turn and a single spelling of each answer in the grammar
(rollout.constrain=own, no thoughts), an action is one sequence of tokens. Its probability is that
of the sequence, so no game has to be sampled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import task as text
from agentrl_jax.text.answer import FORMS
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params


def unknown(run: Any) -> str:
    """Return the settings that action probabilities require; '' if the config has them."""
    env = run.env
    if run.on_hosts or env.mix or run.context.window != 1 or run.context.summary:
        return 'one environment on the device and context.window=1 without a summary'
    if run.rollout.constrain != 'own' or env.think or run.agent.name != 'act':
        return "rollout.constrain='own', env.think=False and agent.name='act'"
    if not run.eval.temperature or run.eval.top_k or run.eval.top_p < 1:
        return 'eval.temperature above 0, eval.top_k=0 and eval.top_p=1'
    if env.max_actions_per_turn != 1:
        return 'env.max_actions_per_turn=1'
    plies = getattr(run.worlds[0], 'PLIES', 0)
    if min(env.max_turns, env.max_actions_per_episode) < plies:
        both = 'env.max_turns and env.max_actions_per_episode'
        return f'{both} of at least {plies}, the plies of both players'
    return ''


def spelled(task: text.TextTask, tokenizer: Tokenizer) -> np.ndarray:
    """Return the answer tokens of each action with the end of the turn, then -1; int32 [A, L]."""
    form = FORMS[task.opening]
    texts = [form.text.format(think='', actions=name) for name in task.env.ACTION_NAMES]
    rows = [[*tokenizer.encode(one), int(task.eos_ids[0])] for one in texts]
    answers = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for row, ids in zip(answers, rows, strict=True):
        row[: len(ids)] = ids
    return answers


def prompts(task: text.TextTask, worlds: text.Episode) -> tuple[jax.Array, jax.Array]:
    """Return the prompts of a policy with window 1 in N environments, including the prefix.

    (tokens int32 [N, P + width], count int32 [N]).
    """

    def one(world):
        tokens, count = text.turn_tokens(task, world, jnp.bool_(True))
        opening = text.opening_length(task, world, jnp.bool_(True))
        opening = jnp.where(world.turn > 0, opening, 0)
        content = jnp.roll(tokens, -opening)
        return jnp.concatenate([task.prefix, content]), task.prefix.shape[0] + count - opening

    return jax.vmap(one)(worlds)


def action_probabilities(
    params: Params,
    task: text.TextTask,
    worlds: text.Episode,
    answers: jax.Array,
    *,
    fns: ModelFns,
    settings: losses.HeadSettings,
) -> jax.Array:
    """Return the probability of each action in N environments, 0 if illegal; answers: spelled."""
    tokens, count = prompts(task, worlds)
    (rows, width), (actions, length) = tokens.shape, answers.shape
    column = jnp.arange(width + length)[None, None]
    place = column - count[:, None, None]  # position in the answer
    answer_ids = jnp.broadcast_to(answers[None], (rows, actions, length))
    at = jnp.broadcast_to(jnp.clip(place, 0, length - 1), (rows, actions, width + length))
    answer_ids = jnp.take_along_axis(answer_ids, at, axis=2)
    prompt_ids = jnp.pad(tokens, ((0, 0), (0, length)))[:, None]
    mask = (place >= 0) & (place < length) & (answer_ids >= 0)
    ids = jnp.where(place < 0, prompt_ids, jnp.where(mask, answer_ids, task.pad_id))
    attention = mask | (place < 0)
    offered = jax.vmap(text.offered, in_axes=(None, 0))(task, worlds.state)
    legal = jnp.repeat(grammars.pack(offered), actions, axis=0)
    allowed = _allowed(task.grammar, legal, jnp.tile(answers, (rows, 1)))  # [N A, L, W]
    allowed = jnp.take_along_axis(allowed, at.reshape(-1, width + length)[..., None], axis=1)
    ids, attention, mask = (x.reshape(-1, width + length) for x in (ids, attention, mask))
    hidden = fns.hidden(params, ids, positions_of(attention), attention)
    logprobs, _ = losses.token_logprobs(hidden, fns.head(params), ids, settings, allowed=allowed)
    total = jnp.where(mask, logprobs, 0.0).sum(1).reshape(rows, actions)
    return jnp.where(offered, jnp.exp(total), 0.0)


def _allowed(grammar: grammars.Grammar, offered: jax.Array, answers: jax.Array) -> jax.Array:
    """Return the tokens allowed at each position of answers int32 [R, L]; uint32 [R, L, W]."""
    place = grammars.begin(grammar, jnp.zeros(len(answers), jnp.int32), offered)

    def step(place, token):
        legal = grammars.pack(grammars.allowed(grammar, place))
        live = token >= 0
        place = grammars.advance(grammar, place, jnp.maximum(token, 0), live, answers.shape[1])
        return place, legal

    return jax.lax.scan(step, place, answers.T)[1].swapaxes(0, 1)
