"""Metrics of a run: the meaning of every name, and the metrics of a rollout."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.measure.diversity import distinct_action_rate, repeated_ngrams
from agentrl_jax.rl import advantages
from agentrl_jax.rl.masked import masked_max, masked_mean
from agentrl_jax.text.agents import ACT, PARTS, PLAN
from agentrl_jax.types import EpisodeStop, Rollout, TurnStop

NGRAM = 4
TRIALS = ('first', 'second', 'third', 'fourth', 'fifth')  # trials with a separate success metric

METRICS = {
    'rollout/success': 'Share of episodes that ended solved.',
    'rollout/return': 'Sum of rewards and format penalties of an episode.',
    'rollout/turns': 'Turns per episode.',
    'rollout/horizon': 'Maximum number of turns per episode in this step (curriculum).',
    'rollout/actions': 'Environment actions per episode.',
    'rollout/tokens': 'Tokens per episode: prompts, observations and answers.',
    'rollout/response_length': 'Sampled tokens per episode.',
    'rollout/valid_format': 'Share of turns with an answer that parsed into legal actions; nan if '
    'an environment on hosts does not report it.',
    'rollout/turn_length_stop': 'Share of turns cut at the maximum length of an answer.',
    'rollout/token_budget_stop': 'Share of episodes ended because no further turn would fit.',
    'rollout/nonfinite': 'Sampled tokens with a non-finite log-probability (any ends the run).',
    'rollout/no_legal_token': 'Sampled tokens for which the grammar allowed no token (any ends the '
    'run).',
    'rollout/env_error': 'Share of all episodes lost to environment faults (in no other metric).',
    'rollout/pass_at_n': 'Share of groups with at least one solved episode.',
    'rollout/staleness': 'Updates between the weights that sampled a turn and the weights that '
    'train on it, mean over turns (rollout.staleness).',
    'rollout/staleness_max': 'Maximum of rollout/staleness over turns.',
    'rollout/restarted': 'Episodes restarted because the run was resumed (rollout.staleness).',
    'group/return_std': 'Unbiased standard deviation of the returns in a group, mean over groups.',
    'group/zero_std_frac': 'Share of groups whose members all have the same return.',
    'group/all_fail_frac': 'Share of groups in which no episode is solved.',
    'group/all_pass_frac': 'Share of groups in which every episode is solved.',
    'echo/repeated_ngrams': 'Share of 4-grams of sampled tokens that occur earlier in the episode.',
    'echo/distinct_actions': 'Distinct action sequences in a group / its episodes.',
    'agent/trials': 'Trials per episode in which a turn acted (agent.trials > 1).',
    'agent/gain': 'Reward of the second trial minus the first; 0 without a second trial.',
    'agent/plan_tokens': 'Sampled tokens of plans per episode.',
    'agent/reflection_tokens': 'Sampled tokens of reflections per episode.',
    'agent/act_tokens': 'Sampled tokens of acting turns per episode.',
    'agent/written': 'Share of written turns that contain their closing tag.',
    'agent/plan_followed': 'Share of plans with actions whose first action is then taken first.',
    'library/tool_calls': 'Lookups per episode.',
    'library/tool_success': 'Lookups that found a card / lookups of an episode; 0 without any.',
    'library/answer_presence': 'Share of episodes in which the card with the answer was shown.',
    'library/answered': 'Share of episodes that gave an answer.',
    'library/answer_f1': 'Word F1 of the given and the correct answer; 0 without an answer.',
    'babyai/solvable_success': 'Success on solvable levels (those that the expert solves).',
    'search/tool_success': 'Executed searches / requested searches; 0 without any.',
    'search/answer_presence': 'Share of episodes in which the first result has a correct answer.',
    'search/exact_match': 'Share of episodes with a last answer that is correct word for word.',
    'harness/requests': 'Requests of a harness that were answered with sampled tokens.',
    'harness/branches': 'Conversations of a harness per episode.',
    'harness/refused': 'Requests of a harness that were rejected as invalid.',
    'harness/bad_calls': 'Tool calls per episode that could not be parsed.',
    'search/format': 'Format of the turns: 1 with all tags in place, 0.2 with none.',
    'shop/score': 'Score of a purchase: type, attributes, options and price; 0 without one.',
    'hosts/waited_s': 'Seconds in which rollouts only waited for environments on hosts.',
    'hosts/reply_s': 'Seconds per reply of an environment, mean over replies.',
    'hosts/slowest_s': 'Seconds of the slowest of these replies.',
    'hosts/idle_slots': 'Share of decode slots that produced no token.',
    'hosts/retries': 'Steps repeated in a new environment after a fault.',
    'hosts/timeouts': 'Environments abandoned because they did not reply in time.',
    'hosts/faults': 'Episodes abandoned because their environments failed.',
    'hosts/cut': 'Environment texts longer than hosts.max_observation; their middle was cut.',
    'filter/collects': 'Rollouts played for a step; more than 1 with dynamic sampling.',
    'filter/kept': 'Share of episodes that the filter kept.',
    'filter/group_std_kept': 'Standard deviation of returns in the kept groups, mean over them.',
    'filter/group_std_max': 'Largest standard deviation of returns in a group.',
    'filter/empty': '1 for a step that kept no token to train on and changed nothing, else 0.',
    'batch/trained_rows': 'Episodes that the update trains on: healthy and kept by the filter.',
    'batch/trained_tokens': 'Tokens that the update trains on: those sampled in these episodes and '
    'in the trained turns of their continuations.',
    'batch/tokens': 'Tokens of the trained rows, including prompts.',
    'batch/advantage_std': 'Standard deviation of the advantages over trained tokens.',
    'fork/played': 'Continuations per episode (algorithm=vine).',
    'fork/tokens': 'Sampled tokens of continuations per episode.',
    'fork/trained_rows': 'Continuations with a first turn that the update trains on.',
    'policy/loss': 'Policy loss, sum of all terms.',
    'policy/surrogate': 'The clipped surrogate, the first term of the policy loss.',
    'policy/clip_frac_low': 'Share of trained tokens that the loss clipped from below.',
    'policy/clip_frac_high': 'Share of trained tokens that the loss clipped from above.',
    'policy/clip_frac_dual': 'Share of trained tokens that loss.dual_clip bounded.',
    'policy/kl_old': 'Estimate of KL(old policy, policy) per trained token. The old policy is the '
    'one before the update, the explorer (agent_evol) or older weights (staleness).',
    'policy/kl_old_k3': 'policy/kl_old with the estimator k3, which is never negative.',
    'policy/ratio_max': 'Largest probability ratio of a trained token.',
    'policy/entropy': 'Entropy of the policy over the vocabulary, mean over trained tokens.',
    'policy/observation_nll': 'Mean of -log p over the tokens of observations in the update '
    '(loss.observation_coef).',
    'policy/kl_ref': 'KL(policy, reference) per trained token, k3 if the loss has no KL.',
    'policy/kl_teacher': 'KL(policy, teachers) per trained token (algorithm=opd), k1 if they only '
    'score sampled tokens.',
    'policy/grad_norm': 'Global norm of the policy gradient before clipping.',
    'optim/lr': 'Scheduled learning rate of the policy at the start of the update.',
    'optim/critic_lr': 'Scheduled learning rate of a separate critic.',
    'update/skipped': 'Optimiser steps skipped because the loss or gradient was not finite.',
    'update/applied': 'Share of optimiser steps with trained tokens that changed the policy.',
    'update/critic_applied': 'Share of optimiser steps that changed a separate critic.',
    'value/loss': 'Loss of the critic.',
    'value/clip_frac': 'Share of trained tokens with a clipped value.',
    'value/explained_variance': '1 - Var(return - value) / Var(return) over trained tokens.',
    'value/grad_norm': 'Global norm of the critic gradient before clipping.',
    'value/vine_error': 'Root mean square of value minus exact value at the starts of turns after '
    'the first, measured by continuations (fork.value_every).',
    'value/vine_spread': 'Standard deviation of these exact values: the error of their mean.',
    'value/vine_corr': 'Correlation of values with these exact values.',
    'sampler/logprob_gap': 'Largest gap of log p between sampler and trainer, before any step. It '
    'includes the gap between policies if the sampler is another one (agent_evol, staleness).',
    'sampler/weight': 'Mean factor that corrects for the sampler (loss.sampler_correction).',
    'sampler/outside': 'Share of trained tokens with a factor out of bounds.',
    'time/collect_s': 'Seconds of a step spent on playing episodes.',
    'time/update_s': 'Seconds of a step spent on scores and updates.',
    'time/step_s': 'Seconds per step.',
    'time/host_s': 'Seconds between the end of the previous step and the start of this one, in '
    'which devices wait for the host: row, page, checkpoint. 0 in the first step after a start.',
    'perf/tokens_per_s': 'Sampled tokens per second of the full step.',
    'perf/recompiles': 'Programs compiled after warm-up (must stay 0).',
    'perf/flops_per_s': 'Minimum number of floating-point operations for the tokens of a step (no '
    'padding, no validation) per second of the full step; estimated from mean lengths. Common '
    'prefixes count once per row, even if batch.prefix_rows computes them only once.',
    'perf/flops_share': 'perf/flops_per_s / the published bfloat16 peak of all devices, if known.',
    'perf/host_peak_bytes': 'Peak resident memory of process 0 since its start.',
    'perf/device_peak_bytes': 'Peak memory of a device of process 0, if the backend reports it '
    '(not on CPUs).',
    'progress/tokens': 'Tokens sampled for training so far.',
    'progress/trained_tokens': 'Sum of batch/trained_tokens so far.',
    'progress/episodes': 'Episodes played for training so far, dynamic sampling included.',
    'eval/success': 'Share of validation episodes that ended solved (mean@k with eval.samples=k).',
    'eval/success_low': 'Lower end of the 95 % Wilson interval of eval/success. With several '
    'samples per level, the interval uses the effective sample size.',
    'eval/success_high': 'Upper end of that interval.',
    'eval/pass_at_k': 'Share of levels solved by at least one of eval.samples=k > 1 episodes; '
    'levels with fewer healthy episodes are excluded.',
    'eval/pass_at_k_low': 'Lower end of the 95 % Wilson interval of eval/pass_at_k.',
    'eval/pass_at_k_high': 'Upper end of the 95 % Wilson interval of eval/pass_at_k.',
    'eval/env_error': 'rollout/env_error of validation episodes.',
    'eval/return': 'Sum of rewards and format penalties of a validation episode.',
    'eval/observation_nll': 'Mean of -log p over the tokens of observations in validation '
    '(eval.observations).',
    'collapse/mi': 'Mutual information of answers and prompts in nats; 0 = prompts are ignored.',
    'collapse/mi_share': 'collapse/mi / log(prompts), its maximum.',
    'collapse/mi_token': 'collapse/mi from log-probabilities per token (RAGEN-2).',
    'collapse/mi_z': 'Ratio of collapse/mi_token to collapse/marginal_std + 0.001.',
    'collapse/mi_z_ema': 'collapse/mi_z with a moving average of the std (decay 0.9).',
    'collapse/marginal_std': 'Spread over answers of log p per token, averaged over prompts.',
    'collapse/conditional_entropy': 'Entropy per token of the scored text, given its prompt.',
    'collapse/marginal_entropy': 'Entropy per token of the scored text, averaged over prompts.',
    'collapse/quadrant': '0 diverse, 1 template collapse, 2 compressed, 3 low-entropy collapse.',
    'collapse/retrieval_accuracy': 'Share of answers that are likeliest under their own prompt.',
    'collapse/retrieval_chance': 'The accuracy of guessing.',
    'collapse/retrieval_above_chance': 'collapse/retrieval_accuracy minus retrieval_chance.',
    'alarm/level': 'Worst signal: 0 nothing, 1 warning, 2 alarm.',
    'eval/exploitability': 'Chips per game that the best response wins against the policy, mean of '
    'both seats, exact (leduc with context.window=1).',
    'eval/valid_format': 'Share of validation turns with an answer that parsed into legal actions; '
    'nan if an environment on hosts does not report it.',
    'eval/token_budget_stop': 'rollout/token_budget_stop of the episodes of `evaluate`.',
}
METRICS |= {
    f'agent/success_{name}': f'Share of episodes solved by their {name} trial (agent.trials).'
    for name in TRIALS
}
METRICS |= {
    f'collapse/retrieval_accuracy_{k}': f'Share of answers with a prompt among the {k} likeliest.'
    for k in (2, 4, 8)
}
OF_EPISODES = ('agent/trials', 'agent/success_', 'agent/gain', 'library/', 'babyai/', 'search/')
OF_EPISODES += ('harness/', 'shop/')
METRICS |= {
    f'eval/{name.split("/")[1]}': f'The metric {name.split("/")[1]} for validation episodes.'
    for name in tuple(METRICS)
    if name.startswith(OF_EPISODES)
}


def metrics_table() -> str:
    """Return METRICS as a Markdown table."""
    rows = [f'| `{name}` | {meaning} |' for name, meaning in METRICS.items()]
    return '\n'.join(['| metric | meaning |', '| --- | --- |', *rows]) + '\n'


def rollout_metrics(rollout: Rollout, group_size: int) -> dict[str, jax.Array]:
    """Return metrics of the healthy episodes as float32 scalars; nan without any.

    Group metrics use the healthy members: in-group spread needs two of them, the rest one.
    """
    metrics = _episode_metrics(rollout) | _group_metrics(rollout, group_size)
    if rollout.staleness is not None:
        metrics |= _staleness(rollout)
    return _measured(metrics, rollout.healthy) | {
        'rollout/env_error': jnp.mean(~rollout.healthy, dtype=jnp.float32)
    }


def _measured(metrics: dict[str, jax.Array], of: jax.Array) -> dict[str, jax.Array]:
    """Return metrics as float32 scalars, nan if the mask `of` is empty."""
    some = jnp.any(of)
    return {
        name: jnp.where(some, jnp.asarray(value, jnp.float32), jnp.nan)
        for name, value in metrics.items()
    }


def agent_metrics(
    rollout: Rollout, agent: Any, *, names_actions: bool = True
) -> dict[str, jax.Array]:
    """Return metrics of trials and written turns, if any; means over healthy episodes.

    names_actions: the rollout records the actions that a plan names (not on hosts).
    """
    metrics = trial_figures(rollout, agent)
    if agent.writes:
        kind = jnp.take_along_axis(rollout.part, jnp.maximum(rollout.turn, 0), axis=1)
        for part, name in enumerate(PARTS):
            metrics[f'{name}_tokens'] = jnp.sum(rollout.action_mask & (kind == part), axis=1)
    metrics = {name: masked_mean(x, rollout.healthy) for name, x in metrics.items()}
    if agent.writes:
        written = rollout.played & ~rollout.acts & rollout.healthy[:, None]
        metrics['written'] = masked_mean(rollout.valid.astype(jnp.float32), written)
    if agent.plans and names_actions:
        metrics['plan_followed'] = plan_followed(rollout)
    return _measured({f'agent/{name}': x for name, x in metrics.items()}, rollout.healthy)


def plan_followed(rollout: Rollout) -> jax.Array:
    """Share of plans with actions in which the next turn takes the first action first."""
    place = jnp.argmax(rollout.actions >= 0, axis=2, keepdims=True)
    first = jnp.take_along_axis(rollout.actions, place, axis=2)[:, :, 0]  # -1: no action
    plans = (rollout.part[:, :-1] == PLAN) & (rollout.part[:, 1:] == ACT)  # else the trial ended
    plans &= rollout.played[:, 1:] & (first[:, :-1] >= 0)
    same = (first[:, :-1] == first[:, 1:]).astype(jnp.float32)
    return masked_mean(same, plans & rollout.healthy[:, None])


def trial_figures(rollout: Rollout, agent: Any) -> dict[str, jax.Array]:
    """Return metrics of each episode of an agent with several trials, [B]."""
    if agent.trials == 1:
        return {}
    last = last_trial(rollout)
    first, second = (
        jnp.where(rollout.trial == number, rollout.rewards, 0.0).sum(1) for number in (0, 1)
    )
    solved = {
        f'success_{name}': rollout.success & (last <= number)
        for number, name in enumerate(TRIALS[: agent.trials])
    }
    return {'trials': last + 1, **solved, 'gain': jnp.where(last >= 1, second - first, 0.0)}


def executed(rollout: Rollout) -> jax.Array:
    """Return the actions of acting turns, int32 [B, K, A]; -1 = none."""
    return jnp.where(rollout.acts[:, :, None], rollout.actions, -1)


def last_trial(rollout: Rollout) -> jax.Array:
    """Return the number of the last trial in which a turn acted, int32 [B]."""
    return jnp.max(jnp.where(rollout.acts & rollout.played, rollout.trial, 0), axis=1)


def last_actions(rollout: Rollout) -> jax.Array:
    """Return the actions of the last trial, which starts from the initial level."""
    last = rollout.trial == last_trial(rollout)[:, None]
    return jnp.where(last[:, :, None], executed(rollout), -1)


def environment_metrics(rollout: Rollout, task: Any) -> dict[str, jax.Array]:
    """Return means over healthy episodes of the metrics of the environment."""
    values = env_metrics_of(rollout, task)
    metrics = {
        f'{task.env.name}/{name}': masked_mean(x, rollout.healthy) for name, x in values.items()
    }
    return _measured(metrics, rollout.healthy)


def env_metrics_of(rollout: Rollout, task: Any) -> dict[str, jax.Array]:
    """Return the metrics that the environment measured in each episode, float32 [B] each."""
    if rollout.figures is not None:
        return dict(zip(task.env.FIGURES, rollout.figures.T, strict=True))
    return task.env.episode_metrics(last_actions(rollout), rollout.level, task.env_params)


def _episode_metrics(rollout: Rollout) -> dict[str, jax.Array]:
    healthy = rollout.healthy
    is_turn = rollout.played & healthy[:, None]
    repeated, ngrams = repeated_ngrams(rollout.tokens, rollout.action_mask, rollout.turn, n=NGRAM)
    return {
        'rollout/success': masked_mean(rollout.success.astype(jnp.float32), healthy),
        'rollout/return': masked_mean(rollout.returns, healthy),
        'rollout/turns': masked_mean(rollout.num_turns, healthy),
        'rollout/actions': masked_mean(rollout.num_actions.sum(1), healthy),
        'rollout/tokens': masked_mean(rollout.attention_mask.sum(1), healthy),
        'rollout/response_length': masked_mean(rollout.action_mask.sum(1), healthy),
        'rollout/valid_format': valid_format(rollout, is_turn),
        'rollout/turn_length_stop': masked_mean(
            (rollout.turn_stop == TurnStop.LENGTH).astype(jnp.float32), is_turn
        ),
        'rollout/token_budget_stop': masked_mean(
            (rollout.episode_stop == EpisodeStop.TOKEN_BUDGET).astype(jnp.float32), healthy
        ),
        'echo/repeated_ngrams': masked_mean(repeated, healthy & (ngrams > 0)),
    }


def _staleness(rollout: Rollout) -> dict[str, jax.Array]:
    is_turn = rollout.played & rollout.healthy[:, None]
    stale = rollout.staleness.astype(jnp.float32)
    return {
        'rollout/staleness': masked_mean(stale, is_turn),
        'rollout/staleness_max': masked_max(stale, is_turn),
    }


def valid_format(rollout: Rollout, played: jax.Array) -> jax.Array:
    """Share of valid turns among `played` bool [B, K]; nan if validity is not always known."""
    share = masked_mean(rollout.valid.astype(jnp.float32), played)
    return jnp.where(unjudged(rollout, played) > 0, jnp.nan, share)


def unjudged(rollout: Rollout, played: jax.Array) -> jax.Array:
    """Return the number of turns with unknown validity.

    A single one makes the share unknown: unparsable answers are always known, so turns with known
    validity are a biased sample.
    """
    return jnp.sum(played & ~rollout.judged) if rollout.judged is not None else jnp.int32(0)


def _group_metrics(rollout: Rollout, group_size: int) -> dict[str, jax.Array]:
    returns, scale = rollout.returns, rollout.magnitudes.returns
    std = advantages.group_std(returns, rollout.healthy, group_size=group_size, scale=scale)
    healthy = rollout.healthy.reshape(-1, group_size)
    success = rollout.success.reshape(-1, group_size)
    some, several = healthy.any(1), healthy.sum(1) >= 2
    solved = jnp.any(success & healthy, axis=1)
    all_solved = jnp.all(success | ~healthy, axis=1)
    distinct, _ = distinct_action_rate(executed(rollout), rollout.healthy, group_size=group_size)

    def share(x, mask):
        return masked_mean(x.astype(jnp.float32), mask)

    in_groups = {
        'group/return_std': masked_mean(std, several),
        'group/zero_std_frac': share(std == 0, several),
        'echo/distinct_actions': masked_mean(distinct, several),
    }
    return _measured(in_groups, several) | {
        'rollout/pass_at_n': share(solved, some),
        'group/all_fail_frac': share(~solved, some),
        'group/all_pass_frac': share(all_solved, some),
    }
