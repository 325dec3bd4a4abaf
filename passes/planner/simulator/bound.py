"""A lower bound of the simulated step of a plan, without simulating it: the busy time of each lane."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from zinf_compile.hardware.world import Leg
from zinf_compile.ir.glossary import Phase, StepTiming, Tier
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.ir.timeline import COMPUTE_LANE, UPDATE_LANE
from zinf_compile.passes.planner.simulator.updates import DeviceShare, in_order_of_use
from zinf_compile.passes.planner.simulator.ways import Ways

# Relative to a step: the simulator adds up seconds in another order, and rounds differently.
ROUNDING = 1e-9


class LeastSeconds(NamedTuple):
    """Lower bounds, in seconds, of a simulated step and of what follows its forward."""

    step: float
    after_forward: float


def least_seconds(plan: Plan, ways: Ways | None = None) -> LeastSeconds:
    """Return lower bounds of the simulated step of a plan. ``ways`` are those of its transfers, if they are known.

    Forward and backward each last at least as long as their busiest lane, with the updates that must start and end there:
    an overlapped update ends before forward gathers its parameter, one in backward starts there. A synchronous step lasts
    at least as long as its own busiest lane. And no lane does two things at a time. While a lane moves bytes, compute loses
    the share of its processors that this takes: compute lasts longer by at least what one lane takes of it.
    """
    busy = _BusyLanes(plan, ways or Ways(plan))
    lanes = set().union(*busy.phases.values(), busy.beside)
    whole = max((sum(each[lane] for each in (*busy.phases.values(), busy.beside)) for lane in lanes), default=0.0)
    in_turn = {
        phase: max(*each.values(), each[COMPUTE_LANE] + max(busy.taken[phase].values(), default=0.0), 0.0)
        for phase, each in busy.phases.items()
    }
    after_forward = sum(seconds for phase, seconds in in_turn.items() if phase is not Phase.FORWARD)
    step = max(whole, in_turn[Phase.FORWARD] + after_forward)
    return LeastSeconds(step=step * (1 - ROUNDING), after_forward=after_forward * (1 - ROUNDING))


class _BusyLanes:
    """How long each lane is busy with what must run in one phase, and with what may run in any."""

    def __init__(self, plan: Plan, ways: Ways) -> None:
        self.phases: dict[Phase, dict[str, float]] = {phase: defaultdict(float) for phase in Phase}
        self.beside: dict[str, float] = defaultdict(float)
        # What transfers take of compute in a phase, by the first lane that they occupy.
        self.taken: dict[Phase, dict[str, float]] = {phase: defaultdict(float) for phase in Phase}
        self._plan = plan
        self._routes = ways.world.routes
        timing = plan.step.timing
        if timing is StepTiming.OVERLAPPED and not plan.may_update_beside_compute:
            timing = StepTiming.SYNCHRONOUS  # as it is simulated
        for span in plan.spans:
            self.phases[span.phase][COMPUTE_LANE] += span.seconds
        runs = plan.schedule.runs
        ends = [run.end for run in runs[:-1]]  # what is issued behind the last run belongs to it
        # Blocks repeat, so many transfers have the same legs, which are then the same object.
        counts: dict[tuple[int, int], int] = defaultdict(int)
        each: dict[int, tuple[Leg, ...]] = {}
        for transfer in plan.transfers:
            legs = ways.legs(transfer)
            each[id(legs)] = legs
            counts[bisect_right(ends, transfer.issue), id(legs)] += 1
        for (run, legs_id), count in counts.items():
            self._add_legs(runs[run].phase, each[legs_id], count)
        if plan.schedule.is_training:
            for _, leg in ways.spread:
                self._add_legs(Phase.FORWARD, (leg,), 1)
            self._add_updates(timing)

    def _add_legs(self, phase: Phase, legs: Iterable[Leg], count: int) -> None:
        """Add the legs of some equal transfers that begin and end in a phase."""
        busy = self.phases[phase]
        for leg in legs:
            seconds = count * leg.seconds
            for lane in leg.route.lanes:
                busy[lane] += seconds
            if leg.route.takes_of_compute:
                self.taken[phase][leg.route.lanes[0]] += leg.route.takes_of_compute * seconds

    def _add_updates(self, timing: StepTiming) -> None:
        plan = self._plan
        update_seconds = plan.step.num_elements / plan.hardware.optimizer_elements_per_second
        if timing is StepTiming.SYNCHRONOUS:
            step, on_device = self.phases[Phase.STEP], plan.device_updates
            in_place = on_device.nbytes_in_place / plan.hardware.memory_bytes_per_second
            step[UPDATE_LANE] = max((1 - on_device.share) * update_seconds, in_place)
            moved = _Moves()
            moved.add(Tier.NVME, Tier.HOST, plan.step.nbytes_read)
            moved.add(Tier.HOST, Tier.NVME, plan.step.nbytes_written)
            if on_device.share:
                moved.add(Tier.HOST, Tier.DEVICE, on_device.nbytes_in)
                moved.add(Tier.DEVICE, Tier.HOST, on_device.nbytes_out)
            self._add_moves(step, moved)
            return
        within, phase = {sink.name for sink in plan.sinks}, self.phases[Phase.BACKWARD]
        if timing is StepTiming.OVERLAPPED:
            forward = plan.schedule.ticks(Phase.FORWARD)
            ahead = frozenset(plan.step.ahead)  # begun in one backward, and ended by the next forward
            in_forward = {use.parameter for use in plan.uses if use.ticks[0] in forward} - ahead
            within, phase = in_forward, self.phases[Phase.FORWARD]
        nbytes, device = sum(placement.gradient_nbytes for placement in plan.placements), DeviceShare(plan)
        moved_within, moved_beside = _Moves(), _Moves()
        for placement in self._placements_in_order(timing):
            is_within = placement.parameter in within
            if placement.gradient_nbytes and (is_within or timing is StepTiming.OVERLAPPED):
                moved, busy = (moved_within, phase) if is_within else (moved_beside, self.beside)
                read = placement.update_nbytes_read
                if timing is StepTiming.IN_BACKWARD and placement.gradient is Tier.NVME:
                    read -= placement.gradient_nbytes
                moved.add(Tier.NVME, Tier.HOST, read)
                moved.add(Tier.HOST, Tier.NVME, placement.update_nbytes_written)
                if not device.takes(placement):
                    busy[UPDATE_LANE] += update_seconds * placement.gradient_nbytes / nbytes
                elif plan.is_updated_in_place(placement):
                    busy[UPDATE_LANE] += placement.update_nbytes_with_host / plan.hardware.memory_bytes_per_second
                else:
                    moved.add(Tier.HOST, Tier.DEVICE, placement.update_nbytes_to_device)
                    moved.add(Tier.DEVICE, Tier.HOST, placement.update_nbytes_to_host)
        self._add_moves(phase, moved_within)
        self._add_moves(self.beside, moved_beside)

    def _placements_in_order(self, timing: StepTiming) -> Iterable[Placement]:
        """Return the placements in the order in which their updates are queued."""
        if timing is StepTiming.OVERLAPPED:
            return in_order_of_use(self._plan)
        placement_of = {placement.parameter: placement for placement in self._plan.placements}
        return (placement_of[sink.name] for sink in self._plan.sinks)

    def _add_moves(self, busy: dict[str, float], moves: "_Moves") -> None:
        for pair, nbytes in moves.nbytes.items():
            route = self._routes[pair]
            seconds = moves.counts[pair] * route.latency_seconds + nbytes / route.bytes_per_second
            for lane in route.lanes:
                busy[lane] += seconds


class _Moves:
    """Transfers of updates between tiers, by source and destination: thousands, on a few routes."""

    def __init__(self) -> None:
        self.counts: dict[tuple[Tier, Tier], int] = defaultdict(int)
        self.nbytes: dict[tuple[Tier, Tier], int] = defaultdict(int)

    def add(self, source: Tier, destination: Tier, nbytes: int) -> None:
        """Add a transfer, unless it moves nothing."""
        if nbytes:
            self.counts[source, destination] += 1
            self.nbytes[source, destination] += nbytes
