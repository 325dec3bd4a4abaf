"""Parameters that a graph reads by tiles: consecutive rows, each moved by itself, with the homes of the whole parameter.

To a plan a tile is a parameter like any other, with ``tile_of`` naming what it is a part of. The model's own parameters
are whole, and so is what is asked of them before and after: cut on the way in, joined on the way out.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.plan import SECTOR_NBYTES, Placement
from zinf_compile.ir.slices import Slice


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
            replace(
                fact,
                name=tile_name(fact.name, number),
                slice=rows,
            )
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
