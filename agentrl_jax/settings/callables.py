"""Fields that name a user's callable: package.module:callable."""

import importlib
import re
import traceback
import types
from collections.abc import Callable

from agentrl_jax.settings.marks import suggestion

FORM = re.compile(r'\w+(\.\w+)*:\w+')


def import_callable(name: str, field: str) -> Callable:
    """Import 'package.module:callable'; a ValueError names the config field."""
    module, attribute = import_module(name, field), name.partition(':')[2]
    if not hasattr(module, attribute):
        raise ValueError(
            f'{_place(name, field)}: {module.__name__} has no attribute {attribute!r}'
            f'{suggestion(attribute, dir(module))}'
        )
    value = getattr(module, attribute)
    if not callable(value):
        raise ValueError(f'{_place(name, field)} is {type(value).__name__}: it cannot be called')
    return value


def import_module(name: str, field: str) -> types.ModuleType:
    """Import the module of 'package.module:callable'.

    A malformed name, a missing module and a failing import have different ValueErrors.
    """
    place, module = _place(name, field), name.partition(':')[0]
    if not FORM.fullmatch(name):
        raise ValueError(f'{place} is not package.module:callable, for example my_module:function')
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and f'{module}.'.startswith(f'{error.name}.'):
            raise ValueError(
                f'{place} is not package.module:callable: {error}; add its folder to PYTHONPATH'
            ) from error
        raise ValueError(f'{place}: the import of {module} failed{_cause(error)}') from error


def _place(name: str, field: str) -> str:
    return f'{field}={name}' if field.startswith('-') else f'{field}={name!r}'


def _cause(error: Exception) -> str:
    """Describe an error in a user's module: ' in my_agent.py, line 3: ImportError: ...'."""
    if isinstance(error, SyntaxError):
        return f' in {error.filename}, line {error.lineno}: {error.msg}'
    skipped = ('<frozen', __file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if not frame.filename.startswith(skipped)]
    where = f' in {lines[-1].filename}, line {lines[-1].lineno}' if lines else ''
    return f'{where}: {type(error).__name__}: {" ".join(str(error).split())}'
