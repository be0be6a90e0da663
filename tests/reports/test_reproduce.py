"""tpu_scripts/reproduce: its commands exist, it goes on where it was, it says what failed.

Nothing is trained: a python that notes its words, and fails or waits as asked, stands in.
"""

import json
import re
import shlex
import signal
import subprocess
import sys

import pytest
import test_readme as readme
from golden_text import assert_golden
from tpu_bench import ROOT, SCRIPTS, Bench, eventually

from benchmarks import reproduced

PYTHON = f"""#!/bin/sh
case "$*" in '-m benchmarks.reproduced '[sw]*) exec {shlex.quote(sys.executable)} "$@" ;; esac
echo "$*" >> "$STAND_IN/calls"
if [ -e "$STAND_IN/waits" ]; then
  trap 'echo stopped; exit 75' TERM
  touch "$STAND_IN/waiting"
  while :; do sleep 0.05; done
fi
echo "error: $(cat "$STAND_IN/broken")"
! grep -q -e "$(cat "$STAND_IN/broken")" <<END
$*
END
"""


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path / 'x', 'local', STAND_IN=str(tmp_path / 'x'))
    (bench.folder / 'bin' / 'python').write_text(PYTHON)
    breaks(bench, 'nothing')
    bench.out = bench.folder / 'an out'
    return bench


def breaks(bench, word):
    """Commands with this word fail from now on, and no others."""
    (bench.folder / 'broken').write_text(word)


def reproduce(bench, only, *words, code=0):
    words = [f'--out={bench.out}', f'--only={only}', *(words or ['--scale=tiny'])]
    return bench.call('reproduce', *words, code=code)


def calls(bench):
    path = bench.folder / 'calls'
    return path.read_text().splitlines() if path.exists() else []


def printed(*words):
    """{stage: words of its command} of a dry run."""
    said = subprocess.run(
        [SCRIPTS / 'reproduce', '--dry-run', *words], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {name[2:]: shlex.split(line) for name, line in zip(said[::2], said[1::2], strict=True)}


# ---- the commands ------------------------------------------------------------------------------


def assert_selects(words):
    """pytest is given files that exist, and words of -k that occur in them."""
    files = [ROOT / word for word in words if word.startswith('tests/')]
    text = ''.join(path.read_text() for path in files)
    chosen = words[words.index('-k') + 1].split(' or ') if '-k' in words else []
    assert files and all(word in text for word in chosen)


@pytest.mark.parametrize('words', [['--weights=a.gguf', '--devices=8'], ['--scale=tiny']])
def test_a_dry_run_prints_commands_whose_modules_fields_flags_and_tests_exist(words):
    stages = printed(*words)
    for command in stages.values():
        if command[0] == 'env':
            command = command[2:]
        if command[2] == 'pytest':
            assert_selects(command)
        elif command[2] == 'benchmarks.hosts':  # its options are the words of a call
            source = (ROOT / 'benchmarks' / 'hosts.py').read_text()
            options = {word.split('=')[0][2:] for word in command[3:]} - {'core', 'json'}
            assert all(f' {option}=' in source for option in options), options
        else:
            readme.assert_exists(command)
    full = words[0] != '--scale=tiny'
    assert ('parity.mesh' in stages) == full and ('clone' in stages) != full
    assert len([name for name in stages if name.startswith('train.')]) == (6 if full else 4)
    trained = [
        line for name, line in stages.items() if name.startswith(('train', 'step', 'before'))
    ]
    assert all(('--config.mesh.fsdp=8' in line) == full for line in trained)


def test_both_scales_have_the_same_stages():
    full, tiny = printed('--weights=a.gguf', '--seeds=2'), printed('--scale=tiny')
    assert [name for name in tiny if name not in ('clone', 'export')] == list(full)


@pytest.mark.parametrize(
    'words, said',
    [
        (['--dry-run'], '--weights= is missing'),
        (['--scale=huge'], '--scale=huge must be full or tiny'),
        (['--scale=tiny', '--weights=a.gguf'], 'makes weights of its own'),
        (['--scale=tiny', '--seeds=0'], '--seeds=0 and --devices=1 must be numbers'),
        (['--scale=tiny', '--dry-run', '--only=stepp'], '--only=stepp names no stage'),
        (['my-tpu', '--scale=tiny'], 'it takes options only, not my-tpu'),
        (['--scale=tiny', '--moe'], 'unknown option --moe'),
    ],
)
def test_wrong_words_are_named(words, said, bench):
    assert said in bench.call('reproduce', *words, code=2)
    assert calls(bench) == []


# ---- stages ------------------------------------------------------------------------------------


@pytest.mark.soak
def test_what_failed_is_named_and_repeated_and_what_ended_well_is_not(bench):
    breaks(bench, 'test_update.py')
    said = reproduce(bench, '[mp]*', code=1)
    assert '6 stages, 1 failed: parity.splits; ' in said and len(calls(bench)) == 6
    page = (bench.out / 'summary.md').read_text()
    assert '5 of 6 stages that were begun have ended with 0; not: parity.splits.' in page
    assert re.search(
        r'^\| parity\.splits \| 1 \| 1 \| \d+ \| .* \| error: test_update\.py \|$', page, re.M
    )
    breaks(bench, 'nothing')
    said = reproduce(bench, '[mp]*')
    assert said.count('done before') == 4 and '6 stages, 0 failed' in said
    again = [line.split()[1] for line in calls(bench)[6:]]
    assert again == ['benchmarks.reproduced', 'pytest']
    page = (bench.out / 'summary.md').read_text()
    assert '6 of 6 stages that were begun have ended with 0.' in page
    assert re.search(r'^\| parity\.splits \| 0 \| 2 \|', page, re.M)


@pytest.mark.soak
def test_a_stage_whose_weights_or_training_failed_is_not_run_and_says_so(bench):
    reproduce(bench, 'machine', '--weights=nowhere')
    said = reproduce(bench, '*0', '--weights=nowhere', code=1)
    assert 'train.frozen_lake.0: exit code 1' in said and 'test.sokoban.0: exit code 1' in said
    assert len(calls(bench)) == 1  # the look at the machine
    page = (bench.out / 'summary.md').read_text()
    assert page.count('| error: not run, since weights has not ended with 0 |') == 2
    assert '| error: not run, since train.sokoban.0 has not ended with 0 |' in page
    assert 'weights: exit code 1' in reproduce(bench, 'weights', '--weights=nowhere', code=1)
    assert 'hf download Qwen/Qwen2.5-Coder-0.5B-Instruct' in (bench.out / 'summary.md').read_text()


def test_without_an_accelerator_nothing_but_the_look_for_one_is_begun(bench):
    breaks(bench, '--accelerator')
    said = reproduce(bench, '[mwh]*', '--weights=qwen.gguf', code=1)
    assert '3 stages, 3 failed: machine weights hosts' in said and len(calls(bench)) == 1


def test_other_weights_do_not_go_into_the_same_folder(bench):
    reproduce(bench, 'machine', '--weights=one.gguf')
    said = reproduce(bench, 'machine', '--weights=two.gguf', code=1)
    assert 'was made with --scale=full --devices=1 --weights=one.gguf: take another --out' in said


@pytest.mark.soak
def test_a_signal_reaches_the_command_and_the_same_words_go_on(bench):
    reproduce(bench, 'machine')
    waits = bench.folder / 'waits'
    waits.touch()
    words = [f'--out={bench.out}', '--scale=tiny', '--only=parity.*']
    process = bench.start('reproduce', *words)
    eventually((bench.folder / 'waiting').exists, while_runs=process)
    process.send_signal(signal.SIGTERM)  # to the script alone, as `kill` does
    said = bench.end(process, code=75)
    assert 'parity.kernels: exit code 75' in said and 'parity.latency' not in said
    assert (bench.out / 'logs' / 'parity.kernels.log').read_text().endswith('stopped\n')
    waits.unlink()
    assert '5 stages, 0 failed' in reproduce(bench, 'parity.*')


def test_on_a_tpu_it_is_a_command_like_others_and_its_folder_may_lie_in_a_bucket(bench):
    bench.environment |= {
        'TPU_HOSTS': '1',
        'TPU_LOCAL_PYTHON': str(bench.folder / 'bin' / 'python'),
    }
    bench.call('create', 'demo')
    bench.call('setup', 'demo')
    words = ['tpu_scripts/reproduce', '--scale=tiny', '--only=machine', '--out=gs://my-bucket/out']
    (bench.folder / 'bin' / 'python').write_text(
        PYTHON.replace('[sw]*) exec', "[sw]* | '-c '*) exec")
    )
    assert '1 stages, 0 failed' in bench.call('run', 'demo', '--', *words)
    assert '| machine | 0 | 1 |' in (bench.buckets / 'my-bucket/out/summary.md').read_text()


# ---- machine, weights, summary -----------------------------------------------------------------


def test_the_machine_is_named_and_one_without_an_accelerator_refused():
    said = reproduced.machine(accelerator=False).splitlines()
    assert re.fullmatch(r'8 x cpu \(.+ cores\)', said[-1])
    assert said[0].startswith('commit: ') and any(line.startswith('jaxlib: ') for line in said)
    with pytest.raises(ValueError, match='jax sees no accelerator here: install jax'):
        reproduced.machine(accelerator=True)


def test_files_of_a_checkpoint_come_with_their_sums(tmp_path):
    empty = 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'  # of no bytes
    file = tmp_path / 'a.gguf'
    with pytest.raises(ValueError, match='there is no checkpoint at .*a.gguf; hf download'):
        reproduced.weights(str(file))
    file.touch()
    said = reproduced.weights(str(file)).splitlines()
    assert said == [f'a.gguf: 0 bytes, sha256 {empty}', '1 files, 0.000 GB']
    (tmp_path / 'config.json').touch()
    with pytest.raises(ValueError, match='there is no checkpoint'):
        reproduced.weights(str(tmp_path))  # no tensors
    (tmp_path / 'model.safetensors').touch()
    assert '2 files' in reproduced.weights(str(tmp_path))


def write_attempts(out, *rows):
    lines = ['\t'.join([*map(str, row), 'ended', 'abc', 'a "command"']) + '\n' for row in rows]
    (out / 'attempts.tsv').write_text(''.join(lines))
    (out / 'made').write_text('--scale=full\n')


def test_a_summary_by_hand(tmp_path):
    write_attempts(
        tmp_path,
        ['step.ppo', 0, 60],
        ['before.frozen_lake', 0, 20],
        ['train.frozen_lake.0', 75, 5],
        ['train.frozen_lake.0', 0, 7],
        ['test.frozen_lake.0', 0, 3],
        ['test.frozen_lake.1', 0, 3],
        ['test.sokoban.0', 3, 1],
    )
    for name in ('before.frozen_lake', 'train.frozen_lake.0', 'train.frozen_lake.1', 'logs'):
        (tmp_path / name).mkdir()
    reference = {'reference/random': 0.2, 'reference/oracle': 1.0}
    interval = {'eval/success_low': 0.1, 'eval/success_high': 0.9}
    for name, value in (('before', 0.25), ('train', 0.5), ('train', 0.75)):
        folder = f'{name}.frozen_lake' + ('' if name == 'before' else f'.{int(value == 0.75)}')
        record = {'eval/success': value} | interval | reference
        (tmp_path / folder / 'evaluation_test.json').write_text(json.dumps(record))
    rows = [
        {'step': 0},
        *({'sampler/logprob_gap': 2e-5, 'time/step_s': s} for s in (9.0, 3.0, 4.0)),
    ]
    metrics = tmp_path / 'train.frozen_lake.0' / 'metrics.jsonl'
    metrics.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    step = {'seconds': {'step': 3.5}, 'parts': {'collect': 1.0, 'update': 2.5}, 'peak_mib': 2048}
    step |= {'machine': {'unit': 'seconds'}}
    step |= {'programs': {'collect': {'share_of_limit': 0.61}, 'learn': {'share_of_matmul': 0.4}}}
    (tmp_path / 'step.ppo.json').write_text(json.dumps(step))
    (tmp_path / 'logs' / 'test.sokoban.0.log').write_text('a | b\nerror: x | y\n\n')
    assert_golden('reproduced.md', {'summary': reproduced.summary(tmp_path)})
