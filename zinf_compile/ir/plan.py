"""The Plan: who lives where, what moves when, which bytes of the arena. A value: hashable, comparable, printable.

One plan describes one captured graph (forward and backward of a training graph, or forward alone) and the optimizer
step after it. Positions in time are ticks of the flattened node order; seconds come from simulating the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from zinf_compile.ir.copies import NOT_DECODED, SECTOR_NBYTES, Copy, Decoded, Granularity, Role, low_halves_nbytes
from zinf_compile.ir.facts import UseFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, Phase, StepTiming, Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.pipeline import PipelinePlan
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.transfers import Moved, Swap, Transfer, TransferIndex, pair_swaps

PLAN_VERSION = 10
UPDATE_NBYTES = 2**19  # memory for one update that allocates temporaries; half of it is freed and not reused
BACKGROUND_NBYTES = 2**22  # the same on a background thread, whose heap the C library hardly shrinks
UPDATE_SETS = 3  # sets of device buffers for updates: one chunk arrives, one is updated, one is copied back
# Chunks of norms and biases would each take the turn of a large one. They have further sets, each a small part of one.
SMALL_UPDATE_SETS = 4
SMALL_UPDATE_PART = 64


SPREAD_NBYTES = 8 * 2**20  # of updated residents that are gathered together: a few blocks' small ones, or one large one
REDUCED_NBYTES = 32 * 2**20  # of gradients that pass between ranks at once: buffers of a constant size


class TierPart(StrEnum):
    """A part of the promised peak of a tier: of the device, unless another tier is named."""

    RESIDENTS = "residents"  # parameters, gradients and state whose home it is
    ARENA = "arena"  # transfers and bound values
    ACTIVATIONS = "activations"  # values outside of the arena
    WORKSPACE = "workspace"  # temporaries of kernels
    OUTSIDE = "loss outside"  # a loss computed outside of the graph, as far as it needs more than all other parts
    UPDATES = "updates"  # buffers and temporaries of updates
    REDUCTIONS = "reductions"  # buffers that gradients pass through between ranks
    LEAVING = "leaving"  # on a device with streams: gradients that are still being copied to the host
    KERNELS = "kept kernels"  # kernels that libraries cache per shape
    RESERVE = "reserve"  # Python, torch and the captured graphs
    OPEN = "open forwards"  # activations of other calls whose backward has not run
    HOMES = "homes"  # host and nvme: parameters, gradients and state whose home it is
    STAGING = "staging"  # host: the buffers that bytes pass through
    PADDING = "padding"  # nvme: the unused end of the last sector of each tensor
    SWAPPED = "swapped activations"  # host and nvme: activations between forward and backward
    SHADOWS = "shadows"  # nvme, host beside a GPU: what updates ahead of step() write, until step() takes it


# Not slotted: its bytes are cached properties, which the simulator reads often.
@dataclass(frozen=True, kw_only=True)
class Placement:
    """What is stored of one parameter, or of a tile of one, and where. Tiles have the homes of their parameter."""

    parameter: str  # its name, or that of the tile
    copies: tuple[Copy, ...]  # in the order of roles: at most one of each, and any number of states
    splits_master: bool = False  # updates write of a master copy on nvme what its bfloat16 compute copy lacks
    in_place: bool = False  # a device reads and updates what is in host memory where it is, without a transfer

    @cached_property
    def by_role(self) -> dict[Role, tuple[Copy, ...]]:
        """Return the copies of each role that it has."""
        roles = dict.fromkeys(copy.role for copy in self.copies)
        return {role: tuple(copy for copy in self.copies if copy.role is role) for role in roles}

    def home_of(self, role: Role) -> Tier | None:
        """Return where the copies of a role live, which all are on one tier; None where there are none."""
        copies = self.by_role.get(role)
        return None if copies is None else copies[0].tier

    @cached_property
    def _sized(self) -> tuple[tuple[Copy, int], ...]:
        return tuple((copy, copy.nbytes) for copy in self.copies)

    @cached_property
    def _nbytes_of(self) -> dict[Role, int]:
        totals: dict[Role, int] = {}
        for copy, nbytes in self._sized:
            totals[copy.role] = totals.get(copy.role, 0) + nbytes
        return totals

    def is_whole(self, role: Role) -> bool:
        """Return whether every rank has all of the copy of a role, and not a shard of it."""
        return self.by_role[role][0].slice.num_ranks == 1

    def nbytes_of(self, role: Role) -> int:
        """Return the bytes of the copies of a role; 0 where there are none."""
        return self._nbytes_of.get(role, 0)

    def moved(self, homes: Mapping[Role, Tier]) -> "Placement":
        """Return it with other homes for the copies of some roles."""
        copies = (replace(copy, tier=homes.get(copy.role, copy.tier)) for copy in self.copies)
        return replace(self, copies=tuple(copies))

    @property
    def tile_of(self) -> str | None:
        """Return the parameter of which it is some rows; None for a whole parameter."""
        whole = self.copies[0].slice.parameter
        return None if whole == self.parameter else whole

    @cached_property
    def compute(self) -> Tier:
        """Return the home of what gathers move; the device means resident."""
        return self.by_role[Role.COMPUTE][0].tier

    @cached_property
    def master(self) -> Tier:
        """Return the home of what the optimizer updates: that of the compute copy where there is only one copy."""
        return self.home_of(Role.MASTER) or self.compute

    @property
    def gradient(self) -> Tier | None:
        """Return the home of the gradient; None for a frozen parameter."""
        return self.home_of(Role.GRADIENT)

    @property
    def optimizer_state(self) -> Tier | None:
        """Return the home of all optimizer state; None where there is none."""
        return self.home_of(Role.STATE)

    @cached_property
    def compute_dtype(self) -> str:
        """Return the dtype of the compute copy; a graph that reads another dtype gathers the master copy."""
        return self.by_role[Role.COMPUTE][0].encoding.dtype

    @property
    def gradient_dtype(self) -> str | None:
        """Return the dtype in which backwards add up at home; None for a frozen parameter."""
        gradient = self.by_role.get(Role.GRADIENT)
        return None if gradient is None else gradient[0].encoding.dtype

    @cached_property
    def compute_nbytes(self) -> int:
        """Return the bytes of the compute copy as a gather gives it."""
        return self.by_role[Role.COMPUTE][0].gathered_nbytes

    @cached_property
    def master_nbytes(self) -> int:
        """Return the bytes of a master copy beside the compute copy; 0 where there is only one copy."""
        return self.nbytes_of(Role.MASTER)

    @cached_property
    def gradient_nbytes(self) -> int:
        """Return the bytes of the gradient; 0 for a frozen parameter."""
        return self.nbytes_of(Role.GRADIENT)

    @cached_property
    def optimizer_state_nbytes(self) -> int:
        """Return the bytes of all optimizer state."""
        return self.nbytes_of(Role.STATE)

    @property
    def is_narrowed(self) -> bool:
        """Return whether the compute copy is there for graphs that cast what they read; others read the master copy."""
        return Role.MASTER in self.by_role and self.gradient_dtype != self.compute_dtype

    def decoded(self, dtype: str) -> Decoded:
        """Return what a gather of ``dtype`` brings encoded."""
        copy = self.by_role[Role.COMPUTE][0]
        if copy.encoding.rows is None or copy.tier is Tier.DEVICE or dtype != self.compute_dtype:
            return NOT_DECODED
        return Decoded(home_nbytes=copy.nbytes, nbytes=copy.gathered_nbytes)

    def home_read(self, dtype: str) -> Tier:
        """Return from where a gather of ``dtype`` moves its copy; the device if compute reads it where it is."""
        home = self.compute if dtype == self.compute_dtype else self.master
        return Tier.DEVICE if self.in_place and home is Tier.HOST else home

    def nbytes_read(self, dtype: str) -> int:
        """Return the bytes that a gather of ``dtype`` moves."""
        return self.compute_nbytes if dtype == self.compute_dtype else self.master_nbytes

    @cached_property
    def _nbytes_on(self) -> dict[Tier, int]:
        totals = dict.fromkeys(Tier, 0)
        for copy, nbytes in self._sized:
            totals[copy.tier] += nbytes
        return totals

    def nbytes_on(self, tier: Tier) -> int:
        """Return the bytes this parameter keeps on a tier between uses."""
        return self._nbytes_on[tier]

    @cached_property
    def file_nbytes(self) -> int:
        """Return its bytes in the store's file on nvme, where each tensor begins at a sector of its own."""
        return sum(
            -(-nbytes // SECTOR_NBYTES) * SECTOR_NBYTES
            for copy, nbytes in self._sized
            if copy.tier is Tier.NVME and not copy.is_in_place
        )

    @cached_property
    def in_place_nbytes(self) -> int:
        """Return its bytes on nvme that are read from a weight file of the user's, and not from the store's file."""
        return sum(nbytes for copy, nbytes in self._sized if copy.is_in_place)

    def without_weights(self) -> "Placement":
        """Return it with the same homes, none of them in a weight file."""
        return replace(self, copies=tuple(replace(copy, in_weights=False) for copy in self.copies))

    @cached_property
    def update_nbytes_read(self) -> int:
        """Return the bytes that an optimizer step reads from nvme, with the gradient; 0 for a frozen parameter."""
        if self.splits_master:
            nbytes = self._update_nbytes_on_nvme(Role.GRADIENT, Role.COMPUTE, Role.STATE)
            return nbytes + self._low_halves_nbytes
        master = Role.MASTER if Role.MASTER in self.by_role else Role.COMPUTE
        return self._update_nbytes_on_nvme(Role.GRADIENT, master, Role.STATE)

    @cached_property
    def update_nbytes_written(self) -> int:
        """Return the bytes that an optimizer step writes to nvme; 0 for a frozen parameter."""
        if self.splits_master:
            return self._update_nbytes_on_nvme(Role.COMPUTE, Role.STATE) + self._low_halves_nbytes
        return self._update_nbytes_on_nvme(Role.COMPUTE, Role.MASTER, Role.STATE)

    @property
    def split_saves_nbytes(self) -> int:
        """Return by how many bytes less an optimizer step moves to and from nvme, since it splits the master copy."""
        if not self.splits_master:
            return 0
        whole = replace(self, splits_master=False)
        moved = (each.update_nbytes_read + each.update_nbytes_written for each in (whole, self))
        return next(moved) - next(moved)

    @property
    def _low_halves_nbytes(self) -> int:
        return low_halves_nbytes(self.by_role[Role.MASTER][0].slice.num_elements)

    @cached_property
    def update_nbytes_to_device(self) -> int:
        """Return the bytes that an update on the device reads: gradient, master copy, and state that lives elsewhere."""
        return self.gradient_nbytes + (self.master_nbytes or self.compute_nbytes) + self._state_nbytes_away

    @cached_property
    def update_nbytes_to_host(self) -> int:
        """Return the bytes that an update on the device writes: every copy and all state that live elsewhere."""
        compute = 0 if self.compute is Tier.DEVICE else self.compute_nbytes
        return self.master_nbytes + compute + self._state_nbytes_away

    @property
    def update_nbytes_with_host(self) -> int:
        """Return the bytes of host memory that an update on the device reads and writes, by copies or in place."""
        return self.update_nbytes_to_device + self.update_nbytes_to_host

    @property
    def has_device_state(self) -> bool:
        """Return whether optimizer state lives on the device."""
        return self.optimizer_state is Tier.DEVICE

    @cached_property
    def has_whole_state(self) -> bool:
        """Return whether some of its optimizer state cannot be cut with it, so that its update needs all of it at once."""
        states = (copy.state for copy in self.by_role.get(Role.STATE, ()))
        return any(state is not None and state.granularity is not Granularity.ELEMENT for state in states)

    def may_update_ahead(self, shadows: Tier) -> bool:
        """Return whether its update may be made ahead of ``step()``, and written to shadows on a tier.

        With shadows on nvme where the update moves more bytes than it would in addition; with shadows in host memory,
        where it runs on a device of its own, if all that it writes is in host memory but for the compute copy.
        """
        if Role.GRADIENT not in self.by_role or self.has_whole_state:
            return False
        if shadows is Tier.NVME:
            moved = self.update_nbytes_read + self.update_nbytes_written
            return moved > 2 * self.reloaded_nbytes(shadows)
        on_device = {copy.role for copy, nbytes in self._sized if nbytes and copy.tier is Tier.DEVICE}
        others = {Role.COMPUTE} if Role.MASTER in self.by_role else set()
        return not self.nbytes_on(Tier.NVME) and on_device <= others

    def reloaded_nbytes(self, shadows: Tier) -> int:
        """Return the bytes that an update ahead of ``step()`` writes to shadows, and that move on to their home after it."""
        return self._reloaded_nbytes[shadows]

    @cached_property
    def _reloaded_nbytes(self) -> dict[Tier, int]:
        written = [(copy.tier, nbytes) for copy, nbytes in self._sized if copy.role is not Role.GRADIENT]
        return {shadows: sum(nbytes for tier, nbytes in written if tier is not shadows) for shadows in Tier}

    @cached_property
    def shadow_nbytes(self) -> int:
        """Return the bytes, in whole sectors, of all that an update writes ahead of ``step()``."""
        return sum(
            -(-nbytes // SECTOR_NBYTES) * SECTOR_NBYTES
            for copy, nbytes in self._sized
            if copy.role is not Role.GRADIENT
        )

    @property
    def _state_nbytes_away(self) -> int:
        return 0 if self.has_device_state else self.optimizer_state_nbytes

    def _update_nbytes_on_nvme(self, *roles: Role) -> int:
        if Role.GRADIENT not in self.by_role:
            return 0
        return sum(self.nbytes_of(role) for role in roles if self.home_of(role) is Tier.NVME)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundValue:
    """A value that its op writes to fixed arena bytes. It is the result of the node at tick ``live.start``."""

    name: str
    offset: int
    nbytes: int
    live: LiveRange


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpan:
    """A run of consecutive ops of one module: its ticks, estimated seconds, and the most bytes that unbound values take."""

    module: str
    phase: Phase
    start: int
    end: int
    seconds: float
    peak_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedValue:
    """A value that is not saved but recomputed in backward, at ``tick``, which takes ``seconds``."""

    value: str
    nbytes: int
    tick: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """What backward's inputs cost."""

    policy: ActivationPolicy
    saved_nbytes: int
    peak_nbytes: int  # most bytes of values outside of the arena live at one tick
    peak_tick: int
    recomputed: tuple[RecomputedValue, ...] = ()  # the large ones, by tick


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The streamed optimizer step: parameters in the order in which forward gathers them, chunk by chunk."""

    timing: StepTiming
    chunk_elements: int
    num_chunks: int
    staging_nbytes: int
    nbytes_read: int  # from nvme
    nbytes_written: int  # to nvme
    num_elements: int
    # Of the elements whose state does not live on the device and that are not updated ahead of step(), updated there all
    # the same; the rest on the host.
    device_share: float = 0.0
    # Placements whose update begins in backward, as soon as their gradient is complete, and is written to shadows: on nvme,
    # or beside a GPU, on which these updates run, in host memory. step() takes it if nothing has changed; copies whose home
    # is elsewhere are then read back. Sorted.
    ahead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUpdatesPlan:
    """The updates of a step that run on a device with memory of its own. Bytes of gradients stand for elements."""

    share: float  # of all elements
    nbytes_in: int  # that come from host memory
    nbytes_out: int  # that go back there
    nbytes_in_place: int  # that an integrated device reads and writes in host memory, where no copy is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """A tier's budget and the peak the plan promises, with what makes it up."""

    tier: Tier
    capacity: int | None  # None: whatever the disk has
    predicted_peak: int
    parts: tuple[tuple[TierPart, int], ...]  # with their bytes, which sum to the predicted peak

    def nbytes_of(self, part: TierPart) -> int:
        """Return the bytes of a part; 0 if there is none."""
        return dict(self.parts).get(part, 0)


# Not slotted: views of its transfers are kept.
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was decided for one captured graph."""

    version: int
    name: str
    compute_dtype: str | None
    hardware: Hardware
    schedule: Schedule
    placements: tuple[Placement, ...]  # in module order
    uses: tuple[UseFact, ...]  # of every parameter this graph reads, sorted by name
    transfers: tuple[
        Transfer, ...
    ]  # everything that moves in forward and backward, in the order of ``order_transfers``
    bound: tuple[BoundValue, ...]  # by tick
    spans: tuple[ComputeSpan, ...]  # by start tick, covering every tick
    activations: ActivationPlan
    arena_nbytes: int
    prefetch_nbytes: int  # how far transfers may run ahead of compute
    step: StepPlan
    tiers: tuple[TierPlan, ...]
    num_ranks: int = 1  # that divide the model among them, each by this plan
    num_replicas: int = 1  # of so many ranks, which train together and add up their gradients
    is_reduced_in_order: bool = True  # whether gradients of several ranks are added in the order of ranks
    num_tensor_ranks: int = 1  # that divide the weights of each layer, of which each rank above has one part
    pipeline: PipelinePlan | None = None  # the step that this graph is a part of, such as one micro-batch; None: all
    notes: tuple[str, ...] = ()  # sentences on how it was made that a reader should know

    @property
    def mesh_size(self) -> int:
        """Return how many ranks, in all replicas, reduce gradients together: the data-parallel ones."""
        return self.num_ranks * self.num_replicas

    @property
    def world_size(self) -> int:
        """Return how many ranks train the model together, in all dimensions of their mesh."""
        return self.mesh_size * self.num_tensor_ranks * self.num_stages

    @property
    def num_stages(self) -> int:
        """Return how many pipeline stages the model is cut into."""
        return 1 if self.pipeline is None else self.pipeline.num_stages

    @cached_property
    def by_tick(self) -> TransferIndex:
        """Return the transfers by the ticks at which they are issued, and by the parameters that gathers move."""
        return TransferIndex(self.transfers)

    @cached_property
    def gathers(self) -> tuple[Transfer, ...]:
        """Return the transfers of parameters to the device."""
        return tuple(transfer for transfer in self.transfers if transfer.what is Moved.PARAMETERS)

    @cached_property
    def sinks(self) -> tuple[Transfer, ...]:
        """Return the transfers of gradients to their homes, with those whose home is the device."""
        return tuple(transfer for transfer in self.transfers if transfer.what is Moved.GRADIENT)

    @cached_property
    def swaps(self) -> tuple[Swap, ...]:
        """Return the activations that are offloaded in forward and reloaded in backward, by the tick at which they leave."""
        return pair_swaps(self.transfers)

    @property
    def has_room_for_updates(self) -> bool:
        """Return whether memory is reserved for the temporaries of updates in the background."""
        return self.tier(Tier.DEVICE).nbytes_of(TierPart.UPDATES) >= BACKGROUND_NBYTES

    @property
    def may_update_beside_compute(self) -> bool:
        """Return whether updates overlap with compute: they move bytes, or run on other processors."""
        return self.step.num_chunks > 0 or self.hardware.updates_take_of_compute == 0

    @property
    def updates_on_device(self) -> bool:
        """Return whether a device with memory of its own updates some parameters."""
        return self.step.device_share > 0 or bool(self.step.ahead and not self.hardware.unified)

    @property
    def shadow_tier(self) -> Tier:
        """Return the tier that updates ahead of ``step()`` are written to."""
        return Tier.NVME if self.hardware.unified else Tier.HOST

    @property
    def device_updates(self) -> "DeviceUpdatesPlan":
        """Return the totals of updates on the device.

        These are every parameter whose state lives there or whose update begins ahead of ``step()``, and a share of the
        others.
        """
        share, ahead = self.step.device_share, frozenset(self.step.ahead)
        trained = [
            (placement, 1.0 if placement.has_device_state or placement.parameter in ahead else share)
            for placement in self.placements
            if placement.gradient_nbytes and self.updates_on_device
        ]
        reloaded = sum(item.reloaded_nbytes(self.shadow_tier) for item, _ in trained if item.parameter in ahead)
        updated = sum(placement.gradient_nbytes * each for placement, each in trained)
        copied = [each for each in trained if not self.is_updated_in_place(each[0])]
        in_place = [each for each in trained if self.is_updated_in_place(each[0])]
        return DeviceUpdatesPlan(
            share=updated / max(1, sum(placement.gradient_nbytes for placement in self.placements)),
            nbytes_in=int(sum(placement.update_nbytes_to_device * each for placement, each in copied)) + reloaded,
            nbytes_out=int(sum(placement.update_nbytes_to_host * each for placement, each in copied)) + reloaded,
            nbytes_in_place=int(sum(placement.update_nbytes_with_host * each for placement, each in in_place)),
        )

    def is_updated_in_place(self, placement: Placement) -> bool:
        """Return whether an update on the device reads and writes host memory where it is.

        One ahead of ``step()`` writes shadows, and copies.
        """
        return placement.in_place and placement.parameter not in self.step.ahead

    @property
    def leaving_nbytes(self) -> int:
        """Return the most device bytes of gradients that are being copied to the host; 0 on a CPU."""
        return self.tier(Tier.DEVICE).nbytes_of(TierPart.LEAVING)

    @property
    def in_place_nbytes(self) -> int:
        """Return the bytes of frozen parameters that are read from weight files of the user's, and that no tier holds."""
        return sum(placement.in_place_nbytes for placement in self.placements)

    def tier(self, tier: Tier) -> TierPlan:
        """Return the plan of one tier."""
        return next(plan for plan in self.tiers if plan.tier is tier)

    def placement(self, parameter: str) -> Placement:
        """Return where one parameter lives; KeyError if the model has no such parameter."""
        for placement in self.placements:
            if placement.parameter == parameter:
                return placement
        raise KeyError(parameter)

    def swapped_nbytes(self, tier: Tier) -> int:
        """Return the bytes of activations that rest on a tier between forward and backward."""
        return sum(each.nbytes for each in self.transfers if each.is_offload and each.destination is tier)

    @property
    def num_ticks(self) -> int:
        """Return the ticks of forward and backward together."""
        return self.schedule.num_ticks
