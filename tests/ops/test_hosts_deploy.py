"""Files that start world servers on other machines: what they say is what the server takes."""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / 'agentrl_jax' / 'envs' / 'hosts' / 'deploy'
SLURM = FOLDER / 'worlds.slurm'
FLAGS = set(
    re.findall(
        r"flags\.DEFINE_\w+\(\s*'(\w+)'", (ROOT / 'agentrl_jax' / 'serve.py').read_text('utf-8')
    )
)
TOKEN = 'a-token-that-is-long-enough'
SERVICE, STATEFUL = yaml.safe_load_all((FOLDER / 'worlds.yaml').read_text('utf-8'))
POD = STATEFUL['spec']['template']
(CONTAINER,) = POD['spec']['containers']


def instructions():
    """(instruction, its words) of the Dockerfile, in order."""
    text = (FOLDER / 'Dockerfile').read_text('utf-8').replace('\\\n', ' ')
    lines = [line for line in text.splitlines() if line and not line.startswith('#')]
    return [tuple(line.split(' ', 1)) for line in lines]


def words_of(instruction):
    (found,) = [rest for name, rest in instructions() if name == instruction]
    return yaml.safe_load(found)  # the exec form is JSON


def flags_of(words):
    """Flag -> value of words that all are --name=value."""
    found = [re.fullmatch(r'--(\w+)=(.*)', word) for word in words]
    assert all(found), words
    return {match[1]: match[2] for match in found}


def run_slurm(*words, **environment):
    return subprocess.run(
        [SLURM, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=30,
    )


# ---- Dockerfile and manifest -------------------------------------------------------------------


def test_the_image_holds_what_its_command_runs():
    copied = [rest.split()[:-1] for name, rest in instructions() if name == 'COPY']
    for source in [source for sources in copied for source in sources]:
        assert (ROOT / source).exists(), source
    program = words_of('ENTRYPOINT')
    assert program[:3] == ['python', '-m', 'agentrl_jax.serve']
    given = flags_of(program[3:]) | flags_of(words_of('CMD'))
    assert given.keys() <= FLAGS and given['address'] == '0.0.0.0' and 'token' in given
    assert ('EXPOSE', given['port']) in instructions()
    probe = next(rest for name, rest in instructions() if name == 'HEALTHCHECK')
    assert f'127.0.0.1:{given["port"]}/health' in probe


def test_what_the_image_installs_is_pinned():
    pins = (ROOT / 'requirements-test.txt').read_text('utf-8')
    (install,) = [rest for name, rest in instructions() if name == 'RUN' and 'pip install' in rest]
    packages = re.search(r'-c pins\.txt\s+(.*)', install)[1].split()
    assert {'fastapi', 'uvicorn'} <= set(packages)
    assert all(re.search(rf'^{name}==', pins, flags=re.MULTILINE) for name in packages)


def test_the_manifest_s_arguments_are_flags_and_its_names_agree():
    image = flags_of(words_of('ENTRYPOINT')[3:])
    assert flags_of(CONTAINER['args']).keys() <= FLAGS
    assert STATEFUL['spec']['serviceName'] == SERVICE['metadata']['name']
    labels = POD['metadata']['labels']
    assert SERVICE['spec']['selector'] == STATEFUL['spec']['selector']['matchLabels'] == labels
    # A world is at one server: a balancer in between would ask another one for it.
    assert SERVICE['spec']['clusterIP'] == 'None' and STATEFUL['kind'] == 'StatefulSet'
    (port,) = CONTAINER['ports']
    assert port['containerPort'] == SERVICE['spec']['ports'][0]['port'] == int(image['port'])
    mounts = {mount['name']: mount['mountPath'] for mount in CONTAINER['volumeMounts']}
    assert mounts.keys() == {volume['name'] for volume in POD['spec']['volumes']}
    assert pathlib.PurePosixPath(image['token']).parent == pathlib.PurePosixPath(mounts['token'])
    user = POD['spec']['securityContext']['runAsUser']
    assert ('USER', f'{user}:{user}') in instructions()


def test_the_manifest_asks_for_health_and_bounds_memory():
    for probe in ('startupProbe', 'readinessProbe', 'livenessProbe'):
        asked = CONTAINER[probe]['httpGet']
        assert asked == {'path': '/health', 'port': CONTAINER['ports'][0]['name']}
    given, resources = flags_of(CONTAINER['args']), CONTAINER['resources']
    limit = resources['limits']['memory']
    assert resources['requests']['memory'] == limit and limit.endswith('Gi')
    # A worker is started again before the pod is killed; the server itself takes less than 1 GB.
    workers = int(given['workers']) * float(given['worker_mb'])
    assert workers + 1024 <= 1024 * float(limit.removesuffix('Gi'))


# ---- SLURM -------------------------------------------------------------------------------------


def test_the_slurm_script_is_bash_that_stops_at_errors_and_says_how_it_is_used():
    text = SLURM.read_text('utf-8')
    assert 'set -euo pipefail' in text and '#SBATCH' in text and os.access(SLURM, os.X_OK)
    found = run_slurm('folder', 'token.txt')
    assert found.returncode == 2 and 'sbatch --array=0-3' in found.stderr
    assert 'SBATCH --' not in found.stderr
    tool = shutil.which('shellcheck', path=pathlib.Path(sys.executable).parent)
    if tool is not None:
        found = subprocess.run([tool, SLURM], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_a_dry_run_prints_the_server_s_command_with_its_share_of_the_memory(tmp_path):
    words = [str(tmp_path / 'a b'), 'token.txt', '--env=sciworld', '--workers=4', '--dry-run']
    found = run_slurm(*words, SLURM_MEM_PER_NODE='40000')
    assert found.returncode == 0, found.stderr
    program = shlex.split(found.stdout)
    assert program[:3] == ['python', '-m', 'agentrl_jax.serve']
    given = flags_of(program[3:])
    share = {'worker_mb': '9000'}  # 0.9 x 40000 / 4
    asked = {'token': 'token.txt', 'env': 'sciworld', 'workers': '4'}
    assert given == {'address': '0.0.0.0', 'port': '0'} | share | asked
    assert given.keys() <= FLAGS and not list(tmp_path.iterdir())


def test_a_task_serves_with_the_manifest_s_flags_until_it_is_asked_to_end(tmp_path):
    """As SLURM starts it: the file of its address is there once it is ready, and goes with it."""
    (tmp_path / 'token').write_text(f'{TOKEN}\n')
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin' / 'python').symlink_to(sys.executable)
    environment = {
        **os.environ,
        'PATH': f'{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
        'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'tests')]),
        'SLURM_ARRAY_JOB_ID': '12',
        'SLURM_ARRAY_TASK_ID': '3',
        'SLURM_MEM_PER_NODE': '8000',
        'SLURMD_NODENAME': 'localhost',
    }
    words = [*CONTAINER['args'], '--env=hostile_worlds:Hostile', '--workers=1']
    task = subprocess.Popen([SLURM, tmp_path / 'urls', tmp_path / 'token', *words], env=environment)
    try:
        address = tmp_path / 'urls' / '12_3.url'
        deadline = time.monotonic() + 120
        while not address.exists():
            assert task.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        url = address.read_text().strip()
        assert re.fullmatch(r'http://localhost:\d+', url)
        with urllib.request.urlopen(f'{url}/health', timeout=20) as answer:
            assert f'"room":{flags_of(words)["worlds"]}'.encode() in answer.read()
        with pytest.raises(urllib.error.HTTPError, match='401'):
            urllib.request.urlopen(f'{url}/metrics', timeout=20)
        started = psutil.Process(task.pid).children(recursive=True)
        assert len(started) >= 2  # the server and its worker
    finally:
        task.send_signal(signal.SIGTERM)
        code = task.wait(30)
    assert code == 0 and not list((tmp_path / 'urls').iterdir())
    assert not psutil.wait_procs(started, 20)[1]
