"""Registry of the games by env.name."""

from agentrl_jax.extras.games.catch import Catch
from agentrl_jax.extras.games.connect_four import ConnectFour
from agentrl_jax.extras.games.game_2048 import Game2048
from agentrl_jax.extras.games.leduc import Leduc
from agentrl_jax.extras.games.minesweeper import Minesweeper

WORLDS = {world.name: world for world in (Game2048, ConnectFour, Leduc, Catch, Minesweeper)}
