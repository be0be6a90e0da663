"""Training without a model, for sweep tests: some quick steps, each with a checkpoint.

  python fake_training.py <folder> <steps> <seconds of a step> [<how it fails> <step>]

It records its events, and a lock detects duplicate processes.
How it fails: `once` or `always` (exit 3), `quiet` (exit 0, unfinished), `busy` (exit 75, once).
"""

import fcntl
import json
import os
import pathlib
import signal
import sys
import time


def write(path, text):
    partial = path.with_name(f'{path.name}.{os.getpid()}')
    partial.write_text(text)
    os.replace(partial, path)


def main(folder, steps, step_s, fault='', fault_step=-1):
    folder, steps, signals = pathlib.Path(folder), int(steps), []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(True))
    lock = (folder / 'own.lock').open('a')
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / 'DOUBLED').touch()
        sys.exit(9)
    saved = folder / 'saved'
    first = int(saved.read_text()) if saved.exists() else 0
    with (folder / 'starts.txt').open('a') as starts:
        starts.write(f'{os.getpid()} {first}\n')
    print(f'starting at step {first}', flush=True)
    began = time.monotonic()
    for step in range(first, steps):
        if step == int(fault_step) and (fault == 'always' or not (folder / 'failed').exists()):
            (folder / 'failed').touch()
            print('this went wrong', flush=True)
            sys.exit({'quiet': 0, 'busy': 75}.get(fault, 3))
        time.sleep(float(step_s))
        with (folder / 'metrics.jsonl').open('a') as rows:
            row = {'step': step, 'time_s': time.monotonic() - began, 'rollout/success': 0.25}
            rows.write(json.dumps(row) + '\n')
        write(saved, str(step + 1))
        if signals:
            sys.exit(75)
    write(folder / 'finished.json', json.dumps({'step': steps}))


if __name__ == '__main__':
    main(*sys.argv[1:])
