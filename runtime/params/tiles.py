"""Tiles of stored parameters: rows that a captured graph gathers, and gives a gradient, by themselves.

A tile has a number of its own, under which ops find it, but no home: its bytes are a part of its parameter's.
"""

from dataclasses import dataclass

import torch

from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.params.records import RecordStore, StoredParameter
from zinf_compile.runtime.params.update_state import UpdateState
from zinf_compile.runtime.storage.slots import SlotPart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class StoredTile:
    """Some rows of a stored parameter: consecutive ones, or as many of each rank's."""

    param: int  # the id in graphs
    name: str  # in plans
    whole: StoredParameter
    rows: Slice  # in the order of tiles (``cut_rows``)
    mine: Slice  # those that this rank has, as rows of the parameter

    @property
    def store(self) -> RecordStore:
        """Return the store of its parameter."""
        return self.whole.store

    @property
    def update(self) -> UpdateState:
        """Return the state of its parameter's update."""
        return self.whole.update

    @property
    def shape(self) -> torch.Size:
        """Return the shape of its rows."""
        return torch.Size(self.rows.sizes)

    def copy_in(self, dtype: torch.dtype) -> SlotPart:
        """Return what this rank moves of the copy that a gather of ``dtype`` moves."""
        return self.whole.copy_in(dtype).part(self.mine)
