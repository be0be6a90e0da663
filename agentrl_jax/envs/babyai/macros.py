"""AgentGym's macro actions for BabyAI, which name numbered objects and walk entire paths.

`go to red ball 1` walks to the first red ball and `pickup` also takes it. `go through` enters an
open door; `toggle and go through` opens a closed one first. Each observation lists the available
actions. Source: AgentGym's agentenv-babyai (commit 48d77a0). The numbers of `go to` and `pickup`
count only reachable objects; those of doors and descriptions count all objects.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.babyai import paths, rules
from agentrl_jax.envs.babyai.rules import REACH, VIEW, EnvState
from agentrl_jax.envs.babyai.sight import (
    DOOR_NAMES,
    FORWARD,
    NAMES,
    RIGHT,
    STATES,
    THING_NAMES,
    Sight,
    held_name,
    wall_ahead,
)
from agentrl_jax.envs.babyai.words import BOX, CLOSED, COLOURS, KEY, LOCKED, NUMBERS, OPEN

SINGLE_ACTIONS = ('turn left', 'turn right', 'move forward', 'drop', 'toggle')
PRIMITIVES = (rules.LEFT, rules.RIGHT, rules.FORWARD, rules.DROP, rules.TOGGLE)
TURN_LEFT, TURN_RIGHT, MOVE_FORWARD, DROP, TOGGLE, CHECK = range(6)
NO_CHANGE, UNKNOWN, BARRIER, OCCUPIED, EMPTY_HANDED, LIST = range(6)  # replies without a name
DOORS, THINGS = len(DOOR_NAMES), len(THING_NAMES)
FRONT = (VIEW - 2) * VIEW + REACH  # place of the cell in front
MAX_DOORS = 8  # in sight at once; room walls are at least four cells from each other


NO_WAY = 'as there is no path leading to it'
KEYLESS = 'as you are not carrying a key'
WRONG_KEY = 'as the color of the key you are carrying does not match the color of door'
# Actions and replies about an object: (text, names that it applies to)
ACTION_TEXTS = {
    'pickup': ('{pick_up} {name}', THING_NAMES),
    'through': ('go through {name}', DOOR_NAMES),
    'toggle_through': ('toggle and go through {name}', DOOR_NAMES),
    'go_to': ('go to {name}', NAMES),
}
REPLY_TEXTS = {
    'no_way_pickup': (f'You cannot {{pick_up}} {{name}}, {NO_WAY}.\n', THING_NAMES),
    'no_way_through': (f'You cannot go through {{name}}, {NO_WAY}.\n', DOOR_NAMES),
    'shut': (
        'You cannot go through {name}, as it is closed. You should toggle it first.\n',
        DOOR_NAMES,
    ),
    'no_way_toggle': (f'You cannot toggle and go through {{name}}, {NO_WAY}.\n', DOOR_NAMES),
    'no_key': (f'You cannot toggle and go through {{name}}, {KEYLESS}.\n', DOOR_NAMES),
    'wrong_key': (f'You cannot toggle and go through {{name}}, {WRONG_KEY}.\n', DOOR_NAMES),
    'no_way_go_to': (f'You cannot go to {{name}}, {NO_WAY}.\n', NAMES),
}
PICKUP_VERBS = {True: 'pickup', False: 'pick up'}  # keyed by `agentgym`


def _blocks(first: int, families: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, range]:
    """Return consecutive ranges of ids, NUMBERS ids per name."""
    ranges = {}
    for family, (_, names) in families.items():
        ranges[family] = range(first, first + len(names) * NUMBERS)
        first = ranges[family].stop
    return ranges


ACTIONS, REPLIES = _blocks(CHECK + 1, ACTION_TEXTS), _blocks(LIST + 1, REPLY_TEXTS)


def numbered(names: tuple[str, ...]) -> list[str]:
    return [f'{name} {number + 1}' for name in names for number in range(NUMBERS)]


def _written(families: dict[str, tuple[str, tuple[str, ...]]], agentgym: bool) -> list[str]:
    verb = PICKUP_VERBS[agentgym]
    return [
        text.format(pick_up=verb, name=name)
        for text, names in families.values()
        for name in numbered(names)
    ]


def action_names(agentgym: bool) -> tuple[str, ...]:
    """Return the names of all actions, including those rarely on offer."""
    return *SINGLE_ACTIONS, 'check available actions', *_written(ACTION_TEXTS, agentgym)


def reply_texts(agentgym: bool) -> list[str]:
    """Return the replies to actions that are not executed, as lines."""
    return [
        'No change in state.\n',
        'The action is not recognized. Please check valid actions.\n',
        "There is a barrier in front of you, you can't move forward.\n",
        'You cannot drop the object, as there is already an object in front of you.\n',
        'You cannot drop the object, as you are not carrying anything.\n',
        'You can take the following actions: turn left, turn right,\n',
        *_written(REPLY_TEXTS, agentgym),
    ]


@struct.dataclass
class Offers:
    """The available actions: for each of the m objects in sight, and without an object."""

    near: jax.Array  # bool [m]  a path leads to a pose facing the object
    go_to: jax.Array  # int32 [m]  the object's number in `go to`, from 0
    pick_up: jax.Array  # bool [m]
    through: jax.Array  # bool [m]  an open door that a path leads into
    toggle_through: jax.Array  # bool [m]
    forward: jax.Array  # bool []
    drop: jax.Array  # bool []
    toggle: jax.Array  # bool []
    free: jax.Array  # uint32 [ROOM]  cells that paths may use
    barrier: jax.Array  # int32 []  steps to the nearest barrier straight ahead, VIEW = none
    box: jax.Array  # bool []  that barrier is a box


def offers(state: EnvState, sight: Sight, agentgym: bool) -> Offers:
    """Return the available actions. agentgym: `toggle` is only for shut doors."""
    free = paths.free_cells(sight.solid, state.direction)
    cells = paths.reachable(free)
    near = sight.present & paths.has(paths.beside(cells), sight.place)
    inside = paths.has(cells, sight.place)
    door, door_state = sight.name < DOORS, sight.name % len(STATES)
    kind = (sight.name - DOORS) // len(COLOURS) + 1
    is_box = ~door & (kind == BOX)
    held = held_name(state)
    fits = (held // len(COLOURS) == KEY - 1) & (held % len(COLOURS) == sight.name // len(STATES))
    openable = door & ((door_state == CLOSED) | ((door_state == LOCKED) & (held >= 0) & fits))
    front = sight.present & (sight.place == FRONT)
    ahead = (jnp.asarray(RIGHT)[sight.place] == 0) & is_box & sight.present
    box = jnp.min(jnp.where(ahead, jnp.asarray(FORWARD)[sight.place], VIEW))
    barrier = jnp.minimum(box, wall_ahead(sight))
    same = (sight.name[None] == sight.name[:, None]) & near[None]
    earlier = jnp.arange(sight.name.shape[0])
    toggles = front & (openable if agentgym else openable | (door & (door_state == OPEN)) | is_box)
    return Offers(
        near=near,
        go_to=jnp.sum(same & (earlier[None] < earlier[:, None]), 1),
        pick_up=near & ~door & (held < 0),
        through=sight.present & inside & door & (door_state == OPEN),
        toggle_through=near & openable,
        forward=barrier > 1,
        drop=(held >= 0) & ~jnp.any(front & ~door) & (wall_ahead(sight) > 1),
        toggle=jnp.any(toggles),
        free=free,
        barrier=barrier,
        box=box < wall_ahead(sight),
    )


def menu(sight: Sight, offer: Offers) -> list[jax.Array]:
    """Return available actions in AgentGym's order, -1 = none, without the first two and last."""

    def block(family, present, name, number):
        number = jnp.minimum(number, NUMBERS - 1)
        return jnp.where(present, ACTIONS[family].start + name * NUMBERS + number, -1)

    def single(action, present):
        return jnp.where(present, action, -1)[None]

    numbers = (sight.name - DOORS, offer.go_to)
    enter = block('through', offer.through, sight.name, sight.number)
    opened = block('toggle_through', offer.toggle_through, sight.name, sight.number)
    door = compact(jnp.maximum(enter, opened), MAX_DOORS)
    # Only the door in front can be toggled; it is the first in the list.
    return [
        single(MOVE_FORWARD, offer.forward),
        block('pickup', offer.pick_up, *numbers),
        single(DROP, offer.drop),
        door[:1],
        single(TOGGLE, offer.toggle),
        door[1:],
        block('go_to', offer.near, sight.name, offer.go_to),
    ]


def offered(sight: Sight, offer: Offers) -> jax.Array:
    """Return bool [actions]: turns and the menu, without `check available actions`."""
    ids = jnp.concatenate([jnp.array([TURN_LEFT, TURN_RIGHT]), *menu(sight, offer)])
    return (
        jnp.zeros(len(MEANING['name']), bool)
        .at[ids]
        .set(True, mode='drop', wrap_negative_indices=False)
    )


def compact(ids: jax.Array, most: int) -> jax.Array:
    """Return the first `most` ids that are not -1, in order; int32 [most]."""
    present = ids >= 0
    rank = jnp.cumsum(present) - 1
    chosen = present[None] & (rank[None] == jnp.arange(most)[:, None])
    return jnp.max(jnp.where(chosen, ids[None], -1), 1)


def _meanings() -> dict[str, np.ndarray]:
    """Return the family (-1 = no object), name and number of every action."""
    count = ACTIONS['go_to'].stop
    family, name = np.full(count, -1), np.zeros(count, int)
    number = np.zeros(count, int)
    for index, block in enumerate(ACTIONS.values()):
        offset = np.arange(len(block))
        family[block.start : block.stop] = index
        name[block.start : block.stop] = offset // NUMBERS
        number[block.start : block.stop] = offset % NUMBERS
    name += np.where(family == list(ACTIONS).index('pickup'), DOORS, 0)
    return dict(family=family, name=name, number=number)


MEANING = _meanings()
PICK, THROUGH, TOGGLE_THROUGH, GO_TO = range(4)


@struct.dataclass
class Errand:
    """An action as a path followed by primitives."""

    steps: jax.Array  # int32 [HEADINGS, ROOM, ROOM]  from paths.way_to
    tail: jax.Array  # int32 [2]  primitives after the path, -1 = none
    reply: jax.Array  # int32 []  reason for not executing it, -1 = executed


def errand(state: EnvState, action: jax.Array, sight: Sight, offer: Offers) -> Errand:
    """Return the path and primitives of an action, or the reply if it is not available."""
    meaning = {key: jnp.asarray(values)[action] for key, values in MEANING.items()}
    family, name, number = meaning['family'], meaning['name'], meaning['number']
    mine = sight.present & (sight.name == name)
    # Objects of a name are numbered in two ways: all of them, or only the reachable ones.
    counted = mine & (sight.number == number)
    counts_near = (family == PICK) | (family == GO_TO)
    chosen = jnp.where(counts_near, mine & offer.near & (offer.go_to == number), counted)
    able = jnp.stack([offer.pick_up, offer.through, offer.toggle_through, offer.near])[family]
    on_offer = jnp.any(chosen & able)
    place = jnp.max(jnp.where(chosen, sight.place, 0))
    steps = paths.way_to(place, offer.free, enter=family == THROUGH)
    single = jnp.asarray([*PRIMITIVES, -1])[jnp.minimum(action, CHECK)]
    tails = jnp.asarray([[rules.PICKUP, -1], [-1, -1], [rules.TOGGLE, rules.FORWARD], [-1, -1]])
    tail = jnp.where(family < 0, jnp.stack([single, jnp.int32(-1)]), tails[family])
    steps = jnp.where(family < 0, 0, steps)
    idle = (family >= 0) & (steps[0, paths.START[0], paths.START[1]] == 0) & (tail[0] < 0)
    refused = _refusal(state, family, name, number, mine, counted, offer)
    reply = jnp.where(on_offer, jnp.where(idle, NO_CHANGE, -1), refused)
    return Errand(steps, tail, jnp.where(family < 0, _single_reply(action, state, offer), reply))


def _single_reply(action: jax.Array, state: EnvState, offer: Offers) -> jax.Array:
    """Return the reply to an action without an object, -1 = executed."""
    dropped = jnp.where(state.held >= 0, OCCUPIED, EMPTY_HANDED)
    replies = jnp.stack(
        [
            jnp.int32(-1),
            jnp.int32(-1),
            jnp.where(offer.forward, -1, BARRIER),
            jnp.where(offer.drop, -1, dropped),
            jnp.where(offer.toggle, -1, UNKNOWN),
            jnp.int32(LIST),
        ]
    )
    return replies[jnp.minimum(action, CHECK)]


def _refusal(state, family, name, number, mine, counted, offer: Offers) -> jax.Array:
    """Return the reply to an unavailable action about an object."""
    there = jnp.any(counted)
    held = held_name(state)
    door_state, colour = name % len(STATES), name // len(STATES)
    no_key = (held < 0) | (held // len(COLOURS) != KEY - 1)
    wrong = held % len(COLOURS) != colour

    def at(key, first=0):
        return REPLIES[key].start + (name - first) * NUMBERS + number

    # The number after the reachable objects is that of the farthest object, if out of reach.
    last = jnp.max(jnp.where(mine, jnp.arange(mine.shape[0]), -1))
    beyond = (number == jnp.sum(mine & offer.near)) & (last >= 0) & ~offer.near[last]
    through = jnp.where(door_state == OPEN, at('no_way_through'), at('shut'))
    through = jnp.where(there & (door_state != LOCKED), through, UNKNOWN)
    locked = jnp.where(no_key, at('no_key'), jnp.where(wrong, at('wrong_key'), at('no_way_toggle')))
    toggled = jnp.where(door_state == LOCKED, locked, at('no_way_toggle'))
    toggled = jnp.where(there & (door_state != OPEN), toggled, UNKNOWN)
    picks = jnp.where(beyond & (held < 0), at('no_way_pickup', DOORS), UNKNOWN)
    goes = jnp.where(beyond, at('no_way_go_to'), UNKNOWN)
    return jnp.stack([picks, through, toggled, goes])[family]


def run(
    state: EnvState,
    action: jax.Array,
    sight: Sight,
    *,
    agentgym: bool,
    rewards: bool,
    play: Callable[[EnvState, jax.Array], EnvState],
) -> tuple[EnvState, jax.Array]:
    """Run an action; return (state, bool []: whether it was executed).

    Primitives run one by one, by play(state, primitive), until one leaves the image unchanged.
    rewards: as in AgentGym, only the last primitive counts and the end of an episode does not stop
    the remaining ones.
    """
    job = errand(state, action, sight, offers(state, sight, agentgym))

    def more(carry):
        return carry[-1]

    def step(carry):
        state, pose, done, _ = carry
        walking = job.steps[pose[2], pose[0], pose[1]] > 0
        walked = paths.next_action(job.steps, pose, paths.LAST_FIRST)
        primitive = jnp.where(walking, walked, job.tail[jnp.minimum(done, 1)])
        after = play(state, primitive)
        pose = jax.tree.map(
            lambda new, old: jnp.where(walking, new, old), paths.moved(pose, walked), pose
        )
        done = done + ~walking
        left = (job.steps[pose[2], pose[0], pose[1]] > 0) | (
            (done < 2) & (job.tail[jnp.minimum(done, 1)] >= 0)
        )
        changed = jnp.any(rules.image(after) != rules.image(state))
        late = after.steps >= after.max_steps
        stopped = jnp.bool_(False) if rewards else after.ended | late
        return after, pose, done, left & changed & ~stopped

    state = state.replace(reply=job.reply)
    start = (state, paths.start_pose(), jnp.int32(0), job.reply < 0)
    return jax.lax.while_loop(more, step, start)[0], job.reply < 0
