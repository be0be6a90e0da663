"""HTTP server of live pages, for browsers of this machine. It only reads.

/run/<name>/                    the page of the run, or of another run in the same folder
/run/<name>/rollouts/<file>     a rollout page
/live_page.js
"""

import contextlib
import importlib.resources
import urllib.parse
from pathlib import Path

import fastapi
from fastapi.responses import RedirectResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from agentrl_jax.machine import files
from agentrl_jax.records import live_page, run_log

MAX_RUNS = 20  # maximum number of other runs on a page; the newest are kept
COMMON = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'; "
POLICY = f"{COMMON}script-src 'self'; connect-src 'self'; frame-src 'self'; frame-ancestors 'none'"
ROLLOUT_POLICY = f"{COMMON}frame-ancestors 'self'"


def run_names(workdir: Path) -> list[str]:
    """Names of the runs in a run's parent folder, the most recently changed first."""
    changed = {workdir.name: 0.0}
    for folder in workdir.parent.iterdir():
        with contextlib.suppress(OSError):  # another user's folder
            if folder.is_dir() and live_page.is_run(folder):
                path = folder / run_log.METRICS_FILE
                changed[folder.name] = path.stat().st_mtime if path.exists() else 0.0
    return sorted(changed, key=lambda name: (-changed[name], name))


def path_of(workdir: Path) -> str:
    return f'/run/{urllib.parse.quote(workdir.name, safe="")}/'


def build_app(workdir: Path) -> fastapi.FastAPI:
    """Return the application that serves the runs in the folder of `workdir`."""
    workdir = workdir.absolute()
    app = fastapi.FastAPI(openapi_url=None, redirect_slashes=False)
    # Reject requests from web sites with names that resolve to this machine.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=['127.0.0.1', 'localhost'])

    def response(content: str | bytes, kind: str = 'text/html', policy: str = POLICY) -> Response:
        headers = {'Content-Security-Policy': policy, 'Cache-Control': 'no-store'}
        headers |= {'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer'}
        return Response(content, media_type=f'{kind}; charset=utf-8', headers=headers)

    def other_runs(name: str) -> list[str]:
        names = run_names(workdir)
        if name not in names:
            raise fastapi.HTTPException(404)
        return [other for other in names if other != name]

    @app.get('/')
    def index() -> Response:
        return RedirectResponse(path_of(workdir), 302)

    @app.get('/live_page.js')
    def script() -> Response:
        path = importlib.resources.files('agentrl_jax.records').joinpath('live_page.js')
        return response(path.read_bytes(), 'text/javascript')

    @app.get('/run/{name}/')
    def page(name: str, x: str = 'step') -> Response:
        others = other_runs(name)
        runs = [live_page.read(workdir.parent / one) for one in [name, *others[:MAX_RUNS]]]
        axis = x if x in live_page.AXES else 'step'
        left_out = len(others) - len(runs) + 1
        text = live_page.render(runs[0], runs[1:], left_out, axis)
        return response(text.encode('utf-8', 'replace'))

    @app.get('/run/{name}/rollouts/{file}')
    def rollout(name: str, file: str) -> Response:
        other_runs(name)
        if file not in live_page.read(workdir.parent / name).pages:
            raise fastapi.HTTPException(404)
        path = workdir.parent / name / 'rollouts' / file
        return response(files.read_bytes(path), policy=ROLLOUT_POLICY)

    return app
