"""Keep eager memory bounded: what autograd saves of a gathered weight is its name, and it is gathered again for backward."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.runtime.slots import StoredParameter


class GatheredStorages:
    """Which storages hold an eagerly gathered value now."""

    def __init__(self) -> None:
        self._records: dict[int, StoredParameter] = {}

    def note(self, value: Tensor, record: StoredParameter) -> None:
        """Remember whose bytes a fresh value holds, as long as the value exists."""
        key = value.untyped_storage()._cdata
        self._records[key] = record
        weakref.finalize(value, self._records.pop, key, None)

    def find(self, tensor: Tensor) -> StoredParameter | None:
        """Return whose bytes a tensor holds, or views."""
        return self._records.get(tensor.untyped_storage()._cdata)


GATHERED = GatheredStorages()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A view of a gathered weight, by name."""

    record: StoredParameter
    update_count: int
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int | torch.SymInt

    def unpack(self) -> Tensor:
        """Gather again; RuntimeError if the parameter was updated since, as for any saved tensor in PyTorch."""
        store = self.record.store
        if self.record.update_count != self.update_count:
            raise RuntimeError(
                f"parameter '{self.record.name}' was modified by an optimizer step between its forward and its backward; "
                "call backward() before step()"
            )
        value = store.gather_value(self.record, self.record.dtype)
        return value.as_strided(self.size, self.stride, self.storage_offset)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's annotation is partial
def _pack(tensor: Tensor) -> Tensor | PackedWeight:
    if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
        return tensor
    record = GATHERED.find(tensor)
    if record is None or tensor.dtype != record.dtype:
        return tensor
    return PackedWeight(
        record=record,
        update_count=record.update_count,
        size=tensor.shape,
        stride=tensor.stride(),
        storage_offset=tensor.storage_offset(),
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's annotation is partial
def _unpack(packed: Tensor | PackedWeight) -> Tensor:
    return packed.unpack() if isinstance(packed, PackedWeight) else packed


@contextmanager
def repack_gathered() -> Iterator[None]:
    """Pack gathered weights that autograd saves inside."""
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield
