"""Documentation of settings: field comments, --show_config and tables of fields."""

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping
from typing import Any

from agentrl_jax.settings import tree
from agentrl_jax.settings.marks import OnlyIf


@functools.cache
def comments(cls: type) -> Mapping[str, str]:
    """Return each field's comment, including the comment lines below it; {} without source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    notes = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    alone = {line for line, t in notes.items() if t.line.lstrip().startswith('#')}
    texts = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            following = node.end_lineno + 1
            while following in alone:
                following += 1
            lines = [line for line in range(node.lineno, following) if line in notes]
            texts[node.target.id] = ' '.join(notes[line].string.lstrip('# ') for line in lines)
    return texts


def doc(leaf: tree.Leaf) -> str:
    """Return the field's comment from the nearest class that has one."""
    classes = (cls for cls in leaf.owner.__mro__ if dataclasses.is_dataclass(cls))
    return next(filter(None, (comments(cls).get(leaf.attribute) for cls in classes)), '')


def show(root: type, full: Any, given: Mapping[str, Any]) -> str:
    """Format a ConfigDict, one field per line, with comments on defaults of chosen classes.

    full: with a run's values filled in; given: {dotted name: value} before that.
    """
    notes = {}
    for leaf, each, every in tree.variants(root):
        preset = tree.values(tree.read(root, {n: x for n, x in given.items() if n not in every}))
        differ = (name for name, one in tree.defaults(root).items() if one.default is None)
        chosen = each[given[leaf.name]]
        for name, one in ((name, chosen[name]) for name in differ if name in chosen):
            value = one.default if preset[name] is None else preset[name]
            notes[name] = (given[leaf.name], value)
    lines = []
    for name, value in tree.flat(full).items():
        lines.append(f'{name} = {value!r}')
        if name in notes and value is not None:
            key, preset = notes[name]
            lines[-1] += f'  # {key}' if value == preset else f'  # {key}: {preset!r}'
    return '\n'.join(lines)


def table(root: type, section: str = '') -> str:
    """Return all fields of a root, or of a section with that name, as a Markdown table.

    A default that depends on the chosen class is ''.
    """
    rows = ['| field | default | must be | |', '| --- | --- | --- | --- |']
    for name, leaf in tree.defaults(root, section and f'{section}.').items():
        value = '' if leaf.default is None else f'`{leaf.default!r}`'
        needs = f' Needs {leaf.marks[OnlyIf].words}.' if OnlyIf in leaf.marks else ''
        rows.append(f'| `{name}` | {value} | {leaf.rule} | {doc(leaf)}{needs} |')
    return '\n'.join(rows)
