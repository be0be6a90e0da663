"""Every field of a run, with its default: RAGEN's StarPO sizes on FrozenLake (its main branch).

Other configs start from this get_config() and change fields. Unknown field names are rejected
before anything runs. Each field is declared once, with its bound and meaning, in a dataclass that
agentrl_jax/run/config.py names; agentrl_jax/run/README.md lists all fields. A placeholder is unset:
each algorithm fills it with its paper's value (agentrl_jax/algorithms/PRESETS.md). To print a
config with these values:
  python -m agentrl_jax.train --config=configs/... --show_config
"""

from agentrl_jax.run.config import get_config

__all__ = ('get_config',)
