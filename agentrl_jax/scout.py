"""Train a scout: a small network that learns a world without language, for demonstrations.

  python -m agentrl_jax.scout --config=configs/demo_sokoban.py --workdir=runs/sokoban
  python -m agentrl_jax.train --config=configs/demo_sokoban.py --workdir=runs/sokoban \\
      --config.clone.expert=scout

It plays the config's environment on the device, with its training levels and its limit of actions
per episode (agentrl_jax/imitation/scout.py). Progress lines show its success on held-out levels.
The same command resumes with the same bits. With clone.expert=scout a run in the same workdir uses
this scout; if there is none, it trains one first.
"""

from absl import flags
from ml_collections import config_flags

from agentrl_jax.run import command

if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, 'Config file, see configs/.')
    flags.DEFINE_string('workdir', None, 'Folder of the run that clones the scout.')
    flags.DEFINE_integer('steps', None, 'Actions to train for; default: 2 million.', 1)
    command.begin(__doc__, needs=('config', 'workdir'), says='agentrl_jax.scout: loading')

from typing import Any

from agentrl_jax.machine import processes
from agentrl_jax.run import cloning, config, scouting


def train(given: Any, workdir: str, steps: int | None) -> None:
    """Train or resume the scouts of all environments of a config. given: the ConfigDict."""
    cfg = config.read(given)
    with processes.exclusive_workdir(workdir) as folder:
        for member in cfg.members:
            limited = cloning.with_limits(member) if member.clone.has_limits else member
            scouting.trained_scout(limited, folder, steps)


if __name__ == '__main__':
    with command.running(flags.FLAGS.workdir):
        train(flags.FLAGS.config, flags.FLAGS.workdir, flags.FLAGS.steps)
