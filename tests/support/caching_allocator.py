"""How torch's caching allocator for CUDA takes memory from a device, so that budgets can be tested without one.

By ``c10/cuda/CUDACachingAllocator.cpp``: sizes are rounded up to 512 bytes; each stream has blocks of its own, small ones
apart from others, which are merged with free neighbours and given back to the device only when it has no room.

- Segments are cut into blocks: small ones of 2 MiB, others of 20 MiB or of their own size. Up to 1 MiB is not cut off.
- With ``expandable`` segments a stream has one range of addresses for small blocks and one for others, which gets memory
  in pages of 2 and of 20 MiB where it is needed, and gives back any page that is free. Everything is cut off.
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
    start: int = 0  # in its segment
    has_memory: bool = True  # False: addresses of an expandable segment without pages
    requested_nbytes: int = 0

    @property
    def reach(self) -> int:
        """Return the bytes to which it can grow: with the addresses behind it that have no pages."""
        following = self.following
        return self.nbytes + (following.nbytes if following is not None and not following.has_memory else 0)


class CachingAllocator:
    """Counts what is requested, what is allocated for it, and what is reserved for that. Not thread-safe."""

    def __init__(self, nbytes: int, *, is_expandable: bool = False) -> None:
        """``nbytes`` is what the device has."""
        self.limit = self._nbytes = nbytes
        self._is_expandable = is_expandable
        self.requested_nbytes = self.peak_requested_nbytes = 0
        self.allocated_nbytes = self.peak_allocated_nbytes = 0
        self.reserved_nbytes = self.peak_reserved_nbytes = 0
        self.num_given_back = 0  # how often what is cached was given back for lack of room, which a GPU has to wait for
        self._free: dict[tuple[str, bool], list[AllocatedBytes]] = {}
        self._without_memory: dict[tuple[str, bool], list[AllocatedBytes]] = {}

    def set_limit(self, nbytes: int | None) -> None:
        """Reserve no more than so many bytes from now on; None for all that the device has."""
        self.limit = self._nbytes if nbytes is None else min(nbytes, self._nbytes)

    def forget_peaks(self) -> None:
        """Reset the peaks to what is there now."""
        self.peak_requested_nbytes = self.requested_nbytes
        self.peak_allocated_nbytes = self.allocated_nbytes
        self.peak_reserved_nbytes = self.reserved_nbytes

    def allocate(self, nbytes: int, stream: str) -> AllocatedBytes:
        """Return a block for a stream. torch.OutOfMemoryError if the device, or the limit, has no room for it."""
        size = max(1, -(-nbytes // _ROUNDING)) * _ROUNDING
        pool = stream, size <= _SMALL
        free = self._free.setdefault(pool, [])
        block = self._best(free, size) or self._reserve(size, pool)
        if block in free:
            free.remove(block)
        block.is_free = False
        rest = block.nbytes - size
        if rest >= _ROUNDING if pool[1] or self._is_expandable else rest > _SMALL:
            self._free[pool].append(_cut(block, size))
        block.requested_nbytes = nbytes
        self.requested_nbytes += nbytes
        self.allocated_nbytes += block.nbytes
        self.peak_requested_nbytes = max(self.peak_requested_nbytes, self.requested_nbytes)
        self.peak_allocated_nbytes = max(self.peak_allocated_nbytes, self.allocated_nbytes)
        return block

    def _best(self, free: list[AllocatedBytes], size: int) -> AllocatedBytes | None:
        """Return the smallest free block that is large enough. One that can grow counts as large as it can become."""
        fitting = sorted((each for each in free if each.nbytes >= size), key=lambda each: (each.nbytes, each.start))
        best = 0
        while best + 1 < len(fitting) and fitting[best + 1].reach < fitting[best].reach:
            best += 1
        return fitting[best] if fitting else None

    def _reserve(self, size: int, pool: tuple[str, bool]) -> AllocatedBytes:
        """Return a free block of at least ``size``, for which memory is taken from the device."""
        segment = _SMALL_SEGMENT if pool[1] else _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _LARGE_ROUNDING)
        nbytes = segment if segment >= size else segment * _LARGE_ROUNDING
        block = self._take(nbytes, size, pool)
        if block is None:
            self.num_given_back += 1
            self.give_back()
            block = self._take(nbytes, size, pool)
        if block is None:
            raise torch.OutOfMemoryError(
                f"tried to allocate {size} bytes: {self.reserved_nbytes} of {self.limit} are reserved, "
                f"{self.allocated_nbytes} allocated"
            )
        return block

    def _take(self, nbytes: int, size: int, pool: tuple[str, bool]) -> AllocatedBytes | None:
        # As there: what counts is the size of a segment, also where fewer pages are missing, or more.
        if self.reserved_nbytes + nbytes > self.limit:
            return None
        if self._is_expandable:
            return self._expand(size, pool)
        self._count_reserved(nbytes)
        return AllocatedBytes(nbytes, pool)

    def _count_reserved(self, nbytes: int) -> None:
        self.reserved_nbytes += nbytes
        self.peak_reserved_nbytes = max(self.peak_reserved_nbytes, self.reserved_nbytes)

    def free(self, block: AllocatedBytes) -> None:
        """Return a block to its stream."""
        self.requested_nbytes -= block.requested_nbytes
        self.allocated_nbytes -= block.nbytes
        block.is_free = True
        self._free[block.pool].append(block)
        self._merge_around(block)

    def _merge_around(self, block: AllocatedBytes) -> AllocatedBytes:
        """Merge a free block with free neighbours of its kind, and return it."""
        if block.previous is not None and _are_alike(block.previous, block):
            block = self._merge(block.previous, block)
        if block.following is not None and _are_alike(block, block.following):
            self._merge(block, block.following)
        return block

    def _merge(self, first: AllocatedBytes, second: AllocatedBytes) -> AllocatedBytes:
        self._list_of(second).remove(second)
        first.nbytes += second.nbytes
        first.following = second.following
        if first.following is not None:
            first.following.previous = first
        return first

    def _list_of(self, block: AllocatedBytes) -> list[AllocatedBytes]:
        return (self._free if block.has_memory else self._without_memory)[block.pool]

    def give_back(self) -> None:
        """Return memory to the device that nothing uses: whole segments, or whole pages of expandable ones."""
        for free in self._free.values():
            if self._is_expandable:
                for block in list(free):
                    self._remove_pages(block)
                continue
            unused = set(map(id, _whole_segments(free)))
            self.reserved_nbytes -= sum(each.nbytes for each in free if id(each) in unused)
            free[:] = [each for each in free if id(each) not in unused]

    # Expandable segments

    def _expand(self, size: int, pool: tuple[str, bool]) -> AllocatedBytes | None:
        """Return a free block of at least ``size`` at the first addresses that have room; None if the device has not."""
        block = self._room(size, pool)
        if not block.has_memory:
            if not self._add_pages(block, min(size, block.nbytes)):
                return None
            block = self._merge_around(block)
        while block.nbytes < size:
            following = block.following
            assert following is not None
            if not self._add_pages(following, min(size - block.nbytes, following.nbytes)):
                return None
            block = self._merge_around(following)
        return block

    def _room(self, size: int, pool: tuple[str, bool]) -> AllocatedBytes:
        """Return the first of consecutive free blocks of ``size`` in all, some of which have no memory."""
        without = self._without_memory.setdefault(pool, [])
        if not without:
            page = _page(pool)
            addresses = -(-self._nbytes * 9 // 8 // page) * page
            without.append(AllocatedBytes(addresses, pool, is_free=True, has_memory=False))
        for block in sorted(without, key=lambda each: each.start):
            first = block.previous if block.previous is not None and block.previous.is_free else block
            room, each = 0, first
            while each is not None and each.is_free and room < size:
                room, each = room + each.nbytes, each.following
            if room >= size:
                return first
        raise AssertionError("there are more addresses than memory")

    def _add_pages(self, block: AllocatedBytes, nbytes: int) -> bool:
        """Give memory to the first bytes of a block, in whole pages; return False if the device has too little."""
        page = _page(block.pool)
        nbytes = -(-nbytes // page) * page
        if self.reserved_nbytes + nbytes > self._nbytes:
            return False
        self._without_memory[block.pool].remove(block)
        if nbytes < block.nbytes:
            self._without_memory[block.pool].append(_cut(block, nbytes))
        block.has_memory = True
        self._free[block.pool].append(block)
        self._count_reserved(nbytes)
        return True

    def _remove_pages(self, block: AllocatedBytes) -> None:
        """Return the whole pages of a free block."""
        page = _page(block.pool)
        first, end = -(-block.start // page) * page, (block.start + block.nbytes) // page * page
        if end <= first:
            return
        if first > block.start:
            block = _cut(block, first - block.start)
        else:
            self._free[block.pool].remove(block)
        if end < block.start + block.nbytes:
            self._free[block.pool].append(_cut(block, end - block.start))
        block.has_memory = False
        self._without_memory[block.pool].append(block)
        self.reserved_nbytes -= block.nbytes
        self._merge_around(block)


def _cut(block: AllocatedBytes, size: int) -> AllocatedBytes:
    """Cut a block behind ``size`` bytes; return the rest, which is free."""
    rest = AllocatedBytes(
        block.nbytes - size,
        block.pool,
        is_free=True,
        previous=block,
        following=block.following,
        start=block.start + size,
        has_memory=block.has_memory,
    )
    if block.following is not None:
        block.following.previous = rest
    block.nbytes, block.following = size, rest
    return rest


def _are_alike(first: AllocatedBytes, second: AllocatedBytes) -> bool:
    return first.is_free and second.is_free and first.has_memory == second.has_memory


def _page(pool: tuple[str, bool]) -> int:
    return _SMALL_SEGMENT if pool[1] else _MEDIUM_SEGMENT


def _whole_segments(free: list[AllocatedBytes]) -> Iterator[AllocatedBytes]:
    return (block for block in free if block.previous is None and block.following is None)
