"""A choice made into a plan: which homes and transfers follow from it, and whether they fit. Decides nothing by itself.

What does not depend on choices (bound values, spans, activations) is worked out once for each graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from zinf_compile.config import Config
from zinf_compile.facts import GradientFact, GraphFacts, ParameterFact
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning.activations import BoundValues, bind_values, plan_activations
from zinf_compile.passes.planning.arena import ARENA_ALIGN
from zinf_compile.passes.planning.costs import ops_seconds, plan_spans
from zinf_compile.passes.planning.leaving import count_resting
from zinf_compile.passes.planning.optimizer_step import plan_step
from zinf_compile.passes.planning.placement import Placer
from zinf_compile.passes.planning.prefetch import Pace, SinkTime, TransferPlan, plan_residencies, plan_transfers
from zinf_compile.passes.planning.prices import USUAL_PRICES, price_homes
from zinf_compile.passes.planning.swaps import without_swapped
from zinf_compile.plans import (
    PLAN_VERSION,
    SWAPPED_PART,
    WORKSPACE_PART,
    ActivationSwap,
    GradientSink,
    Placement,
    Plan,
    TierPlan,
)
from zinf_compile.sizes import Size
from zinf_compile.terms import StepTiming, Tier
from zinf_compile.world import World, shard_parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that a plan is made from. ``candidates`` are the same graph under different activation policies.

    Where activations leave the device, what they take of the other tiers is not in ``config`` any more.
    """

    name: str
    candidates: tuple[GraphFacts, ...]
    parameters: tuple[ParameterFact, ...]
    config: Config
    hardware: Hardware
    captured: tuple[GraphFacts[Size], ...] = ()  # the candidates in symbols, to ask about other sizes
    num_ranks: int = 1  # that train the model together, each with its shard of what the parameters say in full
    placements: tuple[Placement, ...] | None = None  # where other plans of the model have put its parameters already


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAhead:
    """How far transfers run ahead of compute, and how much of a block moves at once."""

    prefetch_nbytes: int
    group_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is left to decide when a graph and the bytes of the device are given."""

    look_ahead: LookAhead
    held_past: int = 1  # a copy that is used again in the same phase stays while so many others begin
    is_eager: bool = False  # transfers start as early as the look-ahead allows, not as late as they arrive in time
    resident_share: float = 1.0  # of the room, all small ones first; in the rest stays what the host has no room for
    # By compute, so that the host is rather for what the step moves; None: its room is given away at the usual prices.
    are_transfers_hidden: bool | None = None
    uses_host: bool = True  # False: what is not on the device is on nvme
    is_filled: bool = True  # False: nothing is resident but small parameters, though there may be room
    small_nbytes: int | None = None  # for small parameters, before all else; None: an eighth of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class _Homes:
    """Placements that fit, with the transfers that they ask for."""

    placements: tuple[Placement, ...]
    moved: TransferPlan


class PlanBuilder:
    """Plans of one graph with the same activations leaving the device, for any choice and device budget; each only once."""

    def __init__(self, request: Request, graph: GraphFacts, swaps: tuple[ActivationSwap, ...] = ()) -> None:
        self._request = request
        self._graph = graph
        self._resting = count_resting(swaps)
        staying = without_swapped(graph, swaps) if swaps else graph
        self._activations = plan_activations(staying)
        self._spans = plan_spans(staying, request.hardware)
        self._reached = (0.0, *accumulate(ops_seconds(graph.ops, request.hardware)))
        self._read = read = {use.parameter: use.dtype for use in graph.uses}
        # What kernels take beside their outputs: a matrix product may repack its largest weight.
        self._workspace = max(
            (item.nbytes_read(read[item.name]) for item in request.parameters if item.name in read), default=0
        )
        self._read_nbytes = sum(
            item.nbytes_read(read.get(item.name, item.compute_dtype)) for item in request.parameters
        )
        self._placer = Placer(request.parameters, graph.uses, num_ranks=request.num_ranks)
        self._shards = [shard_parameter(parameter, request.num_ranks) for parameter in request.parameters]
        self._world = World(hardware=request.hardware, num_ranks=request.num_ranks)
        self._bound = bind_values(staying, base=0, swaps=swaps)
        self._moved_bound: dict[int, BoundValues] = {}  # many choices have transfers of as many bytes
        self._seen: set[_Homes] = set()
        self._moved: dict[
            tuple[tuple[Placement, ...], LookAhead, int, bool], TransferPlan
        ] = {}  # most are asked for again
        self._sink_times: dict[tuple[GradientFact, Tier, bool], tuple[SinkTime, ...]] = {}
        self._uses = tuple(sorted(graph.uses, key=lambda use: use.parameter))
        self._gradients = tuple(sorted(graph.gradients, key=lambda gradient: (gradient.tick, gradient.parameter)))
        self.floor_nbytes = (
            self._bound.nbytes + self._activations.peak_nbytes + self._workspace + request.config.reserve_memory
        )

    @property
    def busy_seconds(self) -> float:
        """Return how long forward and backward compute."""
        return self._reached[-1]

    @property
    def tiny_nbytes(self) -> int:
        """Return the bytes of parameters so small that a page of the arena for each would cost more than they do."""
        sizes = (parameter.compute_nbytes for parameter in self._request.parameters)
        return sum(size for size in sizes if size <= ARENA_ALIGN // 4)

    @property
    def all_resident_nbytes(self) -> int:
        """Return the device bytes with which every copy that is read is resident."""
        return self.floor_nbytes + self._read_nbytes

    def least_nbytes(self, placements: tuple[Placement, ...], look_ahead: LookAhead, *, is_eager: bool = True) -> int:
        """Return the device bytes that a plan with these homes takes; eager transfers take the most."""
        arena = self._transfers(placements, Choice(look_ahead=look_ahead, is_eager=is_eager)).arena_nbytes
        return self.floor_nbytes + arena + _nbytes_on(placements, Tier.DEVICE)

    def build(self, choice: Choice, device_memory: int) -> Plan | None:
        """Return the plan of a choice with as much resident as fits; None if it does not fit, or was returned before.

        Raises CapacityError when the other tiers cannot hold the rest.
        """
        homes = self._fill(choice, device_memory)
        if homes is None or homes in self._seen:
            return None
        plan = self._assemble(homes, choice)
        self._seen.add(homes)
        return plan

    def build_at(self, placements: tuple[Placement, ...], choice: Choice) -> Plan | None:
        """Return the plan with these homes, or None if it does not fit the device budget of the request."""
        return self.build_moved(placements, self._transfers(placements, choice), choice)

    def build_moved(self, placements: tuple[Placement, ...], moved: TransferPlan, choice: Choice) -> Plan | None:
        """Return the plan with these homes and transfers, or None if it does not fit the device budget of the request."""
        needed = self.floor_nbytes + moved.arena_nbytes + _nbytes_on(placements, Tier.DEVICE)
        if needed > self._request.config.device_memory:
            return None
        return self._assemble(_Homes(placements=placements, moved=moved), choice)

    def _fill(self, choice: Choice, device_memory: int) -> _Homes | None:
        room = device_memory - self.floor_nbytes
        if room < 0:
            return None
        config = self._config(choice, device_memory)
        if device_memory >= self.all_resident_nbytes:
            spare = device_memory - self.all_resident_nbytes
            everything = self._place(choice, config, resident_nbytes=room, spare_nbytes=spare)
            return _Homes(placements=everything, moved=self._transfers(everything, choice))
        placements = self._placer.place(config, resident_nbytes=choice.small_nbytes)
        moved = self._transfers(placements, choice)
        if moved.arena_nbytes + _nbytes_on(placements, Tier.DEVICE) > room:
            return None
        # What becomes resident is not transferred, so that the arena shrinks and leaves more room: once more round.
        for _ in range(2 if choice.is_filled else 0):
            left = room - moved.arena_nbytes
            resident = min(left, max(self._placer.small_nbytes, int(left * choice.resident_share)))
            more = self._place(choice, config, resident_nbytes=resident, spare_nbytes=left - resident)
            more_moved = self._transfers(more, choice)
            if more == placements or more_moved.arena_nbytes + _nbytes_on(more, Tier.DEVICE) > room:
                break
            placements, moved = more, more_moved
        return _Homes(placements=placements, moved=moved)

    def _config(self, choice: Choice, device_memory: int) -> Config:
        config = replace(self._request.config, device_memory=device_memory)
        return config if choice.uses_host else replace(config, host_memory=config.staging_memory)

    def _place(
        self, choice: Choice, config: Config, *, resident_nbytes: int, spare_nbytes: int
    ) -> tuple[Placement, ...]:
        hardware, hidden = self._request.hardware, choice.are_transfers_hidden
        prices = USUAL_PRICES
        if hidden is not None:
            prices = price_homes(hardware, config.step_timing, are_transfers_hidden=hidden)
        return self._placer.place(
            config,
            resident_nbytes=resident_nbytes,
            spare_nbytes=spare_nbytes,
            prices=prices,
        )

    def _transfers(self, placements: tuple[Placement, ...], choice: Choice) -> TransferPlan:
        key = placements, choice.look_ahead, choice.held_past, choice.is_eager
        if key not in self._moved:
            self._moved[key] = self._plan_transfers(placements, choice)
        return self._moved[key]

    def _plan_transfers(self, placements: Sequence[Placement], choice: Choice) -> TransferPlan:
        look_ahead = choice.look_ahead
        residencies = plan_residencies(
            self._graph,
            self._request.parameters,
            placements,
            group_nbytes=look_ahead.group_nbytes,
            held_past=choice.held_past,
            num_ranks=self._request.num_ranks,
        )
        return plan_transfers(
            residencies,
            prefetch_nbytes=look_ahead.prefetch_nbytes,
            pace=None if choice.is_eager or not look_ahead.prefetch_nbytes else self._pace(placements),
        )

    def _bound_behind(self, nbytes: int) -> BoundValues:
        """Return the bound values behind the bytes that transfers use."""
        if nbytes not in self._moved_bound:
            self._moved_bound[nbytes] = self._bound.moved(nbytes)
        return self._moved_bound[nbytes]

    def _pace(self, placements: Sequence[Placement]) -> Pace:
        homes = {placement.parameter: placement for placement in placements}
        timing = self._request.config.step_timing
        sinks = (self._times_of_sink(gradient, homes[gradient.parameter], timing) for gradient in self._gradients)
        return Pace(
            reached_seconds=self._reached,
            sinks=tuple(chain.from_iterable(sinks)),
            world=self._world,
        )

    def _times_of_sink(self, gradient: GradientFact, placement: Placement, timing: StepTiming) -> tuple[SinkTime, ...]:
        home = _sink_home(placement, timing)
        is_resident = placement.home_read(self._read.get(gradient.parameter, placement.compute_dtype)) is Tier.DEVICE
        key = gradient, home, is_resident
        if key not in self._sink_times:
            legs = self._world.gradient_legs(home, gradient.nbytes, is_resident=is_resident)
            self._sink_times[key] = tuple(
                SinkTime(tick=gradient.tick, seconds=leg.seconds, lanes=leg.route.lanes) for leg in legs
            )
        return self._sink_times[key]

    def _assemble(self, homes: _Homes, choice: Choice) -> Plan:
        request, graph, config = self._request, self._graph, self._request.config
        placements, moved = homes.placements, homes.moved
        bound = self._bound_behind(moved.arena_nbytes)
        arena_nbytes = moved.arena_nbytes + bound.nbytes
        home_of = {placement.parameter: placement for placement in placements}
        staging = config.staging_memory
        on_nvme = _nbytes_on(placements, Tier.NVME)
        # What is in memory is updated in place; inside backward, from a copy of its gradient.
        uses_staging = on_nvme + self._resting.nvme > 0 or config.step_timing is StepTiming.IN_BACKWARD
        parts = {
            Tier.DEVICE: (
                ("residents", _nbytes_on(placements, Tier.DEVICE)),
                ("arena", arena_nbytes),
                ("activations", self._activations.peak_nbytes),
                (WORKSPACE_PART, self._workspace),
                ("reserve", config.reserve_memory),
            ),
            Tier.HOST: (
                ("homes", _nbytes_on(placements, Tier.HOST)),
                ("staging", staging if uses_staging else 0),
                *_resting_part(self._resting.host),
            ),
            Tier.NVME: (
                ("homes", on_nvme),
                ("padding", sum(item.file_nbytes for item in placements) - on_nvme),
                *_resting_part(self._resting.nvme),
            ),
        }
        whole = self._resting.returned_to(config)
        capacity = {Tier.DEVICE: whole.device_memory, Tier.HOST: whole.host_memory, Tier.NVME: whole.nvme_memory}
        return Plan(
            version=PLAN_VERSION,
            name=request.name,
            compute_dtype=config.compute_dtype,
            hardware=request.hardware,
            num_forward_ticks=graph.num_forward_ticks,
            num_ticks=graph.num_ticks,
            placements=placements,
            uses=self._uses,
            transfers=moved.transfers,
            bound=bound.values,
            swaps=bound.swaps,
            sinks=tuple(
                GradientSink(
                    parameter=gradient.parameter,
                    tick=gradient.tick,
                    destination=_sink_home(home_of[gradient.parameter], config.step_timing),
                    nbytes=gradient.nbytes,
                )
                for gradient in self._gradients
            ),
            spans=self._spans,
            activations=self._activations,
            arena_nbytes=arena_nbytes,
            prefetch_nbytes=choice.look_ahead.prefetch_nbytes,
            step=plan_step(self._shards, placements, staging_nbytes=staging, timing=config.step_timing),
            tiers=tuple(
                TierPlan(
                    tier=tier,
                    capacity=capacity[tier],
                    predicted_peak=sum(nbytes for _, nbytes in parts[tier]),
                    parts=parts[tier],
                )
                for tier in Tier
            ),
            num_ranks=request.num_ranks,
        )


def _nbytes_on(placements: Sequence[Placement], tier: Tier) -> int:
    return sum(placement.nbytes_on(tier) for placement in placements)


def _resting_part(nbytes: int) -> tuple[tuple[str, int], ...]:
    return ((SWAPPED_PART, nbytes),) if nbytes else ()


def _sink_home(placement: Placement, timing: StepTiming) -> Tier:
    is_taken = timing is StepTiming.IN_BACKWARD and placement.gradient is Tier.NVME
    return Tier.HOST if is_taken else placement.gradient
