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
from agentrl_jax.text.answer import ABSENT, END, parse_answer
from agentrl_jax.text.conversation import HostTask, Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Rollout, TurnStop

FOLDER = 'rollouts'  # below the workdir
PAGE_EPISODES = 64  # episodes on a rollout page
OF_STEP = re.compile(r'(?:.*_)?step_(\d+)')  # training page; mixtures have one per environment

# One program for all pages of a run: their tasks and numbers of episodes are the same, unless
# dynamic sampling did not fill a batch.
play_turns = jax.jit(jax.vmap(text.play_turn, in_axes=(None, 0, 0, 0, 0)))


def turn_parts(rollout: Rollout, k: int, task: text.TextTask, tokenizer: Tokenizer) -> tuple:
    """(parts int32 [B, A], matched bool [B]) of turn k, parsed again on the host.

    Turns of an opponent have no tokens in action_mask: their recorded actions are used.
    """
    parts, matched = [], []
    for b in range(rollout.tokens.shape[0]):
        sampled = rollout.action_mask[b] & (rollout.turn[b] == k)
        ids = rollout.tokens[b][sampled]
        ended = bool(rollout.turn_stop[b, k] == TurnStop.EOS)
        answer = tokenizer.decode_bytes(ids[: len(ids) - ended]) + END * ended
        part, per_turn = rollout.part[b, k], task.max_actions_per_turn
        extra = rollout.extra
        if 'learner' in extra and extra['seats'][b, k] != extra['learner'][b]:
            is_match = bool(rollout.valid[b, k])
            row = [action if action >= 0 else ABSENT for action in rollout.actions[b, k]]
        elif part == agents.ACT:
            is_match, row = parse_answer(
                answer, task.env.ACTION_NAMES, max_actions=per_turn, opening=task.opening
            )
        else:
            is_match = agents.WRITTEN[int(part)].closing.encode() in answer
            row = [ABSENT] * per_turn
        parts.append(row)
        matched.append(is_match)
    # The reshape handles 0 rows: dynamic sampling may keep nothing.
    parts = np.asarray(parts, np.int32).reshape(-1, task.max_actions_per_turn)
    return parts, np.asarray(matched, bool)


def replay_states(
    rollout: Rollout, streams: np.ndarray, task: text.TextTask, tokenizer: Tokenizer, key: jax.Array
) -> Iterator[Any]:
    """Yield the states of all environments [B, ...] before each turn and after the last.

    rollout: host arrays of B rows; streams int32 [B]: their world streams; key: the key of collect.
    States after the end of an episode are meaningless.
    """
    task = jax.tree.map(jnp.asarray, jax.device_get(task))
    k_world = jax.random.split(key)[1]
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(k_world, jnp.asarray(streams))
    worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, jnp.asarray(rollout.level))
    for k in range(int(rollout.num_turns.max(initial=0)) + 1):
        yield jax.device_get(worlds.state)
        if k < task.max_turns:
            parts, matched = turn_parts(rollout, k, task, tokenizer)
            worlds, _ = play_turns(task, keys, worlds, jnp.asarray(parts), jnp.asarray(matched))


def replay(
    rollout: Rollout, streams: np.ndarray, task: text.TextTask, tokenizer: Tokenizer, key: jax.Array
) -> list[list]:
    """Boards before each turn and after the last: grids[b][k] = rows of cell names.

    Arguments: see replay_states.
    """
    grids: list[list] = [[] for _ in range(rollout.tokens.shape[0])]
    for k, states in enumerate(replay_states(rollout, streams, task, tokenizer, key)):
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
        grids = replay(head, np.asarray(streams)[::every], task, tokenizer, key)
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
