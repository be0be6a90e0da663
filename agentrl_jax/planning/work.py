"""FLOPs of a training step, and the fraction of the machine's peak that a run achieves.

Counts the matrix products (2 m n k) of real tokens. Padding, recomputation and validation are
excluded, so the rate measures useful work, like model FLOPs utilisation (PaLM, arXiv:2204.02311,
appendix B). Every row counts in full. If shared prefixes are computed once (batch.prefix_rows),
the reported rate is therefore above the machine's actual rate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_jax.models import Model
from agentrl_jax.planning import hardware
from agentrl_jax.run.config import Config


def body(config: Model, tokens: float, length: float) -> float:
    """FLOPs of the layers in a forward pass over tokens in rows of `length`, with causal attention.

    A token attends to (length + 1) / 2 tokens on average, including itself.
    """
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = config.hidden_size * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    attention = 2 * heads * (length + 1) / 2  # scores and weighted values
    return 2.0 * tokens * config.num_layers * (projections + attention)


def head(config: Model, tokens: float) -> float:
    """FLOPs of the logits of `tokens` tokens."""
    return 2.0 * tokens * config.hidden_size * config.vocab_size


def step_flops(cfg: Config, config: Model, row: Mapping[str, Any]) -> float | None:
    """FLOPs of the rollouts, scores and updates of a step, computed from its metrics.

    None if no row was trained, and with context.window, continuations or other models (other
    models read the rows as well).
    """
    rows = float(row['batch/trained_rows'])
    if (
        cfg.context.window
        or cfg.algorithm.continuations(cfg.env.max_turns)
        or cfg.algorithm.other_models
        or not rows > 0
    ):
        return None
    episodes = cfg.rollout.episodes * float(row['filter/collects'])
    length, sampled = float(row['rollout/tokens']), float(row['rollout/response_length'])
    rollout_flops = body(config, episodes * length, length) + head(config, episodes * sampled)
    tokens, trained = float(row['batch/tokens']), float(row['batch/trained_tokens'])
    backward = 1 if cfg.lora.rank else 2  # frozen weights have no gradient
    passes = cfg.batch.epochs * (1 + backward) + cfg.algorithm.uses_reference
    passes += cfg.sampler.corrects
    critic = 0
    if cfg.algorithm.USES_CRITIC:  # values before the update; a separate critic is trained too
        critic = 1 if cfg.shares_backbone else 1 + 3 * cfg.batch.epochs * cfg.critic.updates
    update_flops = (passes + critic) * body(config, tokens, tokens / rows)
    return rollout_flops + update_flops + passes * head(config, trained)


def rates(
    cfg: Config, config: Model, devices: Sequence[Any], row: Mapping[str, Any]
) -> dict[str, float]:
    """Return the perf/flops_ metrics of a step that took row['time/step_s'] s on these devices."""
    flops = step_flops(cfg, config, row)
    if flops is None:
        return {}
    metrics = {'perf/flops_per_s': flops / row['time/step_s']}
    peak = hardware.peak_flops(devices[0])
    if peak is not None:
        metrics['perf/flops_share'] = metrics['perf/flops_per_s'] / (peak * len(devices))
    return metrics
