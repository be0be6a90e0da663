"""A page as lines of text: its accessibility tree, as in WebArena (arXiv:2307.13854).

A line is `[number] role 'name' property: value`, indented by its depth. Numbers count the lines of
one observation from 1. So a page has the same text in every process, unlike with the browser's ids.
"""

import dataclasses
from typing import Any

Bounds = dict[int, tuple[float, float, float, float]]  # left, top, width, height on the page

UNSEEN = {'', 'RootWebArea', 'InlineTextBox', 'LabelText', 'paragraph', 'LineBreak', 'ListMarker'}
PLAIN = {'generic', 'none', 'Section', 'Legend', 'list', 'listitem', 'rowgroup', 'MenuListPopup'}
PLAIN |= {'banner', 'navigation', 'strong', 'emphasis', 'SvgRoot', 'Canvas', 'img', 'image'}
PLAIN |= {'StaticText'}  # included only if they have a name or are focusable
STATES = ('focused', 'selected', 'disabled', 'required', 'hasPopup')  # included if true
CHOICES = ('checked', 'expanded')  # included if present
WITH_VALUE = ('textbox', 'searchbox', 'combobox', 'spinbutton', 'slider', 'Date', 'InputTime')
FOLDED = ('textbox', 'searchbox', 'spinbutton')  # their content is their value


@dataclasses.dataclass(frozen=True)
class Line:
    """An element of an observation."""

    depth: int
    node: int  # the browser's id in the document
    role: str
    name: str
    more: tuple[tuple[str, str], ...] = ()  # properties and their values

    def text(self, number: int) -> str:
        more = ''.join(f' {name}: {value}' for name, value in self.more)
        return f'{chr(9) * self.depth}[{number}] {self.role} {self.name!r}{more}'


def lines(
    nodes: list[dict], bounds: Bounds, window: tuple[float, float, float, float]
) -> list[Line]:
    """Return the visible lines of a page.

    nodes: from Accessibility.getFullAXTree, root first; window: the visible part. An element
    without bounds, such as an option of a closed list, is visible if its parent is.
    """
    known, result = {node['nodeId']: node for node in nodes}, []
    left = [(nodes[0], 0, '', False)] if nodes else []
    while left:
        node, depth, above, hidden = left.pop()
        place = node.get('backendDOMNodeId', 0)
        outside = not overlap(bounds[place], window) if place in bounds else hidden
        line = None if node['ignored'] or outside else read(node, depth)
        if line is not None and line.role == 'StaticText' and line.name in above:
            line = None
        if line is not None:
            result.append(line)
            depth, above = depth + 1, line.name + line.text(0) * (line.role in FOLDED)
        children = [known[child] for child in node.get('childIds', ()) if child in known]
        left += [(child, depth, above, outside) for child in reversed(children)]
    return result


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(
        one[i] < other[i] + other[i + 2] and other[i] < one[i] + max(one[i + 2], 1) for i in (0, 1)
    )


def value_of(node: dict, name: str) -> Any:
    """Return the role, name or value of a node; '' if it has none."""
    return node[name].get('value', '') if name in node else ''


def read(node: dict, depth: int) -> Line | None:
    """Return the line of an element; None for a plain container."""
    role, name = str(value_of(node, 'role')), ' '.join(str(value_of(node, 'name')).split())
    properties = {item['name']: item['value'].get('value') for item in node.get('properties', ())}
    focusable = 'focusable' in properties and properties['focusable']
    if role in UNSEEN or role in PLAIN and not name and not focusable:
        return None
    more = [
        (key, str(value).capitalize() if str(value) in ('true', 'false') else str(value))
        for key, value in properties.items()
        if key in CHOICES or key in STATES and value not in (False, 'false', '')
    ]
    more.sort(key=lambda item: (*STATES, *CHOICES).index(item[0]))
    value = str(value_of(node, 'value'))
    if role in WITH_VALUE and value and value != name:
        more.append(('value', repr(value)))
    return Line(depth, node.get('backendDOMNodeId', 0), role, name, tuple(more))
