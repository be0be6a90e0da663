"""The beginning of a command: flags are read before anything heavy is imported.

  if __name__ == '__main__':
      flags.DEFINE_string('workdir', None, 'Folder of the run.')
      command.begin(__doc__, needs=('workdir',))
  import jax

What is wrong with a command line is reported in one line (exit code 2), --help has exit code 0,
and both answer before jax is imported.
"""

import argparse
import importlib.util
import os
import pathlib
import re
import shlex
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from absl import flags
from ml_collections import config_flags

from agentrl_jax.machine import files
from agentrl_jax.run.usage import SIZES, missing, refuse, wants_fallback
from agentrl_jax.settings import tree
from agentrl_jax.settings.callables import USERS

PLATFORMS = 'JAX_PLATFORMS'  # environment variable of jax: where it computes
CHOSEN = PLATFORMS in os.environ  # by whoever started this process
PROGRAMS = 'JAX_COMPILATION_CACHE_DIR'  # environment variable of jax: where programs are kept
HELP = ('--help', '-help', '-h', '--helpshort', '--helpfull')
ACCELERATORS = ('accel*', 'vfio', 'nvidia[0-9]*', 'kfd', 'dxg')  # below /dev
OWN_MODULES = ('__main__', 'agentrl_jax', sys.argv[0])  # flags of others are not listed
GOOGLE = '0x1ae0'  # vendor of TPUs on the PCI bus


def begin(doc: str, *, needs: Sequence[str] = (), says: str = '') -> None:
    """Parses the flags that the command has defined; ends it for --help and for what is wrong.

    needs: flags without which it cannot begin. says: printed at once, since the imports that follow
    take seconds. From then on Ctrl-C is reported in a line, unless interrupts.py handles it.
    """
    if any(word in HELP for word in sys.argv[1:]):
        print(help_text(doc))
        sys.exit(0)
    prepare_jax()  # a config file imports it
    sys.excepthook = report_interrupt
    sys.argv[1:] = modernised(underscored(sys.argv[1:]))  # config_flags reads it
    parse(sys.argv, needs)
    if says:
        print(says, file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with the errors and the flag spellings of the other commands."""

    def __init__(self, doc: str, command: str):
        super().__init__(
            prog=f'python -m {command}',
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_args(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        def underscored(word):
            name, equals, value = word.partition('=')
            return f'--{name[2:].replace("-", "_")}{equals}{value}' if name[:2] == '--' else word

        return super().parse_args(map(underscored, sys.argv[1:] if argv is None else argv))

    def error(self, message: str) -> NoReturn:
        refuse(f'{message}; --help shows how to call it')


def report_interrupt(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """An exception that ends the command: Ctrl-C needs no stack, nor does what is not installed."""
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.stderr, flush=True)
    elif isinstance(error, ImportError) and 'pip install' in missing(error):
        print(f'error: {missing(error)}', file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def check_backend() -> None:
    """Ends a command in one line where jax cannot start the backend that JAX_PLATFORMS asks for."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where its plugin is not installed
        asked = os.environ['JAX_PLATFORMS'] if 'JAX_PLATFORMS' in os.environ else ''
        said = ' '.join(str(error).split()).partition(' (you may need')[0][:300]
        refuse(
            f'JAX_PLATFORMS={asked!r} names a backend that jax cannot start'
            f'{f" ({said})" if said else ""}: pip install "jax[cuda13]" for GPUs, "jax[tpu]" for '
            'TPUs, or set JAX_PLATFORMS=cpu'
        )


def config_of_run() -> str | None:
    """The default of --config: the config of the run in --workdir; None where --help is asked for.

    Reading it takes the import of jax, which help does without.
    """
    if any(word in HELP for word in sys.argv[1:]):
        return None
    prepare_jax()
    from agentrl_jax.run import saved_config

    sys.argv[1:] = modernised(sys.argv[1:])
    return saved_config.default(sys.argv)


def define_config_of_run() -> None:
    """--config, by default the config of the run in --workdir."""
    help_ = "Config file; default: that of the workdir's run."
    try:
        config_flags.DEFINE_config_file('config', config_of_run(), help_)
    except (flags.Error, *USERS) as error:  # a default reads --config.field=value at once
        refuse(one_line(error, sys.argv))


def define_best() -> None:
    """--best: the policy of the best validation instead of the newest checkpoint."""
    flags.DEFINE_bool('best', False, 'Take the policy of the best validation (checkpoint.best).')


def define_fallback() -> None:
    """--fallback: what to do where the newest checkpoint is damaged."""
    help_ = 'Where checkpoints are damaged, take the newest one that is whole.'
    flags.DEFINE_bool('fallback', wants_fallback(()), help_)


def parse(argv: Sequence[str], needs: Sequence[str] = ()) -> None:
    """flags.FLAGS of the command line; ends with one line if it is invalid."""
    for path in config_files(argv):  # configs/demo.py imports configs.small, from any folder
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(path))))
    try:
        register_classes(argv)
        left = flags.FLAGS(list(argv), known_only=False)[1:]
        if left:
            refuse(f'unknown argument {left[0]!r}; --help lists the flags')
        check_config_file()
        for name in needs:
            if flags.FLAGS[name].value in (None, ''):
                refuse(f'--{name} is needed: {flags.FLAGS[name].help}')
        check_checkpoint()
        if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
            check_sizes(flags.FLAGS.config, flags.FLAGS['config'].override_values)
    except (flags.Error, *USERS) as error:
        refuse(error_of_file(error, argv) or one_line(error, argv))


def underscored(words: Sequence[str]) -> list[str]:
    """Return the command line with underscores in the names of known flags.

    Underscores are documented; hyphens are accepted.
    """
    spelled = []
    for word in words:
        dashes, name, rest = re.fullmatch(r'(--?|)([^=]*)(.*)', word, re.DOTALL).groups()
        ours = name.replace('-', '_')
        known = {ours.partition('.')[0], ours.removeprefix('no')} & set(flags.FLAGS)
        spelled.append(f'{dashes}{ours}{rest}' if dashes and known else word)
    return spelled


def modernised(words: Sequence[str]) -> list[str]:
    """Return the command line with config fields of earlier versions as those of this one."""
    if not any(re.match('--?config[.]', word) for word in words):
        return list(words)
    from agentrl_jax.run import migration

    try:
        return migration.arguments(words)
    except ValueError as error:
        refuse(str(error))


def check_checkpoint() -> None:
    """Reject flags that choose a checkpoint if no run is named."""
    known = flags.FLAGS
    if 'workdir' in known and known['workdir'].value in (None, ''):
        for name in ('step', 'best'):
            if name in known and known[name].value not in (None, False):
                refuse(f'--{name} chooses a checkpoint of a run: name its folder with --workdir')


def register_classes(argv: Sequence[str]) -> None:
    """Registers classes outside the package, so that flags can set their fields."""
    named = re.compile(r'--?config\.(env\.name|algorithm)=(.+:.+)').fullmatch
    if fields := dict(match.groups() for match in map(named, argv) if match):
        from agentrl_jax.run import outside

        outside.register(fields)


def check_config_file() -> None:
    """Reject a --config file that is missing or returns no config."""
    if 'config' not in flags.FLAGS or not flags.FLAGS['config'].present:
        return
    path = flags.FLAGS['config'].config_filename
    name = path.partition(':')[0]
    if os.path.isdir(name):
        raise ValueError(f'--config={name} is a folder; name a file in it')
    if not os.path.exists(name):
        raise FileNotFoundError(f'no config file {path!r}; see configs/')
    made = flags.FLAGS['config'].value
    if not hasattr(made, 'update_from_flattened_dict'):
        kind = type(made).__name__
        raise ValueError(f'{path}: get_config must return a ConfigDict, and returns a {kind}')


def config_files(argv: Sequence[str]) -> list[str]:
    """Paths given to --config, without the argument that follows a colon."""
    named = [word for i, word in enumerate(argv) if argv[i - 1].lstrip('-') == 'config']
    named += [word.partition('=')[2] for word in argv if re.match('--?config=', word)]
    return [name.partition(':')[0] for name in named]


def error_of_file(error: BaseException, argv: Sequence[str]) -> str:
    """What went wrong in the file of --config, and in which line; '' if nothing did."""
    causes = [error]
    while within := causes[-1].__cause__ or causes[-1].__context__:  # flags wrap what a file raises
        causes.append(within)
    for path in config_files(argv)[-1:]:
        for cause in reversed(causes):
            if isinstance(cause, SyntaxError):
                return f'{cause.filename or path}, line {cause.lineno or 1}: {cause.msg}'
            frames = traceback.extract_tb(cause.__traceback__)
            own = [x for x in frames if os.path.abspath(x.filename) == os.path.abspath(path)]
            if own:
                said = ' '.join(str(cause).split())
                return f'{path}, line {own[-1].lineno}: {type(cause).__name__}: {said}'
    return ''


def check_sizes(cfg: Any, given: Mapping[str, Any]) -> None:
    """Refuses sizes of a random model where another one is loaded, which has its own.

    given: fields set in addition to those of the config file, whose sizes count if nothing is
    loaded.
    """
    if 'model' not in cfg or not cfg.model.path:
        return
    for name in (f'model.{size}' for size in SIZES):
        if name in given:
            raise ValueError(
                f'{name}={given[name]!r} is a size of a model that is drawn, and '
                f'model.path={cfg.model.path!r} brings its own: leave one of them out'
            )


def known_fields() -> dict[str, Any]:
    """Return the default config as {dotted name: value}."""
    from agentrl_jax.run import config

    return tree.flat(config.get_config())


def one_line(error: BaseException, argv: Sequence[str] = ()) -> str:
    """An exception on one line; argv: locates a field that the config lacks."""
    text = str(error.args[0] if error.args else error).replace('\\n', '\n').replace("\\'", "'")
    field = re.search(r"'(\w+)'\s+Did you mean \"(\w+)\"", text)
    field = field or re.fullmatch(r"[\"']*(\w+)[\"']*", text)
    if field is None:
        return ' '.join(text.split())
    given = re.compile(rf'--?config\.((?:\w+\.)*{field[1]})(?:\.|=|$)')
    names = [match[1] for match in map(given.match, argv) if match]
    return tree.no_field(names[0] if names else field[1], known_fields())


def show_frames_of(path: str) -> None:
    """A traceback that goes through the given file begins there: internal frames are hidden."""
    wanted = os.path.abspath(path)

    def hook(kind, error, trace):
        frame = trace
        while frame is not None and os.path.abspath(frame.tb_frame.f_code.co_filename) != wanted:
            frame = frame.tb_next
        error = error if frame is None else error.with_traceback(frame)
        traceback.print_exception(kind, error, frame or trace, chain=frame is None)

    sys.excepthook = hook


def help_text(doc: str) -> str:
    """The command's own words and its flags."""
    lines = [doc.strip(), '', 'flags:']
    for name in sorted(flags.FLAGS):
        if not flags.FLAGS.find_module_defining_flag(name).startswith(OWN_MODULES):
            continue
        flag = flags.FLAGS[name]
        default = '' if flag.default in (None, '', False, []) else f' (default {flag.default})'
        lines.append(f'  --{name}: {flag.help}{default}')
    return '\n'.join(lines)


def resume_line(argv: Sequence[str], module: str) -> str:
    """The command that goes on with this run, to be pasted into any shell."""
    return shlex.join(['python', '-m', module, *argv[1:]])


def prepare_jax() -> None:
    """What must be so before jax is imported: it reads the environment once."""
    skip_tpu_search()
    if PROGRAMS not in os.environ:
        return
    try:
        os.environ[PROGRAMS] = files.in_mounts(os.environ[PROGRAMS])
    except ValueError as error:
        refuse(f'{PROGRAMS}={error}')


def skip_tpu_search() -> None:
    """Where libtpu is installed but no accelerator is there, jax does not look for TPUs.

    libtpu prints five lines of errors when it finds none.
    """
    if PLATFORMS in os.environ or importlib.util.find_spec('libtpu') is None:
        return
    vendors = pathlib.Path('/sys/bus/pci/devices').glob('*/vendor')
    if any(path.read_text().strip() == GOOGLE for path in vendors):
        return
    if not any(found for name in ACCELERATORS for found in pathlib.Path('/dev').glob(name)):
        os.environ[PLATFORMS] = 'cpu'
