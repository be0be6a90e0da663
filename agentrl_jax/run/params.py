"""Trainable and frozen parameters.

With LoRA, the initial weights are the frozen base of policy, critic and reference. A resumed run
loads them from model.path again and checks that they have not changed. Weights that were randomly
initialised or cloned are saved:
  <workdir>/base       the model under the adapters, unless it comes from model.path
  <workdir>/reference  trainable parameters at step 0 (KL terms, AgentEvol's restarts)
  <workdir>/best       trainable parameters at the best validation (checkpoint.best)
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.machine import checkpoint, checksums, files, sharding
from agentrl_jax.models import Model, critic, lora
from agentrl_jax.models.functions import policy_of
from agentrl_jax.run.config import Config
from agentrl_jax.run.migration import read_saved
from agentrl_jax.run.streams import ADAPTERS, Streams
from agentrl_jax.types import Params

CLONED = 2  # number of the adapters that cloning trains
BASE_FOLDER, REFERENCE_FOLDER, BEST_FOLDER = 'base', 'reference', 'best'  # below the workdir
# Fields of Model that configure its computation, and fields that determine parameter shapes
HOW = ('dtype', 'lora_scale', 'remat', 'scan_layers', 'transposed', 'fused')
SHOWN = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_layers')
DIGITS = 6  # compared digits: a .gguf stores the numbers of a config.json in float32
_known: list[Any] = []  # cached base_digest: a weak reference to the first parameter, the digest


def trainable_params(params: Params, cfg: Config, index: int) -> Params:
    """Return a model's trainable part: all of it, or adapters (0: policy, 1: critic, CLONED)."""
    if not cfg.lora.rank:
        return dict(params)
    key = Streams(cfg.seed).key(ADAPTERS, index)
    targets = lora.target_names(cfg.lora.targets)
    return {'lora': lora.init(key, params['model'], rank=cfg.lora.rank, targets=targets)}


def initial_trainable_params(params: Params, cfg: Config, config: Model) -> Params:
    """Return TrainState.params at step 0: policy parameters, plus a value head if one is shared."""
    trained = trainable_params(params, cfg, 0)
    if cfg.shares_backbone:
        trained['value_head'] = critic.init_head(config)
    return trained


def holds_run(path: Path) -> bool:
    """Return whether a path is a run's workdir, or its folder of the best policy."""
    return (path / checkpoint.FOLDER).is_dir() or bool(checkpoint.steps(path))


def base_is_in_model_path(cfg: Config) -> bool:
    """Return whether the base comes unchanged from model.path, so that it need not be saved.

    False for a run's workdir: its weights may still change.
    """
    path = cfg.model.path
    return bool(path) and not cfg.clone.demonstrates and not holds_run(files.local_path(path))


def save_base(cfg: Config, workdir: Path, params: Params) -> None:
    """Save the parameters under the adapters, unless model.path holds them."""
    if cfg.lora.rank and not base_is_in_model_path(cfg):
        checkpoint.save_params(workdir / BASE_FOLDER, params)


def load_base(cfg: Config, workdir: Path | str, params: Params, extra: Mapping[str, Any]) -> Params:
    """Return the frozen parameters of a run; {} without LoRA.

    ValueError if model.path holds different parameters. params: from cfg.model.path, or with the
    same shapes and layout. extra: the checkpoint's metadata, which older versions saved without a
    digest. All processes must call this.
    """
    if not cfg.lora.rank:
        return {}
    if (Path(workdir) / BASE_FOLDER).is_dir() or not base_is_in_model_path(read_saved(extra)):
        folder = Path(workdir) / BASE_FOLDER
        return checkpoint.load_params_only(folder, sharding.abstract_of(params))
    if 'base' in extra and extra['base'] != base_digest(params):
        raise ValueError(
            f'model.path={cfg.model.path!r} holds different parameters than '
            f'model.path={_path_in(extra)!r} did when this run started. Its adapters only fit the '
            'original ones: set model.path to the original model'
        )
    return params


def base_digest(params: Params) -> str:
    """Return a digest of the parameters under adapters, the same on any mesh.

    No step changes them, so the digest is cached. All processes must call this.
    """
    first = jax.tree.leaves(params)[0]
    if not _known or _known[0]() is not first:
        _known[:] = weakref.ref(first), checksums.digest(params)
    return _known[1]


def start_of(cfg: Config, config: Model, params: Params) -> dict[str, Any]:
    """Return a checkpoint's metadata about the initial model: sizes that no tensor of the state
    shows, and a digest of the parameters that are not saved."""
    start = {'sizes': sizes_of(config)}
    if cfg.lora.rank and base_is_in_model_path(cfg):
        start['base'] = base_digest(params)
    return start


def sizes_of(config: Model) -> dict[str, Any]:
    """Return the sizes that parameter shapes do not show (heads, positions, norms), as JSON."""

    def rounded(x):
        if isinstance(x, tuple):
            return [rounded(part) for part in x]
        return float(f'{x:.{DIGITS}g}') if isinstance(x, float) else x

    sizes = {name: rounded(x) for name, x in vars(config).items() if name not in HOW + SHOWN}
    return {'model_type': config.to_hf()['model_type']} | sizes


def check_sizes(cfg: Config, config: Model, extra: Mapping[str, Any]) -> None:
    """Raise a ValueError if the sizes of cfg's model differ from the run's initial model.

    extra: the checkpoint's metadata, which older versions saved without sizes.
    """
    before, now = extra.get('sizes', {}), sizes_of(config)
    other = [name for name in before if name in now and before[name] != now[name]]
    if other:
        differences = '; '.join(f'{name} is {now[name]}, was {before[name]}' for name in other)
        raise ValueError(
            f'model.path={cfg.model.path!r} is not the model that model.path={_path_in(extra)!r} '
            f'was when this run started ({differences}): set model.path to the original model'
        )


def _path_in(extra: Mapping[str, Any]) -> str:
    """Return model.path of the run that wrote a checkpoint."""
    return read_saved(extra).model.path


def load_initial_policy(workdir: Path, abstract: Params) -> Params:
    """Load the policy of step 0, which is saved next to the checkpoints."""
    return checkpoint.load_params_only(workdir / REFERENCE_FOLDER, sharding.abstract_of(abstract))


def chosen(args: Any) -> tuple[str, int | None]:
    """Return the folder and the step (None: the newest) of the policy that the flags select."""
    if args.best:
        return str(files.local_path(args.workdir) / BEST_FOLDER), args.step
    if args.workdir and getattr(args, 'fallback', False):
        return args.workdir, checkpoint.fall_back(args.workdir, step=args.step)
    return args.workdir, args.step


def save_if_best(workdir: Path, params: Params, saved: dict[str, Any]) -> None:
    """Save the trainable parameters if eval/success in `saved` is better than the saved best.

    A validation that lost all its episodes (nan) never counts. A best policy saved at this step or
    later is removed first: after a kill, these steps run again. Earlier bests are not restored.
    """
    new, folder = saved['eval/success'], workdir / BEST_FOLDER
    if math.isnan(new):
        return
    checkpoints = checkpoint.open_checkpoints(folder, keep=1)
    checkpoint.remove_from(checkpoints, saved['step'])
    step = checkpoint.latest_step(checkpoints)
    best = -math.inf
    if step is not None:
        with contextlib.suppress(checkpoint.Damaged):  # then any policy is better
            best = checkpoint.read_extra(folder, step=step)['eval/success']
    if new > best:
        checkpoint.save(checkpoints, saved['step'], {'params': params}, saved)
    checkpoint.close(checkpoints)


def saved_policy(
    cfg: Config,
    config: Model,
    mesh: jax.sharding.Mesh,
    params: Params,
    workdir: str,
    *,
    step: int | None = None,
) -> Params:
    """Load the policy of a checkpoint, with adapters and base. config, params: as in load_base.

    ValueError if they do not belong to the run's initial model.
    """
    extra = checkpoint.read_extra(workdir, step=step)
    check_sizes(cfg, config, extra)
    abstract = jax.eval_shape(
        functools.partial(initial_trainable_params, cfg=cfg, config=config), params
    )
    layout = sharding.specs(abstract, sharding.TRAIN_RULES, mesh)
    abstract = sharding.with_layout(abstract, layout)
    trained = checkpoint.load_params_only(workdir, abstract, step=step)
    of_run = files.local_path(workdir)
    of_run = of_run.parent if of_run.name == BEST_FOLDER else of_run
    return policy_of(trained, load_base(cfg, of_run, params, extra))
