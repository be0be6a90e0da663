"""XLA flags that compile quickly instead of well."""

import importlib.metadata


def flags(jaxlib: str) -> str:
    """Return the flags for a version of jaxlib; XLA exits on an unknown flag.

    LLVM does not optimise, and gets plain loops if the version allows it. Compilation takes a
    quarter of the time.
    """
    plain_loops = ' --xla_cpu_use_fusion_emitters=false'  # removed in jaxlib 0.11
    release = tuple(map(int, jaxlib.split('.')[:2]))
    return '--xla_backend_optimization_level=0' + (plain_loops if release < (0, 11) else '')


FLAGS = flags(importlib.metadata.version('jaxlib'))
