"""MiniGrid's dynamics and view for BabyAI, as pure functions of one state (minigrid 3.2.0).

Objects are numbers: where each one lies, what it is called and, if it is a door, its state. The
map itself holds only walls, as bits. All functions are for one level and are vmapped by callers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.babyai.words import BOX, CLOSED, DOOR, KEY, LOCKED, OPEN, SIDE
from agentrl_jax.envs.base import environment

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
VIEW = 7  # cells of the view's side; the agent stands in the middle of its last row
REACH = VIEW // 2  # cells to either side
STEPS = (1, SIDE, -1, -SIDE)  # of a cell number, facing right, down, left, up
OWN_PLACE = VIEW * VIEW - 1 - REACH
UNSEEN, EMPTY, WALL = range(3)  # minigrid's codes of cells; door 4, key 5, ball 6, box 7
FIRST_CODE, GREY = 4, 5
ALL = np.uint32(2**VIEW - 1)  # bits of a row of the view


@struct.dataclass
class EnvState(environment.EnvState):
    """One level being played; n = OBJECTS. time: int32 []  actions so far."""

    rows: jax.Array  # uint32 [SIDE]  walls, bit x of row y, shifted by REACH; outside counts as one
    columns: jax.Array  # uint32 [SIDE]  the same, bit y of column x
    cell: jax.Array  # int16 [n]  where each object lies, -1 = nowhere: in a box, carried, gone
    known: jax.Array  # int16 [n]  where it lay when the instruction last looked
    name: jax.Array  # int8 [n]  kind * 6 + colour; -1 = no object
    door: jax.Array  # int8 [n]  OPEN, CLOSED or LOCKED
    content: jax.Array  # int8 [n]  object in this box, -1 = none
    member: jax.Array  # uint8 [n]  bit 2 c + s: matches side s of clause c
    agent: jax.Array  # int32 []
    direction: jax.Array  # int32 []  right, down, left, up
    held: jax.Array  # int32 []  object carried, -1 = none
    laid: jax.Array  # int32 []  object carried from the start, which the first view shows lying
    steps: jax.Array  # int32 []  of MiniGrid
    max_steps: jax.Array  # int32 []
    clause: jax.Array  # int8 [4]  GO_TO, PICK_UP, OPEN_DOOR, PUT_NEXT or -1
    strict: jax.Array  # bool [4]
    described: jax.Array  # int16 [4, 2]  numbers of pool.description
    order: jax.Array  # int32 []  SINGLE, BEFORE or AFTER
    before: jax.Array  # int8 [4]  object carried when a clause was last looked at
    latched: jax.Array  # bool [4]  clauses of an `and` that were met
    half_done: jax.Array  # bool []  the half of the sentence that comes first was met
    won: jax.Array  # bool []  the instruction was carried out
    over: jax.Array  # bool []  MiniGrid's episode ended with the last step, well or badly
    ended: jax.Array  # bool []  ours ended
    reward: jax.Array  # float32 []  of the last step
    reply: jax.Array  # int32 []  answer to an action that was not executed, -1 = none (see macros)


def kinds(state: EnvState) -> jax.Array:
    """int8 [n]: DOOR, KEY, BALL, BOX; -1 = no object."""
    return jnp.where(state.name < 0, -1, state.name // 6).astype(jnp.int8)


def kind_of(state: EnvState, index: jax.Array) -> jax.Array:
    """Kind of one object, -1 for index -1."""
    name = jnp.max(jnp.where(jnp.arange(state.name.shape[0]) == index, state.name, -1))
    return jnp.where(name < 0, -1, name // 6)


def front_cell(state: EnvState) -> jax.Array:
    return state.agent + jnp.asarray(STEPS, jnp.int32)[state.direction]


def is_wall(state: EnvState, cell: jax.Array) -> jax.Array:
    row, column = cell // SIDE, cell % SIDE
    return (state.rows[row] >> (column + REACH).astype(jnp.uint32)) & 1 == 1


def act(state: EnvState, action: jax.Array) -> EnvState:
    """The world after one of the six actions; the instruction is not looked at."""
    index = jnp.arange(state.name.shape[0])
    kind, colour = kinds(state), state.name % 6
    front = front_cell(state)
    ahead = state.cell == front  # at most one object
    occupied = jnp.any(ahead)
    opened = jnp.any(ahead & (kind == DOOR) & (state.door == OPEN))
    wall = is_wall(state, front)
    turn = jnp.where(action == LEFT, 3, jnp.where(action == RIGHT, 1, 0))
    moves = (action == FORWARD) & ~wall & (~occupied | opened)

    picks = (action == PICKUP) & (state.held < 0) & jnp.any(ahead & (kind != DOOR))
    drops = (action == DROP) & (state.held >= 0) & ~occupied & ~wall
    mine = index == state.held
    cell = jnp.where(picks & ahead, -1, jnp.where(drops & mine, front, state.cell))
    held = jnp.where(picks, jnp.argmax(ahead), jnp.where(drops, -1, state.held))

    toggled = (action == TOGGLE) & ahead
    unlocks = jnp.any(mine & (kind == KEY) & (colour == jnp.max(jnp.where(ahead, colour, -1))))
    swung = jnp.where(state.door == OPEN, CLOSED, OPEN)
    swung = jnp.where((state.door == LOCKED) & ~unlocks, LOCKED, swung)
    opens_box = toggled & (kind == BOX)
    inside = jnp.max(jnp.where(opens_box, state.content, -1))
    cell = jnp.where(opens_box, -1, cell)
    cell = jnp.where((index == inside) & jnp.any(opens_box), front, cell)
    return state.replace(
        cell=cell.astype(state.cell.dtype),
        door=jnp.where(toggled & (kind == DOOR), swung, state.door).astype(state.door.dtype),
        agent=jnp.where(moves, front, state.agent),
        direction=(state.direction + turn) % 4,
        held=held.astype(jnp.int32),
        steps=state.steps + 1,
    )


@struct.dataclass
class View:
    """What the agent sees, from its own side: row 0 is the farthest, column 0 the leftmost."""

    place: jax.Array  # int32 [n]  row * VIEW + column of each object in sight, -1 = unseen
    walls: jax.Array  # uint32 [VIEW]  walls in sight, bit = column
    seen: jax.Array  # uint32 [VIEW]  cells in sight


def view(state: EnvState) -> View:
    """minigrid's 7 x 7 view after its occlusion (Grid.process_vis).

    The carried object, which minigrid draws at the agent's place, is not in it.
    """
    lying = (jnp.arange(state.cell.shape[0]) == state.laid) & (state.steps == 0)
    cell = jnp.where(lying, state.known, state.cell).astype(jnp.int32)
    dx, dy = cell % SIDE - state.agent % SIDE, cell // SIDE - state.agent // SIDE
    forward, right = _turned(dx, dy, state.direction)
    inside = (cell >= 0) & (forward >= 0) & (forward < VIEW) & (jnp.abs(right) <= REACH)
    row, column = VIEW - 1 - forward, right + REACH
    walls = _wall_rows(state)
    shut = inside & (kinds(state) == DOOR) & (state.door != OPEN)
    bit = jnp.uint32(1) << jnp.where(inside, column, 0).astype(jnp.uint32)
    seen = _visible([walls[j] | _any_bit(bit, shut & (row == j)) for j in range(VIEW)])
    own = jnp.stack(seen)
    lit = sum(jnp.where(row == j, seen[j], 0) for j in range(VIEW)) & bit
    # The agent's own cell shows what it carries: never the open door that it stands in.
    visible = inside & (lit != 0) & (forward + jnp.abs(right) > 0)
    return View(jnp.where(visible, row * VIEW + column, -1), walls & own, own)


def _turned(dx: jax.Array, dy: jax.Array, direction: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Offsets on the map as (cells ahead, cells to the right) of who faces `direction`."""
    forward = jnp.stack([dx, dy, -dx, -dy])[direction]
    right = jnp.stack([dy, -dx, -dy, dx])[direction]
    return forward, right


def _any_bit(bits: jax.Array, where: jax.Array) -> jax.Array:
    """Or of the chosen bits (uint32 [n], bool [n]), of which no two are the same."""
    return jnp.sum(jnp.where(where, bits, 0), dtype=jnp.uint32)


def _wall_rows(state: EnvState) -> jax.Array:
    """uint32 [VIEW]: walls as the agent sees them, farthest row first, left = bit 0."""
    x, y = state.agent % SIDE, state.agent // SIDE
    sideways = state.direction % 2 == 0  # facing right or left, its rows are the map's columns
    lines = jnp.where(sideways, state.columns, state.rows)
    along, across = jnp.where(sideways, x, y), jnp.where(sideways, y, x)
    sign = jnp.where(state.direction < 2, 1, -1)
    line = along + sign * jnp.arange(VIEW - 1, -1, -1)
    found = lines.at[line].get(mode='fill', fill_value=2**32 - 1, wrap_negative_indices=False)
    # Bit `across` of a line is its bit across + REACH here: the window begins at bit `across`.
    window = (found >> across.astype(jnp.uint32)) & ALL
    mirrored = (state.direction == 1) | (state.direction == 2)
    return jnp.where(mirrored, _mirrored(window), window)


def _mirrored(bits: jax.Array) -> jax.Array:
    """The VIEW lowest bits in reverse."""
    return sum(((bits >> j) & 1) << (VIEW - 1 - j) for j in range(VIEW)).astype(jnp.uint32)


def _visible(opaque: list[jax.Array]) -> list[jax.Array]:
    """Cells in sight of each row, as bits. opaque: bits of each row, the farthest first.

    From the agent's row upwards, each row from left to right and back: a lit cell that can be
    looked through lights the next one and, in the row above, the cells above both.
    """
    seen, lit = [None] * VIEW, jnp.uint32(1 << REACH)
    for j in reversed(range(VIEW)):
        clear, above = ~opaque[j] & ALL, jnp.uint32(0)
        for step, last in ((1, 1 << (VIEW - 1)), (-1, 1)):
            gate = _shifted(clear, step)
            for k in (1, 2, 4):  # doubling: three rounds for seven cells
                lit |= gate & _shifted(lit, k * step) & ALL
                gate &= _shifted(gate, k * step)
            sources = lit & clear & ~jnp.uint32(last)  # a pass ends before the last cell
            above |= sources | _shifted(sources, step)
        seen[j], lit = lit, above & ALL
    return seen


def _shifted(bits: jax.Array, step: int) -> jax.Array:
    return bits << step if step > 0 else bits >> -step


def image(state: EnvState) -> jax.Array:
    """uint8 [VIEW, VIEW, 3]: minigrid's observation, [column, row] -> (object, colour, state)."""
    looked = view(state)
    columns = jnp.arange(VIEW, dtype=jnp.uint32)
    seen = (looked.seen[:, None] >> columns[None]) & 1  # [row, column]
    wall = (looked.walls[:, None] >> columns[None]) & 1
    code = jnp.where(wall == 1, WALL, jnp.where(seen == 1, EMPTY, UNSEEN))
    cells = jnp.stack([code, jnp.where(wall == 1, GREY, 0), jnp.zeros_like(code)], -1)
    fresh = (state.laid >= 0) & (state.steps == 0)
    mine = jnp.arange(state.name.shape[0]) == jnp.where(fresh, -1, state.held)
    place = jnp.where(looked.place < 0, VIEW * VIEW, looked.place)  # out of bounds: dropped
    place = jnp.where(mine, OWN_PLACE, place)
    things = jnp.stack([kinds(state) + FIRST_CODE, state.name % 6, state.door], -1)
    cells = cells.reshape(VIEW * VIEW, 3).at[place].set(things.astype(jnp.int32), mode='drop')
    return jnp.swapaxes(cells.reshape(VIEW, VIEW, 3), 0, 1).astype(jnp.uint8)
