"""Tiled parameters: a plan has tiles, and results are mapped back to whole parameters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planner_inputs import make_parameter
from zinf_compile.ir.copies import Role
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import SECTOR_NBYTES, Placement
from zinf_compile.ir.tiles import (
    TiledParameters,
    cut_rows,
    join_placements,
    most_tiles,
    rows_in_whole_sectors,
    rows_of_rank,
    tile_name,
)
from zinf_compile.passes.planner.placement.homes import make_placement

ROW_ELEMENTS = 48


def make_fact(name: str, num_rows: int) -> ParameterFact:
    return make_parameter(name, num_rows * ROW_ELEMENTS, width=ROW_ELEMENTS, compute_dtype="bfloat16")


def make_home(fact: ParameterFact) -> Placement:
    homes = {Role.COMPUTE: Tier.HOST, Role.MASTER: Tier.NVME, Role.GRADIENT: Tier.HOST, Role.STATE: Tier.NVME}
    return make_placement(fact, homes)


@given(st.integers(2, 300), st.integers(2, 20))
def test_what_is_cut_is_joined_again(num_rows: int, num_tiles: int) -> None:
    other, head = make_fact("other.weight", 3), make_fact("head.weight", num_rows)
    tiled = TiledParameters({"head.weight": head.slice.split(num_tiles)})
    facts = tiled.cut_facts([other, head])
    assert facts[0] is other
    assert all(fact.tile_of == "head.weight" and fact.compute_nbytes % (2 * ROW_ELEMENTS) == 0 for fact in facts[1:])
    assert sum(fact.num_elements for fact in facts[1:]) == num_rows * ROW_ELEMENTS
    whole = [make_home(other), make_home(head)]
    placements = tiled.cut_placements(whole)
    assert [placement.parameter for placement in placements] == [fact.name for fact in facts]
    assert [placement.nbytes_on(Tier.NVME) for placement in placements[1:]] == [
        12 * fact.num_elements for fact in facts[1:]
    ]
    assert join_placements(placements) == tuple(whole)


def test_names_of_a_plan_lead_to_parameters() -> None:
    tiled = TiledParameters({"head.weight": make_fact("head.weight", 8).slice.split(2)})
    assert tile_name("head.weight", 1) == "head.weight.tile_1"
    assert tiled.whole_name("head.weight.tile_1") == "head.weight"
    assert tiled.whole_name("head.weight.tile_2") == "head.weight.tile_2"  # there are only two tiles
    assert tiled.whole_name("head.bias") == "head.bias"


@pytest.mark.parametrize(
    ("shape", "itemsizes", "rows"),
    [
        ((512, 1024), [4], 1),
        ((512, 1024), [2, 4], 2),
        ((512, 32), [4], 32),
        ((512, 33), [4], 1024),  # more tiles than rows
        ((64, 3, 3, 3), [8], 512),
    ],
)
def test_tiles_begin_at_whole_sectors(shape: tuple[int, ...], itemsizes: list[int], rows: int) -> None:
    assert rows_in_whole_sectors(shape, itemsizes) == rows
    row = 1
    for size in shape[1:]:
        row *= size
    assert all(rows * row * itemsize % SECTOR_NBYTES == 0 for itemsize in itemsizes)
    assert any(rows // 2 * row * itemsize % SECTOR_NBYTES for itemsize in itemsizes) or rows == 1


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.integers(1, 6))
def test_ranks_have_the_same_rows_of_tiles_as_of_the_parameter(
    num_rows: int, num_tiles: int, multiple: int, num_ranks: int
) -> None:
    whole = make_fact("head.weight", num_rows).slice
    tiles = cut_rows(whole, num_tiles, multiple, num_ranks)
    assert len(tiles) <= min(num_tiles, most_tiles(num_rows, multiple, num_ranks))
    assert [tile.start for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])]
    for rank in range(num_ranks):
        shard = whole.among(num_ranks).of_rank(rank)
        parts = [rows_of_rank(tiles, number, rank, num_ranks) for number in range(len(tiles))]
        assert [part.start for part in parts] == [shard.start, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == shard.stop
        for tile, part in zip(tiles, parts, strict=True):
            assert part.length == tile.among(num_ranks).of_rank(rank).length
            assert part.length == 0 or (part.start - shard.start) % multiple == 0
