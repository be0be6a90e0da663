"""Load the extensions in agentrl_jax/extras: their algorithms and config sections."""

import dataclasses
import importlib
import pkgutil

from agentrl_jax import extras
from agentrl_jax.algorithms import ALGORITHMS


def _sections() -> dict[str, type]:
    """Return {section: class} of all extensions, and add their algorithms to ALGORITHMS."""
    sections: dict[str, type] = {}
    for found in pkgutil.iter_modules(extras.__path__, f'{extras.__name__}.'):
        module = importlib.import_module(found.name)
        ALGORITHMS.update(getattr(module, 'ALGORITHMS', {}))
        sections |= getattr(module, 'SECTIONS', {})
    return sections


# One field for each section
Extras = dataclasses.make_dataclass(
    'Extras', [(name, cls, cls()) for name, cls in _sections().items()], frozen=True
)
