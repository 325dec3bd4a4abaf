"""The numbers under which ops name stores, parameters and tiles, and what they stand for. A graph keeps nothing alive."""

import itertools
import weakref
from typing import TYPE_CHECKING

from zinf_compile.errors import StoreError
from zinf_compile.runtime.slots import StoredParameter
from zinf_compile.runtime.tiles import StoredTile

if TYPE_CHECKING:
    from zinf_compile.runtime.store import Store

_numbers = itertools.count(1)  # of stores and parameters alike: a number in a graph never means two things
_stores: "weakref.WeakValueDictionary[int, Store]" = weakref.WeakValueDictionary()
_stored: "weakref.WeakValueDictionary[int, StoredParameter | StoredTile]" = weakref.WeakValueDictionary()


def new_id() -> int:
    """Return a number for a store, a parameter or a tile, unique in the process."""
    return next(_numbers)


def register_store(store: "Store") -> None:
    """Let ops find a store."""
    _stores[store.store_id] = store


def register_stored(stored: StoredParameter | StoredTile) -> None:
    """Let ops find a parameter, or a tile of one."""
    _stored[stored.param] = stored


def find_store(store_id: int) -> "Store":
    """Return the store an op names."""
    return _stores[store_id]


def find_record(param: int) -> StoredParameter | StoredTile:
    """Return the parameter, or the tile of one, that an op names; StoreError after its model is gone."""
    stored = _stored.get(param)
    if stored is None:
        raise StoreError(f"parameter number {param} belongs to a model that no longer exists")
    return stored
