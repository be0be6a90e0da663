"""A card catalogue that must be queried before answering: tool use on the device.

The stand-in for MT-GRPO's search over an encyclopedia (arXiv:2505.11821). A question names a
person; pulling cards, one tool call each, leads from card to card to the box where the papers are:
  Name the box of the Nurse.   pull Nurse   Nurse: see Pilot.   pull Pilot   Pilot: box C 3.
  name C 3
Every level has cards of its own, so what a question's answer is cannot be known from other levels.

Rewards are those of MT-GRPO's code, per action. A turn reward for a lookup: `tool_reward` for
finding a card that was not shown before, `presence_reward` when it is the one with the answer; and
`lookup_cost` times the lookups so far is taken off (the later paper's search penalty, there 0.1).
The outcome reward for an answer: `answer_reward` times its score. The code pays 1.0 for an exact
match and 0.5 for an answer that contains the truth; an answer out of a closed list earns both or
none. The score is 1 for the right box and 0 for others, or, if `graded`, the F1 of the words of the
two names, which is how question answering grades answers: 0.5 for one word of two.
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
COUNTED_LOOKUPS = 10  # further ones cost as much as this one
QUESTION = 'Name the box of the {}.\n'


@struct.dataclass
class EnvState(environment.EnvState):
    """One question. time: int32 []."""

    cards: jax.Array  # int32 [people]  EMPTY, a person to see, or len(PEOPLE) + box
    start: jax.Array  # int32 []   person of the question
    answer: jax.Array  # int32 []   box where the chain of cards ends
    last: jax.Array  # int32 []   person whose card was pulled last, -1 = none yet
    seen: jax.Array  # bool [people]  cards that were found
    lookups: jax.Array  # int32 []
    named: jax.Array  # int32 []   box that was named, -1 = none yet


@struct.dataclass
class EnvParams(environment.EnvParams):
    """The pool."""

    cards: jax.Array = None  # int32 [levels, people]
    start: jax.Array = None  # int32 [levels]
    answer: jax.Array = None  # int32 [levels]
    hops: jax.Array = None  # int32 [levels]  lookups that the question needs
    max_steps_in_episode: int = 100


def in_tenths(reward: float) -> bool:
    return abs(10 * reward - round(10 * reward)) <= 1e-6


@dataclasses.dataclass(frozen=True)
class Library(TextEnvironment):
    """Actions: pull the card of PEOPLE[a], then name box a - len(PEOPLE), which ends the episode.

    `side` letters times `side` numbers are the boxes. Rewards must be multiples of 0.1.
    """

    cards: Annotated[int, In(1, len(PEOPLE))] = of_pool(8)  # of a level; 16 people may be asked for
    min_hops: Annotated[int, ONE] = of_pool(1)  # lookups that a question needs, at least ...
    max_hops: Annotated[int, ONE] = of_pool(3)  # ... and at most; the answer takes a turn more
    side: Annotated[int, In(2, len(LETTERS))] = 4  # a guess is right one time in side x side
    tool_reward: Annotated[float, ZERO] = 0.2  # for a lookup that finds a card not shown before
    presence_reward: Annotated[float, ZERO] = 0.5  # more, if it is the card with the answer
    answer_reward: Annotated[float, ZERO] = 1.5  # for the right answer
    graded: bool = False  # outcome: word F1 of the answer; False: exact match
    lookup_cost: Annotated[float, ZERO] = 0.0  # taken off a lookup, times the lookups so far

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
        most = max(self.tool_reward + self.presence_reward, self.answer_reward)
        return -COUNTED_LOOKUPS * self.lookup_cost, most

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
        """Tables and questions."""
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
        del key
        pulls = action < len(PEOPLE)
        who = jnp.minimum(action, len(PEOPLE) - 1)
        lookups = state.lookups + pulls
        found = pulls & (state.cards[who] != EMPTY)
        fresh = found & ~state.seen[who]
        present = fresh & (state.cards[who] == len(PEOPLE) + state.answer)
        cost = self.lookup_cost * jnp.minimum(lookups, COUNTED_LOOKUPS)
        for_lookup = self.tool_reward * fresh + self.presence_reward * present - cost
        box = action - len(PEOPLE)
        for_answer = self.answer_reward * self.score(box, state.answer)
        after = state.replace(
            last=jnp.where(pulls, who, state.last),
            seen=state.seen.at[who].set(state.seen[who] | found),
            lookups=lookups,
            named=jnp.where(pulls, -1, box),
        )
        reward = jnp.where(pulls, for_lookup, for_answer).astype(jnp.float32)
        return after, reward, fresh | ~pulls

    def score(self, box: jax.Array, answer: jax.Array) -> jax.Array:
        """float32: 1 for the right box; graded, the F1 of the words of the two names."""
        if not self.graded:
            return (box == answer).astype(jnp.float32)
        return self.word_f1(box, answer)

    def word_f1(self, box: jax.Array, answer: jax.Array) -> jax.Array:
        """Half a point for the letter, half for the number: precision = recall = F1."""
        letter, number = box // self.side == answer // self.side, (box - answer) % self.side == 0
        return 0.5 * letter + 0.5 * number

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return state.named >= 0

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        """The right box was named: exact match."""
        return state.named == state.answer

    def episode_metrics(
        self, actions: jax.Array, level: jax.Array, params: EnvParams
    ) -> dict[str, jax.Array]:
        """What MT-GRPO reports of tool use, replayed from actions [B, K, A] on level [B]."""
        actions = actions.reshape(actions.shape[0], -1)
        cards, answer = params.cards[level], params.answer[level]
        pulls = (actions >= 0) & (actions < len(PEOPLE))
        card = jnp.take_along_axis(cards, jnp.clip(actions, 0, len(PEOPLE) - 1), axis=1)
        found = pulls & (card != EMPTY)
        calls = pulls.sum(1)
        box = actions.max(1) - len(PEOPLE)  # naming a box comes last and only once
        return {
            'tool_calls': calls.astype(jnp.float32),
            'tool_success': found.sum(1) / jnp.maximum(calls, 1).astype(jnp.float32),
            'answer_presence': jnp.any(found & (card == len(PEOPLE) + answer[:, None]), 1) * 1.0,
            'answered': (box >= 0) * 1.0,
            'answer_f1': jnp.where(box >= 0, self.word_f1(box, answer), 0.0),
        }

    def observe(self, key: jax.Array, state: EnvState, action: Any, params: EnvParams) -> jax.Array:
        """int32 []: which line is shown."""
        return self.line_ids(state, params)[0]

    def observation_space(self, params: Any = None) -> spaces.Discrete:
        return spaces.Discrete(len(self.lines(params)))

    def lines(self, params: Any = None) -> list[str]:
        return _line_families(self).texts

    def line_slots(self, params: Any = None) -> list[range]:
        return [range(len(self.lines(params)))]

    def line_ids(self, state: EnvState, params: Any = None) -> jax.Array:
        """The question until a card is pulled, then what came of the last lookup."""
        families, who = _line_families(self), jnp.maximum(state.last, 0)
        card = who * (1 + len(PEOPLE) + self.num_boxes) + 1 + state.cards[who]
        asked = families.ids('question', state.start)
        return jnp.where(state.last < 0, asked, families.ids('card', card))

    def observation_text(self, state: EnvState) -> str:
        if state.last < 0:
            return QUESTION.format(PEOPLE[int(state.start)])
        return f'{PEOPLE[int(state.last)]}: {self.card_text(int(state.cards[state.last]))}.\n'

    def card_text(self, card: int) -> str:
        """What a card says."""
        if card >= len(PEOPLE):
            return f'box {self.boxes[card - len(PEOPLE)]}'
        return 'empty' if card == EMPTY else f'see {PEOPLE[card]}'

    def cells(self, state: EnvState) -> list[list[str]]:
        """A row for each card: person, text, and whether it is asked for or was seen."""
        marks = ['asked for' if who == state.start else '' for who in range(len(PEOPLE))]
        return [
            [PEOPLE[who], self.card_text(int(card)), 'seen' if state.seen[who] else marks[who]]
            for who, card in enumerate(state.cards)
            if card != EMPTY
        ]

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """One action each: what comes after the next card is not known before it is seen."""
        return [
            [next_action(np.asarray(cards), int(start), np.asarray(seen))]
            for cards, start, seen in zip(states.cards, states.start, states.seen, strict=True)
        ]

    def random_success(
        self, params: EnvParams, budgets: Sequence[int], *, rollouts: int = 20, seed: int = 0
    ) -> np.ndarray:
        """Exact: random play names a box sooner or later, each with the same probability."""
        names, budgets = self.num_boxes, np.asarray(budgets)
        random = (1 - (1 - names / self.num_actions) ** budgets) / names
        return np.repeat(random[:, None], self.num_levels(params), axis=1)

    def oracle_success(
        self, params: EnvParams, budgets: Sequence[int], *, seed: int = 0
    ) -> np.ndarray:
        """Exact: who never guesses solves a level if an action is left after its lookups."""
        return np.asarray(params.hops)[None] < np.asarray(budgets)[:, None]


def next_action(cards: np.ndarray, start: int, seen: np.ndarray) -> int:
    """What the best player does: pull the next card of the chain, or name the box it ends in."""
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
