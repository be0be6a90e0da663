"""Which tests `make check` leaves out, and what `make clean` leaves alone."""

import functools
import pathlib
import subprocess

import jax
import pytest
import reaching

from agentrl_jax import train
from agentrl_jax.rollout import device

ROOT = pathlib.Path(__file__).resolve().parents[2]


def trains():
    return train.train(None, 'nowhere')


@functools.cache
def trains_through_a_cached_helper():
    return [trains() for _ in range(2)]


def plays_under_jit():
    return jax.jit(functools.partial(device.collect, config=None))()


class Starts:
    def __init__(self):
        self.process = subprocess.Popen(['true'])


def starts_by_a_class():
    return Starts()


def starts_in_an_inner_function():
    def start():
        return Starts()

    return map(start, ())


started = functools.partial(subprocess.run, ['true'])


def starts_by_a_partial():
    return started()


def only_speaks_of_it():
    """train.train and subprocess.run."""
    return 'train.train', ROOT, jax.numpy.zeros(3)


LONG = [
    trains,
    trains_through_a_cached_helper,
    plays_under_jit,
    starts_by_a_class,
    starts_in_an_inner_function,
    starts_by_a_partial,
]


@pytest.mark.parametrize('function', LONG)
def test_what_trains_plays_or_starts_is_found_behind_helpers(function):
    assert reaching.reaches_long_ones([function])
    assert reaching.reaches_long_ones([only_speaks_of_it, function])  # a test and a fixture


def test_what_only_speaks_of_training_is_quick():
    assert not reaching.reaches_long_ones([only_speaks_of_it])


def test_a_test_that_does_neither_is_not_marked(request):
    assert request.node.get_closest_marker('trains') is None


def test_a_test_that_is_marked_slow_says_why_and_would_be_quick_otherwise(request):
    for item in request.session.items:
        for mark in item.iter_markers('slow'):
            assert not item.get_closest_marker('trains'), f'{item.nodeid}: left out as it is'
            (reason,) = mark.args
            assert isinstance(reason, str), item.nodeid


def test_make_clean_leaves_results_alone(request):
    assert request.node.get_closest_marker('trains')  # it starts a process
    told = subprocess.run(
        ['make', '--dry-run', 'clean'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    removed = told.stdout.split()
    assert '.venv' in removed and '.pytest_cache' in removed
    assert not [word for word in removed if word.strip('/').split('/')[0] == 'runs']
