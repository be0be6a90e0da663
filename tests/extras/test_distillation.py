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
SHOWN = {'clone.episodes': 64, 'clone.steps': 60, 'clone.oracle': 1.0, 'steps': 0, **LEGAL}


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    """Return a workdir with a policy cloned from the expert."""
    workdir = tmp_path_factory.mktemp('runs') / 'teacher'
    assert train.train(micro_runs.plain('frozen_lake', **SHOWN), str(workdir)) == 0
    return workdir


def student(*teachers, steps=STEPS, **changes):
    """Return the config of a randomly initialised policy of half the width."""
    given = {
        'algorithm': 'opd',
        'opd.teachers': tuple(map(str, teachers)),
        'model.hidden_size': 16,
        'optim.lr': 1e-2,
        'eval.every': 0,
        'steps': steps,
        **LEGAL,
    }
    return micro_runs.plain('frozen_lake', **(given | changes))


def rows(workdir):
    return run_log.read_metrics(workdir / run_log.METRICS_FILE)


@pytest.fixture(scope='module')
def taught(teacher, tmp_path_factory):
    """Return a workdir with a policy distilled from the teacher."""
    workdir = tmp_path_factory.mktemp('runs') / 'taught'
    assert train.train(student(teacher), str(workdir)) == 0
    return workdir


def test_a_student_comes_closer_to_its_teacher_without_any_reward(taught):
    gaps = [row['policy/kl_teacher'] for row in rows(taught)[:STEPS]]
    assert np.mean(gaps[-3:]) < 0.7 * np.mean(gaps[:3]), gaps


def test_a_run_resumes_to_the_same_bits_wherever_its_teacher_lies_and_with_no_other(
    teacher, taught, tmp_path
):
    workdir = tmp_path / 'halves'
    assert train.train(student(teacher, steps=3), str(workdir)) == 0
    moved = shutil.copytree(teacher, tmp_path / 'elsewhere')
    face = build(student(teacher)).config_dict
    assert train.train(student(moved), str(workdir)) == 0
    states = [micro_runs.saved_state(face, where) for where in (taught, workdir)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    other = tmp_path / 'other'
    cfg = micro_runs.plain('frozen_lake', **(SHOWN | {'seed': 1}))
    assert train.train(cfg, str(other)) == 0
    with pytest.raises(ValueError, match='have other parameters than the teachers that this run'):
        train.train(student(other, steps=STEPS + 1), str(workdir))


def test_a_policy_teaches_itself_what_it_would_do_with_the_plan_and_resumes_so(tmp_path):
    """The policy was cloned on prompts with the plan and now plays without it."""
    hinted, whole, halves = (tmp_path / name for name in ('hinted', 'whole', 'halves'))
    shown = SHOWN | {'env.hint': 'plan', 'rollout.max_tokens': 112}
    assert train.train(micro_runs.plain('frozen_lake', **shown), str(hinted)) == 0
    own = {'opd.privileged': 'plan', 'model.path': str(hinted), 'optim.lr': 3e-3}
    for workdir, steps in ((whole, STEPS), (halves, 3), (halves, STEPS)):
        assert train.train(student(steps=steps, **own), str(workdir)) == 0
    states = [
        micro_runs.saved_state(build(student(**own)).config_dict, at) for at in (whole, halves)
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)
    gaps = [row['policy/kl_teacher'] for row in rows(whole)[:STEPS]]
    assert min(gaps) > 0 and np.mean(gaps[-3:]) < np.mean(gaps[:3]), gaps


def test_a_teacher_of_other_tokens_is_refused(teacher, tmp_path):
    cfg = student(teacher, **{'model.tokenizer': 'agentrl_jax/tokens/babyai.model'})
    with pytest.raises(ValueError, match='use a teacher with the same token ids'):
        build(cfg)


def test_an_evaluation_needs_no_teacher(teacher, taught, tmp_path):
    alone = shutil.copytree(taught, tmp_path / 'alone')
    cfg = student(tmp_path / 'gone')
    evaluate.evaluate(cfg, str(alone), str(tmp_path), None)
    assert (tmp_path / 'evaluation_validation.json').exists()
