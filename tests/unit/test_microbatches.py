"""Rows truncated to their length: bucket widths, and which rows share a slice."""

import jax.numpy as jnp

from agentrl_jax.rl import microbatches


def test_widths_are_evenly_spaced_and_end_with_the_full_row():
    assert microbatches.menu(160, 4) == (40, 80, 120, 160)
    assert microbatches.menu(90, 4) == (24, 48, 72, 90)  # 22.5, 45 and 67.5, up to multiples of 8
    assert microbatches.menu(9, 4) == (8, 9) and microbatches.menu(160, 1) == (160,)


def test_a_row_is_used_up_to_its_last_token_in_the_mask():
    mask = jnp.asarray([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], bool)
    assert microbatches.used(mask).tolist() == [4, 0, 1]


def test_parts_hold_rows_of_similar_length():
    # units (9, 1), (2, 3), (8, 8), (1, 1) are 9, 3, 8 and 1 long: parts {1, 3} and {8, 9}
    order = microbatches.sorted_rows(jnp.asarray([9, 1, 2, 3, 8, 8, 1, 1]), parts=2, unit=2)
    parts = microbatches.split(order, 2, None, 2)
    assert parts.tolist() == [[6, 7, 2, 3], [4, 5, 0, 1]]


def test_rows_take_the_narrowest_width_that_holds_the_longest():
    def fn(params, rows, uncut):
        return rows.shape[1] + params, uncut.sum()

    rows = (jnp.zeros((2, 30)), jnp.arange(2))
    for longest, width in ((0, 8), (8, 8), (9, 16), (30, 30)):
        lengths = jnp.asarray([0, longest])
        assert microbatches.run_in_bucket(fn, 0, rows, lengths, (8, 16, 30)) == (width, 1)
