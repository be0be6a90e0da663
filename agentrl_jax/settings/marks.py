"""Marks for Annotated: what a settings field declares in addition to its type."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any


def suggestion(value: Any, names: Collection[str]) -> str:
    """Return '; did you mean ...?' with the name closest to a value; '' if no name is close.

    Case, '-' and '_' are ignored.
    """
    plain = {re.sub(r'[\W_]', '', str(name)).lower(): name for name in names}
    word = re.sub(r'[\W_]', '', str(value)).lower()
    close = difflib.get_close_matches(word, plain, n=1)
    return f'; did you mean {plain[close[0]]}?' if close else ''


@dataclasses.dataclass(frozen=True)
class In:
    """An interval; infinite ends are open. also: single values allowed outside it."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    also: tuple[float, ...] = ()

    def holds(self, value: float) -> bool:
        """Return whether the value is allowed; nan and infinite values never are."""
        above = self.low < value or (value == self.low and not self.open_low)
        below = value < self.high or (value == self.high and not self.open_high)
        finite = isinstance(value, int) or math.isfinite(value)  # no float holds 10**400
        return finite and (value in self.also or (above and below))

    def __str__(self) -> str:
        if self.low == -math.inf and self.high == math.inf:
            return 'finite'
        if self.high == math.inf:
            text = f'above {self.low:g}' if self.open_low else f'at least {self.low:g}'
        elif self.low == -math.inf:
            text = f'below {self.high:g}' if self.open_high else f'at most {self.high:g}'
        else:
            opening, closing = '(' if self.open_low else '[', ')' if self.open_high else ']'
            text = f'in {opening}{self.low:g}, {self.high:g}{closing}'
        return ' or '.join([text, *(f'{value:g}' for value in self.also)])


ONE, ZERO, FINITE = In(low=1), In(low=0), In()
POSITIVE = In(low=0, open_low=True)
SHARE = In(low=0, high=1)  # a probability, a discount or a fraction
POSITIVE_FRACTION = In(low=0, high=1, open_low=True)  # a fraction above 0
DECAY = In(low=0, high=1, open_high=True)  # decay of a running mean
MANY = In(low=1, high=2**31 - 1)  # counted in int32
WORD = In(low=0, high=2**32 - 1)  # folded into a random key


@dataclasses.dataclass(frozen=True)
class NameIn:
    """The value must be a name in a registry. Use Literal for names that no registry lists."""

    names: Collection[str]


@dataclasses.dataclass(frozen=True)
class MustBe:
    """A description of the valid values, if the type alone does not explain them."""

    text: str


@dataclasses.dataclass(frozen=True)
class ConfigName:
    """The name in the ConfigDict, if it is not the class's AT plus the attribute."""

    name: str


@dataclasses.dataclass(frozen=True)
class OnlyIf:
    """Condition under which the field has an effect: a test of its dataclass, and its text."""

    test: Callable[[Any], bool]
    words: str


@dataclasses.dataclass(frozen=True)
class Neutral:
    """The value that disables the field; classes without the field accept it."""

    value: Any


@dataclasses.dataclass(frozen=True)
class DefaultFrom:
    """The default of an unset field, computed from earlier fields of the root."""

    of: Callable[[Any], Any]
    words: str


@dataclasses.dataclass(frozen=True)
class Variant:
    """The ConfigDict holds the name of one of these classes; its sections hold their fields."""

    by: Mapping[str, type]

    @property
    def names(self) -> Collection[str]:
        return self.by.keys()

    def key(self, one: Any) -> str:
        return next(name for name, cls in self.by.items() if cls is type(one))


@dataclasses.dataclass(frozen=True)
class Inline:
    """The group has no section: its fields are listed among its owner's fields."""
