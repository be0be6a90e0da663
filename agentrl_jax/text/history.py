"""The last turns in words within one message, for policies without earlier messages.

This is RAGEN's single_turn mode: "Summary: n turns completed so far ...", then the state, actions
and reward of each of the last m turns. All of these are lines of the line table, so a history is a
list of row numbers, int32 [m, P], with the oldest turn first; -1 = nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

NOTHING = 'none'


def families(
    names: tuple[str, ...], rewards: list[str], *, turns: int, max_turns: int
) -> dict[str, list[str]]:
    """Return the line families of a history of `turns` turns; rewards []: omitted."""
    if not turns:
        return {}
    return {
        'past_summary': [
            f'Summary: {n} turns completed so far. Showing the last {min(n, turns)}.\n'
            for n in range(max_turns)
        ],
        'past_turn': [f'Turn {k + 1}:\n' for k in range(max_turns)],
        'past_action': [f'Action: {name}\n' for name in (*names, NOTHING)],
        'past_reward': [f'Reward: {reward}\n' for reward in rewards],
    }


def empty(turns: int, observation_rows: int, max_actions: int) -> jax.Array | None:
    """Return the history at the start of an episode; None without turns.

    It is None instead of an empty array because jaxlib 0.11.2 crashes on empty shard_map inputs.
    """
    if not turns:
        return None
    return jnp.full((turns, 2 + observation_rows + max_actions), -1, jnp.int32)


def extended(
    past: jax.Array,
    at: Any,
    names: int,
    *,
    turn: jax.Array,
    observation: jax.Array,
    parts: jax.Array,
    known: jax.Array,
    reward: jax.Array | int,
) -> jax.Array:
    """Append a turn to the history and drop the oldest one.

    observation int32 [R]: rows of the turn's observation; parts int32 [A]: names in the answer,
    known bool [A]: whether they were legal actions; reward: row of the reward line, -1 = none.
    """
    actions = jnp.where(known, at.past_action + parts, -1)
    actions = actions.at[0].set(jnp.where(jnp.any(known), actions[0], at.past_action + names))
    ends = jnp.asarray([at.past_turn + turn]), jnp.asarray([reward])
    row = jnp.concatenate([ends[0], observation, actions, ends[1]]).astype(jnp.int32)
    return jnp.concatenate([past[1:], row[None]])


def past_rows(past: jax.Array, at: Any, turn: jax.Array) -> jax.Array:
    """Return the rows of the history in the prompt of `turn`; the first turn has no summary."""
    summary = jnp.where(turn == 0, -1, at.past_summary + turn)
    return jnp.concatenate([jnp.asarray([summary], jnp.int32), past.reshape(-1)])
