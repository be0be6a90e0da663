"""Read the text of a compiled program: copies and transfers in loops, arrays in memory.

The text is XLA's HLO after all passes, one instruction per line. A loop is a `while`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

SIZES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's16': 2, 'u16': 2}
SIZES |= {'f32': 4, 's32': 4, 'u32': 4, 'f64': 8, 's64': 8, 'u64': 8}
ARRAY = re.compile(r'\b(\w+)\[([\d,]*)\]')
HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$')
LINE = re.compile(r'^(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(')
CALLED = re.compile(r'(?:body|condition|to_apply|calls)=%?([\w.\-]+)')
BRANCHES = re.compile(r'(?:branch_computations|true_computation|false_computation)=\{?([^}=]*)')
COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')
FUSED_ATTENTION = ('fmha', 'tpu_custom_call')  # in the target of a custom call


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    kind: str  # opcode
    shape: str  # of its result, as text
    line: str

    @property
    def bytes(self) -> int:
        """Size of its result."""
        return sum(size for _, _, size in arrays(self.shape))


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def called(self, name: str) -> Iterator[str]:
        """Return computations called from one computation, including loops and branches."""
        for one in self.computations[name]:
            yield from (x for x in CALLED.findall(one.line) if x in self.computations)
            for listed in BRANCHES.findall(one.line):
                yield from (x for x in re.findall(r'[\w.\-]+', listed) if x in self.computations)

    def within(self, names: Sequence[str]) -> set[str]:
        """Return these computations and all that they call."""
        reached, open_ = set(), list(names)
        while open_:
            name = open_.pop()
            if name not in reached:
                reached.add(name)
                open_ += self.called(name)
        return reached

    @functools.cached_property
    def bodies(self) -> set[str]:
        """Return the bodies of loops that the program runs."""
        return {
            re.search(r'body=%?([\w.\-]+)', one.line)[1]
            for name in self.within([self.entry])
            for one in self.computations[name]
            if one.kind == 'while'
        }

    @functools.cached_property
    def in_loops(self) -> list[Instruction]:
        """Return instructions that run in a loop, except inside fusions."""
        return [
            one for name in sorted(self.within(sorted(self.bodies))) for one in self.steps(name)
        ]

    def steps(self, name: str) -> tuple[Instruction, ...]:
        """Return the instructions of a computation; none inside a fusion."""
        return () if name in self.fusions else self.computations[name]

    @functools.cached_property
    def fusions(self) -> set[str]:
        """Return the computations inside one instruction."""
        return {
            x
            for instructions in self.computations.values()
            for one in instructions
            if one.kind in ('fusion', 'reduce', 'scatter', 'sort', 'all-reduce', 'reduce-scatter')
            for x in CALLED.findall(one.line)
        }


def read(text: str) -> Program:
    """Parse an HLO text."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = '', None
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith('}'):
            current = None
        elif current is not None and (match := LINE.match(line.strip())):
            current.append(Instruction(match[1], match[3], match[2], line.strip()))
    return Program(entry, {name: tuple(lines) for name, lines in computations.items()})


def arrays(shape: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Return (dtype, dimensions, bytes) of every array of a shape; a tuple has several."""
    for dtype, listed in ARRAY.findall(shape):
        if dtype in SIZES:
            size = tuple(int(n) for n in listed.split(',') if n)
            yield dtype, size, math.prod(size) * SIZES[dtype]


def copies(program: Program, least: int) -> list[Instruction]:
    """Return copies in loops of at least `least` bytes."""
    return [
        one for one in program.in_loops if one.kind in ('copy', 'copy-start') and one.bytes >= least
    ]


def collectives_in_loops(program: Program) -> list[Instruction]:
    """Return transfers between devices in loops."""
    return [one for one in program.in_loops if one.kind.removesuffix('-start') in COLLECTIVES]


def square_arrays(program: Program, side: int) -> set[str]:
    """Return float arrays in memory with two dimensions of `side`: scores of full rows."""
    shapes = set()
    for name in program.within([program.entry]):
        for one in program.steps(name):
            for dtype, size, _ in arrays(one.shape):
                if dtype in ('f32', 'bf16', 'f16') and size.count(side) >= 2:
                    shapes.add(f'{dtype}[{",".join(map(str, size))}]')
    return shapes


def fused_attention(text: str) -> int:
    """Return the number of custom calls that compute attention in one kernel."""
    targets = re.findall(r'custom_call_target="([^"]+)"', text)
    return sum(any(part in target for part in FUSED_ATTENTION) for target in targets)
