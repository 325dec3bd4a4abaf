"""The gathers of one graph for any homes. Results are cached, since many choices lead to the same gathers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from zinf_compile.hardware.world import World
from zinf_compile.ir.copies import Role
from zinf_compile.ir.facts import GraphFacts, ParameterFact
from zinf_compile.ir.glossary import StepTiming, Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.passes.planner.cost.costs import ops_seconds
from zinf_compile.passes.planner.placement.homes import Placed
from zinf_compile.passes.planner.schedule.prefetch import (
    MadeTransfers,
    Pace,
    Residency,
    ResidencyPlanner,
    SinkTime,
    Starts,
    TransferPlan,
    bind_transfers,
    plan_issues,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How gathers are planned: how far they run ahead, how much of a block moves at once, how early they are issued."""

    prefetch_nbytes: int
    group_nbytes: int
    held_past: int
    is_eager: bool
    by_expert: bool = False


class TransferPlanner:
    """Plans the gathers of one graph. Equal results are the same object; ``Placed`` are compared by identity."""

    def __init__(
        self, graph: GraphFacts, parameters: Sequence[ParameterFact], world: World, timing: StepTiming
    ) -> None:
        self._world = world
        self._timing = timing
        self._reached = (0.0, *accumulate(ops_seconds(graph.ops, world.hardware)))
        self._read = {use.parameter: use.dtype for use in graph.uses}
        self._gradients = sorted(graph.gradients, key=lambda gradient: (gradient.tick, gradient.parameter))
        self._sink_times: list[dict[tuple[Tier, bool], tuple[SinkTime, ...]]] = [{} for _ in self._gradients]
        self._residency_planner = ResidencyPlanner(graph, parameters, num_ranks=world.num_ranks)
        self._asked: dict[tuple[Placed, Manner], TransferPlan] = {}
        self._sources: dict[Placed, tuple[Tier, ...]] = {}  # of each parameter that is read
        self._transfers = MadeTransfers()
        self._paces: dict[Placed, Pace] = {}
        self._streamed: dict[tuple[tuple[Tier, ...], int, int, bool], tuple[Residency, ...]] = {}
        self._made: dict[tuple[tuple[int, ...], Starts], TransferPlan] = {}

    @property
    def busy_seconds(self) -> float:
        """Return the compute seconds of forward and backward."""
        return self._reached[-1]

    @property
    def has_routed(self) -> bool:
        """Return whether some parameter may be gathered by experts."""
        return self._residency_planner.has_routed

    def plan(self, placed: Placed, manner: Manner) -> TransferPlan:
        """Return the gathers that are needed with these homes."""
        if (placed, manner) not in self._asked:
            residencies = self._residencies(placed, manner)
            is_late = not manner.is_eager and manner.prefetch_nbytes > 0
            pace = self._pace(placed) if is_late else None
            starts = plan_issues(residencies, prefetch_nbytes=manner.prefetch_nbytes, pace=pace)
            # Equal residencies are the same object, which their planner keeps alive: so ids identify them.
            key = tuple(map(id, residencies)), starts
            if key not in self._made:
                self._made[key] = bind_transfers(residencies, *starts, made=self._transfers)
            self._asked[placed, manner] = self._made[key]
        return self._asked[placed, manner]

    def _residencies(self, placed: Placed, manner: Manner) -> tuple[Residency, ...]:
        placements, read = placed.placements, self._read
        if placed not in self._sources:
            self._sources[placed] = tuple(
                item.home_read(read[item.parameter]) for item in placements if item.parameter in read
            )
        key = self._sources[placed], manner.group_nbytes, manner.held_past, manner.by_expert
        if key not in self._streamed:
            self._streamed[key] = self._residency_planner.plan(
                placements,
                group_nbytes=manner.group_nbytes,
                held_past=manner.held_past,
                by_expert=manner.by_expert,
            )
        return self._streamed[key]

    def _pace(self, placed: Placed) -> Pace:
        if placed not in self._paces:
            homes = {placement.parameter: placement for placement in placed.placements}
            sinks = (self._times_of_sink(index, homes[item.parameter]) for index, item in enumerate(self._gradients))
            self._paces[placed] = Pace(
                reached_seconds=self._reached, sinks=tuple(chain.from_iterable(sinks)), world=self._world
            )
        return self._paces[placed]

    def _times_of_sink(self, index: int, placement: Placement) -> tuple[SinkTime, ...]:
        gradient, times = self._gradients[index], self._sink_times[index]
        home = sink_home(placement, self._timing)
        is_resident = placement.home_read(self._read.get(gradient.parameter, placement.compute_dtype)) is Tier.DEVICE
        if (home, is_resident) not in times:
            legs = self._world.gradient_legs(home, gradient.nbytes, is_resident=is_resident)
            times[home, is_resident] = tuple(
                SinkTime(tick=gradient.tick, seconds=leg.seconds, lanes=leg.route.lanes) for leg in legs
            )
        return times[home, is_resident]


def sink_home(placement: Placement, timing: StepTiming) -> Tier:
    """Return the destination of a gradient: its home, or the host if its update in backward reads it there."""
    home = placement.by_role[Role.GRADIENT][0].tier
    return Tier.HOST if timing is StepTiming.IN_BACKWARD and home is Tier.NVME else home
