"""All environments by name: the values of env.name, and the config sections of their fields."""

import importlib
import pathlib

from agentrl_jax.envs.babyai import BabyAI
from agentrl_jax.envs.bandit import Bandit
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
GAMES = {}  # on-device environments of extensions: WORLDS in extras/NAME/worlds.py
for _file in sorted((pathlib.Path(__file__).parents[1] / 'extras').glob('*/worlds.py')):
    GAMES |= importlib.import_module(f'agentrl_jax.extras.{_file.parent.name}.worlds').WORLDS
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
