"""Paths and files of a run: bucket mounts, checks of the workdir, reading and writing."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import reprlib
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import pydantic

WHAT_TO_DO = {  # advice for system errors in the middle of a run
    errno.ENOSPC: 'free space',
    errno.EDQUOT: 'free space, or raise the quota',
    errno.EFBIG: 'raise the limit of file sizes (ulimit -f)',
    errno.EMFILE: 'raise the limit of open files (ulimit -n)',
    errno.EROFS: 'mount the file system for writing',
    errno.EACCES: 'give this user write permission',
    errno.EIO: 'check the disk',
    errno.ESTALE: 'check that the server is reachable',
}
BUCKETS = 'AGENTRL_GCS'  # environment variable: the folder with a mount for each bucket
LONGEST_QUOTE = 200  # characters of foreign text that an error message quotes
HALF_CHARACTER = re.compile(r'\\u[dD][89a-fA-F]')  # a surrogate, alone or in a pair


class Failure(ValueError):
    """An error that is not caused by the command line: exit code 1 instead of 2."""


def warn(text: str) -> None:
    """Print a warning on one line."""
    print(f'warning: {text}', file=sys.stderr, flush=True)


def local_path(path: str | os.PathLike) -> pathlib.Path:
    """Return the path; gs://bucket/folder becomes the folder in the bucket's mount.

    Buckets are accessed through mounts (gcsfuse), because logs and pages of a run are plain files.
    If the mount is missing, raise ValueError: the local disk of the machine may be temporary.
    """
    scheme, separator, rest = str(path).partition('://')
    if not separator:
        return pathlib.Path(path).expanduser()  # shells do not expand --workdir=~/run
    if scheme != 'gs':
        raise ValueError(f'{path}: only gs://bucket/folder and plain paths are supported')
    if BUCKETS not in os.environ:
        raise ValueError(
            f'{path}: set {BUCKETS} to the folder where the bucket is mounted; '
            'mount it with tpu_scripts/setup or gcsfuse'
        )
    bucket, _, folder = rest.partition('/')
    mount = pathlib.Path(os.environ[BUCKETS]).expanduser() / bucket
    if not bucket or not (mount.is_mount() or mount.is_symlink()):
        raise ValueError(f'{path}: nothing is mounted at {mount}; run tpu_scripts/setup again')
    return mount / folder


def in_mounts(value: Any) -> Any:
    """Return a value with its gs:// paths replaced by paths in mounts.

    value: a string, or nested dicts, lists and tuples; other types are returned unchanged.
    """
    if isinstance(value, str):
        return str(local_path(value)) if value.startswith('gs://') else value
    if isinstance(value, Mapping):
        return {name: in_mounts(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(in_mounts(one) for one in value)
    return value


def check_workdir(path: str | os.PathLike, *, min_free_bytes: int = 0) -> pathlib.Path:
    """Create the directory, check that it is writable and has space; return its absolute path."""
    workdir = local_path(path).expanduser().absolute()
    probe = workdir / f'.write-test-{secrets.token_hex(8)}'  # pids of containers are often equal
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b'x')
        probe.unlink()
    except OSError as error:
        advice = 'free space there' if error.errno == errno.ENOSPC else 'use a writable folder'
        raise OSError(
            error.errno, f'workdir is not writable ({error.strerror}): {advice}', str(workdir)
        ) from error
    free = shutil.disk_usage(workdir).free
    if free < min_free_bytes:
        raise OSError(
            errno.ENOSPC,
            f'{free / 1e9:.2f} GB are free and this run needs {min_free_bytes / 1e9:.2f} GB: '
            'free space, keep fewer checkpoints, or use another workdir',
            str(workdir),
        )
    return workdir


def format_error(error: Exception, workdir: str | os.PathLike | None = None) -> str:
    """Format an error as one line; system errors with the path, the free space and advice.

    workdir: the path to name if the error has none.
    """
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    place = error.filename or workdir
    if error.strerror != os.strerror(error.errno):  # raised by this package: already complete
        return error.strerror if place is None else f'{place}: {error.strerror}'
    if place is None:
        return error.strerror
    if error.errno not in WHAT_TO_DO:
        return f'{place}: {error.strerror}'
    free = ''
    with contextlib.suppress(OSError):
        free = f' ({shutil.disk_usage(local_path(workdir or place)).free / 1e9:.2f} GB are free)'
    return (
        f'{place}: {error.strerror}{free}: {WHAT_TO_DO[error.errno]}, then run the same command '
        'again; training resumes from the newest checkpoint'
    )


def size_of(folder: pathlib.Path) -> int:
    """Total bytes of the files below a folder; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of the config as JSON with sorted keys: the same for the same fields and values."""
    text = json.dumps(config, sort_keys=True, separators=(',', ':'), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary path, which replaces `path` at the end, but not after an error."""
    partial = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomic(path: str | os.PathLike, text: str | Iterable[str]) -> None:
    """Write a file atomically: at any moment it has the old or the new contents.

    text: a string or its pieces. If the iterator raises, the old contents stay.
    """
    with replacing(pathlib.Path(path)) as partial, open(partial, 'w', encoding='utf-8') as file:
        file.writelines([text] if isinstance(text, str) else text)


def reading(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file. Raises ValueError for pipes, which could block forever."""
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f'{path} is not a regular file')
    return open(path, 'rb')


def read_bytes(path: str | os.PathLike) -> bytes:
    """Contents of a regular file."""
    with reading(path) as file:
        return file.read()


def read_text(path: str | os.PathLike) -> str:
    try:
        return read_bytes(path).decode('utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not UTF-8 text (byte {error.start})') from error


def read_json(path: str | os.PathLike) -> Any:
    """The JSON value of a file. Raises ValueError with the file and the reason."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, source: str, line: int | None = 1) -> Any:
    """Parse JSON. Raises ValueError with the source and the reason.

    line: number of the text's first line in the source; None if `source` includes it. Half a
    surrogate pair ("\\ud800") is valid JSON, but cannot be written to files or terminals.
    """
    try:
        value = json.loads(text)
        if HALF_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode('utf-8')
    except json.JSONDecodeError as error:
        at = '' if line is None else f' in line {line + error.lineno - 1}'
        raise ValueError(f'{source}: broken JSON{at} ({error.msg})') from error
    except UnicodeEncodeError as error:
        raise ValueError(f'{source}: half of a surrogate pair is not a character') from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; deep nesting
        raise ValueError(f'{source}: JSON is nested too deeply or has too long numbers') from error
    return value


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError for other values."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f'{path}: not a JSON object')
    return value


def read_as(kind: Any, value: Any, where: str | os.PathLike) -> Any:
    """Validate a value of a file as a pydantic type; the ValueError names the first wrong field."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field, wrong = '.'.join(map(str, first['loc'])), reprlib.repr(first['input'])
        name = f'{where}: {field}' if field else where
        raise ValueError(f'{name} is {wrong}: {first["msg"]}') from error


def one_line_excerpt(text: str) -> str:
    """Shorten foreign text and escape its control characters, for one-line messages."""
    head = text if len(text) <= LONGEST_QUOTE else f'{text[:LONGEST_QUOTE]}...'
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in head)
