"""From a config to the functions of an update, bound to their settings."""

import functools
from typing import Any

from agentrl_jax.algorithms import ALGORITHMS, dpo
from agentrl_jax.machine import sharding
from agentrl_jax.rl import batches, filtering, parity, score, trials, update
from agentrl_jax.rollout import windows
from agentrl_jax.run import derived
from agentrl_jax.tokens.tokenizer import IM_START


def algorithm_options(cfg: Any) -> dict[str, Any]:
    """Keywords of the algorithm's make_batch: the fields that it takes and that have a value."""
    fields = {name: derived.option(cfg, name) for name in ALGORITHMS[cfg.algorithm].SETTINGS}
    in_reward = cfg.loss.kl_coef > 0 and cfg.loss.kl_in == 'reward'
    chosen = {name: value for name, value in fields.items() if value is not None}
    return dict(kl_in_reward=in_reward) | chosen


def build_windows(cfg: Any, task: Any) -> Any:
    """windows.windows of a rollout; None where the policy sees the whole conversation."""
    if not cfg.context.window:
        return None
    context = windows.Context.of(task, cfg.context.window, cfg.rollout.max_response)
    return functools.partial(windows.windows, context=context)


def build_keep(cfg: Any) -> Any:
    """filtering.keep_rows by the config's rule: of a rollout."""
    choice, groups, members = cfg.filter, cfg.rollout.num_groups, cfg.rollout.group_size
    zero = {} if choice.include_zero is None else {'include_zero': choice.include_zero}
    rules = {
        'top_k': dict(keep=derived.share(choice.keep, groups), smallest=choice.smallest),
        'top_p': dict(p=choice.p, eps=choice.eps) | zero,
        'top_p_softmax': dict(p=choice.p) | zero,
        'min_p': dict(p=choice.p) | zero,
        'percentile': dict(low=choice.low, high=choice.high),
        'within_group': dict(keep=derived.share(choice.keep, members)),
        'varied': {},
        'all': {},
    }
    return functools.partial(
        filtering.keep_rows,
        group_size=members,
        rule=choice.rule,
        normalised=cfg.parity.filter_normalised,
        **rules[choice.rule],
    )


def build_credit(cfg: Any) -> Any:
    """The rewards that train, of a rollout with those that the worlds paid; None: the same."""
    if cfg.agent.reward != 'gain':
        return None
    return functools.partial(trials.gain_rewards, local=cfg.turn_credit.mode == 'mt_local')


def build_select(cfg: Any) -> Any:
    """filtering.select of the config's filter: of a rollout."""
    members, keep_fn = cfg.rollout.group_size, build_keep(cfg)
    if cfg.filter.refill:  # what was collected is kept already
        keep_fn = functools.partial(filtering.keep_rows, group_size=members, rule='all')
    return functools.partial(
        filtering.select,
        keep_fn=keep_fn,
        group_size=members,
        order=derived.row_order(cfg),
        count=derived.kept_groups(cfg) * members,
        soft=cfg.filter.soft,
        scaling=cfg.filter.scaling,
    )


SAMPLER_BOUNDS = {'tis': (0.0, 2.0), 'icepop': (0.5, 5.0)}


def build_correct(cfg: Any) -> Any:
    """batches.correct; None where the sampler is taken for the trainer."""
    loss = cfg.loss
    if loss.sampler_correction == 'off':
        return None
    low, high = SAMPLER_BOUNDS[loss.sampler_correction]
    return functools.partial(
        batches.correct,
        low=low if loss.sampler_low is None else loss.sampler_low,
        high=high if loss.sampler_high is None else loss.sampler_high,
        drop=loss.sampler_correction == 'icepop',
        per_sequence=loss.sampler_sequence,
    )


def build_train_on(cfg: Any, tokenizer: Any) -> Any:
    """parity.train_on; None where the sampled tokens train."""
    if cfg.parity.loss_on == 'sampled':
        return None
    return functools.partial(
        parity.train_on,
        start_id=tokenizer.special(IM_START),
        answers_only=cfg.parity.loss_on == 'answers',
    )


def head_settings(cfg: Any) -> dict[str, Any]:
    """Keywords of everything that computes log-probabilities of a batch."""
    sampled = cfg.rollout.max_response * (1 if cfg.context.window else cfg.env.max_turns)
    others = cfg.parity.loss_on != 'sampled' or derived.base_rows(cfg)
    return dict(
        temperature=cfg.rollout.temperature,
        chunk_size=cfg.batch.head_chunk,
        # No row can have more tokens to train (but demonstrations); with a window a row is a turn.
        row_tokens=None if others else sampled,
    )


def build_update(cfg: Any, mesh: Any, txs: tuple) -> Any:
    """update.update_step of a state and a batch."""
    loss, size, pairs = cfg.loss, cfg.batch, cfg.algorithm == 'dpo'
    rows = derived.kept_groups(cfg) * cfg.rollout.group_size + derived.base_rows(cfg)
    samples = derived.batch_rows(cfg) * (cfg.env.max_turns if cfg.context.window else 1)
    return functools.partial(
        update.update_step,
        tx=txs[0],
        critic_tx=txs[1],
        loss=ALGORITHMS[cfg.algorithm].loss,
        clipped=ALGORITHMS[cfg.algorithm].clipped,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip or None,
        entropy_coef=loss.entropy_coef or 0.0,
        kl_estimator=loss.kl_estimator,
        has_reference=derived.needs_reference(cfg),
        aggregation=loss.aggregation,
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
        together=samples,
        sparse=derived.rows_drop_out(cfg),
        widths=size.widths,
        **head_settings(cfg),
    )


def recomputes(cfg: Any) -> bool:
    """Whether the trainer's own forward pass says what the old log-probabilities were."""
    return cfg.loss.sampler_correction != 'off' or cfg.parity.loss_on != 'sampled'


def build_learning(cfg: Any, mesh: Any, task: Any, tokenizer: Any, txs: tuple) -> batches.Learning:
    """The functions of an update; task: for the width of its prompts, where windows are cut."""
    members, pairs = cfg.rollout.group_size, cfg.algorithm == 'dpo'
    correct, train_on = build_correct(cfg), build_train_on(cfg, tokenizer)
    return batches.Learning(
        select=build_select(cfg),
        credit=build_credit(cfg),
        train_on=train_on,
        order=functools.partial(dpo.order_rows, group_size=members) if pairs else None,
        windows=build_windows(cfg, task),
        score=functools.partial(
            score.score,
            microbatch_rows=cfg.batch.microbatch_rows,
            recompute=recomputes(cfg),
            with_next=bool(cfg.loss.bootstrap_truncated),
            **head_settings(cfg),
        ),
        make_batch=functools.partial(
            ALGORITHMS[cfg.algorithm].make_batch, group_size=members, **algorithm_options(cfg)
        ),
        correct=correct,
        update=build_update(cfg, mesh, txs),
        rates=functools.partial(
            update.learning_rates,
            rate=update.rate_of(cfg.optim.lr, **derived.lr_schedule(cfg)),
            critic_rate=update.rate_of(cfg.optim.critic_lr, **derived.lr_schedule(cfg)),
        ),
        with_continuations=derived.trains_continuations(cfg),
    )


def information_settings(cfg: Any) -> dict[str, Any]:
    """Keywords of mutual_information.information."""
    return dict(
        group_size=cfg.rollout.group_size,
        pairs=cfg.alarm.mi_pairs,
        turns=cfg.alarm.mi_turns,
        text=cfg.alarm.mi_text,
        low_mi=cfg.alarm.low_mi,
        low_entropy=cfg.alarm.low_entropy,
        max_response=cfg.rollout.max_response,
        microbatch_rows=cfg.batch.microbatch_rows,
        temperature=cfg.rollout.temperature,
        chunk_size=cfg.batch.head_chunk,
    )
