"""Grid environments as text environments, with prompts and answers that never leave the device.

All text of an episode is known before it starts: the lines of the observation, one line for each
possible reward, turn number and number of actions left, and the chat markers between messages.
They are tokenised once into a LineTable, and a prompt is a list of row numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.base import TextEnvironment
from agentrl_jax.envs.simulation import check_rewards
from agentrl_jax.text import agents, history, prompt_lines
from agentrl_jax.text import answer as answers
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import lines as line_tables
from agentrl_jax.text.prompts import STYLES, PromptStyle, react_text
from agentrl_jax.tokens import chat as chats
from agentrl_jax.tokens.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Offsets:
    """First row of each family of lines in the table."""

    reward: int
    reward_low: int  # reward of the first row, in quanta
    reward_high: int
    header: int
    observation: int
    warning: int
    tail: int
    next_turn: int  # starts a user message after a sampled end
    end_turn: int  # the same after an answer without an end, which it appends
    close: int  # ends the user message and starts the answer; next rows: the same for written parts
    asks: int = -1  # see agents
    again: int = -1
    next_turn_no_reward: int = -1  # next_turn without a reward
    end_turn_no_reward: int = -1
    past_summary: int = -1  # see text.history
    past_turn: int = -1
    past_action: int = -1
    past_reward: int = -1
    hint: int = -1  # first line of a hint
    hint_action: int = -1


@struct.dataclass
class TextTask:
    """An environment, its prompts and its budgets. Arrays are leaves; the rest is static."""

    env_params: Any
    table: line_tables.LineTable
    prefix: jax.Array  # int32 [P]  tokens in front of every first observation
    answer: answers.AnswerTable
    eos_ids: jax.Array  # int32 [n]  tokens that end a turn
    empty_history: jax.Array | None  # int32 [m, P]  initial history; None: prompts have no history
    turn_limit: jax.Array  # int32 []  turns of an episode, up to max_turns (see curriculum)
    env: Any = struct.field(pytree_node=False)
    offsets: Offsets = struct.field(pytree_node=False)
    style: PromptStyle = struct.field(pytree_node=False)
    agent: agents.Agent = struct.field(pytree_node=False)
    pad_id: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)  # tokens of the longest possible turn prompt
    max_turns: int = struct.field(pytree_node=False)
    max_actions_per_turn: int = struct.field(pytree_node=False)
    max_actions_per_episode: int = struct.field(pytree_node=False)
    format_penalty: float = struct.field(pytree_node=False)
    opening: str = struct.field(pytree_node=False)  # forced in front of answers; in answer.FORMS
    grammar: grammars.Grammar | None = None  # restricts sampling; None = any token
    plans: jax.Array | None = None  # int32 [levels, A]  actions of the oracle from the start of a
    # level, for hints: indices of action names, -1 past the end
    shows_hint: bool = struct.field(pytree_node=False, default=False)  # in the first prompt;
    # otherwise hints are not for the policy (hint_tokens)


@struct.dataclass
class Episode:
    """One running episode (no batch axis; vmapped by the rollout)."""

    state: Any  # environment state
    turn: jax.Array  # int32 []    current turn
    used: jax.Array  # int32 []    actions executed so far
    reward: jax.Array  # float32 []  environment reward of the previous turn
    warn: jax.Array  # bool []     the previous answer had no valid action
    past: jax.Array | None  # int32 [m, P]  rows for the last m turns; see text.history
    level: jax.Array  # int32 []   the same in all trials
    agent: agents.Progress


@struct.dataclass
class TurnOutcome:
    """Outcome of a turn (no batch axis)."""

    reward: jax.Array  # float32 []
    penalty: jax.Array  # float32 []  format penalty, <= 0
    valid: jax.Array  # bool []     the answer matched and each of its actions exists
    num_actions: jax.Array  # int32 []
    actions: jax.Array  # int32 [A]   as Rollout.actions
    success: jax.Array  # bool []
    stop: jax.Array  # int32 []    EpisodeStop, NONE while the episode continues


def begin(task: TextTask, level: jax.Array) -> Episode:
    """Start an episode on a level of the pool."""
    return Episode(
        state=task.env.reset_level(level, task.env_params),
        turn=jnp.int32(0),
        used=jnp.int32(0),
        reward=jnp.float32(0.0),
        warn=jnp.bool_(False),
        past=task.empty_history,
        level=jnp.asarray(level, jnp.int32),
        agent=_as_arrays(agents.begin(task.agent)),
    )


def _as_arrays(now: agents.Progress) -> agents.Progress:
    """Convert to fixed dtypes, so that programs are not recompiled."""
    numbers = {name: jnp.asarray(getattr(now, name)) for name in ('part', 'trial', 'turns')}
    numbers = {name: x.astype(jnp.int32) for name, x in numbers.items()}
    return agents.Progress(stepped=jnp.asarray(now.stepped), **numbers)


def play_turn(
    task: TextTask, key: jax.Array, episode: Episode, parts: jax.Array, matched: jax.Array
) -> tuple[Episode, TurnOutcome]:
    """Execute an answer: parts int32 [A] name indices (-1 unknown, -2 absent), matched bool [].

    Unknown names are skipped and the other actions executed. A fault (no match, an unknown name, no
    valid action) costs format_penalty once per turn. An answer without a valid action has no effect
    (RAGEN). Actions after a terminal state or beyond the action budget are not executed. A written
    turn is valid if it matched.
    """
    key = jax.random.fold_in(key, episode.turn)
    acts = episode.agent.part == agents.ACT
    action = jax.vmap(task.env.env_action, in_axes=(None, 0))(episode.state, parts)
    present = matched & acts & (parts != -2)
    known = present & (parts >= 0) & (action >= 0)

    def act(carry, x):
        state, done, used, reward = carry
        index, action, known = x
        live = known & ~done & (used < task.max_actions_per_episode)
        _, after, gain, terminated, _ = task.env.step_env(
            jax.random.fold_in(key, index), state, jnp.maximum(action, 0), task.env_params
        )
        ended = terminated | task.env.is_truncated(after, task.env_params)
        state = jax.tree.map(lambda new, old: jnp.where(live, new, old), after, state)
        carry = (state, done | (live & ended), used + live, reward + jnp.where(live, gain, 0.0))
        return carry, jnp.where(live, action, -1)

    start = (episode.state, jnp.bool_(False), episode.used, jnp.float32(0.0))
    index = jnp.arange(parts.shape[0])
    (state, done, used, reward), executed = jax.lax.scan(act, start, (index, action, known))
    success, warn = task.env.success(state, task.env_params), acts & ~jnp.any(known)
    valid = matched & jnp.where(acts, jnp.any(known) & jnp.all(known == present), True)
    if task.agent.writes:
        named = jnp.where(matched & (parts >= 0), action, -1)
        executed = jnp.where(acts, executed, named)
    stop, progress, fresh = agents.end_turn(
        task.agent,
        episode.agent,
        turn=episode.turn + 1,
        turn_limit=task.turn_limit,
        done=done,
        success=success,
        used=used,
        max_actions=task.max_actions_per_episode,
    )
    outcome = TurnOutcome(
        reward=reward,
        penalty=jnp.where(valid, 0.0, task.format_penalty).astype(jnp.float32),
        valid=valid,
        num_actions=used - episode.used,
        actions=executed,
        success=success,
        stop=stop,
    )
    if task.agent.trials > 1:
        start = task.env.reset_level(episode.level, task.env_params)
        state = jax.tree.map(lambda new, old: jnp.where(fresh, new, old), start, state)
        used = jnp.where(fresh, 0, used)
    past = episode.past
    if past is not None:
        past = history.extended(
            past,
            task.offsets,
            len(task.env.ACTION_NAMES),
            turn=episode.turn,
            observation=observation_lines(task, episode.state),
            parts=parts,
            known=known,
            reward=reward_line(task, reward, task.offsets.past_reward) if task.style.reward else -1,
        )
    after = Episode(
        state=state,
        turn=episode.turn + 1,
        used=used,
        reward=reward,
        warn=warn & ~fresh,
        past=past,
        level=episode.level,
        agent=_as_arrays(progress),
    )
    return after, outcome


def observation_lines(task: TextTask, state: Any) -> jax.Array:
    """Return the rows of the observation, int32 [R]; -1 = nothing."""
    ids = jnp.atleast_1d(task.env.line_ids(state, task.env_params))
    return jnp.where(ids >= 0, ids + task.offsets.observation, -1).astype(jnp.int32)


def anchor(task: TextTask, episode: Episode) -> jax.Array:
    """Return a hash of the observation, uint32 []; it does not depend on the turn's number.

    sum_r mix(line_r) 0x9E3779B1^r over the lines of the observation, XOR a hash of the turn's kind
    and trial (later trials have fewer trials left). Turn number, actions left, last reward and
    warning are also in the prompt, but not part of the environment's state.
    """
    rows = observation_lines(task, episode.state)
    mixed = (rows.astype(jnp.uint32) + 2) * jnp.uint32(0x85EBCA6B)  # -1, no line, becomes 1
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    powers = jnp.cumprod(jnp.full(rows.shape, 0x9E3779B1, jnp.uint32), dtype=jnp.uint32)
    kind = agents.kind(episode.agent).astype(jnp.uint32) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed * powers, dtype=jnp.uint32) ^ kind


def offered(task: TextTask, state: Any) -> jax.Array:
    """Return which actions are legal in a state, bool [N]."""
    names = jnp.arange(len(task.env.ACTION_NAMES))
    return jax.vmap(task.env.env_action, in_axes=(None, 0))(state, names) >= 0


def words(task: TextTask) -> int:
    """Return the number of words of Rollout.allowed; 0 without a grammar."""
    return 0 if task.grammar is None else grammars.words(task.grammar.after.shape[1])


def reward_line(task: TextTask, reward: jax.Array, family: int) -> jax.Array:
    """Return the row of a reward in a family with a line per multiple of REWARD_QUANTUM."""
    at = task.offsets
    step = jnp.round(reward / task.env.REWARD_QUANTUM).astype(jnp.int32)
    return family + jnp.clip(step, at.reward_low, at.reward_high) - at.reward_low


def opening_lines(
    task: TextTask, reward: jax.Array, sampled_end: jax.Array, stepped: jax.Array
) -> list[jax.Array]:
    """Return the first rows of a prompt: end of the previous turn, user marker, reward.

    stepped bool []: the previous turn acted; written turns have no reward.
    """
    at = task.offsets
    opening = jnp.where(sampled_end, at.next_turn, at.end_turn)
    row = reward_line(task, reward, at.reward)
    if task.agent.writes:
        written = jnp.where(sampled_end, at.next_turn_no_reward, at.end_turn_no_reward)
        opening, row = jnp.where(stepped, opening, written), jnp.where(stepped, row, -1)
    return [opening, row]


def opening_length(task: TextTask, episode: Episode, sampled_end: jax.Array) -> jax.Array:
    """Return the tokens of opening_lines at episode.turn, int32 []; hypothetical at turn 0."""
    opening = opening_lines(task, episode.reward, sampled_end, episode.agent.stepped)
    opening = jnp.stack(opening).astype(jnp.int32)
    rows = turn_lines(task, episode, sampled_end).at[: len(opening)].set(opening)
    return jnp.sum(line_tables.lengths(task.table, rows)[: len(opening)])


def turn_lines(task: TextTask, episode: Episode, sampled_end: jax.Array) -> jax.Array:
    """Return the rows of the prompt of episode.turn, int32 [R]; -1 = nothing."""
    at, now, first = task.offsets, episode.agent, episode.turn == 0
    opening = opening_lines(task, episode.reward, sampled_end, now.stepped)
    past = history.past_rows(episode.past, at, episode.turn) if episode.past is not None else -1
    rows = [*(jnp.where(first, -1, row) for row in opening), past]
    if task.shows_hint:
        rows.append(jnp.where(first, hint_lines(task, task.plans[episode.level]), -1))
    rows.append(at.header + episode.turn)
    if task.agent.trials > 1:
        rows.append(jnp.where(now.begins_again, at.again + now.trial - 1, -1))
    rows += [observation_lines(task, episode.state), jnp.where(episode.warn, at.warning, -1)]
    tail, close = at.tail + task.max_actions_per_episode - episode.used, at.close
    if task.agent.writes:
        tail = jnp.where(now.part == agents.ACT, tail, at.asks + now.part - 1)
        close = at.close + now.part
    rows += [tail, close]
    return jnp.concatenate([jnp.atleast_1d(jnp.asarray(row, jnp.int32)) for row in rows])


def hint_lines(task: TextTask, plan: jax.Array) -> jax.Array:
    """Return the rows of the hint for a plan int32 [A], int32 [1 + A]; all -1 without a plan."""
    at = task.offsets
    opening = jnp.where(plan[:1] >= 0, at.hint, -1)
    return jnp.concatenate([opening, jnp.where(plan >= 0, at.hint_action + plan, -1)])


def hint_tokens(task: TextTask) -> jax.Array:
    """Return the hint of each level after the prefix, int32 [levels, H]; -1 past the end."""
    rows = jax.vmap(lambda plan: hint_lines(task, plan))(task.plans)
    each = line_tables.longest(task.table)
    actions = each[task.offsets.hint_action :][: len(task.env.ACTION_NAMES)].max()
    width = int(each[task.offsets.hint] + task.plans.shape[1] * actions)
    tokens, count = jax.vmap(lambda own: line_tables.gather_lines(task.table, own, width=width))(
        rows
    )
    return tokens[:, : max(int(count.max()), 1)]


def turn_length(task: TextTask, episode: Episode, sampled_end: jax.Array) -> jax.Array:
    """Return the number of tokens of the prompt of episode.turn, int32 []."""
    return jnp.sum(line_tables.lengths(task.table, turn_lines(task, episode, sampled_end)))


def turn_tokens(
    task: TextTask, episode: Episode, sampled_end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the prompt of episode.turn: (tokens int32 [width], count int32 [])."""
    rows = turn_lines(task, episode, sampled_end)
    return line_tables.gather_lines(task.table, rows, width=task.width)


def _reward_numbers(env: Any, actions: int) -> tuple[range, list[str]]:
    """Return the possible rewards of a turn with up to `actions` actions, in quanta and as text."""
    low, high = env.REWARD_BOUNDS
    quanta = range(
        int(np.floor(actions * min(low, 0) / env.REWARD_QUANTUM + 0.5)),
        int(np.floor(actions * max(high, 0) / env.REWARD_QUANTUM + 0.5)) + 1,
    )
    digits = 1 if env.REWARD_QUANTUM >= 0.1 else 2
    return quanta, [f'{q * env.REWARD_QUANTUM:.{digits}f}' for q in quanta]


def build_task(
    env: Any,
    env_params: Any,
    tokenizer: Tokenizer,
    *,
    style: str = 'ragen',
    generation_prefix: str = '<think>',
    max_turns: int = 5,
    max_actions_per_turn: int = 5,
    max_actions_per_episode: int = 10,
    format_penalty: float = -0.1,
    max_words: int = 100,
    past_turns: int = 0,
    agent: agents.Agent = agents.ONLY_ACTS,
    constrain: str = '',
    max_response: int = 0,
    plans: np.ndarray | None = None,
    shows_hint: bool = True,
) -> TextTask:
    """Tokenise every possible line of the environment once (on the host; takes up to seconds).

    Short random and oracle play checks that the lines cover the environment's rewards.
    generation_prefix is forced in front of each answer: '<think>', '<answer>' (no thinking) or
    'Thought:' (ReAct). past_turns: number of previous turns that each prompt describes in words.
    agent: see agents.Agent. constrain: a spelling of text.grammar, for answers of up to
    max_response tokens; '' = any token may be sampled. plans: of each level (simulation.solutions),
    for hints, included in the first prompt if shows_hint; None = no hints.
    """
    if style not in STYLES:
        raise ValueError(f'env.prompt={style!r} is not one of {sorted(STYLES)}')
    if generation_prefix not in answers.FORMS:
        known = ', '.join(map(repr, answers.FORMS))
        raise ValueError(f'generation_prefix={generation_prefix!r} is not one of {known}')
    check_rewards(env, env_params, max_actions_per_episode)
    words, observations = STYLES[style], env.lines(env_params)
    if generation_prefix == 'Thought:':
        words = dataclasses.replace(words, tail=react_text(words.tail))
        observations = list(map(react_text, observations))
    quanta, numbers = _reward_numbers(env, max_actions_per_turn)
    rewards = [words.reward.format(reward=number) for number in numbers]
    left = range(max_actions_per_episode + 1)
    families = {  # lines in the order of the table
        'reward': [text.removeprefix('Reward:\n') for text in rewards],
        'header': [words.header.format(turn=k + 1) for k in range(max_turns)],
        'observation': observations,
        'warning': [words.warning],
        'tail': [words.tail.format(left=n, max_words=max_words) for n in left],
        'asks': [getattr(words, part.asks) for part in agents.WRITTEN.values()] * agent.writes,
        'again': [words.again.format(trial=n + 1) for n in range(1, agent.trials)],
        **history.families(
            env.ACTION_NAMES,
            numbers if words.reward else [],
            turns=past_turns,
            max_turns=max_turns,
        ),
    }
    if plans is not None:
        families['hint'] = [words.hint]
        families['hint_action'] = [f'{name}\n' for name in env.ACTION_NAMES]
    chat = chats.build_chat(tokenizer)
    observed, slots = families['observation'], env.line_slots(env_params)
    pieces = line_tables.check_rows(tokenizer, observed, slots)
    openings = (generation_prefix, *agents.openings(agent))
    table, offsets, at, sizes = _line_table(
        tokenizer, chat, families, pieces, quanta, words, openings
    )
    if pieces.all:
        prompt_lines.check_observations(
            env, env_params, tokenizer, observed, max_actions_per_episode
        )
    first = families | {'observation': [line for line in observed if line not in pieces.inner]}
    prefix = prompt_lines.prefix_tokens(
        tokenizer, chat, env, words, first, max_actions_per_episode, generation_prefix
    )
    if plans is not None:
        prompt_lines.check_hints(tokenizer, families)
    answer, grammar = build_answers(
        tokenizer,
        env.ACTION_NAMES,
        max_actions=max_actions_per_turn,
        opening=generation_prefix,
        agent=agent,
        constrain=constrain,
        max_response=max_response,
        offers=limits_actions(env),
        writes=agent.writes,
    )
    return TextTask(
        env_params=env_params,
        table=table,
        prefix=jnp.asarray(prefix, jnp.int32),
        answer=answer,
        eos_ids=jnp.asarray(tokenizer.eos_ids, jnp.int32),
        empty_history=history.empty(
            past_turns, len(env.line_slots(env_params)), max_actions_per_turn
        ),
        turn_limit=jnp.int32(max_turns),
        env=env,
        offsets=offsets,
        style=words,
        agent=agent,
        pad_id=tokenizer.pad_id,
        width=prompt_lines.prompt_width(
            env,
            env_params,
            line_tables.longest(table),
            at,
            sizes,
            past_turns,
            max_actions_per_turn,
            0 if plans is None or not shows_hint else plans.shape[1],
        ),
        max_turns=max_turns,
        max_actions_per_turn=max_actions_per_turn,
        max_actions_per_episode=max_actions_per_episode,
        format_penalty=format_penalty,
        opening=generation_prefix,
        grammar=grammar,
        plans=None if plans is None else jnp.asarray(plans, jnp.int32),
        shows_hint=plans is not None and shows_hint,
    )


def limits_actions(env: Any) -> bool:
    """Return whether the legal actions depend on the state."""
    return type(env).env_action is not TextEnvironment.env_action


def build_answers(
    tokenizer: Tokenizer,
    names: Sequence[str],
    *,
    max_actions: int,
    opening: str,
    agent: agents.Agent,
    constrain: str,
    max_response: int,
    offers: bool,
    writes: bool,
) -> tuple[answers.AnswerTable, grammars.Grammar | None]:
    """Build the parser of answers, and their grammar if `constrain` is set.

    names: of actions; offers: a state may allow only some of them; writes: some turns are written,
    which needs the logits of all tokens. For the other arguments see build_task.
    """
    table = answers.build_answer_table(
        answers.with_ends(tokenizer.token_bytes(), tokenizer.eos_ids),
        names,
        max_actions=max_actions,
        opening=opening,
        closings=agents.closings(agent),
    )
    if not constrain:
        return table, None
    return table, grammars.build_grammar(
        tokenizer,
        names,
        max_actions=max_actions,
        opening=opening,
        longest=max_response,
        spelling=constrain,
        offers=offers,
        writes=writes,
        tokens_across_tag=np.flatnonzero(answers.tokens_across_tag(table)),
    )


def _line_table(tokenizer, chat, families, pieces, quanta, style, openings):
    """Return (table, offsets, first row of each family, number of lines of each family).

    openings: forced openings of answers, of acting turns first, then of each written part.
    """
    stepped = chat.user_open('Reward:\n' if style.reward else '')
    written = chat.user_open('')
    extra = {'next_turn': stepped, 'end_turn': [chat.end_id, *stepped]}
    if len(openings) > 1:
        extra |= {'next_turn_no_reward': written, 'end_turn_no_reward': [chat.end_id, *written]}
    extra['close'], *others = (chat.answer_open(chat.forced(one)) for one in openings)
    texts = [line for family in families.values() for line in family]
    table = line_tables.build_line_table(
        tokenizer, texts, extra_rows=[*extra.values(), *others], pieces=pieces
    )
    sizes = {name: len(family) for name, family in families.items()}
    starts = np.concatenate([[0], np.cumsum([*sizes.values(), *[1] * len(extra)])])
    at = dict(zip([*sizes, *extra], starts[:-1].tolist(), strict=True))
    return table, Offsets(reward_low=quanta[0], reward_high=quanta[-1], **at), at, sizes
