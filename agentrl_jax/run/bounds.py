"""Bounds of every number in a config: what check refuses, tests draw from and run/README lists.

A field without a value (None) has no bounds to meet: the algorithm's own default stands for it.
Booleans and words are not numbers; words stand in check.CHOICES. Worlds check their own sections.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from agentrl_jax.measure import collapse


@dataclasses.dataclass(frozen=True)
class Bounds:
    """An interval; infinite ends are open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    also: tuple[float, ...] = ()  # single values that are allowed as well

    def holds(self, value: float) -> bool:
        """Whether the value is inside; nan and infinite values never are."""
        if not math.isfinite(value):
            return False
        above = self.low < value or (value == self.low and not self.open_low)
        below = value < self.high or (value == self.high and not self.open_high)
        return value in self.also or (above and below)

    def __str__(self) -> str:
        if self.low == -math.inf and self.high == math.inf:
            return 'finite'
        if self.high == math.inf:
            text = f'above {self.low:g}' if self.open_low else f'at least {self.low:g}'
        elif self.low == -math.inf:
            text = f'below {self.high:g}' if self.open_high else f'at most {self.high:g}'
        else:
            opening, closing = '(' if self.open_low else '[', ')' if self.open_high else ']'
            text = f'in {opening}{self.low:g}, {self.high:g}{closing}'
        return ' or '.join([text, *(f'{value:g}' for value in self.also)])


ONE, ZERO = Bounds(low=1), Bounds(low=0)
POSITIVE = Bounds(low=0, open_low=True)
SHARE = Bounds(low=0, high=1)  # a probability, a discount, a part of a whole
PART = Bounds(low=0, high=1, open_low=True)  # a part that is not nothing
MOMENT = Bounds(low=0, high=1, open_high=True)  # decay of a running mean
FINITE = Bounds()
MANY = Bounds(low=1, high=2**31 - 1)  # what is counted in int32
WORD = Bounds(low=0, high=2**32 - 1)  # what is folded into a random key

BOUNDS: Mapping[str, Bounds] = {
    'seed': Bounds(low=0, high=2**63 - 1),
    'steps': Bounds(low=0, high=2**31 - 1),
    'env.max_turns': ONE,
    'env.max_actions_per_turn': ONE,
    'env.max_actions_per_episode': ONE,
    'env.format_penalty': Bounds(high=0),
    'env.max_words': ONE,
    'env.train_levels': MANY,
    'env.eval_levels': MANY,
    'env.pool_seed': WORD,
    'agent.trials': ONE,
    'agent.plan_every': ZERO,
    'model.hidden_size': Bounds(low=2),
    'model.intermediate_size': ONE,
    'model.num_layers': ONE,
    'model.num_heads': ONE,
    'model.num_kv_heads': ONE,
    'model.rope_theta': Bounds(low=1),
    'lora.rank': ZERO,
    'lora.alpha': POSITIVE,
    'hosts.max_observation': ONE,
    'hosts.read_tokens': ONE,
    'hosts.poll': ONE,
    'hosts.timeout_s': POSITIVE,
    'hosts.tries': ONE,
    'hosts.outage_s': ZERO,
    'hosts.min_healthy': SHARE,
    'rollout.num_groups': MANY,
    'rollout.group_size': MANY,
    'rollout.max_tokens': ONE,
    'rollout.max_response': ONE,
    # Below it log-probabilities of other tokens than the best leave float32
    'rollout.temperature': Bounds(low=0.01, high=100),
    'rollout.slots': ZERO,
    'rollout.serve_rows': ONE,
    'rollout.read_tokens': ZERO,
    'curriculum.stage_steps': ONE,
    'context.window': ZERO,
    'context.summary': ZERO,
    'filter.keep': PART,
    'filter.p': SHARE,
    'filter.eps': ZERO,
    'filter.low': SHARE,
    'filter.high': SHARE,
    'filter.refill': ZERO,
    'filter.max_empty': ZERO,
    'loss.clip_low': SHARE,
    'loss.clip_high': ZERO,
    'loss.dual_clip': Bounds(low=1, open_low=True, also=(0,)),
    'loss.entropy_coef': FINITE,
    'loss.kl_coef': ZERO,
    'loss.kl_target': ZERO,
    'loss.kl_horizon': POSITIVE,
    'loss.gamma': SHARE,
    'loss.lam': SHARE,
    'loss.eps': ZERO,
    'loss.std_floor': ZERO,
    'loss.value_clip': ZERO,
    'loss.value_coef': ZERO,
    'loss.max_length': ZERO,
    'loss.overlong_buffer': ZERO,
    'loss.overlong_coef': ZERO,
    'loss.norm_length': ONE,
    'loss.sampler_low': ZERO,
    'loss.sampler_high': ZERO,
    'turn_credit.turn_gamma': SHARE,
    'turn_credit.outcome_coef': FINITE,
    'turn_credit.step_coef': FINITE,
    'turn_credit.turn_coef': FINITE,
    'fork.continuations': ONE,
    'fork.value_every': ZERO,
    'evol.base_rows': ZERO,
    'evol.iteration': ONE,
    'evol.threshold': FINITE,
    'dpo.beta': POSITIVE,
    'dpo.min_gap': ZERO,
    'dpo.pairs': ONE,
    'critic.warmup_steps': ZERO,
    'optim.lr': POSITIVE,
    'optim.critic_lr': POSITIVE,
    'optim.beta1': MOMENT,
    'optim.beta2': MOMENT,
    'optim.weight_decay': ZERO,
    'optim.max_grad_norm': POSITIVE,
    'optim.warmup_steps': ZERO,
    'optim.schedule_steps': ZERO,
    'optim.final_lr': SHARE,
    'batch.minibatch_rows': ONE,
    'batch.microbatch_rows': ONE,
    'batch.epochs': ONE,
    'batch.head_chunk': ONE,
    'batch.widths': ONE,
    'clone.episodes': ZERO,
    'clone.steps': ZERO,
    'clone.batch': ONE,
    'clone.lr': POSITIVE,
    'clone.oracle': SHARE,
    'clone.microbatch_rows': ZERO,
    'clone.max_turns': ZERO,
    'clone.max_actions_per_turn': ZERO,
    'clone.max_actions_per_episode': ZERO,
    'clone.max_tokens': ZERO,
    'eval.every': ZERO,
    'eval.temperature': Bounds(low=0.01, high=100, also=(0,)),
    'eval.top_k': ZERO,
    'eval.top_p': PART,
    'eval.samples': ONE,
    'checkpoint.every': ONE,
    'checkpoint.keep': ONE,
    'mesh.data': Bounds(low=1, also=(-1,)),
    'mesh.fsdp': ONE,
    'mesh.tensor': ONE,
    'log.rollouts_every': ZERO,
    'log.profile_steps': ZERO,
    'alarm.baseline_steps': ONE,
    'alarm.roll_back_lr': PART,
    'alarm.max_roll_backs': ZERO,
    'alarm.mi_every': ZERO,
    'alarm.mi_pairs': Bounds(low=2),
    'alarm.low_mi': FINITE,
    'alarm.low_entropy': FINITE,
    **{f'alarm.{name}.limit': ZERO for name in collapse.SIGNALS},
    **{f'alarm.{name}.patience': ONE for name in collapse.SIGNALS},
}


def numbers(cfg: Any, prefix: str = '') -> dict[str, type]:
    """Dotted names of the fields of a config that hold numbers, with their types."""
    found = {}
    for name in cfg:
        if hasattr(cfg[name], 'get_type'):
            found |= numbers(cfg[name], f'{prefix}{name}.')
        elif cfg.get_type(name) in (int, float):
            found[prefix + name] = cfg.get_type(name)
    return found


def field(cfg: Any, name: str) -> Any:
    """The value of a dotted name."""
    for part in name.split('.'):
        cfg = cfg[part]
    return cfg


def problems(cfg: Any) -> list[str]:
    """A sentence for every number that is out of its bounds."""
    values = {name: field(cfg, name) for name in numbers(cfg)}
    return [
        f'{name}={value!r} must be {BOUNDS.get(name, FINITE)}'
        for name, value in values.items()
        if value is not None and not BOUNDS.get(name, FINITE).holds(value)
    ]


def table() -> str:
    """The bounds as rows of a markdown table."""
    rows = [f'| `{name}` | {bounds} |' for name, bounds in BOUNDS.items()]
    return '\n'.join(['| field | must be |', '| --- | --- |', *rows])
