"""deploy/: jobs restart after exit code 75 and keep their workdir in the bucket."""

import os
import pathlib
import re
import subprocess

import yaml

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / 'deploy'
SETTINGS = {'IMAGE': 'eu-docker.pkg.dev/p/r/agentrl', 'CLUSTER': 'c', 'BUCKET': 'my-bucket'}


def test_a_skypilot_job_recovers_after_75():
    job = yaml.safe_load((DEPLOY / 'skypilot.yaml').read_text())
    assert job['resources']['job_recovery']['recover_on_exit_codes'] == [75]
    assert '--workdir="gs://$BUCKET/runs/$RUN"' in job['run'] and '/gcs/${BUCKET}' in str(job)
    assert (DEPLOY.parent / re.search(r'-r (\S+)', job['setup'])[1]).exists()


def test_an_xpk_job_trains_in_the_bucket_and_restarts_after_75(tmp_path):
    (tmp_path / 'xpk').write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / 'xpk').chmod(0o755)
    process = subprocess.run(
        [DEPLOY / 'xpk.sh', 'lake', '--config=configs/demo.py', '--config.env.prompt=a b'],
        env=os.environ | SETTINGS | {'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}'},
        capture_output=True,
        text=True,
        check=True,
    )
    words = process.stdout.split('\0')[:-1]
    (command,) = [word for word in words if word.startswith('--command=')]
    assert command.startswith('--command=exec python -m agentrl_jax.train ')
    assert '--workdir=gs://my-bucket/runs/lake' in command and r'prompt=a\ b' in command
    assert {'--restart-on-exit-codes=75', '--max-restarts=1000'} < set(words)
