"""READMEs: their commands parse, their links resolve, and their examples run."""

import importlib
import importlib.util
import pathlib
import re
import shlex

import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy

from configs import base, demo

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'agentrl_jax'
PAGES = ('README.md', 'INSTALL.md', 'CONTRIBUTING.md', 'AGENTS.md')
PATHS = [*(ROOT / name for name in PAGES), *sorted(PACKAGE.rglob('README.md'))]
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text(encoding='utf-8') for path in PATHS}
EVERYTHING = '\n'.join(DOCUMENTS.values())


def blocks(language, source=EVERYTHING):
    """Contents of the fenced code blocks of a language."""
    return re.findall(rf'^```{language}\n(.*?)^```$', source, flags=re.MULTILINE | re.DOTALL)


def commands():
    """Words of every command of this package, in a block or in a line of text."""
    shell = '\n'.join(blocks('sh')).replace('\\\n', ' ').splitlines()
    inline = re.findall(r'`((?:python -m|make) [^`<]+)`', EVERYTHING)
    lines = [shlex.split(line, comments=True) for line in [*shell, *inline]]
    for words in lines:
        words = [word for word in words if not re.match('[A-Z_]+=', word)]
        words = words[words.index('--') + 1 :] if '--' in words else words
        if words[:2] == ['python', '-m'] and words[2].startswith('agentrl_jax.'):
            yield ' '.join(words[2:])


def flag_definitions(path):
    """Source of a command and of the modules it imports that define flags."""
    source = path.read_text(encoding='utf-8')
    imported = re.findall(r'^ *from (agentrl_jax[\w.]*) import (.+)$', source, flags=re.MULTILINE)
    for package, names in imported:
        for name in ['', *names.split(', ')]:
            module = ROOT / pathlib.Path(*package.split('.'), name).with_suffix('.py')
            text = module.read_text(encoding='utf-8') if module.is_file() else ''
            source += flag_definitions(module) if 'flags.DEFINE' in text else ''
    return source


@pytest.mark.parametrize('command', sorted(set(commands())))
def test_a_command_names_modules_configs_fields_and_flags_that_exist(command):
    module, *words = command.split()
    spec = importlib.util.find_spec(module)
    source = flag_definitions(pathlib.Path(spec.origin))
    flags = dict(word[2:].partition('=')[::2] for word in words if word.startswith('--'))
    cfg = base.get_config()  # with --workdir alone: the config of the run
    if 'config' in flags:
        path = pathlib.PurePosixPath(flags['config'])
        cfg = importlib.import_module('.'.join(path.with_suffix('').parts)).get_config()
    for flag, value in flags.items():
        if not flag.startswith('config.'):
            assert f"'{flag}'" in source or f"'--{flag}'" in source, flag
            continue
        old = cfg
        for part in flag.removeprefix('config.').split('.'):
            old = old[part]
        if old is not None:  # a number if the config has a number
            type(old)(value)


@pytest.mark.parametrize('document', DOCUMENTS)
def test_every_link_and_picture_exists(document):
    for target in re.findall(r'\]\(([^)\s]+)\)', DOCUMENTS[document]):
        path, _, heading = target.partition('#')
        linked = ROOT / document if not path else (ROOT / document).parent / path
        if '://' in target:
            continue
        assert linked.exists(), target
        titles = re.findall(r'^##+ (.*)$', linked.read_text(), re.MULTILINE) if heading else []
        assert not heading or heading in [t.lower().replace(' ', '-') for t in titles], target


def load(source, folder):
    """Load a code block as a module."""
    path = folder / 'block.py'
    path.write_text(source, encoding='utf-8')
    spec = importlib.util.spec_from_file_location('block', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.soak
def test_the_step_in_a_few_lines_runs(monkeypatch, capsys, tmp_path, one_device):
    monkeypatch.setattr(demo, 'get_config', lambda: micro_runs.plain('frozen_lake'))
    source, _ = blocks('python', DOCUMENTS['README.md'])
    load(source, tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(')')[0] for line in printed] == [f'{n} (16, 96' for n in range(3)]


def test_the_example_algorithm_by_hand(tmp_path):
    method = re.sub('^', '    ', blocks('python', DOCUMENTS['README.md'])[1].strip(), flags=re.M)
    assert method in (PACKAGE / 'algorithms' / 'grpo.py').read_text(encoding='utf-8')
    (source,) = (block for block in blocks('python') if 'class Imitation' in block)
    # Group (1, 2, 3, 6): mean 3, only 6 is above. Group (1, 1, 1, 1): none is.
    rewards = np.array([[1], [2], [3], [6], [1], [1], [1], [1]])
    out = toy.rollout_of([[(1, 2)]] * 8, rewards, length=4)
    imitation = load(source, tmp_path).Imitation()
    batch = imitation.make_batch(out, toy.scores_of(out), group_size=4)
    expected = np.zeros((8, 4))
    expected[3, 1:3] = 1.0
    np.testing.assert_array_equal(batch.advantages, expected)
