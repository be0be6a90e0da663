"""Curricula: ScalingInter-RL's table of horizons, what it is for, and levels by difficulty.

What a horizon cuts is in test_rollout.py and test_text_task.py, whole runs in test_runs.py.
"""

import types

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pit_corridor as corridor
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax import train
from agentrl_jax.records import run_log
from agentrl_jax.rl.curriculum import horizon, log_odds, revised
from agentrl_jax.rollout.episodes import draw_episodes
from agentrl_jax.run import command
from agentrl_jax.run.build import build
from agentrl_jax.run.config import read as read_config
from agentrl_jax.types import EpisodeStop

# ---- the table ---------------------------------------------------------------------------------


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


# ---- levels by difficulty ------------------------------------------------------------------------


def test_levels_are_drawn_by_how_uncertain_their_success_is():
    # p (1 - p): .25, .09, 0, 0 (and 1e-6 each): .735, .265, 0, 0 of the half, and .125 of the rest
    odds = np.exp(log_odds(jnp.array([0.5, 0.9, 1.0, 0.0]), 0.5))
    np.testing.assert_allclose(odds, [0.4926, 0.2574, 0.125, 0.125], atol=1e-4)
    np.testing.assert_allclose(np.exp(log_odds(jnp.ones(4), 1.0)), 0.25)  # all are solved


def test_what_is_expected_moves_to_what_was_played():
    # level 3: one of two solved, .5 -> .25 x .5 + .75 x .5; level 0: one was lost, the other was
    # solved, .2 -> .25 x .2 + .75; level 1: both were lost
    lost = EpisodeStop.ENV_ERROR
    rollout = types.SimpleNamespace(
        success=jnp.array([True, False, False, True, True, False]),
        episode_stop=jnp.array([0, 0, lost, 0, lost, lost]),
    )
    level = jnp.array([3, 3, 0, 0, 1, 1])
    after = revised(jnp.array([0.2, 0.3, 0.4, 0.5]), rollout, level, group_size=2, memory=0.25)
    np.testing.assert_allclose(after, [0.8, 0.3, 0.4, 0.5], atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31 - 1), st.floats(0, 1), st.integers(1, 12))
def test_a_step_draws_no_level_twice_and_odds_sum_to_one(seed, uncertain, groups):
    expected = jax.random.uniform(jax.random.key(seed), (12,))
    odds = log_odds(expected, uncertain)
    np.testing.assert_allclose(np.exp(odds).sum(), 1, rtol=1e-5)
    assert (np.exp(odds) >= (1 - uncertain) / 12 - 1e-6).all()
    shape = dict(levels=12, groups=groups, group_size=1, common=False)
    drawn = draw_episodes(jax.random.key(seed), 0, 0, odds, **shape)
    assert len(set(drawn.level.tolist())) == groups


def test_levels_are_drawn_as_often_as_their_odds_say():
    odds = log_odds(jnp.array([0.5, 0.9, 1.0, 0.0]), 0.5)
    shape = dict(levels=4, groups=1, group_size=1, common=False)
    draw = jax.vmap(lambda step: draw_episodes(jax.random.key(0), step, 0, odds, **shape).level[0])
    counts = np.bincount(draw(jnp.arange(8000)), minlength=4) / 8000
    np.testing.assert_allclose(counts, np.exp(odds), atol=0.02)  # sd .0056


@pytest.mark.soak
def test_a_run_counts_what_its_levels_earned_and_resumes_to_the_same_bits(tmp_path):
    def run(steps, workdir):
        changes = {'curriculum.uncertain': 0.8, 'env.train_levels': 16, 'checkpoint.every': 1}
        cfg = micro_runs.plain('frozen_lake', steps=steps, **changes)
        assert train.train(cfg, str(tmp_path / workdir)) == 0
        return micro_runs.saved_state(build(cfg).face, tmp_path / workdir)

    whole = run(3, 'whole')
    run(1, 'halves')
    halves = run(3, 'halves')
    jax.tree.map(np.testing.assert_array_equal, whole, halves)
    expected = np.asarray(whole['expected'] if isinstance(whole, dict) else whole.expected)
    assert expected.shape == (16,)
    rows = run_log.read_metrics(tmp_path / 'whole' / run_log.METRICS_FILE)
    last = rows[2]['curriculum/expected']  # a row of the last step
    np.testing.assert_allclose(last, expected.mean(), rtol=1e-6)
    assert 4 <= (expected != 0.5).sum() <= 12  # four groups in each of three steps


def test_a_pool_of_another_size_than_is_counted_is_refused():
    cfg = micro_runs.config('bandit')
    cfg.curriculum.uncertain = 0.5
    with pytest.raises(command.WrongUsage, match=r'curriculum.uncertain counts .* bandit has'):
        build(cfg)


# ---- what it is for ----------------------------------------------------------------------------

STEPS, LONG = 240, corridor.TURNS
SCALED = [horizon(step, rounds=(2, 4, 8, LONG), stage_steps=40) for step in range(STEPS)]


@pytest.mark.soak
def test_a_growing_horizon_beats_fixed_ones_in_a_long_dangerous_corridor():
    """The same number of episodes for all, and fewer sampled tokens than the long horizon takes.

    Five of nine symbols are pits: a uniform policy survives two turns one time in five, (4/9)^2,
    and all twelve one time in 17,000. Over the full horizon nearly every untrained episode ends
    with nothing, whatever right steps it made, so its return says nothing about them; mostly it is
    learnt to stand still with the reward of the first cells. Cut after two turns the first cells
    are learnt, and each stage adds a few unknown ones to a known way. A horizon that stays short
    never sees the door.

    Of 64 seeds of GRPO 62 reach the door with the growing horizon, 7 with the long one and none
    with the short one, for 75, 136 and 46 thousand tokens; with rounds 3, 6, 12 all 64 do, with
    four pits 63 and 48, with six 62 and 1. RLOO and REINFORCE++ behave alike. MT-GRPO, whose credit
    is per turn, needs no help: this is about returns of whole trajectories.
    """
    scaled, long, short = (
        corridor.train('grpo', 5, turns) for turns in (SCALED, [LONG] * STEPS, [4] * STEPS)
    )
    solved = [int((success > 0.9).sum()) for success, _, _ in (scaled, long, short)]
    assert solved[0] >= 7 and solved[1] <= 3 and solved[2] == 0, (scaled, long, short)
    assert scaled[1].mean() > long[1].mean() + 2, (scaled, long)  # cells, of 8
    assert (scaled[2] < 0.8 * long[2]).all(), (scaled, long)
