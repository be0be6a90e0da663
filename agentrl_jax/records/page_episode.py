"""An episode of a rollout document as HTML: turns, worlds, and tokens coloured by their numbers."""

import bisect
import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl_jax.envs.hosts.world import UNSEEN, spelled

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
CHIPS = {  # of a turn, by whether it is valid; None: its world does not say
    True: '<span class="chip good">valid</span>',
    False: '<span class="chip bad">invalid answer</span>',
    None: '',
}
FLAGS = ('success', 'invalid', 'truncated', 'faulty')  # what the filters look at
Episode = Mapping[str, Any]


# ---- text --------------------------------------------------------------------------------------


def escape_attribute(text: Any) -> str:
    """Text that is safe inside an attribute; unseen characters as \\uNNNN."""
    return UNSEEN.sub(lambda found: spelled(found[0]), html.escape(str(text)))


def escape(text: Any) -> str:
    """Text that is safe between tags; unseen characters stand out."""
    escaped = html.escape(str(text))
    return UNSEEN.sub(lambda found: f'<b class="esc">{spelled(found[0])}</b>', escaped)


def to_float(value: Any) -> float:
    return math.nan if value is None else float(value)


def many(count: int, noun: str) -> str:
    return f'{count} {noun}{"s" * (count != 1)}'


# ---- an episode --------------------------------------------------------------------------------


def flags_of(episode: Episode) -> dict[str, bool]:
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


def filter_data(flags: Mapping[str, bool]) -> str:
    return ' '.join(f'data-{name}="{int(flags[name])}"' for name in FLAGS)


def draw_episode(episode: Episode, order: str, largest: float, *, common: int, opened: bool) -> str:
    """common: so many tokens are shown above, at the group."""
    flags = flags_of(episode)
    advantages = [to_float(t['adv']) for t in episode['tokens'] if t['adv'] is not None]
    trained = not advantages or not all(map(math.isnan, advantages))  # all nan: no part of it
    outcome = ('good', 'solved') if flags['success'] else ('bad', 'failed')
    sampled = sum(token['k'] == 'a' for token in episode['tokens'])
    summary = [
        f'<b>#{episode["row"]}</b>',
        f'<span class="chip {outcome[0]}">{outcome[1]}</span>',
        f'<span>return {to_float(episode["return"]):.4g}</span>',
        f'<span>{many(len(episode["turns"]), "turn")}</span>',
        f'<span>{many(sampled, "token")}</span>',
        *([] if common else [f'<span>level {episode["level"]}</span>']),
        f'<span>ended: {escape(episode["episode_stop"]).replace("_", " ")}</span>',
        *_waited(episode['replies']),
        *[f'<span class="chip bad">{name}</span>' for name in FLAGS[1:] if flags[name]],
        *([] if trained else ['<span class="chip">not trained on</span>']),
    ]
    turns = {turn['index']: turn for turn in episode['turns']}
    replies: dict[int, list] = {}
    for reply in episode['replies']:
        replies.setdefault(reply['turn'], []).append(reply)
    tokens: dict[int, list] = {index: [] for index in turns}
    for position, token in enumerate(episode['tokens']):
        run = tokens.setdefault(token['turn'], [])
        if position >= common:
            run.append((position, token))
    body = [
        _turn_section(
            index,
            turns[index] if index in turns else None,
            tokens[index],
            replies[index][-1] if index in replies else None,
            _unseen(index, replies, tokens),
            largest,
            trained,
        )
        for index in sorted(tokens)
    ]
    if episode['final_grid']:
        final = draw_board(episode['final_grid'])
        body.append(f'<section class="turn">{final}<p class="chat end">the world at the end</p>')
        body.append('</section>')
    state = ' open' if opened else ''
    # The target of a link stands inside: browsers open what hides it.
    return (
        f'<details class="episode item rank" style="{order}" {filter_data(flags)}{state}>'
        f'<summary>{"".join(summary)}</summary>\n'
        f'<div class="body" id="e{episode["row"]}">{"".join(body)}</div></details>'
    )


def _waited(replies: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the worlds of an episode took, for its head; nothing of worlds on the device."""
    replies = list(replies)
    retries = sum(reply['tries'] - 1 for reply in replies)
    seconds = f'<span>world {sum(to_float(reply["seconds"]) for reply in replies):.3g} s</span>'
    again = f'<span class="chip bad">asked again {many(retries, "time")}</span>'
    return [*([seconds] if replies else []), *([again] if retries > 0 else [])]


def _unseen(
    index: int, replies: Mapping[int, Sequence[Mapping[str, Any]]], shown: Iterable[int]
) -> list[Mapping[str, Any]]:
    """Replies for the end of a turn's section: those that no prompt of a turn `shown` has.

    Of two that open one turn the first ended a trial, and the prompt shows the second.
    """
    first = replies[0] if index == 0 and 0 in replies else []
    last = replies[index + 1] if index + 1 in replies else []
    last = last[:-1] if index + 1 in shown else last
    return [*(reply for reply in first if reply['fault'] or reply['text']), *last]


def _took(reply: Mapping[str, Any]) -> str:
    """Seconds of a reply of a world on a host, and how often it was asked for."""
    again = f', <span class="bad">{reply["tries"]} tries</span>' if reply['tries'] > 1 else ''
    return f'{to_float(reply["seconds"]):.3g} s{again}'


def _last_words(replies: Iterable[Mapping[str, Any]]) -> str:
    """Cards of what a world said that no prompt shows: its end, or why it failed."""
    names = {'fault': 'fault of the world', 'world': 'world, its end'}
    cards = []
    for reply in replies:
        css = 'fault' if reply['fault'] else 'world'
        cards.append(
            f'<div class="msg prompt {css}"><div class="who">{names[css]}, {_took(reply)}</div>'
            f'<pre>{escape(reply["fault"] or reply["text"])}</pre></div>'
        )
    return ''.join(cards)


def _turn_section(
    index: int,
    turn: Mapping[str, Any] | None,
    tokens: list,
    reply: Mapping[str, Any] | None,
    unseen: Sequence[Mapping[str, Any]],
    largest: float,
    trained: bool,
) -> str:
    """reply: of a world on a host, that opened the turn; unseen: those that no prompt shows."""
    part = turn['part'] if turn is not None and 'part' in turn else ''
    if turn is None:
        header, board = '<span class="chip">never answered</span>', ''
    else:
        valid = CHIPS[turn['valid']]
        if any(one['fault'] for one in unseen):
            valid = '<span class="chip bad">faulty world</span>'
        actions = ', '.join(escape(action) for action in turn['actions']) or 'none'
        penalty = to_float(turn['penalty'])
        header = (
            valid
            + (f'<span class="chip">{escape(part)}</span>' if part else '')
            + ('' if reply or part else f'<span class="chip">actions: {actions}</span>')
            + f'<span class="chip">reward {to_float(turn["reward"]):.4g}</span>'
            + (f'<span class="chip bad">penalty {penalty:.4g}</span>' if penalty else '')
            + f'<span class="chip">stop: {escape(turn["stop"])}</span>'
            + (f'<span class="chip">began in {_took(reply)}</span>' if reply and not index else '')
        )
        board = draw_board(turn['grid'])
    runs = itertools.groupby(tokens, key=lambda entry: entry[1]['k'] == 'a')
    chat = ''.join(
        _answer(list(run), largest, trained, part)
        if sampled
        else draw_prompt(list(run), folded=bool(board), reply=reply if index else None)
        for sampled, run in runs
    )
    chat += _last_words(unseen)
    return (
        f'<section class="turn"><header><h3>Turn {index + 1}</h3>{header}</header>'
        f'{board}<div class="chat">{chat}</div></section>\n'
    )


def _answer(run: list, largest: float, trained: bool, part: str) -> str:
    """A card of sampled tokens, each coloured; folded where it is a plan or a reflection (part)."""
    tokens = ''.join(_token(position, token, largest, trained) for position, token in run)
    who = f'policy, {many(len(run), "token")}'
    if part:
        head = f'<summary class="who">{escape(part)} of the {who}</summary>'
        return f'<details class="msg answer">{head}<pre>{tokens}</pre></details>'
    return f'<div class="msg answer"><div class="who">{who}</div><pre>{tokens}</pre></div>'


def draw_prompt(run: list, folded: bool, reply: Mapping[str, Any] | None = None) -> str:
    """A card of tokens that the policy only read; reply: of a world on a host, that they show."""
    texts = [token['s'] for _, token in run]
    body = ''.join(
        f'<b class="special">{escape(text)}</b>' if text in SPECIALS else escape(text)
        for text in texts
    )
    who = f'{"prompt" if reply is None else "world"}, {many(len(run), "token")}'
    who += '' if reply is None else f', {_took(reply)}'
    long = sum(map(len, texts)) > (LONG_PROMPT if reply is None else LONG_REPLY)
    opened = '' if folded or long else ' open'
    css = 'msg prompt' if reply is None else 'msg prompt world'
    return (
        f'<details class="{css}"{opened}><summary class="who">{who}</summary>'
        f'<pre>{body}</pre></details>'
    )


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
    shown = escape(token['s']).replace('\n', '<i></i>\n')
    if token['s'] in SPECIALS:
        shown = f'<b class="special">{shown}</b>'
    return f'<span class="{" ".join(classes)}" title="{"; ".join(notes)}">{shown}</span>'


def _signed(letter: str, value: float, edges: Sequence[float]) -> str:
    return f'{letter}{"n" if value < 0 else "p"}{bisect.bisect(edges, abs(value))}'


def draw_board(grid: Iterable[Sequence[str]] | None) -> str:
    """A world cell by cell; '' where there is nothing to draw."""
    rows = list(grid or ())
    columns = max(map(len, rows), default=0)
    if not columns:
        return ''
    cells = []
    for row in rows:
        for name in row:
            glyph, css = CELLS[name] if name in CELLS else (escape(name), '')
            cells.append(f'<span class="{css}" title="{escape_attribute(name)}">{glyph}</span>')
        cells += ['<span></span>'] * (columns - len(row))
    style = f'grid-template-columns: repeat({columns}, auto)'
    return f'<div class="board" style="{style}">{"".join(cells)}</div>'
