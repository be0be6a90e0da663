"""Scouts of a run: one that learns FrozenLake, kill -9, and demonstrations for a policy."""

import subprocess
import sys

import jax
import micro_runs
import numpy as np
import pytest
import waiting

from agentrl_jax.imitation import scout
from agentrl_jax.run import cloning, config, scouting
from agentrl_jax.run.build import build
from agentrl_jax.run.usage import WrongUsage
from configs import demo_library

LAKE = {
    'env.max_turns': 10,
    'env.max_actions_per_turn': 1,
    'env.max_actions_per_episode': 10,
    'frozen_lake.success_rate': 1.0,
    'frozen_lake.frozen': 0.9,
    'env.train_levels': 512,
    'env.eval_levels': 128,
    'clone.expert': 'scout',
    'clone.episodes': 16,
    'clone.oracle': 1.0,
    'rollout.max_tokens': 256,
}


def lake(**changes):
    return config.read(micro_runs.config('frozen_lake', **LAKE | changes))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('scout')


@pytest.fixture(scope='module')
def trained(folder):
    return scouting.trained_scout(lake(), folder, 50_000)


def test_a_scout_learns_frozen_lake(trained, folder, capfd):
    game, net, pool = trained
    _, held_out = scouting.parts.build_environment(lake(), 'validation')
    assert scout.evaluate(net, held_out, game=game) > 0.85  # random play .2
    scouting.trained_scout(lake(), folder)  # finished: loaded, with its saved steps
    assert 'scout' not in capfd.readouterr().err


def test_a_scout_that_is_worse_than_random_play_is_reported(tmp_path, capfd):
    scouting.trained_scout(config.read(demo_library.get_config()), tmp_path, 4096)
    assert 'solves 0.0% of held-out levels, random play 6.1%' in capfd.readouterr().err


@pytest.mark.soak
def test_the_default_settings_solve_the_card_catalogue(tmp_path):
    cfg = config.read(demo_library.get_config())
    game, net, _ = scouting.trained_scout(cfg, tmp_path)
    held_out = scouting.parts.build_environment(cfg.held_out, 'validation')[1]
    assert scout.evaluate(net, held_out, game=game) > 0.9


def test_episodes_of_a_scout_are_demonstrations_on_training_levels(trained, folder):
    """The first answers are the scout's greedy actions on levels of the training pool."""
    run = build(micro_runs.config('frozen_lake', **LAKE))
    examples = jax.device_get(cloning.find_demonstrations(run, folder))
    task, (game, net, pool) = run.training.tasks[0], trained
    level = np.random.default_rng(0).integers(512, size=16)
    states = jax.vmap(game.env.reset_level, (0, None))(level, pool)
    names = scout.plan(net, states, np.zeros(16, np.int32), pool, game=game, count=1)
    for row, mask, name in zip(examples.tokens, examples.mask, names[:, 0], strict=True):
        first = row[mask][: list(row[mask]).index(task.eos_ids[0])]
        assert f'>{game.env.ACTION_NAMES[name]}<' in run.tokenizer.decode(first.tolist())


def test_another_scout_in_the_file_is_an_error_that_names_the_difference(trained, folder):
    with pytest.raises(ValueError, match=r'steps: 50000 there, 60000 now\)'):
        scouting.trained_scout(lake(), folder, 60_000)
    with pytest.raises(ValueError, match=r'train_levels: 512 there, 256 now\)'):
        scouting.trained_scout(lake(**{'env.train_levels': 256}), folder)
    copy = folder / 'copy'
    copy.mkdir()
    path = scouting.path_of(lake(), copy)
    path.parent.mkdir()
    path.write_bytes(scouting.path_of(lake(), folder).read_bytes()[:-100])
    with pytest.raises(ValueError, match='is damaged .* Delete it'):
        scouting.trained_scout(lake(), copy)


def test_worlds_on_hosts_and_files_have_no_scout():
    with pytest.raises(WrongUsage, match='clone.expert'):
        lake(**{'clone.file': 'episodes.jsonl'})
    with pytest.raises(WrongUsage, match='clone.expert'):
        lake(**{'env.name': 'textcraft'})


@pytest.mark.soak
def test_kill_9_changes_no_bit(tmp_path):
    def start(workdir):
        flags = '--config=tests/micro_runs.py --steps=100000 --config.env.train_levels=64'.split()
        command = [sys.executable, '-m', 'agentrl_jax.scout', f'--workdir={workdir}', *flags]
        return subprocess.Popen(command, cwd=micro_runs.ROOT, env=micro_runs.environment())

    one, two = tmp_path / 'one', tmp_path / 'two'
    assert start(one).wait(240) == 0
    process, path = start(two), two / scouting.FOLDER / 'frozen_lake.npz'
    waiting.until(path.exists)
    process.kill()
    process.wait()
    with np.load(path) as file:
        assert 0 < file['update'] < 24
    assert start(two).wait(240) == 0
    with np.load(path) as file, np.load(one / scouting.FOLDER / 'frozen_lake.npz') as other:
        for name in {*file, *other}:
            np.testing.assert_array_equal(file[name], other[name])
