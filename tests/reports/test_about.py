"""Where the figures of a run come from, and what a config is called."""

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
        ({}, 'StarPO-S'),  # what the docstring of the config says
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
def test_a_config_is_called_by_what_it_is(changes, name):
    assert method(DEMO | changes) == name


def test_what_a_page_says_of_a_run():
    cfg = micro_runs.config('bandit', seed=3)
    found = about.of_run(cfg, ['train.py', '--config=/home/me/configs/demo.py', '--workdir=x'])
    assert found['method'] == 'PPO' and found['seed'] == '3'
    assert found['model'] == '1 layers of 32, from random weights'
    assert found['config'] == 'configs/demo.py'
    assert found['commit'] == about.short(about.commit())
    cfg = micro_runs.config('bandit', **{'model.path': '/weights/Qwen2.5-0.5B/', 'lora.rank': 8})
    found = about.of_run(cfg.to_dict(), ['--config', 'demo.py'])
    assert found['model'] == 'Qwen2.5-0.5B, LoRA rank 8' and found['config'] == 'demo.py'
    assert 'config' not in about.of_run(cfg)


def test_config_json_names_commit_and_every_machine_of_a_run(tmp_path, monkeypatch):
    path = tmp_path / 'config.json'

    def written(machine):
        monkeypatch.setattr(about, 'machine', lambda: machine)
        run_log.write_config(tmp_path, {'seed': 1}, ['train'])
        return json.loads(path.read_text())

    assert written('1 x a')['commit'] == about.commit()
    assert written('1 x a')['machine'] == '1 x a'  # resumed there
    assert written('2 x b')['machine'] == '1 x a; 2 x b'
    path.write_text('{"half')
    assert written('1 x c')['machine'] == '1 x c'
