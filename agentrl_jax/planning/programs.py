"""Build and compile the programs of a run from shapes alone, without allocating arrays."""

import dataclasses
import functools
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax import types
from agentrl_jax.machine import files, sharding
from agentrl_jax.models import sizes, weights
from agentrl_jax.run import config as settings
from agentrl_jax.run import hooks, loading, parts
from agentrl_jax.run.build import build_learn, build_update_settings
from agentrl_jax.run.config import Config
from agentrl_jax.run.params import holds_run, policy_of
from agentrl_jax.run.state import make_state
from agentrl_jax.run.streams import every_level

OUT_OF_MEMORY = (  # error messages of libtpu 0.0.42
    re.compile(r'Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm'),
    re.compile(r'total memory required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds [^.]*'),
)
SIZES = {  # bytes per device of a compiled program -> their names in XLA
    'arguments': 'argument_size_in_bytes',
    'outputs': 'output_size_in_bytes',
    'shared': 'alias_size_in_bytes',  # outputs that reuse the memory of arguments
    'temporaries': 'temp_size_in_bytes',
    'code': 'generated_code_size_in_bytes',
}
UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Shapes and layouts of a run's state, and its two programs with their arguments."""

    cfg: Config
    config: Any  # sizes of the model
    mesh: jax.sharding.Mesh
    state: Any  # TrainState
    frozen: Any  # types.FrozenParams
    collect: tuple  # (jitted, arguments)
    learn: tuple


def sizes_of(cfg: Config, model: str = '') -> Any:
    """Return the sizes of a named model or of the config's; only file headers are read."""
    if model:
        config = sizes.named(model)
    elif cfg.model.path:
        config = sizes_at(cfg.model.path)
    else:
        config = loading.random_model_config(cfg, loading.build_tokenizer(cfg))
    return dataclasses.replace(config, **loading.compute_fields(cfg))


def sizes_at(name: str) -> Any:
    """Return the sizes of a checkpoint or of a run's policy."""
    path = files.local_path(name)
    if holds_run(path):
        return sizes_of(loading.config_of_run(path))
    return weights.open_source(path).config()


def shapes(given: Any, devices: Any, model: str = '', layers: int = 0) -> Shapes:
    """Build the collect and learn programs of a ConfigDict and their arguments for the devices."""
    cfg = settings.read(given, None)
    if cfg.on_hosts:
        raise ValueError(
            f'env.name={cfg.env.name!r} runs on hosts, but plan supports only on-device '
            'environments. Plan one of these with the same rollout.max_tokens'
        )
    mesh = parts.build_mesh(cfg, devices)
    cfg = settings.check(cfg, sharding.row_shards(mesh))
    replicated, rows = NamedSharding(mesh, P()), sharding.shard_rows(mesh)
    tokenizer = loading.build_tokenizer(cfg)
    config = sizes_of(cfg, model)
    config = dataclasses.replace(config, num_layers=layers or config.num_layers)
    on_host = parts.build_text_task(cfg, tokenizer, 'train', None)  # programs include its grammar
    task = sharding.with_layout(on_host, replicated)
    optimizers = parts.build_optimisers(cfg)
    shaped = loading.build_setup(cfg, config, tokenizer, mesh)
    shaped = dataclasses.replace(shaped, load_policy=functools.partial(shapes_at, cfg, mesh))
    additions = tuple(extension.load(shaped, learns=True) for extension in cfg.extensions)
    state, frozen = state_of(cfg, config, mesh, optimizers)
    place = functools.partial(sharding.with_layout, layout=replicated)
    frozen = frozen.replace(extra=hooks.frozen_of(additions, on_host, place))
    policy = policy_of(state.actor, frozen.model)
    key = sharding.with_layout(jax.eval_shape(jax.random.key, 0), replicated)
    episodes = cfg.rollout.num_groups * cfg.rollout.group_size
    drawn = jax.tree.map(np.asarray, every_level(episodes, 1, 1))
    for extension in cfg.extensions:
        draw = functools.partial(extension.draw, cfg=cfg)
        drawn = jax.eval_shape(draw, drawn)
    collect = parts.build_collect(cfg, config, mesh, training=True)
    collect_args = (policy, task, sharding.with_layout(drawn, rows), key)
    rollout, _ = jax.eval_shape(collect, *collect_args)
    fns = parts.build_functions(cfg, config, mesh)
    extras = hooks.extras_of(additions, on_host)
    learn = build_learn(config, fns, build_update_settings(cfg, mesh, on_host, extras))
    rollout = sharding.with_layout(rollout, rows)
    shuffle = key if cfg.batch.shuffle else None
    joining = demonstrations(rollout, cfg.base_rows, rows)
    return Shapes(
        cfg=cfg,
        config=config,
        mesh=mesh,
        state=state,
        frozen=frozen,
        collect=(collect, collect_args),
        learn=(learn, (state, frozen, rollout, shuffle, joining)),
    )


def state_of(
    cfg: Config, config: Any, mesh: jax.sharding.Mesh, optimizers: tuple
) -> tuple[Any, Any]:
    """Return the shapes of (TrainState, FrozenParams), as state.restore_or_init creates them."""
    params = parameter_shapes(config, mesh)
    make = functools.partial(make_state, cfg=cfg, config=config, optimizers=optimizers)
    state = jax.eval_shape(make, params)
    state = sharding.with_layout(state, sharding.specs(state, sharding.TRAIN_RULES, mesh))
    reference = policy_of(state.params, {}) if cfg.algorithm.uses_reference else None
    return state, types.FrozenParams(params if cfg.lora.rank else {}, reference)


def parameter_shapes(config: Any, mesh: jax.sharding.Mesh) -> Any:
    """Return the shapes and training layouts of a model's parameters."""
    shapes = config.abstract_params()
    return sharding.with_layout(shapes, sharding.specs(shapes, sharding.TRAIN_RULES, mesh))


def shapes_at(cfg: Config, mesh: jax.sharding.Mesh, path: Any) -> tuple[Any, Any]:
    """Return (sizes, parameter shapes) of another checkpoint or of a run's policy."""
    config = dataclasses.replace(sizes_at(str(path)), **loading.compute_fields(cfg))
    return config, parameter_shapes(config, mesh)


def demonstrations(rollout: Any, count: int, layout: NamedSharding) -> Any:
    """Return the shapes of demonstrations added to a batch (AgentEvol); None if count is 0."""
    if not count:
        return None
    tokens, mask = (
        jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=layout)
        for x in (rollout.tokens, rollout.action_mask)
    )
    return types.Demonstrations(tokens=tokens, attention_mask=mask, mask=mask)


def compile_program(name: str, shapes: Shapes) -> dict[str, Any]:
    """Compile 'collect' or 'learn' and return its memory on one device in bytes.

    Keys: SIZES, 'beside' (see there), 'compile_seconds' (tracing and compiling) and 'refused', the
    compiler's out-of-memory error; 'temporaries' is then the full need. '' = it compiled.
    """
    function, arguments = getattr(shapes, name)
    started, refused = time.monotonic(), ''
    try:
        memory = function.trace(*arguments).lower().compile().memory_analysis()
        sizes = {size: getattr(memory, attribute) for size, attribute in SIZES.items()}
    except jax.errors.JaxRuntimeError as error:
        needed, refused = out_of_memory(name, str(error))
        sizes = dict.fromkeys(SIZES, 0) | {'temporaries': needed}
    seconds = time.monotonic() - started
    known = {'name': name, 'refused': refused, 'compile_seconds': seconds}
    return known | sizes | {'beside': beside(name, shapes)}


def bytes_in_use(program: Mapping[str, Any]) -> int:
    """Return the bytes in use on a device while a compiled program runs."""
    new = program['outputs'] - program['shared'] + program['temporaries'] + program['code']
    return program['beside'] + program['arguments'] + new


def beside(name: str, shapes: Shapes) -> int:
    """Return the bytes per device of the state that is in memory but not an argument."""
    if name == 'learn':
        return 0
    policy = shapes.collect[1][0]
    return device_bytes((shapes.state, shapes.frozen)) - device_bytes(policy)


def out_of_memory(name: str, message: str) -> tuple[int, str]:
    """Return (bytes needed, error) of a program that needs more memory than the device has."""
    used = next((m for m in (p.search(message) for p in OUT_OF_MEMORY) if m), None)
    if used is None:
        raise ValueError(f'{name} does not compile: {message[:2000]}')
    return int(float(used[1]) * UNITS[used[2]]), used[0]


def device_bytes(tree: Any) -> int:
    """Return the bytes per device of a tree of shapes with layouts."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
