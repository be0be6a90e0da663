"""Settings are frozen dataclasses, which users change through a ConfigDict.

A field declares its type, default, and choices (Literal, NameIn) or bounds (In). Its comment is its
documentation. `config_dict` makes the ConfigDict; `read` builds the dataclasses from it and
reports every error. For a Chosen field, the ConfigDict holds the name of the class. Fields of these
classes are placeholders, unless all of the classes have them with the same default.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import ml_collections
from ml_collections.config_dict import placeholder

from agentrl_jax.settings.marks import (
    ConfigName,
    DefaultFrom,
    In,
    Inline,
    MustBe,
    NameIn,
    Neutral,
    OnlyIf,
    Variant,
    suggestion,
)

NOT_A_SETTING = types.MappingProxyType({'apart': True})  # metadata of fields that are not settings
LARGEST = 2**31 - 1  # integers are int32, unless their field has an upper bound
SYNONYMS = {  # other libraries' field names -> ours
    'learning_rate': 'lr',
    'batch_size': 'minibatch_rows',
    'micro_batch_size': 'microbatch_rows',
    'max_length': 'max_tokens',
    'gradient_checkpointing': 'remat',
    'num_episodes': 'num_groups',
}
WORDS = {int: 'an integer', float: 'a number', bool: 'True or False', str: 'a string'}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A field: its dotted name in the ConfigDict, and what its class declares."""

    name: str
    attribute: str
    owner: type
    hint: Any  # without Annotated and None
    marks: Mapping[type, Any]  # from Annotated, by type
    default: Any

    @property
    def kind(self) -> type:
        origin = typing.get_origin(self.hint)
        return type(typing.get_args(self.hint)[0]) if origin is Literal else origin or self.hint

    @property
    def names(self) -> Collection[Any]:
        """The values to choose from; () if the field has no choices."""
        named = self.marks.get(NameIn) or self.marks.get(Variant)
        if named:
            return named.names
        return typing.get_args(self.hint) if typing.get_origin(self.hint) is Literal else ()

    @property
    def rule(self) -> str:
        """A description of the valid values."""
        if MustBe in self.marks:
            return self.marks[MustBe].text
        if self.names:
            among = 'some' if self.kind is tuple else 'one'
            return f'{among} of {", ".join(map(str, self.names))}'
        if self.kind in (int, float):
            return str(self.marks.get(In, In()))
        return WORDS.get(self.kind, str(self.hint))

    def take(self, value: Any) -> Any:
        """Return the value converted to the field's type; ValueError if it is invalid."""
        try:
            value = cast(value, self.hint)
        except TypeError:
            other = self.marks[MustBe].text if MustBe in self.marks else str(self.hint)
            words = WORDS.get(self.kind, other)
            raise ValueError(f'{self.name}={value!r} must be {words}') from None
        inside = self.kind not in (int, float) or self.marks.get(In, In()).holds(value)
        literal = typing.get_origin(self.hint) is not Literal or value in typing.get_args(self.hint)
        chosen = value if isinstance(value, tuple) else (value,)
        known = NameIn not in self.marks or set(chosen) <= set(self.marks[NameIn].names)
        if not (inside and literal and known):
            close = suggestion(value, self.names)
            raise ValueError(f'{self.name}={value!r} must be {self.rule}{close}')
        if self.kind is int and value > LARGEST and math.isinf(self.marks.get(In, In()).high):
            raise ValueError(f'{self.name}={value!r} must be at most {LARGEST}')
        return value

    def chosen(self, given: Mapping[str, Any]) -> type:
        """Return the class that the config names, for a Chosen field."""
        by = self.marks[Variant].by
        if given.get(self.name) is None:
            return type(self.default)
        if given[self.name] not in by:
            close = suggestion(given[self.name], by)
            raise ValueError(f'{self.name}={given[self.name]!r} must be {self.rule}{close}')
        return by[given[self.name]]

    def asks(self, given: Mapping[str, Any]) -> bool:
        """Return whether the field is set to a value that would have an effect."""
        return (
            self.name in given and given[self.name] != self.marks.get(Neutral, Neutral(None)).value
        )

    def no_effect_message(self, value: Any, why: str) -> str:
        other = f' or set it to {self.marks[Neutral].value}' if Neutral in self.marks else ''
        return f'{self.name}={value!r} has no effect{why} leave it unset{other}'


def cast(value: Any, hint: Any) -> Any:
    """Convert the value to the type, so that equal settings share a jit key; else TypeError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, tuple | list):  # JSON has lists
        args = args[:1] * len(value) if args[-1] is ... else args
        if len(args) == len(value):
            return tuple(map(cast, value, args))
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) in (map(type, args) if origin is Literal else (hint,)):  # True is not an int
        return value
    raise TypeError(hint)


def bare(hint: Any) -> tuple[Any, dict[type, Any]]:
    """Return (hint without Annotated and None, Annotated's marks by type)."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, marks = bare(hint.__origin__)
        return inner, marks | {type(mark): mark for mark in hint.__metadata__}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return bare(next(arg for arg in typing.get_args(hint) if arg is not type(None)))
    return hint, {}


@functools.cache
def hints(cls: type) -> Mapping[str, tuple[Any, dict]]:
    """Return bare() of each field. A subclass that changes a default keeps the base's marks."""
    fields: dict = {}
    for base in reversed(cls.__mro__):
        annotations = inspect.get_annotations(base, eval_str=True)
        for name in (fields.keys() & vars(base).keys()) - annotations.keys():
            raise TypeError(
                f'{base.__name__}.{name} has no type, so its default is ignored: annotate it'
            )
        for name, hint in annotations.items():
            if typing.get_origin(hint) is not typing.ClassVar:
                kind, marks = bare(hint)
                fields[name] = kind, fields.get(name, (0, {}))[1] | marks
    return fields


def walk(cls: type, at: str = '', default: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield (attribute, its Leaf or a group's (class, at, default)). AT of a class overrides at."""
    at, default = getattr(cls, 'AT', at), cls() if default is None else default
    for field in dataclasses.fields(cls):
        if 'apart' in field.metadata:
            continue
        (kind, marks), value = hints(cls)[field.name], getattr(default, field.name)
        if dataclasses.is_dataclass(value) and Variant not in marks:
            yield field.name, (type(value), at if Inline in marks else f'{at}{field.name}.', value)
        else:
            name = marks[ConfigName].name if ConfigName in marks else at + field.name
            yield field.name, Leaf(name, field.name, cls, kind, marks, value)


def leaves(cls: type, at: str = '', default: Any = None) -> dict[str, Leaf]:
    """Return every field by its dotted name, including groups; for a Chosen, only its name."""
    fields: dict = {}
    for _, leaf in walk(cls, at, default):
        fields |= {leaf.name: leaf} if isinstance(leaf, Leaf) else leaves(*leaf)
    return fields


def variants(cls: type, at: str = '') -> Iterator[tuple[Leaf, dict[str, dict[str, Leaf]], dict]]:
    """Yield (leaf of a Chosen, {choice: its leaves}, the leaves of all choices)."""
    for leaf in leaves(cls, at).values():
        if Variant in leaf.marks:
            each = {key: leaves(one) for key, one in leaf.marks[Variant].by.items()}
            yield leaf, each, functools.reduce(lambda a, b: b | a, each.values())


def flat(cfg: Any, prefix: str = '') -> dict[str, Any]:
    """Return {dotted name: value} of a ConfigDict or of JSON."""
    fields = {}
    for name, value in cfg.items():
        deep = hasattr(value, 'items')
        fields |= flat(value, f'{prefix}{name}.') if deep else {prefix + name: value}
    return fields


def defaults(root: type, at: str = '') -> dict[str, Leaf]:
    """Return every field by its dotted name, with its default in the ConfigDict (None: unset)."""
    known = leaves(root, at)
    for leaf, each, every in variants(root, at):
        name = leaf.marks[Variant].key(leaf.default)
        known[leaf.name] = dataclasses.replace(leaf, hint=str, default=name)
        for name, one in every.items():
            same = all(name in has and has[name].default == one.default for has in each.values())
            known[name] = one if same else dataclasses.replace(one, default=None)
    return known


def config_dict(root: type, section: str = '') -> Any:
    """Return the ConfigDict of a root, or of a section with that name."""
    nested: dict = {section: {}} if section else {}
    for name, leaf in defaults(root, section and f'{section}.').items():
        *sections, last = name.split('.')
        part = functools.reduce(lambda part, word: part.setdefault(word, {}), sections, nested)
        part[last] = placeholder(leaf.kind) if leaf.default is None else leaf.default
    return ml_collections.ConfigDict(nested[section] if section else nested)


def read(cls: type, cfg: Any, at: str = '', *, idle: bool = False) -> Any:
    """Build the dataclass from a ConfigDict or JSON; a ValueError lists everything that is wrong.

    idle: allow fields without effect to be set.
    """
    entries = {name: value for name, value in flat(cfg).items() if value is not None}
    errors: list[str] = []
    settings = _read(cls, at, None, entries, None, errors, idle)
    for leaf, each, every in variants(cls, at) if not idle else ():
        fields = each.get(entries.get(leaf.name, leaf.marks[Variant].key(leaf.default)), every)
        for name in every.keys() - fields.keys():
            if every[name].asks(entries):
                users = ', '.join(key for key, has in each.items() if name in has)
                why = f' with {leaf.name}={entries[leaf.name]!r}, only with {users}:'
                errors.append(every[name].no_effect_message(entries[name], why))
    if errors:
        raise ValueError('; '.join(errors))
    return settings


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
        whens += [leaf] if OnlyIf in leaf.marks else []
        try:
            if Variant in leaf.marks:
                values[name] = _read(leaf.chosen(given), '', None, given, above, wrong, free)
            elif leaf.name in given:
                values[name] = leaf.take(given[leaf.name])
            elif DefaultFrom in leaf.marks and leaf.default is None:
                values[name] = leaf.marks[DefaultFrom].of(types.SimpleNamespace(**above))
        except ValueError as error:
            wrong.append(str(error))
    if len(wrong) > before:
        return default or cls()
    settings = cls(**values) if default is None else dataclasses.replace(default, **values)
    idle = [leaf for leaf in whens if not leaf.marks[OnlyIf].test(settings)]
    for leaf in idle:
        if leaf.asks(given) and not free:
            why = f': it needs {leaf.marks[OnlyIf].words};'
            wrong.append(leaf.no_effect_message(given[leaf.name], why))
    # Fields without effect get their defaults: other values would recompile jitted functions
    return dataclasses.replace(settings, **{leaf.attribute: leaf.default for leaf in idle})


def values(made: Any, at: str = '', *, idle: bool = False) -> dict[str, Any]:
    """Return {dotted name: value} of settings.

    Fields without effect are None, or with `idle` have their values.
    """
    fields: dict = {}
    for name, leaf in walk(type(made), at, made):
        if not isinstance(leaf, Leaf):
            fields |= values(getattr(made, name), leaf[1], idle=idle)
        elif Variant in leaf.marks:
            key = leaf.marks[Variant].key(leaf.default)
            fields |= {leaf.name: key} | values(leaf.default, idle=idle)
        else:
            works = idle or OnlyIf not in leaf.marks or leaf.marks[OnlyIf].test(made)
            fields[leaf.name] = leaf.default if works else None
    return fields


def unknown_field_message(name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown dotted name, with suggestions."""
    section, dot, field = name.rpartition('.')
    known, message = list(known), f'the config has no field {name}'
    near = [other.removeprefix(section + dot) for other in known if other.startswith(section + dot)]
    synonym = SYNONYMS.get(field, field)
    close = [section + dot + word for word in difflib.get_close_matches(synonym, near, n=1)]
    elsewhere = [other for other in known if other.rpartition('.')[2] in (field, synonym)]
    suggested = close or elsewhere if section else elsewhere or close
    if suggested:
        return f'{message}; did you mean {" or ".join(suggested[:4])}?'
    if section and near:
        return f'{message}; {section} has {", ".join(near)}'
    return f'{message}; --show_config prints all fields'
