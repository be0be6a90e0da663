"""The rules between fields of a run's config (agentrl_jax/settings/rules.py).

Algorithms, worlds and sections of extensions have their own rules. RUN_RULES of a world are about
it and the run that trains it.
"""

import importlib.util
from collections.abc import Callable
from itertools import starmap
from typing import Any

import jax

from agentrl_jax.envs import HOSTS, WORLDS
from agentrl_jax.imitation.clone import LIMITS
from agentrl_jax.models.lora import target_names
from agentrl_jax.rl.algorithm import ZERO_RULES
from agentrl_jax.settings import rules
from agentrl_jax.settings.marks import POSITIVE, In, suggestion
from agentrl_jax.settings.rules import Must, Rule, exclude, must
from agentrl_jax.text import agents

Config = Any  # run.config.Config, whose reader checks these rules
TWO, ONE, ACTS, AGENTS = In(low=2), In(low=1), {'act', 'react'}, set(agents.NAMES)
SPLITS = {'train', 'validation', 'test'}


def _hosts(run: Config) -> list[Any]:
    return [world for world in run.worlds if world.name in HOSTS]


def _cloned(run: Config) -> list[Any]:
    """The worlds on hosts whose expert is cloned."""
    members = (one for one in run.members if one.on_hosts and one.clone.episodes)
    return [world for member in members for world in member.worlds]


def _known_worlds(run: Config) -> bool:
    return len(WORLDS.keys() & run.env.worlds) == len(run.env.worlds)


def _worlds(run: Config) -> str:
    close = (suggestion(name, WORLDS) for name in run.env.worlds if name not in WORLDS)
    return f'different worlds of {", ".join(WORLDS)}{"".join(close)}'


def _shares_sum_to_one(run: Config) -> bool:
    shares = [share for _, share in run.env.mix]
    return not shares or (min(shares) > 0 and abs(sum(shares) - 1) < 1e-6)


def _mixed_groups(run: Config) -> tuple[int, ...]:
    return run.env.apportion(run.rollout.num_groups) if run.env.mix else ()


def _free_text(run: Config) -> bool:
    return any('{}' in form for world in _hosts(run) for form in run.forms_of(world))


def _slowest(run: Config) -> tuple[float, str]:
    """(seconds, field) of the longest limit of a world on hosts."""
    limits = [
        (getattr(world, field, 0.0), f'{world.name}.{field}')
        for world in _hosts(run)
        for field in ('start_s', 'silent_s', *(() if world.here else ('timeout_s',)))
    ]
    return max(limits, default=(0.0, ''))


def _crowded(run: Config) -> list[str]:
    """What to set for worlds whose servers hold fewer episodes than are played at once."""
    return [
        f'{member.env.name}.room to more (for {member.worlds_at_once} episodes)'
        for member in run.members
        if member.on_hosts
        and 0 < member.worlds[0].local_server_capacity
        and member.worlds[0].local_server_capacity * jax.process_count() < member.worlds_at_once
    ]


def _known_targets(run: Config) -> bool:
    try:
        return not run.lora.rank or bool(target_names(run.lora.targets))
    except ValueError:
        return False


def _rows(run: Config) -> int:
    """Rows of an update."""
    kept = run.algorithm.filter.kept(run.rollout.num_groups) * run.rollout.group_size
    return kept + run.base_rows


def _increasing(run: Config) -> bool:
    rounds = run.curriculum.rounds
    return all(a < b for a, b in zip((0, *rounds), rounds, strict=False))


def _divides(run: Config) -> bool:
    rows, group = run.batch.prefix_rows, run.rollout.group_size
    return not (rows % group and group % rows)


def _shows_nothing(run: Config) -> bool:
    return not any(world.chats for world in _hosts(run))


def _own_critic(run: Config) -> bool:
    return run.algorithm.USES_CRITIC and not run.critic.share_backbone


def _compares_parts(run: Config) -> bool:
    return not run.algorithm.WHOLE_EPISODES


def _never_finishes(run: Config) -> bool:
    return not any(getattr(world, 'finishes', False) for world in run.worlds)


SHARDED = {  # numbers of rows that go over the data shards
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
        lambda run: (
            f'a number whose rows (rollout.group_size a group) are a multiple of the {run.shards} '
            'data shards'
        ),
        lambda run: not any(count % run.shards for count in counts(run)),
    )


def _package(name: str) -> dict[str, Must]:
    return {'packages': Must(f'pip install {name}', lambda run: importlib.util.find_spec(name))}


NO_LIMITS = dict.fromkeys((f'clone.{name}' for name in LIMITS), 0)
ON_DEVICE = {'env.name': Must('worlds on the device', lambda run: not _hosts(run))}
ONE_BRANCH = {'harness.branches': Must('1', lambda run: run.most_branches == 1)}
ONE_CONVERSATION = {'context.window': 0} | ONE_BRANCH
HAS_RATIO = {'algorithm': Must('one with a ratio', lambda run: run.algorithm.HAS_RATIO)}
DEMONSTRATIONS = Must('a number, or clone.file to a file', lambda run: run.clone.demonstrates)


FIRST = (  # others divide by what these check
    must('env.name', _worlds, lambda run: run.env.mix or _known_worlds(run)),
    must('env.mix', _worlds, lambda run: not run.env.mix or _known_worlds(run)),
    must('env.mix', 'shares above 0 that sum to 1', _shares_sum_to_one),
)

CHECKS = {  # (field, what it must be): whether it is
    ('env.mix', 'shares that give each world a group of rollout.num_groups'): lambda run: (
        min(_mixed_groups(run), default=1) > 0
    ),
    (
        'env.max_turns',
        'more, as curriculum.rounds and clone.max_turns, or agent.trials to less',
    ): lambda run: run.fewest_turns >= run.agent.build().least_turns,
    (
        'clone.episodes',
        '0 for a world without an expert; clone.file can have trajectories',
    ): lambda run: all(world.has_player() for world in _cloned(run)),
    ('clone.oracle', '1.0 for a world that cannot be played at random'): lambda run: (
        run.clone.oracle == 1 or all(world.plays_at_random for world in _cloned(run))
    ),
    ('model.hidden_size', 'a multiple of 2 x model.num_heads'): lambda run: (
        run.model.path or not run.model.hidden_size % (2 * run.model.num_heads)
    ),
    ('model.num_heads', 'a multiple of model.num_kv_heads'): lambda run: (
        run.model.path or not run.model.num_heads % run.model.num_kv_heads
    ),
    ('lora.targets', "'all-linear', or some of q_proj,k_proj,v_proj,..."): _known_targets,
    ('lora.rank', 'the narrowest side of an adapted matrix or less'): lambda run: (
        run.model.path or run.lora.rank <= run.model.narrowest
    ),
    ('rollout.constrain', "'any', since answers hold free text"): lambda run: (
        run.rollout.constrain != 'own' or not _free_text(run)
    ),
    ('eval.also', 'splits of train, validation and test other than eval.split'): lambda run: (
        set(run.eval.also) <= SPLITS - {run.eval.split}
    ),
    (
        'batch.minibatch_rows',
        'a divisor of the rows of an update (rollout.num_groups and group_size, evol.base_rows)',
    ): lambda run: not _rows(run) % run.batch.minibatch_rows,
    ('batch.minibatch_rows', 'a multiple of batch.microbatch_rows'): lambda run: (
        not run.batch.minibatch_rows % run.batch.microbatch_rows
    ),
    ('critic.warmup_steps', 'less than steps'): lambda run: (
        not run.critic.warmup_steps >= run.steps > 0
    ),
    ('curriculum.rounds', 'positive and increasing numbers'): _increasing,
    ('curriculum.rounds', 'numbers up to env.max_turns'): lambda run: (
        max(run.curriculum.rounds, default=0) <= run.env.max_turns
    ),
    ('clone.microbatch_rows', 'a divisor of clone.batch'): lambda run: (
        not run.clone.batch % (run.clone.microbatch_rows or run.clone.batch)
    ),
}
RULES = (
    *starmap(_of_shards, SHARDED.items()),
    *(must(*needed, test) for needed, test in CHECKS.items()),
    *exclude({'env.hint': 'none'}, ON_DEVICE | {'context.window': 0}),
    # Worlds
    *exclude(
        {'env.mix': ()},
        {'context.window': 0, 'filter.refill': 0, 'alarm.mi_every': 0},
        'several worlds have different prompts, and fixed shares',
    ),
    must(
        'env.mix',
        'worlds that are all on the device or all on hosts',
        lambda run: len({name in HOSTS for name in run.env.worlds}) == 1,
        unless={'reward.function': ''},
    ),
    # Agents
    Rule({'agent.name': AGENTS - {'reflect'}, 'agent.trials': TWO}),
    Rule({'agent.plan_every': 0, 'agent.name': 'plan'}),
    *exclude(
        {'agent.name': AGENTS - {'react'}},
        ON_DEVICE | {'env.think': True, 'rollout.stop_at_answer': False},
    ),
    *exclude({'context.summary': 0}, {'agent.name': ACTS, 'agent.trials': 1, 'context.window': 1}),
    Rule({'alarm.mi_every': 0, 'agent.name': ACTS}),
    # Worlds on hosts
    *exclude(ON_DEVICE, {'alarm.mi_every': 0, 'context.summary': 0}),
    must(
        'env.name',
        'a world on the device, or use hosts.stop',
        lambda run: len(_hosts(run)) < len(run.worlds),
        unless={'rollout.stop_at_answer': False},
    ),
    *exclude(
        {'clone.episodes': Must('0 on hosts', lambda run: not _cloned(run))},
        {'agent.name': ACTS, 'agent.trials': 1},
    ),
    *exclude(
        {'env.name': Must('one whose harness does not show the conversation', _shows_nothing)},
        {'context.window': 0, 'agent.name': ACTS, 'agent.trials': 1},
    ),
    must(
        'hosts.timeout_s',
        lambda run: f'{_slowest(run)[0]:g} or more, or {_slowest(run)[1]} to less',
        lambda run: _slowest(run)[0] <= run.hosts.policy.timeout_s,
    ),
    must(
        'rollout.slots',
        lambda run: f'less, or {", ".join(_crowded(run))}',
        lambda run: not _crowded(run),
    ),
    # Models
    # Rollouts
    *exclude(
        {'rollout.group_size': TWO},
        {
            'algorithm': Must('one without groups', lambda run: not run.algorithm.COMPARES_GROUPS),
            'filter.rule': Must("'all'", lambda run: not run.algorithm.filter.drops_groups),
        },
    ),
    *exclude({'rollout.constrain': ''}, {'evol.base_rows': 0}),
    must(
        'hosts.forms',
        "the forms of answers, such as ('Action: {}',)",
        lambda run: all(run.forms_of(world) for world in _hosts(run)),
        unless={'rollout.constrain': ''},
    ),
    *exclude(
        {'rollout.staleness': 0},
        {
            'env.name': Must('one world on hosts', lambda run: run.on_hosts and not run.env.mix),
            'curriculum.rounds': (),
            'filter.refill': 0,
            **HAS_RATIO,
            'processes': Must('1', lambda run: jax.process_count() == 1),
        },
        'episodes continue while the policy is updated',
    ),
    # Validation and logs
    Rule({'checkpoint.best': False, 'eval.split': 'validation'}, 'no test figure would be left'),
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
            'rollout.group_size': Must('a multiple or a divisor of batch.prefix_rows', _divides),
            'context.window': 0,
            'evol.base_rows': 0,
        },
    ),
    # Updates
    *exclude(
        {'critic.share_backbone': Must('False, with an algorithm that has a critic', _own_critic)},
        {'critic.warmup_steps': 0, 'critic.updates': 1, 'critic.freeze_attention': False},
    ),
    *exclude(
        {'loss.sampler_correction': {'tis', 'icepop'}},
        {'loss.sampler_low': None, 'loss.sampler_high': None},
    ),
    Rule({'loss.sampler_low': In(high=1)}),
    Rule({'loss.sampler_high': ONE}),
    Rule({'loss.sampler_correction': 'off'} | HAS_RATIO),
    Rule({'optim.schedule': {'linear', 'cosine'}, 'optim.schedule_steps': 0}),
    Rule({'optim.schedule': 'constant', 'optim.schedule_steps': ONE}),
    Rule({'optim.schedule': {'linear', 'cosine'}, 'optim.final_lr': 0}),
    Rule({'loss.kl_target': 0, 'loss.kl_coef': POSITIVE}),
    must(
        'loss.kl_horizon',
        'the episodes of a step or more',
        lambda run: run.algorithm.kl.horizon >= run.rollout.episodes,
        unless={'loss.kl_target': 0},
    ),
    must(
        'algorithm',
        'one whose newest policy plays',
        lambda run: not run.algorithm.EXPLORES,
        unless={'loss.kl_target': 0},
    ),
    *exclude({'filter.rule': 'top_k'}, {'filter.keep': 1, 'filter.smallest': False}),
    Rule({'filter.rule': set(ZERO_RULES), 'filter.include_zero': None}),
    *exclude(
        {'algorithm': Must('one that compares turns or tokens', _compares_parts)},
        ONE_CONVERSATION,
    ),
    *exclude(
        {'loss.bootstrap_truncated': Must('False', lambda run: not run.algorithm.bootstraps)},
        ONE_CONVERSATION
        | {'env.name': Must('a world that pays nothing after an episode is cut', _never_finishes)},
        'values need the rest of the conversation',
    ),
    # Alarms and curricula
    Rule({'alarm.information_drop.action': {'off', 'warn'}, 'alarm.mi_every': ONE}),
    Rule({'alarm.mi_every': 0, 'alarm.mi_turns': 'first', 'context.window': 0}),
    Rule({'alarm.mi_every': 0, 'alarm.mi_text': 'answer', 'env.think': True}),
    # Imitation
    Rule({'evol.base_rows': 0, 'algorithm': Must("'agent_evol'", lambda run: run.explores)}),
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
        'demonstrations join the episodes of a step',
    ),
    *exclude({'clone.file': ''}, NO_LIMITS, 'limits are for demonstrations of the expert'),
    *exclude({'clone.adapters': False}, {'lora.rank': ONE, 'clone.episodes': DEMONSTRATIONS}),
    must(
        'context.window',
        '0, or env.max_turns or more',
        lambda run: not 0 < run.context.window < run.env.max_turns,
        unless={'clone.file': ''},
    ),
    *exclude(
        {'clone.thoughts': False},
        {'clone.episodes': ONE, 'clone.file': '', 'env.think': True}
        | {'env.name': Must('worlds on the device', lambda run: not run.on_hosts)},
        'thoughts are for demonstrations of the expert',
    ),
)


def broken(run: Config) -> list[rules.Broken]:
    """The rules that a Config breaks; most are checked only if the first ones hold."""
    values = rules.settings_of(run)
    for world in run.worlds:
        values |= rules.settings_of(world, f'{world.name}.')
    found = rules.broken((*FIRST, *rules.rules_of(run.algorithm)), run, values)
    if not found:
        added = [rule for section in vars(run.extras).values() for rule in rules.rules_of(section)]
        found = rules.broken((*RULES, *added), run, values)
        for member in run.members:
            found += rules.broken(rules.rules_of(member.worlds[0], 'RUN_RULES'), member, values)
    return found + [one for world in run.worlds for one in rules.broken_by(world)]
