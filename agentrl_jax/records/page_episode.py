"""What page_episode.html draws of an episode: turns, worlds, tokens coloured by their numbers."""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from agentrl_jax.records.markup import escape, escape_attribute, many, to_float

LONG_PROMPT = 700  # characters; longer prompts are folded, and those drawn as a grid beside them
LONG_REPLY = 2500  # ... of a world on a host, which nothing else shows
LOGPROB_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)  # of -log p
RATIO_EDGES = (0.02, 0.1, 0.2, 0.5)  # of |log ratio|
ADVANTAGE_EDGES = (0.02, 0.25, 0.5, 0.75)  # of |advantage| / the largest on the page
COLOURS = ('red', 'green', 'blue', 'purple', 'yellow', 'grey')  # drawn as first and last letter
SIGNS = {  # of things that have one of these
    'key': '⚷',
    'ball': '●',
    'box': '□',
    'open door': '▯',
    'closed door': '▮',
    'locked door': '▣',
}
CELLS = {  # what an environment calls a cell -> (glyph, class in the style sheet)
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
Reply = Mapping[str, Any]


def flags_of(episode: Episode) -> dict[str, bool]:
    """What the filters of the page look at."""
    cut = any(turn['stop'] == 'length' for turn in episode['turns'])
    lost = {reply['turn'] - 1 for reply in episode['replies'] if reply['fault']}  # to their worlds
    return {
        'success': bool(episode['success']),
        'invalid': any(
            turn['valid'] is False for turn in episode['turns'] if turn['index'] not in lost
        ),
        'truncated': cut or episode['episode_stop'] == 'token_budget',
        'faulty': episode['episode_stop'] == 'env_error',
    }


def view(episode: Episode, order: str, largest: float, *, common: int, opened: bool) -> dict:
    """An episode as the template draws it.

    common: the number of tokens that are shown above it, at the group; largest: advantage.
    """
    advantages = [to_float(t['adv']) for t in episode['tokens'] if t['adv'] is not None]
    trained = not advantages or not all(map(math.isnan, advantages))  # all nan: no part of it
    replies: dict[int, list] = {}
    for reply in episode['replies']:
        replies.setdefault(reply['turn'], []).append(reply)
    turns = {turn['index']: turn for turn in episode['turns']}
    tokens: dict[int, list] = {index: [] for index in turns}
    for position, token in enumerate(episode['tokens']):
        run = tokens.setdefault(token['turn'], [])
        if position >= common:
            run.append((position, token))
    waited = [to_float(reply['seconds']) for reply in episode['replies']]
    return {
        'row': episode['row'],
        'order': order,
        'flags': flags_of(episode),
        'opened': opened,
        'value': episode['return'],
        'turns': len(episode['turns']),
        'sampled': sum(token['k'] == 'a' for token in episode['tokens']),
        'level': episode['level'],
        'common': bool(common),
        'stop': episode['episode_stop'],
        'seconds': sum(waited) if waited else None,
        'retries': sum(reply['tries'] - 1 for reply in episode['replies']),
        'trained': trained,
        'sections': [
            _section(index, turns.get(index), tokens, replies, largest, trained)
            for index in sorted(tokens)
        ],
        'final': draw_board(episode['final_grid']) if episode['final_grid'] else None,
    }


def _section(
    index: int,
    turn: Mapping[str, Any] | None,
    tokens: Mapping[int, list],
    replies: Mapping[int, Sequence[Reply]],
    largest: float,
    trained: bool,
) -> dict[str, Any]:
    """A turn; None: a prompt that was never answered. tokens, replies: of all turns by index."""
    reply = replies[index][-1] if index in replies else None  # that opened the turn
    board = draw_board(turn['grid']) if turn else ''
    runs = itertools.groupby(tokens[index], key=lambda entry: entry[1]['k'] == 'a')
    return {
        'index': index,
        'turn': turn,
        'part': turn['part'] if turn and 'part' in turn else '',
        'staleness': f'weights of {many(turn["staleness"], "update")} ago'
        if turn and 'staleness' in turn
        else '',
        'branch': f'conversation {turn["branch"] + 1}' if turn and 'branch' in turn else '',
        'reply': reply,
        'board': board,
        'cards': [
            _answer(list(run), largest, trained)
            if sampled
            else prompt(list(run), folded=bool(board), reply=reply if index else None)
            for sampled, run in runs
        ],
        'unseen': _unseen(index, replies, tokens),
    }


def _unseen(
    index: int, replies: Mapping[int, Sequence[Reply]], shown: Iterable[int]
) -> list[Reply]:
    """Replies for the end of a turn's section: those that no prompt of a turn `shown` has.

    Of two that open one turn the first ended a trial, and the prompt shows the second.
    """
    first = replies[0] if index == 0 and 0 in replies else []
    last = replies.get(index + 1, [])
    last = last[:-1] if index + 1 in shown else last
    return [*(reply for reply in first if reply['fault'] or reply['text']), *last]


def prompt(run: list, folded: bool, reply: Reply | None = None) -> dict[str, Any]:
    """Tokens that the policy only read; reply: of a world on a host, that they show."""
    texts = [token['s'] for _, token in run]
    long = sum(map(len, texts)) > (LONG_PROMPT if reply is None else LONG_REPLY)
    return {
        'sampled': False,
        'count': len(run),
        'text': Markup(''.join(map(_marked, texts))),
        'reply': reply,
        'opened': not folded and not long,
    }


def _answer(run: list, largest: float, trained: bool) -> dict[str, Any]:
    """Tokens that were sampled, each coloured."""
    tokens = ''.join(_token(*entry, largest, trained) for entry in run)
    return {'sampled': True, 'count': len(run), 'text': Markup(tokens)}


def _marked(text: str) -> str:
    return f'<b class="special">{escape(text)}</b>' if text in SPECIALS else escape(text)


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
    given = [token[field] for field in fields if token[field] is not None]
    if not all(math.isfinite(float(value)) for value in given):
        classes.append('odd')
    shown = str(_marked(token['s'])).replace('\n', '<i></i>\n')
    return f'<span class="{" ".join(classes)}" title="{"; ".join(notes)}">{shown}</span>'


def _signed(letter: str, value: float, edges: Sequence[float]) -> str:
    return f'{letter}{"n" if value < 0 else "p"}{bisect.bisect(edges, abs(value))}'


def draw_board(grid: Iterable[Sequence[str]] | None) -> Markup:
    """A world cell by cell; '' where there is nothing to draw."""
    rows = list(grid or ())
    columns = max(map(len, rows), default=0)
    if not columns:
        return Markup('')
    cells = []
    for row in rows:
        for name in row:
            glyph, css = CELLS[name] if name in CELLS else (escape(name), '')
            cells.append(f'<span class="{css}" title="{escape_attribute(name)}">{glyph}</span>')
        cells += ['<span></span>'] * (columns - len(row))
    style = f'grid-template-columns: repeat({columns}, auto)'
    return Markup(f'<div class="board" style="{style}">{"".join(cells)}</div>')
