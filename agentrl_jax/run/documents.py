"""The tables of fields and of metrics in the READMEs.

python -m agentrl_jax.run.documents        writes them again
"""

import re
import sys
from pathlib import Path

from agentrl_jax.measure.metrics import metrics_table
from agentrl_jax.run.config import Config
from agentrl_jax.settings import pages

PACKAGE = Path(__file__).parents[1]


def documents() -> dict[Path, str]:
    """The text that each README should have."""
    tables = {
        'measure': ('Metrics', metrics_table()),
        'run': ('Fields', pages.table(Config) + '\n'),
    }
    texts = {}
    for folder, (title, table) in tables.items():
        path = PACKAGE / folder / 'README.md'
        head, mark, rest = path.read_text(encoding='utf-8').partition(f'\n## {title}\n')
        first = re.compile(r'^\|.*\n(?:\|.*\n)*', re.MULTILINE)
        texts[path] = head + mark + first.sub(lambda _, table=table: table, rest, count=1)
    return texts


def main() -> int:
    for path, text in documents().items():
        if path.read_text(encoding='utf-8') != text:
            path.write_text(text, encoding='utf-8')
            print(f'wrote {path.relative_to(PACKAGE.parent)}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
