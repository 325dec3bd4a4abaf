"""Tiles that have rows of every rank: readers give the same as with the whole parameter, its rows in order."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import assume, given
from torch import Tensor

from tests.support.examples import examples
from zinf_compile.ir.slices import Slice
from zinf_compile.ir.tiles import cut_rows
from zinf_compile.passes.contract import TileHandle
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.transforms.tiling.linear_loss import linear_cross_entropy
from zinf_compile.passes.transforms.tiling.table import legal_tilings
from zinf_compile.passes.transforms.tiling.tile_order import TileOrder, in_row_order, in_tile_order, place_of
from zinf_compile.runtime.execute.op_bodies import register

FEATURES = 3


def rows_by_tile(num_rows: int, num_tiles: int, num_ranks: int) -> list[list[int]]:
    """Return the rows of each tile: of each rank's the same ones."""
    shards = [shard.tolist() for shard in torch.arange(num_rows).chunk(num_ranks)]
    window = -(-len(shards[0]) // num_tiles)
    firsts = range(0, len(shards[0]), window)
    return [[row for shard in shards for row in shard[first : first + window]] for first in firsts]


def order_of(rows: list[list[int]], num_tiles: int, num_ranks: int) -> TileOrder:
    whole = Slice.of_whole("weight", (sum(map(len, rows)), FEATURES))
    tiles = cut_rows(whole, num_tiles, 1, num_ranks)
    assert [tile.length for tile in tiles] == [len(each) for each in rows]
    order = TileOrder.of_tiles([TileHandle(param=0, rows=tile) for tile in tiles], num_ranks)
    assert order is not None
    return order


@examples(100)
@given(st.integers(2, 40), st.integers(1, 6), st.integers(2, 5))
def test_rows_go_to_their_places_and_back(num_rows: int, num_tiles: int, num_ranks: int) -> None:
    rows = rows_by_tile(num_rows, num_tiles, num_ranks)
    args = order_of(rows, num_tiles, num_ranks).args
    value = torch.arange(2 * num_rows).view(2, num_rows)
    ordered = in_tile_order(value, *args, 1)
    assert torch.equal(ordered, value[:, [*chain(*rows)]])
    assert torch.equal(in_row_order(ordered.split([len(each) for each in rows], 1), *args, 1), value)
    assert torch.equal(
        in_tile_order(torch.arange(num_rows), *args, 0)[place_of(torch.arange(num_rows), *args)], value[0]
    )
    strangers = torch.tensor([-100, -1, num_rows, num_rows + 7])
    assert torch.equal(place_of(strangers, *args), strangers)


def make_call(name: str, num_rows: int) -> tuple[Callable[..., Tensor], list[Any], dict[str, Any]]:
    """Return a call that reads a weight along its rows, which is its argument number 1."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    indices = torch.randint(num_rows, (2, 9), generator=generator)
    calls: dict[str, tuple[Callable[..., Tensor], list[Any], dict[str, Any]]] = {
        "linear": (F.linear, [draw(2, 4, FEATURES), draw(num_rows, FEATURES), draw(num_rows)], {}),
        "embedding": (F.embedding, [indices, draw(num_rows, FEATURES)], {"padding_idx": num_rows // 2 - num_rows}),
        "matmul": (torch.matmul, [draw(4, num_rows), draw(num_rows, FEATURES)], {}),
        "conv": (F.conv1d, [draw(2, FEATURES, 5), draw(num_rows, FEATURES, 2), draw(num_rows)], {}),
        "loss": (
            linear_cross_entropy,
            [draw(9, FEATURES), draw(num_rows, FEATURES), indices[0], draw(num_rows)],
            {"ignore_index": num_rows // 2, "class_weight": draw(num_rows).detach().abs()},
        ),
    }
    return calls[name]


@examples(60)
@given(
    name=st.sampled_from(["linear", "embedding", "matmul", "conv", "loss"]),
    num_rows=st.integers(2, 23),
    num_tiles=st.integers(2, 4),
    num_ranks=st.integers(2, 4),
)
def test_a_reader_of_tiles_gives_the_same(
    capture_call: Callable[..., Any], name: str, num_rows: int, num_tiles: int, num_ranks: int
) -> None:
    register()
    target, args, kwargs = make_call(name, num_rows)
    rows = rows_by_tile(num_rows, num_tiles, num_ranks)
    order, sizes = order_of(rows, num_tiles, num_ranks), [len(each) for each in rows]
    assume(len(sizes) > 1)
    expected = capture_call(target, args, kwargs).run()
    captured = capture_call(target, args, kwargs)
    weight = captured.result.args[1]
    if name == "loss":
        order.reorder_loss(captured.result)
    else:
        axis = {"linear": "output features", "embedding": "vocabulary", "matmul": "inner", "conv": "output channels"}
        (tiling,) = (each for each in legal_tilings(captured.result) if each.axis == axis[name])
        order.tile_reader(captured.result, weight, tiling, sizes)
    in_tiles = args[1].detach()[[*chain(*rows)]].requires_grad_()
    inputs = tuple(in_tiles if given is args[1] else given for given in captured.inputs)
    found = replace(captured, inputs=inputs).run()
    expected[weight.name] = expected[weight.name][[*chain(*rows)]]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-13)


def test_what_is_emitted(capture_call: Callable[..., Any]) -> None:
    captured = capture_call(F.linear, (torch.randn(4, 8), torch.randn(9, 8), torch.randn(9)), {})
    (tiling,) = (each for each in legal_tilings(captured.result) if each.axis == "output features")
    order = TileOrder(windows=(3, 2), full=1, rest=4)
    order.tile_reader(captured.result, captured.result.args[1], tiling, [6, 3])
    assert_expected_inline(
        dump_graph(captured.graph_module.graph),
        """\
input_0 = placeholder[input_0]
input_1 = placeholder[input_1]
input_2 = placeholder[input_2]
input_2_in_tiles = in_tile_order(input_2, [3, 2], 1, 4, 0)
input_1_tiles = split(input_1, [6, 3], 0)
input_1_tile_0 = getitem(input_1_tiles, 0)
input_2_in_tiles_tiles = split(input_2_in_tiles, [6, 3], 0)
input_2_in_tiles_tile_0 = getitem(input_2_in_tiles_tiles, 0)
linear_tile_0 = linear(input_0, input_1_tile_0, input_2_in_tiles_tile_0)
input_1_tile_1 = getitem(input_1_tiles, 1)
input_2_in_tiles_tile_1 = getitem(input_2_in_tiles_tiles, 1)
linear_tile_1 = linear(input_0, input_1_tile_1, input_2_in_tiles_tile_1)
linear_whole = in_row_order([linear_tile_0, linear_tile_1], [3, 2], 1, 4, 1)
return linear_whole
""",
    )


def test_one_process_has_rows_in_order() -> None:
    tiles = cut_rows(Slice.of_whole("weight", (9, 2)), 2, 4)
    assert [(tile.start, tile.stop) for tile in tiles] == [(0, 8), (8, 9)]
    assert TileOrder.of_tiles([TileHandle(param=0, rows=tile) for tile in tiles], 1) is None


@pytest.mark.parametrize("row", [0, 4, 8])
def test_the_place_of_one_row(row: int) -> None:
    assert TileOrder(windows=(3, 2), full=1, rest=4).place(row) == [0, 1, 2, 6, 7, 3, 4, 5, 8][row]
