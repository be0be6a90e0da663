"""Damaged checkpoints are never loaded: the error names the file, and an older step is used."""

import itertools
import random

import jax
import numpy as np
import pytest
from test_checkpoint import abstract, make_state

from agentrl_jax.machine import checkpoint


def save_steps(workdir, steps=(1, 2)):
    """Save a checkpoint of each step in order; return the folder."""
    opened = checkpoint.open_checkpoints(workdir, keep=len(steps))
    for step in steps:
        checkpoint.save(opened, step, make_state(step), {'config': {'seed': step}})
    checkpoint.close(opened)
    return opened.directory


@pytest.fixture
def folder(tmp_path):
    return save_steps(tmp_path)


def load(folder):
    opened = checkpoint.Checkpoints(folder, 9, None)
    return checkpoint.restore(opened, abstract(make_state()))


def files(path):
    return sorted(file for file in path.rglob('*') if file.is_file() and file.stat().st_size)


def flip(file, rng):
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(file, rng):
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def remove(file, rng):
    file.unlink()


def test_damaged_and_missing_files_are_named_and_nothing_is_loaded(folder):
    """Previously 60 of 60 flipped bits were loaded as parameters; truncation printed a tree."""
    rng = random.Random(0)
    for damage, file in itertools.product((flip, truncate, remove), files(folder / '2')):
        content = file.read_bytes()
        damage(file, rng)
        for read in (
            lambda: load(folder),
            lambda: checkpoint.load_params_only(folder, abstract(make_state().params)),
        ):
            with pytest.raises(checkpoint.Damaged, match=f' {file} '):
                read()
        file.write_bytes(content)
    state, _ = load(folder)
    jax.tree.map(np.testing.assert_array_equal, state, make_state(2))


def test_damaged_metadata_is_named_before_a_config_is_read(folder):
    mark = folder / '2' / checkpoint.MARK
    mark.write_text('{"custom_metadata": {}}')
    with pytest.raises(checkpoint.Damaged, match=f'checkpoint 2 is damaged: {mark} '):
        checkpoint.read_extra(folder)
    assert checkpoint.read_extra(folder, step=1) == {'config': {'seed': 1}}


def test_restores_the_newest_complete_step_and_renames_damaged_ones(tmp_path, capsys):
    checkpoint.rename_damaged(tmp_path)  # a new run: nothing to do
    folder = save_steps(tmp_path, (1, 2, 3))
    assert checkpoint.fall_back(tmp_path) == 3 and capsys.readouterr().err == ''
    damaged = [files(folder / str(step))[0] for step in (2, 3)]
    for file in damaged:
        file.write_bytes(b'x')
    assert checkpoint.fall_back(tmp_path) == 1
    log = capsys.readouterr().err.splitlines()
    assert [str(file) in line for file, line in zip(damaged[::-1], log, strict=True)] == [True] * 2
    assert checkpoint.fall_back(tmp_path, step=1) == 1
    checkpoint.rename_damaged(tmp_path)
    assert checkpoint.steps(folder) == [1] and (folder / '3.damaged').is_dir()
    save_steps(tmp_path, (1, 2, 3))  # training writes them again
    assert checkpoint.fall_back(tmp_path) == 3
    files(folder / '3')[1].write_bytes(b'x')
    checkpoint.rename_damaged(tmp_path)  # replaces the older damaged copy
    assert checkpoint.steps(folder) == [1, 2]
    for step in (1, 2):
        files(folder / str(step))[0].write_bytes(b'x')
    with pytest.raises(checkpoint.Damaged):
        checkpoint.fall_back(tmp_path)
