"""A page for reading rollouts: python -m agentrl_jax.view <workdir or rollouts.json>.

Training and evaluation write documents (episodes_document, write_document); the page is one HTML
file without scripts or links. Whatever the model wrote is shown, not run.
"""

import argparse
import codecs
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.machine.files import write_atomic
from agentrl_jax.records.page_html import MAX_EPISODES, VERSION, check_document, render_page
from agentrl_jax.types import EpisodeStop, Rollout, TurnStop


def episodes_document(
    rollout: Rollout,
    tokenizer: Any,
    env_name: str,
    action_names: Sequence[str],
    grids: Sequence[Sequence[Any]] | None = None,
    extras: Mapping[str, np.ndarray] | None = None,
    *,
    group_size: int = 1,
    title: str = '',
    limit: int = MAX_EPISODES,
) -> dict[str, Any]:
    """The first `limit` episodes of a rollout as a JSON document (fields: *_FIELDS in view_page).

    grids[b][k]: rows of cell names before turn k's answer, or None; one entry more than turns is
    the world after the last turn. extras: 'ratio' and 'advantages', [B, T].
    """
    fields = {f.name: np.asarray(getattr(rollout, f.name)) for f in dataclasses.fields(rollout)}
    extras = {name: np.asarray(value) for name, value in (extras or {}).items()}
    raw = tokenizer.token_bytes()
    count = min(limit, len(fields['tokens']))
    episodes = []
    for b in range(count):
        row = {name: value[b] for name, value in fields.items()}
        row_extras = {name: value[b] for name, value in extras.items()}
        boards = list(grids[b]) if grids is not None else []
        turns = [
            _turn(row, k, action_names, boards[k] if k < len(boards) else None)
            for k in range(int(row['num_turns']))
        ]
        episodes.append(
            {
                'level': int(row['level']),
                'group': b // group_size,
                'return': _number(row['rewards'].sum() + row['penalties'].sum()),
                'success': bool(row['success']),
                'episode_stop': EpisodeStop(int(row['episode_stop'])).name.lower(),
                'turns': turns,
                'final_grid': boards[len(turns)] if len(boards) > len(turns) else None,
                'tokens': _tokens(row, row_extras, tokenizer, raw),
            }
        )
    return {
        'version': VERSION,
        'title': title,
        'env': env_name,
        'left_out': len(fields['tokens']) - count,
        'episodes': episodes,
    }


def _turn(row: Mapping[str, np.ndarray], k: int, names: Sequence[str], grid: Any) -> dict[str, Any]:
    played = [int(action) for action in row['actions'][k] if action >= 0]
    return {
        'index': k,
        'stop': TurnStop(int(row['turn_stop'][k])).name.lower(),
        'valid': bool(row['valid'][k]),
        'reward': _number(row['rewards'][k]),
        'penalty': _number(row['penalties'][k]),
        'actions': [names[action] if action < len(names) else str(action) for action in played],
        'grid': grid,
    }


def _number(value: Any) -> float | str:
    """JSON has no nan and inf; they are worth seeing, so they become strings."""
    value = float(str(np.float32(value)))
    return value if math.isfinite(value) else str(value)


def _tokens(
    row: Mapping[str, np.ndarray],
    extras: Mapping[str, np.ndarray],
    tokenizer: Any,
    raw: Sequence[bytes],
) -> list[dict[str, Any]]:
    tokens = []
    real = np.flatnonzero(row['attention_mask'])
    sampled = row['action_mask'][real]
    texts = _texts([int(i) for i in row['tokens'][real]], sampled, tokenizer, raw)
    for text, t, acted in zip(texts, real, sampled, strict=True):
        tokens.append(
            {
                's': text,
                'turn': int(row['turn'][t]),
                'k': 'a' if acted else 'p',
                'lp': _number(row['logprobs'][t]) if acted else None,
                'ratio': _number(extras['ratio'][t]) if acted and 'ratio' in extras else None,
                'adv': _number(extras['advantages'][t])
                if acted and 'advantages' in extras
                else None,
            }
        )
    return tokens


def _texts(
    ids: Sequence[int], sampled: Sequence[bool], tokenizer: Any, raw: Sequence[bytes]
) -> list[str]:
    """Text of each token, broken UTF-8 as \\xNN; special tokens by their names.

    A sampled token stands alone. In prompts a character whose bytes are spread over several tokens
    is shown with the last of them.
    """
    texts = []
    decoder = codecs.getincrementaldecoder('utf-8')('backslashreplace')
    for n, token in enumerate(ids):
        if not raw[token]:
            texts.append(tokenizer.decode([token], show_special=True) or f'[{token}]')
            continue
        more = n + 1 < len(ids) and not sampled[n] and not sampled[n + 1] and raw[ids[n + 1]]
        texts.append(decoder.decode(raw[token], final=not more))
    return texts


def write_document(path: str | os.PathLike, document: dict[str, Any]) -> None:
    """Writes the JSON document; the file is whole or not there."""
    check_document(document)
    write_atomic(path, json.dumps(document, allow_nan=False, separators=(',', ':')) + '\n')


def write_page(
    path: str | os.PathLike, document: dict[str, Any], *, max_episodes: int = MAX_EPISODES
) -> None:
    """Writes the HTML page; the file is whole or not there."""
    write_atomic(path, render_page(document, max_episodes=max_episodes))


def find_document(source: str | os.PathLike) -> Path:
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


def main(argv: Sequence[str] | None = None) -> None:
    """Reads a document and writes its page."""
    parser = argparse.ArgumentParser(prog='python -m agentrl_jax.view', description=__doc__)
    parser.add_argument('source', help='run directory or rollouts/*.json')
    parser.add_argument('--out', help='where the page goes; default: beside the document')
    parser.add_argument('--max-episodes', type=int, default=MAX_EPISODES)
    args = parser.parse_args(argv)
    try:
        source = find_document(args.source)
        document = json.loads(source.read_text(encoding='utf-8'))
        out = Path(args.out) if args.out else source.with_suffix('.html')
        write_page(out, document, max_episodes=args.max_episodes)
    except (OSError, ValueError) as error:
        parser.exit(1, f'{parser.prog}: {error}\n')
    print(out)


if __name__ == '__main__':
    main()
