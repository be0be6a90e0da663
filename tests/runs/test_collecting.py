"""Dynamic sampling until the batch is full. For a full run see `adapters` in test_runs.py."""

import functools
import types

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.rl.algorithm import Filter
from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.run import collecting, refilling
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.streams import draw_episodes
from agentrl_jax.types import Episodes

GROUPS, GROUP_SIZE, ROWS = 4, 2, 8
VARIED = UpdateSettings(GRPO(filter=Filter('varied')), num_groups=GROUPS, group_size=GROUP_SIZE)


def one_turn_rollout(returns, first=0):
    """Return a rollout of one turn and its episodes; level = 100 + stream."""
    stream = first + jnp.arange(len(returns), dtype=jnp.int32)
    out = toy.rollout_of([[(1, 1)]] * len(returns), np.asarray(returns)[:, None], length=3)
    episodes = Episodes(level=100 + stream, token_stream=stream, world_stream=stream)
    return out.replace(level=episodes.level), episodes


def test_varied_groups_are_packed_and_empty_rows_do_not_train():
    first = one_turn_rollout([0, 0, 0, 1, 1, 1, 0, 2])  # groups 1 and 3 vary
    pack = functools.partial(refilling.pack, settings=VARIED)
    (out, episodes), count, varied = pack(first, jnp.int32(0), first)
    assert (int(count), int(varied)) == (2, 2)
    assert episodes.level[:4].tolist() == out.level[:4].tolist() == [102, 103, 106, 107]
    assert out.healthy.tolist() == [True] * 4 + [False] * 4
    second = one_turn_rollout([3, 0, 4, 4, 5, 0, 6, 0], first=8)  # groups 0, 2 and 3 vary; two fit
    (out, episodes), count, varied = pack((out, episodes), count, second)
    assert (int(count), int(varied)) == (4, 3)
    assert episodes.token_stream.tolist() == [2, 3, 6, 7, 8, 9, 12, 13]
    assert out.returns.tolist() == [0, 1, 0, 2, 3, 0, 5, 0] and out.healthy.all()


def stub_run(refill, varied):
    """Return (run, draws); rollout n of the run has varied[n] groups that vary."""
    draws = []

    def draw(key, step, first=0):
        draws.append((jax.random.key_data(key).tolist(), step, first))
        return (one_turn_rollout(np.zeros(ROWS), first)[1],)

    def collect(params, tasks, episodes, key):
        returns = np.zeros(ROWS)
        returns[: 2 * varied[len(draws) - 1] : 2] = 1 + len(draws)
        out = one_turn_rollout(returns, int(episodes[0].token_stream[0]))[0]
        counters = {'overflow': 0, 'generated': 10, 'nonfinite': 1}
        return out, [{name: jnp.array([count]) for name, count in counters.items()}]

    changes = {'rollout.group_size': GROUP_SIZE, 'filter.rule': 'varied', 'filter.refill': refill}
    cfg = read_config(micro_runs.config('frozen_lake', **changes), None)
    pack = functools.partial(refilling.pack, settings=VARIED)
    run = types.SimpleNamespace(
        config=cfg,
        worlds={},
        training=types.SimpleNamespace(
            tasks=(None,),
            draw=draw,
            collect=collect,
            pack=pack if refill else None,
            metrics=lambda out, tasks: {'rollout/return': float(out.returns.mean())},
        ),
    )
    return run, draws


@pytest.mark.parametrize(
    'varied, rollouts, num_groups, share',
    [
        ([4, 9, 9, 9], 1, 4, 4 / 4),  # full at once
        ([1, 2, 4, 9], 3, 4, 7 / 12),  # 1 + 2 + 4 groups of 12 vary; the last 3 do not fit
        ([1, 0, 1, 0], 4, 2, 2 / 16),  # the limit is reached: two groups train
        ([0, 0, 0, 0], 4, 0, 0.0),
    ],
)
def test_collecting_stops_when_the_batch_is_full_or_the_limit_is_reached(
    varied, rollouts, num_groups, share
):
    run, draws = stub_run(3, varied)
    (out, _), sampled, measured, groups = collecting.collect(run, None, None, 5)
    assert len(draws) == measured['filter/collects'] == rollouts and int(sampled) == 10 * rollouts
    assert measured['filter/kept'] == pytest.approx(share)
    assert measured['rollout/nonfinite'] == rollouts  # one per rollout
    assert groups == num_groups and out.healthy.sum() == num_groups * GROUP_SIZE
    # The first rollout is an unbiased sample of the policy: half of its varied groups return 2.
    assert measured['rollout/return'] == pytest.approx(2 * varied[0] / ROWS)
    assert [step for _, step, _ in draws] == [5] * rollouts
    assert [first for _, _, first in draws] == [ROWS * n for n in range(rollouts)]
    assert len({tuple(key) for key, _, _ in draws}) == rollouts  # different levels in each rollout


def test_one_rollout_is_collected_without_refilling():
    run, draws = stub_run(0, [1])
    (out, _), sampled, measured, groups = collecting.collect(run, None, None, 0)
    assert len(draws) == 1 and measured['filter/collects'] == 1 and out.healthy.all()
    assert int(sampled) == 10 and groups is None and 'filter/kept' not in measured


def test_later_rollouts_use_new_streams():
    draw = functools.partial(draw_episodes, jax.random.key(0), 3, levels=9, groups=2, group_size=2)
    episodes = draw(8)
    assert episodes.token_stream.tolist() == episodes.world_stream.tolist() == [8, 9, 10, 11]


def test_sampling_without_an_allowed_token_is_an_error():
    counters = {'nonfinite': np.array([0, 0]), 'no_legal_token': np.array([2, 1])}
    counts = collecting.token_counts([counters])
    with pytest.raises(RuntimeError, match='step 3: the grammar allowed no token for 3 of 50'):
        collecting.check_tokens(counts, 50, 'step 3')
    collecting.check_tokens(counts | {'rollout/no_legal_token': 0}, 50, 'step 3')
