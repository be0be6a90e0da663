"""What a run does, in a browser: python -m agentrl_jax.view runs/demo

A workdir: serves a page of the run on this machine alone, which renews itself while the run trains:
curves, alarms, worlds in flight, rollouts, and the runs beside it. A rollout document
(rollouts/*.json), or a workdir with --out: writes the page of that rollout, or of the newest one.
That page is one HTML file without scripts, which loads nothing. Whatever the model wrote is shown,
not run.
"""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.machine import files
from agentrl_jax.records import document, live_run, live_server, page_html
from agentrl_jax.run import command, usage
from agentrl_jax.settings.marks import suggestion


def main(argv: Sequence[str] | None = None) -> None:
    """Serves the page of a workdir, or writes that of a document."""
    parser = command.Parser(__doc__, 'agentrl_jax.view')
    parser.add_argument('source', help='run directory or rollouts/*.json')
    parser.add_argument(
        '--out', help='where the page of a rollout goes; default: beside the document'
    )
    parser.add_argument(
        '--max_episodes', type=int, default=page_html.MAX_EPISODES, help='most episodes on the page'
    )
    parser.add_argument('--port', type=int, default=0, help='of the server; 0 = a free one')
    parser.add_argument('--open', action='store_true', help='open the page in the browser')
    args = parser.parse_args(argv)
    try:
        with usage.checked():
            source = files.local_path(args.source)
            if not source.exists():
                raise FileNotFoundError(missing(source))
            if source.is_dir() and not args.out:
                serve(source, args.port, open_it=args.open)
            else:
                print(write_page(source, args.out, args.max_episodes))
    except (OSError, ValueError) as error:
        usage.end(files.in_words(error), error)


def missing(source: Path) -> str:
    """That a source does not exist, with the closest name next to it."""
    parent = source.absolute().parent
    names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    advice = suggestion(source.name, names)
    if not advice and not source.suffix:
        advice = '; a training makes it when it starts: wait for it, or name another folder'
    return f'{source} does not exist{advice}'


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
