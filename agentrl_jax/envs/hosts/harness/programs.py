"""A program that plays an episode: an agent in any language."""

import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from agentrl_jax.envs.hosts.harness.episode import End
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.machine import children


class Program:
    """One run of a program, which ends with everything that it has started."""

    def __init__(self, command: Sequence[str], blames: Sequence[str]):
        """blames: errors of the policy, as the last line of the program names them."""
        self.command, self.blames = command, blames
        self.process: subprocess.Popen | None = None
        self.stopped = False

    def play(self, task: Task) -> End:
        address = task.base_url.removesuffix('/v1')
        given = {
            'OPENAI_BASE_URL': task.base_url,
            'OPENAI_API_BASE': task.base_url,
            'OPENAI_API_KEY': task.api_key,
            'OPENAI_MODEL': task.model,
            'AGENTRL_ITEM': str(task.item),
            'AGENTRL_REWARD_URL': f'{address}/reward',
        }
        words = [word.replace('{item}', str(task.item)) for word in self.command]
        try:
            nothing = subprocess.DEVNULL
            pipes = dict(stdin=nothing, stdout=nothing, stderr=subprocess.PIPE)
            self.process = process = children.start(words, env=given, **pipes)
        except OSError as error:
            return End(error=f'{type(error).__name__}: {error}')
        if self.stopped:  # in the meantime
            children.kill(process)
        kept = []
        reader = threading.Thread(
            target=lambda: kept.append(last_line(process.stderr)), daemon=True
        )
        reader.start()
        code = process.wait()
        children.kill(process)  # what it has left: it may hold stderr open, too
        reader.join(timeout=1.0)
        last = kept[0] if kept else ''
        error = last if last.partition(':')[0] in self.blames else ''
        return End(error=error or (f'exit code {code}: {last}' if code else ''))

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            children.kill(self.process)


def last_line(stream: Any) -> str:
    """The last line that a process writes, of at most 2,000 bytes."""
    kept = b''
    while some := stream.read1(2**16):
        kept = (kept + some)[-2000:]
    lines = kept.decode('utf-8', 'replace').strip().splitlines()
    return lines[-1] if lines else ''
