"""Small environments with exact policy gradients, and the gradients of credit estimators.

Tabular softmax policies play environments in which they may stop. Dynamic programming gives the
exact gradient of the expected return; the mean over many groups gives an estimator's gradient.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.algorithms.mt_grpo import MTGRPO
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import Comparison

STOP, GO = 0, 1
NOISE = 5.0  # standard errors of a component that count as significant


@dataclasses.dataclass(frozen=True)
class World:
    """A decision process of S states and A actions that all members start in state 0."""

    turns: int
    move: np.ndarray  # [S, A, S]  probability of the next state
    reward: np.ndarray  # [S, A, S]  of the turn
    ends: np.ndarray  # [S, A]  probability that the action ends the episode
    answer: np.ndarray  # [S, A, S]  outcome, paid if the action ends the episode
    logits: np.ndarray  # [K, S, A]  of the policy
    faults: float = 0.0  # probability that an episode fails, for any actions

    @property
    def policy(self) -> np.ndarray:
        """[K, S, A]."""
        exp = np.exp(self.logits - self.logits.max(-1, keepdims=True))
        return exp / exp.sum(-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Played:
    """Episodes of B = groups x members rows."""

    states: np.ndarray  # int [B, K]
    actions: np.ndarray  # int [B, K]
    rewards: jax.Array  # float32 [B, K]
    outcome: jax.Array  # float32 [B]
    num_turns: jax.Array  # int32 [B]
    healthy: jax.Array  # bool [B]

    @property
    def all_rewards(self) -> jax.Array:
        """float32 [B, K]: the outcome in the last turn."""
        last = jnp.arange(self.rewards.shape[1])[None] == self.num_turns[:, None] - 1
        return self.rewards + jnp.where(last, self.outcome[:, None], 0.0)


# ---- worlds --------------------------------------------------------------------------------------


def empty(states: int, actions: int) -> dict[str, np.ndarray]:
    """Return arrays of an environment without moves, rewards or ends."""
    square = (states, actions, states)
    return dict(
        move=np.broadcast_to(np.eye(states)[:, None], square).copy(),
        reward=np.zeros(square),
        ends=np.zeros((states, actions)),
        answer=np.zeros(square),
    )


def second_turn(worth: float) -> World:
    """Half of the policy stops immediately; continuing earns `worth` in the second turn."""
    parts = empty(2, 2)
    parts['ends'][:] = [[1, 0], [1, 1]]
    parts['move'][0, GO] = [0, 1]
    parts['reward'][1] = worth
    return World(2, **parts, logits=np.zeros((2, 2, 2)))


def lookups() -> World:
    """Look up (-.1, finds it every other time) or answer: a guess is right one time in four."""
    parts = empty(3, 2)  # unknown, known, answered right
    parts['ends'][:, STOP] = 1
    parts['move'][0, GO] = [0.5, 0.5, 0]
    parts['move'][0, STOP], parts['move'][1, STOP] = [0.75, 0, 0.25], [0, 0, 1]
    parts['reward'][:, GO] = -0.1
    parts['answer'][:, STOP, 2] = 1
    logits = np.zeros((4, 3, 2)) + np.array([0.0, 0.5])
    return World(4, **parts, logits=logits)


def bonuses() -> World:
    """Two states, four turns, rewards of +-1."""
    rng, parts = np.random.default_rng(3), empty(2, 3)
    parts['ends'][:, STOP] = 1
    parts['move'][:] = rng.dirichlet([1, 1], (2, 3))
    parts['reward'][:] = rng.choice([-1.0, 1.0], (2, 3, 1))
    return World(4, **parts, logits=rng.normal(size=(4, 2, 3)) * 0.5)


def chance(*, faults: float = 0.0, stops: bool = True) -> World:
    """Three states and five turns; moves, rewards, ends and outcomes are drawn once."""
    rng, parts = np.random.default_rng(7), empty(3, 3)
    parts['move'][:] = rng.dirichlet([1, 1, 1], (3, 3))
    parts['reward'][:] = rng.normal(size=(3, 3, 3))
    if stops:
        parts['ends'][:] = rng.uniform(0, 0.4, (3, 3))
        parts['ends'][:, STOP] = 1
        parts['answer'][:] = rng.normal(size=(3, 3, 3))
    logits = rng.normal(size=(5, 3, 3)) * 0.5
    return World(5, **parts, logits=logits, faults=faults)


WORLDS: Mapping[str, World] = {
    'gain': second_turn(1.0),
    'cost': second_turn(-1.0),
    'lookups': lookups(),
    'bonuses': bonuses(),
    'chance': chance(),
    'faults': chance(faults=0.2),
    'no stop': chance(stops=False),
}


def exact(world: World) -> tuple[np.ndarray, np.ndarray]:
    """Return (values [K, S], gradient [K, S, A] of the expected return) by dynamic programming."""
    turns, states, _ = world.logits.shape
    after, values, actions = np.zeros(states), [], []
    for k in reversed(range(turns)):
        on = (1 - world.ends)[:, :, None] * after[None, None]
        paid = world.reward + world.ends[:, :, None] * world.answer + on
        q = (world.move * paid).sum(2)
        after = (world.policy[k] * q).sum(1)
        values.append(after)
        actions.append(q)
    values, q = np.stack(values[::-1]), np.stack(actions[::-1])
    visits, gradient = np.eye(states)[0], []
    for k in range(turns):
        chosen = visits[:, None] * world.policy[k]
        gradient.append(chosen * (q[k] - values[k][:, None]))
        visits = ((chosen * (1 - world.ends))[:, :, None] * world.move).sum((0, 1))
    return values, np.stack(gradient)


def play(
    world: World,
    episodes: int,
    rng: np.random.Generator,
    *,
    first: int = 0,
    state: np.ndarray | None = None,
) -> Played:
    """Play independent episodes. A faulty episode is played normally and does not count.

    They start at turn `first` in the given states int [B], and rewards count from there.
    """

    def draw(chances):  # [B, n] -> int [B]
        return (rng.random((len(chances), 1)) > np.cumsum(chances[:, :-1], 1)).sum(1)

    state = np.zeros(episodes, int) if state is None else state
    live = np.ones(episodes, bool)
    history = {name: [] for name in ('states', 'actions', 'rewards')}
    outcome, num_turns = np.zeros(episodes), np.zeros(episodes, int)
    for k in range(first, world.turns):
        action = draw(world.policy[k][state])
        after = draw(world.move[state, action])
        ended = live & (rng.random(episodes) < world.ends[state, action])
        history['states'].append(state)
        history['actions'].append(action)
        history['rewards'].append(np.where(live, world.reward[state, action, after], 0.0))
        outcome += np.where(ended, world.answer[state, action, after], 0.0)
        num_turns += live
        state, live = after, live & ~ended
    states, actions, rewards = (np.stack(history[name], 1) for name in history)
    return Played(
        states=states,
        actions=actions,
        rewards=jnp.asarray(rewards, jnp.float32),
        outcome=jnp.asarray(outcome, jnp.float32),
        num_turns=jnp.asarray(num_turns, jnp.int32),
        healthy=jnp.asarray(rng.random(episodes) >= world.faults),
    )


# ---- estimators: (episodes, world, members) -> advantages [B, K] ---------------------------------


def by_mode(episodes: Played, world: World, members: int, *, mode: str, norm: str) -> jax.Array:
    """A mode of MT-GRPO, undiscounted."""
    algorithm = MTGRPO(mode=mode, turn_gamma=1.0, comparison=Comparison(norm, eps=1e-4))
    return algorithm.turn_advantages(
        episodes.rewards, episodes.outcome, episodes.num_turns, episodes.healthy, group_size=members
    )


def by_episode(episodes: Played, world: World, members: int, *, norm: str) -> jax.Array:
    """One advantage for an episode: GRPO, Dr.GRPO, RLOO."""
    returns = episodes.all_rewards.sum(1)
    advantage = adv.compare(returns, episodes.healthy, group_size=members, norm=norm)
    return jnp.broadcast_to(advantage[:, None], episodes.rewards.shape)


def by_others(episodes: Played, world: World, members: int) -> jax.Array:
    """turn_grpo."""
    return turn_credit.leave_one_out_to_go(
        episodes.all_rewards, episodes.num_turns, episodes.healthy, group_size=members
    )


ESTIMATORS = {
    'turn_grpo': by_others,
    'rloo': functools.partial(by_episode, norm='leave_one_out'),
    **{
        f'{mode}, {norm}': functools.partial(by_mode, mode=mode, norm=norm)
        for mode in turn_credit.MODES
        for norm in ('mean', 'std')
    },
}


# ---- gradients of estimators ---------------------------------------------------------------------


def group_gradients(
    episodes: Played, advantages: jax.Array, world: World, members: int
) -> np.ndarray:
    """Return the policy gradient of each group, the mean over its members; [groups, K S A]."""
    turns, states, actions = world.logits.shape
    reached = turn_credit.reached_turns(episodes.num_turns, episodes.healthy, turns)
    weight = np.where(reached, np.asarray(advantages, np.float64), 0.0)[:, :, None]
    rows = len(weight)
    turn = np.arange(turns)[None, :]
    chosen = episodes.actions[:, :, None] == np.arange(actions)
    score = weight * (chosen - world.policy[turn, episodes.states])  # [B, K, A]
    size = turns * states * actions
    first = (np.arange(rows) // members * size)[:, None]
    index = (first + (turn * states + episodes.states) * actions)[:, :, None] + np.arange(actions)
    sums = np.bincount(index.ravel(), score.ravel(), minlength=rows // members * size)
    return sums.reshape(-1, size) / members


@dataclasses.dataclass(frozen=True)
class Quality:
    """The mean over groups compared with the exact gradient."""

    scale: float  # the exact gradient / the mean, by least squares
    bias: float  # residual after scaling / |gradient|
    noise: float  # residual expected from Monte Carlo error
    errors: float  # largest deviation of a component, in its standard errors
    variance: float  # of a group's gradient after scaling / |gradient|^2


def quality(gradients: np.ndarray, gradient: np.ndarray, scale: float | None = None) -> Quality:
    """Compare gradients of groups [N, D] with the exact one [D]; scale None: the best scale."""
    mean, spread = gradients.mean(0), gradients.var(0)
    if scale is None:  # a mean of 0 stays 0
        scale = float(mean @ gradient / max(mean @ mean, 1e-30))
    rest, error = scale * mean - gradient, abs(scale) * np.sqrt(spread / len(gradients))
    length = np.linalg.norm(gradient)
    off = np.abs(rest) > 1e-6 * length  # a constant component may also be off
    return Quality(
        scale=scale,
        bias=float(np.linalg.norm(rest) / length),
        noise=float(np.linalg.norm(error) / length),
        errors=float((np.abs(rest[off]) / np.maximum(error[off], 1e-30)).max(initial=0.0)),
        variance=float(scale**2 * spread.sum() / length**2),
    )
