"""Files of models, tokenizers, templates and replies, spoiled one by one, and what reads them.

  PYTHONPATH=.:tests python tests/fuzz_files.py --files=2000 [--seed=0] [--show]

Each file is loaded, or refused in one line that names it, within 5 s of computing and 1 GB. Files
are read in child processes that cannot have more memory; one that hangs or dies costs one file.
Prints a tally and exits with 1 where a file did anything else. The same seed spoils alike.
"""

import argparse
import collections
import copy
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import resource
import select
import struct
import subprocess
import sys
import tempfile
import time

if __name__ == '__main__':
    os.environ['JAX_PLATFORMS'] = 'cpu'  # read when jax is imported

import folders  # noqa: F401
from test_gguf import write_gguf_with_tokenizer
from test_tokenizer import write_folder as write_byte_pair
from tiny_models import TINY, hf_tensors
from tiny_models import write_folder as write_model

from agentrl_jax.machine import files, gguf_file
from agentrl_jax.models import weights
from agentrl_jax.rollout import replies, versions
from agentrl_jax.tokens.chat import CHATML, build_chat
from agentrl_jax.tokens.load import check_fits, load_tokenizer
from agentrl_jax.tools.demo_tokenizer import DEMO_MODEL

TESTS = pathlib.Path(__file__).resolve().parent

CPU_S, MEMORY = 5.0, 2**30  # what a file may take
HANG_S = 60  # by the clock
SMALL = dataclasses.replace(TINY, hidden_size=32, intermediate_size=32, head_dim=8)
LONGEST_LINE = 2000
SHARES = {  # of the kinds of files
    'config': 8,
    'gguf': 10,
    'index': 3,
    'replies': 5,
    'safetensors': 5,
    'template': 2,
    'tokenizer': 7,
    'versions': 3,
}
REPLY = (
    dict.fromkeys(('step', 'stream', 'trial', 'turn', 'item', 'action'), 0)
    | {'split': 'train', 'observation': 'O', 'instruction': '', 'reward': 0.5, 'done': False}
    | {'success': None, 'figures': [0.5], 'fault': '', 'seconds': 0.25, 'tries': 1}
)
KINDS = [kind for kind, share in SHARES.items() for _ in range(share)]
NESTED = functools.reduce(lambda inner, _: [inner], range(500), 'x')
WRONG = [
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    0.5,
    -1e308,
    float('nan'),
    float('inf'),
    2**16,
    2**31 - 1,
    2**32 - 1,
    2**32,
    2**63,
    10**320,
    '',
    'x',
    '\ud800',
    'a\nb\x1b[31m',
    'x' * 100_000,
    [],
    [0],
    ['x', 1],
    {},
    {'a': 1},
    NESTED,
]
FAILURES = (  # what a reader must not raise; what else there is (a panic of Rust's) ends the child
    *(TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError),
    *(MemoryError, StopIteration, NameError, EOFError, BufferError),
)
NUMBERS = [0, 1, 2**15, 2**24, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
TEMPLATES = [  # that nothing ends but their limits
    "{{ 'x' * 10**10 }}",
    "{{ 'x' * 10**9 }}",
    '{{ [0] * 10**10 }}',
    '{{ 10 ** 10 ** 10 }}',
    '{{ 7 ** 10 ** 8 }}',
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x' | indent(10**10, true) }}",
    "{{ 'x\n' * 10**6 | indent(10**6) }}",
    "{{ range(99999) | join('x' * 99999) }}",
    "{{ 'x' | replace('', 'y' * 10**9) }}",
    '{{ lipsum(n=10**9) }}',
    '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}',
    '{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}',
    "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    '{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}',
    '{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}',
    '{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}',
    '{{ ' + '(' * 5000 + '1' + ')' * 5000 + ' }}',
    '{{ ' + '[' * 90 + ']' * 90 + ' }}',
    '{{ 1 ' + '+ 1 ' * 20000 + '}}',
    '{% if 1 %}' * 2000 + '{% endif %}' * 2000,
    '{{ 1 / 0 }}',
    '{{ messages[99].content }}',
    '{{ raise_exception(messages * 9999) }}',
    "{{ raise_exception('a\n\x1b[31mb') }}",
    '{{ self.__init__.__globals__ }}',
    '{{ cycler.__init__.__globals__.os.system("true") }}',
    "{{ '\ud800' }}",
    "{{ '\\ud800' }}",
    '{% include "x" %}',
    '{% extends "x" %}',
    "{% import 'os' as o %}",
    '{{ dict(messages) }}',
    '{{ range(10**9) | list }}',
    "{{ ('x' * 99999) | wordwrap(1) | length ** 9 }}",
    "{{ messages | map('upper') | list }}",
    '{{ [1, 2] | batch(10**10, 0) | list }}',
    '{{ [1, 2] | slice(10**9, 0) | list }}',
    "{{ ('x ' * 30) | urlize }}{{ 'a' | int(10**10) }}",
]
PARTS = "{{ }} {% %} {# #} for in endfor if - | ' ( [ ~".split()


# ---- spoiling ----------------------------------------------------------------------------------


def spoiled_bytes(rng: random.Random, content: bytes, head: int) -> bytes:
    """Flipped bits, numbers put over others, pieces cut or doubled; most of it before byte head."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(head if rng.random() < 0.85 else len(content))
        way = rng.randrange(6)
        if way == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            content[at : at + 8] = struct.pack('<Q', rng.choice(NUMBERS))
        elif way == 2:
            content[at : at + 4] = struct.pack('<I', rng.choice(NUMBERS[:6]))
        elif way == 3:
            del content[at : at + rng.choice([1, 4, 8, 100])]
        elif way == 4:
            content[at:at] = content[at : at + rng.choice([1, 8, 200])]
        else:
            del content[at:]
            break
        head = max(min(head, len(content)), 1)
        content = content or bytearray(1)
    return bytes(content)


def paths_of(value, path=()):
    """Paths of the values inside a JSON value; of a long list those of its ends."""
    inner = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inner = [(i, part) for i, part in enumerate(value) if i < 3 or i >= len(value) - 3]
    for key, part in list(inner)[:60]:
        yield (*path, key)
        yield from paths_of(part, (*path, key))


def spoiled_value(rng: random.Random, good, number: int):
    """A JSON value with a part of another type; in turn every part and every wrong value."""
    value = copy.deepcopy(good)
    paths = list(paths_of(value))
    wrong, path = WRONG[number % len(WRONG)], paths[number // len(WRONG) % len(paths)]
    if rng.random() < 0.4:
        wrong, path = rng.choice(WRONG), rng.choice(paths)
    *above, last = path
    parent = functools.reduce(lambda part, key: part[key], above, value)
    if isinstance(parent, dict) and rng.random() < 0.1:
        del parent[last]
    elif isinstance(parent, dict) and rng.random() < 0.1:
        parent[rng.choice(['', 'x', str(last) * 2])] = parent.pop(last)
    else:
        parent[last] = wrong
    return value


def spoiled_json(rng: random.Random, good, number: int) -> bytes:
    """The text of a spoiled value, or a spoiled text."""
    text = json.dumps(spoiled_value(rng, good, number) if rng.random() < 0.85 else good)
    way = rng.random()
    if way < 0.06:
        text = spoiled_bytes(rng, text.encode(), len(text)).decode('latin-1')
        return text.encode('latin-1')
    if way < 0.10:  # every key twice
        text = text.replace('{"', '{"x": 1, "x": 2, "', 3)
    elif way < 0.12:
        text = '[' * 100_000 + text
    elif way < 0.14:
        text = text.replace('1', '1' * 5000, 1)
    elif way < 0.15:
        text = rng.choice(['', 'null', '[]', '"x"', '\ufeff' + text, text + text])
    return text.encode()


# ---- the kinds of files ------------------------------------------------------------------------


def safetensors_parts(content: bytes):
    (length,) = struct.unpack('<Q', content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def spoil_safetensors(rng, content, number):
    header, data = safetensors_parts(content)
    if rng.random() < 0.5:
        return spoiled_bytes(rng, content, 8 + len(content) - len(data))
    text = spoiled_json(rng, header, number)
    return struct.pack('<Q', len(text)) + text + data


def spoil_gguf(rng, content, number, *, names):
    """Bytes, or the type and the value of one of its fields."""
    name = names[number % len(names)].encode()
    if rng.random() < 0.5:
        return spoiled_bytes(rng, content, content.find(b'output_norm') + 200)
    at = content.find(name) + len(name)
    content = bytearray(content)
    if rng.random() < 0.5:
        content[at : at + 4] = struct.pack('<I', rng.choice([*range(14), 99]))
    else:
        form = rng.choice(['I', 'Q', 'f'])
        value = rng.choice([*WRONG[8:11], 0.0]) if form == 'f' else rng.choice(NUMBERS)
        value = max(value, -3e38) if form == 'f' else value % 2 ** (32 if form == 'I' else 64)
        packed = struct.pack(f'<{form}', value)
        content[at + 4 : at + 4 + len(packed)] = packed
    return bytes(content)


def spoil_template(rng, content, number):
    if number < len(TEMPLATES):
        return TEMPLATES[number].encode('utf-8', errors='surrogatepass')
    text = CHATML
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(text))
        cut = at + rng.choice([0, 0, 1, 5, 20])
        text = text[:at] + rng.choice(['', *PARTS]) + text[cut:]
    return text.encode()


def spoil_replies(rng, content, number):
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    if rng.random() < 0.3:
        return spoiled_bytes(rng, content, len(content))
    lines[at] = spoiled_json(rng, json.loads(lines[at]), number)
    lines[at] += b'\n' if rng.random() < 0.8 else b''
    return b''.join(lines)


def spoil_json_file(rng, content, number):
    return spoiled_json(rng, json.loads(content), number)


def both(*reads):
    """Refusals of several readers of one file, each of which is tried; [] = all loaded it."""
    refused = []
    for read in reads:
        try:
            read()
        except (ValueError, OSError) as error:
            refused.append(files.in_words(error))
    return refused


def read_tokenizer(path):
    tokenizer = load_tokenizer(path)
    check_fits(tokenizer, 10**6)
    build_chat(tokenizer)
    tokenizer.decode(tokenizer.encode('turn 1\n'))


def read_model(path):
    weights.load_model(path)


def read_replies(path):
    """For a replay, which needs it; for a run, which sets a damaged one aside; for a page."""
    about = {'step': 1, 'split': 'train'}
    refused = both(lambda: replies.choose(path, about), lambda: replies.newest(path, 1))
    content = path.read_bytes()
    aside = replies.cut(path, 1)
    assert replies.newest(path, 1) == [], 'steps that are played again are in the log'
    if aside is not None:
        assert aside.read_bytes() == content and refused, 'what was set aside is not what was there'
        aside.unlink()
    return refused


def read_versions(path):
    """For a replay, step by step, as PartialRollout asks; for a run that goes on from step 1."""

    def replay():
        plan, turns = versions.Plan(path, 1, 2), (0, 1)
        for step in range(1, plan.last_of(1, 2) + 1):
            for row, turn in itertools.product(range(2), turns):
                plan.took(2 * step + row, turn, plan.version(2 * step + row, turn))
        left = {step: plan.left(step) for step in (1, 2)}
        if any(left.values()):
            raise ValueError(f'{path}: a step does not come to an end: {left}')

    content = path.read_bytes()
    refused = both(replay)
    aside = replies.cut(path, 1, versions.line_of)
    if aside is not None:
        assert aside.read_bytes() == content and refused, 'what was set aside is not what was there'
        aside.unlink()
    return refused


def good_files(folder: pathlib.Path) -> dict:
    """For each kind: (file that is spoiled, how, its readers as a function that says refusals)."""
    write_model(folder / 'one', SMALL, hf_tensors(SMALL))
    write_model(folder / 'two', SMALL, hf_tensors(SMALL), files=2)
    write_gguf_with_tokenizer(folder / 'm.gguf', SMALL)
    write_byte_pair(folder / 'bytes', eos_token='<|im_end|>', pad_token={'content': '<|im_end|>'})
    (folder / 'bytes' / 'generation_config.json').write_text('{"eos_token_id": [301]}')
    write_byte_pair(folder / 'chat', eos_token='<|im_end|>')
    (folder / 'pieces').mkdir()
    (folder / 'pieces' / 'tokenizer.json').write_text(load_tokenizer(DEMO_MODEL).to_json())
    rows = [
        REPLY | {'step': step, 'stream': stream, 'turn': turn}
        for step, stream, turn in itertools.product((0, 1), repeat=3)
    ]
    (folder / 'replies.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    plans = [{'step': step, 'versions': [[step, step], [1, step]]} for step in (1, 2)]
    plan = folder / 'versions.jsonl'
    plan.write_text(''.join(json.dumps(row) + '\n' for row in plans))
    template = folder / 'chat' / 'chat_template.jinja'
    template.write_text(CHATML)

    def reads(*readers, of):
        return lambda: both(*(functools.partial(read, of) for read in readers))

    one, two, gguf_path = folder / 'one', folder / 'two', folder / 'm.gguf'
    known = gguf_file.read(gguf_path)
    spoil = functools.partial(spoil_gguf, names=[*known.fields, *list(known.tensors)[:4]])
    log = folder / 'replies.jsonl'
    return {
        'config': [(one / 'config.json', spoil_json_file, reads(read_model, of=one))],
        'index': [(two / weights.INDEX, spoil_json_file, reads(read_model, of=two))],
        'safetensors': [
            (one / weights.SINGLE, spoil_safetensors, reads(read_model, of=one)),
            (two / 'part1.safetensors', spoil_safetensors, reads(read_model, of=two)),
        ],
        'gguf': [(gguf_path, spoil, reads(read_model, read_tokenizer, of=gguf_path))],
        'tokenizer': [
            (folder / where / name, spoil_json_file, reads(read_tokenizer, of=folder / where))
            for where, name in [
                ('bytes', 'tokenizer.json'),
                ('bytes', 'tokenizer.json'),
                ('bytes', 'tokenizer_config.json'),
                ('bytes', 'generation_config.json'),
                ('pieces', 'tokenizer.json'),
            ]
        ],
        'template': [(template, spoil_template, reads(read_tokenizer, of=folder / 'chat'))],
        'replies': [(log, spoil_replies, lambda: read_replies(log))],
        'versions': [(plan, spoil_replies, lambda: read_versions(plan))],
    }


# ---- one file ----------------------------------------------------------------------------------


class Fuzz:
    """Good files in a folder, of which one at a time is spoiled and read."""

    def __init__(self, folder: pathlib.Path, seed: int = 0):
        self.seed = seed
        self.folder = folder
        self.good = good_files(folder)
        for cases in self.good.values():
            for path, _, read in cases:
                content = path.read_bytes()
                assert not read(), path
                path.write_bytes(content)  # a run cuts its log

    def try_one(self, number: int) -> dict:
        """What became of file `number`: its kind, outcome, refusals, seconds and bytes."""
        kind = KINDS[number % len(KINDS)]
        rng = random.Random(f'{self.seed} {number}')
        count = number // len(KINDS) * SHARES[kind] + number % len(KINDS) - KINDS.index(kind)
        cases = self.good[kind]
        path, spoil, read = cases[count % len(cases)]
        content = path.read_bytes()
        path.write_bytes(spoil(rng, content, count // len(cases)))
        cpu, began, memory = cpu_s(), time.monotonic(), reset_peak()
        found = {'number': number, 'kind': kind, 'outcome': 'loaded', 'said': []}
        try:
            found['said'] = read()
            found['outcome'] = 'refused' if found['said'] else 'loaded'
            wrong = [line for line in found['said'] if not good_line(line, self.folder)]
            if wrong:
                found |= {'outcome': 'bad line', 'said': wrong}
        except FAILURES as error:
            found |= {'outcome': type(error).__name__, 'said': [str(error)[:300]]}
        found |= {'cpu_s': cpu_s() - cpu, 'seconds': time.monotonic() - began}
        found['bytes'] = peak() - memory
        if found['cpu_s'] > CPU_S:
            found['outcome'] = 'slow'
        if found['bytes'] > MEMORY:
            found['outcome'] = 'large'
        path.write_bytes(content)
        return found


def good_line(text: str, folder: pathlib.Path) -> bool:
    """Whether a refusal is a line for a terminal, and names the file or its folder."""
    return str(folder) in text and text.isprintable() and len(text) <= LONGEST_LINE


def cpu_s() -> float:
    """Seconds that this process and its children have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def status(name: str) -> int:
    """Bytes of this process by /proc; 0 where there is none."""
    path = pathlib.Path('/proc/self/status')
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{name}:'))


def peak() -> int:
    return status('VmHWM')


def reset_peak() -> int:
    """Lets the peak begin anew; returns what is resident now."""
    path = pathlib.Path('/proc/self/clear_refs')
    if path.exists():
        path.write_text('5')
    return status('VmRSS')


def failures(found: list[dict]) -> list[dict]:
    return [one for one in found if one['outcome'] not in ('loaded', 'refused')]


# ---- many files --------------------------------------------------------------------------------


def child(first: int, last: int, seed: int) -> None:
    """Tries files and prints a line for each."""
    with tempfile.TemporaryDirectory(prefix='fuzz') as folder:
        fuzz = Fuzz(pathlib.Path(folder), seed)
        if sys.platform == 'linux':
            most = status('VmSize') + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        print(json.dumps({'ready': True}), flush=True)
        for number in range(first, last):
            print(json.dumps(fuzz.try_one(number)), flush=True)


def lines_of(process: subprocess.Popen):
    """What a child prints; ends where it ends, or is silent for too long and is killed."""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], HANG_S)
        line = process.stdout.readline() if ready else ''
        if not line:
            process.kill()
            process.wait()
            return
        yield json.loads(line)


def run(count: int, seed: int = 0) -> list[dict]:
    """Tries so many files in child processes."""
    found: list[dict] = []
    places = (str(TESTS.parent), str(TESTS))  # also where pytest has set the path of this process
    while len(found) < count:
        words = [f'--first={len(found)}', f'--files={count}', f'--seed={seed}', '--child']
        process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(places)),
        )
        told = list(lines_of(process))
        if not told:
            raise RuntimeError('a child did not begin: run it with --child to see why')
        found += told[1:]
        if len(found) < count:
            number = len(found)
            kind = KINDS[number % len(KINDS)]
            found.append(
                {'number': number, 'kind': kind, 'outcome': 'ended the process', 'said': []}
                | {'cpu_s': 0.0, 'seconds': 0.0, 'bytes': 0}
            )
    return found


def tally(found: list[dict]) -> str:
    """A line for each kind of file: outcomes, and what the most expensive one took."""
    lines = []
    for kind in SHARES:
        own = [one for one in found if one['kind'] == kind]
        outcomes = dict(collections.Counter(one['outcome'] for one in own))
        cpu, size = (max((one[name] for one in own), default=0) for name in ('cpu_s', 'bytes'))
        lines.append(f'{kind}: {outcomes}, at most {cpu:.2f} CPU s and {size / 2**20:.0f} MB')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--files', type=int, default=2000)
    parser.add_argument('--first', type=int, default=0)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--show', action='store_true', help='print every refusal')
    parser.add_argument('--child', action='store_true', help='read the files in this process')
    args = parser.parse_args()
    if args.child:
        child(args.first, args.files, args.seed)
        return
    began = time.monotonic()
    found = run(args.files, args.seed)
    for one in found if args.show else failures(found):
        said = files.in_line('; '.join(one['said']))
        print(f'{one["number"]:5} {one["kind"]:12} {one["outcome"]:18} {said}')
    print(tally(found))
    print(f'{len(found)} files in {time.monotonic() - began:.0f} s')
    sys.exit(1 if failures(found) else 0)


if __name__ == '__main__':
    main()
