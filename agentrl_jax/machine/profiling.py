"""Traces of training steps on devices and host, for xprof."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax

FOLDER = 'profile'  # below the workdir


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
