"""From a sweep file to resolved configs, names and commands. Writes no files.

A sweep file defines one of two functions:

  def sweep(add):                 def get_hyper(h):
      for seed in range(3):           return h.product([
          add({                           h.sweep('loss.clip_high', (0.2, 0.28)),
              'loss.clip_high': 0.28,     h.sweep('seed', range(3)),
              'seed': seed,           ])
          })

Both give a list of overrides {dotted field: value}; a `config.` prefix of a field is dropped.
"""

import collections
import copy
import functools
import importlib.util
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.machine import files
from agentrl_jax.run import config
from agentrl_jax.run.command import check_sizes
from agentrl_jax.settings import tree
from agentrl_jax.sweeps.status import Overrides, Run

TRAIN = 'agentrl_jax.train'
HASH_DIGITS, VALUE_LENGTH, NAME_LENGTH = 10, 24, 80
UNSAFE = re.compile(r'[^A-Za-z0-9._+-]+')  # characters that are replaced in folder names
ON_COMMAND_LINE = (bool, int, float, str, tuple)  # types that --config.field=value supports


class Hyper:
    """XManager's hyper: every function returns a list of overrides."""

    @staticmethod
    def sweep(field: str, values: Iterable[Any]) -> list[Overrides]:
        """One run for each value."""
        return [{field: value} for value in values]

    @staticmethod
    def product(sweeps: Iterable[list[Overrides]]) -> list[Overrides]:
        """Every combination; the last sweep changes fastest."""
        return [_merge(parts) for parts in itertools.product(*sweeps)]

    @staticmethod
    def zip(sweeps: Iterable[list[Overrides]]) -> list[Overrides]:
        """The first of each, the second of each, ...; all must have the same length."""
        return [_merge(parts) for parts in zip(*sweeps, strict=True)]

    @staticmethod
    def chain(sweeps: Iterable[list[Overrides]]) -> list[Overrides]:
        """One sweep after the other."""
        return list(itertools.chain.from_iterable(sweeps))


def _merge(parts: Iterable[Overrides]) -> Overrides:
    union: Overrides = {}
    for part in parts:
        clash = sorted(union.keys() & part.keys())
        if clash:
            raise ValueError(f'{", ".join(clash)} is set by two factors of the same sweep')
        union |= part
    return union


def load(path: str | Path) -> list[Overrides]:
    """The overrides of a sweep file, in its order."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f'--sweep={path} is a folder; pass a file')
    if not path.is_file():
        raise ValueError(f'--sweep={path}: no such file; see configs/sweeps/ for examples')
    spec = importlib.util.spec_from_file_location('sweep_file', path)
    if spec is None:
        raise ValueError(f'--sweep={path} is not a Python file: its name must end in .py')
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        line = f', line {error.lineno}' if isinstance(error, SyntaxError) else ''
        raise ValueError(f'{path}{line}: {error.msg}') from error
    functions = [name for name in ('sweep', 'get_hyper') if hasattr(module, name)]
    if len(functions) != 1:
        defined = 'both are' if functions else 'neither is'
        raise ValueError(f'{path} must define sweep(add) or get_hyper(h); {defined} there')
    runs: list[Overrides] = []
    if functions == ['sweep']:
        module.sweep(lambda overrides={}, /, **fields: runs.append((overrides, fields)))
        runs = [o | f if isinstance(o, Mapping) else o for o, f in runs]
    else:
        runs = module.get_hyper(Hyper)
    listed = isinstance(runs, Sequence) and all(isinstance(one, Mapping) for one in runs)
    if not runs or not listed:
        raise ValueError(f'{path}: {functions[0]} must give a list of overrides, not {runs!r}')
    return [dict(overrides) for overrides in runs]


def expand(
    base: Any, listed: Sequence[Overrides], *, source: str, taken: Iterable[str] = ()
) -> list[Run]:
    """Return one Run per overrides. source: the file name for error messages.

    taken: fields that the command line sets for all runs; the sweep must not set them.
    """
    taken, resolved, numbers = set(taken), [], {}
    for number, overrides in enumerate(listed, 1):
        where = f'{source}, run {number}'
        cfg, settings = resolve(base, overrides, where)
        clash = sorted(taken & settings.keys())
        if clash:
            raise ValueError(f'{where} sets {", ".join(clash)}, but the command line also does')
        try:
            check_sizes(cfg, settings)
            config.read(cfg)
            full = config.as_json(config.effective(cfg))
            digest = files.config_hash(full)
        except ValueError as error:
            raise ValueError(f'{where} ({_text_of(settings)}): {error}') from error
        if digest in numbers:
            raise ValueError(
                f'{where} ({_text_of(settings)}) has the same config as run {numbers[digest]}: '
                'remove one of them'
            )
        numbers[digest] = number
        resolved.append((settings, full, cfg.steps))
    names = run_names([settings for settings, _, _ in resolved], list(numbers))
    return [Run(name, *one) for name, one in zip(names, resolved, strict=True)]


def resolve(base: Any, overrides: Overrides, where: str) -> tuple[Any, Overrides]:
    """Return (a copy of the config with the overrides, the overrides as stored in the config)."""
    cfg, settings, known = copy.deepcopy(base), {}, tree.flat(base)
    for name, value in overrides.items():
        name = name.removeprefix('config.')
        inside = [other for other in known if other.startswith(f'{name}.')]
        if inside:
            raise ValueError(
                f'{where} sets {name}, which is a group: set one field of it, such as {inside[0]}'
            )
        if name not in known:
            raise ValueError(f'{where} sets {name}, but {tree.unknown_field_message(name, known)}')
        *groups, leaf = name.split('.')
        parent = functools.reduce(lambda part, key: part[key], groups, cfg)
        value, old = _plain(value), parent[leaf]
        if isinstance(old, bool) != isinstance(value, bool) and old is not None:
            raise ValueError(f'{where} sets {name}={value!r}, but the config has {old!r}')
        try:
            parent[leaf] = value
        except (TypeError, ValueError) as error:
            raise ValueError(f'{where} sets {name}={value!r}: {error}') from error
        settings[name] = _plain(parent[leaf])
        if not _fits_command_line(settings[name]):
            raise ValueError(f'{where} sets {name}={value!r}: command lines cannot express it')
    return cfg, settings


def _plain(value: Any) -> Any:
    """Convert NumPy scalars to numbers and lists to tuples, as in configs."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(part) for part in value)
    return value.item() if hasattr(value, 'item') else value


def _fits_command_line(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_fits_command_line(part) for part in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, ON_COMMAND_LINE) and '\0' not in str(value)


def run_names(listed: Sequence[Overrides], digests: Sequence[str]) -> list[str]:
    """Folder names such as 'clip_high=0.28,seed=1-3f2a9c1b04': the overrides, then the hash.

    Overrides that all runs share are left out, except the seed. So are the last ones if they
    exceed NAME_LENGTH.
    """
    fields = list(dict.fromkeys(field for overrides in listed for field in overrides))
    leaves = collections.Counter(field.rsplit('.', 1)[-1] for field in fields)

    def word(field: str, overrides: Overrides) -> str:
        leaf = field.rsplit('.', 1)[-1]
        label = leaf if leaves[leaf] == 1 else field
        return f'{label}={_word(overrides[field])}' if field in overrides else ''

    columns = {field: [word(field, overrides) for overrides in listed] for field in fields}
    if len(listed) > 1:
        columns = {
            field: words
            for field, words in columns.items()
            if field == 'seed' or len(set(words)) > 1
        }
    names = []
    for number, digest in enumerate(digests):
        words = {field: column[number] for field, column in columns.items() if column[number]}
        while len(','.join(words.values())) > NAME_LENGTH:
            del words[next(field for field in reversed(words) if field != 'seed')]
        names.append(f'{",".join(words.values()) or "base"}-{digest[:HASH_DIGITS]}')
    return names


def _word(value: Any) -> str:
    text = value.rstrip('/').rsplit('/', 1)[-1] if isinstance(value, str) else str(value)
    return UNSAFE.sub('_', text)[:VALUE_LENGTH].strip('_')


def _text_of(overrides: Overrides) -> str:
    return ', '.join(f'{name}={value!r}' for name, value in overrides.items()) or 'no overrides'


def arguments(overrides: Overrides) -> list[str]:
    """Overrides in ml_collections' syntax; '=' also permits values that start with '-'."""
    return [f'--config.{name}={value}' for name, value in overrides.items()]


def command(
    run: Run, config_file: str, workdir: str, common: Overrides, *, python: str = 'python'
) -> list[str]:
    """The command that starts or resumes a run; common: overrides from the command line."""
    words = [
        python,
        '-m',
        TRAIN,
        f'--config={config_file}',
        f'--workdir={workdir}/{run.name}',
        *arguments({**common, **run.overrides}),
    ]
    check_one_line(words)
    return words


def check_one_line(words: Iterable[str]) -> None:
    """Raise ValueError for words with line breaks: commands are printed one per line."""
    broken = [word for word in words if '\n' in word or '\r' in word]
    if broken:
        raise ValueError(f'{broken[0]!r} has a line break, but commands are printed one per line')


def matches(run: Run, text: str) -> bool:
    """Whether a run has all values of `field=value,...`; fields by full name or its last part.

    If several fields have the same last part (optim.lr, clone.lr), the one set by the sweep counts.
    """
    pairs = [part.partition('=') for part in text.split(',')]
    if not all(name and equals for name, equals, _ in pairs):
        return False
    values = tree.flat(run.config)
    return all(
        (field := _full_name(name, run, values)) is not None and _equal(values[field], value)
        for name, _, value in pairs
    )


def _full_name(name: str, run: Run, values: Mapping[str, Any]) -> str | None:
    name = name.removeprefix('config.')
    if name in values:
        return name
    for known in (run.overrides, values):
        matching = [field for field in known if field.rsplit('.', 1)[-1] == name]
        if len(matching) == 1:
            return matching[0]
    return None


def _equal(value: Any, text: str) -> bool:
    """Whether a text spells a value: 1e-3 equals 0.001, and true equals True."""
    if isinstance(value, bool | None):
        return str(value).lower() == text.lower()
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value) == text
