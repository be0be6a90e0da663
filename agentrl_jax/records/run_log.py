"""The record of a run: metrics.jsonl, optional TensorBoard and W&B, config.json."""

import contextlib
import importlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.machine.files import read_bytes, read_json, read_text, warn, write_atomic

METRICS_FILE = 'metrics.jsonl'
CONFIG_FILE = 'config.json'
REFERENCE_FILE = 'reference.json'  # success of random play and of the oracle
FINISHED_FILE = 'finished.json'
NOW_FILE = 'now.json'  # written by progress.beacon
COMPILED_FILE = 'compiled.json'  # {program: seconds} of the last long compilations
REDACTED = '***'
WANDB_FILE = 'wandb_id'  # the run's id at W&B, drawn at its start
CHECKPOINTS = 'checkpoints'  # folder of a run; a folder below it is named for its step
NOT_FINITE = {'nan': math.nan, 'inf': math.inf, '-inf': -math.inf}
LARGEST = 2**63  # bound of integers: larger ones are not counts and may not fit in a float


class RunLog(contextlib.ExitStack):
    """Writes the metrics of a run; does nothing on processes other than 0.

    Opening it drops rows of steps >= resume_step, so a resumed run continues the file as if it had
    never stopped; `time_s` continues from the last remaining row. W&B cannot drop rows, but a
    resumed run repeats them exactly, and W&B ignores steps that it has.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        resume_step: int = 0,
        tensorboard: bool = False,
        wandb_project: str = '',
        config: Any = None,
        process_index: int = 0,
    ):
        super().__init__()
        self._file = self._tensorboard = self._wandb = None
        if process_index:
            return
        workdir = Path(workdir)
        # Import first, so that a missing package fails before any work is done.
        tensorboardx = importlib.import_module('tensorboardX') if tensorboard else None
        wandb = importlib.import_module('wandb') if wandb_project else None
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / METRICS_FILE
        rows_before = [row for row in read_metrics(path) if row['step'] < resume_step]
        missing = gaps({row['step'] for row in rows_before}, resume_step)
        if missing:  # only a warning: the training state is in the checkpoint
            warn(
                f'{path} has no rows of steps {missing}, which precede the checkpoint of step '
                f'{resume_step}: curves, tables and alarms will lack them'
            )
        write_atomic(path, ''.join(json_line(row) for row in rows_before))
        self._file = self.enter_context(path.open('a', encoding='utf-8'))
        self._start = time.monotonic() - max((row['time_s'] for row in rows_before), default=0.0)
        if tensorboardx:
            self._tensorboard = tensorboardx.SummaryWriter(
                str(workdir / 'tensorboard'), purge_step=resume_step
            )
            self.callback(self._tensorboard.close)
        if wandb:
            options = dict(project=wandb_project, name=workdir.name, id=wandb_id(workdir))
            options |= dict(resume='allow', dir=str(workdir), config=redact(config))
            try:  # W&B's metadata would include the command line, which may contain secrets
                self._wandb = wandb.init(**options, settings={'x_disable_meta': True})
            except wandb.Error as error:
                raise ValueError(
                    f'log.wandb_project={wandb_project!r}: W&B did not start the run ({error}); '
                    "set it to '' to train without W&B"
                ) from error
            self.callback(self._wandb.finish)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one row: step, time_s, then the metrics by name."""
        if self._file is None:
            return
        row = {'step': int(step), 'time_s': round(time.monotonic() - self._start, 3)}
        row |= {name: plain_number(value) for name, value in sorted(metrics.items())}
        self._file.write(json_line(row))
        self._file.flush()
        if self._tensorboard:
            for name, value in row.items():
                if name != 'step':
                    self._tensorboard.add_scalar(name, value, row['step'])
            self._tensorboard.flush()
        if self._wandb:
            self._wandb.log(row, step=row['step'])


def wandb_id(workdir: str | os.PathLike) -> str:
    """The id of a run at W&B: drawn once and saved in the workdir.

    The path of the workdir would not be unique: two containers may use the same one, and a removed
    folder may be created again.
    """
    path = Path(workdir) / WANDB_FILE
    known = read_text(path).strip() if path.exists() else ''
    if not known:
        known = secrets.token_hex(8)
        write_atomic(path, known + '\n')
    return known


def plain_number(value: Any) -> int | float:
    """A scalar as a Python number; float32 in its shortest decimal form (0.1, not 0.100...01).

    Shortest forms are unique, so equal runs write equal bytes.
    """
    scalar = np.asarray(value)
    if scalar.size != 1 or scalar.dtype == object:
        raise TypeError(f'a metric must be one number, not {value!r}')
    scalar = scalar.reshape(())
    if scalar.dtype.kind in 'iub':
        return int(scalar)
    return float(str(scalar)) if scalar.dtype.itemsize <= 4 else float(scalar)


def plain_row(step: int, metrics: dict[str, Any]) -> dict[str, int | float]:
    """A row as read_metrics will return it, so that decisions are the same after a resume."""
    return {'step': int(step)} | {name: plain_number(value) for name, value in metrics.items()}


def json_line(row: dict[str, int | float]) -> str:
    return json.dumps({name: plain(x) for name, x in row.items()}, allow_nan=False) + '\n'


def plain(value: float | None) -> float | str | None:
    """A value for JSON, which lacks nan and inf: they become 'nan', 'inf' and '-inf'."""
    return value if value is None or math.isfinite(value) else str(value)


def read_metrics(path: str | os.PathLike) -> list[dict[str, int | float]]:
    """Rows of a metrics.jsonl; [] if it does not exist. Skips an incomplete last line."""
    path = Path(path)
    if not path.exists():
        return []
    lines = read_bytes(path).split(b'\n')
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip() and number == len(lines):
            break
        try:
            rows.append(parse_row(line))
        except ValueError as error:
            if number == len(lines):  # no newline: the process was killed while writing
                break
            raise ValueError(f'{path}, line {number}: {error}') from error
    return rows


def parse_row(line: bytes) -> dict[str, int | float]:
    """Parse one line of a metrics.jsonl. Raises ValueError with the reason."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError('not a JSON object') from error
    if not isinstance(row, dict):
        raise ValueError('not a JSON object')
    row = {name: to_number(value) for name, value in row.items()}
    wrong = [name for name, value in row.items() if value is None]
    if wrong:
        raise ValueError(f'{wrong[0]!r} is not a number')
    if not {'step', 'time_s'} <= row.keys():
        raise ValueError('step or time_s is missing')
    if not isinstance(row['step'], int) or row['step'] < 0:
        raise ValueError(f'step {row["step"]} is not a count')
    return row


def to_number(value: Any) -> int | float | None:
    """A JSON value or 'nan', 'inf', '-inf' as a number; None for other values."""
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST):
        return value
    return None


def gaps(steps: set[int], end: int) -> str:
    """The steps 0 to end - 1 that are not in a set, as text: '' or '0 to 3, 7'."""
    ranges, before = [], -1
    for step in [*sorted(step for step in steps if step < end), end]:
        if step > before + 1:
            ranges.append((before + 1, step - 1))
        before = step
    return ', '.join(f'{a} to {b}' if b > a else f'{a}' for a, b in ranges)


def newest_checkpoint(workdir: str | os.PathLike) -> int | None:
    """The largest step with a checkpoint, by folder names only; None without checkpoints."""
    folder = Path(workdir) / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if re.fullmatch('[0-9]{1,18}', name)), default=None)


SECRET_WORD = re.compile(r'(secret|passw|credential|passphrase|(key|token)s?$)', re.IGNORECASE)
WORDS = re.compile(r'[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])')
USER_INFO = re.compile(r'(://)[^/?#\s]+@')  # no scheme: linear in the text
NUMBER = re.compile(r'[-+]?[\d.]+(e[-+]?\d+)?', re.IGNORECASE)
ASSIGNMENT = re.compile(r'(?<![\w.-])([\w.-]+)=([^&\s]+)')


def is_secret_name(name: str) -> bool:
    """Whether a name sounds secret: api_key, HF_TOKEN, accessToken, db.password; not tokenizer."""
    return any(SECRET_WORD.search(word) for word in WORDS.findall(name))


def redact(tree: Any, name: str = '') -> Any:
    """Copy a config as plain JSON values without secrets.

    Replaced by '***': strings in fields with secret-sounding names, user-info of URLs, name=secret
    pairs in strings, and values of secret-sounding environment variables. Numbers stay: max_tokens.
    """
    if hasattr(tree, 'items'):
        return {
            str(key): redact(value, str(key) if not is_secret_name(name) else name)
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return [redact(value, name) for value in tree]
    if isinstance(tree, (str, bytes, os.PathLike)):
        text = tree.decode(errors='replace') if isinstance(tree, bytes) else str(tree)
        return _redact_text(name, text)
    if tree is None or isinstance(tree, (bool, int, float)):
        return tree
    return plain_number(tree)


def _redact_text(name: str, text: str) -> str:
    text = _mask(name, text)
    for variable, value in os.environ.items():
        if is_secret_name(variable) and len(value) >= 8:
            text = text.replace(value, REDACTED)
    text = USER_INFO.sub(rf'\1{REDACTED}@', text)
    return ASSIGNMENT.sub(lambda found: f'{found[1]}={_mask(found[1], found[2])}', text)


def _mask(name: str, text: str) -> str:
    return REDACTED if is_secret_name(name) and not NUMBER.fullmatch(text) and text else text


def write_config(workdir: str | os.PathLike, config: Any, argv: Sequence[str] = ()) -> None:
    """Write config.json: resolved config, command line, commit and machine; secrets redacted."""
    from agentrl_jax.records import about  # imported here so that reading records needs no JAX

    path = Path(workdir) / CONFIG_FILE
    document = {
        'argv': redact_argv(argv),
        'config': redact(config),
        'commit': about.commit(),
        'machine': about.joined(path, about.machine()),
    }
    write_atomic(path, json.dumps(document, indent=2, sort_keys=True) + '\n')


def write_finished(workdir: str | os.PathLike, step: int) -> None:
    """Write finished.json, after all other files: without it, a run must be resumed."""
    write_atomic(Path(workdir) / FINISHED_FILE, json.dumps({'step': step}) + '\n')


def finished_step(workdir: str | os.PathLike) -> int | None:
    """The last step of a finished run; None if it is not finished."""
    path = Path(workdir) / FINISHED_FILE
    if not path.exists():
        return None
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get('step'), int):
        raise ValueError(f'{path}: expected a JSON object with the last step')
    return document['step']


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Redact a command line. Values follow '=' or are the next word: --api_key=x, --api_key x."""
    redacted, flag = [], ''
    for arg in argv:
        name, equals, value = arg.partition('=')
        redacted.append(f'{name}={redact(value, name)}' if equals else redact(arg, flag))
        flag = arg if arg.startswith('-') and not equals else ''
    return redacted
