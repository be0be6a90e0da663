"""CPU time of a harness turn in the endpoint, per dialect and part.

  python -m benchmarks.harness [--episodes=64] [--turns=40]

Clients run in another process and send their requests at the same time. A script answers at once
instead of a policy, and histories grow. "server" is the same HTTP server with a fixed answer.
"""

import argparse
import json
import multiprocessing
import threading
import time

import fastapi
from fastapi.responses import JSONResponse

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.clients import FORMATS, PATHS, Client
from agentrl_jax.envs.hosts.harness.endpoint import Endpoint
from agentrl_jax.envs.hosts.harness.episode import Episode
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.envs.hosts.world import Answer

LIMIT_MS = 1.0  # of a turn


class Bare(Endpoint):
    """A server with a fixed answer."""

    def app(self, desk):
        app, turn = fastapi.FastAPI(openapi_url=None), wire.Turn
        bodies = {}
        for name, path in PATHS.items():
            asked = wire.read(request_of(name, 1), (), name)
            made = asked.dialect.write(turn(asked, Answer('A'), 'x', 'A'))[0]
            bodies[path] = json.loads(asked.dialect.encode(made))

        @app.post('/v1/{path:path}')
        async def fixed(path: str, request: fastapi.Request) -> JSONResponse:
            await request.body()
            return JSONResponse(bodies[path])

        return app


def request_of(dialect: str, turns: int) -> bytes:
    messages = [{'role': 'user', 'content': 'Go.'}]
    for turn in range(turns - 1):
        messages += [{'role': 'assistant', 'content': 'A'}]
        messages += [{'role': 'user', 'content': f'Turn {turn}.'}]
    return json.dumps(FORMATS[dialect][0](messages, {'model': 'm'})).encode()


def talk(url: str, dialect: str, turns: int) -> None:
    client = Client(Task(0, url, 'k'), 'Go.', dialect)
    for turn in range(turns):
        client.ask()
        client.messages.append({'role': 'user', 'content': f'Turn {turn}.'})


def join(target, jobs: list[tuple]) -> None:
    threads = [threading.Thread(target=target, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def answer(episode: Episode, turns: int) -> None:
    for _ in range(turns):
        episode.events.get()
        episode.answer(Answer('A'))


def milliseconds(urls: list[str], dialect: str, turns: int, episodes: list[Episode]) -> float:
    """Return the CPU time of this process per turn."""
    jobs = [(url, dialect, turns) for url in urls]
    clients = multiprocessing.get_context('spawn').Process(target=join, args=(talk, jobs))
    began = time.process_time()
    clients.start()
    join(answer, [(episode, turns) for episode in episodes])
    clients.join()
    return 1e3 * (time.process_time() - began) / (len(urls) * turns)


def timed(function, repeats: int = 200) -> float:
    began = time.process_time()
    for _ in range(repeats):
        function()
    return 1e3 * (time.process_time() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--episodes', type=int, default=64)
    parser.add_argument('--turns', type=int, default=40)
    args = parser.parse_args()
    bare, server = Bare(), Endpoint()
    for dialect in PATHS:
        fixed = milliseconds([f'{bare.url}/v1'] * args.episodes, dialect, args.turns, [])
        episodes = [Episode() for _ in range(args.episodes)]
        urls = [f'{server.open(episode)}/v1' for episode in episodes]
        total = milliseconds(urls, dialect, args.turns, episodes)
        raw = request_of(dialect, args.turns // 2)
        asked = wire.read(raw, (), dialect)
        read = timed(lambda raw=raw, dialect=dialect: wire.read(raw, (), dialect))
        write = timed(
            lambda asked=asked: asked.dialect.encode(wire.complete(Answer('A'), asked, 'x').body)
        )
        print(
            f'{dialect}: {total:.3f} ms, of which server {fixed:.3f}, read {read:.3f}, '
            f'write {write:.3f}; {"within" if total <= LIMIT_MS else "ABOVE"} {LIMIT_MS:g} ms'
        )


if __name__ == '__main__':
    main()
