"""The origin of a run's figures, and the method name of a config."""

import json

import micro_runs
import pytest

from agentrl_jax.records import about, run_log
from agentrl_jax.records.method import method
from agentrl_jax.results.runs import flatten
from agentrl_jax.run.config import effective
from configs import demo_cloned

DEMO = flatten(effective(demo_cloned.get_config()).to_dict())


@pytest.mark.parametrize(
    'changes, name',
    [
        ({}, 'StarPO-S'),  # as in the docstring of the config
        ({'filter.keep': 1.0}, 'PPO'),
        ({'loss.clip_high': 0.2}, 'PPO, filtered'),
        ({'filter.rule': 'all'}, 'PPO'),
        ({'algorithm': 'mt_grpo', 'filter.keep': 1.0}, 'MT-GRPO'),
        ({'algorithm': 'reinforce_pp', 'filter.keep': 1.0}, 'REINFORCE++'),
        ({'curriculum.rounds': (2, 3), 'filter.keep': 1.0}, 'PPO, ScalingInter'),
        (
            {'algorithm': 'agent_evol', 'loss.clip_low': None},
            'AgentEvol, filtered',
        ),
        ({'algorithm': 'dapo', 'filter.rule': 'varied'}, 'DAPO'),
    ],
)
def test_the_method_name_of_a_config(changes, name):
    assert method(DEMO | changes) == name


def test_the_description_of_a_run():
    cfg = micro_runs.config('bandit', seed=3)
    facts = about.of_run(cfg, ['train.py', '--config=/home/me/configs/demo.py', '--workdir=x'])
    assert facts['method'] == 'PPO' and facts['seed'] == '3'
    assert facts['model'] == '1 layers of 32, from random weights'
    assert facts['config'] == 'configs/demo.py'
    assert facts['commit'] == about.short(about.commit())
    cfg = micro_runs.config('bandit', **{'model.path': '/weights/Qwen2.5-0.5B/', 'lora.rank': 8})
    facts = about.of_run(cfg.to_dict(), ['--config', 'demo.py'])
    assert facts['model'] == 'Qwen2.5-0.5B, LoRA rank 8' and facts['config'] == 'demo.py'
    assert 'config' not in about.of_run(cfg)


def test_config_json_names_commit_and_every_machine_of_a_run(tmp_path, monkeypatch):
    path = tmp_path / 'config.json'

    def config_on(machine):
        monkeypatch.setattr(about, 'machine', lambda: machine)
        run_log.write_config(tmp_path, {'seed': 1}, ['train'])
        return json.loads(path.read_text())

    assert config_on('1 x a')['commit'] == about.commit()
    assert config_on('1 x a')['machine'] == '1 x a'  # resumed on it
    assert config_on('2 x b')['machine'] == '1 x a; 2 x b'
    path.write_text('{"half')
    assert config_on('1 x c')['machine'] == '1 x c'
