"""Strings that end a turn: what the device finds is what Python's `in` finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.text import stops


def found_by(table, ids):
    """Index of the token that completed a string; -1 = none did."""
    state = jnp.zeros(1, jnp.int32)
    for index, token in enumerate(ids):
        state = stops.advance(table, state, jnp.array([token]), True)
        if int(state[0]) == int(table.last):
            return index
    return -1


def test_stop_strings_by_hand():
    table = stops.build_stop_table([b'a', b'b', b'ab', b'', b'abc', b'c'], ['abc'])
    assert found_by(table, [0, 1, 5]) == 2  # a b c
    assert found_by(table, [0, 2, 5, 0]) == 2  # a ab c
    assert found_by(table, [2, 3, 5]) == 2  # ab, a token without bytes, c
    assert found_by(table, [2, 99, 5]) == 2  # an id beyond the table says nothing
    assert found_by(table, [4, 0]) == 0 and found_by(table, [0, 5, 2]) == -1


def test_a_string_once_found_stays_found():
    table = stops.build_stop_table([b'a', b'x'], ['a'])
    state = jnp.zeros(2, jnp.int32)
    for token in ([0, 1], [1, 1]):
        state = stops.advance(table, state, jnp.array(token), True)
    np.testing.assert_array_equal(state == table.last, [True, False])


def test_no_strings_end_nothing():
    table = stops.build_stop_table([b'a', b'b'], [])
    assert found_by(table, [0, 1, 1, 0]) == -1


def test_an_empty_string_is_refused():
    with pytest.raises(ValueError, match='ends nothing'):
        stops.build_stop_table([b'a'], ['x', ''])


@pytest.mark.parametrize(
    'strings', [('</answer>',), ('aab', 'ab', '</s>'), ('</search>', '</answer>', '```\n')], ids=str
)
def test_random_tokens_stop_where_their_text_first_holds_a_string(strings):
    pieces = tiny.tokenizer().token_bytes()
    table = stops.build_stop_table(pieces, strings)
    rng, rows, length = np.random.default_rng(0), 400, 24
    likely = [i for text in strings for i in tiny.tokenizer().encode(text)]
    likely += [i for i, piece in enumerate(pieces) if 0 < len(piece) < 3 and rng.random() < 0.1]
    tokens = rng.choice(likely, (rows, length))

    def read(state, token):
        state = stops.advance(table, state, token, True)
        return state, state == table.last

    _, ended = jax.lax.scan(read, jnp.zeros(rows, jnp.int32), jnp.asarray(tokens.T))
    wanted = [
        [
            any(s in b''.join(pieces[t] for t in row[: n + 1]) for s in map(str.encode, strings))
            for n in range(length)
        ]
        for row in tokens
    ]
    wanted = np.array(wanted)
    assert 20 < wanted[:, -1].sum() < rows
    np.testing.assert_array_equal(np.asarray(ended).T, wanted)
