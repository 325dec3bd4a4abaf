"""Simulate a plan: when each span computes, when each transfer moves, how long compute waits. The judge of plans.

Compute runs its spans in order. A route moves one transfer at a time, in issue order; routes that share a lane take turns
on it, as reads and writes of one disk do. A span that first reads a transfer goes on when the transfer has landed; the
difference is its stall. A gradient leaves the device behind compute; backward ends when the last one is home. A value
that is swapped out leaves behind compute too, and compute waits at the tick by which it has to be gone. Of several ranks,
which all do the same, one is simulated: its shards move over its routes, and full values and gradients over the links.

What is simulated is one of many equal steps. An overlapped optimizer step is therefore that of the step before: its updates
move whenever the disk has nothing else to do, in the order of first use; a gather waits for those of its parameters, and so
does the first read of a resident one. Inside backward an update begins when its gradient leaves. What is left of updates at
the end is the step's stall.
"""

import math
from collections import defaultdict

from zinf_compile.plans import ActivationSwap, ComputeSpan, GatherTransfer, GradientSink, Plan
from zinf_compile.simulation.journeys import Journeys
from zinf_compile.simulation.lanes import Lanes
from zinf_compile.simulation.timeline import COMPUTE_LANE, Event, MemoryPoint, TickTime, Timeline
from zinf_compile.simulation.updates import Updates
from zinf_compile.terms import Phase, StepTiming, Tier
from zinf_compile.world import Leg, World

__all__ = ["COMPUTE_LANE", "Event", "MemoryPoint", "Timeline", "simulate"]


def simulate(plan: Plan) -> Timeline:
    """Return the predicted timeline of one training step (or one forward pass) under ``plan``.

    Linear in spans, transfers, swaps and sinks: only ticks at which something is issued, needed or sunk are visited.
    """
    walk = _Walk(plan)
    for span in plan.spans:
        walk.run(span)
    walk.end_ticks()
    forward = walk.clock if walk.forward_end is None else walk.forward_end
    phases = [(Phase.FORWARD, forward)]
    if plan.num_ticks > plan.num_forward_ticks:
        phases += [(Phase.BACKWARD, walk.clock - forward), (Phase.STEP, walk.step())]
    return Timeline(
        plan=plan,
        nodes=tuple(walk.lanes.nodes),
        stalls=tuple(walk.stalls),
        clock=tuple(walk.ticks),
        phase_seconds=tuple(phases),
    )


# What compute's thread spends on a transfer (issuing, waiting, releasing), and on a gradient that goes to the disk beyond
# what storing it takes anyhow, in calls of ops. Measured: 500 and 600 microseconds, where a call took 19.
_CALLS_OF_TRANSFER, _CALLS_OF_WRITTEN = 25, 30


class _Walk:
    """Compute on its way through the ticks, and all that it has set going."""

    def __init__(self, plan: Plan) -> None:
        self.clock = 0.0
        self.forward_end: float | None = None  # once backward has begun
        self.stalls: list[Event] = []
        self.ticks = [TickTime(0, 0.0)]
        self.lanes = Lanes(plan.hardware)
        self._plan = plan
        self._after: tuple[int, ...] = ()  # the nodes after which compute goes on
        self._world = World(hardware=plan.hardware, num_ranks=plan.num_ranks)
        self._journeys = Journeys(self.lanes)
        self._swapped_out: dict[str, int] = {}
        self._last_sinks: list[int] = []  # journeys
        self._updates = Updates(plan, self.lanes)
        moved = {name for transfer in plan.transfers for name in transfer.parameters}
        self._resident = {use.parameter for use in plan.uses} - moved
        self._read: dict[int, list[str]] = defaultdict(list)  # residents that are updated beside forward, by first use
        self._timing = plan.step.timing
        if self._timing is StepTiming.OVERLAPPED and not plan.may_update_beside_compute:
            self._timing = StepTiming.SYNCHRONOUS  # with nothing to move, updates would hide behind nothing
        if self._timing is StepTiming.OVERLAPPED and plan.num_ticks > plan.num_forward_ticks:
            first_use = {use.parameter: use.ticks[0] for use in plan.uses}
            for placement in sorted(plan.placements, key=lambda item: first_use.get(item.parameter, plan.num_ticks)):
                self._updates.queue(placement, (), with_gradient=True)
            for use in plan.uses:
                if use.parameter in self._resident:
                    self._read[use.ticks[0]].append(use.parameter)
        self._placements = {placement.parameter: placement for placement in plan.placements}
        self._sunk: dict[int, list[GradientSink]] = defaultdict(list)
        self._leaving: dict[int, list[ActivationSwap]] = defaultdict(list)
        self._issued: dict[int, list[GatherTransfer]] = defaultdict(list)
        self._returning: dict[int, list[ActivationSwap]] = defaultdict(list)
        self._awaited: dict[int, list[int]] = defaultdict(list)  # journeys that have to have ended, as they began
        visits = set()
        for transfer in plan.transfers:
            self._issued[transfer.issue].append(transfer)
            visits.add(transfer.need_by)
        for sink in plan.sinks:
            is_taken = self._timing is StepTiming.IN_BACKWARD  # by an update, wherever it is
            if is_taken or sink.destination is not Tier.DEVICE or plan.num_ranks > 1:
                self._sunk[sink.tick + 1].append(sink)
        for swap in plan.swaps:
            self._leaving[swap.out + 1].append(swap)
            self._returning[swap.issue].append(swap)
            visits.update((swap.gone, swap.need_by))
        visits.update(self._issued, self._sunk, self._leaving, self._returning, self._read)
        self._visits = sorted(visits, reverse=True)

    def run(self, span: ComputeSpan) -> None:
        """Compute one span, cut at every tick at which something is issued, needed or sunk."""
        if span.phase is Phase.BACKWARD and self.forward_end is None:
            self.forward_end = self.clock
        name = f"{span.module} ({span.phase})"
        # Within a span ops are equally long: a transfer issued or needed at a tick moves at that share of the span.
        per_tick = span.seconds / max(1, span.end - span.start)
        tick, start = span.start, self.clock  # compute has run at an even pace since
        while self._visits and self._visits[-1] < span.end:
            visited = self._visits.pop()
            end = start + (visited - tick) * per_tick
            is_late = self._compute(name, end)
            has_waited = self._visit(visited)
            if is_late or has_waited:
                tick, start = visited, self.clock
        self._compute(name, start + (span.end - tick) * per_tick)
        self.ticks.append(TickTime(span.end, self.clock))

    def end_ticks(self) -> None:
        """Sink what the last op has made, and wait until all gradients are home."""
        for tick in reversed(self._visits):
            self._visit(tick)
        self._journeys.advance(math.inf)
        nodes = [self._journeys.finish(sink) for sink in self._last_sinks]
        if nodes:
            self._wait(max(nodes, key=lambda node: self.lanes.nodes[node].end_seconds))

    def step(self) -> float:
        """Append the optimizer step, or what is left of it, and return its seconds."""
        if self._timing is StepTiming.SYNCHRONOUS:
            return self._step_at_once()
        start = self.clock
        self._updates.finish_all()
        self.clock = max(start, self.lanes.end_of(range(len(self.lanes.nodes))))
        if self.clock > start:
            self._stall("optimizer state", start)
        return self.clock - start

    def _compute(self, name: str, end: float) -> bool:
        """Compute until ``end``, or longer by what is taken of it meanwhile; return whether anything has been.

        Updates take their seconds when they begin, transfers a share of the time in which they move.
        """
        alone, reached, last = end, end, -math.inf
        while reached > last:
            self._journeys.advance(reached)
            alone += self._updates.advance(reached)
            last, reached = reached, max(reached, self.lanes.end_beside(self.clock, alone))
        self._after = self.lanes.compute(name, self.clock, reached, self._after)
        self.clock = reached
        return reached > end

    def _visit(self, tick: int) -> bool:
        """Issue what is due before a tick, and wait for what is needed there; return whether compute has been held up."""
        self.ticks.append(TickTime(tick, self.clock))
        issued, sunk = self._issued.get(tick, ()), self._sunk.get(tick, ())
        num_calls = _CALLS_OF_TRANSFER * len(issued)
        num_calls += _CALLS_OF_WRITTEN * sum(sink.destination is Tier.NVME for sink in sunk)
        calls = num_calls * self._plan.hardware.op_overhead_seconds
        if calls:
            self._compute("transfers", self.clock + calls)
        for sink in sunk:
            self._sink(sink)
        for swap in self._leaving.get(tick, ()):
            leg = Leg(self._plan.hardware.route(Tier.DEVICE, swap.destination), swap.nbytes)
            journey = self._journeys.start(f"{swap.value} out", (leg,), self._after)
            self._swapped_out[swap.value] = self._journeys.finish(journey)
            self._awaited[swap.gone].append(journey)
        for transfer in issued:
            after = (*self._after, *self._updates.finish(transfer.parameters))
            legs = self._world.gather_legs(transfer.source, transfer.nbytes)
            self._awaited[transfer.need_by].append(self._journeys.start(transfer.name, legs, after))
        for swap in self._returning.get(tick, ()):
            after = (*self._after, self._swapped_out[swap.value])
            leg = Leg(self._plan.hardware.route(swap.destination, Tier.DEVICE), swap.nbytes)
            self._awaited[swap.need_by].append(self._journeys.start(f"{swap.value} back", (leg,), after))
        has_waited = calls > 0
        for node in self._updates.finish(self._read.get(tick, ())):
            has_waited |= self._wait(node)
        for journey in self._awaited.get(tick, ()):
            has_waited |= self._wait(self._journeys.finish(journey))
        if has_waited:
            self.ticks.append(TickTime(tick, self.clock))
        return has_waited

    def _sink(self, sink: GradientSink) -> None:
        """Append a gradient's way home, or the update that takes it."""
        taken_by = self._placements.get(sink.parameter) if self._timing is StepTiming.IN_BACKWARD else None
        is_read = taken_by is not None and taken_by.update_nbytes_written > 0  # at once, on its way to the home
        home = Tier.DEVICE if is_read else sink.destination
        legs = self._world.gradient_legs(home, sink.nbytes, is_resident=sink.parameter in self._resident)
        after = self._after
        if legs:
            journey = self._journeys.start(f"gradient {sink.parameter}", legs, after)
            self._last_sinks.append(journey)
            if taken_by is not None:
                after = (self._journeys.finish(journey),)
        if taken_by is not None:
            self._updates.queue(taken_by, after, with_gradient=False)

    def _wait(self, node: int) -> bool:
        """Let compute go on after a node; return whether it has to wait for it."""
        self._after = (*self._after, node)
        awaited = self.lanes.nodes[node]
        if awaited.end_seconds <= self.clock:
            return False
        start, self.clock = self.clock, awaited.end_seconds
        self._stall(awaited.name, start)
        return True

    def _stall(self, name: str, start: float) -> None:
        """Append a wait of compute until now. The updates that begin meanwhile take nothing from it."""
        self._updates.advance(self.clock)
        self.stalls.append(Event(COMPUTE_LANE, f"stall: {name}", start, self.clock))

    def _step_at_once(self) -> float:
        """Append the streamed step's nodes and return its seconds: disk and update overlap, the slower one counts.

        Reads and writes take turns, chunk by chunk; on a lane that they share the reads are drawn before the writes. What
        the update waits for in all is drawn as one stall at the end.
        """
        step, start, after = self._plan.step, self.clock, self._after
        update = step.num_elements * (1 - step.device_share) / self._plan.hardware.optimizer_elements_per_second
        self.lanes.compute("optimizer (step)", start, start + update, after)
        for source, destination, nbytes in (
            (Tier.NVME, Tier.HOST, step.nbytes_read),
            (Tier.HOST, Tier.NVME, step.nbytes_written),
        ):
            if nbytes:
                self.lanes.move(source, destination, "optimizer state", nbytes, after)
        if step.device_share:
            trained = [placement for placement in self._plan.placements if placement.gradient_nbytes]
            there = sum(placement.update_nbytes_to_device for placement in trained) * step.device_share
            back = sum(placement.update_nbytes_to_host for placement in trained) * step.device_share
            self.lanes.move(Tier.HOST, Tier.DEVICE, "optimizer state", int(there), after)
            self.lanes.move(Tier.DEVICE, Tier.HOST, "optimizer state", int(back), after)
        self.clock = self.lanes.end_of(range(len(self.lanes.nodes)))
        if self.clock > start + update:
            self._stall("optimizer state", start + update)
        return self.clock - start
