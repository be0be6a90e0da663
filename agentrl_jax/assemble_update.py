"""From a config to the keywords of score, make_batch and update_step."""

from typing import Any

from agentrl_jax import config_check, sharding
from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.assemble import needs_reference


def batch_settings(cfg: Any) -> dict[str, Any]:
    """Keywords of the algorithm's make_batch: the fields that it takes and that have a value."""
    fields = {name: config_check.option(cfg, name) for name in ALGORITHMS[cfg.algorithm].SETTINGS}
    in_reward = needs_reference(cfg) and cfg.loss.kl_in == 'reward'
    chosen = {name: value for name, value in fields.items() if value is not None}
    return dict(kl_in_reward=in_reward) | chosen


def window_settings(cfg: Any) -> dict[str, int] | None:
    """Keywords of context.windows; None where the policy sees the whole conversation."""
    if not cfg.context.window:
        return None
    return dict(window=cfg.context.window, max_response=cfg.rollout.max_response)


def update_settings(cfg: Any, mesh: Any) -> dict[str, dict]:
    """Keywords of score, make_batch and update_step."""
    loss, size = cfg.loss, cfg.batch
    kept = config_check.kept_groups(cfg) * cfg.rollout.group_size
    kl_in_loss = needs_reference(cfg) and loss.kl_in == 'loss'
    head = dict(
        temperature=cfg.rollout.temperature, chunk_size=size.head_chunk,
        # No row can have more tokens to train; with a window a row is a turn.
        row_tokens=cfg.rollout.max_response * (1 if cfg.context.window else cfg.env.max_turns),
    )  # fmt: skip
    samples = cfg.env.max_turns if cfg.context.window else 1  # of an episode
    return {
        'score': dict(microbatch_rows=size.microbatch_rows, recompute=False, **head),
        'batch': batch_settings(cfg),
        'update': dict(
            loss=ALGORITHMS[cfg.algorithm].loss, clip_low=loss.clip_low, clip_high=loss.clip_high,
            dual_clip=loss.dual_clip or None, entropy_coef=loss.entropy_coef,
            kl_estimator=loss.kl_estimator if kl_in_loss else None,
            aggregation=loss.aggregation, norm_length=loss.norm_length,
            value_clip=loss.value_clip or None, value_coef=loss.value_coef,
            num_minibatches=kept // size.minibatch_rows,
            num_microbatches=samples * size.minibatch_rows // size.microbatch_rows,
            epochs=size.epochs,
            critic_warmup=cfg.critic.warmup_steps, kl_target=loss.kl_target or None,
            kl_horizon=loss.kl_horizon, row_sharding=sharding.shard_rows(mesh), **head,
        ),
    }  # fmt: skip
