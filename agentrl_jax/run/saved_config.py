"""The config of a run from its workdir alone, and which of its checkpoints is meant.

As a file for --config it is the default of programs that open a run: its config is the one that
lies in the checkpoint, and --config.field=value overrides it as it would any config.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.machine import checkpoint, files, provenance
from agentrl_jax.run import config, migration, usage

MAY_DIFFER = tuple(  # of a config that opens a run: not what the model is
    f'model.{name}' for name in ('path', 'tokenizer', 'dtype', 'remat', 'attention', 'scan_layers')
)
HASH_SHOWN = 12  # digits of a config's hash, and of a commit, in a line for people


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a number or an exported folder is of."""

    workdir: str  # '' = no run: the config's own model, as it was loaded or drawn
    step: int | None
    config_hash: str
    commit: str | None  # of the code that looks at it; None outside of a checkout
    skipped: tuple[str, ...] = ()  # newer checkpoints that were never finished

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self) | {'skipped': list(self.skipped)}


def origin(workdir: str, face: Any, *, step: int | None = None) -> Origin:
    """The checkpoint that is opened: that of `step`, or the newest finished one; says what it is.

    face: the ConfigDict, whose hash it is where there is no run.
    """
    if not workdir:
        return Origin('', None, files.config_hash(config.as_json(face)), provenance.commit())
    folder = checkpoint.find_step(workdir, step=step)
    saved = migration.saved_in(checkpoint.read_extra(folder))
    return Origin(
        workdir=str(workdir),
        step=checkpoint.number_of(folder),
        config_hash=files.config_hash(saved),
        commit=provenance.commit(),
        skipped=tuple(unfinished(folder)) if step is None else (),
    )


def check_model(extra: Mapping[str, Any], face: Any) -> None:
    """ValueError where a ConfigDict has another model than the run that a checkpoint is of.

    Heads, the base of positions and alpha show in no tensor. extra: beside its arrays.
    """
    saved, now = migration.comparable(extra), migration.comparable(migration.saved_with(face))
    shaping = ('model', 'lora')
    checkpoint.check_config(
        {name: saved[name] for name in shaping},
        {name: now[name] for name in shaping},
        may_differ=MAY_DIFFER,
    )


def readable(folder: Path) -> Path:
    """The folder of a step, or of the newest one before it whose config can be read.

    Which arrays are whole is looked at later, and said (checkpoint.fall_back).
    """
    own = checkpoint.number_of(folder)
    older = [step for step in reversed(checkpoint.steps(folder.parent)) if step < own]
    for found in [folder, *(folder.parent / str(step) for step in older)]:
        with contextlib.suppress(checkpoint.Damaged):
            checkpoint.read_extra(found)
            return found
    return folder


def unfinished(folder: Path) -> list[str]:
    """Names beside a step's folder of newer checkpoints that lack the mark of a finished one."""
    found, own = [], checkpoint.number_of(folder)
    for path in folder.parent.iterdir():
        number = re.match(r'\d+(?=$|\.)', path.name)
        if number and int(number[0]) > own and not (path / checkpoint.MARK).exists():
            found.append(path.name)
    return sorted(found)


def say(found: Origin) -> None:
    """Print what is opened, and a warning about checkpoints that were passed over."""
    step = 'untrained' if found.step is None else f'step {found.step} of {found.workdir}'
    commit, dash, modified = (found.commit or 'no checkout').partition('-')
    commit = commit[:HASH_SHOWN] + dash + modified
    print(
        f'checkpoint  {step}, config {found.config_hash[:HASH_SHOWN]}, commit {commit}', flush=True
    )
    if found.skipped:
        usage.warn(
            f'{", ".join(found.skipped)} in {found.workdir} was never finished (it lacks '
            f'{checkpoint.MARK}): step {found.step} is taken'
        )


def default(argv: Sequence[str]) -> str | None:
    """Value of --config where it is not given: the config of the run in --workdir, if any.

    Known before flags are parsed, since --config.field=value needs a config to be parsed.
    """
    workdir, step = _value(argv, 'workdir'), _value(argv, 'step')
    if not workdir or _value(argv, 'config') is not None or '--help' in argv:
        return None
    number = int(step) if step and step.isdigit() else None
    try:
        with usage.checked():
            folder = checkpoint.find_step(workdir, step=number)
            if usage.wants_fallback(argv):
                folder = readable(folder)
            get_config(str(folder))
    except (ValueError, OSError) as error:
        usage.end(files.in_words(error), error)
    return f'{__file__}:{folder}'


def _value(argv: Sequence[str], flag: str) -> str | None:
    """The last value of a flag: --flag=value, --flag value, -flag."""
    value = None
    for arg, following in zip(argv, [*argv[1:], None], strict=True):
        name, equals, given = arg.partition('=')
        if name in (f'--{flag}', f'-{flag}'):
            value = given if equals else following
    return value


def get_config(folder: str) -> Any:
    """The config in a checkpoint, as a ConfigDict of this version."""
    extra = checkpoint.read_extra(folder)
    try:
        cfg = migration.of_checkpoint(extra)
    except ValueError as error:
        raise ValueError(f'{folder}: {error}') from error
    cfg.update(migration.comparable(extra))
    return cfg
