"""What a rollout takes of a task's words, whether its worlds are on the device or on hosts."""

import jax
from flax import struct


@struct.dataclass
class Wording:
    """Tokens that all episodes share."""

    prefix: jax.Array  # int32 [P]  in front of every first observation
    eos_ids: jax.Array  # int32 [n]  each ends a turn
    pad_id: int = struct.field(pytree_node=False)
