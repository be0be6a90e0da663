"""RAGEN's two-armed bandit, where the names of the arms are the only information."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.base import TextEnvironment, environment, spaces
from agentrl_jax.envs.splits import SPLITS
from agentrl_jax.settings.marks import NameIn


def read_pairs(names: str) -> tuple[tuple[str, ...], ...]:
    """Parse each `low/high` as (low arm, high arm)."""
    return tuple(tuple(pair.split('/')) for pair in names.split())


def one_each(*pairs: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {split: read_pairs(pair) for split, pair in zip(SPLITS, pairs, strict=True)}


# By set and split. Train and test pairs are RAGEN's: 'main' is from its main branch, the rest from
# branch v0423 (defaults, and both directions of its generalisation runs). RAGEN has no third split;
# the validation pairs were written for this library in the same style. 'one_pair' is for policies
# that do not know the words. Half of RAGEN's own validation is also the training pair.
PAIRS = {
    'main': {
        'train': read_pairs(
            'Teacher/Trader Nurse/StartupFounder Librarian/Investor Accountant/StockBroker '
            'Engineer/RealEstateAgent Pharmacist/Musician Clerk/Freelancer Technician/Youtuber '
            'Planner/Artist Postman/Pilot Banker/VentureCapitalist Gardener/Cryptominer'
        ),
        'validation': read_pairs(
            'Dentist/Inventor Plumber/Gambler Tailor/Stuntman Electrician/Astronaut'
        ),
        'test': read_pairs(
            'Receptionist/Explorer Archivist/Filmmaker Bookkeeper/Consultant '
            'SocialWorker/Photographer Mechanic/GameDesigner Secretary/Entrepreneur '
            'Cashier/DataScientist CivilServant/StartupAccelerator'
        ),
    },
    'v0423': one_each('Phoenix/Dragon', 'Dentist/Inventor', 'Trader/Librarian'),
    'one_pair': one_each('Phoenix/Dragon', 'Phoenix/Dragon', 'Phoenix/Dragon'),
    'generalization': one_each('Engineer/Teacher', 'Inventor/Dentist', 'Trader/Librarian'),
    'generalization_reversed': one_each('Teacher/Engineer', 'Dentist/Inventor', 'Librarian/Trader'),
}

# Wording of RAGEN (mll-lab-nu/RAGEN, ragen/env/bandit/env.py).
QUESTION = (
    'You are playing a bandit game. Goal: Maximize your total reward by choosing which arm to '
    'pull. \nGame Rules: \n1. There are 2 arms, named {a} and {b}\n'
    '2. Each arm has its own reward distribution, related to their names. \n'
    "3. Analyze the symbolic meaning of each arm's name to guess how their reward distribution "
    'might behave.\n4. Based on the symbolic meaning of their names, which arm do you think is '
    'more likely to give higher rewards on average? Choose between {a} and {b}, and output like '
    '<answer> {a} </answer> or <answer> {b} </answer>.\n'
)


@struct.dataclass
class EnvState(environment.EnvState):
    """One choice. time: int32 []."""

    pair: jax.Array  # int32 []   index into the set's pairs, all splits concatenated
    high: jax.Array  # int32 []   position of the high arm in the question: 0 or 1
    pulled: jax.Array  # int32 []   position of the pulled arm, -1 = none yet


@struct.dataclass
class EnvParams(environment.EnvParams):
    """The pool: each pair in both orders."""

    pair: jax.Array = None  # int32 [levels]
    high: jax.Array = None  # int32 [levels]
    low_reward: jax.Array = 0.1  # float32 [] of the low arm, as in RAGEN's code (paper: .15)
    high_probability: jax.Array = 0.25  # float32 [] probability that the high arm pays 1, else 0
    max_steps_in_episode: int = 1


@dataclasses.dataclass(frozen=True)
class Bandit(TextEnvironment):
    """Pull one of two named arms, once. Action 0 or 1 is the arm's position in the question.

    ACTION_NAMES has the arms of all splits, so that pools of different splits share their tables.
    env_action maps a name to an arm of the current question.
    """

    pairs: Annotated[str, NameIn(PAIRS)] = 'main'  # set of arm names

    REWARD_QUANTUM: ClassVar[float] = 0.1
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (0.0, 1.0)
    name: ClassVar[str] = 'bandit'
    instruction: ClassVar[str] = ''  # included in the observation
    num_actions: ClassVar[int] = 2

    @property
    def ACTION_NAMES(self) -> tuple[str, ...]:
        return tuple(sorted({*itertools.chain(*self._all_pairs)}))

    @property
    def _all_pairs(self) -> tuple[tuple[str, str], ...]:
        return sum((PAIRS[self.pairs][split] for split in SPLITS), ())

    def make_params(
        self, split: str = 'train', *, num_levels: int | None = None, seed: int = 0
    ) -> EnvParams:
        """Return both orders of all pairs of the split, ignoring num_levels and seed."""
        if split not in SPLITS:
            raise ValueError(f'split={split!r} is not one of {SPLITS}')
        owners = [name for name in SPLITS for _ in PAIRS[self.pairs][name]]  # split of each pair
        pair = np.repeat(np.flatnonzero(np.array(owners) == split), 2)
        return EnvParams(
            pair=jnp.asarray(pair, jnp.int32),
            high=jnp.asarray(np.arange(len(pair)) % 2, jnp.int32),
            low_reward=jnp.float32(0.1),
            high_probability=jnp.float32(0.25),
        )

    def num_levels(self, params: EnvParams) -> int:
        return params.pair.shape[0]

    def reset_level(self, level: jax.Array, params: EnvParams) -> EnvState:
        return EnvState(
            time=jnp.int32(0),
            pair=params.pair[level],
            high=params.high[level],
            pulled=jnp.int32(-1),
        )

    def advance(
        self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams
    ) -> tuple[EnvState, jax.Array, jax.Array]:
        lucky = jax.random.uniform(key) < params.high_probability
        reward = jnp.where(action == state.high, lucky.astype(jnp.float32), params.low_reward)
        return state.replace(pulled=action), reward, jnp.bool_(True)

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return state.pulled >= 0

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        """Return whether the high arm was pulled, regardless of its reward."""
        return state.pulled == state.high

    def env_action(self, state: EnvState, name_index: jax.Array) -> jax.Array:
        low, high = jnp.asarray(self._pair_names())[state.pair]
        arms = jnp.where(state.high == 0, jnp.stack([high, low]), jnp.stack([low, high]))
        return jnp.where(name_index == arms[0], 0, jnp.where(name_index == arms[1], 1, -1))

    def names_of(self, level: int, params: EnvParams) -> list[str]:
        """Return the two arms in the order of the question."""
        return self.cells(self.reset_level(level, params))[0]

    def _pair_names(self) -> np.ndarray:
        """Return int32 [pairs, 2]: (low, high) as indices into ACTION_NAMES."""
        names = self.ACTION_NAMES
        return np.array([[names.index(name) for name in p] for p in self._all_pairs], np.int32)

    def observe(self, key: jax.Array, state: EnvState, action: Any, params: EnvParams) -> jax.Array:
        """Return int32 []: the question (pair and order)."""
        return 2 * state.pair + state.high

    def observation_space(self, params: Any = None) -> spaces.Discrete:
        return spaces.Discrete(2 * len(self._all_pairs))

    def lines(self, params: Any = None) -> list[str]:
        return _questions(self)

    def line_slots(self, params: Any = None) -> list[range]:
        return [range(2 * len(self._all_pairs))]

    def line_ids(self, state: EnvState, params: Any = None) -> jax.Array:
        return (2 * state.pair + state.high)[None]

    def observation_text(self, state: EnvState) -> str:
        a, b = self.cells(state)[0]
        return QUESTION.format(a=a, b=b)

    def cells(self, state: EnvState) -> list[list[str]]:
        """Return the two arms in the order of the question."""
        low, high = self._all_pairs[int(state.pair)]
        return [[low, high] if int(state.high) else [high, low]]

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """Plan to pull the high arm."""
        names = self._pair_names()
        return [[int(names[pair][1])] for pair in states.pair]

    def random_success(
        self, params: EnvParams, budgets: Sequence[int], *, rollouts: int = 20, seed: int = 0
    ) -> np.ndarray:
        """Return 0.5: one of two arms is correct."""
        return np.full((len(budgets), self.num_levels(params)), 0.5)

    def oracle_success(
        self, params: EnvParams, budgets: Sequence[int], *, seed: int = 0
    ) -> np.ndarray:
        """Return 1: the oracle knows the high arm."""
        return np.ones((len(budgets), self.num_levels(params)))


@functools.cache
def _questions(env: Bandit) -> list[str]:
    """One question per pair and order; even ones list the high arm first."""
    orders = (order for low, high in env._all_pairs for order in ((high, low), (low, high)))
    return [QUESTION.format(a=a, b=b) for a, b in orders]
