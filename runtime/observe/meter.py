"""Measurements of one store: bytes moved per route, stalls per transfer, seconds per phase, busy seconds of routes."""

import itertools
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.hardware import route_name
from zinf_compile.ir.timeline import UPDATE_LANE
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.device import Event, Stream, Timing
from zinf_compile.runtime.observe.recorder import Recorder, is_profiled, profiled

_MOST_TIMED = 2**14  # waits and copies of some steps
_LEAST_STALL_SECONDS = 1e-5  # two consecutive events may be this far apart with nothing in between


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Total seconds that compute waited for one transfer."""

    name: str
    seconds: float
    count: int


class _Timed(NamedTuple):
    """Work enqueued on a stream between two timed events, and the callback for its duration."""

    start: Event
    end: Event
    add: Callable[[float, float], None]  # called with both times


class Meter:
    """Counters of one store, safe to add to from several threads.

    Work on a device's streams is timed by events, which are read when a result is requested.
    """

    def __init__(self, *, waited_seconds: Callable[[], float] = float) -> None:
        """``waited_seconds`` says how long this rank has waited for others so far."""
        self.waited_seconds = waited_seconds
        self._lock = threading.Lock()
        self._moved: dict[str, int] = defaultdict(int)
        self._stalls: dict[str, tuple[float, int]] = {}
        self._stalled_seconds = 0.0
        self._arrived: Counter[str] = Counter()  # bytes by route, when they have arrived
        self._moving: Counter[str] = Counter()  # transfers in progress, by route
        self._busy: dict[tuple[str, ...], float] = defaultdict(float)  # by the set of routes in use at once
        self._busy_since = 0.0
        self._thread = threading.local()
        self.num_eager_gathers = 0  # outside of captured graphs
        self._phase_seconds: dict[Phase, list[float]] = defaultdict(list)
        self._step_starts: list[float] = []
        self._waited_at_starts: list[float] = []  # seconds waited for other ranks when each step began
        self._num_steps = 0
        self.recorder: Recorder | None = None  # while events are recorded
        self._timed: deque[_Timed] = deque()
        self.collectives: Counter[str] = Counter()  # full bytes by kind, between several ranks
        self._origin: tuple[Event, float] | None = None  # an event of the streams, and its time on the host

    def leave_to_parent(self) -> None:
        """In a forked child: use a new lock, since a thread that held the old one does not exist here."""
        self._lock, self.recorder = threading.Lock(), None

    def add_moved(self, source: Tier, destination: Tier, nbytes: int) -> None:
        """Count bytes that moved between two tiers."""
        with self._lock:
            self._moved[route_name(source, destination)] += nbytes

    def add_collective(self, kind: str, nbytes: int) -> None:
        """Count full bytes that passed between ranks."""
        with self._lock:
            self.collectives[kind] += nbytes

    def set_aside_this_thread(self) -> None:
        """Ignore stalls of the calling thread from now on, because compute continues while it waits."""
        self._thread.is_aside = True

    @contextmanager
    def stall(self, name: str) -> Iterator[None]:
        """Count the time in this block as a stall of compute for ``name``."""
        start = time.perf_counter()
        with profiled(f"wait for {name}"):
            yield
        if not getattr(self._thread, "is_aside", False):
            self._add_stall(name, start, time.perf_counter(), self.recorder)

    def _add_stall(self, name: str, start: float, end: float, recorder: Recorder | None) -> None:
        if recorder is not None:
            recorder.add_stall(name, start, end)
        with self._lock:
            seconds, count = self._stalls.get(name, (0.0, 0))
            stalled = end - start
            self._stalls[name] = (seconds + stalled, count + 1)
            self._stalled_seconds += stalled

    @contextmanager
    def stall_on(self, stream: Stream, name: str) -> Iterator[None]:
        """Count the time that a stream spends on what is enqueued in this block as a stall for ``name``.

        A synchronous stream has no time of its own: the caller has waited already.
        """
        if stream.synchronous:
            yield
            self.arrive(name)
            return
        recorder = self.recorder

        def add(start: float, end: float) -> None:
            if end - start > _LEAST_STALL_SECONDS:
                self._add_stall(name, start, end, recorder)
            if recorder is not None:
                recorder.arrive(name, end)

        with self._timing(stream, add):
            yield

    def copying(self, source: Tier, destination: Tier, nbytes: int, name: str) -> Timing | None:
        """Return a context in which to enqueue a copy, so that it is recorded; None if nothing is being recorded."""
        if (recorder := self.recorder) is None:
            return None
        route = route_name(source, destination)
        return lambda stream: self._timing(stream, lambda start, end: recorder.add(route, name, start, nbytes, end))

    @contextmanager
    def _timing(self, stream: Stream, add: Callable[[float, float], None]) -> Iterator[None]:
        if self._origin is None:
            origin = stream.record(timed=True)
            origin.wait()  # once, to align the stream's clock with the host's
            self._origin = origin, time.perf_counter()
        start = stream.record(timed=True)
        yield
        self._timed.append(_Timed(start, stream.record(timed=True), add))
        if len(self._timed) > _MOST_TIMED:  # results were not requested for a long time; drop the oldest
            self._settle_first()

    def settle(self) -> None:
        """Wait for the work enqueued in timed blocks, and add its durations."""
        while self._timed:
            self._settle_first()

    def _settle_first(self) -> None:
        timed = self._timed.popleft()
        timed.start.wait()
        timed.end.wait()
        assert self._origin is not None
        origin, seconds = self._origin
        start = seconds + origin.seconds_until(timed.start)
        timed.add(
            start, start + timed.start.seconds_until(timed.end)
        )  # a float32 of milliseconds: the short way is exact

    @contextmanager
    def moving(self, source: Tier, destination: Tier, nbytes: int, name: str) -> Iterator[None]:
        """Count the time in this block as a route being busy with bytes of ``name``."""
        route = route_name(source, destination)
        start = time.perf_counter()
        self._count_moving(route, 1)
        try:
            with profiled(f"{route} {name}"):
                yield
        finally:
            self._count_moving(route, -1)
        if (recorder := self.recorder) is not None:
            recorder.add(route, name, start, nbytes)
        with self._lock:
            self._arrived[route] += nbytes

    def updating(self, name: str) -> AbstractContextManager[None]:
        """Record the time in this block as an update of a parameter, or of a part of it."""
        return nullcontext() if self.recorder is None and not is_profiled() else self._updating(name)

    @contextmanager
    def _updating(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with profiled(f"update {name}"):
            yield
        if (recorder := self.recorder) is not None:
            recorder.add(UPDATE_LANE, name, start)

    def arrive(self, name: str) -> None:
        """Record that compute continues with ``name`` from now on."""
        if (recorder := self.recorder) is not None:
            recorder.arrive(name)

    def _count_moving(self, route: str, change: int) -> None:
        with self._lock:
            now = time.perf_counter()
            in_use = tuple(sorted(name for name, count in self._moving.items() if count))
            if in_use:
                self._busy[in_use] += now - self._busy_since
            self._busy_since = now
            self._moving[route] += change

    @contextmanager
    def phase(self, phase: Phase, stream: Stream = CPU.compute) -> Iterator[None]:
        """Record the time of what is enqueued on a stream in this block as one run of a phase."""
        if not stream.synchronous:
            recorder = self.recorder
            with self._timing(stream, lambda start, end: self._add_phase(phase, start, end, recorder)):
                yield
            return
        start = time.perf_counter()
        if phase is Phase.STEP:
            self._step_starts.append(start)
            self._waited_at_starts.append(self.waited_seconds())
            self._num_steps += 1
        with profiled(str(phase)):
            yield
        self._add_phase(phase, start, time.perf_counter(), self.recorder)

    def _add_phase(self, phase: Phase, start: float, end: float, recorder: Recorder | None) -> None:
        self._phase_seconds[phase].append(end - start)
        if recorder is not None:
            recorder.add_phase(str(phase), start, end)

    def forget_phases(self) -> None:
        """Forget the seconds of phases and steps, which belong to a plan that is no longer used."""
        self.settle()
        self._phase_seconds.clear()
        self._step_starts.clear()
        self._waited_at_starts.clear()

    @property
    def moved(self) -> tuple[tuple[str, int], ...]:
        """Return the bytes moved so far by route."""
        with self._lock:
            return tuple(sorted(self._moved.items()))

    @property
    def arrived(self) -> tuple[tuple[str, int], ...]:
        """Return the bytes by route of finished, timed transfers."""
        with self._lock:
            return tuple(sorted(self._arrived.items()))

    @property
    def busy(self) -> tuple[tuple[tuple[str, ...], float], ...]:
        """Return, for each set of routes, the seconds during which exactly these were busy, sorted."""
        with self._lock:
            return tuple(sorted(self._busy.items()))

    @property
    def stalled_seconds(self) -> float:
        """Return the seconds of all stalls together."""
        return self._stalled_seconds

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps have begun."""
        return self._num_steps

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """Return all stalls, the longest first."""
        self.settle()
        stalls = [Stall(name=name, seconds=seconds, count=count) for name, (seconds, count) in self._stalls.items()]
        return tuple(sorted(stalls, key=lambda stall: -stall.seconds))

    def phase_seconds(self, phase: Phase) -> tuple[float, ...]:
        """Return the seconds of each run of a phase, in order."""
        self.settle()
        return tuple(self._phase_seconds[phase])

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Return the seconds from each optimizer step to the next, in order."""
        return tuple(after - before for before, after in itertools.pairwise(self._step_starts))

    @property
    def step_waits(self) -> tuple[float, ...]:
        """Return the seconds of each of these that this rank waited for others."""
        return tuple(after - before for before, after in itertools.pairwise(self._waited_at_starts))
