"""`import agentrl_jax` offers its public names and imports nothing heavy until one is used."""

import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import agentrl_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_public_name_is_the_one_its_module_defines():
    for name in agentrl_jax.__all__:
        module = importlib.import_module(f'agentrl_jax.{agentrl_jax._MODULES[name]}')
        value = getattr(agentrl_jax, name)
        assert value is getattr(module, name), name
        # The table has the module that defines a class or function, not one that re-exports it.
        assert getattr(value, '__module__', module.__name__) == module.__name__, name
    with pytest.raises(AttributeError, match="'agentrl_jax' has no attribute 'colect'"):
        agentrl_jax.colect  # noqa: B018
    assert set(agentrl_jax.__all__) <= set(dir(agentrl_jax))


def test_python_m_agentrl_jax_lists_the_commands_and_the_version():
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    listed = run([sys.executable, '-m', 'agentrl_jax'])
    names = re.findall(r'^  (\w+) +\S', listed.stdout, flags=re.MULTILINE)
    files = {path.stem for path in (ROOT / 'agentrl_jax').glob('*.py')}
    assert set(names) == files - {'__init__', '__main__', 'types'} and listed.returncode == 0
    assert agentrl_jax.__version__ in listed.stdout
    wrong = run([sys.executable, '-m', 'agentrl_jax', 'train'])
    assert wrong.returncode == 2 and 'Run python -m agentrl_jax.train' in wrong.stderr


def words_of(program):
    """Return the words that a program prints."""
    return subprocess.check_output([sys.executable, '-c', program], cwd=ROOT, text=True).split()


def test_importing_the_package_imports_nothing_heavy():
    """Commands read their flags and select JAX's backend before JAX is imported."""
    program = (
        'import sys; before = set(sys.modules); import agentrl_jax; '
        'print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))'
    )
    loaded = set(words_of(program))
    assert 'agentrl_jax' in loaded and loaded - {'agentrl_jax'} <= sys.stdlib_module_names


def test_a_server_of_worlds_imports_no_jax():
    """There are many workers, and JAX would dominate their memory and start time.

    Only workers of on-device environments import it.
    """
    hosts = 'agentrl_jax.envs.hosts'
    program = (
        f'import sys; from agentrl_jax import serve; from {hosts} import server, workers; '
        'names = set(workers.WORLDS) - {"babyai", "device"}; '
        'kinds = [workers.WORLDS[name].split(":")[0] for name in names]; '
        '[__import__(kind) for kind in kinds]; print("jax" in sys.modules, len(kinds))'
    )
    assert words_of(program) == ['False', '9']
