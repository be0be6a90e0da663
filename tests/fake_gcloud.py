"""A stand-in for gcloud: refuses what the real one would, plays spot TPUs, runs commands.

It knows the commands and flags of tests/data/gcloud_flags.json and no others. A TPU is a folder,
each of its hosts a folder in it; ssh runs its command there. FAKE_GCLOUD names the folder of all
this; `script.json` in it lists what happens to the TPUs, one after another:
  waits: how many looks find the request in the queue     dies: the look at a job that finds it gone
  error: what creating it prints instead                  deaf: looks for which ssh fails
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

FLAGS = json.loads((pathlib.Path(__file__).parent / 'data' / 'gcloud_flags.json').read_text())


class Refused(Exception):
    """What gcloud calls a usage error (exit code 2)."""


def parse(words):
    """(command, names, {flag: value}) of a command line; Refused if gcloud would refuse it."""
    track, words = words[:1] == ['alpha'], words[words[:1] == ['alpha'] :]
    plain = [word for word in words if not word.startswith('--')]
    lengths = [n for n in range(len(plain), 0, -1) if ' '.join(plain[:n]) in FLAGS['commands']]
    if not lengths:
        raise Refused(f'Invalid choice: {" ".join(plain)}')
    command, names = ' '.join(plain[: lengths[0]]), plain[lengths[0] :]
    if words[: lengths[0]] != plain[: lengths[0]]:
        raise Refused('a flag stands before the end of the command')
    known = FLAGS['commands'][command] | FLAGS['every command']
    if track:  # its flag that the other release has not
        known = known | {'tunnel-through-iap': 'bool'}
    given = {}
    for word in words:
        if not word.startswith('--'):
            continue
        flag, equals, value = word[2:].partition('=')
        if flag not in known or flag in given:
            raise Refused(f'unrecognized arguments: {word}')
        if (known[flag] == 'value') != bool(equals):
            raise Refused(f'argument --{flag}: value expected or not expected')
        given[flag] = value
    if command.startswith('compute tpus') and 'zone' not in given:
        raise Refused('argument --zone: must be specified')
    wanted = 2 if command.endswith('scp') else 1
    if len(names) != wanted:
        raise Refused(f'{wanted} names expected, not {names}')
    return command, names, given


class Cloud:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.file = self.folder / 'cloud.json'
        self.tpus = json.loads(self.file.read_text()) if self.file.exists() else {}

    def save(self):
        partial = self.file.with_name(f'cloud.{os.getpid()}')
        partial.write_text(json.dumps(self.tpus))
        os.replace(partial, self.file)

    def create(self, name, queued):
        if name in self.tpus:
            sys.exit(f'ERROR: ALREADY_EXISTS: {name}')
        made = self.folder / 'made'
        lives = json.loads((self.folder / 'script.json').read_text())
        count = len(made.read_text()) if made.exists() else 0
        made.write_text('x' * (count + 1))
        life = {'waits': 0, 'dies': None, 'deaf': []} | lives[min(count, len(lives) - 1)]
        if 'error' in life:
            sys.exit(life['error'])
        self.tpus[name] = life | {'queued': queued, 'looks': 0, 'gone': False}
        self.save()

    def describe(self, name, of_queue):
        if name not in self.tpus or (of_queue and not self.tpus[name]['queued']):
            sys.exit(f'ERROR: (gcloud) NOT_FOUND: Resource {name} was not found')
        tpu = self.tpus[name]
        if tpu['gone']:
            return 'SUSPENDED' if of_queue else 'PREEMPTED'
        if tpu['waits'] > 0:
            tpu['waits'] -= 1
            self.save()
            return 'WAITING_FOR_RESOURCES' if of_queue else 'CREATING'
        return 'ACTIVE' if of_queue else 'READY'

    def home(self, name, worker):
        if name not in self.tpus or self.tpus[name]['gone'] or self.tpus[name]['waits']:
            print('ssh: connect to host port 22: Connection refused', file=sys.stderr)
            sys.exit(255)
        if self.tpus[name]['deaf'] == 'always':
            print('ssh: connect to host 10.0.0.2 port 22: Connection timed out', file=sys.stderr)
            sys.exit(255)
        home = self.folder / name / worker
        home.mkdir(parents=True, exist_ok=True)
        return home

    def ssh(self, name, worker, command):
        home = self.home(name, worker)
        tpu = self.tpus[name]
        if worker == '0' and 'host/job state env' in command:
            tpu['looks'] += 1
            if tpu['looks'] in tpu['deaf']:
                self.save()
                sys.exit(255)
            if tpu['looks'] == tpu['dies']:
                tpu['gone'] = True
                self.save()
                self.delete_disk(name)
                sys.exit(255)
            self.save()
        # gcloud splits the command at blanks, and ssh puts one blank between the parts
        remote = ' '.join(command.split(' '))
        return subprocess.run(
            ['bash', '-c', remote], cwd=home, env=os.environ | {'HOME': str(home)}
        )

    def delete_disk(self, name):
        for pid in (self.folder / name).glob('*/agentrl_job/pid'):
            try:
                os.killpg(int(pid.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def delete(self, name):
        if name not in self.tpus:
            sys.exit(f'ERROR: NOT_FOUND: {name}')
        self.delete_disk(name)
        del self.tpus[name]
        self.save()


def main(words):
    folder = pathlib.Path(os.environ['FAKE_GCLOUD'])
    with (folder / 'calls.jsonl').open('a') as calls:
        calls.write(json.dumps(words) + '\n')
    try:
        command, names, flags = parse(words)
    except Refused as error:
        print(f'ERROR: (gcloud) {error}', file=sys.stderr)
        return 2
    if (folder / 'broken').exists():
        print('ERROR: There was a problem refreshing your current auth tokens', file=sys.stderr)
        return 1
    cloud, queued = Cloud(folder), 'queued-resources' in command
    names = [name.rpartition('@')[2] for name in names]  # of the hosts' user
    verb = command.split()[-1]
    if verb == 'create':
        cloud.create(names[0], queued)
    elif verb == 'describe':
        print(cloud.describe(names[0], queued))
    elif verb == 'delete':
        cloud.delete(names[0])
    elif verb == 'ssh':
        return cloud.ssh(names[0], flags['worker'], flags['command']).returncode
    elif verb == 'scp':
        name, _, target = names[1].partition(':')
        shutil.copy(names[0], cloud.home(name, flags['worker']) / target)
    else:
        sys.exit(f'the stand-in does not play {command}')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
