"""Bias and variance of every way to credit turns, against exact gradients of small worlds.

  python -m benchmarks.turn_credit [--groups=100000] [--members=4] [--seed=0]

Tabular softmax policies play worlds in which they may stop: the exact gradient of the expected
return is known by dynamic programming, that of an estimator is the mean over 10^5 groups.
Written to benchmarks/turn_credit.md:
  bias      what remains of the mean's direction beside the exact gradient, after the best scaling,
            as a share of it; bold where Monte Carlo noise does not explain it
  variance  of one group's gradient at that scaling / |gradient|^2, times the turns that the group
            samples: lower is better per sampled token
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit

TABLE = Path(__file__).with_suffix('.md')
STOP, GO = 0, 1
NOISE = 5.0  # standard errors of one component that chance does not explain


@dataclasses.dataclass(frozen=True)
class World:
    """A decision process of S states and A actions that all members start in state 0."""

    says: str
    turns: int
    move: np.ndarray  # [S, A, S]  probability of the next state
    reward: np.ndarray  # [S, A, S]  of the turn
    ends: np.ndarray  # [S, A]  probability that the action ends the episode
    answer: np.ndarray  # [S, A, S]  outcome, paid if the action ends the episode
    logits: np.ndarray  # [K, S, A]  of the policy
    faults: float = 0.0  # probability that an episode fails, whatever it does

    @property
    def policy(self) -> np.ndarray:
        """[K, S, A]."""
        exp = np.exp(self.logits - self.logits.max(-1, keepdims=True))
        return exp / exp.sum(-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Continued:
    """M times each turn of an episode was played again, and all that came behind it."""

    actions: np.ndarray  # int [B, K, M]  of that turn
    returns: jax.Array  # float32 [B, K, M]  from that turn on
    turns: np.ndarray  # int [B, K, M]  played
    healthy: np.ndarray  # bool [B, K, M]


@dataclasses.dataclass(frozen=True)
class Played:
    """Episodes of B = groups x members rows."""

    states: np.ndarray  # int [B, K]
    actions: np.ndarray  # int [B, K]
    rewards: jax.Array  # float32 [B, K]
    outcome: jax.Array  # float32 [B]
    num_turns: jax.Array  # int32 [B]
    healthy: jax.Array  # bool [B]
    continued: Continued | None = None

    @property
    def all_rewards(self) -> jax.Array:
        """float32 [B, K]: the outcome in the last turn."""
        last = jnp.arange(self.rewards.shape[1])[None] == self.num_turns[:, None] - 1
        return self.rewards + jnp.where(last, self.outcome[:, None], 0.0)


# ---- worlds --------------------------------------------------------------------------------------


def empty(states: int, actions: int) -> dict[str, np.ndarray]:
    """Arrays of a world in which nothing moves, pays or ends."""
    square = (states, actions, states)
    return dict(
        move=np.broadcast_to(np.eye(states)[:, None], square).copy(),
        reward=np.zeros(square),
        ends=np.zeros((states, actions)),
        answer=np.zeros(square),
    )


def second_turn(worth: float) -> World:
    """Half of the policy stops at once; who goes on gets `worth` in the second turn."""
    parts = empty(2, 2)
    parts['ends'][:] = [[1, 0], [1, 1]]
    parts['move'][0, GO] = [0, 1]
    parts['reward'][1] = worth
    return World(f'a second turn worth {worth:+g}', 2, **parts, logits=np.zeros((2, 2, 2)))


def lookups() -> World:
    """Look up (-.1, finds it every other time) or answer: a guess is right one time in four."""
    parts = empty(3, 2)  # unknown, known, answered right
    parts['ends'][:, STOP] = 1
    parts['move'][0, GO] = [0.5, 0.5, 0]
    parts['move'][0, STOP], parts['move'][1, STOP] = [0.75, 0, 0.25], [0, 0, 1]
    parts['reward'][:, GO] = -0.1
    parts['answer'][:, STOP, 2] = 1
    logits = np.zeros((4, 3, 2)) + np.array([0.0, 0.5])
    return World('lookups that cost .1', 4, **parts, logits=logits)


def bonuses() -> World:
    """Two states, four turns, rewards of +-1."""
    rng, parts = np.random.default_rng(3), empty(2, 3)
    parts['ends'][:, STOP] = 1
    parts['move'][:] = rng.dirichlet([1, 1], (2, 3))
    parts['reward'][:] = rng.choice([-1.0, 1.0], (2, 3, 1))
    return World('bonuses of +-1', 4, **parts, logits=rng.normal(size=(4, 2, 3)) * 0.5)


def chance(says: str, *, faults: float = 0.0, stops: bool = True) -> World:
    """Three states, five turns; moves, rewards, ends and outcomes are drawn once."""
    rng, parts = np.random.default_rng(7), empty(3, 3)
    parts['move'][:] = rng.dirichlet([1, 1, 1], (3, 3))
    parts['reward'][:] = rng.normal(size=(3, 3, 3))
    if stops:
        parts['ends'][:] = rng.uniform(0, 0.4, (3, 3))
        parts['ends'][:, STOP] = 1
        parts['answer'][:] = rng.normal(size=(3, 3, 3))
    logits = rng.normal(size=(5, 3, 3)) * 0.5
    return World(says, 5, **parts, logits=logits, faults=faults)


WORLDS: Mapping[str, World] = {
    'gain': second_turn(1.0),
    'cost': second_turn(-1.0),
    'lookups': lookups(),
    'bonuses': bonuses(),
    'chance': chance('drawn at random, ends by chance too'),
    'faults': chance('the same, one episode of five fails', faults=0.2),
    'no stop': chance('drawn at random, never ends', stops=False),
}


def exact(world: World) -> tuple[np.ndarray, np.ndarray]:
    """(values [K, S], gradient [K, S, A] of the expected return) by dynamic programming."""
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
    """Independent episodes; a faulty one is played like the others and then does not count.

    They begin at turn `first` in the given states int [B]; rewards are those from there on.
    """

    def draw(chances):  # [B, n] -> int [B]
        return (rng.random((len(chances), 1)) > np.cumsum(chances[:, :-1], 1)).sum(1)

    state = np.zeros(episodes, int) if state is None else state
    live = np.ones(episodes, bool)
    found = {name: [] for name in ('states', 'actions', 'rewards')}
    outcome, num_turns = np.zeros(episodes), np.zeros(episodes, int)
    for k in range(first, world.turns):
        action = draw(world.policy[k][state])
        after = draw(world.move[state, action])
        ended = live & (rng.random(episodes) < world.ends[state, action])
        found['states'].append(state)
        found['actions'].append(action)
        found['rewards'].append(np.where(live, world.reward[state, action, after], 0.0))
        outcome += np.where(ended, world.answer[state, action, after], 0.0)
        num_turns += live
        state, live = after, live & ~ended
    states, actions, rewards = (np.stack(found[name], 1) for name in found)
    return Played(
        states=states,
        actions=actions,
        rewards=jnp.asarray(rewards, jnp.float32),
        outcome=jnp.asarray(outcome, jnp.float32),
        num_turns=jnp.asarray(num_turns, jnp.int32),
        healthy=jnp.asarray(rng.random(episodes) >= world.faults),
    )


def play_on(world: World, played: Played, times: int, rng: np.random.Generator) -> Played:
    """The episodes with `times` continuations from the start of every turn behind the first."""
    rows, turns = played.states.shape
    actions, returns, count, healthy = (np.zeros((rows, turns, times)) for _ in range(4))
    for k in range(1, turns):
        reached = np.asarray(played.num_turns) > k
        for m in range(times):
            fresh = play(world, rows, rng, first=k, state=played.states[:, k])
            actions[:, k, m] = fresh.actions[:, 0]
            returns[:, k, m] = fresh.rewards.sum(1) + fresh.outcome
            count[:, k, m] = np.where(reached, fresh.num_turns, 0)
            healthy[:, k, m] = np.asarray(fresh.healthy) & reached
    continued = Continued(
        actions=actions.astype(int),
        returns=jnp.asarray(returns, jnp.float32),
        turns=count.astype(int),
        healthy=healthy.astype(bool),
    )
    return dataclasses.replace(played, continued=continued)


def forked_turns(played: Played, world: World, turns: str, rng: np.random.Generator) -> np.ndarray:
    """The turn of each episode from which it is continued, int [B]; 0 = none.

    unsure: the later turn whose action was the least likely; ahead: drawn, if it was reached.
    """
    k, count = np.arange(world.turns)[None], np.asarray(played.num_turns)
    if turns == 'ahead':
        drawn = rng.integers(1, world.turns, len(count))
        return np.where(drawn < count, drawn, 0)
    chances = world.policy[k, played.states, played.actions]
    later = (k > 0) & (k < count[:, None])
    return np.where(later, -np.log(chances), -1.0).argmax(1) * later.any(1)


def only_from(played: Played, turn: np.ndarray) -> Played:
    """With the continuations from that turn int [B] alone."""
    there = (np.arange(played.states.shape[1])[None] == turn[:, None])[:, :, None]
    more = played.continued
    kept = dataclasses.replace(more, turns=more.turns * there, healthy=more.healthy & there)
    return dataclasses.replace(played, continued=kept)


# ---- estimators: (played, world, members) -> advantages [B, K] -----------------------------------


def by_mode(played: Played, world: World, members: int, *, mode: str, norm: str) -> jax.Array:
    """A mode of MT-GRPO, undiscounted."""
    return turn_credit.turn_advantages(
        played.rewards,
        played.outcome,
        played.num_turns,
        played.healthy,
        group_size=members,
        mode=mode,
        norm=norm,
        gamma=1.0,
    )


def by_episode(played: Played, world: World, members: int, *, compare: Callable) -> jax.Array:
    """One advantage for an episode: GRPO, Dr.GRPO, RLOO."""
    whole = compare(played.all_rewards.sum(1), played.healthy, group_size=members)
    return jnp.broadcast_to(whole[:, None], played.rewards.shape)


def by_state(played: Played, world: World, members: int) -> jax.Array:
    """GiGPO, whose anchors are the states."""
    turns = world.turns
    taken = turn_credit.turns_played(played.num_turns, played.healthy, turns)
    rewards = jnp.where(taken, played.all_rewards, 0.0)
    to_go = turn_credit.discounted_to_go(
        rewards, jnp.zeros_like(rewards[:, 0]), played.num_turns, gamma=0.95
    )
    anchors = jnp.asarray(played.states, jnp.uint32)
    steps = turn_credit.step_advantages(to_go, anchors, taken, group_size=members)
    return steps + adv.group_center(rewards.sum(1), played.healthy, group_size=members)[:, None]


def by_others(played: Played, world: World, members: int) -> jax.Array:
    """turn_grpo."""
    return turn_credit.against_others(
        played.all_rewards, played.num_turns, played.healthy, group_size=members
    )


def by_value(played: Played, world: World, members: int) -> jax.Array:
    """Returns-to-go less the exact value: what a perfect critic gives at lambda 1."""
    values = jnp.asarray(exact(world)[0], jnp.float32)
    to_go = adv.linear_recursion(played.all_rewards, jnp.ones_like(played.all_rewards))
    return to_go - values[jnp.arange(world.turns)[None], played.states]


ESTIMATORS: Mapping[str, Callable[[Played, World, int], jax.Array]] = {
    'exact value': by_value,
    '`turn_grpo`': by_others,
    '`rloo`': functools.partial(by_episode, compare=adv.leave_one_out),
    '`dr_grpo`': functools.partial(by_episode, compare=adv.group_center),
    '`grpo`': functools.partial(by_episode, compare=adv.group_normalize),
    '`gigpo`': by_state,
    **{
        f'`mt_grpo` {mode}, {norm}': functools.partial(by_mode, mode=mode, norm=norm)
        for mode in turn_credit.MODES
        for norm in ('mean', 'std')
    },
}


def by_continuations(
    played: Played, world: World, members: int, *, times: int, weighted: bool
) -> list[tuple[Played, jax.Array]]:
    """vine with the first `times` continuations: (turns that train, their advantages [B, K])."""
    rows, turns = played.states.shape
    more = played.continued
    turn = jnp.broadcast_to(jnp.repeat(jnp.arange(turns), times)[None], (rows, turns * times))
    own, forked, count = turn_credit.against_continuations(
        played.all_rewards,
        played.num_turns,
        played.healthy,
        turn,
        more.returns[:, :, :times].reshape(rows, -1),
        jnp.asarray(more.healthy[:, :, :times].reshape(rows, -1)),
        group_size=members,
    )
    if not weighted:
        return [(played, own)]
    weight, forked = 1.0 / (1 + count), forked.reshape(rows, turns, times)
    return [(played, own * weight)] + [
        (dataclasses.replace(played, actions=more.actions[:, :, m]), forked[:, :, m] * weight)
        for m in range(times)
    ]


def by_siblings(
    played: Played, world: World, members: int, *, times: int
) -> list[tuple[Played, jax.Array]]:
    """BPO's backbone: its return less the mean of its siblings', at the forked turn and later."""
    ((_, own),) = by_continuations(played, world, members, times=times, weighted=False)
    more = played.continued
    usable = more.healthy[:, :, :times].any(2) & np.asarray(played.healthy)[:, None]
    at_fork = jnp.where(usable, own, 0.0).sum(1, keepdims=True)
    return [(played, jnp.where(usable.cumsum(1) > 0, at_fork, 0.0))]


MOST_TIMES = 4
FORKED: Mapping[str, tuple[int, str, Callable]] = {
    f'`vine` of {times}, {train}': (
        times,
        'every',
        functools.partial(by_continuations, times=times, weighted=train == 'weighted'),
    )
    for train in ('trunks', 'weighted')
    for times in (1, 2, MOST_TIMES)
}
FORKED |= {
    f'`vine` of 2, weighted, {turns}': (
        2,
        turns,
        functools.partial(by_continuations, times=2, weighted=True),
    )
    for turns in ('ahead', 'unsure')
}
FORKED |= {'siblings of 3, backbone': (3, 'unsure', functools.partial(by_siblings, times=3))}


# ---- what they give ------------------------------------------------------------------------------


def group_gradients(
    played: Played, advantages: jax.Array, world: World, members: int
) -> np.ndarray:
    """Policy gradient of each group, the mean over its members; [groups, K S A]."""
    turns, states, actions = world.logits.shape
    taken = turn_credit.turns_played(played.num_turns, played.healthy, turns)
    weight = np.where(taken, np.asarray(advantages, np.float64), 0.0)[:, :, None]
    rows = len(weight)
    turn = np.arange(turns)[None, :]
    chosen = played.actions[:, :, None] == np.arange(actions)
    score = weight * (chosen - world.policy[turn, played.states])  # [B, K, A]
    size = turns * states * actions
    first = (np.arange(rows) // members * size)[:, None]
    index = (first + (turn * states + played.states) * actions)[:, :, None] + np.arange(actions)
    sums = np.bincount(index.ravel(), score.ravel(), minlength=rows // members * size)
    return sums.reshape(-1, size) / members


@dataclasses.dataclass(frozen=True)
class Quality:
    """What the mean over groups is beside the exact gradient."""

    scale: float  # the exact gradient / the mean, by least squares
    bias: float  # what is left after scaling / |gradient|
    noise: float  # what Monte Carlo error alone leaves
    errors: float  # largest deviation of a component, in its standard errors
    variance: float  # of a group's gradient after scaling / |gradient|^2


def quality(gradients: np.ndarray, gradient: np.ndarray, scale: float | None = None) -> Quality:
    """Compares gradients of groups [N, D] with the exact one [D]; scale None: the best."""
    mean, spread = gradients.mean(0), gradients.var(0)
    if scale is None:  # a mean of 0 stays 0
        scale = float(mean @ gradient / max(mean @ mean, 1e-30))
    rest, error = scale * mean - gradient, abs(scale) * np.sqrt(spread / len(gradients))
    length = np.linalg.norm(gradient)
    off = np.abs(rest) > 1e-6 * length  # a component that never varies may be off as well
    return Quality(
        scale=scale,
        bias=float(np.linalg.norm(rest) / length),
        noise=float(np.linalg.norm(error) / length),
        errors=float((np.abs(rest[off]) / np.maximum(error[off], 1e-30)).max(initial=0.0)),
        variance=float(scale**2 * spread.sum() / length**2),
    )


def measure(world: World, groups: int, members: int, seed: int) -> dict[str, tuple[Quality, float]]:
    """(quality, turns that a group samples) of every estimator on the same episodes."""
    rng = np.random.default_rng(seed)
    played = play(world, groups * members, rng)
    gradient = exact(world)[1].ravel()
    found, turns = {}, float(np.mean(played.num_turns)) * members
    for name, estimator in ESTIMATORS.items():
        advantages = estimator(played, world, members)
        gradients = group_gradients(played, advantages, world, members)
        found[name] = quality(gradients, gradient), turns
    played = play_on(world, played, MOST_TIMES, rng)
    for name, (times, which, estimator) in FORKED.items():
        some = played
        if which != 'every':
            some = only_from(played, forked_turns(played, world, which, rng))
        parts = estimator(some, world, members)
        gradients = sum(group_gradients(*part, world, members) for part in parts)
        more = some.continued.turns[:, :, :times].sum((1, 2)).mean() * members
        found[name] = quality(gradients, gradient), turns + float(more)
    return found


def table(rows: Mapping[str, list[str]]) -> str:
    """A markdown table with a column for each world."""
    lines = [f'| estimator | {" | ".join(WORLDS)} |', '| --- |' + ' --- |' * len(WORLDS)]
    return '\n'.join(
        [*lines, *(f'| {name} | {" | ".join(cells)} |' for name, cells in rows.items())]
    )


def page(groups: int, members: int, seed: int) -> str:
    """The text of turn_credit.md."""
    measured = {name: measure(world, groups, members, seed) for name, world in WORLDS.items()}
    bias, cost, alone = {}, {}, {}
    for name in (*ESTIMATORS, *FORKED):
        found = [qualities[name] for qualities in measured.values()]
        biased = [one.errors > NOISE for one, _ in found]
        bias[name] = [
            f'**{one.bias:.3f}**' if off else f'{one.bias:.3f}'
            for (one, _), off in zip(found, biased, strict=True)
        ]
        cost[name] = [
            'biased' if off else f'{one.variance * turns:.0f}'
            for (one, turns), off in zip(found, biased, strict=True)
        ]
        alone[name] = [
            'biased' if off else f'{one.variance:.1f}'
            for (one, _), off in zip(found, biased, strict=True)
        ]
    noise = [f'{qualities["`turn_grpo`"][0].noise:.3f}' for qualities in measured.values()]
    worlds = '\n'.join(
        f'- `{name}`: {world.says}, {world.turns} turns' for name, world in WORLDS.items()
    )
    return f"""# Bias and variance of turn credit

Made by `python -m benchmarks.turn_credit --groups={groups} --members={members} --seed={seed}`: the
gradients of estimators, each the mean over {groups} groups of {members}, beside the exact gradient
of the expected return of a tabular policy. Worlds:

{worlds}

MT-GRPO's modes are undiscounted here; `mean` leaves the division by the std out. `or` leaves the
turn rewards out on purpose, and 1.000 is no gradient at all. `vine` forks at every turn, at one
drawn `ahead`, or where it was `unsure`; the last line is BPO's backbone, which has the advantage of
its siblings at the fork and in all later turns.

## Bias

What is left beside the exact gradient after the best scaling, as a share of it; bold where a
component is more than {NOISE:g} standard errors off.

{table(bias | {'Monte Carlo noise of `turn_grpo`': noise})}

## Variance times turns sampled

Variance of a group's gradient at that scaling / |gradient|^2, times the turns that it samples:
lower is better per sampled token. Only of estimators without bias in that world.

{table(cost)}

## Variance of an update

The same variance by itself: of one group, whatever it samples. `vine` of M plays every turn behind
the first M times more.

{table(alone)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--groups', type=int, default=100_000)
    parser.add_argument('--members', type=int, default=4)
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    text = page(args.groups, args.members, args.seed)
    TABLE.write_text(text, encoding='utf-8')
    print(text)


if __name__ == '__main__':
    main()
