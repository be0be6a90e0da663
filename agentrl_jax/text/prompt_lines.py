"""Lines of a task's prompts, and checks that their tokens do not depend on the position."""

from typing import Any

import jax
import numpy as np

from agentrl_jax.envs.simulation import episodes
from agentrl_jax.text import lines as line_tables
from agentrl_jax.text.prompts import SEPARATOR, PromptStyle, react_text

CHECKED_LEVELS, CHECKED_TURNS = 8, 8  # of random play, to check the tokens of pieces


def system_text(env: Any, style: PromptStyle, max_actions: int, opening: str = '<think>') -> str:
    """Return the system message of every episode."""
    react = opening == 'Thought:'
    return style.system.format(
        name=env.name,
        instruction=react_text(env.instruction) if react else env.instruction,
        actions=', '.join(env.ACTION_NAMES),
        max_actions=max_actions,
        separator=SEPARATOR,
    )


def prefix_tokens(tokenizer, chat, env, style, families, max_actions, opening) -> list[int]:
    """Return the tokens in front of every first observation."""
    ids = chat.episode_prefix(system_text(env, style, max_actions, opening), style.lead)
    text = line_tables.trailing_text(tokenizer, ids)
    next_lines = [
        *(families['past_summary'] if 'past_summary' in families else ()),
        *families['header'],
    ]
    if not all(next_lines):
        next_lines += families['observation']
    next_lines += families['hint'] if 'hint' in families else []
    cut = len(ids) - len(tokenizer.encode(text))
    return [*ids[:cut], *line_tables.in_front_of_all(tokenizer, text, next_lines)]


def check_hints(tokenizer, families) -> None:
    """Raise ValueError if the tokens of a hint depend on the prompt that follows it."""
    lines = [*families['hint'], *families['hint_action']]
    next_lines = [line for name in ('header', 'observation') for line in families[name]]
    if moved := line_tables.context_dependent(
        tokenizer, lines, [line for line in next_lines if line]
    ):
        raise ValueError(
            f'the tokens of the hint line {next(iter(moved.values()))!r} depend on the next '
            'line: set env.hint and opd.privileged to none, or use another tokenizer'
        )


def check_observations(env, env_params, tokenizer, lines, budget) -> None:
    """Raise ValueError if an observation of random play has other tokens than its pieces."""
    level = np.arange(CHECKED_LEVELS) % env.num_levels(env_params)
    states, _ = episodes(env, env_params, level, min(budget, CHECKED_TURNS), plans=0)
    states = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
    ids = np.asarray(jax.jit(jax.vmap(env.line_ids, (0, None)))(states, env_params))
    for row in ids:
        pieces = [lines[i] for i in row if i >= 0]
        if tokenizer.encode(''.join(pieces)) != [
            token for piece in tokenizer.encode_batch(pieces) for token in piece
        ]:
            raise ValueError(
                f'{env.name}: the tokenizer merges pieces of the text '
                f'{"".join(pieces)!r}; use another separator between pieces'
            )


def prompt_width(env, env_params, length, at, sizes, past_turns, per_turn, hinted) -> int:
    """Return the tokens of the longest possible turn prompt: the longest line at each position."""

    def longest(first, count):
        return int(length[first : first + count].max()) if count else 0

    widths = {name: longest(at[name], count) for name, count in sizes.items()}
    slots = env.line_slots(env_params)
    observation = sum(longest(at['observation'] + r.start, len(r)) for r in slots)
    past = 0
    if past_turns:
        a_turn = widths['past_turn'] + per_turn * widths['past_action'] + widths['past_reward']
        past = widths['past_summary'] + past_turns * (observation + a_turn)
    fixed = [widths[name] for name in ('reward', 'header', 'again', 'warning')]
    markers = longest(at['end_turn'], 1) + longest(at['close'], len(length) - at['close'])
    hint = widths['hint'] + hinted * widths['hint_action'] if hinted else 0
    return observation + sum(fixed) + max(widths['tail'], widths['asks']) + markers + past + hint
