"""Tiles of a model that is planned without a store: the same search as when it runs, a capture for each choice."""

import gc
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zinf_compile.config import Config
from zinf_compile.errors import CapacityError, DeviceCapacityError, ZinfError
from zinf_compile.facts import ParameterFact
from zinf_compile.passes.offline.trace import TracedGraph
from zinf_compile.plans import Plan
from zinf_compile.simulate import simulate
from zinf_compile.terms import format_bytes
from zinf_compile.tile_search import FASTER, MANY_TILES, Choice, TileSearch
from zinf_compile.tiles import TiledParameters, TileRows, cut_rows, least_rows, tile_name

_TILE = re.compile(r"(.*)\.tile_\d+")
# In a graph that may have few of its blocks: to plan for more takes many minutes. Who asks for more by options gets them.
_MOST_TILES = 1024


class _NothingFinerError(ZinfError):
    """All choices of a search that do not take too long to plan were refused."""

    def __init__(self, search: TileSearch, *, is_cut_short: bool) -> None:
        super().__init__("there is nothing finer to try")
        self.search = search
        self.is_cut_short = is_cut_short  # there is, and to plan it takes too long


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why an attempt did not fit, with how many tiles; early if that was found with few of the blocks."""

    error: DeviceCapacityError
    num_tiles: int
    is_early: bool


class OfflineTiles:
    """Which tiles the graphs of a model have in the attempt that is being made: as few as what was refused so far allows."""

    def __init__(self, config: Config, facts: Mapping[str, ParameterFact], shapes: Mapping[str, torch.Size]) -> None:
        self._config, self._facts, self._shapes = config, facts, shapes
        self._refusals: list[_Refusal] = []
        self._may_refuse_early = config.tiles is not None
        self._has_refused_early = False
        self._num_tiles = 0  # in the graph of this attempt
        self._num_finer = 0
        self.notes: list[str] = []

    def fit(self, attempt: Callable[[], Plan]) -> Plan:
        """Return the plan of the first attempt that fits, or of the next finer one if its step is shorter.

        Raises the CapacityError of the one that needs the least if none does.
        """
        while True:
            self._has_refused_early = False
            try:
                plan = attempt()
                break
            except _NothingFinerError as nothing_finer:
                plan = self._attempt_last(attempt, nothing_finer)
                break
            except DeviceCapacityError as error:
                refusal = _Refusal(error=error, num_tiles=self._num_tiles, is_early=self._has_refused_early)
                self._refusals.append(refusal)
            gc.collect()  # of captures, which the caller keeps it from
        if not self._refusals or sum(placement.tile_of is not None for placement in plan.placements) > MANY_TILES:
            return plan
        self._num_finer = 1
        try:
            finer = attempt()
        except (CapacityError, _NothingFinerError):
            return plan
        return finer if simulate(finer).step_seconds < FASTER * simulate(plan).step_seconds else plan

    def refuse_early(self, check: Callable[[], None]) -> None:
        """Call ``check`` for a model with few of its blocks: what does not fit then will not with all of them."""
        if not self._may_refuse_early:
            return
        try:
            check()
        except DeviceCapacityError:
            self._has_refused_early = True
            raise
        except CapacityError:
            pass  # of other tiers, where every block has its share: only the whole model's numbers are right

    def _attempt_last(self, attempt: Callable[[], Plan], ended: _NothingFinerError) -> Plan:
        """Raise why what needs the least does not fit: if refused early, only the whole model's error has the right numbers.

        Those of graphs with many tiles would take long to have.
        """
        known = [refusal for refusal in self._refusals if not refusal.is_early or refusal.num_tiles <= MANY_TILES]
        least = min(known or self._refusals[:1], key=lambda refusal: refusal.error.needed_nbytes)
        if not least.is_early:
            raise _explain(least.error, ended)
        finest = min(refusal.error.needed_nbytes for refusal in self._refusals)
        del self._refusals[self._refusals.index(least) :]
        self._may_refuse_early = False
        try:
            return attempt()
        except DeviceCapacityError as error:
            if finest < least.error.needed_nbytes:
                error.add_note(
                    f"zinf_compile: with more tiles than were planned to the end, {format_bytes(finest)} at the least"
                )
            raise _explain(error, ended) from None

    def apply(self, graph_module: fx.GraphModule, names: dict[int, str]) -> tuple[fx.GraphModule, frozenset[int]]:
        """Return a graph with the tiles of this attempt, and their numbers, which get their names.

        Raises _NothingFinerError if this attempt is to be finer and there is nothing that is.
        """
        search = TileSearch(graph_module, _Catalog(self._config, self._facts, self._shapes, names))
        choices = search.finer_and_finer()
        choice = next(choices)
        most = max(_MOST_TILES, _num_tiles(choice))  # what options ask for is not too many
        for refusal in (*self._refusals, *(self._refusals[-1:] * self._num_finer)):
            search.refused = refusal.error
            found = next(choices, None)
            if found is None or _num_tiles(found) > most:
                raise _NothingFinerError(search, is_cut_short=found is not None)
            choice = found
        tiled = search.apply(choice)
        self._num_tiles = len(tiled.numbers)
        self.notes = [] if tiled.note is None else [tiled.note]
        return tiled.graph_module, tiled.numbers

    def tiled_in(self, graph: TracedGraph) -> TiledParameters:
        """Return the tiles that a captured graph reads."""
        matches = {found[0]: found[1] for use in graph.candidates[0].uses if (found := _TILE.fullmatch(use.parameter))}
        counts = Counter(matches.values())
        return TiledParameters({name: self._cut(name, count) for name, count in counts.items()})

    def _cut(self, name: str, count: int) -> tuple[TileRows, ...]:
        shape = self._shapes[name]
        multiple = least_rows(self._facts[name], shape, has_file=self._config.nvme is not None)
        return cut_rows(shape[0], count, multiple)


def _num_tiles(choice: Choice) -> int:
    return sum(count for count in choice.num_tiles.values() if count > 1)


def _explain(error: DeviceCapacityError, ended: _NothingFinerError) -> DeviceCapacityError:
    if ended.is_cut_short:
        error.add_note(
            f"zinf_compile: over {_MOST_TILES:,} tiles were not looked at ahead of the machine, though they may fit; "
            "tile_memory asks for them"
        )
    return ended.search.explain(error)


class _Catalog:
    """The parameters of a skeleton, which may have fewer blocks than the model."""

    def __init__(
        self,
        config: Config,
        facts: Mapping[str, ParameterFact],
        shapes: Mapping[str, torch.Size],
        names: dict[int, str],
    ) -> None:
        self.config = config
        self._facts, self._shapes, self._names = facts, shapes, names

    def fact_of(self, param: int) -> ParameterFact | None:
        """Return the fact of a parameter that a graph names; None for one that has another number in the model."""
        return self._facts.get(self._names[param])

    def number_of(self, param: int, number: int, rows: TileRows) -> int:
        """Return a new number for a tile."""
        tile = max(self._names) + 1
        self._names[tile] = tile_name(self._names[param], number)
        return tile
