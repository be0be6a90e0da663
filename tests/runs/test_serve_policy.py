"""A served policy begins its answers as in its run."""

import json
import threading
import urllib.request

import micro_runs
import pytest

from agentrl_jax import serve_policy
from agentrl_jax.run.config import read as read_config


def answered(served, **body):
    request = urllib.request.Request(
        f'{served.url}/chat/completions',
        json.dumps({'messages': [{'role': 'user', 'content': 'Where?'}]} | body).encode(),
        {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read())['choices'][0]['message']['content']


@pytest.mark.parametrize('constrain', ['', 'any'])
def test_answers_begin_with_the_prefix_that_was_forced_in_the_run(constrain):
    """It was left out, and with it what a policy without it never learnt to write."""
    changes = {
        'harness.run': 'harness_clients:two_turns',
        'hosts.answer_prefix': 'Go: ',
        'rollout.constrain': constrain,
    }
    if constrain:
        changes['hosts.forms'] = ('Go: Up', 'Go: Down')
    cfg = read_config(micro_runs.plain('harness', **changes), None)
    served = serve_policy.Served(cfg, slots=8)
    threading.Thread(target=served.run, daemon=True).start()
    said = answered(served)
    assert said.startswith('Go: ') and (not constrain or said in ('Go: Up', 'Go: Down'))
