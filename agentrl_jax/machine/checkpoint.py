"""Orbax checkpoints (v1 API): a TrainState and a JSON dict per step, written in the background.

A single rename publishes a step once all its files are on disk. The newest step is therefore
complete, however a run was killed. Checkpoints do not depend on the mesh: restored arrays are laid
out by the shardings of the abstract state. contents.jsonl, next to the arrays, holds a digest of
each file. A file that does not match its digest is never loaded.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from agentrl_jax.machine import checksums, files, processes, sharding
from agentrl_jax.settings import tree

FOLDER = 'checkpoints'  # below the workdir
STATE = 'state'  # Orbax's name of the pytree in a step
MARK = '_CHECKPOINT_METADATA'  # Orbax's metadata of a step, including `extra`
CONTENTS = 'contents.jsonl'  # not Orbax's: {'sha256'} of the second line; {'files'}
NEW, REMOVED, DAMAGED = '.new', '.removed', '.damaged'  # suffixes of folders that are not steps
PATIENCE_S = 1200  # for Orbax to write a step
# Orbax measures its timeout by wall-clock time: changing the clock during a save would fail it.
UNTIMED = ocp.options.AsyncOptions(timeout_secs=None, create_directories_asynchronously=False)


# Orbax logs long tracebacks of errors that it also raises.
logging.getLogger('absl').addFilter(lambda record: f'{os.sep}orbax{os.sep}' not in record.pathname)


class Damaged(files.Failure):
    """A checkpoint whose files have changed since it was saved; the message names the file."""

    def __init__(self, path: pathlib.Path, what: str):
        number = int(path.name) if path.name.isdigit() else -1  # -1: a copy under another name
        older = [step for step in steps(path.parent) if step < number]
        advice = f'--fallback loads step {older[-1]} instead' if older else 'there is no older step'
        super().__init__(f'checkpoint {path.name} is damaged: {what}; {advice}')
        self.path, self.what = path, what


@dataclasses.dataclass
class Checkpoints:
    """An open checkpoint folder. Create it with open_checkpoints."""

    directory: pathlib.Path
    keep: int
    writer: concurrent.futures.ThreadPoolExecutor
    writing: concurrent.futures.Future | None = None
    need: int = 0  # bytes of the step being written


def open_checkpoints(workdir: str | os.PathLike, *, keep: int) -> Checkpoints:
    """Open workdir/checkpoints and delete partial files of killed runs; `keep` steps are kept."""
    if keep < 1:
        raise ValueError(f'keep={keep} must be at least 1: a run resumes from its last checkpoint')
    directory = files.check_workdir(files.local_path(workdir) / FOLDER).resolve()
    if jax.process_index() == 0:
        for pattern in (f'*{NEW}', f'*{NEW}.*', f'*{REMOVED}', '*.orbax-checkpoint-tmp*'):
            for leftover in directory.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)
    writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
    return Checkpoints(directory, keep, writer)


def state_bytes(state: Any) -> int:
    """Bytes of all leaves, abstract or concrete: the maximum size of a checkpoint on disk."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def save(ckpts: Checkpoints, step: int, state: Any, extra: Mapping[str, Any]) -> bool:
    """Start writing `state` and `extra` (JSON) as `step`; return False if the step exists.

    Returns once the arrays are copied, so `state` may be donated afterwards. Errors of an earlier
    write are raised here or by wait().
    """
    wait(ckpts)
    if step in steps(ckpts.directory):
        return False
    need, free = state_bytes(state), shutil.disk_usage(ckpts.directory).free
    if free < need // jax.process_count():
        raise _disk_full(ckpts.directory, f'step {step} was not saved', need)
    metadata = json.loads(json.dumps(extra, allow_nan=False))
    new = ckpts.directory / f'{step}{NEW}'
    try:
        with ocp.Context(async_options=UNTIMED):
            response = ocp.save_checkpointables_async(
                new, {STATE: state}, overwrite=True, custom_metadata=metadata
            )
    except (OSError, ValueError) as error:
        raise _explained(error, ckpts.directory, need) from error
    ckpts.writing = ckpts.writer.submit(_complete, ckpts, step, new, response)
    ckpts.need = need
    return True


def _complete(ckpts: Checkpoints, step: int, new: pathlib.Path, response: Any) -> None:
    """Wait for Orbax in the background; process 0 then publishes the written files as a step."""
    response.result(PATIENCE_S)  # also closes its thread and file descriptors
    if jax.process_index():
        return
    # Hashing also syncs every file to disk. Without that, a power loss often leaves empty files.
    body = json.dumps({'files': checksums.files(new)}).encode()
    head = json.dumps({'sha256': hashlib.sha256(body).hexdigest()}).encode()
    with (new / CONTENTS).open('wb') as file:
        file.write(head + b'\n' + body + b'\n')
        file.flush()
        os.fsync(file.fileno())
    place = ckpts.directory / str(step)
    if place.exists():  # a folder without MARK or CONTENTS is not a step
        remove(place)
    os.replace(new, place)
    _sync_folder(ckpts.directory)
    for old in steps(ckpts.directory)[: -ckpts.keep]:
        remove(ckpts.directory / str(old))


def remove(path: pathlib.Path) -> None:
    """Remove a step. Rename it first: a half-removed folder must not look like a checkpoint."""
    removed = path.with_name(path.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _sync_folder(folder: pathlib.Path) -> None:
    """Sync a folder, which makes renames in it durable; not all file systems support that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_from(ckpts: Checkpoints, step: int) -> None:
    """Remove the finished steps >= `step`. All processes must call."""
    wait(ckpts)
    later = [number for number in steps(ckpts.directory) if number >= step]
    processes.barrier('steps to remove are listed')
    if jax.process_index() == 0:
        for number in later:
            remove(ckpts.directory / str(number))
    processes.barrier('steps are removed')


def wait(ckpts: Checkpoints) -> None:
    """Wait until the pending save is on disk. Raises errors of the background thread."""
    if ckpts.writing is None:
        return
    writing, ckpts.writing = ckpts.writing, None
    try:
        writing.result()
    except (OSError, ValueError) as error:
        raise _explained(error, ckpts.directory, ckpts.need) from error
    processes.barrier('checkpoint written')  # process 0 is last: it renames the folder


def close(ckpts: Checkpoints) -> None:
    """Wait, then release the background thread."""
    try:
        wait(ckpts)
    finally:
        ckpts.writer.shutdown(wait=False)


def steps(directory: str | os.PathLike) -> list[int]:
    """The finished steps of a checkpoint folder, ascending."""
    names = [
        file.parent.name
        for mark in (MARK, CONTENTS)
        for file in pathlib.Path(directory).glob(f'*/{mark}')
    ]
    return sorted({int(name) for name in names if name.isdigit()})


def latest_step(ckpts: Checkpoints) -> int | None:
    """The newest finished step; None in a new run."""
    finished = steps(ckpts.directory)
    return finished[-1] if finished else None


def restore(
    ckpts: Checkpoints, abstract_state: Any, *, step: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return (state, extra) of `step`, by default the newest, with abstract_state's shardings.

    Each leaf of abstract_state is a ShapeDtypeStruct; leaves without a sharding are loaded onto the
    first device. Raises ValueError with the names of leaves that are missing, unexpected, or of
    another shape or dtype, and Damaged if a file has changed. All processes must call.
    """
    wait(ckpts)
    path = find_step(ckpts.directory, step=step)
    check_files(path)
    saved = _array_metadata(path)
    _check_leaves(saved, abstract_state, path)
    state = _fitted(_load(path, _fitted(abstract_state, saved)), abstract_state)
    return state, _extra(path)


def read_extra(path: str | os.PathLike, *, step: int | None = None) -> dict[str, Any]:
    """Read the JSON dict (config) of a checkpoint, but no arrays. `path`: see find_step."""
    path = find_step(path, step=step)
    check_files(path, [MARK], alone=True)
    return _extra(path)


def load_params_only(
    path: str | os.PathLike, abstract_params: Any, *, step: int | None = None
) -> Any:
    """Load the parameters and no other arrays. `path`: see find_step; errors as restore."""
    path = find_step(path, step=step)
    check_files(path)
    saved = _array_metadata(path)
    _check_leaves(saved['params'], abstract_params, path)
    placeholders = jax.tree.map(lambda _: ocp.PLACEHOLDER, saved)
    return _load(path, {**placeholders, 'params': abstract_params})['params']


def save_params(folder: pathlib.Path, params: Any) -> None:
    """Save parameters that never change, such as a base model; ValueError if others are there."""
    ckpts = open_checkpoints(folder, keep=1)
    stored = save(ckpts, 0, {'params': params}, {})
    close(ckpts)

    @jax.jit
    def equal(one, other):
        return jnp.stack(jax.tree.leaves(jax.tree.map(jnp.array_equal, one, other))).all()

    if not stored and not equal(load_params_only(folder, sharding.abstract_of(params)), params):
        raise ValueError(
            f'{folder} holds the parameters of another run, which ended before its first '
            'checkpoint; remove the folder'
        )


def find_step(path: str | os.PathLike, *, step: int | None = None) -> pathlib.Path:
    """The folder of a step. `path`: that folder, the checkpoint folder or the workdir."""
    path = files.local_path(path).expanduser().absolute()
    if step is None and ((path / MARK).exists() or (path / CONTENTS).exists()):
        return path
    directory = path / FOLDER if (path / FOLDER).is_dir() else path
    finished = steps(directory)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, 'there is no such folder', str(path))
    if not finished:
        raise FileNotFoundError(errno.ENOENT, 'no finished checkpoint', str(directory))
    if step is not None and step not in finished:
        raise FileNotFoundError(
            errno.ENOENT,
            f'no checkpoint of step {step}; there are {", ".join(map(str, finished))}',
            str(directory),
        )
    return directory / str(finished[-1] if step is None else step)


def number_of(path: pathlib.Path) -> int:
    """The step of a checkpoint folder. Raises ValueError if the folder was renamed."""
    if not path.name.isdigit():
        raise ValueError(
            f'{path} is a checkpoint folder without its step number: rename it to that number '
            f'(for example {path.parent / "60"}), or pass the workdir of its run'
        )
    return int(path.name)


def check_files(
    path: pathlib.Path, names: Collection[str] | None = None, *, alone: bool = False
) -> None:
    """Raise Damaged unless the files of a step, by default all, match their digests.

    The processes divide the files among them, so all must call, unless `alone`.
    """
    known = _digests(path)
    first, of = (0, 1) if alone else (jax.process_index(), jax.process_count())
    part = {name: known[name] for name in sorted(names or known)[first::of]}
    difference = checksums.first_difference(path, part)
    if not alone and processes.gather(np.array(bool(difference))).any():
        difference = difference or f'{path} has changed, according to another process'
    if difference:
        raise Damaged(path, difference)


def _digests(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return the digests in contents.jsonl after checking them against their own digest."""
    file = path / CONTENTS
    if not file.exists():
        raise Damaged(path, f'{file} is missing')
    head, _, body = file.read_bytes().partition(b'\n')
    digest = hashlib.sha256(body.removesuffix(b'\n')).hexdigest()
    if head != json.dumps({'sha256': digest}).encode() or not body.endswith(b'\n'):
        raise Damaged(path, f'{file} has changed since it was written')
    return json.loads(body)['files']


def fall_back(path: str | os.PathLike, *, step: int | None = None) -> int:
    """Return the newest intact step up to `step` (default: the newest); warn about skipped steps.

    `path`: see find_step. Raises Damaged if no step is intact. Call it in one process only.
    """
    start = find_step(path, step=step)
    *older, at = [at for at in steps(start.parent) if at <= number_of(start)]
    while True:
        try:
            check_files(start.parent / str(at), alone=True)
            return at
        except Damaged as damage:
            if not older:
                raise
            reason = f'({damage.what}), falling back to step {older[-1]}'
            files.warn(f'checkpoint {at} is damaged {reason}')
            at = older.pop()


def rename_damaged(workdir: str | os.PathLike) -> None:
    """Prepare a run to resume from fall_back's step: rename newer, damaged steps.

    They become <step>.damaged, and training writes these steps again. All processes must call
    before any of them looks for a step.
    """
    directory = files.local_path(workdir).expanduser().absolute() / FOLDER
    if jax.process_index() == 0 and steps(directory):
        intact = fall_back(directory)
        for step in [step for step in steps(directory) if step > intact]:
            damaged = directory / str(step)
            renamed = damaged.with_name(f'{step}{DAMAGED}')
            shutil.rmtree(renamed, ignore_errors=True)
            damaged.rename(renamed)
    processes.barrier('damaged checkpoints set aside')


def check_config(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    may_differ: tuple[str, ...] = (),
    advice: str = 'use its config or another workdir',
    follow: Collection[str] = (),
) -> None:
    """Raise ValueError if a resumed run has another config; the error names every changed field.

    may_differ: dotted names ('steps', 'log') of fields or groups that a resumed run may change.
    follow: names of fields that change together with another; they are counted, not listed.
    """
    before, now = (
        {name: json.dumps(value) for name, value in tree.flat(config).items()}
        for config in (saved, current)
    )
    absent = dict.fromkeys(sorted({*before, *now}), 'absent')
    before, now = absent | before, absent | now
    different = [
        name for name in absent if before[name] != now[name] and not is_free(name, may_differ)
    ]
    listed = [name for name in different if name not in follow] or different
    if different:
        lines = [f'{name}: {before[name]} in the checkpoint, {now[name]} now' for name in listed]
        if rest := len(different) - len(listed):
            lines.append(f'and {rest} more that follow from the algorithm')
        raise ValueError(
            f'this workdir belongs to a run with another config; {advice}. ' + '; '.join(lines)
        )


def is_free(name: str, may_differ: tuple[str, ...]) -> bool:
    """Whether may_differ contains a dotted field or one of its groups."""
    return any(name == free or name.startswith(free + '.') for free in may_differ)


def _check_leaves(saved: Any, wanted: Any, path: pathlib.Path) -> None:
    """Compare names, shapes and dtypes: Orbax casts silently and reports shapes without names."""
    saved, wanted = checksums.leaves(saved), checksums.leaves(wanted)
    errors = [f'{name} is missing in the checkpoint' for name in wanted if name not in saved]
    errors += [f'{name} is only in the checkpoint' for name in saved if name not in wanted]
    advice = '. Another commit may have written it: see config.json of its run' if errors else ''
    for name in wanted.keys() & saved.keys():
        want, have = wanted[name], saved[name]
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            want = jax.eval_shape(jax.random.key_data, want)
        if tuple(have.shape) != want.shape or have.dtype != want.dtype:
            have, want = f'{have.dtype}{list(have.shape)}', f'{want.dtype}{list(want.shape)}'
            errors.append(f'{name} is {have} in the checkpoint and must be {want}')
    if errors:
        more = f' (and {len(errors) - 5} more)' if len(errors) > 5 else ''
        raise ValueError(f'{path} does not fit: {"; ".join(sorted(errors)[:5])}{more}{advice}')


def _extra(path: pathlib.Path) -> dict[str, Any]:
    """Return the JSON dict that was saved with a step, in Orbax's metadata."""
    return json.loads((path / MARK).read_bytes())['custom_metadata']


def _array_metadata(path: pathlib.Path) -> Any:
    """Return the shapes and dtypes of the saved arrays, in nested dicts."""
    return ocp.checkpointables_metadata(path).metadata[STATE]


def _fitted(tree: Any, like: Any) -> Any:
    """Return the leaves of `tree`, matched by name, in the structure of `like`.

    Orbax also compares nodes without leaves. Older checkpoints have fewer: fields were added since.
    """
    leaves = checksums.leaves(tree)
    return jax.tree.unflatten(
        jax.tree.structure(like), [leaves[name] for name in checksums.leaves(like)]
    )


def _load(path: pathlib.Path, abstract: Any) -> Any:
    first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def placed(leaf):
        if leaf is ocp.PLACEHOLDER or leaf.sharding is not None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first_device)

    return ocp.load_checkpointables(path, {STATE: jax.tree.map(placed, abstract)})[STATE]


def _explained(error: Exception, directory: pathlib.Path, need: int) -> Exception:
    """Return an OSError with the system's error number, which Tensorstore puts into its text."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    number = int(match[1]) if match else getattr(error, 'errno', None)
    if number == errno.ENOSPC:
        return _disk_full(directory, 'the newest step was not saved', need)
    if number is None:
        reason = str(error).strip().partition('\n')[0][:200]  # Orbax adds the entire tree
        return OSError(errno.EIO, f'no checkpoint was written: {reason}', str(directory))
    return OSError(number, os.strerror(number), str(directory))


def _disk_full(directory: pathlib.Path, what: str, need: int) -> OSError:
    free = shutil.disk_usage(directory).free
    return OSError(
        errno.ENOSPC,
        f'the disk is full: {what} ({need:,} bytes needed, {free:,} free). Free some space and '
        'run the same command again: it resumes from the newest checkpoint, and nothing is lost',
        str(directory),
    )
