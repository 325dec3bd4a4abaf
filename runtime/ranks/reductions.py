"""Reduces gradients over ranks on their way home: each rank gets its rows of the sum, divided by a factor.

A gradient passes through two buffers, each as large as the largest gradient, at most 32 MiB. As many gradients are in flight
as the buffers hold, beside the compute that follows them::

    gradient of a layer     its rows are copied to the outgoing buffer and go to their ranks; ours of all ranks come in
    no room for the next    waits for those in flight, adds up what came in, and sends the shards home
    end of backward         the same for the last gradients

A gradient above 32 MiB goes in pieces, one after the other.

An ordered reduction adds in the order of ranks. It gives the bits of one process that accumulates the ranks' batches in
that order. A fast one leaves the order to the backend.

Where the mesh has several replicas, what came in is added to the total of the replicas before, in the same order::

    replica 0     p0 + p1                                     p0 to p3: the pieces of ranks 0 to 3
    replica 1     ((p0 + p1) + p2) + p3                       goes back to replica 0

The total is in the outgoing buffer then, which is free again, so that no buffer is added.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.ir.plan import REDUCED_NBYTES
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.ranks.ranks import Collective, Ranks

_ALIGNMENT = 64  # bytes, of gradients in the buffers
Then = Callable[[Tensor], None]  # takes the shard, whose memory is overwritten afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Elements [start, stop) of every rank's rows, which are being reduced."""

    collective: Collective
    parts: Tensor  # what came in, a row for each that has to be added up
    carried: Tensor  # for the total of the replicas before this one
    start: int


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A gradient that is being reduced."""

    total: Tensor | None  # this rank's rows, where they come in several pieces
    piece: _Piece  # the last one
    then: Then


class Reductions:
    """The gradient reductions of one store."""

    def __init__(self, ranks: Ranks, *, is_ordered: bool, divide_by: float) -> None:
        self._ranks = ranks
        self._is_ordered = is_ordered
        self._divide_by = divide_by
        self._buffers = {name: torch.empty(0, dtype=torch.uint8) for name in ("outgoing", "incoming", "total")}
        self._capacity = 0  # bytes of gradients that are in flight at the same time
        self._used = 0  # of them
        self._first = 0  # byte of the gradient that is started
        self._pending: deque[_Pending] = deque()

    def start(self, whole: Slice, grad: Tensor, then: Then) -> None:
        """Start reducing a gradient; ``then`` gets this rank's rows of it, flat, in a later ``start`` or ``finish``."""
        size, flat = self._ranks.size, grad.reshape(-1)
        counts = [whole.among(size).of_rank(rank).num_elements for rank in range(size)]
        firsts = [0, *itertools.accumulate(counts)]
        step = max(1, REDUCED_NBYTES // grad.dtype.itemsize // size)
        starts = range(0, max(counts), step)
        if len(starts) > 1:
            self.finish()  # the total of one that went in pieces may still be there
        self._make_room(min(step, max(counts)) * size * grad.dtype.itemsize)
        total = self._view("total", counts[self._ranks.rank], grad) if len(starts) > 1 else None
        piece: _Piece | None = None
        for start in starts:
            if piece is not None:
                self._add_up(piece, into=total)
            ends = (min(start + step, count) for count in counts)
            rows = [flat[first + start : first + end] for first, end in zip(firsts, ends, strict=False)]
            piece = self._send(whole.parameter, rows, start, grad)
        if piece is not None:
            self._pending.append(_Pending(total=total, piece=piece, then=then))

    def _make_room(self, nbytes: int) -> None:
        """Reserve room in the buffers, as much on every rank; waits for what is in flight if that leaves too little."""
        if self._used + nbytes > self._capacity:
            self.finish()
        self._capacity = max(self._capacity, nbytes)
        self._first = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def _send(self, name: str, rows: list[Tensor], start: int, grad: Tensor) -> _Piece:
        """Start reducing some elements of each rank's rows."""
        ranks, counts = self._ranks, [part.numel() for part in rows]
        what, mine = f"the reduction of the gradient of {name}", counts[ranks.rank]
        outgoing = self._view("outgoing", sum(counts), grad, self._first)
        torch.cat(rows, out=outgoing)
        if self._is_ordered:
            parts = self._view("incoming", mine * ranks.size, grad, self._first)
            collective = ranks.exchange_rows(what, outgoing, counts, parts)
        else:
            parts = self._view("incoming", mine, grad, self._first)
            collective = ranks.reduce_rows(what, outgoing, counts, parts)
        parts = parts.view(-1, mine) if mine else parts.view(1, 0)
        return _Piece(collective=collective, parts=parts, carried=outgoing[:mine], start=start)

    def _add_up(self, piece: _Piece, *, into: Tensor | None) -> Tensor:
        """Wait for a piece; return its sum, which is copied to its place in ``into`` if that is given."""
        self._ranks.wait(piece.collective)
        total = self._add_replicas(piece) if self._ranks.num_replicas > 1 else _add_rows(piece.parts)
        if self._divide_by != 1:
            total.div_(self._divide_by)
        if into is not None:
            into[piece.start : piece.start + total.numel()] = total
        return total

    def _add_replicas(self, piece: _Piece) -> Tensor:
        """Return the sum of a piece over all ranks: the same bits on every replica."""
        ranks, what = self._ranks, f"{piece.collective.name} between replicas"
        if not self._is_ordered:
            total = _add_rows(piece.parts)
            ranks.wait(ranks.sum_replicas(what, total))
            return total
        total = piece.carried
        if ranks.replica == 0:
            total.copy_(_add_rows(piece.parts))
        for sender in range(ranks.num_replicas - 1):  # all wait for each, so that all ranks count the same waits
            ranks.wait(ranks.pass_on(what, total, sender))
            if ranks.replica == sender + 1:
                for part in piece.parts:
                    total.add_(part)
        ranks.wait(ranks.broadcast_last(what, total))
        return total

    def finish(self) -> None:
        """Wait for the reductions in flight, and pass their results on, in the order in which they were started."""
        while self._pending:
            pending = self._pending.popleft()
            last = self._add_up(pending.piece, into=pending.total)
            pending.then(last if pending.total is None else pending.total)
        self._used = 0

    def abandon(self) -> None:
        """Wait for the reductions in flight and drop their results, after an error."""
        pending, self._pending, self._used = self._pending, deque(), 0
        for each in pending:
            self._ranks.wait(each.piece.collective)

    def reduced(self, whole: Slice, grad: Tensor) -> Tensor:
        """Return this rank's rows of a gradient, reduced, in fresh memory; blocks."""
        results: list[Tensor] = []
        self.start(whole, grad, lambda shard: results.append(shard.clone()))
        self.finish()
        (result,) = results
        return result.view(whole.among(self._ranks.size).of_rank(self._ranks.rank).sizes)

    def _view(self, buffer: str, num_elements: int, like: Tensor, first: int = 0) -> Tensor:
        """Return elements of a buffer, from a byte on. It grows as needed, when nothing is in flight, and stays."""
        end = first + num_elements * like.dtype.itemsize
        if self._buffers[buffer].numel() < end:
            nbytes = max(end, 0 if buffer == "total" else self._capacity)
            self._buffers[buffer] = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._buffers[buffer][first:end].view(like.dtype)


def _add_rows(parts: Tensor) -> Tensor:
    """Return the sum of some rows, in their order; it is in the first one."""
    total: Tensor
    total, *others = parts
    for other in others:
        total.add_(other)
    return total
