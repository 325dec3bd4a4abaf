"""Reduces gradients over ranks on their way home: each rank gets its rows of the sum, divided by a factor.

One reduction is in flight at a time, beside the compute that follows it, so two buffers are enough for any model::

    gradient of a layer     copied to the outgoing buffer; its rows go to their ranks, and ours of all ranks come in
    next gradient           waits for the last one, adds up what came in, and sends the shard home
    end of backward         the same for the last gradient

An ordered reduction adds in the order of ranks. It gives the bits of one process that accumulates the ranks' batches in
that order. A fast one leaves the order to the backend.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.ranks.ranks import Collective, Ranks

Then = Callable[[Tensor], None]  # takes the shard, whose memory is overwritten afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    collective: Collective
    parts: Tensor  # what came in, a row for each that has to be added up
    then: Then


class Reductions:
    """The gradient reductions of one store."""

    def __init__(self, ranks: Ranks, *, is_ordered: bool, divide_by: float) -> None:
        self._ranks = ranks
        self._is_ordered = is_ordered
        self._divide_by = divide_by
        self._outgoing = self._incoming = torch.empty(0, dtype=torch.uint8)
        self._pending: _Pending | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of both buffers."""
        return self._outgoing.numel() + self._incoming.numel()

    def start(self, whole: Slice, grad: Tensor, then: Then) -> None:
        """Start reducing a gradient; ``then`` gets this rank's rows of it, flat, at the next ``start`` or ``finish``."""
        self.finish()
        ranks, flat = self._ranks, grad.reshape(-1)
        counts = [whole.among(ranks.size).of_rank(rank).num_elements for rank in range(ranks.size)]
        outgoing = self._view("_outgoing", flat.numel(), grad)
        outgoing.copy_(flat)
        mine, name = counts[ranks.rank], f"the reduction of the gradient of {whole.parameter}"
        if self._is_ordered:
            parts = self._view("_incoming", mine * ranks.size, grad)
            collective = ranks.exchange_rows(name, outgoing, counts, parts)
        else:
            parts = self._view("_incoming", mine, grad)
            collective = ranks.reduce_rows(name, outgoing, counts, parts)
        self._pending = _Pending(collective=collective, parts=parts.view(-1, mine), then=then)

    def finish(self) -> None:
        """Wait for the reduction in flight, if there is one, and pass its result on."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._ranks.wait(pending.collective)
        total, *others = pending.parts
        for other in others:
            total.add_(other)
        if self._divide_by != 1:
            total.div_(self._divide_by)
        pending.then(total)

    def abandon(self) -> None:
        """Wait for the reduction in flight and drop its result, after an error."""
        pending, self._pending = self._pending, None
        if pending is not None and self._ranks.failure is None:
            self._ranks.wait(pending.collective)

    def reduced(self, whole: Slice, grad: Tensor) -> Tensor:
        """Return this rank's rows of a gradient, reduced, in fresh memory; blocks."""
        results: list[Tensor] = []
        self.start(whole, grad, lambda shard: results.append(shard.clone()))
        self.finish()
        (result,) = results
        return result.view(whole.among(self._ranks.size).of_rank(self._ranks.rank).sizes)

    def drop(self) -> None:
        """Give the buffers back."""
        self._outgoing = self._incoming = torch.empty(0, dtype=torch.uint8)

    def _view(self, buffer: str, num_elements: int, like: Tensor) -> Tensor:
        """Return a part of a buffer, which grows to the largest gradient."""
        nbytes = num_elements * like.dtype.itemsize
        if getattr(self, buffer).numel() < nbytes:
            setattr(self, buffer, torch.empty(nbytes, dtype=torch.uint8, device=like.device))
        memory: Tensor = getattr(self, buffer)
        return memory[:nbytes].view(like.dtype)
