"""Games as worlds; pgx and gymnax, whose most of them are, are imported when one begins."""

from agentrl_jax.envs.borrowed.catch import Catch
from agentrl_jax.envs.borrowed.connect_four import ConnectFour
from agentrl_jax.envs.borrowed.game_2048 import Game2048
from agentrl_jax.envs.borrowed.leduc import Leduc
from agentrl_jax.envs.borrowed.minesweeper import Minesweeper

GAMES = {world.name: world for world in (Game2048, ConnectFour, Leduc, Catch, Minesweeper)}

__all__ = ['GAMES', 'Catch', 'ConnectFour', 'Game2048', 'Leduc', 'Minesweeper']
