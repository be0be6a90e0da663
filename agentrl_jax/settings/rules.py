"""Rules between settings. A rule lists fields and their needs, at least one of which must hold.

  Rule({'context.window': 0, 'env.mix': ()}, 'prompts of several environments differ in length')

rejects a window of turns together with several environments. Algorithms, environments and sections
of extensions define their rules in RULES. In an environment's rules, its fields have no section,
and tests receive the environment. All other tests receive the run's config.
"""

import dataclasses
import re
import types
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

from agentrl_jax.settings import tree
from agentrl_jax.settings.callables import import_callable
from agentrl_jax.settings.marks import In

FIELD = re.compile(r'\b[a-z]\w*(?:\.\w+)+')


@dataclasses.dataclass(frozen=True)
class Must:
    """A computed need; `words` completes 'set <field> to'."""

    words: str | Callable[[Any], str]
    test: Callable[[Any], bool]


class Broken(NamedTuple):
    """A violated rule: its fields and the error message."""

    fields: tuple[str, ...]
    sentence: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """Fields and their needs: values, sets of values, intervals or Must. One need must hold."""

    needs: Mapping[str, Any]
    why: str = ''

    def check(self, subject: Any, values: Mapping[str, Any], at: str = '') -> Broken | None:
        """Return None if any need holds. Needs of unset and missing fields hold."""
        needs = {name if '.' in name else at + name: need for name, need in self.needs.items()}
        if any(_holds(need, subject, values.get(name)) for name, need in needs.items()):
            return None
        fixes = ' or '.join(f'{name} to {_words(need, subject)}' for name, need in needs.items())
        others = [name for name in FIELD.findall(fixes) if name in values]
        fields = tuple(dict.fromkeys([*needs, *others]))
        assignments = (f'{name}={values[name]!r}' if name in values else name for name in fields)
        why = f' ({self.why})' if self.why else ''
        return Broken(fields, f'{", ".join(assignments)}: set {fixes}{why}')


def exclude(first: Mapping[str, Any], others: Mapping[str, Any], why: str = '') -> tuple[Rule, ...]:
    """Return one rule per entry of `others`: it or one of `first` must hold."""
    return tuple(Rule({**first, name: need}, why) for name, need in others.items())


def must(
    field: str,
    words: str | Callable[[Any], str],
    test: Callable[[Any], bool],
    unless: Mapping[str, Any] = types.MappingProxyType({}),
) -> Rule:
    """Return a rule for one field. It also holds if any need in `unless` does."""
    return Rule({**unless, field: Must(words, test)})


def importable(field: str, *, optional: bool = False) -> Rule:
    """Return the rule that an environment's field names an importable callable."""

    def error(world: Any) -> str:
        name = getattr(world, field)
        try:
            if name or not optional:
                import_callable(name, f'{world.name}.{field}')
        except ValueError as error:
            return str(error)
        return ''

    return must(field, lambda world: f'a callable ({error(world)})', lambda world: not error(world))


def _holds(need: Any, subject: Any, value: Any) -> bool:
    if isinstance(need, Must):
        return bool(need.test(subject))
    if value is None:
        return True
    if isinstance(need, In):
        return need.holds(value)
    return value in need if isinstance(need, Set) else value == need


def _words(need: Any, subject: Any) -> str:
    if isinstance(need, Must):
        return need.words(subject) if callable(need.words) else need.words
    if isinstance(need, Set):
        return ' or '.join(map(repr, sorted(need)))
    return str(need) if isinstance(need, In) else repr(need)


def rules_of(made: Any, attribute: str = 'RULES') -> list[Rule]:
    """Return the rules of an object's class and its bases."""
    classes = reversed(type(made).__mro__)
    return [rule for cls in classes for rule in vars(cls).get(attribute, ())]


def broken(
    rules: Iterable[Rule], subject: Any, values: Mapping[str, Any], at: str = ''
) -> list[Broken]:
    """Return the rules that do not hold."""
    return [violation for rule in rules if (violation := rule.check(subject, values, at))]


def broken_by(world: Any) -> list[Broken]:
    """Return the environment's rules that its settings break."""
    at = f'{world.name}.'
    return broken(rules_of(world), world, tree.values(world, at, idle=True), at)
