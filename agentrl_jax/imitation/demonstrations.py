"""Demonstrations in the tokens of a rollout: oracle and random play on training levels."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.text import agents
from agentrl_jax.text import answer as answers
from agentrl_jax.text import task as text
from agentrl_jax.text.conversation import Conversation, HostTask
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Demonstrations, EpisodeStop


def answer_text(names: list[str], think: str, opening: str) -> str:
    """Return the text after the forced opening: the rest of the thought and the answer."""
    return answers.FORMS[opening].text.format(think=think, actions=' || '.join(names))


def mixed_plans(
    rng: np.random.Generator,
    oracle_plans: list[list[int]],
    *,
    oracle: float,
    per_turn: int,
    names: int,
    offered: np.ndarray | None = None,
) -> list[list[int]]:
    """Return each oracle plan with probability `oracle`, else 1 to per_turn random actions.

    offered bool [plans, names]: actions to draw from; None = all.
    """
    plans = []
    for i, plan in enumerate(oracle_plans):
        if plan and rng.random() < oracle:
            plans.append(list(plan[:per_turn]))
        else:
            drawn = rng.integers(1, per_turn + 1)
            known = names if offered is None else np.flatnonzero(offered[i])
            plans.append(rng.choice(known, size=drawn).tolist())
    return plans


def demonstrate(
    task: text.TextTask,
    tokenizer: Tokenizer,
    expert: Callable[[Any, int], list[list[int]]],
    *,
    seed: int,
    episodes: int,
    oracle: float,
    max_tokens: int,
    thoughts: bool = False,
    window: int = 0,
    report: Callable[[], None] = lambda: None,
) -> Demonstrations:
    """Play `episodes` training levels; expert(states, used) returns a list of actions per state.

    A demonstration consists of the environment's prompts and answer_text(...), tokenised piece by
    piece as in a rollout. A plan names the expert's next actions, a reflection its actions from the
    start of the level. With `thoughts` the thoughts of acting turns are like plans, else empty.
    window: as in rows_of. report() is called after each turn of all episodes.
    """
    rng = np.random.default_rng(seed)
    level = rng.integers(task.env.num_levels(task.env_params), size=episodes)
    prefix = np.asarray(task.prefix).tolist()
    turns: list[list[Turn]] = [[] for _ in range(episodes)]
    length = np.full(episodes, len(prefix))
    worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.asarray(level, jnp.int32))
    offers = jax.jit(jax.vmap(task.env.offered))
    show = jax.jit(jax.vmap(lambda t, w: text.turn_tokens(t, w, True), in_axes=(None, 0)))
    opened = jax.jit(jax.vmap(lambda t, w: text.opening_length(t, w, True), in_axes=(None, 0)))
    play = jax.jit(jax.vmap(text.play_turn, in_axes=(None, 0, 0, 0, 0)))
    playing, at_start = np.ones(episodes, bool), [[] for _ in range(episodes)]
    keys = jax.random.split(jax.random.key(seed), episodes)
    for turn in range(task.max_turns):
        prompt, count = jax.device_get(show(task, worlds))
        opening = jax.device_get(opened(task, worlds)) if turn else np.zeros(episodes, int)
        host = jax.device_get(worlds.state)
        best = expert(host, np.asarray(worlds.used))
        at_start = best if turn == 0 else at_start
        kind = np.asarray(worlds.agent.part)
        plans = mixed_plans(
            rng,
            best,
            oracle=oracle,
            per_turn=task.max_actions_per_turn,
            names=len(task.env.ACTION_NAMES),
            offered=jax.device_get(offers(worlds.state)),
        )
        parts = np.full((episodes, task.max_actions_per_turn), -2, np.int32)
        for i in np.flatnonzero(playing):
            if kind[i] == agents.ACT:
                thought = named_actions(task, best[i]) if thoughts else ''
                answer = answer_tokens(task, tokenizer, plans[i], thought)
            else:
                named = best[i] if kind[i] == agents.PLAN else at_start[i]
                answer = written_tokens(task, tokenizer, int(kind[i]), named)
            answer.append(int(task.eos_ids[0]))
            if length[i] + count[i] + len(answer) > max_tokens:
                playing[i] = False
                continue
            length[i] += count[i] + len(answer)
            prompt_ids = prompt[i, : count[i]].tolist()
            turns[i].append(Turn(prompt_ids, answer, int(opening[i]), kind[i] != agents.ACT))
            parts[i, : len(plans[i])] = plans[i]  # ignored in a written turn
        worlds, outcome = play(task, keys, worlds, jnp.asarray(parts), jnp.ones(episodes, bool))
        playing &= np.asarray(outcome.stop) == EpisodeStop.NONE
        report()
        if not playing.any():
            break
    return pad_rows(rows_of(prefix, turns, window), max_tokens, task.pad_id)


def demonstrate_on_hosts(
    task: HostTask,
    conversation: Conversation,
    player: Any,
    *,
    seed: int,
    episodes: int,
    oracle: float,
    max_tokens: int,
    window: int = 0,
    report: Callable[[], None] = lambda: None,
) -> tuple[Demonstrations, int]:
    """Play `episodes` training items with a player (envs.hosts.world.Player) in this process.

    Returns the demonstrations and the number of episodes cut by an answer that did not fit. Each
    answer is the expert's with probability `oracle`. Otherwise, or if the expert has none, it is
    random. Each conversation is a row. window: as in rows_of. report() is called per episode.
    """
    rng = np.random.default_rng(seed)
    levels = rng.integers(task.env.num_levels(task.env_params), size=episodes)
    prefix = np.asarray(task.prefix).tolist()
    limit, conversations, cut = task.env.context or max_tokens, [], 0
    for item in np.asarray(task.env_params.items)[levels]:
        talks: dict[int, list[Turn]] = {}  # conversations by number
        observation, instruction = player.reset(int(item)), player.instruction
        for _ in range(task.max_turns):
            prompt = conversation.prompt(observation, instruction)
            turns = talks.setdefault(prompt.branch, [])
            response = (player.best() if rng.random() < oracle else '') or player.random(rng)
            answer = [*conversation.answer(response), int(task.eos_ids[0])]
            so_far = len(prefix) + sum(len(turn.prompt) + len(turn.answer) for turn in turns)
            if so_far + len(prompt.tokens) + len(answer) > limit:
                cut += 1
                break
            turns.append(Turn([*prompt.tokens], answer))
            reply = player.step(response)
            if reply.done:
                break
            observation, instruction = reply.observation, ''
        conversations += talks.values()
        report()
    player.close()
    rows = rows_of(prefix, conversations, window)
    return pad_rows(rows, max_tokens, task.pad_id, budget_name(task, max_tokens)), cut


def budget_name(task: HostTask, max_tokens: int) -> str:
    """Return the setting that bounds a conversation with a host environment, for messages."""
    if task.env.context:
        return f'{task.env.name}.context={task.env.context}'
    return f'rollout.max_tokens={max_tokens}'


class Turn(NamedTuple):
    """Tokens of a turn."""

    prompt: list[int]
    answer: list[int]
    opening: int = 0  # prompt tokens that close the previous turn, omitted with that turn
    written: bool = False  # a plan or a reflection, which stays in the context for longer


def rows_of(
    prefix: list[int], episodes: Iterable[Sequence[Turn]], window: int
) -> list[tuple[list[int], list[bool]]]:
    """Return (tokens, trained flags) of each row: an episode, or with a window of several turns
    (rollout.windows; 0 = all) each turn with its context. Episodes without a turn have no row."""
    if not window:
        return [_row(prefix, turns) for turns in episodes if turns]
    return [_window_row(prefix, turns, k, window) for turns in episodes for k in range(len(turns))]


def _row(prefix: list[int], turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    row, train = list(prefix), [False] * len(prefix)
    for turn in turns:
        row += [*turn.prompt, *turn.answer]
        train += [False] * len(turn.prompt) + [True] * len(turn.answer)
    return row, train


def _window_row(
    prefix: list[int], turns: Sequence[Turn], k: int, window: int
) -> tuple[list[int], list[bool]]:
    """Return the row of turn k: its window, preceded by the last written turn before the window, up
    to the start of the turn after it."""
    first, row = max(k - window + 1, 0), list(prefix)
    older = [j for j in range(first) if turns[j].written][-1:]
    for j in older:
        row += [*turns[j].prompt[turns[j].opening :], *turns[j].answer]
        row += turns[j + 1].prompt[: turns[j + 1].opening]
    for j in range(first, k + 1):
        row += [*turns[j].prompt[turns[j].opening if j == first else 0 :], *turns[j].answer]
    trained = len(turns[k].answer)
    return row, [False] * (len(row) - trained) + [True] * trained


def answer_tokens(
    task: text.TextTask, tokenizer: Tokenizer, plan: list[int], thought: str = ''
) -> list[int]:
    """Return the tokens of the answer that executes the plan, without the end-of-turn token."""
    names = [task.env.ACTION_NAMES[i] for i in plan]
    return tokenizer.encode(answer_text(names, thought, task.opening))


def written_tokens(
    task: text.TextTask, tokenizer: Tokenizer, part: int, plan: list[int]
) -> list[int]:
    """Return the tokens of a written turn that names the actions of a plan."""
    return tokenizer.encode(f'{named_actions(task, plan)}{agents.WRITTEN[part].closing}')


def named_actions(task: text.TextTask, plan: list[int]) -> str:
    """Return the names of a plan's actions, up to the limit of an episode."""
    names = [task.env.ACTION_NAMES[i] for i in plan[: task.max_actions_per_episode]]
    return ' || '.join(names)


def join(parts: Sequence[Demonstrations], pad_id: int) -> Demonstrations:
    """Concatenate demonstrations, padded to the widest."""
    width = max(part.tokens.shape[1] for part in parts)

    def widened(x, fill):
        return jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)

    filled = [jax.tree.map(widened, part, Demonstrations(pad_id, False, False)) for part in parts]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *filled)


def answer_lengths(mask: np.ndarray) -> np.ndarray:
    """Count the trained tokens of each answer, a run of True in mask bool [B, T]; int [n]."""
    edges = np.diff(np.pad(np.asarray(mask, np.int8), ((0, 0), (1, 1))), axis=1)
    return np.nonzero(edges == -1)[1] - np.nonzero(edges == 1)[1]


def pad_rows(
    rows: Sequence[tuple[list[int], list[bool]]], max_tokens: int, pad_id: int, bound: str = ''
) -> Demonstrations:
    """Return tokens and their trained flags as arrays, as wide as the longest row (multiple of 8).

    bound: the setting to name in the error if there are no rows; '' = rollout.max_tokens.
    """
    if not rows:
        bound = bound or f'rollout.max_tokens={max_tokens}'
        raise ValueError(f'no demonstrated answer fits into {bound}: raise it')
    width = min(max_tokens, -(-max(len(row) for row, _ in rows) // 8) * 8)
    tokens = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    attention = np.zeros((len(rows), width), bool)
    for i, (row, train) in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, train
        attention[i, : len(row)] = True
    return Demonstrations(*map(jnp.asarray, (tokens, attention, mask)))
