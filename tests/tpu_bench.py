"""A sandbox for tpu_scripts: a folder, an environment and fake tools."""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / 'tpu_scripts'
FAKE_TRAINING = 'tests/fake_host_training.py'
UV = """#!/bin/sh
# uv: a version, an environment whose Python is the one of the tests, installations that do nothing
if [ "$1" = --version ]; then echo 'uv 0.13.8'; exit; fi
echo "uv $*" >> "$FAKE_GCLOUD/installed"
for last; do :; done
if [ "$1" = venv ]; then mkdir -p "$last/bin"; cp "$FAKE_GCLOUD/bin/python" "$last/bin/python"; fi
"""
GCSFUSE = """#!/bin/sh
# gcsfuse: the bucket is a folder beside the hosts
for folder; do bucket=$before; before=$folder; done
mkdir -p "$FAKE_GCLOUD/buckets/$bucket"
rmdir "$folder" && ln -s "$FAKE_GCLOUD/buckets/$bucket" "$folder"
"""
SLEEP = """#!/bin/bash
# sleep: only the simulated clock moves
read -r clock < "$FAKE_GCLOUD/clock"
echo $((clock + ${1%.*})) > "$FAKE_GCLOUD/clock"
"""
GCLOUD = """#!/bin/bash
# gcloud: notes the simulated time of a call. Two files list what happens, their last word stays:
# creates (ok, or the variable that holds the error), life (the state of the job at each look at it)
next() { # next LIST: sets word
  read -r word rest < "$FAKE_GCLOUD/$1"
  [ -z "$rest" ] || echo "$rest" > "$FAKE_GCLOUD/$1"
}
read -r clock < "$FAKE_GCLOUD/clock"
for verb; do case $verb in create | describe | delete | ssh | scp) break ;; esac; done
echo "$clock $verb" >> "$FAKE_GCLOUD/calls"
tpu=$FAKE_GCLOUD/tpu # its state, as long as there is one
if [ -n "$LOGIN_ERROR" ]; then echo "$LOGIN_ERROR" >&2; exit 1; fi
case $verb in
  create)
    next creates
    if [ "$word" != ok ]; then echo "${!word}" >&2; exit 1; fi
    echo READY > "$tpu" ;;
  describe) cat "$tpu" 2> /dev/null || { echo NOT_FOUND >&2; exit 1; } ;;
  delete) rm "$tpu" ;;
  ssh)
    case "$*" in
      *'host/job state env'*)
        next life
        case $word in
          preempted) echo PREEMPTED > "$tpu"; exit 255 ;;
          deaf) exit 255 ;;
          exited*) echo "exited ${word#exited}" ;;
          *) echo "$word" ;;
        esac ;;
    esac ;;
esac
"""
SETTINGS = {
    'TPU_ENV_FILE': '/dev/null',
    'TPU_PROJECT': 'my-project',
    'TPU_ZONE': 'us-west4-a',
    'TPU_TYPE': 'v4-16',
    'TPU_RUNTIME': 'tpu-ubuntu2204-base',
    'TPU_HOSTS': '2',
    'TPU_BUCKET': 'my-bucket',
    'TPU_POLL': '0.05',
    'TPU_GRACE': '3',
    'TPU_FAILURES': '1',
}


class Bench:
    def __init__(self, folder, provider, *, creates='ok', life='none', **settings):
        """creates, life: of the simulated cloud of providers other than `local`."""
        self.folder = pathlib.Path(folder)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(('TPU_', 'JAX_', 'XLA_'))}
        self.environment = (
            clean
            | SETTINGS
            | settings
            | {
                'TPU_PROVIDER': provider,
                'TPU_LOCAL_ROOT': str(self.folder / 'hosts'),
                'TPU_LOCAL_PYTHON': sys.executable,
                'FAKE_GCLOUD': str(self.folder),
                'PATH': f'{self.folder / "bin"}{os.pathsep}{os.environ["PATH"]}',
            }
        )
        python = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
        tools = {'uv': UV, 'gcsfuse': GCSFUSE, 'python': python}
        if provider != 'local':
            tools |= {'gcloud': GCLOUD, 'sleep': SLEEP}
        (self.folder / 'bin').mkdir(parents=True)
        for name, text in tools.items():
            (self.folder / 'bin' / name).write_text(text)
            (self.folder / 'bin' / name).chmod(0o755)
        for name, text in {'clock': '0', 'creates': creates, 'life': life}.items():
            (self.folder / name).write_text(f'{text}\n')
        self.buckets = self.folder / ('hosts/buckets' if provider == 'local' else 'buckets')

    def start(self, verb, *words):
        return subprocess.Popen(
            [SCRIPTS / verb, *words],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def call(self, verb, *words, code=0):
        """Run a verb and return its output; it must end with the exit code."""
        return self.end(self.start(verb, *words), code=code)

    def end(self, process, *, code=0, within_s=200):
        """Return the output of a verb; it must end in time with the exit code, without children."""
        try:
            output, _ = process.communicate(timeout=within_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == code, output
        return output

    def calls(self):
        """Return [(second, verb)] of the gcloud calls."""
        log = self.folder / 'calls'
        lines = map(str.split, log.read_text().splitlines()) if log.exists() else ()
        return [(int(second), verb) for second, verb in lines]

    def verbs(self):
        return [verb for _, verb in self.calls()]


def eventually(condition, *, within_s=120, while_runs=None):
    """Wait for a condition; while_runs is the process that should cause it."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert while_runs is None or while_runs.poll() is None, while_runs.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group(bench, host):
    """Return the processes of the job on a host."""
    return int((bench.folder / f'hosts/demo/{host}/agentrl_job/pid').read_text())


def vanish(bench):
    """Remove both hosts without a warning."""
    (bench.folder / 'hosts/demo/preempted').touch()
    for host in range(2):
        os.killpg(group(bench, host), signal.SIGKILL)
