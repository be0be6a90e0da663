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


def played_of(returns, first=0):
    """A rollout of one turn and its episodes; level = 100 + stream."""
    stream = first + jnp.arange(len(returns), dtype=jnp.int32)
    out = toy.rollout_of([[(1, 1)]] * len(returns), np.asarray(returns)[:, None], length=3)
    episodes = Episodes(level=100 + stream, token_stream=stream, world_stream=stream)
    return out.replace(level=episodes.level), episodes


def test_kept_groups_are_packed_and_free_places_do_not_train():
    first = played_of([0, 0, 0, 1, 1, 1, 0, 2])  # groups 1 and 3 vary
    pack = functools.partial(refilling.pack, settings=VARIED)
    (out, episodes), count, kept = pack(first, jnp.int32(0), first)
    assert (int(count), int(kept)) == (2, 2)
    assert episodes.level[:4].tolist() == out.level[:4].tolist() == [102, 103, 106, 107]
    assert out.healthy.tolist() == [True] * 4 + [False] * 4
    second = played_of([3, 0, 4, 4, 5, 0, 6, 0], first=8)  # groups 0, 2 and 3 vary; two fit
    (out, episodes), count, kept = pack((out, episodes), count, second)
    assert (int(count), int(kept)) == (4, 3)
    assert episodes.token_stream.tolist() == [2, 3, 6, 7, 8, 9, 12, 13]
    assert out.returns.tolist() == [0, 1, 0, 2, 3, 0, 5, 0] and out.healthy.all()


def stub_run(refill, varied):
    """Return (run, draws); rollout n of the run has varied[n] groups that vary."""
    drawn = []

    def draw(key, step, first=0):
        drawn.append((jax.random.key_data(key).tolist(), step, first))
        return (played_of(np.zeros(ROWS), first)[1],)

    def collect(params, tasks, episodes, key):
        returns = np.zeros(ROWS)
        returns[: 2 * varied[len(drawn) - 1] : 2] = 1 + len(drawn)
        out = played_of(returns, int(episodes[0].token_stream[0]))[0]
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
    return run, drawn


@pytest.mark.parametrize(
    'varied, rollouts, held, kept',
    [
        ([4, 9, 9, 9], 1, 4, 4 / 4),  # full at once
        ([1, 2, 4, 9], 3, 4, 7 / 12),  # 1 + 2 + 4 groups of 12 vary; the last 3 do not fit
        ([1, 0, 1, 0], 4, 2, 2 / 16),  # the limit is reached: two groups train
        ([0, 0, 0, 0], 4, 0, 0.0),
    ],
)
def test_rollouts_are_played_until_the_batch_is_full_or_the_limit_is_reached(
    varied, rollouts, held, kept
):
    run, drawn = stub_run(3, varied)
    (out, _), sampled, measured, groups = collecting.collect(run, None, None, 5)
    assert len(drawn) == measured['filter/collects'] == rollouts and int(sampled) == 10 * rollouts
    assert measured['filter/kept'] == pytest.approx(kept)
    assert measured['rollout/nonfinite'] == rollouts  # one per rollout
    assert groups == held and out.healthy.sum() == held * GROUP_SIZE
    # The first rollout is an unbiased sample of the policy: half of its varied groups return 2.
    assert measured['rollout/return'] == pytest.approx(2 * varied[0] / ROWS)
    assert [step for _, step, _ in drawn] == [5] * rollouts
    assert [first for _, _, first in drawn] == [ROWS * n for n in range(rollouts)]
    assert len({tuple(key) for key, _, _ in drawn}) == rollouts  # different levels in each rollout


def test_without_refilling_one_rollout_is_played_and_nothing_marked():
    run, drawn = stub_run(0, [1])
    (out, _), sampled, measured, groups = collecting.collect(run, None, None, 0)
    assert len(drawn) == 1 and measured['filter/collects'] == 1 and out.healthy.all()
    assert int(sampled) == 10 and groups is None and 'filter/kept' not in measured


def test_further_rollouts_have_streams_of_their_own():
    draw = functools.partial(draw_episodes, jax.random.key(0), 3, levels=9, groups=2, group_size=2)
    own = draw(8)
    assert own.token_stream.tolist() == own.world_stream.tolist() == [8, 9, 10, 11]


def test_tokens_sampled_where_the_grammar_allowed_none_are_an_error():
    counters = {'nonfinite': np.array([0, 0]), 'no_legal_token': np.array([2, 1])}
    counts = collecting.token_counts([counters])
    with pytest.raises(RuntimeError, match='step 3: the grammar allowed no token for 3 of 50'):
        collecting.check_tokens(counts, 50, 'step 3')
    collecting.check_tokens(counts | {'rollout/no_legal_token': 0}, 50, 'step 3')
