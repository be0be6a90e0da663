"""The rules between fields of a run's config (agentrl_jax/settings/rules.py).

Algorithms, environments and sections of extensions have their own rules. An environment's
RUN_RULES relate it to the run that trains it.
"""

import importlib.util
import math
import operator
from collections.abc import Callable
from itertools import starmap
from typing import Any

from agentrl_jax.envs import HOSTS, WORLDS
from agentrl_jax.imitation.clone import LIMITS
from agentrl_jax.settings import rules, tree
from agentrl_jax.settings.marks import In, suggestion
from agentrl_jax.settings.rules import Must, Rule, exclude, must
from agentrl_jax.text import agents

Config = Any  # run.config.Config; run.config.read checks these rules
TWO, ONE, ACTS, AGENTS = In(low=2), In(low=1), {'act', 'react'}, set(agents.NAMES)


def _hosts(run: Config) -> list[Any]:
    return [world for world in run.worlds if world.name in HOSTS]


def _divide(a: int, b: int) -> bool:
    return math.gcd(a, b) in (a, b)


def _finishes(run: Config) -> bool:
    return any(getattr(world, 'finishes', False) for world in run.worlds)


def _cloned(run: Config) -> list[Any]:
    """Return the environments on hosts that demonstrate clone.episodes."""
    members = (one for one in run.members if one.on_hosts and one.clone.episodes)
    return [world for member in members for world in member.worlds]


def _known_worlds(run: Config) -> bool:
    return len(WORLDS.keys() & run.env.worlds) == len(run.env.worlds)


def _worlds(run: Config) -> str:
    close = (suggestion(name, WORLDS) for name in run.env.worlds if name not in WORLDS)
    return f'different environments from {", ".join(WORLDS)}{"".join(close)}'


def _shares_sum_to_one(run: Config) -> bool:
    shares = [share for _, share in run.env.mix]
    return not shares or (min(shares) > 0 and abs(sum(shares) - 1) < 1e-6)


def _mixed_groups(run: Config) -> tuple[int, ...]:
    return run.env.apportion(run.rollout.num_groups) if run.env.mix else ()


SHARDED = {  # row counts that must divide evenly over the data shards
    'env.mix': lambda run: [count * run.rollout.group_size for count in _mixed_groups(run)],
    'rollout.num_groups': lambda run: [run.rollout.episodes],
    'rollout.slots': lambda run: [run.rollout.slots],
    'batch.microbatch_rows': lambda run: [run.batch.microbatch_rows],
    'evol.base_rows': lambda run: [run.base_rows],
    'clone.batch': lambda run: [run.clone.batch] * run.clone.demonstrates,
    'clone.microbatch_rows': lambda run: [run.clone.microbatch_rows],
}


def _of_shards(field: str, counts: Callable[[Any], list[int]]) -> Rule:
    return must(
        field,
        'a value that gives a multiple of the data shards in rows (rollout.group_size per group)',
        lambda run: not any(count % run.shards for count in counts(run)),
    )


def _package(name: str) -> dict[str, Must]:
    return {'packages': Must(f'pip install {name}', lambda run: importlib.util.find_spec(name))}


NO_LIMITS = dict.fromkeys((f'clone.{name}' for name in LIMITS), 0)
ON_DEVICE = {'env.name': Must('environments on the device', lambda run: not _hosts(run))}
ONE_BRANCH = {'harness.branches': Must('1', lambda run: run.most_branches == 1)}
ONE_CONVERSATION = {'context.window': 0} | ONE_BRANCH
HAS_RATIO = {'algorithm': Must('one with a ratio', lambda run: run.algorithm.HAS_RATIO)}
DEMONSTRATIONS = Must('a number, or clone.file to a file', lambda run: run.clone.demonstrates)


FIRST = (  # other rules divide by values that these check
    must('env.name', _worlds, lambda run: run.env.mix or _known_worlds(run)),
    must('env.mix', _worlds, lambda run: not run.env.mix or _known_worlds(run)),
    must('env.mix', 'shares above 0 that sum to 1', _shares_sum_to_one),
)

CHECKS = {  # (field, valid values): whether its value is valid
    ('env.mix', 'shares that give each environment a group (rollout.num_groups)'): lambda run: (
        min(_mixed_groups(run), default=1) > 0
    ),
    ('env.max_turns', 'more turns, or agent.trials to fewer (see curriculum.rounds)'): lambda run: (
        run.fewest_turns >= run.agent.build().least_turns
    ),
    ('clone.episodes', '0 for an environment without an expert, or set clone.file'): lambda run: (
        all(world.has_player() for world in _cloned(run))
    ),
    ('clone.oracle', '1.0 for an environment that cannot be played at random'): lambda run: (
        run.clone.oracle == 1 or all(world.plays_at_random for world in _cloned(run))
    ),
    ('model.hidden_size', 'a multiple of 2 x model.num_heads'): lambda run: (
        run.model.path or not run.model.hidden_size % (2 * run.model.num_heads)
    ),
    ('model.num_heads', 'a multiple of model.num_kv_heads'): lambda run: (
        run.model.path or not run.model.num_heads % run.model.num_kv_heads
    ),
    ('lora.rank', 'at most the smallest dimension of an adapted matrix'): lambda run: (
        run.model.path or run.lora.rank <= run.model.narrowest
    ),
    ('rollout.constrain', "'any', since answers contain free text"): lambda run: (
        run.rollout.constrain != 'own'
        or not any('{}' in form for world in _hosts(run) for form in run.answer_forms(world))
    ),
    (
        'batch.minibatch_rows',
        'a divisor of the number of rows in an update (see rollout.num_groups)',
    ): lambda run: not run.update_rows % run.batch.minibatch_rows,
    ('batch.minibatch_rows', 'a multiple of batch.microbatch_rows'): lambda run: (
        not run.batch.minibatch_rows % run.batch.microbatch_rows
    ),
    ('critic.warmup_steps', 'less than steps'): lambda run: (
        not run.critic.warmup_steps >= run.steps > 0
    ),
    ('curriculum.rounds', 'positive and increasing numbers'): lambda run: all(
        map(operator.lt, (0, *run.curriculum.rounds), run.curriculum.rounds)
    ),
    ('curriculum.rounds', 'numbers up to env.max_turns'): lambda run: (
        max(run.curriculum.rounds, default=0) <= run.env.max_turns
    ),
    (
        'env.mix',
        'environments all on the device or all on hosts, for reward.function',
    ): lambda run: not run.reward.function or len(_hosts(run)) in (0, len(run.worlds)),
    (
        'env.name',
        'an environment on the device, for rollout.stop_at_answer (on hosts, use hosts.stop)',
    ): lambda run: not run.rollout.stop_at_answer or len(_hosts(run)) < len(run.worlds),
    (
        'hosts.forms',
        "templates of answers, such as ('Action: {}',), for rollout.constrain",
    ): lambda run: (
        not run.rollout.constrain or all(run.answer_forms(world) for world in _hosts(run))
    ),
    ('alarm.mi_every', '1 or more, for information_drop in alarm.stop'): lambda run: (
        run.alarm.mi_every or 'information_drop' not in run.alarm.stop
    ),
    ('context.window', '0, or env.max_turns or more, for clone.file'): lambda run: (
        not run.clone.file or not 0 < run.context.window < run.env.max_turns
    ),
    ('clone.microbatch_rows', 'a divisor of clone.batch'): lambda run: (
        not run.clone.batch % (run.clone.microbatch_rows or run.clone.batch)
    ),
}
RULES = (
    *starmap(_of_shards, SHARDED.items()),
    *(must(*needed, test) for needed, test in CHECKS.items()),
    *exclude({'env.hint': 'none'}, ON_DEVICE | {'context.window': 0}),
    # Environments
    *exclude(
        {'env.mix': ()},
        {'context.window': 0, 'filter.refill': 0, 'alarm.mi_every': 0},
        'env.mix gives environments different prompts and fixed shares',
    ),
    # Agents
    Rule({'agent.name': AGENTS - {'reflect'}, 'agent.trials': TWO}),
    *exclude(
        {'agent.name': AGENTS - {'react'}},
        ON_DEVICE | {'env.think': True, 'rollout.stop_at_answer': False},
    ),
    *exclude({'context.summary': 0}, {'agent.name': ACTS, 'agent.trials': 1, 'context.window': 1}),
    Rule({'alarm.mi_every': 0, 'agent.name': ACTS}),
    # Environments on hosts
    *exclude(ON_DEVICE, {'alarm.mi_every': 0, 'context.summary': 0}),
    *exclude(
        {'clone.episodes': Must('0 on hosts', lambda run: not _cloned(run))},
        {'agent.name': ACTS, 'agent.trials': 1},
    ),
    # Rollouts
    *exclude(
        {'rollout.group_size': TWO},
        {
            'algorithm': Must('one without groups', lambda run: not run.algorithm.COMPARES_GROUPS),
            'filter.rule': Must("'all'", lambda run: not run.algorithm.filter.drops_groups),
        },
    ),
    *exclude({'rollout.constrain': ''}, {'evol.base_rows': 0}),
    *exclude(
        {'rollout.staleness': 0},
        {
            'env.name': Must(
                'a single environment on hosts', lambda run: run.on_hosts and not run.env.mix
            ),
            'curriculum.rounds': (),
            'filter.refill': 0,
            **HAS_RATIO,
        },
        'episodes continue while the policy is updated',
    ),
    # Validation and logs
    Rule({'checkpoint.best': False, 'eval.split': 'validation'}, 'select on validation only'),
    Rule({'log.wandb_project': ''} | _package('wandb')),
    Rule({'log.tensorboard': False} | _package('tensorboardX')),
    # Batches
    *exclude(
        {'batch.prefix_rows': 1},
        {
            'batch.microbatch_rows': Must(
                'a multiple of batch.prefix_rows on each data shard',
                lambda run: not run.batch.microbatch_rows % (run.shards * run.batch.prefix_rows),
            ),
            'batch.widths': TWO,
            'rollout.group_size': Must(
                'a multiple or a divisor of batch.prefix_rows',
                lambda run: _divide(run.batch.prefix_rows, run.rollout.group_size),
            ),
            'context.window': 0,
            'evol.base_rows': 0,
        },
    ),
    # Updates
    *exclude(
        {
            'critic.share_backbone': Must(
                'False, with an algorithm that has a critic',
                lambda run: run.algorithm.USES_CRITIC and not run.critic.share_backbone,
            )
        },
        {'critic.warmup_steps': 0, 'critic.updates': 1, 'critic.freeze_attention': False},
    ),
    Rule({'loss.sampler_correction': 'off'} | HAS_RATIO),
    Rule({'optim.schedule': 'constant', 'optim.schedule_steps': ONE}),
    *exclude(
        {
            'algorithm': Must(
                'one that compares no episodes', lambda x: not x.algorithm.WHOLE_EPISODES
            )
        },
        ONE_CONVERSATION,
    ),
    *exclude(
        {
            'loss.bootstrap_truncated': Must(
                'False', lambda run: not run.algorithm.bootstrap_truncated
            )
        },
        ONE_CONVERSATION
        | {
            'env.name': Must(
                'an environment without rewards after a cut', lambda run: not _finishes(run)
            )
        },
        'values need the rest of the conversation',
    ),
    Rule({'alarm.mi_every': 0, 'alarm.mi_text': 'answer', 'env.think': True}),
    # Imitation
    Rule(
        {'evol.base_rows': 0, 'algorithm': Must("'agent_evol'", lambda run: run.algorithm.EXPLORES)}
    ),
    *exclude(
        {'evol.base_rows': 0},
        {
            'clone.episodes': DEMONSTRATIONS,
            'batch.microbatch_rows': Must(
                'a divisor of evol.base_rows',
                lambda run: not run.evol.base_rows % run.batch.microbatch_rows,
            ),
            **ONE_CONVERSATION,
            **NO_LIMITS,
        },
        'demonstrations are added to the episodes of a step',
    ),
    *exclude({'clone.file': ''}, NO_LIMITS, 'limits apply to expert demonstrations'),
    *exclude(
        {'clone.expert': 'world'},
        {'clone.episodes': ONE, 'clone.file': ''} | ON_DEVICE,
        'a scout plays demonstrations on the device',
    ),
    *exclude({'clone.adapters': False}, {'lora.rank': ONE, 'clone.episodes': DEMONSTRATIONS}),
    *exclude(
        {'clone.thoughts': False},
        {'clone.episodes': ONE, 'clone.file': '', 'env.think': True}
        | {'env.name': Must('environments on the device', lambda run: not run.on_hosts)},
        'thoughts apply to expert demonstrations',
    ),
)


def broken(run: Config) -> list[rules.Broken]:
    """Return the rules that a Config breaks. If one of FIRST is broken, most others are skipped."""
    values = tree.values(run, idle=True)
    for world in run.worlds:
        values |= tree.values(world, f'{world.name}.', idle=True)
    violations = rules.broken((*FIRST, *rules.rules_of(run.algorithm)), run, values)
    if not violations:
        added = [rule for section in vars(run.extras).values() for rule in rules.rules_of(section)]
        violations = rules.broken((*RULES, *added), run, values)
        for member in run.members:
            violations += rules.broken(
                rules.rules_of(member.worlds[0], 'RUN_RULES'), member, values
            )
    return violations + [one for world in run.worlds for one in rules.broken_by(world)]
