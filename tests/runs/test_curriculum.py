"""Curricula: ScalingInter-RL's table of horizons.

What a horizon cuts is in test_rollout.py and test_text_task.py, whole runs in test_runs.py.
"""

import micro_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl.curriculum import horizon
from agentrl_jax.run.config import read as read_config


def test_an_interpolated_horizon_by_hand():
    # from 2 to 5 in 4 steps: 2, 2.75, 3.5, 4.25; from 5 to 6: 5, 5.25, 5.5, 5.75; then 6
    climbing = [
        horizon(step, rounds=(2, 5, 6), stage_steps=4, interpolate=True) for step in range(10)
    ]
    assert climbing == [2, 2, 3, 4, 5, 5, 5, 5, 6, 6]
    assert {horizon(s, rounds=(7,), stage_steps=3, interpolate=True) for s in range(9)} == {7}


def counted(rounds, stage_steps, steps):
    """The release's scheduler on a fresh run: a counter from 1 that is moved after each update."""
    stage, seen = 0, []
    for count in range(1, steps + 1):
        seen.append(rounds[stage])
        if stage < len(rounds) - 1 and count % stage_steps == 0:
            stage += 1
    return seen


tables = st.sets(st.integers(1, 40), min_size=1, max_size=5).map(lambda x: tuple(sorted(x)))


@settings(deadline=None)
@given(tables, st.integers(1, 12))
def test_horizons_are_those_of_a_counter_and_never_shrink(rounds, stage_steps):
    steps = range(stage_steps * (len(rounds) + 1))
    shape = dict(rounds=rounds, stage_steps=stage_steps)
    table = [horizon(step, **shape) for step in steps]
    climbing = [horizon(step, **shape, interpolate=True) for step in steps]
    assert table == counted(rounds, stage_steps, len(steps))
    assert climbing[::stage_steps] == table[::stage_steps]
    for low, high in ((table, climbing), (climbing, [*table, rounds[-1]][1:])):
        assert stage_steps > 1 or low == table  # a stage of one step has no inside
        assert all(a <= b for a, b in zip(low[::stage_steps], high[::stage_steps], strict=True))
    for values in (table, climbing):
        assert values == sorted(values) and set(values) <= set(range(rounds[0], rounds[-1] + 1))
        assert all(type(value) is int for value in values)
    later = [rounds[min(step // stage_steps + 1, len(rounds) - 1)] for step in steps]
    assert all(a <= b <= c for a, b, c in zip(table, climbing, later, strict=True))


def test_a_config_without_rounds_plays_every_turn():
    cfg = micro_runs.config('frozen_lake')
    assert [read_config(cfg, None).turn_limit(step) for step in (0, 500)] == [2, 2]
    cfg.curriculum.rounds, cfg.curriculum.stage_steps = (1, 2), 500
    read_config(cfg)
    assert [read_config(cfg, None).turn_limit(step) for step in (0, 499, 500)] == [1, 1, 2]
    cfg.curriculum.rounds, cfg.curriculum.interpolate, cfg.env.max_turns = (1, 5), True, 5
    assert [read_config(cfg, None).turn_limit(step) for step in (124, 125, 499, 500)] == [
        1,
        2,
        4,
        5,
    ]
