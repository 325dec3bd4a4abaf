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

All of this happens beside compute, which fills the buffers and takes what is reduced. On a device with streams two of these
run it: one inside replicas and one between them. On a CPU threads of the backend do; between replicas, where several
collectives and sums follow each other, a thread of ours.
"""

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zinf_compile.ir.errors import RankError
from zinf_compile.ir.plan import REDUCED_NBYTES
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.device import Device, Event, Stream
from zinf_compile.runtime.device.thread_stream import ThreadEvent, ThreadStream
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.ranks.ranks import Collective, Ranks

_ALIGNMENT = 64  # bytes, of gradients in the buffers
Then = Callable[[Tensor], None]  # takes the shard; on a CPU its memory is overwritten afterwards


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Elements [start, stop) of every rank's rows, which are being reduced."""

    name: str  # of what is done, for messages
    parts: Tensor  # what comes in, a row for each that has to be added up
    carried: Tensor  # for the total of the replicas before this one
    start: int
    into: Tensor | None  # where the sum is copied, at its place
    collective: Collective | None = None
    ended: Event | ThreadEvent | None = None  # on the stream that reduces it beside compute
    total: Tensor | None = None  # its sum, then

    def exchange(self, start: Callable[[], Collective]) -> None:
        """Start what brings its parts in."""
        self.collective = start()


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A gradient that is being reduced."""

    total: Tensor | None  # this rank's rows, where they come in several pieces
    piece: _Piece  # the last one
    then: Then


class Reductions:
    """The gradient reductions of one store."""

    def __init__(
        self, ranks: Ranks, *, is_ordered: bool, divide_by: float, device: Device = CPU, meter: Meter | None = None
    ) -> None:
        """``meter`` counts what compute waits for them."""
        self._ranks = ranks
        self._device = device
        self._meter = meter or Meter()
        self._exchanges: Stream = device.compute
        self._sums: Stream | ThreadStream = device.compute
        if not ranks.is_alone:
            self._exchanges = self._sums = device.collectives.reductions
        if ranks.num_replicas > 1:
            self._sums = device.collectives.replicas
            if self._sums.synchronous:
                self._sums = ThreadStream(name="reductions between replicas")
        self._is_ordered = is_ordered
        self._divide_by = divide_by
        self._buffers: dict[str, Tensor] = {}  # outgoing, incoming, total: flat bytes on the device
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
                self._settle(piece)
            ends = (min(start + step, count) for count in counts)
            rows = [flat[first + start : first + end] for first, end in zip(firsts, ends, strict=False)]
            piece = self._send(whole.parameter, rows, start, grad, into=total)
        if piece is not None:
            self._pending.append(_Pending(total=total, piece=piece, then=then))

    def _make_room(self, nbytes: int) -> None:
        """Reserve room in the buffers, as much on every rank; waits for what is in flight if that leaves too little."""
        if self._used + nbytes > self._capacity:
            self.finish()
        self._capacity = max(self._capacity, nbytes)
        self._first = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def _send(self, name: str, rows: list[Tensor], start: int, grad: Tensor, *, into: Tensor | None) -> _Piece:
        """Start reducing some elements of each rank's rows."""
        ranks, counts = self._ranks, [part.numel() for part in rows]
        what, mine = f"the reduction of the gradient of {name}", counts[ranks.rank]
        outgoing = self._view("outgoing", sum(counts), grad, self._first)
        torch.cat(rows, out=outgoing)
        parts = self._view("incoming", mine * (ranks.size if self._is_ordered else 1), grad, self._first)
        exchange = ranks.exchange_rows if self._is_ordered else ranks.reduce_rows
        start_it = partial(exchange, what, outgoing, counts, parts)
        parts = parts.view(-1, mine) if mine else parts.view(1, 0)
        piece = _Piece(name=what, parts=parts, carried=outgoing[:mine], start=start, into=into)
        if not self._exchanges.synchronous:
            # Hazard: ops of compute that fill the buffers, or have read them, may be enqueued and not yet done.
            self._exchanges.wait(self._device.compute.record())
        self._exchanges.run(partial(piece.exchange, start_it))
        if not self._sums.synchronous:
            self._sums.wait(self._exchanges.record())
            self._sums.run(partial(self._sum_beside, piece))
            piece.ended = self._sums.record()
        return piece

    def _sum_beside(self, piece: _Piece) -> None:
        """Add up a piece on the current stream or thread."""
        assert piece.collective is not None
        self._wait(piece.collective)
        piece.total = self._add_up(piece)

    def _settle(self, piece: _Piece) -> Tensor:
        """Return the sum of a piece, for which compute waits."""
        if piece.ended is None:
            assert piece.collective is not None
            with self._meter.stall(piece.name):
                self._wait(piece.collective)
            return self._add_up(piece)
        if isinstance(piece.ended, ThreadEvent):
            with self._meter.stall(piece.name), self._ranks.counting_wait():
                piece.ended.wait()
        else:
            with self._meter.stall_on(self._device.compute, piece.name):
                self._device.compute.wait(piece.ended)
        assert piece.total is not None
        return piece.total

    def _wait(self, collective: Collective) -> None:
        self._ranks.wait(collective, beside=not self._sums.synchronous)

    def _add_up(self, piece: _Piece) -> Tensor:
        """Return the sum of what has come in. It is copied to its place if it is one of several pieces."""
        total = self._add_replicas(piece) if self._ranks.num_replicas > 1 else _add_rows(piece.parts)
        if self._divide_by != 1:
            total.div_(self._divide_by)
        if piece.into is not None:
            piece.into[piece.start : piece.start + total.numel()] = total
        return total

    def _add_replicas(self, piece: _Piece) -> Tensor:
        """Return the sum of a piece over all ranks: the same bits on every replica."""
        ranks, what = self._ranks, f"{piece.name} between replicas"
        if not self._is_ordered:
            total = _add_rows(piece.parts)
            self._wait(ranks.sum_replicas(what, total))
            return total
        total = piece.carried
        if ranks.replica == 0:
            total.copy_(_add_rows(piece.parts))
        for sender in range(ranks.num_replicas - 1):  # all wait for each, so that all ranks count the same waits
            self._wait(ranks.pass_on(what, total, sender))
            if ranks.replica == sender + 1:
                for part in piece.parts:
                    total.add_(part)
        self._wait(ranks.broadcast_last(what, total))
        return total

    def finish(self) -> None:
        """Wait for the reductions in flight, and pass their results on, in the order in which they were started."""
        while self._pending:
            pending = self._pending.popleft()
            last = self._settle(pending.piece)
            total = last if pending.total is None else pending.total
            # Hazard: a copy to the host may read it after the next gradient has been copied to the buffers.
            pending.then(total if self._device.compute.synchronous else total.clone())
        self._used = 0

    def abandon(self) -> None:
        """Wait for the reductions in flight and drop their results, after an error."""
        pending, self._pending, self._used = self._pending, deque(), 0
        for each in pending:
            with suppress(RankError):  # the ranks cannot go on, which was raised before
                if each.piece.ended is not None:
                    each.piece.ended.wait()
                elif each.piece.collective is not None:
                    self._wait(each.piece.collective)

    def close(self) -> None:
        """End its thread, if it has one."""
        if isinstance(self._sums, ThreadStream):
            self._sums.close()

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
        if buffer not in self._buffers or self._buffers[buffer].numel() < end:
            nbytes = max(end, 0 if buffer == "total" else self._capacity)
            self._buffers[buffer] = self._device.allocate([nbytes], torch.uint8)
        return self._buffers[buffer][first:end].view(like.dtype)


def _add_rows(parts: Tensor) -> Tensor:
    """Return the sum of some rows, in their order; it is in the first one."""
    total: Tensor
    total, *others = parts
    for other in others:
        total.add_(other)
    return total
