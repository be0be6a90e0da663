"""Observations as lines of a table: short ones, and AgentGym's for macro actions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.babyai import macros, sight
from agentrl_jax.envs.babyai.rules import VIEW, EnvState
from agentrl_jax.envs.babyai.sight import FORWARD, NAMES, PLACES, RIGHT, THING_NAMES
from agentrl_jax.envs.babyai.words import NUMBERS
from agentrl_jax.envs.base import Lines

STEPS = range(1, VIEW)  # possible distances of a wall or box straight ahead


def short_place(place: int) -> str:
    """Return a place as short text, such as '2 ahead 1 left'."""
    forward, right = int(FORWARD[place]), int(RIGHT[place])
    side = f'{abs(right)} {"right" if right > 0 else "left"}' if right else ''
    return ' '.join(filter(None, [f'{forward} ahead' if forward else '', side])) or 'here'


def long_place(place: int) -> str:
    """Return a place in AgentGym's words."""
    forward, right = int(FORWARD[place]), int(RIGHT[place])
    if right == 0:
        return f'right in front of you {forward} steps away.'
    side = 'right' if right > 0 else 'left'
    return f'{forward} steps in front of you and {abs(right)} steps to your {side}.'


@functools.cache
def short_lines(numbered: bool) -> Lines:
    """Return the short lines. numbered: number objects of one name, for macro actions."""
    names = macros.numbered(NAMES) if numbered else NAMES
    return Lines(
        **sight.goal_lines('', ordered=True),
        refused=['nothing happens\n'],
        object=[f'{name} {short_place(place)}\n' for name in names for place in range(PLACES)],
        more=['more objects\n'],
        wall=[f'wall {steps} ahead\n' for steps in STEPS],
        held=[f'carrying {name}\n' for name in THING_NAMES],
    )


def short_ids(state: EnvState, *, most: int, numbered: bool) -> jax.Array:
    """Return int32 [R]: instruction, rejection, objects, wall ahead, carried object."""
    lines, in_sight = short_lines(numbered), sight.look(state, most)
    wall, held = sight.wall_ahead(in_sight), sight.held_name(state)
    name = numbered_names(in_sight) if numbered else in_sight.name
    return jnp.concatenate(
        [
            sight.goal_ids(state, lines, ordered=True, shown=True),
            lines.ids('refused', 0, state.reply >= 0),
            lines.ids('object', name * PLACES + in_sight.place, in_sight.present),
            lines.ids('more', 0, in_sight.more),
            lines.ids('wall', wall - 1, wall < VIEW),
            lines.ids('held', held, held >= 0),
        ]
    )


def short_slots(clauses: np.ndarray, *, most: int, numbered: bool) -> list[range]:
    """Return the possible lines at each index of short_ids; clauses int [levels, 4]."""
    lines = short_lines(numbered)
    refused = lines.slots['refused'] if numbered else range(0)
    goal = sight.goal_slots(lines, clauses, ordered=True)
    ends = (lines.slots[key] for key in ('more', 'wall', 'held'))
    return [*goal, refused, *[lines.slots['object']] * most, *ends]


def numbered_names(seen: sight.Sight) -> jax.Array:
    """Return int32 [m]: indices into macros.numbered(NAMES)."""
    return seen.name * NUMBERS + jnp.minimum(seen.number, NUMBERS - 1)


@functools.cache
def long_lines(agentgym: bool) -> Lines:
    names = macros.action_names(agentgym)
    facing = 'The room has walls around you. You are facing a'
    numbered = macros.numbered(NAMES)
    return Lines(
        **sight.goal_lines('Your goal: ', ordered=not agentgym),
        reply=macros.reply_texts(agentgym),
        header=[
            'You cannot see any objects within sight.\n',
            'In front of you in this room, you can see several objects:\n',
        ],
        object=[
            f'There is a {n} {long_place(place)}\n' for n in numbered for place in range(PLACES)
        ],
        listed=[f'{name},\n' for name in names],
        listed_last=[f'{names[macros.CHECK]}\n'],
        more=['There are more objects further away.\n'],
        barrier=[
            'The room has walls around you.\n',
            *(f'{facing} {what} {n} steps away.\n' for what in ('wall', 'box') for n in STEPS),
        ],
        held=[
            'You are not carrying anything.\n',
            *(f'You are carrying a {name}.\n' for name in THING_NAMES),
        ],
        completed=['The task is completed.\n'],
        offers=['Available actions: ["turn left", "turn right",\n'],
        offer=[f'"{name}",\n' for name in names],
        offer_last=[f'"{names[macros.CHECK]}"]\n'],
    )


def long_ids(state: EnvState, *, most: int, agentgym: bool) -> jax.Array:
    """Return int32 [R]: instruction, reply, description, available actions.

    agentgym: only the first observation has the instruction, and a reply replaces the description.
    """
    lines, in_sight = long_lines(agentgym), sight.look(state, most)
    offer = macros.offers(state, in_sight, agentgym)
    refused = state.reply >= 0
    visible = ~refused if agentgym else jnp.bool_(True)
    shows_goal = (state.time == 0) if agentgym else jnp.bool_(True)
    anything = jnp.any(in_sight.present) | jnp.any(in_sight.walls != 0)
    facing = jnp.where(offer.box, len(STEPS), 0) + offer.barrier
    actions = jnp.concatenate(macros.menu(in_sight, offer))
    listed = lines.ids('listed', actions, (actions >= 0) & (state.reply == macros.LIST))
    place = numbered_names(in_sight) * PLACES + in_sight.place
    objects = lines.ids('object', place, in_sight.present & visible)
    if agentgym:
        shared = macros.compact(listed, listed.shape[0])
        objects, listed = jnp.where(visible, objects, shared[:most]), shared[most:]
    return jnp.concatenate(
        [
            sight.goal_ids(state, lines, ordered=not agentgym, shown=shows_goal),
            lines.ids('reply', state.reply, refused),
            lines.ids('header', anything.astype(jnp.int32), visible),
            objects,
            listed,
            lines.ids('listed_last', 0, state.reply == macros.LIST),
            lines.ids('more', 0, in_sight.more & visible),
            lines.ids('barrier', jnp.where(offer.barrier < VIEW, facing, 0), visible),
            lines.ids('held', sight.held_name(state) + 1, visible),
            lines.ids('completed', 0, state.over & ~refused),
            lines.ids('offers', 0),
            lines.ids('offer', actions, actions >= 0),
            lines.ids('offer_last', 0),
        ]
    )


def long_slots(clauses: np.ndarray, *, most: int, agentgym: bool) -> list[range]:
    """Return the possible lines at each index of long_ids; clauses int [levels, 4]."""
    lines = long_lines(agentgym)
    slots = lines.slots
    actions = 3 + 2 * most + macros.MAX_DOORS
    objects = range(slots['object'].start, slots['listed'].stop) if agentgym else slots['object']
    listed = actions - most if agentgym else actions
    return [
        *sight.goal_slots(lines, clauses, ordered=not agentgym),
        *(slots[key] for key in ('reply', 'header')),
        *[objects] * most,
        *[slots['listed']] * listed,
        *(slots[k] for k in ('listed_last', 'more', 'barrier', 'held', 'completed', 'offers')),
        *[slots['offer']] * actions,
        slots['offer_last'],
    ]


def joined(lines: list[str], ids: Any) -> str:
    return ''.join(lines[i] for i in np.asarray(ids) if i >= 0)
