"""World servers that a run starts for itself; they end with the run, however it ends."""

import json
import os
import pathlib
import subprocess
import time

from agentrl_jax.envs.hosts.connection import can_be_read
from agentrl_jax.machine.children import Child

START_S = 120.0  # for a server to be ready
END_S = 15.0  # for a server to end; its worlds have 3 s to close


class Launched(Child):
    """A server in a child process; its stdin is a pipe that closes when this process ends."""

    def __init__(
        self,
        env: str,
        *,
        settings: dict | None = None,  # keywords of the world
        log: str | pathlib.Path = os.devnull,  # output of the server and its worlds
        **limits: float,  # other flags of the server, such as workers
    ):
        words = {'env': env, 'settings': json.dumps(settings or {})} | limits
        flags = [f'--{name}={value}' for name, value in words.items()]
        with open(log, 'ab') as out:
            # Ctrl-C goes to the run, which then ends its servers
            super().__init__('agentrl_jax.serve', '--until_stdin_closes', *flags, stderr=out)
        self.url = self._url(f'{env} (its output: {log})')

    def _url(self, name: str) -> str:
        deadline = time.monotonic() + START_S
        while can_be_read(self.process.stdout, max(deadline - time.monotonic(), 0)):
            line = self.process.stdout.readline()
            if not line:
                code = self.process.wait()
                raise RuntimeError(f'the server of {name} ended with exit code {code}')
            if line.startswith(b'{"url"'):
                return json.loads(line)['url']
        self.close()
        raise TimeoutError(f'the server of {name} was not ready within {START_S:g} s')

    def close(self) -> None:
        """End the server; idempotent."""
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> 'Launched':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
