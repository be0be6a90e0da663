"""Read a run's config from its workdir, and select one of its checkpoints.

This module is the default --config file of commands that open a run: get_config returns the config
in the checkpoint, which --config.field=value overrides like any config.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.machine import checkpoint, files
from agentrl_jax.records import about
from agentrl_jax.run import config, migration, usage

MAY_DIFFER = tuple(  # fields that a command may override, since they do not define the model
    f'model.{name}' for name in ('path', 'tokenizer', 'dtype', 'remat', 'attention', 'scan_layers')
)


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """The origin of a result or an exported folder: its checkpoint, config and commit."""

    workdir: str  # '' = no run: the initial model of the config
    step: int | None
    config_hash: str
    commit: str | None  # of the running code; None outside of a checkout

    def fields(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


def origin(workdir: str, face: Any, *, step: int | None = None) -> CheckpointInfo:
    """Find the checkpoint of `step`, or the newest finished one, and describe it.

    face: the ConfigDict, which supplies the hash if there is no run.
    """
    if not workdir:
        return CheckpointInfo('', None, files.config_hash(config.as_json(face)), about.commit())
    folder = checkpoint.find_step(workdir, step=step)
    saved = migration.config_json_in(checkpoint.read_extra(folder))
    return CheckpointInfo(
        workdir=str(workdir),
        step=checkpoint.number_of(folder),
        config_hash=files.config_hash(saved),
        commit=about.commit(),
    )


def check_model(extra: Mapping[str, Any], face: Any) -> None:
    """Raise a ValueError if a ConfigDict has a different model than a checkpoint's run.

    Tensors do not show heads, the base of rotary embeddings or alpha. extra: the metadata.
    """
    saved, now = (
        migration.canonical_json(extra),
        migration.canonical_json(migration.to_metadata(face)),
    )
    shaping = ('model', 'lora')
    checkpoint.check_config(
        {name: saved[name] for name in shaping},
        {name: now[name] for name in shaping},
        may_differ=MAY_DIFFER,
    )


def readable(folder: Path) -> Path:
    """Return the folder of a step, or of the newest earlier step with a readable config.

    checkpoint.fall_back checks the arrays later.
    """
    number = checkpoint.number_of(folder)
    older = [step for step in reversed(checkpoint.steps(folder.parent)) if step < number]
    for candidate in [folder, *(folder.parent / str(step) for step in older)]:
        with contextlib.suppress(checkpoint.Damaged):
            checkpoint.read_extra(candidate)
            return candidate
    return folder


def say(found: CheckpointInfo) -> None:
    """Print the checkpoint."""
    step = 'untrained' if found.step is None else f'step {found.step} of {found.workdir}'
    commit = about.short(found.commit) or 'no checkout'
    digits = found.config_hash[: about.COMMIT_DIGITS]
    print(f'checkpoint  {step}, config {digits}, commit {commit}', flush=True)


def default(argv: Sequence[str]) -> str | None:
    """Return the default of --config: the config of the run in --workdir, if any.

    This runs before flags are parsed, since parsing --config.field=value needs a config.
    """
    workdir, step = _value(argv, 'workdir'), _value(argv, 'step')
    if not workdir or _value(argv, 'config') is not None or '--help' in argv:
        return None
    number = int(step) if step and step.isdigit() else None
    with usage.one_line_errors():
        folder = checkpoint.find_step(workdir, step=number)
        if usage.wants_fallback(argv):
            folder = readable(folder)
        get_config(str(folder))
    return f'{__file__}:{folder}'


def _value(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag: --flag=value, --flag value, -flag."""
    value = None
    for arg, following in zip(argv, [*argv[1:], None], strict=True):
        name, equals, text = arg.partition('=')
        if name in (f'--{flag}', f'-{flag}'):
            value = text if equals else following
    return value


def get_config(folder: str) -> Any:
    """Return the config in a checkpoint as a ConfigDict of this version."""
    extra = checkpoint.read_extra(folder)
    try:
        cfg = migration.from_metadata(extra)
    except ValueError as error:
        raise ValueError(f'{folder}: {error}') from error
    cfg.update(migration.canonical_json(extra))
    return cfg
