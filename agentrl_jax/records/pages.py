"""Rollout pages of a run: replay the environments of a rollout and write document and page."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.records import document, page_html
from agentrl_jax.text import agents
from agentrl_jax.text import task as text
from agentrl_jax.text.conversation import HostTask, Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Rollout

FOLDER = 'rollouts'  # below the workdir
PAGE_EPISODES = 64  # episodes on a rollout page
OF_STEP = re.compile(r'(?:.*_)?step_(\d+)')  # training page; mixtures have one per environment


@jax.jit  # one program for all pages of a run, unless dynamic sampling did not fill a batch
@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, 0, 0))
def play_turn(
    task: text.TextTask,
    key: jax.Array,
    level: jax.Array,
    state: Any,
    actions: jax.Array,
    restarts: jax.Array,
) -> Any:
    """Return the state after the actions of a turn, int32 [A] (-1: none), and before the next."""

    def act(state, x):
        index, action = x
        key_of_step = jax.random.fold_in(key, index)
        _, after, *_ = task.env.step_env(
            key_of_step, state, jnp.maximum(action, 0), task.env_params
        )
        return jax.tree.map(lambda new, old: jnp.where(action >= 0, new, old), after, state), None

    state, _ = jax.lax.scan(act, state, (jnp.arange(len(actions)), actions))
    start = task.env.reset_level(level, task.env_params)
    return jax.tree.map(lambda new, old: jnp.where(restarts, new, old), start, state)


def replay_states(
    rollout: Rollout, streams: np.ndarray, task: text.TextTask, key: jax.Array
) -> Iterator[Any]:
    """Yield the states of all environments [B, ...] before each turn and after the last.

    rollout: host arrays of B rows; streams int32 [B]: their world streams; key: the key of collect.
    States after the end of an episode are meaningless.
    """
    task = jax.tree.map(jnp.asarray, jax.device_get(task))
    k_world = jax.random.split(key)[1]
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(k_world, jnp.asarray(streams))
    level = jnp.asarray(rollout.level)
    states = jax.vmap(task.env.reset_level, in_axes=(0, None))(level, task.env_params)
    yield jax.device_get(states)
    for k in range(int(rollout.num_turns.max(initial=0))):
        turn_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, k)
        actions = np.where(rollout.acts[:, k, None], rollout.actions[:, k], -1)
        states = play_turn(task, turn_keys, level, states, actions, restarts_after(rollout, k))
        yield jax.device_get(states)


def restarts_after(rollout: Rollout, k: int) -> np.ndarray:
    """Return whether turn k is followed by a new trial, bool [B]; a reflection precedes it."""
    part, trial = rollout.part, rollout.trial
    if k + 1 == part.shape[1]:
        return np.zeros(len(part), bool)
    starts = (trial[:, k + 1] > trial[:, k]) | (part[:, k] == agents.REFLECT)
    return starts & (part[:, k + 1] != agents.REFLECT) & (k + 1 < rollout.num_turns)


def replay(
    rollout: Rollout, streams: np.ndarray, task: text.TextTask, key: jax.Array
) -> list[list]:
    """Boards before each turn and after the last: grids[b][k] = rows of cell names.

    Arguments: see replay_states.
    """
    grids: list[list] = [[] for _ in range(rollout.tokens.shape[0])]
    for k, states in enumerate(replay_states(rollout, streams, task, key)):
        for b in np.flatnonzero(rollout.num_turns >= k):
            grids[b].append(task.env.cells(jax.tree.map(lambda x, b=b: x[b], states)))
    return grids


def every_nth(count: int, limit: int, group_size: int) -> int:
    """Return the smallest stride n that selects at most `limit` of `count` rows.

    n divides group_size, so that each group contributes the same number of members. If one member
    per group is still too many, n skips entire groups.
    """
    for n in range(1, group_size + 1):
        if group_size % n == 0 and count <= n * limit:
            return n
    return -(-count // (limit * group_size)) * group_size


def write(
    workdir: Path,
    name: str,
    rollout: Rollout,
    *,
    task: Task,
    tokenizer: Tokenizer,
    streams: np.ndarray,
    key: jax.Array,
    group_size: int,
    title: str,
    extras: dict[str, np.ndarray],
    limit: int,
    about: Mapping[str, str] | None = None,
    replies: Sequence[Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    """Write <workdir>/rollouts/<name>.json and .html; the header covers all rows of the rollout.

    With more than `limit` episodes, only every n-th is included (every_nth). about: label -> text
    for the header (about.of_run). replies: for environments on hosts, the log lines of each row
    (rollout/replies.py). Also links the previous step's page to this one.
    """
    every = every_nth(len(rollout.tokens), limit, group_size)
    host = jax.tree.map(np.asarray, rollout)
    head = jax.tree.map(lambda x: x[::every], host)
    folder = Path(workdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(task, HostTask):  # no boards: the conversation shows its observations
        boards = dict(action_names=None)
    else:
        grids = replay(head, np.asarray(streams)[::every], task, key)
        names = functools.partial(task.env.names_of, params=jax.device_get(task.env_params))
        boards = dict(action_names=names, grids=grids)
    page_document = document.of_rollout(
        host,
        tokenizer,
        task.env.name,
        every=every,
        group_size=group_size,
        **boards,
        extras=extras,
        title=title,
        about=about,
        replies=replies,
    )
    document.write(folder / f'{name}.json', page_document)
    page = folder / f'{name}.html'
    page_html.write(page, page_document, max_episodes=limit)
    page_html.link_before(page)
    return page


def cut(workdir: Path, step: int) -> None:
    """Remove the training pages of `step` and later, before a run resumes from there.

    Pages link to the existing pages of their folder. Leftover pages of a killed run would change
    the links of earlier pages.
    """
    later = [
        path
        for path in sorted((Path(workdir) / FOLDER).glob('*'))
        if path.suffix in ('.html', '.json')
        and (name := OF_STEP.fullmatch(path.stem))
        and int(name[1]) >= step
    ]
    for path in later:
        path.unlink()
    for path in later:
        page_html.link_before(path.with_suffix('.html'))
