"""Bounds memory in eager mode: autograd saves the name of a gathered weight instead of its value; backward regathers."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.storage.slots import local_of


class GatheredStorages:
    """The storages that hold eagerly gathered values now."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[weakref.ref[Tensor], StoredParameter]] = {}

    def note(self, value: Tensor, record: StoredParameter) -> None:
        """Remember the parameter of a gathered value as long as the value exists."""
        key = value.untyped_storage()._cdata
        # Hazard: an interrupt inside a finalizer is lost, and so is the finalizer's work, while the memory may be
        # reused.
        self._records[key] = weakref.ref(value), record
        weakref.finalize(value, self._records.pop, key, None)

    def find(self, tensor: Tensor) -> StoredParameter | None:
        """Return the parameter whose gathered value a tensor is or views; None for others."""
        key = tensor.untyped_storage()._cdata
        noted, record = self._records.get(key, (None, None))
        value = None if noted is None else noted()
        # Hazard: ``set_`` gives a value another storage; another tensor may have the one that was noted.
        return record if value is not None and value.untyped_storage()._cdata == key else None


GATHERED = GatheredStorages()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A view of a gathered weight, by name; of one that the model's own code has as a DTensor, with its class and spec."""

    record: StoredParameter
    update_count: int
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int | torch.SymInt
    kind: Callable[..., Tensor]
    spec: object

    def unpack(self) -> Tensor:
        """Gather again; RuntimeError if the parameter was updated since, as for any saved tensor in PyTorch."""
        store = self.record.store
        if self.record.update.count != self.update_count:
            raise RuntimeError(
                f"parameter '{self.record.name}' was modified by an optimizer step between its forward and its backward; "
                "call backward() before step()"
            )
        value = store.gather_value(self.record, self.record.dtype)
        value = value.as_strided(self.size, self.stride, self.storage_offset)
        return value if self.spec is None else self.kind(value, self.spec, requires_grad=False)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's annotation is partial
def _pack(tensor: Tensor) -> Tensor | PackedWeight:
    local = local_of(tensor)
    if type(local) is not Tensor and not isinstance(local, torch.nn.Parameter):
        return tensor
    record = GATHERED.find(local)
    if record is None or local.dtype != record.dtype:
        return tensor
    return PackedWeight(
        record=record,
        update_count=record.update.count,
        size=local.shape,
        stride=local.stride(),
        storage_offset=local.storage_offset(),
        kind=type(tensor),
        spec=getattr(tensor, "_spec", None),
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's annotation is partial
def _unpack(packed: Tensor | PackedWeight) -> Tensor:
    return packed.unpack() if isinstance(packed, PackedWeight) else packed


@contextmanager
def repack_gathered() -> Iterator[None]:
    """In this block, save gathered weights by name."""
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield
