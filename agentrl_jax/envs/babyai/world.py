"""AgentGym's forty BabyAI levels, with MiniGrid's dynamics on the device."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.babyai import expert, instructions, macros, pool, rules, sight, texts
from agentrl_jax.envs.babyai.rules import EnvState
from agentrl_jax.envs.babyai.words import COLOURS, DESCRIBED, PLACES, SIDE
from agentrl_jax.envs.base import TextEnvironment, environment, of_pool, spaces
from agentrl_jax.settings.marks import In
from agentrl_jax.settings.rules import exclude, must

PRIMITIVE_NAMES = ('turn left', 'turn right', 'move forward', 'pick up', 'drop', 'toggle')

INSTRUCTION = (
    'You are in a building of rooms and follow an instruction. You see the cells in front of you, '
    'up to six steps ahead and three to either side, but not through walls and closed doors. '
)
PRIMITIVE_INSTRUCTION = INSTRUCTION + (
    'Each line of what you see names a thing and where it is, the nearest first. You can pick up '
    'a key, ball or box that is right in front of you when your hands are empty, and drop it in '
    'front of you; toggle opens and closes the door in front of you, unlocks it if you carry a key '
    'of its color, and opens a box. To go to something is to stand in front of it and face it.'
)
MACRO_INSTRUCTION = INSTRUCTION + (
    'Things of the same name are numbered from the nearest one on. {choose}"go to" walks up to '
    'something, "{pick_up}" also takes it, "go through" enters an open door, and "toggle and go '
    'through" opens a door before: a closed one, or a locked one if you carry a key of its color. '
    'An action ends early where the way turns out to be blocked.'
)


CHOOSE = 'Choose one action a turn from the list of available actions. '


@struct.dataclass
class EnvParams(environment.EnvParams):
    """The pool; n = OBJECTS. See export.empty_levels for the fields."""

    rows: jax.Array = None  # uint32 [levels, SIDE]  as in EnvState
    columns: jax.Array = None  # uint32 [levels, SIDE]
    cell: jax.Array = None  # int16 [levels, n]
    name: jax.Array = None  # int8 [levels, n]
    door: jax.Array = None  # int8 [levels, n]
    content: jax.Array = None  # int8 [levels, n]
    member: jax.Array = None  # uint8 [levels, n]
    agent: jax.Array = None  # int16 [levels]
    direction: jax.Array = None  # int8 [levels]
    held: jax.Array = None  # int8 [levels]
    max_steps: jax.Array = None  # int16 [levels]
    clause: jax.Array = None  # int8 [levels, 4]
    strict: jax.Array = None  # bool [levels, 4]
    described: jax.Array = None  # int16 [levels, 4, 2]
    order: jax.Array = None  # int8 [levels]
    length: jax.Array = None  # int16 [levels]  steps of the expert, -1 = unsolved
    data_idx: jax.Array = None  # int32 [levels]  AgentGym's number of the level
    max_steps_in_episode: int = 10_000


@dataclasses.dataclass(frozen=True)
class BabyAI(TextEnvironment):
    """Follow an instruction in rooms, with a view of seven by seven cells.

    The reward is MiniGrid's: 1 - 0.9 steps / max_steps for success. With agentgym_rewards it is
    that of AgentGym's wrapper: the sum of our rewards is its score.
    """

    levels: str = of_pool('all')  # comma-separated names in pool.LEVELS, in equal shares
    train_ids: str = of_pool('')  # AgentGym's level numbers, such as 0:810, instead of names
    test_ids: str = of_pool('')  # the same for validation and test
    actions: Literal['primitive', 'macro'] = 'primitive'  # MiniGrid's six; macro: AgentGym's, such
    # as go to red ball 1; then one action per turn
    wording: Literal['full', 'brief', 'agentgym'] = 'full'  # macro: brief has short lines and no
    # list of available actions; agentgym is AgentGym's text, without the order of two tasks
    agentgym_rewards: bool = False  # macro: AgentGym's score; late success does not end an episode
    most_seen: Annotated[int, In(1, 40)] = 12  # maximum number of objects in an observation

    REWARD_QUANTUM: ClassVar[float] = 0.01
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    REWARDS_ROUNDED: ClassVar[bool] = True
    name: ClassVar[str] = 'babyai'
    RULES = (
        *exclude({'actions': 'macro'}, {'wording': 'full', 'agentgym_rewards': False}),
        must(
            'test_ids',
            'ids like babyai.train_ids',
            lambda world: bool(world.train_ids) == bool(world.test_ids),
        ),
    )

    @property
    def macro(self) -> bool:
        return self.actions == 'macro'

    @property
    def short(self) -> bool:
        return self.wording == 'brief' or not self.macro

    @property
    def agentgym_wording(self) -> bool:
        return self.wording == 'agentgym'

    @property
    def ACTION_NAMES(self) -> tuple[str, ...]:
        return macros.action_names(self.agentgym_wording) if self.macro else PRIMITIVE_NAMES

    @property
    def instruction(self) -> str:
        if not self.macro:
            return PRIMITIVE_INSTRUCTION
        pick_up = macros.PICKUP_VERBS[self.agentgym_wording]
        return MACRO_INSTRUCTION.format(choose='' if self.short else CHOOSE, pick_up=pick_up)

    def make_params(
        self, split: str | None = 'train', *, num_levels: int = 1024, seed: int = 0
    ) -> EnvParams:
        """Return a pool of the named levels, in equal shares, or of AgentGym's level numbers."""
        if self.train_ids:
            drawn = pool.agentgym_split(split, num_levels, self.train_ids, self.test_ids)
        else:
            names = pool.LEVELS if self.levels == 'all' else tuple(self.levels.split(','))
            drawn = pool.draw(split, num_levels, names, seed=seed)
        return EnvParams(**{name: jnp.asarray(values) for name, values in device_arrays(drawn)})

    def num_levels(self, params: EnvParams) -> int:
        return params.cell.shape[0]

    def reset_level(self, level: jax.Array, params: EnvParams) -> EnvState:
        held = params.held[level].astype(jnp.int32)
        cell = params.cell[level]
        carried = jnp.arange(cell.shape[0]) == held
        same = ('rows', 'columns', 'name', 'door', 'content', 'member')
        same += ('clause', 'strict', 'described')
        number = ('agent', 'direction', 'max_steps', 'order')
        return EnvState(
            **{key: getattr(params, key)[level] for key in same},
            **{key: getattr(params, key)[level].astype(jnp.int32) for key in number},
            time=jnp.int32(0),
            cell=jnp.where(carried, -1, cell).astype(cell.dtype),
            known=cell,
            held=held,
            laid=held,
            steps=jnp.int32(0),
            before=jnp.full(4, -1, jnp.int8),
            latched=jnp.zeros(4, bool),
            half_done=jnp.bool_(False),
            won=jnp.bool_(False),
            over=jnp.bool_(False),
            ended=jnp.bool_(False),
            reward=jnp.float32(0.0),
            reply=jnp.int32(-1),
        )

    def advance(
        self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams
    ) -> tuple[EnvState, jax.Array, jax.Array]:
        if not self.macro:
            after = play(state, action)
            return after, after.reward, changed(state, after)
        in_sight = sight.look(state, self.most_seen)
        after, executed = macros.run(
            state,
            action,
            in_sight,
            agentgym=self.agentgym_wording,
            rewards=self.agentgym_rewards,
            play=play,
        )
        if not self.agentgym_rewards:
            return after, jnp.where(executed, after.reward, 0.0), changed(state, after)
        # AgentGym: only the last step counts, an episode ends only above half of the reward, and
        # the last reward is paid again for every action that is not executed.
        ended = after.over & (after.reward > 0.5)
        after = after.replace(ended=ended, won=state.won | (after.reward > 0))
        return after, after.reward, changed(state, after)

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return state.ended

    def is_truncated(self, state: EnvState, params: EnvParams) -> jax.Array:
        """Return whether MiniGrid's step limit is reached; AgentGym's wrapper has none."""
        limit = state.time >= params.max_steps_in_episode
        return limit if self.agentgym_rewards else limit | (state.steps >= state.max_steps)

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        """Return whether the instruction was completed; with agentgym_rewards: a nonzero score."""
        return state.won

    def episode_metrics(
        self, actions: jax.Array, level: jax.Array, params: EnvParams
    ) -> dict[str, jax.Array]:
        """Return success on levels that the expert solves, divided by their share of the pool."""
        solvable = params.length >= 0
        share = jnp.maximum(jnp.mean(solvable), 1e-6)
        won = self.success(self.replay(actions, level, params), params)
        return {'solvable_success': jnp.where(solvable[level], won / share, 0.0)}

    def replay(self, actions: jax.Array, level: jax.Array, params: EnvParams) -> EnvState:
        """Return the final states [B] of episodes. actions int32 [B, K, A], -1 = none."""

        def step(states, action):
            one = (None, 0, 0, None)
            key = jax.random.key(0)  # unused: steps are deterministic
            return jax.vmap(self.step_env, one)(key, states, action, params)[1], None

        states = jax.vmap(self.reset_level, (0, None))(level, params)
        return jax.lax.scan(step, states, actions.reshape(actions.shape[0], -1).T)[0]

    def observe(self, key: jax.Array, state: EnvState, action: Any, params: EnvParams) -> jax.Array:
        """Return minigrid's image uint8 [7, 7, 3]: [column, row] -> (object, color, state)."""
        return rules.image(state)

    def features(self, state: EnvState, params: EnvParams) -> jax.Array:
        """Return the image and the instruction, one-hot: what the text shows."""
        image = jnp.split(rules.image(state).reshape(-1, 3).astype(jnp.int32), 3, axis=1)
        number = state.described.astype(jnp.int32) // 2  # without whether several objects match
        place, colour = number % len(PLACES), number // len(PLACES) % (len(COLOURS) + 1)
        kind = number // len(PLACES) // (len(COLOURS) + 1)
        words = [
            (state.clause, 4),
            (state.order, 3),
            (state.half_done * 1, 2),
            (state.latched * 1, 2),
        ]
        words += [(kind, len(DESCRIBED)), (colour, len(COLOURS) + 1), (place, len(PLACES))]
        sizes = zip(image, (11, len(COLOURS), 4), strict=True)
        return jnp.concatenate([jax.nn.one_hot(x, n).reshape(-1) for x, n in (*sizes, *words)])

    def observation_space(self, params: Any = None) -> spaces.Box:
        return spaces.Box(0, 255, (rules.VIEW, rules.VIEW, 3), jnp.uint8)

    def offered(self, state: EnvState) -> jax.Array | None:
        """Return the macro actions that AgentGym lists; most names are never on offer."""
        if not self.macro:
            return None
        in_sight = sight.look(state, self.most_seen)
        return macros.offered(in_sight, macros.offers(state, in_sight, self.agentgym_wording))

    def lines(self, params: Any = None) -> list[str]:
        if self.short:
            return texts.short_lines(self.macro).texts
        return texts.long_lines(self.agentgym_wording).texts

    def line_slots(self, params: EnvParams) -> list[range]:
        clauses = np.asarray(params.clause)
        if self.short:
            return texts.short_slots(clauses, most=self.most_seen, numbered=self.macro)
        return texts.long_slots(clauses, most=self.most_seen, agentgym=self.agentgym_wording)

    def line_ids(self, state: EnvState, params: Any = None) -> jax.Array:
        if self.short:
            return texts.short_ids(state, most=self.most_seen, numbered=self.macro)
        return texts.long_ids(state, most=self.most_seen, agentgym=self.agentgym_wording)

    def observation_text(self, state: EnvState) -> str:
        """Join the lines; tests compare them with minigrid and AgentGym's wrapper."""
        return texts.joined(self.lines(), _jitted_ids(self)(state))

    def cells(self, state: EnvState) -> list[list[str]]:
        return expert.cells(state)

    def plans(
        self, states: Any, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """Return the planner's actions, or the next macro action, verified by executing it."""
        if not self.macro:
            return expert.primitive_plans(states)
        return expert.macro_plans(self, states, params)

    def oracle_success(
        self, params: EnvParams, budgets: Sequence[int], *, seed: int = 0
    ) -> np.ndarray:
        if self.macro:
            return super().oracle_success(params, budgets, seed=seed)
        length = np.asarray(params.length)[None]
        return ((length >= 0) & (length <= np.asarray(budgets)[:, None])).astype(float)


@functools.cache
def _jitted_ids(env: BabyAI):
    return jax.jit(env.line_ids)


def play(state: EnvState, primitive: jax.Array) -> EnvState:
    """Execute one MiniGrid step and check the instruction."""
    after, won, failed = instructions.judge(rules.act(state, primitive), primitive)
    reward = jnp.where(won, 1 - 0.9 * (after.steps / after.max_steps), 0.0)
    over = won | failed
    return after.replace(won=won, over=over, ended=over, reward=reward.astype(jnp.float32))


def changed(before: EnvState, after: EnvState) -> jax.Array:
    """Return bool []: whether a cell, door, pose or the carried object changed."""
    keys = ('cell', 'door', 'agent', 'direction', 'held')
    return jnp.any(jnp.stack([jnp.any(getattr(before, k) != getattr(after, k)) for k in keys]))


def device_arrays(levels: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, values) of the fields of EnvParams."""
    walls = (levels['walls'][:, :, None] >> np.arange(SIDE, dtype=np.uint32)) & 1  # [levels, y, x]
    outside_x = np.arange(SIDE)[None, None] >= levels['width'][:, None, None]
    outside_y = np.arange(SIDE)[None, :, None] >= levels['height'][:, None, None]
    walls = walls.astype(bool) | outside_x | outside_y
    for name, cells in (('rows', walls), ('columns', walls.swapaxes(1, 2))):
        margin = (rules.REACH, 32 - SIDE - rules.REACH)
        cells = np.pad(cells, ((0, 0), (0, 0), margin), constant_values=True)
        bits = np.packbits(cells, axis=2, bitorder='little')
        yield name, np.ascontiguousarray(bits).view('<u4')[..., 0].astype(np.uint32)
    fields = {field.name for field in dataclasses.fields(EnvParams)} & set(levels)
    yield from ((name, levels[name]) for name in sorted(fields))
