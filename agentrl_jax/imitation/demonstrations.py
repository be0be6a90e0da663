"""Demonstrations in the tokens of a rollout: oracle and random play of the training levels."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.text import agents
from agentrl_jax.text import answer as answers
from agentrl_jax.text import task as text
from agentrl_jax.text.conversation import Conversation, HostTask
from agentrl_jax.types import Demonstrations, EpisodeStop


def answer_text(names: list[str], think: str, opening: str) -> str:
    """What follows the forced opening: the rest of the thought and the answer."""
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
    """Each plan is the oracle's with probability `oracle`, else 1 to per_turn random actions.

    offered bool [plans, names]: those to draw from; None = all.
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
    tokenizer: Any,
    expert: Callable[[Any, int], list[list[int]]],
    *,
    seed: int,
    episodes: int,
    oracle: float,
    max_tokens: int,
    thoughts: bool = False,
    report: Callable[[], None] = lambda: None,
) -> Demonstrations:
    """Plays `episodes` training levels; expert(states, used) plans one list of actions a state.

    The words of a demonstration are the environment's own prompts and answer_text(...), tokenised
    piece by piece as in a rollout. A plan names what the expert would do from there, a reflection
    what it would have done from the start of the level; with `thoughts` those of turns that act
    say the same as a plan, else nothing. report() is called after each turn of all episodes.
    """
    rng = np.random.default_rng(seed)
    level = rng.integers(task.env.num_levels(task.env_params), size=episodes)
    prefix = np.asarray(task.prefix)
    rows = [list(prefix) for _ in range(episodes)]
    trained = [[False] * len(prefix) for _ in range(episodes)]
    worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.asarray(level, jnp.int32))
    offers = jax.jit(jax.vmap(task.env.offered))
    show = jax.jit(jax.vmap(lambda t, w: text.turn_tokens(t, w, True), in_axes=(None, 0)))
    play = jax.jit(jax.vmap(text.play_turn, in_axes=(None, 0, 0, 0, 0)))
    playing, at_start = np.ones(episodes, bool), [[] for _ in range(episodes)]
    keys = jax.random.split(jax.random.key(seed), episodes)
    for turn in range(task.max_turns):
        prompt, count = jax.device_get(show(task, worlds))
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
            new = [*prompt[i, : count[i]].tolist(), *answer]
            if len(rows[i]) + len(new) > max_tokens:
                playing[i] = False
                continue
            rows[i] += new
            trained[i] += [False] * int(count[i]) + [True] * len(answer)
            parts[i, : len(plans[i])] = plans[i]  # which a written turn does not play
        worlds, outcome = play(task, keys, worlds, jnp.asarray(parts), jnp.ones(episodes, bool))
        playing &= np.asarray(outcome.stop) == EpisodeStop.NONE
        report()
        if not playing.any():
            break
    return pad_rows(rows, trained, max_tokens, task.pad_id)


def demonstrate_on_hosts(
    task: HostTask,
    conversation: Conversation,
    player: Any,
    *,
    seed: int,
    episodes: int,
    oracle: float,
    max_tokens: int,
    report: Callable[[], None] = lambda: None,
) -> Demonstrations:
    """Plays `episodes` training items with a player (envs.hosts.world.Player) in this process.

    Each answer is the expert's with probability `oracle`; else, and where it knows no way on, that
    of random play. Of several conversations each is a row. report() is called after each episode.
    """
    rng = np.random.default_rng(seed)
    levels = rng.integers(task.env.num_levels(task.env_params), size=episodes)
    most, rows, trained = task.env.context or max_tokens, [], []
    for item in np.asarray(task.env_params.items)[levels]:
        talks: dict[int, tuple[list[int], list[bool]]] = {}  # by their numbers
        observation, instruction = player.reset(int(item)), player.instruction
        for _ in range(task.max_turns):
            prompt = conversation.prompt(observation, instruction)
            begun = list(np.asarray(task.prefix)), [False] * len(task.prefix)
            row, train = talks.setdefault(prompt.branch, begun)
            said = (player.best() if rng.random() < oracle else '') or player.random(rng)
            answer = [*conversation.answer(said), int(task.eos_ids[0])]
            if len(row) + len(prompt.tokens) + len(answer) > most:
                break
            row += [*prompt.tokens, *answer]
            train += [False] * len(prompt.tokens) + [True] * len(answer)
            reply = player.step(said)
            if reply.done:
                break
            observation, instruction = reply.observation, ''
        rows += [row for row, _ in talks.values()]
        trained += [train for _, train in talks.values()]
        report()
    player.close()
    return pad_rows(rows, trained, max_tokens, task.pad_id)


def answer_tokens(
    task: text.TextTask, tokenizer: Any, plan: list[int], thought: str = ''
) -> list[int]:
    """Tokens of the answer that executes the plan, without the end-of-turn token."""
    names = [task.env.ACTION_NAMES[i] for i in plan]
    return tokenizer.encode(answer_text(names, thought, task.opening))


def written_tokens(task: text.TextTask, tokenizer: Any, part: int, plan: list[int]) -> list[int]:
    """Tokens of a written turn that names the actions of a plan."""
    return tokenizer.encode(f'{named_actions(task, plan)}{agents.WRITTEN[part].closing}')


def named_actions(task: text.TextTask, plan: list[int]) -> str:
    """The actions of a plan in words, as many as an episode may have."""
    names = [task.env.ACTION_NAMES[i] for i in plan[: task.max_actions_per_episode]]
    return ' || '.join(names)


def join(parts: Sequence[Demonstrations], pad_id: int) -> Demonstrations:
    """Demonstrations one after another, as wide as the widest."""
    width = max(part.tokens.shape[1] for part in parts)

    def widened(x, fill):
        return jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)

    filled = [jax.tree.map(widened, part, Demonstrations(pad_id, False, False)) for part in parts]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *filled)


def answer_lengths(mask: np.ndarray) -> np.ndarray:
    """int [n]: trained tokens of each answer, an unbroken run in mask bool [B, T]."""
    edges = np.diff(np.pad(np.asarray(mask, np.int8), ((0, 0), (1, 1))), axis=1)
    return np.nonzero(edges == -1)[1] - np.nonzero(edges == 1)[1]


def pad_rows(
    rows: list[list[int]], trained: list[list[bool]], max_tokens: int, pad_id: int
) -> Demonstrations:
    """Token lists and their trained flags as arrays, as wide as the longest (in steps of 8)."""
    width = min(max_tokens, -(-max(map(len, rows)) // 8) * 8)
    tokens = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    attention = np.zeros((len(rows), width), bool)
    for i, (row, train) in enumerate(zip(rows, trained, strict=True)):
        tokens[i, : len(row)], mask[i, : len(row)] = row, train
        attention[i, : len(row)] = True
    return Demonstrations(*map(jnp.asarray, (tokens, attention, mask)))
