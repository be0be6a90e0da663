"""Random play and the expert on worlds on hosts, as far as a kind of worlds has a player."""

from collections.abc import Callable

import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment, Items
from agentrl_jax.envs.hosts.world import Player


def reference_success(
    env: HostEnvironment,
    params: Items,
    turns: int,
    *,
    trials: int = 1,
    rollouts: int = 20,
    seed: int = 0,
) -> dict[str, float]:
    """Success of random play (key random, where there is some) and of the expert (oracle) within
    some turns a trial.

    Each item is played rollouts times at random and once by the expert.
    """
    player, generator = env.player(), np.random.default_rng(seed)
    ways: dict[str, tuple[Callable[[], str], int]] = {'oracle': (player.best, 1)}
    if env.plays_at_random:
        ways = {'random': (lambda: player.random(generator), rollouts)} | ways
    found = {}
    for name, (say, times) in ways.items():
        items = np.tile(params.items, times)
        solved = [
            any(solves(env, player, item, say, turns) for _ in range(trials)) for item in items
        ]
        found[name] = float(np.mean(solved))
    player.close()
    return found


def solves(
    env: HostEnvironment, player: Player, item: int, say: Callable[[], str], turns: int
) -> bool:
    """Whether the item is solved when say() answers."""
    player.reset(int(item))
    returned, success = 0.0, False
    for _ in range(turns):
        reply = player.step(say())
        returned += reply.reward
        success = env.solved(returned) if reply.success is None else reply.success
        if reply.done:
            break
    return success
