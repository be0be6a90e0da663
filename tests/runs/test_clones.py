"""Limits of expert demonstrations, and answers that do not fit into rollout.max_response."""

import dataclasses
import types

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax.imitation import demonstrations
from agentrl_jax.run import cloning
from agentrl_jax.run.build import build

CLONES = {'clone.episodes': 16, 'clone.steps': 2, 'clone.batch': 8}


@pytest.mark.soak
def test_runs_with_other_limits_can_have_the_same_demonstrations():
    limits = {'max_turns': 2, 'max_actions_per_turn': 3, 'max_actions_per_episode': 6}
    of_env = {f'env.{name}': value for name, value in limits.items()} | {'rollout.max_tokens': 96}
    of_clone = {f'clone.{name}': value for name, value in limits.items()} | {'clone.max_tokens': 96}
    short = {'env.max_turns': 3, 'env.max_actions_per_turn': 1, 'rollout.max_tokens': 128}
    one, other = (
        cloning.find_demonstrations(build(micro_runs.config('frozen_lake', **CLONES | changes)))
        for changes in (of_env, of_clone | short)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.soak
def test_demonstrations_use_the_limits_of_the_clone(capsys):
    limits = {'clone.max_turns': 1, 'clone.max_actions_per_turn': 4, 'rollout.max_response': 12}
    run = build(micro_runs.config('frozen_lake', **(CLONES | limits)))
    longest = int(cloning.find_demonstrations(run).mask.sum(axis=1).max())
    texts = [
        len(demonstrations.answer_tokens(run.training.tasks[0], run.tokenizer, [0] * n)) + 1
        for n in range(5)
    ]
    assert longest == texts[4] < 2 * texts[2]  # one turn of four actions, not two of two
    for limit in (12, longest - 1):  # warns about answers that do not fit
        capsys.readouterr()
        rollout = dataclasses.replace(run.config.rollout, max_response=limit)
        cfg = dataclasses.replace(run.config, rollout=rollout)
        cloning.find_demonstrations(types.SimpleNamespace(**vars(run) | {'config': cfg}))
        warned = f'rollout.max_response={limit} cuts' in capsys.readouterr().err
        assert warned == (longest > limit)


def test_lengths_of_answers_by_hand():
    mask = np.array([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0] * 5], bool)
    assert demonstrations.answer_lengths(mask).tolist() == [2, 1, 1]
