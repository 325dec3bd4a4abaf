"""Forwards whose backward has not run: what they hold on the device while another graph runs.

Autograd keeps what a forward saves until its backward has run without ``retain_graph``, or its graph is dropped. Weak
references to the storages tell, whatever the reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldStorage:
    """Bytes of some tensors, told apart from all others for as long as this object is there."""

    weak: StorageWeakRef
    nbytes: int

    @property
    def number(self) -> int:
        """Return what no other storage has; it is not given to a new one while this object is there."""
        number: int = self.weak.cdata
        return number

    @property
    def is_alive(self) -> bool:
        """Return whether a tensor still has these bytes."""
        return not self.weak.expired()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenForward:
    saved: tuple[HeldStorage, ...]  # for backward, and for nothing else
    returned: tuple[HeldStorage, ...]  # of which some is saved, here or by the forward of another graph that reads it

    @property
    def is_open(self) -> bool:
        return any(storage.is_alive for storage in self.saved)


class OpenForwards:
    """The forwards of one store's graphs that are open, as far as their values rest on the device."""

    def __init__(self) -> None:
        self._forwards: list[_OpenForward] = []

    def add(self, given: Iterable[HeldStorage], returned: Sequence[object], saved: Sequence[object]) -> None:
        """Remember a forward that has run with storages ``given`` to it, by what it returns and what it saves.

        A caller may hold what is returned for longer: it counts while something is there that is only saved.
        """
        before = {storage.number for storage in given}
        results = {storage.number: storage for storage in storages_of(returned) if storage.number not in before}
        own = [storage for storage in storages_of(saved) if storage.number not in before | results.keys()]
        if own:
            self._forwards.append(_OpenForward(saved=tuple(own), returned=tuple(results.values())))

    def nbytes_beside(self, given: Iterable[HeldStorage] = ()) -> int:
        """Return the bytes that open forwards hold beside storages ``given`` to the graph that runs next."""
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
    """Return the storages of the tensors among some values, each once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    held = (HeldStorage(weak=StorageWeakRef(storage), nbytes=storage.nbytes()) for storage in storages)
    return tuple({storage.number: storage for storage in held}.values())
