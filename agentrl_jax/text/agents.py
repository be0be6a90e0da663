"""Agents as data: the kinds of turns of an episode, and their order.

The answer of a turn that acts steps the environment. A written turn holds text between tags and
does not change the environment. It is a plan, before the first action of a trial and then every few
turns, or a reflection, after a failed trial. A further trial plays the same level again from its
start, in the same conversation. Written turns are sampled, credited and trained like all others.
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
class WrittenTurn:
    """A kind of turn with text as its answer."""

    asks: str  # field of a PromptStyle with the request, which replaces the request for actions
    opening: str  # forced in front of the answer
    closing: str  # ends the answer; required


WRITTEN = {
    PLAN: WrittenTurn('plan', '<plan>', '</plan>'),
    REFLECT: WrittenTurn('reflect', '<reflect>', '</reflect>'),
}


@dataclasses.dataclass(frozen=True)
class Agent:
    """The turns of an episode in addition to acting ones."""

    plans: bool = False  # before the first action of each trial
    reflects: bool = False  # after each failed trial except the last
    trials: int = 1  # maximum number of attempts at a level

    @property
    def writes(self) -> bool:
        return self.plans or self.reflects

    @property
    def least_turns(self) -> int:
        """Minimum number of turns of an episode: each trial acts once."""
        return self.trials * (1 + self.plans) + (self.trials - 1) * self.reflects

    def trial_turns(self, turn_limit: jax.Array | int) -> jax.Array | int:
        """Return the turns per trial if an episode has turn_limit turns, without reflections."""
        if self.trials == 1:
            return turn_limit
        return (turn_limit - (self.trials - 1) * self.reflects) // self.trials

    def acting_turns(self, turn_limit: int) -> int:
        """Return how many of a trial's turns act."""
        return self.trial_turns(turn_limit) - self.plans


ONLY_ACTS = Agent()
NAMES = ('act', 'react', 'plan', 'reflect')  # react: act with another form (answer.FORMS)


def openings(agent: Agent) -> tuple[str, ...]:
    """Return the forced openings of written answers, by part, starting at 1."""
    return tuple(part.opening for part in WRITTEN.values()) * agent.writes


def closings(agent: Agent) -> tuple[str, ...]:
    """Return the closing tags of written answers, by part, starting at 1."""
    return tuple(part.closing for part in WRITTEN.values()) * agent.writes


def build_agent(name: str, *, trials: int = 1) -> Agent:
    """Build the agent of a config."""
    if name not in NAMES:
        raise ValueError(f'agent.name={name!r} is not one of {", ".join(NAMES)}')
    return Agent(plans=name == 'plan', reflects=name == 'reflect', trials=trials)


@struct.dataclass
class Progress:
    """Progress of an episode (no batch axis); Python numbers for host environments."""

    part: jax.Array  # int32 []  kind of the current turn
    trial: jax.Array  # int32 []  a reflection belongs to the next trial
    turns: jax.Array  # int32 []  turns of this trial so far, without its reflection
    stepped: jax.Array  # bool []   the previous turn acted, so the prompt includes its reward

    @property
    def begins_again(self) -> jax.Array:
        """bool []: this is the first turn of a further trial, not counting its reflection."""
        return (self.trial > 0) & (self.turns == 0) & (self.part != REFLECT)


def kind(now: Progress) -> jax.Array:
    """Return a number for the kind and trial of a turn; 0: it acts in the first trial."""
    return now.part + len(PARTS) * now.trial


def begin(agent: Agent) -> Progress:
    """Return the progress before the first turn."""
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
    """Return (EpisodeStop int32 [], progress after a turn, whether the level restarts bool []).

    turn: number of turns so far, including this one; done, success: of the environment; used:
    actions of the trial. The end of the last or of a successful trial also ends the episode.
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
    return stop, *follow(agent, now, again)


def follow(agent: Agent, now: Progress, again: jax.Array) -> tuple[Progress, jax.Array]:
    """Return (progress after a turn, whether the level restarts in the next turn: bool []).

    again: this turn ended a trial, and another trial follows.
    """
    # Only arithmetic, for arrays and Python numbers
    reflected = now.part == REFLECT
    turns = (now.turns + 1) * (1 - (again | reflected))
    part = PLAN * (turns == 0) * agent.plans
    if agent.reflects:
        part = REFLECT * again + part * (1 - again)
    after = Progress(part=part, trial=now.trial + again, turns=turns, stepped=now.part == ACT)
    return after, reflected | (again & (not agent.reflects))
