"""Gathers into the arena: issued, waited for, released.

The compute thread, which runs the model, issues and waits. On a CPU its ops are synchronous: those before an issue are
done, so the transfer may overwrite arena bytes that were released before. On a device with streams they may not be done:
there copies wait for an event that is recorded on the compute stream at the issue.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap
from typing import Protocol

import torch
from torch import Tensor

from zinf_compile.ir.copies import SECTOR_NBYTES
from zinf_compile.ir.errors import RankError, VerifyError, ZinfError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.device import Device
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.process.waiting import wait_future
from zinf_compile.runtime.ranks.ranks import ALONE, Ranks
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import Engine, whole_sectors
from zinf_compile.runtime.storage.futures import call_when_done, then_start
from zinf_compile.runtime.storage.nvme.weight_file import WeightFile
from zinf_compile.runtime.storage.row_codes import decode_rows
from zinf_compile.runtime.storage.row_memory import Rows, decode_behind, decode_in_place, whole_sectors_around
from zinf_compile.runtime.storage.slots import Slot, SlotPart, weights_of
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.transfer.gpu_direct import DirectReads, GpuDirectFiller
from zinf_compile.runtime.transfer.in_flight import DirectFiller, Filler, InFlight, LinkFiller, Source
from zinf_compile.runtime.transfer.io_pool import IOPool
from zinf_compile.runtime.transfer.link import Link
from zinf_compile.runtime.transfer.shared_arena import SharedArena, share_arena
from zinf_compile.runtime.transfer.tensor_io import TensorIO

_ROUTING = "the routing of tokens to experts"


class Updated(Protocol):
    """The update of a parameter, as a gather of it sees it."""

    @property
    def future(self) -> "Future[None] | None":
        """An update in flight, which a gather has to wait for."""

    def note_gather(self, gather: InFlight) -> None:
        """Remember a gather that may still read what the next update writes."""


class Gathered(Protocol):
    """What a gather moves: a parameter, or a tile of one."""

    @property
    def name(self) -> str:
        """Its name, for messages."""

    @property
    def update(self) -> Updated:
        """The state of its update."""

    @property
    def shape(self) -> torch.Size:
        """The shape of its whole value."""

    def copy_in(self, dtype: torch.dtype) -> Slot | SlotPart:
        """Return the copy that a gather of ``dtype`` moves."""


class Transfers:
    """The gathers in flight of one store, with its I/O pool and the tensor I/O of its slots."""

    def __init__(
        self,
        *,
        engine: Engine | None,
        staging: StagingPool,
        arena: Arena,
        meter: Meter,
        device: Device = CPU,
        reads_in_place: Callable[[], bool] = lambda: False,
        ranks: Ranks = ALONE,
    ) -> None:
        """``device`` computes, and ``arena`` is in its memory. Each of ``ranks`` moves its shards.

        ``reads_in_place``: see Link.
        """
        self._ranks = ranks
        self._device = device
        self.link = link = Link(device, reads_in_place=reads_in_place)
        self.pool = IOPool(engine=engine, staging=staging, meter=meter, link=link)
        self.tensors = TensorIO(self.pool, arena=arena, meter=meter)
        self._arena = arena
        self._meter = meter
        self._in_flight: dict[int, InFlight] = {}
        self._next_ticket = 0
        self.filler: Filler = DirectFiller(arena, self.pool.read, self.pool.copy)
        if link.is_crossed:
            piece_nbytes = self.pool.piece_elements(torch.uint8)
            self.filler = LinkFiller(arena, link, staging, self.pool.read, piece_nbytes=piece_nbytes, meter=meter)

    def read_directly(self, reads: DirectReads) -> None:
        """Read the file directly into device memory from now on, without staging. Nothing may be in flight."""
        self.filler = GpuDirectFiller(self._arena, self.filler, reads, self._meter, self.link)

    def find_experts(self, ends: Tensor) -> list[range]:
        """Return the experts that have rows, by where the rows of each end. Blocks until the device has computed that."""
        known = ends
        if self.link.is_crossed:
            known = torch.empty(ends.shape, dtype=ends.dtype)
            left = self.tensors.copy_out(ends, known, _ROUTING, Tier.DEVICE)
            with self._meter.stall(_ROUTING):
                self.pool.wait(left, _ROUTING)
        found: list[range] = []
        start = 0
        for expert, end in enumerate(known.tolist()):
            if end > start:
                joins = bool(found) and found[-1].stop == expert
                found.append(range(found.pop().start if joins else expert, expert + 1))
            start = end
        return found

    def issue_gather(
        self,
        records: Sequence[Gathered],
        dtypes: Sequence[torch.dtype],
        offsets: Sequence[int],
        experts: Sequence[range] | None = None,
    ) -> int:
        """Start gathering the copies with these dtypes into the arena at these offsets; return the ticket to wait with.

        Of ``experts`` only these rows; what is at the others is undefined.
        """
        slots = [record.copy_in(dtype) for record, dtype in zip(records, dtypes, strict=True)]
        first, end = offsets[0], offsets[-1] + whole_sectors(slots[-1].nbytes)
        targets, shared = offsets, []
        if self._ranks.size > 1:
            shapes = [record.shape for record in records]
            shared = share_arena(self._ranks, slots, shapes, offsets)
            targets, end = [each.shard_offset for each in shared], shared[-1].end
        scratch = end
        if self.link.is_crossed:
            end += max(map(_decoding_nbytes, slots))
        ticket = self.issue(
            records[0].name if len(records) == 1 else f"{records[0].name} and {len(records) - 1} more",
            first,
            end - first,
            # Enqueued after updates of these parameters, without blocking: compute may need the values much later.
            after=[update for record in records if (update := record.update.future) is not None],
            start=lambda moving: self._start_gather(*_parts_of(slots, targets, experts), moving, scratch),
        )
        self._in_flight[ticket].shared = shared
        if self.link.is_crossed:  # compute continues while copies read the homes: writers must wait for them
            for record in records:
                record.update.note_gather(self._in_flight[ticket])
        return ticket

    def issue(
        self,
        name: str,
        offset: int,
        nbytes: int,
        *,
        after: Sequence[Future[None]],
        start: Callable[[InFlight], None],
    ) -> int:
        """Take arena bytes; when all of ``after`` are done, call ``start``, which starts filling them and adds its futures.

        Returns the ticket to wait with. Errors of ``after`` or ``start`` are raised by that wait.
        """
        self._arena.take(offset, nbytes)
        self._next_ticket += 1
        moving = InFlight(name=name, offset=offset, started=Future(), futures=[], mark=self.link.mark())
        self._in_flight[self._next_ticket] = moving

        def go(error: BaseException | None) -> None:
            if error is not None:
                moving.started.set_exception(error)
                return
            try:
                start(moving)
            except (ZinfError, RuntimeError) as refused:  # such as a pool that was shut down: the wait raises it
                moving.started.set_exception(refused)
            else:
                moving.started.set_result(None)

        call_when_done(after, go)
        return self._next_ticket

    def in_flight(self, ticket: int) -> InFlight:
        """Return a transfer that was issued and not yet released."""
        return self._in_flight[ticket]

    def _start_gather(
        self, slots: Sequence[Slot | SlotPart], offsets: Sequence[int], moving: InFlight, scratch: int
    ) -> None:
        for run in _file_runs(slots, offsets):
            self.filler.fill_from_file(moving, run.slot, run.file_offset, run.arena_offset, run.nbytes)
        for slot, offset in zip(slots, offsets, strict=True):
            if slot.whole.rows is None:
                continue
            if self.link.is_crossed:
                self._start_decoding_there(slot, slot.whole.rows, offset, moving, scratch)
            else:
                self._start_decoding(slot, slot.whole.rows, offset, moving)
        in_memory = [
            Source(slot.tensor, offset, slot.tier, slot.name)
            for slot, offset in zip(slots, offsets, strict=True)
            if slot.in_memory
        ]
        if in_memory:
            self.filler.fill_from_memory(moving, in_memory)

    def _start_decoding(self, slot: Slot | SlotPart, rows: Rows, offset: int, moving: InFlight) -> None:
        """Start decoding rows into the arena of a CPU. From the file they are read to the end of the same arena bytes."""
        values = self._arena.view(offset, (slot.slice.num_elements,), slot.whole.dtype)
        first, nbytes = rows.range_of(slot.slice.offset_in(slot.whole.slice), values.numel())
        if rows.stored is not None:
            self._meter.add_moved(slot.tier, Tier.DEVICE, nbytes)
            decode = partial(decode_rows, rows.code, rows.stored[first : first + nbytes], values)
            moving.futures.append(self.pool.decode(decode, nbytes, slot.tier, slot.name))
            return
        assert slot.whole.extent is not None
        start, read_nbytes = whole_sectors_around(first, nbytes)
        room = whole_sectors(slot.nbytes)
        memory = self._arena.bytes_at(offset, room)
        begin = room - read_nbytes
        if begin < 0:  # of very small tiles
            memory, begin = torch.frombuffer(mmap(-1, read_nbytes), dtype=torch.uint8), 0
        buffer = memory.numpy().data[begin : begin + read_nbytes]
        reads = self.pool.read(slot, slot.whole.extent.offset + start, buffer, Tier.DEVICE)
        where = begin + first - start

        def decode_read() -> None:
            if memory.data_ptr() == values.data_ptr():
                decode_behind(rows.code, memory, where, values)
            else:
                decode_rows(rows.code, memory[where : where + nbytes], values)

        moving.futures.append(then_start(reads, lambda: [self.pool.decode(decode_read, 0, Tier.HOST, slot.name)]))

    def _start_decoding_there(
        self, slot: Slot | SlotPart, rows: Rows, offset: int, moving: InFlight, scratch: int
    ) -> None:
        """Start bringing rows to the end of the arena bytes of their values, and decoding them there on the device."""
        values = self._arena.view(offset, (slot.slice.num_elements,), slot.whole.dtype)
        first, nbytes = rows.range_of(slot.slice.offset_in(slot.whole.slice), values.numel())
        room = whole_sectors(slot.nbytes)
        memory = self._arena.bytes_at(offset, room)
        apart = self._arena.bytes_at(scratch, _decoding_nbytes(slot))

        def decode(begin: int) -> list[Future[None]]:
            change = partial(decode_in_place, rows.code, memory, begin, values, apart)
            moving.copies.append(self.link.change(change))
            return []

        if rows.stored is not None:
            begin = room - nbytes
            stored = rows.stored[first : first + nbytes]
            self.filler.fill_from_memory(moving, [Source(stored, offset + begin, slot.tier, slot.name)])
            decode(begin)
            return
        assert slot.whole.extent is not None
        start, read_nbytes = whole_sectors_around(first, nbytes)
        begin = room - read_nbytes
        if begin < 0:  # of very small tiles
            self._start_decoding_here(slot, rows, values, moving)
            return
        known = len(moving.futures)
        self.filler.fill_from_file(moving, slot, slot.whole.extent.offset + start, offset + begin, read_nbytes)
        moving.futures.append(then_start(moving.futures[known:], partial(decode, begin + first - start)))

    def _start_decoding_here(self, slot: Slot | SlotPart, rows: Rows, values: Tensor, moving: InFlight) -> None:
        """Start reading rows to host memory, decoding them there, and bringing their values to the device."""
        assert slot.whole.extent is not None
        first, nbytes = rows.range_of(slot.slice.offset_in(slot.whole.slice), values.numel())
        start, read_nbytes = whole_sectors_around(first, nbytes)
        memory = mmap(-1, read_nbytes)
        reads = self.pool.read(slot, slot.whole.extent.offset + start, memoryview(memory), Tier.DEVICE)

        def bring() -> list[Future[None]]:
            here = torch.empty(values.numel(), dtype=values.dtype)
            decode_rows(rows.code, torch.frombuffer(memory, dtype=torch.uint8)[first - start :][:nbytes], here)
            pair = here.view(torch.uint8), values.view(torch.uint8)
            moving.copies.append(self.link.bring(*pair, behind=moving.mark))
            return []

        moving.futures.append(then_start(reads, bring))

    def launch_gather(self, ticket: int) -> None:
        """Start the all-gather of a transfer once this rank's shards have arrived: every rank does so in the same order.

        Over a link a stream waits for them, and the caller only until that wait can be enqueued.
        """
        gather = self._in_flight[ticket]
        if gather.collective is not None or gather.gathered is not None or not gather.shared:
            return
        stream = self._device.collectives.gathers
        if stream.synchronous:
            self._wait_arrived(gather)
        else:
            self._wait_enqueued(gather)
            # Hazard: compute may still read what was in the bytes of the whole values. Copies of shards have waited for
            # that, but a rank that has no rows copies none.
            stream.wait(gather.mark)
            for copy in gather.copies:
                stream.wait(copy.event)
        views = [
            (self._arena.view(each.shard_offset, (each.num_elements,), each.dtype), self._whole(each))
            for each in gather.shared
        ]
        shards, wholes = zip(*views, strict=True)
        start = partial(self._ranks.all_gather, f"the all-gather of {gather.name}", shards, wholes)
        if stream.synchronous:
            gather.collective = start()
        else:
            stream.run(lambda: self._ranks.wait(start(), beside=True))
            gather.gathered = stream.record()

    def _whole(self, each: SharedArena) -> Tensor:
        return self._arena.view(each.offset, (self._ranks.size * each.num_elements,), each.dtype)

    def wait_gather(self, ticket: int) -> bool:
        """Block until a transfer is complete; return whether this was its first wait. Raises its first error.

        Over a link the compute stream waits for it, and the caller only until that wait can be enqueued.
        """
        gather = self._in_flight[ticket]
        if gather.is_awaited:
            return False
        self.launch_gather(ticket)
        if gather.shared:
            self._wait_gathered(gather)
            self._meter.add_collective("all-gather", sum(each.whole_nbytes for each in gather.shared))
        else:
            self._wait_arrived(gather)
        gather.is_awaited = True
        return True

    def _wait_gathered(self, gather: InFlight) -> None:
        """Block until the shards of all ranks have arrived, or make the compute stream wait for them."""
        name = f"the all-gather of {gather.name}"
        if gather.gathered is not None:
            with self._meter.stall_on(self.link.compute, name):
                self.link.join(gather.gathered)
            return
        assert gather.collective is not None
        with self._meter.stall(name):
            self._ranks.wait(gather.collective)

    def _wait_arrived(self, gather: InFlight) -> None:
        """Block until the bytes that this rank moves have arrived, or compute will wait for them."""
        self._wait_enqueued(gather)
        with self._meter.stall_on(self.link.compute, gather.name):
            self._join(gather)

    def _wait_enqueued(self, gather: InFlight) -> None:
        """Block until the bytes that this rank moves have arrived or, over a link, their copies are enqueued."""
        if gather.is_ready:
            gather.wait()
        else:
            with self._meter.stall(gather.name):
                gather.wait()

    def _join(self, gather: InFlight) -> None:
        for copy in gather.copies:
            self.link.join(copy.event)

    def release(self, ticket: int) -> None:
        """Release the arena bytes for later transfers. Called after the last op that reads them."""
        gather = self._in_flight[ticket]
        if not gather.is_awaited:
            raise VerifyError(f"transfer of {gather.name} is released before it was waited for")
        del self._in_flight[ticket]
        self._arena.give_back(gather.offset)

    def abandon_gathers(self) -> None:
        """Wait for and drop all gathers in flight, after compute failed between an issue and its release."""
        for ticket in list(self._in_flight):
            gather = self._in_flight[ticket]
            wait_future(gather.started, gather.name)  # only then is the list of calls complete
            for future in gather.futures:
                wait_future(future, gather.name)
            if gather.collective is not None and not gather.is_awaited:
                with suppress(RankError):  # the ranks cannot go on, which was raised before
                    self._ranks.wait(gather.collective)
            with suppress(RuntimeError):  # of CUDA, which was raised before
                if gather.gathered is not None:
                    self.link.join(gather.gathered)
                self._join(gather)  # later ops on these bytes must come after copies that are no longer needed
            gather.is_awaited = True
            self.release(ticket)
        self._arena.give_back_all()  # including bytes taken by an interrupted issue_gather

    def close(self) -> None:
        """Wait for every call in flight and end the threads."""
        self.filler.close()  # first, since it submits reads
        self.pool.close()


def _decoding_nbytes(slot: Slot | SlotPart) -> int:
    """Return the bytes of the arena behind the values of a gather in which a device decodes this slot."""
    rows = slot.whole.rows
    return 0 if rows is None else whole_sectors(rows.code.scratch_nbytes(slot.whole.dtype.itemsize))


def _parts_of(
    slots: Sequence[Slot | SlotPart], offsets: Sequence[int], experts: Sequence[range] | None
) -> tuple[Sequence[Slot | SlotPart], Sequence[int]]:
    """Return what of the slots has to move, and to where: all of them, or the rows of some experts."""
    if experts is None:
        return slots, offsets
    parts: list[Slot | SlotPart] = []
    targets: list[int] = []
    for slot, offset in zip(slots, offsets, strict=True):
        for rows in experts:
            part = slot.slice.part(rows.start, rows.stop)
            parts.append(SlotPart(whole=slot.whole, slice=part))
            targets.append(offset + part.offset_in(slot.slice) * slot.tensor.dtype.itemsize)
    return parts, targets


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileRun:
    """Bytes that are consecutive both in the file and in the arena: one read, for any number of parameters."""

    slot: Slot | SlotPart  # the first one, for messages
    file_offset: int
    arena_offset: int
    nbytes: int


def _file_of(slot: Slot | SlotPart) -> WeightFile | None:
    """Return the weight file that a slot lies in; None for the store file."""
    weights = weights_of(slot)
    return None if weights is None else weights.file


def _file_runs(slots: Sequence[Slot | SlotPart], offsets: Sequence[int]) -> list[_FileRun]:
    runs: list[_FileRun] = []
    for slot, offset in zip(slots, offsets, strict=True):
        # Rows are read apart, to be decoded. The last of several ranks may have nothing of a parameter.
        if slot.in_memory or slot.whole.rows is not None or slot.nbytes == 0:
            continue
        start, _ = slot.byte_range(slot.slice)
        before = offset % SECTOR_NBYTES  # of an expert that begins within a sector; its neighbour's bytes are read, too
        file_offset, arena_offset, nbytes = start - before, offset - before, whole_sectors(before + slot.nbytes)
        last = runs[-1] if runs else None
        if (
            last is not None
            and _file_of(last.slot) is _file_of(slot)
            and last.file_offset <= file_offset <= last.file_offset + last.nbytes
            and last.arena_offset - last.file_offset == arena_offset - file_offset
        ):
            runs[-1] = replace(last, nbytes=file_offset + nbytes - last.file_offset)
        else:
            runs.append(_FileRun(slot=slot, file_offset=file_offset, arena_offset=arena_offset, nbytes=nbytes))
    return runs
