"""A bound below the simulated step of a plan, without simulating it: every lane is busy with what the plan puts on it."""

from collections import defaultdict

from zinf_compile.plans import Plan
from zinf_compile.simulation.timeline import COMPUTE_LANE, UPDATE_LANE
from zinf_compile.terms import Phase, StepTiming, Tier
from zinf_compile.world import Leg, World

# Of a step. The simulator adds up seconds in another order, and rounds otherwise.
_ROUNDING = 1e-9


def least_seconds(plan: Plan) -> float:
    """Return seconds that no simulated step of a plan is shorter than.

    Forward and backward each last as long as their busiest lane, and what is in flight beside both as long as its own.
    """
    phases = _busy_in_phases(plan)
    beside, step = _busy_with_updates(plan)
    lanes = {lane for busy in (*phases.values(), beside) for lane in busy}
    whole = max((sum(busy[lane] for busy in (*phases.values(), beside)) for lane in lanes), default=0.0)
    in_turn = sum(max(busy.values(), default=0.0) for busy in phases.values()) + step
    return max(whole, in_turn) * (1 - _ROUNDING)


def _busy_in_phases(plan: Plan) -> dict[Phase, dict[str, float]]:
    """Return how long each lane is busy with what begins and ends in a phase."""
    world = World(hardware=plan.hardware, num_ranks=plan.num_ranks)
    busy: dict[Phase, dict[str, float]] = {phase: defaultdict(float) for phase in (Phase.FORWARD, Phase.BACKWARD)}

    def move(phase: Phase, legs: tuple[Leg, ...]) -> None:
        for leg in legs:
            for lane in leg.route.lanes:
                busy[phase][lane] += leg.seconds

    for span in plan.spans:
        busy[span.phase][COMPUTE_LANE] += span.seconds
    moved: set[str] = set()
    for transfer in plan.transfers:
        moved.update(transfer.parameters)
        move(transfer.phase, world.gather_legs(transfer.source, transfer.nbytes))
    for swap in plan.swaps:
        move(Phase.FORWARD, (Leg(world.routes[Tier.DEVICE, swap.destination], swap.nbytes),))
        move(Phase.BACKWARD, (Leg(world.routes[swap.destination, Tier.DEVICE], swap.nbytes),))
    resident = {use.parameter for use in plan.uses} - moved
    updated = _read_by_updates(plan)
    for sink in plan.sinks:
        home = Tier.DEVICE if sink.parameter in updated else sink.destination
        legs = world.gradient_legs(home, sink.nbytes, is_resident=sink.parameter in resident)
        move(Phase.BACKWARD, legs)
    return busy


def _read_by_updates(plan: Plan) -> set[str]:
    """Return the parameters whose gradients updates inside backward take on their way."""
    if plan.step.timing is not StepTiming.IN_BACKWARD:
        return set()
    return {placement.parameter for placement in plan.placements if placement.update_nbytes_written}


def _busy_with_updates(plan: Plan) -> tuple[dict[str, float], float]:
    """Return how long updates beside compute keep each lane busy, and the seconds of a step that comes after backward."""
    busy: dict[str, float] = defaultdict(float)
    if plan.num_ticks == plan.num_forward_ticks or plan.step.timing is StepTiming.IN_BACKWARD:
        return busy, 0.0  # inside backward only what has a gradient in this graph is updated
    busy[UPDATE_LANE] = plan.step.num_elements / plan.hardware.optimizer_elements_per_second
    routes = World(hardware=plan.hardware, num_ranks=plan.num_ranks).routes
    for way, nbytes in (
        ((Tier.NVME, Tier.HOST), plan.step.nbytes_read),
        ((Tier.HOST, Tier.NVME), plan.step.nbytes_written),
    ):
        if nbytes:
            for lane in routes[way].lanes:
                busy[lane] += Leg(routes[way], nbytes).seconds  # in one move; of several each has the latency
    if plan.step.timing is StepTiming.SYNCHRONOUS or plan.step.num_chunks == 0:
        return defaultdict(float), max(busy.values())
    return busy, 0.0
