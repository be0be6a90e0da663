"""Several environments in one run: shares, rows, streams, sums. Full runs are in test_runs.py."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import micro_runs
import ml_collections
import numpy as np
import pytest
import toy_rollouts

from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.imitation import demonstrations
from agentrl_jax.machine import sharding
from agentrl_jax.measure import validation
from agentrl_jax.run import cloning, collecting, mixture
from agentrl_jax.run.build import build
from agentrl_jax.run.config import effective
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.state import start_state
from agentrl_jax.text import agents, conversation
from agentrl_jax.types import Demonstrations, FrozenParams

pytestmark = pytest.mark.usefixtures('quick_runs')
MIX = (('frozen_lake', 0.5), ('catch', 0.5))
UNEVEN = (('frozen_lake', 0.75), ('catch', 0.25))
MIX_NAMES = ('frozen_lake', 'catch')


def config(mix, **changes):
    """Four groups of four; eight groups if the shares are uneven."""
    small = {
        'algorithm': 'grpo',
        'clone.episodes': 0,
        'rollout.num_groups': 8 if mix == UNEVEN else 4,
        'loss.kl_coef': 0.0,
        'env.mix': mix,
    }
    cfg = micro_runs.plain('frozen_lake', **(small | changes))
    cfg.catch = ml_collections.ConfigDict(dict(rows=4, columns=3))
    return cfg


# ---- shares ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'shares, total, expected',
    [
        ((0.75, 0.25), 8, (6, 2)),
        ((0.5, 0.5), 7, (4, 3)),  # 3.5 each: the first one wins ties
        ((0.5, 0.3, 0.2), 8, (4, 2, 2)),  # 4, 2.4, 1.6
        ((1 / 3, 1 / 3, 1 / 3), 32, (11, 11, 10)),
        ((1.0,), 5, (5,)),
        ((0.5, 0.5), 0, (0, 0)),
    ],
)
def test_groups_by_share_by_hand(shares, total, expected):
    cfg = config(tuple((f'world {i}', share) for i, share in enumerate(shares)))
    assert read_config(cfg, None).env.apportion(total) == expected


def test_a_member_is_the_config_of_a_separate_run():
    cfg = effective(config(UNEVEN, **{'clone.episodes': 10}))
    run = read_config(cfg, None)
    assert cfg.env.name == 'frozen_lake+catch' and run.env.worlds == MIX_NAMES
    assert effective(cfg) == cfg
    lake, catch = run.members
    assert (lake.env.name, lake.env.mix, lake.rollout.num_groups) == ('frozen_lake', (), 6)
    assert (catch.env.name, catch.rollout.num_groups) == ('catch', 2)
    assert (lake.clone.episodes, catch.clone.episodes) == (8, 2)
    saved = ml_collections.ConfigDict(json.loads(cfg.to_json()))  # JSON turns pairs into lists
    assert tuple(effective(saved).env.mix) == UNEVEN
    assert tuple(member.env.name for member in read_config(saved, None).members) == MIX_NAMES
    plain = read_config(config(()), None)
    assert plain.members == (plain,)


# ---- parts -------------------------------------------------------------------------------------


def test_joined_demonstrations_have_the_largest_width():
    def rows_of(tokens):
        tokens = jnp.array(tokens)
        return Demonstrations(tokens, tokens > 0, tokens > 1)

    joined = demonstrations.join([rows_of([[1, 2]]), rows_of([[3, 4, 5], [6, 0, 0]])], 9)
    assert joined.tokens.tolist() == [[1, 2, 9], [3, 4, 5], [6, 0, 0]]
    assert joined.attention_mask.tolist()[0] == [True, True, False]
    assert joined.tokens.dtype == jnp.int32 and joined.attention_mask.dtype == bool


def test_sums_of_worlds_keep_the_figures_shared_by_all():
    def counted(successes, **figures):
        levels = {'tries': np.array([2, 2]), 'solved': np.array([successes, 0])}
        known = {'episodes': 4, 'successes': successes, 'of_levels': levels, 'samples': 2}
        return known | {'own': figures}

    total = validation.total([counted(1, trials=5.0, answered=2.0), counted(2, trials=6.0)])
    levels = total.pop('of_levels')
    assert total == {'episodes': 8, 'successes': 3, 'own': {'trials': 11.0}, 'samples': 2}
    assert levels['tries'].tolist() == [2] * 4 and levels['solved'].tolist() == [1, 0, 2, 0]


@pytest.mark.soak
def test_demonstrations_are_divided_by_the_shares_of_worlds():
    halves = (('frozen_lake', 0.5), ('sokoban', 0.5))
    run = build(config(halves, **{'clone.episodes': 6, 'rollout.max_tokens': 144}))
    data = cloning.find_demonstrations(run)
    assert len(data.tokens) == 6
    lake, sokoban = (np.asarray(task.prefix) for task in run.training.tasks)
    tokens = np.asarray(data.tokens)
    assert (tokens[:3, : len(lake)] == lake).all() and (tokens[3:, : len(sokoban)] == sokoban).all()


def first_rollout(run):
    """Return (rollout, episodes) of the first step."""
    training = run.training
    drawn = training.draw(jax.random.key(1), 0, 100)
    rollout, counters = training.collect(run.params, training.tasks, drawn, jax.random.key(2))
    collecting.check_counters(counters)
    return rollout, drawn


@pytest.mark.soak
def test_rows_of_a_rollout_are_grouped_by_world_and_use_its_pool():
    """On eight devices. Streams differ in all rows; blocks start with their environment's text."""
    run = build(config(UNEVEN, **{'mesh.data': 8}))
    rollout, drawn = first_rollout(run)
    assert run.mesh.size == 8
    assert rollout.tokens.sharding.is_equivalent_to(sharding.shard_rows(run.mesh), 2)
    assert np.concatenate([world.token_stream for world in drawn]).tolist() == [*range(100, 132)]
    blocks = list(mixture.blocks((24, 8), jax.device_get(rollout)))
    assert [member.rollout.episodes for member in run.config.members] == [24, 8]
    assert len(set(drawn[1].level.tolist())) == 2  # groups of four
    for task, rows, listed in zip(run.training.tasks, blocks, drawn, strict=True):
        prefix = np.asarray(task.prefix)
        assert (rows.tokens[:, : len(prefix)] == prefix).all()
        np.testing.assert_array_equal(rows.level, listed.level)


@pytest.mark.soak
def test_every_world_has_continuations_plans_and_further_trials():
    changes = {
        'algorithm': 'vine',
        'agent.name': 'plan',
        'agent.trials': 2,
        'env.max_turns': 5,
        'rollout.max_tokens': 240,
    }
    run = build(config(MIX, **changes))
    rollout, _ = first_rollout(run)
    measured = jax.device_get(run.training.metrics(rollout, run.training.tasks))
    assert (np.asarray(rollout.part) == agents.PLAN).any(1).all()
    for rows in mixture.blocks((8, 8), rollout):
        assert (rows.extra['continuations'].turn > 0).any() and rows.trial.max() == 1
    for name in ('agent/trials', 'agent/plan_tokens', 'agent/success_second'):
        each = [measured[name.replace('/', f'_{world}/')] for world in MIX_NAMES]
        np.testing.assert_allclose(measured[name], np.mean(each), rtol=1e-5)
    state, learned, *_ = run.training.learn(
        start_state(run, run.params), FrozenParams({}, None), rollout
    )
    assert int(state.step) == 1 and learned['batch/trained_rows'] == 16
    assert np.isfinite(learned['policy/loss'])


def test_joined_rows_are_cut_back_to_the_figures_of_each_world():
    def task_with(*names):
        class World(HostEnvironment):
            FIGURES = names

        empty = {field.name: None for field in dataclasses.fields(conversation.HostTask)}
        return conversation.HostTask(**empty | {'env': World()})

    plain = toy_rollouts.rollout_of([[(1, 1)]] * 2, [[0.0]] * 2, length=4)
    plain = plain.replace(actions=jnp.zeros((2, 1, 3), jnp.int32))
    one, two = (
        plain.replace(actions=plain.actions[:, :, :1], figures=jnp.array(rows))
        for rows in ([[1.0], [2.0]], [[3.0, 4.0], [5.0, 6.0]])
    )
    tasks = None, task_with('tries'), task_with('tries', 'cost')
    joined = mixture.joined((plain, one, two))
    assert joined.actions.tolist()[2:] == [[[0, -1, -1]]] * 4 and joined.figures.shape == (6, 2)
    rows = [*map(mixture.own, tasks, mixture.blocks((2, 2, 2), joined))]
    assert rows[0].figures is None
    micro_runs.assert_same(rows[1].figures, one.figures)
    micro_runs.assert_same(rows[2].figures, two.figures)
    assert mixture.joined((plain, plain)).figures is None
    # Validity is known on the device, and for some environments on hosts
    assert joined.judged is None
    doubtful = one.replace(judged=jnp.zeros_like(one.valid))
    assert mixture.joined((plain, doubtful)).judged.tolist() == [[True]] * 2 + [[False]] * 2
