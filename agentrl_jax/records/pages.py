"""The rollout page of a run: replays the worlds of a rollout, and writes document and page."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax import view
from agentrl_jax.text import task as text
from agentrl_jax.text.answer import parse_answer
from agentrl_jax.types import Rollout, TurnStop

PAGE_EPISODES = 64  # episodes on a rollout page

# One program for all pages of a run: their tasks and numbers of episodes are the same.
play_turns = jax.jit(jax.vmap(text.play_turn, in_axes=(None, 0, 0, 0, 0)))


def turn_parts(rollout: Rollout, k: int, task: text.TextTask, tokenizer: Any) -> tuple:
    """(parts int32 [B, A], matched bool [B]) of turn k, parsed again on the host."""
    parts, matched = [], []
    for b in range(rollout.tokens.shape[0]):
        sampled = rollout.action_mask[b] & (rollout.turn[b] == k)
        ids = rollout.tokens[b][sampled]
        if rollout.turn_stop[b, k] == TurnStop.EOS:
            ids = ids[:-1]
        found, row = parse_answer(
            tokenizer.decode_bytes(ids),
            task.env.ACTION_NAMES,
            max_actions=task.max_actions_per_turn,
            with_think=task.with_think,
        )
        parts.append(row)
        matched.append(found)
    return np.asarray(parts, np.int32), np.asarray(matched)


def replay(rollout: Rollout, streams: np.ndarray, task, tokenizer, key: jax.Array) -> list[list]:
    """The worlds before each turn and after the last: grids[b][k] = rows of cell names.

    rollout: host arrays of B rows; streams int32 [B] their world streams; key: that of collect.
    """
    task = jax.tree.map(jnp.asarray, jax.device_get(task))
    k_world = jax.random.split(key)[1]
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(k_world, jnp.asarray(streams))
    worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.asarray(rollout.level))
    grids: list[list] = [[] for _ in range(rollout.tokens.shape[0])]
    for k in range(int(rollout.num_turns.max(initial=0)) + 1):
        states = jax.device_get(worlds.state)
        for b in np.flatnonzero(rollout.num_turns >= k):
            grids[b].append(task.env.cells(jax.tree.map(lambda x, b=b: x[b], states)))
        if k < task.max_turns:
            parts, matched = turn_parts(rollout, k, task, tokenizer)
            worlds, _ = play_turns(task, keys, worlds, jnp.asarray(parts), jnp.asarray(matched))
    return grids


def write(
    workdir: Path,
    name: str,
    rollout: Rollout,
    *,
    task: text.TextTask,
    tokenizer: Any,
    streams: np.ndarray,
    key: jax.Array,
    group_size: int,
    title: str,
    extras: dict[str, np.ndarray],
    limit: int,
) -> Path:
    """Writes <workdir>/rollouts/<name>.json and .html of at most `limit` episodes.

    Where there are more, every n-th one is shown, so that all groups are: n divides group_size.
    """
    wanted = len(rollout.tokens) / limit
    every = min(
        (n for n in range(1, group_size + 1) if group_size % n == 0 and n >= wanted),
        default=group_size,
    )
    chosen = slice(None, limit * every, every)
    head = jax.tree.map(lambda x: np.asarray(x)[chosen], rollout)
    folder = Path(workdir) / 'rollouts'
    folder.mkdir(parents=True, exist_ok=True)
    document = view.episodes_document(
        head,
        tokenizer,
        task.env.name,
        task.env.ACTION_NAMES,
        replay(head, np.asarray(streams)[chosen], task, tokenizer, key),
        {n: x[chosen] for n, x in extras.items()},
        group_size=group_size // every,
        title=title,
    )
    view.write_document(folder / f'{name}.json', document)
    view.write_page(folder / f'{name}.html', document)
    return folder / f'{name}.html'
