"""The numbers under which ops name parameters and tiles, and what they stand for. A graph keeps nothing alive."""

import itertools
import secrets
import weakref

from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.params.tiles import StoredTile

# Of stores, parameters and tiles, so that a number in a graph never means two things. Every process starts at another
# number, since a graph may be carried to another process.
_numbers = itertools.count(secrets.randbits(40) << 20)
_stored: "weakref.WeakValueDictionary[int, StoredParameter | StoredTile]" = weakref.WeakValueDictionary()


def new_id() -> int:
    """Return a number for a store, a parameter or a tile, unique in the process."""
    return next(_numbers)


def register_stored(stored: StoredParameter | StoredTile) -> None:
    """Let ops find a parameter, or a tile of one."""
    _stored[stored.param] = stored


def find_record(param: int) -> StoredParameter | StoredTile:
    """Return the parameter, or the tile of one, that an op names; StoreError after its model is gone."""
    stored = _stored.get(param)
    if stored is None:
        raise StoreError(f"parameter number {param} belongs to a model that no longer exists")
    return stored
