"""The instruction of a level as a state machine: BabyAI's verifier (minigrid 3.2.0).

A sentence has two halves of up to two clauses each: clauses 0 and 1, then 2 and 3. A clause is met
by one action. The corner cases of the original are preserved:
- object cells are updated only by a drop, so facing an object's old cell counts as going to it;
- a clause compares with the object carried when it was last checked;
- the action that completes the first half is also checked against the second half.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.envs.babyai import rules
from agentrl_jax.envs.babyai.rules import EnvState
from agentrl_jax.envs.babyai.words import (
    AFTER,
    DOOR,
    GO_TO,
    OPEN,
    OPEN_DOOR,
    PICK_UP,
    PUT_NEXT,
    SIDE,
    SINGLE,
)


def judge(state: EnvState, action: jax.Array) -> tuple[EnvState, jax.Array, jax.Array]:
    """Return (state, success bool [], failure bool []) after rules.act executed an action."""
    known = jnp.where(action == rules.DROP, state.cell, state.known)
    state = state.replace(known=known)
    met, broken = clause_verdicts(state, action)
    twofold = state.order != SINGLE
    # The half that must be done first: B in `A after you B`.
    first = jnp.where(state.order == AFTER, 1, 0)
    ask_first = ~(twofold & state.half_done)
    state, won, failed = check_half(state, first, met, broken, ask_first)
    half_done = state.half_done | (twofold & won)
    state = state.replace(half_done=half_done)
    state, last_won, last_failed = check_half(state, 1 - first, met, broken, half_done)
    return state, jnp.where(twofold, last_won, won), failed | last_failed


def check_half(
    state: EnvState, half: jax.Array, met: jax.Array, broken: jax.Array, asked: jax.Array
) -> tuple[EnvState, jax.Array, jax.Array]:
    """Return (state, success, failure) of one half (0 or 1); no effect unless `asked`.

    The clauses of an `and` stay met, and it cannot fail. A single clause is checked again.
    """
    index = jnp.arange(4)
    mine = (index // 2 == half) & (state.clause >= 0)
    both = jnp.sum(mine) == 2
    looked = mine & asked & ~(both & state.latched)
    before = jnp.where(looked, state.held, state.before).astype(state.before.dtype)
    latched = state.latched | (looked & both & met)
    done = jnp.all(jnp.where(mine, jnp.where(both, latched, met), True))
    failed = ~both & jnp.any(mine & broken)
    return state.replace(before=before, latched=latched), asked & done, asked & failed


def clause_verdicts(state: EnvState, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (met, broken) bool [4]: the verdict of each clause on the action."""
    ours, theirs = members(state)
    front = rules.front_cell(state)
    held = jnp.arange(state.name.shape[0])[None] == state.held
    carried = jnp.arange(state.name.shape[0])[None] == state.before[:, None].astype(jnp.int32)
    ahead, was_ahead = (state.cell == front)[None], (state.known == front)[None]
    door = (rules.kinds(state) == DOOR)[None]
    opened = door & (state.door == OPEN)[None]

    faces = jnp.any(ours & was_ahead, 1)
    toggles = action == rules.TOGGLE
    opens = toggles & jnp.any(ours & ahead & opened, 1)
    misses = toggles & jnp.any(ahead & door, 1) & ~opens
    picks = (action == rules.PICKUP) & (state.before < 0) & jnp.any(ours & held, 1)
    grabs = (action == rules.PICKUP) & (state.held >= 0) & ~picks
    # Cell of the object that was carried; -1 if it could not be dropped.
    laid = jnp.max(jnp.where(ours & carried, state.cell[None], -1), 1).astype(jnp.int32)
    distance = jnp.abs(state.known[None].astype(jnp.int32) - laid[:, None])
    near = theirs & (state.known >= 0)[None] & ((distance == 1) | (distance == SIDE))
    puts = (action == rules.DROP) & (laid >= 0) & jnp.any(near, 1)

    kind = state.clause
    met = jnp.where(kind == GO_TO, faces, jnp.where(kind == OPEN_DOOR, opens, picks))
    met = jnp.where(kind == PUT_NEXT, puts, met)
    broken = jnp.where(kind == OPEN_DOOR, misses, jnp.where(kind == PICK_UP, grabs, False))
    return met, broken & state.strict


def members(state: EnvState) -> tuple[jax.Array, jax.Array]:
    """Return bool [4, n] twice: the objects of each clause, and its `next to` objects."""
    clause = jnp.arange(4, dtype=jnp.uint8)[:, None]
    ours = (state.member[None] >> (2 * clause)) & 1
    theirs = (state.member[None] >> (2 * clause + 1)) & 1
    return ours == 1, theirs == 1
