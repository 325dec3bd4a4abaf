"""Chooses which parameters of a captured graph to tile, and the number of tiles: as few as it takes to fit."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor, fx

from zinf_compile.ir.config import LEAST_TILE, Config
from zinf_compile.ir.errors import ConfigError, DeviceCapacityError, UnsupportedError
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.ir.slices import Slice
from zinf_compile.ir.tiles import WHOLE, TiledParameters, cut_rows, least_rows, most_tiles
from zinf_compile.passes.contract import TileHandle, TileInputs
from zinf_compile.passes.fx_edit import copy_graph_module, describe_place
from zinf_compile.passes.pipeline import tile_graph
from zinf_compile.passes.transforms.tiling.cut_blocks import Block, WholeBlock, find_blocks
from zinf_compile.passes.transforms.tiling.fuse_linear_loss import find_linear_losses, takes_one_pass
from zinf_compile.passes.transforms.tiling.tile_chains import find_row_chains
from zinf_compile.passes.transforms.tiling.tile_parameters import Tileable, find_tileable

Made = TypeVar("Made")
_MOST_CHAIN_TILES = 64
_MOST_MICRO_BATCHES = 64
# Of a parameter on the device at once: itself, a kernel's copy, its gradient, one more being accumulated, its cast.
_COPIES = 5
_TIMES_COUNTED = 2  # of activations, at most: as bound values in the arena, and in the peak of the others
_HELPED = 0.95  # of the bytes needed before: if finer tiles need more, tiles of this kind are not split further
FASTER = 0.995  # of a step's seconds: a smaller gain does not justify more tiles
MANY_TILES = 128  # per graph: planning more takes longer than it could gain
MANY_BATCHES = 8  # of a block: planning twice as many takes longer than it could gain
_OUT_OF_REACH = 1.1  # of the budget, by the trend of the bytes that fewer micro-batches need


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledGraph:
    """A torch-level graph that reads some parameters by tiles."""

    graph_module: fx.GraphModule
    tiled: TiledParameters
    numbers: frozenset[int] = frozenset()  # by which ops refer to the tiles
    cut: str = ""  # describes what is tiled
    remark: str | None = None  # about what was asked for and is not done

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report."""
        if not self.cut:
            return () if self.remark is None else (self.remark,)
        made = f"to fit the device, or as asked for, {self.cut}: results are the same to rounding"
        return (made,) if self.remark is None else (made, self.remark)


class Catalog(Protocol):
    """The parameters of a graph by number, as the search needs them."""

    config: Config

    @property
    def has_plans(self) -> bool:
        """Return whether another graph of the model has been planned before."""

    @property
    def num_ranks(self) -> int:
        """Return how many ranks divide every parameter, and every tile of one."""

    def fact_of(self, param: int) -> ParameterFact | None:
        """Return the fact of a parameter; None for one that the model does not have."""

    def number_of(self, param: int, number: int, tiles: Sequence[Slice]) -> int:
        """Return the number by which ops refer to one of the tiles of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A parameter that a graph may read by tiles. Tiles start at a multiple of ``multiple`` among the rows of a rank."""

    name: str
    slice: Slice  # all of it
    nbytes: int  # of the compute copy
    multiple: int
    num_ranks: int
    found: Tileable

    @property
    def num_rows(self) -> int:
        return self.slice.length

    @property
    def most_tiles(self) -> int:
        """Return the largest possible number of tiles; 1 if a reader needs the whole parameter."""
        if self.found.refused_by is not None:
            return 1
        return most_tiles(self.num_rows, self.multiple, self.num_ranks)

    def cut(self, num_tiles: int) -> tuple[Slice, ...]:
        """Return the tiles."""
        return cut_rows(self.slice, num_tiles, self.multiple, self.num_ranks)


def fit_by_tiles(
    graph_module: fx.GraphModule,
    catalog: Catalog,
    compile_tiled: Callable[[TiledGraph], Made],
    predict_seconds: Callable[[TiledGraph], float],
    *,
    compile_op_by_op: Callable[[TiledGraph, DeviceCapacityError], Made] | None = None,
    stays_whole: bool = False,
) -> Made:
    """Return the result of ``compile_tiled`` for the graph with as few tiles as it takes to fit, possibly none.

    Before the graph is tiled, ``compile_op_by_op`` is tried, which leaves more memory to the model than compiling does.

    ``compile_tiled`` captures, plans and lowers one choice (``passes/capture/aot.py``); ``predict_seconds`` only plans it.

    If the next finer choice also fits, takes the one with the shorter step. Both functions raise DeviceCapacityError
    for a graph that does not fit. If nothing fits, raises the error of the choice that needs the least, with a note
    about what could not be tiled.

    A graph that ``stays_whole`` is not tiled: collectives of the user's would run once for each tile, on this rank only.
    """
    search = TileSearch(graph_module, catalog)
    choices = search.finer_and_finer()
    whole = search.apply(next(choices))
    try:
        return compile_tiled(whole)
    except DeviceCapacityError as error:
        search.refused = least = error.with_traceback(None)  # whose frames keep all that was captured
    if compile_op_by_op is not None:
        with suppress(DeviceCapacityError):
            return compile_op_by_op(whole, least)
    fitting: tuple[float, TiledGraph] | None = None
    for choice in () if stays_whole else choices:
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
        if len(tiled.numbers) > MANY_TILES or choice.micro_batches >= MANY_BATCHES:
            break
    if fitting is not None:
        return compile_tiled(fitting[1])
    raise search.explain(least)


def check_tiles(config: Config, parameters: Mapping[str, Tensor], num_ranks: int, *, are_all: bool = True) -> None:
    """Raise ConfigError if options ask for more tiles than rows, or, of ``are_all``, for a parameter that is not there."""
    for name, count in config.tiles or ():
        if name not in parameters and not are_all:
            continue
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"tiles={{{name!r}: {count}}} names no parameter of the model{hint}")
        shape = tuple(parameters[name].shape)
        if count > 1 and (len(shape) < 2 or count > most_tiles(shape[0], 1, num_ranks)):
            on_each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
            raise ConfigError(
                f"tiles={{{name!r}: {count}}} asks for {count} tiles of its rows, and it has the shape {list(shape)}; a "
                f"parameter of two dimensions or more has as many tiles as rows{on_each} at the most"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way to tile a graph: parameters, the batch inside of blocks, rows of chains of layers, and losses if fused."""

    num_tiles: Mapping[str, int]
    micro_batches: int = 1  # inside of blocks
    chain_tiles: int = 1
    fuses_losses: bool = False
    recomputes_logits: bool = False


class TileSearch:
    """The choices for one graph, from no tiles to the finest. ``refused`` is the error of the last choice."""

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

    @cached_property
    def _blocks(self) -> Sequence[Block | WholeBlock]:
        return tuple(find_blocks(self._graph_module.graph))

    @property
    def _cut_blocks(self) -> Sequence[Block]:
        return [block for block in self._blocks if isinstance(block, Block)]

    def _finer_batches(self, needed: Mapping[int, int]) -> int | None:
        """Return the next number of micro-batches to try; None if there is none, or none that could fit.

        ``needed`` are the bytes needed with fewer, by their number. Part of these bytes is proportional to the size of a
        micro-batch. The last two give that part and the rest, and so the number with which the graph may fit.
        """
        *_, last = needed
        least, budget = 2 * last, self._config.device_memory
        if len(needed) > 1:
            before = [*needed][-2]
            of_batch = (needed[before] - needed[last]) / (1 / before - 1 / last)
            rest = needed[last] - of_batch / last
            if rest > _OUT_OF_REACH * budget:
                return None
            if budget > rest:
                least = max(least, int(of_batch / (budget - rest) / _OUT_OF_REACH))
        num_samples = math.gcd(*(block.num_samples for block in self._cut_blocks))
        finer = range(least, min(num_samples, _MOST_MICRO_BATCHES) + 1)
        return next((number for number in finer if num_samples % number == 0), None)

    def _asked_batches(self) -> int:
        """Return the micro-batches that options ask for; 1 for a graph without blocks.

        Raises ConfigError if the batch has no such part, UnsupportedError if no block can be cut. Not for a graph that
        is captured after another, such as for the last batch of an epoch, which may be smaller: that is computed whole.
        """
        asked = self._config.micro_batches or 1
        if asked == 1 or not self._blocks:
            return 1
        samples = sorted({block.num_samples for block in self._cut_blocks})
        if any(number % asked == 0 for number in samples):
            return asked
        if self._catalog.has_plans:
            return 1
        whole = next((block for block in self._blocks if isinstance(block, WholeBlock)), None)
        if not samples:
            assert whole is not None
            raise UnsupportedError(
                f"micro_batches={asked} cannot be: {_describe_whole(whole)}; leave it out, or give smaller batches and "
                "accumulate gradients"
            )
        raise ConfigError(
            f"micro_batches={asked} does not divide the batch, of {' or '.join(map(str, samples))} samples; give a "
            "number that does, or leave it to the planner with micro_batches=None"
        )

    def _make_candidate(self, found: Tileable) -> _Candidate | None:
        fact = self._catalog.fact_of(found.param)
        if fact is None:
            return None
        multiple = least_rows(fact, has_file=self._config.nvme is not None)
        return _Candidate(
            name=fact.name,
            slice=fact.slice,
            nbytes=fact.compute_nbytes,
            multiple=multiple,
            num_ranks=self._catalog.num_ranks,
            found=found,
        )

    def finer_and_finer(self) -> Iterator[Choice]:
        """Yield finer and finer choices, starting with the options' own. Set ``refused`` before each next one."""
        choice = Choice(num_tiles=self._asked_tiles(), micro_batches=self._asked_batches())
        yield choice
        if self._config.tiles is None:
            return
        assert self.refused is not None
        # Fusing losses can save at most all activations. If even that cannot fit, fusing alone is not tried.
        unfused = _TIMES_COUNTED * self.refused.activations_nbytes if self._has_loss else 0
        may_fit = self.refused.needed_nbytes - unfused <= self._config.device_memory
        for fused in self._fused(choice):
            choice = fused
            if may_fit:
                yield choice
                unfused = 0
        fixed = dict(self._config.tiles or ())
        free = {name: each for name, each in self._candidates.items() if name not in fixed and each.most_tiles > 1}
        useful = {"parameters", *(["chains"] if self._has_chains else [])}  # what is worth splitting further
        if self._config.micro_batches is None and self._cut_blocks:
            useful.add("blocks")
        needed_by_batches: dict[int, int] = {}
        while useful:
            assert self.refused is not None
            refused, piece = self.refused, self._largest_piece(choice, free)
            # The activation bytes include the gradient of a weight, and perhaps one more that is being accumulated.
            wide = refused.activations_nbytes - 2 * piece
            pieces = _COPIES * piece if "parameters" in useful else 0
            without_pieces = refused.needed_nbytes - unfused - pieces
            narrows = bool(useful & {"blocks", "chains"})
            narrowed = _TIMES_COUNTED * max(0, wide) if narrows else 0
            if without_pieces - narrowed > self._config.device_memory:
                return  # does not fit even if tiles reduced their bytes to zero
            is_wide = narrows and (
                wide > min(pieces, self._config.device_memory // 2)
                or without_pieces > self._config.device_memory
                or "parameters" not in useful
            )
            kind = "parameters" if not is_wide else "blocks" if "blocks" in useful else "chains"
            if kind != "blocks":
                needed_by_batches.clear()  # other tiles change what all numbers need
            if kind == "blocks":
                needed_by_batches[choice.micro_batches] = refused.needed_nbytes
                finer = replace(choice, micro_batches=self._finer_batches(needed_by_batches) or choice.micro_batches)
            elif kind == "chains":
                finer = replace(choice, chain_tiles=2 * choice.chain_tiles)
            else:
                # A tile and a workspace of the same size are on the device at once, so a tile above half cannot fit.
                nbytes = min(piece, self._config.device_memory) // 2
                while nbytes > LEAST_TILE and without_pieces + _COPIES * nbytes > self._config.device_memory:
                    nbytes //= 2  # skip sizes that cannot fit
                nbytes = max(LEAST_TILE, nbytes)
                counts = {name: max(choice.num_tiles[name], _num_tiles(each, nbytes)) for name, each in free.items()}
                finer = replace(choice, num_tiles={**choice.num_tiles, **counts})
            if finer == choice or finer.chain_tiles > _MOST_CHAIN_TILES:
                useful.discard(kind)
                continue
            choice, unfused = finer, 0
            yield choice
            if self.refused is not refused and self.refused.needed_nbytes > _HELPED * refused.needed_nbytes:
                useful.discard(kind)

    def _fused(self, choice: Choice) -> Iterator[Choice]:
        """Yield a choice with its losses fused, if it has any, then with recomputed logits."""
        if self._has_loss:
            choice = replace(choice, fuses_losses=True)
            yield choice
            if self._has_one_pass:
                yield replace(choice, recomputes_logits=True)

    def _largest_piece(self, choice: Choice, free: Mapping[str, _Candidate]) -> int:
        """Return the bytes of the largest parameter or tile of a choice that may be split further."""
        return max((each.nbytes // choice.num_tiles[name] for name, each in free.items()), default=0)

    def _asked_tiles(self) -> dict[str, int]:
        """Return the tiles that options ask for. UnsupportedError for more than a named parameter can have."""
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
                    else f"its {candidate.num_rows} rows{_among(candidate)} are cut at multiples of {candidate.multiple}, "
                    f"whole sectors of the file, into {candidate.most_tiles} tiles at the most"
                )
                raise UnsupportedError(f"tiles={{{name!r}: {count}}} cannot be: {reason}")
            asked[name] = count
        return asked

    def apply(self, choice: Choice) -> TiledGraph:
        """Return the graph tiled by a choice; the graph itself if nothing is tiled or fused."""
        rows: dict[str, Sequence[Slice]] = {}
        handles: dict[int, list[TileHandle]] = {}
        for name, count in choice.num_tiles.items():
            if count > 1:
                candidate = self._candidates[name]
                param = candidate.found.param
                rows[name] = tiles = candidate.cut(count)
                handles[param] = [
                    TileHandle(param=self._catalog.number_of(param, number, tiles), rows=each)
                    for number, each in enumerate(tiles)
                ]
        inputs = TileInputs(
            tiles=handles,
            fuses_losses=choice.fuses_losses,
            recomputes_logits=choice.recomputes_logits,
            micro_batches=choice.micro_batches,
            chain_tiles=choice.chain_tiles,
            num_ranks=self._catalog.num_ranks,
        )
        remark = self._describe_uncut(choice)
        if inputs == TileInputs(num_ranks=inputs.num_ranks):
            return TiledGraph(graph_module=self._graph_module, tiled=WHOLE, remark=remark)
        copied = copy_graph_module(self._graph_module)
        tile_graph(copied, inputs)
        return TiledGraph(
            graph_module=copied,
            tiled=TiledParameters(rows),
            numbers=frozenset(handle.param for tiles in handles.values() for handle in tiles),
            cut=_describe_choice(choice, self._catalog.num_ranks),
            remark=remark,
        )

    def _describe_uncut(self, choice: Choice) -> str | None:
        """Return a sentence about blocks that are computed for the whole batch although others are cut, or none are."""
        asked = self._config.micro_batches or 1
        if choice.micro_batches == 1 and asked == 1:
            return None
        whole = [
            f"{block.name} has {block.num_samples} samples" if isinstance(block, Block) else _describe_whole(block)
            for block in self._blocks
            if isinstance(block, WholeBlock) or block.num_samples % max(asked, choice.micro_batches)
        ]
        if not whole and choice.micro_batches == 1:
            return f"micro_batches={asked} has no effect here: there is no repeated block whose inputs have fixed sizes"
        more = f", and {len(whole) - 1} more blocks" if len(whole) > 1 else ""
        return f"not cut into micro-batches: {whole[0]}{more}" if whole else None

    def explain(self, refused: DeviceCapacityError) -> DeviceCapacityError:
        """Return the error, with a note if the largest parameter cannot be tiled."""
        largest = max(self._candidates.values(), key=lambda candidate: candidate.nbytes, default=None)
        if largest is not None and largest.most_tiles == 1 and largest.nbytes > LEAST_TILE:
            refused.add_note(f"zinf_compile: {_describe_refusal(largest)}")
        return refused


def _describe_whole(block: WholeBlock) -> str:
    return f"{block.name} is computed for the whole batch, since {block.why}{describe_place(block.node)}"


def _num_tiles(candidate: _Candidate, tile_nbytes: int) -> int:
    return min(candidate.most_tiles, max(1, -(-candidate.nbytes // tile_nbytes)))


def _describe_choice(choice: Choice, num_ranks: int) -> str:
    """Describe what is tiled. Other ranks have other rows in their tiles, and so other bits."""
    among = f" of the rows of {num_ranks} ranks" if num_ranks > 1 else ""
    parts = [f"{name} is gathered in {count} tiles{among}" for name, count in choice.num_tiles.items() if count > 1]
    if choice.micro_batches > 1:
        parts.append(f"blocks compute {choice.micro_batches} micro-batches, one after another")
    if choice.chain_tiles > 1:
        parts.append(f"layers that follow each other compute {choice.chain_tiles} tiles of rows, one after another")
    if choice.fuses_losses:
        recomputed = " and are recomputed in backward" if choice.recomputes_logits else ""
        parts.append(f"the loss is fused with its linear layer, whose logits never exist whole{recomputed}")
    return "; ".join(parts)


def _describe_refusal(candidate: _Candidate) -> str:
    """Return why a parameter cannot be tiled, with the line of the user's code that reads it whole."""
    reader = candidate.found.refused_by
    size = format_bytes(candidate.nbytes)
    if reader is None:
        return (
            f"'{candidate.name}' ({size}) cannot be tiled: only {candidate.multiple} of its rows are whole sectors of the "
            f"file, and it has {candidate.num_rows}{_among(candidate)}"
        )
    return (
        f"'{candidate.name}' ({size}) cannot be tiled: {_describe_op(reader)} reads all of it{describe_place(reader)}"
    )


def _among(candidate: _Candidate) -> str:
    return f" on {candidate.num_ranks} ranks" if candidate.num_ranks > 1 else ""


def _describe_op(node: fx.Node) -> str:
    return (
        node.target
        if isinstance(node.target, str)
        else torch.typename(node.target)
        if callable(node.target)
        else node.op
    )
