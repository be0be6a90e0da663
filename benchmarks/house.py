"""The house in one picture: the folders of the package, each above all that it imports.

  python -m benchmarks.house      writes agentrl_jax/house.svg

Rows are computed from the imports, sizes from the files, purposes from the table of README.md, so
the picture is made again after a change of any of them.
"""

import collections
import html
import pathlib
import re

from benchmarks import reading_cost

PACKAGE = reading_cost.ROOT / 'agentrl_jax'
OUT = PACKAGE / 'house.svg'
READ = ('run', 'rollout', 'algorithms', 'rl')  # in this order: config -> rollout -> loss -> update
WIDTH, MARGIN, GAP, TOP, HEAD, LINE, MOST = 960, 22, 10, 92, 38, 16, 5  # pixels; boxes in a row
STYLE = """
svg { --card: #ffffff; --line: #d0d7de; --ink: #1f2328; --soft: #656d76; --box: #f6f8fa;
  --sky: #ddf4ff; --rim: #54aeff; }
@media (prefers-color-scheme: dark) { svg { --card: #0d1117; --line: #30363d; --ink: #e6edf3;
  --soft: #8d96a0; --box: #161b22; --sky: #0c2d57; --rim: #388bfd; } }
text { font: 12px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif;
  fill: var(--soft); }
.title { font-size: 14px; font-weight: 600; fill: var(--ink); }
.name { font: 600 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink); }
.card { fill: var(--card); stroke: var(--line); } .box { fill: var(--box); stroke: var(--line); }
.read { fill: var(--sky); stroke: var(--rim); } .disc { fill: var(--rim); }
.number { font-weight: 600; fill: var(--card); text-anchor: middle; }
"""


def folder_of(name):
    """The folder of a module of the package; None of files beside the folders."""
    parts = name.split('.')
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else None


def imports():
    """{folder: the folders that it imports}."""
    found = {path.parent.name: set() for path in PACKAGE.glob('*/__init__.py')}
    for name, module in reading_cost.modules().items():
        folder = folder_of(name) if name.startswith('agentrl_jax.') else None
        targets = {folder_of(target) for target in module.imports.values()} - {None, folder}
        if folder:
            found[folder] |= {x for x in targets if x in found}
    return found


def rows(below):
    """Folders by rows, the lowest first: each one row above the highest that it imports."""
    row, levels = {}, collections.defaultdict(list)
    while len(row) < len(below):
        ready = [x for x in below if x not in row and below[x] <= row.keys()]
        if not ready:
            raise ValueError(f'folders import each other: {sorted(below.keys() - row.keys())}')
        row |= {x: max((row[y] + 1 for y in below[x]), default=0) for x in ready}
    for folder in sorted(row):
        levels[row[folder]].append(folder)
    return [levels[level] for level in sorted(levels)]


def wrapped(text, letters):
    """A text in two lines at most."""
    words, lines = text.split(), ['']
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > letters:
            lines.append('')
        lines[-1] = f'{lines[-1]} {word}'.strip()
    return lines if len(lines) < 3 else [lines[0], f'{lines[1]} ...']


def picture():
    readme = (reading_cost.ROOT / 'README.md').read_text(encoding='utf-8')
    table = r'^\| \[(\w+)\]\(agentrl_jax/\w+/README\.md\) \| (.*) \|$'
    purposes = dict(re.findall(table, readme, flags=re.MULTILINE))
    levels = [row[i : i + MOST] for row in rows(imports()) for i in range(0, len(row), MOST)]
    parts, y = [], TOP
    for row in reversed(levels):
        wide = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        texts = {x: wrapped(purposes.get(x, ''), int((wide - 20) / 6.2)) for x in row}
        tall = HEAD + LINE * max(map(len, texts.values()))
        for place, folder in enumerate(row):
            x = MARGIN + place * (wide + GAP)
            lines = reading_cost.lines_of(f'agentrl_jax.{folder}')
            kind = 'read' if folder in READ else 'box'
            box = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{tall}"'
            after = x + 20 + 8.6 * len(folder)
            parts += [
                f'<rect class="{kind}" {box} rx="9"/>',
                f'<text x="{x + 12:.1f}" y="{y + 24}" class="name">{folder}</text>',
                f'<text x="{after:.1f}" y="{y + 24}">{lines:,} lines</text>',
            ]
            for n, line in enumerate(texts[folder]):
                where = f'x="{x + 12:.1f}" y="{y + HEAD + 6 + LINE * n}"'
                parts.append(f'<text {where}>{html.escape(line)}</text>')
            if folder in READ:
                at, number = f'{x + wide - 18:.1f}', READ.index(folder) + 1
                parts += [
                    f'<circle class="disc" cx="{at}" cy="{y + 20}" r="10"/>',
                    f'<text class="number" x="{at}" y="{y + 24}">{number}</text>',
                ]
        y += tall + GAP
    size = f'viewBox="0 0 {WIDTH} {y + GAP}" width="{WIDTH}" height="{y + GAP}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        '<title>The folders of agentrl_jax: each imports only from rows below its own</title>',
        f'<style>{STYLE}</style>',
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{y + GAP - 1}" rx="12"/>',
        f'<text x="{MARGIN}" y="36" class="title">The house</text>',
        f'<text x="{MARGIN}" y="58">A folder imports only from rows below its own. The commands '
        'are above all of them; train.py is the one to read.</text>',
        f'<text x="{MARGIN}" y="76">1 to 4: the way of a setting from the config to the rollout, '
        'the loss and the update.</text>',
        *parts,
    ]
    return '\n'.join([*parts, '</svg>', ''])


if __name__ == '__main__':
    pathlib.Path(OUT).write_text(picture(), encoding='utf-8')
    print(OUT.relative_to(reading_cost.ROOT))
