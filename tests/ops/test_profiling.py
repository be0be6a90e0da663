"""Traces and their steps, and paths in buckets."""

import gzip
import json
import os
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from agentrl_jax.imitation import trajectories
from agentrl_jax.machine import files, processes, profiling
from agentrl_jax.run import command, params, recorder
from configs import base


def steps_in_trace(folder):
    """Return the step numbers in the single trace of a workdir."""
    (file,) = folder.glob('profile/plugins/profile/*/*.trace.json.gz')
    events = json.loads(gzip.decompress(file.read_bytes()))['traceEvents']
    marks = [event['args'] for event in events if event.get('name') == 'train']
    return sorted({int(mark['step_num']) for mark in marks})


def play(folder, *, first, last, steps=6):
    double = jax.jit(lambda x: x * 2)
    with profiling.Trace(folder, first=first, last=last) as trace:
        for step in range(steps):
            with trace.step(step):
                double(jnp.float32(step)).block_until_ready()


def test_requested_steps_form_one_trace_and_a_run_that_stops_early_keeps_its_part(tmp_path):
    """A rollback continues in the same process, so a new trace must be able to start."""
    play(tmp_path / 'none', first=2, last=1)
    assert not list(tmp_path.iterdir())
    play(tmp_path / 'early', first=1, last=9, steps=3)
    play(tmp_path / 'all', first=2, last=4)
    assert steps_in_trace(tmp_path / 'early') == [1, 2]
    assert steps_in_trace(tmp_path / 'all') == [2, 3, 4]
    assert len(list(tmp_path.glob('all/profile/plugins/profile/*/*.xplane.pb'))) == 1


def test_the_trace_starts_after_compilation_and_ends_with_the_run():
    cfg = base.get_config()
    assert recorder.WARM_UP_STEPS == 2
    cfg.steps, cfg.log.profile_steps = 20, 3
    assert recorder.last_traced(cfg, 0) == 4  # steps 2, 3, 4
    assert recorder.last_traced(cfg, 10) == 14  # resumed at 10: 12, 13, 14
    assert recorder.last_traced(cfg, 16) == 19  # 18, 19; there is no step 20
    cfg.log.profile_steps = 0
    assert recorder.last_traced(cfg, 0) == 1  # step 2 would be the first: no trace


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Return the folder that is mounted as gs://bucket."""
    monkeypatch.setenv(files.BUCKETS, str(tmp_path / 'gcs'))
    (tmp_path / 'shared').mkdir()
    (tmp_path / 'gcs').mkdir()
    (tmp_path / 'gcs' / 'bucket').symlink_to(tmp_path / 'shared')
    return tmp_path / 'shared'


def test_a_path_in_a_bucket_is_a_folder_of_its_mount(tmp_path, bucket):
    assert files.local_path('gs://bucket/a/b') == tmp_path / 'gcs/bucket/a/b'
    assert files.local_path('runs/a').parts == ('runs', 'a')
    assert files.local_path('~/a') == pathlib.Path.home() / 'a'
    workdir = files.check_workdir('gs://bucket/run')
    assert workdir.is_dir() and (bucket / 'run').is_dir()
    flags = types.SimpleNamespace(workdir='gs://bucket/run', best=True, step=None)
    assert params.chosen(flags) == (str(tmp_path / 'gcs/bucket/run/best'), None)
    trajectories.write_records('gs://bucket/run/played.jsonl', [{'item_id': 'a_1'}])
    assert (bucket / 'run' / 'played.jsonl').read_text() == '{"item_id": "a_1"}\n'
    unchanged = {'a': 'http://host:1', 'b': ('x', 2, None), 'c': ['gs'], 'd': {'e': 1.5}}
    assert files.in_mounts(unchanged) == unchanged
    assert isinstance(files.in_mounts(('x',)), tuple)


def test_compiled_programs_can_be_cached_in_a_bucket(tmp_path, bucket, monkeypatch, capsys):
    """Without further packages jax silently ignores a cache in gs:// and compiles again."""
    monkeypatch.setenv(command.PROGRAMS, 'gs://bucket/programs')
    command.prepare_jax()
    assert os.environ[command.PROGRAMS] == str(tmp_path / 'gcs/bucket/programs')
    monkeypatch.setenv(command.PROGRAMS, 'gs://other/programs')
    with pytest.raises(SystemExit):
        command.prepare_jax()
    assert f'{command.PROGRAMS}=gs://other/programs' in capsys.readouterr().err
    monkeypatch.delenv(command.PROGRAMS)
    command.prepare_jax()
    assert command.PROGRAMS not in os.environ


def test_programs_of_large_models_are_cached_unless_a_folder_is_set(tmp_path, capsys):
    names = 'jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs'
    before = {name: getattr(jax.config, name) for name in names}
    folder, large = tmp_path / 'programs', processes.KEEP_FROM
    try:
        jax.config.update(names[0], None)
        processes.keep_programs(folder, large - 1)
        assert not jax.config.jax_compilation_cache_dir
        processes.keep_programs(folder, large)
        assert str(folder) in capsys.readouterr().err
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
        assert list(folder.iterdir())
        processes.keep_programs(tmp_path / 'other', large)
        assert jax.config.jax_compilation_cache_dir == str(folder)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_an_unmounted_bucket_is_rejected(tmp_path, monkeypatch):
    """Otherwise a run would be written to a disk that is deleted with its machine."""
    monkeypatch.setenv(files.BUCKETS, str(tmp_path))
    (tmp_path / 'plain').mkdir()  # a lost mount leaves an empty folder
    for path in ('gs://other/run', 'gs://plain/run', 'gs:///run', 's3://bucket/run'):
        with pytest.raises(ValueError, match=path):
            files.check_workdir(path)
    monkeypatch.delenv(files.BUCKETS, raising=False)
    with pytest.raises(ValueError, match='AGENTRL_GCS'):
        files.local_path('gs://bucket/run')
