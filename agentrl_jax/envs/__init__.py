"""Environments on the device: gymnax environments that can also be rendered as text.

Public names are imported on first use, because servers of environments run without JAX.
"""

import importlib

# Public name -> the module that defines it.
_MODULES = {
    'ENVIRONMENTS': 'environments',
    'GAMES': 'environments',
    'HOSTS': 'environments',
    'SPLITS': 'splits',
    'BabyAI': 'babyai',
    'Bandit': 'bandit',
    'FrozenLake': 'frozen_lake',
    'Library': 'library',
    'Sokoban': 'sokoban',
    'TextEnvironment': 'base',
    'WORLDS': 'environments',
}
__all__ = tuple(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)
