"""Records the events of a store on request: what compute waits for, what moves, what is updated.

A compute interval is labelled with the transfer it last waited for.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import NamedTuple, TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

from zinf_compile.ir.timeline import COMPUTE_LANE, Event

Item = TypeVar("Item")


class _Arrival(NamedTuple):
    seconds: float
    name: str


class Recorder:
    """Events of one store, safe to add to from several threads. Seconds are those of ``time.perf_counter``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._others: list[Event] = []  # on other lanes
        self._stalls: list[Event] = []
        self._phases: list[Event] = []
        self._arrivals: list[_Arrival] = []

    def add(self, lane: str, name: str, start: float, nbytes: int = 0, end: float | None = None) -> None:
        """Add an event that occupied a lane from ``start`` until ``end``, or until now."""
        with self._lock:
            self._others.append(Event(lane, name, start, time.perf_counter() if end is None else end, nbytes))

    def add_stall(self, name: str, start: float, end: float) -> None:
        """Add that compute waited for ``name``."""
        with self._lock:
            self._stalls.append(Event(COMPUTE_LANE, name, start, end))

    def add_phase(self, name: str, start: float, end: float) -> None:
        """Add a phase."""
        with self._lock:
            self._phases.append(Event(COMPUTE_LANE, name, start, end))

    def arrive(self, name: str, seconds: float | None = None) -> None:
        """Record that compute continues with ``name`` from ``seconds`` on, or from now."""
        with self._lock:
            self._arrivals.append(_Arrival(time.perf_counter() if seconds is None else seconds, name))

    def take(self) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        """Return all events so far, including compute, and the stalls, by start time; the first event starts at 0 s."""
        with self._lock:
            stalls, arrivals = sorted(self._stalls, key=_start_of), sorted(self._arrivals)
            phases, others = self._phases.copy(), self._others.copy()
        computed = [event for phase in phases for event in _cut(phase, arrivals, stalls)]
        events = sorted([*others, *computed], key=_start_of)
        first = min((event.start_seconds for event in (*events, *stalls)), default=0.0)
        return tuple(_shifted(events, first)), tuple(_shifted(stalls, first))


def _start_of(event: Event) -> float:
    return event.start_seconds


def _cut(phase: Event, arrivals: list[_Arrival], stalls: list[Event]) -> Iterator[Event]:
    """Yield the compute intervals of a phase, between its stalls, each named after the transfer it last waited for."""
    name, at = phase.name, phase.start_seconds
    changes: list[tuple[float, float, str | None]] = [
        (stall.start_seconds, stall.end_seconds, None) for stall in _inside(stalls, phase, _start_of)
    ]
    changes += [
        (arrival.seconds, arrival.seconds, f"{arrival.name} ({phase.name})")
        for arrival in _inside(arrivals, phase, attrgetter("seconds"))
    ]
    for start, end, named in sorted(changes, key=lambda change: change[:2]):
        if start > at:
            yield Event(phase.lane, name, at, start)
        name, at = named or name, max(at, end)
    if at < phase.end_seconds:
        yield Event(phase.lane, name, at, phase.end_seconds)


def _inside(items: Sequence[Item], phase: Event, seconds_of: Callable[[Item], float]) -> Sequence[Item]:
    """Return the items, which are ordered by time, that begin in a phase."""
    first = bisect_left(items, phase.start_seconds, key=seconds_of)
    return items[first : bisect_left(items, phase.end_seconds, key=seconds_of)]


def _shifted(events: Iterable[Event], first: float) -> Iterator[Event]:
    return (
        event._replace(start_seconds=event.start_seconds - first, end_seconds=event.end_seconds - first)
        for event in events
    )


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a range of this name for torch.profiler, and for NVTX under ``torch.autograd.profiler.emit_nvtx``.

    A profiler sees I/O threads only if it profiles all threads. Without a profiler this does nothing.
    """
    return record_function(f"zinf {name}") if is_profiled() else nullcontext()


def is_profiled() -> bool:
    """Return whether a profiler runs, on any thread: a range costs 12 microseconds even without one."""
    return bool(profiler._is_profiler_enabled)
