"""Strings that end a turn, found on the device while the tokens are sampled.

An Aho-Corasick automaton over bytes, lifted to tokens: a token moves the automaton from a state to
another by its class, and tokens that move every state alike share one. A step costs two gathers.
The token that completes a string is kept whole.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class StopTable:
    """Q states and C classes of tokens. State 0 has read nothing; in the last one a string stands,
    and it is never left."""

    token_class: jax.Array  # int32 [V]
    after: jax.Array  # int32 [C, Q]
    last: jax.Array  # int32 []


def advance(table: StopTable, state: jax.Array, token: jax.Array) -> jax.Array:
    """States int32 [S] behind a token int32 [S] each; tokens beyond the table change nothing."""
    kind = table.token_class.at[token].get(mode='fill', fill_value=0)
    return table.after[kind, state]


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
    """int32 [Q, 256]: the state behind each byte; the last state means that a string was read."""
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
