"""Configs in checkpoints, including configs of earlier versions."""

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ml_collections

from agentrl_jax.envs import GAMES, HOSTS
from agentrl_jax.envs.base import shared_fields
from agentrl_jax.measure.collapse import SIGNALS, Alarms
from agentrl_jax.run import config, outside, usage
from agentrl_jax.settings import tree

VERSION = 5  # of the configs in checkpoints
ANY = object()  # no value of the field changed any result


def _each(off: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), off)


# Removed fields by the last commit that had them, with the value that had no effect
REMOVED = {
    '55cb303': {
        'agent.reward': 'whole',
        'curriculum.memory': 0.5,
        'eval.worlds': [],
        'filter.high': 1.0,
        'filter.scaling': 'none',
        'loss.sampler_reject': 'off',
        'parity.loss_on': 'sampled',
        **_each(0.0, 'curriculum.uncertain filter.low'),
        **_each(None, 'loss.sampler_reject_high loss.sampler_reject_low'),
        **_each(False, 'curriculum.interpolate filter.soft loss.center_scores'),
        **_each(False, 'loss.sampler_sequence parity.filter_normalised parity.microbatch_means'),
        **_each(ANY, 'alarm.max_roll_backs alarm.roll_back_lr clone.keep_in'),
        **_each(ANY, 'dpo.beta dpo.min_gap dpo.pairs rollout.read_tokens'),
    },
    'fc874ba': {
        'filter.eps': 0.01,
        'filter.include_zero': None,
        'loss.eps': {1e-6, 1e-4},
        'miniwob.rewards': 'score',
        'sciworld.max_moves': 100,
        'search.about': ['country', 'region'],
        'turn_credit.step_coef': 1.0,
        **_each(0, 'loss.std_floor search.longest_name shop.seed'),
        **_each(True, 'evol.restart filter.compact'),
        **_each(False, 'babyai.solvable rollout.common_random_numbers'),
        **_each(ANY, 'alarm.baseline_steps alarm.low_entropy alarm.low_mi alarm.mi_pairs'),
        **_each(ANY, 'alarm.mi_turns hosts.poll miniwob.settle_s web.settle_s'),
        **{f'alarm.{name}.{field}': ANY for name in SIGNALS for field in ('limit', 'patience')},
    },
    '6b835a7e': {'fork.turns': 'every', 'fork.train': 'weighted'},
    'f41233b2': {
        'agent.plan_every': 0,
        'eval.also': [],
        'loss.kl_horizon': ANY,
        'loss.kl_target': 0.0,
    },
    '839984a3': {'loss.thought_weight': 1.0, 'loss.action_uncertainty': False},
    '59125fc1': _each(ANY, 'entropy.method entropy.share entropy.target'),
}


def _values(off: Any) -> Collection[Any]:
    """Return the values that had no effect; JSON stores tuples as lists."""
    if isinstance(off, list):
        return off, tuple(off)
    return off if isinstance(off, set) else (off,)


def _without_removed(saved: dict[str, Any]) -> dict[str, Any]:
    """Drop removed fields from a flat config; ValueError if one of them had an effect."""
    for commit, fields in REMOVED.items():
        present = {name: saved[name] for name in fields if saved.get(name) is not None}
        active = [
            f'{name}={value!r}'
            for name, value in present.items()
            if fields[name] is not ANY and value not in _values(fields[name])
        ]
        if active:
            raise ValueError(
                f'the config sets {", ".join(active)}, which this version no longer has; use '
                f'commit {commit}, the last one that has it'
            )
        saved = {name: value for name, value in saved.items() if name not in fields}
    return saved


def _with_lists_of_alarms(saved: dict[str, Any]) -> dict[str, Any]:
    """Turn alarm.NAME.action of each signal into alarm.off and alarm.stop."""
    actions = {name: saved.pop(f'alarm.{name}.action', None) for name in SIGNALS}
    if not any(actions.values()):
        return saved
    stop = {None: set(Alarms.stop), 'stop': SIGNALS, 'roll_back': SIGNALS}
    return saved | {
        'alarm.off': tuple(name for name in SIGNALS if actions[name] == 'off'),
        'alarm.stop': tuple(name for name in SIGNALS if name in stop.get(actions[name], ())),
    }


def _with_wordings(saved: dict[str, Any]) -> dict[str, Any]:
    """Turn two switches of BabyAI into the name of a wording."""
    for wording, name in {'brief': 'brief', 'agentgym': 'agentgym_wording'}.items():
        if saved.pop(f'babyai.{name}', False):
            saved['babyai.wording'] = wording
    return saved


def _with_shared_hosts(saved: dict[str, Any]) -> dict[str, Any]:
    """Move the shared fields of environments on hosts from their sections to `hosts`."""
    mix = [name for name, _ in saved.get('env.mix') or ()]
    names = mix or [saved.get('env.name')]
    for world, cls in HOSTS.items():
        for name, leaf in shared_fields(cls).items():
            value = saved.pop(f'{world}.{name}', None)
            if value not in (None, leaf.default) and (world in names or names == [None]):
                before = saved.get(leaf.name) or ()
                saved[leaf.name] = (*before, *value) if leaf.kind is tuple else value
    return saved


def _current(saved: dict[str, Any]) -> dict[str, Any]:
    return _with_shared_hosts(_with_wordings(_with_lists_of_alarms(_without_removed(saved))))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def arguments(words: Sequence[str]) -> list[str]:
    """Return the command line with config fields of earlier versions migrated to this one.

    Warns about migrated fields; ValueError if one had an effect that this version lacks.
    """
    matches = [re.fullmatch(r'--?config\.([\w.]+)=(.*)', word, re.DOTALL) for word in words]
    before = {match[1]: _literal(match[2]) for match in matches if match}
    after = _current({name: value for name, value in before.items() if name != 'env.mix'})
    gone = [name for name in before if name not in {*after, 'env.mix'}]
    pairs = zip(words, matches, strict=True)
    unchanged = [word for word, match in pairs if match is None or match[1] not in gone]
    new = [f'--config.{name}={value}' for name, value in after.items() if name not in before]
    if gone:
        usage.warn(
            f'fields of an earlier version: {", ".join(gone)}; '
            f'now: {" ".join(new) or "without effect"}'
        )
    return unchanged + new


def migrate(saved: Mapping[str, Any]) -> Any:
    """Return the ConfigDict of a saved config of any version.

    Newer fields have their defaults; fields without effect are unset. ValueError lists fields that
    no longer exist.
    """
    values = _current(tree.flat(saved))
    outside.register(values)
    cfg = config.get_config()
    with cfg.unlocked():
        for name in saved.keys() & GAMES.keys():
            cfg[name] = ml_collections.ConfigDict(saved[name])
    known = tree.flat(cfg)
    unknown = sorted(name for name in values if name not in known)
    if unknown:
        raise ValueError(
            'its config has fields that this version of the code does not have: '
            f'{", ".join(unknown)}; use the version that wrote it, or pass --config'
        )
    cfg.update_from_flattened_dict({n: x for n, x in values.items() if x is not None})
    # Older versions saved the values of fields without effect
    working = tree.values(tree.read(config.Config, cfg, idle=True))
    chosen = {name for _, _, every in tree.variants(config.Config) for name in every}
    cfg.update_from_flattened_dict({n: None for n in chosen if working.get(n) is None})
    return cfg


def config_json_in(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON config in a checkpoint's metadata; ValueError if there is none."""
    if not isinstance(extra.get('config'), Mapping):
        raise ValueError('the checkpoint has no run config: another program wrote it')
    return extra['config']


def from_metadata(extra: Mapping[str, Any]) -> Any:
    """Return that config in this version; errors as in config_json_in and migrate."""
    return migrate(config_json_in(extra))


def to_metadata(cfg: Any) -> dict[str, Any]:
    """Return the checkpoint metadata that holds a ConfigDict."""
    return {'config': config.as_json(cfg), 'version': VERSION}


def read_saved(extra: Mapping[str, Any]) -> config.Config:
    """Return the Config of the run that wrote a checkpoint. extra: the checkpoint's metadata."""
    return config.read(from_metadata(extra), None)


def canonical_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's config as JSON for comparisons: fields without effect are None."""
    cfg = config.effective(from_metadata(extra))
    if not cfg.loss.kl_coef:
        cfg.loss.kl_in = None
    return config.as_json(cfg)


def following(saved: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the fields that have their algorithm's default in both configs (comparable)."""
    chosen = {name for _, _, every in tree.variants(config.Config) for name in every}

    def defaults(of):
        cfg = migrate(of)
        cfg.update_from_flattened_dict(dict.fromkeys(chosen))
        return tree.flat(config.as_json(config.effective(cfg)))

    before, after = defaults(saved), defaults(now)
    values, changed = tree.flat(saved), tree.flat(now)
    return {n for n in chosen if (values[n], changed[n]) == (before[n], after[n])}
