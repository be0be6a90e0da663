"""Tables of the READMEs that follow from the code.

python -m agentrl_jax.run.documents        writes them again, with rows for what is new
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.envs import ENVIRONMENTS, GAMES, HOSTS
from agentrl_jax.measure.metrics import metrics_table
from agentrl_jax.run.config import Config
from agentrl_jax.settings import pages, tree

PACKAGE = Path(__file__).parents[1]
DEVICE = (*ENVIRONMENTS, *GAMES)
BY_MODE = {'turn_credit.turn_gamma', 'loss.norm_length'}  # users depend on more than the algorithm


def documents() -> dict[Path, str]:
    """The text that each README should have."""
    rewrite = {
        'algorithms': (
            ('The algorithms', lambda text: with_rows(text, ALGORITHMS, _algorithm_row)),
            ('Options of single algorithms', with_users),
        ),
        'envs': (
            ('All worlds', lambda text: with_rows(text, (*DEVICE, *HOSTS), _world_row)),
            ('Environments', lambda text: with_rows(text, ENVIRONMENTS, _rules_row)),
        ),
        'measure': (('Metrics', lambda text: with_table(text, metrics_table())),),
        'run': (('Fields', lambda text: with_table(text, pages.table(Config) + '\n')),),
    }
    texts = {}
    for folder, parts in rewrite.items():
        path = PACKAGE / folder / 'README.md'
        texts[path] = path.read_text(encoding='utf-8')
        for title, change in parts:
            texts[path] = with_section(texts[path], title, change)
    return texts


def with_section(document: str, title: str, change: Callable[[str], str]) -> str:
    """A document with the section of a title changed."""
    head, mark, rest = document.partition(f'\n## {title}\n')
    if not mark:
        raise ValueError(f'there is no section {title!r}')
    section, following, tail = rest.partition('\n## ')
    return head + mark + change(section) + following + tail


def with_table(section: str, table: str) -> str:
    """A section with its first table replaced."""
    return re.sub(r'^\|.*\n(?:\|.*\n)*', lambda _: table, section, count=1, flags=re.MULTILINE)


def with_rows(section: str, names: Iterable[str], row: Callable[[str], str]) -> str:
    """A section whose first table has a row for each name, in this order."""
    lines = re.search(r'^\|.*\n(?:\|.*\n)*', section, flags=re.MULTILINE)[0].splitlines()
    known = {re.match(r'\| `(\w+)`', line)[1]: line for line in lines[2:]}
    rows = [known[name] if name in known else row(name) for name in names]
    return with_table(section, '\n'.join([*lines[:2], *rows]) + '\n')


def with_users(section: str) -> str:
    """The section on options, with the algorithms that have each of them."""

    def row(match: re.Match) -> str:
        option = re.search(r'`(\w+\.\w+)`', match[1])[1]
        takers = [name for name, cls in ALGORITHMS.items() if option in tree.leaves(cls)]
        users = match[2].removeprefix('all but ')
        listed = set(re.findall(r'`(\w+)`', users))
        if match[2].startswith('all but '):
            listed = ALGORITHMS.keys() - listed
        if option in BY_MODE or listed == set(takers):
            return match[0]
        others = [name for name in ALGORITHMS if name not in takers]
        names = takers if len(takers) <= len(others) else others
        text = ', '.join(f'`{name}`' for name in names)
        return f'| {match[1]} | {"" if names is takers else "all but "}{text} |'

    return re.sub(r'^\| (`.+?) \| (.+) \|$', row, section, flags=re.MULTILINE)


def _about(cls: type) -> str:
    """The first line of the docstring of a module, without the full stop."""
    text = inspect.getdoc(sys.modules[cls.__module__]) or cls.__name__
    return text.splitlines()[0].rstrip('.')


def _algorithm_row(name: str) -> str:
    return f'| `{name}` | {_about(ALGORITHMS[name])} |'


def _world_row(name: str) -> str:
    place = 'on the device' if name in DEVICE else 'in the process'
    return f'| `{name}` | {place} | | | | | | |'


def _rules_row(name: str) -> str:
    return f'| `{name}` | {_about(ENVIRONMENTS[name])} |'


def main() -> int:
    for path, text in documents().items():
        if path.read_text(encoding='utf-8') != text:
            path.write_text(text, encoding='utf-8')
            print(f'wrote {path.relative_to(PACKAGE.parent)}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
