"""Worlds on hosts: servers, simulators and Python objects behind one small face."""

import importlib

# Public name -> the module that defines it.
_MODULES = {
    'HOSTS': '..environments',
    'AgentGymEnvironment': '.served',
    'Gymnasium': '.gymnasium_text',
    'HarnessEnvironment': '.harness.world',
    'HostEnvironment': '.base',
    'MiniWoBEnvironment': '.web.miniwob',
    'Objects': '.objects',
    'OpenEnvEnvironment': '.openenv',
    'Reply': '.world',
    'SciWorldEnvironment': '.sciworld',
    'SearchEnvironment': '.search.world',
    'ShopEnvironment': '.webshop.world',
    'TextCraftEnvironment': '.textcraft',
    'WebEnvironment': '.web.world',
    'World': '.world',
    'WorldDown': '.world',
    'WorldError': '.world',
}
__all__ = tuple(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
