"""Success on held-out levels: sums over episodes, and their Wilson intervals."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.measure.stats import wilson_interval
from agentrl_jax.rl.masked import masked_sum
from agentrl_jax.types import Rollout


def count(rollout: Rollout, task: Any, *, episodes: int) -> dict[str, Any]:
    """Sums over the healthy ones of the first `episodes` rows."""
    healthy = rollout.healthy & (jnp.arange(rollout.tokens.shape[0]) < episodes)
    index = jnp.arange(rollout.rewards.shape[1])[None]
    played = (index < rollout.num_turns[:, None]) & healthy[:, None]
    own = task.env.episode_metrics(rollout.actions, rollout.level, task.env_params)
    return {
        'episodes': healthy.sum(),
        'successes': jnp.sum(rollout.success & healthy),
        'returns': masked_sum(rollout.returns, healthy),
        'turns': played.sum(),
        'valid': jnp.sum(rollout.valid & played),
        'own': {name: masked_sum(x, healthy) for name, x in own.items()},
    }


def summarise(sums: dict[str, Any]) -> dict[str, float]:
    """eval/ metrics of the sums of `count`."""
    sums = jax.device_get(sums)
    episodes, successes = int(sums['episodes']), int(sums['successes'])
    low, high = wilson_interval(successes, episodes)
    return {
        'eval/success': successes / max(episodes, 1),
        'eval/success_low': low,
        'eval/success_high': high,
        'eval/return': float(sums['returns']) / max(episodes, 1),
        'eval/valid_format': int(sums['valid']) / max(int(sums['turns']), 1),
    } | {f'eval/{name}': float(x) / max(episodes, 1) for name, x in sums['own'].items()}
