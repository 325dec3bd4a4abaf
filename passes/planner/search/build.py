"""Builds the plan of a choice: the homes and transfers that follow from it, if they fit. Makes no choices itself.

What does not depend on the choice (bound values, spans, activations) is computed once for each graph.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zinf_compile.hardware.world import World
from zinf_compile.ir.config import Config
from zinf_compile.ir.facts import GradientFact, GraphFacts, ParameterFact
from zinf_compile.ir.glossary import StepTiming, Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import (
    BACKGROUND_NBYTES,
    PLAN_VERSION,
    REDUCED_NBYTES,
    UPDATE_NBYTES,
    ActivationPlan,
    ComputeSpan,
    Placement,
    Plan,
    TierPart,
    TierPlan,
)
from zinf_compile.ir.sizes import Size
from zinf_compile.ir.transfers import Moved, Transfer, order_transfers
from zinf_compile.passes.planner.cost.costs import ops_seconds
from zinf_compile.passes.planner.cost.op_kinds import keeps_kernels
from zinf_compile.passes.planner.memory.activations import BoundValues, bind_values, count_outside, plan_activations
from zinf_compile.passes.planner.memory.arena import ARENA_ALIGN
from zinf_compile.passes.planner.memory.recompute import find_recomputed
from zinf_compile.passes.planner.optimizer.optimizer_step import (
    device_chunk_elements,
    device_updates_nbytes,
    plan_device_share,
    plan_step,
)
from zinf_compile.passes.planner.placement.homes import Placed, Placer, count_placed
from zinf_compile.passes.planner.placement.prices import USUAL_PRICES, price_homes
from zinf_compile.passes.planner.schedule.leaving import count_resting
from zinf_compile.passes.planner.schedule.prefetch import TransferPlan
from zinf_compile.passes.planner.schedule.spans import plan_spans
from zinf_compile.passes.planner.schedule.swaps import without_swapped
from zinf_compile.passes.planner.schedule.transfers import Manner, TransferPlanner, sink_home

_TEMPORARIES = 4  # the size of the parameter, in an update of a small one; larger ones are updated in pieces
_LEAST_ROOM = 62 * BACKGROUND_NBYTES  # with at least this much room, residents leave some for updates in the background


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that a plan is made from. ``candidates`` are the same graph under different activation policies.

    If activations are offloaded, the budgets in ``config`` no longer include the bytes that they take on other tiers.
    """

    name: str
    candidates: tuple[GraphFacts, ...]
    parameters: tuple[ParameterFact, ...]
    config: Config
    hardware: Hardware
    captured: tuple[GraphFacts[Size], ...] = ()  # the candidates with symbolic sizes, for what-if questions
    num_ranks: int = 1  # each has its shard of the parameters, which are given in full
    num_replicas: int = 1  # of so many ranks, which reduce gradients together
    placements: tuple[Placement, ...] | None = None  # fixed by other plans of the model
    # Size of the kernel caches on the planned machine, which fill up if the shapes of kernels depend on values.
    kernel_cache_nbytes: int = 0
    open_nbytes: int = 0  # that open forwards of other calls hold on the device
    # Other forwards that hold what this one saves, since backwards of a pipeline begin late; beside ``open_nbytes``.
    num_open: int = 0
    waits_for_activations: bool = False  # whether they may leave one at a time, while compute waits
    num_tensor_ranks: int = 1  # of each of ``num_ranks``, which has its part of the parameters that are given


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAhead:
    """How far transfers run ahead of compute, and how many bytes of a block move as one transfer."""

    prefetch_nbytes: int
    group_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The decisions that remain for a given graph and device budget."""

    look_ahead: LookAhead
    held_past: int = 1  # a copy that is used again in the same phase stays while at most this many others start
    is_eager: bool = False  # start transfers as early as the look-ahead allows, not just in time
    resident_share: float = 1.0  # of the room, small parameters first; the rest is for what does not fit on the host
    # Whether compute hides transfers, so that the host rather holds what the step moves. None: the usual prices.
    are_transfers_hidden: bool | None = None
    uses_host: bool = True  # False: everything that is not on the device is on nvme
    is_filled: bool = True  # False: only small parameters are resident, even if there is room
    by_expert: bool = False  # gather only the experts that have rows, once that is known, where no others are read
    small_nbytes: int | None = None  # for small parameters, which come first; None: an eighth of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Placements that fit, with the transfers that they need."""

    placed: Placed
    moved: TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a graph computes beside its transfers, with some activations offloaded."""

    staying: GraphFacts  # without what is offloaded
    activations: ActivationPlan
    spans: tuple[ComputeSpan, ...]
    bound: BoundValues  # from the start of the arena on


class Groundwork:
    """What all plan builders of one graph share, independent of budgets."""

    def __init__(self, request: Request, graph: GraphFacts) -> None:
        self._graph, self._hardware = graph, request.hardware
        self._computes: dict[int, tuple[tuple[Transfer, ...], Compute]] = {}  # by the id of what is offloaded
        self.world = World(
            hardware=request.hardware,
            num_ranks=request.num_ranks,
            num_replicas=request.num_replicas,
            is_ordered=request.config.reduce == "ordered",
            num_tensor_ranks=request.num_tensor_ranks,
        )
        make_placer = partial(
            Placer, request.parameters, num_ranks=request.num_ranks, num_replicas=request.num_replicas
        )
        self.unseen_placer = make_placer()  # before a graph is known
        self.placer = make_placer(graph.uses)
        self.transfers = TransferPlanner(graph, request.parameters, self.world, request.config.step_timing)
        self.seconds_of_ops = tuple(ops_seconds(graph.ops, request.hardware))
        self._recomputed = find_recomputed(graph, request.hardware)
        self.shards = [parameter.among(request.num_ranks) for parameter in request.parameters]
        read = {use.parameter: use.dtype for use in graph.uses}
        self.read_nbytes = sum(item.nbytes_read(read.get(item.name, item.compute_dtype)) for item in request.parameters)
        is_read = [item for item in request.parameters if item.name in read]
        # What kernels take besides their outputs: a matrix product may repack its largest weight.
        self.workspace = max((item.nbytes_read(read[item.name]) for item in is_read), default=0)
        # A weight is on the device when it is read: resident, or gathered. Not counted where a gather may move only a
        # part, or where a device reads host memory.
        whole = [] if self.transfers.has_routed else [item for item in is_read if not item.integrated]
        decoded = [item for item in whole if item.compute.rows is None]
        self.largest_read = max((item.nbytes_read(read[item.name]) for item in decoded), default=0)
        self.device_share = plan_device_share(
            request.config, request.hardware, request.parameters, num_ranks=request.num_ranks
        )
        self.leaving = _count_leaving(request, graph)
        self.reductions = _count_reductions(request, graph)
        self.kernels = request.kernel_cache_nbytes if any(map(keeps_kernels, graph.ops)) else 0
        self.uses = tuple(sorted(graph.uses, key=lambda use: use.parameter))
        self.gradients = tuple(sorted(graph.gradients, key=lambda gradient: (gradient.tick, gradient.parameter)))

    def for_level(self) -> "Groundwork":
        """Return the same, to be forgotten together with the activations that one level offloads."""
        level = copy.copy(self)
        level._computes = {}
        return level

    def compute(self, swaps: tuple[Transfer, ...]) -> Compute:
        """Return what the graph computes with some activations offloaded."""
        if id(swaps) not in self._computes:
            staying = without_swapped(self._graph, swaps) if swaps else self._graph
            compute = Compute(
                staying=staying,
                activations=replace(plan_activations(staying), recomputed=self._recomputed),
                spans=plan_spans(staying, self._hardware, self.seconds_of_ops),
                bound=bind_values(staying, base=0, swaps=swaps),
            )
            self._computes[id(swaps)] = swaps, compute
        return self._computes[id(swaps)][1]


class PlanBuilder:
    """Builds plans of one graph with fixed offloaded activations, for any choice and device budget. Each only once."""

    def __init__(
        self,
        request: Request,
        graph: GraphFacts,
        swaps: tuple[Transfer, ...] = (),
        groundwork: Groundwork | None = None,
    ) -> None:
        groundwork = groundwork or Groundwork(request, graph)
        self._unseen_placer, self._placer = groundwork.unseen_placer, groundwork.placer
        self._transfer_planner = groundwork.transfers
        self._request = request
        self._graph = graph
        self._resting = count_resting(swaps, num_forwards=1 + request.num_open)
        self._resting_of_one = count_resting(swaps)
        compute = groundwork.compute(swaps)
        self._activations, self._spans, self._bound = compute.activations, compute.spans, compute.bound
        self._open_nbytes = request.open_nbytes + request.num_open * self._activations.saved_nbytes
        self._workspace, self._largest_read = groundwork.workspace, groundwork.largest_read
        self._outside = count_outside(compute.staying, self._activations.peak_nbytes + self._workspace)
        self._device_share = groundwork.device_share
        self._updates = _count_updates(request, self._device_share)
        self._leaving, self._reductions, self._kernels = groundwork.leaving, groundwork.reductions, groundwork.kernels
        self._read_nbytes = groundwork.read_nbytes
        self._shards = groundwork.shards
        self._device_chunk = device_chunk_elements(request.config, self._shards)
        self._moved_bound: dict[int, BoundValues] = {}  # by the arena bytes of transfers, which many choices share
        self._seen: set[Homes] = set()
        self._uses, self._gradients = groundwork.uses, groundwork.gradients
        self._made_sinks: list[dict[Tier, Transfer]] = [{} for _ in self._gradients]  # by home
        self.floor_nbytes = (
            self._bound.nbytes
            + self._activations.peak_nbytes
            + self._workspace
            + self._outside
            + self._updates
            + self._leaving
            + self._reductions
            + self._kernels
            + self._open_nbytes
            + request.config.reserve_memory
        )

    @property
    def least_device_nbytes(self) -> int:
        """Return a lower bound of the device bytes of any plan, whatever the homes."""
        return self.floor_nbytes + self._largest_read

    @property
    def busy_seconds(self) -> float:
        """Return the compute seconds of forward and backward."""
        return self._transfer_planner.busy_seconds

    @property
    def has_routed(self) -> bool:
        """Return whether some parameter may be gathered by experts."""
        return self._transfer_planner.has_routed

    @property
    def tiny_nbytes(self) -> int:
        """Return the bytes of all tiny parameters: the arena would round each up to a page, several times its size."""
        sizes = (parameter.compute_nbytes for parameter in self._request.parameters)
        return sum(size for size in sizes if size <= ARENA_ALIGN // 4)

    @property
    def all_resident_nbytes(self) -> int:
        """Return the device bytes needed for every copy that is read to be resident."""
        return self.floor_nbytes + self._read_nbytes

    def place_unseen(self, config: Config, resident_nbytes: int | None = None) -> Placed:
        """Return the homes of all parameters as chosen before a graph is known."""
        return self._unseen_placer.place(config, resident_nbytes=resident_nbytes)

    def place_small(self, config: Config, resident_nbytes: int | None) -> Placed:
        """Return the homes with only so many bytes of small parameters resident; None: an eighth of the device."""
        return self._placer.place(config, resident_nbytes=resident_nbytes)

    def least_nbytes(self, placed: Placed, look_ahead: LookAhead, *, is_eager: bool = True) -> int:
        """Return the device bytes of a plan with these homes. Eager transfers take the most."""
        arena_nbytes = self._transfers(placed, Choice(look_ahead=look_ahead, is_eager=is_eager)).arena_nbytes
        return self.floor_nbytes + arena_nbytes + placed.device_nbytes

    def build(self, choice: Choice, device_memory: int) -> Plan | None:
        """Return the plan of a choice with as many residents as fit; None if it does not fit or was returned before.

        Raises CapacityError if the other tiers cannot hold the rest.
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
        return self.build_with(Homes(placed=placed, moved=self._transfers(placed, choice)), choice)

    def build_with(self, homes: Homes, choice: Choice) -> Plan | None:
        """Return the plan with these homes and transfers, or None if it does not fit the device budget of the request."""
        needed = self.floor_nbytes + homes.moved.arena_nbytes + homes.placed.device_nbytes
        return None if needed > self._request.config.device_memory else self._assemble(homes, choice)

    def _fill(self, choice: Choice, device_memory: int) -> Homes | None:
        room = device_memory - self.floor_nbytes
        if room < 0:
            return None
        config = self._config(choice, device_memory)
        # Half of the surplus, so that more memory never means fewer residents.
        kept = min(BACKGROUND_NBYTES, max(0, room - _LEAST_ROOM) // 2)
        if not config.memory.unified:  # updates run in host memory
            kept = 0
        if device_memory >= self.all_resident_nbytes:
            spare = max(0, device_memory - self.all_resident_nbytes - kept)
            everything = self._place(choice, config, resident_nbytes=room, spare_nbytes=spare)
            return Homes(placed=everything, moved=self._transfers(everything, choice))
        placed = self.place_small(config, choice.small_nbytes)
        moved = self._transfers(placed, choice)
        if moved.arena_nbytes + placed.device_nbytes > room:
            return None
        # Residents are not transferred, so the arena shrinks and leaves more room. Hence two rounds.
        for _ in range(2 if choice.is_filled else 0):
            left = max(0, room - moved.arena_nbytes - kept)
            resident = min(left, max(self._placer.small_nbytes, int(left * choice.resident_share)))
            more = self._place(choice, config, resident_nbytes=resident, spare_nbytes=left - resident)
            more_moved = self._transfers(more, choice)
            if more is placed or more_moved.arena_nbytes + more.device_nbytes > room:
                break
            placed, moved = more, more_moved
        return Homes(placed=placed, moved=moved)

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
            by_expert=choice.by_expert,
        )
        return self._transfer_planner.plan(placed, manner)

    def _bound_behind(self, nbytes: int) -> BoundValues:
        """Return the bound values at offsets after the arena bytes of transfers."""
        if nbytes not in self._moved_bound:
            self._moved_bound[nbytes] = self._bound.moved(nbytes)
        return self._moved_bound[nbytes]

    def _may_update_in_background(self, on_nvme: int) -> bool:
        is_trained = any(parameter.trainable for parameter in self._request.parameters)
        return is_trained and on_nvme > 0 and self._request.config.step_timing is not StepTiming.SYNCHRONOUS

    def _sinks(self, placements: Sequence[Placement]) -> Iterator[Transfer]:
        """Yield the transfer of each gradient. Equal ones are the same object."""
        home_of = {placement.parameter: placement for placement in placements}
        for gradient, made in zip(self._gradients, self._made_sinks, strict=True):
            home = sink_home(home_of[gradient.parameter], self._request.config.step_timing)
            if home not in made:
                made[home] = self._sink(gradient, home)
            yield made[home]

    def _sink(self, gradient: GradientFact, home: Tier) -> Transfer:
        request, routing = self._request, gradient.routing
        is_reduced = request.num_ranks * request.num_replicas > 1
        is_whole = is_reduced or home is Tier.DEVICE or request.config.gather_by_expert is False
        if routing is not None and (is_whole or not routing.leaves_out_enough):
            routing = None
        return Transfer(
            what=Moved.GRADIENT,
            name=gradient.parameter,
            parameters=(gradient.parameter,),
            source=Tier.DEVICE,
            destination=home,
            nbytes=gradient.nbytes,
            issue=gradient.tick + 1,
            need_by=self._graph.num_ticks,
            release=self._graph.num_ticks,
            ends=None if routing is None else routing.ends,
            # A gradient on nvme is written whole, with its zeros.
            share=1.0 if routing is None or home is Tier.NVME else routing.share,
        )

    def _assemble(self, homes: Homes, choice: Choice) -> Plan:
        request, graph, config = self._request, self._graph, self._request.config
        placements, moved = homes.placed.placements, homes.moved
        bound = self._bound_behind(moved.arena_nbytes)
        arena_nbytes = moved.arena_nbytes + bound.nbytes
        staging = config.staging_memory
        on_nvme = _nbytes_on(placements, Tier.NVME)
        in_place = sum(placement.in_place_nbytes for placement in placements)  # no bytes of the store's file
        # Parameters in memory are updated in place, without staging. Inside backward, gradients are copied to staging.
        uses_staging = (
            on_nvme + self._resting.nvme > 0
            or config.step_timing is StepTiming.IN_BACKWARD
            or not config.memory.unified
        )
        parts: dict[Tier, tuple[tuple[TierPart, int], ...]] = {
            Tier.DEVICE: (
                (TierPart.RESIDENTS, homes.placed.device_nbytes),
                (TierPart.ARENA, arena_nbytes),
                (TierPart.ACTIVATIONS, self._activations.peak_nbytes),
                (TierPart.WORKSPACE, self._workspace),
                *_part_if_any(TierPart.OUTSIDE, self._outside),
                *_part_if_any(TierPart.UPDATES, self._updates),
                *_part_if_any(TierPart.LEAVING, self._leaving),
                *_part_if_any(TierPart.REDUCTIONS, self._reductions),
                *_part_if_any(TierPart.KERNELS, self._kernels),
                (TierPart.RESERVE, config.reserve_memory),
                *_part_if_any(TierPart.OPEN, self._open_nbytes),
            ),
            Tier.HOST: (
                (TierPart.HOMES, _nbytes_on(placements, Tier.HOST)),
                (TierPart.STAGING, staging if uses_staging else 0),
                *_part_if_any(TierPart.SWAPPED, self._resting_of_one.host),
                *_part_if_any(TierPart.OPEN, self._resting.host - self._resting_of_one.host),
            ),
            Tier.NVME: (
                (TierPart.HOMES, on_nvme - in_place),
                (TierPart.PADDING, homes.placed.file_nbytes - (on_nvme - in_place)),
                *_part_if_any(TierPart.SWAPPED, self._resting_of_one.nvme),
                *_part_if_any(TierPart.OPEN, self._resting.nvme - self._resting_of_one.nvme),
            ),
        }
        spare = config.device_memory - sum(nbytes for _, nbytes in parts[Tier.DEVICE])
        is_held_here = config.memory.unified and self._may_update_in_background(on_nvme)
        if is_held_here and spare >= BACKGROUND_NBYTES:
            updates = (TierPart.UPDATES, self._updates + BACKGROUND_NBYTES)
            parts[Tier.DEVICE] = (*(part for part in parts[Tier.DEVICE] if part[0] != TierPart.UPDATES), updates)
        whole = self._resting.returned_to(config)
        capacity = {Tier.DEVICE: whole.device_memory, Tier.HOST: whole.host_memory, Tier.NVME: whole.nvme_memory}
        return Plan(
            version=PLAN_VERSION,
            name=request.name,
            compute_dtype=config.compute_dtype,
            hardware=request.hardware,
            schedule=graph.schedule,
            placements=placements,
            uses=self._uses,
            transfers=order_transfers((*moved.gathers, *bound.swaps, *self._sinks(placements))),
            bound=bound.values,
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
                device_chunk=self._device_chunk,
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
            num_replicas=request.num_replicas,
            is_reduced_in_order=request.config.reduce == "ordered",
            num_tensor_ranks=request.num_tensor_ranks,
        )


def _nbytes_on(placements: Sequence[Placement], tier: Tier) -> int:
    return sum(placement.nbytes_on(tier) for placement in placements)


def _count_updates(request: Request, device_share: float) -> int:
    """Return the device bytes of updates: inside backward, the temporary tensors of one parameter or a piece of one.

    If updates run on a device with its own memory, these are its buffers for chunks.
    """
    if device_share:
        return device_updates_nbytes(request.config, request.parameters)
    if request.config.step_timing is not StepTiming.IN_BACKWARD or not request.config.memory.unified:
        return 0
    sizes = (parameter.master_nbytes for parameter in request.parameters if parameter.trainable)
    return min(UPDATE_NBYTES, _TEMPORARIES * max(sizes, default=0))


def _count_leaving(request: Request, graph: GraphFacts) -> int:
    """Return the device bytes of gradients that wait for their copy to the host: at most two of the largest."""
    if request.config.memory.unified:
        return 0
    return 2 * max((gradient.nbytes for gradient in graph.gradients), default=0)


def _count_reductions(request: Request, graph: GraphFacts) -> int:
    """Return the device bytes of what gradients of several ranks pass through: two buffers, and a shard in pieces.

    In stage 1 all gradients wait there, whole, for the end of the step.
    """
    if request.num_ranks * request.num_replicas == 1:
        return 0
    trained = {gradient.parameter for gradient in graph.gradients}
    shards = (item.among(request.num_ranks).gradient_nbytes for item in request.parameters if item.name in trained)
    shard = max(shards, default=0)
    whole = request.num_ranks * shard
    waiting = (
        sum(item.gradient_nbytes for item in request.parameters if item.trainable) if request.config.stage == 1 else 0
    )
    return waiting + 2 * min(whole, REDUCED_NBYTES) + (shard if whole > REDUCED_NBYTES else 0)


def _part_if_any(part: TierPart, nbytes: int) -> tuple[tuple[TierPart, int], ...]:
    return ((part, nbytes),) if nbytes else ()
