"""What a run does, in a browser: python -m agentrl_jax.view runs/demo

A workdir: serves a page of the run on this machine alone, which renews itself while the run trains:
curves, alarms, worlds in flight, rollouts, and the runs beside it. A rollout document
(rollouts/*.json), or a workdir with --out: writes the page of that rollout, or of the newest one.
That page is one HTML file without scripts, which loads nothing. Whatever the model wrote is shown,
not run.
"""

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.machine import files
from agentrl_jax.records import document, live_run, live_server, page_html


def main(argv: Sequence[str] | None = None) -> None:
    """Serves the page of a workdir, or writes that of a document."""
    parser = argparse.ArgumentParser(
        prog='python -m agentrl_jax.view',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('source', help='run directory or rollouts/*.json')
    parser.add_argument(
        '--out', help='where the page of a rollout goes; default: beside the document'
    )
    parser.add_argument(
        '--max-episodes', type=int, default=page_html.MAX_EPISODES, help='most episodes on the page'
    )
    parser.add_argument('--port', type=int, default=0, help='of the server; 0 = a free one')
    parser.add_argument('--open', action='store_true', help='open the page in the browser')
    args = parser.parse_args(argv)
    try:
        source = files.local_path(args.source)
        if source.is_dir() and not args.out:
            serve(source, args.port, open_it=args.open)
        else:
            print(write_page(source, args.out, args.max_episodes))
    except (OSError, ValueError, OverflowError) as error:
        said = files.in_words(error) if isinstance(error, OSError) else error
        parser.exit(1, f'{parser.prog}: {said}\n')


def write_page(source: Path, out: str | None, max_episodes: int) -> Path:
    """The page of a document, or of the newest one of a workdir."""
    source = document.find(source)
    page = files.local_path(out) if out else source.with_suffix('.html')
    page_html.write(page, document.read(source), max_episodes=max_episodes)
    return page


def serve(workdir: Path, port: int, *, open_it: bool) -> None:
    """Answers browsers until Ctrl-C."""
    if not live_run.is_run(workdir):
        raise ValueError(f'{workdir} is no folder of a run: it holds no metrics and no rollouts')
    server = live_server.serve(workdir, port)
    where = live_server.address(server)
    print(f'{where}  (Ctrl-C ends it)', flush=True)
    if open_it:
        webbrowser.open(where)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


if __name__ == '__main__':
    main()
