"""What really happened: bytes moved per route, seconds waited per transfer, seconds per phase, seconds of moving."""

import itertools
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from zinf_compile.hardware import route_name
from zinf_compile.runtime.device import Event, Stream, Timing
from zinf_compile.runtime.recorder import Recorder, profiled
from zinf_compile.simulation.timeline import UPDATE_LANE
from zinf_compile.terms import Phase, Tier

_MOST_TIMED = 2**14  # waits and copies of some steps
_LEAST_STALL_SECONDS = 1e-5  # what two events beside each other may be apart without anything between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds that compute waited for one transfer, all times together."""

    name: str
    seconds: float
    count: int


class _Timed(NamedTuple):
    """What a stream was told between two timed events, and who wants to know how long that took."""

    start: Event
    end: Event
    add: Callable[[float, float], None]  # is called with both times


class Meter:
    """Counters of one store, safe to add to from several threads.

    What a device's streams do is timed by events, and known when somebody asks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: dict[str, int] = defaultdict(int)
        self._stalls: dict[str, tuple[float, int]] = {}
        self._stalled_seconds = 0.0
        self._arrived: Counter[str] = Counter()  # bytes by route, when they are there
        self._moving: Counter[str] = Counter()  # calls that move bytes now, by route
        self._busy: dict[tuple[str, ...], float] = defaultdict(float)  # by the routes in use at once
        self._busy_since = 0.0
        self._thread = threading.local()
        self.num_eager_gathers = 0  # outside of captured graphs
        self._phase_seconds: dict[Phase, list[float]] = defaultdict(list)
        self._step_starts: list[float] = []
        self._num_steps = 0
        self.recorder: Recorder | None = None  # of what happens when, while somebody records it
        self._timed: deque[_Timed] = deque()
        self._origin: tuple[Event, float] | None = None  # of the streams' times, and when that was

    def add_moved(self, source: Tier, destination: Tier, nbytes: int) -> None:
        """Count bytes that moved between two tiers."""
        with self._lock:
            self._moved[route_name(source, destination)] += nbytes

    def set_aside_this_thread(self) -> None:
        """Count no stall of the calling thread from now on: compute goes on while it waits."""
        self._thread.is_aside = True

    @contextmanager
    def stall(self, name: str) -> Iterator[None]:
        """Count the time spent inside as compute waiting for ``name``."""
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
        """Count the time for which a stream does nothing but what it is told inside, to wait for ``name``."""
        recorder = self.recorder

        def add(start: float, end: float) -> None:
            if end - start > _LEAST_STALL_SECONDS:
                self._add_stall(name, start, end, recorder)
            if recorder is not None:
                recorder.arrive(name, end)

        with self._timing(stream, add):
            yield

    def copying(self, source: Tier, destination: Tier, nbytes: int, name: str) -> Timing | None:
        """Return what a stream's copy is to be told inside of, so that it is recorded; None while nobody records."""
        if (recorder := self.recorder) is None:
            return None
        route = route_name(source, destination)
        return lambda stream: self._timing(stream, lambda start, end: recorder.add(route, name, start, nbytes, end))

    @contextmanager
    def _timing(self, stream: Stream, add: Callable[[float, float], None]) -> Iterator[None]:
        if self._origin is None:
            origin = stream.record(timed=True)
            origin.wait()  # once: only so a stream's times and the processor's can be compared
            self._origin = origin, time.perf_counter()
        start = stream.record(timed=True)
        yield
        self._timed.append(_Timed(start, stream.record(timed=True), add))
        if len(self._timed) > _MOST_TIMED:  # nobody asks; the first was long ago
            self._settle_first()

    def settle(self) -> None:
        """Wait for what streams were told inside of timed blocks, and take over how long it took."""
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
        """Count the time spent inside as a route being busy with some bytes of ``name``."""
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

    @contextmanager
    def updating(self, name: str) -> Iterator[None]:
        """Record the time spent inside as an update of a parameter, or of a part of it."""
        start = time.perf_counter()
        with profiled(f"update {name}"):
            yield
        if (recorder := self.recorder) is not None:
            recorder.add(UPDATE_LANE, name, start)

    def arrive(self, name: str) -> None:
        """Tell who records that compute goes on with ``name`` from now on."""
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
    def phase(self, phase: Phase, stream: Stream | None = None) -> Iterator[None]:
        """Record the time spent inside as one run of a phase, or the time for which a stream does what it is told inside."""
        if stream is not None:
            recorder = self.recorder
            with self._timing(stream, lambda start, end: self._add_phase(phase, start, end, recorder)):
                yield
            return
        start = time.perf_counter()
        if phase is Phase.STEP:
            self._step_starts.append(start)
            self._num_steps += 1
        with profiled(str(phase)):
            yield
        self._add_phase(phase, start, time.perf_counter(), self.recorder)

    def _add_phase(self, phase: Phase, start: float, end: float, recorder: Recorder | None) -> None:
        self._phase_seconds[phase].append(end - start)
        if recorder is not None:
            recorder.add_phase(str(phase), start, end)

    def forget_phases(self) -> None:
        """Forget the seconds of phases and steps, as those of a plan that is no longer followed."""
        self.settle()
        self._phase_seconds.clear()
        self._step_starts.clear()

    @property
    def moved(self) -> tuple[tuple[str, int], ...]:
        """Return the bytes moved so far by route."""
        with self._lock:
            return tuple(sorted(self._moved.items()))

    @property
    def arrived(self) -> tuple[tuple[str, int], ...]:
        """Return the bytes by route whose moves were timed, and are over."""
        with self._lock:
            return tuple(sorted(self._arrived.items()))

    @property
    def busy(self) -> tuple[tuple[tuple[str, ...], float], ...]:
        """Return the seconds in which bytes moved over exactly these routes, for each set of them, sorted."""
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
