"""Settings are frozen dataclasses; a ConfigDict is their face.

A field says everything about itself: type, default, choices (Literal, OneOf) or bounds (In); its
comment is its documentation. `config_dict` makes the ConfigDict that users change, `read` the
dataclasses of it, with a sentence for each thing that is wrong. Of a Chosen field the ConfigDict
holds a name, which selects the class; fields that its classes do not all have, with one default,
are placeholders.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import ml_collections
from ml_collections.config_dict import placeholder

from agentrl_jax.settings.marks import (
    At,
    Chosen,
    From,
    In,
    Inline,
    Off,
    OneOf,
    When,
    Words,
    suggestion,
)

APART = types.MappingProxyType({'apart': True})  # metadata of fields that are no settings
LARGEST = 2**31 - 1  # whole numbers are counted in int32, unless their field says how far they go
SYNONYMS = {  # names that people look for -> ours
    'learning_rate': 'lr',
    'batch_size': 'minibatch_rows',
    'micro_batch_size': 'microbatch_rows',
    'max_length': 'max_tokens',
    'gradient_checkpointing': 'remat',
    'num_episodes': 'num_groups',
}
WORDS = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a text'}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A field: its dotted name in the ConfigDict, and what its class says of it."""

    name: str
    attribute: str
    owner: type
    hint: Any  # without Annotated and None
    marks: Mapping[type, Any]  # of Annotated, by their types
    default: Any

    @property
    def kind(self) -> type:
        origin = typing.get_origin(self.hint)
        return type(typing.get_args(self.hint)[0]) if origin is Literal else origin or self.hint

    @property
    def names(self) -> Collection[Any]:
        """The values to choose from; () for other fields."""
        named = self.marks.get(OneOf) or self.marks.get(Chosen)
        if named:
            return named.names
        return typing.get_args(self.hint) if typing.get_origin(self.hint) is Literal else ()

    @property
    def rule(self) -> str:
        """What a value must be."""
        if Words in self.marks:
            return self.marks[Words].text
        if self.names:
            among = 'some' if self.kind is tuple else 'one'
            return f'{among} of {", ".join(map(str, self.names))}'
        if self.kind in (int, float):
            return str(self.marks.get(In, In()))
        return WORDS.get(self.kind, str(self.hint))

    def take(self, value: Any) -> Any:
        """The value as its type has it; ValueError with a sentence."""
        try:
            value = cast(value, self.hint)
        except TypeError:
            other = self.marks[Words].text if Words in self.marks else str(self.hint)
            words = WORDS.get(self.kind, other)
            raise ValueError(f'{self.name}={value!r} must be {words}') from None
        inside = self.kind not in (int, float) or self.marks.get(In, In()).holds(value)
        literal = typing.get_origin(self.hint) is not Literal or value in typing.get_args(self.hint)
        chosen = value if isinstance(value, tuple) else (value,)
        known = OneOf not in self.marks or set(chosen) <= set(self.marks[OneOf].names)
        if not (inside and literal and known):
            close = suggestion(value, self.names)
            raise ValueError(f'{self.name}={value!r} must be {self.rule}{close}')
        if self.kind is int and value > LARGEST and math.isinf(self.marks.get(In, In()).high):
            raise ValueError(f'{self.name}={value!r} must be {LARGEST} at most')
        return value

    def chosen(self, given: Mapping[str, Any]) -> type:
        """Of a Chosen: the class that the config names."""
        by = self.marks[Chosen].by
        if given.get(self.name) is None:
            return type(self.default)
        if given[self.name] not in by:
            close = suggestion(given[self.name], by)
            raise ValueError(f'{self.name}={given[self.name]!r} must be {self.rule}{close}')
        return by[given[self.name]]

    def asks(self, given: Mapping[str, Any]) -> bool:
        """Whether it was set to something that would have an effect."""
        return self.name in given and given[self.name] != self.marks.get(Off, Off(None)).value

    def useless(self, value: Any, why: str) -> str:
        other = f' or set it to {self.marks[Off].value}' if Off in self.marks else ''
        return f'{self.name}={value!r} has no effect{why} leave it unset{other}'


def cast(value: Any, hint: Any) -> Any:
    """The value as the type has it, so that equal settings are one key of jit; else TypeError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, tuple | list):  # JSON has lists
        args = args[:1] * len(value) if args[-1] is ... else args
        if len(args) == len(value):
            return tuple(map(cast, value, args))
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) in (map(type, args) if origin is Literal else (hint,)):  # True is no int
        return value
    raise TypeError(hint)


def bare(hint: Any) -> tuple[Any, dict[type, Any]]:
    """(hint without Annotated and None, what Annotated held by type)."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, marks = bare(hint.__origin__)
        return inner, marks | {type(mark): mark for mark in hint.__metadata__}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return bare(next(arg for arg in typing.get_args(hint) if arg is not type(None)))
    return hint, {}


@functools.cache
def hints(cls: type) -> Mapping[str, tuple[Any, dict]]:
    """bare() of each field; a subclass that gives a new default keeps what the base says of it."""
    found: dict = {}
    for base in reversed(cls.__mro__):
        own = inspect.get_annotations(base, eval_str=True)
        for name in (found.keys() & vars(base).keys()) - own.keys():
            raise TypeError(
                f'{base.__name__}.{name} needs a type, or its default stays the old one'
            )
        for name, hint in own.items():
            if typing.get_origin(hint) is not typing.ClassVar:
                kind, marks = bare(hint)
                found[name] = kind, found.get(name, (0, {}))[1] | marks
    return found


def walk(cls: type, at: str = '', default: Any = None) -> Iterator[tuple[str, Any]]:
    """(attribute, its Leaf, or (class, at, default) of a group); AT of a class outweighs at."""
    at, default = getattr(cls, 'AT', at), cls() if default is None else default
    for field in dataclasses.fields(cls):
        if 'apart' in field.metadata:
            continue
        (kind, marks), value = hints(cls)[field.name], getattr(default, field.name)
        if dataclasses.is_dataclass(value) and Chosen not in marks:
            yield field.name, (type(value), at if Inline in marks else f'{at}{field.name}.', value)
        else:
            name = marks[At].name if At in marks else at + field.name
            yield field.name, Leaf(name, field.name, cls, kind, marks, value)


def leaves(cls: type, at: str = '', default: Any = None) -> dict[str, Leaf]:
    """Every field by its dotted name, groups included; of a Chosen its name alone."""
    found: dict = {}
    for _, leaf in walk(cls, at, default):
        found |= {leaf.name: leaf} if isinstance(leaf, Leaf) else leaves(*leaf)
    return found


def variants(cls: type, at: str = '') -> Iterator[tuple[Leaf, dict[str, dict[str, Leaf]], dict]]:
    """(leaf of a Chosen, {its choice: leaves}, the leaves of all choices)."""
    for leaf in leaves(cls, at).values():
        if Chosen in leaf.marks:
            each = {key: leaves(one) for key, one in leaf.marks[Chosen].by.items()}
            yield leaf, each, functools.reduce(lambda a, b: b | a, each.values())


def flat(cfg: Any, prefix: str = '') -> dict[str, Any]:
    """{dotted name: value} of a ConfigDict or of JSON."""
    found = {}
    for name, value in cfg.items():
        deep = hasattr(value, 'items')
        found |= flat(value, f'{prefix}{name}.') if deep else {prefix + name: value}
    return found


def defaults(root: type, at: str = '') -> dict[str, Leaf]:
    """Every field by its dotted name, with the default that the ConfigDict has (None: unset)."""
    known = leaves(root, at)
    for leaf, each, every in variants(root, at):
        name = leaf.marks[Chosen].key(leaf.default)
        known[leaf.name] = dataclasses.replace(leaf, hint=str, default=name)
        for name, one in every.items():
            same = all(name in own and own[name].default == one.default for own in each.values())
            known[name] = one if same else dataclasses.replace(one, default=None)
    return known


def config_dict(root: type, section: str = '') -> Any:
    """The ConfigDict of a root, or of the section of that name."""
    nested: dict = {section: {}} if section else {}
    for name, leaf in defaults(root, section and f'{section}.').items():
        *sections, last = name.split('.')
        part = functools.reduce(lambda part, word: part.setdefault(word, {}), sections, nested)
        part[last] = placeholder(leaf.kind) if leaf.default is None else leaf.default
    return ml_collections.ConfigDict(nested[section] if section else nested)


def read(cls: type, cfg: Any, at: str = '', *, idle: bool = False) -> Any:
    """The dataclass of a ConfigDict or of JSON; ValueError with everything that is wrong.

    idle: fields without effect may be set.
    """
    given = {name: value for name, value in flat(cfg).items() if value is not None}
    wrong: list[str] = []
    made = _read(cls, at, None, given, None, wrong, idle)
    for leaf, each, every in variants(cls, at) if not idle else ():
        own = each.get(given.get(leaf.name, leaf.marks[Chosen].key(leaf.default)), every)
        for name in every.keys() - own.keys():
            if every[name].asks(given):
                users = ', '.join(key for key, has in each.items() if name in has)
                why = f' on {leaf.name}={given[leaf.name]!r}, only on {users}:'
                wrong.append(every[name].useless(given[name], why))
    if wrong:
        raise ValueError('; '.join(wrong))
    return made


def _read(
    cls: type, at: str, default: Any, given: dict, above: dict | None, wrong: list, free: bool
) -> Any:
    values, before, whens = {}, len(wrong), []
    above = values if above is None else above
    for name, leaf in walk(cls, at, default):
        if not isinstance(leaf, Leaf):
            values[name] = _read(*leaf, given, above, wrong, free)
            continue
        values[name] = leaf.default
        whens += [leaf] if When in leaf.marks else []
        try:
            if Chosen in leaf.marks:
                values[name] = _read(leaf.chosen(given), '', None, given, above, wrong, free)
            elif leaf.name in given:
                values[name] = leaf.take(given[leaf.name])
            elif From in leaf.marks and leaf.default is None:
                values[name] = leaf.marks[From].of(types.SimpleNamespace(**above))
        except ValueError as error:
            wrong.append(str(error))
    if len(wrong) > before:
        return default or cls()
    made = cls(**values) if default is None else dataclasses.replace(default, **values)
    idle = [leaf for leaf in whens if not leaf.marks[When].test(made)]
    for leaf in idle:
        if leaf.asks(given) and not free:
            why = f': it needs {leaf.marks[When].words};'
            wrong.append(leaf.useless(given[leaf.name], why))
    # What does nothing is the same for all, or jit would compile for it
    return dataclasses.replace(made, **{leaf.attribute: leaf.default for leaf in idle})


def values(made: Any, at: str = '') -> dict[str, Any]:
    """{dotted name: value} of settings; None for those that have nothing to do."""
    found: dict = {}
    for name, leaf in walk(type(made), at, made):
        if not isinstance(leaf, Leaf):
            found |= values(getattr(made, name), leaf[1])
        elif Chosen in leaf.marks:
            found |= {leaf.name: leaf.marks[Chosen].key(leaf.default)} | values(leaf.default)
        else:
            works = When not in leaf.marks or leaf.marks[When].test(made)
            found[leaf.name] = leaf.default if works else None
    return found


def no_field(name: str, known: Iterable[str]) -> str:
    """That the config has no field of this dotted name, and what there is instead."""
    section, dot, field = name.rpartition('.')
    known, asked = list(known), f'the config has no field {name}'
    near = [other.removeprefix(section + dot) for other in known if other.startswith(section + dot)]
    synonym = SYNONYMS.get(field, field)
    close = [section + dot + word for word in difflib.get_close_matches(synonym, near, n=1)]
    elsewhere = [other for other in known if other.rpartition('.')[2] in (field, synonym)]
    suggested = close or elsewhere if section else elsewhere or close
    if suggested:
        return f'{asked}; did you mean {" or ".join(suggested[:4])}?'
    if section and near:
        return f'{asked}; {section} has {", ".join(near)}'
    return f'{asked}; --show_config prints those there are'


def migrate(saved: Any, steps: Sequence[Callable[[dict], dict]]) -> dict[str, Any]:
    """A saved config, flat, as this version has it; steps: from each version to the next."""
    found = flat(saved)
    for step in steps[found.pop('version', 0) :]:
        found = step(found)
    return found
