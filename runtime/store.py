"""The store: where the parameters of one model live, and the one object that owns its file, buffers and threads."""

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zinf_compile.config import Config
from zinf_compile.errors import StoreError, UnsupportedError
from zinf_compile.facts import ParameterFact
from zinf_compile.ops import make_anchor
from zinf_compile.plans import Placement
from zinf_compile.runtime.activations import Activations
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.device import make_device
from zinf_compile.runtime.device_allocations import DeviceAllocations
from zinf_compile.runtime.device_updates import DeviceUpdates
from zinf_compile.runtime.failure import REMEDY, describe_error, describe_state
from zinf_compile.runtime.home import refuse_gradient, torn_error
from zinf_compile.runtime.home_gradient import settle_gradient
from zinf_compile.runtime.link import Link
from zinf_compile.runtime.measured_store import MeasuredStore
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.numbers import new_id, register_store, register_stored
from zinf_compile.runtime.nvme.engine import Engine
from zinf_compile.runtime.nvme.layout import FileLayout
from zinf_compile.runtime.nvme.posix import PosixEngine
from zinf_compile.runtime.open_forwards import OpenForwards
from zinf_compile.runtime.ram import DeviceRam
from zinf_compile.runtime.slots import Owner, Slot, StoredParameter, map_tensor
from zinf_compile.runtime.staging import StagingPool
from zinf_compile.runtime.tier_memory import TierMemory
from zinf_compile.runtime.tiles import StoredTile
from zinf_compile.runtime.transfers import Transfers
from zinf_compile.runtime.updates import UpdateQueue
from zinf_compile.terms import Tier
from zinf_compile.tiles import TileRows, tile_name


class EarlyStep(Protocol):
    """What updates a parameter when its gradient is complete."""

    def take(self, record: StoredParameter, grad: Tensor) -> bool:
        """Update a parameter; return False if the gradient is to go home and wait for the optimizer."""

    def flush(self) -> None:
        """Do what was taken without waiting for more."""

    def forget(self) -> None:
        """Forget the step that is open: every parameter has got another value."""


class Store(MeasuredStore):
    """The homes of one model's parameters, gradients and optimizer state."""

    def __init__(self, config: Config, *, engine: Engine | None = None) -> None:
        super().__init__()
        self.config = config
        self.store_id = new_id()
        self.session: Owner | None = None
        self.anchor, self.frozen_anchor = make_anchor(requires_grad=True), make_anchor(requires_grad=False)
        self.records: dict[str, StoredParameter] = {}
        self.facts: dict[str, ParameterFact] = {}
        self.placements: dict[str, Placement] = {}
        self._tiles: dict[tuple[int, int, TileRows], StoredTile] = {}  # by parameter, number and rows
        self.meter = Meter()
        self.device = make_device(config.device)
        self.memory = TierMemory(self.device)
        self.staging = StagingPool(max(config.staging_memory, 0), self.memory.allocate)
        self.arena = Arena(self.device)
        self.engine = engine
        if engine is None and config.nvme is not None:
            self.engine = PosixEngine(config.nvme)
        self.layout = FileLayout()
        self.transfers = Transfers(
            engine=self.engine,
            staging=self.staging,
            arena=self.arena,
            meter=self.meter,
            link=None if self.device is None else Link(self.device),
        )
        self.updates = UpdateQueue(begin_thread=self.meter.set_aside_this_thread)
        self.early_step: EarlyStep | None = None  # updates parameters inside backward
        self.wanted_norms: set[float] = set()  # orders that somebody asked a gradient for, as clip_grad_norm_ does
        self.update_order: Mapping[str, int] = {}  # of parameters, the first that the next forward gathers first
        self.chunk_elements = 2**20  # of the streamed step; a plan sets it, and
        self.device_share = 0.0  # of its elements, updated on the device
        self.device_updates: DeviceUpdates | None = None
        if self.device is not None and self.transfers.link is not None:
            self.device_updates = DeviceUpdates(self.device, self.transfers.link, self.meter)
        budget = config.device_memory - config.reserve_memory
        self.ram: DeviceRam | DeviceAllocations = DeviceRam(budget=budget)
        if self.device is not None:
            self.ram = DeviceAllocations(self.device, budget=budget)
        self.activations = Activations(
            transfers=self.transfers,
            arena=self.arena,
            meter=self.meter,
            layout=self.layout,
            engine=self.engine,
            room=partial(_room_for_activations, config, self._homes_nbytes),
            allocate=self.memory.allocate,
        )
        self.open_forwards = OpenForwards()
        self.lock = threading.RLock()  # one captured graph runs at a time: they share the arena
        self._process = os.getpid()
        self._failure: str | None = None  # why it computes no more until a checkpoint is loaded
        self._unsure: set[str] = set()  # parameters that nobody has loaded since
        self._closed = False
        register_store(self)
        self._finalizer = weakref.finalize(
            self, _close, self.updates, self.transfers, self.staging, self.memory, self.engine
        )

    # Homes

    def add(self, record: StoredParameter, fact: ParameterFact, placement: Placement) -> None:
        """Take in a parameter whose slots are made: from now on ops find it."""
        self.records[fact.name] = record
        self.facts[fact.name] = fact
        self.placements[fact.name] = placement
        register_stored(record)

    def tile(self, record: StoredParameter, number: int, rows: TileRows) -> StoredTile:
        """Return some rows of a parameter, which ops find from now on; for the same rows the same tile."""
        key = record.param, number, rows
        if key not in self._tiles:
            name = tile_name(record.name, number)
            self._tiles[key] = StoredTile(
                param=new_id(), name=name, whole=record, first_row=rows.first_row, num_rows=rows.num_rows
            )
            register_stored(self._tiles[key])
        return self._tiles[key]

    def reserve(self, placements: Sequence[Placement]) -> None:
        """Reserve the disk space of what is placed next, so that a disk too small is an error before anything moves."""
        if self.engine is not None:
            self.engine.reserve(self.layout.end + sum(placement.file_nbytes for placement in placements))

    def reserve_growth(self, placements: Sequence[Placement]) -> None:
        """Reserve the disk space that parameters take more of at these homes than at those they have."""
        self.reserve(
            [
                item
                for item in placements
                if item.nbytes_on(Tier.NVME) > self.placements[item.parameter].nbytes_on(Tier.NVME)
            ]
        )

    def give_back_free_extents(self) -> None:
        """Let the disk have what homes have left behind, now that they have moved; what is still to come keeps its space."""
        if self.engine is None:
            return
        for offset, nbytes in self.layout.free_ranges:
            if self.engine.give_back(offset, nbytes):
                self.layout.make_hole(offset)
        planned = sum(item.file_nbytes for item in self.placements.values()) + self.activations.reserved_nbytes
        to_come = max(0, planned - self.layout.live_nbytes)
        self.engine.cut(self.layout.end + to_come)
        self.engine.reserve(self.layout.end + to_come)

    def new_slot(self, name: str, shape: torch.Size, dtype: torch.dtype, tier: Tier) -> Slot:
        """Return a slot with undefined content; on nvme its extent is reserved on the disk."""
        nbytes = shape.numel() * dtype.itemsize
        if tier is not Tier.NVME or nbytes == 0:
            home = self.memory.new_home(shape, dtype, tier)
            self.count_home(tier, nbytes)
            return Slot(name=name, tier=tier, tensor=home, on_device=self.memory.is_on_device(tier))
        assert self.engine is not None
        self.activations.give_back_dropped()  # what is gone may lie where this fits
        extent = self.layout.allocate(nbytes)
        self.engine.reserve(self.layout.end)
        mapped = self.engine.map(extent.offset, extent.reserved_nbytes)
        self.count_home(tier, nbytes)
        return Slot(name=name, tier=tier, tensor=map_tensor(mapped, shape, dtype), extent=extent)

    # Values

    def gather_value(self, record: StoredParameter | StoredTile, dtype: torch.dtype) -> Tensor:
        """Return the full value in one of its dtypes: the resident tensor itself, or fresh memory filled from its home.

        Blocks.
        """
        self.check_usable(record.whole)  # once its update is done
        self.follow_compute()
        self.refresh_one(record.whole)
        slot = record.copy_in(dtype)
        if slot.tier is Tier.DEVICE:
            return slot.tensor.detach()
        self.begin_memory()
        value = self.memory.new_value(slot.tensor.shape, slot.tensor.dtype)
        with self.failing_on_error():
            self.transfers.read_value(slot, value)
        self.sample_memory()
        return value

    def await_gradient(self, record: StoredParameter) -> None:
        """Block until the gradient at home may be added to by somebody who does not ask, and has what was put off."""
        self.finish(record)
        settle_gradient(record)
        with torch._C.DisableTorchFunctionSubclass():
            if self.early_step is not None and record.parameter.grad is not None:
                raise refuse_gradient(record, "added to")

    def refresh_stale(self) -> None:
        """Make every compute copy again whose master the user has written since."""
        for record in self.records.values():
            self.refresh_one(record)

    def refresh_one(self, record: StoredParameter) -> None:
        """Make one compute copy again if its master was written since."""
        version = record.version
        if version == record.synced_version and not record.exposed:
            return
        self.finish(record)
        if record.has_compute_copy:
            with self.failing_on_error():
                self.transfers.write_value(record.compute, record.master.tensor)
                self.transfers.wait_writes()
        record.synced_version, record.exposed = version, False

    def finish(self, record: StoredParameter) -> None:
        """Block until nothing is in flight for one parameter: no update of it, of its optimizer state, from its gradient.

        Nor a copy to the device of what compute goes on with.

        Does not raise for an update that failed: it leaves the parameter torn, and the store failed. StoreError in a
        process that was forked meanwhile, where it would never end.
        """
        for gather in record.gathers.copy():
            if gather.is_awaited:
                gather.wait_landed()
        update = record.update
        if update is None:
            return
        if not update.done():
            self.check_open()
            with self.meter.stall(f"update of {record.name}"):
                update.exception()  # waits
        if record.update is update:
            record.update = None

    def synchronize(self) -> None:
        """Block until nothing is in flight for any parameter. Raises the StoreError of an update that failed."""
        if self.early_step is not None:
            self.early_step.flush()
        if not self.updates.is_idle:
            with self.meter.stall("optimizer step"):
                self.updates.wait()
        for record in self.records.values():
            self.finish(record)
        if self._failure is not None:
            raise StoreError(self._failure)

    # Life

    def await_compute(self) -> None:
        """Block until a device with streams has done what its compute stream was told."""
        if self.device is not None:
            self.device.follow()
            self.device.compute.record().wait()

    def follow_compute(self) -> None:
        """Take the caller's stream for that of compute. Called where the model's own thread is about to run ops."""
        if self.device is not None:
            self.device.follow()

    @property
    def is_open(self) -> bool:
        """Return whether bytes can move: the store was neither closed nor forked, and has not failed."""
        return not self._closed and self._failure is None and os.getpid() == self._process

    def check_usable(self, record: StoredParameter | None = None) -> None:
        """Raise StoreError if the store was closed or has failed, or if ``record``, once at rest, holds half an update."""
        if record is not None:
            self.finish(record)
        self.check_open()
        if self._failure is not None:
            raise StoreError(self._failure)
        if record is not None and record.torn:
            raise torn_error(record)
        if record is not None and record.lent:
            raise UnsupportedError(
                f"'{record.name}' is lent to full_parameters(), whose tensor holds its value now; do this after the block"
            )

    def check_open(self) -> None:
        """Raise StoreError if the store was closed, or is another process's."""
        if self._closed:
            raise StoreError("the store of this model is closed; build and optimize the model again to train it")
        if os.getpid() != self._process:
            raise StoreError(
                "this model lives in a store of another process, whose threads a fork does not copy; use it in the process "
                "that called optimize(), or start workers with 'spawn' and build the model there"
            )

    @contextmanager
    def failing_on_error(self) -> Iterator[None]:
        """Fail when a read or write inside does."""
        try:
            yield
        except StoreError as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException, *, updated: Sequence[StoredParameter] = ()) -> None:
        """Refuse to compute and to step until a checkpoint is loaded, and tell ``error`` so in a note.

        ``updated`` are the parameters whose update was complete when a step failed. The first failure counts.
        """
        if self._failure is not None or self._closed:
            return
        with suppress(StoreError):  # nothing may stay in flight; what failed is in failed_slots
            self.transfers.wait_writes()
        for record in self.records.values():  # a master copy that did not get home has no value
            record.torn = record.torn or record.master in self.transfers.failed_slots
        torn = [record.name for record in self.records.values() if record.torn]
        state = describe_state(updated=[record.name for record in updated], torn=torn)
        self._failure = f"an earlier error stopped this model: {describe_error(error)}; {state}; {REMEDY}"
        self._unsure = set(self.records)
        error.add_note(f"zinf_compile: {state}; {REMEDY}")

    @contextmanager
    def rewriting(self, records: Sequence[StoredParameter]) -> Iterator[None]:
        """Inside, every copy of some parameters and their optimizer state are written; afterwards those are in order.

        A store that has failed computes again once that is so for all of its parameters. An error inside leaves these torn.
        """
        for record in records:
            record.torn = True
        try:
            yield
            self.transfers.wait_writes()
        except BaseException as error:
            self.fail(error)
            raise
        for record in records:
            record.torn = record.exposed = record.is_updated_early = False
            record.synced_version = record.version
            record.update_count += 1  # a backward whose forward saw other values is refused
        if self.early_step is not None:
            self.early_step.forget()
        self._unsure.difference_update(record.name for record in records)
        if not self._unsure:
            self.transfers.failed_slots.clear()
            self._failure = None

    def close(self) -> None:
        """Finish what is in flight and give back the file, the threads and the buffers. Safe to call twice."""
        if not self._closed:
            if self.early_step is not None:
                self.early_step.flush()
            self.updates.close(wait=True)
            self._closed = True
            with suppress(StoreError):  # a write that failed was reported by the step it belonged to
                self.transfers.wait_writes()
            self._finalizer()
            if self.device is not None and self.device_updates is not None:
                self.device_updates.drop()
                self.arena.give_back_all()
                self.arena.drop()

    def check_integrity(self) -> None:
        """Raise VerifyError if a buffer is leaked or two things share bytes once nothing runs."""
        if self.early_step is not None:
            self.early_step.flush()
        self.updates.wait()
        self.activations.check_integrity()
        self.staging.check_integrity(expect_idle=True)
        self.arena.check_integrity(expect_idle=True)
        self.layout.check_integrity()


def _room_for_activations(config: Config, homes_nbytes: Mapping[Tier, int], tier: Tier) -> int | None:
    """Return the bytes of a tier's budget that homes and staging leave; None where only the disk is the limit."""
    if tier is Tier.HOST:
        return config.host_memory - max(config.staging_memory, 0) - homes_nbytes[tier]
    return None if config.nvme_memory is None else config.nvme_memory - homes_nbytes[tier]


def _close(
    updates: UpdateQueue, transfers: Transfers, staging: StagingPool, memory: TierMemory, engine: Engine | None
) -> None:
    updates.close(wait=False)  # the last to hold a store may be its own step in the background
    transfers.close()
    staging.close()
    memory.close()
    if engine is not None:
        engine.close()
