"""The code of a tiled call, and that its pieces keep the metadata of the call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.transforms.tiling.table import legal_tilings
from zinf_compile.passes.transforms.tiling.tile_chain import tile_node


def _tile(captured: Any, axis: str, num_tiles: int) -> str:
    tiling = next(tiling for tiling in legal_tilings(captured.result) if tiling.axis == axis)
    tile_node(captured.result, tiling, num_tiles)
    return dump_graph(captured.graph_module.graph)


@pytest.fixture
def linear(capture_call: Callable[..., Any]) -> Any:
    """Return a captured linear layer of five features."""
    return capture_call(F.linear, (torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)), {})


def test_output_features_are_concatenated(linear: Any) -> None:
    assert_expected_inline(
        _tile(linear, "output features", 2),
        """\
input_0 = placeholder[input_0]
input_1 = placeholder[input_1]
input_2 = placeholder[input_2]
input_1_tiles = split(input_1, [3, 2], 0)
input_1_tile_0 = getitem(input_1_tiles, 0)
input_2_tiles = split(input_2, [3, 2], 0)
input_2_tile_0 = getitem(input_2_tiles, 0)
linear_tile_0 = linear(input_0, input_1_tile_0, input_2_tile_0)
input_1_tile_1 = getitem(input_1_tiles, 1)
input_2_tile_1 = getitem(input_2_tiles, 1)
linear_tile_1 = linear(input_0, input_1_tile_1, input_2_tile_1)
linear_whole = cat([linear_tile_0, linear_tile_1], 1)
return linear_whole
""",
    )


def test_input_features_are_added_and_the_bias_once(linear: Any) -> None:
    assert_expected_inline(
        _tile(linear, "input features", 2),
        """\
input_0 = placeholder[input_0]
input_1 = placeholder[input_1]
input_2 = placeholder[input_2]
input_0_tiles = split(input_0, [4, 4], 1)
input_0_tile_0 = getitem(input_0_tiles, 0)
input_1_tiles = split(input_1, [4, 4], 1)
input_1_tile_0 = getitem(input_1_tiles, 0)
linear_tile_0 = linear(input_0_tile_0, input_1_tile_0, input_2)
input_0_tile_1 = getitem(input_0_tiles, 1)
input_1_tile_1 = getitem(input_1_tiles, 1)
linear_tile_1 = linear(input_0_tile_1, input_1_tile_1, None)
linear_sum_1 = add(linear_tile_0, linear_tile_1)
return linear_sum_1
""",
    )


def test_vocabulary(capture_call: Callable[..., Any]) -> None:
    captured = capture_call(F.embedding, (torch.zeros(3, dtype=torch.int64), torch.randn(7, 2)), {"padding_idx": 4})
    assert_expected_inline(
        _tile(captured, "vocabulary", 2),
        """\
input_0 = placeholder[input_0]
input_1 = placeholder[input_1]
input_1_tiles = split(input_1, [4, 3], 0)
input_1_tile_0 = getitem(input_1_tiles, 0)
input_0_below_0 = lt(input_0, 4)
input_0_local_0 = where(input_0_below_0, input_0, 0)
embedding_tile_0 = embedding(input_0_local_0, input_1_tile_0, padding_idx=None)
input_1_tile_1 = getitem(input_1_tiles, 1)
input_0_from_1 = sub(input_0, 4)
input_0_low_1 = clamp(input_0_from_1, 0)
embedding_tile_1 = embedding(input_0_low_1, input_1_tile_1, padding_idx=0)
input_0_inside_1 = ge(input_0, 4)
embedding_chosen_1 = unsqueeze(input_0_inside_1, -1)
embedding_sum_1 = where(embedding_chosen_1, embedding_tile_1, embedding_tile_0)
return embedding_sum_1
""",
    )


def test_blocks_of_causal_queries_see_no_key_behind_them(capture_call: Callable[..., Any]) -> None:
    captured = capture_call(F.scaled_dot_product_attention, 3 * (torch.randn(1, 2, 6, 4),), {"is_causal": True})
    captured.result._rename("mix")
    assert_expected_inline(
        _tile(captured, "queries", 2),
        """\
input_0 = placeholder[input_0]
input_1 = placeholder[input_1]
input_2 = placeholder[input_2]
input_0_tiles = split(input_0, [3, 3], 2)
input_0_tile_0 = getitem(input_0_tiles, 0)
input_1_seen_0 = narrow(input_1, -2, 0, 3)
input_2_seen_0 = narrow(input_2, -2, 0, 3)
mix_tile_0 = scaled_dot_product_attention(input_0_tile_0, input_1_seen_0, input_2_seen_0, is_causal=True)
input_0_tile_1 = getitem(input_0_tiles, 1)
input_1_seen_1 = narrow(input_1, -2, 0, 6)
input_2_seen_1 = narrow(input_2, -2, 0, 6)
ones_1 = ones([3, 6], dtype=bool, device=cpu)
seen_1 = tril(ones_1, 3)
mix_tile_1 = scaled_dot_product_attention(input_0_tile_1, input_1_seen_1, input_2_seen_1, is_causal=False, attn_mask=seen_1)
mix_whole = cat([mix_tile_0, mix_tile_1], 2)
return mix_whole
""",
    )


def test_groups(capture_call: Callable[..., Any]) -> None:
    captured = capture_call(F.conv1d, (torch.randn(1, 6, 9), torch.randn(9, 2, 3)), {"groups": 3})
    assert_expected_inline(
        _tile(captured, "groups", 2),
        """\
input_0 = placeholder[input_0]
input_1 = placeholder[input_1]
input_0_tiles = split(input_0, [4, 2], 1)
input_0_tile_0 = getitem(input_0_tiles, 0)
input_1_tiles = split(input_1, [6, 3], 0)
input_1_tile_0 = getitem(input_1_tiles, 0)
conv1d_tile_0 = conv1d(input_0_tile_0, input_1_tile_0, groups=2)
input_0_tile_1 = getitem(input_0_tiles, 1)
input_1_tile_1 = getitem(input_1_tiles, 1)
conv1d_tile_1 = conv1d(input_0_tile_1, input_1_tile_1, groups=1)
conv1d_whole = cat([conv1d_tile_0, conv1d_tile_1], 1)
return conv1d_whole
""",
    )


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_outside_the_table_is_refused_as_ever(index: int, capture_call: Callable[..., Any]) -> None:
    captured = capture_call(F.embedding, (torch.tensor([0, 6]), torch.randn(7, 2)), {})
    _tile(captured, "vocabulary", 3)
    captured.graph_module.recompile()
    table = captured.inputs[1]
    assert torch.equal(captured.graph_module(torch.tensor([0, 6]), table), table[[0, 6]])
    with pytest.raises(IndexError, match="index out of range"):
        captured.graph_module(torch.tensor([0, index]), table)


def test_every_node_made_knows_its_value_and_where_it_comes_from(linear: Any) -> None:
    linear.result.meta["stack_trace"] = "model.py, line 3"
    _tile(linear, "output features", 2)
    made = [node for node in linear.graph_module.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in made)
    pieces = [node for node in made if node.target is F.linear]
    assert [tuple(node.meta["val"].shape) for node in pieces] == [(4, 3), (4, 2)]
    assert all(node.meta["stack_trace"] == "model.py, line 3" for node in pieces)
    assert linear.result.meta["stack_trace"] == "model.py, line 3"
