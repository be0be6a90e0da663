"""Tool use on the device: a card catalogue that must be queried before answering.

It replaces MT-GRPO's search over an encyclopedia (arXiv:2505.11821). A question names a person.
Each tool call pulls a card, which names the next card or the box with the papers:
  Name the box of the Nurse.   pull Nurse   Nurse: see Pilot.   pull Pilot   Pilot: box C 3.
  name C 3
Every level has different cards, so an answer cannot be learnt from other levels.

Rewards follow MT-GRPO's code, per action. A lookup earns `tool_reward` for a new card, and also
`presence_reward` for the card with the answer. It costs `lookup_cost` times the lookups so far,
the later paper's search penalty (0.1 there).
An answer earns `answer_reward` times its score. MT-GRPO's code pays 1.0 for an exact match and 0.5
for an answer that contains the truth; with a closed list of answers, both conditions coincide. The
score is 1 for the right box and 0 for other boxes. With `graded` it is the F1 over the words of the
two names, as in question answering: 0.5 for one word of two.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.base import Lines, TextEnvironment, environment, of_pool, spaces
from agentrl_jax.envs.library.levels import EMPTY, PEOPLE, draw_pool
from agentrl_jax.envs.splits import check_split
from agentrl_jax.settings.marks import ONE, ZERO, In
from agentrl_jax.settings.rules import must

LETTERS = 'ACEF'
COUNTED_LOOKUPS = 10  # the cost of a lookup stops growing here
QUESTION = 'Name the box of the {}.\n'


@struct.dataclass
class EnvState(environment.EnvState):
    """One question. time: int32 []."""

    cards: jax.Array  # int32 [people]  EMPTY, the next person, or len(PEOPLE) + box
    start: jax.Array  # int32 []   person in the question
    answer: jax.Array  # int32 []   box at the end of the chain
    last: jax.Array  # int32 []   person of the last lookup, -1 = none yet
    seen: jax.Array  # bool [people]  cards pulled so far
    lookups: jax.Array  # int32 []
    named: jax.Array  # int32 []   box named, -1 = none yet


@struct.dataclass
class EnvParams(environment.EnvParams):
    """The pool."""

    cards: jax.Array = None  # int32 [levels, people]
    start: jax.Array = None  # int32 [levels]
    answer: jax.Array = None  # int32 [levels]
    hops: jax.Array = None  # int32 [levels]  lookups needed
    max_steps_in_episode: int = 100


def in_tenths(reward: float) -> bool:
    return abs(10 * reward - round(10 * reward)) <= 1e-6


@dataclasses.dataclass(frozen=True)
class Library(TextEnvironment):
    """Action a pulls the card of PEOPLE[a] or names box a - len(PEOPLE), which ends the episode.

    Boxes have one of `side` letters and one of `side` numbers. Rewards must be multiples of 0.1.
    """

    cards: Annotated[int, In(1, len(PEOPLE))] = of_pool(8)  # per level, out of 16 people
    min_hops: Annotated[int, ONE] = of_pool(1)  # fewest lookups that a question needs
    max_hops: Annotated[int, ONE] = of_pool(3)  # most lookups; the answer takes one more turn
    side: Annotated[int, In(2, len(LETTERS))] = 4  # side x side boxes
    tool_reward: Annotated[float, ZERO] = 0.2  # for a lookup of a new card
    presence_reward: Annotated[float, ZERO] = 0.5  # added for the card with the answer
    answer_reward: Annotated[float, ZERO] = 1.5  # for the right answer
    graded: bool = False  # outcome: word F1 of the answer; False: exact match
    lookup_cost: Annotated[float, ZERO] = 0.0  # subtracted per lookup, times the lookups so far

    REWARD_QUANTUM: ClassVar[float] = 0.05
    name: ClassVar[str] = 'library'
    instruction: ClassVar[str] = (
        'Find out in which box the papers of a person are. The card of a person names the box, or '
        'another person whose card to see instead; a place without a card is empty. Pull one card '
        'at a time, and name the box when you have seen it. Naming a box ends the game.'
    )
    RULES = (
        *(
            must(
                field,
                'a multiple of 0.1',
                lambda world, field=field: in_tenths(getattr(world, field)),
            )
            for field in ('tool_reward', 'presence_reward', 'answer_reward', 'lookup_cost')
        ),
        must(
            'min_hops', 'at most library.max_hops', lambda world: world.min_hops <= world.max_hops
        ),
        must('max_hops', 'at most library.cards', lambda world: world.max_hops <= world.cards),
    )

    @property
    def REWARD_BOUNDS(self) -> tuple[float, float]:
        highest = max(self.tool_reward + self.presence_reward, self.answer_reward)
        return -COUNTED_LOOKUPS * self.lookup_cost, highest

    @property
    def num_boxes(self) -> int:
        return self.side**2

    @property
    def boxes(self) -> tuple[str, ...]:
        return tuple(f'{x} {n + 1}' for x in LETTERS[: self.side] for n in range(self.side))

    @property
    def ACTION_NAMES(self) -> tuple[str, ...]:
        return (*(f'pull {who}' for who in PEOPLE), *(f'name {box}' for box in self.boxes))

    def make_params(
        self, split: str | None = 'train', *, num_levels: int = 1024, seed: int = 0
    ) -> EnvParams:
        """Draw tables and questions."""
        check_split(split)
        drawn = draw_pool(
            split,
            num_levels,
            seed,
            boxes=self.num_boxes,
            cards=self.cards,
            hops=(self.min_hops, self.max_hops),
        )
        return EnvParams(**{name: jnp.asarray(x, jnp.int32) for name, x in drawn.items()})

    def num_levels(self, params: EnvParams) -> int:
        return params.start.shape[0]

    def reset_level(self, level: jax.Array, params: EnvParams) -> EnvState:
        return EnvState(
            time=jnp.int32(0),
            cards=params.cards[level],
            start=params.start[level],
            answer=params.answer[level],
            last=jnp.int32(-1),
            seen=jnp.zeros(len(PEOPLE), bool),
            lookups=jnp.int32(0),
            named=jnp.int32(-1),
        )

    def advance(
        self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams
    ) -> tuple[EnvState, jax.Array, jax.Array]:
        pulls = action < len(PEOPLE)
        who = jnp.minimum(action, len(PEOPLE) - 1)
        lookups = state.lookups + pulls
        exists = pulls & (state.cards[who] != EMPTY)
        fresh = exists & ~state.seen[who]
        present = fresh & (state.cards[who] == len(PEOPLE) + state.answer)
        cost = self.lookup_cost * jnp.minimum(lookups, COUNTED_LOOKUPS)
        for_lookup = self.tool_reward * fresh + self.presence_reward * present - cost
        box = action - len(PEOPLE)
        for_answer = self.answer_reward * self.score(box, state.answer)
        after = state.replace(
            last=jnp.where(pulls, who, state.last),
            seen=state.seen.at[who].set(state.seen[who] | exists),
            lookups=lookups,
            named=jnp.where(pulls, -1, box),
        )
        reward = jnp.where(pulls, for_lookup, for_answer).astype(jnp.float32)
        return after, reward, fresh | ~pulls

    def score(self, box: jax.Array, answer: jax.Array) -> jax.Array:
        """Return float32: 1 for the right box, else 0; if graded, word_f1."""
        if not self.graded:
            return (box == answer).astype(jnp.float32)
        return self.word_f1(box, answer)

    def word_f1(self, box: jax.Array, answer: jax.Array) -> jax.Array:
        """Return 0.5 for the letter plus 0.5 for the number: precision = recall = F1."""
        letter, number = box // self.side == answer // self.side, (box - answer) % self.side == 0
        return 0.5 * letter + 0.5 * number

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return state.named >= 0

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        """Return whether the right box was named (exact match)."""
        return state.named == state.answer

    def episode_metrics(
        self, actions: jax.Array, level: jax.Array, params: EnvParams
    ) -> dict[str, jax.Array]:
        """Compute MT-GRPO's tool-use metrics by replaying actions [B, K, A] on level [B]."""
        actions = actions.reshape(actions.shape[0], -1)
        cards, answer = params.cards[level], params.answer[level]
        pulls = (actions >= 0) & (actions < len(PEOPLE))
        card = jnp.take_along_axis(cards, jnp.clip(actions, 0, len(PEOPLE) - 1), axis=1)
        exists = pulls & (card != EMPTY)
        calls = pulls.sum(1)
        box = actions.max(1) - len(PEOPLE)  # naming a box ends the episode
        return {
            'tool_calls': calls.astype(jnp.float32),
            'tool_success': exists.sum(1) / jnp.maximum(calls, 1).astype(jnp.float32),
            'answer_presence': jnp.any(exists & (card == len(PEOPLE) + answer[:, None]), 1) * 1.0,
            'answered': (box >= 0) * 1.0,
            'answer_f1': jnp.where(box >= 0, self.word_f1(box, answer), 0.0),
        }

    def observe(self, key: jax.Array, state: EnvState, action: Any, params: EnvParams) -> jax.Array:
        """Return int32 []: the id of the line."""
        return self.line_ids(state, params)[0]

    def observation_space(self, params: Any = None) -> spaces.Discrete:
        return spaces.Discrete(len(self.lines(params)))

    def lines(self, params: Any = None) -> list[str]:
        return _line_families(self).texts

    def line_slots(self, params: Any = None) -> list[range]:
        return [range(len(self.lines(params)))]

    def line_ids(self, state: EnvState, params: Any = None) -> jax.Array:
        """Return the question before the first lookup, then the result of the last lookup."""
        families, who = _line_families(self), jnp.maximum(state.last, 0)
        card = who * (1 + len(PEOPLE) + self.num_boxes) + 1 + state.cards[who]
        question = families.ids('question', state.start)
        return jnp.where(state.last < 0, question, families.ids('card', card))

    def observation_text(self, state: EnvState) -> str:
        if state.last < 0:
            return QUESTION.format(PEOPLE[int(state.start)])
        return f'{PEOPLE[int(state.last)]}: {self.card_text(int(state.cards[state.last]))}.\n'

    def card_text(self, card: int) -> str:
        """Return the text on a card."""
        if card >= len(PEOPLE):
            return f'box {self.boxes[card - len(PEOPLE)]}'
        return 'empty' if card == EMPTY else f'see {PEOPLE[card]}'

    def cells(self, state: EnvState) -> list[list[str]]:
        """Return a row per card: person, text, and status ('asked for', 'seen' or '')."""
        marks = ['asked for' if who == state.start else '' for who in range(len(PEOPLE))]
        return [
            [PEOPLE[who], self.card_text(int(card)), 'seen' if state.seen[who] else marks[who]]
            for who, card in enumerate(state.cards)
            if card != EMPTY
        ]

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """Return one action each: the card after the next one is not yet known."""
        return [
            [next_action(np.asarray(cards), int(start), np.asarray(pulled))]
            for cards, start, pulled in zip(states.cards, states.start, states.seen, strict=True)
        ]

    def random_success(
        self, params: EnvParams, budgets: Sequence[int], *, rollouts: int = 20, seed: int = 0
    ) -> np.ndarray:
        """Exact: random play names each box with the same probability."""
        names, budgets = self.num_boxes, np.asarray(budgets)
        random = (1 - (1 - names / self.num_actions) ** budgets) / names
        return np.repeat(random[:, None], self.num_levels(params), axis=1)

    def oracle_success(
        self, params: EnvParams, budgets: Sequence[int], *, seed: int = 0
    ) -> np.ndarray:
        """Exact: the expert solves a level if the budget leaves an action after its lookups."""
        return np.asarray(params.hops)[None] < np.asarray(budgets)[:, None]


def next_action(cards: np.ndarray, start: int, seen: np.ndarray) -> int:
    """Return the expert's action: pull the next card of the chain, or name the box at its end."""
    card = start
    while card < len(PEOPLE) and seen[card]:
        card = int(cards[card])
    return card


@functools.cache
def _line_families(env: Library) -> Lines:
    cards = range(EMPTY, len(PEOPLE) + env.num_boxes)
    return Lines(
        question=[QUESTION.format(who) for who in PEOPLE],
        card=[f'{who}: {env.card_text(card)}.\n' for who in PEOPLE for card in cards],
    )
