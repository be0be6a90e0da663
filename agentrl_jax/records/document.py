"""Rollout documents: episodes as JSON, with the figures of the step they are taken from.

Training and evaluation write a document and its page (page_html). `Document` is the schema.
"""

import codecs
import dataclasses
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

import numpy as np
from pydantic import Field, InstanceOf, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from agentrl_jax.machine import files
from agentrl_jax.measure import validation
from agentrl_jax.records import run_log
from agentrl_jax.text import agents
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import EpisodeStop, Rollout, TurnStop

VERSION = 3
ACTION_SHOWN = 80  # characters of an action that is free text
REPLY_SHOWN = 4000  # ... of a world's text that is in no prompt


# ---- schema ------------------------------------------------------------------------------------

Number = Annotated[float, Strict()] | Literal['nan', 'inf', '-inf']
Count = Annotated[int, Strict(), Field(gt=-run_log.LARGEST, lt=run_log.LARGEST)]
Truth = Annotated[bool, Strict()]
Text = InstanceOf[str]  # str would reject half a surrogate pair, which a world may send
Grid = list[list[Text]] | None  # rows of cell names

Totals = TypedDict(
    'Totals',
    {
        'episodes': Count,
        'faulty': Count,  # episodes whose worlds failed; the other figures leave them out
        'solved': Count,
        'success_low': NotRequired[Number],  # 95 % interval; levels are taken as independent
        'success_high': NotRequired[Number],
        'return': Number,  # mean
        'turns': Count,
        'invalid': Number | None,  # turns; null if a world does not report it for all turns
        'truncated': Count,  # episodes with a cut answer, or ended by the token budget
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
    """Replies of worlds on hosts in all episodes."""

    replies: Count
    seconds: Number  # of a reply, mean
    slowest: Number
    retries: Count
    faults: Count  # episodes that were given up


class Turn(TypedDict):
    index: Count
    stop: Text
    valid: Truth | None  # null: the world does not report it
    reward: Number
    penalty: Number
    actions: list[Text]
    grid: Grid
    part: NotRequired[Text]  # a plan or a reflection
    branch: NotRequired[Count]  # conversation, if the episode has several
    staleness: NotRequired[Count]  # updates between the weights that sampled and those that train


class Reply(TypedDict):
    """A reply of a world on a host."""

    turn: Count  # the turn that it opens; 0: the first reply
    seconds: Number  # of the last try
    tries: Count
    fault: Text  # why the episode ended here; '' if it did not
    text: Text  # text that no prompt shows: the last reply


class Token(TypedDict):
    s: Text
    turn: Count
    k: Text  # a: sampled by the policy, p: not
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
    every: Count  # every n-th episode played is in the document
    totals: Totals  # of all episodes played
    worlds: Worlds | None  # null for worlds on the device
    groups: list[Group]  # of all members of each group that has an episode in the document
    episodes: list[Episode]


SCHEMA = TypeAdapter(Document)


def check(document: Any) -> None:
    """Raise a ValueError that names the first wrong field of a document."""
    try:
        SCHEMA.validate_python(document)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        field = '.'.join(map(str, wrong['loc'])) or 'the document'
        value = '' if isinstance(wrong['input'], (dict, list)) else f', not {wrong["input"]!r:.80}'
        raise ValueError(f'rollout document: {field}: {wrong["msg"]}{value}') from error


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
    """Every `every`-th episode of a rollout as a document, and the figures of all of them.

    action_names: of all levels or by level; None where the answers are the actions, in free text.
    rollout: group-major host arrays of B rows, all of which count. grids[i][k]: for the i-th
    episode taken, rows of cell names before turn k's answer, or None; one entry more than turns is
    the world after the last turn. extras: 'ratio' and 'advantages', [B, T], nan where not trained.
    replies[b]: the lines of the log of row b, where worlds are on hosts.
    """
    required = [
        field.name
        for field in dataclasses.fields(rollout)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    fields = {name: np.asarray(getattr(rollout, name)) for name in required}
    for name, default in (('judged', True), ('branch', 0), ('staleness', 0)):
        known = getattr(rollout, name)
        known = np.full(fields['valid'].shape, default) if known is None else known
        fields[name] = np.asarray(known)
    extras = {name: np.asarray(value) for name, value in (extras or {}).items()}
    raw, taken = tokenizer.token_bytes(), range(0, len(fields['tokens']), every)
    spread = extras.get('advantages')
    episodes = []
    for i, b in enumerate(taken):
        row = {name: value[b] for name, value in fields.items()}
        of_row = {name: value[b] for name, value in extras.items()}
        boards = list(grids[i]) if grids is not None else []
        names = action_names(int(row['level'])) if callable(action_names) else action_names
        turns = [
            _turn(row, k, names, tokenizer, boards[k] if k < len(boards) else None)
            for k in range(int(row['num_turns']))
        ]
        episodes.append(
            {
                'row': b,
                'level': int(row['level']),
                'group': b // group_size,
                'return': number(row['rewards'].sum() + row['penalties'].sum()),
                'success': bool(row['success']),
                'episode_stop': EpisodeStop(int(row['episode_stop'])).name.lower(),
                'turns': turns,
                'replies': _replies(replies[b], row) if replies else [],
                'final_grid': boards[len(turns)] if len(boards) > len(turns) else None,
                'tokens': _tokens(row, of_row, tokenizer, raw),
            }
        )
    starts = dict.fromkeys(episode['group'] * group_size for episode in episodes)
    return {
        'version': VERSION,
        'title': title,
        'env': env_name,
        'about': dict(about or {}),
        'every': every,
        'totals': totals(fields),
        'worlds': worlds(replies) if replies else None,
        'groups': [group(fields, slice(a, a + group_size), group_size, spread) for a in starts],
        'episodes': episodes,
    }


def totals(fields: Mapping[str, np.ndarray]) -> dict[str, int | float | str]:
    """`Totals` of all episodes of a rollout, given as host arrays by name."""
    healthy = fields['episode_stop'] != EpisodeStop.ENV_ERROR
    played = np.arange(fields['rewards'].shape[1]) < fields['num_turns'][:, None]
    played &= healthy[:, None]
    cut = ((fields['turn_stop'] == TurnStop.LENGTH) & played).any(1)
    out = fields['episode_stop'] == EpisodeStop.TOKEN_BUDGET
    unknown = bool((played & ~fields['judged']).any())
    returns = (fields['rewards'] + fields['penalties']).sum(1)
    solved, levels = fields['success'] & healthy, fields['level']
    counted = {'tries': healthy, 'solved': solved}
    counted = {name: np.bincount(levels, rows).astype(int) for name, rows in counted.items()}
    low, high = validation.success_interval(counted)
    return {
        'episodes': len(healthy),
        'faulty': int((~healthy).sum()),
        'solved': int(solved.sum()),
        'success_low': low,
        'success_high': high,
        'return': number(returns[healthy].mean()) if healthy.any() else 'nan',
        'turns': int(played.sum()),
        'invalid': None if unknown else int((played & ~fields['valid']).sum()),
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


def group(
    fields: Mapping[str, np.ndarray], rows: slice, group_size: int, advantages: np.ndarray | None
) -> dict[str, Any]:
    """`Group` of the members of one group; advantages: float [B, T], nan where not trained."""
    members = {name: value[rows] for name, value in fields.items()}
    healthy = members['episode_stop'] != EpisodeStop.ENV_ERROR
    returns = (members['rewards'] + members['penalties']).sum(1)[healthy]
    sampled = members['action_mask'].sum(1)[healthy]
    trained = np.zeros(0) if advantages is None else advantages[rows][members['action_mask']]
    trained = trained[np.isfinite(trained)]
    return {
        'group': rows.start // group_size,
        'level': int(members['level'][0]),
        'episodes': len(healthy),
        'faulty': int((~healthy).sum()),
        'solved': int((members['success'] & healthy).sum()),
        'return': number(returns.mean()) if returns.size else 'nan',
        'return_std': number(returns.std(ddof=1)) if returns.size > 1 else None,
        'turns': number(members['num_turns'][healthy].mean()) if returns.size else 'nan',
        'sampled': number(sampled.mean()) if returns.size else 'nan',
        'advantages': number(trained.max() - trained.min()) if trained.size else None,
    }


def _turn(
    row: Mapping[str, np.ndarray],
    k: int,
    names: Sequence[str] | None,
    tokenizer: Tokenizer,
    grid: Any,
) -> dict[str, Any]:
    part = int(row['part'][k])
    played = [int(action) for action in row['actions'][k] if action >= 0]
    if part:
        actions = []
    elif names is None:
        said = tokenizer.decode(row['tokens'][row['action_mask'] & (row['turn'] == k)])
        actions = [textwrap.shorten(said, ACTION_SHOWN, placeholder=' ...')]
    else:
        actions = [names[action] if action < len(names) else str(action) for action in played]
    return {
        **({'part': agents.PARTS[part]} if part else {}),
        **({'branch': int(row['branch'][k])} if row['branch'].any() else {}),
        **({'staleness': int(row['staleness'][k])} if row['staleness'][k] else {}),
        'index': k,
        'stop': TurnStop(int(row['turn_stop'][k])).name.lower(),
        'valid': bool(row['valid'][k]) if row['judged'][k] else None,
        'reward': number(row['rewards'][k]),
        'penalty': number(row['penalties'][k]),
        'actions': actions,
        'grid': grid,
    }


def _replies(
    lines: Sequence[Mapping[str, Any]], row: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    last = {line['turn']: line for line in lines}  # which the prompt shows: of a further trial
    begun = np.flatnonzero(row['begin'])  # a prompt begins after the prefix
    replies = []
    for line in lines:
        shown = line is last[line['turn']] and line['turn'] in begun
        text = '' if shown else line['observation']
        if (left := len(text) - REPLY_SHOWN) > 0:
            text = f'{text[:REPLY_SHOWN]} [... {left} more characters]'
        replies.append({name: line[name] for name in ('turn', 'seconds', 'tries', 'fault')})
        replies[-1]['text'] = text
    return replies


def number(value: Any) -> float | str:
    """A float32 as JSON; nan and inf become strings."""
    return run_log.plain(run_log.plain_number(np.float32(value)))


def _tokens(
    row: Mapping[str, np.ndarray],
    extras: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    raw: Sequence[bytes],
) -> list[dict[str, Any]]:
    figures = {'lp': row['logprobs'], 'ratio': extras.get('ratio'), 'adv': extras.get('advantages')}
    real = np.flatnonzero(row['attention_mask'])
    sampled = row['action_mask'][real]
    texts = _spellings([int(i) for i in row['tokens'][real]], sampled, tokenizer, raw)
    return [
        {'s': text, 'turn': int(row['turn'][t]), 'k': 'a' if acted else 'p'}
        | {x: number(of[t]) if acted and of is not None else None for x, of in figures.items()}
        for text, t, acted in zip(texts, real, sampled, strict=True)
    ]


def _spellings(
    ids: Sequence[int], sampled: Sequence[bool], tokenizer: Tokenizer, raw: Sequence[bytes]
) -> list[str]:
    """Text of each token, broken UTF-8 as \\xNN; special tokens by their names.

    A sampled token is shown by itself. In prompts a character whose bytes are spread over several
    tokens is shown with the last of them.
    """
    raw = [*raw, *[b''] * (max(ids, default=0) + 1 - len(raw))]  # rows of the model without a token
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
    """Writes the JSON document; the file is whole or not there."""
    check(document)
    text = json.dumps(document, allow_nan=False, separators=(',', ':')) + '\n'
    files.write_atomic(path, text)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """The document of a file; a ValueError names the file and what is wrong with it."""
    found = files.read_json(path)
    try:
        check(found)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error
    return found


def find(source: str | os.PathLike) -> Path:
    """The file itself, or the last *.json by name under <workdir>/rollouts."""
    source = Path(source)
    if source.is_dir():
        found = sorted((source / 'rollouts').glob('*.json'))
        if not found:
            raise FileNotFoundError(f'{source / "rollouts"} holds no rollouts (*.json)')
        return found[-1]
    if source.suffix != '.json' or not source.exists():
        raise FileNotFoundError(f'{source} is neither a run directory nor a rollout document')
    return source
