"""Open forwards, whose backward has not run yet: the memory they hold on the device while another graph runs.

Autograd keeps what a forward saves until its backward has run without ``retain_graph``, or its graph is dropped. Weak
references to the storages show both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldStorage:
    """A storage, identified for as long as this object lives."""

    weak: StorageWeakRef
    nbytes: int

    @property
    def number(self) -> int:
        """Return an identifier that no other storage has while this object lives."""
        number: int = self.weak.cdata
        return number

    @property
    def is_alive(self) -> bool:
        """Return whether a tensor still uses this storage."""
        return not self.weak.expired()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenForward:
    saved: tuple[HeldStorage, ...]  # only for backward
    returned: tuple[
        HeldStorage, ...
    ]  # outputs, some of which are saved, here or by the forward of another graph that reads them

    @property
    def is_open(self) -> bool:
        return any(storage.is_alive for storage in self.saved)


class OpenForwards:
    """The open forwards of one store's graphs, and their bytes on the device."""

    def __init__(self) -> None:
        self._forwards: list[_OpenForward] = []

    def add(self, given: Iterable[HeldStorage], returned: Sequence[object], saved: Sequence[object]) -> None:
        """Remember a forward that ran with inputs ``given``, by its outputs and saved values.

        A caller may keep outputs for longer: they count only while some saved value is alive.
        """
        before = {storage.number for storage in given}
        results = {storage.number: storage for storage in storages_of(returned) if storage.number not in before}
        own = [storage for storage in storages_of(saved) if storage.number not in before | results.keys()]
        if own:
            self._forwards.append(_OpenForward(saved=tuple(own), returned=tuple(results.values())))

    def nbytes_beside(self, given: Iterable[HeldStorage] = ()) -> int:
        """Return the bytes that open forwards hold, without storages ``given`` to the graph that runs next."""
        self._forwards = [forward for forward in self._forwards if forward.is_open]
        before = {storage.number for storage in given}
        held = {
            storage.number: storage.nbytes
            for forward in self._forwards
            for storage in (*forward.saved, *forward.returned)
            if storage.is_alive and storage.number not in before
        }
        return sum(held.values())


def storages_of(values: Iterable[object]) -> tuple[HeldStorage, ...]:
    """Return the distinct storages of the tensors among some values."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    held = (HeldStorage(weak=StorageWeakRef(storage), nbytes=storage.nbytes()) for storage in storages)
    return tuple({storage.number: storage for storage in held}.values())
