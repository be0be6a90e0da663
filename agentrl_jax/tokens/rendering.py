"""Chat templates, rendered by Jinja in this process.

The immutable sandbox blocks access to files and Python internals, and endless ranges. The sizes of
templates and texts are limited. Nested loops can still take a long time.
"""

import datetime
import functools
import json
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE = 2**20  # characters
MAX_TEXT = 2**22
# Date for templates that use one, fixed for reproducible prompts. It is Llama 3.1's default.
TODAY = datetime.datetime(2024, 7, 26)
# Exceptions that expressions of a template can raise
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _Generation(ext.Extension):
    """{% generation %} marks text to train on; it renders its body."""

    tags = {'generation'}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE:
        raise ValueError(f'it has {len(template):,} characters; the limit is {MAX_TEMPLATE:,}')
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    # The same additions as in transformers
    environment.globals['raise_exception'] = _raise_exception
    environment.globals['strftime_now'] = TODAY.strftime
    environment.filters['tojson'] = _to_json
    return environment.from_string(template)


def render(template: str, messages: list[dict], **fields: Any) -> str:
    """Return a conversation's text up to the start of the next answer.

    fields: tools, documents and special tokens by name. Raises ValueError if the template fails or
    its text is too long.
    """
    fields = {'tools': None, 'documents': None, 'add_generation_prompt': True} | fields
    parts, length = [], 0
    try:
        for part in _compile(template).generate(messages=messages, **fields):
            parts.append(part)
            length += len(part)
            if length > MAX_TEXT:
                raise ValueError(f'it renders more than {MAX_TEXT:,} characters')
        text = ''.join(parts)
        text.encode()  # raises for lone surrogates
    except _FAILURES as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return text
