"""Puts what is cut along the rows of a tiled parameter in the order of its tiles, and results back in that of its rows.

A tile of several ranks has rows of every rank (``zinf_compile/ir/tiles.py``), so its rows are not consecutive. Emitted for
a linear layer with 9 output features, in two tiles of two ranks::

    bias_in_tiles = in_tile_order(bias, [3, 2], 1, 4, 0)             of each rank 3 rows and 2; but the second has only 4
    up_tile_0     = linear(x, weight_tile_0, bias_tile_0)
    up_tile_1     = linear(x, weight_tile_1, bias_tile_1)
    up_whole      = in_row_order([up_tile_0, up_tile_1], [3, 2], 1, 4, 1)

Indices of rows, as those of an embedding, become places in the order of tiles, and so do targets of a loss.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zinf_compile.passes.contract import TileHandle
from zinf_compile.passes.transforms.tiling.calls import arguments_of, places_of
from zinf_compile.passes.transforms.tiling.emit import Emitter
from zinf_compile.passes.transforms.tiling.tile_chain import tile_node
from zinf_compile.passes.transforms.tiling.tilings import Combine, Pieces, Tiling


def in_tile_order(value: Tensor, windows: Sequence[int], full: int, rest: int, dim: int) -> Tensor:
    """Return a value with its rows, along ``dim``, in the order of tiles.

    ``windows`` are the rows that each tile has of a rank. ``full`` ranks have all of these, and the next one ``rest`` rows.
    """
    shard = sum(windows)
    first, last = value.split([full * shard, rest], dim)
    of_full = first.unflatten(dim, (full, shard)).split(list(windows), dim + 1)
    of_last = last.split(list(_rests(windows, rest)), dim)
    parts = [(part.flatten(dim, dim + 1), end) for part, end in zip(of_full, of_last, strict=True)]
    return torch.cat([each for both in parts for each in both if each.shape[dim]], dim)


def in_row_order(tiles: Sequence[Tensor], windows: Sequence[int], full: int, rest: int, dim: int) -> Tensor:
    """Return tiles, which lie side by side along ``dim``, with their rows in order. See ``in_tile_order``."""
    of_full, of_last = [], []
    for tile, window, num_last in zip(tiles, windows, _rests(windows, rest), strict=True):
        first, last = tile.split([full * window, num_last], dim) if rest else (tile, None)
        of_full.append(first.unflatten(dim, (full, window)))
        of_last += [] if last is None else [last]
    whole = torch.cat(of_full, dim + 1).flatten(dim, dim + 1)
    return torch.cat([whole, *of_last], dim) if of_last else whole


def place_of(index: Tensor, windows: Sequence[int], full: int, rest: int) -> Tensor:
    """Return the places of rows in the order of tiles. What is no row stays as it is. See ``in_tile_order``."""
    shard, window = sum(windows), windows[0]  # all but the last window are equal
    rank = index // shard
    within = index - rank * shard
    first = within // window * window  # of the tile
    before = full * first + first.clamp(max=rest)  # rows in earlier tiles
    place = before + rank * (shard - first).clamp(max=window) + within - first
    return torch.where((index >= 0) & (index < full * shard + rest), place, index)


def _rests(windows: Sequence[int], rest: int) -> Iterator[int]:
    """Yield how many of the rows of the last rank that has any, and not all, each tile has."""
    for first, window in zip(itertools.accumulate(windows, initial=0), windows, strict=False):
        yield min(max(rest - first, 0), window)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOrder:
    """The order of the rows of a parameter in its tiles."""

    windows: tuple[int, ...]
    full: int
    rest: int

    @staticmethod
    def of_tiles(tiles: Sequence[TileHandle], num_ranks: int) -> "TileOrder | None":
        """Return the order of some tiles; None if it is that of the parameter."""
        if num_ranks == 1:
            return None
        windows = tuple(tile.rows.among(num_ranks).of_rank(0).length for tile in tiles)
        full, rest = divmod(sum(tile.rows.length for tile in tiles), sum(windows))
        return TileOrder(windows=windows, full=full, rest=rest)

    @property
    def args(self) -> tuple[list[int], int, int]:
        """Return what the functions above take."""
        return list(self.windows), self.full, self.rest

    def tile_reader(self, user: fx.Node, gather: fx.Node, tiling: Tiling, sizes: Sequence[int]) -> None:
        """Replace a call that reads a gathered parameter by pieces that read its tiles."""
        emitter, arguments, places = Emitter(user), arguments_of(user), places_of(user)
        changed: dict[str, Any] = {
            cut.operand: self._reordered(emitter, arguments[cut.operand], cut.dim)
            for cut in tiling.cuts
            if arguments[cut.operand] is not gather
        }
        if tiling.pieces is Pieces.VOCABULARY:
            changed["input"] = self._places(emitter, arguments["input"])
            if (padding := arguments.get("padding_idx")) is not None:
                changed["padding_idx"] = self.place(padding % tiling.size)
        for operand, value in changed.items():
            if isinstance(place := places[operand], int):
                user.update_arg(place, value)
            else:
                user.update_kwarg(place, value)
        whole = tile_node(user, tiling, sizes)
        if tiling.combine is Combine.CONCATENATE:
            whole.target, whole.args = in_row_order, (whole.args[0], *self.args, tiling.dim)

    def reorder_loss(self, loss: fx.Node) -> None:
        """Let a fused loss read classes in the order of tiles."""
        emitter = Emitter(loss)
        given: tuple[Any, ...] = loss.args
        hidden, weight, target, *biases = given
        biases = [None if bias is None else self._reordered(emitter, bias, 0) for bias in biases]
        loss.args = (hidden, weight, self._places(emitter, target), *biases)
        options: dict[str, Any] = dict(loss.kwargs)
        if options.get("class_weight") is not None:
            options["class_weight"] = self._reordered(emitter, options["class_weight"], 0)
        if "ignore_index" in options:
            options["ignore_index"] = self.place(options["ignore_index"])
        loss.kwargs = options

    def place(self, row: int) -> int:
        """Return the place of a row."""
        return int(place_of(torch.tensor(row, device="cpu"), *self.args))

    def _places(self, emitter: Emitter, indices: fx.Node) -> fx.Node:
        return emitter.call(f"{indices.name}_places", place_of, indices, *self.args, origin=indices)

    def _reordered(self, emitter: Emitter, source: fx.Node, dim: int) -> fx.Node:
        return emitter.call(f"{source.name}_in_tiles", in_tile_order, source, *self.args, dim, origin=source)
