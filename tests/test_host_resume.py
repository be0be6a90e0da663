"""A run against servers that it has started itself, killed: its bits are kept, its servers are not.

tests/chaos.py does this to runs of every kind, as often as it is asked to.
"""

import chaos
import pytest

pytestmark = pytest.mark.soak


def test_kill_9_changes_no_bit_and_leaves_no_server(tmp_path):
    runs = chaos.Chaos(tmp_path, seed=13)
    try:
        runs.of_hosts(kills=2)
    finally:
        runs.end()
    assert runs.tally.total() and runs.leaves > 10
