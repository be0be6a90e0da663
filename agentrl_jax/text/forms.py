"""Legal answers to host environments: forms with free text, as an automaton over tokens.

A form is a template of an answer with HOLE as the placeholder for any text: 'inventory',
'search[{}]', '<think>{}</think>\n<search>{}</search>'. A hole has at least one byte and ends at the
first occurrence of the text after it, or with the turn. Tokens may span literal text and holes, so
all spellings are legal.

The automaton is built over bytes and lifted to tokens. Tokens with the same transitions from every
state share a column. A budget does not truncate answers: each form has a shortest completion, and
if only enough tokens for that are left, only the completions of the offered forms are legal.
"""

import functools
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from agentrl_jax.text.automata import (
    EVERY,
    Bytes,
    Loose,
    Piece,
    Spellings,
    Table,
    Tokens,
    step_spellings,
)
from agentrl_jax.text.grammar import Grammar, pack
from agentrl_jax.tokens.tokenizer import Tokenizer

HOLE = '{}'
# Byte order for the shortest completion: holes are filled with a letter
ORDER = np.r_[np.frombuffer(b'x', np.uint8), np.arange(256, dtype=np.uint8)]


def pattern(forms: Sequence[str]) -> str:
    """Return a regular expression of complete answers, for other samplers."""
    return '|'.join(map(_pattern, forms))


def _pattern(form: str) -> str:
    first, *rest = form.split(HOLE)
    expression = re.escape(first)
    for piece in rest:  # one character, then lazily up to the text after the hole
        after = re.escape(piece)
        expression += f'[\\s\\S](?:(?!{after})[\\s\\S])*{after}' if piece else '[\\s\\S]+'
    return expression


def build_automaton(forms: Sequence[str]) -> Bytes:
    """Build the automaton of the forms; the kind of an answer is the number of its form."""
    pieces, first = [], []
    for kind, form in enumerate(forms):
        start, *rest = form.split(HOLE)
        if not form or not all(rest[:-1]):
            raise ValueError(
                f'{form!r} is not a valid form: it needs text, also between placeholders'
            )
        first.append(len(pieces))
        last = len(pieces) + len(rest)
        for text in (start, *rest):
            number = len(pieces)
            following = () if number == last else [number + 1]
            pieces.append(Piece(text.encode(), following, number > first[-1], kind))
    return Bytes(pieces, first)


def shortest_endings(table: np.ndarray, ends: np.ndarray) -> list[bytes | None]:
    """Return the shortest text from each state to an end; None if it cannot reach one.

    table: int32 [Q, 256] of a Bytes; ends: bool [Q].
    """
    ways = {int(state): b'' for state in np.flatnonzero(ends)}
    steps = table[:, ORDER]
    known = np.zeros(len(steps) + 1, bool)  # the last one for DEAD
    new = [*ways]
    while new:
        known[new] = True
        new = np.flatnonzero(~known[:-1] & known[steps].any(1)).tolist()
        for state in new:
            place = known[steps[state]].argmax()
            ways[state] = bytes([ORDER[place]]) + ways[int(steps[state, place])]
    return [ways.get(state) for state in range(len(steps))]


def _roots(table: np.ndarray, ends: np.ndarray, tokens: Tokens) -> list[Spellings]:
    """Return the shortest endings of each state, in tokens; ends bool [Q, kinds]: by kind."""
    spell = functools.cache(lambda way: tuple(tokens.spelling(way)))
    ways = [{} for _ in table]
    for kind, some in enumerate(ends.T):
        for kinds, way in zip(ways, shortest_endings(table, some), strict=True):
            if way is not None:
                kinds[spell(way)] = kinds.get(spell(way), 0) | 1 << kind
    # A single ending is shared by all remaining forms.
    return [
        frozenset((ids, kinds if len(some) > 1 else EVERY) for ids, kinds in some.items())
        for some in ways
    ]


@functools.lru_cache(maxsize=8)  # shared by the pools of a run
def build_forms(
    tokenizer: Tokenizer, forms: tuple[str, ...], *, longest: int, offers: bool = False
) -> Grammar:
    """Build the grammar of answers of up to `longest` tokens, including their end.

    offers: answers can be restricted to the forms on offer. The grammar always has a state for
    written turns, which allows everything.
    """
    automaton, end = build_automaton(forms), tokenizer.eos_ids[0]
    steps, tokens, table = automaton.table(), Tokens(tokenizer.token_bytes()), Table(end)
    count = len(steps)
    some, ends = np.zeros((2, count, len(forms)), bool)
    for state in range(count):
        some[state, [*automaton.kinds(state)]] = True
        ends[state, [*automaton.ends(state)]] = True
    roots = _roots(steps, ends if offers else ends.any(1, keepdims=True), tokens)
    states = np.array([table.state() for _ in roots])
    opened, every = table.state(), np.arange(len(tokens.texts))
    loose = {opened: Loose(every, np.full(len(every), opened))}
    need = np.array([1 + max(len(ids) for ids, _ in ways) for ways in roots])  # tokens to the end
    bits, last = (np.asarray(pack(jnp.asarray(x))) for x in (some, ends))
    for number, state in enumerate(states):
        closing = table.add(step_spellings, roots[number], need[number])
        following_tokens, after = tokens.follow(automaton, number)
        # Force the ending before a token that would leave too few tokens for it.
        reserve = max(need[number], need[after].max(initial=0))
        targets, kinds = states[after], bits[after]
        if ends[number].any():
            following_tokens, targets = np.r_[following_tokens, end], np.r_[targets, 0]
            kinds = np.concatenate([kinds, last[[number]]])
        kinds = kinds if offers else None
        loose[state] = Loose(following_tokens, targets, kinds, closing, reserve)
    least = loose[states[0]].reserve
    if least >= longest:
        raise ValueError(
            f'rollout.max_response={longest} is too small for {", ".join(map(repr, forms))}: the '
            f'end of an answer takes {least} tokens; set it to at least {least + 1}'
        )
    arrays = table.arrays(loose, size=len(every), apart=(), kinds=len(forms) if offers else 0)
    return Grammar(
        columns=np.array(tokenizer.eos_ids, np.int32),
        **arrays,
        first=int(states[0]),
        think_state=-1,
        opened=opened,
        answers=(0, 0),
    )
