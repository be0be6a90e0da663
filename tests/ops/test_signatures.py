"""Every public function and method says what it takes and returns; private ones may.

A method that a base class of the package says it of need not say it again.
"""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / 'agentrl_jax'
SPECIAL = ('__init__', '__call__')  # of the names with underscores, those that callers use


def untyped(source: str, declared: frozenset[str] = frozenset()) -> list[str]:
    """`name(parameter, ...)` of public functions, and methods of public classes, without types.

    declared: names of methods that a subclass may override without saying their types again.
    """
    found = []

    def visit(nodes, prefix, first, inherited=frozenset()):
        for node in nodes:
            public = not node.name.startswith('_') or node.name in SPECIAL
            if isinstance(node, ast.ClassDef) and public:
                visit(definitions(node), f'{node.name}.', 1, declared if node.bases else ())
            elif isinstance(node, ast.FunctionDef) and public and node.name not in inherited:
                missing = untyped_parts(node, first)
                found.extend([f'{prefix}{node.name}({", ".join(missing)})'] if missing else [])

    visit(definitions(ast.parse(source)), '', 0)
    return found


def declared_methods(sources: list[str]) -> frozenset[str]:
    """Names of public methods whose parameters all have types somewhere."""
    classes = [x for source in sources for x in ast.walk(ast.parse(source))]
    methods = [m for x in classes if isinstance(x, ast.ClassDef) for m in definitions(x)]
    return frozenset(
        m.name
        for m in methods
        if isinstance(m, ast.FunctionDef) and m.name not in SPECIAL and not untyped_parts(m, 1)
    )


def definitions(node):
    return [x for x in node.body if isinstance(x, ast.FunctionDef | ast.ClassDef)]


def untyped_parts(function, first):
    """Names of parameters without a type, and 'return'; a method's first parameter needs none."""
    static = any(getattr(x, 'id', '') == 'staticmethod' for x in function.decorator_list)
    given = function.args
    listed = [*given.posonlyargs, *given.args][0 if static else first :] + given.kwonlyargs
    listed += [x for x in (given.vararg, given.kwarg) if x is not None]
    missing = [x.arg for x in listed if x.annotation is None]
    return missing + ['return'] * (function.returns is None and function.name != '__init__')


def test_public_functions_say_what_they_take_and_return():
    sources = {path: path.read_text(encoding='utf-8') for path in PACKAGE.rglob('*.py')}
    declared = declared_methods([*sources.values()])
    found = {path: untyped(source, declared) for path, source in sources.items()}
    assert not {str(path): missing for path, missing in found.items() if missing}


def test_what_lacks_a_type_is_found_and_what_is_private_is_not():
    source = """
def f(a, b: int, *, c=1, **d) -> int: ...
def g(a: int): ...
def _h(a): ...
class A:
    def __init__(self, x): ...
    def m(self, *y) -> None: ...
    def __call__(self): ...
    def _n(self, z): ...
    @staticmethod
    def s(x) -> int: ...
class _B:
    def m(self, x): ...
"""
    expected = ['f(a, c, d)', 'g(return)', 'A.__init__(x)', 'A.m(y)', 'A.__call__(return)']
    assert untyped(source) == [*expected, 'A.s(x)']
