"""The endpoint of harnesses: CPU time of a turn, beside a bare server of the same library.

  python -m benchmarks.harness [--episodes=64] [--turns=40]

All clients, each with its own connection, ask at once and are answered at once by a script in the
place of a policy; a turn's history grows. What is counted is the CPU time of the process, clients
included; it may be MOST_MS. The reference is the same clients against a server that answers a fixed
body, so the ratio is what reading, placing and answering a turn costs. No model and no tokens take
part.
"""

import argparse
import http.client
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agentrl_jax.envs.hosts.harness.endpoint import Endpoint
from agentrl_jax.envs.hosts.harness.episode import Episode
from agentrl_jax.envs.hosts.world import Answer

MOST_MS = 1.0  # of a turn at 64 episodes at once
BODY = json.dumps({'choices': [{'message': {'role': 'assistant', 'content': 'A'}}]}).encode()


class Bare(BaseHTTPRequestHandler):
    """Reads a request and answers the same body."""

    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    wbufsize = 2**16

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers['Content-Length']))
        self.send_response(200)
        self.send_header('Content-Length', str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)
        self.wfile.flush()


def talk(port: int, path: str, turns: int) -> None:
    """One client's conversation."""
    connection = http.client.HTTPConnection('127.0.0.1', port)
    messages = [{'role': 'user', 'content': 'Go.'}]
    for turn in range(turns):
        connection.request('POST', path, json.dumps({'model': 'm', 'messages': messages}))
        said = json.loads(connection.getresponse().read())['choices'][0]['message']
        messages += [said, {'role': 'user', 'content': f'Turn {turn}.'}]


def answers(episode: Episode, turns: int) -> None:
    for _ in range(turns):
        episode.events.get()
        episode.answer(Answer('A'))


def seconds(work: list) -> float:
    """CPU seconds of threads that do the work at once."""
    threads = [threading.Thread(target=function, args=given) for function, *given in work]
    began = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.process_time() - began


def measure(episodes: int, turns: int) -> dict[str, float]:
    """Milliseconds of a turn: ours, and the reference's."""
    bare = ThreadingHTTPServer(('127.0.0.1', 0), Bare)
    threading.Thread(target=bare.serve_forever, daemon=True).start()
    reference = seconds([(talk, bare.server_port, '/', turns)] * episodes)
    bare.shutdown()
    server, work = Endpoint(), []
    for _ in range(episodes):
        episode = Episode()
        path = f'{server.open(episode)}/v1/chat/completions'.removeprefix(server.url)
        work += [
            (talk, server.port, path, turns),
            (answers, episode, turns),
        ]
    ours = seconds(work)
    count = episodes * turns / 1e3
    return {'ours': ours / count, 'reference': reference / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--episodes', type=int, default=64)
    parser.add_argument('--turns', type=int, default=40)
    given = parser.parse_args()
    found = measure(given.episodes, given.turns)
    print(f'{given.episodes} episodes at once, {given.turns} turns each, CPU ms of a turn')
    print(f'endpoint {found["ours"]:.3f}, bare server {found["reference"]:.3f}', end='')
    print(f': {found["ours"] / found["reference"]:.2f} times as much', end='')
    print(f'; {"within" if found["ours"] <= MOST_MS else "ABOVE"} {MOST_MS:g} ms')


if __name__ == '__main__':
    main()
