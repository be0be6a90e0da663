"""The lines of a task's prompts, and checks that their tokens are the same in every place."""

from typing import Any

import jax
import numpy as np

from agentrl_jax.envs.simulation import episodes
from agentrl_jax.text import lines as line_tables
from agentrl_jax.text.prompts import SEPARATOR, PromptStyle, react_text

CHECKED_LEVELS, CHECKED_TURNS = 8, 8  # of random play that checks how pieces are tokenised


def system_text(env: Any, style: PromptStyle, max_actions: int, opening: str = '<think>') -> str:
    """System message of every episode."""
    react = opening == 'Thought:'
    return style.system.format(
        name=env.name,
        instruction=react_text(env.instruction) if react else env.instruction,
        actions=', '.join(env.ACTION_NAMES),
        max_actions=max_actions,
        separator=SEPARATOR,
    )


def prefix_tokens(tokenizer, chat, env, style, families, max_actions, opening) -> list[int]:
    """Tokens in front of every first observation, spelled as they are in front of it."""
    ids = chat.episode_prefix(system_text(env, style, max_actions, opening), style.lead)
    text = line_tables.open_end(tokenizer, ids)
    shown = [*(families['past_summary'] if 'past_summary' in families else ()), *families['header']]
    if not all(shown):
        shown += families['observation']
    shown += families['hint'] if 'hint' in families else []
    cut = len(ids) - len(tokenizer.encode(text))
    return [*ids[:cut], *line_tables.in_front_of_all(tokenizer, text, shown)]


def check_hints(tokenizer, families) -> None:
    """Raises if a line of a hint is spelled otherwise in front of one line than of another.

    What a level's hint is must not depend on the prompt that follows it.
    """
    lines = [*families['hint'], *families['hint_action']]
    shown = [line for name in ('header', 'observation') for line in families[name]]
    if moved := line_tables.looking_ahead(tokenizer, lines, [line for line in shown if line]):
        raise ValueError(
            f'the tokens of {next(iter(moved.values()))!r}, a line of a hint, depend on the line '
            'after it: set env.hint and opd.privileged to none, or take another tokenizer'
        )


def check_observations(env, env_params, tokenizer, lines, budget) -> None:
    """Raises if the text of a state of a little random play is not the tokens of its pieces."""
    level = np.arange(CHECKED_LEVELS) % env.num_levels(env_params)
    states, _ = episodes(env, env_params, level, min(budget, CHECKED_TURNS), plans=0)
    states = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
    ids = np.asarray(jax.jit(jax.vmap(env.line_ids, (0, None)))(states, env_params))
    for row in ids:
        shown = [lines[i] for i in row if i >= 0]
        if tokenizer.encode(''.join(shown)) != [
            token for piece in tokenizer.encode_batch(shown) for token in piece
        ]:
            raise ValueError(
                f'{env.name}: the tokens of its pieces are not those of the text '
                f'{"".join(shown)!r}; separate the pieces otherwise'
            )


def prompt_width(env, env_params, length, at, sizes, past_turns, per_turn, hinted) -> int:
    """Tokens of the longest possible turn prompt: the longest line at each of its places."""

    def longest(first, count):
        return int(length[first : first + count].max()) if count else 0

    most = {name: longest(at[name], count) for name, count in sizes.items()}
    slots = env.line_slots(env_params)
    observation = sum(longest(at['observation'] + r.start, len(r)) for r in slots)
    past = 0
    if past_turns:
        a_turn = most['past_turn'] + per_turn * most['past_action'] + most['past_reward']
        past = most['past_summary'] + past_turns * (observation + a_turn)
    fixed = [most[name] for name in ('reward', 'header', 'again', 'warning')]
    markers = longest(at['end_turn'], 1) + longest(at['close'], len(length) - at['close'])
    hint = most['hint'] + hinted * most['hint_action'] if hinted else 0
    return observation + sum(fixed) + max(most['tail'], most['asks']) + markers + past + hint
