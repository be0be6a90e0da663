"""Benchmarks: `python -m benchmarks.NAME`; benchmarks/README.md lists them."""

from agentrl_jax.run import command

command.prepare_jax()  # before a benchmark imports jax
