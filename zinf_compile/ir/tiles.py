"""Parameters that a graph reads by tiles: some rows each, moved by themselves, with the homes of the whole parameter.

To a plan a tile is a parameter like any other, with ``tile_of`` naming what it is a part of. The model's own parameters
are whole, and so is what is asked of them before and after: cut on the way in, joined on the way out.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from zinf_compile.ir.copies import SECTOR_NBYTES
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.plan import Placement
from zinf_compile.ir.slices import Slice, shard_size


def rows_in_whole_sectors(shape: Sequence[int], itemsizes: Sequence[int]) -> int:
    """Return the least number of rows that are whole sectors of the file in each of these item sizes."""
    row = 1
    for size in shape[1:]:
        row *= size
    rows = 1
    for itemsize in itemsizes:
        while rows * row * itemsize % SECTOR_NBYTES:
            rows *= 2
    return rows


def least_rows(fact: ParameterFact, *, has_file: bool) -> int:
    """Return the least number of rows that a tile of a parameter may have, wherever any of its copies lives."""
    if not has_file:
        return 1
    return rows_in_whole_sectors(fact.slice.shape, [encoding.itemsize for encoding in {fact.compute, fact.master}])


def most_tiles(num_rows: int, multiple: int, num_ranks: int) -> int:
    """Return the most tiles that ``cut_rows`` can give."""
    return -(-shard_size(num_rows, num_ranks) // multiple)


def cut_rows(whole: Slice, num_tiles: int, multiple: int, num_ranks: int = 1) -> tuple[Slice, ...]:
    """Return at most ``num_tiles`` tiles of a parameter, each beginning at a multiple of some rows, on every rank.

    A tile of several ranks has as many rows of each rank, so that all of their disks and links move it at once. By
    ``torch.chunk``, ranks have the same rows of the parameter and of its tiles::

        rank             0 0 0 0 0 1 1 1 1
        row              0 1 2 3 4 5 6 7 8
        tile             0 0 0 1 1 0 0 0 1
        place            0 1 2 6 7 3 4 5 8

    The slices returned are of places: rows in the order of tiles, and in each tile of ranks. ``rows_of_rank`` are rows.
    """
    full, rest = divmod(
        whole.length, shard_size(whole.length, num_ranks)
    )  # the shards, and rows of the one behind them
    cuts = [window.stop for window in whole.among(num_ranks).of_rank(0).split(num_tiles, multiple)]
    places = [0, *(full * cut + min(rest, cut) for cut in cuts)]
    return tuple(whole.part(start, stop) for start, stop in itertools.pairwise(places))


def rows_of_rank(tiles: Sequence[Slice], number: int, rank: int, num_ranks: int) -> Slice:
    """Return the rows of a tile that a rank has, which are some of its rows of the parameter; maybe none."""
    counts = [tile.among(num_ranks).of_rank(rank).length for tile in tiles[: number + 1]]
    stop = sum(counts)
    return tiles[number].whole.among(num_ranks).of_rank(rank).part(stop - counts[-1], stop)


def tile_name(parameter: str, number: int) -> str:
    """Return the name of a tile: ``lm_head.weight.tile_3``."""
    return f"{parameter}.tile_{number}"


class TiledParameters:
    """Which parameters of a model a graph reads by tiles, and which rows those are, by the parameter's name."""

    def __init__(self, tiles: Mapping[str, Sequence[Slice]]) -> None:
        self.tiles = dict(tiles)
        self._wholes = {tile_name(name, number): name for name, rows in tiles.items() for number in range(len(rows))}

    def whole_name(self, name: str) -> str:
        """Return the parameter that a name of a plan stands for."""
        return self._wholes.get(name, name)

    def cut_facts(self, facts: Iterable[ParameterFact]) -> tuple[ParameterFact, ...]:
        """Return facts with those of tiles in place of the parameters that are tiled."""
        return tuple(itertools.chain.from_iterable(map(self._cut_fact, facts)))

    def _cut_fact(self, fact: ParameterFact) -> Sequence[ParameterFact]:
        if fact.name not in self.tiles:
            return (fact,)
        return [
            replace(fact, name=tile_name(fact.name, number), slice=rows)
            for number, rows in enumerate(self.tiles[fact.name])
        ]

    def cut_placements(self, placements: Iterable[Placement]) -> tuple[Placement, ...]:
        """Return placements with those of tiles in place of the parameters that are tiled."""
        return tuple(itertools.chain.from_iterable(map(self._cut_placement, placements)))

    def _cut_placement(self, placement: Placement) -> Sequence[Placement]:
        if placement.parameter not in self.tiles:
            return (placement,)
        return [
            replace(
                placement,
                parameter=tile_name(placement.parameter, number),
                copies=tuple(replace(copy, slice=rows.among(copy.slice.num_ranks)) for copy in placement.copies),
            )
            for number, rows in enumerate(self.tiles[placement.parameter])
        ]


WHOLE = TiledParameters({})


def join_placements(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Return placements with whole parameters in place of their tiles, which all have the same homes."""
    joined: dict[str, Placement] = {}
    for placement in placements:
        whole = placement.tile_of
        if whole is None:
            joined[placement.parameter] = placement
        elif whole not in joined:
            copies = (replace(copy, slice=copy.slice.whole) for copy in placement.copies)
            joined[whole] = replace(placement, parameter=whole, copies=tuple(copies))
    return tuple(joined.values())
