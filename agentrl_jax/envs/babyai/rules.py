"""MiniGrid's dynamics and view for BabyAI, as pure functions of one state (minigrid 3.2.0).

Arrays over objects hold each object's cell, its name and, for doors, the door's state. The map
holds only walls, as bits. All functions are for one level; callers vmap them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.babyai.words import BOX, CLOSED, DOOR, KEY, LOCKED, OPEN, SIDE
from agentrl_jax.envs.base import environment

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
VIEW = 7  # side of the view in cells; the agent is in the middle of the last row
REACH = VIEW // 2  # cells to either side
STEPS = (1, SIDE, -1, -SIDE)  # change of the cell index facing right, down, left, up
AGENT_PLACE = VIEW * VIEW - 1 - REACH
UNSEEN, EMPTY, WALL = range(3)  # minigrid's cell codes; door 4, key 5, ball 6, box 7
FIRST_CODE, GREY = 4, 5
ALL = np.uint32(2**VIEW - 1)  # bits of a row of the view


@struct.dataclass
class EnvState(environment.EnvState):
    """State of one level; n = OBJECTS. time: int32 []  actions so far."""

    rows: jax.Array  # uint32 [SIDE]  walls: bit x + REACH of row y; cells outside are walls
    columns: jax.Array  # uint32 [SIDE]  the same: bit y + REACH of column x
    cell: jax.Array  # int16 [n]  cell of each object, -1 = in a box, carried or gone
    known: jax.Array  # int16 [n]  cell of each object at the verifier's last update (see judge)
    name: jax.Array  # int8 [n]  kind * 6 + colour; -1 = no object
    door: jax.Array  # int8 [n]  OPEN, CLOSED or LOCKED
    content: jax.Array  # int8 [n]  object in this box, -1 = none
    member: jax.Array  # uint8 [n]  bit 2 c + s: matches side s of clause c
    agent: jax.Array  # int32 []
    direction: jax.Array  # int32 []  right, down, left, up
    held: jax.Array  # int32 []  object carried, -1 = none
    laid: jax.Array  # int32 []  object carried from the start; the first view shows it in its cell
    steps: jax.Array  # int32 []  MiniGrid's step count
    max_steps: jax.Array  # int32 []
    clause: jax.Array  # int8 [4]  GO_TO, PICK_UP, OPEN_DOOR, PUT_NEXT or -1
    strict: jax.Array  # bool [4]
    described: jax.Array  # int16 [4, 2]  numbers for words.description
    order: jax.Array  # int32 []  SINGLE, BEFORE or AFTER
    before: jax.Array  # int8 [4]  object carried when each clause was last checked
    latched: jax.Array  # bool [4]  clauses of an `and` that have been met
    half_done: jax.Array  # bool []  the half of the sentence to do first has been met
    won: jax.Array  # bool []  the instruction was completed
    over: jax.Array  # bool []  MiniGrid's episode ended with the last step, in success or failure
    ended: jax.Array  # bool []  this environment's episode ended
    reward: jax.Array  # float32 []  of the last step
    reply: jax.Array  # int32 []  reply to an action that was not executed, -1 = none (see macros)


def kinds(state: EnvState) -> jax.Array:
    """Return int8 [n]: DOOR, KEY, BALL, BOX; -1 = no object."""
    return jnp.where(state.name < 0, -1, state.name // 6).astype(jnp.int8)


def kind_of(state: EnvState, index: jax.Array) -> jax.Array:
    """Return the kind of one object, -1 for index -1."""
    name = jnp.max(jnp.where(jnp.arange(state.name.shape[0]) == index, state.name, -1))
    return jnp.where(name < 0, -1, name // 6)


def front_cell(state: EnvState) -> jax.Array:
    return state.agent + jnp.asarray(STEPS, jnp.int32)[state.direction]


def is_wall(state: EnvState, cell: jax.Array) -> jax.Array:
    row, column = cell // SIDE, cell % SIDE
    return (state.rows[row] >> (column + REACH).astype(jnp.uint32)) & 1 == 1


def act(state: EnvState, action: jax.Array) -> EnvState:
    """Return the state after one of the six actions, without checking the instruction."""
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
    """The agent's view in its own frame: row 0 is the farthest, column 0 the leftmost."""

    place: jax.Array  # int32 [n]  row * VIEW + column of each object in sight, -1 = not in sight
    walls: jax.Array  # uint32 [VIEW]  walls in sight, bit = column
    seen: jax.Array  # uint32 [VIEW]  cells in sight


def view(state: EnvState) -> View:
    """Return minigrid's 7 x 7 view after occlusion (Grid.process_vis).

    It excludes the carried object, which minigrid draws at the agent's cell.
    """
    lying = (jnp.arange(state.cell.shape[0]) == state.laid) & (state.steps == 0)
    cell = jnp.where(lying, state.known, state.cell).astype(jnp.int32)
    dx, dy = cell % SIDE - state.agent % SIDE, cell // SIDE - state.agent // SIDE
    forward = jnp.stack([dx, dy, -dx, -dy])[state.direction]
    right = jnp.stack([dy, -dx, -dy, dx])[state.direction]
    inside = (cell >= 0) & (forward >= 0) & (forward < VIEW) & (jnp.abs(right) <= REACH)
    row, column = VIEW - 1 - forward, right + REACH
    walls = _wall_rows(state)
    shut = inside & (kinds(state) == DOOR) & (state.door != OPEN)
    bit = jnp.uint32(1) << jnp.where(inside, column, 0).astype(jnp.uint32)
    doors = [jnp.where(shut & (row == j), bit, 0) for j in range(VIEW)]  # distinct bits
    lit_rows = _visible([walls[j] | jnp.sum(doors[j], dtype=jnp.uint32) for j in range(VIEW)])
    visible_cells = jnp.stack(lit_rows)
    lit = sum(jnp.where(row == j, lit_rows[j], 0) for j in range(VIEW)) & bit
    # The agent's cell shows the carried object, never an open door in that cell.
    visible = inside & (lit != 0) & (forward + jnp.abs(right) > 0)
    return View(jnp.where(visible, row * VIEW + column, -1), walls & visible_cells, visible_cells)


def _wall_rows(state: EnvState) -> jax.Array:
    """Return uint32 [VIEW]: walls in the agent's frame, farthest row first, left = bit 0."""
    x, y = state.agent % SIDE, state.agent // SIDE
    sideways = state.direction % 2 == 0  # facing right or left, view rows are map columns
    lines = jnp.where(sideways, state.columns, state.rows)
    along, across = jnp.where(sideways, x, y), jnp.where(sideways, y, x)
    sign = jnp.where(state.direction < 2, 1, -1)
    line = along + sign * jnp.arange(VIEW - 1, -1, -1)
    padded = lines.at[line].get(mode='fill', fill_value=2**32 - 1, wrap_negative_indices=False)
    # Lines are stored shifted by REACH, so the window starts at bit `across`.
    window = (padded >> across.astype(jnp.uint32)) & ALL
    mirrored = sum(((window >> j) & 1) << (VIEW - 1 - j) for j in range(VIEW)).astype(jnp.uint32)
    return jnp.where((state.direction == 1) | (state.direction == 2), mirrored, window)


def _visible(opaque: list[jax.Array]) -> list[jax.Array]:
    """Return the visible cells of each row as bits. opaque: bits per row, farthest first.

    Process rows from the agent outwards, left to right and back. A lit transparent cell lights the
    next cell of its row and the cells of the row above that are above both.
    """
    visible, lit = [None] * VIEW, jnp.uint32(1 << REACH)
    for j in reversed(range(VIEW)):
        clear, above = ~opaque[j] & ALL, jnp.uint32(0)
        for step, last in ((1, 1 << (VIEW - 1)), (-1, 1)):
            gate = _shifted(clear, step)
            for k in (1, 2, 4):  # doubling: three rounds for seven cells
                lit |= gate & _shifted(lit, k * step) & ALL
                gate &= _shifted(gate, k * step)
            sources = lit & clear & ~jnp.uint32(last)  # a pass stops before the last cell
            above |= sources | _shifted(sources, step)
        visible[j], lit = lit, above & ALL
    return visible


def _shifted(bits: jax.Array, step: int) -> jax.Array:
    return bits << step if step > 0 else bits >> -step


def image(state: EnvState) -> jax.Array:
    """Return minigrid's image uint8 [VIEW, VIEW, 3]: [column, row] -> (object, colour, state)."""
    in_view = view(state)
    columns = jnp.arange(VIEW, dtype=jnp.uint32)
    visible = (in_view.seen[:, None] >> columns[None]) & 1  # [row, column]
    wall = (in_view.walls[:, None] >> columns[None]) & 1
    code = jnp.where(wall == 1, WALL, jnp.where(visible == 1, EMPTY, UNSEEN))
    cells = jnp.stack([code, jnp.where(wall == 1, GREY, 0), jnp.zeros_like(code)], -1)
    fresh = (state.laid >= 0) & (state.steps == 0)
    mine = jnp.arange(state.name.shape[0]) == jnp.where(fresh, -1, state.held)
    place = jnp.where(in_view.place < 0, VIEW * VIEW, in_view.place)  # out of bounds: dropped
    place = jnp.where(mine, AGENT_PLACE, place)
    things = jnp.stack([kinds(state) + FIRST_CODE, state.name % 6, state.door], -1)
    cells = cells.reshape(VIEW * VIEW, 3).at[place].set(things.astype(jnp.int32), mode='drop')
    return jnp.swapaxes(cells.reshape(VIEW, VIEW, 3), 0, 1).astype(jnp.uint8)
