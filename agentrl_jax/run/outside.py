"""Environments and algorithms from outside the package, named module:Class in a config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.envs import ENVIRONMENTS, HOSTS, WORLDS, TextEnvironment
from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.rl.algorithm import Algorithm
from agentrl_jax.settings.callables import import_callable


def register(fields: Mapping[str, Any]) -> None:
    """Add the classes that a config names to the known environments and algorithms.

    fields: config fields by dotted name. ValueError if a class cannot be imported or used.
    """
    mix = fields.get('env.mix') or ()
    worlds = [pair[0] for pair in mix if isinstance(pair, tuple | list) and pair]
    if not mix:  # otherwise env.name joins the names of the mixture
        worlds = [fields.get('env.name')]
    for name in worlds:
        if isinstance(name, str):
            world_name(name)
    algorithm = fields.get('algorithm')
    if isinstance(algorithm, str) and ':' in algorithm:
        ALGORITHMS[algorithm] = _import(algorithm, 'algorithm', Algorithm)


def world_name(name: str) -> str:
    """Return the name of an environment: `name`, or its class's name if it is module:Class."""
    if ':' not in name:
        return name
    world = _import(name, 'env.name', TextEnvironment, HostEnvironment)
    if not isinstance(world.name, str):
        raise ValueError(f"env.name={name!r} has no name: set name = '...' in its class")
    known = WORLDS.get(world.name, world)
    if (known.__module__, known.__qualname__) != (world.__module__, world.__qualname__):
        raise ValueError(
            f'env.name={name!r} has the name of another environment, {world.name!r}: rename its '
            'class attribute `name`'
        )
    kinds = ENVIRONMENTS if issubclass(world, TextEnvironment) else HOSTS
    kinds[world.name] = WORLDS[world.name] = world
    return world.name


def with_world_names(run: Any) -> Any:
    """Return a Config with module:Class replaced by the environment's name."""
    mix = tuple((world_name(name), share) for name, share in run.env.mix)
    name = run.env.name if mix else world_name(run.env.name)
    return dataclasses.replace(run, env=dataclasses.replace(run.env, name=name, mix=mix))


def _import(name: str, field: str, *bases: type) -> type:
    cls = import_callable(name, field)
    if not (isinstance(cls, type) and issubclass(cls, bases)):
        kinds = ' or '.join(base.__name__ for base in bases)
        raise ValueError(f'{field}={name!r} must be a subclass of {kinds}')
    return cls
