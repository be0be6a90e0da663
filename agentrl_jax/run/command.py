"""Start a command: parse its flags before heavy imports.

  if __name__ == '__main__':
      flags.DEFINE_string('workdir', None, 'Folder of the run.')
      command.begin(__doc__, needs=('workdir',))
  import jax

An invalid command line prints one line and exits with code 2; --help exits with code 0. Both happen
before jax is imported.
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import re
import shlex
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags, logging
from ml_collections import config_flags

from agentrl_jax.machine import files
from agentrl_jax.run.usage import SIZES, missing, one_line_errors, refuse, wants_fallback
from agentrl_jax.settings import tree

PLATFORMS = 'JAX_PLATFORMS'  # environment variable of jax: where it computes
PLATFORM_WAS_SET = PLATFORMS in os.environ  # set by the caller
PROGRAMS = 'JAX_COMPILATION_CACHE_DIR'  # environment variable of jax: cache of compiled programs
HELP = ('--help', '-help', '-h', '--helpshort', '--helpfull')
ACCELERATORS = ('accel*', 'vfio', 'nvidia[0-9]*', 'kfd', 'dxg')  # below /dev
FLAG_MODULES = ('__main__', 'agentrl_jax', sys.argv[0])  # flags of other modules are not listed
GOOGLE = '0x1ae0'  # vendor of TPUs on the PCI bus


def begin(doc: str, *, needs: Sequence[str] = (), says: str = '') -> None:
    """Parse the command's flags; exit after --help or an invalid command line.

    needs: required flags. says: text printed at once, since the following imports take seconds.
    From here on, Ctrl-C prints one line, unless interrupts.py handles it.
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
    """An ArgumentParser with the same errors and flag spellings as the other commands."""

    def __init__(self, doc: str, command: str, arguments: str):
        def form(prog):
            return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=108)

        prog = f'python -m {command}'
        usage = f'{prog} {arguments} [options]'
        super().__init__(prog, usage, doc, formatter_class=form, allow_abbrev=False)

    def parse_args(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        def underscored(word):
            name, equals, value = word.partition('=')
            return f'--{name[2:].replace("-", "_")}{equals}{value}' if name[:2] == '--' else word

        return super().parse_args(map(underscored, sys.argv[1:] if argv is None else argv))

    def error(self, message: str) -> NoReturn:
        refuse(f'{message}; see --help')


def report_interrupt(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """Print a final exception; Ctrl-C and missing packages need no stack trace."""
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.stderr, flush=True)
    elif isinstance(error, ImportError) and 'pip install' in missing(error):
        print(f'error: {missing(error)}', file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def check_backend() -> None:
    """Exit with one line if jax cannot start the backend in JAX_PLATFORMS."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter if its plugin is not installed
        platforms = os.environ['JAX_PLATFORMS'] if 'JAX_PLATFORMS' in os.environ else ''
        reason = ' '.join(str(error).split()).partition(' (you may need')[0][:300]
        refuse(
            f'JAX_PLATFORMS={platforms!r} names a backend that jax cannot start'
            f'{f" ({reason})" if reason else ""}: pip install "jax[cuda13]" for GPUs, "jax[tpu]" '
            'for TPUs, or set JAX_PLATFORMS=cpu'
        )


@contextlib.contextmanager
def running(workdir: str | os.PathLike | None = None) -> Iterator[None]:
    """Context of a command that uses jax; its errors end the process with one line.

    workdir: see usage.one_line_errors.
    """
    logging.set_verbosity(logging.WARNING)
    check_backend()
    with one_line_errors(workdir):
        yield


def config_of_run() -> str | None:
    """Return the default of --config: the config of the run in --workdir. None for --help.

    Reading it imports jax, which --help does not need.
    """
    if any(word in HELP for word in sys.argv[1:]):
        return None
    prepare_jax()
    from agentrl_jax.run import saved_config

    sys.argv[1:] = modernised(sys.argv[1:])
    return saved_config.default(sys.argv)


def define_config_of_run() -> None:
    """Define --config; its default is the config of the run in --workdir."""
    help_ = "Config file; default: the config of the workdir's run."
    try:
        config_flags.DEFINE_config_file('config', config_of_run(), help_)
    except Exception as error:  # the default reads --config.field=value immediately
        refuse(one_line(error, sys.argv))


def define_best() -> None:
    """Define --best: use the policy of the best validation instead of the newest checkpoint."""
    flags.DEFINE_bool('best', False, 'Use the policy of the best validation (checkpoint.best).')


def define_fallback() -> None:
    """Define --fallback: what to do if the newest checkpoint is damaged."""
    help_ = 'If checkpoints are damaged, use the newest intact one.'
    flags.DEFINE_bool('fallback', wants_fallback(()), help_)


def parse(argv: Sequence[str], needs: Sequence[str] = ()) -> None:
    """Parse the command line into flags.FLAGS; exit with one line if it is invalid."""
    for path in config_files(argv):  # configs/demo.py imports configs.small, from any folder
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(path))))
    try:
        register_classes(argv)
        unknown = flags.FLAGS(list(argv), known_only=False)[1:]
        if unknown:
            refuse(f'unknown argument {unknown[0]!r}; --help lists the flags')
        check_config_file()
        for name in needs:
            if flags.FLAGS[name].value in (None, ''):
                refuse(f'missing --{name}: {flags.FLAGS[name].help}')
        check_checkpoint()
        if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
            check_sizes(flags.FLAGS.config, flags.FLAGS['config'].override_values)
    except Exception as error:  # a config file may raise anything
        refuse(error_of_file(error, argv) or one_line(error, argv))


def underscored(words: Sequence[str]) -> list[str]:
    """Return the command line with underscores in the names of known flags.

    The documentation uses underscores; hyphens are accepted too.
    """
    spelled = []
    for word in words:
        dashes, name, rest = re.fullmatch(r'(--?|)([^=]*)(.*)', word, re.DOTALL).groups()
        ours = name.replace('-', '_')
        known = {ours.partition('.')[0], ours.removeprefix('no')} & set(flags.FLAGS)
        spelled.append(f'{dashes}{ours}{rest}' if dashes and known else word)
    return spelled


def modernised(words: Sequence[str]) -> list[str]:
    """Return the command line with config fields of earlier versions migrated to this one."""
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
                refuse(f'--{name} selects a checkpoint of a run: set --workdir to its folder')


def register_classes(argv: Sequence[str]) -> None:
    """Register classes from outside the package, so that flags can set their fields."""
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
        raise ValueError(f'--config={name} is a folder; pass a file in it')
    if not os.path.exists(name):
        raise FileNotFoundError(f'no config file {path!r}; see configs/')
    config = flags.FLAGS['config'].value
    if not hasattr(config, 'update_from_flattened_dict'):
        kind = type(config).__name__
        raise ValueError(f'{path}: get_config must return a ConfigDict, not a {kind}')


def config_files(argv: Sequence[str]) -> list[str]:
    """Return the paths passed to --config, without the argument after a colon."""
    named = [word for i, word in enumerate(argv) if argv[i - 1].lstrip('-') == 'config']
    named += [word.partition('=')[2] for word in argv if re.match('--?config=', word)]
    return [name.partition(':')[0] for name in named]


def error_of_file(error: BaseException, argv: Sequence[str]) -> str:
    """Describe an error in the --config file and its line; '' if the file is not involved."""
    causes = [error]
    while within := causes[-1].__cause__ or causes[-1].__context__:  # flags wrap a file's errors
        causes.append(within)
    for path in config_files(argv)[-1:]:
        for cause in reversed(causes):
            if isinstance(cause, SyntaxError):
                return f'{cause.filename or path}, line {cause.lineno or 1}: {cause.msg}'
            frames = traceback.extract_tb(cause.__traceback__)
            lines = [x for x in frames if os.path.abspath(x.filename) == os.path.abspath(path)]
            if lines:
                text = ' '.join(str(cause).split())
                return f'{path}, line {lines[-1].lineno}: {type(cause).__name__}: {text}'
    return ''


def check_sizes(cfg: Any, given: Mapping[str, Any]) -> None:
    """Reject sizes for a random model if a model is loaded, since that has its own sizes.

    given: fields set on the command line. The config file may set sizes: they only apply if no
    model is loaded.
    """
    if 'model' not in cfg or not cfg.model.path:
        return
    for name in (f'model.{size}' for size in SIZES):
        if name in given:
            raise ValueError(
                f'{name}={given[name]!r} is for random weights, but '
                f'model.path={cfg.model.path!r} has its own sizes: remove one of them'
            )


def one_line(error: BaseException, argv: Sequence[str] = ()) -> str:
    """Format an exception on one line. argv: used to locate an unknown config field."""
    text = str(error.args[0] if error.args else error).replace('\\n', '\n').replace("\\'", "'")
    field = re.search(r"'(\w+)'\s+Did you mean \"(\w+)\"", text)
    field = field or re.fullmatch(r"[\"']*(\w+)[\"']*", text)
    if field is None:
        return ' '.join(text.split())
    pattern = re.compile(rf'--?config\.((?:\w+\.)*{field[1]})(?:\.|=|$)')
    names = [match[1] for match in map(pattern.match, argv) if match]
    from agentrl_jax.run import config

    fields = tree.flat(config.get_config())
    return tree.unknown_field_message(names[0] if names else field[1], fields)


def show_frames_of(path: str) -> None:
    """Start tracebacks that pass through the given file there, which hides internal frames."""
    source = os.path.abspath(path)

    def hook(kind, error, trace):
        frame = trace
        while frame is not None and os.path.abspath(frame.tb_frame.f_code.co_filename) != source:
            frame = frame.tb_next
        error = error if frame is None else error.with_traceback(frame)
        traceback.print_exception(kind, error, frame or trace, chain=frame is None)

    sys.excepthook = hook


def help_text(doc: str) -> str:
    """Return the help text: the command's docstring and its flags."""
    lines = [doc.strip(), '', 'flags:']
    for name in sorted(flags.FLAGS):
        if not flags.FLAGS.find_module_defining_flag(name).startswith(FLAG_MODULES):
            continue
        flag = flags.FLAGS[name]
        default = '' if flag.default in (None, '', False, []) else f' (default {flag.default})'
        lines.append(f'  --{name}: {flag.help}{default}')
    return '\n'.join(lines)


def resume_line(argv: Sequence[str], module: str) -> str:
    """Return the shell command that resumes this run."""
    return shlex.join(['python', '-m', module, *argv[1:]])


def prepare_jax() -> None:
    """Set up the environment before jax is imported, since jax reads it only once."""
    skip_tpu_search()
    if PROGRAMS not in os.environ:
        return
    try:
        os.environ[PROGRAMS] = files.in_mounts(os.environ[PROGRAMS])
    except ValueError as error:
        refuse(f'{PROGRAMS}={error}')


def skip_tpu_search() -> None:
    """Keep jax from searching for TPUs if libtpu is installed but there is no accelerator.

    Otherwise libtpu prints five lines of errors.
    """
    if PLATFORMS in os.environ or importlib.util.find_spec('libtpu') is None:
        return
    vendors = pathlib.Path('/sys/bus/pci/devices').glob('*/vendor')
    if any(path.read_text().strip() == GOOGLE for path in vendors):
        return
    if not any(device for name in ACCELERATORS for device in pathlib.Path('/dev').glob(name)):
        os.environ[PLATFORMS] = 'cpu'
