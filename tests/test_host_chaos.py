"""Whole rollouts through a network and servers that fail; tests/chaos_hosts.py plays many more."""

import os

import chaos_hosts
import chaos_proxy
import micro_runs
import pytest


def test_lost_episodes_leave_the_loss_and_the_others_are_those_of_a_calm_rollout(monkeypatch):
    """Of 64 episodes; each trouble happens a few times, one server is killed, the other hangs."""
    monkeypatch.setenv('PYTHONPATH', f'{micro_runs.ROOT}/tests', prepend=os.pathsep)
    with chaos_hosts.nothing_left(), chaos_hosts.sites_in_order(seed=0) as sites:
        chaos, rollouts = chaos_hosts.Chaos(sites, seed=0), chaos_hosts.Rollouts(sites, groups=8)
        for number in range(2):
            rollouts.compare(number, chaos)
    troubles = chaos.troubles()
    assert rollouts.episodes == 64 and 0 < rollouts.lost < 64 and rollouts.counted['retries']
    assert {*chaos_proxy.TROUBLES, 'killed', 'hung'} == troubles.keys()


def test_what_is_left_over_is_found():
    with pytest.raises(AssertionError, match='threads, descriptors, processes'):
        with chaos_hosts.nothing_left(patience_s=0.0):
            files = os.pipe()
    for each in files:
        os.close(each)
