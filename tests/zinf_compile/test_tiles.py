"""Parameters by tiles: what is cut on the way into a plan is whole again on the way out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.facts import ParameterFact
from zinf_compile.plans import SECTOR_NBYTES, Placement
from zinf_compile.terms import Tier
from zinf_compile.tiles import TiledParameters, cut_rows, join_placements, rows_in_whole_sectors, tile_name

ROW_ELEMENTS = 48


def make_fact(num_rows: int) -> ParameterFact:
    num_elements = num_rows * ROW_ELEMENTS
    return ParameterFact(
        name="head.weight",
        block="head",
        num_elements=num_elements,
        dtype="float32",
        compute_dtype="bfloat16",
        master_nbytes=4 * num_elements,
        compute_nbytes=2 * num_elements,
        state_nbytes=8 * num_elements,
        trainable=True,
    )


def make_placement(num_rows: int) -> Placement:
    fact = make_fact(num_rows)
    return Placement(
        parameter=fact.name,
        compute=Tier.HOST,
        master=Tier.NVME,
        gradient=Tier.HOST,
        optimizer_state=Tier.NVME,
        compute_dtype=fact.compute_dtype,
        compute_nbytes=fact.compute_nbytes,
        master_nbytes=fact.master_nbytes,
        gradient_nbytes=fact.gradient_nbytes,
        gradient_dtype=fact.gradient_dtype,
        optimizer_state_nbytes=fact.optimizer_state_nbytes,
    )


@given(st.integers(1, 500), st.integers(1, 40), st.sampled_from([1, 2, 8, 32]))
def test_tiles_are_all_rows_once(num_rows: int, num_tiles: int, multiple: int) -> None:
    tiles = cut_rows(num_rows, num_tiles, multiple)
    assert [row for tile in tiles for row in range(tile.first_row, tile.first_row + tile.num_rows)] == list(
        range(num_rows)
    )
    assert len(tiles) <= num_tiles
    assert all(tile.first_row % multiple == 0 for tile in tiles)
    assert len({tile.num_rows for tile in tiles[:-1]}) <= 1
    assert tiles[-1].num_rows <= tiles[0].num_rows


@given(st.integers(2, 300), st.integers(2, 20))
def test_what_is_cut_is_joined_again(num_rows: int, num_tiles: int) -> None:
    other = replace(make_fact(3), name="other.weight")
    tiled = TiledParameters({"head.weight": cut_rows(num_rows, num_tiles)})
    facts = tiled.cut_facts([other, make_fact(num_rows)])
    assert facts[0] is other
    assert all(fact.tile_of == "head.weight" and fact.compute_nbytes % (2 * ROW_ELEMENTS) == 0 for fact in facts[1:])
    assert sum(fact.num_elements for fact in facts[1:]) == num_rows * ROW_ELEMENTS
    whole = [replace(make_placement(3), parameter="other.weight"), make_placement(num_rows)]
    placements = tiled.cut_placements(whole)
    assert [placement.parameter for placement in placements] == [fact.name for fact in facts]
    assert join_placements(placements) == tuple(whole)


def test_names_of_a_plan_lead_to_parameters() -> None:
    tiled = TiledParameters({"head.weight": cut_rows(8, 2)})
    assert tile_name("head.weight", 1) == "head.weight.tile_1"
    assert tiled.whole_name("head.weight.tile_1") == "head.weight"
    assert tiled.whole_name("head.weight.tile_2") == "head.weight.tile_2"  # there are two
    assert tiled.whole_name("head.bias") == "head.bias"


@pytest.mark.parametrize(
    ("shape", "itemsizes", "rows"),
    [
        ((512, 1024), [4], 1),
        ((512, 1024), [2, 4], 2),
        ((512, 32), [4], 32),
        ((512, 33), [4], 1024),  # more than there are: it cannot be cut
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
