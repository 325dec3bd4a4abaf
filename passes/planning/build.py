"""A choice made into a plan: which homes and transfers follow from it, and whether they fit. Decides nothing by itself.

What does not depend on choices (bound values, spans, activations) is worked out once for each graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zinf_compile.config import Config
from zinf_compile.facts import GraphFacts, ParameterFact
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning.activations import BoundValues, bind_values, count_outside, plan_activations
from zinf_compile.passes.planning.arena import ARENA_ALIGN
from zinf_compile.passes.planning.costs import ops_seconds, plan_spans
from zinf_compile.passes.planning.leaving import count_resting
from zinf_compile.passes.planning.op_kinds import keeps_kernels
from zinf_compile.passes.planning.optimizer_step import (
    device_chunk_elements,
    device_updates_nbytes,
    plan_device_share,
    plan_step,
)
from zinf_compile.passes.planning.placement import Placed, Placer, count_placed
from zinf_compile.passes.planning.prefetch import TransferPlan
from zinf_compile.passes.planning.prices import USUAL_PRICES, price_homes
from zinf_compile.passes.planning.recompute import find_recomputed
from zinf_compile.passes.planning.swaps import without_swapped
from zinf_compile.passes.planning.transfers import Manner, TransferPlanner, sink_home
from zinf_compile.plans import (
    BACKGROUND_NBYTES,
    KERNELS_PART,
    LEAVING_PART,
    OPEN_PART,
    OUTSIDE_PART,
    PLAN_VERSION,
    SWAPPED_PART,
    UPDATE_NBYTES,
    UPDATES_PART,
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

_TEMPORARIES = 4  # that an update of a small parameter makes, of its size; of larger ones, pieces are made to fit
_LEAST_ROOM = 62 * BACKGROUND_NBYTES  # from so much on, residents leave room for updates in the background


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
    kernel_cache_nbytes: int = (
        0  # that kernels of all shapes take which values decide, on the machine it is planned for
    )
    open_nbytes: int = 0  # that forwards of other calls hold on the device, whose backward has not run


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

    placed: Placed
    moved: TransferPlan


class Groundwork:
    """What all builders of one graph's plans work with, whatever leaves the device and whatever the budgets are."""

    def __init__(self, request: Request, graph: GraphFacts) -> None:
        self.world = World(hardware=request.hardware, num_ranks=request.num_ranks)
        self.unseen_placer = Placer(request.parameters, num_ranks=request.num_ranks)  # as before a graph is known
        self.placer = Placer(request.parameters, graph.uses, num_ranks=request.num_ranks)
        self.transfers = TransferPlanner(graph, request.parameters, self.world, request.config.step_timing)
        self.seconds_of_ops = tuple(ops_seconds(graph.ops, request.hardware))
        self.recomputed = find_recomputed(graph, request.hardware)


class PlanBuilder:
    """Plans of one graph with the same activations leaving the device, for any choice and device budget; each only once."""

    def __init__(
        self,
        request: Request,
        graph: GraphFacts,
        swaps: tuple[ActivationSwap, ...] = (),
        groundwork: Groundwork | None = None,
    ) -> None:
        groundwork = groundwork or Groundwork(request, graph)
        self._unseen_placer, self._placer = groundwork.unseen_placer, groundwork.placer
        self._transfer_planner = groundwork.transfers
        self._request = request
        self._graph = graph
        self._resting = count_resting(swaps)
        staying = without_swapped(graph, swaps) if swaps else graph
        self._activations = replace(plan_activations(staying), recomputed=groundwork.recomputed)
        self._spans = plan_spans(staying, request.hardware, groundwork.seconds_of_ops)
        self._read = read = {use.parameter: use.dtype for use in graph.uses}
        # What kernels take beside their outputs: a matrix product may repack its largest weight.
        self._workspace = max(
            (item.nbytes_read(read[item.name]) for item in request.parameters if item.name in read), default=0
        )
        self._outside = count_outside(staying, self._activations.peak_nbytes + self._workspace)
        self._device_share = plan_device_share(request.config, request.hardware, request.parameters)
        self._updates = _count_updates(request, self._device_share)
        self._leaving = _count_leaving(request, graph)
        self._kernels = request.kernel_cache_nbytes if any(map(keeps_kernels, graph.ops)) else 0
        self._read_nbytes = sum(
            item.nbytes_read(read.get(item.name, item.compute_dtype)) for item in request.parameters
        )
        self._shards = [shard_parameter(parameter, request.num_ranks) for parameter in request.parameters]
        self._bound = bind_values(staying, base=0, swaps=swaps)
        self._moved_bound: dict[int, BoundValues] = {}  # many choices have transfers of as many bytes
        self._seen: set[_Homes] = set()
        self._uses = tuple(sorted(graph.uses, key=lambda use: use.parameter))
        self._gradients = tuple(sorted(graph.gradients, key=lambda gradient: (gradient.tick, gradient.parameter)))
        self.floor_nbytes = (
            self._bound.nbytes
            + self._activations.peak_nbytes
            + self._workspace
            + self._outside
            + self._updates
            + self._leaving
            + self._kernels
            + request.open_nbytes
            + request.config.reserve_memory
        )

    @property
    def busy_seconds(self) -> float:
        """Return how long forward and backward compute."""
        return self._transfer_planner.busy_seconds

    @property
    def tiny_nbytes(self) -> int:
        """Return the bytes of parameters so small that a page of the arena for each would cost more than they do."""
        sizes = (parameter.compute_nbytes for parameter in self._request.parameters)
        return sum(size for size in sizes if size <= ARENA_ALIGN // 4)

    @property
    def all_resident_nbytes(self) -> int:
        """Return the device bytes with which every copy that is read is resident."""
        return self.floor_nbytes + self._read_nbytes

    def place_unseen(self, config: Config, resident_nbytes: int | None = None) -> Placed:
        """Return the homes of all parameters as they are chosen before a graph is known."""
        return self._unseen_placer.place(config, resident_nbytes=resident_nbytes)

    def least_nbytes(self, placed: Placed, look_ahead: LookAhead, *, is_eager: bool = True) -> int:
        """Return the device bytes that a plan with these homes takes; eager transfers take the most."""
        arena_nbytes = self._transfers(placed, Choice(look_ahead=look_ahead, is_eager=is_eager)).arena_nbytes
        return self.floor_nbytes + arena_nbytes + placed.device_nbytes

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
        placed = count_placed(placements)
        return self._build_if_it_fits(_Homes(placed=placed, moved=self._transfers(placed, choice)), choice)

    def build_moved(self, placements: tuple[Placement, ...], moved: TransferPlan, choice: Choice) -> Plan | None:
        """Return the plan with these homes and transfers, or None if it does not fit the device budget of the request."""
        return self._build_if_it_fits(_Homes(placed=count_placed(placements), moved=moved), choice)

    def _build_if_it_fits(self, homes: _Homes, choice: Choice) -> Plan | None:
        needed = self.floor_nbytes + homes.moved.arena_nbytes + homes.placed.device_nbytes
        return None if needed > self._request.config.device_memory else self._assemble(homes, choice)

    def _fill(self, choice: Choice, device_memory: int) -> _Homes | None:
        room = device_memory - self.floor_nbytes
        if room < 0:
            return None
        config = self._config(choice, device_memory)
        kept = min(BACKGROUND_NBYTES, max(0, room - _LEAST_ROOM) // 2)  # more memory leaves residents more at any size
        if config.is_apart:  # where updates run in host memory
            kept = 0
        if device_memory >= self.all_resident_nbytes:
            spare = max(0, device_memory - self.all_resident_nbytes - kept)
            everything = self._place(choice, config, resident_nbytes=room, spare_nbytes=spare)
            return _Homes(placed=everything, moved=self._transfers(everything, choice))
        placed = self._placer.place(config, resident_nbytes=choice.small_nbytes)
        moved = self._transfers(placed, choice)
        if moved.arena_nbytes + placed.device_nbytes > room:
            return None
        # What becomes resident is not transferred, so that the arena shrinks and leaves more room: once more round.
        for _ in range(2 if choice.is_filled else 0):
            left = max(0, room - moved.arena_nbytes - kept)
            resident = min(left, max(self._placer.small_nbytes, int(left * choice.resident_share)))
            more = self._place(choice, config, resident_nbytes=resident, spare_nbytes=left - resident)
            more_moved = self._transfers(more, choice)
            if more is placed or more_moved.arena_nbytes + more.device_nbytes > room:
                break
            placed, moved = more, more_moved
        return _Homes(placed=placed, moved=moved)

    def _config(self, choice: Choice, device_memory: int) -> Config:
        config = replace(self._request.config, device_memory=device_memory)
        return config if choice.uses_host else replace(config, host_memory=config.staging_memory)

    def _place(self, choice: Choice, config: Config, *, resident_nbytes: int, spare_nbytes: int) -> Placed:
        hardware, hidden = self._request.hardware, choice.are_transfers_hidden
        prices = USUAL_PRICES
        if hidden is not None:
            prices = price_homes(hardware, config.step_timing, are_transfers_hidden=hidden)
        return self._placer.place(config, resident_nbytes=resident_nbytes, spare_nbytes=spare_nbytes, prices=prices)

    def _transfers(self, placed: Placed, choice: Choice) -> TransferPlan:
        manner = Manner(
            prefetch_nbytes=choice.look_ahead.prefetch_nbytes,
            group_nbytes=choice.look_ahead.group_nbytes,
            held_past=choice.held_past,
            is_eager=choice.is_eager,
        )
        return self._transfer_planner.plan(placed, manner)

    def _bound_behind(self, nbytes: int) -> BoundValues:
        """Return the bound values behind the bytes that transfers use."""
        if nbytes not in self._moved_bound:
            self._moved_bound[nbytes] = self._bound.moved(nbytes)
        return self._moved_bound[nbytes]

    def _may_update_in_background(self, on_nvme: int) -> bool:
        is_trained = any(parameter.trainable for parameter in self._request.parameters)
        return is_trained and on_nvme > 0 and self._request.config.step_timing is not StepTiming.SYNCHRONOUS

    def _assemble(self, homes: _Homes, choice: Choice) -> Plan:
        request, graph, config = self._request, self._graph, self._request.config
        placements, moved = homes.placed.placements, homes.moved
        bound = self._bound_behind(moved.arena_nbytes)
        arena_nbytes = moved.arena_nbytes + bound.nbytes
        home_of = {placement.parameter: placement for placement in placements}
        staging = config.staging_memory
        on_nvme = _nbytes_on(placements, Tier.NVME)
        # What is in memory is updated in place; inside backward, from a copy of its gradient.
        uses_staging = (
            on_nvme + self._resting.nvme > 0 or config.step_timing is StepTiming.IN_BACKWARD or config.is_apart
        )
        parts = {
            Tier.DEVICE: (
                ("residents", homes.placed.device_nbytes),
                ("arena", arena_nbytes),
                ("activations", self._activations.peak_nbytes),
                (WORKSPACE_PART, self._workspace),
                *_part_if_any(OUTSIDE_PART, self._outside),
                *_part_if_any(UPDATES_PART, self._updates),
                *_part_if_any(LEAVING_PART, self._leaving),
                *_part_if_any(KERNELS_PART, self._kernels),
                ("reserve", config.reserve_memory),
                *_part_if_any(OPEN_PART, request.open_nbytes),
            ),
            Tier.HOST: (
                ("homes", _nbytes_on(placements, Tier.HOST)),
                ("staging", staging if uses_staging else 0),
                *_part_if_any(SWAPPED_PART, self._resting.host),
            ),
            Tier.NVME: (
                ("homes", on_nvme),
                ("padding", homes.placed.file_nbytes - on_nvme),
                *_part_if_any(SWAPPED_PART, self._resting.nvme),
            ),
        }
        spare = config.device_memory - sum(nbytes for _, nbytes in parts[Tier.DEVICE])
        is_held_here = not config.is_apart and self._may_update_in_background(on_nvme)
        if is_held_here and spare >= BACKGROUND_NBYTES:
            updates = (UPDATES_PART, self._updates + BACKGROUND_NBYTES)
            parts[Tier.DEVICE] = (*(part for part in parts[Tier.DEVICE] if part[0] != UPDATES_PART), updates)
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
                    destination=sink_home(home_of[gradient.parameter], config.step_timing),
                    nbytes=gradient.nbytes,
                )
                for gradient in self._gradients
            ),
            spans=self._spans,
            activations=self._activations,
            arena_nbytes=arena_nbytes,
            prefetch_nbytes=choice.look_ahead.prefetch_nbytes,
            step=plan_step(
                self._shards,
                placements,
                staging_nbytes=staging,
                timing=config.step_timing,
                device_share=self._device_share,
                device_chunk=device_chunk_elements(config, self._shards),
            ),
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


def _count_updates(request: Request, device_share: float) -> int:
    """Return what updates take on the device: inside of backward some temporary tensors of one, or of a piece of one.

    Where they run on a device with memory of its own, buffers for chunks as well.
    """
    if device_share:
        return device_updates_nbytes(request.config, request.parameters)
    if request.config.step_timing is not StepTiming.IN_BACKWARD or request.config.is_apart:
        return 0
    sizes = (parameter.master_nbytes for parameter in request.parameters if parameter.trainable)
    return min(UPDATE_NBYTES, _TEMPORARIES * max(sizes, default=0))


def _count_leaving(request: Request, graph: GraphFacts) -> int:
    """Return what gradients may hold of a device with streams until they have been copied: the largest, and one more."""
    if not request.config.is_apart:
        return 0
    return 2 * max((gradient.nbytes for gradient in graph.gradients), default=0)


def _part_if_any(part: str, nbytes: int) -> tuple[tuple[str, int], ...]:
    return ((part, nbytes),) if nbytes else ()
