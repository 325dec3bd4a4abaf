"""Gathers: which parameters move together, when each gather starts, and when its arena bytes are free again.

Parameters of one block on the same tier move together, up to ``group_nbytes``. A gather is issued no more than
``prefetch_nbytes`` of gathers ahead of compute, and otherwise as late as it still arrives in time.
"""

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zinf_compile.hardware.world import World
from zinf_compile.ir.copies import NOT_DECODED, Decoded, Role
from zinf_compile.ir.facts import GraphFacts, ParameterFact, Routing, UseFact
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.ir.slices import shard_size
from zinf_compile.ir.transfers import Moved, Transfer
from zinf_compile.passes.planner.memory.arena import ArenaLayout, align, plan_arena

# Gathers are issued early enough for a disk this many times slower than measured: a shared disk is at times half as fast.
_MARGIN = 2.0


# Not slotted: its bytes are cached.
@dataclass(frozen=True, kw_only=True)
class Residency:
    """A stretch of ticks in which some parameters are needed on the device."""

    name: str
    phase: Phase
    source: Tier
    parameters: tuple[str, ...]
    sizes: tuple[int, ...]  # of each parameter, rounded up to the arena's alignment
    need_by: int
    release: int
    num_ranks: int = 1
    routing: Routing | None = None  # of experts, of which only those that have rows are gathered
    decoded: Decoded = NOT_DECODED  # of the full values; nothing of experts, which are stored exactly
    decoding_nbytes: int = 0  # of the arena, in which a device with memory of its own decodes

    @cached_property
    def moved_nbytes(self) -> int:
        """Return the bytes that are expected to move: of what is decoded on arrival, those that it takes at home."""
        asked = self.nbytes if self.routing is None else math.ceil(self.routing.share * self.nbytes)
        return asked - self.decoded.saved_nbytes

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of the full values, rounded up."""
        return sum(self.sizes)

    @cached_property
    def scratch_nbytes(self) -> int:
        """Return the bytes behind the full values: of one of several ranks its shards, until they are gathered."""
        shards = 0 if self.num_ranks == 1 else sum(align(shard_size(size, self.num_ranks)) for size in self.sizes)
        return shards + self.decoding_nbytes

    @cached_property
    def arena_nbytes(self) -> int:
        """Return the bytes of the arena that it takes: full values, and what is needed behind them."""
        return self.nbytes + self.scratch_nbytes


# Not slotted, and compared by identity: most callers need only the byte count.
@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """One transfer for each residency, issued at its tick, with its place in the arena that holds them."""

    residencies: Sequence[Residency]
    issues: Sequence[int]
    launches: Sequence[int]
    layout: ArenaLayout
    # Transfers that were made for other plans with some of the same residencies: most of two plans are equal.
    made: "MadeTransfers"

    @property
    def arena_nbytes(self) -> int:
        """Return the bytes of the arena that holds the transfers."""
        return self.layout.nbytes

    @cached_property
    def gathers(self) -> tuple[Transfer, ...]:
        """Return the transfers with their offsets, by issue tick."""
        gathers = map(self.made.transfer, self.residencies, self.issues, self.launches, self.layout.offsets)
        return tuple(sorted(gathers, key=lambda gather: (gather.issue, gather.need_by, gather.name)))


class MadeTransfers:
    """The transfers of some residencies. Equal ones are the same object."""

    def __init__(self) -> None:
        # By residency, which is kept with them, issue, launch and offset.
        self._made: dict[tuple[int, int, int, int], tuple[Residency, Transfer]] = {}

    def transfer(self, residency: Residency, issue: int, launch: int, offset: int) -> Transfer:
        """Return the transfer of a residency, issued and launched at some ticks, with its offset in the arena."""
        key = id(residency), issue, launch, offset
        found = self._made.get(key)
        if found is None:
            self._made[key] = found = residency, _make_transfer(residency, issue, launch, offset)
        return found[1]


def _make_transfer(residency: Residency, issue: int, launch: int, offset: int) -> Transfer:
    return Transfer(
        what=Moved.PARAMETERS,
        name=residency.name,
        parameters=residency.parameters,
        source=residency.source,
        destination=Tier.DEVICE,
        offsets=tuple(itertools.accumulate(residency.sizes[:-1], initial=offset)),
        nbytes=residency.nbytes,
        decoded=residency.decoded,
        scratch_nbytes=residency.scratch_nbytes,
        issue=issue,
        launch=launch if residency.num_ranks > 1 else None,
        need_by=residency.need_by,
        release=residency.release,
        ends=None if residency.routing is None else residency.routing.ends,
        share=1.0 if residency.routing is None else residency.routing.share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTime:
    """How long a gradient that is complete after a tick occupies the lanes of one leg on its way home."""

    tick: int
    seconds: float
    lanes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When compute reaches each tick if it never waits, and when gradients occupy the lanes, by tick."""

    reached_seconds: tuple[float, ...]
    sinks: tuple[SinkTime, ...]
    world: World


class _Used(NamedTuple):
    """A parameter that a graph reads, and when it does."""

    name: str
    block: str
    dtype: str
    ticks: tuple[tuple[Phase, tuple[int, ...]], ...]  # of each phase that reads it
    routings: tuple[tuple[Phase, Routing], ...] = ()  # of each phase that reads only experts that have rows

    def routing_in(self, phase: Phase) -> Routing | None:
        """Return by what a phase picks the experts that it reads; None if it reads all of the parameter."""
        return dict(self.routings).get(phase)


class _Streamed(NamedTuple):
    """A parameter that is gathered from its home, and the arena bytes it takes."""

    used: _Used
    source: Tier
    nbytes: int
    decoded: Decoded
    decoding_nbytes: int


_Key = tuple[tuple[str, ...], Tier, tuple[int, ...], int, int, Routing | None]


class ResidencyPlanner:
    """Residencies of one graph, for any homes. Equal ones are the same object."""

    def __init__(self, graph: GraphFacts, parameters: Sequence[ParameterFact], *, num_ranks: int = 1) -> None:
        uses = {use.parameter: use for use in graph.uses}
        self._num_ranks = num_ranks
        self._is_unified = all(parameter.unified for parameter in parameters)
        routings: dict[str, list[tuple[Phase, Routing]]] = defaultdict(list)
        for routed in graph.routed if num_ranks == 1 else ():  # every rank has rows of other experts
            if routed.routing.leaves_out_enough:
                routings[routed.parameter].append((graph.schedule.phase_of(routed.routing.ends), routed.routing))
        self._used = [
            _Used(
                parameter.name,
                parameter.block,
                uses[parameter.name].dtype,
                _by_phase(graph, uses[parameter.name]),
                tuple(routings[parameter.name]),
            )
            for parameter in parameters
            if parameter.name in uses
        ]
        self._made: dict[_Key, Residency] = {}

    @property
    def has_routed(self) -> bool:
        """Return whether some parameter may be gathered by experts."""
        return any(used.routings for used in self._used)

    def plan(
        self, placements: Sequence[Placement], *, group_nbytes: int, held_past: int = 1, by_expert: bool = False
    ) -> tuple[Residency, ...]:
        """Return when which parameters must be on the device, by need-by tick. Resident parameters do not appear.

        With ``by_expert`` only the experts that have rows are gathered, where a phase reads no others.

        Uses of a group in one phase share a residency if no more than ``held_past`` other groups are needed in between:
        keeping the group that long costs less than gathering it again.
        """
        streamed = self._stream(placements)
        together = None if by_expert else _group(streamed, group_nbytes, None)
        stretches = [
            (group, phase, ticks)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for group in (_group(streamed, group_nbytes, phase) if together is None else together)
            if (ticks := _ticks_in(group, phase))
        ]
        needs = sorted((tick, index) for index, (_, _, ticks) in enumerate(stretches) for tick in ticks)
        residencies = []
        for group, phase, ticks in stretches:
            for run in _split(ticks, needs, held_past):
                used = group
                if len(group) > 1:
                    used = [
                        item for item in group if any(run[0] <= tick <= run[-1] for tick in _ticks_in([item], phase))
                    ]
                residencies.append(self._residency(used, phase, run[0], run[-1] + 1, by_expert=by_expert))
        return tuple(sorted(residencies, key=lambda item: (item.need_by, item.release, item.name)))

    def _stream(self, placements: Sequence[Placement]) -> list[_Streamed]:
        homes = {placement.parameter: placement for placement in placements}
        streamed = []
        for used in self._used:
            placement = homes.get(used.name)
            source = Tier.DEVICE if placement is None else placement.home_read(used.dtype)
            if placement is not None and source is not Tier.DEVICE:
                nbytes = align(self._num_ranks * placement.nbytes_read(used.dtype))
                decoded = placement.decoded(used.dtype).of_ranks(self._num_ranks)
                decoding = align(_decoding_nbytes(placement)) if decoded.nbytes and not self._is_unified else 0
                streamed.append(_Streamed(used, source, nbytes, decoded, decoding))
        return streamed

    def _residency(
        self, group: Sequence[_Streamed], phase: Phase, need_by: int, release: int, *, by_expert: bool
    ) -> Residency:
        names, sizes = tuple(item.used.name for item in group), tuple(item.nbytes for item in group)
        routing = group[0].used.routing_in(phase) if by_expert else None
        key = names, group[0].source, sizes, need_by, release, routing
        if key not in self._made:
            self._made[key] = Residency(
                name=names[0] if len(group) == 1 else group[0].used.block,
                phase=phase,
                source=group[0].source,
                parameters=names,
                sizes=sizes,
                need_by=need_by,
                release=release,
                num_ranks=self._num_ranks,
                routing=routing,
                decoded=sum((item.decoded for item in group), start=NOT_DECODED),
                decoding_nbytes=max(item.decoding_nbytes for item in group),  # one after another
            )
        return self._made[key]


def _decoding_nbytes(placement: Placement) -> int:
    encoding = placement.by_role[Role.COMPUTE][0].encoding
    return 0 if encoding.rows is None else encoding.rows.scratch_nbytes(encoding.itemsize)


def _by_phase(graph: GraphFacts, use: UseFact) -> tuple[tuple[Phase, tuple[int, ...]], ...]:
    return tuple(
        (phase, tuple(ticks)) for phase, ticks in itertools.groupby(sorted(use.ticks), graph.schedule.phase_of)
    )


def _ticks_in(group: Sequence[_Streamed], phase: Phase) -> Sequence[int]:
    """Return the ticks of a phase at which some parameter of a group is read, sorted."""
    found = [ticks for item in group for each, ticks in item.used.ticks if each is phase]
    return found[0] if len(found) == 1 else sorted(set(itertools.chain.from_iterable(found)))


def _group(streamed: Sequence[_Streamed], group_nbytes: int, phase: Phase | None) -> list[list[_Streamed]]:
    """Return what moves together, up to so many bytes: in a ``phase`` that gathers by experts, what has the same experts."""

    def routing(item: _Streamed) -> Routing | None:
        return None if phase is None else item.used.routing_in(phase)

    groups: list[list[_Streamed]] = []
    nbytes = 0  # of the last group
    for item in streamed:
        last = groups[-1][-1] if groups else None
        nbytes += item.nbytes
        if (
            last is not None
            and last.used.block == item.used.block
            and last.source is item.source
            and routing(last) == routing(item)
            and nbytes <= group_nbytes
        ):
            groups[-1].append(item)
        else:
            groups.append([item])
            nbytes = item.nbytes
    return groups


def _split(ticks: Sequence[int], needs: Sequence[tuple[int, int]], held_past: int) -> list[list[int]]:
    """Return the ticks in runs, cut where more than ``held_past`` other groups are needed in between.

    ``needs`` are pairs of a tick and the index of the group that is needed there, sorted.
    """
    runs = [[ticks[0]]]
    for before, after in itertools.pairwise(ticks):
        others: set[int] = set()
        for position in range(bisect.bisect_left(needs, (before + 1, 0)), len(needs)):
            tick, who = needs[position]
            if tick >= after or len(others) > held_past:
                break
            others.add(who)
        if len(others) > held_past:
            runs.append([])
        runs[-1].append(after)
    return runs


def _earliest_issues(residencies: Sequence[Residency], prefetch_nbytes: int) -> list[int]:
    issues: list[int] = []
    sizes = [residency.arena_nbytes for residency in residencies]
    first, behind = 0, 0  # the residency that is waited for, and the bytes of those from there to this one
    phase = residencies[0].phase if residencies else None
    for index, residency in enumerate(residencies):
        if residency.phase is not phase:
            first, behind, phase = index, 0, residency.phase
        elif index:
            behind += sizes[index]
        while first < index and behind > prefetch_nbytes:
            first += 1
            behind -= sizes[first]
        issues.append(residencies[first].need_by)
    return issues


def _latest_issues(residencies: Sequence[Residency], pace: Pace) -> tuple[list[int], list[int]]:
    """Return the last ticks at which each gather may be issued and launched, from the last need-by backwards over lanes.

    A gradient that uses the same lane makes the gathers before it earlier.
    """
    issues = [residency.need_by for residency in residencies]
    launches = issues.copy()
    reached, sinks, gather_legs = pace.reached_seconds, pace.sinks, pace.world.gather_legs
    num_sinks = len(sinks)  # gradients that are complete before the residencies visited so far
    free: dict[str, float] = {}  # when the lane has to be free for transfers that are needed later
    phase = None
    for index in reversed(range(len(residencies))):
        residency = residencies[index]
        if residency.phase is not phase:
            phase, free = residency.phase, {}
        while num_sinks and sinks[num_sinks - 1].tick >= residency.need_by:
            num_sinks -= 1
            for lane in sinks[num_sinks].lanes:
                if lane in free:
                    free[lane] -= _MARGIN * sinks[num_sinks].seconds
        need_by = residency.need_by
        due = reached[need_by]
        legs = gather_legs(residency.source, residency.moved_nbytes, residency.decoded)
        for leg in reversed(legs):
            lanes = leg.route.lanes
            for lane in lanes:
                if lane in free and free[lane] < due:
                    due = free[lane]
            due -= _MARGIN * leg.seconds
            for lane in lanes:
                free[lane] = due
            ticks = issues if leg is legs[0] else launches
            # It is not due behind its need-by tick.
            ticks[index] = min(need_by, max(0, bisect.bisect_right(reached, due, 0, need_by + 1) - 1))
    return issues, launches


def _arrival(residency: Residency, issue: int, pace: Pace) -> int:
    """Return the tick nearest to the arrival of a gather's shards, if compute never waits and their lane is free."""
    shards = pace.world.gather_legs(residency.source, residency.moved_nbytes, residency.decoded)[0]
    reached, arrival = pace.reached_seconds, pace.reached_seconds[issue] + shards.seconds
    tick = bisect.bisect_left(reached, arrival, lo=issue)
    if tick > issue and (tick == len(reached) or arrival - reached[tick - 1] < reached[tick] - arrival):
        return tick - 1
    return tick


def plan_transfers(
    residencies: Sequence[Residency],
    *,
    prefetch_nbytes: int,
    pace: Pace | None = None,
) -> TransferPlan:
    """Return one gather per residency with its issue tick and its arena offsets.

    A gather is issued at the need-by tick of an earlier gather of its phase, or at its own: at the earliest from which on
    at most ``prefetch_nbytes`` are still needed, itself included. Nothing crosses from forward into backward, since other
    programs may run in between. With a ``pace``, it is issued as late as it still arrives in time.
    """
    return bind_transfers(residencies, *plan_issues(residencies, prefetch_nbytes=prefetch_nbytes, pace=pace))


class Starts(NamedTuple):
    """The ticks at which gathers are issued, and at which ranks launch their all-gathers."""

    issues: tuple[int, ...]
    launches: tuple[int, ...]


def plan_issues(residencies: Sequence[Residency], *, prefetch_nbytes: int, pace: Pace | None = None) -> Starts:
    """Return the issue and launch ticks of ``plan_transfers``."""
    issues = _earliest_issues(residencies, prefetch_nbytes)
    for index, residency in enumerate(residencies):
        if residency.routing is not None:  # not before it is known which experts have rows
            issues[index] = max(issues[index], residency.routing.ends + 1)
    # Without a pace an all-gather starts when compute has waited for the one before, beside what it computes next.
    launches = [residency.need_by for residency in residencies]
    for index, (before, residency) in enumerate(itertools.pairwise(residencies), start=1):
        if before.phase is residency.phase:
            launches[index] = before.need_by
    if pace is not None:
        latest, launches = _latest_issues(residencies, pace)
        issues = list(map(max, issues, latest))
        arrivals = (_arrival(residency, issue, pace) for residency, issue in zip(residencies, issues, strict=True))
        launches = list(map(max, arrivals, launches))  # a launch waits for its shards
    in_order = itertools.accumulate(launches, max)  # in which they are needed
    need_by = (residency.need_by for residency in residencies)
    return Starts(tuple(issues), tuple(map(min, need_by, map(max, issues, in_order))))


def bind_transfers(
    residencies: Sequence[Residency],
    issues: Sequence[int],
    launches: Sequence[int] | None = None,
    *,
    made: MadeTransfers | None = None,
) -> TransferPlan:
    """Return one gather per residency, issued and launched at the ticks given for it, with its arena offsets.

    By default an all-gather is launched where its value is needed. ``made`` has transfers of other plans.
    """
    launches = [residency.need_by for residency in residencies] if launches is None else launches
    layout = plan_arena(
        [residency.arena_nbytes for residency in residencies],
        starts=issues,
        ends=[residency.release for residency in residencies],
    )
    return TransferPlan(
        residencies=residencies, issues=issues, launches=launches, layout=layout, made=made or MadeTransfers()
    )
