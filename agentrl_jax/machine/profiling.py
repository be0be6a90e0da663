"""Traces of training steps on devices and host, for xprof, and peak memory."""

import contextlib
import pathlib
import resource
import sys
from collections.abc import Iterator

import jax

FOLDER = 'profile'  # below the workdir
RSS_UNIT = 1 if sys.platform == 'darwin' else 1024  # bytes per unit of getrusage


class Trace(contextlib.ExitStack):
    """Records steps first..last as one trace in workdir/profile; none if last < first.

    with Trace(workdir, first=2, last=4) as trace:
        for step in ...:
            with trace.step(step):
                state = update(state)  # and wait for it

    Every process traces its own devices. If the loop ends early, the partial trace is kept.
    """

    def __init__(self, workdir: pathlib.Path, *, first: int, last: int):
        super().__init__()
        self._folder, self._first, self._last = workdir / FOLDER, first, last

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step == self._first <= self._last:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing every Python call is slow and hides the rest
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self.callback(jax.profiler.stop_trace)
        with jax.profiler.StepTraceAnnotation('train', step_num=step):
            yield
        if step == self._last:
            self.close()


def peak_memory() -> dict[str, int]:
    """Peak bytes of the process, and of its fullest device if the backend reports them."""
    peak = {'perf/host_peak_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT}
    known = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [stats['peak_bytes_in_use'] for stats in known if 'peak_bytes_in_use' in stats]
    return peak | ({'perf/device_peak_bytes': max(used)} if used else {})
