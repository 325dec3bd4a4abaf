"""Rows: what the slot of a frozen weight stores in fewer bits, and the memory in which its values are shown.

Gathers decode the stored rows into the arena. Users see a plain tensor of the values: its memory has no pages until somebody
looks, and loses them again before the next run.
"""

import mmap

import torch
from torch import Tensor

from zinf_compile.ir.copies import SECTOR_NBYTES, RowCode
from zinf_compile.runtime.storage.row_codes import decode_rows


class Rows:
    """The stored rows of one slot, in host memory or in the file."""

    def __init__(self, code: RowCode, shape: torch.Size, dtype: torch.dtype, stored: Tensor | None) -> None:
        """``stored`` are the bytes of a home in host memory, flat; None of one in the file."""
        self.code, self.stored = code, stored
        self._memory = mmap.mmap(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = torch.frombuffer(self._memory, dtype=dtype).view(shape)
        self.is_shown = False  # the view has the values that are stored
        self.begin()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the stored rows."""
        return self.code.nbytes(self.view.numel())

    def hide(self) -> None:
        """Give the pages of the view back. Nobody else holds a tensor over them."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        self.is_shown = False

    # Writing, from the first element to the last: what does not fill a row, or a sector, waits here

    def begin(self) -> None:
        """Begin to write at the first element."""
        self.num_written = 0  # elements
        self.num_sent = 0  # bytes of their rows
        self.values = torch.empty(0, dtype=self.view.dtype)  # of a row that is not complete
        self.bytes = torch.empty(0, dtype=torch.uint8)  # of a sector that is not

    def range_of(self, first: int, num_elements: int) -> tuple[int, int]:
        """Return where the rows of so many elements begin, and their bytes."""
        row, beyond = divmod(first, self.code.columns)
        assert beyond == 0, f"element {first} is not the first of a row of {self.code.columns}"
        return row * self.code.page_nbytes, self.code.nbytes(num_elements)


def whole_sectors_around(first: int, nbytes: int) -> tuple[int, int]:
    """Return the first byte and the number of bytes of the sectors that have these bytes."""
    start, end = first // SECTOR_NBYTES * SECTOR_NBYTES, first + nbytes
    return start, -(-end // SECTOR_NBYTES) * SECTOR_NBYTES - start


def decode_in_place(code: RowCode, memory: Tensor, first: int, values: Tensor, scratch: Tensor) -> None:
    """Enqueue what fills flat ``values``, at the beginning of ``memory`` on a device, from rows that end at its end.

    They begin at byte ``first``. Many rows are decoded at once, to where no row is that is not decoded yet: of rows of int8
    that become bfloat16 first about half, then half of the rest, and so on. Values of the last ones would be written over
    these themselves, so they are copied to ``scratch``, of ``RowCode.scratch_nbytes``, and decoded there.
    """
    nbytes, columns, wide = code.page_nbytes, code.columns, code.columns * values.element_size()
    count, done = values.numel() // columns, 0
    while done < count:
        start = first + done * nbytes
        end = min(count, start // wide)
        rows = memory[start : start + (end - done) * nbytes]
        if (count - done) * nbytes <= scratch.numel():
            end = count
            rows = scratch[: (end - done) * nbytes].copy_(memory[start : first + end * nbytes])
        decode_rows(code, rows, values[done * columns : end * columns])
        done = end


def decode_behind(code: RowCode, memory: Tensor, first: int, values: Tensor) -> None:
    """Fill flat ``values``, at the beginning of ``memory``, from rows that begin at byte ``first`` of the same memory.

    Row after row: a value is written where a row was that is decoded already. The last rows, over which their own values are
    written, are copied first.
    """
    num_rows, wide = values.numel() // code.columns, code.columns * values.element_size()
    apart = min(num_rows, max(0, (first - wide) // (wide - code.page_nbytes) + 1))
    start = first + apart * code.page_nbytes
    last = memory[start : first + num_rows * code.page_nbytes].clone()
    decode_rows(code, memory[first:start], values[: apart * code.columns])  # in order, by one thread
    decode_rows(code, last, values[apart * code.columns :])
