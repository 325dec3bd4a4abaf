"""The parameters of a model that is planned without a store: shapes and bytes, no values."""

from collections.abc import Container, Mapping, Sequence

import torch

from zinf_compile.driver.catalog import Narrowing
from zinf_compile.ir.config import Config
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.plan import Placement
from zinf_compile.ir.slices import Slice
from zinf_compile.ir.tiles import cut_rows, least_rows, tile_name


class PaperCatalog:
    """Facts of all parameters, and their homes once one graph is planned. The other graphs keep those homes."""

    def __init__(self, config: Config, facts: tuple[ParameterFact, ...], num_ranks: int) -> None:
        self.config = config
        self.num_ranks = num_ranks
        self.facts = facts
        self.placements: tuple[Placement, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._by_name = {fact.name: fact for fact in facts}

    @property
    def has_plans(self) -> bool:
        """Return whether homes are fixed, because a graph planned earlier has chosen them."""
        return bool(self.placements)

    def only(self, names: Container[str]) -> "PaperCatalog":
        """Return a catalog with only these parameters."""
        return PaperCatalog(self.config, tuple(fact for fact in self.facts if fact.name in names), self.num_ranks)

    def with_homes(self, placements: tuple[Placement, ...]) -> "PaperCatalog":
        """Return a copy of the catalog with these homes for all parameters."""
        placed = PaperCatalog(self.config, self.facts, self.num_ranks)
        placed.placements = placements
        return placed

    def narrow_copies(self, reads: Mapping[int, torch.dtype]) -> dict[int, torch.dtype]:
        """Return an empty dict: without a store, compute copies have the dtype that the options ask for."""
        return {}

    def plan_narrowing(self, reads: Mapping[int, torch.dtype], streamed: Container[str]) -> Narrowing | None:
        """Return None: without a store, compute copies have the dtype that the options ask for."""
        return None

    def adopt_narrowing(self, narrowing: Narrowing) -> None:
        """Raise AssertionError: ``plan_narrowing`` never returns a plan."""
        raise AssertionError("parameters on paper have no narrower copies")

    def cut(self, name: str, num_tiles: int) -> tuple[Slice, ...]:
        """Return the rows of each tile of a parameter."""
        fact = self._by_name[name]
        return cut_rows(fact.slice, num_tiles, least_rows(fact, has_file=self.config.nvme is not None), self.num_ranks)

    def named(self, names: dict[int, str]) -> "NumberedParameters":
        """Return the parameters by number in a skeleton, a graph that may have fewer blocks than the model."""
        return NumberedParameters(self.config, self._by_name, names, self.num_ranks)


class NumberedParameters:
    """The parameters of a skeleton by number, for the search for tiles. Gives numbers to tiles."""

    def __init__(
        self, config: Config, facts: Mapping[str, ParameterFact], names: dict[int, str], num_ranks: int
    ) -> None:
        """``names`` are the names of the skeleton's parameters by number. Names of tiles are added to it."""
        self.config = config
        self.has_plans = False
        self.num_ranks = num_ranks
        self._facts, self._names = facts, names

    def fact_of(self, param: int) -> ParameterFact | None:
        """Return the fact of a parameter; None if the model has no parameter of its name."""
        return self._facts.get(self._names[param])

    def number_of(self, param: int, number: int, tiles: Sequence[Slice]) -> int:
        """Return a new number for a tile."""
        tile = max(self._names) + 1
        self._names[tile] = tile_name(self._names[param], number)
        return tile
