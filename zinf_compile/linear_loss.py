"""A linear layer and the cross-entropy of its logits, which never exist whole.

With ``p`` the softmax of a row's logits, ``t`` its target, ``w`` the class weights, ``e`` the label smoothing and ``C`` the
number of classes, the loss of a row that is not ignored, and the gradient of its logits, are ::

    loss = (a + b * sum(w)) * logsumexp - a * logits[t] - b * sum(w * logits)         a = (1 - e) * w[t],  b = e / C
    grad = (a + b * sum(w)) * p - a * onehot(t) - b * w

All of it follows from three sums of each row, which add up over ranges of classes.

Where the losses of the rows are added, the gradient of each sum is known before. Loss and gradients may then come of *one
pass*, a tile of rows at a time, in three products; backward scales the gradients, held until then in the dtype of sums.
Otherwise backward computes the logits again, in four products, and holds nothing of the size of the weight but its gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.ops import sums_dtype

_HELD_SHARE = 4  # logits over the gradient of the weight that one pass holds until backward
_TILES = 8  # of rows: logits then take an eighth at most of what they would, and products stay large


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowFactors:
    """By what the three sums of each row are multiplied; the sum of that over a row is its loss."""

    logsumexp: Tensor
    picked: Tensor
    weighted: Tensor | None  # None: without label smoothing that sum is not in the loss

    def losses(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the loss of each row."""
        logsumexp, picked, weighted = sums
        losses = self.logsumexp * logsumexp + self.picked * picked
        return losses if self.weighted is None else losses + self.weighted * weighted


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | Sequence[Tensor],
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    tile_rows: int | None = None,
    one_pass: bool | None = None,
) -> Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias), target, ...)`` in the dtype of sums: float32 or float64.

    ``hidden`` is [rows, features], ``target`` [rows] of class numbers, ``weight`` [classes, features], or a list of tiles of
    it along the classes, of which each op then reads one. One pass needs the whole weight, and a ``reduction``; by default
    it is taken where the gradient that it holds is at most a quarter of the logits: an eighth of what plain PyTorch takes.

    Raises ValueError for a ``reduction`` that is not "mean", "sum" or "none".
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r} is not 'mean', 'sum' or 'none'")
    tile_rows = tile_rows or max(1, -(-_num_rows(hidden) // _TILES))
    tiles = [weight] if isinstance(weight, Tensor) else list(weight)
    num_classes = sum(tile.shape[0] for tile in tiles)
    valid = target != ignore_index
    target = torch.where(valid, target, 0)
    dtype = sums_dtype(hidden.dtype)
    of_target = valid.to(dtype)
    total_weight: Tensor | float = float(num_classes)
    if class_weight is not None:
        of_target = of_target * class_weight.to(dtype)[target]
        total_weight = class_weight.sum(dtype=dtype)
    on_picked = (1.0 - label_smoothing) * of_target
    smoothing = (label_smoothing / num_classes) * valid.to(dtype) if label_smoothing else None
    factors = _RowFactors(
        logsumexp=on_picked if smoothing is None else on_picked + smoothing * total_weight,
        picked=-on_picked,
        weighted=None if smoothing is None else -smoothing,
    )
    wanted = [
        torch.is_grad_enabled() and given is not None and given.requires_grad for given in (hidden, tiles[0], bias)
    ]
    if one_pass is None:
        one_pass = holds_little(hidden, tiles[0])
    if one_pass and len(tiles) == 1 and reduction != "none" and any(wanted):
        loss: Tensor = torch.ops.zinf.weigh_logit_sums(
            *(hidden, tiles[0], bias, target, class_weight),
            *(factors.logsumexp, factors.picked, factors.weighted, tile_rows, wanted),
        )[0]
    else:
        losses = factors.losses(_sums_of_tiles(hidden, tiles, target, bias, class_weight, tile_rows))
        if reduction == "none":
            return losses
        loss = losses.sum()
    return loss / of_target.sum() if reduction == "mean" else loss


def holds_little(rows: Tensor, weight: Tensor) -> bool:
    """Return whether the gradient of the weight that one pass holds until backward is small beside the logits of rows."""
    held = weight.numel() * sums_dtype(weight.dtype).itemsize
    return _HELD_SHARE * held <= _num_rows(rows) * weight.shape[0] * weight.dtype.itemsize


def _num_rows(rows: Tensor) -> int:
    """Return how many rows there are; where that changes from call to call, how many there were at capture."""
    size = rows.shape[0]
    return size if isinstance(size, int) else int(size.node.hint)


def _sums_of_tiles(
    hidden: Tensor,
    tiles: Sequence[Tensor],
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    tile_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three sums of each row over all classes, from those over tiles of the classes."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    first = 0
    for tile in tiles:
        part = slice(first, first + tile.shape[0])
        first = part.stop
        own_bias = None if bias is None else bias[part]
        own_class_weight = None if class_weight is None else class_weight[part]
        is_last = len(parts) == len(tiles) - 1
        parts.append(
            torch.ops.zinf.logit_sums(hidden, tile, own_bias, target, own_class_weight, part.start, is_last, tile_rows)
        )
    if len(parts) == 1:
        return parts[0]
    logsumexp, picked, weighted = (torch.stack(same) for same in zip(*parts, strict=True))
    return logsumexp.logsumexp(0), picked.sum(0), weighted.sum(0)
