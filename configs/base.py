"""Every field of a run, with its default: RAGEN's StarPO sizes on FrozenLake (its main branch).

Other configs start from get_config() here and change fields. A field that is not here does not
exist: a mistyped name is an error before anything runs. Each field has one home, the dataclass of
what it sets, with its bound and meaning: agentrl_jax/run/config.py names them, run/README.md lists
all fields. A placeholder has no value until one is set: each algorithm has that of its own paper
(agentrl_jax/algorithms/PRESETS.md). In full, with these values, a config is printed by
  python -m agentrl_jax.train --config=configs/... --show_config
"""

from agentrl_jax.run.config import get_config

__all__ = ('get_config',)
