"""Rollout documents: episodes as JSON, with the figures of their step.

Training and evaluation write a document and its page (page_html). `Document` is the schema.
"""

import codecs
import json
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,  # pydantic needs these before Python 3.12
)

import jax
import numpy as np
from pydantic import Field, InstanceOf, Strict
from typing_extensions import TypedDict

from agentrl_jax.machine import files
from agentrl_jax.measure import validation
from agentrl_jax.records import run_log
from agentrl_jax.text import agents
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import EpisodeStop, Rollout, TurnStop

VERSION = 3
MAX_ACTION_CHARS = 80  # characters of an action that is free text
MAX_REPLY_CHARS = 4000  # characters of an environment's text that is not in a prompt


# ---- schema ------------------------------------------------------------------------------------

Number = Annotated[float, Strict()] | Literal['nan', 'inf', '-inf']
Count = Annotated[int, Strict(), Field(gt=-run_log.LARGEST, lt=run_log.LARGEST)]
Truth = Annotated[bool, Strict()]
Text = InstanceOf[str]  # str would reject half a surrogate pair, which an environment may send
Grid = list[list[Text]] | None  # rows of cell names

Totals = TypedDict(
    'Totals',
    {
        'episodes': Count,
        'faulty': Count,  # episodes with a failed environment; not in the other figures
        'solved': Count,
        'success_low': Number,  # 95 % interval, assuming independent levels
        'success_high': Number,
        'return': Number,  # mean
        'turns': Count,
        'invalid': Number | None,  # turns; null if the environment does not report all of them
        'truncated': Count,  # episodes with a truncated answer or ended by the token budget
    },
)
Group = TypedDict(
    'Group',
    {
        'group': Count,
        'level': Count,
        'episodes': Count,
        'faulty': Count,
        'solved': Count,
        'return': Number,  # mean
        'return_std': Number | None,  # unbiased; null with fewer than two healthy members
        'turns': Number,  # mean
        'sampled': Number,  # tokens, mean
        'advantages': Number | None,  # range over tokens; null if nothing trained
    },
)


class Worlds(TypedDict):
    """Replies of environments on hosts in all episodes."""

    replies: Count
    seconds: Number  # per reply, mean
    slowest: Number
    retries: Count
    faults: Count  # abandoned episodes


class Turn(TypedDict):
    index: Count
    stop: Text
    valid: Truth | None  # null: the environment does not report it
    reward: Number
    penalty: Number
    actions: list[Text]
    grid: Grid
    part: NotRequired[Text]  # a plan or a reflection
    branch: NotRequired[Count]  # conversation, if the episode has several
    staleness: NotRequired[Count]  # updates between sampling and training


class Reply(TypedDict):
    """A reply of an environment on a host."""

    turn: Count  # the turn that it opens; 0: the first reply
    seconds: Number  # of the last try
    tries: Count
    fault: Text  # why the episode ended here; '' if it did not
    text: Text  # text that is not in a prompt: the last reply


class Token(TypedDict):
    s: Text
    turn: Count
    k: Text  # a: sampled by the policy; p: prompt
    lp: Number | None  # log-probability
    ratio: Number | None
    adv: Number | None


Episode = TypedDict(
    'Episode',
    {
        'row': Count,  # of the rollout
        'level': Count,
        'group': Count,
        'return': Number,
        'success': Truth,
        'episode_stop': Text,
        'turns': list[Turn],
        'replies': list[Reply],
        'final_grid': Grid,
        'tokens': list[Token],
    },
)


class Document(TypedDict):
    version: Literal[3]
    title: Text
    env: Text
    about: dict[Text, Text]  # model, config, commit, ...
    every: Count  # every n-th episode of the rollout is in the document
    totals: Totals  # of all episodes of the rollout
    worlds: Worlds | None  # null for environments on the device
    groups: list[Group]  # groups with an episode in the document; figures of all their members
    episodes: list[Episode]


def check(document: Any) -> None:
    """Raise a ValueError that names the first wrong field of a document."""
    files.read_as(Document, document, 'rollout document')


# ---- from a rollout ----------------------------------------------------------------------------


def of_rollout(
    rollout: Rollout,
    tokenizer: Tokenizer,
    env_name: str,
    action_names: Sequence[str] | Callable[[int], Sequence[str]] | None,
    *,
    every: int = 1,
    group_size: int = 1,
    grids: Sequence[Sequence[Any]] | None = None,
    extras: Mapping[str, np.ndarray] | None = None,
    title: str = '',
    about: Mapping[str, str] | None = None,
    replies: Sequence[Sequence[Mapping[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Return a document of every `every`-th episode of a rollout, with figures of all episodes.

    rollout: group-major host arrays of B rows, without padding rows. action_names: for all levels
    or by level; None if actions are free text. grids[i][k]: for the i-th selected episode, rows of
    cell names before turn k's answer, or None; one entry beyond the turns is the final board.
    extras: 'ratio' and 'advantages', [B, T], nan where not trained. replies[b]: log lines of row b,
    for environments on hosts.
    """
    defaults = {'judged': True, 'branch': 0, 'staleness': 0}
    missing = {name: x for name, x in defaults.items() if getattr(rollout, name) is None}
    filled = {name: np.full(rollout.valid.shape, x) for name, x in missing.items()}
    rollout = rollout.replace(**filled, allowed=None, figures=None, extra={})
    rollout = jax.tree.map(np.asarray, rollout)
    extras = {name: np.asarray(value) for name, value in (extras or {}).items()}
    raw, episodes = tokenizer.token_bytes(), []
    for i, b in enumerate(range(0, len(rollout.tokens), every)):
        row, row_extras = jax.tree.map(lambda x, b=b: x[b], (rollout, extras))
        boards = list(grids[i]) if grids is not None else []
        names = action_names(int(row.level)) if callable(action_names) else action_names
        turns = [
            _turn(row, k, names, tokenizer, boards[k] if k < len(boards) else None)
            for k in range(int(row.num_turns))
        ]
        episodes.append(
            {
                'row': b,
                'level': int(row.level),
                'group': b // group_size,
                'return': number(row.rewards.sum() + row.penalties.sum()),
                'success': bool(row.success),
                'episode_stop': EpisodeStop(int(row.episode_stop)).name.lower(),
                'turns': turns,
                'replies': _replies(replies[b], row) if replies else [],
                'final_grid': boards[len(turns)] if len(boards) > len(turns) else None,
                'tokens': _tokens(row, row_extras, tokenizer, raw),
            }
        )
    groups = []
    for index in dict.fromkeys(episode['group'] for episode in episodes):
        rows = slice(index * group_size, (index + 1) * group_size)
        trained = (rollout, extras.get('advantages'))
        members, advantages = jax.tree.map(lambda x, rows=rows: x[rows], trained)
        groups.append({'group': index} | group(members, advantages))
    return {
        'version': VERSION,
        'title': title,
        'env': env_name,
        'about': dict(about or {}),
        'every': every,
        'totals': totals(rollout),
        'worlds': worlds(replies) if replies else None,
        'groups': groups,
        'episodes': episodes,
    }


def totals(rollout: Rollout) -> dict[str, int | float | str]:
    """`Totals` of all episodes of a rollout."""
    healthy = rollout.healthy
    is_turn = np.asarray(rollout.played) & healthy[:, None]
    cut = ((rollout.turn_stop == TurnStop.LENGTH) & is_turn).any(1)
    out = rollout.episode_stop == EpisodeStop.TOKEN_BUDGET
    unknown = bool((is_turn & ~rollout.judged).any())
    solved = rollout.success & healthy
    counted = {'tries': healthy, 'solved': solved}
    counted = {n: np.bincount(rollout.level, rows).astype(int) for n, rows in counted.items()}
    low, high = validation.success_interval(counted)
    return {
        'episodes': len(healthy),
        'faulty': int((~healthy).sum()),
        'solved': int(solved.sum()),
        'success_low': low,
        'success_high': high,
        'return': number(rollout.returns[healthy].mean()) if healthy.any() else 'nan',
        'turns': int(is_turn.sum()),
        'invalid': None if unknown else int((is_turn & ~rollout.valid).sum()),
        'truncated': int((cut | (out & healthy)).sum()),
    }


def worlds(replies: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, int | float]:
    """`Worlds` of all episodes of a rollout."""
    lines = [line for episode in replies for line in episode]
    seconds = [line['seconds'] for line in lines]
    return {
        'replies': len(lines),
        'seconds': sum(seconds) / max(len(lines), 1),
        'slowest': max(seconds, default=0.0),
        'retries': sum(line['tries'] - 1 for line in lines),
        'faults': sum(bool(line['fault']) for line in lines),
    }


def group(members: Rollout, advantages: np.ndarray | None) -> dict[str, Any]:
    """`Group` of a group's members; advantages: float [members, T], nan where not trained."""
    healthy = members.healthy
    returns, sampled = members.returns[healthy], members.action_mask.sum(1)[healthy]
    trained = np.zeros(0) if advantages is None else advantages[members.action_mask]
    trained = trained[np.isfinite(trained)]
    return {
        'level': int(members.level[0]),
        'episodes': len(healthy),
        'faulty': int((~healthy).sum()),
        'solved': int((members.success & healthy).sum()),
        'return': number(returns.mean()) if returns.size else 'nan',
        'return_std': number(returns.std(ddof=1)) if returns.size > 1 else None,
        'turns': number(members.num_turns[healthy].mean()) if returns.size else 'nan',
        'sampled': number(sampled.mean()) if returns.size else 'nan',
        'advantages': number(trained.max() - trained.min()) if trained.size else None,
    }


def _turn(
    row: Rollout, k: int, names: Sequence[str] | None, tokenizer: Tokenizer, grid: Any
) -> dict[str, Any]:
    """`Turn` k of an episode; row: a rollout without the axis of episodes."""
    part = int(row.part[k])
    action_ids = [int(action) for action in row.actions[k] if action >= 0]
    if part:
        actions = []
    elif names is None:
        answer = tokenizer.decode(row.tokens[row.action_mask & (row.turn == k)])
        actions = [textwrap.shorten(answer, MAX_ACTION_CHARS, placeholder=' ...')]
    else:
        actions = [names[action] if action < len(names) else str(action) for action in action_ids]
    return {
        **({'part': agents.PARTS[part]} if part else {}),
        **({'branch': int(row.branch[k])} if row.branch.any() else {}),
        **({'staleness': int(row.staleness[k])} if row.staleness[k] else {}),
        'index': k,
        'stop': TurnStop(int(row.turn_stop[k])).name.lower(),
        'valid': bool(row.valid[k]) if row.judged[k] else None,
        'reward': number(row.rewards[k]),
        'penalty': number(row.penalties[k]),
        'actions': actions,
        'grid': grid,
    }


def _replies(lines: Sequence[Mapping[str, Any]], row: Rollout) -> list[dict[str, Any]]:
    last = {line['turn']: line for line in lines}  # the prompt shows the last reply of its turn
    prompt_turns = np.flatnonzero(row.begin)  # prompts start after the prefix, not at 0
    replies = []
    for line in lines:
        in_prompt = line is last[line['turn']] and line['turn'] in prompt_turns
        text = '' if in_prompt else line['observation']
        if (left := len(text) - MAX_REPLY_CHARS) > 0:
            text = f'{text[:MAX_REPLY_CHARS]} [... {left} more characters]'
        replies.append({name: line[name] for name in ('turn', 'seconds', 'tries', 'fault')})
        replies[-1]['text'] = text
    return replies


def number(value: Any) -> float | str:
    """A float32 as JSON; nan and inf become strings."""
    return run_log.plain(run_log.plain_number(np.float32(value)))


def _tokens(
    row: Rollout, extras: Mapping[str, np.ndarray], tokenizer: Tokenizer, raw: Sequence[bytes]
) -> list[dict[str, Any]]:
    figures = {'lp': row.logprobs, 'ratio': extras.get('ratio'), 'adv': extras.get('advantages')}
    real = np.flatnonzero(row.attention_mask)
    sampled = row.action_mask[real]
    texts = _spellings([int(i) for i in row.tokens[real]], sampled, tokenizer, raw)
    return [
        {'s': text, 'turn': int(row.turn[t]), 'k': 'a' if acted else 'p'}
        | {x: number(of[t]) if acted and of is not None else None for x, of in figures.items()}
        for text, t, acted in zip(texts, real, sampled, strict=True)
    ]


def _spellings(
    ids: Sequence[int], sampled: Sequence[bool], tokenizer: Tokenizer, raw: Sequence[bytes]
) -> list[str]:
    """Text of each token, broken UTF-8 as \\xNN; special tokens by their names.

    A sampled token is decoded separately. In prompts, a character whose bytes are spread over
    several tokens belongs to the last of them.
    """
    raw = [*raw, *[b''] * (max(ids, default=0) + 1 - len(raw))]  # the model's unused rows
    texts = []
    decoder = codecs.getincrementaldecoder('utf-8')('backslashreplace')
    for n, token in enumerate(ids):
        if not raw[token]:
            texts.append(tokenizer.decode([token], show_special=True) or f'[{token}]')
            continue
        more = n + 1 < len(ids) and not sampled[n] and not sampled[n + 1] and raw[ids[n + 1]]
        texts.append(decoder.decode(raw[token], final=not more))
    return texts


# ---- files -------------------------------------------------------------------------------------


def write(path: str | os.PathLike, document: dict[str, Any]) -> None:
    """Check and write a document atomically."""
    check(document)
    text = json.dumps(document, allow_nan=False, separators=(',', ':')) + '\n'
    files.write_atomic(path, text)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Read a document. Raises ValueError with the file and the reason if it is invalid."""
    return files.read_as(Document, files.read_json(path), path)


def find(source: str | os.PathLike) -> Path:
    """Return the file itself, or for a workdir its last rollouts/*.json by name."""
    source = Path(source)
    if source.is_dir():
        paths = sorted((source / 'rollouts').glob('*.json'))
        if not paths:
            raise FileNotFoundError(f'{source / "rollouts"} contains no rollouts (*.json)')
        return paths[-1]
    if source.suffix != '.json' or not source.exists():
        raise FileNotFoundError(f'{source} is not a run directory or a rollout document')
    return source
