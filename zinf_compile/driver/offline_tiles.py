"""Tiles of a model that is planned without a store: the search of a running model, with one capture per choice."""

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import fx

from zinf_compile.driver.paper_catalog import PaperCatalog
from zinf_compile.driver.tile_search import FASTER, MANY_BATCHES, MANY_TILES, Choice, Made, TileSearch
from zinf_compile.ir.errors import CapacityError, DeviceCapacityError, ZinfError
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.tiles import TiledParameters, tile_name
from zinf_compile.passes.capture.offline.trace import TracedGraph
from zinf_compile.passes.planner.simulator.simulate import simulate

# Per graph, which may have only a few of the blocks: planning more takes many minutes. Options may ask for more.
_MOST_TILES = 1024


class _HasPlan(Protocol):
    @property
    def plan(self) -> Plan:
        """Return the op-by-op plan of the main graph."""


Trial = TypeVar("Trial", bound=_HasPlan)


class _NothingFinerError(ZinfError):
    """None of the choices that can be planned in reasonable time fits."""

    def __init__(self, search: TileSearch, *, is_cut_short: bool) -> None:
        super().__init__("there is nothing finer to try")
        self.search = search
        self.is_cut_short = is_cut_short  # there are finer choices, but planning them takes too long


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why an attempt did not fit, and its number of tiles. Early: found by planning only a few of the blocks."""

    error: DeviceCapacityError
    num_tiles: int
    is_early: bool


class OfflineTiles:
    """The tiles of the graphs in the current attempt: the coarsest choice that was not refused yet."""

    def __init__(self, catalog: PaperCatalog) -> None:
        self._catalog = catalog
        self._refusals: list[_Refusal] = []
        self._may_refuse_early = catalog.config.tiles is not None
        self._has_refused_early = False
        self._num_tiles = 0  # in the graph of the current attempt
        self._micro_batches = 1  # of its blocks
        self._path: list[DeviceCapacityError] = []  # the last refusal before each finer choice
        self.notes: list[str] = []

    def fit(self, attempt: Callable[[], Made], predict: Callable[[], Trial], finish: Callable[[Trial], Made]) -> Made:
        """Return the first attempt that fits, or the next finer one if its step is shorter.

        As for a captured model, ``attempt`` plans the first choice with all policies. ``predict`` plans finer choices
        with fewer policies, and ``finish`` plans the best of those with all. Afterwards, ``attempt`` plans the final
        choice. If none fits, raises the CapacityError of the choice that needs the least.
        """
        try:
            return attempt()
        except DeviceCapacityError as error:
            self._refuse(error)
        fitting: tuple[float, Trial, int] | None = None
        while True:
            gc.collect()  # cycles of captures: the caller has paused the collector
            self._has_refused_early = False
            try:
                trial = predict()
            except _NothingFinerError as nothing_finer:
                if fitting is None:
                    return self._attempt_last(attempt, nothing_finer)
                break
            except DeviceCapacityError as error:
                self._refuse(error)
                continue
            except CapacityError:
                if fitting is None:
                    raise
                break
            seconds = simulate(trial.plan).step_seconds
            if fitting is not None:
                if seconds < FASTER * fitting[0]:
                    fitting = seconds, trial, len(self._path)
                break
            fitting = seconds, trial, len(self._path)
            if (
                sum(item.tile_of is not None for item in trial.plan.placements) > MANY_TILES
                or self._micro_batches >= MANY_BATCHES
            ):
                break
            self._path.append(self._path[-1])
        _, trial, num_steps = fitting
        del self._path[num_steps:]
        return finish(trial)

    def _refuse(self, error: DeviceCapacityError) -> None:
        self._refusals.append(_Refusal(error=error, num_tiles=self._num_tiles, is_early=self._has_refused_early))
        self._path.append(error)

    def refuse_early(self, check: Callable[[], None]) -> None:
        """Call ``check`` for a model with few of its blocks: if that does not fit, the whole model does not either."""
        if not self._may_refuse_early:
            return
        try:
            check()
        except DeviceCapacityError:
            self._has_refused_early = True
            raise
        except CapacityError:
            pass  # host and nvme hold something of every block, so only the numbers of the whole model are right

    def _attempt_last(self, attempt: Callable[[], Made], ended: _NothingFinerError) -> Made:
        """Raise the error of the choice that needs the least. If that was refused early, plan the whole model.

        Skips early refusals with many tiles, since planning the whole model with those takes long.
        """
        known = [refusal for refusal in self._refusals if not refusal.is_early or refusal.num_tiles <= MANY_TILES]
        least = min(known or self._refusals[:1], key=lambda refusal: refusal.error.needed_nbytes)
        if not least.is_early:
            raise _explain(least.error, ended)
        finest = min(refusal.error.needed_nbytes for refusal in self._refusals)
        del self._path[self._refusals.index(least) :]
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
        """Return the graph with the tiles of this attempt, and the tiles' numbers. Adds the tiles to ``names``.

        Raises _NothingFinerError if this attempt needs a finer choice and there is none.
        """
        search = TileSearch(graph_module, self._catalog.named(names))
        choices = search.finer_and_finer()
        choice = next(choices)
        most = max(_MOST_TILES, _num_tiles(choice))  # options may ask for more
        for refused in self._path:
            search.refused = refused
            found = next(choices, None)
            if found is None or _num_tiles(found) > most:
                raise _NothingFinerError(search, is_cut_short=found is not None)
            choice = found
        tiled = search.apply(choice)
        self._num_tiles, self._micro_batches = len(tiled.numbers), choice.micro_batches
        self.notes = list(tiled.notes)
        return tiled.graph_module, tiled.numbers

    def tiled_in(self, graph: TracedGraph) -> TiledParameters:
        """Return the tiles that a captured graph reads."""
        read = {use.parameter for use in graph.facts.uses}
        tiles = {}
        for fact in self._catalog.facts:
            if tile_name(fact.name, 0) in read:
                count = next(number for number in itertools.count(1) if tile_name(fact.name, number) not in read)
                tiles[fact.name] = self._catalog.cut(fact.name, count)
        return TiledParameters(tiles)


def _num_tiles(choice: Choice) -> int:
    return sum(count for count in choice.num_tiles.values() if count > 1)


def _explain(error: DeviceCapacityError, ended: _NothingFinerError) -> DeviceCapacityError:
    if ended.is_cut_short:
        error.add_note(
            f"zinf_compile: over {_MOST_TILES:,} tiles were not looked at ahead of the machine, though they may fit; "
            "tile_memory asks for them"
        )
    return ended.search.explain(error)
