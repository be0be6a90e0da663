"""HTML of pages: templates of this folder in which every value is escaped, whoever wrote it."""

import functools
import html
import math
import urllib.parse
from typing import Any

import jinja2
from markupsafe import Markup

from agentrl_jax.envs.hosts.world import UNSEEN, spelled


def escape(text: Any) -> Markup:
    """Text that is safe between tags; unseen characters stand out."""
    escaped = html.escape(str(text))
    return Markup(UNSEEN.sub(lambda found: f'<b class="esc">{spelled(found[0])}</b>', escaped))


def escape_attribute(text: Any) -> Markup:
    """Text that is safe inside an attribute or a title; unseen characters as \\uNNNN."""
    return Markup(UNSEEN.sub(lambda found: spelled(found[0]), html.escape(str(text))))


def to_float(value: Any) -> float:
    return math.nan if value is None else float(value)


def many(count: int, noun: str) -> str:
    return f'{count} {noun}{"s" * (count != 1)}'


def _finalize(value: Any) -> Markup:
    """What a template writes for a value; jinja2's own escape leaves Markup as it is."""
    return value if isinstance(value, Markup) else escape(value)


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader('agentrl_jax.records', '.'),
    autoescape=True,
    finalize=_finalize,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    'attribute': escape_attribute,
    'number': to_float,
    'digits': lambda value, digits: f'{to_float(value):.{digits}g}',
    'many': many,
    'quoted': functools.partial(urllib.parse.quote, safe=''),  # no other address, no attribute
}


def render(template: str, **values: Any) -> str:
    """A template of this folder, filled."""
    return TEMPLATES.get_template(template).render(values)
