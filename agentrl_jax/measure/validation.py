"""Success on held-out levels: sums over episodes, and their intervals."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.measure.metrics import own_figures, trial_figures, unjudged
from agentrl_jax.measure.stats import level_interval, pass_at
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
    return {
        'episodes': healthy.sum(),
        'lost': rows - healthy.sum(),
        'successes': jnp.sum(solved),
        'returns': masked_sum(rollout.returns, healthy),
        'turns': played.sum(),
        'valid': jnp.sum(rollout.valid & played),
        'unjudged': unjudged(rollout, played),
        'own': {name: masked_sum(x, healthy) for name, x in own.items()},
        'of_levels': count_levels(rollout.level, solved, healthy, levels),
        'samples': jnp.int32(samples),
    }


def count_levels(
    level: jax.Array, solved: jax.Array, healthy: jax.Array, levels: int
) -> dict[str, jax.Array]:
    """Episodes of each level, int32 [L]; level int32 [B], solved, healthy bool [B].

    A pool that has fewer levels than are asked for plays some of them several times over.
    """
    none = jnp.zeros(levels, jnp.int32)
    return {
        'tries': none.at[level].add(healthy.astype(jnp.int32)),
        'solved': none.at[level].add(solved.astype(jnp.int32)),
    }


def total(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the pools of several worlds; of their own figures those that all have."""
    names = set.intersection(*(set(sums['own']) for sums in counts))
    shared = [{**sums, 'own': {name: sums['own'][name] for name in names}} for sums in counts]
    found = jax.tree.map(lambda *x: sum(x), *[{**x, 'of_levels': 0} for x in shared])
    levels = jax.tree.map(lambda *x: np.concatenate(x), *[x['of_levels'] for x in shared])
    return found | {'of_levels': levels, 'samples': counts[0]['samples']}


def summarise(sums: dict[str, Any], prefix: str = 'eval') -> dict[str, float]:
    """eval/ metrics of the sums of `count`.

    Intervals take levels as independent and their samples as not (stats.level_interval): Wilson's
    with one sample a level. With several eval/success is mean@k, and eval/pass_at_k is of all of
    them. Without a healthy episode nothing was measured: all but env_error are nan.
    """
    sums = jax.device_get(sums)
    episodes, successes, samples = (
        int(sums[name]) for name in ('episodes', 'successes', 'samples')
    )
    low, high = success_interval(sums['of_levels'])
    valid_format = int(sums['valid']) / max(int(sums['turns']), 1)
    found = {}
    if samples > 1:
        mean, ends = passes(sums, samples)
        found = {'pass_at_k': mean, 'pass_at_k_low': ends[0], 'pass_at_k_high': ends[1]}
    found |= {
        'success': successes / max(episodes, 1),
        'success_low': low,
        'success_high': high,
        'return': float(sums['returns']) / max(episodes, 1),
        'valid_format': valid_format if not int(sums['unjudged']) else math.nan,
    }
    found |= {name: float(x) / max(episodes, 1) for name, x in sums['own'].items()}
    for name in [name.removesuffix('/total') for name in sums if name.endswith('/total')]:
        count = int(sums[f'{name}/count'])
        found[name] = float(sums[f'{name}/total']) / count if count else math.nan
    found = {name: x if episodes else math.nan for name, x in found.items()}
    found['env_error'] = int(sums['lost']) / max(int(sums['lost']) + episodes, 1)
    return {f'{prefix}/{name}': x for name, x in found.items()}


def success_interval(of_levels: dict[str, np.ndarray]) -> tuple[float, float]:
    """95 % interval of the success, of what count_levels counted."""
    tries, solved = (np.asarray(of_levels[name]) for name in ('tries', 'solved'))
    played = tries > 0
    return level_interval(solved[played] / tries[played], int(tries.sum()))


def passes(sums: dict[str, Any], k: int) -> tuple[float, tuple[float, float]]:
    """(pass@k, its 95 % interval) of the sums of `count`; nan where no level has k tries."""
    tries, solved = (np.asarray(sums['of_levels'][name]) for name in ('tries', 'solved'))
    shares = pass_at(solved, tries, k)
    mean = float(shares.mean()) if shares.size else float('nan')
    return mean, level_interval(shares, int((tries // k).sum()))
