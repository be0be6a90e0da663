"""What the READMEs say is so: commands, fields, files, links, tables; their examples are run."""

import csv
import functools
import importlib
import importlib.util
import json
import pathlib
import re
import shlex
import tomllib

import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import qwen_vocabulary
import test_probes as probes
import toy_rollouts as toy

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.envs import ENVIRONMENTS
from agentrl_jax.measure import collapse, metrics
from agentrl_jax.records import report, run_log
from agentrl_jax.rl.algorithm import Filter
from agentrl_jax.run.config import Config, effective
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.parts import build_environment
from agentrl_jax.settings import pages, tree
from agentrl_jax.settings.marks import OneOf
from agentrl_jax.text import prompts
from agentrl_jax.text import task as text
from configs import base, demo

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'agentrl_jax'
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob('*/__init__.py'))
# By folder: '' is the project's own, 'run' that of agentrl_jax/run
DOCUMENTS = {
    folder: path.read_text(encoding='utf-8')
    for folder, path in [
        ('', ROOT / 'README.md'),
        ('tpu_scripts', ROOT / 'tpu_scripts' / 'README.md'),
        *((folder, PACKAGE / folder / 'README.md') for folder in FOLDERS),
    ]
}
README, EVERYTHING = DOCUMENTS[''], '\n'.join(DOCUMENTS.values())
CONFIGS = sorted(path.stem for path in (ROOT / 'configs').glob('*.py') if path.stem[0] != '_')
REAL = ('frozen_lake', 'sokoban', 'bandit')  # RAGEN's configs for a real checkpoint
FOREIGN = ('gcloud', 'uvx', '.')  # commands of other programs


def folder_of(document):
    return ROOT / document if document in ('', 'tpu_scripts') else PACKAGE / document


def blocks(language, source=EVERYTHING):
    """Contents of the fenced code blocks of a language."""
    return re.findall(rf'^```{language}\n(.*?)^```$', source, flags=re.MULTILINE | re.DOTALL)


def section(document, title):
    found = re.search(
        rf'^## {title}\n(.*?)(?=^## |\Z)', DOCUMENTS[document], flags=re.MULTILINE | re.DOTALL
    )
    assert found, f'the README of {document} has no section {title}'
    return found[1]


def table_names(source):
    """Names in the first column of a table, in order; several of one row count each."""
    cells = re.findall(r'^\| (`[^|]+`) \|', source, flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r'`([^`]+)`', cell)]


def commands():
    """Words of every command in a block or in a line of text, continuation lines joined."""
    shell = '\n'.join(blocks('sh')).replace('\\\n', ' ').splitlines()
    inline = re.findall(r'`((?:python -m|make) [^`<]+)`', EVERYTHING)
    found = [shlex.split(line, comments=True) for line in [*shell, *inline] if line.strip()]
    found = [[word for word in words if not re.match('[A-Z_]+=', word)] for words in found]
    unique = {tuple(words): words for words in found if words and words[0] not in FOREIGN}
    return list(unique.values())


def field(cfg, name):
    """The value of a dotted field; fails if there is none."""
    for part in name.split('.'):
        assert part in cfg, f'a README names {name}, which no config has'
        cfg = cfg[part]
    return cfg


def flag_definitions(path):
    """Source of a command and of the modules it imports that define flags."""
    source = path.read_text(encoding='utf-8')
    imported = re.findall(r'^from (agentrl_jax[\w.]*) import (.+)$', source, flags=re.MULTILINE)
    for package, names in imported:
        for name in ['', *names.split(', ')]:  # the module itself, or a name in a package
            module = ROOT / pathlib.Path(*package.split('.'), name).with_suffix('.py')
            text = module.read_text(encoding='utf-8') if module.is_file() else ''
            source += text if 'flags.DEFINE' in text else ''
    return source


def load(name, source, folder):
    """A code block as a module."""
    path = folder / f'{name}.py'
    path.write_text(source, encoding='utf-8')
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- commands, files, links --------------------------------------------------------------------


def test_there_are_commands_to_check():
    run = {words[2] for words in commands() if words[:2] == ['python', '-m']}
    tools = {'train', 'evaluate', 'play', 'view', 'export', 'plan', 'sweep', 'tables'}
    assert {f'agentrl_jax.{tool}' for tool in (*tools, 'envs.reference')} <= run
    assert ['make', 'demo'] in commands() and ['make', 'test'] in commands()
    assert ['tpu_scripts/delete', 'my-tpu'] in commands()


@pytest.mark.parametrize('words', commands(), ids=' '.join)
def test_a_command_names_modules_configs_fields_and_flags_that_exist(words):
    assert_exists(words)


def assert_exists(words):
    """All that a command names is there; one behind `--` is looked at too."""
    if words[0] == 'make':
        targets = re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), flags=re.MULTILINE)
        assert set(words[1:]) <= set(targets)
        return
    if words[:2] == ['hf', 'download']:
        assert words[2].split('/')[1] == words[4] and words[3] == '--local-dir'
        return
    if words[0].startswith('tpu_scripts/'):
        assert (ROOT / words[0]).is_file(), words[0]
        if '--' in words:
            assert_exists(words[words.index('--') + 1 :])
        return
    assert words[:2] == ['python', '-m']
    spec = importlib.util.find_spec(words[2])
    assert spec is not None, words[2]
    source = flag_definitions(pathlib.Path(spec.origin))
    flags = dict(word[2:].partition('=')[::2] for word in words[3:] if word.startswith('--'))
    cfg = base.get_config()  # with --workdir alone: the config of the run
    if 'config' in flags:
        path = pathlib.PurePosixPath(flags['config'])
        assert (ROOT / path).is_file(), flags['config']
        cfg = importlib.import_module('.'.join(path.with_suffix('').parts)).get_config()
    for flag, value in flags.items():
        if flag.startswith('config.'):
            old = field(cfg, flag.removeprefix('config.'))
            if old is not None:  # a number where the config has a number
                type(old)(value)
        else:
            assert f"'{flag}'" in source or f"'--{flag}'" in source, flag


def test_the_mesh_of_a_pasted_tpu_command_is_one_that_was_planned():
    """Without mesh.fsdp, as it was, the update takes 17.4 of the 15.75 GiB of a chip."""
    example = (ROOT / 'tpu_scripts' / 'env.example').read_text()
    kind, chips = re.search(r'TPU_TYPE:=v(\d)litepod-(\d+)\}', example).groups()
    topology = {('5', '8'): 'v5e:2x4'}[kind, chips]
    trains = [
        words[words.index('--') + 1 :]
        for words in commands()
        if words[1:2] == ['my-tpu'] and 'agentrl_jax.train' in words
    ]
    # A workdir belongs to one config: the command that traces a run is the run's own.
    assert len(trains) >= 2 and all(words == trains[0] for words in trains)
    flags = dict(word.partition('=')[::2] for word in trains[0][3:])
    model = flags['--config.model.path'].rpartition('/')[2].removesuffix('-Instruct')
    meshes = {name: value for name, value in flags.items() if name.startswith('--config.mesh.')}
    settings = ', '.join(f'`{name[9:]}={value}`' for name, value in meshes.items())
    plans = (ROOT / 'benchmarks' / 'plans.md').read_text()
    row = f'| {model} | {topology} | {settings} | now |'
    assert re.search(rf'^{re.escape(row)}.*\| yes, of ', plans, flags=re.MULTILINE), row
    asked = {'--config': flags['--config'], '--topology': topology, '--model': model} | meshes
    plan = [words for words in commands() if words[1:3] == ['-m', 'agentrl_jax.plan']]
    assert asked in [dict(word.partition('=')[::2] for word in words[3:]) for words in plan]


def test_commands_that_compile_for_long_keep_their_programs():
    lines = '\n'.join(blocks('sh', README)).replace('\\\n', ' ').splitlines()
    long = [line for line in lines if '--config.model.path' in line]
    assert len(long) == 2
    assert all(line.startswith('JAX_COMPILATION_CACHE_DIR=') for line in long)
    for document in ('run', 'machine', 'tpu_scripts'):
        assert 'JAX_COMPILATION_CACHE_DIR' in DOCUMENTS[document]


def test_every_field_that_is_named_exists():
    cfg = base.get_config()
    groups = '|'.join(name for name in cfg if hasattr(cfg[name], 'items'))
    named = re.findall(r'--config\.([a-z_.]+)', EVERYTHING)
    named += re.findall(rf'`(?:cfg\.)?((?:{groups})\.(?!py\b)[a-z_]+)\b', EVERYTHING)
    assert len(named) > 100
    for name in named:
        field(cfg, name)


def test_every_file_that_is_named_exists():
    folders = 'agentrl_jax|configs|tests|experiments|benchmarks|tpu_scripts'
    named = set(re.findall(rf'\b((?:{folders})/[\w/]+\.[a-z]+)', EVERYTHING))
    assert len(named) > 30
    missing = sorted(name for name in named if not (ROOT / name).is_file())
    assert not missing, missing


@pytest.mark.parametrize('document', FOLDERS)
def test_a_folder_s_readme_names_its_modules(document):
    """The lines before the first heading say where to begin: at least two files of the folder."""
    named = re.findall(r'`([\w/]+\.py)`', DOCUMENTS[document].split('\n## ')[0])
    named = [name for name in named if not name.startswith(('agentrl_jax/', 'configs/'))]
    missing = [name for name in named if not (folder_of(document) / name).is_file()]
    modules = {path.name for path in folder_of(document).glob('*.py')} - {'__init__.py'}
    assert not missing and len(named) >= min(2, len(modules)), missing
    assert DOCUMENTS[document].startswith(f'# {document}/\n\n')


@pytest.mark.parametrize('document', DOCUMENTS)
def test_every_link_and_picture_leads_somewhere(document):
    for target in re.findall(r'\]\(([^)\s]+)\)', DOCUMENTS[document]):
        path, _, heading = target.partition('#')
        linked = folder_of(document) / path
        assert linked.is_file(), target
        titles = (
            re.findall(r'^##+ (.*)$', linked.read_text(), flags=re.MULTILINE) if heading else []
        )
        assert not heading or heading in [t.lower().replace(' ', '-') for t in titles], target


def test_every_folder_command_and_config_is_listed():
    folders = re.findall(
        r'^\| \[(\w+)\]\(agentrl_jax/(\w+)/README\.md\) \|', README, flags=re.MULTILINE
    )
    assert sorted(folder for folder, _ in folders) == FOLDERS
    assert all(name == target for name, target in folders)
    files = {path.stem for path in PACKAGE.glob('*.py')} - {'__init__', '__main__', 'types'}
    listed = table_names(section('', 'Where is what'))
    assert len(listed) == len(files) and set(listed) == files
    assert not [name for name in CONFIGS if f'configs/{name}.py' not in DOCUMENTS['run']]


# ---- tables ------------------------------------------------------------------------------------


def test_algorithms_and_environments_are_those_there_are():
    assert table_names(section('algorithms', 'The algorithms')) == list(ALGORITHMS)
    assert table_names(section('envs', 'Environments')) == list(ENVIRONMENTS)


def test_filters_and_styles_of_prompts_are_those_there_are():
    rules = tree.leaves(Filter)['filter.rule'].marks[OneOf].names
    assert sorted(table_names(section('algorithms', 'Filters'))) == sorted(rules)
    assert table_names(section('text', 'Wording')) == list(prompts.STYLES)


def test_options_of_single_algorithms_are_those_they_take():
    """What the table says of an option's users is what their fields say."""
    rows = re.findall(
        r'^\| (`.+?) \| (.+) \|$',
        section('algorithms', 'Options of single algorithms'),
        re.MULTILINE,
    )
    assert len(rows) == 21
    for names, users in rows:
        option = re.search(r'`(\w+\.\w+)`', names)[1]
        takers = {name for name, cls in ALGORITHMS.items() if option in tree.leaves(cls)}
        said = set(re.findall(r'`(\w+)`', users))
        if users.startswith('all but'):
            said = ALGORITHMS.keys() - said
        if option == 'turn_credit.turn_gamma':  # 'the same': those of the row above
            said |= {'mt_grpo', 'gspo_turn'}
        assert said == takers or option == 'loss.norm_length', (option, said, takers)


def test_the_tables_of_metrics_and_bounds_are_those_in_the_code():
    assert metrics.metrics_table() in section('measure', 'Metrics')
    assert pages.table(Config) in section('run', 'Fields')


def test_the_table_of_signals_has_each_with_its_metric_limit_and_patience():
    alarm, rows = base.get_config().alarm, {}
    for line in section('measure', 'Collapse').splitlines():
        if match := re.match(r'\| `alarm\.(\w+)` \| (.*) \|$', line):
            rows[match[1]] = match[2]
    assert list(rows) == list(collapse.SIGNALS)
    for name, signal in collapse.SIGNALS.items():
        assert f'`{signal.metric}`' in rows[name]
        assert str(alarm[name].patience) in rows[name]
        assert f'{alarm[name].limit:g} x' in rows[name] or signal.relative == ''
        assert f'{alarm[name].limit:g}' in rows[name] or alarm[name].limit < 1e-5
        assert ('stops the run' in rows[name]) == (alarm[name].action == 'stop')


def test_figures_in_the_readme_are_those_of_the_experiment():
    made = (ROOT / 'experiments' / 'algorithms' / 'table' / 'table.md').read_text()
    table = made.split('\n\n')[0]
    assert table.startswith('| algorithm | FrozenLake |') and table in section('', 'Results')


def test_the_demo_s_seeds_are_those_of_its_table():
    folder = ROOT / 'experiments' / 'demo_cloned'
    page = (folder / 'README.md').read_text()
    with (folder / 'table' / 'runs.csv').open() as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 3
    for run in runs:
        value, low, high = (100 * float(run[n]) for n in ('value', 'wilson_low', 'wilson_high'))
        trained = f'{value:.1f} % [{low:.1f}, {high:.1f}]'
        assert re.search(rf'^\| {run["seed"]} \| .* \| {re.escape(trained)} \|', page, re.MULTILINE)


# ---- what a run prints -------------------------------------------------------------------------


def test_what_the_demo_prints_is_from_its_recorded_output():
    printed = (ROOT / 'experiments' / 'demo' / 'output.txt').read_text().splitlines()
    shown = blocks('text', README)[0].splitlines()
    places = [printed.index(line) for line in shown]
    assert places == sorted(places) and places[-7:] == list(range(len(printed)))[-7:]


def test_the_last_lines_of_a_run_are_worded_as_shown(tmp_path):
    row = {'time_s': 1.0, 'perf/recompiles': 0, 'eval/success': 0.5}
    row |= {'eval/success_low': 0.4, 'eval/success_high': 0.6}
    rows = [json.dumps({'step': step} | row) + '\n' for step in (0, 9)]
    (tmp_path / run_log.METRICS_FILE).write_text(''.join(rows))
    (tmp_path / report.REFERENCE_FILE).write_text('{"random": 0.25, "oracle": 1.0}\n')
    (tmp_path / 'rollouts').mkdir()
    (tmp_path / 'rollouts' / 'step_000008.html').touch()

    def wording(printed):
        printed = re.sub(r'[\d.]+', '..', printed.replace(str(tmp_path), 'runs/demo'))
        return [' '.join(line.split()) for line in printed.strip().splitlines()]

    shown = blocks('text', README)[0]
    command = re.search(r'^resume +(.*)$', shown, flags=re.MULTILINE)[1]
    summary = wording(report.summary(tmp_path, command))
    assert wording(shown)[-len(summary) :] == summary
    makefile = (ROOT / 'Makefile').read_text()
    assert command in makefile.replace('$(RUN)', 'python')
    (slowest,) = re.findall(r'--durations (\d+)', makefile)
    assert f'the slowest {slowest},' in README


# ---- configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize('name', [name for name in CONFIGS if name != 'base'])
def test_a_config_says_command_hardware_time_and_score(name):
    doc = importlib.import_module(f'configs.{name}').__doc__
    assert f'python -m agentrl_jax.train --config=configs/{name}.py --workdir=' in doc
    said = re.findall(r'^(Hardware|Time|Score): \S', doc, flags=re.MULTILINE)
    assert said == ['Hardware', 'Time', 'Score']
    files = re.findall(r'\b((?:experiments|benchmarks|agentrl_jax)/[\w/]+\.(?:md|py))', doc)
    assert all((ROOT / file).is_file() for file in files), files


@functools.cache
def real_task(name):
    """(config, its task on a small pool in the words of Qwen2.5)."""
    cfg = importlib.import_module(f'configs.{name}').get_config()
    cfg.env.train_levels = 8
    task = text.build_task(
        *build_environment(read_config(cfg), 'train'),
        qwen_vocabulary.qwen_tokenizer(),
        style=cfg.env.prompt,
        max_turns=cfg.env.max_turns,
        max_words=cfg.env.max_words,
        max_actions_per_turn=cfg.env.max_actions_per_turn,
        max_actions_per_episode=cfg.env.max_actions_per_episode,
    )
    return cfg, task


@pytest.mark.slow('builds the texts of real checkpoints')
@pytest.mark.parametrize('name', [*REAL, 'library'])
def test_token_budgets_for_real_checkpoints_hold_every_turn_at_its_longest(name):
    cfg, task = real_task(name)
    longest = cfg.env.max_turns * (task.width + cfg.rollout.max_response)
    assert task.prefix.shape[0] + longest <= cfg.rollout.max_tokens


@pytest.mark.parametrize('name', REAL)
def test_configs_for_real_checkpoints_are_the_paper_s(name):
    """v0423: 8 x 16 episodes, a quarter kept = 32 = one optimiser step; 1e-6, 1e-5; .2/.28."""
    cfg = effective(importlib.import_module(f'configs.{name}').get_config())
    assert cfg.env.name == name and cfg.algorithm == 'ppo'
    assert (cfg.rollout.num_groups, cfg.rollout.group_size, cfg.filter.keep) == (8, 16, 0.25)
    assert 8 * 16 * cfg.filter.keep == cfg.batch.minibatch_rows == 32
    assert (cfg.optim.lr, cfg.optim.critic_lr) == (1e-6, 1e-5)
    assert (cfg.loss.clip_low, cfg.loss.clip_high, cfg.loss.dual_clip) == (0.2, 0.28, 0)
    assert (cfg.loss.kl_coef, cfg.loss.entropy_coef, cfg.loss.reward_on) == (0, 0.001, 'episode')
    assert (cfg.loss.gamma, cfg.loss.lam, cfg.eval.temperature, cfg.steps) == (1, 1, 0.5, 200)
    assert cfg.env.max_turns == (1 if name == 'bandit' else 5)


# ---- the examples -----------------------------------------------------------------------------


def test_the_ten_lines_run(monkeypatch, capsys, tmp_path, one_device):
    """They are played with a smaller config than the demo's."""
    monkeypatch.setattr(demo, 'get_config', lambda: micro_runs.plain('frozen_lake'))
    (source,) = blocks('python', README)
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 10
    load('ten_lines', source, tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(')')[0] for line in printed] == [f'{n} (16, 96' for n in range(3)]


def test_the_dialogue_is_that_of_the_experiment():
    page = (ROOT / 'experiments' / 'smollm2' / 'README.md').read_text(encoding='utf-8')
    dialogue = re.search(r'^```\n(before .*?)^```$', README, flags=re.MULTILINE | re.DOTALL)[1]
    for line in dialogue.splitlines():
        assert re.sub('^(before|after)? *', '', line) in page, line


def example(mark):
    """The one block of Python that holds `mark`; at most 40 lines of it are not blank."""
    (block,) = (block for block in blocks('python') if mark in block)
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 40
    return block


@pytest.fixture(scope='module')
def imitation(tmp_path_factory):
    source = example('def make_batch')
    return load('imitation', source, tmp_path_factory.mktemp('readme')).Imitation()


def test_the_example_algorithm_by_hand(imitation):
    # Group (1, 2, 3, 6): mean 3, only 6 lies above. Group (1, 1, 1, 1): nobody does.
    rewards = np.array([[1], [2], [3], [6], [1], [1], [1], [1]])
    out = toy.rollout_of([[(1, 2)]] * 8, rewards, length=4)
    batch = imitation.make_batch(out, toy.scores_of(out), group_size=4)
    expected = np.zeros((8, 4))
    expected[3, 1:3] = 1.0
    np.testing.assert_array_equal(batch.advantages, expected)
    assert batch.advantages.dtype == jnp.float32 and batch.returns.dtype == jnp.float32


def test_the_example_algorithm_learns(imitation):
    returns, _ = probes.train(imitation, probes.delayed, turns=2, steps=60)
    assert (returns[:, 0] < 0.5).all() and (returns[:, -5:].mean(1) > 0.95).all(), returns[:, -5:]


def test_the_readme_lists_every_extra_of_the_package():
    """`pip install .` and the extras stood nowhere."""
    known = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']
    table = README.split('| extra | for |')[1].split('\n\n')[0]
    listed = re.findall(r'^\| `(\w+)` \|', table, flags=re.MULTILINE)
    assert sorted(listed) == sorted(known['optional-dependencies'])
