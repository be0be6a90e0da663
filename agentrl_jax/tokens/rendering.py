"""Renders a chat template in a separate process: a template is a program of somebody else's.

Jinja's sandbox keeps it from files and from the insides of Python, but not from loops without end
nor from gigabytes (`{{ 'x' * 10**10 }}`; repeated, padded and joined texts; loops in loops that
write nothing), of which there are too many forms to forbid each. A process can be bounded as a
whole. It takes a tenth of a second, once for each template and conversation.

The same file is the process: it reads {"template", "messages"} as JSON and writes the text as JSON.
"""

import functools
import json
import resource
import subprocess
import sys

CPU_S = 2  # seconds of computing, of which the start takes 0.1
MEMORY = 2**29  # bytes of addresses, on Linux; macOS knows no such limit
LONGEST = 2**16  # characters of a text
PATIENCE_S = 60  # of the clock, on a machine that does not let the process compute


class TemplateError(ValueError):
    """What is wrong with a template, as somebody else words it."""


@functools.lru_cache(maxsize=64)
def render(template: str, messages: str) -> str:
    """The template's text of a conversation, up to where the next answer begins.

    messages: JSON of [{'role': 'user', 'content': '...'}, ...].
    """
    asked = json.dumps({'template': template, 'messages': json.loads(messages)})
    command = [sys.executable, '-P', __file__]  # -P: modules beside this file hide no others
    try:
        done = subprocess.run(
            command, input=asked.encode(), capture_output=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TemplateError(f'it takes more than {PATIENCE_S} s') from error
    if done.returncode < 0:
        raise TemplateError(f'it takes more than {CPU_S} s, or ends its process')
    if done.returncode:
        raise TemplateError(done.stderr.decode('utf-8', errors='replace').strip())
    return json.loads(done.stdout)


def _bound() -> None:
    """Lets this process take no more than its share, and say in a line why it ended."""

    def say(kind, error, trace):
        text = f'it takes more than {MEMORY:,} bytes of memory' if kind is MemoryError else error
        print(str(text) or kind.__name__, file=sys.stderr)

    sys.excepthook = say
    wanted = {resource.RLIMIT_CPU: CPU_S, resource.RLIMIT_CORE: 0}
    if sys.platform == 'linux':
        wanted[resource.RLIMIT_AS] = MEMORY
    for which, most in wanted.items():
        _, allowed = resource.getrlimit(which)
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(which, (most, most))


def _answer(asked: dict) -> None:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(reason: str):
        raise jinja2.TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols']
    )
    environment.globals['raise_exception'] = raise_exception
    compiled = environment.from_string(asked['template'])
    text = compiled.render(messages=asked['messages'], add_generation_prompt=True)
    if len(text) > LONGEST:
        raise jinja2.TemplateError(f'it renders {len(text):,} characters')
    json.dump(text, sys.stdout)


if __name__ == '__main__':
    _bound()
    _answer(json.load(sys.stdin))
