"""Full runs of on-policy distillation, in which a trained policy teaches a smaller one."""

import shutil

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax import evaluate, train
from agentrl_jax.records import run_log
from agentrl_jax.run.build import build

pytestmark = pytest.mark.soak

STEPS = 12
LEGAL = {'rollout.constrain': 'own', 'env.think': False}
CLONING = {'clone.episodes': 64, 'clone.steps': 60, 'clone.oracle': 1.0, 'steps': 0, **LEGAL}


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    """Return a workdir with a policy cloned from the expert."""
    workdir = tmp_path_factory.mktemp('runs') / 'teacher'
    assert train.train(micro_runs.plain('frozen_lake', **CLONING), str(workdir)) == 0
    return workdir


def student(*teachers, steps=STEPS, **changes):
    """Return the config of a randomly initialised policy of half the width."""
    defaults = {
        'algorithm': 'opd',
        'opd.teachers': tuple(map(str, teachers)),
        'model.hidden_size': 16,
        'optim.lr': 1e-2,
        'eval.every': 0,
        'steps': steps,
        **LEGAL,
    }
    return micro_runs.plain('frozen_lake', **(defaults | changes))


def rows(workdir):
    return run_log.read_metrics(workdir / run_log.METRICS_FILE)


@pytest.fixture(scope='module')
def taught(teacher, tmp_path_factory):
    """Return a workdir with a policy distilled from the teacher."""
    workdir = tmp_path_factory.mktemp('runs') / 'taught'
    assert train.train(student(teacher), str(workdir)) == 0
    return workdir


def test_a_student_approaches_its_teacher_without_rewards(taught):
    gaps = [row['policy/kl_teacher'] for row in rows(taught)[:STEPS]]
    assert np.mean(gaps[-3:]) < 0.7 * np.mean(gaps[:3]), gaps


def test_a_run_resumes_bit_identically_with_a_moved_teacher_and_rejects_another(
    teacher, taught, tmp_path
):
    workdir = tmp_path / 'halves'
    assert train.train(student(teacher, steps=3), str(workdir)) == 0
    moved = shutil.copytree(teacher, tmp_path / 'elsewhere')
    config = build(student(teacher)).config_dict
    assert train.train(student(moved), str(workdir)) == 0
    states = [micro_runs.saved_state(config, path) for path in (taught, workdir)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    other = tmp_path / 'other'
    cfg = micro_runs.plain('frozen_lake', **(CLONING | {'seed': 1}))
    assert train.train(cfg, str(other)) == 0
    with pytest.raises(ValueError, match='have other parameters than the teachers that this run'):
        train.train(student(other, steps=STEPS + 1), str(workdir))


def test_a_policy_is_distilled_from_itself_with_the_plan_and_resumes(tmp_path):
    """The policy was cloned on prompts with the plan and now plays without it."""
    hinted, unsplit, halves = (tmp_path / name for name in ('hinted', 'whole', 'halves'))
    cloning = CLONING | {'env.hint': 'plan', 'rollout.max_tokens': 112}
    assert train.train(micro_runs.plain('frozen_lake', **cloning), str(hinted)) == 0
    settings = {'opd.privileged': 'plan', 'model.path': str(hinted), 'optim.lr': 3e-3}
    for workdir, steps in ((unsplit, STEPS), (halves, 3), (halves, STEPS)):
        assert train.train(student(steps=steps, **settings), str(workdir)) == 0
    states = [
        micro_runs.saved_state(build(student(**settings)).config_dict, at)
        for at in (unsplit, halves)
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)
    gaps = [row['policy/kl_teacher'] for row in rows(unsplit)[:STEPS]]
    assert min(gaps) > 0 and np.mean(gaps[-3:]) < np.mean(gaps[:3]), gaps


def test_a_teacher_with_another_vocabulary_is_rejected(teacher, tmp_path):
    cfg = student(teacher, **{'model.tokenizer': 'agentrl_jax/tokens/babyai.model'})
    with pytest.raises(ValueError, match='use a teacher with the same token ids'):
        build(cfg)


def test_an_evaluation_needs_no_teacher(teacher, taught, tmp_path):
    alone = shutil.copytree(taught, tmp_path / 'alone')
    cfg = student(tmp_path / 'gone')
    evaluate.evaluate(cfg, str(alone), str(tmp_path), None)
    assert (tmp_path / 'evaluation_validation.json').exists()
