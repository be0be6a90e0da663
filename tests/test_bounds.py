"""Every number of a config has bounds; what they let through trains, or is refused in words."""

import math
import os

import micro_runs
import numpy as np
import pytest

from agentrl_jax import train
from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.envs import ENVIRONMENTS
from agentrl_jax.envs.hosts import HOSTS
from agentrl_jax.measure import collapse
from agentrl_jax.records import run_log
from agentrl_jax.run import bounds, check
from agentrl_jax.run.bounds import Bounds
from configs import base

WORLDS = tuple(ENVIRONMENTS)
DRAWS = int(os.environ.get('CONFIG_DRAWS', '6'))
# Larger values are legal and slow; what they mean is the same
SMALL = {
    'steps': 2,
    'env.max_turns': 3,
    'agent.trials': 2,
    'agent.plan_every': 2,
    'env.train_levels': 40,
    'env.eval_levels': 16,
    'env.max_actions_per_turn': 4,
    'env.max_actions_per_episode': 8,
    'rollout.num_groups': 6,
    'rollout.group_size': 6,
    'rollout.max_tokens': 400,
    'rollout.max_response': 12,
    'rollout.serve_rows': 16,
    'rollout.read_tokens': 8,
    'rollout.slots': 32,
    'model.hidden_size': 64,
    'model.intermediate_size': 64,
    'model.num_layers': 2,
    'model.num_heads': 4,
    'model.num_kv_heads': 4,
    'batch.epochs': 2,
    'batch.head_chunk': 2048,
    'batch.widths': 2,
    'clone.episodes': 16,
    'clone.steps': 2,
    'clone.batch': 16,
    'filter.refill': 2,
    'lora.rank': 4,
    'mesh.data': 8,
    'mesh.fsdp': 8,
    'mesh.tensor': 8,
    'alarm.mi_pairs': 8,
    'alarm.mi_every': 2,
    'evol.iteration': 2,
    'evol.base_rows': 8,
    'clone.max_turns': 3,
    'clone.max_tokens': 400,
    'context.window': 3,
    'context.summary': 2,
    'log.profile_steps': 1,
    'env.max_words': 200,
    'seed': 2**40,
}


def test_every_number_of_a_config_has_bounds_and_no_other():
    worlds = (*WORLDS, *HOSTS)
    own = {name for name in bounds.numbers(base.get_config()) if name.split('.')[0] not in worlds}
    assert own == set(bounds.BOUNDS)


def test_the_default_config_is_within_its_bounds():
    assert bounds.problems(base.get_config()) == []


@pytest.mark.parametrize(
    'interval, inside, outside, text',
    [
        (Bounds(low=1), [1, 7], [0, -3, math.nan, math.inf], 'at least 1'),
        (Bounds(low=0, open_low=True), [1e-30], [0.0, -1.0], 'above 0'),
        (Bounds(low=0, high=1, open_high=True), [0, 0.5], [1.0], 'in [0, 1)'),
        (Bounds(low=1, also=(-1,)), [-1, 1], [0, -2], 'at least 1 or -1'),
        (Bounds(high=0), [-5, 0], [0.1, -math.inf], 'at most 0'),
        (Bounds(), [-1e9], [math.nan], 'finite'),
    ],
)
def test_bounds_by_hand(interval, inside, outside, text):
    assert all(map(interval.holds, inside)) and not any(map(interval.holds, outside))
    assert str(interval) == text


@pytest.mark.parametrize(
    'name, value',
    [
        ('optim.lr', 0.0),
        ('optim.lr', -1e-3),
        ('optim.lr', math.nan),
        ('optim.critic_lr', math.inf),
        ('optim.beta1', 1.0),
        ('optim.beta2', 1.5),
        ('optim.weight_decay', -0.1),
        ('optim.max_grad_norm', 0.0),
        ('optim.warmup_steps', -1),
        ('loss.clip_high', -0.1),
        ('loss.clip_low', 1.5),
        ('loss.value_coef', -1.0),
        ('clone.oracle', 1.5),
        ('model.rope_theta', -1.0),
        ('model.num_layers', 0),
        ('rollout.temperature', 1e-30),
    ],
)
def test_numbers_that_cannot_train_are_refused(name, value):
    cfg = micro_runs.config('frozen_lake', **{name: value})
    with pytest.raises(ValueError, match=f'{name}={value!r} must be ') as refused:
        check.check(cfg)
    assert '\n' not in str(refused.value)


def values_of(name, kind, default, rng):
    """A value at the border of its bounds, near the default, or (seldom) out of them."""
    interval = bounds.BOUNDS[name]
    if rng.random() < 0.15:
        return kind(rng.choice([-1, 0] if kind is int else [-1.0, math.nan, 2.0]))
    ends = [end for end in (interval.low, interval.high) if math.isfinite(end) and abs(end) < 2**20]
    near = [default, default * 2, default / 2] if default else [1, 2]
    value = rng.choice([*ends, *interval.also, *near])
    return kind(min(value, SMALL.get(name, math.inf)))


def drawn(seed):
    """A config of a micro run with eight fields drawn at random."""
    rng = np.random.default_rng(seed)
    cfg = micro_runs.plain(rng.choice(WORLDS).item(), **{'steps': 2, 'log.rollouts_every': 0})
    changes = {'algorithm': rng.choice(list(ALGORITHMS)).item()}
    own = ALGORITHMS[changes['algorithm']].DEFAULTS  # fields of others would be refused
    useless = set().union(*(module.DEFAULTS for module in ALGORITHMS.values())) - set(own)
    known = (bounds.BOUNDS.keys() & bounds.numbers(cfg)) - useless - {'steps'}
    kinds = {name: kind for name, kind in bounds.numbers(cfg).items() if name in known}
    for name in rng.choice(sorted(kinds), 5, replace=False):
        default = bounds.field(cfg, name)
        changes[name] = values_of(name, kinds[name], default or 0, rng)
    words = check.CHOICES | check.OPTIONAL_CHOICES
    words = {name: known for name, known in words.items() if name not in useless}
    for name in rng.choice(sorted(words), 3, replace=False):
        changes[str(name)] = str(rng.choice(words[name]))
    cfg.update_from_flattened_dict(changes)
    return cfg, changes


@pytest.mark.soak
@pytest.mark.parametrize('seed', range(DRAWS))
def test_a_config_drawn_at_random_trains_two_steps_or_is_refused_in_a_sentence(seed, tmp_path):
    """CONFIG_DRAWS=200 draws more."""
    cfg, changes = drawn(seed)
    try:
        code = train.train(cfg, str(tmp_path))
    except ValueError as refused:
        assert '\n' not in str(refused) and len(str(refused)) > 20, changes
        return
    rows = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert len(rows) == 3 and code == bool(collapse.untrained(rows)), changes
    for row in rows[:2]:
        for name in ('rollout/return', 'policy/loss', 'policy/grad_norm', 'policy/entropy'):
            trained = not row['filter/empty']
            assert math.isfinite(row[name]) or not trained, (changes, name)
