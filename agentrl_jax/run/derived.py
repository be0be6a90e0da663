"""What follows from a config: numbers and yes-or-no answers that more than one part asks for."""

from typing import Any

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.envs.hosts import HOSTS
from agentrl_jax.imitation.kept import LIMITS
from agentrl_jax.rl import curriculum
from agentrl_jax.rollout.episodes import forks_of_each
from agentrl_jax.text import agents

# Where options of algorithms stand
OPTION_SECTIONS = ('loss', 'turn_credit', 'fork', 'evol', 'dpo')


def section(cfg: Any, name: str) -> str:
    """Where an option of an algorithm stands: a name of its SETTINGS is unique in all of them."""
    return next(section for section in OPTION_SECTIONS if name in cfg[section])


def option(cfg: Any, name: str) -> Any:
    """Value of an option of an algorithm, None where it is left to the algorithm."""
    return cfg[section(cfg, name)][name]


def on_hosts(cfg: Any) -> bool:
    """Whether episodes are played against worlds on hosts."""
    return cfg.env.name in HOSTS


def worlds_at_once(cfg: Any) -> int:
    """Episodes on hosts that a run plays side by side, all of its processes together."""
    rows = max(episodes(cfg), cfg.env.eval_levels * cfg.eval.samples if cfg.eval.every else 0)
    return min(cfg.rollout.slots or rows, rows)


def room_of_own_servers(cfg: Any) -> int:
    """Worlds that fit into the servers which each process starts; 0 = it starts none."""
    section = cfg[cfg.env.name]
    starts = 'launch' in section and not section.urls
    return section.launch * section.room if starts else 0


def agent(cfg: Any) -> agents.Agent:
    """Which turns an episode has beside those that act."""
    of = cfg.agent
    return agents.build_agent(of.name, trials=of.trials, plan_every=of.plan_every)


def answer_opening(cfg: Any) -> str:
    """What is forced in front of answers that act."""
    if on_hosts(cfg):
        return cfg.hosts.answer_prefix
    if cfg.agent.name == 'react':
        return 'Thought:'
    return '<think>' if cfg.env.think else '<answer>'


def worlds(cfg: Any) -> tuple[str, ...]:
    """Names of the worlds that train: those of env.mix, or env.name."""
    return tuple(name for name, _ in cfg.env.mix) or (cfg.env.name,)


def apportion(cfg: Any, total: int) -> tuple[int, ...]:
    """Whole parts of a total by the shares of env.mix: rounded down, the rest to those that lost
    most."""
    exact = [share * total for _, share in cfg.env.mix]
    parts = [int(part + 1e-6) for part in exact]
    lost = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])  # of equals the first
    return tuple(part + (i in lost[: total - sum(parts)]) for i, part in enumerate(parts))


def needs_critic(cfg: Any) -> bool:
    return bool(ALGORITHMS[cfg.algorithm].USES_CRITIC)


def shares_backbone(cfg: Any) -> bool:
    """Whether the critic is a head on the policy's own hidden states."""
    return needs_critic(cfg) and cfg.critic.share_backbone


def needs_reference(cfg: Any) -> bool:
    """A reference model is kept only when some KL term or DPO needs it."""
    return cfg.loss.kl_coef > 0 or cfg.algorithm == 'dpo'


def begins_iteration(cfg: Any, step: int) -> bool:
    """AgentEvol: whether explorer and learner change before the step."""
    return explores(cfg) and step > 0 and step % cfg.evol.iteration == 0


def explores(cfg: Any) -> bool:
    """Whether episodes are played by the policy of an iteration's beginning (AgentEvol)."""
    return cfg.algorithm == 'agent_evol'


def keeps_start(cfg: Any) -> bool:
    """Whether the policy of step 0 is kept on disk: as a reference, or to begin again from."""
    return needs_reference(cfg) or explores(cfg)


def turn_limit(cfg: Any, step: int) -> int:
    """Turns an episode of a training step may take: those of the curriculum, or all."""
    if not cfg.curriculum.rounds:
        return cfg.env.max_turns
    return curriculum.horizon(
        step,
        rounds=cfg.curriculum.rounds,
        stage_steps=cfg.curriculum.stage_steps,
        interpolate=cfg.curriculum.interpolate,
    )


def lr_schedule(cfg: Any) -> dict[str, Any]:
    """Keywords of update.rate_of, the same for both rates."""
    return dict(
        warmup_steps=cfg.optim.warmup_steps,
        schedule=cfg.optim.schedule,
        schedule_steps=cfg.optim.schedule_steps,
        final_lr=cfg.optim.final_lr,
    )


def lora_scale(cfg: Any) -> float:
    """What the adapters' corrections are multiplied by."""
    return cfg.lora.alpha / cfg.lora.rank if cfg.lora.rank else 1.0


def episodes(cfg: Any) -> int:
    """Episodes of a rollout."""
    return cfg.rollout.num_groups * cfg.rollout.group_size


def continuations(cfg: Any) -> int:
    """Continuations that an episode of a rollout can have; 0 = it is never forked."""
    if cfg.fork.turns is None or cfg.fork.continuations is None:
        return 0
    return forks_of_each(cfg.fork.turns, cfg.env.max_turns, cfg.fork.continuations)


def trains_continuations(cfg: Any) -> bool:
    return continuations(cfg) > 0 and cfg.fork.train == 'weighted'


def batch_rows(cfg: Any) -> int:
    """Rows that an episode has in an update: its own and those of continuations that train."""
    return 1 + continuations(cfg) if trains_continuations(cfg) else 1


def demonstrates_apart(cfg: Any) -> bool:
    """Whether own demonstrations have limits that are not those of the run's episodes."""
    return any(cfg.clone[field] for _, field in LIMITS)


def clones(cfg: Any) -> bool:
    """Whether there are demonstrations, of a file or our own."""
    return bool(cfg.clone.file) or cfg.clone.episodes > 0


def base_rows(cfg: Any) -> int:
    """Demonstrations that join the episodes of a step (AgentEvol)."""
    return cfg.evol.base_rows if cfg.algorithm == 'agent_evol' else 0


def share(part: float, whole: int) -> int:
    """RAGEN's int(part * whole), at least one."""
    return max(int(part * whole + 1e-9), 1)


def drops_groups(cfg: Any) -> bool:
    """Whether the filter can drop whole groups."""
    rule = cfg.filter.rule
    return rule not in ('all', 'within_group') and not (rule == 'top_k' and cfg.filter.keep == 1)


def kept_groups(cfg: Any) -> int:
    """Groups that enter an update: those that are kept where their number is known before."""
    groups, choice = cfg.rollout.num_groups, cfg.filter
    if choice.refill or not choice.compact:
        return groups
    if choice.rule == 'top_k':
        return share(choice.keep, groups)
    if choice.rule == 'percentile':
        return round(choice.high * groups) - round(choice.low * groups)
    return groups


def row_order(cfg: Any) -> str:
    """How the filter hands on the rows of a rollout: an `order` of filtering.select."""
    if cfg.filter.refill or not drops_groups(cfg):
        return 'all'
    return 'compact' if kept_groups(cfg) < cfg.rollout.num_groups else 'kept_first'


def rows_drop_out(cfg: Any) -> bool:
    """Whether rows of an update may have nothing to train: groups not kept, turns not played.

    Never said where it matters which rows share a micro-batch: means of its own, pairs.
    """
    if cfg.parity.microbatch_means or cfg.algorithm == 'dpo':
        return False
    return trains_continuations(cfg) or row_order(cfg) == 'kept_first' or cfg.context.window > 0
