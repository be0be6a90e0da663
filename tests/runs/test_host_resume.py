"""Killed runs lose no bit and leave no server, and chaos.py's comparisons detect differences.

tests/chaos.py does this for runs of every kind, any number of times.
"""

import chaos
import pytest

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
