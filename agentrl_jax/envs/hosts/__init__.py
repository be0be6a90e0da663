"""Worlds on hosts: servers, simulators and Python objects behind one small face."""

import importlib

# Public name -> the module that defines it.
_MODULES = {
    'HOSTS': 'environments',
    'AgentGymEnvironment': 'environments',
    'Gymnasium': 'gymnasium_text',
    'HostEnvironment': 'base',
    'MiniWoBEnvironment': 'environments',
    'Objects': 'objects',
    'OpenEnvEnvironment': 'environments',
    'Reply': 'world',
    'SciWorldEnvironment': 'environments',
    'SearchEnvironment': 'environments',
    'ShopEnvironment': 'environments',
    'TextCraftEnvironment': 'environments',
    'WebEnvironment': 'environments',
    'World': 'world',
    'WorldDown': 'world',
    'WorldError': 'world',
}
__all__ = tuple(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)
