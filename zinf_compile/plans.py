"""The Plan: who lives where, what moves when, which bytes of the arena. A value: hashable, comparable, printable.

One plan describes one captured graph (forward and backward of a training graph, or forward alone) and the optimizer
step after it. Positions in time are ticks of the flattened node order; seconds come from simulating the plan.
"""

from dataclasses import dataclass, field
from pathlib import Path

from zinf_compile.facts import UseFact
from zinf_compile.hardware import Hardware
from zinf_compile.terms import ActivationPolicy, LiveRange, Phase, StepTiming, Tier

PLAN_VERSION = 1
SECTOR_NBYTES = 4096  # of the store file: what O_DIRECT asks for on disks of 4 KiB sectors
_NUM_STATES = 2  # tensors that an optimizer keeps of a parameter, as Adam does
WORKSPACE_PART = "workspace"  # the part of the device that kernels take beside their outputs
UPDATES_PART = "updates"  # the part of the device that an optimizer takes beside what is counted of it, and of compute
UPDATE_NBYTES = 2**19  # of it: what one takes that allocates, a piece at a time; half is what is freed and not reused
BACKGROUND_NBYTES = 2**22  # and what a thread of its own comes to hold for that, of which the C library returns little
UPDATE_SETS = 3  # of buffers that chunks take turns with which are updated on the device: arriving, updated, leaving
OUTSIDE_PART = "loss outside"  # the part of the device that a loss outside of the graph takes beyond all other parts
LEAVING_PART = (
    "leaving"  # the part of a device with streams that gradients hold until they have been copied to the host
)
OPEN_PART = "open forwards"  # the part of the device that forwards of other calls hold, whose backward has not run
KERNELS_PART = "kept kernels"  # the part of the device that libraries keep kernels in, one for each shape they have met
SWAPPED_PART = "swapped activations"  # the part of host and of nvme that activations rest in


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The homes of one parameter's copies, its gradient and its optimizer state, with their bytes."""

    parameter: str
    compute: Tier  # what gathers move; the device tier means resident
    master: Tier  # what the optimizer updates; equals ``compute`` where there is only one copy
    gradient: Tier
    optimizer_state: Tier
    compute_dtype: str  # of the compute copy; a graph that reads another dtype gathers the master copy
    compute_nbytes: int
    master_nbytes: int  # 0 where there is only one copy
    gradient_nbytes: int
    gradient_dtype: str | None  # in which backwards add up at home; None for frozen parameters
    optimizer_state_nbytes: int
    tile_of: str | None = None  # the parameter of which these are some rows, all with the same homes

    @property
    def is_narrowed(self) -> bool:
        """Return whether the compute copy is there for graphs that cast what they read; others read the master copy."""
        return self.master_nbytes > 0 and self.gradient_dtype != self.compute_dtype

    def home_read(self, dtype: str) -> Tier:
        """Return where the copy lives that a gather of ``dtype`` moves."""
        return self.compute if dtype == self.compute_dtype else self.master

    def nbytes_read(self, dtype: str) -> int:
        """Return the bytes that a gather of ``dtype`` moves."""
        return self.compute_nbytes if dtype == self.compute_dtype else self.master_nbytes

    def nbytes_on(self, tier: Tier) -> int:
        """Return the bytes this parameter keeps on a tier between uses."""
        total = self.compute_nbytes if self.compute is tier else 0
        total += self.master_nbytes if self.master is tier else 0
        total += self.gradient_nbytes if self.gradient is tier else 0
        return total + (self.optimizer_state_nbytes if self.optimizer_state is tier else 0)

    @property
    def file_nbytes(self) -> int:
        """Return what this parameter takes of the file on nvme, where each tensor begins at a sector of its own."""
        half_state = self.optimizer_state_nbytes // _NUM_STATES
        homes = (
            (self.compute, self.compute_nbytes),
            (self.master, self.master_nbytes),
            (self.gradient, self.gradient_nbytes),
            *((self.optimizer_state, half_state) for _ in range(_NUM_STATES)),
        )
        return sum(-(-nbytes // SECTOR_NBYTES) * SECTOR_NBYTES for home, nbytes in homes if home is Tier.NVME)

    @property
    def update_nbytes_read(self) -> int:
        """Return what an optimizer step reads of this parameter from nvme, its gradient included; 0 if it is frozen."""
        return self._nbytes_on_nvme(gradient=1, compute=int(self.master_nbytes == 0))

    @property
    def update_nbytes_written(self) -> int:
        """Return what an optimizer step writes of this parameter to nvme; 0 if it is frozen."""
        return self._nbytes_on_nvme(gradient=0, compute=1)

    @property
    def update_nbytes_to_device(self) -> int:
        """Return what an update on the device takes there: gradient, master copy and optimizer state."""
        return self.gradient_nbytes + (self.master_nbytes or self.compute_nbytes) + self.optimizer_state_nbytes

    @property
    def update_nbytes_to_host(self) -> int:
        """Return what comes back from an update on the device: every copy, and optimizer state."""
        return self.master_nbytes + self.compute_nbytes + self.optimizer_state_nbytes

    def _nbytes_on_nvme(self, *, gradient: int, compute: int) -> int:
        if self.gradient_nbytes == 0:
            return 0
        total = gradient * self.gradient_nbytes if self.gradient is Tier.NVME else 0
        total += compute * self.compute_nbytes if self.compute is Tier.NVME else 0
        total += self.master_nbytes if self.master is Tier.NVME else 0
        return total + (self.optimizer_state_nbytes if self.optimizer_state is Tier.NVME else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTransfer:
    """One transfer of some parameters, in the dtypes the graph reads, from their home into consecutive arena bytes."""

    name: str  # "layers.3" or "layers.3.mlp.up.weight"; with the phase it is unique up to repeats
    phase: Phase
    source: Tier
    parameters: tuple[str, ...]
    offsets: tuple[int, ...]  # absolute in the arena, one per parameter
    offset: int
    nbytes: int
    issue: int  # tick before which the transfer is started
    need_by: int  # tick that first reads it
    release: int  # tick before which its bytes are free again

    @property
    def live(self) -> LiveRange:
        """Return the ticks in which its arena bytes are taken."""
        return LiveRange(start=self.issue, end=self.release)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSink:
    """A gradient leaves the device for its home; for host memory, where its update takes it, if that is in backward."""

    parameter: str
    tick: int  # the node after which it leaves
    destination: Tier
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundValue:
    """A value that its op writes to fixed arena bytes. It is the result of the node at tick ``live.start``."""

    name: str
    offset: int
    nbytes: int
    live: LiveRange


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSwap:
    """A value saved for backward leaves the device in forward, and comes back to arena bytes in backward."""

    value: str
    destination: Tier  # where it rests in between: host or nvme
    nbytes: int  # in whole sectors, there and in the arena
    out: int  # forward tick after which it starts to leave: that of its birth, so that it moves beside compute
    gone: int  # forward tick before which it has left, and after its last use there: its bytes on the device are free
    issue: int  # backward tick before which its way back starts
    need_by: int  # tick that first reads it in backward
    release: int  # tick before which its arena bytes are free again
    offset: int  # absolute in the arena, where it comes back to

    @property
    def live(self) -> LiveRange:
        """Return the ticks in which its arena bytes are taken."""
        return LiveRange(start=self.issue, end=self.release)


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
    """A value that forward makes and does not save, since backward makes it again, at ``tick`` and in so many seconds."""

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
    device_share: float = 0.0  # of the elements, whose updates run on the device; the others' on processors of the host


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """A tier's budget and the peak the plan promises, with what makes it up."""

    tier: Tier
    capacity: int | None  # None: whatever the disk has
    predicted_peak: int
    parts: tuple[tuple[str, int], ...]  # ("arena", bytes), ...; they sum to the predicted peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that was decided for one captured graph."""

    version: int
    name: str
    compute_dtype: str | None
    hardware: Hardware
    num_forward_ticks: int
    num_ticks: int
    placements: tuple[Placement, ...]  # in module order
    uses: tuple[UseFact, ...]  # of every parameter this graph reads, sorted by name
    transfers: tuple[GatherTransfer, ...]  # by issue tick, then need-by tick
    bound: tuple[BoundValue, ...]  # by tick
    swaps: tuple[ActivationSwap, ...]  # by the tick after which they leave
    sinks: tuple[GradientSink, ...]  # by tick
    spans: tuple[ComputeSpan, ...]  # by start tick, covering every tick
    activations: ActivationPlan
    arena_nbytes: int
    prefetch_nbytes: int  # how far transfers may run ahead of compute
    step: StepPlan
    tiers: tuple[TierPlan, ...]
    num_ranks: int = 1  # that train the model together, each by this plan
    notes: tuple[str, ...] = ()  # sentences on how it was made that a reader should know
    # The planner's Request that it was made from, to ask questions of; not part of its value, and not saved with it.
    request: object = field(default=None, compare=False, repr=False)

    @property
    def has_room_for_updates(self) -> bool:
        """Return whether what updates in the background hold is counted, if their optimizer allocates."""
        return dict(self.tier(Tier.DEVICE).parts).get(UPDATES_PART, 0) >= BACKGROUND_NBYTES

    @property
    def may_update_beside_compute(self) -> bool:
        """Return whether updates hide behind compute: where bytes move for them, or other processors do them."""
        return self.step.num_chunks > 0 or self.hardware.updates_take_of_compute == 0

    @property
    def leaving_nbytes(self) -> int:
        """Return what gradients may hold of the device that are being copied to the host; 0 on a CPU."""
        return dict(self.tier(Tier.DEVICE).parts).get(LEAVING_PART, 0)

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
        return sum(swap.nbytes for swap in self.swaps if swap.destination is tier)

    def phase_of(self, tick: int) -> Phase:
        """Return the phase a tick belongs to."""
        return Phase.FORWARD if tick < self.num_forward_ticks else Phase.BACKWARD

    def __str__(self) -> str:
        from zinf_compile.printing import dump_plan

        return dump_plan(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with its version."""
        from zinf_compile.plan_io import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Return the plan saved at ``path``; PlanFileError if it is damaged or of another version."""
        from zinf_compile.plan_io import load_plan

        return load_plan(path)

    def what_if(self, **changes: object) -> "Plan":
        """Return the plan as it would be with other input sizes, budgets, options or rates, all by name.

        ``batch=8`` (any symbol of the capture), ``device_memory="16GiB"``, ``nvme_read="7GB/s"`` and so on. Parameters
        and activations find new homes. ConfigError for an unknown name, CapacityError for what does not fit.
        """
        from zinf_compile.passes.planning.questions import plan_what_if

        return plan_what_if(self, changes)

    def max_batch(self) -> int:
        """Return the largest batch that fits; 0 if none. UnsupportedError where the capture has a fixed batch."""
        from zinf_compile.passes.planning.questions import largest_batch

        return largest_batch(self)

    def min_device_memory(self) -> int:
        """Return the bytes of the smallest device budget, in whole pages of 4 KiB, with which a plan can be made."""
        from zinf_compile.passes.planning.questions import smallest_device_memory

        return smallest_device_memory(self)

    def explain(self, name: str) -> str:
        """Return where a parameter or a value lives, when it moves, what that costs, and what another home would."""
        from zinf_compile.passes.planning.explain import explain

        return explain(self, name)

    def to_html(self, path: str | Path) -> None:
        """Write one page that works without a network: memory of each tier, the timeline, what bounds the step, values."""
        from zinf_compile.views.html.page import save_html_page

        save_html_page(self, path)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the predicted timeline as a Chrome trace: lanes for compute and each route, counters for each tier."""
        from zinf_compile.views.chrome_trace import save_chrome_trace

        save_chrome_trace(self, path)

    def to_memory_viz(self, path: str | Path) -> None:
        """Write the planned device memory over a step as a memory snapshot of PyTorch's, for pytorch.org/memory_viz."""
        from zinf_compile.views.memory_viz import save_memory_viz

        save_memory_viz(self, path)
