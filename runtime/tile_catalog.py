"""What the search for tiles asks of a store: the parameters behind numbers, and numbers for tiles of them."""

from zinf_compile.facts import ParameterFact
from zinf_compile.runtime.numbers import find_record
from zinf_compile.runtime.store import Store
from zinf_compile.tiles import TileRows


class StoreCatalog:
    """The parameters of a store as the search for tiles asks for them."""

    def __init__(self, store: Store) -> None:
        self.config = store.config
        self._store = store

    def fact_of(self, param: int) -> ParameterFact:
        """Return the fact of a parameter that a graph names."""
        return self._store.facts[find_record(param).name]

    def number_of(self, param: int, number: int, rows: TileRows) -> int:
        """Return the number under which ops find a tile of a parameter."""
        return self._store.tile(find_record(param).whole, number, rows).param
