"""The flags of a sweep."""

from absl import flags
from ml_collections import config_flags


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    def define(kind, name, default, *rest, **options):
        kind(name, default, *rest, flag_values=values, **options)

    define(config_flags.DEFINE_config_file, 'config', None, 'Config that all runs start from.')
    define(flags.DEFINE_string, 'sweep', None, 'Python file with sweep(add) or get_hyper(h).')
    define(flags.DEFINE_string, 'workdir', None, 'Folder that gets a folder for each run.')
    define(
        flags.DEFINE_enum, 'launcher', 'local', ['local', 'print', 'slurm'], 'How runs are started.'
    )
    define(flags.DEFINE_integer, 'jobs', 1, 'Runs that train at once.', lower_bound=1)
    define(
        flags.DEFINE_integer,
        'retries',
        2,
        'How often a run that failed is tried again.',
        lower_bound=0,
    )
    define(
        flags.DEFINE_multi_string,
        'only',
        [],
        'Runs to train: a name or its beginning, or field=value,field=value; all if left out.',
    )
    define(flags.DEFINE_string, 'gpus', '', 'GPUs to share out among the jobs: 0,1,2,3.')
    define(flags.DEFINE_multi_string, 'sbatch', [], 'More for SLURM: --sbatch=--gres=gpu:1.')
    define(flags.DEFINE_bool, 'submit', False, 'slurm: submit the script as well.')
