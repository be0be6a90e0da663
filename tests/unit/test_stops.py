"""Stop strings: the device finds the same strings as Python's `in`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.text import stops
from agentrl_jax.types import TurnStop


def stop_index(table, ids):
    """Return the index of the token that completed a string; -1 = none. The state is final."""
    state, first = jnp.zeros(1, jnp.int32), -1
    for index, token in enumerate(ids):
        idle = stops.advance(table, state, jnp.array([token]), jnp.array([False]))
        assert int(idle[0]) == int(state[0])
        state = stops.advance(table, state, jnp.array([token]), jnp.array([True]))
        matched = bool(stops.matched(table, state)[0])
        assert matched or first < 0
        first = index if matched and first < 0 else first
    return first


def test_stop_strings_by_hand():
    table = stops.build_stop_table([b'a', b'b', b'ab', b'', b'abc', b'c'], ['abc'])
    assert stop_index(table, [0, 1, 5, 0]) == 2  # a b c
    assert stop_index(table, [0, 2, 5, 0]) == 2  # a ab c
    assert stop_index(table, [2, 3, 5]) == 2  # ab, a token without bytes, c
    assert stop_index(table, [2, 99, 5]) == 2  # an id beyond the table has no text
    assert stop_index(table, [4, 0]) == 0 and stop_index(table, [0, 5, 2]) == -1
    assert stop_index(stops.build_stop_table([b'a', b'b'], []), [0, 1, 1, 0]) == -1
    with pytest.raises(ValueError, match='contains an empty string'):
        stops.build_stop_table([b'a'], ['x', ''])


def test_stop_reasons_of_turns_by_hand():
    """EOS takes precedence over a string, and a string over the length; only live rows change."""
    table = stops.build_stop_table([b'a', b'b', b''], ['b'])
    #   a      b       eos    b and longest  eos and longest  longest  not live
    token = jnp.array([0, 1, 2, 1, 2, 0, 2])
    count = jnp.array([0, 0, 0, 3, 3, 3, 3])
    live = jnp.array([True] * 6 + [False])
    stop, after, state = stops.turn_stop(
        token,
        live,
        count,
        jnp.zeros(7, jnp.int32),
        advance=functools.partial(stops.advance, table),
        matched=functools.partial(stops.matched, table),
        eos_ids=jnp.array([2]),
        max_response=4,
    )
    none, eos, length, answer, *_ = TurnStop
    assert stop.tolist() == [none, answer, eos, answer, eos, length, none]
    assert after.tolist() == [1, 1, 1, 4, 4, 4, 3]
    assert (state == table.last).tolist() == [False, True, False, True, False, False, False]


@pytest.mark.parametrize(
    'strings', [('</answer>',), ('aab', 'ab', '</s>'), ('</search>', '</answer>', '```\n')], ids=str
)
def test_random_tokens_stop_where_their_text_first_contains_a_string(strings):
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
    expected = [
        [
            any(s in b''.join(pieces[t] for t in row[: n + 1]) for s in map(str.encode, strings))
            for n in range(length)
        ]
        for row in tokens
    ]
    expected = np.array(expected)
    assert 20 < expected[:, -1].sum() < rows
    np.testing.assert_array_equal(np.asarray(ended).T, expected)
