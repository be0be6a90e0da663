"""The recipe of envs/README.md: an environment is written, registered, checked and trained."""

import importlib
import importlib.util
import json
import pathlib
import re
import shlex
import sys

import every_world
import jax
import micro_runs
import pytest

from agentrl_jax import envs, train
from agentrl_jax.records import page_episode, run_log

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / 'agentrl_jax' / 'envs'
README = (FOLDER / 'README.md').read_text(encoding='utf-8')


def blocks(language):
    """Return the contents of the fenced code blocks of a language."""
    return re.findall(rf'^```{language}\n(.*?)^```$', README, flags=re.MULTILINE | re.DOTALL)


WORLD, NAME = blocks('python')
(COMMAND,) = [shlex.split(block.replace('\\\n', ' ')) for block in blocks('sh')]


def load(path, source):
    """Load source code as a module."""
    path.write_text(source, encoding='utf-8')
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def corridor(tmp_path_factory):
    """Follow the recipe step by step in another folder; return its class."""
    folder = tmp_path_factory.mktemp('corridor')
    (folder / 'corridor.py').write_text(WORLD, encoding='utf-8')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs, '__path__', [*envs.__path__, str(folder)])
        for name, world in load(folder / 'name.py', NAME).ENVIRONMENTS.items():
            patch.setitem(envs.ENVIRONMENTS, name, world)
            patch.setitem(envs.WORLDS, name, world)
        yield envs.WORLDS['corridor']
    del sys.modules['agentrl_jax.envs.corridor'], envs.corridor


@pytest.fixture(scope='module')
def world(corridor):
    return every_world.World(corridor())


@pytest.mark.parametrize(
    'check', [*every_world.TEXTS, *every_world.RULES], ids=lambda check: check.__name__
)
def test_it_passes_what_every_world_passes(world, check):
    check(world)


def test_pages_know_its_cells(world):
    state = jax.tree.map(lambda x: x[0], world.states)
    assert set(world.env.cells(state)[0]) == {'player', 'goal', 'empty'} <= set(page_episode.CELLS)


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
def test_it_is_cloned_and_trained_by_the_command_s_fields(corridor, tmp_path):
    assert COMMAND[:3] == ['python', '-m', 'agentrl_jax.train']
    flags = dict(word.removeprefix('--').split('=') for word in COMMAND[3:])
    assert (ROOT / flags['config']).is_file()
    small = {
        'clone.episodes': 32,
        'clone.steps': 2,
        'steps': 2,
        'corridor.nearest': 2,
    }
    cfg = micro_runs.plain('bandit', algorithm='grpo')
    cfg.update_from_flattened_dict(small)
    for section, field in (name[7:].split('.') for name in flags if name.startswith('config.')):
        cfg[section][field] = type(cfg[section][field])(flags[f'config.{section}.{field}'])
    assert cfg.env.name == 'corridor'
    assert train.train(cfg, str(tmp_path)) == 0
    rows = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert [row['step'] for row in rows] == [0, 1, 2] and rows[1]['batch/trained_rows'] > 0
    reference = json.loads((tmp_path / run_log.REFERENCE_FILE).read_text(encoding='utf-8'))
    assert 0 < reference['random'] < reference['oracle'] < 1  # four actions, doors up to 8 away
    (page, *_) = sorted((tmp_path / 'rollouts').glob('*.html'))
    assert 'the door is at' in page.read_text(encoding='utf-8')
