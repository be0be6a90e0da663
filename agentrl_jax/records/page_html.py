"""A rollout document as one HTML page: page_template.html filled with escaped text."""

import importlib.resources
import itertools
import math
import re
import string
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.machine import files
from agentrl_jax.measure.stats import wilson_interval
from agentrl_jax.records import document as documents
from agentrl_jax.records.page_episode import (
    ADVANTAGE_EDGES,
    LOGPROB_EDGES,
    RATIO_EDGES,
    draw_board,
    draw_episode,
    draw_prompt,
    escape,
    escape_attribute,
    filter_data,
    flags_of,
    many,
    to_float,
)

MAX_EPISODES = 64
MAX_TOKENS = 200_000  # about 25 MB of page
HEATS = {'logprob': 'lp', 'ratio': 'ratio', 'advantage': 'adv', 'mask': None}
SORTS = {  # what groups, and the episodes of each, are sorted by: letter -> label
    'n': 'as played',
    's': 'success',
    'r': 'return',
    'l': 'length',
    'a': 'advantage',
}
# No other file is linked to: no name can be an address or an attribute of its own.
PAGE_NAME = re.compile(r'([A-Za-z][\w.=,+-]*?)(\d*)\.html', re.ASCII)
Episode = Mapping[str, Any]


def render_page(
    document: dict[str, Any],
    *,
    max_episodes: int = MAX_EPISODES,
    links: Mapping[str, str] | None = None,
) -> str:
    """The document as one HTML page; episodes beyond max_episodes or MAX_TOKENS are counted.

    links: label -> name of a file beside the page.
    """
    documents.check(document)
    every = document['episodes']
    ends = np.cumsum([len(episode['tokens']) for episode in every])
    count = max(1, min(max_episodes, int(np.searchsorted(ends, MAX_TOKENS, side='right'))))
    episodes = every[:count]
    known = {
        heat: field is None or any(t[field] is not None for e in episodes for t in e['tokens'])
        for heat, field in HEATS.items()
    }
    advantages = [abs(to_float(token['adv'])) for e in episodes for token in e['tokens']]
    largest = max((a for a in advantages if math.isfinite(a)), default=0.0)
    groups = _groups(document, episodes)
    template = importlib.resources.files('agentrl_jax.records').joinpath('page_template.html')
    return string.Template(template.read_text(encoding='utf-8')).substitute(
        title=escape_attribute(document['title'] or document['env']),  # no elements inside <title>
        heading=escape(document['title'] or document['env']),
        about=_about(document),
        links=''.join(_link(label, name) for label, name in (links or {}).items()),
        tiles=_tiles(document['totals'], document['worlds']),
        subtitle=_shown(document, len(episodes)),
        heat_choices=_heat_choices(known),
        sort_choices=_sort_choices(known['advantage']),
        scales=_scales(largest),
        map='\n'.join(_strip(*found) for found in groups),
        groups='\n'.join(_group(*found, largest, known['advantage']) for found in groups),
        count=len(episodes),
    )


# ---- the head ----------------------------------------------------------------------------------


def _about(document: Mapping[str, Any]) -> str:
    about = {'world': document['env'], **document['about']}
    return ''.join(
        f'<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>'
        for label, text in about.items()
    )


def _link(label: str, name: str) -> str:
    """A link to a file of this folder, quoted: no name is another address or an attribute."""
    return f'<a href="./{urllib.parse.quote(name, safe="")}">{escape(label)}</a>'


def _shown(document: Mapping[str, Any], shown: int) -> str:
    """Which of the episodes played are on the page; the figures above are of all of them."""
    played, every = document['totals']['episodes'], document['every']
    if shown >= played:
        return f'All {many(played, "episode")} are on this page.'
    which = f': every {_ordinal(every)}' if every > 1 else ''
    if shown < len(document['episodes']):
        which += f', of these the first {shown}' if every > 1 else f': the first {shown}'
    return (
        f'The figures above are of all {many(played, "episode")}; {shown} of them are shown below'
        f'{which}. {played - shown} are left out.'
    )


def _ordinal(n: int) -> str:
    endings = {1: 'st', 2: 'nd', 3: 'rd'}
    regular = n % 10 not in endings or n % 100 in (11, 12, 13)
    return f'{n}{"th" if regular else endings[n % 10]}'


def _tiles(totals: Mapping[str, Any], worlds: Mapping[str, Any] | None) -> str:
    """Figures of the whole step; faulty episodes only in their own count."""
    healthy = totals['episodes'] - totals['faulty']
    share = f'{100 * totals["solved"] / max(healthy, 1):.1f} %'
    if 0 <= totals['solved'] <= healthy:
        ends = wilson_interval(totals['solved'], healthy)
        if 'success_low' in totals:  # of levels, whose episodes are not independent
            ends = to_float(totals['success_low']), to_float(totals['success_high'])
        low, high = (100 * end for end in ends)
        share += f' <small>95 % interval {low:.1f} to {high:.1f}</small>'
    invalid = f'{totals["invalid"]} of {many(totals["turns"], "turn")}'
    tiles = {
        'success': share,
        'solved': f'{totals["solved"]} of {healthy}',
        'mean return': f'{to_float(totals["return"]):.3g}',
        'mean turns': f'{totals["turns"] / max(healthy, 1):.3g}',
        **({} if totals['invalid'] is None else {'invalid answers': invalid}),
        'truncated episodes': f'{totals["truncated"]}',
        'faulty worlds': f'{totals["faulty"]}',
    }
    if worlds is not None:
        slowest = f'<small>slowest {to_float(worlds["slowest"]):.3g}</small>'
        tiles['seconds of a reply'] = f'{to_float(worlds["seconds"]):.3g} {slowest}'
        tiles['worlds asked again'] = f'{many(worlds["retries"], "time")}'
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


def _sort_choices(advantages: bool) -> str:
    choices = []
    for letter, label in SORTS.items():
        missing = letter == 'a' and not advantages
        state = ' checked' if letter == 'n' else ' disabled' if missing else ''
        choices.append(
            f'<label><input type="radio" name="sort" id="sort-{letter}"{state}> {label}</label>'
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


# ---- groups ------------------------------------------------------------------------------------


def _groups(document: Mapping[str, Any], episodes: Sequence[Episode]) -> list[tuple]:
    """(what is known of a group or None, its order, its episodes, their orders), as played."""
    known = {group['group']: group for group in document['groups']}
    members: dict[int, list[Episode]] = {}
    for episode in episodes:
        members.setdefault(episode['group'], []).append(episode)
    keys = [
        _group_keys(known[number]) if number in known else _episode_keys(found[0])
        for number, found in members.items()
    ]
    orders = dict(zip(members, _orders(keys), strict=True))
    return [
        (
            known[number] if number in known else None,
            orders[number],
            found,
            _orders([_episode_keys(episode) for episode in found]),
        )
        for number, found in members.items()
    ]


def _group_keys(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        's': group['solved'] / max(group['episodes'] - group['faulty'], 1),
        'r': to_float(group['return']),
        'l': to_float(group['sampled']),
        'a': to_float(group['advantages']),
    }


def _episode_keys(episode: Episode) -> dict[str, float]:
    """advantage: the mean over its tokens, which says what the update made of the episode."""
    advantages = [to_float(token['adv']) for token in episode['tokens'] if token['adv'] is not None]
    trained = [x for x in advantages if math.isfinite(x)]
    return {
        's': float(episode['success']),
        'r': to_float(episode['return']),
        'l': float(sum(token['k'] == 'a' for token in episode['tokens'])),
        'a': sum(trained) / len(trained) if trained else math.nan,
    }


def _orders(keys: Sequence[Mapping[str, float]]) -> list[str]:
    """For each entry its place by every key, the largest first, as custom properties of a style.

    Equal keys have one place; nan comes last.
    """
    places: list[list[str]] = [[f'--n:{n}'] for n in range(len(keys))]
    for letter in SORTS:
        if letter != 'n':
            values = [key[letter] for key in keys]
            ranked = sorted({value for value in values if not math.isnan(value)}, reverse=True)
            place = {value: n for n, value in enumerate(ranked)}
            for found, value in zip(places, values, strict=True):
                found.append(f'--{letter}:{place[value] if value in place else len(ranked)}')
    return [';'.join(found) for found in places]


def _strip(
    group: Mapping[str, Any] | None, order: str, episodes: Sequence[Episode], orders: Sequence[str]
) -> str:
    """A group in the map of the page: a link to it and one to each of its episodes."""
    cells = ''.join(_cell(*found) for found in zip(episodes, orders, strict=True))
    number = episodes[0]['group']
    name = '' if len(episodes) == 1 else f'<a class="name" href="#g{number}">{number}</a>'
    return f'<span class="strip rank" style="{order}">{name}{cells}</span>'


def _cell(episode: Episode, order: str) -> str:
    flags = flags_of(episode)
    mark = '!' if flags['faulty'] else '✓' if flags['success'] else '·'
    css = 'faulty' if flags['faulty'] else 'solved' if flags['success'] else 'failed'
    title = f'#{episode["row"]}, level {episode["level"]}: return {to_float(episode["return"]):.4g}'
    return (
        f'<a class="cell item rank {css}" href="#e{episode["row"]}" title="{title}" '
        f'style="{order}" {filter_data(flags)}>{mark}</a>'
    )


def _group(
    group: Mapping[str, Any] | None,
    order: str,
    episodes: Sequence[Episode],
    orders: Sequence[str],
    largest: float,
    updated: bool,
) -> str:
    """A group with its prompt once and its episodes; an episode that is alone stands for itself."""
    first = episodes[0]
    if len(episodes) == 1:
        return draw_episode(first, order, largest, common=0, opened=first['row'] == 0)
    common = _common_prompt(episodes)
    prompt = draw_prompt(list(enumerate(first['tokens'][:common])), folded=False) if common else ''
    board = draw_board(first['turns'][0]['grid']) if common and first['turns'] else ''
    start = f'<div class="start">{board}<div class="chat">{prompt}</div></div>' if common else ''
    body = '\n'.join(
        draw_episode(episode, place, largest, common=common, opened=episode is first)
        for episode, place in zip(episodes, orders, strict=True)
    )
    facts = ''.join(f'<span>{fact}</span>' for fact in _group_facts(group, len(episodes), updated))
    return (
        f'<section class="group rank" id="g{first["group"]}" style="{order}">'
        f'<header><h2>Group {first["group"]}</h2><span>level {first["level"]}</span>{facts}'
        f'</header>\n{start}<div class="episodes">\n{body}</div></section>'
    )


def _group_facts(group: Mapping[str, Any] | None, shown: int, updated: bool) -> list[str]:
    """updated: an update was made of the rollout, of some of its groups at least."""
    if group is None:
        return []
    spread = to_float(group['return_std'])
    facts = [
        f'{group["solved"]} of {group["episodes"] - group["faulty"]} solved',
        f'return {to_float(group["return"]):.3g}'
        + ('' if math.isnan(spread) else f' ± {spread:.2g}'),
        f'turns {to_float(group["turns"]):.3g}',
        f'tokens {to_float(group["sampled"]):.3g}',
    ]
    if updated:
        apart = to_float(group['advantages'])
        facts.append('not trained on' if math.isnan(apart) else f'advantages {apart:.3g} apart')
    if shown < group['episodes']:
        facts.append(f'<em>{shown} of {group["episodes"]} shown</em>')
    return facts


def _common_prompt(episodes: Sequence[Episode]) -> int:
    """Tokens in front of the first answer, where all episodes begin with the same; else 0."""
    starts = [
        [
            token['s']
            for token in itertools.takewhile(
                lambda t: t['k'] != 'a' and t['turn'] == 0, episode['tokens']
            )
        ]
        for episode in episodes
    ]
    boards = [episode['turns'][0]['grid'] if episode['turns'] else None for episode in episodes]
    same = all(start == starts[0] for start in starts) and all(b == boards[0] for b in boards)
    return len(starts[0]) if same else 0


# ---- files -------------------------------------------------------------------------------------


def write(path: Path, document: dict[str, Any], *, max_episodes: int = MAX_EPISODES) -> None:
    """Writes a page with links to those beside it; the file is whole or not there."""
    text = render_page(document, max_episodes=max_episodes, links=links(path))
    files.write_atomic(path, text)


def draw_before(page: Path, *, max_episodes: int = MAX_EPISODES) -> None:
    """Draws the page of the step before a page again, which gives it a link to that page."""
    before = beside(page)[0]
    source = before.with_suffix('.json') if before else None
    if source is None or not source.exists():
        return
    try:
        found = documents.read(source)
    except ValueError:  # of an earlier version: its page is whole and only lacks the link
        return
    write(before, found, max_episodes=max_episodes)


def beside(page: Path) -> tuple[Path | None, Path | None, list[Path]]:
    """(the page of the step before, that of the step after, the last one of each other series).

    Pages of one series differ in the number at the end of their names: step_000050, step_000100.
    """
    series: dict[str, list[tuple[int, Path]]] = {}
    for path in page.parent.glob('*.html'):
        if name := PAGE_NAME.fullmatch(path.name):
            series.setdefault(name[1], []).append((int(name[2] or -1), path))
    own = PAGE_NAME.fullmatch(page.name)
    prefix, number = (own[1], int(own[2] or -1)) if own else ('', -1)
    mates = series.pop(prefix, [])
    before = max((mate for mate in mates if mate[0] < number), default=(0, None))[1]
    after = min((mate for mate in mates if mate[0] > number), default=(0, None))[1]
    return before, after, [max(found)[1] for _, found in sorted(series.items())]


def links(page: Path) -> dict[str, str]:
    """Label -> file name of the pages beside a page, as far as they are there."""
    before, after, others = beside(page)
    found = {f'← {page_label(before.name)}': before.name} if before else {}
    found |= {f'{page_label(after.name)} →': after.name} if after else {}
    return found | {page_label(other.name): other.name for other in others}


def page_label(name: str) -> str:
    """'step 50' of step_000050.html."""
    prefix, number = PAGE_NAME.fullmatch(name).groups()
    words = prefix.replace('_', ' ').split()
    return ' '.join([*words, *([str(int(number))] if number else [])])
