"""Simulate a plan: when each span computes, when each transfer moves, how long compute waits. The judge of plans.

Compute runs its spans in order. Each route moves one transfer at a time, in issue order; routes that touch the disk
share it, so reads and writes add up. A span that first reads a transfer goes on when the transfer has landed; the
difference is its stall. A gradient leaves the device behind compute; backward ends when the last one is home.

What is simulated is one of many equal steps. An overlapped optimizer step is therefore that of the step before: its updates
move whenever the disk has nothing else to do, in the order of first use, and a gather waits for those of its parameters.
Inside backward an update begins when its gradient leaves. What is left of updates at the end is the step's stall.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from zinf_compile.hardware import Hardware, route_name
from zinf_compile.plans import GatherTransfer, GradientSink, Placement, Plan
from zinf_compile.terms import Phase, StepTiming, Tier

COMPUTE_LANE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that occupies a lane (compute, or a route) for some seconds of the simulated step."""

    lane: str
    name: str
    start_seconds: float
    end_seconds: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Return how long the lane is occupied."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The bytes taken on a tier from this moment on."""

    tier: Tier
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step. Events and stalls of one lane never overlap.

    ``stalls`` are events on the compute lane, named after the transfer that was waited for. Each phase lasts as long as
    its events on the compute lane and its stalls together.
    """

    events: tuple[Event, ...]
    stalls: tuple[Event, ...]
    memory: tuple[MemoryPoint, ...]
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


def simulate(plan: Plan) -> Timeline:
    """Return the predicted timeline of one training step (or one forward pass) under ``plan``.

    Linear in spans, transfers and sinks: only ticks at which something is issued, needed or sunk are visited.
    """
    lanes = _Lanes(plan.hardware)
    if plan.step.timing is StepTiming.OVERLAPPED and plan.num_ticks > plan.num_forward_ticks:
        first_use = {use.parameter: use.ticks[0] for use in plan.uses}
        for placement in sorted(plan.placements, key=lambda item: first_use.get(item.parameter, plan.num_ticks)):
            lanes.queue_update(placement, 0.0, with_gradient=True)
    taken = {}  # by the update inside backward
    if plan.step.timing is StepTiming.IN_BACKWARD:
        taken = {placement.parameter: placement for placement in plan.placements if placement.update_nbytes_written}
    device = plan.tier(Tier.DEVICE)
    standing = device.predicted_peak - plan.activations.peak_nbytes
    memory = [
        MemoryPoint(tier=tier.tier, seconds=0.0, nbytes=tier.predicted_peak)
        for tier in plan.tiers
        if tier.tier is not Tier.DEVICE
    ]
    issued_at: dict[int, list[GatherTransfer]] = defaultdict(list)
    sunk_before: dict[int, list[GradientSink]] = defaultdict(list)
    landings: dict[int, list[Event]] = defaultdict(list)  # by need-by tick, in issue order
    for transfer in plan.transfers:
        issued_at[transfer.issue].append(transfer)
    for sink in plan.sinks:
        if sink.destination is not Tier.DEVICE:
            sunk_before[sink.tick + 1].append(sink)
    visits = sorted({*issued_at, *sunk_before, *(transfer.need_by for transfer in plan.transfers)}, reverse=True)

    clock = 0.0
    ends: dict[Phase, float] = {}
    for span in plan.spans:
        if span.phase is Phase.BACKWARD:
            ends.setdefault(Phase.FORWARD, clock)
        memory.append(MemoryPoint(tier=Tier.DEVICE, seconds=clock, nbytes=standing + span.peak_nbytes))
        name = f"{span.module} ({span.phase})"
        # Within a span ops are equally long: a transfer issued or needed at a tick moves at that share of the span.
        per_tick = span.seconds / max(1, span.end - span.start)
        run_tick, run_start = span.start, clock  # compute has run without a stall since
        while visits and visits[-1] < span.end:
            tick = visits.pop()
            clock = run_start + (tick - run_tick) * per_tick
            for sink in sunk_before[tick]:
                lanes.sink(sink, clock, taken.get(sink.parameter))
            for transfer in issued_at[tick]:
                lanes.finish_updates(transfer.parameters)
                landings[transfer.need_by].append(
                    lanes.move(transfer.source, Tier.DEVICE, transfer.name, transfer.nbytes, clock)
                )
            for landing in landings[tick]:
                if landing.end_seconds > clock:
                    lanes.compute(name, run_start, clock)
                    clock = lanes.stall(landing.name, clock, landing.end_seconds)
                    run_tick, run_start = tick, clock
        clock = run_start + (span.end - run_tick) * per_tick
        lanes.compute(name, run_start, clock)
    for tick in reversed(visits):
        for sink in sunk_before[tick]:
            lanes.sink(sink, clock, taken.get(sink.parameter))
    if lanes.last_sink is not None and lanes.last_sink.end_seconds > clock:
        clock = lanes.stall(lanes.last_sink.name, clock, lanes.last_sink.end_seconds)
    memory.append(MemoryPoint(tier=Tier.DEVICE, seconds=clock, nbytes=standing))

    forward = ends.setdefault(Phase.FORWARD, clock)
    phases = [(Phase.FORWARD, forward)]
    if plan.num_ticks > plan.num_forward_ticks:
        phases.append((Phase.BACKWARD, clock - forward))
        if plan.step.timing is StepTiming.SYNCHRONOUS:
            seconds = _simulate_step(plan, clock, lanes)
        else:
            seconds = max(0.0, lanes.finish_updates() - clock)
            if seconds:
                lanes.stall("optimizer state", clock, clock + seconds)
        phases.append((Phase.STEP, seconds))
    return Timeline(
        events=tuple(sorted(lanes.events, key=lambda event: (event.start_seconds, event.lane))),
        stalls=tuple(lanes.stalls),
        memory=tuple(sorted(memory, key=lambda point: point.seconds)),
        phase_seconds=tuple(phases),
    )


class _Lanes:
    """What occupies each lane so far, and when the next transfer on it can start."""

    def __init__(self, hardware: Hardware) -> None:
        self.events: list[Event] = []
        self.stalls: list[Event] = []
        self.last_sink: Event | None = None  # the one that lands last
        self._routes = {route.name: route for route in hardware.routes}
        self._free_at: dict[str, float] = {}
        self._updates: dict[str, tuple[float, tuple[tuple[Tier, Tier, int], ...]]] = {}  # by parameter, in order

    def compute(self, name: str, start: float, end: float) -> None:
        """Append a stretch of compute, unless it is empty."""
        if end > start:
            self.events.append(Event(lane=COMPUTE_LANE, name=name, start_seconds=start, end_seconds=end))

    def stall(self, name: str, start: float, end: float) -> float:
        """Append a wait of compute and return when it is over."""
        self.stalls.append(Event(lane=COMPUTE_LANE, name=f"stall: {name}", start_seconds=start, end_seconds=end))
        return end

    def move(self, source: Tier, destination: Tier, name: str, nbytes: int, start: float) -> Event:
        """Append a transfer that is issued at ``start`` and return when it moves; KeyError for an unknown route."""
        if Tier.NVME in (source, destination):
            self._catch_up(start)
        return self._move(source, destination, name, nbytes, start)

    def queue_update(self, placement: Placement, start: float, *, with_gradient: bool) -> None:
        """Append an update to those that move when the disk is free, from ``start`` on."""
        read = placement.update_nbytes_read
        if not with_gradient and placement.gradient is Tier.NVME:
            read -= placement.gradient_nbytes
        moves = ((Tier.NVME, Tier.HOST, read), (Tier.HOST, Tier.NVME, placement.update_nbytes_written))
        if any(nbytes for _, _, nbytes in moves):
            self._updates[placement.parameter] = (start, moves)

    def finish_updates(self, parameters: Iterable[str] | None = None) -> float:
        """Move updates until those of ``parameters``, or all, are home; return when the disk is free then."""
        wanted = self._updates.keys() if parameters is None else self._updates.keys() & set(parameters)
        for name in list(self._updates) if wanted else ():
            if not self._updates.keys() & wanted:
                break
            self._update(name)
        return self._free_at.get(Tier.NVME, 0.0)

    def _catch_up(self, now: float) -> None:
        """Move updates as long as the disk would have been idle until ``now``."""
        for name, (start, _) in list(self._updates.items()):
            if max(start, self._free_at.get(Tier.NVME, 0.0)) >= now:
                break
            self._update(name)

    def _update(self, name: str) -> None:
        start, moves = self._updates.pop(name)
        for source, destination, nbytes in moves:
            if nbytes:
                self._move(source, destination, f"update of {name}", nbytes, start)

    def _move(self, source: Tier, destination: Tier, name: str, nbytes: int, start: float) -> Event:
        lane = route_name(source, destination)
        route = self._routes[lane]
        start = max(start, *(self._free_at.get(shared, 0.0) for shared in route.lanes))
        end = start + route.latency_seconds + nbytes / route.bytes_per_second
        self._free_at.update(dict.fromkeys(route.lanes, end))
        event = Event(lane=lane, name=name, start_seconds=start, end_seconds=end, nbytes=nbytes)
        self.events.append(event)
        return event

    def sink(self, sink: GradientSink, start: float, taken_by: Placement | None) -> None:
        """Append a gradient's way home, or the update that takes it."""
        if taken_by is not None:
            self.queue_update(taken_by, start, with_gradient=False)
            return
        event = self.move(Tier.DEVICE, sink.destination, f"gradient {sink.parameter}", sink.nbytes, start)
        if self.last_sink is None or event.end_seconds > self.last_sink.end_seconds:
            self.last_sink = event


def _simulate_step(plan: Plan, start: float, lanes: _Lanes) -> float:
    """Append the streamed step's events and return its seconds: disk and update overlap, the slower one counts.

    Reads and writes share the disk: their times add up, and both are drawn over the whole step, chunk by chunk as they
    go. What the update waits for in all is drawn as one stall at the end.
    """
    step, hardware = plan.step, plan.hardware
    update = step.num_elements / hardware.optimizer_elements_per_second
    moves = [
        (source, destination, nbytes)
        for source, destination, nbytes in (
            (Tier.NVME, Tier.HOST, step.nbytes_read),
            (Tier.HOST, Tier.NVME, step.nbytes_written),
        )
        if nbytes
    ]
    disk = sum(nbytes / hardware.bytes_per_second(source, destination) for source, destination, nbytes in moves)
    seconds = max(update, disk)
    end = start + seconds
    for source, destination, nbytes in moves:
        lanes.events.append(
            Event(
                lane=route_name(source, destination),
                name="optimizer state",
                start_seconds=start,
                end_seconds=end,
                nbytes=nbytes,
            )
        )
    lanes.compute("optimizer (step)", start, start + update)
    if disk > update:
        lanes.stall("optimizer state", start + update, end)
    return seconds
