"""The SLURM script that serves environments: its command, and a server that ends with its task."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLURM = ROOT / 'agentrl_jax' / 'envs' / 'hosts' / 'deploy' / 'worlds.slurm'
TOKEN = 'a-token-that-is-long-enough'


def test_a_task_serves_until_it_is_terminated(tmp_path):
    """As in SLURM: the address file is written once the server is ready, and removed at its end."""
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
    words = ['--worlds=7', '--env=hostile_worlds:Hostile', '--workers=1']
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
            assert b'"room":7' in answer.read()
        with pytest.raises(urllib.error.HTTPError, match='401'):
            urllib.request.urlopen(f'{url}/metrics', timeout=20)
        started = psutil.Process(task.pid).children(recursive=True)
        assert len(started) >= 2  # the server and its worker
    finally:
        task.send_signal(signal.SIGTERM)
        code = task.wait(30)
    assert code == 0 and not list((tmp_path / 'urls').iterdir())
    assert not psutil.wait_procs(started, 20)[1]
