"""A rollout document as one HTML page: page_template.html filled."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from agentrl_jax.machine import files
from agentrl_jax.measure.stats import wilson_interval
from agentrl_jax.records import document as documents
from agentrl_jax.records import markup, page_episode
from agentrl_jax.records.markup import many, to_float
from agentrl_jax.records.page_episode import Episode

MAX_EPISODES = 64
MAX_TOKENS = 200_000  # about 25 MB of page
HEATS = {'logprob': 'lp', 'ratio': 'ratio', 'advantage': 'adv', 'mask': None}
HEAT_LABELS = {heat: heat for heat in HEATS} | {
    'logprob': 'log-probability',
    'mask': 'mask (trained)',
}
SORTS = {  # what groups, and the episodes of each, are sorted by: letter -> label
    'n': 'as played',
    's': 'success',
    'r': 'return',
    'l': 'length',
    'a': 'advantage',
}
# No other file is linked to: no name can be an address or an attribute of its own.
PAGE_NAME = re.compile(r'([A-Za-z][\w.=,+-]*?)(\d*)\.html', re.ASCII)


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
    return markup.render(
        'page_template.html',
        name=document['title'] or document['env'],
        about={'world': document['env'], **document['about']},
        links=links or {},
        tiles=_tiles(document['totals'], document['worlds']),
        subtitle=_subtitle(document, len(episodes)),
        sorts=SORTS,
        heats=known,
        first_heat=next(heat for heat in HEATS if known[heat]),
        HEAT_LABELS=HEAT_LABELS,
        scales=_scales(largest),
        groups=_groups(document, episodes, largest, known['advantage']),
        count=len(episodes),
    )


# ---- the head ----------------------------------------------------------------------------------


def _subtitle(document: Mapping[str, Any], shown: int) -> str:
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


def _tiles(
    totals: Mapping[str, Any], worlds: Mapping[str, Any] | None
) -> dict[str, tuple[str, str]]:
    """Figures of the whole step, each with a note; faulty episodes only in their own count."""
    healthy, interval = totals['episodes'] - totals['faulty'], ''
    success = f'{100 * totals["solved"] / healthy:.1f} %' if healthy else '—'
    if healthy and 0 <= totals['solved'] <= healthy:
        ends = wilson_interval(totals['solved'], healthy)
        if 'success_low' in totals:  # of levels, whose episodes are not independent
            ends = to_float(totals['success_low']), to_float(totals['success_high'])
        interval = '95 % interval {:.1f} to {:.1f}'.format(*(100 * end for end in ends))
    tiles = {
        'success': (success, interval),
        'solved': (f'{totals["solved"]} of {healthy}', ''),
        'mean return': (f'{to_float(totals["return"]):.3g}', ''),
        'mean turns': (f'{totals["turns"] / max(healthy, 1):.3g}', ''),
        'invalid answers': (f'{totals["invalid"]} of {many(totals["turns"], "turn")}', ''),
        'truncated episodes': (f'{totals["truncated"]}', ''),
        'faulty worlds': (f'{totals["faulty"]}', ''),
    }
    if totals['invalid'] is None:
        del tiles['invalid answers']
    if worlds is not None:
        slowest = f'slowest {to_float(worlds["slowest"]):.3g}'
        tiles['seconds of a reply'] = f'{to_float(worlds["seconds"]):.3g}', slowest
        tiles['worlds asked again'] = many(worlds['retries'], 'time'), ''
    return tiles


def _scales(largest: float) -> dict[str, list[tuple[str, str]]]:
    """A legend for each heat-map, (class, label), of the classes that colour the tokens."""
    probabilities = [f'{math.exp(-edge):.2g}' for edge in page_episode.LOGPROB_EDGES]
    swatches = [Markup(f'p > {probabilities[0]}'), *[f'≤ {p}' for p in probabilities]]
    scales = {'logprob': [(f'l{n}', label) for n, label in enumerate(swatches)]}
    ratios = [(math.exp(-edge), math.exp(edge)) for edge in page_episode.RATIO_EDGES]
    advantages = [(-edge * largest, edge * largest) for edge in page_episode.ADVANTAGE_EDGES]
    for heat, middle, labels in (('ratio', '1', ratios), ('advantage', '0', advantages)):
        below = [(f'{heat[0]}n{n}', f'< {low:.3g}') for n, (low, _) in enumerate(labels, 1)]
        above = [(f'{heat[0]}p{n}', f'> {high:.3g}') for n, (_, high) in enumerate(labels, 1)]
        scales[heat] = [*reversed(below), (f'{heat[0]}p0', middle), *above]
    return scales | {'mask': [('', 'sampled by the policy: trained')]}


# ---- groups ------------------------------------------------------------------------------------


def _groups(
    document: Mapping[str, Any], episodes: Sequence[Episode], largest: float, updated: bool
) -> list[dict[str, Any]]:
    """Groups as the template draws them, in the order of play.

    updated: an update was made of the rollout, of some of its groups at least.
    """
    known = {group['group']: group for group in document['groups']}
    members: dict[int, list[Episode]] = {}
    for episode in episodes:
        members.setdefault(episode['group'], []).append(episode)
    orders = _orders(
        _group_keys(known[number]) if number in known else _episode_keys(found[0])
        for number, found in members.items()
    )
    views = []
    for order, (number, found) in zip(orders, members.items(), strict=True):
        first, alone = found[0], len(found) == 1
        common = 0 if alone else _common_prompt(found)
        places = _orders(map(_episode_keys, found))
        start = list(enumerate(first['tokens'][:common]))
        shown = [
            page_episode.view(
                episode,
                order if alone else place,
                largest,
                common=common,
                opened=episode['row'] == 0 if alone else episode is first,
            )
            | {'place': place}
            for episode, place in zip(found, places, strict=True)
        ]
        facts, left_out = _facts(known.get(number), len(found), updated)
        board = common and first['turns'] and first['turns'][0]['grid']
        views.append(
            {
                'number': number,
                'order': order,
                'level': first['level'],
                'facts': facts,
                'left_out': left_out,
                'board': page_episode.draw_board(board or None),
                'prompt': page_episode.prompt(start, folded=False) if common else None,
                'episodes': shown,
            }
        )
    return views


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


def _orders(entries: Iterable[Mapping[str, float]]) -> list[str]:
    """For each entry its place by every key, the largest first, as custom properties of a style.

    Equal keys have one place; nan comes last.
    """
    keys = list(entries)
    places = [[f'--n:{n}'] for n in range(len(keys))]
    for letter in 'srla':
        values = [key[letter] for key in keys]
        ranked = sorted({value for value in values if not math.isnan(value)}, reverse=True)
        place = {value: n for n, value in enumerate(ranked)}
        for found, value in zip(places, values, strict=True):
            found.append(f'--{letter}:{place.get(value, len(ranked))}')
    return [';'.join(found) for found in places]


def _facts(group: Mapping[str, Any] | None, shown: int, updated: bool) -> tuple[list[str], str]:
    """(what all members of a group did, how many of them are shown where some are not)."""
    if group is None:
        return [], ''
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
    left_out = f'{shown} of {group["episodes"]} shown' if shown < group['episodes'] else ''
    return facts, left_out


def _common_prompt(episodes: Sequence[Episode]) -> int:
    """Tokens before the first answer, where all episodes begin with the same; else 0."""

    def start(episode: Episode) -> tuple:
        tokens = itertools.takewhile(lambda t: t['k'] != 'a' and t['turn'] == 0, episode['tokens'])
        board = episode['turns'][0]['grid'] if episode['turns'] else None
        return [token['s'] for token in tokens], board

    starts = list(map(start, episodes))
    return len(starts[0][0]) if all(found == starts[0] for found in starts) else 0


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
