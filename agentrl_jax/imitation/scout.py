"""A scout: PPO with a small network on a world's features, without language (arXiv:2601.21754).

A scout explores a world on the device, and the language model clones its episodes. The algorithm is
PPO (arXiv:1707.06347) as one program: batched steps with automatic resets, GAE, clipped updates in
minibatches. Its actions are names, as in an answer. N environments, T steps, F features, A names.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct


@dataclasses.dataclass(frozen=True)
class ScoutSettings:
    """Settings of a scout."""

    seed: int = 0
    steps: int = 2_000_000  # actions in the environments
    envs: int = 256  # environments at once
    length: int = 16  # actions in each environment between two updates
    epochs: int = 4  # passes over the actions of an update
    minibatches: int = 8  # optimiser steps per pass
    hidden: int = 256  # width of the two hidden layers
    lr: float = 2e-3  # initial learning rate of Adam; falls linearly to 0
    max_grad_norm: float = 0.5
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2  # of the probability ratio
    entropy_coef: float = 0.1  # initial; falls linearly to a tenth
    value_coef: float = 0.5

    @property
    def updates(self) -> int:
        return max(self.steps // (self.envs * self.length), 1)

    @property
    def entropy_schedule(self) -> optax.Schedule:
        return optax.linear_schedule(self.entropy_coef, self.entropy_coef / 10, self.updates)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        rate = optax.linear_schedule(self.lr, 0.0, self.updates * self.epochs * self.minibatches)
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), optax.adam(rate))


@dataclasses.dataclass(frozen=True)
class Game:
    """A world with a limit of actions per episode, as a scout plays it; for one episode."""

    env: Any  # TextEnvironment
    budget: int  # actions per episode

    @property
    def actions(self) -> int:
        return len(self.env.ACTION_NAMES)

    def view(self, state: Any, used: jax.Array, pool: Any) -> jax.Array:
        """Return float32 [F]: the world's features and the number of actions left."""
        left = self.budget - used
        known = jax.nn.one_hot(jnp.minimum(left, 16) - 1, 16)
        share = left.astype(jnp.float32)[None] / self.budget
        return jnp.concatenate([self.env.features(state, pool), known, share])

    def legal(self, state: Any) -> jax.Array:
        """Return bool [A]: the names on offer; all of them if there are none."""
        legal = jax.vmap(self.env.env_action, (None, 0))(state, jnp.arange(self.actions)) >= 0
        offered = self.env.offered(state)
        legal = legal if offered is None else legal & offered
        return legal | ~jnp.any(legal)

    def act(
        self, key: jax.Array, state: Any, used: jax.Array, name: jax.Array, pool: Any
    ) -> tuple[Any, jax.Array, jax.Array]:
        """Return (state, reward, whether the episode is over) after an action.

        Rewards are divided by the largest absolute reward of a step.
        """
        largest = max(map(abs, self.env.REWARD_BOUNDS))
        action = self.env.env_action(state, name)
        _, state, reward, over, _ = self.env.step_env(key, state, action, pool)
        over = over | self.env.is_truncated(state, pool) | (used + 1 >= self.budget)
        return state, reward / largest, over

    def reset(self, key: jax.Array, pool: Any) -> Any:
        """Return the start of a random level."""
        level = jax.random.randint(key, (), 0, self.env.num_levels(pool))
        return self.env.reset_level(level, pool)


@struct.dataclass
class ScoutState:
    """Everything that training continues from."""

    update: jax.Array  # int32 []  updates so far
    net: Any  # {layer: (kernel, bias)}
    opt_state: Any
    world: Any  # states of the environments, [N, ...]
    used: jax.Array  # int32 [N]  actions in the current episodes


class Steps(NamedTuple):
    """Actions of a batch; [T, N, ...] or flat [T * N, ...]."""

    view: jax.Array  # float32 [F]
    legal: jax.Array  # bool [A]
    action: jax.Array  # int32 []
    logprob: jax.Array  # float32 []
    value: jax.Array  # float32 []
    reward: jax.Array  # float32 []
    over: jax.Array  # bool []  the episode ended with this action
    success: jax.Array  # bool []  in success


def init_net(key: jax.Array, features: int, actions: int, hidden: int) -> Any:
    """Return random layers of two hidden layers, a policy head and a value head."""
    sizes = {
        'first': (features, hidden, 2**0.5),
        'second': (hidden, hidden, 2**0.5),
        'policy': (hidden, actions, 0.01),
        'value': (hidden, 1, 1.0),
    }
    keys = jax.random.split(key, len(sizes))
    return {
        name: (jax.random.normal(k, (rows, columns)) * (scale / rows**0.5), jnp.zeros(columns))
        for k, (name, (rows, columns, scale)) in zip(keys, sizes.items(), strict=True)
    }


def forward(net: Any, view: jax.Array, legal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (log-probabilities [B, A], -1e9 for illegal names; value [B]) of view [B, F]."""

    def layer(name, x):
        kernel, bias = net[name]
        return x @ kernel + bias[None]

    x = jax.nn.relu(layer('second', jax.nn.relu(layer('first', view))))
    logits = jnp.where(legal, layer('policy', x), -1e9)
    return jax.nn.log_softmax(logits), layer('value', x)[:, 0]


def gae(
    reward: jax.Array,
    value: jax.Array,
    over: jax.Array,
    last: jax.Array,
    discount: float,
    gae_lambda: float,
) -> jax.Array:
    """Return the advantages [T, N] of generalised advantage estimation (arXiv:1506.02438, eq. 16).

    A[t] = d[t] + discount * lambda * A[t+1], d[t] = r[t] + discount * V[t+1] - V[t]; both terms of
    t+1 are 0 where the episode is over [T, N]. last [N]: the value after the last step.
    """

    def step(carry, at):
        advantage, after = carry
        reward, value, over = at
        delta = reward + jnp.where(over, 0.0, discount * after) - value
        advantage = delta + jnp.where(over, 0.0, discount * gae_lambda * advantage)
        return (advantage, value), advantage

    start = jnp.zeros_like(last), last
    return jax.lax.scan(step, start, (reward, value, over), reverse=True)[1]


def loss(
    net: Any,
    steps: Steps,
    advantage: jax.Array,
    target: jax.Array,
    entropy_coef: jax.Array,
    settings: ScoutSettings,
) -> jax.Array:
    """Return PPO's clipped loss of B steps, with an entropy bonus and a squared value error."""
    logprobs, value = forward(net, steps.view, steps.legal)
    taken = jnp.take_along_axis(logprobs, steps.action[:, None], 1)[:, 0]
    ratio = jnp.exp(taken - steps.logprob)
    clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -jnp.where(steps.legal, jnp.exp(logprobs) * logprobs, 0.0).sum(-1).mean()
    error = jnp.square(value - target).mean()
    return -gain - entropy_coef * entropy + settings.value_coef * error


def start(game: Game, pool: Any, settings: ScoutSettings) -> ScoutState:
    """Return the state before the first update."""
    k_net, k_world = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), 0))
    world = jax.vmap(game.reset, (0, None))(jax.random.split(k_world, settings.envs), pool)
    used = jnp.zeros(settings.envs, jnp.int32)
    features = jax.eval_shape(jax.vmap(game.view, (0, 0, None)), world, used, pool).shape[1]
    net = init_net(k_net, features, game.actions, settings.hidden)
    return ScoutState(jnp.int32(0), net, settings.optimiser.init(net), world, used)


def choose(mask: jax.Array, new: Any, old: Any) -> Any:
    """Select between two pytrees by row; mask bool [N]."""
    return jax.tree.map(
        lambda x, y: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old
    )


def explore(
    key: jax.Array, state: ScoutState, pool: Any, game: Game, settings: ScoutSettings
) -> tuple[ScoutState, Steps, jax.Array]:
    """Play T sampled actions in N environments; (state, steps [T, N], value of the end [N])."""
    env, view = game.env, jax.vmap(game.view, (0, 0, None))

    def step(carry, key):
        world, used = carry
        k_action, k_world, k_reset = jax.random.split(key, 3)
        seen, legal = view(world, used, pool), jax.vmap(game.legal)(world)
        logprobs, value = forward(state.net, seen, legal)
        action = jax.random.categorical(k_action, logprobs)
        logprob = jnp.take_along_axis(logprobs, action[:, None], 1)[:, 0]
        keys = jax.random.split(k_world, settings.envs)
        act = jax.vmap(game.act, (0, 0, 0, 0, None))
        after, reward, over = act(keys, world, used, action, pool)
        won = over & jax.vmap(env.success, (0, None))(after, pool)
        fresh = jax.vmap(game.reset, (0, None))(jax.random.split(k_reset, settings.envs), pool)
        carry = choose(over, fresh, after), jnp.where(over, 0, used + 1)
        return carry, Steps(seen, legal, action, logprob, value, reward, over, won)

    keys = jax.random.split(key, settings.length)
    (world, used), steps = jax.lax.scan(step, (state.world, state.used), keys)
    last = forward(state.net, view(world, used, pool), jax.vmap(game.legal)(world))[1]
    return state.replace(world=world, used=used), steps, last


def improve(
    key: jax.Array, state: ScoutState, steps: Steps, last: jax.Array, settings: ScoutSettings
) -> ScoutState:
    """Run the optimiser steps of an update on steps [T, N]; last as in explore."""
    advantage = gae(
        steps.reward, steps.value, steps.over, last, settings.discount, settings.gae_lambda
    )
    target = advantage + steps.value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (steps, advantage, target))
    rows = settings.length * settings.envs

    def minibatch(carry, part):
        net, opt_state = carry
        gradient = jax.grad(loss)(net, *part, settings.entropy_schedule(state.update), settings)
        change, opt_state = settings.optimiser.update(gradient, opt_state)
        return (optax.apply_updates(net, change), opt_state), None

    def epoch(carry, key):
        order = jax.random.permutation(key, rows).reshape(settings.minibatches, -1)
        return jax.lax.scan(
            lambda carry, chosen: minibatch(carry, jax.tree.map(lambda x: x[chosen], data)),
            carry,
            order,
        )

    keys = jax.random.split(key, settings.epochs)
    (net, opt_state), _ = jax.lax.scan(epoch, (state.net, state.opt_state), keys)
    return state.replace(update=state.update + 1, net=net, opt_state=opt_state)


@functools.partial(jax.jit, static_argnames=('game', 'settings'))
def train(
    state: ScoutState, pool: Any, until: jax.Array, *, game: Game, settings: ScoutSettings
) -> tuple[ScoutState, jax.Array]:
    """Return (state after update number `until`, success rate of the episodes on the way).

    Update k depends only on the state and on (seed, k): training in parts gives the same bits.
    """
    root = jax.random.fold_in(jax.random.key(settings.seed), 1)

    def one(_, carry):
        state, won, over = carry
        k_play, k_learn = jax.random.split(jax.random.fold_in(root, state.update))
        state, steps, last = explore(k_play, state, pool, game, settings)
        state = improve(k_learn, state, steps, last, settings)
        return state, won + steps.success.sum(), over + steps.over.sum()

    start = state, jnp.int32(0), jnp.int32(0)
    state, won, over = jax.lax.fori_loop(state.update, until, one, start)
    return state, won / jnp.maximum(over, 1)


@functools.partial(jax.jit, static_argnames='game')
def evaluate(net: Any, pool: Any, *, game: Game) -> jax.Array:
    """Return the success rate of greedy play on every level of the pool, float32 []."""
    levels = jnp.arange(game.env.num_levels(pool))
    states = jax.vmap(game.env.reset_level, (0, None))(levels, pool)
    states, _ = follow(net, states, jnp.zeros_like(levels), pool, game, game.budget)
    return jax.vmap(game.env.success, (0, None))(states, pool).mean()


def follow(
    net: Any, states: Any, used: jax.Array, pool: Any, game: Game, count: int
) -> tuple[Any, jax.Array]:
    """Play up to `count` greedy actions from states [N, ...] after used [N] actions.

    Returns (states, names int32 [N, count]; -1 = the episode was over).
    """

    def step(carry, key):
        states, used, over = carry
        view = jax.vmap(game.view, (0, 0, None))(states, used, pool)
        name = forward(net, view, jax.vmap(game.legal)(states))[0].argmax(-1)
        act = jax.vmap(game.act, (0, 0, 0, 0, None))
        after, _, ends = act(jax.random.split(key, len(used)), states, used, name, pool)
        after = choose(over, states, after)
        return (after, used + 1, over | ends), jnp.where(over, -1, name)

    begin = states, used, jnp.zeros(used.shape, bool)
    keys = jax.random.split(jax.random.key(0), count)
    (states, *_), names = jax.lax.scan(step, begin, keys)
    return states, names.T


@functools.partial(jax.jit, static_argnames=('game', 'count'))
def plan(net: Any, states: Any, used: jax.Array, pool: Any, *, game: Game, count: int) -> jax.Array:
    """Return the next `count` greedy actions int32 [N, count], as in `follow`."""
    return follow(net, states, used, pool, game, count)[1]
