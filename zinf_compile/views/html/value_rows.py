"""The largest values of a plan, one row each: where they live, when they move, and why they do not live nearer."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from zinf_compile.hardware import route_name
from zinf_compile.plans import GatherTransfer, GradientSink, Plan
from zinf_compile.simulation.memory import MemoryRole
from zinf_compile.simulation.timeline import Timeline
from zinf_compile.terms import StepTiming, Tier, format_bytes, format_seconds

MAX_ROWS = 2000  # what a browser sorts and searches at once
_MAX_MOVES = 3  # that are told one by one

_STEPS = {
    StepTiming.SYNCHRONOUS: "in the step",
    StepTiming.OVERLAPPED: "beside the next forward",
    StepTiming.IN_BACKWARD: "inside backward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """One value: a copy of a parameter, its gradient or state, or a result of compute."""

    name: str
    what: str  # "master copy", "bound value"
    role: MemoryRole
    nbytes: int
    home: str
    moves: str
    why: str


def collect_rows(timeline: Timeline) -> tuple[ValueRow, ...]:
    """Return a row for every value that the plan knows by name, the largest first."""
    return tuple(sorted(_rows(timeline), key=lambda row: (-row.nbytes, row.name, row.what)))


def _rows(timeline: Timeline) -> Iterator[ValueRow]:
    plan = timeline.plan
    room = {tier: _tell_room(plan, tier) for tier in Tier}
    gathers: dict[str, list[GatherTransfer]] = defaultdict(list)
    for transfer in plan.transfers:
        for parameter in transfer.parameters:
            gathers[parameter].append(transfer)
    sinks = {sink.parameter: sink for sink in plan.sinks if sink.destination is not Tier.DEVICE}
    reads: dict[tuple[str, bool], int] = defaultdict(int)  # by parameter, and whether it is the compute copy
    compute_dtypes = {placement.parameter: placement.compute_dtype for placement in plan.placements}
    for use in plan.uses:
        reads[use.parameter, use.dtype == compute_dtypes[use.parameter]] += len(use.ticks)
    for placement in plan.placements:
        name = placement.parameter
        step = _STEPS[plan.step.timing] if placement.gradient_nbytes else ""
        copies = (
            (True, "compute copy", placement.compute, placement.compute_nbytes, not placement.master_nbytes),
            (False, "master copy", placement.master, placement.master_nbytes, True),
        )
        for is_compute, what, home, nbytes, is_updated in copies:
            if not nbytes:
                continue
            num_reads = reads[name, is_compute]
            moved = [transfer for transfer in gathers[name] if num_reads and transfer.source is home]
            change = f"{'updated' if is_updated else 'written'} {step}" if step else ""
            told = "; ".join(part for part in (_tell_gathers(timeline, moved), change) if part)
            is_resident = home is Tier.DEVICE and num_reads
            why = (
                f"resident: read in place at {num_reads:,} tick{'' if num_reads == 1 else 's'}"
                if is_resident
                else room[home]
            )
            yield ValueRow(
                name=name, what=what, role=MemoryRole.PARAMETER, nbytes=nbytes, home=str(home), moves=told, why=why
            )
        if placement.gradient_nbytes:
            yield ValueRow(
                name=name,
                what="gradient",
                role=MemoryRole.GRADIENT,
                nbytes=placement.gradient_nbytes,
                home=str(placement.gradient),
                moves=_tell_sink(timeline, sinks.get(name)),
                why=room[placement.gradient],
            )
        if placement.optimizer_state_nbytes:
            yield ValueRow(
                name=name,
                what="optimizer state",
                role=MemoryRole.OPTIMIZER_STATE,
                nbytes=placement.optimizer_state_nbytes,
                home=str(placement.optimizer_state),
                moves=f"updated {step}",
                why=room[placement.optimizer_state],
            )
    yield from _activation_rows(timeline)


def _activation_rows(timeline: Timeline) -> Iterator[ValueRow]:
    """Yield a row for each value of compute that has its own bytes in the plan."""
    for swap in timeline.plan.swaps:
        out, gone, back, need = (
            _moment(timeline, tick) for tick in (swap.out + 1, swap.gone, swap.issue, swap.need_by)
        )
        yield ValueRow(
            name=swap.value,
            what="swapped activation",
            role=MemoryRole.ACTIVATION,
            nbytes=swap.nbytes,
            home=str(swap.destination),
            moves=f"leaves at {out}, gone by {gone}; back from {back}, needed at {need}",
            why="saved for backward, and its bytes on the device serve others in between",
        )
    for value in timeline.plan.bound:
        start, end = (_moment(timeline, tick) for tick in (value.live.start, value.live.end))
        yield ValueRow(
            name=value.name,
            what="bound value",
            role=MemoryRole.ACTIVATION,
            nbytes=value.nbytes,
            home=str(Tier.DEVICE),
            moves="",
            why=f"written straight into the arena; live from {start} to {end}",
        )


def _tell_gathers(timeline: Timeline, gathers: list[GatherTransfer]) -> str:
    if not gathers:
        return ""
    told = [
        f"{gather.phase} from {_moment(timeline, gather.issue)}, needed at {_moment(timeline, gather.need_by)}"
        for gather in gathers[:_MAX_MOVES]
    ]
    more = f"; {len(gathers) - _MAX_MOVES} more" if len(gathers) > _MAX_MOVES else ""
    return f"{route_name(gathers[0].source, Tier.DEVICE)}: {'; '.join(told)}{more}"


def _tell_sink(timeline: Timeline, sink: GradientSink | None) -> str:
    if sink is None:
        return ""
    return f"{route_name(Tier.DEVICE, sink.destination)} from {_moment(timeline, sink.tick + 1)}"


def _tell_room(plan: Plan, home: Tier) -> str:
    """Return what the plan leaves free on the tiers that are faster than ``home``."""
    faster = [plan.tier(tier) for tier in Tier if list(Tier).index(tier) < list(Tier).index(home)]
    free = [
        f"{format_bytes(tier.capacity - tier.predicted_peak)} of {tier.tier}"
        for tier in faster
        if tier.capacity is not None
    ]
    return f"the plan leaves {' and '.join(free)} free" if free else ""


def _moment(timeline: Timeline, tick: int) -> str:
    return format_seconds(timeline.seconds_at(tick))
