"""An episode of FrozenLake as an animated SVG: the board, and every token as it is written.

  python -m agentrl_jax.tools.episode_svg runs/demo/rollouts/step_000449.json --episode=27 \\
      --out=experiments/demo/episode.svg --excerpt=experiments/demo/episode.json

Everything drawn is in the rollout document. Its boards are those before and after a turn; the steps
between two of them are played here by the rules of a lake that is not slippery, and must lead from
one board to the next. Without animation (a reader that asks for less motion, a program that shows
no CSS) the picture is the end of the episode.
"""

import argparse
import dataclasses
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = {'Left': (0, -1), 'Down': (1, 0), 'Right': (0, 1), 'Up': (-1, 0)}  # action -> (row, column)

# Seconds
START, PROMPT, SAMPLE, STEP, SLIDE = 0.4, 0.04, 0.13, 0.45, 0.28
READ, THINK, REST, HOLD, FADE = 0.25, 0.3, 0.35, 3.5, 0.35

# Pixels of the picture
WIDTH, MARGIN, CELL, GAP, TOP = 960, 22, 61, 5, 60
SIDE = 4  # cells of the demo's lake
LEFT = MARGIN + SIDE * (CELL + GAP) + 28  # of the conversation
LETTER, PAD, CHIP, ROW, HEAD = 7.83, 3, 20, 25, 27  # of a token: 13 pixels high, monospaced


@dataclasses.dataclass(frozen=True)
class Word:
    """A token where it is drawn."""

    text: str
    sampled: bool
    x: float
    y: float
    width: float
    start: float  # seconds at which it is written
    executed: float | None = None  # seconds at which its action is executed


@dataclasses.dataclass(frozen=True)
class Move:
    """A step of the player, or a push against the edge (start and end are the same cell)."""

    start: tuple[int, int]
    end: tuple[int, int]
    towards: tuple[int, int]
    time: float


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn as it is drawn: its tokens, its moves, and when its reward is known."""

    words: list[Word]
    moves: list[Move]
    y: float
    start: float
    end: float
    reward: float


def player_of(grid: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(row, column) of the player on a board."""
    (place,) = (
        (r, c) for r, row in enumerate(grid) for c, cell in enumerate(row) if 'player' in cell
    )
    return place


def walk(grid: Sequence[Sequence[str]], actions: Sequence[str]) -> list[tuple[int, int]]:
    """The cell after each action on a lake that is not slippery; edges hold the player."""
    place, path = player_of(grid), []
    for action in actions:
        down, right = STEPS[action]
        row = min(max(place[0] + down, 0), len(grid) - 1)
        column = min(max(place[1] + right, 0), len(grid[0]) - 1)
        place = (row, column)
        path.append(place)
    return path


def boards_of(episode: dict[str, Any]) -> list[Any]:
    """The boards before each turn and after the last."""
    return [*(turn['grid'] for turn in episode['turns']), episode['final_grid']]


def paths_of(episode: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """The cells of each turn's actions; a ValueError where they do not lead to the next board."""
    boards = boards_of(episode)
    if None in boards:
        raise ValueError('the episode has no boards: it was saved without its worlds')
    if any(len(row) != SIDE for board in boards for row in [board, *board]):
        raise ValueError(f'only lakes of {SIDE} x {SIDE} cells can be drawn')
    paths = []
    for k, turn in enumerate(episode['turns']):
        path = walk(boards[k], turn['actions'])
        if [player_of(boards[k]), *path][-1] != player_of(boards[k + 1]):
            raise ValueError(
                f'turn {k + 1}: {", ".join(turn["actions"])} does not lead to the next board; only '
                'episodes of lakes that are not slippery can be drawn'
            )
        paths.append(path)
    return paths


def lay_out(tokens: Sequence[dict[str, Any]], y: float) -> list[tuple[float, float, float]]:
    """(x, y, width) of each token of a turn, in lines; the first sampled one opens a line."""
    places, x = [], float(LEFT + 14)
    for n, token in enumerate(tokens):
        width = LETTER * len(visible(token['s'])) + 2 * PAD
        opens = n > 0 and token['k'] == 'a' and tokens[n - 1]['k'] == 'p'
        if n and (opens or x + width > WIDTH - MARGIN):
            x, y = float(LEFT + 14), y + ROW
        places.append((x, y, width))
        x += width + 3
    return places


def visible(text: str) -> str:
    """A token's text with its line feeds as signs."""
    return text.replace('\n', '\u21b5')


def find(words: Sequence[Word], action: str, first: int) -> int:
    """Index of the sampled token that says an action, from the first-th on."""
    for index in range(first, len(words)):
        if words[index].sampled and words[index].text.strip() == action:
            return index
    raise ValueError(f'an answer does not say {action}, which was executed, as one token')


def turns_of(episode: dict[str, Any]) -> list[Turn]:
    """The turns of an episode with the place and the time of everything."""
    boards, turns, now, y = boards_of(episode), [], START, float(TOP)
    for k, (turn, path) in enumerate(zip(episode['turns'], paths_of(episode), strict=True)):
        tokens = [token for token in episode['tokens'] if token['turn'] == k]
        start, words = now, []
        for n, (token, (x, row, width)) in enumerate(
            zip(tokens, lay_out(tokens, y + HEAD), strict=True)
        ):
            sampled = token['k'] == 'a'
            if sampled and tokens[n - 1]['k'] == 'p':
                now += READ
            words.append(Word(visible(token['s']), sampled, x, row, width, now))
            now += SAMPLE if sampled else PROMPT
        now += THINK
        place, moves, index = player_of(boards[k]), [], 0
        for action, cell in zip(turn['actions'], path, strict=True):
            index = find(words, action, index)  # executed in the order of the answer
            words[index] = dataclasses.replace(words[index], executed=now)
            moves.append(Move(place, cell, STEPS[action], now))
            place, now, index = cell, now + STEP, index + 1
        reward = float(turn['reward']) + float(turn['penalty'])
        turns.append(Turn(words, moves, y, start, now, reward))
        now, y = now + REST, words[-1].y + ROW + 12
    return turns


# ---- drawing -------------------------------------------------------------------------------------

STYLE = """
svg { --card: #ffffff; --line: #d0d7de; --ink: #1f2328; --soft: #656d76; --chip: #f3f5f7;
  --edge: #d8dee4; --blue: #0969da; --sky: #ddf4ff; --sea: #0550ae; --rim: #80ccff;
  --ice: #e1f0fa; --frost: #c4dff2; --hole: #1c3a52; --deep: #0c2233; --gold: #d4a017;
  --sun: #fff3c4; --coat: #f2711c; --face: #ffffff; --good: #1a7f37; --on: #ffffff; }
@media (prefers-color-scheme: dark) { svg { --card: #0d1117; --line: #30363d; --ink: #e6edf3;
  --soft: #8d96a0; --chip: #161b22; --edge: #30363d; --blue: #388bfd; --sky: #0c2d57;
  --sea: #a5d6ff; --rim: #1f6feb; --ice: #17354d; --frost: #23496a; --hole: #02060b;
  --deep: #000000; --gold: #f2cc60; --sun: #4a3c0b; --coat: #fb8f44; --face: #ffffff;
  --good: #3fb950; --on: #ffffff; } }
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace;
  fill: var(--ink); white-space: pre; }
.sans { font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; }
.soft { fill: var(--soft); } .bold { font-weight: 600; } .good { fill: var(--good); }
.prompt rect { fill: var(--chip); stroke: var(--edge); } .prompt text { fill: var(--soft); }
.sample rect { fill: var(--sky); stroke: var(--rim); } .sample text { fill: var(--sea); }
.action rect { fill: var(--blue); stroke: var(--blue); } .action text { fill: var(--on); }
.a { animation: DURATIONs linear infinite; }
@media (prefers-reduced-motion: reduce) { .a { animation: none; } }
"""


class Clock:
    """Keyframes of one loop, and the attributes that use them."""

    def __init__(self, duration: float):
        self.duration = duration
        self.rules: list[str] = []

    def percent(self, seconds: float) -> str:
        return f'{100 * seconds / self.duration:.2f}'.rstrip('0').rstrip('.') + '%'

    def use(self, frames: str) -> str:
        """Attributes of an element that follows these keyframes."""
        if frames not in self.rules:
            self.rules.append(frames)
        return f'class="a" style="animation-name:k{self.rules.index(frames)}"'

    def during(self, start: float, end: float | None = None) -> str:
        """Attributes of an element that is there from start to end (None: until the loop ends)."""
        first = f'0%,{self.percent(start)}{{opacity:0}}{self.percent(start + 0.08)}'
        if end is None:
            return self.use(f'{first},100%{{opacity:1}}')
        last = f'{self.percent(end)}{{opacity:1}}{self.percent(end + 0.08)},100%{{opacity:0}}'
        return self.use(f'{first},{last}') + ' opacity="0"'

    def style(self) -> str:
        rules = [f'@keyframes k{n}{{{frames}}}' for n, frames in enumerate(self.rules)]
        return STYLE.replace('DURATION', f'{self.duration:.2f}') + '\n'.join(rules)


def number(x: float) -> str:
    return f'{x:.1f}'.removesuffix('.0')


def text(x: float, y: float, words: str, css: str = '', **attributes: str) -> str:
    extra = ''.join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    css = f' class="{css}"' if css else ''
    return f'<text x="{number(x)}" y="{number(y)}"{css}{extra}>{html.escape(words)}</text>'


def chip(word: Word, css: str) -> str:
    """A token in its box. Its width is fixed: fonts differ."""
    length = number(word.width - 2 * PAD)
    box = (
        f'<rect x="{number(word.x)}" y="{number(word.y)}" width="{number(word.width)}" '
        f'height="{CHIP}" rx="4"/>'
    )
    label = text(word.x + PAD, word.y + 14.5, word.text, textLength=length)
    return f'<g class="{css}">{box}{label}</g>'


def centre(cell: tuple[int, int]) -> tuple[float, float]:
    """Pixels of the middle of a cell."""
    row, column = cell
    return MARGIN + column * (CELL + GAP) + CELL / 2, TOP + row * (CELL + GAP) + CELL / 2


def draw_board(grid: Sequence[Sequence[str]]) -> list[str]:
    """The lake without its player."""
    out = []
    for r, row in enumerate(grid):
        for c, cell in enumerate(row):
            x, y = centre((r, c))
            corner = f'x="{number(x - CELL / 2)}" y="{number(y - CELL / 2)}"'
            goal = 'goal' in cell
            fill, edge = ('--sun', '--gold') if goal else ('--ice', '--frost')
            out.append(
                f'<rect {corner} width="{CELL}" height="{CELL}" rx="9" fill="var({fill})" '
                f'stroke="var({edge})"/>'
            )
            if 'hole' in cell:
                out.append(
                    f'<ellipse cx="{number(x)}" cy="{number(y)}" rx="24" ry="20" '
                    'fill="var(--hole)"/>'
                    f'<ellipse cx="{number(x)}" cy="{number(y + 3)}" rx="19" ry="14" '
                    'fill="var(--deep)"/>'
                )
            elif goal:
                out.append(
                    f'<path transform="translate({number(x)} {number(y)})" fill="var(--gold)" '
                    'd="M0-21 6.2-7.2 21.1-5.6 10 4.6 13.1 19.2 0 11.8-13.1 19.2-10 4.6-21.1-5.6'
                    '-6.2-7.2Z"/>'
                )
            else:
                out.append(
                    f'<path transform="translate({number(x)} {number(y)})" fill="none" '
                    'stroke="var(--frost)" stroke-width="2" stroke-linecap="round" '
                    'd="M-20-12-10-22M-20-2 0-22"/>'
                )
    return out


def draw_player(turns: Sequence[Turn], start: tuple[int, int], clock: Clock) -> list[str]:
    """The trail, which grows, and the player, who slides along it."""
    moves = [move for turn in turns for move in turn.moves]
    trail, frames = [], []

    def at(seconds, x, y):
        frames.append(
            f'{clock.percent(seconds)}{{transform:translate({number(x)}px,{number(y)}px)}}'
        )

    place = centre(start)
    at(0.0, *place)
    for move in moves:
        (x0, y0), (x1, y1) = centre(move.start), centre(move.end)
        at(move.time, x0, y0)
        if move.start == move.end:
            down, right = move.towards
            at(move.time + SLIDE / 2, x0 + 9 * right, y0 + 9 * down)
        else:
            trail.append(
                f'<g {clock.during(move.time + SLIDE)}><path d="M{number(x0)} {number(y0)}'
                f'L{number(x1)} {number(y1)}" stroke="var(--coat)" stroke-width="3" '
                'stroke-dasharray="1 8" stroke-linecap="round"/></g>'
            )
        at(move.time + SLIDE, x1, y1)
        place = x1, y1
    frames.append(f'100%{{transform:translate({number(place[0])}px,{number(place[1])}px)}}')
    body = (
        f'<g transform="translate({number(place[0])} {number(place[1])})" '
        f'{clock.use("".join(frames))}>'
        '<circle r="19" fill="var(--coat)"/><circle r="13.5" cy="1" fill="var(--face)"/>'
        '<circle cx="-5" cy="-1" r="2.4" fill="#1f2328"/><circle cx="5" cy="-1" r="2.4" '
        'fill="#1f2328"/><path d="M-5 5.5Q0 9.5 5 5.5" fill="none" stroke="#1f2328" '
        'stroke-width="1.8" stroke-linecap="round"/></g>'
    )
    return [*trail, body]


def draw_turn(index: int, turn: Turn, clock: Clock) -> list[str]:
    """The conversation of a turn."""
    bottom = turn.words[-1].y + CHIP
    out = [
        f'<g {clock.during(turn.start)}>'
        f'<rect x="{LEFT}" y="{number(turn.y + 4)}" width="3" '
        f'height="{number(bottom - turn.y - 4)}" rx="1.5" fill="var(--rim)"/>'
        + text(LEFT + 14, turn.y + 16, f'turn {index + 1}', 'sans bold')
        + '</g>'
    ]
    for word in turn.words:
        css = 'sample' if word.sampled else 'prompt'
        out.append(f'<g {clock.during(word.start)}>{chip(word, css)}</g>')
        if word.executed is not None:
            out.append(f'<g {clock.during(word.executed)}>{chip(word, "action")}</g>')
    css = 'sans bold good' if turn.reward > 0 else 'sans soft'
    reward = text(
        WIDTH - MARGIN,
        turn.y + 16,
        f'reward {turn.reward:+g}' if turn.reward else 'reward 0',
        css,
        text_anchor='end',
    )
    return [*out, f'<g {clock.during(turn.end)}>{reward}</g>']


def draw_legend() -> str:
    """What the three kinds of boxes are, right-aligned in the first line."""
    kinds = (
        ('read', 'prompt'),
        ('sampled by the policy', 'sample'),
        ('executed in the world', 'action'),
    )
    out, x = [], float(WIDTH - MARGIN)
    for label, css in reversed(kinds):
        x -= 7.2 * len(label)
        out.append(text(x, 37, label, 'sans soft'))
        x -= 22
        out.append(
            f'<g class="{css}"><rect x="{number(x)}" y="26" width="16" height="14" rx="4"/></g>'
        )
        x -= 18
    return ''.join(out)


def draw_outcome(episode: dict[str, Any], turns: Sequence[Turn], clock: Clock) -> list[str]:
    """Below the board: how the episode stands."""
    y, out = TOP + SIDE * (CELL + GAP) + 22, []
    for n, turn in enumerate(turns):
        after = turns[n + 1].start if n + 1 < len(turns) else turn.end
        line = text(MARGIN, y, f'turn {n + 1} of {len(turns)}', 'sans soft')
        out.append(f'<g {clock.during(turn.start, after)}>{line}</g>')
    end = 'solved' if episode['success'] else 'not solved'
    css = 'sans bold good' if episode['success'] else 'sans bold'
    line = text(MARGIN, y, f'{end}, return {float(episode["return"]):g}', css)
    return [*out, f'<g {clock.during(turns[-1].end)}>{line}</g>']


def render(document: dict[str, Any], index: int) -> str:
    """The SVG of one episode of a rollout document."""
    episode = document['episodes'][index]
    turns = turns_of(episode)
    clock = Clock(turns[-1].end + HOLD)
    height = max(turns[-1].words[-1].y + ROW, TOP + SIDE * (CELL + GAP) + 44) + 16
    fade = clock.use(f'0%,{clock.percent(clock.duration - FADE)}{{opacity:1}}100%{{opacity:0}}')
    first = episode['turns'][0]['grid']
    title = f'{document["env"]}, level {episode["level"]}'
    body = [
        text(MARGIN, 37, title, 'sans bold'),
        draw_legend(),
        text(MARGIN, TOP + SIDE * (CELL + GAP) + 42, document['title'], 'sans soft'),
        *draw_board(first),
        f'<g {fade}>',
        *draw_player(turns, player_of(first), clock),
        *draw_outcome(episode, turns, clock),
        *(line for n, turn in enumerate(turns) for line in draw_turn(n, turn, clock)),
        '</g>',
    ]
    return '\n'.join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(height)}" '
            f'width="{WIDTH}" height="{number(height)}" role="img">',
            f'<title>{html.escape(title)}: {html.escape(document["title"])}</title>',
            f'<style>{clock.style()}</style>',
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{number(height - 1)}" rx="12" '
            'fill="var(--card)" stroke="var(--line)"/>',
            *body,
            '</svg>\n',
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Reads a rollout document and writes the SVG, and the document of this one episode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('document', help='rollouts/*.json of a run, or an excerpt')
    parser.add_argument('--episode', type=int, default=0, help='its number on the page')
    parser.add_argument('--out', required=True, help='the SVG')
    parser.add_argument('--excerpt', help='where to keep the one episode as a document')
    args = parser.parse_args(argv)
    try:
        document = json.loads(Path(args.document).read_text(encoding='utf-8'))
        picture = render(document, args.episode)
    except (OSError, ValueError) as error:
        sys.exit(f'error: {error}')
    except (KeyError, IndexError, TypeError) as error:
        sys.exit(
            f'error: {args.document} is no rollout document with episode {args.episode} ({error!r})'
        )
    Path(args.out).write_text(picture, encoding='utf-8')
    if args.excerpt:
        one = document | {'episodes': [document['episodes'][args.episode]], 'left_out': 0}
        words = json.dumps(one, allow_nan=False, separators=(',', ':')) + '\n'
        Path(args.excerpt).write_text(words, encoding='utf-8')


if __name__ == '__main__':
    main()
