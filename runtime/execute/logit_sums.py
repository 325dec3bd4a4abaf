"""Bodies of ``zinf::`` ops: sums over the logits of a linear layer, and their gradients, without holding all logits.

Rows are processed ``tile_rows`` at a time. The logits of such a tile are computed, summed, and overwritten by their own
gradient, one strip of classes at a time, which stays in cache in between; on a GPU strips are wide, so that there are few
kernels. Nothing here makes the host wait for a GPU. If the sums are known before the gradients, a
tile is a range of classes for all rows; the gradient of the weight then needs no accumulation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.ir.ops import sums_dtype

_STRIP_NBYTES = 2**21  # of logits in the dtype of sums: the private cache of a core of a current server CPU
_GPU_STRIP_NBYTES = 2**25  # it passes through the memory of a GPU in 10 us, twice as long as a launch takes
_PRODUCT_WIDTH = 2048  # classes per product for the gradient of a weight: a few MiB, which malloc reuses
_SCALED_AT_ONCE = 2**20  # elements: a few MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Classes:
    """The part of the layer for the classes from ``first`` on, and the targets of all rows."""

    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    target: Tensor  # counted over all classes
    first: int
    last: bool

    @property
    def sums_dtype(self) -> torch.dtype:
        """The dtype of sums over classes and rows."""
        return sums_dtype(self.weight.dtype)

    @property
    def are_cached(self) -> bool:
        """Whether a strip of logits is to stay in a cache."""
        return self.weight.device.type == "cpu"

    def part(self, strip: slice) -> "_Classes":
        """Return the layer for some of these classes."""
        return _Classes(
            weight=self.weight[strip],
            bias=None if self.bias is None else self.bias[strip],
            class_weight=None if self.class_weight is None else self.class_weight[strip],
            target=self.target,
            first=self.first + strip.start,
            last=self.last and strip.stop == self.weight.shape[0],
        )

    def write_logits(self, logits: Tensor, hidden: Tensor) -> None:
        """Write the logits of all these classes for some rows."""
        torch.mm(hidden, self.weight.t(), out=logits)
        if self.bias is not None:
            logits += self.bias

    def strips(self, width: int) -> Iterator[slice]:
        """Return ranges of ``width`` classes, relative to ``first``."""
        return _ranges(self.weight.shape[0], width)

    def cached_strips(self, num_rows: int) -> Iterator[slice]:
        """Yield ranges of classes whose logits for ``num_rows`` rows fit into the cache, or are enough for a GPU."""
        nbytes = _STRIP_NBYTES if self.are_cached else _GPU_STRIP_NBYTES
        return self.strips(max(64, nbytes // (self.sums_dtype.itemsize * max(1, num_rows))))

    def targets_here(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return, per row, whether its target is one of these classes, and its index among them, or 0.

        An invalid target, below or above all classes, counts for the first or last range, so that indexing refuses it.
        """
        local = self.target[rows] - self.first
        here = torch.ones_like(local, dtype=torch.bool)
        if self.first > 0:
            here &= local >= 0
        if not self.last:
            here &= local < self.weight.shape[0]
        return here, torch.where(here, local, 0)

    def weights_of(self, strip: slice) -> Tensor | float:
        """Return the class weights of a strip."""
        return 1.0 if self.class_weight is None else self.class_weight[strip].to(self.sums_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowSums:
    """Three numbers for each row, of its sums or of the gradients of its sums."""

    logsumexp: Tensor
    picked: Tensor
    weighted: Tensor | None  # the sum of logits times class weights; None if it is not needed

    def of(self, rows: slice) -> "_RowSums":
        """Return the numbers of some rows."""
        weighted = None if self.weighted is None else self.weighted[rows]
        return _RowSums(logsumexp=self.logsumexp[rows], picked=self.picked[rows], weighted=weighted)


class _Gradients:
    """The wanted gradients among those of hidden states, weight and bias, summed tile by tile."""

    def __init__(self, hidden: Tensor, classes: _Classes, wanted: Sequence[bool]) -> None:
        shapes = (hidden.shape, classes.weight.shape, classes.weight.shape[:1])
        self.hidden, self.weight, self.bias = (
            hidden.new_zeros(shape, dtype=classes.sums_dtype) if asked else None
            for shape, asked in zip(shapes, wanted, strict=True)
        )

    def add(self, logit_gradient: Tensor, hidden: Tensor, rows: slice, classes: _Classes) -> None:
        """Add the contribution of some rows, given the gradient of their logits."""
        if self.hidden is not None:
            self.hidden[rows] = torch.mm(logit_gradient, classes.weight)
        for strip in classes.strips(_PRODUCT_WIDTH):
            part = logit_gradient[:, strip]
            if self.weight is not None:
                _add_product(self.weight[strip], part.t(), hidden)
            if self.bias is not None:
                self.bias[strip] += part.sum(0, dtype=classes.sums_dtype)

    def results(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all three; unwanted ones are empty."""
        return _or_nothing(self.hidden, hidden), _or_nothing(self.weight, hidden), _or_nothing(self.bias, hidden)


def _or_nothing(gradient: Tensor | None, hidden: Tensor) -> Tensor:
    """Return a gradient, or an empty tensor if it is None, since the schema requires a tensor."""
    return hidden.new_empty(0, dtype=torch.float32) if gradient is None else gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a total. If the total has a wider dtype, the product is rounded once before."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right)


def _row_tiles(hidden: Tensor, classes: _Classes, tile_rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield ranges of rows, their hidden states, and memory for their logits, which all tiles share."""
    num_rows = hidden.shape[0]
    memory = hidden.new_empty(min(tile_rows, num_rows), classes.weight.shape[0])
    for rows in _ranges(num_rows, tile_rows):
        yield rows, hidden[rows], memory[: rows.stop - rows.start]


def _ranges(total: int, most: int) -> Iterator[slice]:
    """Yield consecutive ranges of ``most`` indices, fewer in the last one."""
    for start in range(0, total, most):
        yield slice(start, min(start + most, total))


def _fill_logits(logits: Tensor, hidden: Tensor, rows: slice, classes: _Classes, *, weigh: bool) -> _RowSums:
    """Write the logits of some rows, and return their sums."""
    dtype, num_rows = classes.sums_dtype, hidden.shape[0]
    # Not minus infinity, whose differences are NaN: a strip may have no finite logit.
    largest = hidden.new_full((num_rows,), torch.finfo(dtype).min, dtype=dtype)
    exponentials = hidden.new_zeros(num_rows, dtype=dtype)
    weighted = hidden.new_zeros(num_rows, dtype=dtype) if weigh else None
    for strip in classes.cached_strips(num_rows):
        part = logits[:, strip]
        classes.part(strip).write_logits(part, hidden)
        values = part.to(dtype, copy=True)
        if weighted is not None:
            weighted += (values * classes.weights_of(strip)).sum(1)
        before, largest = largest, torch.maximum(largest, values.amax(1))
        exponentials = exponentials * (before - largest).exp() + values.sub_(largest[:, None]).exp_().sum(1)
    here, local = classes.targets_here(rows)
    picked = logits.gather(1, local[:, None])[:, 0].to(dtype).masked_fill_(~here, 0.0)
    return _RowSums(logsumexp=exponentials.log() + largest, picked=picked, weighted=weighted)


def _overwrite_by_gradient(logits: Tensor, sums: _RowSums, given: _RowSums, rows: slice, classes: _Classes) -> None:
    """Overwrite the logits of some rows by their gradient, given the gradients of the sums."""
    # A row without a class here: its logits are minus infinity, and the difference would be NaN.
    logsumexp = sums.logsumexp.masked_fill(sums.logsumexp == -torch.inf, 0.0)
    for strip in classes.cached_strips(logits.shape[0]):
        values = logits[:, strip].to(classes.sums_dtype, copy=True)
        values.sub_(logsumexp[:, None]).exp_().mul_(given.logsumexp[:, None])
        if given.weighted is not None:
            values += given.weighted[:, None] * classes.weights_of(strip)
        logits[:, strip] = values
    # Near a perfect fit the gradient of the target's logit is far smaller than its terms, so it is rounded after
    # summing.
    here, local = classes.targets_here(rows)
    at_target = (sums.picked - logsumexp).exp() * given.logsumexp + given.picked
    if given.weighted is not None:
        weights = 1.0 if classes.class_weight is None else classes.class_weight[local].to(classes.sums_dtype)
        at_target += given.weighted * weights
    # A row whose target is elsewhere is given what it has. To pick rows, the host would wait for their number.
    index = local[:, None]
    logits.scatter_(1, index, torch.where(here[:, None], at_target[:, None].to(logits.dtype), logits.gather(1, index)))


def logit_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    last: bool,
    tile_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each row, logsumexp of its logits, the logit of its target, and the sum of logits times class weights."""
    classes = _Classes(weight=weight, bias=bias, class_weight=class_weight, target=target, first=first, last=last)
    logsumexp, picked, weighted = (hidden.new_empty(hidden.shape[0], dtype=classes.sums_dtype) for _ in range(3))
    for rows, tile, logits in _row_tiles(hidden, classes, tile_rows):
        sums = _fill_logits(logits, tile, rows, classes, weigh=True)
        assert sums.weighted is not None
        logsumexp[rows], picked[rows], weighted[rows] = sums.logsumexp, sums.picked, sums.weighted
    return logsumexp, picked, weighted


def logit_sums_backward(
    on_logsumexp: Tensor,
    on_picked: Tensor,
    on_weighted: Tensor | None,
    logsumexp: Tensor,
    picked: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    last: bool,
    tile_rows: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden states, weight and bias, from those of the three sums; logits are recomputed."""
    classes = _Classes(weight=weight, bias=bias, class_weight=class_weight, target=target, first=first, last=last)
    sums = _RowSums(logsumexp=logsumexp, picked=picked, weighted=None)
    given = _RowSums(logsumexp=on_logsumexp, picked=on_picked, weighted=on_weighted)
    wants_hidden, wants_weight, wants_bias = wanted
    of_hidden = torch.zeros_like(hidden, dtype=classes.sums_dtype) if wants_hidden else None
    of_weight = torch.empty_like(weight) if wants_weight else None
    of_bias = weight.new_empty(weight.shape[0]) if wants_bias else None
    num_rows = hidden.shape[0]
    # A quarter of the logits that forward held at once: the products of a strip are as large, and there are few strips.
    width = max(64, weight.shape[0] * min(tile_rows, num_rows) // max(1, num_rows) // 4)
    memory = hidden.new_empty(num_rows * min(width, weight.shape[0]))
    for strip in classes.strips(width):
        part = classes.part(strip)
        gradient = memory[: num_rows * part.weight.shape[0]].view(num_rows, -1)
        for rows in _ranges(num_rows, tile_rows if classes.are_cached else num_rows):
            part.write_logits(gradient[rows], hidden[rows])
            _overwrite_by_gradient(gradient[rows], sums.of(rows), given.of(rows), rows, part)
        if of_hidden is not None:
            _add_product(of_hidden, gradient, part.weight)
        if of_weight is not None:
            torch.mm(gradient.t(), hidden, out=of_weight[strip])
        if of_bias is not None:
            of_bias[strip] = gradient.sum(0, dtype=classes.sums_dtype)
    typed = None if of_hidden is None else of_hidden.to(hidden.dtype)
    return _or_nothing(typed, hidden), _or_nothing(of_weight, hidden), _or_nothing(of_bias, hidden)


def weigh_logit_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    on_logsumexp: Tensor,
    on_picked: Tensor,
    on_weighted: Tensor | None,
    tile_rows: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weighted sum of all rows' three sums, and its gradients, in one pass."""
    classes = _Classes(weight=weight, bias=bias, class_weight=class_weight, target=target, first=0, last=True)
    given = _RowSums(logsumexp=on_logsumexp, picked=on_picked, weighted=on_weighted)
    gradients = _Gradients(hidden, classes, wanted)
    total = hidden.new_zeros((), dtype=classes.sums_dtype)
    for rows, tile, logits in _row_tiles(hidden, classes, tile_rows):
        factors = given.of(rows)
        sums = _fill_logits(logits, tile, rows, classes, weigh=factors.weighted is not None)
        total += factors.logsumexp @ sums.logsumexp + factors.picked @ sums.picked
        if factors.weighted is not None and sums.weighted is not None:
            total += factors.weighted @ sums.weighted
        _overwrite_by_gradient(logits, sums, factors, rows, classes)
        gradients.add(logits, tile, rows, classes)
    return total, *gradients.results(hidden)


def scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient times a number in another dtype, without a full intermediate copy."""
    scaled = torch.empty_like(gradient, dtype=dtype)
    pairs = zip(gradient.view(-1).split(_SCALED_AT_ONCE), scaled.view(-1).split(_SCALED_AT_ONCE), strict=True)
    for part, result in pairs:
        result.copy_(part * factor)
    return scaled
