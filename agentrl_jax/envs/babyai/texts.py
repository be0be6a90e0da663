"""Observations as lines of a table: short ones for primitive actions, AgentGym's for its own."""

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

STEPS = range(1, VIEW)  # at which a wall or a box can be straight ahead


def short_place(place: int) -> str:
    """'2 ahead 1 left' and the like."""
    forward, right = int(FORWARD[place]), int(RIGHT[place])
    side = f'{abs(right)} {"right" if right > 0 else "left"}' if right else ''
    return ' '.join(filter(None, [f'{forward} ahead' if forward else '', side])) or 'here'


def long_place(place: int) -> str:
    """AgentGym's words for where something is."""
    forward, right = int(FORWARD[place]), int(RIGHT[place])
    if right == 0:
        return f'right in front of you {forward} steps away.'
    side = 'right' if right > 0 else 'left'
    return f'{forward} steps in front of you and {abs(right)} steps to your {side}.'


@functools.cache
def short_lines(numbered: bool) -> Lines:
    """numbered: for macro actions, which tell objects of one name apart."""
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
    """int32 [R]: instruction, refusal, objects in sight, the wall ahead, what is carried."""
    lines, seen = short_lines(numbered), sight.look(state, most)
    wall, held = sight.wall_ahead(seen), sight.held_name(state)
    name = numbered_names(seen) if numbered else seen.name
    return jnp.concatenate(
        [
            sight.goal_ids(state, lines, ordered=True, shown=True),
            lines.ids('refused', 0, state.reply >= 0),
            lines.ids('object', name * PLACES + seen.place, seen.present),
            lines.ids('more', 0, seen.more),
            lines.ids('wall', wall - 1, wall < VIEW),
            lines.ids('held', held, held >= 0),
        ]
    )


def short_slots(clauses: np.ndarray, *, most: int, numbered: bool) -> list[range]:
    """For each place of short_ids the lines that it may hold; clauses int [levels, 4]."""
    lines = short_lines(numbered)
    refused = lines.slots['refused'] if numbered else range(0)
    goal = sight.goal_slots(lines, clauses, ordered=True)
    ends = (lines.slots[key] for key in ('more', 'wall', 'held'))
    return [*goal, refused, *[lines.slots['object']] * most, *ends]


def numbered_names(seen: sight.Sight) -> jax.Array:
    """int32 [m]: index into macros.numbered(NAMES)."""
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
    """int32 [R]: instruction, reply, description, actions on offer.

    agentgym: the instruction opens the first observation only, and a reply takes the place of the
    description.
    """
    lines, seen = long_lines(agentgym), sight.look(state, most)
    offer = macros.offers(state, seen, agentgym)
    refused = state.reply >= 0
    visible = ~refused if agentgym else jnp.bool_(True)
    shown = (state.time == 0) if agentgym else jnp.bool_(True)
    anything = jnp.any(seen.present) | jnp.any(seen.walls != 0)
    facing = jnp.where(offer.box, len(STEPS), 0) + offer.barrier
    actions = jnp.concatenate(macros.menu(seen, offer))
    listed = lines.ids('listed', actions, (actions >= 0) & (state.reply == macros.LIST))
    place = numbered_names(seen) * PLACES + seen.place
    objects = lines.ids('object', place, seen.present & visible)
    if agentgym:
        shared = macros.compact(listed, listed.shape[0])
        objects, listed = jnp.where(visible, objects, shared[:most]), shared[most:]
    return jnp.concatenate(
        [
            sight.goal_ids(state, lines, ordered=not agentgym, shown=shown),
            lines.ids('reply', state.reply, refused),
            lines.ids('header', anything.astype(jnp.int32), visible),
            objects,
            listed,
            lines.ids('listed_last', 0, state.reply == macros.LIST),
            lines.ids('more', 0, seen.more & visible),
            lines.ids('barrier', jnp.where(offer.barrier < VIEW, facing, 0), visible),
            lines.ids('held', sight.held_name(state) + 1, visible),
            lines.ids('completed', 0, state.over & ~refused),
            lines.ids('offers', 0),
            lines.ids('offer', actions, actions >= 0),
            lines.ids('offer_last', 0),
        ]
    )


def long_slots(clauses: np.ndarray, *, most: int, agentgym: bool) -> list[range]:
    """For each place of long_ids the lines that it may hold."""
    lines = long_lines(agentgym)
    slots = lines.slots
    actions = 3 + 2 * most + macros.MOST_DOORS
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
