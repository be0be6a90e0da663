"""The model and the tokenizer of a run: random weights, a checkpoint, or the policy of a run."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from agentrl_jax.machine import checkpoint, files, sharding
from agentrl_jax.models import DRAWN, Model, adapters, lora, weights
from agentrl_jax.run import hooks, parts, usage
from agentrl_jax.run.config import Config
from agentrl_jax.run.migration import read_saved
from agentrl_jax.run.params import holds_run, saved_policy
from agentrl_jax.tokens.load import check_fits, load_tokenizer
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params

TOKENIZERS = Path(__file__).parents[1] / 'tokens'
BUNDLED_TOKENIZER = TOKENIZERS / 'demo.model'
PRETRAINED_LR = 1e-4  # pretrained weights are trained with lower learning rates
PRETRAINED_SIZE = 10**8  # parameters; larger models start from pretrained weights


def tokenizer_source(cfg: Config) -> Path:
    """Return the tokenizer's path: model.tokenizer, the model's folder, or this package's file.

    If model.path is a run, it is that run's tokenizer.
    """
    if cfg.model.path and not cfg.model.tokenizer:
        return tokenizer_of(files.local_path(cfg.model.path))
    return files.local_path(cfg.model.tokenizer or bundled_tokenizer(*cfg.env.worlds))


def tokenizer_of(path: Path) -> Path:
    """Return the tokenizer's path of a checkpoint: in it, in its base, or in its run's model."""
    if holds_run(path):
        return tokenizer_source(config_of_run(path))
    has_tokenizer = any((path / name).exists() for name in ('tokenizer.json', 'tokenizer.model'))
    return adapters.base_of(path) if adapters.is_adapter(path) and not has_tokenizer else path


def checkpoint_source(cfg: Config) -> Path | None:
    """Return the original checkpoint of a policy, following runs; None for random weights."""
    path = files.local_path(cfg.model.path) if cfg.model.path else None
    if path is not None and holds_run(path):
        return checkpoint_source(config_of_run(path))
    return path


def bundled_tokenizer(*worlds: str) -> Path:
    """Return the small tokenizer of the environments' vocabulary, or the demo's."""
    candidates = [TOKENIZERS / f'{world}.model' for world in worlds]
    paths = {path if path.exists() else BUNDLED_TOKENIZER for path in candidates}
    if len(paths) > 1:
        raise ValueError(
            f'env.mix: {", ".join(worlds)} have different small tokenizers '
            f'({", ".join(sorted(path.name for path in paths))}): set model.tokenizer to one that '
            'has the words of all of them'
        )
    return paths.pop()


def build_tokenizer(cfg: Config) -> Any:
    return load_tokenizer(tokenizer_source(cfg))


def compute_fields(cfg: Config) -> dict[str, Any]:
    """Return the fields of Model that configure how it computes, independent of its sizes."""
    names = ('dtype', 'remat', 'scan_layers')
    return {name: getattr(cfg.model, name) for name in names} | {'lora_scale': cfg.lora.scale}


def random_model_config(cfg: Config, tokenizer: Tokenizer) -> Model:
    """Return the Model of randomly initialised weights."""
    sizes = {name: getattr(cfg.model, name) for name in usage.SIZES}
    return DRAWN(
        vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        head_dim=cfg.model.hidden_size // cfg.model.num_heads,
        **sizes,
        **compute_fields(cfg),
    )


def build_model(cfg: Config, tokenizer: Tokenizer, mesh: Any) -> tuple[Model, Any]:
    """Load or randomly initialise a model: (sizes, float32 parameters laid out for training)."""
    if cfg.model.path:
        config, params = load_policy(files.local_path(cfg.model.path), mesh=mesh)
        check_fits(tokenizer, config.vocab_size)
        return dataclasses.replace(config, **compute_fields(cfg)), params
    config = random_model_config(cfg, tokenizer)
    key = jax.random.fold_in(jax.random.key(cfg.seed), 1)
    return config, sharding.init_sharded(config.init, key, sharding.TRAIN_RULES, mesh)


def warn_of_random_start(cfg: Config, model: Model) -> None:
    """Warn about each setting that only makes sense with pretrained weights."""
    if cfg.model.path or cfg.clone.demonstrates or jax.process_index():
        return
    advice = 'set model.path or clone demonstrations (clone.episodes)'
    if cfg.optim.lr < PRETRAINED_LR or model.param_count() > PRETRAINED_SIZE:
        usage.warn(
            f'model.path is empty: {model.param_count() / 1e6:.3g} M random weights are trained '
            f'with settings for pretrained weights (optim.lr={cfg.optim.lr:g}); {advice}'
        )
    if cfg.algorithm.kl.coef:
        usage.warn(
            f'loss.kl_coef={cfg.algorithm.kl.coef:g} keeps the policy close to random weights: set '
            f'loss.kl_coef=0, or {advice}'
        )


def load_policy(path: Path, *, mesh: Any) -> tuple[Model, Params]:
    """Load a checkpoint or a run's policy: (sizes, float32 parameters laid out for training)."""
    load = load_run if holds_run(path) else weights.load_model
    return load(path, mesh=mesh)


def config_of_run(path: Path) -> Config:
    """Return the config of the newest checkpoint in a workdir, or in its folder `best`."""
    return read_saved(checkpoint.read_extra(path))


def load_run(path: Path, *, mesh: Any, step: int | None = None) -> tuple[Model, Any]:
    """Load (sizes, float32 parameters) of a run's policy, with adapters merged.

    step: the checkpoint; None = the newest.
    """
    cfg = config_of_run(path)
    tokenizer = build_tokenizer(cfg)
    if cfg.model.path:
        config, start = build_model(cfg, tokenizer, mesh)
    else:
        config = random_model_config(cfg, tokenizer)
        start = config.abstract_params()
        start = sharding.with_layout(start, sharding.specs(start, sharding.TRAIN_RULES, mesh))
    policy = saved_policy(cfg, config, mesh, start, path, step=step)
    merged = jax.jit(functools.partial(lora.merge, scale=cfg.lora.scale))(policy)
    return config, merged if cfg.lora.rank else policy


def build_setup(cfg: Config, model: Model, tokenizer: Tokenizer, mesh: Mesh) -> hooks.Setup:
    """Return what extensions need to load their additions."""

    def load(path):
        config, params = load_policy(path, mesh=mesh)
        return dataclasses.replace(config, **compute_fields(cfg)), params

    return hooks.Setup(
        config=cfg,
        model=model,
        tokenizer=tokenizer,
        mesh=mesh,
        load_policy=load,
        load_tokenizer=lambda path: load_tokenizer(tokenizer_of(path)),
        functions=functools.partial(parts.build_functions, cfg, mesh=mesh, critic=False),
    )
