"""Worlds on hosts: servers, simulators and Python objects behind one small face."""

from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.envs.hosts.environments import (
    AgentGymEnvironment,
    OpenEnvEnvironment,
    SciWorldEnvironment,
    TextCraftEnvironment,
)
from agentrl_jax.envs.hosts.gymnasium_text import Gymnasium
from agentrl_jax.envs.hosts.objects import Objects
from agentrl_jax.envs.hosts.world import Reply, World, WorldDown, WorldError

HOSTS = {  # env.name -> class; the settings are the section of that name in a config
    'gymnasium': Gymnasium,
    'objects': Objects,
    'textcraft': TextCraftEnvironment,
    'sciworld': SciWorldEnvironment,
    'agentgym': AgentGymEnvironment,
    'openenv': OpenEnvEnvironment,
}

__all__ = [
    'HOSTS',
    'AgentGymEnvironment',
    'Gymnasium',
    'HostEnvironment',
    'Objects',
    'OpenEnvEnvironment',
    'Reply',
    'SciWorldEnvironment',
    'TextCraftEnvironment',
    'World',
    'WorldDown',
    'WorldError',
]
