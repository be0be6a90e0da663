"""The config that a run has in the end: what is left unset takes the value of an algorithm's paper.

Fields without a value in configs/base.py are matters of the algorithm. DEFAULTS of its module holds
the values of its paper; fields that do not stand in DEFAULTS of the chosen one have no effect on
it. The effective config is what is built, what config.json holds and what train --show_config
prints.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.run import derived
from agentrl_jax.run.bounds import field
from agentrl_jax.run.command import WrongUsage


def _turns_are_discounted(cfg: Any) -> bool:
    if cfg.algorithm == 'ppo':
        return cfg.loss.estimator in ('turn', 'bi_level')
    return cfg.algorithm == 'gigpo' or cfg.turn_credit.mode in ('gtpo', 'hybrid')


# Fields that only some values of other fields give an effect: whether these have, and their names
CONDITIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    'loss.kl_estimator': (
        lambda cfg: cfg.loss.kl_coef > 0 and cfg.loss.kl_in == 'loss',
        'loss.kl_coef > 0 and loss.kl_in=loss',
    ),
    'loss.norm_length': (
        lambda cfg: cfg.loss.aggregation == 'token_sum_norm',
        'loss.aggregation=token_sum_norm',
    ),
    'loss.gamma': (lambda cfg: cfg.loss.estimator != 'turn', 'loss.estimator=token or bi_level'),
    'loss.reward_normalization': (
        lambda cfg: cfg.loss.reward_on == 'episode',
        'loss.reward_on=episode',
    ),
    'loss.eps': (lambda cfg: cfg.loss.norm == 'std', 'loss.norm=std'),
    'loss.std_floor': (lambda cfg: cfg.loss.norm == 'std', 'loss.norm=std'),
    'loss.overlong_buffer': (lambda cfg: bool(cfg.loss.max_length), 'loss.max_length'),
    'loss.overlong_coef': (lambda cfg: bool(cfg.loss.max_length), 'loss.max_length'),
    'turn_credit.turn_gamma': (
        _turns_are_discounted,
        'loss.estimator=turn or bi_level (ppo), turn_credit.mode=gtpo or hybrid',
    ),
    'filter.refill': (derived.drops_groups, 'a filter.rule that drops groups, such as varied'),
}
# Values that say of any algorithm that a field has no effect: with them a config can be given to
# one that does not take the field
NEUTRAL = {
    'loss.gamma': 1.0,
    'loss.lam': 1.0,
    'loss.reward_on': 'turn',
    'loss.reward_normalization': 'identity',
    'loss.entropy_coef': 0.0,
    'loss.dual_clip': 0.0,
    'loss.max_length': 0,
    'loss.bootstrap_truncated': False,
    'filter.refill': 0,
}


def defaults(cfg: Any) -> dict[str, Any]:
    """Every field that the chosen algorithm takes, with its paper's value."""
    if cfg.algorithm not in ALGORITHMS:
        raise WrongUsage(f'algorithm={cfg.algorithm!r} is not one of {", ".join(ALGORITHMS)}')
    longest = cfg.env.max_turns * cfg.rollout.max_response
    found = ALGORITHMS[cfg.algorithm].DEFAULTS
    return {name: value(longest) if callable(value) else value for name, value in found.items()}


def applies(cfg: Any, name: str) -> bool:
    """Whether the other fields of an effective config give this one an effect."""
    return name not in CONDITIONS or CONDITIONS[name][0](cfg)


def effective(cfg: Any) -> Any:
    """A copy of the config in which every field that has an effect has a value."""
    cfg, own = copy.deepcopy(cfg), defaults(cfg)
    for name in sorted(own, key=lambda name: name in CONDITIONS):  # conditions ask for the others
        section, leaf = name.split('.')
        if cfg[section][leaf] is None and applies(cfg, name):
            cfg[section][leaf] = own[name]
    if cfg.env.mix:
        cfg.env.mix = mixed(cfg)
        cfg.env.name = '+'.join(name for name, _ in cfg.env.mix)
    return cfg


def mixed(cfg: Any) -> tuple[tuple[str, float], ...]:
    """env.mix as pairs of a world and its share; ValueError where it is something else."""
    try:
        return tuple((str(name), float(share)) for name, share in cfg.env.mix)
    except (TypeError, ValueError) as error:
        raise WrongUsage(
            f'env.mix={cfg.env.mix!r} must be pairs of a world and its share, such as '
            "(('frozen_lake', .5), ('sokoban', .5))"
        ) from error


def idle(cfg: Any) -> set[str]:
    """Names of the algorithms' fields that do nothing in an effective config."""
    known = {name for module in ALGORITHMS.values() for name in module.DEFAULTS}
    own = defaults(cfg)
    found = {name for name in known if name not in own or not applies(cfg, name)}
    return found | ({'loss.kl_in'} if cfg.loss.kl_coef == 0 else set())


def without_effect(cfg: Any) -> list[str]:
    """A sentence for every field of an effective config that was set and does nothing."""
    users: dict[str, list[str]] = {}
    for algorithm, module in ALGORITHMS.items():
        for name in module.DEFAULTS:
            users.setdefault(name, []).append(algorithm)
    found = []
    for name, known in users.items():
        value = field(cfg, name)
        if value is None or (name in NEUTRAL and value == NEUTRAL[name]):
            continue
        other = f' or set it to {NEUTRAL[name]}' if name in NEUTRAL else ''
        if cfg.algorithm not in known:
            found.append(
                f'{name}={value!r} has no effect on algorithm={cfg.algorithm!r}, only on '
                f'{", ".join(known)}: leave it unset{other}'
            )
        elif not applies(cfg, name):
            found.append(
                f'{name}={value!r} has no effect: it needs {CONDITIONS[name][1]}; leave it '
                f'unset{other}'
            )
    return found


def show(cfg: Any) -> str:
    """The effective config, a field a line; behind those of the algorithm, its own values."""
    own, full = defaults(cfg), effective(cfg)

    def lines(part, prefix):
        for name, value in part.items():
            if hasattr(value, 'items'):
                yield from lines(value, f'{prefix}{name}.')
                continue
            dotted = prefix + name
            note = ''
            if dotted in own and value is not None:
                same = value == own[dotted]
                note = f'  # {cfg.algorithm}' if same else f'  # {cfg.algorithm}: {own[dotted]!r}'
            yield f'{dotted} = {value!r}{note}'

    return '\n'.join(lines(full, ''))
