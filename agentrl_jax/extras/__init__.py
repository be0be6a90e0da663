"""Extensions: each folder adds features to the core, which never imports them by name.

An extension is a package. Its `__init__.py` may define
  ALGORITHMS  {name: class}, added to algorithm=...
  SECTIONS    {name: class}, settings added to the config; a class derives from
              agentrl_jax.run.hooks.Extension to change how a run is built
Its module `worlds.py` may define
  WORLDS      {name: class}, added to env.name=...
An extension imports the core. Deleting its folder removes it and breaks only its tests.
"""
