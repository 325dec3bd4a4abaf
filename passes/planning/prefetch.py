"""Which parameters move together, when each transfer starts, and when its bytes are free again.

Parameters of one block that come from the same tier move as one transfer, as large as ``group_nbytes`` allows. A
transfer starts no more than ``prefetch_nbytes`` of transfers ahead of compute, and as late as it still arrives in time.
"""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zinf_compile.facts import GraphFacts, ParameterFact
from zinf_compile.passes.planning.arena import ArenaLayout, Piece, align, plan_arena
from zinf_compile.plans import GatherTransfer, Placement
from zinf_compile.terms import LiveRange, Phase, Tier
from zinf_compile.world import World

# A transfer is started so many times earlier than the measured rates ask for: a shared disk is at times half as fast.
_MARGIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """A stretch of ticks in which some parameters are needed on the device."""

    name: str
    phase: Phase
    source: Tier
    parameters: tuple[str, ...]
    sizes: tuple[int, ...]  # of each parameter, rounded up to the arena's alignment
    need_by: int
    release: int

    @property
    def nbytes(self) -> int:
        """Return the arena bytes it takes."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Transfers with their offsets bound, and the arena that holds them."""

    transfers: tuple[GatherTransfer, ...]
    arena_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTime:
    """How long the gradient that is complete after a tick occupies the lanes of a leg of its way."""

    tick: int
    seconds: float
    lanes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When compute reaches each tick if it never waits, and what else occupies the lanes, by tick."""

    reached_seconds: tuple[float, ...]
    sinks: tuple[SinkTime, ...]
    world: World


def plan_residencies(
    graph: GraphFacts,
    parameters: Sequence[ParameterFact],
    placements: Sequence[Placement],
    *,
    group_nbytes: int,
    held_past: int = 1,
    num_ranks: int = 1,
) -> tuple[Residency, ...]:
    """Return when which parameters must be on the device, by need-by tick. Resident parameters do not appear.

    Uses of a group in one phase are one residency as long as no more than ``held_past`` other groups are first needed in
    between: holding on past one costs less than reading again.
    """
    uses = {use.parameter: use.ticks for use in graph.uses}
    dtypes = {use.parameter: use.dtype for use in graph.uses}
    homes = {item.parameter: item.home_read(dtypes[item.parameter]) for item in placements if item.parameter in uses}
    sizes = {
        item.parameter: align(num_ranks * item.nbytes_read(dtypes[item.parameter]))
        for item in placements
        if item.parameter in uses
    }
    groups = _group(
        [parameter for parameter in parameters if homes.get(parameter.name, Tier.DEVICE) is not Tier.DEVICE],
        homes,
        sizes,
        group_nbytes=group_nbytes,
    )
    stretches: list[tuple[list[ParameterFact], Phase, list[int]]] = []
    for group in groups:
        ticks = sorted({tick for parameter in group for tick in uses[parameter.name]})
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            in_phase = [tick for tick in ticks if graph.phase_of(tick) is phase]
            if in_phase:
                stretches.append((group, phase, in_phase))
    first_needs = sorted(ticks[0] for _, _, ticks in stretches)
    residencies = []
    for group, phase, ticks in stretches:
        for run in _split(ticks, first_needs, held_past):
            used = group
            if len(group) > 1:
                used = [item for item in group if any(run[0] <= tick <= run[-1] for tick in uses[item.name])]
            residencies.append(
                Residency(
                    name=used[0].name if len(used) == 1 else used[0].block,
                    phase=phase,
                    source=homes[used[0].name],
                    parameters=tuple(item.name for item in used),
                    sizes=tuple(sizes[item.name] for item in used),
                    need_by=run[0],
                    release=run[-1] + 1,
                )
            )
    return tuple(sorted(residencies, key=lambda item: (item.need_by, item.release, item.name)))


def _group(
    parameters: Sequence[ParameterFact], homes: Mapping[str, Tier], sizes: Mapping[str, int], *, group_nbytes: int
) -> list[list[ParameterFact]]:
    groups: list[list[ParameterFact]] = []
    for parameter in parameters:
        group = groups[-1] if groups else []
        if (
            group
            and group[-1].block == parameter.block
            and homes[group[-1].name] is homes[parameter.name]
            and sum(sizes[item.name] for item in group) + sizes[parameter.name] <= group_nbytes
        ):
            group.append(parameter)
        else:
            groups.append([parameter])
    return groups


def _split(ticks: Sequence[int], first_needs: Sequence[int], held_past: int) -> list[list[int]]:
    """Return the ticks in runs, cut where more other residencies begin in between; ``first_needs`` are sorted."""
    runs = [[ticks[0]]]
    for before, after in itertools.pairwise(ticks):
        others = bisect.bisect_left(first_needs, after) - bisect.bisect_right(first_needs, before)
        if others > held_past:
            runs.append([])
        runs[-1].append(after)
    return runs


def _earliest_issues(residencies: Sequence[Residency], prefetch_nbytes: int) -> list[int]:
    issues: list[int] = []
    for index, residency in enumerate(residencies):
        ahead, issue = residency.nbytes, residency.need_by
        for position in range(index - 1, -1, -1):
            before = residencies[position]
            if before.phase is not residency.phase or ahead > prefetch_nbytes:
                break
            issue = min(issue, before.need_by)
            ahead += before.nbytes
        issues.append(issue)
    return issues


def _latest_issues(residencies: Sequence[Residency], pace: Pace) -> list[int]:
    """Return the last tick at which each transfer may start: backwards over each lane from the last need-by.

    A gradient that leaves over the same lane takes its share of it.
    """
    issues = [residency.need_by for residency in residencies]
    sinks = list(pace.sinks)
    free: dict[str, float] = {}  # until when a lane may be taken by what is needed earlier
    phase = None
    for index in reversed(range(len(residencies))):
        residency = residencies[index]
        if residency.phase is not phase:
            phase, free = residency.phase, {}
        while sinks and sinks[-1].tick >= residency.need_by:
            sink = sinks.pop()
            for lane in free.keys() & set(sink.lanes):
                free[lane] -= _MARGIN * sink.seconds
        due = pace.reached_seconds[residency.need_by]
        for leg in reversed(pace.world.gather_legs(residency.source, residency.nbytes)):
            landed = min(due, *(free.get(lane, math.inf) for lane in leg.route.lanes))
            due = landed - _MARGIN * leg.seconds
            free.update(dict.fromkeys(leg.route.lanes, due))
        latest = bisect.bisect_right(pace.reached_seconds, due) - 1
        issues[index] = min(residency.need_by, max(0, latest))
    return issues


def plan_transfers(
    residencies: Sequence[Residency],
    *,
    prefetch_nbytes: int,
    pace: Pace | None = None,
) -> TransferPlan:
    """Return one transfer per residency with its issue tick and its arena offsets.

    A transfer is issued no earlier than the need-by tick of the earliest transfer from which at most ``prefetch_nbytes``
    lie ahead, itself included, in the same phase: nothing crosses from forward into backward, where other programs may
    run. With a ``pace``, it is issued as late as it still arrives in time.
    """
    issues = _earliest_issues(residencies, prefetch_nbytes)
    if pace is not None:
        issues = [max(pair) for pair in zip(issues, _latest_issues(residencies, pace), strict=True)]
    return bind_transfers(residencies, issues)


def bind_transfers(residencies: Sequence[Residency], issues: Sequence[int]) -> TransferPlan:
    """Return one transfer per residency, issued at the tick given for it, with its arena offsets."""
    layout: ArenaLayout = plan_arena(
        [
            Piece(nbytes=residency.nbytes, live=LiveRange(start=issue, end=residency.release))
            for residency, issue in zip(residencies, issues, strict=True)
        ]
    )
    transfers = []
    for residency, issue, offset in zip(residencies, issues, layout.offsets, strict=True):
        transfers.append(
            GatherTransfer(
                name=residency.name,
                phase=residency.phase,
                source=residency.source,
                parameters=residency.parameters,
                offsets=tuple(itertools.accumulate(residency.sizes[:-1], initial=offset)),
                offset=offset,
                nbytes=residency.nbytes,
                issue=issue,
                need_by=residency.need_by,
                release=residency.release,
            )
        )
    transfers.sort(key=lambda transfer: (transfer.issue, transfer.need_by, transfer.name))
    return TransferPlan(transfers=tuple(transfers), arena_nbytes=layout.nbytes)
