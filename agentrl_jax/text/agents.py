"""Agents as data: the kinds of turns that an episode is made of, and when each has its turn.

The answer of a turn that acts steps the world. A written turn holds text between tags and leaves
the world as it is: a plan, before the first action of a trial and again after so many turns, or a
reflection, after a trial that failed. A further trial plays the same level again from its start,
in the same conversation. Written turns are sampled, credited and trained like any other.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.types import EpisodeStop

ACT, PLAN, REFLECT = range(3)
PARTS = ('act', 'plan', 'reflection')  # names of kinds of turns


@dataclasses.dataclass(frozen=True)
class Part:
    """A kind of turn whose answer is text."""

    asks: str  # field of a PromptStyle: the line that asks for it, where else actions are asked for
    opening: str  # forced in front of the answer
    closing: str  # what the answer must hold; it ends it


WRITTEN = {
    PLAN: Part('plan', '<plan>', '</plan>'),
    REFLECT: Part('reflect', '<reflect>', '</reflect>'),
}


@dataclasses.dataclass(frozen=True)
class Agent:
    """Which turns an episode has, beside those that act."""

    plans: bool = False  # before the first action of each trial
    plan_every: int = 0  # ... and after so many turns that act; 0 = never again
    reflects: bool = False  # after each trial but the last, if it failed
    trials: int = 1  # times that a level is tried before the episode has failed

    @property
    def writes(self) -> bool:
        return self.plans or self.reflects

    @property
    def least_turns(self) -> int:
        """The fewest turns of an episode: each trial acts once."""
        return self.trials * (1 + self.plans) + (self.trials - 1) * self.reflects

    def trial_turns(self, turn_limit: jax.Array | int) -> jax.Array | int:
        """Turns of a trial where an episode has turn_limit of them; a reflection is in no trial's.

        Each trial has as many.
        """
        if self.trials == 1:
            return turn_limit
        return (turn_limit - (self.trials - 1) * self.reflects) // self.trials

    def acting_turns(self, turn_limit: int) -> int:
        """Those of them that act."""
        turns = self.trial_turns(turn_limit)
        if not self.plans:
            return turns
        return turns - 1 - ((turns - 2) // (self.plan_every + 1) if self.plan_every else 0)


ONLY_ACTS = Agent()
NAMES = ('act', 'react', 'plan', 'reflect')  # react acts in another form (answer.FORMS)


def openings(agent: Agent) -> tuple[str, ...]:
    """What is forced in front of the answers that are text, by part from 1 on."""
    return tuple(part.opening for part in WRITTEN.values()) * agent.writes


def closings(agent: Agent) -> tuple[str, ...]:
    """What closes them."""
    return tuple(part.closing for part in WRITTEN.values()) * agent.writes


def build_agent(name: str, *, trials: int = 1, plan_every: int = 0) -> Agent:
    """The agent of a config."""
    if name not in NAMES:
        raise ValueError(f'agent.name={name!r} is not one of {", ".join(NAMES)}')
    return Agent(
        plans=name == 'plan', plan_every=plan_every, reflects=name == 'reflect', trials=trials
    )


@struct.dataclass
class Progress:
    """Where an episode is (no batch axis); numbers of Python's for worlds on hosts."""

    part: jax.Array  # int32 []  kind of the turn about to be answered
    trial: jax.Array  # int32 []  a reflection belongs to the trial that it prepares
    turns: jax.Array  # int32 []  of this trial so far, without its reflection
    stepped: jax.Array  # bool []   the turn before stepped the world: its reward is shown

    @property
    def begins_again(self) -> jax.Array:
        """bool []: the first turn that shows the level of a further trial."""
        return (self.trial > 0) & (self.turns == 0) & (self.part != REFLECT)


def kind(now: Progress) -> jax.Array:
    """A number for the kind of a turn and its trial; 0 for a turn of the first one that acts."""
    return now.part + len(PARTS) * now.trial


def begin(agent: Agent) -> Progress:
    """In front of the first turn."""
    return Progress(part=PLAN if agent.plans else ACT, trial=0, turns=0, stepped=False)


def end_turn(
    agent: Agent,
    now: Progress,
    *,
    turn: jax.Array | int,
    turn_limit: jax.Array | int,
    done: jax.Array | bool,
    success: jax.Array | bool,
    used: jax.Array | int = 0,
    max_actions: float = math.inf,
    xp: Any = jnp,
) -> tuple[jax.Array, Progress, jax.Array]:
    """(EpisodeStop int32 [], progress after a turn, whether a trial begins there bool []).

    turn: turns played, this one included; done, success: of the world after it; used: actions
    of the trial. What ends a trial ends the episode if it was the last trial or a success.
    xp: jax.numpy, or numpy on a host.
    """
    ended = turn >= turn_limit
    if agent.trials > 1:
        reflects = xp.equal(now.part, REFLECT)
        ended |= ~reflects & (now.turns + 1 >= agent.trial_turns(turn_limit))
        used = xp.where(reflects, 0, used)
    stop = xp.where(ended, EpisodeStop.TURN_BUDGET, EpisodeStop.NONE)
    stop = xp.where(used >= max_actions, EpisodeStop.ACTION_BUDGET, stop)
    stop = xp.where(done, EpisodeStop.TERMINATED, stop)
    more = (now.trial + 1 < agent.trials) & ~success & (turn < turn_limit)
    again = (stop != EpisodeStop.NONE) & more
    stop = xp.where(again, EpisodeStop.NONE, stop)
    return stop, *follow(agent, now, again, agent.trial_turns(turn_limit))


def follow(
    agent: Agent, now: Progress, again: jax.Array, trial_turns: jax.Array | int
) -> tuple[Progress, jax.Array]:
    """(progress after a turn, whether a trial begins there with the level as it was: bool []).

    again: this turn ended a trial, and another one follows. trial_turns: as Agent.trial_turns; its
    last turn acts, since no other would follow a plan.
    """
    # Arithmetic alone, so that it takes arrays and numbers of Python's
    reflected = now.part == REFLECT
    turns = (now.turns + 1) * (1 - (again | reflected))
    due = turns == 0
    if agent.plan_every:
        due |= (turns % (agent.plan_every + 1) == 0) & (turns + 1 < trial_turns)
    part = PLAN * due * agent.plans
    if agent.reflects:
        part = REFLECT * again + part * (1 - again)
    after = Progress(part=part, trial=now.trial + again, turns=turns, stepped=now.part == ACT)
    return after, reflected | (again & (not agent.reflects))
