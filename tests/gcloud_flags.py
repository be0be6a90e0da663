"""gcloud's commands and flags, as listed in tests/data/gcloud_flags.json."""

import json
import pathlib

FLAGS = json.loads((pathlib.Path(__file__).parent / 'data' / 'gcloud_flags.json').read_text())


def parse(words):
    """Return (command, names, {flag: value}) of a command line; ValueError if it is invalid."""
    track, words = words[:1] == ['alpha'], words[words[:1] == ['alpha'] :]
    plain = [word for word in words if not word.startswith('--')]
    lengths = [n for n in range(len(plain), 0, -1) if ' '.join(plain[:n]) in FLAGS['commands']]
    if not lengths:
        raise ValueError(f'Invalid choice: {" ".join(plain)}')
    command, names = ' '.join(plain[: lengths[0]]), plain[lengths[0] :]
    if words[: lengths[0]] != plain[: lengths[0]]:
        raise ValueError('a flag stands before the end of the command')
    known = FLAGS['commands'][command] | FLAGS['every command']
    if track:  # a flag that the other release does not have
        known = known | {'tunnel-through-iap': 'bool'}
    values = {}
    for word in words:
        if not word.startswith('--'):
            continue
        flag, equals, value = word[2:].partition('=')
        if flag not in known or flag in values:
            raise ValueError(f'unrecognized arguments: {word}')
        if (known[flag] == 'value') != bool(equals):
            raise ValueError(f'argument --{flag}: value expected or not expected')
        values[flag] = value
    if command.startswith('compute tpus') and 'zone' not in values:
        raise ValueError('argument --zone: must be specified')
    count = 2 if command.endswith('scp') else 1
    if len(names) != count:
        raise ValueError(f'{count} names expected, not {names}')
    return command, names, values
