"""Training without a model, one process per host: python fake_host_training.py --workdir=DIR STEPS

Each process counts its steps in a file in DIR, resumes there when restarted, and exits with 75 when
terminated. If DIR has a file `limit`, it waits at the step in this file.
"""

import os
import pathlib
import signal
import sys
import time

STEP_S = 0.05


def limit(folder):
    path = folder / 'limit'
    return int(path.read_text()) if path.exists() else None


def main(folder, steps):
    folder = folder.removeprefix('--workdir=')
    name = f'process{os.environ["JAX_PROCESS_ID"]}'
    if folder.startswith('gs://'):
        folder = pathlib.Path(os.environ['AGENTRL_GCS']) / folder.removeprefix('gs://')
    folder, signals = pathlib.Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: signals.append(True))
    saved = folder / name
    first = int(saved.read_text()) if saved.exists() else 0
    with (folder / f'{name}.starts').open('a') as starts:
        starts.write(f'{first}\n')
    print(f'step {first} of {steps}', flush=True)
    for step in range(first, int(steps)):
        time.sleep(STEP_S)
        while not signals and step == limit(folder):
            time.sleep(STEP_S)
        saved.with_suffix('.new').write_text(str(step + 1))
        os.replace(saved.with_suffix('.new'), saved)
        if signals:
            sys.exit(75)
    print('finished', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
