"""The world of envs/hosts/README.md is written, played and trained as its text says."""

import ast
import pathlib
import re
import shlex

import micro_runs
import numpy as np
import pytest

from agentrl_jax import train
from agentrl_jax.records import run_log
from agentrl_jax.run.config import read as read_config
from configs import base, demo_cloned

FOLDER = pathlib.Path(__file__).resolve().parents[2] / 'agentrl_jax' / 'envs' / 'hosts'
README = (FOLDER / 'README.md').read_text(encoding='utf-8')


def blocks(language):
    return re.findall(rf'^```{language}\n(.*?)^```$', README, flags=re.MULTILINE | re.DOTALL)


(WORLD,) = blocks('python')
TRAIN = 'agentrl_jax.train'
COMMANDS = [shlex.split(block.replace('\\\n', ' ')) for block in blocks('sh') if TRAIN in block]


def fields(words):
    """The fields that a command sets, as values."""
    found, cfg = {}, base.get_config()
    for word in words:
        if match := re.match(r'--config\.([a-z_.]+)=(.*)', word):
            section, leaf = match[1].split('.')
            kind = cfg[section].get_type(leaf)
            found[match[1]] = ast.literal_eval(match[2]) if kind is tuple else kind(match[2])
    return found


@pytest.fixture
def guess(tmp_path, monkeypatch):
    (tmp_path / 'guess.py').write_text(WORLD, encoding='utf-8')
    monkeypatch.syspath_prepend(tmp_path)
    import guess

    return guess


def test_the_world_is_played_by_hand(guess):
    world = guess.Guess()
    assert world.reset(7) == '4 left\n'
    number = world.number
    assert world.step('what?').observation == 'No number. 3 left\n'
    wrong = world.step(f'I say {number % 9 + 1}!')
    assert wrong.observation.split(',')[0] in ('larger', 'smaller') and not wrong.done
    assert world.step(str(number)).success and world.reset(7) == '4 left\n'
    assert world.number == number


@pytest.mark.usefixtures('quick_runs')
def test_it_trains_by_the_command_s_fields(guess, tmp_path):
    changes = fields(COMMANDS[0])
    assert changes['objects.make_object'] == 'guess:Guess'
    cfg = micro_runs.config('frozen_lake', **(changes | {'steps': 2, 'algorithm': 'grpo'}))
    assert train.train(cfg, str(tmp_path / 'run')) == 0
    rows = run_log.read_metrics(tmp_path / 'run' / run_log.METRICS_FILE)
    assert rows[-1]['step'] == 2 and np.isfinite(rows[1]['policy/loss'])
    page = (tmp_path / 'run' / 'rollouts' / 'step_000001.html').read_text()
    assert 'Guess my number.' in page and 'left' in page


@pytest.mark.parametrize('words', COMMANDS, ids=lambda words: words[4])
def test_its_commands_are_possible(words, guess):
    cfg = demo_cloned.get_config()
    cfg.update_from_flattened_dict(fields(words))
    read_config(cfg)
