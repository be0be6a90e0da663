"""Serves worlds over HTTP, in AgentGym's protocol (agentrl_jax/envs/hosts/server.py lists it).

  python -m agentrl_jax.serve --env=textcraft --port=0
  python -m agentrl_jax.serve --env=sciworld --workers=4 --worlds=16 --address=0.0.0.0 --token=FILE

The first line of the output is {"url": ...}; --port=0 takes a free port. --env names a world, or
is module:class of one's own. Other machines are let in by --address, and only with a token: the
first line of a file, which clients show as well.
"""

import sys

from absl import flags

from agentrl_jax.run import command

if __name__ == '__main__':
    names = (
        'textcraft, sciworld, babyai, device, search, searchqa, shop, webshop, miniwob, web, '
        'webarena, or module:class.'
    )
    flags.DEFINE_string('env', None, names)
    flags.DEFINE_integer('port', 0, 'Port to listen at; 0 = a free one.', 0, 65535)
    flags.DEFINE_string('address', '127.0.0.1', 'Address to listen at; 0.0.0.0 = all.')
    flags.DEFINE_string('token', '', 'File whose first line clients must show.')
    flags.DEFINE_string('settings', '{}', 'Keywords of the world, as JSON.')
    flags.DEFINE_integer('workers', 1, 'Processes that hold worlds.', 1)
    flags.DEFINE_integer('worlds', 64, 'Worlds that may be open in each.', 1)
    flags.DEFINE_float('lease_s', 600.0, 'Seconds without a call after which a world is closed.')
    flags.DEFINE_float('step_s', 60.0, 'Seconds that a reset or a step may take.')
    flags.DEFINE_float('worker_mb', 4096.0, 'Memory of a worker, above which it is started again.')
    flags.DEFINE_boolean('until_stdin_closes', False, 'End when the input does: with the starter.')
    command.begin(__doc__, needs=('env',))

import asyncio
import ipaddress
import json
import os
import pathlib
import socket
import threading

import uvicorn

from agentrl_jax.envs.hosts import server

END_S = 10.0  # for requests and worlds to end when the starter has gone


def token_of(path: str, address: str) -> str:
    """The token in a file; an address that others reach needs one."""
    token = ''
    if path:
        token = pathlib.Path(path).read_text(encoding='utf-8').partition('\n')[0].strip()
        if len(token) < 16:
            raise ValueError(f'{path}: the first line must be a token of 16 characters or more')
    if not token and not ipaddress.ip_address(address).is_loopback:
        raise ValueError(f'--address={address} lets other machines in: name a file with --token')
    return token


def listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=1024)
    # Else an answer's body waits for the client to acknowledge its headers, 40 ms on Linux; asyncio
    # sets it only on sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def end_with_input(running: uvicorn.Server) -> None:
    """The pipe's other end closes when the starter ends, however it does."""
    while os.read(0, 4096):
        pass
    running.should_exit = True
    threading.Timer(END_S, os._exit, (1,)).start()


async def serve(app, listener: socket.socket, *, until_stdin_closes: bool) -> int:
    """Serves until asked to end; the exit code."""
    settings = uvicorn.Config(
        app,
        access_log=False,
        log_level='warning',
        timeout_keep_alive=300,  # a policy may think for long between two steps
        timeout_graceful_shutdown=3,
    )
    running = uvicorn.Server(settings)
    if until_stdin_closes:
        threading.Thread(target=end_with_input, args=(running,), daemon=True).start()
    task = asyncio.create_task(running.serve(sockets=[listener]))
    workers = app.state.worlds.workers
    while not task.done() and not any(worker.ready for worker in workers):
        await asyncio.sleep(0.02)
        if all(worker.stillborn for worker in workers):
            running.should_exit = True
            await task
            return 1
    address, port = listener.getsockname()[:2]
    host = f'[{address}]' if ':' in address else address
    print(json.dumps({'url': f'http://{host}:{port}'}), flush=True)
    await task
    return 0


def main() -> int:
    args = flags.FLAGS
    settings = json.loads(args.settings)
    if not isinstance(settings, dict):
        raise ValueError(f'--settings={args.settings} must be a JSON object of keywords')
    token = token_of(args.token, args.address)
    limits = server.Limits(
        workers=args.workers,
        worlds=args.worlds,
        lease_s=args.lease_s,
        step_s=args.step_s,
        worker_mb=args.worker_mb,
    )
    app = server.build_app(args.env, settings, limits=limits, token=token)
    listener = listening(args.address, args.port)
    return asyncio.run(serve(app, listener, until_stdin_closes=args.until_stdin_closes))


if __name__ == '__main__':
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f'error: {error}')
