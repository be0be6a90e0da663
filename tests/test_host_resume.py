"""Runs that are killed lose no bit and leave no server, and what chaos.py compares would tell.

tests/chaos.py does this to runs of every kind, as often as it is asked to.
"""

import json

import chaos
import pytest

from agentrl_jax.records import run_log
from agentrl_jax.run.config import read as read_config

pytestmark = pytest.mark.soak


def test_kill_9_changes_no_bit_and_leaves_no_server(tmp_path):
    runs = chaos.Chaos(tmp_path, seed=13)
    try:
        runs.of('hosts', kills=2)
    finally:
        runs.end()
    assert runs.tally.total() and runs.leaves > 10
    assert runs.compared['pages_of'] and runs.compared['replies_of']


@pytest.mark.parametrize('name', chaos.KINDS)
def test_every_kind_of_run_that_is_killed_is_possible(name):
    read_config(chaos.config_of(chaos.KINDS[name].changes))


def test_mixtures_agents_adapters_and_worlds_on_hosts_are_killed_too():
    """None of them was, nor was the best policy compared."""
    kinds = {name: chaos.config_of(kind.changes) for name, kind in chaos.KINDS.items()}
    served = {name for name in kinds if name.startswith('hosts')}
    assert all(kinds[name].textcraft.launch for name in served)
    assert {name for name in kinds if kinds[name].env.mix} == {'mix', 'hosts_mix'}
    agents = {(cfg.agent.name, cfg.agent.trials) for cfg in kinds.values()}
    assert agents >= {('plan', 2), ('reflect', 2)}
    assert kinds['lora'].lora.rank and kinds['best'].checkpoint.best
    assert any(kinds[name].curriculum.interpolate for name in served)
    assert any(chaos.KINDS[name].processes == 2 for name in served)


@pytest.mark.parametrize('named', ['step_000000.json', 'step_000000.html', 'replies.jsonl'])
def test_a_page_or_a_reply_that_differs_is_a_difference(tmp_path, named):
    """Only metrics and arrays were compared. What a clock says is none."""
    reply = dict(
        step=0, stream=0, trial=0, turn=0, item=0, action=0, observation='', instruction=''
    )
    reply |= dict(reward=0.0, done=False, success=False, figures=[], fault='', tries=1)
    for seconds, name in enumerate(('one', 'other')):
        folder = tmp_path / name / 'rollouts'
        folder.mkdir(parents=True)
        row = json.dumps({'step': 0, 'time_s': 0.0, 'policy/grad_norm': 1.0})
        (tmp_path / name / run_log.METRICS_FILE).write_text(row + '\n')
        text = name if named == 'step_000000.json' else ''
        page = {'text': text, 'worlds': [{'seconds': seconds}]}
        (folder / 'step_000000.json').write_text(json.dumps(page))
        if named == 'step_000000.html':
            (folder / named).write_text(name)
        if named == 'replies.jsonl':
            line = reply | {'seconds': float(seconds), 'observation': name}
            (tmp_path / name / named).write_text(json.dumps(line) + '\n')
    with pytest.raises(AssertionError, match=named):
        chaos.Chaos(tmp_path, seed=0).compare({}, tmp_path / 'one', tmp_path / 'other')
