"""What settings say of themselves: the comments beside fields, --show_config, tables of fields."""

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
from agentrl_jax.settings.marks import Chosen, From, When


@functools.cache
def comments(cls: type) -> Mapping[str, str]:
    """The comment beside each field and the lines of comment that follow; {} without source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    notes = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    alone = {line for line, t in notes.items() if t.line.lstrip().startswith('#')}
    found = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            following = node.end_lineno + 1
            while following in alone:
                following += 1
            lines = [line for line in range(node.lineno, following) if line in notes]
            found[node.target.id] = ' '.join(notes[line].string.lstrip('# ') for line in lines)
    return found


def doc(leaf: tree.Leaf) -> str:
    """The comment of the nearest class that has one."""
    classes = (cls for cls in leaf.owner.__mro__ if dataclasses.is_dataclass(cls))
    return next(filter(None, (comments(cls).get(leaf.attribute) for cls in classes)), '')


def show(made: Any, given: Mapping[str, Any]) -> str:
    """Settings, a field a line, with the value of the chosen class where that differs.

    given: {dotted name: value} of the ConfigDict that they were read from.
    """
    chosen = {}
    for leaf, each, _ in tree.variants(type(made)):
        key = leaf.marks[Chosen].key(getattr(made, leaf.attribute))
        chosen |= dict.fromkeys(each[key], key) | {n: (x, key) for n, x in each[key].items()}
    lines = []
    for name, value in tree.values(made).items():
        note = ''
        if name in chosen and value is not None:
            leaf, key = chosen[name]
            other = given.get(name) not in (None, leaf.default)
            note = f'  # {key}: {leaf.default!r}' if other else f'  # {key}'
        lines.append(f'{name} = {value!r}{note}')
    return '\n'.join(lines)


def table(cls: type, at: str = '') -> str:
    """The fields of a class as rows of markdown."""
    rows = ['| field | default | must be | |', '| --- | --- | --- | --- |']
    for leaf in tree.leaves(cls, at).values():
        value = leaf.marks[From].words if From in leaf.marks else f'`{leaf.default!r}`'
        needs = f' Needs {leaf.marks[When].words}.' if When in leaf.marks else ''
        rows.append(f'| `{leaf.name}` | {value} | {leaf.rule} | {doc(leaf)}{needs} |')
    return '\n'.join(rows)
