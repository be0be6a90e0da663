"""Games of pgx and gymnax as worlds; those libraries are imported when a game begins."""

from agentrl_jax.envs.borrowed.catch import Catch
from agentrl_jax.envs.borrowed.connect_four import ConnectFour
from agentrl_jax.envs.borrowed.game_2048 import Game2048
from agentrl_jax.envs.borrowed.leduc import Leduc

GAMES = {world.name: world for world in (Game2048, ConnectFour, Leduc, Catch)}

__all__ = ['GAMES', 'Catch', 'ConnectFour', 'Game2048', 'Leduc']
