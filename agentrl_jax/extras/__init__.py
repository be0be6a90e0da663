"""Extensions: each folder here adds to the core, which never names one of them.

An extension is a package. Its `__init__.py` may define
  ALGORITHMS  {name: class}, which joins algorithm=...
  SECTIONS    {name: class}, settings that join the config; a class derives from
              agentrl_jax.run.hooks.Extension where it changes how a run is built
Its module `worlds.py` may define
  WORLDS      {name: class}, which joins env.name=...
An extension imports the core. Deleting its folder removes it, and breaks only its own tests.
"""
