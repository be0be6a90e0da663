"""Checkpoints by Orbax (v1 API): a TrainState and a JSON dict per step, written in the background.

A step becomes visible by one rename when all of it is on disk, so whatever kills a run, the newest
step found is whole. A checkpoint does not depend on the mesh: the shardings of the abstract state
say where its arrays go.
"""

import dataclasses
import errno
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from agentrl_jax.machine import files

FOLDER = 'checkpoints'  # below the workdir
STATE = 'state'  # Orbax's name of the pytree in a step
MARK = '_CHECKPOINT_METADATA'  # a folder with it is a finished step


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """An open checkpoint folder; made by open_checkpoints."""

    directory: pathlib.Path
    checkpointer: ocp.training.Checkpointer
    asynchronous: bool


def open_checkpoints(
    workdir: str | os.PathLike, *, keep: int, best: str | None = None, async_: bool = True
) -> Checkpoints:
    """Open workdir/checkpoints, remove what a killed run left half-written, keep the last `keep`.

    With best='eval/success' the step whose saved metric of that name is highest is kept as well.
    """
    if keep < 1:
        raise ValueError(f'keep={keep} must be at least 1: a resumed run starts from the last one')
    directory = files.check_workdir(files.local_path(workdir) / FOLDER)
    policies = ocp.training.preservation_policies
    preserve = policies.LatestN(keep)
    if best is not None:
        highest = policies.BestN(
            get_metric_fn=lambda metrics: metrics[best], n=1, keep_checkpoints_without_metrics=False
        )
        preserve = policies.AnyPreservationPolicy([preserve, highest])
    checkpointer = ocp.training.Checkpointer(
        directory, preservation_policy=preserve, cleanup_tmp_directories=True
    )
    return Checkpoints(directory, checkpointer, async_)


def state_bytes(state: Any) -> int:
    """Bytes of all leaves, abstract or real: what one checkpoint takes at most on the disk."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def save(
    ckpts: Checkpoints,
    step: int,
    state: Any,
    extra: Mapping[str, Any],
    *,
    metrics: Mapping[str, float] | None = None,
) -> bool:
    """Start writing `state` and `extra` (JSON) as `step`; False if that step is already there.

    Returns when the arrays are copied, so `state` may be donated afterwards. An error of an
    earlier write is raised here or by wait().
    """
    wait(ckpts)
    if step in steps(ckpts.directory):
        return False
    need, free = state_bytes(state), shutil.disk_usage(ckpts.directory).free
    if free < need // jax.process_count():
        raise _disk_full(ckpts.directory, f'step {step} needs {need:,} bytes, {free:,} are free')
    try:
        ckpts.checkpointer.save_checkpointables_async(
            step,
            {STATE: state},
            force=True,
            overwrite=any(known.step == step for known in ckpts.checkpointer.checkpoints),
            metrics=None if metrics is None else dict(metrics),
            custom_metadata=json.loads(json.dumps(extra, allow_nan=False)),
        )
    except (OSError, ValueError) as error:
        raise _explained(error, ckpts.directory) from error
    if not ckpts.asynchronous:
        wait(ckpts)
    return True


def wait(ckpts: Checkpoints) -> None:
    """Return when every started save is on disk; raises what went wrong in the background."""
    try:
        ckpts.checkpointer.wait()
    except (OSError, ValueError) as error:
        raise _explained(error, ckpts.directory) from error


def close(ckpts: Checkpoints) -> None:
    """Wait, then release the background threads."""
    wait(ckpts)
    ckpts.checkpointer.close()


def steps(directory: str | os.PathLike) -> list[int]:
    """The finished steps of a checkpoint folder, ascending."""
    found = pathlib.Path(directory).glob(f'*/{MARK}')
    return sorted(int(mark.parent.name) for mark in found if mark.parent.name.isdigit())


def latest_step(ckpts: Checkpoints) -> int | None:
    """The newest finished step, None in a new run."""
    finished = steps(ckpts.directory)
    return finished[-1] if finished else None


def restore(
    ckpts: Checkpoints, abstract_state: Any, *, step: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """(state, extra) of `step`, or of the newest one, laid out as abstract_state's shardings say.

    abstract_state has a ShapeDtypeStruct at every leaf; without a sharding it goes to the first
    device. A leaf that is missing, extra or of another shape or dtype is an error that names it.
    """
    wait(ckpts)
    path = find_step(ckpts.directory, step=step)
    saved = _metadata(path)
    _check_leaves(saved.metadata[STATE], abstract_state, path)
    return _load(path, abstract_state), saved.custom_metadata


def read_extra(path: str | os.PathLike, *, step: int | None = None) -> dict[str, Any]:
    """The JSON dict of a checkpoint: its config, before any array is read. Path as find_step."""
    return _metadata(find_step(path, step=step)).custom_metadata


def load_params_only(
    path: str | os.PathLike, abstract_params: Any, *, step: int | None = None, field: str = 'params'
) -> Any:
    """One field of the state; no other array is read. Path as find_step."""
    path = find_step(path, step=step)
    saved = _metadata(path).metadata[STATE]
    if field not in saved:
        raise ValueError(f'{path} has no {field!r}, only: {", ".join(sorted(saved))}')
    _check_leaves(saved[field], abstract_params, path)
    others = jax.tree.map(lambda _: ocp.PLACEHOLDER, saved)
    return _load(path, {**others, field: abstract_params})[field]


def find_step(path: str | os.PathLike, *, step: int | None = None) -> pathlib.Path:
    """The folder of a step, given itself, the checkpoint folder or the workdir."""
    path = files.local_path(path).expanduser().absolute()
    if step is None and (path / MARK).exists():
        return path
    directory = path / FOLDER if (path / FOLDER).is_dir() else path
    finished = steps(directory)
    if not finished:
        raise FileNotFoundError(errno.ENOENT, 'no finished checkpoint in', str(directory))
    if step is not None and step not in finished:
        raise FileNotFoundError(
            errno.ENOENT,
            f'no checkpoint of step {step}; there are {", ".join(map(str, finished))} in',
            str(directory),
        )
    return directory / str(finished[-1] if step is None else step)


def check_config(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, may_differ: tuple[str, ...] = ()
) -> None:
    """Refuse to go on with another config; the error names every field that differs.

    may_differ: dotted names ('steps', 'log') of fields or groups that a resumed run may change.
    """
    before, now = _flat(saved), _flat(current)
    different = [
        f'{name}: {_shown(before, name)} in the checkpoint, {_shown(now, name)} now'
        for name in sorted({*before, *now})
        if _shown(before, name) != _shown(now, name)
        and not any(name == free or name.startswith(free + '.') for free in may_differ)
    ]
    if different:
        raise ValueError(
            'this workdir holds a run with another config; use its config or another workdir. '
            + '; '.join(different)
        )


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, str]:
    fields = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            fields.update(_flat(value, f'{prefix}{name}.'))
        else:
            fields[prefix + name] = json.dumps(value)
    return fields


def _shown(fields: dict[str, str], name: str) -> str:
    return fields[name] if name in fields else 'absent'


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path; Orbax names dict, dataclass and tuple entries alike."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in flat}


def _check_leaves(saved: Any, wanted: Any, path: pathlib.Path) -> None:
    """Orbax would cast a dtype silently and report a shape without its name."""
    saved, wanted = _leaves(saved), _leaves(wanted)
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


def _metadata(path: pathlib.Path):
    try:
        saved = ocp.checkpointables_metadata(path)
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(path, error) from error
    if STATE not in saved.metadata or saved.metadata[STATE] is None:
        raise _damaged(path, 'it holds no state')
    return saved


def _load(path: pathlib.Path, abstract: Any) -> Any:
    first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def placed(leaf):
        if leaf is ocp.PLACEHOLDER or leaf.sharding is not None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first_device)

    try:
        return ocp.load_checkpointables(path, {STATE: jax.tree.map(placed, abstract)})[STATE]
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(path, error) from error


def _damaged(path: pathlib.Path, cause: Any) -> ValueError:
    earlier = [step for step in steps(path.parent) if step < int(path.name)]
    advice = f'step {earlier[-1]} is used' if earlier else 'the run starts anew'
    return ValueError(f'{path} cannot be read; move it away and {advice}. Cause: {cause}')


def _explained(error: Exception, directory: pathlib.Path) -> Exception:
    if 'No space left' in str(error) or getattr(error, 'errno', None) == errno.ENOSPC:
        return _disk_full(directory, 'the checkpoint could not be written')
    return OSError(errno.EIO, f'checkpoint could not be written: {error}', str(directory))


def _disk_full(directory: pathlib.Path, what: str) -> OSError:
    return OSError(
        errno.ENOSPC,
        f'disk full: {what}. Free space and start the same command again: it resumes from the '
        'last finished checkpoint',
        str(directory),
    )
