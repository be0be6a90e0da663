"""CPU time that a harness turn costs the endpoint, per dialect and part.

  python -m benchmarks.harness [--episodes=64] [--turns=40]

Clients run in another process and send requests at the same time. A script answers at once instead
of a policy, and histories grow. "server" is the HTTP server alone: the same requests to an unknown
episode. "read" and "write" are measured alone, for a history of half the turns.
"""

import argparse
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.clients import FORMATS, Client
from agentrl_jax.envs.hosts.harness.endpoint import Endpoint
from agentrl_jax.envs.hosts.harness.episode import Episode
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.envs.hosts.world import Answer

USER, SAID = {'role': 'user', 'content': 'Go on.'}, {'role': 'assistant', 'content': 'A'}


def talk(url: str, dialect: str, turns: int) -> None:
    client = Client(Task(0, url, 'k'), 'Go.', dialect)
    for _ in range(turns):
        client.ask()
        client.messages.append(USER)


def answer(episode: Episode, turns: int) -> None:
    for _ in range(turns):
        episode.events.get()
        episode.answer(Answer('A'))


def join(target: Callable, jobs: Iterable[tuple]) -> None:
    threads = [threading.Thread(target=target, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def milliseconds(calls: int, function: Callable, *args) -> float:
    """Return the CPU time of this process per call."""
    began = time.process_time()
    function(*args)
    return 1e3 * (time.process_time() - began) / calls


def play(urls: list[str], dialect: str, turns: int, episodes: list[Episode]) -> None:
    jobs = [(url, dialect, turns) for url in urls]
    clients = multiprocessing.get_context('spawn').Process(target=join, args=(talk, jobs))
    clients.start()
    join(answer, [(episode, turns) for episode in episodes])
    clients.join()


def repeat(function: Callable, *args) -> None:
    for _ in range(200):
        function(*args)


def complete(request: wire.ParsedRequest) -> bytes:
    return request.dialect.encode(wire.complete(Answer('A'), request, 'x').body, request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--episodes', type=int, default=64)
    parser.add_argument('--turns', type=int, default=40)
    args = parser.parse_args()
    server, count = Endpoint(), args.episodes * args.turns
    for dialect, (write, _) in FORMATS.items():
        history = [USER, *[SAID, USER] * (args.turns // 2)]
        raw = json.dumps(write(history, {'model': 'm'})).encode()
        asked = wire.read(raw, (), dialect)
        complete(asked)  # builds the types of the dialect
        found = {
            'read': milliseconds(200, repeat, wire.read, raw, (), dialect),
            'write': milliseconds(200, repeat, complete, asked),
        }
        urls = [f'{server.url}/episodes/unknown/v1'] * args.episodes
        found['server'] = milliseconds(count, play, urls, dialect, args.turns, [])
        episodes = [Episode() for _ in urls]
        urls = [f'{server.open(episode)}/v1' for episode in episodes]
        found['turn'] = milliseconds(count, play, urls, dialect, args.turns, episodes)
        for episode in episodes:
            server.close(episode)
        print(f'{dialect}, CPU ms:', *(f'{name} {ms:.3f}' for name, ms in found.items()))


if __name__ == '__main__':
    main()
