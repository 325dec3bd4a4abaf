"""Copies whole tensors between their homes and a file: piece by piece, with a checksum, in constant memory."""

import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from zinf_compile.ir.copies import AnyCode, Blocks, Code, chunk_multiple
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.process.waiting import wait_future
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.file_stream import FileReader, FileWriter
from zinf_compile.runtime.storage.futures import wait_all
from zinf_compile.runtime.storage.slots import Slot, SlotPart, elements_of
from zinf_compile.runtime.storage.staging import StagingBuffer
from zinf_compile.runtime.storage.state_codes import decode, encode
from zinf_compile.runtime.transfer.tensor_io import TensorIO

_PIECE_NBYTES = 16 * 2**20  # at most; a few calls for each thread of a store
_CODED_NBYTES = 2**20  # of a piece of codes, whose values take up to four times as much outside of staging
_VALUES = torch.float32  # what is stored in codes
_NUM_READS = 2  # pieces of a slot that are being read or processed


class _Piece(NamedTuple):
    """Bytes of a slot that are being read from nvme."""

    lease: StagingBuffer
    nbytes: int
    reads: list[Future[None]]


def write_slot(writer: FileWriter, slot: Slot, tensor_io: TensorIO | None) -> int:
    """Append a slot's tensor, or the pages of its codes, to a file; return the CRC-32 of what was appended.

    One on nvme needs its ``tensor_io``.
    """
    checksum = 0
    for view in pieces_to_save(slot, tensor_io):
        checksum = zlib.crc32(view, checksum)
        writer.write(view)
    return checksum


def read_slot(
    reader: FileReader,
    slot: Slot,
    tensor_io: TensorIO | None,
    *,
    code: AnyCode | None = None,
    compute: Slot | None = None,
) -> int:
    """Fill a slot, and a compute copy of it, with the next bytes of a file; return their CRC-32.

    The file has values, or the pages of their codes. Where the slot stores them otherwise they are converted. Writes to nvme
    may be in flight when this returns; ``tensor_io.wait_writes`` completes them.
    """
    checksum = 0
    if slot.row_code is not None:
        assert tensor_io is not None
        assert compute is None
        for part in slot.slice.flat.pieces(slot.row_code.columns * max(1, _CODED_NBYTES // slot.row_code.columns)):
            values = torch.empty(part.num_elements, dtype=slot.dtype, device="cpu")
            reader.read_into(view := tensor_bytes(values))
            checksum = zlib.crc32(view, checksum)
            tensor_io.write_value(slot.part(part), values)
        return checksum
    is_alike = code == slot.code
    ours = None if is_alike else _own(code)
    flat = (
        slot.tensor.reshape(-1).cpu() if slot.in_memory else None
    )  # a copy if it is not contiguous, as a user's buffer may be
    for elements in _parts(slot, tensor_io) if is_alike else _parts_of_values(slot, tensor_io, ours):
        part = elements if is_alike else slot.stored(elements)
        lease = _lease(tensor_io, slot, part) if flat is None else None
        try:
            piece = _staged(lease, slot, part) if flat is None else elements_of(flat, slot.slice, part)
            read = piece if is_alike else torch.empty(_file_nbytes(elements, ours), dtype=torch.uint8, device="cpu")
            view = tensor_bytes(read)
            reader.read_into(view)
            checksum = zlib.crc32(view, checksum)
            if not is_alike:
                _fill(piece, _own(slot.code), values_of(read, ours, elements.num_elements), first=elements.start)
            if compute is not None:
                _convert(piece, compute, part, tensor_io)
        except BaseException:
            if lease is not None and tensor_io is not None:
                tensor_io.staging.return_(lease)
            raise
        if lease is not None and tensor_io is not None:
            tensor_io.send_home(slot, part, lease)
    if flat is not None and flat.data_ptr() != slot.tensor.data_ptr():
        slot.tensor.copy_(flat.view(slot.tensor.shape))
    return checksum


def _own(code: AnyCode | None) -> Code | None:
    """Return a code of ours; an optimizer's own ones are moved as they are."""
    assert not isinstance(code, Blocks)
    return code


def _parts_of_values(slot: Slot, tensor_io: TensorIO | None, code: Code | None) -> Iterator[Slice]:
    """Yield consecutive parts of the values of a slot: each begins at a page of its codes, and of those in a file."""
    elements = slot.slice if slot.coded is None else slot.coded.slice
    multiple = chunk_multiple(
        [each.page_elements for each in (code, slot.code) if each is not None], [_VALUES.itemsize]
    )
    room = _CODED_NBYTES if tensor_io is None else min(tensor_io.staging.capacity // 4, _CODED_NBYTES)
    return elements.flat.pieces(max(multiple, room // _VALUES.itemsize // multiple * multiple))


def _file_nbytes(elements: Slice, code: Code | None) -> int:
    return elements.num_elements * _VALUES.itemsize if code is None else code.nbytes(elements.num_elements)


def values_of(read: Tensor, code: Code | None, num_elements: int) -> Tensor:
    """Return so many values, float32, of bytes that were read: of the values, or of pages of their codes."""
    if code is None:
        return read.view(_VALUES)
    values = torch.empty(num_elements, dtype=_VALUES, device="cpu")
    decode(code, read, values)
    return values


def _fill(piece: Tensor, code: Code | None, values: Tensor, *, first: int) -> None:
    """Fill a part of a slot with values; of one of codes, with theirs."""
    if code is None:
        piece.copy_(values)
    else:
        encode(code, values, piece, first=first)


def convert_slot(slot: Slot, compute: Slot, tensor_io: TensorIO) -> None:
    """Start filling a compute copy with the value of another slot; ``tensor_io.wait_writes`` completes it."""
    for part, view in zip(_parts(slot, tensor_io), pieces_of(slot, tensor_io), strict=True):
        _convert(torch.frombuffer(view, dtype=slot.tensor.dtype), compute, part, tensor_io)


def _convert(piece: Tensor, compute: Slot, part: Slice, tensor_io: TensorIO | None) -> None:
    """Write a part of the compute copy from a piece of the master copy."""
    if compute.in_memory:
        compute.elements(part).copy_(piece)
        return
    lease = _lease(tensor_io, compute, part)
    assert tensor_io is not None
    with lease.handed_on():
        _staged(lease, compute, part).copy_(piece)
        tensor_io.send_home(compute, part, lease)


def pieces_of(slot: Slot | SlotPart, tensor_io: TensorIO | None) -> Iterator[memoryview]:
    """Yield the bytes of a slot, or of a part of one, in order; each piece is valid until the next is requested.

    Of a slot of codes these are the bytes of its values.
    """
    if slot.whole.upper is not None or slot.whole.rows is not None:
        assert tensor_io is not None
        yield from (tensor_bytes(piece) for _, piece in tensor_io.read_pieces(slot))
        return
    if isinstance(slot, SlotPart) or slot.coded is None:
        yield from _stored_pieces(slot, tensor_io)
        return
    coded = slot.coded
    for part, view in zip(_parts(slot, tensor_io), _stored_pieces(slot, tensor_io), strict=True):
        values = coded.room(coded.values_of(part).length, torch.device("cpu"))
        yield tensor_bytes(coded.decode(torch.frombuffer(view, dtype=torch.uint8), values))


def pieces_to_save(slot: Slot | SlotPart, tensor_io: TensorIO | None) -> Iterator[memoryview]:
    """Yield the bytes that a file has of a slot, or of a part of one: those of its values, or the pages of its codes."""
    return pieces_of(slot, tensor_io) if slot.whole.coded is None else _stored_pieces(slot, tensor_io)


def _stored_pieces(slot: Slot | SlotPart, tensor_io: TensorIO | None) -> Iterator[memoryview]:
    if slot.in_memory:
        flat = slot.tensor.reshape(-1).cpu()  # a user's buffer may be on the device
        for part in _parts(slot, tensor_io):
            yield tensor_bytes(elements_of(flat, slot.slice, part))
        return
    assert tensor_io is not None
    pieces: deque[_Piece] = deque()
    try:
        for part in _parts(slot, tensor_io):
            if len(pieces) == _NUM_READS:
                tensor_io.staging.return_(pieces.popleft().lease)
            lease = _lease(tensor_io, slot, part)
            nbytes = part.num_elements * slot.tensor.dtype.itemsize
            with lease.handed_on():
                reads = tensor_io.pool.read(slot, slot.byte_range(part)[0], lease.view)
            pieces.append(_Piece(lease, nbytes, reads))
            if len(pieces) == _NUM_READS:
                yield _landed(pieces[0])
        if pieces:
            yield _landed(pieces[-1])
    finally:
        for piece in pieces:
            for read in piece.reads:
                wait_future(read, "a read of the store")  # the buffer must not be reused during the read
            tensor_io.staging.return_(piece.lease)


def _parts(slot: Slot | SlotPart, tensor_io: TensorIO | None) -> Iterator[Slice]:
    """Yield consecutive parts of a slot that begin at a sector, both of the slot and of a compute copy of any dtype.

    A part is a quarter of staging, so that two parts of a slot and the blocks of a file in flight fit.
    """
    room = _PIECE_NBYTES if tensor_io is None else min(tensor_io.staging.capacity // 4, _PIECE_NBYTES)
    if slot.whole.coded is not None:
        room = min(room, _CODED_NBYTES)
    step = max(ALIGN, room // slot.tensor.dtype.itemsize // ALIGN * ALIGN)
    return slot.slice.flat.pieces(step)


def _lease(tensor_io: TensorIO | None, slot: Slot | SlotPart, part: Slice) -> StagingBuffer:
    assert tensor_io is not None
    return tensor_io.staging.lease(slot.byte_range(part)[1])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in memory, readable and writable."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _staged(lease: StagingBuffer | None, slot: Slot, part: Slice) -> Tensor:
    assert lease is not None
    return torch.frombuffer(lease.view, dtype=slot.tensor.dtype, count=part.num_elements)


def _landed(piece: _Piece) -> memoryview:
    wait_all(piece.reads, "a read of the store")
    return piece.lease.view[: piece.nbytes]
