"""Dynamic sampling: rollouts until the batch is full of groups worth training on."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax import train
from agentrl_jax.machine import processes
from agentrl_jax.rl import filtering
from agentrl_jax.rollout.episodes import Episodes, draw_episodes
from agentrl_jax.run import collecting, parts
from agentrl_jax.run.build import build
from agentrl_jax.run.params import Frozen, policy_of
from agentrl_jax.run.state import Opened, start_state
from agentrl_jax.run.streams import Streams

GROUPS, GROUP_SIZE, ROWS = 4, 2, 8
VARIED = functools.partial(filtering.keep_rows, group_size=GROUP_SIZE, rule='varied')


def played_of(returns, first=0):
    """A rollout of one turn and its episodes; level = 100 + stream."""
    stream = first + jnp.arange(len(returns), dtype=jnp.int32)
    out = toy.rollout_of([[(1, 1)]] * len(returns), np.asarray(returns)[:, None], length=3)
    episodes = Episodes(level=100 + stream, token_stream=stream, world_stream=stream)
    return out.replace(level=episodes.level), episodes


def test_kept_groups_are_packed_and_free_places_do_not_train():
    first = played_of([0, 0, 0, 1, 1, 1, 0, 2])  # groups 1 and 3 vary
    pack = functools.partial(collecting.pack, keep_fn=VARIED, group_size=GROUP_SIZE)
    (out, episodes), count, kept = pack(first, jnp.int32(0), first)
    assert (int(count), int(kept)) == (2, 2)
    assert episodes.level[:4].tolist() == out.level[:4].tolist() == [102, 103, 106, 107]
    assert out.healthy.tolist() == [True] * 4 + [False] * 4
    second = played_of([3, 0, 4, 4, 5, 0, 6, 0], first=8)  # groups 0, 2 and 3 vary; two have room
    (out, episodes), count, kept = pack((out, episodes), count, second)
    assert (int(count), int(kept)) == (4, 3)
    assert episodes.token_stream.tolist() == [2, 3, 6, 7, 8, 9, 12, 13]
    assert out.returns.tolist() == [0, 1, 0, 2, 3, 0, 5, 0] and out.healthy.all()


STREAMS = Streams(seed=0)
OPENED = Opened(state=None, frozen=Frozen({}, None), base=None, streams=STREAMS)


def stub_run(refill, varied):
    """A run whose rollout number n has varied[n] groups that vary; (run, what was drawn)."""
    drawn = []

    def draw(key, step, first=0):
        drawn.append((jax.random.key_data(key).tolist(), step, first))
        return played_of(np.zeros(ROWS), first)[1]

    def collect(params, task, episodes, key):
        returns = np.zeros(ROWS)
        returns[: 2 * varied[len(drawn) - 1] : 2] = 1 + len(drawn)
        out = played_of(returns, int(episodes.token_stream[0]))[0]
        counters = {'overflow': 0, 'generated': 10, 'nonfinite': 1}
        return out, {name: jnp.array([count]) for name, count in counters.items()}

    cfg = micro_runs.config('frozen_lake', **{'rollout.group_size': GROUP_SIZE})
    cfg.filter.refill = refill
    pack = functools.partial(collecting.pack, keep_fn=VARIED, group_size=GROUP_SIZE)
    run = types.SimpleNamespace(
        cfg=cfg,
        worlds={},
        training=types.SimpleNamespace(
            task=None,
            draw=draw,
            collect=collect,
            pack=pack if refill else None,
            metrics=lambda out, task: {'rollout/return': float(out.returns.mean())},
        ),
    )
    return run, drawn


@pytest.mark.parametrize(
    'varied, rollouts, held, kept',
    [
        ([4, 9, 9, 9], 1, 4, 4 / 4),  # full at once
        ([1, 2, 4, 9], 3, 4, 7 / 12),  # 1 + 2 + 4 groups of 12 vary; the last 3 have no room
        ([1, 0, 1, 0], 4, 2, 2 / 16),  # the limit is reached: two groups train
        ([0, 0, 0, 0], 4, 0, 0.0),
    ],
)
def test_rollouts_are_played_until_the_batch_is_full_or_the_limit_is_reached(
    varied, rollouts, held, kept
):
    run, drawn = stub_run(3, varied)
    (out, _), sampled, measured = collecting.collect(run, None, None, STREAMS, 5)
    assert len(drawn) == measured['filter/collects'] == rollouts and int(sampled) == 10 * rollouts
    assert measured['filter/kept'] == pytest.approx(kept)
    assert measured['rollout/nonfinite'] == rollouts  # one in each
    assert out.healthy.sum() == held * GROUP_SIZE
    # The first rollout is an unbiased sample of the policy: 2 for one of two in its varied groups.
    assert measured['rollout/return'] == pytest.approx(2 * varied[0] / ROWS)
    assert [step for _, step, _ in drawn] == [5] * rollouts
    assert [first for _, _, first in drawn] == [ROWS * n for n in range(rollouts)]
    assert len({tuple(key) for key, _, _ in drawn}) == rollouts  # other levels each time


def test_without_refilling_one_rollout_is_played_and_nothing_marked():
    run, drawn = stub_run(0, [1])
    (out, _), sampled, measured = collecting.collect(run, None, None, STREAMS, 0)
    assert len(drawn) == 1 and measured['filter/collects'] == 1 and out.healthy.all()
    assert int(sampled) == 10 and 'filter/kept' not in measured


def test_further_rollouts_have_streams_of_their_own():
    draw = functools.partial(draw_episodes, jax.random.key(0), 3, levels=9, groups=2, group_size=2)
    own, common = draw(8, common=False), draw(8, common=True)
    assert own.token_stream.tolist() == own.world_stream.tolist() == [8, 9, 10, 11]
    assert common.world_stream.tolist() == [8, 8, 9, 9]


# ---- with a policy, on meshes --------------------------------------------------------------------


def one_step(monkeypatch, devices):
    """(run, rollout and rows of the update, state, metrics): one group in four is kept."""
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ('data', 'fsdp', 'tensor')
    )
    monkeypatch.setattr(parts, 'build_mesh', lambda cfg: mesh)
    cfg = micro_runs.config(
        'frozen_lake',
        algorithm='grpo',
        **{'filter.keep': 0.25, 'filter.refill': 5, 'env.eval_levels': 8, 'optim.lr': 1e-5},
    )
    run = build(cfg)
    params = policy_of(start_state(run, run.params).params, {})
    collect_without_compiling(run, params)
    state, measured, _, played = train.train_step(
        run, OPENED, start_state(run, run.params), 2, first=False
    )
    return run, played, state, measured


def collect_without_compiling(run, params):
    """A first step that one rollout fills, then one that takes four: no further program."""
    cfg = run.cfg.copy_and_resolve_references()
    cfg.filter.refill = 0
    collecting.collect(dataclasses.replace(run, cfg=cfg), params, run.training.task, STREAMS, 2)
    with processes.CompileCounter() as counter:
        _, _, measured = collecting.collect(run, params, run.training.task, STREAMS, 2)
    assert measured['filter/collects'] == 4 and counter.count == 0


@pytest.mark.soak
def test_a_refilled_step_repeats_itself_on_one_device_and_on_eight(monkeypatch):
    """Four rollouts fill a batch of four groups: the best of each, in their order."""
    run, played, state, measured = one_step(monkeypatch, 8)
    assert measured['filter/collects'] == 4 and measured['filter/kept'] == 0.25
    assert measured['batch/trained_rows'] == 16 and measured['filter/empty'] == 0
    held, params = played.rollout, policy_of(start_state(run, run.params).params, {})
    keep = settings.build_keep(run.cfg)
    for number in range(4):
        (out, _), _ = collecting.play(run, params, run.training.task, STREAMS, 2, number)
        rows = np.flatnonzero(keep(out)[1])
        part = slice(4 * number, 4 * number + 4)
        np.testing.assert_array_equal(held.tokens[part], out.tokens[rows])
        np.testing.assert_array_equal(held.rewards[part], out.rewards[rows])
        np.testing.assert_array_equal(played.episodes.level[part], out.level[rows])
    again = train.train_step(run, OPENED, start_state(run, run.params), 2, first=False)[0]
    jax.tree.map(np.testing.assert_array_equal, state, again)
    _, alone, state_alone, _ = one_step(monkeypatch, 1)
    np.testing.assert_array_equal(held.tokens, alone.rollout.tokens)
    for a, b in zip(*map(jax.tree.leaves, (state.params, state_alone.params)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
