"""Replaces a call, or a chain of calls, by pieces.

Emitted for a linear layer by output features, and by input features, into two tiles each::

    weight_tiles = split(weight, [3, 2], 0)                 weight_tiles = split(weight, [4, 4], 1)
    weight_tile_0 = getitem(weight_tiles, 0)                ...
    up_tile_0 = linear(x, weight_tile_0, bias_tile_0)       up_tile_0 = linear(x_tile_0, weight_tile_0, bias)
    weight_tile_1 = getitem(weight_tiles, 1)                ...
    up_tile_1 = linear(x, weight_tile_1, bias_tile_1)       up_tile_1 = linear(x_tile_1, weight_tile_1, None)
    up_whole = cat([up_tile_0, up_tile_1], 1)               up_sum_1 = add(up_tile_0, up_tile_1)

An operand is cut by one ``split``, whose backward concatenates the gradients of its tiles once. The results of a chain
before its last call are wide: they can be tagged, so that backward recomputes them, a tile at a time, instead of saving
all of them.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.passes.contract import TILE
from zinf_compile.passes.transforms.tiling.calls import arguments_of, places_of, value_of
from zinf_compile.passes.transforms.tiling.emit import Emitter
from zinf_compile.passes.transforms.tiling.tilings import Combine, Pieces, Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A call and how it is tiled."""

    node: fx.Node
    tiling: Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Calls in order, each cut along the axis that concatenates the pieces of the one before; the last gives the result."""

    links: tuple[Link, ...]

    @property
    def result(self) -> Link:
        """The call whose result stays whole."""
        return self.links[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    number: int
    sizes: tuple[int, ...]  # of all tiles, in indices of the axis

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.number])

    @property
    def stop(self) -> int:
        return self.start + self.sizes[self.number]

    @property
    def is_last(self) -> bool:
        return self.number == len(self.sizes) - 1


def tile_node(node: fx.Node, tiling: Tiling, tiles: int | Sequence[int]) -> fx.Node:
    """Replace a call by pieces, one after another; return the node of its result.

    ``tiles`` is the number of tiles, or the length of each along the axis.
    """
    return tile_chain(Chain(links=(Link(node=node, tiling=tiling),)), tiles)


def tile_chain(chain: Chain, tiles: int | Sequence[int], *, recompute: bool = False) -> fx.Node:
    """Replace a chain by pieces, each through the whole chain; return the node of its result.

    ``tiles`` is the number of tiles, or the length of each along the axis. With ``recompute`` intermediate results are
    tagged for torch's partitioner, so that backward recomputes them.
    """
    last = chain.result
    emitter = Emitter(last.node)
    sizes = last.tiling.tile_sizes(tiles) if isinstance(tiles, int) else tuple(tiles)
    whole: fx.Node | None = None
    pieces: list[fx.Node] = []
    for number in range(len(sizes)):
        tile = _Tile(number=number, sizes=sizes)
        made: dict[fx.Node, fx.Node] = {}
        for link in chain.links:
            made[link.node] = piece = _emit_piece(emitter, link, tile, made)
            piece.meta["custom"] = {**piece.meta.get("custom", {}), TILE: number}
            if recompute and link is not last:
                made[link.node].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE  # the key torch's partitioner reads
        pieces.append(made[last.node])
        whole = _combine(emitter, last, tile, whole, pieces)
    assert whole is not None
    last.node.replace_all_uses_with(whole)
    for link in reversed(chain.links):
        link.node.graph.erase_node(link.node)
    return whole


def _combine(emitter: Emitter, link: Link, tile: _Tile, before: fx.Node | None, pieces: list[fx.Node]) -> fx.Node:
    """Return the partial result after a tile."""
    name, piece = link.node.name, pieces[-1]
    match link.tiling.combine:
        case Combine.CONCATENATE:
            if not tile.is_last:
                return piece
            return emitter.call(f"{name}_whole", torch.cat, list(pieces), link.tiling.dim)
        case Combine.ADD:
            if before is None:
                return piece
            return emitter.call(f"{name}_sum_{tile.number}", operator.add, before, piece)
        case Combine.SELECT:
            if before is None:
                return piece
            inside = _inside(emitter, arguments_of(link.node)["input"], tile)
            chosen = emitter.call(f"{name}_chosen_{tile.number}", torch.unsqueeze, inside, -1)
            return emitter.call(f"{name}_sum_{tile.number}", torch.where, chosen, piece, before)


def _emit_piece(emitter: Emitter, link: Link, tile: _Tile, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Emit one piece of a call; operands computed by the chain are those of this tile."""
    node, arguments = link.node, arguments_of(link.node)
    changed: dict[str, Any] = {}
    for cut in link.tiling.cuts:
        source = arguments[cut.operand]
        sizes = tuple(size * cut.unit for size in tile.sizes)
        changed[cut.operand] = made.get(source) or emitter.tile_of(source, sizes, cut.dim, tile.number)
    match link.tiling.pieces:
        case Pieces.ALIKE:
            pass
        case Pieces.BIAS_ONCE:
            if tile.number > 0 and arguments.get("bias") is not None:
                changed["bias"] = None
        case Pieces.GROUPS:
            changed["groups"] = tile.sizes[tile.number]
        case Pieces.VOCABULARY:
            changed |= _part_of_vocabulary(emitter, arguments, tile)
        case Pieces.CAUSAL:
            changed |= _up_to_the_block(emitter, arguments, tile)
    args, kwargs = list(node.args), dict(node.kwargs)
    places = places_of(node)
    for operand, value in changed.items():
        place = places.get(operand, operand)
        if isinstance(place, int):
            args[place] = value
        else:
            kwargs[place] = value
    return emitter.call_like(f"{node.name}_tile_{tile.number}", node, args, kwargs)


def _inside(emitter: Emitter, indices: fx.Node, tile: _Tile) -> fx.Node:
    """Return which indices are in a tile or a later one; later tiles select theirs again."""
    return emitter.call(f"{indices.name}_inside_{tile.number}", torch.ge, indices, tile.start)


def _part_of_vocabulary(emitter: Emitter, arguments: Mapping[str, Any], tile: _Tile) -> dict[str, Any]:
    """Return the indices relative to the start of a tile's rows, 0 for indices outside, and the tile's padding row.

    Indices below the first tile or above the last are not changed, so that the embedding refuses them.
    """
    indices, number = arguments["input"], tile.number
    changed: dict[str, Any] = {}
    local = indices
    if number > 0:
        local = emitter.call(f"{indices.name}_from_{number}", torch.sub, indices, tile.start)
        local = emitter.call(f"{indices.name}_low_{number}", torch.clamp, local, 0)
    if not tile.is_last:
        below = emitter.call(f"{indices.name}_below_{number}", torch.lt, indices, tile.stop)
        local = emitter.call(f"{indices.name}_local_{number}", torch.where, below, local, 0)
    changed["input"] = local
    padding = arguments.get("padding_idx")
    if padding is not None:
        num_rows = value_of(arguments["weight"]).shape[0]
        row = padding + num_rows if padding < 0 else padding
        changed["padding_idx"] = row - tile.start if tile.start <= row < tile.stop else None
    return changed


def _up_to_the_block(emitter: Emitter, arguments: Mapping[str, Any], tile: _Tile) -> dict[str, Any]:
    """Return the keys and values up to the end of a block of queries, and the mask of the block.

    Query number i sees keys 0 to i. The first block is causal itself.
    """
    query, key, value = (arguments[operand] for operand in ("query", "key", "value"))
    num_keys = min(tile.stop, value_of(key).shape[-2])
    changed: dict[str, Any] = {}
    for operand, source in (("key", key), ("value", value)):
        name = f"{source.name}_seen_{tile.number}"
        changed[operand] = emitter.call(name, torch.narrow, source, -2, 0, num_keys, origin=source)
    if tile.number == 0:
        return changed
    shape, device = [tile.sizes[tile.number], num_keys], value_of(query).device
    ones = emitter.call(f"ones_{tile.number}", torch.ones, shape, dtype=torch.bool, device=device)
    changed["attn_mask"] = emitter.call(f"seen_{tile.number}", torch.tril, ones, tile.start)
    return changed | {"is_causal": False}
