"""Renders chat templates in a separate process: a template is a program of somebody else's.

Jinja's sandbox keeps it from files and from the insides of Python, but not from loops without end
nor from gigabytes (`{{ 'x' * 10**10 }}`; repeated, padded and joined texts; loops in loops that
write nothing), of which there are too many forms to forbid each. A process can be bounded as a
whole. It takes a tenth of a second to start, so `render` is for what is rendered once, and a
Renderer, whose process stays, for the conversations of a run.

The same file is the process: of each line {"template", "messages", ...} that it reads it writes the
text as a line of JSON. What is wrong with a template ends it, in a line of stderr.
"""

import functools
import json
import resource
import selectors
import subprocess
import sys
import threading
from typing import Any

CPU_S = 2  # seconds of computing for a conversation, of which the start takes 0.1
MEMORY = 2**29  # bytes of addresses, on Linux; macOS knows no such limit
# To templates that ask: a run has the same prompts on every day. Llama 3.1's own
TODAY = (2024, 7, 26)
LONGEST = 2**16  # characters of a text that is rendered once
SAID = 2000  # characters of what is wrong
PATIENCE_S = 60  # of the clock, on a machine that does not let the process compute


class TemplateError(ValueError):
    """What is wrong with a template, as somebody else words it."""


@functools.lru_cache(maxsize=64)
def render(template: str, messages: str, named: str = '{}') -> str:
    """The template's text of a conversation, up to where the next answer begins.

    messages: JSON of [{'role': 'user', 'content': '...'}, ...]; named: JSON of special tokens.
    """
    renderer = Renderer(template)
    try:
        return renderer.render(json.loads(messages), **json.loads(named))
    finally:
        renderer.close()


class Renderer:
    """A process that renders one template; made anew where a conversation has ended it."""

    def __init__(self, template: str, longest: int = LONGEST):
        """longest: characters of a text."""
        self._template, self._longest, self._lock = template, longest, threading.Lock()
        self._process: subprocess.Popen | None = None

    def render(self, messages: list[dict], **more: Any) -> str:
        """The template's text of a conversation, up to where the next answer begins."""
        asked = {'template': self._template, 'longest': self._longest}
        asked |= {'messages': messages, 'more': more}
        line = json.dumps(asked).encode() + b'\n'
        with self._lock:
            return self._say(line)

    def _say(self, line: bytes) -> str:
        if self._process is None:
            command = [sys.executable, '-P', __file__]  # -P: modules beside it hide no others
            pipe = subprocess.PIPE
            # Signals to the group of a run, such as Ctrl-C, are for the run, which plays on
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        process = self._process
        try:
            process.stdin.write(line)
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:  # select() takes no descriptor over 1,023
                selector.register(process.stdout, selectors.EVENT_READ)
                answered = selector.select(PATIENCE_S)
            if not answered:
                self.close()
                raise TemplateError(f'it takes more than {PATIENCE_S} s')
            found = process.stdout.readline()
        except BrokenPipeError:
            found = b''
        if found:
            return json.loads(found)
        said = process.stderr.read().decode('utf-8', errors='replace').strip()
        code = process.wait()
        self.close()
        endless = f'it takes more than {CPU_S} s, or ends its process'
        raise TemplateError(said if code > 0 else endless)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()


def _bound(used_s: int = 0) -> None:
    """Lets this process take no more than its share, and say in a line why it ended."""

    def say(kind, error, trace):
        text = f'it takes more than {MEMORY:,} bytes of memory' if kind is MemoryError else error
        print(str(text)[:SAID] or kind.__name__, file=sys.stderr)  # nobody reads it before the end

    sys.excepthook = say
    wanted = {resource.RLIMIT_CPU: used_s + CPU_S, resource.RLIMIT_CORE: 0}
    if sys.platform == 'linux':
        wanted[resource.RLIMIT_AS] = MEMORY
    for which, most in wanted.items():
        _, allowed = resource.getrlimit(which)
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(which, (most, allowed))  # it is raised again with each conversation


@functools.cache
def _compiled(template: str) -> Any:
    import datetime

    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what trains; it renders its body."""

        tags = {'generation'}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method('body'), [], [], body).set_lineno(line)

        def body(self, caller):
            return caller()

    def raise_exception(reason: str):
        raise jinja2.TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    # What transformers gives a template besides
    environment.globals['raise_exception'] = raise_exception
    environment.globals['strftime_now'] = datetime.datetime(*TODAY).strftime
    environment.filters['tojson'] = tojson
    return environment.from_string(template)


def _answer(asked: dict) -> str:
    template = _compiled(asked['template'])
    fields = {'tools': None, 'documents': None, 'add_generation_prompt': True} | asked['more']
    text = template.render(messages=asked['messages'], **fields)
    if len(text) > asked['longest']:
        raise ValueError(f'it renders {len(text):,} characters')
    return text


def _serve() -> None:
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _bound(int(used.ru_utime + used.ru_stime) + 1)
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == '__main__':
    _bound()
    _serve()
