"""Files of a checkpoint that several ranks write and read together: each its own rows, or its own tensors, at their place.

The files are those that one process writes. So a checkpoint fits any number of ranks, and one process. All ranks need the
same filesystem.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from zinf_compile.ir.copies import SECTOR_NBYTES, AnyCode, Blocks
from zinf_compile.ir.errors import CheckpointError, StoreError
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.model.model_state import HomedTensor
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.safetensors_file import SafetensorsLayout, TensorSpan
from zinf_compile.runtime.transfer.slot_stream import pieces_of, pieces_to_save, tensor_bytes, values_of

T = TypeVar("T")
_PIECE_NBYTES = 4 * 2**20  # of a read
_POLYNOMIAL = 0xEDB88320  # of CRC-32, bits reversed, as in zlib


class Written(NamedTuple):
    """What a rank wrote of a tensor."""

    crc32: int
    nbytes: int


def create_file(path: Path, layout: SafetensorsLayout) -> None:
    """Create a file with its header, and room for the rows of all ranks."""
    with _reporting(path), open(path, "xb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
        file.flush()
        os.fsync(file.fileno())


def write_mine(path: Path, layout: SafetensorsLayout, tensors: dict[str, HomedTensor], ranks: Ranks) -> list[Written]:
    """Write the tensors that this rank gives to a file, or its rows of them. Returns when they are on disk.

    Only the first of several replicas writes.
    """
    if ranks.replica > 0:
        return [Written(0, 0)] * len(layout.spans)
    written = []
    with writing_at(path) as write:
        for span in layout.spans:
            if (tensor := tensors.get(span.name)) is None:
                written.append(Written(0, 0))
                continue
            pieces, offset = pieces_to_save(tensor.slot, tensor.tensor_io), span.start
            if tensor.is_divided:
                offset += tensor.shard.flat.start * span.dtype.itemsize
                # Pages of other ranks hold other rows, so files have values.
                rows = tensor.slot if tensor.slot.coded is not None else tensor.slot.part(tensor.shard)
                pieces = pieces_of(rows, tensor.tensor_io)
            checksum, end = 0, offset
            for piece in pieces:
                checksum = zlib.crc32(piece, checksum)
                write(piece, end)
                end += len(piece)
            written.append(Written(checksum, end - offset))
    return written


@contextmanager
def writing_at(path: Path) -> Iterator[Callable[[memoryview, int], None]]:
    """Yield a function that writes bytes at an offset of a file; what it wrote is on disk at the end."""
    with _reporting(path), open(path, "r+b", buffering=0) as file:
        yield partial(_write_at, file.fileno())
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # written pages should not stay in memory


def _write_at(descriptor: int, piece: memoryview, offset: int) -> None:
    while piece:
        done = os.pwrite(descriptor, piece, offset)
        piece, offset = piece[done:], offset + done


def read_tensor(path: Path, span: TensorSpan, code: AnyCode | None, tensor: HomedTensor) -> None:
    """Fill a tensor, or this rank's rows of it, from a file that was verified: values, or pages of their codes."""
    if not tensor.is_divided:
        value = read_values(path, span, code, Slice.of_whole(span.name, tensor.shape).flat)
        tensor.slot.tensor.copy_(value.view(tensor.slot.tensor.shape))
        return
    assert tensor.tensor_io is not None
    if tensor.slot.coded is not None:
        tensor.tensor_io.encode_pieces(tensor.slot, partial(read_values, path, span, code))
        return
    step = _PIECE_NBYTES // tensor.slot.dtype.itemsize  # in whole pages of 4096 bytes, so that pieces begin at sectors
    for part in tensor.shard.flat.pieces(step):
        piece = read_values(path, span, code, part)
        for slot in (tensor.slot, tensor.compute):
            if slot is not None:
                tensor.tensor_io.write_value(slot.part(part), piece)


def read_values(path: Path, span: TensorSpan, code: AnyCode | None, part: Slice) -> Tensor:
    """Return some elements of a tensor in a file, flat; decoded, if it is in codes."""
    if code is None:
        values = torch.empty(part.num_elements, dtype=span.dtype)
        _read_at(path, memoryview(tensor_bytes(values)), span.start + part.start * span.dtype.itemsize)
        return values
    assert not isinstance(code, Blocks), "the checkpoint was refused"
    first, skipped = divmod(part.start, code.page_elements)
    pages = torch.empty(code.nbytes(skipped + part.num_elements), dtype=torch.uint8)
    _read_at(path, memoryview(tensor_bytes(pages)), span.start + first * SECTOR_NBYTES)
    return values_of(pages, code, skipped + part.num_elements)[skipped:]


def checksum_of(path: Path, span: TensorSpan) -> int:
    """Return the CRC-32 of a tensor in a file, which is read."""
    checksum, end = 0, span.start + span.nbytes
    for offset in range(span.start, end, _PIECE_NBYTES):
        piece = bytearray(min(_PIECE_NBYTES, end - offset))
        _read_at(path, memoryview(piece), offset)
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _read_at(path: Path, view: memoryview, offset: int) -> None:
    with _reporting(path), open(path, "rb", buffering=0) as file:
        while view:
            done = os.preadv(file.fileno(), [view], offset)
            if done == 0:
                raise CheckpointError(f"{path} ends at byte {offset}, and has more tensors; load another checkpoint")
            os.posix_fadvise(file.fileno(), offset, done, os.POSIX_FADV_DONTNEED)
            view, offset = view[done:], offset + done


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be written or read: {error.strerror or error}") from error


def share_of(tensors: Sequence[T], rank: int, num_ranks: int) -> Sequence[T]:
    """Return the tensors of a file that a rank verifies, which lie side by side."""
    each = -(-len(tensors) // num_ranks)
    return tensors[rank * each : (rank + 1) * each]


def combine(written: Sequence[Written]) -> int:
    """Return the CRC-32 of bytes that lie side by side, from those of the parts."""
    checksum = 0
    for part in written:
        checksum = _advance(checksum, part.nbytes) ^ part.crc32
    return checksum


def _advance(checksum: int, nbytes: int) -> int:
    """Return what a checksum becomes with so many zero bytes behind, but for the inversions, which cancel out.

    Each zero bit multiplies the remainder by x. Powers of x are squared, as in zlib's ``crc32_combine``.
    """
    power, factor = 1 << 31, 1 << 23  # x**0 and x**8
    while nbytes:
        if nbytes & 1:
            power = _multiply(power, factor)
        factor = _multiply(factor, factor)
        nbytes >>= 1
    return _multiply(power, checksum)


def _multiply(left: int, right: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32; the highest bit is x**0."""
    product = 0
    while left:
        if left & (1 << 31):
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product
