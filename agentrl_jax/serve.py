"""Serve environments over HTTP with AgentGym's protocol (see agentrl_jax/envs/hosts/server.py).

  python -m agentrl_jax.serve --env=textcraft --port=0
  python -m agentrl_jax.serve --env=device --settings='{"name": "sokoban"}' --port=8080
  python -m agentrl_jax.serve --env=sciworld --workers=4 --worlds=16 --address=0.0.0.0 --token=FILE

The first line of the output is {"url": ...}; --port=0 selects a free port. --env is the name of an
environment, or module:class. To accept other machines, set --address and a --token file; clients
must send the token in its first line.
"""

import sys

from absl import flags

from agentrl_jax.run import command, usage

if __name__ == '__main__':
    names = (
        'textcraft, sciworld, babyai, device, search, searchqa, shop, webshop, miniwob, web, '
        'webarena, or module:class.'
    )
    flags.DEFINE_string('env', None, names)
    flags.DEFINE_integer('port', 0, 'Port to listen on; 0 = a free one.', 0, 65535)
    flags.DEFINE_string('address', '127.0.0.1', 'Address to listen on; 0.0.0.0 = all.')
    flags.DEFINE_alias('host', 'address')
    flags.DEFINE_string('token', '', "File with the clients' token in its first line.")
    flags.DEFINE_string('settings', '{}', 'Keyword arguments of the environment, as JSON.')
    flags.DEFINE_integer('workers', 1, 'Processes that run environments.', 1)
    flags.DEFINE_integer('worlds', 64, 'Maximum number of open environments per worker.', 1)
    flags.DEFINE_float('lease_s', 600.0, 'Seconds without a call until an environment is closed.')
    flags.DEFINE_float('step_s', 60.0, 'Maximum seconds for a reset or a step.')
    flags.DEFINE_float('worker_mb', 4096.0, 'Restart a worker that uses more memory than this.')
    flags.DEFINE_boolean('until_stdin_closes', False, 'Exit when stdin closes.')
    command.begin(__doc__, needs=('env',))

import asyncio
import ipaddress
import json
import os
import socket
import threading

import uvicorn

from agentrl_jax.envs.hosts import gate, server, workers
from agentrl_jax.envs.hosts.connection import token_in

LEAST_TOKEN = 16  # characters
END_S = 10.0  # for requests and environments to end after stdin has closed


def token_of(path: str, address: str) -> str:
    """Read the token of clients; an address that other machines reach needs one."""
    token = token_in(path)
    if path and len(token) < LEAST_TOKEN:
        raise ValueError(
            f'{path}: the first line must be a token of at least {LEAST_TOKEN} characters'
        )
    local = all(ipaddress.ip_address(number).is_loopback for _, number in gate.resolved(address))
    if not token and not local:
        raise ValueError(f'--address={address} accepts other machines: set --token to a file')
    return token


def end_with_input(running: uvicorn.Server) -> None:
    """Stop the server when stdin closes, which happens however the parent process ends."""
    while os.read(0, 4096):
        pass
    running.should_exit = True
    threading.Timer(END_S, os._exit, (1,)).start()


async def serve(app, listener: socket.socket, *, until_stdin_closes: bool) -> int:
    """Serve until shutdown and return the exit code."""
    settings = uvicorn.Config(
        app,
        access_log=False,
        log_level='warning',
        timeout_keep_alive=300,  # a policy may take long between two steps
        timeout_graceful_shutdown=3,
    )
    running = uvicorn.Server(settings)
    if until_stdin_closes:
        threading.Thread(target=end_with_input, args=(running,), daemon=True).start()
    task = asyncio.create_task(running.serve(sockets=[listener]))
    started = app.state.worlds.workers
    while not task.done() and not any(worker.ready for worker in started):
        await asyncio.sleep(0.02)
        if all(worker.stillborn for worker in started):
            running.should_exit = True
            await task
            return 1
    print(json.dumps({'url': gate.url_of(listener)}), flush=True)
    await task
    return 0


def main() -> int:
    args = flags.FLAGS
    workers.place_of(args.env)
    try:
        settings = json.loads(args.settings)
    except ValueError as error:
        raise ValueError(f'--settings is not valid JSON: {error}') from error
    if not isinstance(settings, dict):
        raise ValueError('--settings must be a JSON object of keywords')
    token = token_of(args.token, args.address)
    names = ('workers', 'worlds', 'lease_s', 'step_s', 'worker_mb')
    limits = server.Limits(**{name: getattr(args, name) for name in names})
    app = server.build_app(args.env, settings, limits=limits, token=token)
    listener = gate.listening(args.address, args.port)
    return asyncio.run(serve(app, listener, until_stdin_closes=args.until_stdin_closes))


if __name__ == '__main__':
    with usage.one_line_errors():
        code = main()
    sys.exit(code)
