"""Episodes of a rollout page: turns, boards, and tokens coloured by their numbers."""

import bisect
import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from agentrl_jax.records.markup import escape, to_float

LONG_PROMPT = 700  # characters; longer prompts and prompts with a board are folded
LONG_REPLY = 2500  # characters; longer replies of environments on hosts are folded
LOGPROB_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)  # of -log p
RATIO_EDGES = (0.02, 0.1, 0.2, 0.5)  # of |log ratio|
ADVANTAGE_EDGES = (0.02, 0.25, 0.5, 0.75)  # of |advantage| / the largest on the page
COLOURS = ('red', 'green', 'blue', 'purple', 'yellow', 'grey')  # drawn as first and last letter
SIGNS = {  # of coloured objects
    'key': '⚷',
    'ball': '●',
    'box': '□',
    'open door': '▯',
    'closed door': '▮',
    'locked door': '▣',
}
CELLS = {  # name of a cell -> (glyph, CSS class)
    'wall': ('', 'wall'),
    'empty': ('', 'floor'),
    'target': ('○', 'target'),
    'box': ('■', 'box'),
    'box on target': ('■', 'boxed'),
    'player': ('☻', 'player'),
    'player on target': ('☻', 'target'),
    'hole': ('●', 'hole'),
    'goal': ('★', 'goal'),
    'player in hole': ('☻', 'lost'),
    'player on goal': ('☻', 'won'),
    'agent facing right': ('▶', 'player'),
    'agent facing down': ('▼', 'player'),
    'agent facing left': ('◀', 'player'),
    'agent facing up': ('▲', 'player'),
    **{f'{c} {kind}': (f'{s}{c[0]}{c[-1]}', 'floor') for c in COLOURS for kind, s in SIGNS.items()},
}
SPECIALS = ('<|im_start|>', '<|im_end|>', '<|endoftext|>')
SPECIALS += ('<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>', '<|begin_of_text|>')
Episode = Mapping[str, Any]


def flags_of(episode: Episode) -> dict[str, bool]:
    """Outcomes for the filters of the page."""
    faulty = {reply['turn'] - 1 for reply in episode['replies'] if reply['fault']}
    turns = episode['turns']
    cut = any(turn['stop'] == 'length' for turn in turns)
    return {
        'success': bool(episode['success']),
        'invalid': any(turn['valid'] is False for turn in turns if turn['index'] not in faulty),
        'truncated': cut or episode['episode_stop'] == 'token_budget',
        'faulty': episode['episode_stop'] == 'env_error',
    }


def view(episode: Episode, largest: float, *, common: int, opened: bool) -> dict[str, Any]:
    """Return an episode of a document with the values that the template needs.

    largest: the largest advantage on the page; common: number of tokens displayed by the group.
    """
    advantages = [to_float(t['adv']) for t in episode['tokens'] if t['adv'] is not None]
    trained = not advantages or not all(map(math.isnan, advantages))
    replies: dict[int, list] = collections.defaultdict(list)
    for reply in episode['replies']:
        replies[reply['turn']].append(reply)
    turns = {turn['index']: turn for turn in episode['turns']}
    tokens: dict[int, list] = {index: [] for index in turns}
    for position, token in enumerate(episode['tokens']):
        entries = tokens.setdefault(token['turn'], [])
        if position >= common:
            entries.append((position, token))
    sections = []
    for index in sorted(tokens):
        turn = turns.get(index)
        reply = replies[index][-1] if replies[index] else None  # opened the turn
        board = draw_board(turn and turn['grid'])
        # Replies that are not in a prompt. If two open a turn, the first ended a trial.
        first = [r for r in replies[0] if r['fault'] or r['text']] if index == 0 else []
        last = replies[index + 1][:-1] if index + 1 in tokens else replies[index + 1]
        cards = [
            _answer(list(run), largest, trained)
            if sampled
            else prompt(list(run), folded=bool(board), reply=reply if index else None)
            for sampled, run in itertools.groupby(tokens[index], lambda x: x[1]['k'] == 'a')
        ]
        sections.append(
            {
                'index': index,
                'turn': turn,  # None: a prompt without an answer
                'reply': reply,
                'board': board,
                'cards': cards,
                'unseen': first + last,
            }
        )
    waited = [to_float(reply['seconds']) for reply in episode['replies']]
    return {
        **episode,
        'flags': flags_of(episode),
        'opened': opened,
        'sampled': sum(token['k'] == 'a' for token in episode['tokens']),
        'common': bool(common),
        'seconds': sum(waited) if waited else None,
        'retries': sum(reply['tries'] - 1 for reply in episode['replies']),
        'trained': trained,
        'sections': sections,
        'final': draw_board(episode['final_grid']),
    }


def prompt(
    run: Sequence[tuple[int, Mapping[str, Any]]],
    folded: bool = False,
    reply: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Card of tokens that the policy read; reply: the host environment's reply in them, if any."""
    texts = [token['s'] for _, token in run]
    long = sum(map(len, texts)) > (LONG_PROMPT if reply is None else LONG_REPLY)
    return {
        'sampled': False,
        'count': len(run),
        'text': Markup().join(map(_marked, texts)),
        'reply': reply,
        'opened': not folded and not long,
    }


def _answer(
    run: Sequence[tuple[int, Mapping[str, Any]]], largest: float, trained: bool
) -> dict[str, Any]:
    """Card of sampled tokens, each coloured."""
    text = Markup(''.join(_token(*entry, largest, trained) for entry in run))
    return {'sampled': True, 'count': len(run), 'text': text}


def _marked(text: str) -> Markup:
    escaped = escape(text)
    return Markup(f'<b class="special">{escaped}</b>') if text in SPECIALS else escaped


def _token(position: int, token: Mapping[str, Any], largest: float, trained: bool) -> str:
    logprob, ratio, advantage = (to_float(token[field]) for field in ('lp', 'ratio', 'adv'))
    notes, classes = [f'token {position}'], ['t']
    if token['lp'] is not None:
        notes.append(f'log p {logprob:.4g} (p {math.exp(min(logprob, 0.0)):.3g})')
        classes.append(f'l{bisect.bisect(LOGPROB_EDGES, -logprob)}')
    if token['ratio'] is not None:
        notes.append(f'ratio {ratio:.4g}')
        classes.append(_signed('r', math.log(ratio) if ratio > 0 else -math.inf, RATIO_EDGES))
    if not trained:
        notes.append('not trained on')
        classes.append('un')
    elif token['adv'] is not None:
        notes.append(f'advantage {advantage:+.4g}')
        classes.append(_signed('a', advantage / largest if largest else 0.0, ADVANTAGE_EDGES))
    fields = ('lp', 'ratio', 'adv') if trained else ('lp', 'ratio')
    values = [token[field] for field in fields if token[field] is not None]
    if not all(math.isfinite(float(value)) for value in values):
        classes.append('odd')
    text = str(_marked(token['s'])).replace('\n', '<i></i>\n')
    return f'<span class="{" ".join(classes)}" title="{"; ".join(notes)}">{text}</span>'


def _signed(letter: str, value: float, edges: Sequence[float]) -> str:
    return f'{letter}{"n" if value < 0 else "p"}{bisect.bisect(edges, abs(value))}'


def draw_board(grid: Iterable[Sequence[str]] | None) -> Markup:
    """Draw a board cell by cell; '' without cells."""
    rows = list(grid or ())
    columns = max(map(len, rows), default=0)
    if not columns:
        return Markup('')
    cells = []
    for row in rows:
        for name in row:
            glyph, css = CELLS[name] if name in CELLS else (escape(name), '')
            cells.append(f'<span class="{css}" title="{escape(name)}">{glyph}</span>')
        cells += ['<span></span>'] * (columns - len(row))
    style = f'grid-template-columns: repeat({columns}, auto)'
    return Markup(f'<div class="board" style="{style}">{"".join(cells)}</div>')
