"""Tool calls: one parser for the text of answers and the messages of requests.

Grammar of an answer with tags (ChatML):

  answer  = (text | thought | call)*
  thought = '<think>' text '</think>'          without a closing tag, it lasts to the end
  call    = '<tool_call>' object '</tool_call>'    the last closing tag may be missing

A '</think>' outside a call ends a thought that the prompt opened; text before it is ignored. With
'object' (Llama 3) a call is an object at the end of the answer that names a known tool and has
parameters or arguments; '<|python_tag|>' may precede it. A JSON decoder finds the end of an object,
so tags inside its strings are text.
"""

import json
import math
import re
from collections.abc import Collection
from typing import Any

MAX_DEPTH = 100  # of nested JSON: templates and copies recurse into it
THINK, END_OF_THOUGHT = '<think>', '</think>'
CALL, END_OF_CALL = '<tool_call>', '</tool_call>'
PYTHON_TAG = '<|python_tag|>'
SPACE = re.compile(r'[ \t\n\r]*')
MARKS = {
    'tags': re.compile('|'.join((THINK, END_OF_THOUGHT, CALL))),
    'object': re.compile('|'.join((THINK, END_OF_THOUGHT, re.escape(PYTHON_TAG), '{'))),
}


def _reject(constant: str) -> Any:
    raise ValueError(f'{constant} is not JSON')


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f'{digits:.20} is too large')
    return number


CONTAINERS = (dict, list)
DECODER = json.JSONDecoder(parse_constant=_reject, parse_float=_finite)


def _check_depth(value: Any, levels: int = MAX_DEPTH) -> None:
    if not isinstance(value, CONTAINERS):
        return
    if not levels:
        raise ValueError(f'more than {MAX_DEPTH} levels of nesting')
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, CONTAINERS):  # most are not, and a function call costs more
            _check_depth(child, levels - 1)


def read_json(raw: str | bytes) -> Any:
    """Parse JSON; raise ValueError for NaN, Infinity, deep nesting and invalid JSON."""
    try:
        value = json.loads(raw, parse_constant=_reject, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(f'more than {MAX_DEPTH} levels of nesting') from error
    _check_depth(value)
    return value


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Return (value, its end) of the JSON value at a position."""
    try:
        value, end = DECODER.raw_decode(text, SPACE.match(text, at).end())
    except RecursionError as error:
        raise ValueError(f'more than {MAX_DEPTH} levels of nesting') from error
    _check_depth(value)
    return value, end


def read_arguments(arguments: Any) -> dict:
    """Return arguments as an object, decoding JSON strings; null and '' are {}; else ValueError."""
    while isinstance(arguments, str):
        arguments = read_json(arguments) if arguments.strip() else None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ValueError('arguments must be an object')
    json.dumps(arguments, ensure_ascii=False).encode()  # ValueError for a lone surrogate
    return arguments


def read_call(function: Any) -> dict:
    """Return {'name', 'arguments'}; raise ValueError without a name or with invalid arguments."""
    name = function.get('name') if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError('a call needs a name')
    name.encode()
    arguments = function.get('arguments')
    if arguments is None:
        arguments = function.get('parameters')
    return {'name': name, 'arguments': read_arguments(arguments)}


def find_calls(text: str, form: str, tools: Collection[str]) -> tuple[str, list[dict], int]:
    """Return (text before the first call, calls, number of invalid calls) of an answer.

    form: 'tags' or 'object'. tools: tool names that a call without tags may use.
    """
    calls, bad, first, at = [], 0, None, 0
    marks = MARKS[form]
    while mark := marks.search(text, at):
        begin, at = mark.span()
        if mark[0] == THINK:
            end = text.find(END_OF_THOUGHT, at)
            at = len(text) if end < 0 else end
            continue
        if mark[0] == END_OF_THOUGHT:
            calls, bad, first = [], 0, None
            continue
        try:
            if form == 'tags':
                call, at = _tagged(text, at)
            else:
                call, at = _object(text, begin, at, tools)
        except ValueError:
            call, bad = None, bad + 1
        if call:
            calls.append(call)
        if call or bad:
            first = begin if first is None else first
    return text[:first], calls, bad if form == 'tags' else min(bad, 1)


def _tagged(text: str, at: int) -> tuple[dict, int]:
    """Return (call, its end) after an opening tag."""
    value, end = _decode(text, at)
    end = SPACE.match(text, end).end()
    if end < len(text) and not text.startswith(END_OF_CALL, end):
        raise ValueError(f'{END_OF_CALL} must follow the object')
    return read_call(value), end + len(END_OF_CALL)


def _object(text: str, begin: int, at: int, tools: Collection[str]) -> tuple[dict | None, int]:
    """Return (call or None, position to continue) at an object or a python tag."""
    announced = at - begin > 1
    try:
        value, end = _decode(text, at if announced else begin)
    except ValueError:
        if announced or _is_attempt(text, begin, tools):
            raise
        return None, at
    if not _is_call(value, tools):
        if announced:
            raise ValueError('the call does not name a known tool')
        return None, end
    if SPACE.match(text, end).end() < len(text):
        raise ValueError('a call must end the answer')
    return read_call(value), len(text)


def _is_call(value: Any, tools: Collection[str]) -> bool:
    """Return whether an object names a known tool and has arguments."""
    if not isinstance(value, dict) or not {'arguments', 'parameters'} & value.keys():
        return False
    return isinstance(value.get('name'), str) and value['name'] in tools


def _is_attempt(text: str, begin: int, tools: Collection[str]) -> bool:
    """Return whether text that is not JSON looks like a call of a known tool."""
    names = '|'.join(map(re.escape, tools))
    start = r'{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"?name"?\s*:\s*"?'
    return bool(names) and bool(re.match(rf'{start}(?:{names})\b', text[begin : begin + 400]))
