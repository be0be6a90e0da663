"""The flags of a sweep."""

from absl import flags
from ml_collections import config_flags


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    here = {'flag_values': values}
    text, number, several = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_multi_string
    config_flags.DEFINE_config_file('config', None, 'Base config of all runs.', **here)
    text('sweep', None, 'Python file with sweep(add) or get_hyper(h).', **here)
    text('workdir', None, 'Folder that will contain one folder per run.', **here)
    launchers = ['local', 'print', 'slurm']
    flags.DEFINE_enum('launcher', 'local', launchers, 'How runs are started.', **here)
    number('jobs', 1, 'Number of runs to train in parallel.', lower_bound=1, **here)
    number('retries', 2, 'Number of retries for a failed run.', lower_bound=0, **here)
    only = 'Runs to train: the start of a name, or field=value,field=value. Default: all.'
    several('only', [], only, **here)
    text('gpus', '', 'GPUs to divide among the jobs: 0,1,2,3.', **here)
    several('sbatch', [], 'Additional options for SLURM: --sbatch=--gres=gpu:1.', **here)
    flags.DEFINE_bool('submit', False, 'slurm: submit the script as well.', **here)
