"""The layout of the store file: hands out aligned extents in order, and takes them back."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from zinf_compile.ir.errors import VerifyError
from zinf_compile.runtime.storage.engine import whole_sectors

_LARGE_NBYTES = 2**18  # sixty-four sectors: what is smaller hardly adds to a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes [offset, offset + nbytes) of the file; up to ``reserved_nbytes`` belong to it, as padding."""

    offset: int
    nbytes: int
    reserved_nbytes: int


class FileLayout:
    """Extents of one file. The live ones, the free ones and the holes tile [0, end) exactly, and the last is not free.

    A hole was given back to the disk, and is never laid into again: there might be no room on the disk by then. Extents
    allocated one after another are contiguous as long as none has been freed. Not thread-safe.
    """

    def __init__(self, on_allocate: Callable[[int, int], None] | None = None) -> None:
        """``on_allocate`` is called with offset and bytes of every extent that is handed out."""
        self._on_allocate = on_allocate
        self._live: dict[int, Extent] = {}
        # The free extents, sorted by offset, as two parallel lists; no two of them touch.
        self._free_offsets: list[int] = []
        self._free_nbytes: list[int] = []
        self._holes: dict[int, int] = {}  # bytes by offset
        self._end = 0

    @property
    def end(self) -> int:
        """Return how long the file must be."""
        return self._end

    @property
    def taken_nbytes(self) -> int:
        """Return the bytes that the file takes of the disk: all but holes."""
        return self._end - sum(self._holes.values())

    @property
    def live_nbytes(self) -> int:
        """Return the bytes of all live extents, with their padding."""
        return sum(extent.reserved_nbytes for extent in self._live.values())

    @property
    def free_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return offset and bytes of every free extent, in order."""
        return tuple(zip(self._free_offsets, self._free_nbytes, strict=True))

    def allocate(self, nbytes: int) -> Extent:
        """The smallest free extent that fits, the first of equals, else new bytes at the end.

        A small tensor divides no hole that a large one left: the next of its size would no longer fit there.
        """
        if nbytes <= 0:
            raise VerifyError(f"cannot lay out {nbytes} bytes: an extent has at least one; skip empty values")
        reserved = whole_sectors(nbytes)
        fitting = [
            (size, index)
            for index, size in enumerate(self._free_nbytes)
            if size >= reserved and (size >= _LARGE_NBYTES) <= (reserved >= _LARGE_NBYTES)
        ]
        if fitting:
            index = min(fitting)[1]
            offset = self._free_offsets[index]
            if self._free_nbytes[index] == reserved:
                del self._free_offsets[index], self._free_nbytes[index]
            else:
                self._free_offsets[index] += reserved
                self._free_nbytes[index] -= reserved
        else:
            offset = self._end
            self._end += reserved
        extent = Extent(offset=offset, nbytes=nbytes, reserved_nbytes=reserved)
        self._live[offset] = extent
        if self._on_allocate is not None:
            self._on_allocate(offset, reserved)
        return extent

    def free(self, extent: Extent) -> None:
        """Take ``extent`` back, joined with free neighbours; VerifyError unless this layout gave it out."""
        if self._live.get(extent.offset) != extent:
            raise VerifyError(f"{extent} is not live in this layout: it was freed before, or is another layout's")
        del self._live[extent.offset]
        start, stop = extent.offset, extent.offset + extent.reserved_nbytes
        index = bisect_left(self._free_offsets, start)
        if index < len(self._free_offsets) and self._free_offsets[index] == stop:
            stop += self._free_nbytes[index]
            del self._free_offsets[index], self._free_nbytes[index]
        if index > 0 and self._free_offsets[index - 1] + self._free_nbytes[index - 1] == start:
            index -= 1
            start = self._free_offsets[index]
            del self._free_offsets[index], self._free_nbytes[index]
        if stop == self._end:
            self._end = start
            return
        self._free_offsets.insert(index, start)
        self._free_nbytes.insert(index, stop - start)

    def make_hole(self, offset: int) -> None:
        """Let the free extent at ``offset`` be a hole."""
        index = self._free_offsets.index(offset)
        self._holes[self._free_offsets.pop(index)] = self._free_nbytes.pop(index)

    def check_integrity(self) -> None:
        """Raise VerifyError if extents overlap, bytes of [0, end) belong to nobody, or free neighbours are not one."""
        free, holes = list(self.free_ranges), list(self._holes.items())
        live = [(extent.offset, extent.reserved_nbytes) for extent in self._live.values()]
        position = 0
        was_free = False
        for offset, nbytes in sorted(free + live + holes):
            is_free = offset not in self._live and offset not in self._holes
            if offset < position:
                raise VerifyError(f"extents overlap at offset {offset}: the one before it ends at {position}")
            if offset > position:
                raise VerifyError(f"bytes [{position}, {offset}) of the store file leaked: neither live nor free")
            if is_free and was_free:
                raise VerifyError(f"free extents meet at offset {offset} and were not joined")
            position, was_free = offset + nbytes, is_free
        if position != self._end:
            raise VerifyError(f"extents end at {position}, but the store file's end is {self._end}")
        if was_free:
            raise VerifyError(f"the store file's last bytes, up to {self._end}, are free; its end should be lower")
