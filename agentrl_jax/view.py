"""Show a run in a browser.

  python -m agentrl_jax.view runs/demo --open
  python -m agentrl_jax.view runs/demo --out=newest.html
  python -m agentrl_jax.view runs/demo/rollouts/step_000030.json --max_episodes=8

For a workdir, serves a page of the run to browsers on this machine. The page shows curves, alarms,
environments in flight, rollouts and the folder's other runs, and updates itself during training.
For a rollout document (rollouts/*.json), or a workdir with --out, writes the page of that rollout,
or of the newest one, as one HTML file without scripts.
"""

import contextlib
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from agentrl_jax.envs.hosts import gate
from agentrl_jax.machine import files
from agentrl_jax.records import document, live_page, live_server, page_html
from agentrl_jax.run import command, usage
from agentrl_jax.settings.marks import suggestion


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the page of a workdir, or write the page of a document."""
    parser = command.Parser(__doc__, 'agentrl_jax.view', 'SOURCE')
    parser.add_argument('source', help='run directory or rollouts/*.json')
    parser.add_argument('--out', help='file for the rollout page; default: next to the document')
    parser.add_argument(
        '--max_episodes', type=int, default=page_html.MAX_EPISODES, help='episodes on the page'
    )
    parser.add_argument('--port', type=int, default=0, help='port of the server; 0 = a free one')
    parser.add_argument('--open', action='store_true', help='open the page in the browser')
    args = parser.parse_args(argv)
    with usage.one_line_errors():
        source = files.local_path(args.source)
        if not source.exists():
            folder = source.absolute().parent
            names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            raise FileNotFoundError(f'{source} does not exist{suggestion(source.name, names)}')
        if source.is_dir() and not args.out:
            serve(source, args.port, open_it=args.open)
        else:
            source = document.find(source)
            page = files.local_path(args.out) if args.out else source.with_suffix('.html')
            page_html.write(page, document.read(source), max_episodes=args.max_episodes)
            print(page)


def serve(workdir: Path, port: int, *, open_it: bool) -> None:
    """Serve the live page of a run until Ctrl-C."""
    if not live_page.is_run(workdir):
        raise ValueError(f'{workdir} is not the folder of a run: it has no metrics or rollouts')
    listener = gate.listening('127.0.0.1', port)
    workdir = workdir.absolute()
    address = gate.url_of(listener) + live_server.path_of(workdir)
    print(f'{address}  (Ctrl-C to stop)', flush=True)
    if open_it:
        webbrowser.open(address)
    app = live_server.build_app(workdir)
    # log_config=None: uvicorn would close the handlers of other loggers
    config = uvicorn.Config(app, log_config=None, log_level='warning', timeout_graceful_shutdown=1)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == '__main__':
    main()
