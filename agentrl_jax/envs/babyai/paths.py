"""Paths through the visible cells, as in AgentGym's wrapper: breadth-first search over poses.

The map is the view in the agent's frame. The wrapper's ranges add a row at the agent's back and a
column on its right for some headings. Cells out of sight and all doors count as free. If there are
several shortest paths, the order of actions determines the wrapper's choice; see way_to.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.envs.babyai.rules import FORWARD, LEFT, REACH, RIGHT, VIEW

ROOM = VIEW + 1  # rows and columns of the map; a row of cells is an integer, bit = column
HEADINGS = 4  # ahead, right, back, left, relative to the view
START = (VIEW - 1, REACH)
_ROW, _LINE = (1 << VIEW) - 1, (1 << ROOM) - 1


def free_cells(solid: jax.Array, direction: jax.Array) -> jax.Array:
    """Return uint32 [ROOM]: cells that paths may use. solid: uint32 [VIEW]."""
    extra_row = direction < 2  # facing right or down
    extra_column = (direction == 1) | (direction == 2)  # facing down or left
    line = jnp.where(extra_column, jnp.uint32(_LINE), jnp.uint32(_ROW))
    rows = jnp.concatenate([line & ~solid, jnp.where(extra_row, line, 0)[None]])
    return rows.astype(jnp.uint32)


def beside(cells: jax.Array) -> jax.Array:
    """Return the cells with a neighbour in `cells`, uint32 [ROOM]."""
    none = jnp.zeros(1, jnp.uint32)
    up, down = jnp.concatenate([cells[1:], none]), jnp.concatenate([none, cells[:-1]])
    return (up | down | (cells << 1) | (cells >> 1)) & _LINE


def reachable(free: jax.Array) -> jax.Array:
    """Return uint32 [ROOM]: the cells reachable from the agent."""
    start = jnp.zeros(ROOM, jnp.uint32).at[START[0]].set(jnp.uint32(1 << START[1]))

    def spread(carry):
        cells, _ = carry
        wider = cells | (beside(cells) & free)
        return wider, jnp.any(wider != cells)

    return jax.lax.while_loop(lambda carry: carry[1], spread, (start, jnp.bool_(True)))[0]


def has(cells: jax.Array, place: jax.Array) -> jax.Array:
    """Return whether each place (row * VIEW + column) is in `cells`; bool of place's shape."""
    return (cells[place // VIEW] >> (place % VIEW).astype(jnp.uint32)) & 1 == 1


def _ahead_of(cells: jax.Array) -> jax.Array:
    """Return uint32 [HEADINGS, ROOM]: cells from which a step with heading h enters `cells[h]`."""
    none = jnp.zeros(1, jnp.uint32)
    return jnp.stack(
        [
            jnp.concatenate([none, cells[0, :-1]]),
            cells[1] >> 1,
            jnp.concatenate([cells[2, 1:], none]),
            (cells[3] << 1) & _LINE,
        ]
    )


def steps_to(goals: jax.Array, free: jax.Array) -> jax.Array:
    """Return int32 [HEADINGS, ROOM, ROOM]: steps from each pose to the nearest goal pose.

    goals uint32 [HEADINGS, ROOM]. The search stops at the agent's pose; unvisited poses are -1.
    """
    columns = jnp.arange(ROOM, dtype=jnp.uint32)[None, None]

    def cells(rows):
        return (rows[..., None] >> columns) & 1 == 1

    def widen(carry):
        edge, visited, steps, count = carry
        turned = jnp.roll(edge, 1, 0) | jnp.roll(edge, -1, 0)
        edge = (turned | _ahead_of(edge)) & free[None] & ~visited
        return edge, visited | edge, jnp.where(cells(edge), count + 1, steps), count + 1

    def unfinished(carry):
        edge, visited, *_ = carry
        return jnp.any(edge != 0) & ((visited[0, START[0]] >> START[1]) & 1 == 0)

    goals = goals & free[None]
    start = (goals, goals, jnp.where(cells(goals), 0, -1), jnp.int32(0))
    return jax.lax.while_loop(unfinished, widen, start)[2]


def moved(pose: tuple, action: jax.Array) -> tuple:
    """Return (row, column, heading) after a turn or a step forward."""
    row, column, heading = pose
    goes = action == FORWARD
    row = row + jnp.where(goes, jnp.asarray([-1, 0, 1, 0])[heading], 0)
    column = column + jnp.where(goes, jnp.asarray([0, 1, 0, -1])[heading], 0)
    turn = jnp.where(action == LEFT, 3, jnp.where(action == RIGHT, 1, 0))
    return row, column, (heading + turn) % HEADINGS


def next_action(steps: jax.Array, pose: tuple, order: tuple[int, ...]) -> jax.Array:
    """Return the first action in `order` that reduces the distance. steps: from steps_to."""

    def left(action):
        row, column, heading = moved(pose, jnp.int32(action))
        inside = (row >= 0) & (row < ROOM) & (column >= 0) & (column < ROOM)
        remaining = steps[heading, jnp.clip(row, 0, ROOM - 1), jnp.clip(column, 0, ROOM - 1)]
        return jnp.where(inside, remaining, -1)

    row, column, heading = pose
    nearer = jnp.stack([left(action) for action in order]) == steps[heading, row, column] - 1
    return jnp.asarray(order)[jnp.argmax(nearer)]


def start_pose() -> tuple:
    return jnp.int32(START[0]), jnp.int32(START[1]), jnp.int32(0)


LAST_FIRST = (RIGHT, LEFT, FORWARD)  # the order in which `steps` of way_to are followed


def way_to(place: jax.Array, free: jax.Array, *, enter: jax.Array) -> jax.Array:
    """Return steps_to the final pose of the wrapper's path: facing a place, or on it if `enter`.

    The wrapper expands forward, left, right and stops at the first goal pose in its queue. Among
    the nearest goal poses, this is the one with the smallest path in the order forward < left <
    right. But the wrapper stores the last predecessor of each pose, so it returns the largest
    shortest path to that pose. Follow the result with next_action(..., LAST_FIRST).
    """
    row, column = place // VIEW, place % VIEW
    target = jnp.where(jnp.arange(ROOM) == row, jnp.uint32(1) << column.astype(jnp.uint32), 0)
    target = jnp.broadcast_to(target.astype(jnp.uint32), (HEADINGS, ROOM))
    goals = jnp.where(enter, target, _ahead_of(target))
    steps = steps_to(goals, free)

    def walk(pose):
        return moved(pose, next_action(steps, pose, (FORWARD, LEFT, RIGHT)))

    def short(pose):
        return steps[pose[2], pose[0], pose[1]] > 0

    row, column, heading = jax.lax.while_loop(short, walk, start_pose())
    end = jnp.zeros((HEADINGS, ROOM), jnp.uint32)
    end = end.at[heading, row].set(jnp.uint32(1) << column.astype(jnp.uint32))
    return steps_to(end, free)
