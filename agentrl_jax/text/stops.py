"""What ends a turn: the rule, and the automaton that finds strings while tokens are sampled.

An Aho-Corasick automaton over bytes, lifted to tokens: a token moves the automaton from a state to
another by its class, and tokens that move every state alike share one. A step costs two gathers.
The token that completes a string is kept whole.
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
    """Q states and C classes of tokens. State 0 has read nothing; in the last one a string was
    found, and it is never left."""

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
    """(TurnStop of each row after a token int32 [S], count and answer with that token).

    live bool [S]: rows that sampled it; count int32 [S]: tokens of the answer; answer: state of its
    reader, advance(answer, token, live) -> answer and matched(answer) -> bool [S].
    """
    eos = jnp.isin(token, eos_ids) & live
    answer = advance(answer, token, live)
    count = count + live
    complete = matched(answer)
    stop = jnp.where(count >= max_response, TurnStop.LENGTH, TurnStop.NONE)
    stop = jnp.where(complete, TurnStop.ANSWER, stop)
    return jnp.where(eos, TurnStop.EOS, stop), count, answer


def advance(table: StopTable, state: jax.Array, token: jax.Array, live: jax.Array) -> jax.Array:
    """States int32 [S] after a token int32 [S] each, where live and where the table knows it."""
    kind = table.token_class.at[token].get(mode='fill', fill_value=0)
    return jnp.where(live, table.after[kind, state], state)


def matched(table: StopTable, state: jax.Array) -> jax.Array:
    """bool [S]: a string was found."""
    return state == table.last


def build_stop_table(token_bytes: Sequence[bytes], strings: Sequence[str]) -> StopTable:
    """The table of a tokenizer (bytes of each id) and of strings, none of which is empty."""
    if not all(strings):
        raise ValueError(f'hosts.stop={tuple(strings)} holds an empty string, which ends nothing')
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
    # Class 0 is that of tokens without bytes, which ids beyond the table are taken for.
    first = int(kind[0])
    swap = np.arange(len(after))
    swap[[0, first]] = swap[[first, 0]]
    return StopTable(
        token_class=jnp.asarray(swap[kind[1:].reshape(-1)], jnp.int32),
        after=jnp.asarray(after[swap], jnp.int32),
        last=jnp.int32(states - 1),
    )


def byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """int32 [Q, 256]: the state after each byte; the last state means that a string was read."""
    held = {b''}
    for text in strings:
        held |= {text[:end] for end in range(1, len(text))}
    held = sorted(text for text in held if not any(whole in text for whole in strings))
    index = {text: number for number, text in enumerate(held)}
    step = np.full((len(held) + 1, 256), len(held), np.int32)
    for text in held:
        for byte in range(256):
            read = text + bytes([byte])
            if not any(read.endswith(whole) for whole in strings):
                while read not in index:
                    read = read[1:]
                step[index[text], byte] = index[read]
    return step
