"""Curricula: ScalingInter-RL's table of horizons.

Effects of a horizon are in test_rollout.py and test_text_task.py, full runs in test_runs.py.
"""

import micro_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl.curriculum import Curriculum
from agentrl_jax.run.config import read as read_config


def reference_horizons(rounds, stage_steps, steps):
    """Run the released scheduler: a counter that starts at 1 and advances after each update."""
    stage, horizons = 0, []
    for count in range(1, steps + 1):
        horizons.append(rounds[stage])
        if stage < len(rounds) - 1 and count % stage_steps == 0:
            stage += 1
    return horizons


tables = st.sets(st.integers(1, 40), min_size=1, max_size=5).map(lambda x: tuple(sorted(x)))


@settings(deadline=None)
@given(tables, st.integers(1, 12))
def test_horizons_match_the_released_scheduler_and_never_shrink(rounds, stage_steps):
    steps = range(stage_steps * (len(rounds) + 1))
    table = [Curriculum(rounds, stage_steps).turn_limit(step, 0) for step in steps]
    assert table == reference_horizons(rounds, stage_steps, len(steps)) == sorted(table)


def test_a_config_without_rounds_plays_every_turn():
    cfg = micro_runs.config('frozen_lake')
    assert [read_config(cfg, None).turn_limit(step) for step in (0, 500)] == [2, 2]
    cfg.curriculum.rounds, cfg.curriculum.stage_steps = (1, 2), 500
    read_config(cfg)
    assert [read_config(cfg, None).turn_limit(step) for step in (0, 499, 500)] == [1, 1, 2]
