"""Whole rollouts through a network and servers that fail; tests/chaos_hosts.py plays many more."""

import os
import re
import subprocess
import sys

import chaos_hosts
import chaos_proxy
import micro_runs
import pytest


def test_lost_episodes_leave_the_loss_and_the_others_are_those_of_a_calm_rollout():
    """Of 64 episodes; each trouble happens a few times, one server is killed, the other hangs."""
    words = ['tests/chaos_hosts.py', '--episodes=64', '--groups=8', '--steps=0']
    # In a process of its own: it counts what it holds, and has one device as most runs have
    done = subprocess.run(
        [sys.executable, *words],
        cwd=micro_runs.ROOT,
        env=micro_runs.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stdout + done.stderr
    *_, last, troubles, left = done.stdout.splitlines()
    episodes, lost, retries = (int(number) for number in re.findall('[0-9]+', last)[:3])
    assert episodes == 64 and 0 < lost < 64 and retries
    told = {word.split()[0] for word in troubles.split(', ')}
    assert told == {*chaos_proxy.TROUBLES, 'killed', 'hung'}
    assert left == '0 processes, threads, descriptors and worlds left over'


def test_what_is_left_over_is_found():
    with pytest.raises(AssertionError, match='threads, descriptors, processes'):
        with chaos_hosts.nothing_left(patience_s=0.0):
            files = os.pipe()
    for each in files:
        os.close(each)
