"""XLA flags that compile quickly instead of well."""

import importlib.metadata


def flags(jaxlib: str) -> str:
    """The flags for a version of jaxlib; XLA ends the process if it does not know one.

    LLVM optimises nothing, and gets plain loops where the version allows it. Compiling takes a
    quarter of the time.
    """
    plain_loops = ' --xla_cpu_use_fusion_emitters=false'  # removed in jaxlib 0.11
    release = tuple(map(int, jaxlib.split('.')[:2]))
    return '--xla_backend_optimization_level=0' + (plain_loops if release < (0, 11) else '')


FLAGS = flags(importlib.metadata.version('jaxlib'))
