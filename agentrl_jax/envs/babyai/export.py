"""Export levels of minigrid's BabyAI to arrays (host; the only file that needs minigrid)."""

import contextlib
import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from agentrl_jax.envs.babyai import planner
from agentrl_jax.envs.babyai.rules import REACH
from agentrl_jax.envs.babyai.words import (
    AFTER,
    BEFORE,
    COLOURS,
    DESCRIBED,
    KINDS,
    NUMBERS,
    OBJECTS,
    OPEN_DOOR,
    PICK_UP,
    PLACES,
    PUT_NEXT,
    SIDE,
    mission,
)

MINIGRID = '3.2.0'  # other versions draw different levels for a few seeds


def empty_levels(count: int) -> dict[str, np.ndarray]:
    """Return arrays of `count` empty levels; a cell is row * SIDE + column."""
    return dict(
        walls=np.zeros((count, SIDE), np.uint32),  # bit x of row y
        width=np.zeros(count, np.int8),
        height=np.zeros(count, np.int8),
        cell=np.full((count, OBJECTS), -1, np.int16),  # of each object; -1: none, or in a box
        name=np.full((count, OBJECTS), -1, np.int8),  # kind * 6 + colour
        door=np.zeros((count, OBJECTS), np.int8),  # OPEN, CLOSED or LOCKED
        content=np.full((count, OBJECTS), -1, np.int8),  # object in a box
        member=np.zeros((count, OBJECTS), np.uint8),  # bit 2 c + s: matches side s of clause c
        agent=np.zeros(count, np.int16),
        direction=np.zeros(count, np.int8),  # right, down, left, up
        held=np.full(count, -1, np.int8),  # object carried from the start; cell = its old cell
        max_steps=np.zeros(count, np.int16),
        clause=np.full((count, 4), -1, np.int8),  # GO_TO, ...; two per half of the sentence
        strict=np.zeros((count, 4), bool),
        described=np.full((count, 4, 2), -1, np.int16),  # see words.description
        order=np.zeros(count, np.int8),  # SINGLE, BEFORE or AFTER, between the halves
        length=np.full(count, -1, np.int16),  # steps of the expert; -1: unsolved
    )


def gym_id(name: str) -> str:
    """Return minigrid's id of a level; only the corrected version of GoToObjS6 still exists."""
    return f'BabyAI-{name}-v{1 if name == "GoToObjS6" else 0}'


def export_levels(name: str, seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the levels that minigrid draws for the seeds."""
    make = level_maker(name)
    levels = empty_levels(len(seeds))
    for row, seed in enumerate(seeds):
        level = {key: values[row] for key, values in levels.items()}
        env = make(seed)
        fill_level(level, env)
        for key in ('width', 'height', 'agent', 'direction', 'held', 'max_steps', 'order'):
            levels[key][row] = level[key]
        if mission(level) != env.mission:
            raise ValueError(f'{name}, seed {seed}: {env.mission!r} became {mission(level)!r}')
        levels['length'][row] = expert_length(level, env)
    return levels


def expert_length(level: dict[str, np.ndarray], env: Any) -> int:
    """Return the steps of the expert in a reset minigrid environment; -1 = unsolved."""
    for action in planner.plan(first_state(level)):
        _, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            return env.step_count if reward > 0 else -1
    return -1


def first_state(level: dict[str, np.ndarray]) -> SimpleNamespace:
    """Return the fields of a state that the expert reads, from the arrays of one level."""
    lying = np.where(np.arange(OBJECTS) == level['held'], -1, level['cell'])
    start = dict(
        rows=level['walls'] << REACH,
        cell=lying,
        known=level['cell'],
        before=np.full(4, -1),
        latched=np.zeros(4, bool),
        half_done=False,
    )
    return SimpleNamespace(**(level | start))


def level_maker(name: str) -> Callable[[int], Any]:
    """Return make(seed), which creates minigrid's environment reset to the level of the seed."""
    try:
        import gymnasium
        import minigrid
    except ImportError as error:
        raise ImportError(
            f'more levels of {name} than those shipped with agentrl_jax need the package '
            f'minigrid. Run pip install minigrid=={MINIGRID}, or use fewer levels'
        ) from error
    if minigrid.__version__ != MINIGRID:
        raise ImportError(
            f'minigrid {minigrid.__version__} draws other levels than the pinned version. '
            f'Run pip install minigrid=={MINIGRID}'
        )

    def make(seed: int) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints each rejected draw
            env = gymnasium.make(gym_id(name)).unwrapped
            env.reset(seed=int(seed))
        return env

    return make


def fill_level(level: dict[str, Any], env: Any) -> None:
    """Write a reset minigrid environment into the arrays of one level."""
    grid, objects, cells = env.grid, [], []
    for y in range(grid.height):
        for x in range(grid.width):
            thing = grid.get(x, y)
            if thing is not None and thing.type == 'wall':
                level['walls'][y] |= np.uint32(1 << x)
            elif thing is not None:
                objects.append(thing)
                cells.append(y * SIDE + x)
    if env.carrying is not None:
        x, y = env.carrying.init_pos
        objects.append(env.carrying)
        cells.append(int(y) * SIDE + int(x))
        level['held'] = len(objects) - 1
    for thing in [thing for thing in objects if thing.contains is not None]:
        level['content'][objects.index(thing)] = len(objects)
        objects.append(thing.contains)
        cells.append(-1)
    if len(objects) > OBJECTS:
        raise ValueError(f'{len(objects)} objects are more than OBJECTS={OBJECTS}')
    for index, (thing, cell) in enumerate(zip(objects, cells, strict=True)):
        level['cell'][index] = cell
        level['name'][index] = KINDS.index(thing.type) * 6 + COLOURS.index(thing.color)
        level['door'][index] = thing.encode()[2]
    if np.bincount(level['name'][: len(objects)]).max(initial=0) > NUMBERS:
        raise ValueError(f'more than NUMBERS={NUMBERS} objects have the same name')
    level.update(width=grid.width, height=grid.height, max_steps=env.max_steps)
    level.update(agent=env.agent_pos[1] * SIDE + env.agent_pos[0], direction=env.agent_dir)
    fill_instruction(level, env.instrs, objects)


def fill_instruction(level: dict[str, Any], instruction: Any, objects: list) -> None:
    """Write minigrid's instruction: up to four clauses and the order of the halves.

    Only clauses to pick up or open are strict in these levels.
    """
    kind = type(instruction).__name__
    halves = [instruction]
    if kind in ('BeforeInstr', 'AfterInstr'):
        halves = [instruction.instr_a, instruction.instr_b]
        level['order'] = BEFORE if kind == 'BeforeInstr' else AFTER
    for half, group in zip(halves, (0, 2), strict=False):
        clauses = [half]
        if type(half).__name__ == 'AndInstr':
            clauses = [half.instr_a, half.instr_b]
        for place, clause in enumerate(clauses, group):
            fill_clause(level, place, clause, objects)


def fill_clause(level: dict[str, Any], place: int, clause: Any, objects: list) -> None:
    kinds = ('GoToInstr', 'PickupInstr', 'OpenInstr', 'PutNextInstr')
    kind = kinds.index(type(clause).__name__)
    descriptions = [clause.desc_move, clause.desc_fixed] if kind == PUT_NEXT else [clause.desc]
    level['clause'][place] = kind
    if kind in (PICK_UP, OPEN_DOOR):
        level['strict'][place] = clause.strict
    for side, desc in enumerate(descriptions):
        level['described'][place, side] = describe(desc)
        things = [thing for thing in desc.obj_set if thing.type != 'wall']
        if len(things) < len(desc.obj_set) and kind != PICK_UP:  # "grey object" matches walls
            raise ValueError('an instruction about walls is not supported')
        for thing in things:
            index = next(i for i, other in enumerate(objects) if other is thing)
            level['member'][index] |= np.uint8(1 << (2 * place + side))


def describe(desc: Any) -> int:
    """Return the number of minigrid's ObjDesc after its objects have been matched."""
    colour = (*COLOURS, None).index(desc.color)
    number = DESCRIBED.index(desc.type) * (len(COLOURS) + 1) + colour
    number = number * len(PLACES) + PLACES.index(desc.loc)
    return number * 2 + (len(desc.obj_set) > 1)
