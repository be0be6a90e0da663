"""Harness programs, in any language."""

import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from agentrl_jax.envs.hosts.harness.episode import End
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.machine import children


class Program:
    """One run of a program, which is killed together with its child processes."""

    def __init__(self, command: Sequence[str], blames: Sequence[str]):
        """blames: errors of the policy, as named in the program's last line."""
        self.command, self.blames = command, blames
        self.process: subprocess.Popen | None = None
        self.stopped = False

    def play(self, task: Task) -> End:
        env = {
            'OPENAI_BASE_URL': task.base_url,
            'OPENAI_API_BASE': task.base_url,
            'OPENAI_API_KEY': task.api_key,
            'OPENAI_MODEL': task.model,
            'ANTHROPIC_BASE_URL': task.root_url,
            'ANTHROPIC_API_KEY': task.api_key,
            'ANTHROPIC_MODEL': task.model,
            'AGENTRL_ITEM': str(task.item),
            'AGENTRL_REWARD_URL': f'{task.root_url}/reward',
        }
        words = [word.replace('{item}', str(task.item)) for word in self.command]
        try:
            nothing = subprocess.DEVNULL
            pipes = dict(stdin=nothing, stdout=nothing, stderr=subprocess.PIPE)
            self.process = process = children.start(words, env=env, **pipes)
        except OSError as error:
            return End(error=f'{type(error).__name__}: {error}')
        if self.stopped:  # in the meantime
            children.kill(process)
        lines = []
        reader = threading.Thread(
            target=lambda: lines.append(last_line(process.stderr)), daemon=True
        )
        reader.start()
        code = process.wait()
        children.kill(process)  # leftover child processes, which may also keep stderr open
        reader.join(timeout=1.0)
        last = lines[0] if lines else ''
        error = last if last.partition(':')[0] in self.blames else ''
        return End(error=error or (f'exit code {code}: {last}' if code else ''))

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            children.kill(self.process)


def last_line(stream: Any) -> str:
    """Return the last line that a process writes, up to 2,000 bytes."""
    tail = b''
    while some := stream.read1(2**16):
        tail = (tail + some)[-2000:]
    lines = tail.decode('utf-8', 'replace').strip().splitlines()
    return lines[-1] if lines else ''
