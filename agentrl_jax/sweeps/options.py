"""The flags of a sweep."""

from absl import flags
from ml_collections import config_flags


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    here = {'flag_values': values}
    text, number, several = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_multi_string
    config_flags.DEFINE_config_file('config', None, 'Config that all runs start from.', **here)
    text('sweep', None, 'Python file with sweep(add) or get_hyper(h).', **here)
    text('workdir', None, 'Folder that gets a folder for each run.', **here)
    launchers = ['local', 'print', 'slurm']
    flags.DEFINE_enum('launcher', 'local', launchers, 'How runs are started.', **here)
    number('jobs', 1, 'Runs that train at once.', lower_bound=1, **here)
    number('retries', 2, 'How often a run that failed is tried again.', lower_bound=0, **here)
    only = 'Runs to train: a name or its beginning, or field=value,field=value; all if left out.'
    several('only', [], only, **here)
    text('gpus', '', 'GPUs to share out among the jobs: 0,1,2,3.', **here)
    several('sbatch', [], 'More for SLURM: --sbatch=--gres=gpu:1.', **here)
    flags.DEFINE_bool('submit', False, 'slurm: submit the script as well.', **here)
