"""Which parameters play, which are trained, and which stay as they are.

With LoRA the weights a run starts from are the frozen base of policy, critic and reference alike.
They come from model.path again when a run resumes, and must be what they were; weights that were
drawn or cloned are kept:
  <workdir>/base       the model under adapters, unless it is model.path's own
  <workdir>/reference  what was trained, as it was at step 0 (KL terms, AgentEvol's restarts)
  <workdir>/best       what was trained, as it was at the best validation (checkpoint.best)
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.machine import checkpoint, checksums, files, frozen, sharding
from agentrl_jax.models import Model, critic, lora
from agentrl_jax.models.functions import policy_of
from agentrl_jax.run.config import Config
from agentrl_jax.run.migration import read_saved
from agentrl_jax.run.streams import ADAPTERS, Streams
from agentrl_jax.types import Params, TrainState

CLONED = 2  # number of the adapters that cloning trains
BASE_FOLDER, REFERENCE_FOLDER, BEST_FOLDER = 'base', 'reference', 'best'  # below the workdir
# Fields of Model that say how it computes, and those that show in the shapes of its parameters
HOW = ('dtype', 'lora_scale', 'remat', 'scan_layers', 'transposed', 'fused')
SHOWN = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_layers')
DIGITS = 6  # of numbers that are compared: a .gguf has those of a config.json in float32
_known: list[Any] = []  # a weak reference to the first of some parameters, and their base_digest


def player_of(state: TrainState, base: Params) -> Params:
    """The parameters that play episodes: the policy, or the explorer of AgentEvol."""
    return policy_of(state.params if state.explorer is None else state.explorer, base)


def trained_part(params: Params, cfg: Config, index: int) -> Params:
    """What is trained of a model: all of it, or adapters (0: policy, 1: critic, CLONED)."""
    if not cfg.lora.rank:
        return dict(params)
    key = Streams(cfg.seed).key(ADAPTERS, index)
    targets = lora.target_names(cfg.lora.targets)
    return {'lora': lora.init(key, params['model'], rank=cfg.lora.rank, targets=targets)}


def trained_policy(params: Params, cfg: Config, config: Model) -> Params:
    """TrainState.params of step 0: the policy's part, with the head of a critic that shares it."""
    trained = trained_part(params, cfg, 0)
    if cfg.shares_backbone:
        trained['value_head'] = critic.init_head(config)
    return trained


def holds_run(path: Path) -> bool:
    """Whether a path is the workdir of a run, or its folder of the best policy."""
    return (path / checkpoint.FOLDER).is_dir() or bool(checkpoint.steps(path))


def base_is_given(cfg: Config) -> bool:
    """Does the base come from model.path, as it is? Then nothing is kept of it.

    A run is no such place: it may go on, and then holds other weights.
    """
    path = cfg.model.path
    return bool(path) and not cfg.clone.demonstrates and not holds_run(files.local_path(path))


def keep_base(cfg: Config, workdir: Path, params: Params) -> None:
    """Keeps the parameters under the adapters, unless there are none or model.path has them."""
    if cfg.lora.rank and not base_is_given(cfg):
        frozen.keep(workdir / BASE_FOLDER, params)


def open_base(cfg: Config, workdir: Path | str, params: Params, extra: Mapping[str, Any]) -> Params:
    """The frozen parameters of a run; {} without LoRA, ValueError where model.path has others.

    params: those of cfg.model.path, or of the same shapes and layout; extra: what lies beside the
    checkpoint (of older versions without a digest). All processes must call.
    """
    if not cfg.lora.rank:
        return {}
    if (Path(workdir) / BASE_FOLDER).is_dir() or not base_is_given(read_saved(extra)):
        return frozen.load(Path(workdir) / BASE_FOLDER, sharding.abstract_of(params))
    if 'base' in extra and extra['base'] != base_digest(params):
        raise ValueError(
            f'model.path={cfg.model.path!r} holds other parameters than '
            f'model.path={_path_in(extra)!r} did when this run began, and its adapters fit those '
            'alone: give the model that it began with'
        )
    return params


def base_digest(params: Params) -> str:
    """Digest of the parameters under adapters, whatever the mesh; all processes must call.

    Those of a run, which no step changes, are read once.
    """
    first = jax.tree.leaves(params)[0]
    if not _known or _known[0]() is not first:
        _known[:] = weakref.ref(first), checksums.digest(params)
    return _known[1]


def start_of(cfg: Config, config: Model, params: Params) -> dict[str, Any]:
    """What a checkpoint holds of the model that a run began with: what shows in no tensor of its
    state, and a digest of the parameters that are not kept."""
    start = {'sizes': sizes_of(config)}
    if cfg.lora.rank and base_is_given(cfg):
        start['base'] = base_digest(params)
    return start


def sizes_of(config: Model) -> dict[str, Any]:
    """What a model computes with and no shape shows: heads, positions, norms; as JSON."""

    def rounded(x):
        if isinstance(x, tuple):
            return [rounded(part) for part in x]
        return float(f'{x:.{DIGITS}g}') if isinstance(x, float) else x

    sizes = {name: rounded(x) for name, x in vars(config).items() if name not in HOW + SHOWN}
    return {'model_type': config.to_hf()['model_type']} | sizes


def check_sizes(cfg: Config, config: Model, extra: Mapping[str, Any]) -> None:
    """ValueError for a model of cfg with other sizes than the one that a run began with.

    extra: what lies beside its checkpoint, of older versions without them.
    """
    before, now = extra.get('sizes', {}), sizes_of(config)
    other = [name for name in before if name in now and before[name] != now[name]]
    if other:
        said = '; '.join(f'{name} is {now[name]} and was {before[name]}' for name in other)
        raise ValueError(
            f'model.path={cfg.model.path!r} is another model than model.path={_path_in(extra)!r} '
            f'was when this run began ({said}): give the model that it began with'
        )


def _path_in(extra: Mapping[str, Any]) -> str:
    """model.path beside a checkpoint."""
    return read_saved(extra).model.path


def open_start(workdir: Path, abstract: Params) -> Params:
    """The policy of step 0, as it is kept beside the checkpoints."""
    return frozen.load(workdir / REFERENCE_FOLDER, sharding.abstract_of(abstract))


def best_of(workdir: str | Path) -> str:
    """The folder of the best policy of a run."""
    return str(files.local_path(workdir) / BEST_FOLDER)


def keep_best(workdir: Path, params: Params, saved: dict[str, Any]) -> None:
    """Keeps what is trained if `saved`, said beside it, has a better eval/success than is kept.

    A validation that lost all of its episodes (nan) is no best one. What was kept of this step or
    of later ones goes, for it is played again after a kill. What was the best before that is not
    there any more.
    """
    new, folder = saved['eval/success'], workdir / BEST_FOLDER
    if math.isnan(new):
        return
    kept = checkpoint.open_checkpoints(folder, keep=1)
    checkpoint.remove_from(kept, saved['step'])
    step = checkpoint.latest_step(kept)
    best = -math.inf
    if step is not None:
        with contextlib.suppress(checkpoint.Damaged):  # then any is better
            best = checkpoint.read_extra(folder, step=step)['eval/success']
    if new > best:
        checkpoint.save(kept, saved['step'], {'params': params}, saved)
    checkpoint.close(kept)


def saved_policy(
    cfg: Config,
    config: Model,
    mesh: jax.sharding.Mesh,
    params: Params,
    workdir: str,
    *,
    step: int | None = None,
) -> Params:
    """The policy of a checkpoint, adapters and base; config, params: of cfg, as in open_base.

    ValueError where they are of another model than the run began with.
    """
    extra = checkpoint.read_extra(workdir, step=step)
    check_sizes(cfg, config, extra)
    abstract = jax.eval_shape(functools.partial(trained_policy, cfg=cfg, config=config), params)
    layout = sharding.specs(abstract, sharding.TRAIN_RULES, mesh)
    abstract = sharding.with_layout(abstract, layout)
    trained = checkpoint.load_params_only(workdir, abstract, step=step)
    of_run = files.local_path(workdir)
    of_run = of_run.parent if of_run.name == BEST_FOLDER else of_run
    return policy_of(trained, open_base(cfg, of_run, params, extra))
