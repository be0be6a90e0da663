"""Every public function and method says what it takes and returns; private ones may."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / 'agentrl_jax'
SPECIAL = ('__init__', '__call__')  # of the names with underscores, those that callers use


def untyped(source: str) -> list[str]:
    """`name(parameter, ...)` of public functions, and methods of public classes, without types."""
    found = []

    def visit(nodes, prefix, first):
        for node in nodes:
            public = not node.name.startswith('_') or node.name in SPECIAL
            if isinstance(node, ast.ClassDef) and public:
                visit(definitions(node), f'{node.name}.', 1)
            elif isinstance(node, ast.FunctionDef) and public:
                missing = untyped_parts(node, first)
                found.extend([f'{prefix}{node.name}({", ".join(missing)})'] if missing else [])

    visit(definitions(ast.parse(source)), '', 0)
    return found


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
    found = {path: untyped(path.read_text(encoding='utf-8')) for path in PACKAGE.rglob('*.py')}
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
