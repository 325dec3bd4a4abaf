"""Measures the first steps of a captured graph: compute seconds without stalls, and the bandwidth of each route."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zinf_compile.hardware.observed import BusyTime, Observed, RouteBytes
from zinf_compile.ir.glossary import Phase
from zinf_compile.runtime.observe.meter import Meter

_FIRST_STEPS = 3  # watched, except for the first, which touches fresh memory
_LEAST_SECONDS = 1.0  # of forward and backward: shorter measurements are not reliable


class StepWatch:
    """Watches one graph under one plan, until it has seen enough."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._num_steps = 0  # that have ended, each with a forward of this graph in it
        self._steps_begun = meter.num_steps  # by any optimizer, at this graph's last run
        self._seconds: dict[Phase, list[float]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        self._moved: dict[str, int] = {}
        self._busy: dict[tuple[str, ...], float] = {}
        self._begun = 0.0
        self._is_over = False

    @contextmanager
    def run(self, phase: Phase) -> Iterator[None]:
        """Watch one run of the graph's forward or backward."""
        self._steps_begun = self._meter.num_steps
        start, stalled = time.perf_counter(), self._meter.stalled_seconds
        yield
        self._seconds[phase].append(time.perf_counter() - start - (self._meter.stalled_seconds - stalled))

    def look(self, agree: Callable[[bool], bool] = bool) -> Observed | None:
        """Return the measurements of the first steps once, when enough have ended, else None. Called before each forward.

        ``agree`` gets whether this process has seen enough, and returns whether all have that train together.
        """
        if self._is_over or self._steps_begun == self._meter.num_steps or not self._seconds[Phase.BACKWARD]:
            return None  # in the middle of a step: gradients may be accumulated in part
        self._num_steps += 1
        if self._num_steps == 1:
            self._begin()
            return None
        watched = sum(map(sum, self._seconds.values()))
        if self._num_steps < _FIRST_STEPS or not agree(watched >= _LEAST_SECONDS):
            return None
        self._is_over = True
        return Observed(
            num_steps=self._num_steps,
            compute_seconds=sum(sum(runs) / len(runs) for runs in self._seconds.values()),
            step_seconds=(time.perf_counter() - self._begun) / (self._num_steps - 1),
            moved=tuple(RouteBytes(route, nbytes - self._moved.get(route, 0)) for route, nbytes in self._meter.arrived),
            busy=tuple(BusyTime(routes, seconds - self._busy.get(routes, 0.0)) for routes, seconds in self._meter.busy),
        )

    def _begin(self) -> None:
        """Forget the first step."""
        self._begun = time.perf_counter()
        for runs in self._seconds.values():
            runs.clear()
        self._moved, self._busy = dict(self._meter.arrived), dict(self._meter.busy)
