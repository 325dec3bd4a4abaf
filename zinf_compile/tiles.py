"""Parameters that a graph reads by tiles: consecutive rows, each moved by itself, with the homes of the whole parameter.

To a plan a tile is a parameter like any other, with ``tile_of`` naming what it is a part of. The model's own parameters
are whole, and so is what is asked of them before and after: cut on the way in, joined on the way out.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zinf_compile.facts import ParameterFact
from zinf_compile.plans import SECTOR_NBYTES, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRows:
    """Consecutive rows of a parameter of ``total_rows``."""

    first_row: int
    num_rows: int
    total_rows: int

    def share(self, size: int) -> int:
        """Return what these rows have of elements or bytes of the whole parameter, which all rows have the same of."""
        return size // self.total_rows * self.num_rows


def cut_rows(total_rows: int, num_tiles: int, multiple: int = 1) -> tuple[TileRows, ...]:
    """Return ``num_tiles`` tiles, or fewer, of equal size but for the last, which begin at a multiple of some rows."""
    size = -(-total_rows // (num_tiles * multiple)) * multiple
    return tuple(
        TileRows(first_row=first, num_rows=min(size, total_rows - first), total_rows=total_rows)
        for first in range(0, total_rows, size)
    )


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


def least_rows(fact: ParameterFact, shape: Sequence[int], *, has_file: bool) -> int:
    """Return the least number of rows that a tile of a parameter may have, wherever any of its copies lives."""
    sizes = {fact.compute_nbytes, fact.master_nbytes, fact.gradient_nbytes} - {0}
    return rows_in_whole_sectors(shape, [size // fact.num_elements for size in sizes]) if has_file else 1


def tile_name(parameter: str, number: int) -> str:
    """Return the name of a tile: ``lm_head.weight.tile_3``."""
    return f"{parameter}.tile_{number}"


class TiledParameters:
    """Which parameters of a model a graph reads by tiles, and which rows those are, by the parameter's name."""

    def __init__(self, tiles: Mapping[str, Sequence[TileRows]]) -> None:
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
                tile_of=fact.name,
                num_elements=rows.share(fact.num_elements),
                master_nbytes=rows.share(fact.master_nbytes),
                compute_nbytes=rows.share(fact.compute_nbytes),
                state_nbytes=fact.state_nbytes * rows.num_rows // rows.total_rows,
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
                tile_of=placement.parameter,
                compute_nbytes=rows.share(placement.compute_nbytes),
                master_nbytes=rows.share(placement.master_nbytes),
                gradient_nbytes=rows.share(placement.gradient_nbytes),
                optimizer_state_nbytes=placement.optimizer_state_nbytes * rows.num_rows // rows.total_rows,
            )
            for number, rows in enumerate(self.tiles[placement.parameter])
        ]


WHOLE = TiledParameters({})


def join_placements(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Return placements with whole parameters in place of their tiles, which all have the same homes."""
    joined: dict[str, Placement] = {}
    for placement in placements:
        whole = placement.tile_of or placement.parameter
        known = joined.get(whole)
        if known is None:
            joined[whole] = replace(placement, parameter=whole, tile_of=None) if placement.tile_of else placement
            continue
        joined[whole] = replace(
            known,
            compute_nbytes=known.compute_nbytes + placement.compute_nbytes,
            master_nbytes=known.master_nbytes + placement.master_nbytes,
            gradient_nbytes=known.gradient_nbytes + placement.gradient_nbytes,
            optimizer_state_nbytes=known.optimizer_state_nbytes + placement.optimizer_state_nbytes,
        )
    return tuple(joined.values())
