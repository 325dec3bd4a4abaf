"""How torch's caching allocator for CUDA takes memory from a device, so that budgets can be tested without one.

By ``c10/cuda/CUDACachingAllocator.cpp``, without expandable segments: sizes are rounded up to 512 bytes; small ones are cut
from segments of 2 MiB, others from segments of 20 MiB or of their own size; each stream has blocks of its own, which are
merged with free neighbours and given back to the device only when it has no room.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_ROUNDING = 512
_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
_MEDIUM, _MEDIUM_SEGMENT, _LARGE_ROUNDING = 10 * 2**20, 20 * 2**20, 2 * 2**20


@dataclass(slots=True, eq=False)
class AllocatedBytes:
    """A part of a segment."""

    nbytes: int
    pool: tuple[str, bool]  # the stream, and whether small allocations come from it
    is_free: bool = False
    previous: "AllocatedBytes | None" = None
    following: "AllocatedBytes | None" = None


class CachingAllocator:
    """Counts what is allocated and what is reserved for it. Not thread-safe."""

    def __init__(self, nbytes: int) -> None:
        """``nbytes`` is what the device has."""
        self.limit = self._nbytes = nbytes
        self.allocated_nbytes = self.peak_nbytes = self.reserved_nbytes = 0
        self._free: dict[tuple[str, bool], list[AllocatedBytes]] = {}

    def set_limit(self, nbytes: int | None) -> None:
        """Reserve no more than so many bytes from now on; None for all that the device has."""
        self.limit = self._nbytes if nbytes is None else min(nbytes, self._nbytes)

    def allocate(self, nbytes: int, stream: str) -> AllocatedBytes:
        """Return a block for a stream. torch.OutOfMemoryError if the device, or the limit, has no room for it."""
        size = max(1, -(-nbytes // _ROUNDING)) * _ROUNDING
        pool = stream, size <= _SMALL
        free = self._free.setdefault(pool, [])
        fitting = [block for block in free if block.nbytes >= size]
        block = min(fitting, key=lambda each: each.nbytes) if fitting else self._reserve(size, pool)
        if block in free:
            free.remove(block)
        block.is_free = False
        rest = block.nbytes - size
        if rest >= _ROUNDING if pool[1] else rest > _SMALL:
            self._split(block, size)
        self.allocated_nbytes += block.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.allocated_nbytes)
        return block

    def _reserve(self, size: int, pool: tuple[str, bool]) -> AllocatedBytes:
        segment = _SMALL_SEGMENT if pool[1] else _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _LARGE_ROUNDING)
        nbytes = segment if segment >= size else segment * _LARGE_ROUNDING
        if self.reserved_nbytes + nbytes > self.limit:
            self.give_back()
        if self.reserved_nbytes + nbytes > self.limit:
            raise torch.OutOfMemoryError(
                f"tried to allocate {size} bytes: {self.reserved_nbytes} of {self.limit} are reserved, "
                f"{self.allocated_nbytes} allocated"
            )
        self.reserved_nbytes += nbytes
        return AllocatedBytes(nbytes, pool)

    def _split(self, block: AllocatedBytes, size: int) -> None:
        rest = AllocatedBytes(block.nbytes - size, block.pool, True, block, block.following)
        if block.following is not None:
            block.following.previous = rest
        block.nbytes, block.following = size, rest
        self._free[block.pool].append(rest)

    def free(self, block: AllocatedBytes) -> None:
        """Return a block to its stream."""
        self.allocated_nbytes -= block.nbytes
        block.is_free = True
        self._free[block.pool].append(block)
        if block.previous is not None and block.previous.is_free:
            block = self._merge(block.previous, block)
        if block.following is not None and block.following.is_free:
            self._merge(block, block.following)

    def _merge(self, first: AllocatedBytes, second: AllocatedBytes) -> AllocatedBytes:
        self._free[first.pool].remove(second)
        first.nbytes += second.nbytes
        first.following = second.following
        if first.following is not None:
            first.following.previous = first
        return first

    def give_back(self) -> None:
        """Return segments to the device that nothing uses."""
        for free in self._free.values():
            unused = set(map(id, _whole_segments(free)))
            self.reserved_nbytes -= sum(each.nbytes for each in free if id(each) in unused)
            free[:] = [each for each in free if id(each) not in unused]


def _whole_segments(free: list[AllocatedBytes]) -> Iterator[AllocatedBytes]:
    return (block for block in free if block.previous is None and block.following is None)
