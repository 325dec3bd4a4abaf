"""Gather a parameter in tiles of rows: each reader becomes pieces, each of which gathers the one tile that it reads.

Emitted for a linear layer whose weight is gathered in two tiles::

    weight_tile_0 = zinf.gather(anchor, tile_0, [512, 1024], dtype, device)
    up_tile_0     = linear(x, weight_tile_0, bias_tile_0)
    weight_tile_1 = zinf.gather(anchor, tile_1, [512, 1024], dtype, device)
    up_tile_1     = linear(x, weight_tile_1, bias_tile_1)
    up_whole      = cat([up_tile_0, up_tile_1], 1)

A tile is a range of rows of the first dimension, which are contiguous on every tier. It has its own gradient. With several
ranks it is such a range of the rows of each rank, and ``tile_order.py`` puts results in order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.contract import Pass, TileHandle, TileInputs
from zinf_compile.passes.transforms.tiling.calls import arguments_of, value_of
from zinf_compile.passes.transforms.tiling.emit import Emitter
from zinf_compile.passes.transforms.tiling.linear_loss import linear_cross_entropy
from zinf_compile.passes.transforms.tiling.table import legal_tilings
from zinf_compile.passes.transforms.tiling.tile_chain import tile_node
from zinf_compile.passes.transforms.tiling.tile_order import TileOrder
from zinf_compile.passes.transforms.tiling.tilings import Tiling

_GATHERS = (GATHER, torch.ops.zinf.gather)
_OF_LOSS = 1  # the position of the weight in the arguments of linear_cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Tileable:
    """A parameter that a graph gathers, and the reader that cannot be tiled along its rows; None if all can."""

    param: int
    shape: tuple[int, ...]
    refused_by: fx.Node | None


def find_tileable(graph: fx.Graph) -> Iterator[Tileable]:
    """Yield every parameter with at least two dimensions that a torch-level graph gathers."""
    refused: dict[int, fx.Node | None] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for gather in _gathers(graph):
        param, shape = gather.args[1], tuple(value_of(gather).shape)
        assert isinstance(param, int)
        if len(shape) < 2:
            continue
        shapes[param] = shape
        readers = (user for user in gather.users if not _is_by_rows(user, gather))
        refused[param] = refused.get(param) or next(readers, None)
    for param, shape in shapes.items():
        yield Tileable(param=param, shape=shape, refused_by=refused[param])


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    return [node for target in _GATHERS for node in graph.find_nodes(op="call_function", target=target)]


def _is_by_rows(user: fx.Node, gather: fx.Node) -> bool:
    return _reads_as_loss(user, gather) or _tiling_by_rows(user, gather) is not None


def _reads_as_loss(user: fx.Node, gather: fx.Node) -> bool:
    return (
        user.target is linear_cross_entropy
        and user.all_input_nodes.count(gather) == 1
        and (user.args[_OF_LOSS] is gather)
    )


def _tiling_by_rows(user: fx.Node, gather: fx.Node) -> Tiling | None:
    """Return the tiling of a reader whose pieces read different rows of a gathered value, its only cut operand."""
    for tiling in legal_tilings(user):
        arguments = arguments_of(user)
        read = [name for name, argument in arguments.items() if argument is gather]
        cut = tiling.cut_of(read[0]) if len(read) == 1 else None
        if cut is not None and cut.dim == 0 and cut.unit == 1 and tiling.size == value_of(gather).shape[0]:
            return tiling
    return None


def _run(graph_module: fx.GraphModule, inputs: TileInputs) -> None:
    graph = graph_module.graph
    for gather in _gathers(graph):
        param = gather.args[1]
        if not isinstance(param, int) or param not in inputs.tiles:
            continue
        tiles = inputs.tiles[param]
        sizes = tuple(tile.rows.length for tile in tiles)
        order = TileOrder.of_tiles(tiles, inputs.num_ranks)
        for user in list(gather.users):
            if _reads_as_loss(user, gather):
                if order is not None:
                    order.reorder_loss(user)
                emitter = Emitter(user)
                pieces = [_gather_tile(emitter, gather, tile, number) for number, tile in enumerate(tiles)]
                user.args = (*user.args[:_OF_LOSS], pieces, *user.args[_OF_LOSS + 1 :])
                continue
            tiling = _tiling_by_rows(user, gather)
            assert tiling is not None, f"'{user.name}' cannot be tiled along the rows of '{gather.name}'"
            if order is None:
                tile_node(user, tiling, sizes)
            else:
                order.tile_reader(user, gather, tiling, sizes)
        for split in list(gather.users):
            _gather_in_place_of(split, gather, tiles)
        graph.erase_node(gather)


def _gather_in_place_of(split: fx.Node, gather: fx.Node, tiles: Sequence[TileHandle]) -> None:
    """Replace each tile of a gathered value by its own gather, where it is first read."""
    for part in list(split.users):
        number: Any = part.args[1]
        gathered = _gather_tile(Emitter(part), gather, tiles[number], number)
        part.replace_all_uses_with(gathered)
        split.graph.erase_node(part)
    split.graph.erase_node(split)


def _gather_tile(emitter: Emitter, gather: fx.Node, tile: TileHandle, number: int) -> fx.Node:
    anchor, _, shape, dtype, device = gather.args
    assert isinstance(shape, Sequence)
    arguments = (anchor, tile.param, [tile.rows.length, *shape[1:]], dtype, device)
    return emitter.call(f"{gather.name}_tile_{number}", GATHER, *arguments, origin=gather)


TILE_PARAMETERS: Pass[TileInputs] = Pass(name="tile_parameters", run=_run)
