"""Tiles of stored parameters: consecutive rows that a captured graph gathers, and gives a gradient, by themselves.

A tile has a number of its own, under which ops find it, and no home of its own: its bytes are a part of its parameter's.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zinf_compile.runtime.slots import Slot, StoredParameter
from zinf_compile.terms import Tier

if TYPE_CHECKING:
    from zinf_compile.runtime.store import Store


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRows:
    """Consecutive rows of a slot, as a slot of their own. On nvme they begin at a whole sector."""

    whole: Slot
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        """Return the name of the slot: what went wrong with a part went wrong with all of it."""
        return self.whole.name

    @property
    def tier(self) -> Tier:
        """Return where the home is."""
        return self.whole.tier

    @property
    def in_memory(self) -> bool:
        """Return whether the home is RAM."""
        return self.whole.in_memory

    @property
    def device_bytes(self) -> Tensor | None:
        """Return the bytes of the whole home, if that is on the device."""
        return self.whole.device_bytes

    @property
    def tensor(self) -> Tensor:
        """Return the rows of the home tensor. Made anew each time: kept, it would count as an alias that others hold."""
        return self.whole.tensor.narrow(0, self.first_row, self.num_rows)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows."""
        return self.tensor.numel() * self.tensor.dtype.itemsize

    @property
    def first_element(self) -> int:
        """Return where the rows begin in the flat tensor."""
        return self.first_row * self.whole.tensor.stride(0)

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the file offset and the sector-rounded length of elements [start, stop) of these rows."""
        return self.whole.byte_range(self.first_element + start, self.first_element + stop)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class StoredTile:
    """Consecutive rows of a stored parameter."""

    param: int  # the id in graphs
    name: str  # in plans
    whole: StoredParameter
    first_row: int
    num_rows: int

    @property
    def store(self) -> "Store":
        """Return the store of its parameter."""
        return self.whole.store

    @property
    def update(self) -> "Future[None] | None":
        """Return the update of its parameter that is in flight."""
        return self.whole.update

    def copy_in(self, dtype: torch.dtype) -> SlotRows:
        """Return its rows of the copy that a gather of ``dtype`` moves."""
        return self.rows_of(self.whole.copy_in(dtype))

    def rows_of(self, slot: Slot) -> SlotRows:
        """Return its rows of a slot of its parameter."""
        return SlotRows(whole=slot, first_row=self.first_row, num_rows=self.num_rows)
