"""Tensor I/O: reads, writes, adds to and changes whole tensors of slots, a staging buffer at a time."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zinf_compile.ir.copies import GRADIENT, LOW_HALVES, SECTOR_NBYTES, RowCode, chunk_multiple
from zinf_compile.ir.errors import StoreError, VerifyError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.futures import return_when_done, then_start
from zinf_compile.runtime.storage.low_halves import join
from zinf_compile.runtime.storage.row_codes import decode_rows, encode_rows, round_to_rows
from zinf_compile.runtime.storage.row_memory import Rows, whole_sectors_around
from zinf_compile.runtime.storage.slots import Slot, SlotPart, elements_of
from zinf_compile.runtime.storage.staging import StagingBuffer
from zinf_compile.runtime.transfer.io_pool import IOPool


@dataclass(frozen=True, slots=True, eq=False)
class _Landed:
    """A part of a gradient on nvme whose bytes may still be in staging, where its write has left them."""

    part: Slice
    version: int  # of the home tensor, by autograd's count, which rises where somebody writes in place


class TensorIO:
    """Reads and writes of whole tensors in one store's slots.

    Writes continue in the background; ``wait_writes`` waits for all of them.
    """

    def __init__(self, pool: IOPool, *, arena: Arena, meter: Meter) -> None:
        """``pool`` reads and writes. Device values that lie in ``arena`` are copied first, since arena bytes are reused."""
        self.pool = pool
        self.link, self.staging = pool.link, pool.staging
        self._meter = meter
        self._arena = arena
        self._writes: list[tuple[Slot, Future[None]]] = []
        self.failed_slots: list[Slot] = []  # slots with a failed write: their content is undefined
        self.keeps_gradients = False  # somebody will read them soon: what is written of them is remembered
        self._landed: weakref.WeakKeyDictionary[Slot, list[_Landed]] = weakref.WeakKeyDictionary()

    def write_value(
        self,
        slot: Slot | SlotPart,
        value: Tensor,
        source: Tier = Tier.HOST,
        *,
        nonzero: Sequence[Slice] | None = None,
    ) -> None:
        """Start writing ``value`` to a slot; ``wait_writes`` completes it. The caller may reuse ``value`` at once.

        A value on a device with its own memory is copied on a stream, after the ops that compute it, and must not be
        changed any more. Only ``nonzero`` parts of it are read, if they are given: all others are zero. Of a weight in rows
        of int8 parts come in order, from its first element on.
        """
        if slot.whole.row_code is not None:
            self._write_rows(slot, value.detach().reshape(-1).to(slot.whole.dtype).contiguous(), source)
            return
        moved = [slot.slice.flat] if nonzero is None else [each.flat for each in nonzero]
        if source is Tier.DEVICE and self.link.is_crossed:
            self._write_from_device(slot, value, moved)
            return
        if slot.in_memory:
            if nonzero is None:
                slot.tensor.view(value.shape).copy_(value)
                self._meter.add_moved(source, slot.tier, slot.nbytes)
                return
            for zeros in slot.slice.without(nonzero):
                _rows_of(slot.tensor, slot.slice, zeros).zero_()
            for rows in nonzero:  # the value may have another layout
                _rows_of(slot.tensor, slot.slice, rows).copy_(_rows_of(value, slot.slice, rows))
            self._meter.add_moved(source, slot.tier, _nbytes_of(slot, nonzero))
            return
        flat = value.reshape(-1)
        for part, lease in self._leases(slot):
            with lease.handed_on():
                staged = torch.frombuffer(lease.view, dtype=slot.tensor.dtype, count=part.num_elements)
                for zeros in part.without(moved):
                    elements_of(staged, part, zeros).zero_()
                for each in _common(part, moved):
                    elements_of(staged, part, each).copy_(elements_of(flat, slot.slice, each))
                self.send_home(slot, part, lease, source)

    def _write_rows(self, slot: Slot | SlotPart, values: Tensor, source: Tier) -> None:
        whole, code, rows = slot.whole, slot.whole.row_code, slot.whole.rows
        assert code is not None
        first = slot.slice.offset_in(whole.slice)
        if rows is None:  # on the device, decoded
            self._meter.add_moved(source, whole.tier, values.nbytes)
            flat = whole.tensor.detach().view(-1)
            flat[first : first + values.numel()].copy_(values)
            start, end = first // code.columns, (first + values.numel()) // code.columns
            for written in flat[start * code.columns : end * code.columns].split(self._row_elements(code)):
                here = written.cpu()
                round_to_rows(code, here)
                written.copy_(here)
            return
        values = values.cpu()
        if first == 0:
            rows.begin()
        if first != rows.num_written:
            raise VerifyError(f"{slot.name} is written at element {first}, behind {rows.num_written} that were written")
        rows.num_written += values.numel()
        values = torch.cat([rows.values, values]) if rows.values.numel() else values
        complete = values.numel() // code.columns * code.columns
        rows.values = values[complete:].clone()
        for some in values[:complete].split(self._row_elements(code)):
            encoded = torch.empty(code.nbytes(some.numel()), dtype=torch.uint8)
            encode_rows(code, some, encoded, num_threads=torch.get_num_threads())
            self._send_rows(whole, rows, encoded, source)
        if rows.num_written == whole.tensor.numel():
            self._send_rows(whole, rows, torch.zeros(-rows.nbytes % SECTOR_NBYTES, dtype=torch.uint8), source)
            rows.is_shown = False

    def _send_rows(self, slot: Slot, rows: Rows, encoded: Tensor, source: Tier) -> None:
        """Start writing bytes of rows behind those that were sent before; what does not fill a sector waits."""
        if rows.stored is not None:
            piece = rows.stored[rows.num_sent : rows.num_sent + encoded.numel()]
            piece.copy_(encoded[: piece.numel()])
            self._meter.add_moved(source, slot.tier, piece.numel())
            rows.num_sent += encoded.numel()
            return
        assert slot.extent is not None
        encoded = torch.cat([rows.bytes, encoded])
        complete = encoded.numel() // SECTOR_NBYTES * SECTOR_NBYTES
        rows.bytes = encoded[complete:].clone()
        for some in encoded[:complete].split(self.pool.piece_elements(torch.uint8)):
            lease = self.pool.lease(some.numel(), f"room for {slot.name}")
            with lease.handed_on():
                torch.frombuffer(lease.view, dtype=torch.uint8).copy_(some)
                futures = self.pool.write(slot, slot.extent.offset + rows.num_sent, lease.view, source)
                return_when_done(self.staging, lease, futures)
            self._writes += [(slot, future) for future in futures]
            rows.num_sent += some.numel()

    def _row_elements(self, code: RowCode) -> int:
        """Return the elements of so many rows that they fit into a staging buffer with what their first sector has."""
        room = self.pool.piece_elements(torch.uint8) - 2 * SECTOR_NBYTES
        return max(1, room // code.page_nbytes) * code.columns

    def _decoded_rows(self, slot: Slot | SlotPart, destination: Tier) -> Iterator[tuple[Slice, Tensor]]:
        """Yield consecutive parts of a slot of rows and their encoded bytes, valid until the next is asked for; blocks."""
        whole, rows = slot.whole, slot.whole.rows
        assert rows is not None
        for part in slot.slice.flat.pieces(self._row_elements(rows.code)):
            first, nbytes = rows.range_of(part.offset_in(whole.slice), part.num_elements)
            if rows.stored is not None:
                self._meter.add_moved(slot.tier, destination, nbytes)
                yield part, rows.stored[first : first + nbytes]
                continue
            assert whole.extent is not None
            start, staged = whole_sectors_around(first, nbytes)
            with self.pool.lease(staged, f"room for {slot.name}") as lease:
                self.pool.wait(self.pool.read(slot, whole.extent.offset + start, lease.view, destination), slot.name)
                yield part, torch.frombuffer(lease.view, dtype=torch.uint8)[first - start : first - start + nbytes]

    def encode_value(self, slot: Slot, value: Tensor) -> None:
        """Start writing a value to a slot as codes; ``wait_writes`` completes it. The caller may reuse ``value`` at once."""
        assert slot.coded is not None
        self.encode_pieces(slot, partial(slot.coded.piece_of, slot.coded.flat(value)))

    def encode_pieces(self, slot: Slot, value_of: Callable[[Slice], Tensor]) -> None:
        """Start writing to a slot as codes what ``value_of`` returns of each part of its values, flat and on the CPU."""
        assert slot.coded is not None
        coded = slot.coded
        for part in self._pieces(slot):
            values = coded.values_of(part)
            piece = value_of(values)
            if slot.in_memory:
                coded.encode(piece, slot.elements(part), first=values.start)
                continue
            lease = self.pool.lease(part.num_elements, f"room for {slot.name}")
            with lease.handed_on():
                coded.encode(piece, torch.frombuffer(lease.view, dtype=torch.uint8), first=values.start)
                self.send_home(slot, part, lease)

    def _write_from_device(self, slot: Slot | SlotPart, value: Tensor, moved: Sequence[Slice]) -> None:
        flat = self._outliving(value, slot.tensor.dtype)
        if slot.in_memory:
            for zeros in slot.slice.flat.without(moved):  # on a thread: compute goes on
                home = slot.elements(zeros).data  # filled later, it keeps its version, which tells of edits of users
                self._writes.append((slot.whole, self.pool.submit(_clear, home)))
            for part in moved:
                left = self._leave(elements_of(flat, slot.slice, part), slot.elements(part), slot.name)
                self._meter.add_moved(Tier.DEVICE, slot.tier, _nbytes_of(slot, [part]))
                self._writes.append((slot.whole, left))
        else:
            for part, lease in self._leases(slot):
                with lease.handed_on():
                    here = torch.frombuffer(lease.view, dtype=flat.dtype, count=part.num_elements)
                    for zeros in part.without(moved):
                        elements_of(here, part, zeros).zero_()
                    left = None
                    for each in _common(part, moved):  # one after another: when the last has left, all have
                        piece = elements_of(flat, slot.slice, each)
                        left = self._leave(piece, elements_of(here, part, each), slot.name)
                    self.send_home(slot, part, lease, Tier.DEVICE, after=left)
        self.link.let_go(flat)

    def _leave(self, source: Tensor, here: Tensor, name: str) -> Future[None]:
        """Start copying flat elements on the device to host memory."""
        timing = self._meter.copying(Tier.DEVICE, Tier.HOST, here.nbytes, name)
        return self.link.take(_as_bytes(source), _as_bytes(here), timing=timing).done

    def copy_out(self, value: Tensor, destination: Tensor, name: str, source: Tier) -> Sequence[Future[None]]:
        """Start copying a value to flat host memory; return what is done when it is there.

        The caller may reuse ``value`` at once, and must not change it on a device with its own memory.
        """
        if source is not Tier.DEVICE or not self.link.is_crossed:
            destination.copy_(value.detach().reshape(-1))
            return ()
        flat = self._outliving(value, destination.dtype)
        self._meter.add_moved(Tier.DEVICE, Tier.HOST, destination.nbytes)
        left = self._leave(flat, destination, name)
        self.link.let_go(flat)
        return (left,)

    def _outliving(self, value: Tensor, dtype: torch.dtype, *, is_overwritten: bool = False) -> Tensor:
        """Return a device value, flat, in memory that nobody else overwrites before its copies are done.

        If the caller overwrites it, in memory of its own.
        """
        is_copied = value.dtype != dtype or not value.is_contiguous()
        must_move = is_overwritten or self._arena.holds(value)
        if is_copied or must_move:
            self.link.make_room(value.numel() * dtype.itemsize)  # for a copy
        flat = value.detach().to(dtype).contiguous().view(-1)
        return flat.clone() if must_move and not is_copied else flat

    def _pieces(self, slot: Slot | SlotPart) -> Iterator[Slice]:
        """Yield consecutive parts of a slot, each of which fits into a staging buffer."""
        return slot.slice.flat.pieces(self.pool.piece_elements(slot.tensor.dtype))

    def _leases(self, slot: Slot | SlotPart) -> Iterator[tuple[Slice, StagingBuffer]]:
        """Yield the parts of a slot, each with a staging buffer for it."""
        for part in self._pieces(slot):
            yield part, self.pool.lease(slot.byte_range(part)[1], f"room for {slot.name}", in_shares=True)

    def add_value(
        self,
        slot: Slot | SlotPart,
        value: Tensor,
        source: Tier = Tier.HOST,
        *,
        on_sum: Callable[[Tensor, Tensor | None], None] | None = None,
        with_scratch: bool = False,
    ) -> None:
        """Start adding ``value`` to a slot; ``wait_writes`` completes it.

        ``on_sum`` is called with the whole sum where that is at hand: if it is added up on the device, or if the slot is on
        nvme and half of staging can hold it. On the device it also gets memory like that of the sum, to be overwritten, if
        it is to be called ``with_scratch``.
        """
        if source is Tier.DEVICE and self.link.is_crossed:
            # Two largest gradients may be leaving at once.
            if slot.in_memory and 2 * slot.nbytes <= self.link.leaving_limit:
                self._add_on_device(slot, value, on_sum, with_scratch=with_scratch)
            else:
                self._add_from_device(slot, value)
            return
        if slot.in_memory:
            slot.tensor.add_(value.to(slot.tensor.dtype))
            self._meter.add_moved(source, slot.tier, slot.nbytes)
            return
        flat = value.reshape(-1)

        def add(piece: Tensor, part: Slice) -> None:
            piece.add_(elements_of(flat, slot.slice, part).to(piece.dtype))
            if on_sum is not None and piece.numel() == flat.numel():
                on_sum(piece.view(slot.tensor.shape), None)

        self.rewrite_value(slot, add, source, whole=on_sum is not None and slot.nbytes <= self.staging.capacity // 2)

    def _add_on_device(
        self,
        slot: Slot | SlotPart,
        value: Tensor,
        on_sum: Callable[[Tensor, Tensor | None], None] | None,
        *,
        with_scratch: bool,
    ) -> None:
        """Start adding a value on the device to a slot in host memory: there, beside compute, for processors are slower."""
        self.link.make_room(2 * slot.nbytes)  # for the sum, and for a copy of the value
        flat = self._outliving(value, slot.tensor.dtype, is_overwritten=with_scratch)
        self.wait_writes_of(slot)

        def add(there: Tensor) -> None:
            there.add_(flat)
            if on_sum is not None:
                scratch = flat.view(slot.tensor.shape) if with_scratch else None  # it has been added
                on_sum(there.view(slot.tensor.shape), scratch)

        home = slot.elements(slot.slice.flat).data  # has a version of its own: that of the home tells of edits of users
        routes = ((slot.tier, Tier.DEVICE), (Tier.DEVICE, slot.tier))
        there, back = (self._meter.copying(*route, home.nbytes, slot.name) for route in routes)
        if not self.link.reads_in_place():
            for route in routes:
                self._meter.add_moved(*route, home.nbytes)
        added = self.link.rewrite(home, add, (there, back))
        self._writes.append((slot.whole, added.done))
        self.link.let_go(flat, left=added.event)

    def _add_from_device(self, slot: Slot | SlotPart, value: Tensor) -> None:
        flat = self._outliving(value, slot.tensor.dtype)
        self.wait_writes_of(slot)
        for part in self._pieces(slot):
            piece = elements_of(flat, slot.slice, part)
            lease = self.pool.lease(piece.numel() * piece.dtype.itemsize, f"room for {slot.name}")
            here = torch.frombuffer(lease.view, dtype=piece.dtype, count=piece.numel())
            timing = self._meter.copying(Tier.DEVICE, Tier.HOST, lease.nbytes, slot.name)
            try:
                left = self.link.take(_as_bytes(piece), _as_bytes(here), timing=timing).done
            except RuntimeError:  # of CUDA, after an earlier kernel failed
                self.staging.return_(lease)
                raise
            if slot.in_memory:
                home = slot.elements(part).data  # adding later changes no version, by which edits of users are told
                self._meter.add_moved(Tier.DEVICE, slot.tier, lease.nbytes)
                added = then_start([left], partial(self._add_on_thread, home, here, part))
                return_when_done(self.staging, lease, [added])
                self._writes.append((slot.whole, added))
                continue
            try:
                self.pool.wait([left], slot.name)
                self._rewrite(slot, part, partial(_add, here))
            finally:
                self.staging.return_(lease)
        self.link.let_go(flat)

    def _add_on_thread(self, home: Tensor, addend: Tensor, part: Slice) -> list[Future[None]]:
        return [self.pool.submit(_add, addend, home, part)]

    def writes_of(self, slot: Slot | SlotPart) -> list[Future[None]]:
        """Return the writes to a slot that were started since ``wait_writes``."""
        return [future for written, future in self._writes if written is slot.whole]

    def wait_writes_of(self, slot: Slot | SlotPart) -> None:
        """Block until every write to a slot so far is complete; raise the StoreError of one that failed."""
        self.pool.wait(self.writes_of(slot), slot.name)

    def rewrite_value(
        self,
        slot: Slot | SlotPart,
        change: Callable[[Tensor, Slice], object],
        source: Tier = Tier.HOST,
        *,
        whole: bool = False,
    ) -> None:
        """Read a slot on nvme a staging buffer at a time, or ``whole``, change it, and start writing it back.

        ``change`` gets flat elements, to be changed in place, and their slice of the parameter. ``wait_writes``
        completes the writes.
        """
        self.wait_writes_of(slot)
        elements = slot.slice.flat
        for part in elements.pieces(max(1, elements.length)) if whole else self._pieces(slot):
            self._rewrite(slot, part, change, source)

    def _rewrite(
        self,
        slot: Slot | SlotPart,
        part: Slice,
        change: Callable[[Tensor, Slice], object],
        source: Tier = Tier.HOST,
    ) -> None:
        offset, nbytes = slot.byte_range(part)
        lease = self.pool.lease(nbytes, f"room for {slot.name}")
        with lease.handed_on():
            self.pool.wait(self.pool.read(slot, offset, lease.view), slot.name)
            change(torch.frombuffer(lease.view, dtype=slot.tensor.dtype, count=part.num_elements), part)
            self.send_home(slot, part, lease, source)

    def send_home(
        self,
        slot: Slot | SlotPart,
        part: Slice,
        lease: StagingBuffer,
        source: Tier = Tier.HOST,
        *,
        after: Future[None] | None = None,
    ) -> None:
        """Start writing a part of a slot from ``lease``, which is returned to staging when that is done.

        ``wait_writes`` completes it. The bytes of the lease are valid once ``after`` is done.
        """
        offset = slot.byte_range(part)[0]
        if after is None:
            futures = self.pool.write(slot, offset, lease.view, source)
        else:
            view = lease.view
            futures = [then_start([after], lambda: self.pool.write(slot, offset, view, source))]
        landed = self._note_landing(slot.whole, part) if slot.whole.key == GRADIENT else None
        return_when_done(self.staging, lease, futures, holds=landed)
        self._writes += [(slot.whole, future) for future in futures]

    def _note_landing(self, slot: Slot, part: Slice) -> _Landed | None:
        """Forget what staging holds of a part of a gradient, which is written now; return the note of what it will hold."""
        others = [each for each in self._landed.pop(slot, ()) if each.part.intersect(part) is None]
        landed = _Landed(part, slot.tensor._version) if self.keeps_gradients else None
        if landed is not None:
            others.append(landed)
        if others:
            self._landed[slot] = others
        return landed

    def copy_landed(self, slot: Slot, part: Slice, buffer: memoryview) -> bool:
        """Fill a buffer with a part of a gradient as it was written last, if staging still holds that.

        False if not, or if it was changed in place since: then the buffer holds anything.
        """
        version = slot.tensor._version
        written = [landed for landed in self._landed.get(slot, ()) if landed.version == version]
        if next(part.without([each.part for each in written]), None) is not None:
            return False
        itemsize = slot.tensor.dtype.itemsize
        for landed in written:
            if (common := part.intersect(landed.part)) is None:
                continue
            if (lease := self.staging.lease_holding(landed)) is None:
                return False
            start, first, nbytes = (
                itemsize * each for each in (common.offset_in(part), common.offset_in(landed.part), common.num_elements)
            )
            buffer[start : start + nbytes] = lease.view[first : first + nbytes]
            self.staging.return_(lease, holds=landed)
        return True

    def wait_writes(self) -> None:
        """Block until every write so far is complete; raise the StoreError of the first that failed."""
        pending = self._writes.copy()
        self._writes.clear()
        writes = [future for _, future in pending]
        try:
            self.pool.wait(writes, "gradients on their way home")
        except StoreError:
            self.failed_slots += [slot for slot, future in pending if future.exception(timeout=0) is not None]
            raise

    def read_value(self, slot: Slot | SlotPart, destination: Tensor) -> None:
        """Fill ``destination``, a contiguous tensor of the slot's dtype, with the whole value; blocks."""
        if (rows := slot.whole.rows) is not None:
            flat = destination.detach().view(-1)
            for part, encoded in self._decoded_rows(slot, Tier.DEVICE):
                values = elements_of(flat, slot.slice, part)
                decode_rows(rows.code, encoded.to(flat.device), values, num_threads=torch.get_num_threads())
            return
        if slot.in_memory:
            destination.copy_(slot.tensor)
            self._meter.add_moved(slot.tier, Tier.DEVICE, slot.nbytes)
            return
        for part, piece in self.read_pieces(slot, Tier.DEVICE):
            elements_of(destination, slot.slice, part).copy_(piece)

    def read_pieces(self, slot: Slot | SlotPart, destination: Tier = Tier.HOST) -> Iterator[tuple[Slice, Tensor]]:
        """Yield the parts of a slot in order, each with its elements; blocks.

        The tensors are flat, and each is valid until the next is requested.
        """
        if (rows := slot.whole.rows) is not None:
            for part, encoded in self._decoded_rows(slot, destination):
                values = torch.empty(part.num_elements, dtype=slot.whole.dtype)
                decode_rows(rows.code, encoded, values, num_threads=torch.get_num_threads())
                yield part, values
            return
        if slot.whole.upper is not None:
            for part in self._joined_parts(slot.whole):
                with self._joined(slot.whole, part, destination) as (piece, _):
                    yield part, piece
            return
        for part in self._pieces(slot):
            if slot.in_memory:
                yield part, slot.elements(part)
                continue
            offset, nbytes = slot.byte_range(part)
            with self.pool.lease(nbytes, f"room for {slot.name}") as lease:
                self.pool.wait(self.pool.read(slot, offset, lease.view, destination), slot.name)
                yield part, torch.frombuffer(lease.view, dtype=slot.tensor.dtype, count=part.num_elements)

    def join(self, slot: Slot) -> None:
        """Write all of a master copy of which there is only what the compute copy lacks; blocks.

        From its end on: the values of a part are written over pages of parts that lie before it, at most of its own.
        """
        assert slot.upper is not None
        for part in reversed(list(self._joined_parts(slot))):
            with self._joined(slot, part) as (_, view):
                self.pool.wait(self.pool.write(slot, slot.byte_range(part)[0], view), slot.name)

    def _joined_parts(self, slot: Slot) -> Iterator[Slice]:
        """Yield consecutive parts of a split master copy, each of which fits into staging with all that it takes."""
        assert slot.upper is not None
        itemsizes = [slot.tensor.dtype.itemsize, slot.upper.tensor.dtype.itemsize]
        multiple = chunk_multiple([LOW_HALVES], itemsizes)
        wanted = self.pool.piece_elements(slot.tensor.dtype) // 2  # beside the values there is as much to join
        return slot.slice.flat.pieces(max(multiple, wanted - wanted % multiple))

    @contextmanager
    def _joined(self, slot: Slot, part: Slice, destination: Tier = Tier.HOST) -> Iterator[tuple[Tensor, memoryview]]:
        """Read a part of a split master copy; inside, give its values and the staged bytes of these."""
        upper, count = slot.upper, part.num_elements
        assert upper is not None
        values_nbytes, (offset, pages_nbytes) = slot.byte_range(part)[1], slot.low_halves_range(part)
        upper_nbytes = 0 if upper.in_memory else upper.byte_range(part)[1]
        with self.pool.lease(values_nbytes + pages_nbytes + upper_nbytes, f"room for {slot.name}") as lease:
            values, rest = lease.view[:values_nbytes], lease.view[values_nbytes:]
            reads = self.pool.read(slot, offset, rest[:pages_nbytes], destination)
            if upper_nbytes:
                reads += self.pool.read(upper, upper.byte_range(part)[0], rest[pages_nbytes:], destination)
            self.pool.wait(reads, slot.name)
            pages = torch.frombuffer(rest, dtype=torch.uint8, count=pages_nbytes)
            halves = (
                torch.frombuffer(rest[pages_nbytes:], dtype=upper.tensor.dtype, count=count)
                if upper_nbytes
                else upper.elements(part)
            )
            piece = torch.frombuffer(values, dtype=slot.tensor.dtype, count=count)
            join(pages, halves, piece, num_threads=torch.get_num_threads())
            yield piece, values


def _add(addend: Tensor, home: Tensor, _: Slice) -> None:
    home.add_(addend)


def _common(part: Slice, others: Sequence[Slice]) -> Iterator[Slice]:
    """Yield what a slice has of some others."""
    return (each for other in others if (each := part.intersect(other)) is not None)


def _rows_of(tensor: Tensor, held: Slice, part: Slice) -> Tensor:
    """Return the rows of a slice in a tensor that holds those of another."""
    return tensor.narrow(held.dim, part.start - held.start, part.length)


def _nbytes_of(slot: Slot | SlotPart, parts: Sequence[Slice]) -> int:
    return sum(part.num_elements for part in parts) * slot.tensor.dtype.itemsize


def _clear(home: Tensor) -> None:
    home.zero_()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
