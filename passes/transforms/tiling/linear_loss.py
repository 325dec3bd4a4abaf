"""A linear layer and the cross entropy of its logits, without ever holding all logits.

With ``p`` the softmax of a row's logits, ``t`` its target, ``w`` the class weights, ``e`` the label smoothing and ``C``
the number of classes, the loss of a row that is not ignored, and the gradient of its logits, are ::

    loss = (a + b * sum(w)) * logsumexp - a * logits[t] - b * sum(w * logits)         a = (1 - e) * w[t],  b = e / C
    grad = (a + b * sum(w)) * p - a * onehot(t) - b * w

All of it follows from three sums per row, which can be accumulated over ranges of classes.

If the losses of the rows are summed or averaged, the gradient of each sum is known in advance. Loss and gradients can
then be computed in *one pass*, a tile of rows at a time, with three products; backward only scales the gradients, which
are kept until then in the dtype of the sums. Otherwise backward recomputes the logits, with four products in total, and
nothing of the size of the weight is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.ir.ops import sums_dtype

_HELD_SHARE = 4  # least ratio of the logits to the weight gradient, which one pass keeps until backward
_TILES = 8  # of rows: at most an eighth of the logits exists at once, and products stay large


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowFactors:
    """Factors of the three sums of each row; the weighted sum is the row's loss."""

    logsumexp: Tensor
    picked: Tensor
    weighted: Tensor | None  # None without label smoothing: the loss does not use that sum

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

    ``hidden`` is [rows, features], ``target`` [rows] class indices, ``weight`` [classes, features], or a list of tiles
    of it along the classes, of which each op reads one. One pass needs the whole weight and a ``reduction``; by default
    it is used if the gradient that it keeps is at most a quarter of the logits, an eighth of the memory that plain
    PyTorch needs.

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
    """Return whether the weight gradient that one pass keeps until backward is small compared with the logits."""
    held = weight.numel() * sums_dtype(weight.dtype).itemsize
    return _HELD_SHARE * held <= _num_rows(rows) * weight.shape[0] * weight.dtype.itemsize


def _num_rows(rows: Tensor) -> int:
    """Return the number of rows; if it changes from call to call, the number at capture."""
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
    """Return the three sums of each row over all classes, combined from those over tiles of the classes."""
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
