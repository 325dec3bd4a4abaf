"""A bound below the simulated step of a plan, without simulating it: every lane is busy with what the plan puts on it."""

from collections import defaultdict
from collections.abc import Iterable

from zinf_compile.plans import Plan
from zinf_compile.simulation.timeline import COMPUTE_LANE, UPDATE_LANE
from zinf_compile.terms import Phase, StepTiming, Tier
from zinf_compile.world import Leg, World

# Of a step. The simulator adds up seconds in another order, and rounds otherwise.
_ROUNDING = 1e-9


def least_seconds(plan: Plan) -> float:
    """Return seconds that no simulated step of a plan is shorter than.

    Forward and backward each last as long as their busiest lane, updates included that begin and end there: one beside
    compute is over when forward has gathered its parameter; one inside backward begins there. Where the step follows
    backward it lasts as long as its own busiest lane. And no lane does two things at a time.
    """
    busy = _BusyLanes(plan)
    lanes = set().union(*busy.phases.values(), busy.beside)
    whole = max((sum(each[lane] for each in (*busy.phases.values(), busy.beside)) for lane in lanes), default=0.0)
    in_turn = sum(max(each.values(), default=0.0) for each in busy.phases.values())
    return max(whole, in_turn) * (1 - _ROUNDING)


class _BusyLanes:
    """How long each lane is busy with what begins and ends in one phase, and with what may be under way in any."""

    def __init__(self, plan: Plan) -> None:
        self.phases: dict[Phase, dict[str, float]] = {phase: defaultdict(float) for phase in Phase}
        self.beside: dict[str, float] = defaultdict(float)
        self._plan = plan
        self._world = World(hardware=plan.hardware, num_ranks=plan.num_ranks)
        timing = plan.step.timing
        if timing is StepTiming.OVERLAPPED and not plan.may_update_beside_compute:
            timing = StepTiming.SYNCHRONOUS  # as it is simulated
        for span in plan.spans:
            self.phases[span.phase][COMPUTE_LANE] += span.seconds
        self._add_gathers()
        self._add_sinks(timing)
        if plan.num_ticks > plan.num_forward_ticks:
            self._add_updates(timing)

    def _add_gathers(self) -> None:
        forward, backward = self.phases[Phase.FORWARD], self.phases[Phase.BACKWARD]
        for transfer in self._plan.transfers:
            _add(self.phases[transfer.phase], self._world.gather_legs(transfer.source, transfer.nbytes))
        for swap in self._plan.swaps:
            _add(forward, (Leg(self._world.routes[Tier.DEVICE, swap.destination], swap.nbytes),))
            _add(backward, (Leg(self._world.routes[swap.destination, Tier.DEVICE], swap.nbytes),))

    def _add_sinks(self, timing: StepTiming) -> None:
        plan = self._plan
        moved = {name for transfer in plan.transfers for name in transfer.parameters}
        resident = {use.parameter for use in plan.uses} - moved
        taken = set[str]()  # by updates inside backward, on their way home
        if timing is StepTiming.IN_BACKWARD:
            taken = {placement.parameter for placement in plan.placements if placement.update_nbytes_written}
        for sink in plan.sinks:
            home = Tier.DEVICE if sink.parameter in taken else sink.destination
            legs = self._world.gradient_legs(home, sink.nbytes, is_resident=sink.parameter in resident)
            _add(self.phases[Phase.BACKWARD], legs)

    def _add_updates(self, timing: StepTiming) -> None:
        plan = self._plan
        if timing is StepTiming.SYNCHRONOUS:
            step = self.phases[Phase.STEP]
            on_host = plan.step.num_elements * (1 - plan.step.device_share)
            step[UPDATE_LANE] = on_host / plan.hardware.optimizer_elements_per_second
            self._add_update(step, plan.step.nbytes_read, plan.step.nbytes_written)
            return
        within, phase = {sink.parameter for sink in plan.sinks}, self.phases[Phase.BACKWARD]
        if timing is StepTiming.OVERLAPPED:
            in_forward = {use.parameter for use in plan.uses if use.ticks[0] < plan.num_forward_ticks}
            within, phase = in_forward, self.phases[Phase.FORWARD]
        for placement in plan.placements:
            is_within = placement.parameter in within
            if placement.gradient_nbytes and (is_within or timing is StepTiming.OVERLAPPED):
                read = placement.update_nbytes_read
                if timing is StepTiming.IN_BACKWARD and placement.gradient is Tier.NVME:
                    read -= placement.gradient_nbytes
                self._add_update(phase if is_within else self.beside, read, placement.update_nbytes_written)

    def _add_update(self, busy: dict[str, float], read: int, written: int) -> None:
        routes = self._world.routes
        for way, nbytes in (((Tier.NVME, Tier.HOST), read), ((Tier.HOST, Tier.NVME), written)):
            if nbytes:
                _add(busy, (Leg(routes[way], nbytes),))


def _add(busy: dict[str, float], legs: Iterable[Leg]) -> None:
    for leg in legs:
        for lane in leg.route.lanes:
            busy[lane] += leg.seconds
