"""Random and oracle play of any environment, for baselines of success and checks of rewards."""

import collections
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CHECKED_EPISODES, CHECKED_PLANS, CHECKED_ACTIONS = 128, 16, 32  # sizes of check_rewards


class NoExpert(ValueError):
    """The environment has no expert, so there are no plans."""


def simulate_random(env: Any, params: Any, horizon: int, *, rollouts: int, seed: int) -> np.ndarray:
    """Return bool [horizon + 1, levels, rollouts]: success after 0, 1, ... random actions.

    Actions are uniform over env.offered, or over all actions if it returns None.
    """
    levels = env.num_levels(params)
    level = jnp.repeat(jnp.arange(levels), rollouts)
    states = jax.vmap(env.reset_level, in_axes=(0, None))(level, params)
    success, is_terminated, is_truncated = (
        jax.vmap(call, in_axes=(0, None))
        for call in (env.success, env.is_terminated, env.is_truncated)
    )

    def act(states, key):
        k_action, k_world = jax.random.split(key)
        offered = jax.vmap(env.offered)(states)
        if offered is None:
            action = jax.random.randint(k_action, level.shape, 0, env.num_actions)
        else:
            draws = jax.random.uniform(k_action, offered.shape)
            name = jnp.argmax(jnp.where(offered, draws, -1.0), 1)
            action = jax.vmap(env.env_action)(states, name)
        keys = jax.random.split(k_world, len(level))
        over = is_terminated(states, params) | is_truncated(states, params)  # step limit

        def keep_if_over(old, new):
            return jnp.where(over.reshape(-1, *[1] * (old.ndim - 1)), old, new)

        after = jax.vmap(env.step_env, in_axes=(0, 0, 0, None))(keys, states, action, params)[1]
        states = jax.tree.map(keep_if_over, states, after)
        return states, success(states, params)

    keys = jax.random.split(jax.random.key(seed), horizon)
    won = jax.jit(lambda states: jax.lax.scan(act, states, keys)[1])(states)
    won = np.concatenate([np.asarray(success(states, params))[None], np.asarray(won)])
    return won.reshape(horizon + 1, levels, rollouts)


def simulate_oracle(env: Any, params: Any, budget: int, *, seed: int) -> np.ndarray:
    """Return bool [levels]: success within the budget of env.plans, replanned every action."""
    levels = env.num_levels(params)
    steps = _steps(env, params, np.arange(levels), budget, plans=levels, replan=True, seed=seed)
    ((states, *_),) = collections.deque(steps, maxlen=1)
    return np.asarray(jax.jit(jax.vmap(env.success, in_axes=(0, None)))(states, params))


def episodes(
    env: Any,
    params: Any,
    level: np.ndarray,
    budget: int,
    *,
    plans: int,
    replan: bool = True,
    seed: int = 0,
) -> tuple[Any, np.ndarray]:
    """Play `budget` actions on each level (int [N]): oracle in the first `plans` rows, else random.

    Returns host arrays: states [budget + 1, N, ...] and rewards float32 [budget, N]. Random actions
    are uniform. Without `replan` a plan is followed to its end, even if an action did not have the
    effect that it assumes.
    """
    steps = _steps(env, params, level, budget, plans=plans, replan=replan, seed=seed)
    states, _, _, rewards = zip(*steps, strict=True)
    rewards = np.array(rewards[1:], np.float32).reshape(budget, len(level))
    return jax.tree.map(lambda *x: np.stack(x), *states), rewards


def solutions(env: Any, params: Any, budget: int, *, seed: int = 0) -> np.ndarray:
    """Return int32 [levels, budget]: the expert's actions from the start of each level.

    Indices into ACTION_NAMES, -1 past the end. Each plan is followed to its end. If the level is
    not over then, as in partially observed environments, a new plan follows. In a stochastic
    environment the actions fit one random draw and may not fit another.
    """
    levels = env.num_levels(params)
    steps = _steps(env, params, np.arange(levels), budget, plans=levels, replan=False, seed=seed)
    done = np.full((levels, budget), -1, np.int32)
    for used, ((_, over, _, _), (_, _, name, _)) in enumerate(itertools.pairwise(steps)):
        done[:, used] = np.where(over, -1, name)
        if (done[:, used] < 0).all():
            break
    return done


def _steps(env: Any, params: Any, level: Any, budget: int, *, plans: int, replan: bool, seed: int):
    """Yield (states, over, name, reward) at the start and after each action of `episodes`.

    name: index into ACTION_NAMES, int [N], -1: no action. name and reward are None at the start.
    """
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    reset, act = _programs(env)
    states, over = jax.device_get(reset(params, jnp.asarray(level, jnp.int32)))
    yield states, over, None, None
    queues: list[list[int]] = [[] for _ in range(plans)]
    for used in range(budget):
        ask = [row for row in range(plans) if not over[row] and (replan or not queues[row])]
        if ask:
            rows = jax.tree.map(lambda x, ask=ask: x[ask], states)
            fresh = env.plans(rows, np.full(len(ask), used), budget, params)
            for row, plan in zip(ask, fresh, strict=True):
                queues[row] = list(plan)
        action = rng.integers(env.num_actions, size=len(level))
        action[:plans] = -1  # no action without a plan
        name = np.full(len(level), -1)
        name[:plans] = [queue.pop(0) if queue else -1 for queue in queues]
        states, reward, over = jax.device_get(act(params, key, used, states, name, action))
        yield states, over, name, reward


@functools.cache
def _programs(env: Any) -> tuple[Any, Any]:
    """Return jitted functions: (params, level) -> (states, over), and one action per row."""

    def reset(params, level):
        states = jax.vmap(env.reset_level, (0, None))(level, params)
        return states, jax.vmap(env.is_terminated, (0, None))(states, params)

    def act(params, key, used, states, name, action):
        """name int32 [N]: an index into ACTION_NAMES; -1: use the raw `action`."""
        named = jax.vmap(env.env_action)(states, jnp.maximum(name, 0))
        action = jnp.where(name >= 0, named, action)
        keys = jax.random.split(jax.random.fold_in(key, used), len(action))
        step = jax.vmap(env.step_env, (0, 0, 0, None))
        _, states, reward, over, _ = step(keys, states, action, params)
        return states, reward, over

    return jax.jit(reset), jax.jit(act)


def check_rewards(env: Any, params: Any, budget: int) -> None:
    """Raise ValueError if short random and oracle play gives a reward that prompts cannot show.

    A prompt has a line for each multiple of REWARD_QUANTUM that the actions of a turn can sum to
    within REWARD_BOUNDS. Other rewards would be clipped or rounded, which REWARDS_ROUNDED allows.
    """
    if env.REWARDS_ROUNDED:
        return
    level = np.arange(CHECKED_EPISODES) % env.num_levels(params)
    actions = min(budget, CHECKED_ACTIONS)
    try:
        _, rewards = episodes(env, params, level, actions, plans=CHECKED_PLANS, replan=False)
    except NoExpert:
        _, rewards = episodes(env, params, level, actions, plans=0)
    low, high = env.REWARD_BOUNDS
    quanta = rewards / env.REWARD_QUANTUM
    outside = ~((rewards >= low - 1e-5) & (rewards <= high + 1e-5))  # nan is outside
    if outside.any():
        raise ValueError(
            f'{env.name}: an action gave reward {rewards[outside][0]:g}, which is outside '
            f'REWARD_BOUNDS={env.REWARD_BOUNDS}. Widen the bounds'
        )
    between = np.abs(quanta - np.round(quanta)) > 1e-3
    if between.any():
        raise ValueError(
            f'{env.name}: an action gave reward {rewards[between][0]:g}, which is not a multiple '
            f'of REWARD_QUANTUM={env.REWARD_QUANTUM:g}. Choose a smaller quantum'
        )
