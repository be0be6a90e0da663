"""Games of pgx and gymnax as environments on the device.

A game defines a few hooks: its start, the effect of an action and the parts of an observation. A
level is a seed, which determines the start, all tiles and cards and the opponent's moves. Episodes
of a group therefore differ only by their answers. Splits have different seeds, but a game with few
starts and no chance (Catch, Minesweeper) is the same in all of them.
"""

import dataclasses
import functools
import importlib
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.base import TextEnvironment, environment
from agentrl_jax.envs.splits import check_split, level_split
from agentrl_jax.extras.games.pieces import Layout


@struct.dataclass
class EnvState(environment.EnvState):
    game: Any  # state of the library
    seed: jax.Array  # uint32 []  seed of the level
    reward: jax.Array  # float32 []  reward of the last action


@struct.dataclass
class EnvParams(environment.EnvParams):
    seeds: jax.Array = None  # uint32 [levels]
    max_steps_in_episode: int = 1000


def library(name: str) -> Any:
    """Return the module; ImportError names the package to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split('.')[0]
        raise ImportError(f'this game needs {package}: pip install {package}') from error


@dataclasses.dataclass(frozen=True)
class BorrowedWorld(TextEnvironment):
    """The base of all games.

    A subclass defines the hooks, and is_terminated, success and plans of TextEnvironment.
    """

    short: bool = False  # observations in few tokens, for small policies: no blanks, no legal
    # actions

    def start(self, key: jax.Array) -> Any:
        """Return the first state of the game."""
        raise NotImplementedError

    def turn(self, key: jax.Array, game: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        """Return (the game after a legal action, reward)."""
        raise NotImplementedError

    def offers(self, game: Any) -> jax.Array:
        """Return the legal actions, by default all; bool [actions]."""
        del game
        return jnp.ones(self.num_actions, bool)

    def values(self, game: Any) -> tuple[Any, ...]:
        """Return the value of each part of the layout (traced)."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """Return the parts of an observation (host)."""
        raise NotImplementedError

    @property
    def blank(self) -> str:
        """Separator of the cells of a board."""
        return '' if self.short else ' '

    def make_params(
        self, split: str | None = 'train', *, num_levels: int = 1024, seed: int = 0
    ) -> EnvParams:
        check_split(split)
        rng, seeds = np.random.default_rng(seed), {}
        while len(seeds) < num_levels:
            drawn = int(rng.integers(2**32))
            if split in (None, level_split(f'{self.name} {drawn}'.encode())):
                seeds[drawn] = None
        return EnvParams(seeds=jnp.array(list(seeds), jnp.uint32))

    def num_levels(self, params: EnvParams) -> int:
        return len(params.seeds)

    def reset_level(self, level: jax.Array, params: EnvParams) -> EnvState:
        seed = params.seeds[level]
        game = self.start(jax.random.fold_in(jax.random.key(seed), 0))
        return EnvState(time=jnp.int32(0), game=game, seed=seed, reward=jnp.float32(0.0))

    def env_action(self, state: EnvState, name_index: jax.Array) -> jax.Array:
        index = jnp.asarray(name_index, jnp.int32)
        return jnp.where(self.offers(state.game)[index], index, -1)

    def advance(
        self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams
    ) -> tuple[EnvState, jax.Array, jax.Array]:
        """Apply an action; an illegal action changes nothing."""
        key_of_step = jax.random.fold_in(jax.random.key(state.seed), state.time + 1)
        offered = self.offers(state.game)[action]
        game, reward = self.turn(key_of_step, state.game, action)
        reward = jnp.where(offered, reward, 0.0).astype(jnp.float32)
        game = jax.tree.map(lambda new, old: jnp.where(offered, new, old), game, state.game)
        return state.replace(game=game, reward=reward), reward, offered

    def lines(self, params: Any) -> list[str]:
        return _layout(self).texts

    def line_slots(self, params: Any) -> list[range]:
        return _layout(self).slots

    def line_ids(self, state: EnvState, params: Any) -> jax.Array:
        return _layout(self).ids(self.values(state.game))

    def observation_text(self, state: EnvState) -> str:
        lines = self.lines(None)
        return ''.join(lines[i] for i in np.asarray(_ids(self)(state)) if i >= 0)

    def cells(self, state: EnvState) -> list[list[str]]:
        """Return the words of the observation, row by row; of a short one each character."""
        rows = self.observation_text(state).splitlines()
        return [list(row) if self.short else row.split() for row in rows]


@functools.cache
def _layout(world: BorrowedWorld) -> Layout:
    return world.layout()


@functools.cache
def _ids(world: BorrowedWorld):
    return jax.jit(lambda state: world.line_ids(state, None))


@dataclasses.dataclass(frozen=True)
class PgxWorld(BorrowedWorld):
    """A game of pgx for one player."""

    GAME: ClassVar[str]

    def game(self) -> Any:
        return _pgx_game(self.GAME)

    def start(self, key: jax.Array) -> Any:
        return self.game().init(key)

    def turn(self, key: jax.Array, game: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        after = self.game().step(game, action, jax.random.fold_in(key, 0))
        return after, after.rewards[0]

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return state.game.terminated

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        return state.game.terminated & (state.reward > 0)

    def offers(self, game: Any) -> jax.Array:
        return game.legal_action_mask


@dataclasses.dataclass(frozen=True)
class TwoPlayers(PgxWorld):
    """A two-player zero-sum game of pgx, against random play or in self-play.

    Against random play the agent is player 0. In self-play each action is a ply of the seat to
    move. Observations are those of this seat. Rewards and success are those of seat 0, which moved
    first; seat 1 earns minus that.
    """

    PLIES: ClassVar[int]  # of the longest game, counting both players
    opponent: Literal['random', 'self'] = 'random'  # player of the other seat; self: the policy,
    # while validation still plays against random moves

    def for_validation(self) -> 'TwoPlayers':
        """Return the game with a random opponent."""
        return dataclasses.replace(self, opponent='random')

    def first(self, game: Any) -> jax.Array:
        """Return pgx's number of the player who moved first; int32 []."""
        raise NotImplementedError

    def seat(self, state: EnvState) -> jax.Array:
        """Return the seat to move, 0 = the player who moved first; int32 []."""
        return (state.game.current_player != self.first(state.game)).astype(jnp.int32)

    def start(self, key: jax.Array) -> Any:
        game = super().start(key)
        return game if self.opponent == 'self' else self.answered(key, game)[0]

    def turn(self, key: jax.Array, game: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        after, _ = super().turn(key, game, action)
        if self.opponent == 'self':
            return after, after.rewards[self.first(game)]
        return self.answered(jax.random.fold_in(key, 1), after)

    def answered(self, key: jax.Array, game: Any) -> tuple[Any, jax.Array]:
        """Return (the game at the agent's next turn, the agent's total reward until then)."""

        def move(carry):
            game, key, reward = carry
            key, draw, chance_key = jax.random.split(key, 3)
            chance = jax.random.uniform(draw, game.legal_action_mask.shape)
            action = jnp.argmax(jnp.where(game.legal_action_mask, chance, -1.0))
            after = self.game().step(game, action, chance_key)
            return after, key, reward + after.rewards[0]

        def theirs(carry):
            return (carry[0].current_player != 0) & ~carry[0].terminated

        game, _, reward = jax.lax.while_loop(theirs, move, (game, key, game.rewards[0]))
        return game, reward


@functools.cache
def _pgx_game(name: str) -> Any:
    with jax.ensure_compile_time_eval():  # constants of the game, also inside a traced function
        return library('pgx').make(name)
