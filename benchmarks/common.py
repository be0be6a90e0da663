"""Shared code of the benchmarks: pinning, alternating timers, the same weights in torch, output.

On a CPU, all times are CPU-seconds of this process on one core, because other processes disturb
them far less than wall-clock time. On an accelerator, they are wall-clock seconds. A and B
alternate (A B A B ...), so that slow periods affect both; ratios are ratios of medians.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pandas as pd

from agentrl_jax import export
from agentrl_jax.models import DRAWN, Model

ONE_THREAD = '--xla_cpu_multi_thread_eigen=false'
PINNED = 'BENCHMARK_IS_PINNED'  # environment variable: pin() has restarted the program
# A policy of 5 million parameters: small enough for a CPU, large enough that matmuls dominate.
SHAPE = dict(hidden_size=256, intermediate_size=1024, num_layers=4, num_heads=4, num_kv_heads=2)
SMALL_VOCAB, QWEN_VOCAB = 4096, 151936


def parse_arguments(description: str, **defaults: Any) -> argparse.Namespace:
    """Command line with one option per default, and --json and --core."""
    parser = argparse.ArgumentParser(description=description)
    for name, value in defaults.items():
        parser.add_argument('--' + name.replace('_', '-'), type=type(value), default=value)
    parser.add_argument('--core', type=int, default=0, help='CPU core to run on; -1: any')
    parser.add_argument('--json', type=Path, help='also write the result to this file')
    return parser.parse_args()


def main(name: str, doc: str, run: Callable, show: Callable, **defaults: Any) -> None:
    """Run a benchmark with one option per default, and print its table and its result."""
    args = parse_arguments(doc.splitlines()[0], **defaults)
    pin(args.core)
    result = run(**{key: x for key, x in vars(args).items() if key not in ('json', 'core')})
    print(show(result))
    emit(name, result, args.json)


def pin(core: int) -> None:
    """Run this program on one core with one thread; core=-1 changes nothing.

    XLA reads its flags and starts its threads at import time, so this restarts the program.
    """
    if core < 0 or PINNED in os.environ:
        return
    flags = f'{os.environ["XLA_FLAGS"]} ' if 'XLA_FLAGS' in os.environ else ''
    settings = {'XLA_FLAGS': flags + ONE_THREAD, 'OMP_NUM_THREADS': '1', PINNED: '1'}
    if hasattr(os, 'sched_setaffinity'):  # Linux
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core if core in allowed else min(allowed)})
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, dict(os.environ, **settings))


def import_optional(
    name: str, install: str = 'the test requirements: pip install -r requirements-test.txt'
) -> ModuleType:
    """Import a package that only comparisons need; install: advice for the error message."""
    os.environ['HF_HUB_OFFLINE'] = '1'
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f'this benchmark needs {name}, which cannot be imported ({error}); install {install}'
        ) from error


def clock() -> float:
    """CPU-seconds of this process on a CPU, wall-clock seconds on an accelerator."""
    return time.process_time() if jax.default_backend() == 'cpu' else time.perf_counter()


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call, including the wait for its result."""
    start = clock()
    jax.block_until_ready(call())
    return clock() - start


def alternate(
    calls: dict[str, Callable[[], Any]], repeats: int, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call by name, alternating, after `warm` rounds of compiling and warm-up."""
    for call in [*calls.values()] * warm:
        jax.block_until_ready(call())
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def compare(times: dict[str, list[float]], ours: str, other: str) -> dict[str, float]:
    """Medians of both, and the speed-up over the other: median and range over the pairs."""
    ratios = [b / a for a, b in zip(times[ours], times[other], strict=True)]
    return {
        'ours_s': statistics.median(times[ours]),
        'other_s': statistics.median(times[other]),
        'times_as_fast': statistics.median(ratios),
        'times_low': min(ratios),
        'times_high': max(ratios),
    }


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call."""
    return medians(alternate({'call': call}, repeats))['call']


def model_config(vocab: int, **changes: Any) -> Model:
    """The benchmark's policy."""
    sizes = SHAPE | changes
    return DRAWN(vocab_size=vocab, head_dim=sizes['hidden_size'] // sizes['num_heads'], **sizes)


def init_params(config: Model) -> Any:
    return jax.jit(config.init)(jax.random.key(0))


def hf_model(params: Any, config: Model) -> Any:
    """transformers' Qwen2ForCausalLM with the same weights, float32."""
    torch, transformers = import_optional('torch'), import_optional('transformers')
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        path = export.export_hf(params, config, Path(folder) / 'model', dtype='float32')
        model = transformers.Qwen2ForCausalLM.from_pretrained(path, attn_implementation='sdpa')
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu')


def machine() -> dict[str, Any]:
    """The machine and its load."""
    return {
        'device': jax.devices()[0].device_kind,
        'backend': jax.default_backend(),
        'cores': len(os.sched_getaffinity(0)),
        'load': os.getloadavg()[0],
        'jax': jax.__version__,
        'unit': 'CPU-seconds' if jax.default_backend() == 'cpu' else 'seconds',
    }


def note(sentence: str) -> None:
    """Print a remark while the benchmark runs."""
    print(sentence, file=sys.stderr, flush=True)


def table(title: str, columns: list[str], rows: list[list[Any]]) -> str:
    """Text table; floats get three significant digits."""
    cells = [[_cell(x) for x in row] for row in rows]
    frame = pd.DataFrame(cells, columns=columns)
    return f'{title}\n{frame.to_string(index=False)}'


def _cell(x: Any) -> str:
    if not isinstance(x, float):
        return f'{x:,}' if isinstance(x, int) else str(x)
    return f'{x:,.0f}' if abs(x) >= 100 else f'{x:.3g}'


def emit(name: str, result: dict[str, Any], path: Path | None) -> None:
    """Print the result as one line of JSON, and write it to `path` if set."""
    result = {'benchmark': name, 'machine': machine(), **result}
    print(json.dumps(result))
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + '\n')
