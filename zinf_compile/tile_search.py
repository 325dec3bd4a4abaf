"""Which parameters of a captured graph to tile, and into how many: none if it fits without, else as few tiles as will do."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, fx

from zinf_compile.config import LEAST_TILE, Config
from zinf_compile.errors import ConfigError, DeviceCapacityError, UnsupportedError
from zinf_compile.facts import ParameterFact
from zinf_compile.passes.contract import TileHandle, TileInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import tile_graph
from zinf_compile.passes.tiling.fuse_linear_loss import find_linear_losses, takes_one_pass
from zinf_compile.passes.tiling.tile_chains import find_row_chains
from zinf_compile.passes.tiling.tile_parameters import Tileable, find_tileable
from zinf_compile.terms import format_bytes
from zinf_compile.tiles import WHOLE, TiledParameters, TileRows, cut_rows, least_rows

Made = TypeVar("Made")
_MOST_CHAIN_TILES = 64
_COPIES = (
    5  # of a parameter on the device at once: it, a kernel's own, its gradient, one more on its way to a sum, its cast
)
_TIMES_COUNTED = 2  # are activations at the most: bound values in the arena, and the others when those are the most
_HELPED = 0.95  # of what was needed before: finer tiles that leave more are the last of their kind
FASTER = 0.995  # of a step: what is less is no reason for more tiles
MANY_TILES = 128  # in a graph: to plan for more of them takes longer than it may win


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledGraph:
    """A torch-level graph that reads some parameters by tiles."""

    graph_module: fx.GraphModule
    tiled: TiledParameters
    numbers: frozenset[int] = frozenset()  # of the tiles, as ops name them
    note: str | None = None  # for a reader of the report


class Catalog(Protocol):
    """What a search knows of the parameters that a graph names by numbers."""

    config: Config

    def fact_of(self, param: int) -> ParameterFact | None:
        """Return the fact of a parameter; None for one that must stay whole."""

    def number_of(self, param: int, number: int, rows: TileRows) -> int:
        """Return the number under which ops find a tile of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A parameter that a graph may read by tiles, which begin at a multiple of some rows."""

    name: str
    nbytes: int  # of the compute copy
    multiple: int
    found: Tileable

    @property
    def num_rows(self) -> int:
        return self.found.shape[0]

    @property
    def most_tiles(self) -> int:
        """Return into how many tiles it may be cut at the most; 1 if a reader needs all of it."""
        return 1 if self.found.refused_by is not None else -(-self.num_rows // self.multiple)


def fit_by_tiles(
    graph_module: fx.GraphModule,
    catalog: Catalog,
    compile_tiled: Callable[[TiledGraph], Made],
    predict_seconds: Callable[[TiledGraph], float],
) -> Made:
    """Return what ``compile_tiled`` makes of a graph that reads as few tiles as it takes to fit, which may be none.

    Of two numbers of tiles that fit, one after the other, the one with the shorter step is taken. Both functions raise
    DeviceCapacityError for a graph that does not fit. If none does, that of the graph that needs the least is raised, with
    what could not be tiled.
    """
    search = TileSearch(graph_module, catalog)
    choices = search.finer_and_finer()
    try:
        return compile_tiled(search.apply(next(choices)))
    except DeviceCapacityError as error:
        search.refused = least = error
    fitting: tuple[float, TiledGraph] | None = None
    for choice in choices:
        tiled = search.apply(choice)
        try:
            seconds = predict_seconds(tiled)
        except DeviceCapacityError as error:
            search.refused = error
            least = min(least, error, key=lambda refused: refused.needed_nbytes)
            continue
        if fitting is not None:
            return compile_tiled(tiled if seconds < FASTER * fitting[0] else fitting[1])
        fitting = seconds, tiled
        if len(tiled.numbers) > MANY_TILES:
            break
    if fitting is not None:
        return compile_tiled(fitting[1])
    raise search.explain(least)


def check_tiles(config: Config, parameters: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if options ask for tiles of a parameter that is not there, or for more than it has rows."""
    for name, count in config.tiles or ():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"tiles={{{name!r}: {count}}} names no parameter of the model{hint}")
        shape = tuple(parameters[name].shape)
        if count > 1 and (len(shape) < 2 or count > shape[0]):
            raise ConfigError(
                f"tiles={{{name!r}: {count}}} asks for {count} tiles of its rows, and it has the shape {list(shape)}; a "
                "parameter of two dimensions or more has as many tiles as rows at the most"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a graph is tiled into: the tiles of each parameter, those of chains of layers, and whether losses are fused."""

    num_tiles: Mapping[str, int]
    chain_tiles: int = 1
    fuses_losses: bool = False
    makes_logits_again: bool = False


class TileSearch:
    """The choices for one graph, from none to the finest there is. ``refused`` says why the last did not fit."""

    def __init__(self, graph_module: fx.GraphModule, catalog: Catalog) -> None:
        self._graph_module = graph_module
        self._catalog = catalog
        self._config = catalog.config
        found = map(self._make_candidate, find_tileable(graph_module.graph))
        self._candidates = {candidate.name: candidate for candidate in found if candidate is not None}
        losses = list(find_linear_losses(graph_module.graph))
        self._has_loss, self._has_one_pass = bool(losses), any(map(takes_one_pass, losses))
        self._has_chains = next(find_row_chains(graph_module.graph), None) is not None
        self.refused: DeviceCapacityError | None = None

    def _make_candidate(self, found: Tileable) -> _Candidate | None:
        fact = self._catalog.fact_of(found.param)
        if fact is None:
            return None
        multiple = least_rows(fact, found.shape, has_file=self._config.nvme is not None)
        return _Candidate(name=fact.name, nbytes=fact.compute_nbytes, multiple=multiple, found=found)

    def finer_and_finer(self) -> Iterator[Choice]:
        """Give choices, each to be asked for when the one before did not fit: first what options ask for."""
        choice = Choice(num_tiles=self._asked_tiles())
        yield choice
        if self._config.tiles is None:
            return
        assert self.refused is not None
        # Fused losses may leave nothing of activations. What cannot fit even so is not tried by itself.
        unfused = _TIMES_COUNTED * self.refused.activations_nbytes if self._has_loss else 0
        may_fit = self.refused.needed_nbytes - unfused <= self._config.device_memory
        for fused in self._fused(choice):
            choice = fused
            if may_fit:
                yield choice
                unfused = 0
        fixed = dict(self._config.tiles or ())
        free = {name: each for name, each in self._candidates.items() if name not in fixed and each.most_tiles > 1}
        useful = {"parameters", *(["chains"] if self._has_chains else [])}  # what finer tiles of have helped so far
        while useful:
            assert self.refused is not None
            refused, piece = self.refused, self._largest_piece(choice, free)
            # What is counted as activations has the gradient of a weight in it, and may have one more on its way to a sum.
            wide = refused.activations_nbytes - 2 * piece
            pieces = _COPIES * piece if "parameters" in useful else 0
            without_pieces = refused.needed_nbytes - unfused - pieces
            narrowed = _TIMES_COUNTED * max(0, wide) if "chains" in useful else 0
            if without_pieces - narrowed > self._config.device_memory:
                return  # without any of what tiles make smaller it would not fit
            is_chain = "chains" in useful and (
                wide > min(pieces, self._config.device_memory // 2)
                or without_pieces > self._config.device_memory
                or "parameters" not in useful
            )
            if is_chain:
                finer = replace(choice, chain_tiles=2 * choice.chain_tiles)
            else:
                # A tile and a workspace as large are on the device at once: what is larger than half of it cannot fit.
                nbytes = min(piece, self._config.device_memory) // 2
                while nbytes > LEAST_TILE and without_pieces + _COPIES * nbytes > self._config.device_memory:
                    nbytes //= 2  # what cannot fit is not tried
                nbytes = max(LEAST_TILE, nbytes)
                counts = {name: max(choice.num_tiles[name], _num_tiles(each, nbytes)) for name, each in free.items()}
                finer = replace(choice, num_tiles={**choice.num_tiles, **counts})
            if finer == choice or finer.chain_tiles > _MOST_CHAIN_TILES:
                useful.discard("chains" if is_chain else "parameters")
                continue
            choice, unfused = finer, 0
            yield choice
            if self.refused is not refused and self.refused.needed_nbytes > _HELPED * refused.needed_nbytes:
                useful.discard("chains" if is_chain else "parameters")

    def _fused(self, choice: Choice) -> Iterator[Choice]:
        """Yield a choice with its losses fused, if it has any, then with logits that are made again."""
        if self._has_loss:
            choice = replace(choice, fuses_losses=True)
            yield choice
            if self._has_one_pass:
                yield replace(choice, makes_logits_again=True)

    def _largest_piece(self, choice: Choice, free: Mapping[str, _Candidate]) -> int:
        """Return the most bytes of a parameter that may be cut finer, or of a tile of one, that a choice gathers at once."""
        return max((each.nbytes // choice.num_tiles[name] for name, each in free.items()), default=0)

    def _asked_tiles(self) -> dict[str, int]:
        """Return the tiles that options ask for. UnsupportedError for a parameter by name that some op reads whole."""
        config, candidates = self._config, self._candidates
        asked = dict.fromkeys(candidates, 1)
        if config.tile_memory is not None:
            asked = {name: _num_tiles(candidate, config.tile_memory) for name, candidate in candidates.items()}
        for name, count in config.tiles or ():
            if name not in candidates:
                continue  # another graph reads it
            candidate = candidates[name]
            if count > candidate.most_tiles:
                reason = (
                    _describe_refusal(candidate)
                    if candidate.most_tiles == 1
                    else f"its {candidate.num_rows} rows are cut at multiples of {candidate.multiple}, whole sectors of the "
                    f"file, into {candidate.most_tiles} tiles at the most"
                )
                raise UnsupportedError(f"tiles={{{name!r}: {count}}} cannot be: {reason}")
            asked[name] = count
        return asked

    def apply(self, choice: Choice) -> TiledGraph:
        """Return the graph as a choice has it; the graph itself if it has no tiles."""
        rows: dict[str, Sequence[TileRows]] = {}
        handles: dict[int, list[TileHandle]] = {}
        for name, count in choice.num_tiles.items():
            if count > 1:
                candidate = self._candidates[name]
                param = candidate.found.param
                rows[name] = tiles = cut_rows(candidate.num_rows, count, candidate.multiple)
                handles[param] = [
                    TileHandle(param=self._catalog.number_of(param, number, each), num_rows=each.num_rows)
                    for number, each in enumerate(tiles)
                ]
        inputs = TileInputs(
            tiles=handles,
            fuses_losses=choice.fuses_losses,
            makes_logits_again=choice.makes_logits_again,
            chain_tiles=choice.chain_tiles,
        )
        if inputs == TileInputs():
            return TiledGraph(graph_module=self._graph_module, tiled=WHOLE)
        copied = copy_graph_module(self._graph_module)
        tile_graph(copied, inputs)
        return TiledGraph(
            graph_module=copied,
            tiled=TiledParameters(rows),
            numbers=frozenset(handle.param for tiles in handles.values() for handle in tiles),
            note=_describe_choice(choice),
        )

    def explain(self, refused: DeviceCapacityError) -> DeviceCapacityError:
        """Return why a choice did not fit, with why the largest parameter cannot be tiled if that is so."""
        largest = max(self._candidates.values(), key=lambda candidate: candidate.nbytes, default=None)
        if largest is not None and largest.most_tiles == 1 and largest.nbytes > LEAST_TILE:
            refused.add_note(f"zinf_compile: {_describe_refusal(largest)}")
        return refused


def _num_tiles(candidate: _Candidate, tile_nbytes: int) -> int:
    return min(candidate.most_tiles, max(1, -(-candidate.nbytes // tile_nbytes)))


def _describe_choice(choice: Choice) -> str:
    """Return a sentence for a reader of the report."""
    told = [f"{name} is gathered in {count} tiles" for name, count in choice.num_tiles.items() if count > 1]
    if choice.chain_tiles > 1:
        told.append(f"layers that follow each other compute {choice.chain_tiles} tiles of rows, one after another")
    if choice.fuses_losses:
        again = " and are made again in backward" if choice.makes_logits_again else ""
        told.append(f"the loss is fused with its linear layer, whose logits never exist whole{again}")
    return f"to fit the device, or as asked for, {'; '.join(told)}: results are the same to rounding"


def _describe_refusal(candidate: _Candidate) -> str:
    """Return why a parameter cannot be tiled, with the line of the user's that reads it whole."""
    reader = candidate.found.refused_by
    size = format_bytes(candidate.nbytes)
    if reader is None:
        return (
            f"'{candidate.name}' ({size}) cannot be tiled: only {candidate.multiple} of its rows are whole sectors of the "
            f"file, and it has {candidate.num_rows}"
        )
    return f"'{candidate.name}' ({size}) cannot be tiled: {_describe_op(reader)} reads all of it{_where(reader)}"


def _describe_op(node: fx.Node) -> str:
    return (
        node.target
        if isinstance(node.target, str)
        else torch.typename(node.target)
        if callable(node.target)
        else node.op
    )


def _where(node: fx.Node) -> str:
    """Return the user's line behind a node, as `` at file.py:12``; nothing if it is not known."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    file, number, *_ = lines[-1].removeprefix("File ").split(", ")
    return f" at {file.strip(chr(34))}:{number.removeprefix('line ')}"
