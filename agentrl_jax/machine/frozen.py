"""Parameters that are kept on disk once and read again: bases, references, clones."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.machine import checkpoint, sharding
from agentrl_jax.types import Params


def keep(folder: Path, params: Params) -> None:
    """Stores the parameters in the folder; one that holds others is refused."""
    kept = checkpoint.open_checkpoints(folder, keep=1)
    stored = checkpoint.save(kept, 0, {'params': params}, {})
    checkpoint.close(kept)
    if not stored and not jax.jit(equal)(load(folder, sharding.abstract_of(params)), params):
        raise ValueError(
            f'{folder} holds the parameters of another run, which ended before its first '
            'checkpoint; remove the folder'
        )


def load(folder: Path, abstract: Params) -> Params:
    """The parameters kept in the folder, laid out as the abstract ones."""
    return checkpoint.load_params_only(folder, abstract)


def equal(one: Any, other: Any) -> jax.Array:
    """bool []: are all arrays of two trees the same?"""
    same = jax.tree.map(lambda a, b: (a == b).all(), one, other)
    return jnp.stack(jax.tree.leaves(same)).all()
