"""The script that holds a refactoring against the commit before it."""

import goldens
import pytest

from agentrl_jax.run import config


@pytest.mark.parametrize('name', goldens.RUNS)
def test_every_run_is_one_that_training_takes(name):
    config.read(goldens.config(*goldens.RUNS[name]))


def test_differences_name_the_place():
    before = {'rows': [{'step': 0, 'x': float('nan')}, {'step': 1, 'x': 2.0}], 'code': 0}
    after = {'rows': [{'step': 0, 'x': float('nan')}, {'step': 1, 'x': 2.5}], 'new': 1, 'code': 0}
    assert list(goldens.differences(before, before)) == []
    found = list(goldens.differences(before, after))
    assert found == ['new: only after', 'rows: [1] x: 2.0 -> 2.5']
    assert list(goldens.differences([1], [1, 2])) == ['[1] -> [1, 2]']
