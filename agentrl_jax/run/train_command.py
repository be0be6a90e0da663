"""The command line of training."""

import sys
from collections.abc import Callable
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from agentrl_jax.run import command, usage


def start(doc: str) -> None:
    """Parse the flags and connect the processes of the run, before heavy imports."""
    config_flags.DEFINE_config_file('config', None, 'Config file, see configs/.')
    flags.DEFINE_string('workdir', None, 'Folder of the run.')
    flags.DEFINE_string('replay', '', "Train from a run's log of replies, without its hosts.")
    flags.DEFINE_bool('show_config', False, 'Print the config that the run would have, and exit.')
    command.define_fallback()
    shows = {'--show_config', '--show-config'} & set(sys.argv)
    needs = ('config',) if shows else ('config', 'workdir')
    command.begin(doc, needs=needs, says='agentrl_jax.train: loading')
    from agentrl_jax.machine import processes

    # Before other imports: importing gymnax computes a constant, which starts the backend.
    try:
        processes.initialize_distributed()
    except ValueError as error:
        usage.refuse(str(error))


def main(train: Callable[..., int], check: Callable[[Any], None]) -> None:
    """Call train with the flags. check: raises for a config that does not fit this machine."""
    from agentrl_jax.machine import checkpoint, processes
    from agentrl_jax.run import config

    logging.set_verbosity(logging.WARNING)  # Orbax reports every stage of every save
    args = flags.FLAGS
    command.check_backend()
    try:
        if args.show_config:
            print(config.show(args.config))
            config.read(args.config)
            sys.exit(0)
        with usage.checked():
            config.read(args.config)
            check(args.config)
        code = train(args.config, args.workdir, fallback=args.fallback, replay=args.replay)
    except checkpoint.Damaged as error:
        processes.fail(error, processes.EXIT_DAMAGED)
    except (ValueError, OSError, RuntimeError) as error:
        processes.fail(error, usage.code_of(error), workdir=args.workdir)
    sys.exit(code)
