"""A simulated step: what occupied which lane when, what each had to wait for, and how far compute had come."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.plan import Plan

COMPUTE_LANE = "compute"
UPDATED_RESIDENTS = "updated residents"  # the event in which ranks get the rows of them that others have updated
UPDATE_LANE = "updates"  # the thread that updates parameters beside compute


class Event(NamedTuple):
    """Something that occupies a lane (compute, updates, or a route) for some seconds of the simulated step."""

    lane: str
    name: str
    start_seconds: float
    end_seconds: float
    nbytes: int = 0
    after: tuple[int, ...] = ()  # of a timeline's nodes: those that had to end before this one could start

    @property
    def seconds(self) -> float:
        """Return how long the lane is occupied."""
        return self.end_seconds - self.start_seconds


class MemoryPoint(NamedTuple):
    """The bytes taken on a tier from this moment on."""

    tier: Tier
    seconds: float
    nbytes: int


class TickTime(NamedTuple):
    """When compute reaches a tick, or resumes after a stall there."""

    tick: int
    seconds: float


# Not slotted: rarely used properties are cached, and computed on first use.
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step. Events and stalls of one lane never overlap.

    ``nodes`` are the dependency graph: compute is cut wherever something is issued, needed or sunk, each node starts when
    the last of those it is ``after`` ends (or at 0), and a node stands behind all that it is after. ``stalls`` are events
    on the compute lane, named after the transfer that was waited for. Each phase lasts as long as its events on the
    compute lane and its stalls together.
    """

    plan: Plan = field(repr=False, compare=False)
    nodes: tuple[Event, ...] = field(repr=False)
    stalls: tuple[Event, ...]
    clock: tuple[TickTime, ...] = field(repr=False)  # when compute reaches some ticks; linear in between
    phase_seconds: tuple[tuple[Phase, float], ...]

    @property
    def step_seconds(self) -> float:
        """Return the seconds of the whole step."""
        return sum(seconds for _, seconds in self.phase_seconds)

    @property
    def stall_seconds(self) -> float:
        """Return the seconds compute waits for transfers, the optimizer step's wait for the disk included."""
        return sum(stall.seconds for stall in self.stalls)

    def stalls_in(self, phase: Phase) -> tuple[Event, ...]:
        """Return the stalls of one phase; none for a phase the plan does not have."""
        start = 0.0
        for each, seconds in self.phase_seconds:
            if each is phase:
                return tuple(stall for stall in self.stalls if start <= stall.start_seconds < start + seconds)
            start += seconds
        return ()

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Return the nodes as a person sees them, by start: compute of one span that was not held up is one event."""
        return tuple(sorted(_join(self.nodes), key=lambda event: (event.start_seconds, event.lane)))

    @cached_property
    def memory(self) -> tuple[MemoryPoint, ...]:
        """Return the bytes taken on each tier, by seconds: on the device span by span, elsewhere what is planned for."""
        device = self.plan.tier(Tier.DEVICE)
        standing = device.predicted_peak - self.plan.activations.peak_nbytes
        points = [
            MemoryPoint(tier.tier, 0.0, tier.predicted_peak) for tier in self.plan.tiers if tier.tier is not Tier.DEVICE
        ]
        for span in self.plan.spans:
            points.append(MemoryPoint(Tier.DEVICE, self.seconds_at(span.start), standing + span.peak_nbytes))
        points.append(MemoryPoint(Tier.DEVICE, self._end_of_ticks, standing))
        return tuple(sorted(points, key=lambda point: point.seconds))

    def seconds_at(self, tick: int) -> float:
        """Return when compute reaches a tick, before any stall there."""
        index = bisect_left(self.clock, tick, key=lambda point: point.tick)
        if index == len(self.clock):
            return self._end_of_ticks
        after = self.clock[index]
        if after.tick == tick or index == 0:
            return after.seconds
        before = self.clock[index - 1]
        share = (tick - before.tick) / (after.tick - before.tick)
        return before.seconds + share * (after.seconds - before.seconds)

    @property
    def _end_of_ticks(self) -> float:
        return sum(seconds for phase, seconds in self.phase_seconds if phase is not Phase.STEP)


def _join(nodes: tuple[Event, ...]) -> Iterator[Event]:
    """Yield the nodes without their dependencies, what compute does of one span in one go joined."""
    going: Event | None = None
    for node in nodes:
        if node.lane != COMPUTE_LANE:
            yield node._replace(after=())
        elif going is not None and going.name == node.name and going.end_seconds == node.start_seconds:
            going = going._replace(end_seconds=node.end_seconds)
        else:
            if going is not None:
                yield going
            going = node._replace(after=())
    if going is not None:
        yield going
