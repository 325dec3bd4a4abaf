"""Facts, budgets and rates in; the Plan out. Pure: the same input gives the same plan on every machine and rank.

For each activation policy the widest look-ahead that fits is taken, what room is left makes parameters resident, and of
the plans that fit the one with the shortest simulated step is returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zinf_compile.config import Config
from zinf_compile.errors import CapacityError
from zinf_compile.facts import GraphFacts, ParameterFact, working_set
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning.activations import bind_values, plan_activations
from zinf_compile.passes.planning.costs import plan_spans
from zinf_compile.passes.planning.optimizer_step import plan_step
from zinf_compile.passes.planning.placement import plan_placement, with_device_memory
from zinf_compile.passes.planning.prefetch import TransferPlan, plan_residencies, plan_transfers
from zinf_compile.plans import PLAN_VERSION, GradientSink, Placement, Plan, TierPlan
from zinf_compile.simulate import simulate
from zinf_compile.sizes import Size
from zinf_compile.terms import StepTiming, Tier, format_bytes

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAhead:
    """How far transfers run ahead of compute, and how much of a block moves at once."""

    prefetch_nbytes: int
    group_nbytes: int


# Widest first. A group is a quarter of the look-ahead, so that several transfers are in flight; the last entry moves
# every parameter alone, at the moment it is needed: the least memory a plan can do with.
_LOOK_AHEADS = (
    *(LookAhead(prefetch_nbytes=size * _MIB, group_nbytes=size * _MIB // 4) for size in (256, 128, 64, 32, 16, 8)),
    LookAhead(prefetch_nbytes=0, group_nbytes=0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that a plan is made from. ``candidates`` are the same graph under different activation policies."""

    name: str
    candidates: tuple[GraphFacts, ...]
    parameters: tuple[ParameterFact, ...]
    config: Config
    hardware: Hardware
    captured: tuple[GraphFacts[Size], ...] = ()  # the candidates in symbols, to ask about other sizes
    placements: tuple[Placement, ...] | None = None  # where other plans of the model have put its parameters already


def make_plan(request: Request) -> Plan:
    """Return the plan with the shortest simulated step of those that fit.

    Raises CapacityError, with the smallest budgets that work, when none does.
    """
    plans = [plan for graph in request.candidates if (plan := _plan_graph(request, graph)) is not None]
    if not plans:
        raise _capacity_error(request)
    return replace(min(plans, key=lambda plan: simulate(plan).step_seconds), request=request)


def minimum_device_memory(request: Request) -> int:
    """Return the bytes of the smallest device budget with which ``make_plan`` succeeds."""
    return min(_minimum(request, graph) for graph in request.candidates)


def _compute_nbytes(request: Request, graph: GraphFacts) -> int:
    """Return the device bytes that compute itself takes, however parameters move."""
    bound = bind_values(graph, base=0).nbytes
    return bound + plan_activations(graph).peak_nbytes + _workspace(request, graph) + request.config.reserve_memory


def _workspace(request: Request, graph: GraphFacts) -> int:
    """Return what kernels take beside their outputs: a matrix product may repack its largest weight."""
    read = {use.parameter: use.dtype for use in graph.uses}
    return max((item.nbytes_read(read[item.name]) for item in request.parameters if item.name in read), default=0)


def _look_aheads(config: Config) -> Sequence[LookAhead]:
    if config.prefetch_memory is None:
        return _LOOK_AHEADS
    return (LookAhead(prefetch_nbytes=config.prefetch_memory, group_nbytes=config.prefetch_memory // 4),)


def _plan_graph(request: Request, graph: GraphFacts) -> Plan | None:
    """Return the plan of one candidate, or None if it does not fit the device."""
    config = request.config
    room = config.device_memory - _compute_nbytes(request, graph)
    num_uses = {use.parameter: len(use.ticks) for use in graph.uses}
    if room < 0:
        return None
    if request.placements is not None:
        # Other graphs of the model run with these homes: keep them where that fits, so that nothing has to move.
        for look_ahead in _look_aheads(config):
            arena = _transfers(request, graph, request.placements, look_ahead).arena_nbytes
            if arena + _resident_nbytes(request.placements) <= room:
                return _build(request, graph, request.placements, look_ahead)
    least = plan_placement(request.parameters, config)  # first: of all it leaves the most to host and nvme
    if _resident_nbytes(least) > room:
        return None
    everything = plan_placement(request.parameters, config, resident_nbytes=room, num_uses=num_uses)
    nothing_moves = not _transfers(request, graph, everything, _LOOK_AHEADS[-1]).transfers
    if nothing_moves and all(placement.compute is Tier.DEVICE for placement in everything):
        return _build(request, graph, everything, _LOOK_AHEADS[-1])
    for look_ahead in _look_aheads(config):
        arena = _transfers(request, graph, least, look_ahead).arena_nbytes
        if arena + _resident_nbytes(least) > room:
            continue
        more = plan_placement(request.parameters, config, resident_nbytes=room - arena, num_uses=num_uses)
        fits = _transfers(request, graph, more, look_ahead).arena_nbytes + _resident_nbytes(more) <= room
        return _build(request, graph, more if fits else least, look_ahead)
    return None


def _transfers(
    request: Request, graph: GraphFacts, placements: Sequence[Placement], look_ahead: LookAhead
) -> TransferPlan:
    residencies = plan_residencies(graph, request.parameters, placements, group_nbytes=look_ahead.group_nbytes)
    return plan_transfers(residencies, prefetch_nbytes=look_ahead.prefetch_nbytes)


def _resident_nbytes(placements: Sequence[Placement]) -> int:
    return sum(placement.nbytes_on(Tier.DEVICE) for placement in placements)


def _build(request: Request, graph: GraphFacts, placements: tuple[Placement, ...], look_ahead: LookAhead) -> Plan:
    config = request.config
    moved = _transfers(request, graph, placements, look_ahead)
    bound = bind_values(graph, base=moved.arena_nbytes)  # behind the bytes that transfers use
    arena_nbytes = moved.arena_nbytes + bound.nbytes
    activations = plan_activations(graph)
    homes = {placement.parameter: placement for placement in placements}
    staging = config.staging_memory
    parts = {
        Tier.DEVICE: (
            ("residents", _resident_nbytes(placements)),
            ("arena", arena_nbytes),
            ("activations", activations.peak_nbytes),
            ("workspace", _workspace(request, graph)),
            ("reserve", config.reserve_memory),
        ),
        Tier.HOST: (("homes", sum(item.nbytes_on(Tier.HOST) for item in placements)), ("staging", staging)),
        Tier.NVME: (("homes", sum(item.nbytes_on(Tier.NVME) for item in placements)),),
    }
    capacity = {Tier.DEVICE: config.device_memory, Tier.HOST: config.host_memory, Tier.NVME: config.nvme_memory}
    return Plan(
        version=PLAN_VERSION,
        name=request.name,
        compute_dtype=config.compute_dtype,
        hardware=request.hardware,
        num_forward_ticks=graph.num_forward_ticks,
        num_ticks=graph.num_ticks,
        placements=placements,
        uses=tuple(sorted(graph.uses, key=lambda use: use.parameter)),
        transfers=moved.transfers,
        bound=bound.values,
        swaps=(),
        sinks=tuple(
            GradientSink(
                parameter=gradient.parameter,
                tick=gradient.tick,
                destination=_sink_home(homes[gradient.parameter], config.step_timing),
                nbytes=gradient.nbytes,
            )
            for gradient in sorted(graph.gradients, key=lambda gradient: (gradient.tick, gradient.parameter))
        ),
        spans=plan_spans(graph, request.hardware),
        activations=activations,
        arena_nbytes=arena_nbytes,
        prefetch_nbytes=look_ahead.prefetch_nbytes,
        step=plan_step(request.parameters, placements, staging_nbytes=staging, timing=config.step_timing),
        tiers=tuple(
            TierPlan(
                tier=tier,
                capacity=capacity[tier],
                predicted_peak=sum(nbytes for _, nbytes in parts[tier]),
                parts=parts[tier],
            )
            for tier in Tier
        ),
    )


def _sink_home(placement: Placement, timing: StepTiming) -> Tier:
    is_taken = timing is StepTiming.IN_BACKWARD and placement.gradient is Tier.NVME
    return Tier.HOST if is_taken else placement.gradient


def _minimum(request: Request, graph: GraphFacts) -> int:
    """Return the smallest device budget for one candidate: bare transfers and nothing resident but the small ones.

    The small residents may take an eighth of the budget, so the budget they are counted under is searched for.
    """
    floor = _compute_nbytes(request, graph)
    fixed = request.config.prefetch_memory
    look_ahead = _LOOK_AHEADS[-1] if fixed is None else LookAhead(prefetch_nbytes=fixed, group_nbytes=fixed // 4)
    needed = floor
    while True:
        placements = plan_placement(request.parameters, with_device_memory(request.config, needed))
        total = floor + _transfers(request, graph, placements, look_ahead).arena_nbytes + _resident_nbytes(placements)
        if total <= needed:
            return needed
        needed = total


def _capacity_error(request: Request) -> CapacityError:
    graph = min(request.candidates, key=lambda candidate: _minimum(request, candidate))
    live = working_set(graph.values, graph.num_ticks)
    peak_tick = max(range(len(live)), key=live.__getitem__)
    at_peak = [value for value in graph.values if value.live.start <= peak_tick < value.live.end]
    largest = sorted(at_peak, key=lambda value: (-value.nbytes, value.name))[:3]
    peak_op = next(op for op in graph.ops if op.tick == peak_tick)
    minimum = _minimum(request, graph)
    return CapacityError(
        f"{request.name} needs {format_bytes(minimum)} on device, device_memory is "
        f"{format_bytes(request.config.device_memory)}; its activations alone peak at {format_bytes(live[peak_tick])} "
        f"(in {peak_op.module}, at {peak_op.name}), largest: "
        + ", ".join(f"{value.name} {format_bytes(value.nbytes)}" for value in largest)
        + f"; raise device_memory to {-(-minimum // _MIB)}MiB or make the batch smaller"
    )
