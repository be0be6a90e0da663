"""Test tpu_scripts without a cloud: dry runs, a simulated gcloud, and two hosts on this machine.

`python tests/ops/test_tpu_scripts.py` regenerates the expected dry runs in tests/data/dry_runs.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tarfile

import gcloud_flags
import pytest
from tpu_bench import FAKE_TRAINING, ROOT, SCRIPTS, Bench, eventually, group, vanish

VERBS = 'create setup sync run launch logs status stop unlock babysit sweep profile doctor delete'
VERBS = tuple(VERBS.split())
TAKE_A_COMMAND = ('run', 'launch', 'babysit', 'profile', 'sweep')
PROVIDERS = {
    'tpu_vm': {},
    'tpu_vm_queued': {'TPU_MODE': 'queued'},
    'gce': {'TPU_TYPE': 'ct6e-standard-4t', 'TPU_RUNTIME': 'images/tpu', 'TPU_TOPOLOGY': '2x4'},
    'gce_one': {'TPU_TYPE': 'ct6e-standard-4t', 'TPU_RUNTIME': 'images/tpu', 'TPU_HOSTS': '1'},
    'local': {'TPU_LOCAL_ROOT': '/hosts', 'TPU_LOCAL_PYTHON': '/usr/bin/python3'},
}
ONE_HOST = {'TPU_HOSTS': '1', 'TPU_TYPE': 'v5litepod-8'}
DRY_RUNS = ROOT / 'tests' / 'data' / 'dry_runs'
NASTY = ['', ' ', "it's", '"', '$HOME `id` $(id)', 'two\nlines\n', *'\\*~!ü-', 'a=b']
TRAIN = ['python', '-m', 'agentrl_jax.train', '--config=configs/demo.py']
TRAIN += ['--workdir=gs://my-bucket/a run']
SWEEP = (
    "printf '%s\\n' \"/usr/bin/python -m t --workdir='gs://my-bucket/a run'\""
    " \"python 'it'\\\"'\\\"'s'\""
)


def words_of(verb):
    """Return the arguments of a verb in a dry run."""
    command = {'sweep': ['bash', '-c', SWEEP]}.get(verb, TRAIN)
    return ['demo', '--dry-run', *(['--', *command] if verb in TAKE_A_COMMAND else [])]


def dry_runs(provider, folder):
    """Return the commands of every verb in a dry run, with its stderr after #."""
    bench = Bench(folder, re.sub('_(queued|one)$', '', provider))
    bench.environment |= PROVIDERS[provider]
    output = ''
    for verb in VERBS:
        process = subprocess.run(
            [SCRIPTS / verb, *words_of(verb)], env=bench.environment, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        output += f'$ tpu_scripts/{verb} {shlex.join(words_of(verb))}\n{process.stdout}'
        output += ''.join(f'# {line}\n' for line in process.stderr.splitlines()) + '\n'
    assert bench.calls() == [] and not (bench.folder / 'hosts').exists()  # nothing was run
    return output


ON_GCE = {'TPU_PROVIDER': 'gce', **PROVIDERS['gce']}


@pytest.mark.parametrize(
    'words, settings, message',
    [
        (['status'], {'TPU_PROVIDER': 'aws'}, 'TPU_PROVIDER=aws'),
        (['status'], {'TPU_HOSTS': 'two'}, 'TPU_HOSTS=two'),
        (['create'], ON_GCE | {'TPU_TOPOLOGY': '4x4'}, 'set TPU_HOSTS=4'),
        (['babysit', *TRAIN[:3], '--workdir=runs/x'], {}, 'has no --config'),
        (['babysit', *TRAIN, '--config', 'configs/nope.py'], {}, 'configs/nope.py: '),
        (['babysit', *TRAIN, '--workdir=gs://other/x'], {}, 'set TPU_BUCKET=other'),
        (['babysit', *TRAIN[:2], 'agentrl_jax.trian', '--workdir=runs/x'], {}, 'no such module'),
        (['babysit', *TRAIN, '--config.nope=3'], {}, 'nope'),
        (['babysit', *TRAIN], {'TPU_TYPE': 'v5litepod-16', 'TPU_HOSTS': '1'}, 'TPU_HOSTS=4'),
        (['sweep', 'python', 'x', '--workdir=~/x'], {}, 'is on the disks'),
    ],
)
def test_invalid_commands_are_errors_before_anything_is_rented(words, settings, message, tmp_path):
    bench = Bench(tmp_path / 'x', 'tpu_vm')
    bench.environment |= settings
    process = bench.start(words[0], 'demo', *(['--', *words[1:]] if words[1:] else []))
    output, _ = process.communicate(timeout=100)
    assert process.returncode in (1, 2) and message in output, output
    assert bench.calls() == []


@pytest.mark.parametrize('provider', PROVIDERS)
def test_a_dry_run_prints_the_expected_commands(provider, tmp_path):
    output = dry_runs(provider, tmp_path / 'x')
    assert output == (DRY_RUNS / f'{provider}.txt').read_text()
    for line in output.splitlines():
        if line.startswith('gcloud '):
            gcloud_flags.parse(shlex.split(line)[1:])


@pytest.mark.soak
def test_arguments_reach_the_hosts_unchanged(local):
    local.call('create', 'demo')
    local.call('setup', 'demo')
    show = 'import sys; print("|".join(w.encode().hex() for w in sys.argv[1:]))'
    output = local.call('run', 'demo', '--', 'python', '-c', show, *NASTY)
    expected = '|'.join(word.encode().hex() for word in NASTY)
    assert sorted(line for line in output.splitlines() if '|' in line) == [
        f'[{host}] {expected}' for host in range(2)
    ]
    # Compiled programs are cached where the next TPU finds them
    write = 'mkdir -p "$JAX_COMPILATION_CACHE_DIR"; echo x > "$JAX_COMPILATION_CACHE_DIR/program"'
    local.call('run', 'demo', '--', 'bash', '-c', write)
    assert (local.buckets / 'my-bucket/runs/programs/program').exists()


def test_an_expired_login_creates_nothing_and_delete_needs_confirmation(tmp_path):
    bench = Bench(tmp_path / 'x', 'tpu_vm')
    bench.environment['LOGIN_ERROR'] = 'There was a problem refreshing your current auth tokens'
    bench.call('create', 'demo', code=1)
    assert set(bench.verbs()) == {'describe'}
    bench.environment['LOGIN_ERROR'] = ''
    assert 'tpu_scripts/delete demo' in bench.call('create', 'demo')  # how to stop paying
    bench.call('delete', 'demo', code=1)
    assert 'delete' not in bench.verbs()
    bench.call('delete', 'demo', '--yes')
    assert 'demo: none' in bench.call('status', 'demo')


STOCK_OUT = """ERROR: (gcloud.compute.tpus.tpu-vm.create) {
  "code": 8,
  "message": "There is no more capacity in the zone \\"us-west4-a\\"; you can try in another zone"
}"""
NO_QUOTA = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.create) RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPreemptible"
    "PerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region us-east5."
)
KINDS = {
    STOCK_OUT: 'wait',
    "code: ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS\nmessage: The zone 'projects/p/zones/z' does "
    "not have enough resources available to fulfill the request. '(state:STOCKOUT)": 'wait',
    "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Create requests' and limit 'Create "
    "requests per minute' of service 'tpu.googleapis.com'": 'wait',
    'There was a problem refreshing your current auth tokens: HTTPSConnectionPool(host='
    "'oauth2.googleapis.com', port=443): Max retries exceeded with url: /token": 'wait',
    'ALREADY_EXISTS: Resource demo already exists': 'exists',
    NO_QUOTA: 'quota',
    "ERROR: PERMISSION_DENIED: Permission denied on 'locations/us-central2-b' (or it may not "
    'exist).': 'never',
    'ERROR: INVALID_ARGUMENT: Cloud TPU received a bad request. The requested accelerator '
    'configuration could not be found in the zonal accelerator configurations.': 'never',
    'Reauthentication failed. cannot prompt during non-interactive execution.': 'never',
    "'nodes/quota-invalid' is UNAVAILABLE in projects/denied/locations/z": 'wait',  # names
    'something new': 'unknown',
}


def test_only_temporary_gcloud_errors_are_retried():
    """Previously all errors were retried immediately and forever. The texts are real errors."""
    program = (
        f'ALLOWS=""; . {shlex.quote(str(SCRIPTS / "lib.sh"))}; '
        'NAME=quota-invalid TPU_PROJECT=denied; for text; do error_kind <<< "$text"; done'
    )
    process = subprocess.run(
        ['bash', '-c', program, '_', *KINDS], capture_output=True, text=True, check=True
    )
    assert dict(zip(KINDS, process.stdout.split(), strict=True)) == KINDS


def simulated(folder, life, creates='ok', **settings):
    """Return a bench where only `sleep` takes time; life: the job's state at each poll."""
    settings |= {**ONE_HOST, 'TPU_POLL': '30', 'TPU_GRACE': '180'}
    settings |= {'STOCK_OUT': STOCK_OUT, 'NO_QUOTA': NO_QUOTA}
    return Bench(folder, 'tpu_vm', creates=creates, life=life, **settings)


@pytest.mark.soak
def test_babysit_calls_at_most_ten_times_an_hour_without_capacity(tmp_path):
    """Previously it made 91 calls in 6 seconds."""
    bench = simulated(tmp_path / 'x', 'none running exited0', 'STOCK_OUT ' * 120 + 'ok')
    output = bench.call('babysit', 'demo', '--', 'true')
    created = max(time for time, verb in bench.calls() if verb == 'create')
    times = [time for time, _ in bench.calls() if time < created]
    assert created < 24 * 3600 and len(times) >= 120  # and it keeps trying
    assert max(sum(begin <= time < begin + 3600 for time in times) for begin in times) <= 10
    assert 'There is no more capacity in the zone' in output
    assert 'delete' not in bench.verbs()


def test_permanent_errors_end_babysit_with_the_message_from_gcloud(tmp_path):
    bench = simulated(tmp_path / 'x', 'none', 'NO_QUOTA')
    output = bench.call('babysit', 'demo', '--', 'true', code=1)
    assert output.endswith(f'{NO_QUOTA}\n')
    assert bench.verbs() == ['describe', 'create']


@pytest.mark.soak
def test_ssh_hiccups_over_weeks_do_not_end_babysit_or_delete_a_tpu(tmp_path):
    """Previously any four hiccups ended babysit; with --delete they also deleted the TPU."""
    day = 'running ' * 62 + 'deaf ' * 3 + 'exited1 '  # healthy for half an hour, then a failure
    bench = simulated(tmp_path / 'x', day * 3 + 'exited0')
    output = bench.call('babysit', 'demo', '--', 'true')
    assert output.count('failure 1:') == 3 and 'failure 2' not in output
    assert 'delete' not in bench.verbs()


@pytest.mark.parametrize('life', ['deaf', pytest.param('running deaf', marks=pytest.mark.soak)])
def test_a_ready_tpu_that_a_firewall_blocks_is_never_deleted(life, tmp_path):
    """Previously it was deleted after TPU_GRACE, even if it was on-demand."""
    bench = simulated(tmp_path / 'x', life, TPU_WAIT_HOURS='10')
    output = bench.call('babysit', 'demo', '--delete', '--', 'true', code=1)
    assert ('error: demo has never answered' in output) == (life == 'deaf')
    assert 'delete' not in bench.verbs()
    assert bench.calls()[-1][0] >= (1800 if life == 'deaf' else 36000)


def test_a_wrong_command_is_not_restarted(tmp_path):
    """Previously it was restarted four times, "from the last checkpoint"."""
    bench = simulated(tmp_path / 'x', 'none exited2')
    assert 'again' not in bench.call('babysit', 'demo', '--', 'true', code=2)


def test_a_tpu_preempted_during_compilation_is_replaced(tmp_path):
    life = 'none running preempted none deaf running exited0'
    bench = simulated(tmp_path / 'x', life, 'ok STOCK_OUT NO_QUOTA ok')
    output = bench.call('babysit', 'demo', '--delete', '--', 'true')
    assert output.count('demo was preempted') == 1 and output.count('could not be created') == 2
    assert 'demo: done' in output and 'failure' not in output
    changes = [verb for verb in bench.verbs() if verb in ('create', 'delete')]
    assert changes == ['create', 'delete', *['create'] * 3, 'delete']


@pytest.mark.parametrize('provider', ['tpu_vm', 'gce_one'])
def test_ssh_gets_the_configured_flags_and_user(provider, tmp_path):
    flags = {'TPU_SSH_FLAGS': '--tunnel-through-iap --internal-ip', 'TPU_SSH_USER': 'me'}
    bench = Bench(tmp_path / 'x', re.sub('_one$', '', provider), **PROVIDERS[provider] | flags)
    output = bench.call('setup', 'demo', '--dry-run')
    lines = [line for line in output.splitlines() if ' ssh ' in line or ' scp ' in line]
    assert len(lines) >= 3
    for line in lines:
        assert flags['TPU_SSH_FLAGS'] in line and 'me@demo' in line
        gcloud_flags.parse(shlex.split(line)[1:])


@pytest.fixture
def local(tmp_path):
    bench = Bench(tmp_path / 'x', 'local')
    yield bench
    bench.call('delete', 'demo', '--yes')


def step(run, process):
    path = run / f'process{process}'
    return int(path.read_text()) if path.exists() else 0


def wait_at(run, step):
    """Make all processes of the fake training wait at a step."""
    path = run / 'limit'
    path.with_suffix('.new').write_text(str(step))
    os.replace(path.with_suffix('.new'), path)


@pytest.mark.soak
def test_a_run_in_a_relative_workdir_resumes_after_a_preemption_and_a_signal(local):
    """Previously every start deleted runs/ on the hosts, so a run always counted one start."""
    run = local.buckets / 'my-bucket' / 'runs' / 'x'
    run.mkdir(parents=True)
    wait_at(run, 10)
    command = ['python', FAKE_TRAINING, '--workdir=runs/x', '30']
    babysit = local.start('babysit', 'demo', '--', *command)
    eventually(lambda: step(run, 0) == step(run, 1) == 10, while_runs=babysit)
    vanish(local)
    wait_at(run, 20)
    eventually(lambda: step(run, 0) == step(run, 1) == 20, while_runs=babysit)
    os.killpg(group(local, 1), signal.SIGTERM)
    wait_at(run, 30)
    output = local.end(babysit)
    assert step(run, 0) == step(run, 1) == 30
    for process in range(2):
        steps = [int(line) for line in (run / f'process{process}.starts').read_text().split()]
        # On a busy machine one host may end long before the other, which adds one start.
        assert len(steps) >= 3 and steps[:2] == [0, 10] and steps == sorted(steps)
    assert 'demo was preempted' in output and 'again, from the last checkpoint' in output


@pytest.mark.soak
def test_runs_on_the_disks_of_hosts_survive_sync_and_setup(local):
    local.environment |= {'TPU_BUCKET': '', 'TPU_HOSTS': '1'}
    local.call('create', 'demo')
    local.call('setup', 'demo')
    run = local.folder / 'hosts/demo/0/agentrl_jax/runs/x'
    command = ['bash', '-c', 'mkdir -p runs/x; echo start >> runs/x/starts', '--workdir=runs/x']
    for count in (1, 2):
        local.call('launch', 'demo', '--', *command)
        eventually(lambda: 'exited 0' in local.call('status', 'demo'))
        local.call('setup', 'demo')
        assert (run / 'starts').read_text() == 'start\n' * count
    local.environment['TPU_BUCKET'] = 'my-bucket'
    local.call('setup', 'demo', code=1)
    assert (run / 'starts').exists() and not run.parent.is_symlink()


@pytest.mark.soak
def test_babysit_falls_back_once_to_an_older_checkpoint_if_one_is_damaged(local):
    local.environment['TPU_FAILURES'] = '0'
    command = 'echo "fallback: $AGENTRL_FALLBACK"; exit 65'
    output = local.call('babysit', 'demo', '--', 'bash', '-c', command, code=65)
    assert '[1] fallback: \n' in output and '[1] fallback: 1\n' in output
    assert output.count('launched;') == 2 and 'giving up after 1 failures' in output


@pytest.mark.soak
def test_launch_logs_status_stop_and_unlock(local):
    local.call('create', 'demo')
    local.call('setup', 'demo')
    assert '[0] none' in local.call('status', 'demo')
    local.call('launch', 'demo', '--', 'python', FAKE_TRAINING, 'gs://my-bucket/run', '900')
    output = local.call('status', 'demo')
    assert 'demo: ready' in output and '[0] running' in output and '[1] running' in output
    assert 'a job is running' in local.call('launch', 'demo', '--', 'true', code=1)
    assert 'a job is running' in local.call('sync', 'demo', code=1)  # its files are in use
    run = local.buckets / 'my-bucket' / 'run'
    eventually(lambda: step(run, 0) and step(run, 1))
    assert '[1] exited 75' in local.call('stop', 'demo')
    assert '[0] step 0 of 900' in local.call('logs', 'demo', '--lines=5')
    assert local.call('status', 'demo').count('exited 75') == 2
    lock = local.folder / 'lock'
    lock.touch()
    local.environment |= {'TPU_LOCKFILE': str(lock), 'TPU_HOSTS': '1'}
    with lock.open():
        local.call('unlock', 'demo', code=1 if shutil.which('fuser') else 0)
    local.call('unlock', 'demo')
    assert not lock.exists()


@pytest.mark.soak
def test_sync_replaces_the_code_of_the_hosts_and_nothing_else(local, tmp_path):
    """Previously it deleted the entire tree, including the workdirs in runs/."""
    local.call('create', 'demo')
    local.call('sync', 'demo', f'--archive={tmp_path / "code.tar.gz"}')
    tree = local.folder / 'hosts/demo/1/agentrl_jax'
    train = (ROOT / 'agentrl_jax/train.py').read_bytes()
    assert (tree / 'agentrl_jax/train.py').read_bytes() == train
    assert (tree / '.synced').read_text().strip()

    code = tmp_path / 'code'  # of another commit
    shutil.unpack_archive(tmp_path / 'code.tar.gz', code)  # tarfile's filter needs Python 3.11.4
    names = {*(code / '.code').read_text().split('\0'), 'new folder/a.py'} - {''}
    shutil.rmtree(code / 'experiments')
    (code / 'agentrl_jax/train.py').write_text('changed')
    (code / 'new folder').mkdir()
    (code / 'new folder/a.py').touch()
    (code / '.synced').write_text('another')
    remaining = sorted(name for name in names if (code / name).exists())
    (code / '.code').write_text(''.join(f'{name}\0' for name in remaining))
    with tarfile.open(tmp_path / 'other.tar.gz', 'w:gz') as archive:
        archive.add(code, '.')

    ours = ['runs/x/checkpoints/3/state', 'experiments/smollm2/mine.txt', 'own.py', '.venv/x']
    for name in ours:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text('mine')
    compiled = tree / 'experiments/algorithms/__pycache__/x.pyc'
    compiled.parent.mkdir()
    compiled.touch()
    local.call('sync', 'demo', f'--archive={tmp_path / "other.tar.gz"}')
    files = {str(path.relative_to(tree)) for path in tree.rglob('*') if not path.is_dir()}
    assert files == {*remaining, *ours, '.code', '.synced'}
    assert not (tree / 'experiments/algorithms').exists()  # no empty folders
    assert all((tree / name).read_text() == 'mine' for name in ours)
    assert (tree / 'agentrl_jax/train.py').read_text() == 'changed'


@pytest.mark.soak
def test_a_share_of_a_sweep_is_trained_one_run_at_a_time(local):
    """Runs 1, 3 and 5 of 5: the first is killed, the second is done, the third is still trained."""
    code = {1: 137}
    lines = [
        f'/usr/bin/python -c \'print("run {n}"); exit({code.get(n, 0)})\' $HOME'
        for n in range(1, 6)
    ]
    lines[2] = '# run 3 is done'
    listing = f"printf '%s\\n' {shlex.join(lines)} #"
    local.environment['TPU_FAILURES'] = '0'
    output = local.call('sweep', 'demo', '--share=1/2', '--', 'bash', '-c', listing, code=1)
    assert '2 runs, 1 failed' in output and '[0] run 1' in output
    log = (local.folder / 'hosts/demo/0/agentrl_job/log').read_text()
    assert log.split('\n')[:2] == ['run 1', 'run 5']


def main():
    for provider in PROVIDERS:
        shutil.rmtree('/tmp/dry_runs', ignore_errors=True)
        (DRY_RUNS / f'{provider}.txt').write_text(dry_runs(provider, '/tmp/dry_runs'))


if __name__ == '__main__':
    main()
