"""The programs of a run, from shapes alone: nothing is allocated, whatever the model's size."""

import dataclasses
import functools
import re
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax import types
from agentrl_jax.machine import files, sharding
from agentrl_jax.models import sizes, weights
from agentrl_jax.rollout.episodes import every_level
from agentrl_jax.run import config as settings
from agentrl_jax.run import hooks, parts
from agentrl_jax.run.build import build_learn, build_learning, build_setup
from agentrl_jax.run.config import Config
from agentrl_jax.run.params import holds_run, player_of, policy_of
from agentrl_jax.run.state import make_state

OUT_OF_MEMORY = (  # of libtpu 0.0.42
    re.compile(r'Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm'),
    re.compile(r'total memory required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds [^.]*'),
)
UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A run as shapes with layouts."""

    cfg: Config
    config: Any  # sizes of the model
    mesh: jax.sharding.Mesh
    state: Any  # TrainState
    frozen: Any  # types.Frozen
    collect: tuple  # (jitted, arguments)
    learn: tuple


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Memory of a compiled program on one device, in bytes."""

    name: str
    beside: int  # state in memory that is not among the arguments
    arguments: int
    outputs: int
    shared: int  # outputs that take the place of arguments
    temporaries: int
    code: int
    compile_seconds: float  # spent tracing and compiling
    refused: str = ''  # why the compiler gave up; temporaries are then all that it wanted

    @property
    def total(self) -> int:
        """Bytes in use while the program runs."""
        new = self.outputs - self.shared + self.temporaries + self.code
        return self.beside + self.arguments + new


def sizes_of(cfg: Config, model: str = '') -> Any:
    """Sizes of a model: by name, or of the config's; of a file only its head is read."""
    if model:
        config = sizes.named(model)
    elif cfg.model.path:
        config = sizes_at(cfg.model.path)
    else:
        config = parts.random_model_config(cfg, parts.build_tokenizer(cfg))
    return dataclasses.replace(config, **parts.execution(cfg))


def sizes_at(name: str) -> Any:
    """Sizes of a checkpoint, or of the policy of a run."""
    path = files.local_path(name)
    if holds_run(path):
        return sizes_of(parts.config_of_run(path))
    return weights.open_source(path).config()


def shapes(given: Any, devices: Any, model: str = '', layers: int = 0) -> Shapes:
    """The collect and learn programs of a ConfigDict with their arguments, over the devices."""
    cfg = settings.read(given, None)
    if cfg.on_hosts:
        raise ValueError(
            f'env.name={cfg.env.name!r} is on hosts, and plan knows rollouts on the device '
            'alone: plan a world on the device with the same rollout.max_tokens'
        )
    mesh = parts.build_mesh(cfg, devices)
    cfg = settings.read(given, sharding.row_shards(mesh))
    whole, rows = NamedSharding(mesh, P()), sharding.shard_rows(mesh)
    tokenizer = parts.build_tokenizer(cfg)
    config = sizes_of(cfg, model)
    config = dataclasses.replace(config, num_layers=layers or config.num_layers)
    on_host = parts.build_text_task(cfg, tokenizer, 'train', None)  # a grammar is part of programs
    task = sharding.with_layout(on_host, whole)
    txs = parts.build_optimisers(cfg)
    shaped = build_setup(cfg, config, tokenizer, mesh)
    shaped = dataclasses.replace(shaped, load_policy=functools.partial(shapes_at, cfg, mesh))
    additions = tuple(extension.load(shaped, learns=True) for extension in cfg.extensions)
    state, frozen = state_of(cfg, config, mesh, txs)
    place = functools.partial(sharding.with_layout, layout=whole)
    frozen = frozen.replace(extra=hooks.frozen_of(additions, on_host, place))
    policy = player_of(state, frozen.model)
    key = sharding.with_layout(jax.eval_shape(jax.random.key, 0), whole)
    episodes = cfg.rollout.num_groups * cfg.rollout.group_size
    drawn = jax.tree.map(np.asarray, every_level(episodes, 1, 1))
    for extension in cfg.extensions:
        draw = functools.partial(extension.draw, cfg=cfg)
        drawn = jax.eval_shape(draw, jax.random.key(0), 0, drawn)
    collect = parts.build_collect(cfg, config, mesh, training=True)
    played = (policy, task, sharding.with_layout(drawn, rows), key)
    rollout, _ = jax.eval_shape(collect, *played)
    fns = parts.build_functions(cfg, config, mesh)
    extras = hooks.extras_of(additions, on_host)
    learn = build_learn(fns, build_learning(cfg, mesh, on_host, extras))
    rollout = sharding.with_layout(rollout, rows)
    shuffle = key if cfg.batch.shuffle else None
    scale = sharding.with_layout(jax.ShapeDtypeStruct((), np.float32), whole)
    joining = demonstrations(rollout, cfg.base_rows, rows)
    return Shapes(
        cfg=cfg,
        config=config,
        mesh=mesh,
        state=state,
        frozen=frozen,
        collect=(collect, played),
        learn=(learn, (state, frozen, rollout, shuffle, scale, joining)),
    )


def state_of(cfg: Config, config: Any, mesh: jax.sharding.Mesh, txs: tuple) -> tuple[Any, Any]:
    """(TrainState, Frozen) as state.open_state makes them."""
    params = parameter_shapes(config, mesh)
    make = functools.partial(make_state, cfg=cfg, config=config, txs=txs)
    state = jax.eval_shape(make, params)
    state = sharding.with_layout(state, sharding.specs(state, sharding.TRAIN_RULES, mesh))
    reference = policy_of(state.params, {}) if cfg.needs_reference else None
    return state, types.Frozen(params if cfg.lora.rank else {}, reference)


def parameter_shapes(config: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shapes and layouts of a model's parameters in training."""
    shapes = config.abstract_params()
    return sharding.with_layout(shapes, sharding.specs(shapes, sharding.TRAIN_RULES, mesh))


def shapes_at(cfg: Config, mesh: jax.sharding.Mesh, path: Any) -> tuple[Any, Any]:
    """(sizes, shapes of the parameters) of another checkpoint, or of the policy of a run."""
    config = dataclasses.replace(sizes_at(str(path)), **parts.execution(cfg))
    return config, parameter_shapes(config, mesh)


def demonstrations(rollout: Any, count: int, layout: NamedSharding) -> Any:
    """Demonstrations that join a batch (AgentEvol); None if there are none."""
    if not count:
        return None
    tokens, mask = (
        jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=layout)
        for x in (rollout.tokens, rollout.action_mask)
    )
    return types.Demonstrations(tokens=tokens, attention_mask=mask, mask=mask)


def compile_program(name: str, shapes: Shapes) -> Compiled:
    """Compile 'collect' or 'learn'; a program too large for the device is a result as well."""
    function, arguments = getattr(shapes, name)
    began = time.monotonic()
    known = {'name': name, 'beside': beside(name, shapes)}
    try:
        memory = function.trace(*arguments).lower().compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        return Compiled(
            **known, **refused(name, str(error)), compile_seconds=time.monotonic() - began
        )
    return Compiled(
        **known,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        shared=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        compile_seconds=time.monotonic() - began,
    )


def beside(name: str, shapes: Shapes) -> int:
    """Bytes a device of the state that lies in memory and is no argument of the program."""
    if name == 'learn':
        return 0
    policy = shapes.collect[1][0]
    return device_bytes((shapes.state, shapes.frozen)) - device_bytes(policy)


def refused(name: str, message: str) -> dict[str, Any]:
    """Fields of Compiled for a program that takes more memory than there is."""
    used = next((m for m in (p.search(message) for p in OUT_OF_MEMORY) if m), None)
    if used is None:
        raise ValueError(f'{name} does not compile: {message[:2000]}')
    sizes = dict.fromkeys(('arguments', 'outputs', 'shared', 'code'), 0)
    total = int(float(used[1]) * UNITS[used[2]])
    return sizes | {'temporaries': total, 'refused': used[0]}


def device_bytes(tree: Any) -> int:
    """Bytes that a tree of laid-out shapes takes on one device."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
