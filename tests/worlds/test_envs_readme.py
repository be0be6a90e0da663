"""The recipe of envs/README.md: an environment is written, registered and checked.

test_outside.py trains it.
"""

import importlib
import importlib.util
import pathlib
import re
import sys

import every_world
import jax
import pytest

from agentrl_jax import envs
from agentrl_jax.records import page_episode

README = (pathlib.Path(envs.__file__).parent / 'README.md').read_text(encoding='utf-8')


def blocks(language):
    """Return the contents of the fenced code blocks of a language."""
    return re.findall(rf'^```{language}\n(.*?)^```$', README, flags=re.MULTILINE | re.DOTALL)


WORLD, NAME = blocks('python')


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
def test_the_recipe_passes_the_checks_of_every_world(world, check):
    check(world)


def test_pages_can_draw_its_cells(world):
    state = jax.tree.map(lambda x: x[0], world.states)
    assert set(world.env.cells(state)[0]) == {'player', 'goal', 'empty'} <= set(page_episode.CELLS)
