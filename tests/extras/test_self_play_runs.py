"""Self-play runs: metrics, snapshots, resuming, Elo, and incompatible settings."""

import importlib.util
import json
import types

import jax
import micro_runs
import ml_collections
import numpy as np
import pytest

from agentrl_jax import train
from agentrl_jax.extras.self_play import elo, section
from agentrl_jax.machine import checkpoint
from agentrl_jax.records import run_log
from agentrl_jax.run.config import read as read_config

pytestmark = pytest.mark.soak

needs_pgx = pytest.mark.skipif(
    importlib.util.find_spec('pgx') is None, reason='pip install -r requirements-test.txt'
)
LEDUC = {
    'algorithm': 'rae',
    'env.name': 'leduc',
    'env.prompt': 'plain',
    'env.think': False,
    'env.max_turns': 8,
    'env.max_actions_per_turn': 1,
    'env.max_actions_per_episode': 8,
    'context.window': 1,
    'rollout.constrain': 'own',
    'rollout.max_response': 9,
    'rollout.max_tokens': 320,
    'eval.temperature': 1.0,
}


def plain(world='leduc', opponent='self', **changes):
    cfg = micro_runs.plain('frozen_lake')
    section = dict(short=True, opponent=opponent)
    if world == 'leduc':
        section['position'] = True
    with cfg.unlocked():
        cfg[world] = ml_collections.ConfigDict(section)
    cfg.update_from_flattened_dict(LEDUC | {'env.name': world} | changes)
    return cfg


SNAPSHOTS = {
    'self_play.snapshots': 2,
    'self_play.every': 2,
    'steps': 4,
    'checkpoint.keep': 9,
    'mesh.fsdp': 2,  # its checkpoints are rated on one device
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Return (config, workdir) of a run of four steps against two snapshots."""
    cfg, workdir = plain(**SNAPSHOTS), tmp_path_factory.mktemp('runs') / 'whole'
    with micro_runs.one_device():
        assert train.train(cfg, str(workdir)) == 0
    return cfg, workdir


@needs_pgx
def test_a_run_trains_both_seats_and_logs_its_exploitability(trained):
    cfg, workdir = trained
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    assert all(row['perf/recompiles'] == 0 for row in rows)
    values = [row['eval/exploitability'] for row in rows if 'eval/success' in row]
    assert len(values) == 3 and len(set(values)) == 3 and 1 < min(values) and max(values) < 4
    assert all(row['rollout/valid_format'] == 1 for row in rows[:-1])


@needs_pgx
def test_snapshots_are_policies_of_earlier_steps_oldest_first(trained):
    cfg, workdir = trained
    with micro_runs.one_device():
        first, second, last = (micro_runs.saved_state(cfg, workdir, step) for step in (0, 2, 4))
    start = (first.params, first.params)
    jax.tree.map(np.testing.assert_array_equal, first.extra['snapshots'], start)
    # The snapshot of step 2 is taken at its start, after the checkpoint of the step
    jax.tree.map(np.testing.assert_array_equal, second.extra['snapshots'], first.extra['snapshots'])
    expected = (first.params, second.params)
    jax.tree.map(np.testing.assert_array_equal, last.extra['snapshots'], expected)


@needs_pgx
def test_a_resumed_run_ends_bit_identically(trained, tmp_path):
    cfg, workdir = trained
    with micro_runs.one_device():
        assert train.train(plain(**SNAPSHOTS | {'steps': 2}), str(tmp_path)) == 0
        assert train.train(cfg, str(tmp_path)) == 0
        uninterrupted, resumed = (micro_runs.saved_state(cfg, path) for path in (workdir, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, uninterrupted, resumed)


@needs_pgx
def test_the_checkpoints_of_a_run_have_ratings(trained):
    cfg, workdir = trained
    assert checkpoint.steps(workdir / checkpoint.FOLDER) == [0, 2, 4]
    records = elo.elo(str(workdir), [], [0, 4], games=16, seed=0, out='')
    assert json.loads((workdir / 'elo.json').read_text()) == records
    by_name = {one['player']: one for one in records}
    assert set(by_name) == {'random', 'expert', 'whole 0', 'whole 4'}
    assert by_name['random']['elo'] == by_name['random']['low'] == 0
    assert sum(one['reward'] for one in records) == pytest.approx(0, abs=1e-9)
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    logged = rows[-1]['eval/exploitability']
    assert by_name['whole 4']['exploitability'] == pytest.approx(logged, abs=1e-4)
    assert elo.table(records).count('\n') == 4
    with pytest.raises(ValueError, match='--games=3 must be an even number'):
        elo.elo(str(workdir), [], [0], games=3, seed=0, out='')


REJECTED = [
    ({'algorithm': 'ppo'}, 'algorithm'),
    ({'context.window': 0}, 'context.window'),
    ({'self_play.snapshots': 2, 'rollout.group_size': 2}, 'rollout.group_size'),
]


@needs_pgx
@pytest.mark.parametrize('changes, message', REJECTED)
def test_settings_incompatible_with_self_play_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(plain(**changes))


@needs_pgx
def test_rae_and_snapshots_require_self_play():
    with pytest.raises(ValueError, match='opponent'):
        read_config(plain(opponent='random'))
    with pytest.raises(ValueError, match='self_play.snapshots'):
        read_config(plain(opponent='random', algorithm='rloo', **{'self_play.snapshots': 1}))


@needs_pgx
@pytest.mark.parametrize(
    'world, plies, budget',
    [('leduc', 8, 'max_turns'), ('connect_four', 42, 'max_actions_per_episode')],
)
def test_budgets_for_one_player_are_too_small_for_both(world, plies, budget):
    """Prompts after the last turn had other lines, and a game that was cut was a draw."""
    budgets = {'env.max_turns': plies, 'env.max_actions_per_episode': plies}
    enough, short = (
        read_config(plain(world, 'random', algorithm='rloo', **budgets | changes))
        for changes in ({}, {f'env.{budget}': plies - 1})
    )
    assert elo.in_self_play(enough).worlds[0].opponent == 'self'
    with pytest.raises(ValueError, match=f'of at least {plies}, the plies of both players'):
        elo.in_self_play(short)
    parts = types.SimpleNamespace(config=short)
    assert section.SelfPlay().eval_probes(parts) == {}
