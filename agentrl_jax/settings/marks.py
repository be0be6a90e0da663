"""What Annotated says of a field of settings, beside its type."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any


def suggestion(value: Any, names: Collection[str]) -> str:
    """'; did you mean ...?' with the name closest to a value; '' if no name is close.

    Case, '-' and '_' do not count.
    """
    plain = {re.sub(r'[\W_]', '', str(name)).lower(): name for name in names}
    word = re.sub(r'[\W_]', '', str(value)).lower()
    close = difflib.get_close_matches(word, plain, n=1)
    return f'; did you mean {plain[close[0]]}?' if close else ''


@dataclasses.dataclass(frozen=True)
class In:
    """An interval; infinite ends are open. also: single values that are allowed as well."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    also: tuple[float, ...] = ()

    def holds(self, value: float) -> bool:
        """Whether the value is inside; nan and infinite values never are."""
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
SHARE = In(low=0, high=1)  # a probability, a discount, a part of a whole
PART = In(low=0, high=1, open_low=True)  # a part that is not nothing
MOMENT = In(low=0, high=1, open_high=True)  # decay of a running mean
MANY = In(low=1, high=2**31 - 1)  # counted in int32
WORD = In(low=0, high=2**32 - 1)  # folded into a random key


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Names of a registry; Literal is for names that nothing else lists."""

    names: Collection[str]


@dataclasses.dataclass(frozen=True)
class Words:
    """What a value must be, where its type says too little."""

    text: str


@dataclasses.dataclass(frozen=True)
class At:
    """Its name in the ConfigDict, where that is not the class's AT and the attribute."""

    name: str


@dataclasses.dataclass(frozen=True)
class When:
    """Otherwise it has no effect: a test of its own dataclass, and the same in words."""

    test: Callable[[Any], bool]
    words: str


@dataclasses.dataclass(frozen=True)
class Off:
    """The value that asks for nothing, accepted by classes without the field."""

    value: Any


@dataclasses.dataclass(frozen=True)
class From:
    """Unset, it follows from the fields before it in the root."""

    of: Callable[[Any], Any]
    words: str


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The ConfigDict holds a name of one of these classes; sections of it hold their fields."""

    by: Mapping[str, type]

    @property
    def names(self) -> Collection[str]:
        return self.by.keys()

    def key(self, one: Any) -> str:
        return next(name for name, cls in self.by.items() if cls is type(one))


@dataclasses.dataclass(frozen=True)
class Inline:
    """The fields of this group are among those of its owner."""
