"""Which tests `make check` leaves out."""

import functools
import subprocess

import jax
import pytest
import reaching

from agentrl_jax import train
from agentrl_jax.rollout import device


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
    return 'train.train', jax.numpy.zeros(3)


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
