"""Offsets in the device arena: best fit over live ranges, so that no two live transfers share a byte."""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from zinf_compile.ir.glossary import LiveRange

ARENA_ALIGN = 4096  # the disk is read directly into the arena, and O_DIRECT needs 4 KiB-aligned addresses


def align(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the arena's alignment."""
    return -(-nbytes // ARENA_ALIGN) * ARENA_ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes that must be contiguous while they are live."""

    nbytes: int
    live: LiveRange


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """An offset for each piece, and the bytes the arena needs."""

    offsets: tuple[int, ...]
    nbytes: int


def plan_arena(sizes: Sequence[int], *, starts: Sequence[int], ends: Sequence[int]) -> ArenaLayout:
    """Return offsets for pieces of so many bytes, each live from its start tick to its end.

    The largest comes first, and each into the smallest gap left by those it overlaps in time.
    """
    overlapping = _overlapping(starts, ends)
    taken: list[tuple[int, int] | None] = [None] * len(sizes)  # the bytes [start, end) of each piece so far
    # Sorting is stable: among equally large pieces the one that starts first comes first.
    by_start = sorted(range(len(sizes)), key=starts.__getitem__)
    for index in sorted(by_start, key=lambda index: -sizes[index]):
        beside = sorted([span for other in overlapping[index] if (span := taken[other]) is not None])
        nbytes = align(sizes[index])
        offset = _best_gap(beside, nbytes)
        taken[index] = offset, offset + nbytes
    placed = [span for span in taken if span is not None]
    return ArenaLayout(offsets=tuple(start for start, _ in placed), nbytes=max((end for _, end in placed), default=0))


def _overlapping(starts: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    """Return, for each piece, the others that overlap it in time, by one sweep."""
    found: list[list[int]] = [[] for _ in starts]
    live: list[int] = []
    for index in sorted(range(len(starts)), key=starts.__getitem__):
        start = starts[index]
        live = [other for other in live if ends[other] > start]
        for other in live:
            found[index].append(other)
            found[other].append(index)
        live.append(index)
    return found


def plan_sequential(pieces: Sequence[Piece]) -> ArenaLayout:
    """Return offsets for many short-lived pieces, sorted by start: each gets the smallest gap that is free at its start.

    This is what an allocator does at run time. It is linear in the pieces, where ``plan_arena`` is quadratic.
    """
    gaps: list[tuple[int, int]] = []  # free (start, end), sorted, none touching
    ends: list[tuple[int, int, int]] = []  # a heap of (tick of death, offset, nbytes)
    offsets, high = [], 0
    for piece in pieces:
        while ends and ends[0][0] <= piece.live.start:
            _, offset, nbytes = heapq.heappop(ends)
            _free(gaps, offset, offset + nbytes)
        nbytes = align(piece.nbytes)
        fitting = [(end - start, start, index) for index, (start, end) in enumerate(gaps) if end - start >= nbytes]
        if fitting:
            _, offset, index = min(fitting)
            start, end = gaps[index]
            gaps[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
        else:
            # The last gap, if it reaches the end, is extended.
            offset = gaps.pop()[0] if gaps and gaps[-1][1] == high else high
            high = offset + nbytes
        heapq.heappush(ends, (piece.live.end, offset, nbytes))
        offsets.append(offset)
    return ArenaLayout(offsets=tuple(offsets), nbytes=high)


def _free(gaps: list[tuple[int, int]], start: int, end: int) -> None:
    """Add a free range, merged with adjacent gaps."""
    index = bisect.bisect_left(gaps, (start, end))
    if index < len(gaps) and gaps[index][0] == end:
        end = gaps.pop(index)[1]
    if index > 0 and gaps[index - 1][1] == start:
        start = gaps.pop(index - 1)[0]
        index -= 1
    gaps.insert(index, (start, end))


def _best_gap(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    """Return the start of the smallest gap between taken byte ranges that holds ``nbytes``, else the end of all."""
    best_start, best_size, cursor = None, 0, 0
    for start, end in taken:
        gap = start - cursor
        if gap >= nbytes and (best_start is None or gap < best_size):
            best_start, best_size = cursor, gap
        cursor = max(cursor, end)
    return cursor if best_start is None else best_start
