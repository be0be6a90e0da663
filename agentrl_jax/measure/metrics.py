"""What a run reports: the meaning of every metric name, and the metrics of a rollout."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.measure.diversity import distinct_action_rate, repeated_ngrams
from agentrl_jax.rl import advantages
from agentrl_jax.rl.masked import masked_max, masked_mean
from agentrl_jax.text.agents import ACT, PARTS, PLAN
from agentrl_jax.types import EpisodeStop, Rollout, TurnStop

NGRAM = 4
TRIALS = ('first', 'second', 'third', 'fourth', 'fifth')  # those whose success is reported apart

METRICS = {
    'rollout/success': 'Share of episodes that ended solved.',
    'rollout/return': 'Sum of rewards and format penalties of an episode.',
    'rollout/turns': 'Turns played in an episode.',
    'rollout/horizon': 'Turns an episode could take in this step (curriculum).',
    'rollout/actions': 'Environment actions executed in an episode.',
    'rollout/tokens': 'Tokens of an episode: prompts, observations and answers.',
    'rollout/response_length': 'Tokens the policy sampled in an episode.',
    'rollout/valid_format': 'Share of played turns whose answer parsed into legal actions; nan '
    'where worlds on hosts do not say it.',
    'rollout/turn_length_stop': 'Share of played turns cut at the longest allowed answer.',
    'rollout/token_budget_stop': 'Share of episodes ended because no further turn would fit.',
    'rollout/nonfinite': 'Sampled tokens whose log-probability is not finite (any ends the run).',
    'rollout/no_legal_token': 'Sampled tokens for which the grammar allowed no token (any ends the '
    'run).',
    'rollout/env_error': 'Share of all episodes lost to environment faults (in no other metric).',
    'rollout/pass_at_n': 'Share of groups with at least one solved episode.',
    'rollout/staleness': 'Updates between the weights that sampled a turn and those that are '
    'trained, mean over turns (rollout.staleness).',
    'rollout/staleness_max': 'The most of them.',
    'rollout/restarted': 'Episodes that had begun before the run was resumed, and began again '
    '(rollout.staleness).',
    'group/return_std': 'Unbiased standard deviation of the returns in a group, mean over groups.',
    'group/zero_std_frac': 'Share of groups whose members all have the same return.',
    'group/all_fail_frac': 'Share of groups in which no episode is solved.',
    'group/all_pass_frac': 'Share of groups in which every episode is solved.',
    'echo/repeated_ngrams': 'Share of 4-grams of sampled tokens that repeat one of their episode.',
    'echo/distinct_actions': 'Different action sequences in a group / its episodes.',
    'agent/trials': 'Trials of an episode in which a turn acted (agent.trials > 1).',
    'agent/gain': 'What the second trial earned less what the first did; 0 without a second one.',
    'agent/plan_tokens': 'Tokens sampled in the plans of an episode.',
    'agent/reflection_tokens': 'Tokens sampled in the reflections of an episode.',
    'agent/act_tokens': 'Tokens sampled in the turns of an episode that act.',
    'agent/written': 'Share of written turns that hold the tag that closes them.',
    'agent/plan_followed': 'Share of plans that name actions whose first one is then taken first.',
    'library/tool_calls': 'Lookups in an episode.',
    'library/tool_success': 'Lookups that found a card / lookups of an episode; 0 without any.',
    'library/answer_presence': 'Share of episodes in which the card with the answer was shown.',
    'library/answered': 'Share of episodes that gave an answer.',
    'library/answer_f1': 'Word F1 of the answer and the right one; 0 without an answer.',
    'babyai/solvable_success': 'Success on levels that can be solved (that the expert solves).',
    'search/tool_success': 'Searches that could be made / searches asked for; 0 without any.',
    'search/answer_presence': 'Share of episodes whose first result holds a right answer.',
    'search/exact_match': 'Share of episodes whose last answer is a right one, word for word.',
    'harness/requests': 'Requests of a harness that were answered with sampled tokens.',
    'harness/branches': 'Conversations of a harness in an episode.',
    'harness/refused': 'Requests that were refused for what a harness did wrong.',
    'harness/bad_calls': 'Calls of a tool that could not be read, in an episode.',
    'search/format': 'Format of the turns: 1 with all tags at their places, 0.2 with none.',
    'shop/score': 'What purchases score: type, attributes, options and price; 0 without one.',
    'hosts/waited_s': 'Seconds in which rollouts did nothing but wait for worlds on hosts.',
    'hosts/reply_s': 'Seconds a world took to answer, mean over its replies.',
    'hosts/slowest_s': 'Seconds the slowest of these replies took.',
    'hosts/idle_slots': 'Share of decode slots that produced no token.',
    'hosts/retries': 'Steps that were asked of a fresh world after a fault.',
    'hosts/timeouts': 'Worlds that were given up because they did not answer in time.',
    'hosts/faults': 'Episodes given up because their worlds failed.',
    'hosts/cut': 'Texts of worlds longer than hosts.max_observation, whose middle was cut.',
    'filter/collects': 'Rollouts played for a step; more than 1 with dynamic sampling.',
    'filter/kept': 'Share of the episodes played that the filter kept.',
    'filter/group_std_kept': 'Standard deviation of returns in the kept groups, mean over them.',
    'filter/group_std_max': 'Largest standard deviation of returns in a group.',
    'filter/empty': '1 for a step that kept nothing to train on and changed nothing, else 0.',
    'batch/trained_rows': 'Episodes the update trains on: healthy, and kept by the filter.',
    'batch/trained_tokens': 'Tokens the update trains on: those sampled in these episodes, and in '
    'what trains of their continuations.',
    'batch/tokens': 'Tokens of the rows that train, prompts included.',
    'batch/advantage_std': 'Standard deviation of the advantages over trained tokens.',
    'fork/played': 'Continuations of an episode that were played (algorithm=vine).',
    'fork/tokens': 'Tokens the policy sampled in the continuations of an episode.',
    'fork/trained_rows': 'Continuations whose first turn the update trains on.',
    'policy/loss': 'Policy loss, all of its terms.',
    'policy/surrogate': 'The clipped surrogate, the first of its terms.',
    'policy/clip_frac_low': 'Share of trained tokens that the loss clipped from below.',
    'policy/clip_frac_high': 'Share of trained tokens that the loss clipped from above.',
    'policy/clip_frac_dual': 'Share of trained tokens that loss.dual_clip bounded.',
    'policy/kl_old': 'Estimate of KL(policy that sampled, policy) per trained token: before the '
    'update, or where it is another one its explorer (agent_evol) or older weights (staleness).',
    'policy/kl_old_k3': 'The same by the estimator k3, which is never negative.',
    'policy/ratio_max': 'Largest probability ratio of a trained token.',
    'policy/entropy': 'Entropy of the policy over the vocabulary, mean over trained tokens.',
    'policy/observation_nll': 'Mean of -log p over the tokens of observations in the update '
    '(loss.observation_coef).',
    'policy/kl_ref': 'KL(policy, reference) per trained token, k3 where the loss has no KL.',
    'policy/kl_teacher': 'KL(policy, teachers) per trained token (algorithm=opd), k1 where they '
    'score sampled tokens alone.',
    'policy/kl_coef': 'Coefficient of the KL term during the update.',
    'policy/grad_norm': 'Global norm of the policy gradient before clipping.',
    'optim/lr': 'Learning rate of the policy as the update begins, with its schedule.',
    'optim/critic_lr': 'The same of a critic with parameters of its own.',
    'update/skipped': 'Optimiser steps skipped for a loss or gradient that is not finite.',
    'update/applied': 'Share of optimiser steps with trained tokens that changed the policy.',
    'update/critic_applied': 'The same of a critic with parameters of its own.',
    'value/loss': 'Loss of the critic.',
    'value/clip_frac': 'Share of trained tokens whose value was clipped.',
    'value/explained_variance': '1 - Var(return - value) / Var(return) over trained tokens.',
    'value/grad_norm': 'Global norm of the critic gradient before clipping.',
    'value/vine_error': 'Root mean square of value less exact value at the starts of later turns, '
    'measured by continuations (fork.value_every).',
    'value/vine_spread': 'Standard deviation of these exact values: the error of their mean.',
    'value/vine_corr': 'Correlation of values with these exact values.',
    'sampler/logprob_gap': 'Largest gap of log p between sampler and trainer, before any step; '
    'where the sampler is another policy (agent_evol, staleness) theirs too.',
    'sampler/weight': 'Mean factor that corrects for the sampler (loss.sampler_correction).',
    'sampler/outside': 'Share of trained tokens whose factor was out of bounds.',
    'time/collect_s': 'Seconds spent playing episodes in a step.',
    'time/update_s': 'Seconds spent on scores and updates in a step.',
    'time/step_s': 'Seconds of a whole step.',
    'time/host_s': 'Seconds from the figures of the step before to the begin of this one, in which '
    'devices wait for the host: row, page, checkpoint. 0 in the first step after a start.',
    'perf/tokens_per_s': 'Tokens sampled per second of a whole step.',
    'perf/recompiles': 'Programs compiled after warm-up (must stay 0).',
    'perf/flops_per_s': 'Floating-point operations that the tokens of a step need at least (no '
    'padding, no validation), per second of the whole step; estimated from mean lengths. What rows '
    'have in common counts in each, also where batch.prefix_rows computes it once.',
    'perf/flops_share': 'As a share of the published bfloat16 peak of all devices, where known.',
    'perf/host_peak_bytes': 'Largest resident memory of process 0 so far, since its start.',
    'perf/device_peak_bytes': 'Most memory in use on a device of process 0 so far, where the '
    'backend says so (not on CPUs).',
    'progress/tokens': 'Tokens sampled for training so far.',
    'progress/trained_tokens': 'Sum of batch/trained_tokens so far.',
    'progress/episodes': 'Episodes played for training so far, dynamic sampling included.',
    'eval/success': 'Share of validation episodes that ended solved (mean@k with eval.samples=k).',
    'eval/success_low': 'Lower end of its 95 % interval: Wilson, with several samples of a level '
    'for as many episodes as would vary like the levels do.',
    'eval/success_high': 'Upper end of that interval.',
    'eval/pass_at_k': 'Share of levels that one of eval.samples=k > 1 episodes solved; levels with '
    'fewer healthy ones are left out.',
    'eval/pass_at_k_low': 'Lower end of the 95 % Wilson interval of eval/pass_at_k.',
    'eval/pass_at_k_high': 'Upper end of the 95 % Wilson interval of eval/pass_at_k.',
    'eval/env_error': 'As rollout/env_error, of validation episodes.',
    'eval/return': 'Sum of rewards and format penalties of a validation episode.',
    'eval/observation_nll': 'Mean of -log p over the tokens of observations in validation '
    '(eval.observations).',
    'collapse/mi': 'Mutual information of answers and prompts in nats; 0 = prompts are ignored.',
    'collapse/mi_share': 'As a share of the most that collapse/mi can be, log(prompts).',
    'collapse/mi_token': 'The same estimate of log-probabilities per token (RAGEN-2).',
    'collapse/mi_z': 'Ratio of collapse/mi_token to collapse/marginal_std + 0.001.',
    'collapse/mi_z_ema': 'The same with a smoothed std, which keeps 0.9 of itself.',
    'collapse/marginal_std': 'Spread over answers of their log p per token, prompts averaged out.',
    'collapse/conditional_entropy': 'Entropy per token of what is scored, given its prompt.',
    'collapse/marginal_entropy': 'Entropy per token of what is scored, prompts averaged out.',
    'collapse/quadrant': '0 diverse, 1 template collapse, 2 compressed, 3 low-entropy collapse.',
    'collapse/retrieval_accuracy': 'How often an answer is likeliest under its own prompt.',
    'collapse/retrieval_chance': 'The accuracy of guessing.',
    'collapse/retrieval_above_chance': 'What collapse/retrieval_accuracy is above chance.',
    'alarm/level': 'Worst signal: 0 nothing, 1 warning, 2 alarm.',
    'eval/exploitability': 'Chips a game that the best response earns of the policy, mean of both '
    'seats, exact (leduc with context.window=1).',
    'eval/valid_format': 'Share of validation turns whose answer parsed into legal actions; nan '
    'where worlds on hosts do not say it.',
    'eval/token_budget_stop': 'As rollout/token_budget_stop, of what `evaluate` plays.',
}
METRICS |= {
    f'agent/success_{name}': f'Share of episodes solved by their {name} trial (agent.trials).'
    for name in TRIALS
}
METRICS |= {
    f'collapse/retrieval_accuracy_{k}': f'How often its prompt is among the {k} likeliest.'
    for k in (2, 4, 8)
}
OF_EPISODES = ('agent/trials', 'agent/success_', 'agent/gain', 'library/', 'babyai/', 'search/')
OF_EPISODES += ('harness/', 'shop/')
METRICS |= {
    f'eval/{name.split("/")[1]}': f'As {name.split("/")[1]} of training, of validation episodes.'
    for name in tuple(METRICS)
    if name.startswith(OF_EPISODES)
}


def metrics_table() -> str:
    """METRICS as a Markdown table."""
    rows = [f'| `{name}` | {meaning} |' for name, meaning in METRICS.items()]
    return '\n'.join(['| metric | meaning |', '| --- | --- |', *rows]) + '\n'


def rollout_metrics(rollout: Rollout, group_size: int) -> dict[str, jax.Array]:
    """Metrics of the healthy episodes as float32 scalars; nan where there is none.

    Groups count with their healthy members: in-group spread needs two of them, the rest one.
    """
    metrics = _episode_metrics(rollout) | _group_metrics(rollout, group_size)
    if rollout.staleness is not None:
        metrics |= _staleness(rollout)
    return _measured(metrics, rollout.healthy) | {
        'rollout/env_error': jnp.mean(~rollout.healthy, dtype=jnp.float32)
    }


def _measured(metrics: dict[str, jax.Array], of: jax.Array) -> dict[str, jax.Array]:
    """Metrics as float32 scalars, nan where no element of the mask is set: none was measured."""
    some = jnp.any(of)
    return {
        name: jnp.where(some, jnp.asarray(value, jnp.float32), jnp.nan)
        for name, value in metrics.items()
    }


def agent_metrics(
    rollout: Rollout, agent: Any, *, names_actions: bool = True
) -> dict[str, jax.Array]:
    """Figures of trials and of written turns, where there are any; means of healthy episodes.

    names_actions: the rollout says which actions a plan names (on hosts it does not).
    """
    found = trial_figures(rollout, agent)
    played = jnp.arange(rollout.part.shape[1])[None] < rollout.num_turns[:, None]
    if agent.writes:
        kind = jnp.take_along_axis(rollout.part, jnp.maximum(rollout.turn, 0), axis=1)
        for part, name in enumerate(PARTS):
            found[f'{name}_tokens'] = jnp.sum(rollout.action_mask & (kind == part), axis=1)
    found = {name: masked_mean(x, rollout.healthy) for name, x in found.items()}
    if agent.writes:
        written = played & ~rollout.acts & rollout.healthy[:, None]
        found['written'] = masked_mean(rollout.valid.astype(jnp.float32), written)
    if agent.plans and names_actions:
        found['plan_followed'] = plan_followed(rollout)
    return _measured({f'agent/{name}': x for name, x in found.items()}, rollout.healthy)


def plan_followed(rollout: Rollout) -> jax.Array:
    """Share of plans that name actions whose first one is the first that the next turn takes."""
    place = jnp.argmax(rollout.actions >= 0, axis=2, keepdims=True)
    first = jnp.take_along_axis(rollout.actions, place, axis=2)[:, :, 0]  # -1: there is none
    later = jnp.arange(1, first.shape[1])[None] < rollout.num_turns[:, None]
    plans = (rollout.part[:, :-1] == PLAN) & (rollout.part[:, 1:] == ACT)  # else a trial is over
    plans &= later & (first[:, :-1] >= 0)
    same = (first[:, :-1] == first[:, 1:]).astype(jnp.float32)
    return masked_mean(same, plans & rollout.healthy[:, None])


def trial_figures(rollout: Rollout, agent: Any) -> dict[str, jax.Array]:
    """Figures of each episode of an agent with several trials, [B]."""
    if agent.trials == 1:
        return {}
    last = last_trial(rollout)
    first, second = (trial_rewards(rollout, number) for number in (0, 1))
    solved = {
        f'success_{name}': rollout.success & (last <= number)
        for number, name in enumerate(TRIALS[: agent.trials])
    }
    return {'trials': last + 1, **solved, 'gain': jnp.where(last >= 1, second - first, 0.0)}


def executed(rollout: Rollout) -> jax.Array:
    """The actions int32 [B, K, A] of turns that act, -1 = none."""
    return jnp.where(rollout.acts[:, :, None], rollout.actions, -1)


def last_trial(rollout: Rollout) -> jax.Array:
    """Number of the last trial in which a turn acted, int32 [B]."""
    played = jnp.arange(rollout.acts.shape[1])[None] < rollout.num_turns[:, None]
    return jnp.max(jnp.where(rollout.acts & played, rollout.trial, 0), axis=1)


def last_actions(rollout: Rollout) -> jax.Array:
    """Those of the last trial, which is played on the level as it was."""
    last = rollout.trial == last_trial(rollout)[:, None]
    return jnp.where(last[:, :, None], executed(rollout), -1)


def trial_rewards(rollout: Rollout, number: int) -> jax.Array:
    """What the world paid in a trial, float32 [B]."""
    return jnp.where(rollout.trial == number, rollout.rewards, 0.0).sum(1)


def environment_metrics(rollout: Rollout, task: Any) -> dict[str, jax.Array]:
    """Means over the healthy episodes of what the environment of a text task counts by itself."""
    own = own_figures(rollout, task)
    found = {f'{task.env.name}/{name}': masked_mean(x, rollout.healthy) for name, x in own.items()}
    return _measured(found, rollout.healthy)


def own_figures(rollout: Rollout, task: Any) -> dict[str, jax.Array]:
    """float32 [B] each: what the environment counts in an episode, or its worlds on hosts did."""
    if rollout.figures is not None:
        return dict(zip(task.env.FIGURES, rollout.figures.T, strict=True))
    return task.env.episode_metrics(last_actions(rollout), rollout.level, task.env_params)


def _episode_metrics(rollout: Rollout) -> dict[str, jax.Array]:
    healthy = rollout.healthy
    turn_index = jnp.arange(rollout.rewards.shape[1])[None]
    played = (turn_index < rollout.num_turns[:, None]) & healthy[:, None]
    repeated, ngrams = repeated_ngrams(rollout.tokens, rollout.action_mask, rollout.turn, n=NGRAM)
    return {
        'rollout/success': masked_mean(rollout.success.astype(jnp.float32), healthy),
        'rollout/return': masked_mean(rollout.returns, healthy),
        'rollout/turns': masked_mean(rollout.num_turns, healthy),
        'rollout/actions': masked_mean(rollout.num_actions.sum(1), healthy),
        'rollout/tokens': masked_mean(rollout.attention_mask.sum(1), healthy),
        'rollout/response_length': masked_mean(rollout.action_mask.sum(1), healthy),
        'rollout/valid_format': valid_format(rollout, played),
        'rollout/turn_length_stop': masked_mean(
            (rollout.turn_stop == TurnStop.LENGTH).astype(jnp.float32), played
        ),
        'rollout/token_budget_stop': masked_mean(
            (rollout.episode_stop == EpisodeStop.TOKEN_BUDGET).astype(jnp.float32), healthy
        ),
        'echo/repeated_ngrams': masked_mean(repeated, healthy & (ngrams > 0)),
    }


def _staleness(rollout: Rollout) -> dict[str, jax.Array]:
    turns = jnp.arange(rollout.staleness.shape[1])[None]
    played = (turns < rollout.num_turns[:, None]) & rollout.healthy[:, None]
    stale = rollout.staleness.astype(jnp.float32)
    return {
        'rollout/staleness': masked_mean(stale, played),
        'rollout/staleness_max': masked_max(stale, played),
    }


def valid_format(rollout: Rollout, played: jax.Array) -> jax.Array:
    """Share of the turns played bool [B, K] that are valid; nan where a world does not say it."""
    share = masked_mean(rollout.valid.astype(jnp.float32), played)
    return jnp.where(unjudged(rollout, played) > 0, jnp.nan, share)


def unjudged(rollout: Rollout, played: jax.Array) -> jax.Array:
    """Of how many turns played nobody said whether they are valid.

    One is enough: that an answer could not be read is known without the world, so those that are
    known are no fair sample.
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
