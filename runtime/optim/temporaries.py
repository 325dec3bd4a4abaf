"""Measures the temporary memory of an update, on a few elements or without memory, to know what fits beside it."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SMALL = 4096  # elements: enough that temporaries of one row or column are small beside the rest
_KEPT = 16  # dimensions up to this size are kept: those of convolution kernels and the like
_MOST_ASKED = 100  # values for one update
_ALIGN = 512  # elements: on one thread, pieces begin where vectorised kernels see the same alignment
_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
    }
)
_COPIES = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})  # no temporary to convert


class TemporaryCount(TorchDispatchMode):
    """Measures the peak bytes of tensors that ops allocate while it is active. Scalars do not count.

    An op that gets operands of different dtypes converts them internally, where no mode sees it; these copies count too.
    With ``emulates_bfloat16``, so does what oneDNN allocates to multiply bfloat16 on a CPU without instructions for it: a
    result in float32, and at most a copy of each matrix. For 512 x 512 by 512 x 2048 it was 80 % of that.

    A tensor of the device "meta" has no memory, and so no values: where one is asked for, as by ``item()``, it is 1.
    RuntimeError from a loop that asks on and on.
    """

    def __init__(self, *, emulates_bfloat16: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no annotations
        self._emulates_bfloat16 = emulates_bfloat16
        self.most_nbytes = 0
        self._num_asked = 0  # values that tensors without any were asked for
        self._alive: dict[StorageWeakRef, int] = {}  # bytes of storages that were made here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count its results that share no memory with what it was given."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self._answer(args[0].dtype)
        result = func(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in inputs}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if tensor.numel() > 1 and StorageWeakRef(storage) not in given:
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {reference: nbytes for reference, nbytes in self._alive.items() if not reference.expired()}
        converted = 0 if func in _COPIES else _converted_nbytes([*inputs, *outputs])
        if self._emulates_bfloat16 and func in _PRODUCTS and outputs[0].dtype is torch.bfloat16:
            copied = sum(each.numel() * each.itemsize for each in inputs[-2:])
            converted += outputs[0].numel() * torch.float32.itemsize + copied
        self.most_nbytes = max(self.most_nbytes, sum(self._alive.values()) + converted)
        return result

    def _answer(self, dtype: torch.dtype) -> bool | int | float | complex:
        self._num_asked += 1
        if self._num_asked > _MOST_ASKED:
            raise RuntimeError(f"an update asked {_MOST_ASKED} times for values of tensors that have none")
        one: bool | int | float | complex = torch.ones((), dtype=dtype).item()
        return one


def small_shape(shape: torch.Size) -> torch.Size:
    """Return a shape of the same proportions with few elements; small dimensions stay as they are."""
    num_large = sum(size > _KEPT for size in shape)
    factor = max(1.0, shape.numel() / _SMALL) ** (1 / max(1, num_large))
    return torch.Size(math.ceil(size / factor) if size > _KEPT else size for size in shape)


def piece_elements(nbytes: int, temporary_nbytes: int) -> int | None:
    """Return how many elements may be updated at once if each takes so many temporary bytes; None for any number.

    Never fewer than a few hundred, below which an update is mostly overhead.
    """
    if temporary_nbytes == 0:
        return None
    wanted = nbytes // temporary_nbytes
    return max(_ALIGN, wanted - wanted % _ALIGN)


def _converted_nbytes(operands: list[Tensor]) -> int:
    """Return the bytes of operands that are converted to the widest dtype among them. Masks and indices are not."""
    numbers = [tensor for tensor in operands if tensor.numel() > 1 and tensor.is_floating_point()]
    widest = max((tensor.dtype.itemsize for tensor in numbers), default=0)
    return sum(tensor.numel() * widest for tensor in numbers if tensor.dtype.itemsize < widest)


def _tensors(tree: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in leaves if tensor.layout is torch.strided]  # others have several storages, or none
