"""What an update takes beside its tensors, counted on a few elements: how many more can be updated at once is known then."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SMALL = 4096  # elements: what is made of one in a thousand rows or columns is then little beside the rest
_ALIGN = 512  # elements, so that vectorised kernels see the same alignment in every piece


class TemporaryCount(TorchDispatchMode):
    """Counts the bytes of what ops make while it is on: the most that was alive at once. Scalars do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no annotations
        self.most_nbytes = 0
        self._alive: dict[StorageWeakRef, int] = {}  # bytes of storages that were made here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count its results that share no memory with what it was given."""
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if tensor.numel() > 1 and StorageWeakRef(storage) not in given:
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {reference: nbytes for reference, nbytes in self._alive.items() if not reference.expired()}
        self.most_nbytes = max(self.most_nbytes, sum(self._alive.values()))
        return result


def small_shape(shape: torch.Size) -> torch.Size:
    """Return a shape of the same proportions with some thousand elements at the most, as far as whole numbers allow."""
    factor = max(1.0, shape.numel() / _SMALL) ** (1 / max(1, len(shape)))
    return torch.Size(math.ceil(size / factor) for size in shape)


def piece_elements(nbytes: int, temporary_nbytes: int) -> int | None:
    """Return how many elements may be updated at once if each takes so many temporary bytes; None: any number.

    Never fewer than a few hundred, below which an update is mostly overhead.
    """
    if temporary_nbytes == 0:
        return None
    wanted = nbytes // temporary_nbytes
    return max(_ALIGN, wanted - wanted % _ALIGN)


def _tensors(tree: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in leaves if tensor.layout is torch.strided]  # others have several storages, or none
