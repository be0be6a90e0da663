"""Success on held-out levels: sums over episodes, and their intervals."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.measure.metrics import own_figures, trial_figures
from agentrl_jax.measure.stats import normal_interval, wilson_interval
from agentrl_jax.rl.masked import masked_sum
from agentrl_jax.types import Rollout


def count(rollout: Rollout, task: Any, *, levels: int, samples: int = 1) -> dict[str, Any]:
    """Sums over the healthy ones of the first levels * samples rows, each level in turn."""
    rows = levels * samples
    healthy = rollout.healthy & (jnp.arange(rollout.tokens.shape[0]) < rows)
    index = jnp.arange(rollout.rewards.shape[1])[None]
    played = (index < rollout.num_turns[:, None]) & healthy[:, None]
    own = own_figures(rollout, task) | trial_figures(rollout, task.agent)
    solved = rollout.success & healthy
    sums = {
        'episodes': healthy.sum(),
        'lost': rows - healthy.sum(),
        'successes': jnp.sum(solved),
        'returns': masked_sum(rollout.returns, healthy),
        'turns': played.sum(),
        'valid': jnp.sum(rollout.valid & played),
        'own': {name: masked_sum(x, healthy) for name, x in own.items()},
    }
    if samples > 1:
        sums['of_levels'] = count_levels(
            solved[:rows].reshape(samples, levels), healthy[:rows].reshape(samples, levels)
        )
    return sums


def count_levels(solved: jax.Array, healthy: jax.Array) -> dict[str, jax.Array]:
    """Sums over levels of what k samples of each say; solved, healthy bool [k, L]."""
    tries = healthy.sum(0)
    share = solved.sum(0) / jnp.maximum(tries, 1)
    return {
        'levels': jnp.sum(tries > 0),
        'passed': jnp.sum(solved.any(0)),
        'shares': share.sum(),
        'squares': jnp.sum(share**2),
    }


def total(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the pools of several worlds; of their own figures those that all have."""
    names = set.intersection(*(set(sums['own']) for sums in counts))
    shared = [{**sums, 'own': {name: sums['own'][name] for name in names}} for sums in counts]
    return jax.tree.map(lambda *x: sum(x), *shared)


def summarise(sums: dict[str, Any], prefix: str = 'eval') -> dict[str, float]:
    """eval/ metrics of the sums of `count`.

    One sample a level: Wilson's interval of the success. Several: eval/success is mean@k, its
    interval that of a mean of levels, and eval/pass_at_k the share of levels solved at least once,
    with Wilson's. Without a healthy episode nothing was measured: all but env_error are nan.
    """
    sums = jax.device_get(sums)
    episodes, successes = int(sums['episodes']), int(sums['successes'])
    low, high = wilson_interval(successes, episodes)
    found = {}
    if 'of_levels' in sums:
        of = sums['of_levels']
        levels, passed = int(of['levels']), int(of['passed'])
        low, high = normal_interval(float(of['shares']), float(of['squares']), levels)
        found['pass_at_k'] = passed / max(levels, 1)
        found['pass_at_k_low'], found['pass_at_k_high'] = wilson_interval(passed, levels)
    found |= {
        'success': successes / max(episodes, 1),
        'success_low': low,
        'success_high': high,
        'return': float(sums['returns']) / max(episodes, 1),
        'valid_format': int(sums['valid']) / max(int(sums['turns']), 1),
    }
    found |= {name: float(x) / max(episodes, 1) for name, x in sums['own'].items()}
    found = {name: x if episodes else math.nan for name, x in found.items()}
    found['env_error'] = int(sums['lost']) / max(int(sums['lost']) + episodes, 1)
    return {f'{prefix}/{name}': x for name, x in found.items()}
