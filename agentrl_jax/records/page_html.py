"""Render a rollout document as one HTML page."""

import collections
import itertools
import math
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from agentrl_jax.machine import files
from agentrl_jax.records import markup, page_episode
from agentrl_jax.records.markup import many, to_float
from agentrl_jax.records.page_episode import Episode

MAX_EPISODES = 64
MAX_TOKENS = 200_000  # about 25 MB of page
HEATS = {  # heat map -> label, field of a token
    'logprob': ('log-probability', 'lp'),
    'ratio': ('ratio', 'ratio'),
    'advantage': ('advantage', 'adv'),
    'mask': ('mask (trained)', 's'),
}
# Only files with these names are linked: they are safe in URLs and attributes.
NAV = re.compile('<nav>.*?</nav>', re.DOTALL)
PAGE_NAME = re.compile(r'([A-Za-z][\w.=,+-]*?)(\d*)\.html', re.ASCII)


def render_page(
    document: dict[str, Any],
    *,
    max_episodes: int = MAX_EPISODES,
    links: Mapping[str, str] | None = None,
) -> str:
    """Return the page of a valid document, with up to max_episodes and MAX_TOKENS.

    links: label -> name of a file in the same folder.
    """
    every = document['episodes']
    ends = np.cumsum([len(episode['tokens']) for episode in every])
    count = max(1, min(max_episodes, int(np.searchsorted(ends, MAX_TOKENS, side='right'))))
    episodes = every[:count]
    tokens = [token for episode in episodes for token in episode['tokens']]
    known = {
        heat: any(token[field] is not None for token in tokens)
        for heat, (_, field) in HEATS.items()
    } | {'mask': True}
    advantages = [abs(to_float(token['adv'])) for token in tokens]
    largest = max(filter(math.isfinite, advantages), default=0.0)
    return markup.render(
        'rollout_page.html',
        document=document,
        nav=nav(links or {}),
        tiles=_tiles(document['totals'], document['worlds']),
        shown=len(episodes),
        heats={heat: (label, known[heat]) for heat, (label, _) in HEATS.items()},
        first_heat=next(heat for heat in HEATS if known[heat]),
        scales=_scales(largest),
        groups=_groups(document, episodes, largest),
    )


def _tiles(
    totals: Mapping[str, Any], worlds: Mapping[str, Any] | None
) -> dict[str, tuple[str, str]]:
    """Label -> (figure of all healthy episodes, note)."""
    healthy, interval = totals['episodes'] - totals['faulty'], ''
    success = f'{100 * totals["solved"] / healthy:.1f} %' if healthy else '—'
    if healthy:
        low, high = (100 * to_float(totals[f'success_{end}']) for end in ('low', 'high'))
        interval = f'95 % interval {low:.1f} to {high:.1f}'
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
        tiles['seconds per reply'] = f'{to_float(worlds["seconds"]):.3g}', slowest
        tiles['repeated requests'] = f'{worlds["retries"]}', ''
    return tiles


def _scales(largest: float) -> dict[str, list[tuple[str, str]]]:
    """The (CSS class, label) of each colour of a heat map."""
    probabilities = [f'{math.exp(-edge):.2g}' for edge in page_episode.LOGPROB_EDGES]
    labels = [f'p > {probabilities[0]}', *[f'≤ {p}' for p in probabilities]]
    scales = {'logprob': [(f'l{n}', label) for n, label in enumerate(labels)]}
    ratios = [(math.exp(-edge), math.exp(edge)) for edge in page_episode.RATIO_EDGES]
    advantages = [(-edge * largest, edge * largest) for edge in page_episode.ADVANTAGE_EDGES]
    for heat, middle, edges in (('ratio', '1', ratios), ('advantage', '0', advantages)):
        below = [(f'{heat[0]}n{n}', f'< {low:.3g}') for n, (low, _) in enumerate(edges, 1)]
        above = [(f'{heat[0]}p{n}', f'> {high:.3g}') for n, (_, high) in enumerate(edges, 1)]
        scales[heat] = [*reversed(below), (f'{heat[0]}p0', middle), *above]
    return scales | {'mask': [('', 'sampled by the policy: trained')]}


def _groups(
    document: Mapping[str, Any], episodes: Sequence[Episode], largest: float
) -> list[dict[str, Any]]:
    """Groups in the order of play; a prompt common to all members is displayed once."""
    figures = {group['group']: group for group in document['groups']}
    groups = []
    for number, members in itertools.groupby(episodes, lambda episode: episode['group']):
        members = list(members)
        first, alone = members[0], len(members) == 1
        common = 0 if alone else _common_prompt(members)
        board = first['turns'][0]['grid'] if common and first['turns'] else None
        opened = first if not alone or first['row'] == 0 else None
        groups.append(
            {
                'number': number,
                'level': first['level'],
                'figures': figures.get(number),
                'board': page_episode.draw_board(board),
                'prompt': page_episode.prompt(list(enumerate(first['tokens'][:common]))),
                'episodes': [
                    page_episode.view(one, largest, common=common, opened=one is opened)
                    for one in members
                ],
            }
        )
    return groups


def _common_prompt(episodes: Sequence[Episode]) -> int:
    """Number of tokens before the first answer if these are equal in all episodes, else 0."""

    def start(episode: Episode) -> tuple:
        tokens = itertools.takewhile(lambda t: t['k'] != 'a' and t['turn'] == 0, episode['tokens'])
        board = episode['turns'][0]['grid'] if episode['turns'] else None
        return [token['s'] for token in tokens], board

    starts = list(map(start, episodes))
    return len(starts[0][0]) if all(one == starts[0] for one in starts) else 0


# ---- files -------------------------------------------------------------------------------------


def write(path: Path, document: dict[str, Any], *, max_episodes: int = MAX_EPISODES) -> None:
    """Write a page with links to the other pages of its folder."""
    files.write_atomic(path, render_page(document, max_episodes=max_episodes, links=links(path)))


def link_before(page: Path) -> None:
    """Update the links of the previous step's page."""
    if before := neighbours(page)[0]:
        text = files.read_text(before)
        files.write_atomic(before, NAV.sub(lambda _: nav(links(before)), text, count=1))


def neighbours(page: Path) -> tuple[Path | None, Path | None, list[Path]]:
    """Return the previous page, the next page, and the last page of each other series.

    Pages of one series differ in the number at the end of their names: step_000050, step_000100.
    """
    series = collections.defaultdict(list)
    for path in page.parent.glob('*.html'):
        if name := PAGE_NAME.fullmatch(path.name):
            series[name[1]].append((int(name[2] or -1), path))
    match = PAGE_NAME.fullmatch(page.name)
    prefix, number = (match[1], int(match[2] or -1)) if match else ('', -1)
    siblings = series.pop(prefix, [])
    before = max((mate for mate in siblings if mate[0] < number), default=(0, None))[1]
    after = min((mate for mate in siblings if mate[0] > number), default=(0, None))[1]
    return before, after, [max(pages)[1] for _, pages in sorted(series.items())]


def links(page: Path) -> dict[str, str]:
    """Label -> file name of the other pages of a folder."""
    before, after, others = neighbours(page)
    by_label = {f'← {page_label(before.name)}': before.name} if before else {}
    by_label |= {f'{page_label(after.name)} →': after.name} if after else {}
    return by_label | {page_label(other.name): other.name for other in others}


def nav(links: Mapping[str, str]) -> Markup:
    items = (
        f'<a href="./{urllib.parse.quote(file, safe="")}">{markup.escape(label)}</a>'
        for label, file in links.items()
    )
    return Markup(f'<nav>{"".join(items)}</nav>')


def page_label(name: str) -> str:
    """'step 50' of step_000050.html."""
    prefix, number = PAGE_NAME.fullmatch(name).groups()
    words = prefix.replace('_', ' ').split()
    return ' '.join([*words, *([str(int(number))] if number else [])])
