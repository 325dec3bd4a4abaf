"""The largest values of a plan, one row each: where they are stored, when they move, and why not on a faster tier."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import StepTiming, Tier, format_bytes, format_seconds
from zinf_compile.ir.hardware import route_name
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.timeline import Timeline
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.simulator.memory import MEMORY_ROLES, MemoryRole

MAX_ROWS = 2000  # what a browser sorts and searches at once
_MAX_MOVES = 3  # shown individually

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
    """Return a row for every named value of the plan, the largest first."""
    return tuple(sorted(_rows(timeline), key=lambda row: (-row.nbytes, row.name, row.what)))


def _rows(timeline: Timeline) -> Iterator[ValueRow]:
    plan = timeline.plan
    room = {tier: _tell_room(plan, tier) for tier in Tier}
    sinks = {sink.name: sink for sink in plan.sinks if not sink.stays}
    reads: dict[tuple[str, bool], int] = defaultdict(int)  # by parameter, and whether it is the compute copy
    compute_dtypes = {placement.parameter: placement.compute_dtype for placement in plan.placements}
    for use in plan.uses:
        reads[use.parameter, use.dtype == compute_dtypes[use.parameter]] += len(use.ticks)
    ahead = frozenset(plan.step.ahead)
    for placement in plan.placements:
        name = placement.parameter
        step = _STEPS[plan.step.timing] if placement.gradient_nbytes else ""
        if name in ahead:
            step = "from backward on, ahead of step()"
        for role, copies in placement.by_role.items():
            home, nbytes = copies[0].tier, placement.nbytes_of(role)
            moves, why = f"updated {step}", room[home]
            if role is Role.GRADIENT:
                moves = _tell_sink(timeline, sinks.get(name))
            elif role is not Role.STATE:
                num_reads = reads[name, role is Role.COMPUTE]
                moved = [
                    transfer for transfer in plan.by_tick.gathers_of(name) if num_reads and transfer.source is home
                ]
                is_updated = role is Role.MASTER or Role.MASTER not in placement.by_role
                change = f"{'updated' if is_updated else 'written'} {step}" if step else ""
                moves = "; ".join(part for part in (_tell_gathers(timeline, moved), change) if part)
                if home is Tier.DEVICE and num_reads:
                    why = f"resident: read in place at {num_reads:,} tick{'' if num_reads == 1 else 's'}"
            yield ValueRow(
                name=name,
                what=role.label,
                role=MEMORY_ROLES[role],
                nbytes=nbytes,
                home=str(home),
                moves=moves,
                why=why,
            )
    yield from _activation_rows(timeline)


def _activation_rows(timeline: Timeline) -> Iterator[ValueRow]:
    """Yield a row for each activation with its own bytes in the plan."""
    for swap in timeline.plan.swaps:
        ticks = (swap.offload.issue, swap.offload.need_by, swap.reload.issue, swap.reload.need_by)
        out, gone, back, need = (_moment(timeline, tick) for tick in ticks)
        yield ValueRow(
            name=swap.value,
            what="swapped activation",
            role=MemoryRole.ACTIVATION,
            nbytes=swap.nbytes,
            home=str(swap.rests_on),
            moves=f"leaves at {out}, gone by {gone}; "
            + (f"read there from {need}" if swap.reload.stays else f"back from {back}, needed at {need}"),
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


def _tell_gathers(timeline: Timeline, gathers: list[Transfer]) -> str:
    if not gathers:
        return ""
    phase_of = timeline.plan.schedule.phase_of
    moves = [
        f"{phase_of(gather.issue)} from {_moment(timeline, gather.issue)}, needed at {_moment(timeline, gather.need_by)}"
        for gather in gathers[:_MAX_MOVES]
    ]
    more = f"; {len(gathers) - _MAX_MOVES} more" if len(gathers) > _MAX_MOVES else ""
    return f"{route_name(gathers[0].source, Tier.DEVICE)}: {'; '.join(moves)}{more}"


def _tell_sink(timeline: Timeline, sink: Transfer | None) -> str:
    if sink is None:
        return ""
    return f"{route_name(Tier.DEVICE, sink.destination)} from {_moment(timeline, sink.issue)}"


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
