"""Layouts of a segment's inputs and results as captured: shapes, strides, dtypes and devices, for any symbolic sizes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_SIZES = 64  # number of cached sets of sizes


class Layout(NamedTuple):
    """What compiled code assumes about a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def accepts(self, tensor: Tensor) -> bool:
        """Return whether a tensor has exactly this layout; strides of dimensions of size 1 do not matter."""
        if tensor.shape != self.shape or tensor.dtype is not self.dtype or not self._is_where(tensor):
            return False
        if tensor.is_neg() or tensor.is_conj():  # its bytes are not its values
            return False
        return tensor.stride() == self.strides or all(
            ours == theirs or length == 1
            for ours, theirs, length in zip(tensor.stride(), self.strides, self.shape, strict=True)
        )

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy with this layout of a tensor that has the same shape, dtype and device."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).copy_(tensor)

    def difference(self, tensor: Tensor) -> str | None:
        """Return, as text, how a tensor differs in anything but strides; None if it does not."""
        if (tuple(tensor.shape), tensor.dtype) == (self.shape, self.dtype) and self._is_where(tensor):
            return None
        theirs = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        return f"{theirs}, and not {self.shape} of {self.dtype} on {self.device}"

    def _is_where(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device. Scalars of a CPU are taken, too: of attention without dropout on CUDA,
        seeds are there, where its fake kernel says otherwise; code that would read them on a GPU raises."""
        return tensor.device == self.device or (self.shape == () and tensor.device.type == "cpu")


class Layouts:
    """The layouts of several tensors, as functions of the sizes passed to a segment."""

    def __init__(self, sizes: Sequence[torch.SymInt], tensors: Sequence[Tensor]) -> None:
        """``tensors`` are fake; ``sizes`` contain every symbol in their shapes and strides. Neither is kept."""
        self._sizes = [size.node.expr for size in sizes]
        self._tensors = [
            (_expressions(tensor.shape), _expressions(tensor.stride()), tensor.dtype, tensor.device)
            for tensor in tensors
        ]
        self._known: dict[tuple[int, ...], tuple[Layout, ...]] = {}

    def at(self, sizes: tuple[int, ...]) -> tuple[Layout, ...]:
        """Return the layouts at these sizes."""
        known = self._known.get(sizes)
        if known is None:
            values = {symbol: size for symbol, size in zip(self._sizes, sizes, strict=True) if symbol.is_Symbol}
            known = tuple(
                Layout(_evaluate(shape, values), _evaluate(strides, values), dtype, device)
                for shape, strides, dtype, device in self._tensors
            )
            if len(self._known) == _MOST_SIZES:
                self._known.clear()
            self._known[sizes] = known
        return known


def _expressions(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def _evaluate(sizes: Sequence[Any], values: dict[Any, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else int(size.xreplace(values)) for size in sizes)
