"""Which tests train, play rollouts or start processes: read off their code.

No list is kept and no mark set by hand, so a new test is told apart like any other. From a test and
its fixtures the functions and classes of this repository that its code names are followed, and what
these name, until one of the long ones is met. A name that only a string spells is not seen.
"""

import functools
import pathlib
import subprocess
import sys
import types

TESTS = pathlib.Path(__file__).resolve().parent
FOLDERS = tuple(f'{TESTS.parent / name}/' for name in ('tests', 'agentrl_jax', 'benchmarks'))


@functools.cache
def long_ones():
    """What takes seconds to compile or to start."""
    from agentrl_jax import train
    from agentrl_jax.imitation import clone, demonstrations
    from agentrl_jax.rl import update
    from agentrl_jax.rollout import device

    return (
        train.train,
        clone.clone,
        demonstrations.demonstrate,
        device.collect,
        update.update_step,
        subprocess.run,
        subprocess.Popen,
    )


def reaches_long_ones(functions):
    """Whether any of the functions comes to call one of them."""
    todo, seen = [_plain(f) for f in functions], set()
    while todo:
        function = todo.pop()
        if function in long_ones():
            return True
        if id(function) not in seen:
            seen.add(id(function))
            todo += _named(function)
    return False


def _plain(value):
    """What a partial, a jitted or a cached function calls."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif hasattr(value, '__wrapped__'):
            value = value.__wrapped__
        else:
            return value


def _named(value):
    """The functions and classes that the code of a function, or of a class's methods, names."""
    if isinstance(value, type):
        members = [getattr(x, '__func__', x) for x in vars(value).values()]
        return [x for x in members if isinstance(x, types.FunctionType)]
    return _named_by(value)


@functools.cache
def _named_by(function):
    names = _names(function.__code__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    scope = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    values = [scope[name] for name in names if name in scope]
    for module in [x for x in values if isinstance(x, types.ModuleType)]:
        values += [vars(module)[name] for name in names if name in vars(module)]
    called = [x for x in map(_plain, values) if isinstance(x, types.FunctionType | type)]
    return [x for x in called if x in long_ones() or _is_ours(x)]


def _names(code):
    """Names used in the code and in the functions written inside it."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return set(code.co_names + code.co_freevars).union(*inner)


def _is_ours(value):
    module = sys.modules.get(value.__module__)
    return (getattr(module, '__file__', None) or '').startswith(FOLDERS)
