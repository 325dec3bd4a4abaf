"""Simulate a plan: when each span computes, when each transfer moves, how long compute waits. The judge of plans.

Compute runs its spans in order. A route moves one transfer at a time, in the order of issue; routes that share a lane take
turns on it, like reads and writes of one disk. At the need-by tick of a transfer compute waits until it has ended; that
wait is a stall. What leaves the device starts after the op that computes it; backward ends when the last gradient is home.
A reload starts after its offload has ended. All ranks do the same, so one of them is simulated: its shards move over its
routes, full values and gradients over the links. Compute starts what moves over the links: at the launch tick of a gather
it waits until the shards are there, and before a gradient is reduced until the buffers have room for it. The rows of
residents that other ranks have updated come at the beginning of forward, in the order of first reads, which wait for them.

The simulated step is one of many equal ones. With an overlapped optimizer step, forward therefore runs beside the updates
of the step before. These use the disk whenever nothing else does, in the order of first use. A gather waits for the
updates of its parameters, and so does the first read of a resident parameter. With updates in backward, each begins when
its gradient leaves. What is left of the updates at the end is the stall of the step. Updates ahead of ``step()`` begin when
their gradient is home; those that have not ended by the end of backward run beside the next forward, and so do reloads of
what the others have written of copies in memory.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from zinf_compile.ir.glossary import Phase, StepTiming, Tier
from zinf_compile.ir.plan import REDUCED_NBYTES, ComputeSpan, Placement, Plan
from zinf_compile.ir.timeline import COMPUTE_LANE, UPDATED_RESIDENTS, Event, MemoryPoint, TickTime, Timeline
from zinf_compile.ir.transfers import Moved, Transfer
from zinf_compile.passes.planner.simulator.bound import ROUNDING
from zinf_compile.passes.planner.simulator.journeys import Journeys
from zinf_compile.passes.planner.simulator.lanes import Lanes
from zinf_compile.passes.planner.simulator.updates import Updates, in_order_of_use
from zinf_compile.passes.planner.simulator.ways import Ways

__all__ = [
    "COMPUTE_LANE",
    "Event",
    "MemoryPoint",
    "Timeline",
    "simulate",
    "simulate_micro_batch",
    "simulate_within",
]


class _TooLongError(Exception):
    """A step takes longer than allowed."""


def simulate_within(
    plan: Plan, seconds: float, least_after_forward: float, ways: Ways | None = None
) -> Timeline | None:
    """Return the timeline of a step; None, as soon as that is known, if it takes longer than ``seconds``.

    ``least_after_forward`` is a lower bound, in seconds, of what follows forward. ``ways`` are those of the transfers, if
    they are known.
    """
    try:
        timeline = _simulate(plan, _Limit(plan, seconds, least_after_forward), ways)
    except _TooLongError:
        return None
    return timeline if timeline.step_seconds <= seconds else None


def simulate(plan: Plan) -> Timeline:
    """Return the predicted timeline of one training step (or one forward pass) under ``plan``.

    Linear in spans and transfers: only ticks at which something is issued or waited for are visited.
    """
    return _simulate(plan, None, None)


def simulate_micro_batch(plan: Plan, *, is_reduced: bool) -> float:
    """Return the seconds of forward and backward of a micro-batch in the middle of a step of several.

    No update runs, and no rank has updated anything. ``is_reduced`` says whether ranks reduce the gradients of each
    micro-batch; if not, these stay on the device until the end of the step (stage 1 of ZeRO).
    """
    synchronous = replace(plan, step=replace(plan.step, timing=StepTiming.SYNCHRONOUS, ahead=()))
    walk = _Walk(synchronous, is_in_the_middle=True, keeps_gradients=not is_reduced)
    walk.run_all()
    return walk.clock


def _simulate(plan: Plan, limit: "_Limit | None", ways: Ways | None) -> Timeline:
    ways = ways or Ways(plan)
    walk = _Walk(plan, ways=ways)
    walk.run_all(None if plan.step.ahead else limit)
    if plan.step.ahead and walk.unfinished:  # every step begins with what the one before has left
        walk = _Walk(plan, ways=ways, left=walk.unfinished)
        walk.run_all(limit)
    forward = walk.clock if walk.forward_end is None else walk.forward_end
    phases = [(Phase.FORWARD, forward)]
    if plan.schedule.is_training:
        phases += [(Phase.BACKWARD, walk.clock - forward), (Phase.STEP, walk.step())]
    return Timeline(
        plan=plan,
        nodes=tuple(walk.lanes.nodes),
        stalls=tuple(walk.stalls),
        clock=tuple(walk.ticks),
        phase_seconds=tuple(phases),
    )


class _Limit:
    """Stops a simulation once the elapsed time plus a lower bound of the rest exceeds a limit."""

    def __init__(self, plan: Plan, seconds: float, least_after_forward: float) -> None:
        self._seconds = seconds * (1 + ROUNDING)
        self._least_after_forward = least_after_forward
        self._to_compute = sum(span.seconds for span in plan.spans)
        self._is_in_forward = True

    def check(self, span: ComputeSpan, clock: float) -> None:
        """Raise _TooLongError if the step is too long. Called at the start of each span, in order."""
        to_come = self._to_compute
        if self._is_in_forward and span.phase is Phase.BACKWARD:
            self._is_in_forward = False
            to_come = max(to_come, self._least_after_forward)
        if clock + to_come > self._seconds:
            raise _TooLongError
        self._to_compute -= span.seconds


class _Reduction(NamedTuple):
    """A gradient that is being reduced."""

    journey: int
    nbytes: int


# Overhead of the compute thread for a gather (issue, wait, release), and for a gradient that goes to the disk
# beyond what storing it takes anyhow, in calls of ops. Measured: 500 and 600 microseconds, where a call took 19.
_CALLS_OF_GATHER, _CALLS_OF_WRITTEN = 25, 30


class _Walk:
    """The compute lane, tick by tick, and what it has started."""

    def __init__(
        self,
        plan: Plan,
        *,
        ways: Ways | None = None,
        left: frozenset[str] = frozenset(),
        is_in_the_middle: bool = False,
        keeps_gradients: bool = False,
    ) -> None:
        """``left``: the updates ahead of ``step()`` that backward has not ended. ``ways``: of the transfers, if known.

        ``is_in_the_middle`` of a step: no parameter has been updated before. With ``keeps_gradients`` none leaves.
        """
        self.clock = 0.0
        self.forward_end: float | None = None  # once backward has begun
        self.stalls: list[Event] = []
        self.ticks = [TickTime(0, 0.0)]
        self.lanes = Lanes(plan.hardware)
        self._plan = plan
        self._after: tuple[int, ...] = ()  # the nodes after which compute goes on
        self._issued_at = plan.by_tick.issued_at
        self._ways = ways or Ways(plan)
        self._journeys = Journeys(self.lanes)
        self._offloads: dict[str, int] = {}  # the journey of each activation that has left
        self._sinks: list[int] = []  # journeys of gradients, which backward waits for at its end
        self._launches: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by tick: need-by ticks and journeys
        self._held: set[int] = set()  # gathers whose shards the ranks do not exchange yet
        self._reductions: list[_Reduction] = []  # in flight: their buffers are as large as the largest gradient
        self._largest = min(REDUCED_NBYTES, max((sink.nbytes for sink in plan.sinks), default=0))
        self._spread: dict[int, list[int]] = defaultdict(list)  # by first read: what brings rows of residents
        self._updates = Updates(plan, self.lanes)
        self._read: dict[int, list[str]] = defaultdict(list)  # residents that are updated beside forward, by first use
        self._timing = plan.step.timing
        self._ahead, self._left = frozenset(plan.step.ahead), left
        if self._timing is StepTiming.OVERLAPPED and not plan.may_update_beside_compute:
            self._timing = StepTiming.SYNCHRONOUS  # with nothing to move, updates would hide behind nothing
        if self._timing is StepTiming.OVERLAPPED and plan.schedule.is_training:
            for placement in in_order_of_use(plan):
                if placement.parameter not in self._ahead or placement.parameter in left:
                    self._updates.queue(placement, (), with_gradient=True)
                else:
                    self._updates.queue_reload(placement)
            for use in plan.uses:
                if use.parameter in self._ways.resident:
                    self._read[use.ticks[0]].append(use.parameter)
        self._keeps_gradients = keeps_gradients
        if plan.schedule.is_training and not is_in_the_middle:
            self._spread_residents()
        self._placements = {placement.parameter: placement for placement in plan.placements}
        self._awaited: dict[int, list[int]] = defaultdict(list)  # by tick, the journeys that compute waits for there
        visits = {*self._read, *self._spread}
        for transfer in plan.transfers:
            if transfer.what is not Moved.GRADIENT:
                visits.update((transfer.issue, transfer.need_by))
                if transfer.launch is not None:
                    visits.add(transfer.launch)
            elif (
                not transfer.stays
                or self._timing is StepTiming.IN_BACKWARD
                or plan.mesh_size > 1
                or transfer.name in self._ahead
            ):
                visits.add(transfer.issue)  # others neither move nor are taken by an update
        self._visits = sorted(visits, reverse=True)

    def run_all(self, limit: _Limit | None = None) -> None:
        """Compute all spans. Raises _TooLongError if ``limit`` says that the step is too long."""
        for span in self._plan.spans:
            if limit is not None:
                limit.check(span, self.clock)
            self.run(span)
        self.end_ticks()

    @property
    def unfinished(self) -> frozenset[str]:
        """Return the parameters whose updates ahead of ``step()`` have not ended."""
        self._updates.advance(self.clock)
        return self._updates.unfinished & self._ahead

    def run(self, span: ComputeSpan) -> None:
        """Compute one span, cut at every tick at which something is issued or waited for."""
        if span.phase is Phase.BACKWARD and self.forward_end is None:
            self.forward_end = self.clock
        name = f"{span.module} ({span.phase})"
        # Within a span ops are equally long: a transfer issued or needed at a tick moves at that share of the span.
        per_tick = span.seconds / max(1, span.end - span.start)
        tick, start = span.start, self.clock  # compute has run at a constant rate since
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
        """Issue the gradients of the last op, and wait until all gradients are home."""
        for tick in reversed(self._visits):
            self._visit(tick)
        self._journeys.advance(math.inf)
        nodes = [self._journeys.finish(sink) for sink in self._sinks]
        if nodes:
            self._wait(max(nodes, key=lambda node: self.lanes.nodes[node].end_seconds))

    def step(self) -> float:
        """Append the optimizer step, or what is left of it, and return its seconds."""
        if self._timing is StepTiming.SYNCHRONOUS:
            return self._step_at_once()
        start = self.clock
        if self._ahead:  # what is left of these runs beside the next forward
            last = self._updates.finish(self._updates.unfinished - self._ahead)
        else:
            self._updates.finish_all()
            last = tuple(range(len(self.lanes.nodes)))
        self.clock = max(start, self.lanes.end_of(last))
        if self.clock > start:
            self._stall("optimizer state", start)
        return self.clock - start

    def _compute(self, name: str, end: float) -> bool:
        """Compute until ``end``, or longer if updates and transfers slow it down; return whether it was longer."""
        reached, last = end, -math.inf
        while reached > last:
            self._journeys.advance(reached)
            self._updates.advance(reached)
            last, reached = reached, max(reached, self.lanes.end_beside(self.clock, end))
        self._after = self.lanes.compute(name, self.clock, reached, self._after)
        self.clock = reached
        return reached > end

    def _visit(self, tick: int) -> bool:
        """Issue what is due at a tick, and wait for what is needed there; return whether compute was held up."""
        self.ticks.append(TickTime(tick, self.clock))
        start = self.clock
        issued = self._issued_at(tick)
        calls = sum(map(_num_calls, issued)) * self._plan.hardware.op_overhead_seconds
        if calls:
            self._compute("transfers", self.clock + calls)
        for transfer in issued:
            self._start(transfer)
        if tick in self._read:
            self._wait(*self._updates.finish(self._read[tick]))
        for node in self._spread.get(tick, ()):
            self._wait(node)
        for journey in self._awaited.get(tick, ()):
            self._launch(journey)
            self._wait(self._journeys.finish(journey))
        if tick in self._launches:
            for _, journey in sorted(self._launches[tick]):
                self._launch(journey)
        has_waited = calls > 0 or self.clock > start
        if has_waited:
            self.ticks.append(TickTime(tick, self.clock))
        return has_waited

    def _start(self, transfer: Transfer) -> None:
        """Start a transfer, behind compute and behind what else it has to wait for."""
        if transfer.what is Moved.GRADIENT:
            self._start_sink(transfer)
            return
        if transfer.stays:  # an activation, whose offload has ended in forward
            return
        after = self._after
        if transfer.what is Moved.PARAMETERS:
            after = (*after, *self._updates.finish(transfer.parameters))
        elif transfer.is_reload:
            after = (*after, self._journeys.finish(self._offloads[transfer.name]))
        is_held = transfer.what is Moved.PARAMETERS and self._plan.num_ranks > 1
        journey = self._journeys.start(transfer.label, self._ways.legs(transfer), after, is_held=is_held)
        self._awaited[transfer.need_by].append(journey)
        if is_held:
            self._held.add(journey)
            self._launches[transfer.launched_at].append((transfer.need_by, journey))
        if transfer.is_offload:
            self._offloads[transfer.name] = journey

    def _spread_residents(self) -> None:
        """Wait for the updates of residents; start to bring every rank what the others have updated of them."""
        updated = self._ways.updated_residents
        self._wait(*self._updates.finish(placement.parameter for placement in updated))
        for tick, leg in self._ways.spread:
            self._spread[tick].append(self.lanes.travel(leg, UPDATED_RESIDENTS, self._after))

    def _launch(self, journey: int) -> None:
        """Let the ranks exchange the shards of a gather, once those of this one have arrived; of others, do nothing."""
        if journey in self._held:
            self._held.remove(journey)
            self._wait(self._journeys.last_of(journey))
            self._journeys.launch(journey, self.clock, self._after)

    def _start_sink(self, sink: Transfer) -> None:
        """Start moving a gradient home, and queue the update in backward that takes it."""
        if self._keeps_gradients:
            return
        # What backward had no time for, it has none for in the next step either.
        is_ahead = sink.name in self._ahead and sink.name not in self._left
        begins_update = self._timing is StepTiming.IN_BACKWARD or is_ahead
        taken_by = self._placements.get(sink.name) if begins_update else None
        legs = self._ways.legs(sink)
        if not legs:
            self._update(taken_by, self._after)
            return
        if sum(each.nbytes for each in self._reductions) + sink.nbytes > self._largest:
            self._finish_reductions()
        journey = self._journeys.start(sink.label, legs, self._after)
        self._sinks.append(journey)
        if self._plan.mesh_size > 1:
            self._reductions.append(_Reduction(journey, sink.nbytes))
        if taken_by is not None:
            self._update(taken_by, (self._journeys.finish(journey),))

    def _finish_reductions(self) -> None:
        """Wait for the reductions in flight."""
        pending, self._reductions = self._reductions, []
        for each in pending:
            self._wait(self._journeys.reach(each.journey, self._ways.num_reducing_legs - 1))

    def _update(self, placement: Placement | None, after: tuple[int, ...]) -> None:
        """Queue the update in backward of a parameter after some nodes, if there is one."""
        if placement is not None:
            is_ahead = placement.parameter in self._ahead
            self._updates.queue(placement, after, with_gradient=is_ahead, is_ahead=is_ahead)

    def _wait(self, *nodes: int) -> None:
        """Let compute go on after some nodes, for each of which in turn it may have to wait."""
        self._after += nodes
        for node in nodes:
            awaited = self.lanes.nodes[node]
            if awaited.end_seconds > self.clock:
                start, self.clock = self.clock, awaited.end_seconds
                self._stall(awaited.name, start)

    def _stall(self, name: str, start: float) -> None:
        """Append a wait of compute until now."""
        self._updates.advance(self.clock)
        self.stalls.append(Event(COMPUTE_LANE, f"stall: {name}", start, self.clock))

    def _step_at_once(self) -> float:
        """Append the nodes of the streamed step, and return its seconds: disk and update overlap, the slower one counts.

        Reads and writes take turns, chunk by chunk; on a lane that they share, the reads come before the writes here. The
        waits of the update are one stall at the end.
        """
        step, start, after = self._plan.step, self.clock, self._after
        on_device = self._plan.device_updates
        update = step.num_elements * (1 - on_device.share) / self._plan.hardware.optimizer_elements_per_second
        self.lanes.compute("optimizer (step)", start, start + update, after)
        for source, destination, nbytes in (
            (Tier.NVME, Tier.HOST, step.nbytes_read),
            (Tier.HOST, Tier.NVME, step.nbytes_written),
        ):
            if nbytes:
                self.lanes.move(source, destination, "optimizer state", nbytes, after)
        if on_device.nbytes_in_place:
            in_place = on_device.nbytes_in_place / self._plan.hardware.memory_bytes_per_second
            self.lanes.update("optimizer (device)", in_place, after)
        elif on_device.share:
            self.lanes.move(Tier.HOST, Tier.DEVICE, "optimizer state", on_device.nbytes_in, after)
            self.lanes.move(Tier.DEVICE, Tier.HOST, "optimizer state", on_device.nbytes_out, after)
        self.clock = self.lanes.end_of(range(len(self.lanes.nodes)))
        if self.clock > start + update:
            self._stall("optimizer state", start + update)
        return self.clock - start


def _num_calls(transfer: Transfer) -> int:
    """Return the overhead of a transfer on the compute thread, in op calls."""
    if transfer.what is Moved.PARAMETERS:
        return _CALLS_OF_GATHER
    is_written = transfer.what is Moved.GRADIENT and transfer.destination is Tier.NVME
    return _CALLS_OF_WRITTEN if is_written else 0
