"""From a config to the keywords of score, make_batch and update_step."""

import functools
from typing import Any

from agentrl_jax.algorithms import ALGORITHMS, dpo
from agentrl_jax.machine import sharding
from agentrl_jax.rl import filtering
from agentrl_jax.run import check
from agentrl_jax.run.parts import build_tokenizer
from agentrl_jax.tokens.tokenizer import IM_START


def batch_settings(cfg: Any) -> dict[str, Any]:
    """Keywords of the algorithm's make_batch: the fields that it takes and that have a value."""
    fields = {name: check.option(cfg, name) for name in ALGORITHMS[cfg.algorithm].SETTINGS}
    in_reward = cfg.loss.kl_coef > 0 and cfg.loss.kl_in == 'reward'
    chosen = {name: value for name, value in fields.items() if value is not None}
    return dict(kl_in_reward=in_reward) | chosen


def window_settings(cfg: Any) -> dict[str, int] | None:
    """Keywords of context.windows; None where the policy sees the whole conversation."""
    if not cfg.context.window:
        return None
    return dict(window=cfg.context.window, max_response=cfg.rollout.max_response)


def keep_settings(cfg: Any) -> dict[str, Any]:
    """Keywords of filtering.keep_rows: the rule and what it takes."""
    choice, groups, members = cfg.filter, cfg.rollout.num_groups, cfg.rollout.group_size
    zero = {} if choice.include_zero is None else {'include_zero': choice.include_zero}
    rules = {
        'top_k': dict(keep=check.share(choice.keep, groups), smallest=choice.smallest),
        'top_p': dict(p=choice.p, eps=choice.eps) | zero,
        'top_p_softmax': dict(p=choice.p) | zero,
        'min_p': dict(p=choice.p) | zero,
        'percentile': dict(low=choice.low, high=choice.high),
        'within_group': dict(keep=check.share(choice.keep, members)),
        'varied': {},
        'all': {},
    }
    normalised = cfg.parity.filter_normalised
    return dict(group_size=members, rule=choice.rule, normalised=normalised) | rules[choice.rule]


def build_keep(cfg: Any) -> Any:
    """filtering.keep_rows by the config's rule: of a rollout."""
    return functools.partial(filtering.keep_rows, **keep_settings(cfg))


def build_select(cfg: Any) -> Any:
    """filtering.select of the config's filter: of a rollout."""
    groups, members = cfg.rollout.num_groups, cfg.rollout.group_size
    kept, keep_fn = check.kept_groups(cfg), build_keep(cfg)
    if cfg.filter.refill:  # what was collected is kept already
        keep_fn = functools.partial(filtering.keep_rows, group_size=members, rule='all')
    whole = cfg.filter.refill or not check.drops_groups(cfg)
    order = 'all' if whole else 'compact' if kept < groups else 'kept_first'
    return functools.partial(
        filtering.select,
        keep_fn=keep_fn,
        group_size=members,
        order=order,
        count=kept * members,
        soft=cfg.filter.soft,
        scaling=cfg.filter.scaling,
    )


SAMPLER_BOUNDS = {'tis': (0.0, 2.0), 'icepop': (0.5, 5.0)}


def correction_settings(cfg: Any) -> dict[str, Any] | None:
    """Keywords of batches.correct; None where the sampler is taken for the trainer."""
    loss = cfg.loss
    if loss.sampler_correction == 'off':
        return None
    low, high = SAMPLER_BOUNDS[loss.sampler_correction]
    return dict(
        low=low if loss.sampler_low is None else loss.sampler_low,
        high=high if loss.sampler_high is None else loss.sampler_high,
        drop=loss.sampler_correction == 'icepop',
        per_sequence=loss.sampler_sequence,
    )


def trained_settings(cfg: Any) -> dict[str, Any] | None:
    """Keywords of parity.train_on; None where the sampled tokens train."""
    if cfg.parity.loss_on == 'sampled':
        return None
    start = build_tokenizer(cfg).special(IM_START)
    return dict(start_id=start, answers_only=cfg.parity.loss_on == 'answers')


def update_settings(cfg: Any, mesh: Any) -> dict[str, dict]:
    """The filter, the order of rows, and keywords of score, make_batch and update_step."""
    loss, size = cfg.loss, cfg.batch
    base_rows, pairs = check.base_rows(cfg), cfg.algorithm == 'dpo'
    rows = check.kept_groups(cfg) * cfg.rollout.group_size + base_rows
    kl_in_loss = loss.kl_coef > 0 and loss.kl_in == 'loss'
    sampled = cfg.rollout.max_response * (1 if cfg.context.window else cfg.env.max_turns)
    head = dict(
        temperature=cfg.rollout.temperature,
        chunk_size=size.head_chunk,
        # No row can have more tokens to train (but demonstrations); with a window a row is a turn.
        row_tokens=sampled if cfg.parity.loss_on == 'sampled' and not base_rows else None,
    )
    samples = cfg.env.max_turns if cfg.context.window else 1  # of an episode
    correction, trained = correction_settings(cfg), trained_settings(cfg)
    return {
        'select': build_select(cfg),
        'window': window_settings(cfg),
        'correction': correction,
        'trained': trained,
        'score': dict(
            microbatch_rows=size.microbatch_rows,
            recompute=correction is not None or trained is not None,
            **head,
        ),
        'batch': batch_settings(cfg),
        'order': dpo.order_rows if pairs else None,
        'update': dict(
            loss=ALGORITHMS[cfg.algorithm].loss,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip or None,
            entropy_coef=loss.entropy_coef,
            kl_estimator=loss.kl_estimator if kl_in_loss else None,
            aggregation='seq_mean_token_sum' if pairs else loss.aggregation,
            norm_length=loss.norm_length,
            unit=2 if pairs else 1,
            value_clip=loss.value_clip or None,
            value_coef=loss.value_coef,
            num_minibatches=rows // size.minibatch_rows,
            num_microbatches=samples * size.minibatch_rows // size.microbatch_rows,
            epochs=size.epochs,
            microbatch_means=cfg.parity.microbatch_means,
            critic_warmup=cfg.critic.warmup_steps,
            kl_target=loss.kl_target or None,
            kl_horizon=loss.kl_horizon,
            row_sharding=sharding.shard_rows(mesh),
            **head,
        ),
    }
