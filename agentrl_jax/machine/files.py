"""Paths, folders and files of a run: mounts of buckets, a usable workdir, reading and writing."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

WHAT_TO_DO = {  # of errors that the system raises in the middle of a run
    errno.ENOSPC: 'free space',
    errno.EDQUOT: 'free space, or raise the quota',
    errno.EFBIG: 'raise the limit of file sizes (ulimit -f)',
    errno.EMFILE: 'raise the limit of open files (ulimit -n)',
    errno.EROFS: 'mount the file system for writing',
    errno.EACCES: 'let this user write there',
    errno.EIO: 'see whether the disk is in order',
    errno.ESTALE: 'see whether the server is there',
}
BUCKETS = 'AGENTRL_GCS'  # environment variable: the folder that holds a mount for each bucket
LONGEST_QUOTE = 200  # characters of somebody else's text in a message of ours
HALF_CHARACTER = re.compile(r'\\u[dD][89a-fA-F]')  # may be half, or one of a pair


class Failure(ValueError):
    """An error that the command line did not cause: exit code 1 instead of 2."""


def local_path(path: str | os.PathLike) -> pathlib.Path:
    """The path itself; gs://bucket/folder is the folder in the mount of its bucket.

    Buckets are used through mounts (gcsfuse), since the logs and pages of a run are plain files.
    A mount that is missing must not become a folder on the disk of a machine that may vanish.
    """
    scheme, found, rest = str(path).partition('://')
    if not found:
        return pathlib.Path(path).expanduser()  # no shell expands --workdir=~/run
    if scheme != 'gs':
        raise ValueError(f'{path}: only gs://bucket/folder and plain paths are understood')
    if BUCKETS not in os.environ:
        raise ValueError(
            f'{path}: {BUCKETS} must name the folder where the bucket is mounted; '
            'tpu_scripts/setup mounts it, gcsfuse does it by hand'
        )
    bucket, _, folder = rest.partition('/')
    mount = pathlib.Path(os.environ[BUCKETS]).expanduser() / bucket
    if not bucket or not (mount.is_mount() or mount.is_symlink()):
        raise ValueError(f'{path}: nothing is mounted at {mount}; run tpu_scripts/setup again')
    return mount / folder


def in_mounts(value: Any) -> Any:
    """The value with each gs:// path in it as one of its mount; what is no such path stays.

    value: a text, or dicts, lists and tuples of values.
    """
    if isinstance(value, str):
        return str(local_path(value)) if value.startswith('gs://') else value
    if isinstance(value, Mapping):
        return {name: in_mounts(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(in_mounts(one) for one in value)
    return value


def check_workdir(path: str | os.PathLike, *, min_free_bytes: int = 0) -> pathlib.Path:
    """Create the directory, write a file in it, look at the free space; returns it absolute."""
    workdir = local_path(path).expanduser().absolute()
    probe = workdir / f'.write-test-{secrets.token_hex(8)}'  # pids of containers are often equal
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b'x')
        probe.unlink()
    except OSError as error:
        advice = 'free space there' if error.errno == errno.ENOSPC else 'name one that is'
        raise OSError(
            error.errno, f'workdir is not writable ({error.strerror}): {advice}', str(workdir)
        ) from error
    free = shutil.disk_usage(workdir).free
    if free < min_free_bytes:
        raise OSError(
            errno.ENOSPC,
            f'{free / 1e9:.2f} GB are free and this run needs {min_free_bytes / 1e9:.2f} GB: '
            'free space, keep fewer checkpoints, or name another workdir',
            str(workdir),
        )
    return workdir


def in_words(error: Exception, workdir: str | os.PathLike | None = None) -> str:
    """An error as a line; of one that the system raised: where, what is free, what to do.

    workdir: where a run writes when the error itself does not say so.
    """
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    place = error.filename or workdir
    if error.strerror != os.strerror(error.errno):  # raised by us: it says all
        return error.strerror if place is None else f'{place}: {error.strerror}'
    if place is None:
        return error.strerror
    if error.errno not in WHAT_TO_DO:
        return f'{place}: {error.strerror}'
    room = ''
    with contextlib.suppress(OSError):
        room = f' ({shutil.disk_usage(local_path(workdir or place)).free / 1e9:.2f} GB are free)'
    return (
        f'{place}: {error.strerror}{room}: {WHAT_TO_DO[error.errno]}, then give the same command '
        'again; a training goes on from its newest checkpoint'
    )


def size_of(folder: pathlib.Path) -> int:
    """Bytes of all files below a folder; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of the config as JSON with sorted keys: the same for the same fields and values."""
    text = json.dumps(config, sort_keys=True, separators=(',', ':'), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomic(path: str | os.PathLike, text: str | Iterable[str]) -> None:
    """The file has the old or the new contents at any moment, never a part.

    text: or its pieces, of which an error leaves the old contents.
    """
    path = pathlib.Path(path)
    partial = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        with open(partial, 'w', encoding='utf-8') as file:
            file.writelines([text] if isinstance(text, str) else text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def reading(path: str | os.PathLike) -> BinaryIO:
    """A regular file, opened; a pipe would be waited for for ever."""
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f'{path} is no regular file')
    return open(path, 'rb')


def read_bytes(path: str | os.PathLike) -> bytes:
    """Contents of a regular file."""
    with reading(path) as file:
        return file.read()


def read_text(path: str | os.PathLike) -> str:
    try:
        return read_bytes(path).decode('utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is no UTF-8 text (byte {error.start})') from error


def read_json(path: str | os.PathLike) -> Any:
    """The JSON value of a file; a ValueError names the file and what is wrong with it."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, source: str, line: int | None = 1) -> Any:
    """A JSON value; a ValueError says what is wrong. The text begins in this line of the
    source; None: the source names the line.

    Half of a surrogate pair ("\\ud800") is JSON, but no text: no file and no terminal takes it.
    """
    try:
        value = json.loads(text)
        if HALF_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode('utf-8')
    except json.JSONDecodeError as error:
        at = '' if line is None else f' in line {line + error.lineno - 1}'
        raise ValueError(f'{source}: broken JSON{at} ({error.msg})') from error
    except UnicodeEncodeError as error:
        raise ValueError(f'{source}: half of a surrogate pair, which is no character') from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; deep nesting
        raise ValueError(f'{source}: JSON that is too deep or too long to read') from error
    return value


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """read_json of a file that holds an object; other values are refused too."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f'{path}: not a JSON object')
    return value


def in_line(text: str) -> str:
    """A text that somebody else wrote, for a message of one line: no control characters, cut."""
    head = text if len(text) <= LONGEST_QUOTE else f'{text[:LONGEST_QUOTE]}...'
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in head)
