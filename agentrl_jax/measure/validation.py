"""Success on held-out levels: sums over episodes and intervals."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.measure.metrics import env_metrics_of, trial_figures, unjudged
from agentrl_jax.measure.stats import level_interval, pass_at
from agentrl_jax.rl.masked import masked_sum
from agentrl_jax.types import Rollout


def count(rollout: Rollout, task: Any, *, levels: int, samples: int = 1) -> dict[str, Any]:
    """Sum metrics over the healthy episodes among the first levels * samples rows."""
    rows = levels * samples
    healthy = rollout.healthy & (jnp.arange(rollout.tokens.shape[0]) < rows)
    is_turn = rollout.played & healthy[:, None]
    env_metrics = env_metrics_of(rollout, task) | trial_figures(rollout, task.agent)
    solved = rollout.success & healthy
    return {
        'episodes': healthy.sum(),
        'lost': rows - healthy.sum(),
        'successes': jnp.sum(solved),
        'returns': masked_sum(rollout.returns, healthy),
        'turns': is_turn.sum(),
        'valid': jnp.sum(rollout.valid & is_turn),
        'unjudged': unjudged(rollout, is_turn),
        'own': {name: masked_sum(x, healthy) for name, x in env_metrics.items()},
        'of_levels': count_levels(rollout.level, solved, healthy, levels),
        'samples': jnp.int32(samples),
    }


def count_levels(
    level: jax.Array, solved: jax.Array, healthy: jax.Array, levels: int
) -> dict[str, jax.Array]:
    """Count the episodes of each level, int32 [L]; level int32 [B], solved, healthy bool [B].

    A pool with fewer levels than requested plays some of them several times.
    """
    none = jnp.zeros(levels, jnp.int32)
    return {
        'tries': none.at[level].add(healthy.astype(jnp.int32)),
        'solved': none.at[level].add(solved.astype(jnp.int32)),
    }


def total(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum the counts of several environments; environment metrics only if all have them."""
    names = set.intersection(*(set(sums['own']) for sums in counts))
    shared = [{**sums, 'own': {name: sums['own'][name] for name in names}} for sums in counts]
    totals = jax.tree.map(lambda *x: sum(x), *[{**x, 'of_levels': 0} for x in shared])
    levels = jax.tree.map(lambda *x: np.concatenate(x), *[x['of_levels'] for x in shared])
    return totals | {'of_levels': levels, 'samples': counts[0]['samples']}


def summarise(sums: dict[str, Any], prefix: str = 'eval') -> dict[str, float]:
    """Return the eval/ metrics from the sums of `count`.

    Intervals treat levels as independent, but not samples of a level (stats.level_interval). With
    one sample per level they are Wilson's. With several, eval/success is mean@k and eval/pass_at_k
    is reported too. Without a healthy episode all metrics except env_error are nan.
    """
    sums = jax.device_get(sums)
    episodes, successes, samples = (
        int(sums[name]) for name in ('episodes', 'successes', 'samples')
    )
    low, high = success_interval(sums['of_levels'])
    valid_format = int(sums['valid']) / max(int(sums['turns']), 1)
    metrics = {}
    if samples > 1:
        mean, ends = passes(sums, samples)
        metrics = {'pass_at_k': mean, 'pass_at_k_low': ends[0], 'pass_at_k_high': ends[1]}
    metrics |= {
        'success': successes / max(episodes, 1),
        'success_low': low,
        'success_high': high,
        'return': float(sums['returns']) / max(episodes, 1),
        'valid_format': valid_format if not int(sums['unjudged']) else math.nan,
    }
    metrics |= {name: float(x) / max(episodes, 1) for name, x in sums['own'].items()}
    for name in [name.removesuffix('/total') for name in sums if name.endswith('/total')]:
        count = int(sums[f'{name}/count'])
        metrics[name] = float(sums[f'{name}/total']) / count if count else math.nan
    metrics = {name: x if episodes else math.nan for name, x in metrics.items()}
    metrics['env_error'] = int(sums['lost']) / max(int(sums['lost']) + episodes, 1)
    return {f'{prefix}/{name}': x for name, x in metrics.items()}


def success_interval(of_levels: dict[str, np.ndarray]) -> tuple[float, float]:
    """Return the 95 % interval of the success rate from the counts of count_levels."""
    tries, solved = (np.asarray(of_levels[name]) for name in ('tries', 'solved'))
    has_tries = tries > 0
    return level_interval(solved[has_tries] / tries[has_tries], int(tries.sum()))


def passes(sums: dict[str, Any], k: int) -> tuple[float, tuple[float, float]]:
    """Return (pass@k, its 95 % interval) from the sums of `count`; nan if no level has k tries."""
    tries, solved = (np.asarray(sums['of_levels'][name]) for name in ('tries', 'solved'))
    shares = pass_at(solved, tries, k)
    mean = float(shares.mean()) if shares.size else float('nan')
    return mean, level_interval(shares, int((tries // k).sum()))
