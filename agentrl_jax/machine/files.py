"""Paths, folders and files of a run: mounts of buckets, a usable workdir, atomic writes."""

import errno
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

BUCKETS = 'AGENTRL_GCS'  # environment variable: the folder that holds a mount for each bucket


def local_path(path: str | os.PathLike) -> pathlib.Path:
    """The path itself; gs://bucket/folder is the folder in the mount of its bucket.

    Buckets are used through mounts (gcsfuse), since the logs and pages of a run are plain files.
    A mount that is missing must not become a folder on the disk of a machine that may vanish.
    """
    scheme, found, rest = str(path).partition('://')
    if not found:
        return pathlib.Path(path)
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


def check_workdir(path: str | os.PathLike, *, min_free_bytes: int = 0) -> pathlib.Path:
    """Create the directory, write a file in it, look at the free space; returns it absolute."""
    workdir = local_path(path).expanduser().absolute()
    probe = workdir / f'.write-test-{os.getpid()}'
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


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of the config as JSON with sorted keys: the same for the same fields and values."""
    text = json.dumps(config, sort_keys=True, separators=(',', ':'), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomic(path: str | os.PathLike, text: str) -> None:
    """The file has the old or the new contents at any moment, never a part."""
    path = pathlib.Path(path)
    partial = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        partial.write_text(text, encoding='utf-8')
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
