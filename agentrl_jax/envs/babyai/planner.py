"""The expert, which knows the full map and completes an instruction clause by clause (host).

Plans are optimal in a single room without obstacles, and reasonable elsewhere. The expert opens
doors, fetches keys of locked doors (also from boxes) and removes obstacles. A plan is made by
playing it on a copy of the map.
"""

import copy
import dataclasses
import heapq
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from agentrl_jax.envs.babyai.rules import DROP, FORWARD, LEFT, PICKUP, REACH, RIGHT, STEPS, TOGGLE
from agentrl_jax.envs.babyai.words import (
    AFTER,
    BOX,
    CLOSED,
    DOOR,
    GO_TO,
    KEY,
    LOCKED,
    OPEN,
    OPEN_DOOR,
    PICK_UP,
    SIDE,
)

PATIENCE = 40  # obstacles removed on one path before it counts as blocked
MAX_STEPS = 600  # limit of a plan; the longest successful one had 250
THROUGH_BOX, THROUGH_OBJECT, THROUGH_LOCK = 3, 12, 40  # path cost through each obstacle
Goal = Callable[[int, int], bool]  # (cell in front, cell of the agent)


class Stuck(Exception):
    """The expert finds no plan."""


@dataclasses.dataclass
class Map:
    """A level and the actions played on it so far."""

    walls: list[int]  # bits
    cell: list[int]
    name: list[int]
    door: list[int]
    content: list[int]
    agent: int
    direction: int
    held: int
    known: list[int]  # the cells at the last drop
    wanted: list[int]  # not 0: the instruction mentions this object
    played: list[int] = dataclasses.field(default_factory=list)
    unlocking: frozenset[int] = frozenset()  # locked doors with a key being fetched
    ways: set[int] = dataclasses.field(default_factory=set)  # cells of blocked paths

    def kind(self, index: int) -> int:
        return self.name[index] // 6

    def is_spare(self, index: int) -> bool:
        """Return whether the object is an empty box that may be removed by opening it."""
        return self.kind(index) == BOX and not self.wanted[index] and self.content[index] < 0

    def is_wall(self, cell: int) -> bool:
        return bool(self.walls[cell // SIDE] >> (cell % SIDE) & 1)

    def object_at(self, cell: int) -> int:
        """Return the index of the object in a cell, -1 = nothing."""
        return self.cell.index(cell) if cell in self.cell else -1

    def is_free(self, cell: int) -> bool:
        """Return whether an object can be dropped there from a neighbouring cell."""
        return not self.is_wall(cell) and cell not in self.cell

    def key_fits(self, door: int) -> bool:
        return self.held >= 0 and self.name[self.held] == KEY * 6 + self.name[door] % 6

    def play(self, actions: Iterable[int]) -> None:
        for action in actions:
            self.play_one(action)
            if len(self.played) > MAX_STEPS:
                raise Stuck

    def play_one(self, action: int) -> None:
        """rules.act in plain Python."""
        self.played.append(action)
        front = self.agent + STEPS[self.direction]
        ahead = self.object_at(front)
        kind = self.kind(ahead) if ahead >= 0 else None
        if action in (LEFT, RIGHT):
            self.direction = (self.direction + (3 if action == LEFT else 1)) % 4
        elif action == FORWARD and not self.is_wall(front):
            if ahead < 0 or (kind == DOOR and self.door[ahead] == OPEN):
                self.agent = front
        elif action == PICKUP and ahead >= 0 and kind != DOOR and self.held < 0:
            self.held, self.cell[ahead] = ahead, -1
        elif action == DROP:
            if self.held >= 0 and ahead < 0 and not self.is_wall(front):
                self.cell[self.held], self.held = front, -1
            self.known = list(self.cell)
        elif action == TOGGLE and kind == BOX:
            self.cell[ahead] = -1
            if self.content[ahead] >= 0:
                self.cell[self.content[ahead]] = front
        elif action == TOGGLE and kind == DOOR:
            if self.door[ahead] != LOCKED:
                self.door[ahead] = CLOSED if self.door[ahead] == OPEN else OPEN
            elif self.key_fits(ahead):
                self.door[ahead] = OPEN


def forward_cost(world: Map, cell: int, relaxed: bool) -> int | None:
    """Return the steps to enter a cell from a neighbour that faces it; None = impossible.

    relaxed: also through obstacles that must be moved or unlocked first.
    """
    if world.is_wall(cell):
        return None
    index = world.object_at(cell)
    if index < 0 or (world.kind(index) == DOOR and world.door[index] == OPEN):
        return 1
    if world.is_spare(index):
        return THROUGH_BOX if relaxed else None
    if world.kind(index) != DOOR:
        return THROUGH_OBJECT if relaxed else None
    if world.door[index] == CLOSED or world.key_fits(index):
        return 2
    return THROUGH_LOCK if relaxed and index not in world.unlocking else None


def search(world: Map, goal: Goal, *, relaxed: bool = False) -> list[tuple[int, int]] | None:
    """Cheapest path (Dijkstra) as poses (cell, direction) from the current one; None = none."""
    start = (world.agent, world.direction)
    cost, parent, queue = {start: 0}, {start: None}, [(0, 0, start)]
    while queue:
        so_far, _, pose = heapq.heappop(queue)
        if so_far > cost[pose]:
            continue
        cell, direction = pose
        front = cell + STEPS[direction]
        if goal(front, cell):
            way = []
            while pose is not None:
                way.append(pose)
                pose = parent[pose]
            return way[::-1]
        entry = forward_cost(world, front, relaxed)
        ahead = [] if entry is None else [((front, direction), entry)]
        for after, extra in [*ahead, *(((cell, (direction + t) % 4), 1) for t in (3, 1))]:
            total = so_far + extra
            if after not in cost or total < cost[after]:
                cost[after], parent[after] = total, pose
                heapq.heappush(queue, (total, len(parent), after))
    return None


def walk(world: Map, way: list[tuple[int, int]]) -> None:
    """Play a path found without `relaxed`."""
    for (cell, direction), (next_cell, next_direction) in zip(way, way[1:], strict=False):
        if next_cell != cell:
            ahead = world.object_at(next_cell)
            shut = ahead >= 0 and world.door[ahead] != OPEN
            world.play([TOGGLE, FORWARD] if shut else [FORWARD])
        else:
            world.play([LEFT if (next_direction - direction) % 4 == 3 else RIGHT])


def reach(world: Map, goal: Goal) -> None:
    """Walk to a pose that satisfies the goal, removing obstacles."""
    for _ in range(PATIENCE):
        way = search(world, goal)
        if way is not None:
            return walk(world, way)
        way = search(world, goal, relaxed=True)
        if way is None:
            raise Stuck
        cells = [cell for cell, _ in way]
        first = next(i for i, c in enumerate(cells) if i and forward_cost(world, c, False) is None)
        obstacle = world.object_at(cells[first])
        world.ways.update(cells)
        if world.kind(obstacle) == DOOR:
            unlock(world, obstacle)
        elif world.is_spare(obstacle):
            reach(world, facing([world.cell[obstacle]]))
            world.play([TOGGLE])
        else:
            ahead = set(cells[first:])
            take(world, [obstacle], avoid=ahead)
            put_down(world, ahead)
    raise Stuck


def facing(cells: Iterable[int]) -> Goal:
    chosen = {cell for cell in cells if cell >= 0}
    return lambda front, _: front in chosen


def take(world: Map, indices: Iterable[int], avoid: set[int] = frozenset()) -> None:
    """Pick up the nearest of some objects, after dropping any carried object."""
    if world.held >= 0:
        put_down(world, avoid)
    targets = facing(world.cell[index] for index in indices)
    reach(world, targets)
    if world.held >= 0:  # a key needed on the path
        put_down(world, avoid)
        reach(world, targets)
    world.play([PICKUP])


def put_down(world: Map, avoid: set[int] = frozenset()) -> None:
    """Drop the carried object where it blocks nothing: not on a path or next to a door."""
    doors = {c for c, n in zip(world.cell, world.name, strict=True) if c >= 0 and n // 6 == DOOR}
    near_doors = {cell + step for cell in doors for step in STEPS}
    for taboo in (world.ways | avoid | near_doors, avoid | near_doors, avoid, set()):
        way = search(world, lambda front, cell, no=taboo: front not in no and world.is_free(front))
        if way is not None:
            walk(world, way)
            return world.play([DROP])
    raise Stuck


def unlock(world: Map, door: int) -> None:
    """Fetch the key of a locked door and open it."""
    outer = world.unlocking
    world.unlocking = outer | {door}
    for _ in range(PATIENCE):
        if not world.key_fits(door):
            fetch_key(world, world.name[door] % 6)
        reach(world, facing([world.cell[door]]))
        if world.key_fits(door):  # it may have been dropped on the way
            world.unlocking = outer
            return world.play([TOGGLE])
    raise Stuck


def fetch_key(world: Map, colour: int) -> None:
    """Take a key of the colour, out of a box if needed."""
    keys = [i for i, name in enumerate(world.name) if name == KEY * 6 + colour]
    lying = [key for key in keys if world.cell[key] >= 0]
    boxes = [i for i, inside in enumerate(world.content) if inside in keys and world.cell[i] >= 0]
    if not lying and not boxes:
        raise Stuck
    if not lying:
        reach(world, facing(world.cell[box] for box in boxes))
        world.play([TOGGLE])
        lying = [key for key in keys if world.cell[key] >= 0]
    take(world, lying)


@dataclasses.dataclass(frozen=True)
class Clause:
    """The goal of one clause."""

    kind: int
    ours: tuple[int, ...]  # objects to go to, pick up, open or move
    theirs: tuple[int, ...]  # objects to put one of ours next to
    before: int  # object carried when the clause was last checked


def follow(world: Map, clause: Clause) -> None:
    """Play one clause."""
    if clause.kind == GO_TO:
        start = len(world.played)
        reach(world, facing(world.known[i] for i in clause.ours))
        if len(world.played) == start:  # clauses are checked only after an action
            world.play([LEFT, RIGHT])
    elif clause.kind == PICK_UP:
        take(world, clause.ours)
    elif clause.kind == OPEN_DOOR:
        open_one(world, clause.ours)
    else:
        put_next(world, clause)


def open_one(world: Map, doors: tuple[int, ...]) -> None:
    """Open a closed door, else unlock a locked one, else reopen an open one."""
    for door_state in (CLOSED, LOCKED, OPEN):
        some = [door for door in doors if world.door[door] == door_state]
        if some and door_state != LOCKED:
            reach(world, facing(world.cell[door] for door in some))
            return world.play([TOGGLE] if door_state == CLOSED else [TOGGLE, TOGGLE])
        if some:
            return unlock(world, some[0])
    raise Stuck


def put_next(world: Map, clause: Clause) -> None:
    """Carry one of ours to a free cell next to one of theirs; clear such a cell if needed."""

    def near() -> set[int]:
        return {world.cell[i] + s for i in clause.theirs if world.cell[i] >= 0 for s in STEPS}

    for _ in range(PATIENCE):
        if not any(map(world.is_free, near())):
            there = [index for index, cell in enumerate(world.cell) if cell in near()]
            take(world, [i for i in there if world.kind(i) != DOOR], avoid=near())
            put_down(world, near())
        if world.held not in clause.ours:
            take(world, clause.ours)
        cells = near()
        reach(world, lambda front, _, cells=cells: front in cells and world.is_free(front))
        # On the way the object may have been dropped, or its neighbour moved.
        if world.held in clause.ours and world.agent + STEPS[world.direction] in near():
            unaware = not world.played and clause.before != world.held
            return world.play([LEFT, RIGHT, DROP] if unaware else [DROP])
    raise Stuck


def shortest(world: Map, clauses: list[Clause]) -> Map:
    """Return the map after the clauses of one half, in the shorter order."""
    best = None
    for order in (clauses, clauses[::-1])[: len(clauses)]:
        attempt = copy.deepcopy(world)
        try:
            for clause in order:
                follow(attempt, clause)
        except Stuck:
            continue
        if best is None or len(attempt.played) < len(best.played):
            best = attempt
    if best is None:
        raise Stuck
    return best


def plan(level: Any) -> list[int]:
    """Return actions that complete the instruction from a state (host EnvState).

    [] if no plan was found or the instruction is already completed.
    """
    world = map_of(level)
    try:
        for half in open_halves(level):
            world = shortest(world, half)
    except Stuck:
        return []
    return world.played


def map_of(level: Any) -> Map:
    """Return the map of a state."""
    lists = ('cell', 'known', 'name', 'door', 'content')
    return Map(
        walls=[int(row) >> REACH for row in level.rows],
        agent=int(level.agent),
        direction=int(level.direction),
        held=int(level.held),
        wanted=np.asarray(level.member).tolist(),
        **{key: np.asarray(getattr(level, key)).tolist() for key in lists},
    )


def open_halves(level: Any) -> list[list[Clause]]:
    """Return the unmet clauses of each half, in order of execution."""
    bits = np.asarray(level.member)[None] >> np.arange(8)[:, None] & 1
    matched = [tuple(np.flatnonzero(row).tolist()) for row in bits]

    def clause(place: int) -> Clause:
        return Clause(
            kind=int(level.clause[place]),
            ours=matched[2 * place],
            theirs=matched[2 * place + 1],
            before=int(level.before[place]),
        )

    halves = [
        [clause(c) for c in places if level.clause[c] >= 0 and not level.latched[c]]
        for places in ((0, 1), (2, 3))
    ]
    if level.order == AFTER:
        halves.reverse()
    return [half for half in halves[1 if level.half_done else 0 :] if half]
