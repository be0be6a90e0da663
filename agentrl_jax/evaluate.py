"""Measure a policy's success on held-out levels, next to random play and the oracle.

  python -m agentrl_jax.evaluate --workdir=runs/demo --config.eval.split=test
  python -m agentrl_jax.evaluate --workdir=runs/demo --best --config.eval.samples=8
  python -m agentrl_jax.evaluate --workdir=runs/demo --transfer --config.frozen_lake.size=5

The policy is a checkpoint of the workdir (the newest, --step, or --best), with the config of its
run. Without --workdir it is the untrained model of --config. With --config.eval.samples=k it plays
each level k times and prints pass@1 to pass@k (powers of two, and k). With --transfer, environment,
rules and turns may differ from training (--config.frozen_lake.size=5). Writes a rollout page and
evaluation_<split>.json with metrics, checkpoint and settings; evaluations with other settings stay
in that file. --trajectories=FILE also writes the episodes in AgentTraj's format (.json, .jsonl),
which clone.file reads.

Replies of environments on hosts are logged in replies_<split>.jsonl. --replay=FILE replays such a
log, or a run's replies.jsonl, bit for bit, without the environments.
"""

import sys

from absl import flags

from agentrl_jax.run import command
from agentrl_jax.settings import tree

if __name__ == '__main__':
    command.define_config_of_run()
    flags.DEFINE_string('workdir', '', "Folder of the run; '' = the config's own model.")
    flags.DEFINE_string('out', '', 'Folder for the results; default: the workdir.')
    flags.DEFINE_string('trajectories', '', "File for the episodes; '' = none.")
    flags.DEFINE_string('replay', '', 'Log of replies to play from, without the hosts.')
    flags.DEFINE_bool('transfer', False, 'Allow other environments and rules than in training.')
    flags.DEFINE_integer('step', None, 'Checkpoint to use; default: the newest.')
    command.define_best()
    command.define_fallback()
    command.begin(__doc__, needs=('config',), says='agentrl_jax.evaluate: loading')

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentrl_jax.envs import WORLDS
from agentrl_jax.imitation import trajectories
from agentrl_jax.machine import checkpoint, files
from agentrl_jax.measure import validation
from agentrl_jax.models import weights
from agentrl_jax.records import about, pages, report, run_log
from agentrl_jax.records.progress import live_line
from agentrl_jax.run import collecting, hosts, loading, saved_config
from agentrl_jax.run.build import build
from agentrl_jax.run.config import Config
from agentrl_jax.run.migration import canonical_json, read_saved, to_metadata
from agentrl_jax.run.params import chosen, saved_policy
from agentrl_jax.run.state import HOST_CONNECTION_FIELDS, HOST_TASK_FIELDS, changeable_world_fields
from agentrl_jax.run.streams import EVALUATE, Streams
from agentrl_jax.types import EpisodeStop


def evaluate(
    given: Any,
    workdir: str,
    out: str,
    step: int | None,
    trajectories_file: str = '',
    replay: str = '',
    transfer: bool = False,
) -> dict[str, float]:
    """Play the pool of eval.split once, write the results and return the metrics.

    given: the ConfigDict. trajectories_file: file for the episodes as trajectories; '' = none.
    replay: log of replies of this checkpoint and split, used instead of hosts; '' = none. transfer:
    `env` and the sections of environments may differ from the run's.
    """
    if given.env.mix:
        names = ', '.join(str(world) for world, *_ in given.env.mix)
        raise ValueError(
            f'env.mix={given.env.mix!r}: several environments are evaluated one by one. Set '
            f"--config.env.mix='()' and --config.env.name to one of {names}"
        )
    origin = saved_config.origin(workdir, given, step=step)
    saved_config.say(origin)
    if workdir and transfer:
        given = with_tokenizer_of_run(given, workdir, origin.step)
    run = build(given, probe=not replay, learns=False)
    cfg, params, rules = run.config, run.params, {}
    if trajectories_file and any(getattr(world, 'chats', False) for world in cfg.worlds):
        raise ValueError(
            f'--trajectories: episodes of {cfg.env.name} may have tools and several conversations, '
            'but a trajectory only alternates between human and gpt: remove the flag'
        )
    if workdir:
        saved = canonical_json(checkpoint.read_extra(workdir, step=origin.step))
        mixed = [name for name, _ in saved['env']['mix']]
        chosen = ('env.mix', 'env.name') if cfg.env.name in mixed else ()
        now = canonical_json(to_metadata(run.config_dict))
        may_differ = (*MAY_DIFFER, *chosen, *changeable_world_fields(cfg))
        if transfer:
            rules = other_rules(saved, now, may_differ)
            may_differ += environment_fields()
        checkpoint.check_config(saved, now, may_differ=may_differ, advice=ADVICE)
        params = saved_policy(cfg, run.model, run.mesh, params, workdir, step=origin.step)
        weights.check_finite(params, f'step {origin.step} of {workdir}')
    pool, task = run.validation, run.validation.task
    key = Streams(cfg.seed).key(EVALUATE)
    folder = files.local_path(out or workdir or '.')
    folder.mkdir(parents=True, exist_ok=True)
    name = f'evaluation_{cfg.eval.split}'
    earlier(folder / f'{name}.json')  # fail before playing if the file cannot be extended
    if trajectories_file and not (parent := files.local_path(trajectories_file).parent).is_dir():
        raise ValueError(f'--trajectories={trajectories_file}: no folder {parent}; create it')
    label = {'step': origin.step or 0, 'split': cfg.eval.split}
    stem = f'replies_{cfg.eval.split}'
    hosts.check_replay(run, replay)
    log = Path(replay) if replay else folder / hosts.log_name(stem)
    if not replay:
        hosts.archive_logs(run, folder, stem)
    watch = functools.partial(hosts.in_flight, run)
    with (
        hosts.playing(run, None if replay else folder, 0, stem=stem, replay=replay),
        live_line('worlds', watch),
    ):
        hosts.label(run, **label)
        rollout, counters = pool.collect(params, task, pool.episodes, key)
    policy = workdir or cfg.model.path or 'random weights'
    where = f'{f"step {origin.step} of " if workdir else ""}{policy}, {cfg.eval.split} episodes'
    collecting.check_validation(counters, where)
    sums = pool.sums(params, rollout)
    metrics = validation.summarise(sums)
    if math.isnan(metrics['eval/success']):
        raise files.Failure(
            f'{where}: all were lost to environment faults, so nothing was measured; see {log}'
        )
    counted_rows = slice(cfg.eval.samples * cfg.env.eval_levels)  # later rows only fill the mesh
    stop, healthy = (np.asarray(x)[counted_rows] for x in (rollout.episode_stop, rollout.healthy))
    cut = (stop == EpisodeStop.TOKEN_BUDGET)[healthy]
    metrics['eval/token_budget_stop'] = float(cut.mean())
    players = report.reference(task, cfg.env.eval_levels)
    metrics |= {f'reference/{name}': x for name, x in players.items()}
    passed = {k: validation.passes(sums, k) for k in range(1, cfg.eval.samples + 1)}
    pass_at = {
        str(k): {'mean': x, 'low': low, 'high': high} for k, (x, (low, high)) in passed.items()
    }
    print(describe(metrics, cfg.eval.split, passed), flush=True)
    if cut.any():
        limit = f'rollout.max_tokens={cfg.rollout.max_tokens}'
        print(f'{100 * cut.mean():.1f} % of episodes were ended by {limit}', flush=True)
    settings = settings_of(cfg) | ({'rules': rules} if rules else {})
    about_it = {'pass_at': pass_at, 'settings': settings, 'checkpoint': origin.fields()}
    keep(folder / f'{name}.json', metrics | about_it)
    # Order rows by level, then by sample
    samples = cfg.eval.samples
    rows = np.arange(samples * cfg.env.eval_levels).reshape(samples, -1).T.ravel()
    host, episodes = jax.tree.map(lambda x: np.asarray(x)[rows], (rollout, pool.episodes))
    checkpoint_name = {} if origin.step is None else {'checkpoint': f'step {origin.step}'}
    page = pages.write(
        folder,
        name,
        host,
        task=task,
        tokenizer=run.tokenizer,
        streams=episodes.world_stream,
        key=key,
        replies=hosts.said(run, cfg.env.name, log, episodes.token_stream, **label),
        group_size=samples,
        title=f'{cfg.eval.split} episodes of {policy}',
        extras={},
        limit=pages.PAGE_EPISODES,
        about=about.of_run(run.config_dict, sys.argv) | checkpoint_name,
    )
    if trajectories_file:
        records = trajectories.rollout_records(host, run.tokenizer, cfg.env.name)
        trajectories.write_records(trajectories_file, records)
    print(f'rollouts    {page}')
    return metrics


def with_tokenizer_of_run(given: Any, workdir: str, step: int | None) -> Any:
    """Return the ConfigDict with the run's tokenizer, unless it sets a model or a tokenizer."""
    if given.model.path or given.model.tokenizer:
        return given
    given = given.copy_and_resolve_references()
    saved = read_saved(checkpoint.read_extra(workdir, step=step))
    given.model.tokenizer = str(loading.tokenizer_source(saved))
    return given


def environment_fields() -> tuple[str, ...]:
    """Return the config sections and fields that define the environment."""
    return 'env', *HOST_TASK_FIELDS, *WORLDS


def other_rules(
    saved: Mapping[str, Any], now: Mapping[str, Any], free: tuple[str, ...]
) -> dict[str, Any]:
    """Return the fields of `env` and of the environment that differ from the run's.

    saved, now: configs of the checkpoint and of the evaluation. free: fields that any evaluation
    may change.
    """
    before = tree.flat(saved)
    return {
        name: x
        for name, x in tree.flat(now).items()
        if checkpoint.is_free(name, environment_fields())
        and before.get(name) != x
        and not checkpoint.is_free(name, free)
    }


def settings_of(cfg: Config) -> dict[str, Any]:
    """Return the settings in which evaluations of one checkpoint may differ."""
    settings = {
        'env': cfg.env.name,
        'levels': cfg.env.eval_levels,
        'pool_seed': cfg.env.pool_seed,
        'k': cfg.eval.samples,
        'temperature': cfg.eval.temperature,
        'top_k': cfg.eval.top_k,
        'top_p': cfg.eval.top_p,
        'seed': cfg.seed,
        'max_tokens': cfg.rollout.max_tokens,
        'max_response': cfg.rollout.max_response,
        'stop_at_answer': cfg.rollout.stop_at_answer,
        'sampler_dtype': cfg.rollout.sampler_dtype or cfg.model.dtype,
        'reward': cfg.reward.function,
    }
    if cfg.rollout.constrain:
        settings['constrain'] = cfg.rollout.constrain
    if url := getattr(cfg.worlds[0], 'url', ''):  # a server alone determines the environment
        settings['url'] = run_log.redact(url)
    return settings


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write an evaluation; the file keeps evaluations of other settings or checkpoints.

    They are listed in `earlier`, newest first.
    """
    others = [one for one in earlier(path) if key_of(one) != key_of(record)]
    files.write_atomic(path, json.dumps(record | {'earlier': others}, indent=2) + '\n')


def earlier(path: Path) -> list[dict[str, Any]]:
    """Return the evaluations in a file, newest first; ValueError if it holds anything else."""
    if not path.exists():
        return []
    newest = files.read_json(path)
    rest = newest.pop('earlier', []) if isinstance(newest, dict) else None
    if not isinstance(rest, list) or not all(isinstance(one, dict) for one in rest):
        raise ValueError(f'{path} is not an evaluation file: move it away')
    return [newest, *rest]


def key_of(record: dict[str, Any]) -> tuple:
    """Return the key of an evaluation; None for entries that older versions did not write.

    For a model without a run, the hash belongs to the evaluation's own config.
    """
    origin = record.get('checkpoint', {})
    return record.get('settings'), *map(origin.get, ('workdir', 'step', 'config_hash'))


def describe(
    metrics: dict[str, float], split: str, passed: Mapping[int, tuple[float, tuple[float, float]]]
) -> str:
    """Format the metrics, one per line. passed: pass@k and its interval by k."""
    lines = [f'{split} success {report.interval(metrics)}']
    for k, (mean, ends) in passed.items() if len(passed) > 1 else ():
        if k == len(passed) or k & (k - 1) == 0:  # powers of two
            low, high = (100 * end for end in ends)
            lines.append(f'pass@{k:<6}{100 * mean:.1f} % [{low:.1f}, {high:.1f}]')
    valid = 100 * metrics['eval/valid_format']
    valid = '' if math.isnan(valid) else f'valid format {valid:.1f} %, '  # hosts may not report it
    lines.append(f'{valid}return {metrics["eval/return"]:.3f}')
    if 'eval/observation_nll' in metrics:
        lines.append(f'observations {metrics["eval/observation_nll"]:.3f} nats/token')
    if faults := 100 * metrics['eval/env_error']:
        lines.append(f'{faults:.1f} % of episodes were lost to environment faults, not counted')
    return '\n'.join([*lines, report.players(metrics, 'reference/')])


ADVICE = 'evaluate it with its own config, or with --transfer if only the environment differs'
# Fields that an evaluation may change; the model and the environment's rules must be the run's.
MAY_DIFFER = (
    *'seed steps algorithm eval env.eval_levels env.train_levels env.pool_seed rollout'.split(),
    *'filter loss reward turn_credit evol opd optim batch mesh clone checkpoint alarm log'.split(),
    *('curriculum', *HOST_CONNECTION_FIELDS, *saved_config.MAY_DIFFER),
)


def main() -> None:
    args = flags.FLAGS
    with command.running(args.out or args.workdir or None):
        workdir, step = chosen(args)
        out, more = args.out or args.workdir, (args.trajectories, args.replay, args.transfer)
        evaluate(args.config, workdir, out, step, *more)


if __name__ == '__main__':
    main()
