"""Checkpoints by Orbax (v1 API): a TrainState and a JSON dict per step, written in the background.

A step becomes visible by one rename when all of it is on disk, so whatever kills a run, the newest
step found is whole. A checkpoint does not depend on the mesh: the shardings of the abstract state
say where its arrays go. Next to the arrays is contents.jsonl with a digest of each file; a file
that does not match its digest is never loaded.
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
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from agentrl_jax.machine import checksums, files, processes
from agentrl_jax.settings import tree

FOLDER = 'checkpoints'  # below the workdir
STATE = 'state'  # Orbax's name of the pytree in a step
MARK = '_CHECKPOINT_METADATA'  # Orbax's file about a whole step, `extra` included
CONTENTS = 'contents.jsonl'  # ours: {'sha256'} of the second line; {'files'}
HAS_CONTENTS = 'has_contents'  # beside `extra`; checkpoints of older versions have none
NEW, REMOVED, DAMAGED = '.new', '.removed', '.damaged'  # ends of folders that are no steps
PATIENCE_S = 1200  # for Orbax to write a step
# Orbax counts its own patience in times of day: where the clock is set meanwhile, a save fails.
UNTIMED = ocp.options.AsyncOptions(timeout_secs=None, create_directories_asynchronously=False)


# Orbax logs pages of stacks about errors that it raises as well.
logging.getLogger('absl').addFilter(lambda record: f'{os.sep}orbax{os.sep}' not in record.pathname)


class Damaged(files.Failure):
    """A checkpoint that is not as it was saved; the message names the file."""

    def __init__(self, path: pathlib.Path, what: str):
        own = int(path.name) if path.name.isdigit() else -1  # a folder that was copied elsewhere
        older = [step for step in steps(path.parent) if step < own]
        advice = f'--fallback goes back to step {older[-1]}' if older else 'there is no older step'
        super().__init__(f'checkpoint {path.name} is damaged: {what}; {advice}')
        self.path, self.what = path, what


@dataclasses.dataclass
class Checkpoints:
    """An open checkpoint folder; made by open_checkpoints."""

    directory: pathlib.Path
    keep: int
    writer: concurrent.futures.ThreadPoolExecutor
    writing: concurrent.futures.Future | None = None
    need: int = 0  # bytes of what is being written


def open_checkpoints(workdir: str | os.PathLike, *, keep: int) -> Checkpoints:
    """Open workdir/checkpoints, remove what a killed run left half-written; `keep` steps stay."""
    if keep < 1:
        raise ValueError(f'keep={keep} must be at least 1: a resumed run starts from the last one')
    directory = files.check_workdir(files.local_path(workdir) / FOLDER).resolve()
    if jax.process_index() == 0:
        for pattern in (f'*{NEW}', f'*{NEW}.*', f'*{REMOVED}', '*.orbax-checkpoint-tmp*'):
            for left in directory.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
    writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
    return Checkpoints(directory, keep, writer)


def state_bytes(state: Any) -> int:
    """Bytes of all leaves, abstract or real: what one checkpoint takes at most on the disk."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def save(ckpts: Checkpoints, step: int, state: Any, extra: Mapping[str, Any]) -> bool:
    """Start writing `state` and `extra` (JSON) as `step`; False if that step is already there.

    Returns when the arrays are copied, so `state` may be donated afterwards. An error of an
    earlier write is raised here or by wait().
    """
    wait(ckpts)
    if step in steps(ckpts.directory):
        return False
    need, free = state_bytes(state), shutil.disk_usage(ckpts.directory).free
    if free < need // jax.process_count():
        raise _disk_full(ckpts.directory, f'step {step} was not saved', need)
    metadata = json.loads(json.dumps({**extra, HAS_CONTENTS: True}, allow_nan=False))
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
    """In the background: waits for Orbax, then process 0 makes a step of what it wrote.

    The response must be asked for its result, for that is what closes its thread and descriptors.
    """
    response.result(PATIENCE_S)
    if jax.process_index():
        return
    # Reading also brings every file to the disk: an emptied one after a power loss was the most
    # likely damage of all.
    body = json.dumps({'files': checksums.files(new)}).encode()
    head = json.dumps({'sha256': hashlib.sha256(body).hexdigest()}).encode()
    with (new / CONTENTS).open('wb') as file:
        file.write(head + b'\n' + body + b'\n')
        file.flush()
        os.fsync(file.fileno())
    place = ckpts.directory / str(step)
    if place.exists():  # without its mark, so it was no step
        remove(place)
    os.replace(new, place)
    _sync_folder(ckpts.directory)
    for old in steps(ckpts.directory)[: -ckpts.keep]:
        remove(ckpts.directory / str(old))


def remove(path: pathlib.Path) -> None:
    """Removes a step. Renamed first: a half-removed folder must not look like a checkpoint."""
    gone = path.with_name(path.name + REMOVED)
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sync_folder(folder: pathlib.Path) -> None:
    """A rename is on the disk once its folder is; some file systems cannot be asked for it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_from(ckpts: Checkpoints, step: int) -> None:
    """Removes the finished steps from `step` on; in all processes together."""
    wait(ckpts)
    later = [number for number in steps(ckpts.directory) if number >= step]
    processes.barrier('steps to remove are listed')
    if jax.process_index() == 0:
        for number in later:
            remove(ckpts.directory / str(number))
    processes.barrier('steps are removed')


def wait(ckpts: Checkpoints) -> None:
    """Return when the started save is on disk; raises what went wrong in the background."""
    if ckpts.writing is None:
        return
    writing, ckpts.writing = ckpts.writing, None
    try:
        writing.result()
    except (OSError, ValueError) as error:
        raise _explained(error, ckpts.directory, ckpts.need) from error
    processes.barrier('checkpoint written')  # process 0 renames last of all


def close(ckpts: Checkpoints) -> None:
    """Wait, then release the background thread."""
    try:
        wait(ckpts)
    finally:
        ckpts.writer.shutdown(wait=False)


def steps(directory: str | os.PathLike) -> list[int]:
    """The finished steps of a checkpoint folder, ascending."""
    found = [
        file.parent.name
        for mark in (MARK, CONTENTS)
        for file in pathlib.Path(directory).glob(f'*/{mark}')
    ]
    return sorted({int(name) for name in found if name.isdigit()})


def latest_step(ckpts: Checkpoints) -> int | None:
    """The newest finished step, None in a new run."""
    finished = steps(ckpts.directory)
    return finished[-1] if finished else None


def restore(
    ckpts: Checkpoints, abstract_state: Any, *, step: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """(state, extra) of `step`, or of the newest one, laid out as abstract_state's shardings say.

    abstract_state has a ShapeDtypeStruct at every leaf; without a sharding it goes to the first
    device. A leaf that is missing, extra or of another shape or dtype is an error that names it;
    a file that is not as it was saved is Damaged. All processes must call.
    """
    wait(ckpts)
    path = find_step(ckpts.directory, step=step)
    check_files(path)
    saved = _array_metadata(path)
    _check_leaves(saved, abstract_state, path)
    state = _fitted(_load(path, _fitted(abstract_state, saved)), abstract_state)
    return state, _extra(path)


def read_extra(path: str | os.PathLike, *, step: int | None = None) -> dict[str, Any]:
    """The JSON dict of a checkpoint: its config, before any array is read. Path as find_step."""
    path = find_step(path, step=step)
    known = _contents(path)
    if known is not None:
        _same_files(path, {MARK: known['files'][MARK]})
    return _extra(path)


def load_params_only(
    path: str | os.PathLike, abstract_params: Any, *, step: int | None = None, field: str = 'params'
) -> Any:
    """One field of the state; no other array is read. Path as find_step, damage as restore."""
    path = find_step(path, step=step)
    check_files(path)
    saved = _array_metadata(path)
    if field not in saved:
        raise ValueError(f'{path} has no {field!r}, only: {", ".join(sorted(saved))}')
    _check_leaves(saved[field], abstract_params, path)
    others = jax.tree.map(lambda _: ocp.PLACEHOLDER, saved)
    return _load(path, {**others, field: abstract_params})[field]


def find_step(path: str | os.PathLike, *, step: int | None = None) -> pathlib.Path:
    """The folder of a step, given itself, the checkpoint folder or the workdir."""
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
    """The step of its folder; ValueError for one that was copied under another name."""
    if not path.name.isdigit():
        raise ValueError(
            f'{path} is a checkpoint under a name that is not its step: name the folder by the '
            f'number of the step (such as {path.parent / "60"}), or give the workdir of its run'
        )
    return int(path.name)


def check_files(path: pathlib.Path, *, alone: bool = False) -> None:
    """Raise Damaged unless every file of a step is as it was written.

    The processes of a run share the files out, so all must call, unless one looks alone.
    """
    known = _contents(path)
    if known is not None:
        _same_files(path, known['files'], alone=alone)
    elif jax.process_index() == 0:
        say = f'WARNING: {path} was saved without checksums: damage to it may go unnoticed'
        print(say, file=sys.stderr, flush=True)


def _same_files(path: pathlib.Path, known: dict[str, Any], *, alone: bool = True) -> None:
    part, of = (0, 1) if alone else (jax.process_index(), jax.process_count())
    found = checksums.first_difference(path, known, part=part, of=of)
    if of > 1:  # the process that saw it says what is wrong; the others know the file
        numbers = processes.gather(np.array([found[0] if found else len(known)]))
        if found is None and numbers.min() < len(known):
            found = int(numbers.min()), 'is not as it was written, says another process'
    if found:
        raise Damaged(path, f'{path / sorted(known)[found[0]]} {found[1]}')


def _contents(path: pathlib.Path) -> dict[str, Any] | None:
    """What contents.jsonl says, once it has been compared with its own digest."""
    file = path / CONTENTS
    if not file.exists():
        if HAS_CONTENTS in _metadata(path)['custom_metadata']:
            raise Damaged(path, f'{file} is missing')
        return None
    head, _, body = file.read_bytes().partition(b'\n')
    digest = hashlib.sha256(body.removesuffix(b'\n')).hexdigest()
    if head != json.dumps({'sha256': digest}).encode() or not body.endswith(b'\n'):
        raise Damaged(path, f'{file} does not hold what was written')
    return json.loads(body)


def fall_back(path: str | os.PathLike, *, step: int | None = None) -> int:
    """The newest step that is whole, from `step` (or the newest) on; warns of those it skips.

    Path as find_step. Damaged when none is whole. For one process.
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
            words = f'({damage.what}), falling back to step {older[-1]}'
            print(f'WARNING: checkpoint {at} is damaged {words}', file=sys.stderr, flush=True)
            at = older.pop()


def set_aside_damaged(workdir: str | os.PathLike) -> None:
    """fall_back for a run that goes on: damaged steps newer than the whole one get another name.

    They keep their bytes, as <step>.damaged; training writes these steps again. All processes must
    call, before any of them looks for a step.
    """
    directory = files.local_path(workdir).expanduser().absolute() / FOLDER
    if jax.process_index() == 0 and steps(directory):
        whole = fall_back(directory)
        for step in [step for step in steps(directory) if step > whole]:
            damaged = directory / str(step)
            aside = damaged.with_name(f'{step}{DAMAGED}')
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
    processes.barrier('damaged checkpoints set aside')


def check_config(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    may_differ: tuple[str, ...] = (),
    advice: str = 'use its config or another workdir',
    follow: Collection[str] = (),
) -> None:
    """Refuse to go on with another config; the error names every field that differs.

    may_differ: dotted names ('steps', 'log') of fields or groups that a resumed run may change.
    follow: names of fields that change with another one; they are counted, not listed.
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
            f'this workdir holds a run with another config; {advice}. ' + '; '.join(lines)
        )


def is_free(name: str, may_differ: tuple[str, ...]) -> bool:
    """Whether a dotted field, or a group that holds it, is among those that may differ."""
    return any(name == free or name.startswith(free + '.') for free in may_differ)


def _check_leaves(saved: Any, wanted: Any, path: pathlib.Path) -> None:
    """Orbax would cast a dtype silently and report a shape without its name."""
    saved, wanted = checksums.leaves(saved), checksums.leaves(wanted)
    wrong = [f'{name} is missing in the checkpoint' for name in wanted if name not in saved]
    wrong += [f'{name} is only in the checkpoint' for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        want, have = wanted[name], saved[name]
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            want = jax.eval_shape(jax.random.key_data, want)
        if tuple(have.shape) != want.shape or have.dtype != want.dtype:
            have, want = f'{have.dtype}{list(have.shape)}', f'{want.dtype}{list(want.shape)}'
            wrong.append(f'{name} is {have} in the checkpoint and must be {want}')
    if wrong:
        more = f' (and {len(wrong) - 5} more)' if len(wrong) > 5 else ''
        raise ValueError(f'{path} does not fit: {"; ".join(sorted(wrong)[:5])}{more}')


def _metadata(path: pathlib.Path) -> dict[str, Any]:
    """Orbax's own file about a step, as far as it is needed before an array is read."""
    file = path / MARK
    try:
        saved = json.loads(file.read_bytes())
        whole = isinstance(saved['custom_metadata'], dict) and STATE in saved['item_handlers']
    except FileNotFoundError as error:
        raise Damaged(path, f'{file} is missing') from error
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise Damaged(path, f'{file} is invalid checkpoint metadata')
    return saved


def _extra(path: pathlib.Path) -> dict[str, Any]:
    saved = _metadata(path)['custom_metadata']
    return {name: value for name, value in saved.items() if name != HAS_CONTENTS}


def _array_metadata(path: pathlib.Path) -> Any:
    """Shapes and dtypes of the saved arrays, in nested dicts."""
    _metadata(path)
    with _readable(path):
        saved = ocp.checkpointables_metadata(path).metadata[STATE]
    if saved is None:  # Orbax has logged why
        raise Damaged(path, f'{path / STATE} does not say which arrays it holds')
    return saved


def _fitted(tree: Any, like: Any) -> Any:
    """The leaves of `tree` in the structure of `like`, by name.

    Orbax minds nodes without leaves, of which older checkpoints have fewer: a state gains fields.
    """
    own = checksums.leaves(tree)
    return jax.tree.unflatten(
        jax.tree.structure(like), [own[name] for name in checksums.leaves(like)]
    )


def _load(path: pathlib.Path, abstract: Any) -> Any:
    first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def placed(leaf):
        if leaf is ocp.PLACEHOLDER or leaf.sharding is not None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first_device)

    with _readable(path):
        return ocp.load_checkpointables(path, {STATE: jax.tree.map(placed, abstract)})[STATE]


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:  # Orbax met what it did not write
        raise Damaged(path, f'{path / STATE} cannot be read ({_first_line(error)})') from error


def _first_line(error: Exception) -> str:
    """Orbax repeats the whole tree after the first line."""
    return str(error).strip().partition('\n')[0][:200]


def _explained(error: Exception, directory: pathlib.Path, need: int) -> Exception:
    """Tensorstore's errors are ValueErrors whose text ends with the system's number."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    number = int(found[1]) if found else getattr(error, 'errno', None)
    if number == errno.ENOSPC:
        return _disk_full(directory, 'the newest step was not saved', need)
    if number is None:
        said = f'no checkpoint was written: {_first_line(error)}'
        return OSError(errno.EIO, said, str(directory))
    return OSError(number, os.strerror(number), str(directory))


def _disk_full(directory: pathlib.Path, what: str, need: int) -> OSError:
    free = shutil.disk_usage(directory).free
    return OSError(
        errno.ENOSPC,
        f'the disk is full: {what}, which needs {need:,} bytes, {free:,} are free. Free space and '
        'give the same command again: it goes on from the newest checkpoint, and nothing is lost',
        str(directory),
    )
