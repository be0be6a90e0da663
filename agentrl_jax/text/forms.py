"""Legal answers to worlds on hosts: forms with free text, as an automaton over tokens.

A form is what an answer must look like, with HOLE where any text may be: 'inventory',
'search[{}]', '<think>{}</think>\n<search>{}</search>'. A hole holds at least one byte and ends with
the first occurrence of what follows it; a hole that nothing follows ends with the turn. Tokens may
cross every border, as tokenizers make them, so all spellings are legal.

The automaton is made over bytes and lifted to tokens: tokens that lead every state to the same
place share a column. A budget cuts no answer off. Each form has a shortest text to its end. Once no
more tokens are left than these take, only those of the forms on offer are legal.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from agentrl_jax.text.automata import EVERY, as_words
from agentrl_jax.text.grammar import Grammar, pack, with_choice, with_padding
from agentrl_jax.tokens.tokenizer import Tokenizer

HOLE = '{}'
DEAD = -1
# Bytes in the order in which a way to the end takes them: a hole is filled with a letter
ORDER = np.r_[np.frombuffer(b'x', np.uint8), np.arange(256, dtype=np.uint8)]


def pattern(forms: Sequence[str]) -> str:
    """A regular expression of the whole answers, for samplers elsewhere."""
    return '|'.join(map(_pattern, forms))


def _pattern(form: str) -> str:
    first, *rest = form.split(HOLE)
    found = re.escape(first)
    for piece in rest:  # a hole holds a character, and then none with which what follows it begins
        after = re.escape(piece)
        found += f'[\\s\\S](?:(?!{after})[\\s\\S])*{after}' if piece else '[\\s\\S]+'
    return found


class Item(NamedTuple):
    """A place in a form: bytes read of one of its pieces; -1, the hole in front of it is open."""

    form: int
    piece: int
    read: int
    fresh: bool = False  # the hole holds nothing yet


class Automaton(NamedTuple):
    """Over bytes; state 0 is the first one."""

    step: np.ndarray  # int32 [Q, 256]  next state, or DEAD
    forms: np.ndarray  # bool [Q, N]  which forms an answer can still be
    ends: np.ndarray  # bool [Q, N]  which it is if it ends here


def build_automaton(forms: Sequence[str]) -> Automaton:
    """The language of some forms; ValueError where one is no form."""
    pieces = [_pieces(form) for form in forms]
    first = _settled((Item(i, 0, 0) for i in range(len(forms))), pieces)
    numbers, states, steps = {first: 0}, [first], []
    for state in states:  # grows
        row = np.full(256, DEAD, np.int32)
        for byte in range(256):
            after = _settled(_after(state, byte, pieces), pieces)
            if after:
                if after not in numbers:
                    numbers[after] = len(states)
                    states.append(after)
                row[byte] = numbers[after]
        steps.append(row)
    some, ends = np.zeros((2, len(states), len(forms)), bool)
    for number, state in enumerate(states):
        some[number, [item.form for item in state]] = True
        ends[number, [item.form for item in state if _whole(item, pieces)]] = True
    return Automaton(np.stack(steps), some, ends)


def _pieces(form: str) -> list[bytes]:
    pieces = [piece.encode() for piece in form.split(HOLE)]
    if not form or not all(pieces[1:-1]):
        raise ValueError(f'{form!r} is no form of answers: it needs text, and some between holes')
    return pieces


def _settled(items: Iterable[Item], pieces: list[list[bytes]]) -> frozenset[Item]:
    """With pieces that are read to their end in the holes after them."""
    return frozenset(
        Item(form, piece + 1, -1, True)
        if read == len(pieces[form][piece]) and piece + 1 < len(pieces[form])
        else Item(form, piece, read, fresh)
        for form, piece, read, fresh in items
    )


def _after(state: frozenset[Item], byte: int, pieces: list[list[bytes]]) -> set[Item]:
    found, closed = set(), set()
    for form, piece, read, fresh in state:
        text = pieces[form][piece]
        if read < 0:
            found.add(Item(form, piece, -1))
        at = max(read, 0)
        if not fresh and at < len(text) and text[at] == byte:
            found.add(Item(form, piece, at + 1))
            if at + 1 == len(text):
                closed.add((form, piece))
    # Its first end is the end of a hole
    return {x for x in found if (x[:2] not in closed) or x.read == len(pieces[x.form][x.piece])}


def _whole(item: Item, pieces: list[list[bytes]]) -> bool:
    text = pieces[item.form][item.piece]
    if item.piece + 1 < len(pieces[item.form]) or item.fresh:
        return False
    return item.read == len(text) or (item.read < 0 and not text)


def ways_out(automaton: Automaton) -> list[bytes | None]:
    """Return the shortest text from each state to an end; None if it cannot reach one."""
    ways = {int(state): b'' for state in np.flatnonzero(automaton.ends.any(1))}
    steps = automaton.step[:, ORDER]
    known = np.zeros(len(steps) + 1, bool)  # the last one for DEAD
    new = [*ways]
    while new:
        known[new] = True
        new = np.flatnonzero(~known[:-1] & known[steps].any(1)).tolist()
        for state in new:
            place = known[steps[state]].argmax()
            ways[state] = bytes([ORDER[place]]) + ways[int(steps[state, place])]
    return [ways.get(state) for state in range(len(steps))]


Ways = frozenset[tuple[tuple[int, ...], int]]  # (tokens to an end, its forms as bits); empty: over


def _as_ways(forms_of: dict[tuple[int, ...], int]) -> Ways:
    """Ways from their tokens and forms; a single way belongs to every form that is left."""
    if len(forms_of) == 1:
        return frozenset((text, EVERY) for text in forms_of)
    return frozenset(forms_of.items())


def _roots(automaton: Automaton, tokens: 'Tokens', offers: bool) -> list[Ways]:
    """The ways out of each state: one, or with offers one for each form."""
    kinds = [automaton]
    if offers:
        kinds = [automaton._replace(ends=one[:, None]) for one in automaton.ends.T]
    spell = functools.cache(lambda way: tuple(tokens.spelling(way)))
    ways = [{} for _ in automaton.step]
    for form, kind in enumerate(kinds):
        for forms_of, way in zip(ways, ways_out(kind), strict=True):
            if way is not None:
                forms_of[spell(way)] = forms_of.get(spell(way), 0) | 1 << form
    return [_as_ways(forms_of) for forms_of in ways]


def _following(ways: Ways, end: int) -> dict[int, tuple[Ways, int]]:
    """Token -> (the ways after it, their forms as bits)."""
    rests, bits_of = {}, {}
    for text, bits in ways:
        token = text[0] if text else end
        bits_of[token] = bits_of.get(token, 0) | bits
        after = rests.setdefault(token, {})
        if text:
            after[text[1:]] = after.get(text[1:], 0) | bits
    return {token: (_as_ways(after), bits_of[token]) for token, after in rests.items()}


@functools.lru_cache(maxsize=8)  # the pools of a run have the same
def build_forms(
    tokenizer: Tokenizer, forms: tuple[str, ...], *, longest: int, offers: bool = False
) -> Grammar:
    """The grammar of answers of at most `longest` tokens, their end included.

    offers: answers can be kept to some of the forms, those on offer. A state in front of turns
    that are written, where all is allowed, is always there.
    """
    automaton = build_automaton(forms)
    tokens = Tokens(tokenizer.token_bytes())
    ids, ends = np.arange(len(tokens.texts)), list(tokenizer.eos_ids)
    # Table of all states: the end, the automaton's, those on the ways out, a written turn
    roots = _roots(automaton, tokens, offers)
    moves = {}  # of the ways out
    for ways in (queue := list(roots)):
        if ways not in moves:
            moves[ways] = _following(ways, ends[0])
            queue += [after for after, _ in moves[ways].values() if after]
    number = {ways: state for state, ways in enumerate(moves, 1 + len(roots))}
    number[frozenset()] = 0
    opened = len(roots) + len(number)
    rows = [(ids[:0], ids[:0])]
    for state, closing in enumerate(automaton.ends.any(1)):
        taken, after = tokens.lifted(automaton.step, state)
        if closing:
            taken, after = np.r_[taken, ends[0]], np.r_[after, -1]
        rows.append((taken, after + 1))
    for edges in moves.values():
        rows.append((np.array([*edges]), np.array([number[after] for after, _ in edges.values()])))
    rows.append((ids, np.full(len(ids), opened)))
    if len(rows) > np.iinfo(np.int16).max:
        raise ValueError(f'the forms need {len(rows)} states, which 16 bits cannot count')
    classes = _classes(rows, len(ids))
    after = np.full((len(rows), classes.max() + 1), -1, np.int16)
    for state, (taken, target) in enumerate(rows):
        after[state, classes[taken]] = target
    through = None
    if offers:
        some, ended = np.ones((2, len(rows), len(forms)), bool)
        some[1 : 1 + len(roots)], ended[1 : 1 + len(roots)] = automaton.forms, automaton.ends
        some, ended = (np.asarray(pack(jnp.asarray(x))) for x in (some, ended))
        through = np.where((after == 0)[..., None], ended[:, None], some[np.maximum(after, 0)])
        for ways, edges in moves.items():
            for token, (_, bits) in edges.items():
                through[number[ways], classes[token]] = as_words(bits, len(forms))
    after, through, classes = with_padding(after, through, classes)
    after, through = with_choice(after, through, classes)
    forced, reserve = np.arange(len(rows), dtype=np.int32), np.zeros(len(rows), np.int32)
    forced[1 : 1 + len(roots)] = [number[ways] for ways in roots]
    need = np.zeros(len(rows), np.int32)  # tokens to the end
    need[1 : 1 + len(roots)] = [1 + max(len(text) for text, _ in ways) for ways in roots]
    for state in range(1, 1 + len(roots)):  # before a token after which they would be too few
        reserve[state] = max(need[state], need[rows[state][1]].max())
    if reserve[1] >= longest:
        raise ValueError(
            f'rollout.max_response={longest} is too little for {", ".join(map(repr, forms))}: the '
            f'way to the end of an answer takes {reserve[1]} tokens; set it to more'
        )
    return Grammar(
        columns=jnp.asarray(ends, jnp.int32),
        classes=jnp.asarray(classes, jnp.int32),
        after=jnp.asarray(after),
        through=None if through is None else jnp.asarray(through),
        forced=jnp.asarray(forced),
        reserve=jnp.asarray(reserve),
        first=1,
        thinks=-1,
        opened=opened,
        answers=(0, 0),
    )


class Tokens:
    """The bytes of a vocabulary, by the first of them."""

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
        """Tokens of a text, each as long as can be; ValueError where a byte is in no token."""
        found = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((n for n in sizes if text[:n] in self._ids), None)
            if size is None:
                raise ValueError(f'no token of the tokenizer begins as {text!r} does')
            found.append(self._ids[text[:size]])
            text = text[size:]
        return found

    def lifted(self, step: np.ndarray, state: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [n] that can follow a state, the states [n] that they lead to)."""
        heads = np.flatnonzero(step[state] != DEAD)
        tokens = np.concatenate([self._by_head[byte] for byte in heads] or [np.zeros(0, int)])
        now, at = np.full(len(tokens), state), 0
        going = np.arange(len(tokens))
        while len(going):
            now[going] = step[now[going], self._bytes[self._begin[tokens[going]] + at]]
            at += 1
            going = going[(now[going] != DEAD) & (self._length[tokens[going]] > at)]
        return tokens[now != DEAD], now[now != DEAD]


def _classes(rows: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> np.ndarray:
    """int32 [count]: a number for each token, equal where all rows lead tokens to one place."""
    classes, known = np.zeros(count, np.int64), 1
    for taken, target in rows:
        if len(taken):
            pairs = classes[taken] * (len(rows) + 1) + target
            fresh = np.unique(pairs, return_inverse=True)[1]
            classes[taken] = known + fresh
            known += fresh.max() + 1
    return np.unique(classes, return_inverse=True)[1].astype(np.int32)
