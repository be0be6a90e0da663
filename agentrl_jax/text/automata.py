"""Automata of answers over tokens: how they are spelled, and their smallest table.

An automaton is a function from a state to its edges. A row of a `Table` is a state and the number
of tokens that are left. Rows with the same edges are merged.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentrl_jax.text.prompts import SEPARATOR
from agentrl_jax.tokens.tokenizer import Tokenizer

BETWEEN = f' {SEPARATOR} '  # as demonstrations have it
MOST_ANSWERS = 50_000  # that 'own' spells one by one
WORD = 32  # bits of a word of Rollout.allowed
EVERY = -1  # of an edge: any of the names can follow that could before
ANY = -1  # instead of a first action: it is already known, or nothing depends on it

# (step, first state). step(state) -> ({token: (state after it, first action that it settles or
# ANY)}, first actions as bits of the answers that may end here)
Automaton = tuple[Callable, Any]


class Table:
    """The least table of automata without cycles; state 0 is the end, which allows nothing."""

    def __init__(self, end: int):
        self._end, self._ids, self._rows = end, {(): 0}, [{}]
        self._edges, self._need, self._most = {}, {}, {}  # by automaton and state

    def state(self) -> int:
        """A state of its own, with a row to be filled."""
        self._rows.append({})
        return len(self._rows) - 1

    def longest(self, step: Callable, first: Any) -> int:
        """Tokens of the longest answer."""
        self._measure(step, first)
        return self._most[step, first]

    def least(self, step: Callable, first: Any) -> dict[int, int]:
        """Tokens of the shortest answer with each first action."""
        self._measure(step, first)
        return self._need[step, first]

    def add(self, step: Callable, first: Any, left: int) -> int:
        """The state in front of answers of at most `left` tokens."""
        need = min(self.least(step, first).values(), default=None)
        if need is None or need > left:
            raise ValueError(
                f'no legal answer has {left} tokens or fewer: the shortest needs {need}; set '
                'rollout.max_response to more'
            )
        return self._number(step, first, left)

    def _fitting(self, step: Callable, state: Any, left: int) -> int:
        """First actions, as bits, of the answers that `left` tokens can finish."""
        fits = [name for name, need in self._need[step, state].items() if need <= left]
        return EVERY if ANY in fits else sum(1 << name for name in fits)

    def _measure(self, step: Callable, first: Any) -> None:
        """Tokens to the end from each state: at least by first action, and at the most."""
        stack = [first]
        while stack:
            now = stack[-1]
            if (step, now) in self._need:
                stack.pop()
                continue
            if (step, now) not in self._edges:
                self._edges[step, now] = step(now)
            edges, ends = self._edges[step, now]
            waits = {x for x, _ in edges.values() if (step, x) not in self._need}
            if waits:
                stack += waits
                continue
            stack.pop()
            least, most = dict.fromkeys(_names(ends), 1), int(ends != 0)
            for after, name in edges.values():
                for other, need in self._need[step, after].items():
                    which = other if name == ANY else name
                    least[which] = min(need + 1, least.get(which, need + 1))
                    most = max(most, 1 + self._most[step, after])
            self._need[step, now], self._most[step, now] = least, most

    def _number(self, step: Callable, first: Any, left: int) -> int:
        """Row of (state, tokens left); budgets that cannot bind count as the most needed."""
        memo, stack = {}, [(first, min(left, self._most[step, first]))]
        start = stack[0]
        while stack:
            key = stack[-1]
            if key in memo:
                stack.pop()
                continue
            now, left_now = key
            (edges, ends), row, waits = self._edges[step, now], {}, []
            before = self._fitting(step, now, left_now)
            for token, (after, name) in edges.items():
                fits = self._fitting(step, after, left_now - 1)
                if not fits:
                    continue
                names = fits if name == ANY else 1 << name
                child = (after, min(left_now - 1, self._most[step, after]))
                if child in memo:
                    row[token] = memo[child], EVERY if names == before else names
                else:
                    waits.append(child)
            if waits:
                stack += waits
                continue
            stack.pop()
            if ends:
                row[self._end] = 0, EVERY if ends == before else ends
            signature = tuple(sorted(row.items()))
            if signature not in self._ids:
                self._ids[signature] = self.state()
                self._rows[-1] = row
            memo[key] = self._ids[signature]
        return memo[start]

    def arrays(
        self, free: dict[int, list[int]], ends: list[int], names: int
    ) -> tuple[np.ndarray, list[int], np.ndarray | None]:
        """(after, columns, through); free: states that lead to themselves but by some tokens."""
        if len(self._rows) > np.iinfo(np.int16).max:
            raise ValueError(
                f'the legal answers need {len(self._rows)} states, which 16 bits cannot count; '
                'set env.max_actions_per_turn to less'
            )
        columns = sorted({token for row in self._rows for token in row} | {*(ends if free else ())})
        place = {token: i for i, token in enumerate(columns)}
        after = np.full((len(self._rows), len(columns) + bool(free)), -1, np.int16)
        through = np.zeros((*after.shape, words(names)), np.uint32) if names else None
        for state, row in enumerate(self._rows):
            for token, (target, bits) in row.items():
                after[state, place[token]] = target
                if through is not None:
                    through[state, place[token]] = as_words(bits, names)
        for state, closed in free.items():
            after[state] = state
            after[state, [place[token] for token in closed]] = -1
            if through is not None:
                through[state] = as_words(EVERY, names)
        return after, columns, through


def words(columns: int) -> int:
    """Words that hold so many bits."""
    return -(-columns // WORD)


def _names(bits: int) -> list[int]:
    """The names of a set of bits."""
    if bits == EVERY:
        return [ANY]
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


def as_words(bits: int, names: int) -> np.ndarray:
    """A set of names as uint32 words; EVERY has all bits."""
    mask = 2 ** (words(names) * WORD) - 1
    text = (bits & mask).to_bytes(words(names) * WORD // 8, 'little')
    return np.frombuffer(text, np.uint32)


def automaton_of_spellings(
    tokenizer: Tokenizer, names: Sequence[str], max_actions: int, head: str, tail: str, offers: bool
) -> Automaton:
    """The tree of all answers as the tokenizer spells them."""
    count = sum(len(names) ** k for k in range(1, max_actions + 1))
    if count > MOST_ANSWERS:
        raise ValueError(
            f'{count} answers are too many to spell one by one: set rollout.constrain to any, or '
            'lower env.max_actions_per_turn'
        )
    chosen = [
        each
        for k in range(1, max_actions + 1)
        for each in itertools.product(range(len(names)), repeat=k)
    ]
    texts = [head + BETWEEN.join(names[i] for i in each) + tail for each in chosen]
    children, ends, firsts = [{}], [0], [0]
    for ids, each in zip(tokenizer.encode_batch(texts), chosen, strict=True):
        node, bit = 0, 1 << each[0]
        firsts[0] |= bit
        for token in ids:
            if token not in children[node]:
                children[node][token] = len(children)
                children.append({}), ends.append(0), firsts.append(0)
            node = children[node][token]
            firsts[node] |= bit
        ends[node] |= bit

    def settled(node):
        return not offers or firsts[node].bit_count() == 1

    def step(node):
        known = settled(node)
        edges = {
            token: (child, ANY if known or not settled(child) else firsts[child].bit_length() - 1)
            for token, child in children[node].items()
        }
        return edges, EVERY if known and ends[node] else ends[node]

    return step, 0


def automaton_of_bytes(
    tokenizer: Tokenizer, names: Sequence[str], max_actions: int, head: str, tail: str, offers: bool
) -> Automaton:
    """The automaton over bytes, lifted to tokens.

    A state is a set of (text of which a part was read, bytes read, actions so far, the first one):
    all that can have been read. The first action is forgotten once it can be only one.
    """
    texts = [head.encode(), BETWEEN.encode(), tail.encode(), *(n.encode() for n in names)]
    HEAD, BAR, TAIL, NAME = 0, 1, 2, 3
    END = -1

    def following(which, count, first):
        if which == TAIL:  # with the first action: a token may say the end and thereby which it was
            return [(END, 0, 0, first)]
        if which in (HEAD, BAR):
            said = count > 0 or not offers
            return [(NAME + i, 0, count + 1, first if said else i) for i in range(len(names))]
        more = [(BAR, 0, count, first)] if count < max_actions else []
        return [(TAIL, 0, count, first), *more]

    def settled(items):
        found, queue = set(), list(items)
        while queue:
            item = queue.pop()
            if item[0] == END or item[1] < len(texts[item[0]]):
                found.add(item)
            else:
                queue += following(item[0], *item[2:])
        return frozenset(found)

    def firsts(state):
        return {item[3] for item in state}

    def forgetful(state):
        if len(firsts(state)) > 1:
            return state
        return frozenset((*item[:3], ANY) for item in state)

    known = {}

    def byte_steps(state):
        if state not in known:
            moves = {}
            for item in state:
                which, at, count, first = item
                if which != END:
                    moves.setdefault(texts[which][at], []).append((which, at + 1, count, first))
            known[state] = {byte: settled(items) for byte, items in moves.items()}
        return known[state]

    letters = set(b''.join(texts))
    spelled, begins = {}, set()
    for token, text in enumerate(tokenizer.token_bytes()):
        if text and letters.issuperset(text):
            spelled.setdefault(text, []).append(token)
            begins.update(text[:end] for end in range(1, len(text) + 1))

    def step(state):
        edges, queue = {}, [(b'', state)]
        while queue:
            read, now = queue.pop()
            for byte, after in byte_steps(now).items():
                text = read + bytes([byte])
                if text not in begins:
                    continue
                queue.append((text, after))
                first, *others = firsts(after)
                edge = forgetful(after), ANY if others else first
                edges |= dict.fromkeys(spelled.get(text, ()), edge)
        ends = {item[3] for item in state if item[0] == END}
        return edges, EVERY if ANY in ends else sum(1 << i for i in ends)

    return step, settled([(HEAD, 0, 0, ANY)])
