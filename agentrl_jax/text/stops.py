"""End of a turn: the rule, and an automaton that finds stop strings while tokens are sampled.

This is an Aho-Corasick automaton over bytes, lifted to tokens: the next state depends on the state
and the class of the token. Tokens with the same transitions from every state share a class. A step
costs two gathers. The token that completes a string is not truncated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.types import TurnStop


@struct.dataclass
class StopTable:
    """Q states and C classes of tokens. State 0 is initial; the last state, which is never left,
    means that a string was found."""

    token_class: jax.Array  # int32 [V]
    after: jax.Array  # int32 [C, Q]
    last: jax.Array  # int32 []


def turn_stop(
    token: jax.Array,
    live: jax.Array,
    count: jax.Array,
    answer: Any,
    *,
    advance: Callable,
    matched: Callable,
    eos_ids: jax.Array,
    max_response: int,
) -> tuple[jax.Array, jax.Array, Any]:
    """Return (TurnStop of each row after a token int32 [S], updated count, updated answer).

    live bool [S]: rows that sampled the token. count int32 [S]: tokens of the answer. answer: state
    of its parser, with advance(answer, token, live) -> answer and matched(answer) -> bool [S].
    """
    eos = jnp.isin(token, eos_ids) & live
    answer = advance(answer, token, live)
    count = count + live
    complete = matched(answer)
    stop = jnp.where(count >= max_response, TurnStop.LENGTH, TurnStop.NONE)
    stop = jnp.where(complete, TurnStop.ANSWER, stop)
    return jnp.where(eos, TurnStop.EOS, stop), count, answer


def advance(table: StopTable, state: jax.Array, token: jax.Array, live: jax.Array) -> jax.Array:
    """Return the states int32 [S] after a token int32 [S] in live rows."""
    kind = table.token_class.at[token].get(mode='fill', fill_value=0)
    return jnp.where(live, table.after[kind, state], state)


def matched(table: StopTable, state: jax.Array) -> jax.Array:
    """Return whether a string was found, bool [S]."""
    return state == table.last


def build_stop_table(token_bytes: Sequence[bytes], strings: Sequence[str]) -> StopTable:
    """Build the table of a tokenizer (bytes of each id) and non-empty strings."""
    if not all(strings):
        raise ValueError(f'hosts.stop={tuple(strings)} contains an empty string')
    step = byte_automaton([text.encode() for text in strings])
    states = len(step)
    moved = np.tile(np.arange(states, dtype=np.int32), (len(token_bytes) + 1, 1))
    lengths = np.array([0, *map(len, token_bytes)])  # row 0: a token without bytes
    order = np.argsort(-lengths, kind='stable')
    flat = np.frombuffer(b''.join(token_bytes), np.uint8)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    for position in range(int(lengths.max())):
        rows = order[: int((lengths > position).sum())]
        byte = flat[starts[rows] + position]
        moved[rows] = step[moved[rows], byte[:, None]]
    after, kind = np.unique(moved, axis=0, return_inverse=True)
    # Class 0: tokens without bytes, also used for ids beyond the table
    first = int(kind[0])
    swap = np.arange(len(after))
    swap[[0, first]] = swap[[first, 0]]
    return StopTable(
        token_class=jnp.asarray(swap[kind[1:].reshape(-1)], jnp.int32),
        after=jnp.asarray(after[swap], jnp.int32),
        last=jnp.int32(states - 1),
    )


def byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Return the state after each byte, int32 [Q, 256]; the last state: a string was read."""
    held = {b''}
    for text in strings:
        held |= {text[:end] for end in range(1, len(text))}
    held = sorted(text for text in held if not any(string in text for string in strings))
    index = {text: number for number, text in enumerate(held)}
    step = np.full((len(held) + 1, 256), len(held), np.int32)
    for text in held:
        for byte in range(256):
            read = text + bytes([byte])
            if not any(read.endswith(string) for string in strings):
                while read not in index:
                    read = read[1:]
                step[index[text], byte] = index[read]
    return step
