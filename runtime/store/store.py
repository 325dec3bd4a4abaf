"""The store: where the parameters of one model live, and the one object that owns its file, buffers and threads."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import COMPUTE, AnyCode, CopyKey, RowCode, low_halves_nbytes
from zinf_compile.ir.errors import DamageError, RankError, StoreError, UnsupportedError
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.ops import make_anchor
from zinf_compile.ir.plan import SPREAD_NBYTES, Placement
from zinf_compile.ir.slices import Slice
from zinf_compile.ir.tiles import tile_name
from zinf_compile.runtime.device.make_device import make_device
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.observe.open_forwards import OpenForwards
from zinf_compile.runtime.params.gradient_state import WantedNorms
from zinf_compile.runtime.params.home import refuse_gradient, torn_error
from zinf_compile.runtime.params.home_gradient import drop_unreduced, settle_gradient
from zinf_compile.runtime.params.numbers import new_id, register_stored
from zinf_compile.runtime.params.records import BackgroundWork, EarlyStep, Owner, Stored, StoredParameter, UpdatesAhead
from zinf_compile.runtime.params.remote import Elsewhere
from zinf_compile.runtime.params.tiles import StoredTile
from zinf_compile.runtime.process.failure import REMEDY, describe_error, describe_state
from zinf_compile.runtime.process.forking import has_ended, leave_when_forked, touch_pages
from zinf_compile.runtime.process.interrupts import uninterrupted, without_interrupts
from zinf_compile.runtime.process.waiting import holding, wait_future
from zinf_compile.runtime.ranks.messages import Messages
from zinf_compile.runtime.ranks.ranks import ALONE, Collective, Ranks, is_grouped
from zinf_compile.runtime.ranks.reductions import Reductions
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.layout import FileLayout
from zinf_compile.runtime.storage.low_halves import join
from zinf_compile.runtime.storage.nvme.posix import PosixEngine
from zinf_compile.runtime.storage.nvme.verified import VerifiedEngine
from zinf_compile.runtime.storage.nvme.weight_file import WeightFile, WeightSpan
from zinf_compile.runtime.storage.row_memory import Rows
from zinf_compile.runtime.storage.slots import Slot, SlotPart, map_tensor, memory_of
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.storage.state_blocks import pages_of_code
from zinf_compile.runtime.storage.tier_memory import TierMemory
from zinf_compile.runtime.store.cuts import Cuts
from zinf_compile.runtime.store.held_memory import HeldMemory
from zinf_compile.runtime.store.update_queue import UpdateQueue
from zinf_compile.runtime.transfer.activations import Activations
from zinf_compile.runtime.transfer.device_updates import DeviceUpdates
from zinf_compile.runtime.transfer.link import Link
from zinf_compile.runtime.transfer.transfers import Transfers


@dataclass(frozen=True, kw_only=True, eq=False)
class _Spread:
    """Copies that every rank has whole, on their way to having the rows that other ranks have updated."""

    names: tuple[str, ...]
    collective: Collective
    padded: Sequence[
        tuple[Tensor, Tensor]
    ]  # copies whose rows ranks do not divide evenly, and what is gathered for them


def _in_groups(records: Sequence[StoredParameter]) -> Iterator[list[StoredParameter]]:
    """Yield consecutive parameters whose copies are gathered together."""
    group: list[StoredParameter] = []
    nbytes = 0
    for record in records:
        group.append(record)
        nbytes += record.copies.compute.nbytes
        if nbytes >= SPREAD_NBYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


class Store:
    """The homes of one model's parameters, gradients and optimizer state."""

    def __init__(self, config: Config, *, engine: Engine | None = None, ranks: Ranks = ALONE) -> None:
        """``ranks`` train the model together: this store holds the shards of one of them."""
        self.config = config
        self.ranks = ranks
        self.messages: Messages | None = None  # between ranks that work in rounds
        self.store_id = new_id()
        self.session: Owner | None = None
        self.elsewhere: Elsewhere | None = None
        self.anchor, self.frozen_anchor = make_anchor(requires_grad=True), make_anchor(requires_grad=False)
        self.records: dict[str, StoredParameter] = {}
        self.facts: dict[str, ParameterFact] = {}
        self.placements: dict[str, Placement] = {}
        self._tiles: dict[tuple[int, int, Slice], StoredTile] = {}  # by parameter, number and rows
        self.meter = Meter(waited_seconds=lambda: ranks.waited_seconds)
        self.device = make_device(config.device)
        self.memory = TierMemory(self.device)
        self.staging = StagingPool(max(config.staging_memory, 0), self.memory.allocate)
        self.arena = Arena(self.device)
        self.engine = engine
        if engine is None and config.nvme is not None:
            self.engine = PosixEngine(config.nvme)
        self._verified: VerifiedEngine | None = None
        if config.verify_store and self.engine is not None:
            self.engine = self._verified = VerifiedEngine(self.engine, name_at=weak_name_at(self))
        self._weight_files: weakref.WeakValueDictionary[str, WeightFile] = weakref.WeakValueDictionary()  # by path
        self.layout = FileLayout(None if self._verified is None else self._verified.forget)
        self.transfers = Transfers(
            engine=self.engine,
            staging=self.staging,
            arena=self.arena,
            meter=self.meter,
            device=self.device,
            reads_in_place=partial(self.memory.reads_in_place, Tier.HOST),
            ranks=ranks,
        )
        self.io_pool, self.tensor_io = self.transfers.pool, self.transfers.tensors
        self.reductions = Reductions(
            ranks,
            is_ordered=config.reduce == "ordered",
            divide_by=config.gradient_divide_factor or ranks.mesh_size,
            device=self.device,
            meter=self.meter,
        )
        self.updates = UpdateQueue(begin_thread=partial(_begin_update_thread, self.meter, self.transfers.link))
        self.early_step: EarlyStep | None = None  # updates parameters inside backward
        self.background_work: BackgroundWork | None = None  # of optimizers, beside their steps
        self.updates_ahead: UpdatesAhead | None = None  # begins updates in backward, which step() takes
        self.unreduced: dict[str, StoredParameter] = {}  # whose gradients are reduced once per step, in this order
        self._spreads: dict[str, _Spread] = {}  # by parameter: what brings the rows that other ranks have updated
        self.wanted_norms = WantedNorms()
        self.update_order: Mapping[str, int] = {}  # by parameter: the position of its first gather in the next forward
        self.chunk_elements = 2**20  # of the streamed step; set by the plan
        self.device_share = 0.0  # share of its elements that are updated on the device; set by the plan
        self.device_updates = DeviceUpdates(self.device, self.meter)
        self.ram = self.device.measure_use(budget=config.device_memory - config.reserve_memory)
        homes_nbytes = dict.fromkeys(Tier, 0)
        self.activations = Activations(
            transfers=self.transfers,
            arena=self.arena,
            meter=self.meter,
            layout=self.layout,
            engine=self.engine,
            room=partial(_room_for_activations, config, self.staging, homes_nbytes),
            allocate=self.memory.allocate,
            device=self.device,
        )
        self.open_forwards = OpenForwards()
        self.held = HeldMemory(
            homes_nbytes=homes_nbytes,
            host_memory=config.host_memory,
            device=self.device,
            device_updates=self.device_updates,
            arena=self.arena,
            staging=self.staging,
            activations=self.activations,
            open_forwards=self.open_forwards,
            updates=self.updates,
            meter=self.meter,
            ram=self.ram,
        )
        self.cuts = Cuts()
        self._lock = threading.RLock()  # one captured graph runs at a time: they share the arena
        self._busy: str | None = None  # what the thread that holds the lock does
        self._process = os.getpid()
        self._is_without_group = not is_grouped()  # when the model was optimized
        self._views: set[int] = set()  # in a forked child: addresses of homes on nvme that were not read yet
        self._failure: str | None = None  # why it refuses to compute until a checkpoint is loaded
        self._unsure: set[str] = set()  # parameters that were not loaded since the failure
        self._closed = False
        _stores[self.store_id] = self
        leave_when_forked(self)
        self._finalizer = weakref.finalize(
            self,
            _close,
            self.updates,
            self.device_updates,
            self.reductions,
            self.transfers,
            self.staging,
            self.memory,
            self.engine,
            self._weight_files,
        )

    # Homes

    @without_interrupts
    def open_weights(self, path: str) -> WeightFile:
        """Return a weight file, open until the store is closed or nothing lies in it. OSError if it cannot be opened."""
        file = self._weight_files.get(path)
        if file is None:
            digest = None if self._verified is None else self._verified.digest
            file = self._weight_files[path] = WeightFile(path, digest=digest)
        return file

    def add(self, record: StoredParameter, fact: ParameterFact, placement: Placement) -> None:
        """Add a parameter whose slots exist, and register it so that ops find it."""
        self.records[fact.name] = record
        self.facts[fact.name] = fact
        self.placements[fact.name] = placement
        register_stored(record)

    def tile(self, record: StoredParameter, number: int, rows: Slice, mine: Slice) -> StoredTile:
        """Return the tile of some rows of a parameter, registered so that ops find it; the same tile for the same rows.

        ``mine`` are those that this rank has.
        """
        key = record.param, number, rows
        if key not in self._tiles:
            name = tile_name(record.name, number)
            self._tiles[key] = StoredTile(param=new_id(), name=name, whole=record, rows=rows, mine=mine)
            register_stored(self._tiles[key])
        return self._tiles[key]

    @without_interrupts
    def reserve(self, placements: Sequence[Placement]) -> None:
        """Reserve disk space for these placements, so that a full disk is an error before anything moves."""
        if self.engine is not None:
            self.engine.reserve(self.layout.end + sum(placement.file_nbytes for placement in placements))

    def reserve_growth(self, placements: Sequence[Placement]) -> None:
        """Reserve disk space for parameters that need more of it in these placements than in their current ones."""
        self.reserve([item for item in placements if item.file_nbytes > self.placements[item.parameter].file_nbytes])

    @without_interrupts
    def give_back_free_extents(self) -> None:
        """Return file space that moved homes no longer use to the disk, but keep what is still reserved."""
        if self.engine is None:
            return
        for offset, nbytes in self.layout.free_ranges:
            if self.engine.give_back(offset, nbytes):
                self.layout.make_hole(offset)
        planned = sum(item.file_nbytes for item in self.placements.values()) + self.activations.reserved_nbytes
        to_come = max(0, planned - self.layout.live_nbytes)
        self.engine.cut(self.layout.end + to_come)
        self.engine.reserve(self.layout.end + to_come)

    @without_interrupts
    def new_slot(
        self,
        parameter: str,
        shape: torch.Size,
        dtype: torch.dtype,
        tier: Tier,
        key: CopyKey = COMPUTE,
        *,
        is_whole: bool = False,
        code: AnyCode | None = None,
        row_code: RowCode | None = None,
        per_element: bool = True,
        weights: WeightSpan | None = None,
    ) -> Slot:
        """Return a slot for a copy of a parameter of this shape, with undefined content, in pages of codes if asked for.

        On nvme it is in place if it lies in ``weights``, and then has the value that is there.

        It holds this rank's shard of the parameter, unless ``is_whole``. Without ``per_element`` the shape is that of the
        copy, which has another one than its parameter. With ``row_code`` it is stored as rows of int8, outside of the
        device. On nvme its extent is reserved on the disk.
        """
        held, num_ranks = Slice.of_whole(parameter, shape), 1
        if not (is_whole or self.ranks.is_alone):
            assert per_element, "every rank would have another part of a state that belongs to the whole parameter"
            held, num_ranks = self.ranks.shard_of(held), self.ranks.size
            shape = torch.Size(held.sizes)
        coded = None
        if code is not None:
            coded = pages_of_code(code, held, dtype)
            shape, dtype = torch.Size([code.nbytes(held.num_elements)]), torch.uint8
            held = Slice.of_whole(parameter, shape)
        nbytes = shape.numel() * dtype.itemsize
        rows = None
        if row_code is not None and tier is not Tier.DEVICE and nbytes:  # the last of several ranks may have no row
            nbytes = row_code.nbytes(shape.numel())
            is_in_file = tier is Tier.NVME
            stored = None if is_in_file else self.memory.new_home(torch.Size([nbytes]), torch.uint8, tier)
            rows = Rows(row_code, shape, dtype, stored)
        if tier is not Tier.NVME or nbytes == 0:
            home = self.memory.new_home(shape, dtype, tier) if rows is None else rows.view
            self.held.count_home(tier, nbytes)
            is_behind_link = self.memory.is_behind_link(tier)
            return Slot(
                slice=held,
                num_ranks=num_ranks,
                key=key,
                tier=tier,
                tensor=home,
                coded=coded,
                row_code=row_code,
                rows=rows,
                per_element=per_element,
                on_device=is_behind_link,
            )
        if weights is not None:
            assert self.ranks.is_alone
            assert rows is None, "a weight file has values, not rows"
            home = map_tensor(weights.file.map(weights.start, nbytes), shape, dtype)
            return Slot(slice=held, key=key, tier=tier, tensor=home, weights=weights)
        assert self.engine is not None
        self.activations.give_back_dropped()  # frees extents of dropped activations for reuse
        extent = self.layout.allocate(nbytes)
        try:
            self.engine.reserve(self.layout.end)
        except BaseException:
            self.layout.free(extent)
            raise
        if rows is None:
            home = map_tensor(self.engine.map(extent.offset, extent.reserved_nbytes), shape, dtype)
        else:
            home = rows.view
        self.held.count_home(tier, nbytes)
        return Slot(
            slice=held,
            num_ranks=num_ranks,
            key=key,
            tier=tier,
            tensor=home,
            coded=coded,
            row_code=row_code,
            rows=rows,
            per_element=per_element,
            extent=extent,
        )

    # Values

    @without_interrupts
    def gather_value(self, record: Stored, dtype: torch.dtype) -> Tensor:
        """Return the full value in one of its dtypes: the resident tensor itself, or fresh memory filled from its home.

        Blocks.
        """
        self.check_usable(record.whole, only_read=True)  # once its update is done
        if self.early_step is not None:
            self.early_step.note_backward()
        self.follow_compute()
        self.refresh_one(record.whole)
        slot = record.copy_in(dtype)
        has_values = slot.num_ranks == 1 and slot.whole.rows is None
        if has_values and not slot.whole.is_mapped and self.memory.reads_in_place(slot.tier):
            if slot.tier is Tier.DEVICE:
                return slot.tensor.detach()
            record.whole.update.note_read_in_place()
            return self.device.in_place(slot.tensor.detach())
        self.held.begin_run()
        try:
            value = self.full_value(record.shape, slot)
            self.held.sample()
        finally:
            self.ram.end()
        return value

    def full_value(self, shape: torch.Size, slot: Slot | SlotPart) -> Tensor:
        """Return the full value of a slot, of this shape, in fresh memory; blocks until every rank has given its shard."""
        if slot.num_ranks == 1:
            value = self.memory.new_value(shape, slot.tensor.dtype)
            with self.failing_on_error():
                self.tensor_io.read_value(slot, value)
            return value
        with self.failing_on_error():
            self.ranks.meet(f"the gather of {slot.name}")
            padded = Slice.of_whole(slot.slice.parameter, shape).among(self.ranks.size).num_elements
            shard = self.memory.new_value(torch.Size([padded]), slot.tensor.dtype)
            whole = self.memory.new_value(torch.Size([padded * self.ranks.size]), slot.tensor.dtype)
            self.tensor_io.read_value(slot, shard[: slot.tensor.numel()].view(slot.tensor.shape))
            self.ranks.wait(self.ranks.all_gather(slot.name, [shard], [whole]))
            return whole[: shape.numel()].view(shape)

    @without_interrupts
    def join_master(self, record: StoredParameter) -> None:
        """Make the master copy whole, where an update has left only what the compute copy lacks; blocks.

        An update ahead of ``step()`` that reads it is dropped. Of a parameter that is torn there is nothing to join.
        """
        self.finish(record)
        master = record.copies.master
        if master.upper is None or record.update.is_torn:
            return
        if self.is_forked or self._closed:
            self._join_in_memory(record, master, master.upper)
            return
        record.update.note_look()
        record.update.tear()
        with self.failing_on_error():
            self.tensor_io.join(master)
        master.upper = None
        record.update.mend()
        record.copies.note_joined(record.update.count)

    def _join_in_memory(self, record: StoredParameter, master: Slot, upper: Slot) -> None:
        """Join a master copy through its mapping, where nothing can be read or written otherwise."""
        if self.is_forked:
            for slot in (upper, master):
                self.take_into_child(record, slot.tensor)
        flat = master.tensor.detach().view(-1)
        pages = flat.view(torch.uint8)[: low_halves_nbytes(flat.numel())].clone()
        join(pages, upper.tensor.detach().view(-1), flat)
        master.upper = None

    @without_interrupts
    def finish_gradients(self, record: StoredParameter | None = None) -> None:
        """Block until all gradients that a backward has sent home, or that of one parameter, are there.

        They are at its end. A hook may look before that, or break it off.
        """
        if record is None:
            with self.failing_on_error():
                self.tensor_io.wait_writes()
        elif record.gradient.slot is not None and not self.is_forked:
            with self.failing_on_error():
                self.tensor_io.wait_writes_of(record.gradient.slot)

    @without_interrupts
    def await_gradient(self, record: StoredParameter) -> None:
        """Block until others, such as autograd, may add to the gradient at its home; apply postponed changes first."""
        self.finish(record)
        self.finish_gradients(record)
        settle_gradient(record)
        with torch._C.DisableTorchFunctionSubclass():
            if self.early_step is not None and record.parameter.grad is not None:
                raise refuse_gradient(record, "added to")

    @without_interrupts
    def refresh_stale(self) -> None:
        """Recompute every compute copy whose master copy the user has written since.

        Whole copies of several ranks then start to get the rows that the others have updated, in the order in which forward
        reads them.
        """
        for record in self.records.values():
            self._sync(record)
        behind = [record for record in self.records.values() if self._is_behind(record)]
        behind.sort(key=lambda record: self.update_order.get(record.name, len(self.update_order)))
        for group in _in_groups(behind):
            self._start_spread(group)

    @without_interrupts
    def refresh_one(self, record: StoredParameter) -> None:
        """Recompute one compute copy if its master copy was written since, and wait for the rows of other ranks."""
        self._finish_spread_of(record)
        self._sync(record)
        if self._is_behind(record):
            self._start_spread([record])
            self._finish_spread_of(record)

    @without_interrupts
    def finish_spreads(self) -> None:
        """Wait for the rows of other ranks that nothing has waited for, before updates write these copies again."""
        for spread in dict.fromkeys(self._spreads.values()):  # in the order of their start, the same on all ranks
            with suppress(RankError):  # the ranks cannot go on, which was raised before
                self._finish_spread(spread)
        self._spreads.clear()

    def keep_writes(self, record: StoredParameter) -> None:
        """Give a parameter in place a home of its own if somebody has written to it. CapacityError if there is no room."""
        slot = record.copies.in_place
        if slot is None or not self.is_open:
            return
        may_be_written = not record.copies.is_synced(record.version) or slot.may_change_unseen
        if may_be_written and slot.is_written_in_place:
            assert self.session is not None
            self.session.leave_weights(record)

    @without_interrupts
    def show_rows(self, record: StoredParameter) -> None:
        """Let the view of a weight in rows of int8 have its values, for somebody who looks at them; blocks.

        What was written into it is encoded first, so that the values are those that gathers give. StoreError in a forked
        child for what is on the disk.
        """
        slot = record.copies.compute
        if slot.row_code is None:
            return
        if self.is_open:
            self._encode_written(record)
        rows = slot.rows
        if rows is None or rows.is_shown:
            return
        if rows.stored is None and not self.is_open:
            self.check_usable()
        self.tensor_io.read_value(slot, rows.view)
        rows.is_shown = True

    def _encode_written(self, record: StoredParameter) -> None:
        """Encode what a user may have written into the values of a weight in rows of int8, and show what that gives."""
        slot, version = record.copies.compute, record.version
        is_held = slot.rows is not None and slot.rows.is_shown and slot.may_change_unseen
        if record.copies.is_synced(version) and not is_held:
            return
        if slot.rows is None or slot.rows.is_shown:
            with self.failing_on_error():
                self.tensor_io.write_value(slot, slot.tensor)
                self.tensor_io.wait_writes()
                if slot.rows is not None:
                    self.tensor_io.read_value(slot, slot.rows.view)
                    slot.rows.is_shown = True
        record.copies.sync(version)

    def _sync(self, record: StoredParameter) -> None:
        self.keep_writes(record)
        if record.copies.compute.row_code is not None:
            self._encode_written(record)
            rows = record.copies.compute.rows
            if rows is not None and rows.is_shown and not record.copies.compute.may_change_unseen:
                rows.hide()
            return
        version = record.version
        if record.copies.is_synced(version):
            return
        self.join_master(record)
        if record.copies.are_two:
            with self.failing_on_error():
                shard = record.shard
                compute, master = record.copies.compute.part(shard), record.copies.master.elements(shard)
                self.tensor_io.write_value(compute, master.view(compute.tensor.shape))
                self.tensor_io.wait_writes()
        record.copies.sync(version)

    def _is_behind(self, record: StoredParameter) -> bool:
        """Return whether other ranks have updated their rows of a copy that is whole here since they were gathered."""
        return self.ranks.size > 1 and record.copies.is_behind(record.update.count)

    def _start_spread(self, records: Sequence[StoredParameter]) -> None:
        """Start gathering the updated rows of copies that every rank has whole. Every rank does so in the same order."""
        shards: list[Tensor] = []
        wholes: list[Tensor] = []
        padded: list[tuple[Tensor, Tensor]] = []
        for record in records:
            self.finish(record)
            each = Slice.of_whole(record.name, record.shape).among(self.ranks.size).num_elements
            for slot in record.copies.all:
                if slot.num_ranks == 1:
                    whole, shard = slot.tensor.detach().view(-1), slot.elements(record.shard)
                    if each * self.ranks.size != whole.numel():
                        shard = torch.nn.functional.pad(shard, (0, each - shard.numel()))
                        padded.append((whole, whole := shard.new_empty(each * self.ranks.size)))
                    shards.append(shard)
                    wholes.append(whole)
        if wholes:
            with self.failing_on_error():
                collective = self.ranks.all_gather("the all-gather of updated residents", shards, wholes)
            names = tuple(record.name for record in records)
            self._spreads.update(dict.fromkeys(names, _Spread(names=names, collective=collective, padded=padded)))
            self.meter.add_collective("all-gather", sum(whole.nbytes for whole in wholes))
        for record in records:
            record.copies.note_spread(record.update.count)

    def _finish_spread_of(self, record: StoredParameter) -> None:
        if record.name in self._spreads:
            self._finish_spread(self._spreads[record.name])

    def _finish_spread(self, spread: "_Spread") -> None:
        with self.failing_on_error(), self.meter.stall("updated residents"):
            self.ranks.wait(spread.collective)
        for name in spread.names:
            del self._spreads[name]
        for target, gathered in spread.padded:
            target.copy_(gathered[: target.numel()])

    @without_interrupts
    def finish(self, record: StoredParameter, *, may_leave: bool = True, only_read: bool = False) -> None:
        """Block until nothing is in flight for one parameter: no update, no copy to the device, no read of it in place.

        Does not raise for an update that failed, which leaves the parameter torn and the store failed. StoreError in a
        child that was forked meanwhile, where the update would never end. With ``may_leave`` an interrupt may raise.
        ``only_read``: the caller writes nothing, so that ops may go on reading.
        """
        if self.is_forked:
            self._refuse_in_flight(record)
            return
        for gather in record.update.gathers.copy():
            if gather.is_awaited:
                gather.wait_landed()
        if record.update.is_read_in_place and not only_read:
            # Hazard: ops that are enqueued and not yet done may read what the caller is about to write.
            self.device.compute.record().wait()
            record.update.end_reads_in_place()
        update = record.update.future
        if update is None:
            return
        if not update.done():
            with self.meter.stall(f"update of {record.name}"):
                wait_future(update, f"the update of {record.name}", gone=self._why_no_update, may_leave=may_leave)
        record.update.end_wait(update)

    def _why_no_update(self) -> str | None:
        """Return why an update in flight will never end; None if it may still end."""
        if self.updates.is_idle:
            return "the update thread has no more work"
        return self.updates.why_gone()

    @without_interrupts
    def synchronize(self) -> None:
        """Block until nothing is in flight for any parameter. Raises the StoreError of an update that failed."""
        self._check_process()
        if self.early_step is not None:
            self.early_step.flush()
        if not self.updates.is_idle:
            with self.meter.stall("optimizer step"):
                self.updates.wait(may_leave=True)
        self.finish_gradients()
        for record in self.records.values():
            self.finish(record)
        self.check_not_failed()
        for record in self.records.values():
            self.keep_writes(record)

    # Life

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """A block in which no other thread can run a graph, step synchronously, save or load.

        StoreError if this thread is in such a block already: a signal handler that saves would wait for itself.
        """
        with holding(self._lock, f"{what}, behind what this model does on another thread"):
            if self._busy is not None:
                raise StoreError(
                    f"{what} cannot begin inside {self._busy} of the same model, as from a signal handler or a hook; set "
                    "a flag there, and do it after the step"
                )
            self._busy = what
            try:
                yield
            finally:
                self._busy = None

    def await_compute(self) -> None:
        """Block until the device has finished the work on its compute stream."""
        self.device.follow()
        self.device.compute.record().wait()

    def follow_compute(self) -> None:
        """Use the caller's current stream as the compute stream. Called on the model's thread before it runs ops."""
        self.device.follow()

    @property
    def is_open(self) -> bool:
        """Return whether transfers are possible: the store is not closed, not failed, and this process owns it."""
        return not self._closed and self._failure is None and not self.is_forked

    @without_interrupts
    def check_usable(self, record: StoredParameter | None = None, *, only_read: bool = False) -> None:
        """Raise StoreError if the store is closed or failed, or if ``record`` is torn after its update has ended.

        ``only_read``: see ``finish``.
        """
        if record is not None:
            self.finish(record, only_read=only_read)
        self.check_open()
        self.check_not_failed()
        if record is not None and record.update.is_torn:
            raise torn_error(record)
        if record is not None:
            self.keep_writes(record)
        if record is not None and record.copies.seat.is_held:
            raise UnsupportedError(
                f"'{record.name}' is held by full_parameters(), whose tensor has its value now; do this after the block"
            )

    def check_whole(self) -> None:
        """Wait for updates, and raise StoreError if the store has failed: its parameters are then of different steps.

        Does not raise for a closed store or in a forked child, where some values can still be read.
        """
        if not self.is_forked and not self.updates.is_idle:
            self.synchronize()
        self.check_not_failed()

    def check_not_failed(self) -> None:
        """Raise StoreError if the store has failed so far, or if damaged bytes were found on the disk."""
        if self._verified is not None and self._verified.damage is not None:
            self.fail(self._verified.damage)
        if self.early_step is not None and (updated := self.early_step.find_broken()):
            broken = StoreError("a backward that updates parameters (step_in_backward) did not finish")
            self.fail(broken, updated=updated)
        if self._failure is not None:
            raise StoreError(self._failure)

    def check_open(self) -> None:
        """Raise StoreError if the store was closed, or belongs to another process."""
        if self._closed:
            raise StoreError("the store of this model is closed; build and optimize the model again to train it")
        if self._is_without_group and is_grouped():
            raise RankError(
                "torch.distributed was initialised after this model was optimized, so each rank would train it by itself; "
                "call torch.distributed.init_process_group() before zinf_compile.optimize(model)"
            )
        self._check_process()

    # Forked children

    @property
    def is_forked(self) -> bool:
        """Return whether this process was forked from the one that owns the store."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self.is_forked:
            raise StoreError(
                "this model lives in a store of another process, whose threads a fork does not copy; use it in the process "
                "that called optimize(), or start workers with 'spawn' and build the model there"
            )

    def leave_to_parent(self) -> None:
        """See Forkable.leave_to_parent."""
        self._finalizer.detach()  # it would wait for threads that do not exist here
        self._lock, self._busy = threading.RLock(), None
        self.meter.leave_to_parent()
        if self.engine is not None:
            self._views.update(self.engine.leave_to_parent())
        for file in self._weight_files.values():
            file.leave_to_parent()
        for record in self.records.values():
            if (update := record.update.future) is not None and has_ended(update):
                record.update.end_wait(update)

    def let_go(self, record: StoredParameter, home: Tensor) -> None:
        """Record that user code gets a home tensor and may change it. With ``verify_store``, StoreError if it is damaged."""
        self.io_pool.uses.note()
        if record.gradient.slot is None or not record.gradient.slot.is_home_of(home):
            record.update.note_look()
        if self._verified is None:
            return
        for slot in _all_slots(record):
            if slot.extent is not None and slot.rows is None and slot.is_home_of(home):
                with self.failing_on_error():
                    self._verified.let_go(slot.extent.offset, slot.extent.reserved_nbytes)

    def take_into_child(self, record: StoredParameter, home: Tensor) -> None:
        """In a forked child: copy a home tensor, as it was at the fork, to private memory. StoreError if that fails."""
        self._refuse_in_flight(record)
        if not self.device.memory.unified:
            raise StoreError(
                f"'{record.name}' is in device memory, or in pinned memory, which a fork does not copy; give the child a "
                "copy made before the fork, such as parameter.detach().clone()"
            )
        if (address := memory_of(home).data_ptr()) not in self._views:
            return  # in memory, or copied already
        uses = self.io_pool.uses
        if uses.was_at_rest and uses.is_unchanged:
            touch_pages(memory_of(home))
            if uses.is_unchanged:
                self._views.discard(address)
                return
        raise StoreError(
            f"'{record.name}' may have changed since this process was forked: the parent has continued training; read it "
            "before that, or give the child a copy made before the fork, such as parameter.detach().clone()"
        )

    def _refuse_in_flight(self, record: StoredParameter) -> None:
        if record.update.future is not None:
            raise StoreError(
                f"'{record.name}' was being updated when this process was forked, and has no value here; call "
                "zinf_compile.synchronize(model) before the fork"
            )

    @contextmanager
    def failing_on_error(self) -> Iterator[None]:
        """A block in which an error of a read or write makes the store fail."""
        try:
            yield
        except StoreError as error:
            self.fail(error)
            raise

    @without_interrupts
    def fail(self, error: BaseException, *, updated: Sequence[StoredParameter] = ()) -> None:
        """Refuse to compute and to step until a checkpoint is loaded, and add a note that says so to ``error``.

        ``updated`` are the parameters whose update was complete when a step failed. Later failures are ignored.
        """
        if self._failure is not None or self._closed or self.is_forked:
            return
        self.ranks.fail(describe_error(error))  # first, so that no rank waits for this one any longer
        with suppress(StoreError):  # nothing may stay in flight; what failed is in failed_slots
            self.tensor_io.wait_writes()
        for record in self.records.values():  # a master copy whose write failed has no value
            if record.copies.master in self.tensor_io.failed_slots:
                record.update.tear()
        torn = [record.name for record in self.records.values() if record.update.is_torn]
        state = describe_state(updated=[record.name for record in updated], torn=torn)
        if isinstance(error, DamageError) and not updated and not torn:
            state = "no update was cut short"
        self._failure = f"an earlier error stopped this model: {describe_error(error)}; {state}; {REMEDY}"
        self._unsure = set(self.records)
        error.add_note(f"zinf_compile: {state}; {REMEDY}")

    @contextmanager
    def rewriting(self, records: Sequence[StoredParameter]) -> Iterator[None]:
        """A block that rewrites every copy and the optimizer state of some parameters, which are valid afterwards.

        A store that has failed can compute again once all of its parameters were rewritten. An error in the block leaves
        these parameters torn.
        """
        with suppress(StoreError):
            self.check_not_failed()
        if self.updates_ahead is not None:
            self.updates_ahead.drop("parameters were loaded")
        if self.background_work is not None:
            self.background_work.drop()
        in_place = [record for record in records if record.copies.in_place is not None]
        if in_place:
            assert self.session is not None
            self.session.check_leaving(in_place)
        for record in records:
            record.update.tear()
            record.copies.master.upper = None
        try:
            for record in in_place:
                assert self.session is not None
                self.session.leave_weights(record, with_value=False)
            yield
            self.tensor_io.wait_writes()
        except BaseException as error:
            self._failure = None  # all parameters are valid again
            self.fail(error)
            raise
        for record in records:
            record.copies.sync(record.version)
            record.update.rewrite()
        if self.early_step is not None:
            self.early_step.forget()
        self._unsure.difference_update(record.name for record in records)
        if not self._unsure:
            self.tensor_io.failed_slots.clear()
            self._failure = None
            if self._verified is not None:
                self._verified.forget_damage()

    @without_interrupts
    def close(self) -> None:
        """Finish what is in flight, and release the file, the threads and the buffers. Safe to call twice.

        In a forked child this does nothing to them: the parent owns them.
        """
        if self.is_forked:
            self._closed = True
        if not self._closed:
            if self.background_work is not None:
                self.background_work.drop()
            if self.early_step is not None:
                self.early_step.flush()
            if self.updates_ahead is not None:
                self.updates_ahead.drop("the model was closed")
            drop_unreduced(self)
            self.updates.close(wait=True)
            self._closed = True
            with suppress(StoreError):  # a write that failed was reported by the step it belonged to
                self.tensor_io.wait_writes()
            self._finalizer()
            self.arena.give_back_all()
            self.arena.drop()

    @without_interrupts
    def check_integrity(self) -> None:
        """Raise VerifyError if a buffer is leaked or two things share bytes once nothing runs."""
        if self.early_step is not None:
            self.early_step.flush()
        self.updates.wait()
        if self.background_work is not None:
            self.background_work.wait()
        self.activations.check_integrity()
        self.staging.check_integrity(expect_idle=True)
        self.arena.check_integrity(expect_idle=True)
        self.layout.check_integrity()


# By the number that ops carry. A graph does not keep its store alive.
_stores: "weakref.WeakValueDictionary[int, Store]" = weakref.WeakValueDictionary()


def find_store(store_id: int) -> Store:
    """Return the store with a number."""
    return _stores[store_id]


def store_of(record: Stored) -> Store:
    """Return the store that holds a parameter."""
    return _stores[record.whole.store.store_id]


def _all_slots(record: StoredParameter) -> Iterator[Slot]:
    yield from record.slots
    yield from record.gradient.held
    for states in record.copies.states_of_others:
        yield from states.values()


def weak_name_at(store: Store) -> Callable[[int], str | None]:
    """Return a function from file offsets to slot names, None for other offsets. It does not keep the store alive."""
    alive = weakref.ref(store)

    def name_at(offset: int) -> str | None:
        found = alive()
        for record in () if found is None else list(found.records.values()):
            for slot in _all_slots(record):
                if slot.extent is not None and 0 <= offset - slot.extent.offset < slot.extent.reserved_nbytes:
                    is_compute = slot is record.copies.compute and record.copies.are_two
                    return f"{slot.name} (compute copy)" if is_compute else slot.name
        return None

    return name_at


def _begin_update_thread(meter: Meter, link: Link) -> None:
    meter.set_aside_this_thread()
    link.begin_thread()


def _room_for_activations(
    config: Config, staging: StagingPool, homes_nbytes: Mapping[Tier, int], tier: Tier
) -> int | None:
    """Return the bytes of a tier's budget that homes and staging leave; None if only the disk is the limit."""
    if tier is Tier.HOST:
        return config.host_memory - staging.capacity - homes_nbytes[tier]
    return None if config.nvme_memory is None else config.nvme_memory - homes_nbytes[tier]


def _close(
    updates: UpdateQueue,
    device_updates: DeviceUpdates,
    reductions: Reductions,
    transfers: Transfers,
    staging: StagingPool,
    memory: TierMemory,
    engine: Engine | None,
    weight_files: Mapping[str, WeightFile],
) -> None:
    with uninterrupted(may_raise=False):  # Python discards exceptions of finalizers
        updates.close(wait=False)  # this may run on the update thread itself, if it held the last reference
        device_updates.close()
        reductions.close()
        transfers.close()
        staging.close()
        memory.close()
        if engine is not None:
            engine.close()
        for file in list(weight_files.values()):
            file.close()
