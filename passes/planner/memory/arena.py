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


def plan_arena(pieces: Sequence[Piece]) -> ArenaLayout:
    """Return offsets for pieces: largest first, each into the smallest gap left by those it overlaps in time."""
    order = sorted(range(len(pieces)), key=lambda index: (-pieces[index].nbytes, pieces[index].live.start, index))
    overlapping = _overlapping(pieces)
    offsets: dict[int, int] = {}
    for index in order:
        taken = sorted(
            (offsets[other], offsets[other] + align(pieces[other].nbytes))
            for other in overlapping[index]
            if other in offsets
        )
        offsets[index] = _best_gap(taken, align(pieces[index].nbytes))
    needed = max((offset + align(pieces[index].nbytes) for index, offset in offsets.items()), default=0)
    return ArenaLayout(offsets=tuple(offsets[index] for index in range(len(pieces))), nbytes=needed)


def _overlapping(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return, for each piece, the others that overlap it in time, by one sweep."""
    found: list[list[int]] = [[] for _ in pieces]
    live: list[int] = []
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index].live.start):
        live = [other for other in live if pieces[other].live.end > pieces[index].live.start]
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
