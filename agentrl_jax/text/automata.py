"""Automata of answers: pieces of text -> bytes -> tokens -> a table of states.

An answer is a chain of pieces. `Bytes` is the deterministic automaton of all chains,
`Tokens.automaton` lifts it to tokens, and `Table` numbers the states. Without free text, a row of
the table is a state together with the number of remaining tokens. Rows with equal edges are merged.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

WORD = 32  # bits of a word of Rollout.allowed
EVERY = -1  # as bits of kinds: all kinds that were possible before
ANY = -1  # instead of a kind of answer: already known or irrelevant
OPEN, EMPTY = -1, -2  # holes: with text, without text
DEAD = -1  # instead of a state: not the start of any answer

# (step, first state). step(state) -> ({token: (next state, the kind that it determines or ANY)},
# bits of the kinds of answers that may end here)
Automaton = tuple[Callable, Any]


# ---- bytes ---------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Literal text of an answer, and what may precede and follow it."""

    text: bytes
    following: Sequence[int] = ()  # numbers of the next pieces; (): the answer ends
    hole: bool = False  # a hole, at least one byte of free text, precedes the text
    kind: int = ANY  # of answers with this piece


class Item(NamedTuple):
    """A position in a piece."""

    piece: int
    read: int  # bytes of its text; OPEN or EMPTY: its hole is open
    kind: int


class Bytes:
    """The deterministic automaton of answers, built on demand; state 0 is initial."""

    def __init__(self, pieces: Sequence[Piece], first: Iterable[int]):
        self._pieces = pieces
        self._items, self._numbers, self._rows = [], {}, {}
        self._number(item for i in first for item in self._begin(i, ANY))

    def row(self, state: int) -> np.ndarray:
        """Return the next state for each byte, or DEAD, int32 [256]."""
        if state not in self._rows:
            items, moved = self._items[state], {}
            holes = {item._replace(read=OPEN) for item in items if item.read < 0}
            for item in items:
                for byte in self._next(item):
                    moved.setdefault(byte, set()).add(item._replace(read=max(item.read, 0) + 1))
            row = np.full(256, self._number(holes) if holes else DEAD, np.int32)
            for byte in sorted(moved):
                # The first occurrence of a piece ends its hole.
                closed = {(x.piece, x.kind) for x in moved[byte] if not self._next(x)}
                row[byte] = self._number(
                    x
                    for item in moved[byte] | holes
                    if (item.piece, item.kind) not in closed or not self._next(item)
                    for x in self._reach(item)
                )
            self._rows[state] = row
        return self._rows[state]

    def table(self) -> np.ndarray:
        """Return the rows of all states, int32 [Q, 256]."""
        rows = []
        while len(rows) < len(self._items):
            rows.append(self.row(len(rows)))
        return np.stack(rows)

    def kinds(self, state: int) -> set[int]:
        """Return the possible kinds of answers."""
        return {item.kind for item in self._items[state]}

    def ends(self, state: int) -> set[int]:
        """Return the kinds of answers that may end here."""
        return {item.kind for item in self._items[state] if self._complete(item)}

    def without_kind(self, state: int) -> int:
        """Return the state without its kind if only one kind is possible."""
        if len(self.kinds(state)) > 1:
            return state
        return self._number([item._replace(kind=ANY) for item in self._items[state]])

    def _number(self, items: Iterable[Item]) -> int:
        items = frozenset(items)
        if items not in self._numbers:
            self._numbers[items] = len(self._items)
            self._items.append(items)
        return self._numbers[items]

    def _next(self, item: Item) -> bytes:
        """Return the byte that continues the piece, or b''."""
        at = max(item.read, 0)
        return b'' if item.read == EMPTY else self._pieces[item.piece].text[at : at + 1]

    def _complete(self, item: Item) -> bool:
        piece = self._pieces[item.piece]
        return not piece.following and item.read != EMPTY and not self._next(item)

    def _begin(self, number: int, kind: int) -> Iterable[Item]:
        """Return the items at the start of a piece."""
        piece = self._pieces[number]
        kind = kind if piece.kind == ANY else piece.kind
        if piece.hole:
            return [Item(number, EMPTY, kind)]
        return self._reach(Item(number, 0, kind))

    def _reach(self, item: Item) -> list[Item]:
        """Return the item, or the items at the start of the next pieces if it is complete."""
        piece = self._pieces[item.piece]
        if item.read < len(piece.text) or not piece.following:
            return [item]
        return [x for number in piece.following for x in self._begin(number, item.kind)]


# ---- tokens --------------------------------------------------------------------------------------


class Tokens:
    """The bytes of a vocabulary, indexed by first byte."""

    def __init__(self, texts: Sequence[bytes]):
        self.texts, self._ids = texts, {text: i for i, text in enumerate(texts) if text}
        self._longest = max(map(len, texts))
        self._length = np.array([len(text) for text in texts])
        self._begin = np.cumsum(self._length) - self._length
        self._bytes = np.frombuffer(b''.join(texts), np.uint8)
        spelled = np.flatnonzero(self._length)
        head = self._bytes[self._begin[spelled]]
        self._by_head = [spelled[head == byte] for byte in range(256)]

    def spelling(self, text: bytes) -> list[int]:
        """Tokenise a text greedily, longest token first; ValueError if no token matches."""
        ids = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((n for n in sizes if text[:n] in self._ids), None)
            if size is None:
                raise ValueError(f'the tokenizer has no token for the start of {text!r}')
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids

    def follow(self, automaton: Bytes, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [n] that can follow a state, their next states [n])."""
        heads = np.flatnonzero(automaton.row(state) != DEAD)
        tokens = np.concatenate([self._by_head[byte] for byte in heads] or [np.zeros(0, int)])
        now, at = np.full(len(tokens), state), 0
        going = np.arange(len(tokens))
        while len(going):
            byte = self._bytes[self._begin[tokens[going]] + at]
            states = np.flatnonzero(np.bincount(now[going]))  # np.unique would sort all tokens
            rows = np.stack([automaton.row(x) for x in states.tolist()])
            now[going] = rows[np.searchsorted(states, now[going]), byte]
            at += 1
            going = going[(now[going] != DEAD) & (self._length[tokens[going]] > at)]
        return tokens[now != DEAD], now[now != DEAD]

    def automaton(self, of: Bytes) -> Automaton:
        """Lift an automaton to tokens, with all spellings of its answers."""

        def step(state):
            edges = {}
            for token, after in zip(*(x.tolist() for x in self.follow(of, state)), strict=True):
                kind, *others = of.kinds(after)
                edges[token] = of.without_kind(after), ANY if others else kind
            return edges, _as_bits(of.ends(state))

        return step, 0


def _as_bits(kinds: set[int]) -> int:
    return EVERY if ANY in kinds else sum(1 << kind for kind in kinds)


Spellings = frozenset[tuple[tuple[int, ...], int]]  # (tokens up to the end, kinds as bits)


def step_spellings(state: Spellings) -> tuple[dict[int, tuple[Spellings, int]], int]:
    """Step of an automaton with sets of possible continuations as its states."""
    rests, ends = {}, 0
    for ids, kinds in state:
        if ids:
            rest = rests.setdefault(ids[0], {})
            rest[ids[1:]] = rest.get(ids[1:], 0) | kinds
        else:
            ends |= kinds
    return {token: (frozenset(rest.items()), ANY) for token, rest in rests.items()}, ends


# ---- the table -----------------------------------------------------------------------------------


def in_order(first: Hashable, following: Callable) -> Iterable[Hashable]:
    """Yield the nodes of an acyclic graph, each one after its successors."""
    done, stack = set(), [first]
    while stack:
        waits = [] if stack[-1] in done else [x for x in following(stack[-1]) if x not in done]
        stack += waits
        if not waits and (now := stack.pop()) not in done:
            done.add(now)
            yield now


class Loose(NamedTuple):
    """Edges of a state that are not pruned by the budget."""

    tokens: np.ndarray  # int [n]
    after: np.ndarray  # int [n]  states
    kinds: np.ndarray | None = None  # uint32 [n, words]  as `through`; None: all
    forced: int | None = None  # start of an ending, if only `reserve` tokens are left
    reserve: int = 0


class Table:
    """Minimal table of acyclic automata; state 0 is the end and has no edges."""

    def __init__(self, end: int):
        self._end, self._ids, self._rows = end, {(): 0}, [{}]
        self._edges, self._need, self._most = {}, {}, {}  # by automaton and state

    def state(self) -> int:
        """Add a state for loose edges."""
        self._rows.append({})
        return len(self._rows) - 1

    def tokens(self) -> list[int]:
        """Return the tokens of all answers, ascending."""
        return sorted({token for row in self._rows for token in row})

    def longest(self, step: Callable, first: Any) -> int:
        """Return the number of tokens of the longest answer."""
        self._measure(step, first)
        return self._most[step, first]

    def least(self, step: Callable, first: Any) -> dict[int, int]:
        """Return the number of tokens of the shortest answer of each kind."""
        self._measure(step, first)
        return self._need[step, first]

    def add(self, step: Callable, first: Any, left: int) -> int:
        """Add the answers of up to `left` tokens; return their first state."""
        need = min(self.least(step, first).values(), default=None)
        if need is None or need > left:
            raise ValueError(
                f'no legal answer fits into {left} tokens: the shortest needs {need}; increase '
                'rollout.max_response'
            )
        return self._number(step, first, left)

    def _fitting(self, step: Callable, state: Any, left: int) -> int:
        """Return the bits of the kinds of answers that `left` tokens can finish."""
        return _as_bits({kind for kind, need in self._need[step, state].items() if need <= left})

    def _measure(self, step: Callable, first: Any) -> None:
        """Compute the tokens to the end from each state: the minimum by kind, and the maximum."""

        def following(state):
            if (step, state) in self._need:
                return []
            if (step, state) not in self._edges:
                self._edges[step, state] = step(state)
            return [after for after, _ in self._edges[step, state][0].values()]

        for now in in_order(first, following):
            edges, ends = self._edges[step, now]
            least, greatest = dict.fromkeys(_kinds(ends), 1), int(ends != 0)
            for after, kind in edges.values():
                for other, need in self._need[step, after].items():
                    which = other if kind == ANY else kind
                    least[which] = min(need + 1, least.get(which, need + 1))
                    greatest = max(greatest, 1 + self._most[step, after])
            self._need[step, now], self._most[step, now] = least, greatest

    def _number(self, step: Callable, first: Any, left: int) -> int:
        """Return the row of (state, tokens left); larger budgets count as the longest answer."""

        def place(state, left):
            return state, min(left, self._most[step, state])

        def edges(now):
            """Yield (token, next place, kinds that it can finish)."""
            state, left = now
            for token, (after, kind) in self._edges[step, state][0].items():
                fits = self._fitting(step, after, left - 1)
                if fits:
                    yield token, place(after, left - 1), fits if kind == ANY else 1 << kind

        numbers, start = {}, place(first, left)
        for now in in_order(start, lambda now: [after for _, after, _ in edges(now)]):
            before, ends = self._fitting(step, *now), self._edges[step, now[0]][1]
            row = {token: (numbers[after], kinds) for token, after, kinds in edges(now)}
            if ends:
                row[self._end] = 0, ends
            row = {
                token: (number, EVERY if kinds == before else kinds)
                for token, (number, kinds) in row.items()
            }
            signature = tuple(sorted(row.items()))
            if signature not in self._ids:
                self._ids[signature] = self.state()
                self._rows[-1] = row
            numbers[now] = self._ids[signature]
        return numbers[start]

    def arrays(
        self, loose: Mapping[int, Loose], *, size: int, apart: Sequence[int], kinds: int
    ) -> dict[str, np.ndarray | None]:
        """Return the fields `classes`, `after`, `through`, `forced` and `reserve` of a Grammar.

        loose: by state. apart: tokens with separate columns; without loose edges there are no
        other columns and classes is None. size: of the vocabulary. kinds: number; 0 = irrelevant.
        """
        if len(self._rows) > np.iinfo(np.int16).max:
            raise ValueError(
                f'the legal answers need {len(self._rows)} states, too many for 16 bits; '
                'reduce env.max_actions_per_turn or the number of hosts.forms'
            )
        rows = [
            Loose(np.array([*row], int), np.array([after for after, _ in row.values()], int))
            for row in self._rows
        ]
        for state, edges in loose.items():
            rows[state] = edges
        classes, columns = np.full(size, len(apart)), len(apart)
        classes[list(apart)] = np.arange(columns)
        if loose:
            # The last column is never allowed. It is for ids beyond the vocabulary, because a head
            # may be larger.
            classes, columns = _refine(classes, rows)
            classes, columns = np.append(classes, columns), columns + 1
        after = np.full((len(rows), columns), -1, np.int16)
        through = np.zeros((*after.shape, words(kinds)), np.uint32) if kinds else None
        forced, reserve = np.arange(len(rows), dtype=np.int32), np.zeros(len(rows), np.int32)
        for state, (tokens, target, some, ending, left) in enumerate(rows):
            if ending is not None:
                forced[state], reserve[state] = ending, left
            after[state, classes[tokens]] = target
            if through is not None and len(tokens):
                if state not in loose:
                    bits = self._rows[state].values()
                    some = np.stack([as_words(kinds_, kinds) for _, kinds_ in bits])
                through[state, classes[tokens]] = as_words(EVERY, kinds) if some is None else some
        if loose:
            after, through = with_choice(after, through, classes)
        return dict(
            classes=classes.astype(np.int32) if loose else None,
            after=after,
            through=through,
            forced=forced if reserve.any() else None,
            reserve=reserve if reserve.any() else None,
        )


def _refine(classes: np.ndarray, rows: Sequence[Loose]) -> tuple[np.ndarray, int]:
    """Return (classes int [V], count); tokens with the same next state in each row share a class.

    Classes are ordered by the initial classes, then by the next states of the last rows.
    """
    before, classes, known = classes, classes.copy(), classes.max() + 1
    for tokens, after, *_ in rows:
        if len(tokens):
            pairs = classes[tokens] * (len(rows) + 1) + after
            fresh = np.unique(pairs, return_inverse=True)[1]
            classes[tokens] = known + fresh
            known += fresh.max() + 1
    pairs, classes = np.unique(np.stack([before, -classes]), axis=1, return_inverse=True)
    return classes.reshape(-1), pairs.shape[1]


def with_choice(
    after: np.ndarray, through: np.ndarray | None, classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Add a column without a token to (after, through).

    It is allowed if a column shared by several tokens is, because these tokens are a choice.
    """
    shared = np.bincount(classes, minlength=after.shape[1]) > 1
    choice = np.where((after[:, shared] >= 0).any(1, keepdims=True), 0, -1)
    if through is not None:
        kinds = np.where((after >= 0)[..., None], through, 0)[:, shared]
        kinds = np.bitwise_or.reduce(kinds, axis=1, keepdims=True)
        through = np.concatenate([through, kinds], 1)
    return np.concatenate([after, choice], 1).astype(np.int16), through


def words(columns: int) -> int:
    """Return the number of words with at least one bit per column."""
    return -(-columns // WORD)


def _kinds(bits: int) -> list[int]:
    """Return the kinds of a set of bits."""
    if bits == EVERY:
        return [ANY]
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


def as_words(bits: int, kinds: int) -> np.ndarray:
    """Return the bits of kinds as uint32 words; EVERY sets all bits."""
    mask = 2 ** (words(kinds) * WORD) - 1
    text = (bits & mask).to_bytes(words(kinds) * WORD // 8, 'little')
    return np.frombuffer(text, np.uint32)
