"""The objects in sight as a list, nearest first, and the lines that describe the instruction.

The order is AgentGym's: by Manhattan distance, then row by row from the farthest, left to right.
Lines are entries of a table (see envs.base).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.babyai import rules
from agentrl_jax.envs.babyai.rules import REACH, VIEW, EnvState
from agentrl_jax.envs.babyai.words import (
    AFTER,
    BEFORE,
    COLOURS,
    DESCRIPTIONS,
    DOOR,
    KINDS,
    NUMBERS,
    PUT_NEXT,
    VERBS,
    phrase,
)
from agentrl_jax.envs.base import Lines

STATES = ('open', 'closed', 'locked')
DOOR_NAMES = tuple(f'{colour} {state} door' for colour in COLOURS for state in STATES)
THING_NAMES = tuple(f'{colour} {kind}' for kind in KINDS[1:] for colour in COLOURS)
NAMES = DOOR_NAMES + THING_NAMES  # doors by colour and state, things by kind and colour
PLACES = VIEW * VIEW
FORWARD = VIEW - 1 - np.arange(PLACES) // VIEW  # cells ahead, by place
RIGHT = np.arange(PLACES) % VIEW - REACH  # cells to the right, by place
_KEYS = [(f + abs(r), place) for place, (f, r) in enumerate(zip(FORWARD, RIGHT, strict=True))]
ORDER = np.argsort(np.argsort([PLACES * distance + place for distance, place in _KEYS]))
COUNTS = range(1, NUMBERS + 1)


@struct.dataclass
class Sight:
    """Objects in sight, nearest first, padded to m entries."""

    present: jax.Array  # bool [m]
    name: jax.Array  # int32 [m]  index into NAMES
    place: jax.Array  # int32 [m]  row * VIEW + column
    number: jax.Array  # int32 [m]  index among the objects of the same name
    more: jax.Array  # bool []  there are more than m objects in sight
    walls: jax.Array  # uint32 [VIEW]  walls in sight, bit = column
    solid: jax.Array  # uint32 [VIEW]  walls and things in sight, without doors


def look(state: EnvState, most: int) -> Sight:
    """Return the nearest `most` objects in sight."""
    view = rules.view(state)
    visible = view.place >= 0
    key = jnp.where(visible, jnp.asarray(ORDER)[jnp.maximum(view.place, 0)], PLACES)
    rank = jnp.sum(key[None] < key[:, None], 1)
    chosen = visible[None] & (rank[None] == jnp.arange(most)[:, None])  # [m, n]
    index, present = jnp.argmax(chosen, 1), jnp.any(chosen, 1)
    name, place = object_names(state)[index], view.place[index]
    same = (name[None] == name[:, None]) & (jnp.arange(most)[None] < jnp.arange(most)[:, None])
    thing = visible & (rules.kinds(state) != DOOR)
    bit = jnp.where(thing, jnp.uint32(1) << (view.place % VIEW).astype(jnp.uint32), 0)
    row = view.place // VIEW
    things = [jnp.sum(jnp.where(row == j, bit, 0), dtype=jnp.uint32) for j in range(VIEW)]
    return Sight(
        present=present,
        name=name,
        place=place,
        number=jnp.sum(same, 1),
        more=jnp.sum(visible) > most,
        walls=view.walls,
        solid=view.walls | jnp.stack(things),
    )


def wall_ahead(sight: Sight) -> jax.Array:
    """Return int32 []: steps to the wall straight ahead, VIEW = none in sight."""
    column, steps = (sight.walls >> REACH) & 1, jnp.arange(VIEW - 1, -1, -1)
    return jnp.min(jnp.where(column == 1, steps, VIEW))


def object_names(state: EnvState) -> jax.Array:
    """Return int32 [n]: each object's index into NAMES."""
    kind, colour = rules.kinds(state).astype(jnp.int32), state.name.astype(jnp.int32) % 6
    door = colour * len(STATES) + state.door
    return jnp.where(kind == DOOR, door, len(DOOR_NAMES) + (kind - 1) * len(COLOURS) + colour)


def held_name(state: EnvState) -> jax.Array:
    """Return int32 []: the carried object's index into THING_NAMES, -1 = none."""
    mine = jnp.arange(state.name.shape[0]) == state.held
    name = jnp.max(jnp.where(mine, object_names(state), -1))
    return jnp.where(name < 0, -1, name - len(DOOR_NAMES))


def goal_lines(first: str, *, ordered: bool) -> dict[str, list[str]]:
    """Return the line families of an instruction, one clause per line.

    first: start of the first clause; ordered: False omits `then` and `after` (AgentGym).
    """
    phrases = [phrase(number) for number in range(DESCRIPTIONS)]
    clauses = [f'{verb} {thing}' for verb in VERBS for thing in phrases]
    starts = dict(first=first, joined='and ', then='then ', after='after you ')
    if not ordered:
        starts = dict(first=first, joined='and ')
    families = {}
    for name, start in starts.items():
        families[name] = [f'{start}{clause}\n' for clause in clauses]
        if name in ('first', 'joined'):
            families[f'{name}_comma'] = [f'{start}{clause},\n' for clause in clauses]
    families['next_to'] = [f'next to {thing}\n' for thing in phrases]
    families['next_to_comma'] = [f'next to {thing},\n' for thing in phrases]
    return families


def goal_ids(state: EnvState, lines: Lines, *, ordered: bool, shown: jax.Array | bool) -> jax.Array:
    """Return int32 [8]: the line of each clause, and the line of its `next to` object."""
    ids = []
    for place in range(4):
        clause = state.clause[place].astype(jnp.int32)
        present = shown & (clause >= 0)
        ends_half = (place == 1) | (state.clause[min(place + 1, 3)] < 0)
        comma = ends_half & (place < 2) & (state.order == BEFORE)
        head = comma & (clause != PUT_NEXT)
        row = jnp.maximum(clause, 0) * DESCRIPTIONS + state.described[place, 0]
        family = 'first' if place == 0 else 'joined'
        if place == 2 and ordered:
            line = jnp.where(state.order == AFTER, lines.ids('after', row), lines.ids('then', row))
        else:
            line = jnp.where(head, lines.ids(f'{family}_comma', row), lines.ids(family, row))
        other = state.described[place, 1]
        target = jnp.where(comma, lines.ids('next_to_comma', other), lines.ids('next_to', other))
        ids += [jnp.where(present, line, -1), jnp.where(present & (clause == PUT_NEXT), target, -1)]
    return jnp.concatenate(ids)


def goal_slots(lines: Lines, clauses: np.ndarray, *, ordered: bool) -> list[range]:
    """Return the possible lines at each index of goal_ids; empty for clauses that no level has.

    clauses int [levels, 4]. The families of one slot are adjacent in the table.
    """
    slots = lines.slots
    families = [('first', 'first_comma'), ('joined', 'joined_comma')]
    families += [('then', 'after') if ordered else ('joined', 'joined'), ('joined', 'joined')]
    next_to = range(slots['next_to'].start, slots['next_to_comma'].stop)
    goals = []
    for place, (first, last) in enumerate(families):
        used = clauses[:, place]
        family = range(slots[first].start, slots[last].stop)
        goals.append(family if (used >= 0).any() else range(0))
        goals.append(next_to if (used == PUT_NEXT).any() else range(0))
    return goals
