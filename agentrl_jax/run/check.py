"""What a config must satisfy, checked before any time is spent.

A field that does not exist is refused by ml_collections itself.
"""

import importlib.util
from typing import Any

import jax

from agentrl_jax.algorithms import ALGORITHMS, agent_evol, mt_grpo, ppo, turn_grpo, vine
from agentrl_jax.envs import ENVIRONMENTS, GAMES
from agentrl_jax.envs.hosts import HOSTS
from agentrl_jax.imitation import trajectories
from agentrl_jax.measure import collapse
from agentrl_jax.models import lora
from agentrl_jax.rl import advantages, curriculum, filtering, losses, trials, turn_credit, update
from agentrl_jax.rollout.episodes import fork_turns
from agentrl_jax.run import bounds, derived, effective, mixture
from agentrl_jax.run.command import WrongUsage
from agentrl_jax.text import agents

CHOICES = {
    'agent.name': agents.NAMES,
    'agent.reward': trials.REWARDS,
    'eval.split': ('validation', 'test'),
    'optim.schedule': update.SCHEDULES,
    'filter.scaling': ('none', 'linear', 'sqrt'),
    'loss.sampler_correction': ('off', 'tis', 'icepop'),
    'parity.loss_on': ('sampled', 'answers', 'all'),
    'rollout.sampler_dtype': ('', 'float32', 'bfloat16'),
    'model.dtype': ('float32', 'bfloat16'),
    'alarm.mi_turns': ('first', 'any'),
    'alarm.mi_text': ('reasoning', 'answer'),
    **{f'alarm.{name}.action': collapse.ACTIONS for name in collapse.SIGNALS},
}
OPTIONAL_CHOICES = {  # fields without a value take the algorithm's own default
    'filter.rule': (*filtering.RULES, 'within_group'),
    'loss.aggregation': losses.AGGREGATIONS,
    'loss.kl_estimator': losses.KL_ESTIMATORS,
    'loss.kl_in': ('loss', 'reward'),
    'loss.reward_on': ('turn', 'episode'),
    'loss.estimator': ppo.ESTIMATORS,
    'loss.norm': advantages.NORMS,
    'loss.reward_normalization': advantages.NORMALIZATIONS,
    'turn_credit.mode': turn_credit.MODES,
    'turn_credit.outcome': mt_grpo.OUTCOMES,
    'turn_credit.scale': turn_grpo.SCALES,
    'fork.train': vine.TRAIN,
    'evol.weights': agent_evol.WEIGHTS,
}
WHOLE_EPISODES = ('gspo', 'dpo')  # their loss needs all tokens of an episode in one row
# They compare no episode with others of its group
WITHOUT_GROUPS = ('ppo', 'reinforce_pp', 'agent_evol')


def check(cfg: Any, mesh_shards: int = 1) -> None:
    """Refuses impossible fields and combinations before any time is spent."""
    cfg = effective.effective(cfg)
    found = [
        f'{name}={bounds.field(cfg, name)!r} is not one of {", ".join(known)}'
        for name, known in CHOICES.items()
        if bounds.field(cfg, name) not in known
    ]
    found += [
        f'{name}={bounds.field(cfg, name)!r} is not one of {", ".join(known)}'
        for name, known in OPTIONAL_CHOICES.items()
        if bounds.field(cfg, name) is not None and bounds.field(cfg, name) not in known
    ]
    found += bounds.problems(cfg)
    grows = cfg.curriculum
    found += curriculum.problems(grows.rounds, grows.interpolate, cfg.env.max_turns)
    if cfg.lora.rank:
        found += _impossible_adapters(cfg)
    if cfg.fork.turns is not None:
        found += _impossible_forks(cfg)
    # What follows divides by numbers that are at least 1.
    found = found or [
        *effective.without_effect(cfg),
        *_impossible_options(cfg),
        *_impossible_labels(cfg),
        *_impossible_filter(cfg),
        *_impossible_reward(cfg),
        *_impossible_agents(cfg),
    ]
    found += _impossible_sampler(cfg) + _impossible_hosts(cfg)
    found = found or _impossible_mixture(cfg, mesh_shards) or _impossible_together(cfg, mesh_shards)
    if found:
        raise WrongUsage('impossible configuration: ' + '; '.join(found))
    check_packages(cfg)
    if cfg.clone.file:
        trajectories.read_records(cfg.clone.file)  # now rather than behind the model


def check_packages(cfg: Any) -> None:
    """Refuses loggers whose package is not installed."""
    wanted = {
        'wandb': ('log.wandb_project', bool(cfg.log.wandb_project)),
        'tensorboardX': ('log.tensorboard', cfg.log.tensorboard),
    }
    for package, (name, asked) in wanted.items():
        if asked and importlib.util.find_spec(package) is None:
            raise WrongUsage(
                f'{name} needs {package}, which is not installed: pip install {package}'
            )


def _impossible_adapters(cfg: Any) -> list[str]:
    try:
        lora.target_names(cfg.lora.targets)
    except ValueError as error:
        return [str(error)]
    return []


def _impossible_forks(cfg: Any) -> list[str]:
    if cfg.env.max_turns < 2:
        return [
            f'algorithm={cfg.algorithm!r} plays on from later turns than the first, and '
            f'env.max_turns={cfg.env.max_turns} has none: set it to 2 or more'
        ]
    try:
        fork_turns(cfg.fork.turns, cfg.env.max_turns)
    except ValueError as error:
        return [str(error)]
    return []


def _impossible_labels(cfg: Any) -> list[str]:
    """What a critic estimates must be the return that continuations earn."""
    asked, loss = f'fork.value_every={cfg.fork.value_every}', cfg.loss
    if not cfg.fork.value_every:
        return []
    if not derived.needs_critic(cfg):
        return [f'{asked} measures a critic, and algorithm={cfg.algorithm!r} has none: set it to 0']
    discounts = {'loss.gamma': loss.gamma, 'turn_credit.turn_gamma': cfg.turn_credit.turn_gamma}
    problems = [
        (
            cfg.env.max_turns < 2,
            f'{asked} plays on from later turns than the first, and env.max_turns='
            f'{cfg.env.max_turns} has none: set it to 0',
        ),
        (
            loss.estimator == 'turn',
            f'{asked} reads values where answers begin, and loss.estimator=turn trains those where '
            'they end: set it to 0',
        ),
        *(
            (x not in (None, 1), f'{asked} needs undiscounted values: set {name}={x} to 1')
            for name, x in discounts.items()
        ),
        (
            loss.reward_normalization not in (None, 'identity'),
            f'{asked} needs values of returns, and loss.reward_normalization='
            f'{loss.reward_normalization} has them of another quantity: set it to identity',
        ),
        (
            bool(loss.bootstrap_truncated),
            f'{asked} needs values of episodes that end with their budget: set '
            'loss.bootstrap_truncated=False',
        ),
    ]
    return [sentence for wrong, sentence in problems if wrong]


def _impossible_options(cfg: Any) -> list[str]:
    loss = cfg.loss
    own_critic = ALGORITHMS[cfg.algorithm].USES_CRITIC and not cfg.critic.share_backbone
    problems = [
        (
            cfg.algorithm == 'gigpo' and loss.norm == 'none',
            "loss.norm='none' is not one of std, mean for algorithm='gigpo'",
        ),
        (
            cfg.algorithm == 'dpo' and loss.aggregation != 'seq_mean_token_sum',
            f'loss.aggregation={loss.aggregation!r} does not go with dpo, whose loss is a mean '
            'over pairs: leave it unset',
        ),
        (
            cfg.fork.turns is not None and loss.kl_coef > 0 and loss.kl_in == 'reward',
            f"loss.kl_in='reward' does not go with algorithm={cfg.algorithm!r}, which compares "
            'returns of continuations: set loss.kl_in=loss',
        ),
        (
            derived.trains_continuations(cfg) and loss.aggregation == 'seq_mean_token_mean',
            f'loss.aggregation={loss.aggregation!r} would undo the weights of fork.train=weighted: '
            'set it to token_mean',
        ),
        (
            derived.trains_continuations(cfg) and cfg.parity.microbatch_means,
            'parity.microbatch_means would undo the weights of fork.train=weighted: leave it False',
        ),
        (
            cfg.fork.turns is not None and cfg.parity.loss_on != 'sampled',
            f'parity.loss_on={cfg.parity.loss_on!r} does not go with fork.turns: set it to sampled',
        ),
        (
            bool(loss.bootstrap_truncated) and cfg.context.window > 0,
            f'loss.bootstrap_truncated needs the whole conversation: context.window='
            f'{cfg.context.window} has no row that holds a turn and what comes behind it',
        ),
        (
            loss.kl_target > 0 and loss.kl_coef == 0,
            f'loss.kl_target={loss.kl_target} has no effect without loss.kl_coef > 0, the '
            'coefficient that it steers',
        ),
        (
            bool(loss.max_length) and (loss.overlong_buffer or 0) >= loss.max_length,
            f'loss.overlong_buffer={loss.overlong_buffer} must be smaller than loss.max_length='
            f'{loss.max_length}',
        ),
        (
            cfg.critic.warmup_steps > 0 and not own_critic,
            f'critic.warmup_steps={cfg.critic.warmup_steps} needs a critic of its own '
            '(algorithm=ppo, critic.share_backbone=False)',
        ),
        (
            cfg.context.window > 0 and cfg.rollout.read_tokens > 0,
            f'rollout.read_tokens={cfg.rollout.read_tokens} needs the whole conversation in the '
            'cache: set it or context.window to 0',
        ),
        (
            cfg.fork.turns is not None and cfg.rollout.read_tokens > 0,
            f'rollout.read_tokens={cfg.rollout.read_tokens} does not go with fork.turns: set it '
            'to 0',
        ),
        (
            cfg.context.window > 0 and cfg.algorithm in WHOLE_EPISODES,
            f'algorithm={cfg.algorithm!r} compares whole episodes, and context.window='
            f'{cfg.context.window} makes each turn a sample of its own: set it to 0, or use '
            'gspo_turn',
        ),
        (
            cfg.context.summary > 0 and cfg.context.window != 1,
            f'context.summary={cfg.context.summary} tells turns that the policy does not see: '
            'set context.window=1',
        ),
    ]
    return [sentence for wrong, sentence in problems if wrong]


def _impossible_reward(cfg: Any) -> list[str]:
    """What does not go with rewards of one's own."""
    asked = f'reward.function={cfg.reward.function!r}'
    known = [name for name in derived.worlds(cfg) if name in {*ENVIRONMENTS, *GAMES, *HOSTS}]
    problems = [
        (
            derived.continuations(cfg) > 0 or cfg.fork.value_every > 0,
            f'{asked} is a function of whole episodes, and continuations (algorithm=vine, '
            'fork.value_every) hold the turns from a later one on',
        ),
        (
            len({name in HOSTS for name in known}) > 1,
            f'{asked} is a function of rollouts on the device and of texts on hosts, and env.mix='
            f'{cfg.env.mix!r} has both kinds of worlds',
        ),
    ]
    return [sentence for wrong, sentence in problems if wrong and cfg.reward.function]


def _impossible_agents(cfg: Any) -> list[str]:
    agent, built = cfg.agent, derived.agent(cfg)
    turns = min((cfg.env.max_turns, *cfg.curriculum.rounds))
    turns = min(turns, cfg.clone.max_turns or turns)
    least = 1 + built.plans
    needed = built.trials * least + (built.trials - 1) * built.reflects
    acting = built.acting_turns(max(turns, needed))
    problems = [
        (
            agent.name == 'reflect' and agent.trials == 1,
            'agent.name=reflect writes between trials: set agent.trials to 2 or more',
        ),
        (
            agent.name == 'react' and not cfg.env.think,
            'agent.name=react writes its thoughts: set env.think=True',
        ),
        (
            agent.name == 'react' and cfg.rollout.stop_at_answer,
            'rollout.stop_at_answer has no effect on agent.name=react, whose answers end with the '
            'turn: set it to False',
        ),
        (
            agent.plan_every > 0 and agent.name != 'plan',
            f'agent.plan_every={agent.plan_every} has no effect on agent.name={agent.name!r}: set '
            'it to 0',
        ),
        (
            agent.reward == 'gain' and agent.trials == 1,
            'agent.reward=gain has no effect on agent.trials=1: set it to whole',
        ),
        (
            agent.reward == 'gain' and (cfg.fork.turns is not None or cfg.fork.value_every > 0),
            'agent.reward=gain does not go with continuations (algorithm=vine, fork.value_every), '
            'which begin within a trial: set it to whole',
        ),
        (
            agent.reward == 'gain'
            and cfg.turn_credit.mode in ('or', 'mt_v1')
            and cfg.turn_credit.outcome != 'return',
            f'turn_credit.mode={cfg.turn_credit.mode!r} credits later turns with the outcome, '
            f'and agent.reward=gain changes no turn_credit.outcome={cfg.turn_credit.outcome!r}: '
            'set that to return (what the last trial earned), or agent.reward to whole',
        ),
        (
            turns < needed,
            f'agent.name={agent.name!r} with agent.trials={agent.trials} takes {needed} turns at '
            f'least, and env.max_turns, curriculum.rounds or clone.max_turns allow {turns}',
        ),
        (
            cfg.env.name == 'search' and cfg.search.turns > acting,
            f'search.turns={cfg.search.turns} is when the outcome is earned, and '
            f'agent.name={agent.name!r} with agent.trials={agent.trials} has {acting} turns that '
            'act in a trial (env.max_turns, curriculum.rounds): set it to so many at most',
        ),
        (
            cfg.context.summary > 0 and (built.writes or built.trials > 1),
            f'context.summary={cfg.context.summary} tells turns of a single trial that all act: '
            "set it to 0, or agent.name='act' and agent.trials=1",
        ),
        (
            cfg.alarm.mi_every > 0 and built.writes,
            f'alarm.mi_every={cfg.alarm.mi_every} compares answers of one kind, and agent.name='
            f'{agent.name!r} writes others: set it to 0',
        ),
    ]
    return [sentence for wrong, sentence in problems if wrong]


def _impossible_sampler(cfg: Any) -> list[str]:
    loss, leaks = cfg.loss, cfg.parity.loss_on != 'sampled'
    off = loss.sampler_correction == 'off'
    beyond = f'parity.loss_on={cfg.parity.loss_on!r} trains tokens that nobody sampled: it needs '
    problems = [
        (
            off
            and (loss.sampler_low, loss.sampler_high, loss.sampler_sequence) != (None, None, False),
            'loss.sampler_low, loss.sampler_high and loss.sampler_sequence have no effect with '
            'loss.sampler_correction=off',
        ),
        (
            (loss.sampler_low or 0) > 1
            or (loss.sampler_high is not None and loss.sampler_high < 1),
            f'loss.sampler_low={loss.sampler_low} must be at most 1 and loss.sampler_high='
            f'{loss.sampler_high} at least 1, the factor of equal models',
        ),
        (leaks and not off, f'{beyond}loss.sampler_correction=off'),
        (leaks and cfg.context.window > 0, f'{beyond}context.window=0'),
        (leaks and bool(loss.max_length), f'{beyond}loss.max_length=0'),
    ]
    return [sentence for wrong, sentence in problems if wrong]


def _impossible_hosts(cfg: Any) -> list[str]:
    """What needs a world on the device."""
    if not derived.on_hosts(cfg):
        return []
    name, clone, agent = cfg.env.name, cfg.clone, derived.agent(cfg)
    problems = [
        (
            clone.episodes > 0 and not HOSTS[name].has_player(),
            f'clone.episodes={clone.episodes} needs an expert, and env.name={name!r} has none: set '
            'it to 0, or name trajectories in clone.file',
        ),
        (
            clone.episodes > 0 and (agent.writes or agent.trials > 1),
            f'clone.episodes={clone.episodes} plays one trial of turns that act on hosts, and '
            f'agent.name={cfg.agent.name!r} with agent.trials={agent.trials} has others: set it '
            'to 0, or name trajectories in clone.file',
        ),
        (
            cfg.agent.name == 'react',
            f'agent.name=react words the prompts of worlds on the device, and env.name={name!r} '
            "brings its own: set hosts.answer_prefix='Thought:' and agent.name='act'",
        ),
        (
            cfg.alarm.mi_every > 0,
            f'alarm.mi_every={cfg.alarm.mi_every} needs answers of a known form, and those to '
            f'env.name={name!r} are free text: set it to 0',
        ),
        (
            cfg.context.summary > 0,
            f'context.summary={cfg.context.summary} needs lines of a world on the device, and '
            f'env.name={name!r} is on hosts: set it to 0',
        ),
        (
            derived.continuations(cfg) > 0,
            f'fork.continuations={cfg.fork.continuations} rewinds worlds on the device, and '
            f'env.name={name!r} is on hosts: set it to 0',
        ),
        (
            cfg.fork.value_every > 0,
            f'fork.value_every={cfg.fork.value_every} rewinds worlds on the device, and '
            f'env.name={name!r} is on hosts: set it to 0',
        ),
        (
            bool(cfg.eval.worlds),
            f'eval.worlds={cfg.eval.worlds} are on the device, and env.name={name!r} is on hosts: '
            'evaluate the run on them by itself',
        ),
        (
            cfg.rollout.stop_at_answer,
            f'rollout.stop_at_answer has no effect on env.name={name!r}: set '
            "hosts.stop=('</answer>',)",
        ),
        (
            cfg.rollout.read_tokens > 0,
            f'rollout.read_tokens={cfg.rollout.read_tokens} has no effect on env.name={name!r}: '
            'set hosts.read_tokens',
        ),
    ]
    room, needed = derived.room_of_own_servers(cfg), derived.worlds_at_once(cfg)
    needed = -(-needed // jax.process_count())
    problems += [
        (
            0 < room < needed,
            f'{name}.launch and {name}.room hold {room} worlds, and {needed} episodes are played '
            f'at once: raise {name}.room, or lower rollout.slots',
        )
    ]
    return [sentence for wrong, sentence in problems if wrong]


def _impossible_mixture(cfg: Any, mesh_shards: int) -> list[str]:
    """What is wrong with several worlds in one run, or what they exclude."""
    if not cfg.env.mix:
        return []
    names, shares = zip(*cfg.env.mix, strict=True)
    known = (*ENVIRONMENTS, *GAMES, *HOSTS)
    mix = f'env.mix={cfg.env.mix!r}'
    problems = [
        (
            not set(names) <= set(known) or len(set(names)) < len(names),
            f'{mix} must name different worlds: {", ".join(known)}',
        ),
        (
            not (min(shares) > 0 and abs(sum(shares) - 1) < 1e-6),
            f'{mix}: shares must be above 0 and sum to 1',
        ),
    ]
    found = [sentence for wrong, sentence in problems if wrong]
    return found or _impossible_members(cfg) + _impossible_shares(cfg, mix, mesh_shards)


def _impossible_members(cfg: Any) -> list[str]:
    """What worlds on hosts cannot do beside others; what is for the device alone passes them by."""
    members = mixture.members(cfg)
    found = []
    for member in members:
        if not all(map(derived.on_hosts, members)):
            member.rollout.stop_at_answer, member.rollout.read_tokens = False, 0
        found += _impossible_hosts(member)
    return found


def _impossible_shares(cfg: Any, mix: str, mesh_shards: int) -> list[str]:
    """What the worlds of a mixture cannot be given, and what does not go with them."""
    groups = derived.apportion(cfg, cfg.rollout.num_groups)
    rows = [count * cfg.rollout.group_size for count in groups]
    several = 'does not go with several worlds (env.mix)'
    problems = [
        (
            min(groups) < 1,
            f'{mix} leaves a world none of rollout.num_groups={cfg.rollout.num_groups}',
        ),
        (
            any(count % mesh_shards for count in rows),
            f'{mix} gives the worlds {", ".join(map(str, rows))} episodes, which must be multiples '
            f'of the {mesh_shards} data shards of the mesh',
        ),
        (
            cfg.context.window > 0,
            f'context.window={cfg.context.window} {several}, whose prompts differ in length: set '
            'it to 0',
        ),
        (
            bool(cfg.filter.refill),
            f'filter.refill={cfg.filter.refill} {several}: what it fills a batch with would undo '
            'their shares; set it to 0',
        ),
        (
            cfg.alarm.mi_every > 0,
            f'alarm.mi_every={cfg.alarm.mi_every} {several}: it compares answers to the prompts of '
            'one; set it to 0',
        ),
        (
            cfg.fork.value_every > 0,
            f'fork.value_every={cfg.fork.value_every} {several}: it plays the episodes of one '
            'again; set it to 0',
        ),
    ]
    return [sentence for wrong, sentence in problems if wrong]


def _impossible_filter(cfg: Any) -> list[str]:
    choice, groups = cfg.filter, cfg.rollout.num_groups
    zero_rules = ('top_p', 'top_p_softmax', 'min_p')
    problems = [
        (
            choice.rule == 'percentile'
            and round(choice.low * groups) >= round(choice.high * groups),
            f'filter.low={choice.low} to filter.high={choice.high} holds none of {groups} groups',
        ),
        (
            choice.keep != 1 and choice.rule not in ('top_k', 'within_group'),
            f'filter.keep={choice.keep} has no effect on filter.rule={choice.rule!r}, only on '
            'top_k and within_group: set it to 1',
        ),
        (
            bool(choice.refill) and choice.scaling != 'none',
            f'filter.scaling={choice.scaling!r} has no effect with filter.refill: the batch is '
            'filled',
        ),
        (
            choice.smallest and choice.rule != 'top_k',
            f'filter.smallest has no effect on filter.rule={choice.rule!r}, only on top_k',
        ),
        (
            choice.include_zero is not None and choice.rule not in zero_rules,
            f'filter.include_zero has no effect on filter.rule={choice.rule!r}, only on '
            f'{", ".join(zero_rules)}',
        ),
    ]
    return [sentence for wrong, sentence in problems if wrong]


def _impossible_together(cfg: Any, mesh_shards: int) -> list[str]:
    rows = derived.episodes(cfg)
    kept = derived.kept_groups(cfg) * cfg.rollout.group_size
    small, micro = cfg.batch.minibatch_rows, cfg.batch.microbatch_rows
    size, optim = cfg.model, cfg.optim
    head = size.hidden_size // size.num_heads
    narrowest = min(size.hidden_size, size.intermediate_size, head * size.num_kv_heads)
    base = derived.base_rows(cfg)
    joined = f' and {base} demonstrations join them (evol.base_rows)' if base else ''
    problems = [
        (
            (kept + base) % small != 0,
            f'{kept} episodes of each rollout ({rows} played) enter an update{joined}, which is no '
            f'multiple of batch.minibatch_rows={small}',
        ),
        (
            small % micro != 0,
            f'batch.minibatch_rows={small} must be a multiple of batch.microbatch_rows={micro}',
        ),
        (
            rows % mesh_shards != 0,
            f'{rows} episodes (rollout.num_groups x rollout.group_size) must be a multiple of the '
            f'{mesh_shards} data shards of the mesh',
        ),
        (
            micro % mesh_shards != 0,
            f'batch.microbatch_rows={micro} must be a multiple of the {mesh_shards} data shards of '
            'the mesh',
        ),
        (
            cfg.rollout.slots % mesh_shards != 0,
            f'rollout.slots={cfg.rollout.slots} must be a multiple of the {mesh_shards} data '
            'shards of the mesh',
        ),
        (
            not cfg.model.path and cfg.model.hidden_size % (2 * cfg.model.num_heads) != 0,
            f'model.hidden_size={cfg.model.hidden_size} must be a multiple of '
            f'2 x model.num_heads={cfg.model.num_heads}',
        ),
        (
            not cfg.model.path and cfg.model.num_heads % cfg.model.num_kv_heads != 0,
            f'model.num_heads={cfg.model.num_heads} must be a multiple of '
            f'model.num_kv_heads={cfg.model.num_kv_heads}',
        ),
        (
            not cfg.model.path and cfg.lora.rank > narrowest,
            f'lora.rank={cfg.lora.rank} must be at most {narrowest}, the narrowest side of an '
            'adapted matrix: more would train nothing else',
        ),
        (
            cfg.rollout.group_size == 1 and cfg.algorithm not in WITHOUT_GROUPS,
            f'rollout.group_size=1 leaves algorithm={cfg.algorithm!r} nothing to compare an '
            'episode with: set it to 2 or more',
        ),
        (
            cfg.rollout.group_size == 1 and derived.drops_groups(cfg),
            f'rollout.group_size=1 leaves filter.rule={cfg.filter.rule!r} no spread to go by: set '
            'filter.rule=all, or rollout.group_size to 2 or more',
        ),
        (
            (optim.schedule == 'constant') != (optim.schedule_steps == 0),
            f'optim.schedule={optim.schedule!r} and optim.schedule_steps={optim.schedule_steps} do '
            'not go together: linear and cosine need the optimiser steps they take, constant 0',
        ),
        (
            optim.schedule == 'constant' and optim.final_lr != 0,
            f'optim.final_lr={optim.final_lr} has no effect on optim.schedule=constant: set it to '
            '0',
        ),
        (
            not set(cfg.eval.also) <= {'train', 'validation', 'test'} - {cfg.eval.split},
            f'eval.also={cfg.eval.also} must name splits of train, validation, test other than '
            f'eval.split={cfg.eval.split!r}',
        ),
        (
            not set(cfg.eval.worlds) <= set(ENVIRONMENTS) - set(derived.worlds(cfg)),
            f'eval.worlds={cfg.eval.worlds} must name worlds of {", ".join(ENVIRONMENTS)} other '
            f'than env.name={cfg.env.name!r}',
        ),
        (
            cfg.checkpoint.best and cfg.eval.split == 'test',
            'checkpoint.best chooses by eval.split, and a policy chosen on the test split has no '
            'test figure left: set eval.split=validation',
        ),
        (
            cfg.critic.warmup_steps >= cfg.steps > 0,
            f'critic.warmup_steps={cfg.critic.warmup_steps} must be below steps={cfg.steps}: no '
            'step would be left to train the policy',
        ),
    ]
    problems += _imitation_problems(cfg, mesh_shards)
    return [sentence for wrong, sentence in problems if wrong] + _impossible_alarms(cfg)


def _impossible_alarms(cfg: Any) -> list[str]:
    alarm = cfg.alarm
    problems = [
        (
            alarm.mi_every > 0 and alarm.mi_turns == 'any' and cfg.context.window > 0,
            "alarm.mi_turns='any' needs context.window=0: other turns were not played from all "
            'that stands in front of them',
        ),
        (
            alarm.mi_every > 0 and alarm.mi_text == 'reasoning' and not cfg.env.think,
            'alarm.mi_text=reasoning needs env.think=True; without thinking take answer',
        ),
        (
            alarm.information_drop.action in ('stop', 'roll_back') and alarm.mi_every == 0,
            'alarm.information_drop.action can only act with alarm.mi_every > 0',
        ),
    ]
    every = {'eval/success': cfg.eval.every, 'collapse/mi_share': alarm.mi_every}
    saved = (cfg.checkpoint.keep - 1) * cfg.checkpoint.every
    for name, signal in collapse.SIGNALS.items():
        steps = alarm[name].patience * every.get(signal.metric, 1)
        problems.append(
            (
                alarm[name].action == 'roll_back' and saved <= steps,
                f'alarm.{name}.action=roll_back looks back over {steps} steps, and '
                f'checkpoint.keep, checkpoint.every only keep {saved}: raise one of them',
            )
        )
    return [sentence for wrong, sentence in problems if wrong]


def _imitation_problems(cfg: Any, mesh_shards: int) -> list[tuple[bool, str]]:
    clone, micro, pairs = cfg.clone, cfg.clone.microbatch_rows, cfg.algorithm == 'dpo'
    return [
        (
            micro > 0 and (clone.batch % micro != 0 or micro % mesh_shards != 0),
            f'clone.batch={clone.batch} must be a multiple of clone.microbatch_rows={micro}, and '
            f'that of the {mesh_shards} data shards of the mesh',
        ),
        (
            (cfg.evol.threshold or 0) < 0 and cfg.evol.weights != 'equal',
            f'evol.threshold={cfg.evol.threshold} is negative: set evol.weights=equal, or episodes '
            'of negative return would be unlearnt',
        ),
        (
            derived.base_rows(cfg) > 0 and not derived.clones(cfg),
            f'evol.base_rows={cfg.evol.base_rows} needs demonstrations: set clone.file or '
            'clone.episodes',
        ),
        (
            derived.base_rows(cfg) % mesh_shards != 0,
            f'evol.base_rows={cfg.evol.base_rows} must be a multiple of the {mesh_shards} data '
            'shards of the mesh',
        ),
        (
            cfg.evol.base_rows > 0 and cfg.algorithm != 'agent_evol',
            f'evol.base_rows={cfg.evol.base_rows} has no effect on algorithm={cfg.algorithm!r}, '
            'only on agent_evol: set it to 0',
        ),
        (
            derived.base_rows(cfg) % cfg.batch.microbatch_rows != 0,
            f'evol.base_rows={cfg.evol.base_rows} must be a multiple of batch.microbatch_rows='
            f'{cfg.batch.microbatch_rows}, by which they are scored',
        ),
        (
            derived.base_rows(cfg) > 0 and cfg.context.window > 0,
            f'evol.base_rows={cfg.evol.base_rows} are whole conversations: set context.window=0',
        ),
        (
            derived.base_rows(cfg) > 0 and derived.demonstrates_apart(cfg),
            'the play that evol.base_rows joins to batches has the limits of rollouts: set those '
            'of clone (clone.max_turns and its like) to 0',
        ),
        (
            bool(clone.file) and derived.demonstrates_apart(cfg),
            'clone.max_turns and its like are for own demonstrations, not for those of clone.file: '
            'set them to 0',
        ),
        (
            clone.thoughts
            and (
                not clone.episodes or bool(clone.file) or derived.on_hosts(cfg) or not cfg.env.think
            ),
            'clone.thoughts has an effect only on own demonstrations (clone.episodes) of worlds on '
            'the device whose answers think (env.think=True): set it to False',
        ),
        (
            pairs and (cfg.rollout.group_size % 2 != 0 or cfg.batch.microbatch_rows % 2 != 0),
            f'rollout.group_size={cfg.rollout.group_size} and batch.microbatch_rows='
            f'{cfg.batch.microbatch_rows} must be even: dpo compares two episodes',
        ),
        (
            cfg.loss.sampler_correction != 'off' and cfg.algorithm in ('agent_evol', 'dpo'),
            f'loss.sampler_correction={cfg.loss.sampler_correction!r} has no effect on algorithm='
            f'{cfg.algorithm!r}, which has no ratio: set it to off',
        ),
        (
            pairs and cfg.parity.microbatch_means,
            'parity.microbatch_means does not go with dpo, whose loss is a mean over pairs',
        ),
        (
            pairs and (cfg.filter.soft or cfg.filter.scaling != 'none'),
            'filter.soft and filter.scaling do not go with dpo: they would scale its beta',
        ),
        (
            pairs and cfg.loss.kl_coef > 0 and cfg.loss.kl_in == 'reward',
            "loss.kl_in='reward' does not go with dpo, which compares returns: set loss.kl_in=loss",
        ),
    ]
