"""Tiny random models, and HuggingFace folders of them."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from agentrl_jax import export
from agentrl_jax.machine import sharding
from agentrl_jax.models import lora, weights
from agentrl_jax.models.fields import stored_shapes
from agentrl_jax.models.olmo2 import Olmo2
from agentrl_jax.models.qwen2 import Qwen2

TINY = Qwen2(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)

UNTIED = dataclasses.replace(TINY, tie_embeddings=False)
LLAMA = dataclasses.replace(UNTIED, qkv_bias=False)
QWEN3 = dataclasses.replace(TINY, qkv_bias=False, qk_norm=True, head_dim=32)
OLMO2 = Olmo2(**{field.name: getattr(TINY, field.name) for field in dataclasses.fields(Olmo2)})
FAMILIES = {'qwen2': TINY, 'llama': LLAMA, 'qwen3': QWEN3, 'olmo2': OLMO2}  # one of each model_type
forward = jax.jit(lambda params, config, *rows: config.forward(params, *rows), static_argnums=1)


def random_params(config, seed=0):
    """Return weights large enough that every part of the model affects the logits; norms vary."""
    shapes = config.abstract_params()
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    rng = np.random.default_rng(seed)
    out = []
    for path, leaf in leaves:
        value = rng.normal(0, 0.14, leaf.shape)
        if sharding.path_name(path).endswith('scale'):
            value = 1 + value
        out.append(jnp.asarray(value, jnp.float32))
    return jax.tree.unflatten(tree, out)


def with_adapters(config, rank=3):
    """Return a random model with non-zero adapters."""
    params, rng = random_params(config), np.random.default_rng(2)
    init = functools.partial(lora.init, jax.random.key(0), rank=rank, targets=lora.TARGETS)
    shapes = jax.eval_shape(init, params['model'])
    adapters = jax.tree.map(lambda x: jnp.float32(rng.normal(0, 0.1, x.shape)), shapes)
    return {**params, 'lora': adapters}


def rows(config, batch=3, length=12, seed=1):
    tokens = np.random.default_rng(seed).integers(config.vocab_size, size=(batch, length))
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32)


def padded(lengths, width, left):
    """Return (attention mask bool [B, T], positions int32 [B, T]) of rows padded left or right."""
    column = np.arange(width)[None]
    lengths = np.asarray(lengths)[:, None]
    mask = column >= width - lengths if left else column < lengths
    return jnp.asarray(mask), jnp.asarray(np.maximum(np.cumsum(mask, 1) - 1, 0), jnp.int32)


def hf_tensors(config, dtype=np.float32, seed=0):
    """Return random tensors of a model with HuggingFace's names."""
    rng, shapes = np.random.default_rng(seed), stored_shapes(config.abstract_params())
    return {name: rng.normal(0, 0.14, shape).astype(dtype) for name, shape in shapes.items()}


def write_folder(folder, config, tensors, files=1, **changes):
    """Write an HF folder with the tensors split over `files` safetensors."""
    folder.mkdir()
    hf = export.config_to_hf(config, dtype='float32') | changes
    (folder / 'config.json').write_text(json.dumps(hf))
    if files == 1:
        save_file(tensors, folder / 'model.safetensors')
        return folder
    weight_map = {}
    for i in range(files):
        part = dict(list(tensors.items())[i::files])
        save_file(part, folder / f'part{i}.safetensors')
        weight_map |= dict.fromkeys(part, f'part{i}.safetensors')
    (folder / weights.INDEX).write_text(json.dumps({'weight_map': weight_map}))
    return folder


def by_hf_name(params):
    """Return parameters as numpy arrays in the files' layout."""
    out = {}
    for where, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = sharding.path_name(where)
        out[weights.hf_name(path)] = (
            np.asarray(leaf).T if weights.is_transposed(path) else np.asarray(leaf)
        )
    return out
