"""Whole rollouts through a network and servers that fail; tests/chaos_hosts.py plays many more."""

import re
import shutil
import subprocess
import sys

import chaos_proxy
import micro_runs
import pytest

from agentrl_jax.envs.hosts.web import chromium

pytestmark = pytest.mark.soak


def printed(*words):
    """Lines of the suite, in a process of its own: it counts what it holds, and has one device."""
    done = subprocess.run(
        [sys.executable, 'tests/chaos_hosts.py', *words],
        cwd=micro_runs.ROOT,
        env=micro_runs.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_lost_episodes_leave_the_loss_and_the_others_are_those_of_a_calm_rollout():
    """Of 64 episodes; each trouble happens a few times, one server is killed, the other hangs."""
    *_, last, troubles, left = printed('--episodes=64', '--groups=8', '--steps=0', '--acted=0')
    episodes, lost, retries = (int(number) for number in re.findall('[0-9]+', last)[:3])
    assert episodes == 64 and 0 < lost < 64 and retries
    told = {word.split()[0] for word in troubles.split(', ')}
    assert told == {*chaos_proxy.TROUBLES, 'killed', 'hung'}
    assert left == '0 processes, threads, descriptors and worlds left over'


def test_search_and_shop_say_in_chaos_what_they_say_without():
    search, shop, left = printed('--episodes=0', '--acted=24', '--worlds=search,shop')
    for line, name in ((search, 'search'), (shop, 'shop')):
        assert line.startswith(f'{name}: 24 episodes') and line.endswith('in this process')
    assert left == '0 processes, threads, descriptors and worlds left over'


@pytest.mark.skipif(not any(map(shutil.which, chromium.NAMES)), reason='apt-get install chromium')
def test_pages_say_in_chaos_what_they_say_without():
    """The server that is killed has a browser, which ends with it."""
    pytest.importorskip('miniwob')
    pages, left = printed('--episodes=0', '--acted=6', '--worlds=miniwob')
    assert pages.startswith('miniwob: 6 episodes') and pages.endswith('in this process')
    assert left == '0 processes, threads, descriptors and worlds left over'
