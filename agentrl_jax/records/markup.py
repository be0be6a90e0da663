"""HTML of pages from the Jinja templates of this folder, with every value escaped."""

import functools
import html
import math
import urllib.parse
from typing import Any

import jinja2
from markupsafe import Markup

from agentrl_jax.envs.hosts.world import UNSEEN, spelled


def escape(text: Any) -> Markup:
    """Escape text for HTML and attributes; unprintable characters become \\xNN or \\uNNNN."""
    return Markup(UNSEEN.sub(lambda match: spelled(match[0]), html.escape(str(text))))


def to_float(value: Any) -> float:
    return math.nan if value is None else float(value)


def many(count: int, noun: str) -> str:
    return f'{count} {noun}{"s" * (count != 1)}'


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader('agentrl_jax.records', '.'),
    autoescape=True,
    finalize=lambda value: value if isinstance(value, Markup) else escape(value),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    'number': to_float,
    'digits': lambda value, digits: f'{to_float(value):.{digits}g}',
    'many': many,
    'quoted': functools.partial(urllib.parse.quote, safe=''),
}


def render(template: str, **values: Any) -> str:
    """Fill a template of this folder."""
    return TEMPLATES.get_template(template).render(values)
