"""A rollout document as one HTML page: page_template.html filled with escaped text."""

import bisect
import html
import importlib.resources
import itertools
import math
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_jax.measure.stats import wilson_interval

VERSION = 1
MAX_EPISODES = 64
MAX_TOKENS = 200_000  # about 25 MB of page
LONG_PROMPT = 700  # characters; longer prompts are folded, and those drawn as a grid beside them
EPISODE_FIELDS = ('level', 'group', 'return', 'success', 'episode_stop', 'turns', 'tokens')
TURN_FIELDS = ('index', 'stop', 'valid', 'reward', 'penalty', 'actions', 'grid')
TOKEN_FIELDS = ('s', 'turn', 'k', 'lp', 'ratio', 'adv')
HEATS = {'logprob': 'lp', 'ratio': 'ratio', 'advantage': 'adv', 'mask': None}
LOGPROB_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)  # of -log p
RATIO_EDGES = (0.02, 0.1, 0.2, 0.5)  # of |log ratio|
ADVANTAGE_EDGES = (0.02, 0.25, 0.5, 0.75)  # of |advantage| / the largest on the page
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
}
SPECIALS = ('<|im_start|>', '<|im_end|>', '<|endoftext|>')
# Characters that do not show, reorder text or cannot be encoded; tab and newline stay.
UNSEEN = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff'
    '\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]'
)


def check_document(document: Any) -> None:
    """ValueError naming what is wrong with a document."""
    if not isinstance(document, dict) or 'version' not in document:
        raise ValueError('not a rollout document: the field version is missing')
    if document['version'] != VERSION:
        raise ValueError(f'rollout document version {document["version"]!r}; known: {VERSION}')
    _check_fields(document, ('title', 'env', 'episodes'), 'the document')
    for number, episode in enumerate(document['episodes']):
        where = f'episode {number}'
        _check_fields(episode, EPISODE_FIELDS, where)
        for turn in episode['turns']:
            _check_fields(turn, TURN_FIELDS, f'a turn of {where}')
        for token in episode['tokens']:
            _check_fields(token, TOKEN_FIELDS, f'a token of {where}')


def _check_fields(entry: Any, fields: Sequence[str], where: str) -> None:
    missing = [name for name in fields if not isinstance(entry, dict) or name not in entry]
    if missing:
        raise ValueError(f'rollout document: {where} lacks {", ".join(missing)}')


def render_page(document: dict[str, Any], *, max_episodes: int = MAX_EPISODES) -> str:
    """The document as one HTML page; episodes beyond max_episodes or MAX_TOKENS are counted."""
    check_document(document)
    every = document['episodes']
    ends = np.cumsum([len(episode['tokens']) for episode in every])
    count = max(1, min(max_episodes, int(np.searchsorted(ends, MAX_TOKENS, side='right'))))
    episodes = every[:count]
    left_out = int(document['left_out'] if 'left_out' in document else 0) + len(every[count:])
    known = {
        heat: field is None or any(t[field] is not None for e in episodes for t in e['tokens'])
        for heat, field in HEATS.items()
    }
    advantages = [abs(_float(token['adv'])) for e in episodes for token in e['tokens']]
    largest = max((a for a in advantages if math.isfinite(a)), default=0.0)
    subtitle = f'{_text(document["env"])}, {len(episodes)} episodes'
    if left_out:
        subtitle += f'; {left_out} more are left out of this page'
    template = importlib.resources.files('agentrl_jax.records').joinpath('page_template.html')
    return string.Template(template.read_text(encoding='utf-8')).substitute(
        title=_plain(document['title'] or document['env']),  # no elements inside <title>
        heading=_text(document['title'] or document['env']),
        subtitle=subtitle,
        tiles=_tiles(episodes),
        heat_choices=_heat_choices(known),
        scales=_scales(largest),
        episodes='\n'.join(_episode(n, e, largest) for n, e in enumerate(episodes)),
        count=len(episodes),
    )


def _plain(text: Any) -> str:
    """Text that is safe inside an attribute; unseen characters as \\uNNNN."""
    return UNSEEN.sub(lambda found: _spelled(found[0]), html.escape(str(text)))


def _text(text: Any) -> str:
    """Text that is safe between tags; unseen characters stand out."""
    escaped = html.escape(str(text))
    return UNSEEN.sub(lambda found: f'<b class="esc">{_spelled(found[0])}</b>', escaped)


def _spelled(character: str) -> str:
    return ascii(character)[1:-1]


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _flags(episode: Mapping[str, Any]) -> dict[str, bool]:
    cut = any(turn['stop'] == 'length' for turn in episode['turns'])
    return {
        'success': bool(episode['success']),
        'invalid': any(not turn['valid'] for turn in episode['turns']),
        'truncated': cut or episode['episode_stop'] == 'token_budget',
        'faulty': episode['episode_stop'] == 'env_error',
    }


def _tiles(episodes: Sequence[Mapping[str, Any]]) -> str:
    """Figures of the episodes on the page; faulty ones only in their own count."""
    flags = [_flags(episode) for episode in episodes]
    healthy = [e for e, flag in zip(episodes, flags, strict=True) if not flag['faulty']]
    turns = [turn for episode in healthy for turn in episode['turns']]
    solved, n = sum(bool(episode['success']) for episode in healthy), len(healthy)
    low, high = wilson_interval(solved, n)
    tiles = {
        'solved': f'{solved} of {n} <small>95 % interval {low:.0%} to {high:.0%}</small>',
        'mean return': f'{sum(_float(e["return"]) for e in healthy) / max(n, 1):.3g}',
        'mean turns': f'{len(turns) / max(n, 1):.3g}',
        'invalid answers': f'{sum(not t["valid"] for t in turns)} of {len(turns)} turns',
        'truncated episodes': f'{sum(flag["truncated"] for flag in flags)}',
        'faulty worlds': f'{sum(flag["faulty"] for flag in flags)}',
    }
    return ''.join(f'<div><dt>{k}</dt><dd>{v}</dd></div>' for k, v in tiles.items())


def _heat_choices(known: Mapping[str, bool]) -> str:
    first = next(heat for heat in HEATS if known[heat])
    labels = {'logprob': 'log-probability', 'mask': 'mask (trained)'}
    choices = []
    for heat, present in known.items():
        state = ' checked' if heat == first else '' if present else ' disabled'
        label = labels[heat] if heat in labels else heat
        label += '' if present else ' (not recorded)'
        choices.append(
            f'<label><input type="radio" name="heat" id="heat-{heat}"{state}> {label}</label>'
        )
    return '\n'.join(choices)


def _scales(largest: float) -> str:
    """One legend per heat-map, made of the classes that colour the tokens."""
    probabilities = [f'{math.exp(-edge):.2g}' for edge in LOGPROB_EDGES]
    swatches = [f'p > {probabilities[0]}', *[f'≤ {p}' for p in probabilities]]
    scales = {'logprob': [(f'l{n}', label) for n, label in enumerate(swatches)]}
    for heat, letter, labels in (
        ('ratio', 'r', [(math.exp(-edge), math.exp(edge)) for edge in RATIO_EDGES]),
        ('advantage', 'a', [(-edge * largest, edge * largest) for edge in ADVANTAGE_EDGES]),
    ):
        below = [(f'{letter}n{n}', f'&lt; {low:.3g}') for n, (low, _) in enumerate(labels, 1)]
        above = [(f'{letter}p{n}', f'&gt; {high:.3g}') for n, (_, high) in enumerate(labels, 1)]
        middle = (f'{letter}p0', '1' if heat == 'ratio' else '0')
        scales[heat] = [*reversed(below), middle, *above]
    scales['mask'] = [('', 'sampled by the policy: trained')]
    lines = []
    for heat, swatches in scales.items():
        shown = ' '.join(f'<span class="t {css}">{label}</span>' for css, label in swatches)
        lines.append(f'<span class="scale scale-{heat}">{shown}</span>')
    return '\n'.join(lines)


def _episode(number: int, episode: Mapping[str, Any], largest: float) -> str:
    flags = _flags(episode)
    data = ' '.join(f'data-{name}="{int(flag)}"' for name, flag in flags.items())
    outcome = ('good', 'solved') if flags['success'] else ('bad', 'failed')
    warnings = [name for name in ('invalid', 'truncated', 'faulty') if flags[name]]
    summary = [
        f'<b>#{number}</b>',
        f'<span class="chip {outcome[0]}">{outcome[1]}</span>',
        f'<span>return {_float(episode["return"]):.4g}</span>',
        f'<span>{len(episode["turns"])} turn{"s" * (len(episode["turns"]) != 1)}</span>',
        f'<span>level {int(episode["level"])}</span>',
        f'<span>group {int(episode["group"])}</span>',
        f'<span>ended: {_text(episode["episode_stop"]).replace("_", " ")}</span>',
        *[f'<span class="chip bad">{name}</span>' for name in warnings],
    ]
    turns = {int(turn['index']): turn for turn in episode['turns']}
    tokens: dict[int, list] = {index: [] for index in turns}
    for position, token in enumerate(episode['tokens']):
        tokens.setdefault(int(token['turn']), []).append((position, token))
    body = [
        _turn_section(index, turns[index] if index in turns else None, tokens[index], largest)
        for index in sorted(tokens)
    ]
    if episode.get('final_grid'):
        final = _board(episode['final_grid'])
        body.append(f'<section class="turn">{final}<p class="chat end">the world at the end</p>')
        body.append('</section>')
    opened = ' open' if number == 0 else ''
    return (
        f'<details class="episode" id="e{number}" {data}{opened}>'
        f'<summary>{"".join(summary)}</summary>\n{"".join(body)}</details>'
    )


def _turn_section(index: int, turn: Mapping[str, Any] | None, tokens: list, largest: float) -> str:
    if turn is None:
        header, board = '<span class="chip">never answered</span>', ''
    else:
        valid = ('good', 'valid') if turn['valid'] else ('bad', 'invalid answer')
        actions = ', '.join(_text(action) for action in turn['actions']) or 'none'
        penalty = _float(turn['penalty'])
        header = (
            f'<span class="chip {valid[0]}">{valid[1]}</span>'
            f'<span class="chip">actions: {actions}</span>'
            f'<span class="chip">reward {_float(turn["reward"]):.4g}</span>'
            + (f'<span class="chip bad">penalty {penalty:.4g}</span>' if penalty else '')
            + f'<span class="chip">stop: {_text(turn["stop"])}</span>'
        )
        board = _board(turn['grid']) if turn['grid'] else ''
    runs = itertools.groupby(tokens, key=lambda entry: entry[1]['k'] == 'a')
    chat = ''.join(
        _answer(list(run), largest) if sampled else _prompt(list(run), folded=bool(board))
        for sampled, run in runs
    )
    return (
        f'<section class="turn"><header><h3>Turn {index + 1}</h3>{header}</header>'
        f'{board}<div class="chat">{chat}</div></section>\n'
    )


def _answer(run: list, largest: float) -> str:
    """A card of sampled tokens, each coloured."""
    tokens = ''.join(_token(position, token, largest) for position, token in run)
    who = f'policy, {len(run)} tokens'
    return f'<div class="msg answer"><div class="who">{who}</div><pre>{tokens}</pre></div>'


def _prompt(run: list, folded: bool) -> str:
    """A card of tokens that the policy only read."""
    texts = [str(token['s']) for _, token in run]
    body = ''.join(
        f'<b class="special">{_text(text)}</b>' if text in SPECIALS else _text(text)
        for text in texts
    )
    who = f'prompt, {len(run)} tokens'
    opened = '' if folded or sum(map(len, texts)) > LONG_PROMPT else ' open'
    return (
        f'<details class="msg prompt"{opened}><summary class="who">{who}</summary>'
        f'<pre>{body}</pre></details>'
    )


def _token(position: int, token: Mapping[str, Any], largest: float) -> str:
    logprob, ratio, advantage = (_float(token[field]) for field in ('lp', 'ratio', 'adv'))
    notes, classes = [f'token {position}'], ['t']
    if token['lp'] is not None:
        notes.append(f'log p {logprob:.4g} (p {math.exp(min(logprob, 0.0)):.3g})')
        classes.append(f'l{bisect.bisect(LOGPROB_EDGES, -logprob)}')
    if token['ratio'] is not None:
        notes.append(f'ratio {ratio:.4g}')
        classes.append(_signed('r', math.log(ratio) if ratio > 0 else -math.inf, RATIO_EDGES))
    if token['adv'] is not None:
        notes.append(f'advantage {advantage:+.4g}')
        classes.append(_signed('a', advantage / largest if largest else 0.0, ADVANTAGE_EDGES))
    given = [token[field] for field in ('lp', 'ratio', 'adv') if token[field] is not None]
    if not all(math.isfinite(float(value)) for value in given):
        classes.append('odd')
    text = str(token['s'])
    shown = _text(text).replace('\n', '<i></i>\n')
    if text in SPECIALS:
        shown = f'<b class="special">{shown}</b>'
    return f'<span class="{" ".join(classes)}" title="{"; ".join(notes)}">{shown}</span>'


def _signed(letter: str, value: float, edges: Sequence[float]) -> str:
    return f'{letter}{"n" if value < 0 else "p"}{bisect.bisect(edges, abs(value))}'


def _board(grid: Sequence[Sequence[Any]]) -> str:
    columns = max(len(row) for row in grid)
    cells = []
    for row in grid:
        for name in map(str, row):
            glyph, css = CELLS[name] if name in CELLS else (_text(name), '')
            cells.append(f'<span class="{css}" title="{_plain(name)}">{glyph}</span>')
        cells += ['<span></span>'] * (columns - len(row))
    style = f'grid-template-columns: repeat({columns}, auto)'
    return f'<div class="board" style="{style}">{"".join(cells)}</div>'
