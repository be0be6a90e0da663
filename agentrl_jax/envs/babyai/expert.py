"""The planner's plans as action names, and the map in words (host)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.babyai import macros, planner, rules, sight
from agentrl_jax.envs.babyai.rules import EnvState
from agentrl_jax.envs.babyai.words import COLOURS, DOOR, KINDS, NUMBERS, SIDE

BLOCK = 64  # states per call of a program
HANDS = (rules.PICKUP, rules.DROP, rules.TOGGLE)
FACING = ('right', 'down', 'left', 'up')
MACRO_OF = dict(zip(macros.PRIMITIVES, range(len(macros.PRIMITIVES)), strict=True))


def rows_of(stacked: Any) -> list[Any]:
    """Split N stacked host states or menus."""
    count = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda x, i=i: np.asarray(x[i]), stacked) for i in range(count)]


def primitive_plans(states: Any) -> list[list[int]]:
    return [planner.plan(state) for state in rows_of(states)]


def macro_plans(env: Any, states: Any, params: Any) -> list[list[int]]:
    """Return the next macro action of each state; [] = unsolved.

    It is an available action that covers the plan up to its next pickup, door or goal. If there is
    none, it is the plan's next primitive.
    """
    singles = rows_of(states)
    plans = [planner.plan(state) for state in singles]
    menus = in_blocks(_menus(env), states)
    wishes = [
        wish(state, plan, *menu) if plan else (-1, ())
        for state, plan, menu in zip(singles, plans, rows_of(menus), strict=True)
    ]
    tried = np.array([action for action, _ in wishes])
    step = functools.partial(_outcomes(env), params)
    after = in_blocks(step, states, np.maximum(tried, 0))
    results = []
    for reached, plan, (action, end) in zip(rows_of(after), plans, wishes, strict=True):
        fits = action >= 0 and arrived(reached, end)
        # There is no single action for picking up
        single = [MACRO_OF[first] for first in plan[:1] if first in MACRO_OF]
        results.append([action] if fits else single)
    return results


def in_blocks(program: Callable, *rows: Any) -> Any:
    """Call a program on N host rows, BLOCK at a time, so that every N shares one compilation."""
    count = len(jax.tree.leaves(rows)[0])
    blocks = [
        jax.tree.map(lambda x, at=at: x[np.minimum(at + np.arange(BLOCK), count - 1)], rows)
        for at in range(0, count, BLOCK)
    ]
    results = jax.device_get([program(*block) for block in blocks])
    return jax.tree.map(lambda *x: np.concatenate(x)[:count], *results)


@functools.cache
def _menus(env: Any):
    """Jitted: states [N] -> objects in sight, their cells [N, m], and available actions."""

    def one(state):
        in_sight = sight.look(state, env.most_seen)
        offer = macros.offers(state, in_sight, env.agentgym_wording)
        steps, place = jnp.asarray(rules.STEPS), in_sight.place
        ahead, right = steps[state.direction], steps[(state.direction + 1) % 4]
        forward, sideways = jnp.asarray(sight.FORWARD)[place], jnp.asarray(sight.RIGHT)[place]
        cell = state.agent + forward * ahead + sideways * right
        return in_sight, jnp.where(in_sight.present, cell, -1), offer

    return jax.jit(jax.vmap(one))


@functools.cache
def _outcomes(env: Any):
    """Jitted: (params, states [N], actions [N]) -> next states."""
    key = jax.random.key(0)
    return jax.jit(jax.vmap(lambda p, s, a: env.advance(key, s, a, p)[0], in_axes=(None, 0, 0)))


def wish(
    state: Any, plan: list[int], in_sight: sight.Sight, cells: np.ndarray, offer: macros.Offers
) -> tuple[int, tuple]:
    """Return (macro action, expected pose or carried object) that shortens the plan; -1 = none."""
    world, doors = planner.map_of(state), []
    step = next((i for i, action in enumerate(plan) if action in HANDS), len(plan))
    for move in plan[:step]:
        world.play_one(move)
        if move == rules.FORWARD and world.object_at(world.agent) >= 0:
            doors.append(world.agent)
    front = world.agent + rules.STEPS[world.direction]
    action = plan[step] if step < len(plan) else None
    if action == rules.DROP:
        options = []
    elif action == rules.PICKUP:
        options = [('pickup', 'pick_up', front, ('held', world.object_at(front)))]
    elif action == rules.TOGGLE and step == 0:
        options = []
    else:
        options = [('go_to', 'near', front, ('front', front))]
        if action == rules.TOGGLE and plan[step + 1 : step + 2] == [rules.FORWARD]:
            options.insert(0, ('toggle_through', 'toggle_through', front, ('at', front)))
    options += [('through', 'through', cell, ('at', cell)) for cell in reversed(doors)]
    for family, able, cell, end in options:
        rows = np.flatnonzero((cells == cell) & getattr(offer, able))
        if len(rows) and (step > 1 or family != 'go_to'):
            name = in_sight.name[rows[0]] - (macros.DOORS if family == 'pickup' else 0)
            numbers = offer.go_to if family in ('pickup', 'go_to') else in_sight.number
            number = min(numbers[rows[0]], NUMBERS - 1)
            return int(macros.ACTIONS[family].start + name * NUMBERS + number), end
    return -1, ()


def arrived(state: Any, end: tuple) -> bool:
    """Return whether the action had the expected result or solved the episode."""
    what, value = end
    front = int(state.agent) + rules.STEPS[int(state.direction)]
    places = {'held': int(state.held), 'front': front, 'at': int(state.agent)}
    return bool(state.won) or places[what] == value


def cells(state: EnvState) -> list[list[str]]:
    """Return the map in words, row by row: walls, objects, the agent."""
    state = jax.tree.map(np.asarray, state)
    walls = (state.rows[:, None] >> np.arange(rules.REACH, rules.REACH + SIDE)) & 1  # [y, x]
    words = [['wall' if wall else 'empty' for wall in row] for row in walls]
    for cell, name, door in zip(state.cell, state.name, state.door, strict=True):
        if cell >= 0:
            kind, colour = divmod(int(name), len(COLOURS))
            door_state = f'{sight.STATES[door]} ' if kind == DOOR else ''
            words[cell // SIDE][cell % SIDE] = f'{COLOURS[colour]} {door_state}{KINDS[kind]}'
    y, x = divmod(int(state.agent), SIDE)
    words[y][x] = f'agent facing {FACING[int(state.direction)]}'
    height, width = (np.flatnonzero(~walls.astype(bool).all(axis))[-1] + 2 for axis in (1, 0))
    return [row[:width] for row in words[:height]]
