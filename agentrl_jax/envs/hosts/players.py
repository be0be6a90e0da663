"""Success of random play and of the expert on host environments that have a player."""

from collections.abc import Callable

import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment, Items


def reference_success(
    env: HostEnvironment,
    params: Items,
    turns: int,
    *,
    trials: int = 1,
    rollouts: int = 20,
) -> dict[str, float]:
    """Return the success of random play ('random', if supported) and of the expert ('oracle').

    Each item is played `rollouts` times at random and once by the expert, `turns` turns a trial.
    """
    player, generator = env.player(), np.random.default_rng(0)
    plays: dict[str, tuple[Callable[[], str], int]] = {'oracle': (player.best, 1)}
    if env.plays_at_random:
        plays = {'random': (lambda: player.random(generator), rollouts)} | plays

    def solved(item: int, answer: Callable[[], str]) -> bool:
        player.reset(int(item))
        returned, success = 0.0, False
        for _ in range(turns):
            reply = player.step(answer())
            returned += reply.reward
            success = env.solved(returned) if reply.success is None else reply.success
            if reply.done:
                break
        return success

    shares = {}
    for name, (answer, times) in plays.items():
        items = np.tile(params.items, times)
        shares[name] = np.mean([any(solved(i, answer) for _ in range(trials)) for i in items])
    player.close()
    return {name: float(share) for name, share in shares.items()}
