"""Whole tensors between their homes and a file: piece by piece, with a checksum, never all of one in memory."""

import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from zinf_compile.runtime.file_stream import FileReader, FileWriter
from zinf_compile.runtime.futures import wait_all
from zinf_compile.runtime.nvme.engine import ALIGN
from zinf_compile.runtime.slots import Slot
from zinf_compile.runtime.staging import StagingBuffer
from zinf_compile.runtime.transfers import Transfers

_PIECE_NBYTES = 16 * 2**20  # at most: a few calls for each of a store's threads
_NUM_READS = 2  # pieces of a slot on their way in, or looked at


class _Piece(NamedTuple):
    """Bytes of a slot on their way from nvme."""

    lease: StagingBuffer
    nbytes: int
    reads: list[Future[None]]


def write_slot(writer: FileWriter, slot: Slot, transfers: Transfers | None) -> int:
    """Append a slot's tensor to a file; return the CRC-32 of its bytes. One on nvme needs its store's transfers."""
    checksum = 0
    for view in _pieces(slot, transfers):
        checksum = zlib.crc32(view, checksum)
        writer.write(view)
    return checksum


def read_slot(reader: FileReader, slot: Slot, transfers: Transfers | None, *, compute: Slot | None = None) -> int:
    """Fill a slot, and the compute copy made from it, with the next bytes of a file; return their CRC-32.

    What goes to nvme is on its way when this returns; ``transfers.wait_writes`` makes it home.
    """
    checksum = 0
    flat = (
        slot.tensor.reshape(-1).cpu() if slot.in_memory else None
    )  # a copy where it is not contiguous: a user's buffer
    for start, stop in _ranges(slot, transfers):
        lease = _lease(transfers, slot, start, stop) if flat is None else None
        try:
            piece = flat[start:stop] if flat is not None else _staged(lease, slot, stop - start)
            view = tensor_bytes(piece)
            reader.read_into(view)
            checksum = zlib.crc32(view, checksum)
            if compute is not None:
                _convert(piece, compute, start, transfers)
        except BaseException:
            if lease is not None and transfers is not None:
                transfers.staging.return_(lease)
            raise
        if lease is not None and transfers is not None:
            transfers.send_home(slot, start, stop, lease)
    if flat is not None and flat.data_ptr() != slot.tensor.data_ptr():
        slot.tensor.copy_(flat.view(slot.tensor.shape))
    return checksum


def convert_slot(slot: Slot, compute: Slot, transfers: Transfers) -> None:
    """Start filling a compute copy with the value of another slot; ``transfers.wait_writes`` makes it home."""
    for (start, _), view in zip(_ranges(slot, transfers), _pieces(slot, transfers), strict=True):
        _convert(torch.frombuffer(view, dtype=slot.tensor.dtype), compute, start, transfers)


def _convert(piece: Tensor, compute: Slot, start: int, transfers: Transfers | None) -> None:
    """Write the elements of the compute copy from ``start`` on."""
    stop = start + piece.numel()
    if compute.in_memory:
        compute.tensor.view(-1)[start:stop].copy_(piece)
        return
    lease = _lease(transfers, compute, start, stop)
    _staged(lease, compute, stop - start).copy_(piece)
    assert transfers is not None
    transfers.send_home(compute, start, stop, lease)


def _pieces(slot: Slot, transfers: Transfers | None) -> Iterator[memoryview]:
    """Yield a slot's bytes in order; each piece is valid until the next is asked for."""
    if slot.in_memory:
        flat = slot.tensor.reshape(-1).cpu()  # a user's buffer may be on the device
        for start, stop in _ranges(slot, transfers):
            yield tensor_bytes(flat[start:stop])
        return
    assert transfers is not None
    pieces: deque[_Piece] = deque()
    try:
        for start, stop in _ranges(slot, transfers):
            if len(pieces) == _NUM_READS:
                transfers.staging.return_(pieces.popleft().lease)
            lease = _lease(transfers, slot, start, stop)
            nbytes = (stop - start) * slot.tensor.dtype.itemsize
            pieces.append(_Piece(lease, nbytes, transfers.read(slot, slot.byte_range(start, stop)[0], lease.view)))
            if len(pieces) == _NUM_READS:
                yield _landed(pieces[0])
        yield _landed(pieces[-1])
    finally:
        for piece in pieces:
            for read in piece.reads:
                read.exception()  # waits: the buffer must not be used again under a read
            transfers.staging.return_(piece.lease)


def _ranges(slot: Slot, transfers: Transfers | None) -> Iterator[tuple[int, int]]:
    """Yield element ranges that begin at whole sectors, of the slot and of a compute copy of any dtype.

    One is a quarter of staging, so that two of a slot and what a file has in flight are less than there is.
    """
    num_elements = slot.tensor.numel()
    room = _PIECE_NBYTES if transfers is None else min(transfers.staging.capacity // 4, _PIECE_NBYTES)
    step = max(ALIGN, room // slot.tensor.dtype.itemsize // ALIGN * ALIGN)
    for start in range(0, num_elements, step):
        yield start, min(num_elements, start + step)


def _lease(transfers: Transfers | None, slot: Slot, start: int, stop: int) -> StagingBuffer:
    assert transfers is not None
    return transfers.staging.lease(slot.byte_range(start, stop)[1])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in memory, to be read or written."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _staged(lease: StagingBuffer | None, slot: Slot, num_elements: int) -> Tensor:
    assert lease is not None
    return torch.frombuffer(lease.view, dtype=slot.tensor.dtype, count=num_elements)


def _landed(piece: _Piece) -> memoryview:
    wait_all(piece.reads)
    return piece.lease.view[: piece.nbytes]
