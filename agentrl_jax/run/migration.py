"""Configs in checkpoints, also those of earlier versions."""

from collections.abc import Mapping
from typing import Any

import ml_collections

from agentrl_jax.envs import GAMES
from agentrl_jax.run import config, outside
from agentrl_jax.settings import tree

VERSION = 4  # of the configs in checkpoints; see migrate
ANY = object()  # whatever the value, it changed no result
# Fields that earlier versions had and this one has not, with the value that had no effect.
REMOVED = {
    'agent.reward': 'whole',
    'alarm.max_roll_backs': ANY,
    'alarm.roll_back_lr': ANY,
    'clone.keep_in': ANY,
    'curriculum.interpolate': False,
    'curriculum.memory': 0.5,
    'curriculum.uncertain': 0.0,
    'dpo.beta': ANY,
    'dpo.min_gap': ANY,
    'dpo.pairs': ANY,
    'eval.worlds': [],
    'filter.high': 1.0,
    'filter.low': 0.0,
    'filter.scaling': 'none',
    'filter.soft': False,
    'loss.center_scores': False,
    'loss.sampler_reject': 'off',
    'loss.sampler_reject_high': None,
    'loss.sampler_reject_low': None,
    'loss.sampler_sequence': False,
    'parity.filter_normalised': False,
    'parity.loss_on': 'sampled',
    'parity.microbatch_means': False,
    'rollout.read_tokens': ANY,
}


def _without_removed(saved: dict[str, Any]) -> dict[str, Any]:
    """Drop removed fields of a flat config; ValueError if one of them had an effect."""
    active = [
        f'{name}={saved[name]!r}'
        for name, off in REMOVED.items()
        if off is not ANY and saved.get(name) not in (None, off)
    ]
    if active:
        raise ValueError(
            f'its config sets {", ".join(active)}, which this version no longer has; use commit '
            '55cb303, the last one that does'
        )
    kept = {name: value for name, value in saved.items() if name not in REMOVED}
    return {name: 'stop' if value == 'roll_back' else value for name, value in kept.items()}


STEPS = (lambda saved: saved, *[_without_removed] * 3)  # from each version to the next


def migrate(saved: Mapping[str, Any], version: int = 0) -> Any:
    """The ConfigDict of a saved config of any version.

    Fields that came later have their defaults, those without effect no value; ValueError names
    those that are gone.
    """
    values = tree.migrate({**saved, 'version': version}, STEPS)
    outside.register(values)
    cfg = config.get_config()
    with cfg.unlocked():
        for name in saved.keys() & GAMES.keys():
            cfg[name] = ml_collections.ConfigDict(saved[name])
    known = tree.flat(cfg)
    unknown = sorted(name for name in values if name not in known)
    if unknown:
        raise ValueError(
            'its config has fields that this version of the code does not know: '
            f'{", ".join(unknown)}; use the version that it was made with, or give --config'
        )
    cfg.update_from_flattened_dict({n: x for n, x in values.items() if x is not None})
    # Older versions kept what was set of fields without effect
    working = tree.values(tree.read(config.Config, cfg, idle=True))
    chosen = {name for _, _, every in tree.variants(config.Config) for name in every}
    cfg.update_from_flattened_dict({n: None for n in chosen if working.get(n) is None})
    return cfg


def saved_in(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config as JSON in what lies beside the arrays of a checkpoint; ValueError without one."""
    if not isinstance(extra.get('config'), Mapping):
        raise ValueError('the checkpoint holds no config of a run: another program wrote it')
    return extra['config']


def of_checkpoint(extra: Mapping[str, Any]) -> Any:
    """The same as a ConfigDict of this version; errors of saved_in and migrate."""
    return migrate(saved_in(extra), extra.get('version', 0))


def saved_with(cfg: Any) -> dict[str, Any]:
    """What a checkpoint holds of a ConfigDict."""
    return {'config': config.as_json(cfg), 'version': VERSION}


def read_saved(extra: Mapping[str, Any]) -> config.Config:
    """The settings of the run that wrote a checkpoint; extra: what lies beside its arrays."""
    return config.read(of_checkpoint(extra), None)


def comparable(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The config beside a checkpoint as JSON by what it does: idle fields have no value."""
    cfg = config.effective(of_checkpoint(extra))
    if not cfg.loss.kl_coef:
        cfg.loss.kl_in = None
    return config.as_json(cfg)


def following(saved: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the fields whose values in two configs (comparable) follow from their algorithms."""
    chosen = {name for _, _, every in tree.variants(config.Config) for name in every}

    def defaults(of):
        cfg = migrate(of, VERSION)
        cfg.update_from_flattened_dict(dict.fromkeys(chosen))
        return tree.flat(config.as_json(config.effective(cfg)))

    before, after = defaults(saved), defaults(now)
    values, changed = tree.flat(saved), tree.flat(now)
    return {n for n in chosen if (values[n], changed[n]) == (before[n], after[n])}
