"""All worlds by their names: env.name, and the sections of a config that hold their fields."""

from agentrl_jax.envs.babyai import BabyAI
from agentrl_jax.envs.bandit import Bandit
from agentrl_jax.envs.borrowed.catch import Catch
from agentrl_jax.envs.borrowed.connect_four import ConnectFour
from agentrl_jax.envs.borrowed.game_2048 import Game2048
from agentrl_jax.envs.borrowed.leduc import Leduc
from agentrl_jax.envs.borrowed.minesweeper import Minesweeper
from agentrl_jax.envs.frozen_lake import FrozenLake
from agentrl_jax.envs.hosts.gymnasium_text import Gymnasium
from agentrl_jax.envs.hosts.harness.world import HarnessEnvironment
from agentrl_jax.envs.hosts.objects import Objects
from agentrl_jax.envs.hosts.openenv import OpenEnvEnvironment
from agentrl_jax.envs.hosts.sciworld import SciWorldEnvironment
from agentrl_jax.envs.hosts.search.world import SearchEnvironment
from agentrl_jax.envs.hosts.served import AgentGymEnvironment
from agentrl_jax.envs.hosts.textcraft import TextCraftEnvironment
from agentrl_jax.envs.hosts.web.miniwob import MiniWoBEnvironment
from agentrl_jax.envs.hosts.web.world import WebEnvironment
from agentrl_jax.envs.hosts.webshop.world import ShopEnvironment
from agentrl_jax.envs.library import Library
from agentrl_jax.envs.sokoban import Sokoban

ENVIRONMENTS = {world.name: world for world in (FrozenLake, Sokoban, Bandit, Library, BabyAI)}
GAMES = {world.name: world for world in (Game2048, ConnectFour, Leduc, Catch, Minesweeper)}
HOSTS = {
    world.name: world
    for world in (
        Gymnasium,
        Objects,
        TextCraftEnvironment,
        SciWorldEnvironment,
        SearchEnvironment,
        ShopEnvironment,
        MiniWoBEnvironment,
        WebEnvironment,
        AgentGymEnvironment,
        OpenEnvEnvironment,
        HarnessEnvironment,
    )
}
WORLDS = ENVIRONMENTS | GAMES | HOSTS
