"""Environments and algorithms of a user's module outside the package: the READMEs' examples."""

import importlib
import pathlib
import re
import sys

import micro_runs
import pytest

from agentrl_jax import algorithms, envs, train
from agentrl_jax.machine import checkpoint
from agentrl_jax.records import run_log
from agentrl_jax.run import config, documents, saved_config

PACKAGE = pathlib.Path(train.__file__).parent
KNOWN = (envs.ENVIRONMENTS, envs.HOSTS, envs.WORLDS, algorithms.ALGORITHMS)
NAMES = {'env.name': 'my_things:Corridor', 'algorithm': 'my_things:Imitation'}


def example(folder):
    text = (PACKAGE / folder / 'README.md').read_text(encoding='utf-8')
    return re.search(r'^```python\n(.*?)^```$', text, flags=re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module outside the package, which each test imports again."""
    path = tmp_path / 'my_things.py'
    path.write_text(example('envs') + '\n\n' + example('algorithms'), encoding='utf-8')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = [dict(known) for known in KNOWN]
    yield path
    forget(before)


def forget(before):
    """Restore the state of a process that has not imported the module."""
    sys.modules.pop('my_things', None)
    for known, names in zip(KNOWN, before, strict=True):
        known.clear()
        known.update(names)


def build_config(**changes):
    cfg = micro_runs.plain('bandit', **{'steps': 1, 'clone.episodes': 0, **NAMES, **changes})
    cfg.rollout.max_tokens = 176
    return cfg


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
def test_a_world_and_an_algorithm_outside_the_package_train_and_reload(
    module, tmp_path, monkeypatch, capsys
):
    before = [dict(known) for known in KNOWN]
    run = tmp_path / 'run'
    assert train.train(build_config(), str(run)) == 0
    rows = run_log.read_metrics(run / run_log.METRICS_FILE)
    assert rows[0]['batch/trained_rows'] > 0
    forget(before)
    assert train.train(build_config(steps=2), str(run)) == 0  # resumed
    assert run_log.read_metrics(run / run_log.METRICS_FILE)[1]['step'] == 1
    forget(before)
    opened = config.read(saved_config.get_config(str(checkpoint.find_step(run))))
    assert type(opened.algorithm) is algorithms.ALGORITHMS[NAMES['algorithm']]
    assert opened.env.name == opened.worlds[0].name == 'corridor'
    forget(before)
    module.unlink()
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, 'path_importer_cache', {})
    with pytest.raises(SystemExit) as stopped:
        saved_config.default(['evaluate', f'--workdir={run}'])
    assert 'my_things' in str(stopped.value) and 'PYTHONPATH' in str(stopped.value)
    assert '\n' not in str(stopped.value)


def test_fields_of_classes_outside_the_package_are_settings(module):
    fields = {'corridor.width': 5, 'loss.margin': 0.5}
    cfg = config.get_config()
    config.outside.register(NAMES)
    cfg = config.get_config()
    cfg.update_from_flattened_dict(NAMES | fields)
    settings = config.read(cfg)
    assert settings.worlds[0].width == 5 and settings.algorithm.margin == 0.5
    cfg.update_from_flattened_dict({'loss.margin': -1.0})
    with pytest.raises(ValueError, match='loss.margin=-1.0 must be at least 0'):
        config.read(cfg)


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'env.name': 'my_things:Imitation'}, 'must be a subclass of TextEnvironment or Host'),
        ({'algorithm': 'my_things:Corridor'}, 'must be a subclass of Algorithm'),
        ({'env.mix': (('my_things:Lake', 0.5), ('bandit', 0.5))}, 'name of another environment'),
    ],
)
def test_an_unusable_class_is_a_one_line_error(module, changes, words):
    with open(module, 'a', encoding='utf-8') as file:
        file.write("\n\nclass Lake(Corridor):\n    name = 'frozen_lake'\n")
    with pytest.raises(ValueError, match=words) as error:
        config.read(build_config(**changes))
    assert '\n' not in str(error.value)


def test_tables_of_the_readmes_match_the_code():
    """Run python -m agentrl_jax.run.documents to update them."""
    for path, text in documents.documents().items():
        assert path.read_text(encoding='utf-8') == text, path
