"""A page for reading rollouts: python -m agentrl_jax.view <workdir or rollouts/*.json>.

Training and evaluation write documents and their pages; this makes the page of a document again.
The page is one HTML file without scripts, which loads nothing. Whatever the model wrote is shown,
not run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.records import document, page_html


def main(argv: Sequence[str] | None = None) -> None:
    """Reads a document and writes its page."""
    parser = argparse.ArgumentParser(prog='python -m agentrl_jax.view', description=__doc__)
    parser.add_argument('source', help='run directory or rollouts/*.json')
    parser.add_argument('--out', help='where the page goes; default: beside the document')
    parser.add_argument(
        '--max-episodes', type=int, default=page_html.MAX_EPISODES, help='most episodes on the page'
    )
    args = parser.parse_args(argv)
    try:
        source = document.find(args.source)
        out = Path(args.out) if args.out else source.with_suffix('.html')
        page_html.write(out, document.read(source), max_episodes=args.max_episodes)
    except (OSError, ValueError) as error:
        parser.exit(1, f'{parser.prog}: {error}\n')
    print(out)


if __name__ == '__main__':
    main()
