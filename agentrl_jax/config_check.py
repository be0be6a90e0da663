"""What a config must satisfy, checked before any time is spent.

A field that does not exist is refused by ml_collections itself.
"""

import functools
from typing import Any

from agentrl_jax import losses
from agentrl_jax.algorithms import ALGORITHMS

CHOICES = {
    'algorithm': tuple(ALGORITHMS),
    'eval.split': ('validation', 'test'),
    'loss.aggregation': losses.AGGREGATIONS,
    'loss.kl_estimator': losses.KL_ESTIMATORS,
    'loss.kl_in': ('loss', 'reward'),
    'loss.reward_on': ('turn', 'episode'),
    'model.dtype': ('float32', 'bfloat16'),
    'stop.echo_trap': ('off', 'warn', 'stop'),
}
AT_LEAST_ONE = (
    'env.max_turns', 'env.max_actions_per_turn', 'env.max_actions_per_episode', 'env.train_levels',
    'env.eval_levels', 'rollout.num_groups', 'rollout.group_size', 'rollout.max_response',
    'rollout.serve_rows', 'batch.minibatch_rows', 'batch.microbatch_rows', 'batch.epochs',
    'batch.head_chunk', 'clone.batch', 'checkpoint.every', 'checkpoint.keep',
)  # fmt: skip
NOT_NEGATIVE = (
    'steps', 'rollout.slots', 'loss.kl_coef', 'loss.dual_clip', 'loss.value_clip', 'clone.episodes',
    'clone.steps', 'eval.every', 'eval.temperature', 'eval.top_k', 'log.rollouts_every',
)  # fmt: skip


def check(cfg: Any, mesh_shards: int = 1) -> None:
    """Refuses impossible fields and combinations before any time is spent."""

    def field(name):
        return functools.reduce(lambda part, key: part[key], name.split('.'), cfg)

    found = [
        f'{name}={field(name)!r} is not one of {", ".join(known)}'
        for name, known in CHOICES.items()
        if field(name) not in known
    ]
    found += [
        f'{name}={field(name)} must be at least 1' for name in AT_LEAST_ONE if field(name) < 1
    ]
    found += [
        f'{name}={field(name)} must not be negative' for name in NOT_NEGATIVE if field(name) < 0
    ]
    # What follows divides by numbers that are at least 1.
    found = found or _impossible_together(cfg, mesh_shards)
    if found:
        raise ValueError('impossible configuration: ' + '; '.join(found))


def _impossible_together(cfg: Any, mesh_shards: int) -> list[str]:
    rows = cfg.rollout.num_groups * cfg.rollout.group_size
    kept = kept_groups(cfg) * cfg.rollout.group_size
    small, micro = cfg.batch.minibatch_rows, cfg.batch.microbatch_rows
    problems = {
        f'filter.keep={cfg.filter.keep} must be in (0, 1]': not 0 < cfg.filter.keep <= 1,
        f'eval.top_p={cfg.eval.top_p} must be in (0, 1]': not 0 < cfg.eval.top_p <= 1,
        f'rollout.temperature={cfg.rollout.temperature} must be positive: a greedy policy gives '
        'no gradient': cfg.rollout.temperature <= 0,
        f'{kept} episodes are kept of each rollout ({rows} played), which is no multiple of '
        f'batch.minibatch_rows={small}': kept % small != 0,
        f'batch.minibatch_rows={small} must be a multiple of '
        f'batch.microbatch_rows={micro}': small % micro != 0,
        f'{rows} episodes (rollout.num_groups x rollout.group_size) must be a multiple of the '
        f'{mesh_shards} data shards of the mesh': rows % mesh_shards != 0,
        f'batch.microbatch_rows={micro} must be a multiple of the {mesh_shards} data shards of '
        'the mesh': micro % mesh_shards != 0,
        f'rollout.slots={cfg.rollout.slots} must be a multiple of the {mesh_shards} data shards of '
        'the mesh': cfg.rollout.slots % mesh_shards != 0,
        f'model.hidden_size={cfg.model.hidden_size} must be a multiple of '
        f'2 x model.num_heads={cfg.model.num_heads}':
            not cfg.model.path and cfg.model.hidden_size % (2 * cfg.model.num_heads) != 0,
    }  # fmt: skip
    return [problem for problem, wrong in problems.items() if wrong]


def kept_groups(cfg: Any) -> int:
    """Groups that the filter lets through: RAGEN's int(ratio * groups), at least one."""
    return max(int(cfg.filter.keep * cfg.rollout.num_groups + 1e-9), 1)
