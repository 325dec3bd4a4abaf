"""The table of tilings: its entries for an op, and which calls it rejects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from zinf_compile.passes.transforms.tiling.calls import Call
from zinf_compile.passes.transforms.tiling.table import legal_tilings, tilings_of_call
from zinf_compile.passes.transforms.tiling.tilings import Tiling


def _describe(tiling: Tiling) -> str:
    cuts = ", ".join(f"{cut.operand}[{cut.dim}]" + (f"*{cut.unit}" if cut.unit > 1 else "") for cut in tiling.cuts)
    combined = f"{tiling.combine} {tiling.dim}" if tiling.combine == "concatenate" else str(tiling.combine)
    return (
        f"{tiling.axis} {tiling.size}: {cuts} -> {combined}; {tiling.pieces}; exact {', '.join(tiling.exact) or '-'}\n"
    )


def _table(op: str, output: tuple[int, ...], options: dict[str, Any] | None = None, **shapes: tuple[int, ...]) -> str:
    call = Call(op=op, output=output, shapes=shapes, options=options or {})
    return "".join(_describe(tiling) for tiling in tilings_of_call(call))


def test_products() -> None:
    assert_expected_inline(
        _table("linear", (4, 6, 5), input=(4, 6, 8), weight=(5, 8), bias=(5,)),
        """\
rows 4: input[0] -> concatenate 0; alike; exact -
rows 6: input[1] -> concatenate 1; alike; exact -
output features 5: weight[0], bias[0] -> concatenate 2; alike; exact -
input features 8: input[2], weight[1] -> add; bias_once; exact -
""",
    )
    assert_expected_inline(
        _table("matmul", (2, 3, 5), input=(2, 3, 4), other=(4, 5)),
        """\
batch 2: input[0] -> concatenate 0; alike; exact -
rows 3: input[1] -> concatenate 1; alike; exact -
columns 5: other[1] -> concatenate 2; alike; exact -
inner 4: input[2], other[0] -> add; alike; exact -
""",
    )


def test_embedding() -> None:
    assert_expected_inline(
        _table("embedding", (3, 8), input=(3,), weight=(10, 8)),
        """\
rows 3: input[0] -> concatenate 0; alike; exact output
vocabulary 10: weight[0] -> select; vocabulary; exact output, weight
features 8: weight[1] -> concatenate 1; alike; exact output, weight
""",
    )


def test_convolutions() -> None:
    assert_expected_inline(
        _table("conv", (2, 6, 9), input=(2, 4, 9), weight=(6, 4, 3), bias=(6,)),
        """\
rows 2: input[0] -> concatenate 0; alike; exact -
output channels 6: weight[0], bias[0] -> concatenate 1; alike; exact -
input channels 4: input[1], weight[1] -> add; bias_once; exact -
""",
    )
    assert_expected_inline(
        _table("conv", (6, 9), {"groups": 2}, input=(4, 9), weight=(6, 2, 3)),
        """\
groups 2: input[0]*2, weight[0]*3 -> concatenate 0; groups; exact -
""",
    )


def test_attention_with_grouped_heads() -> None:
    shapes = {"query": (2, 8, 6, 16), "key": (2, 4, 9, 16), "value": (2, 4, 9, 16), "attn_mask": (1, 8, 6, 9)}
    assert_expected_inline(
        _table("attention", (2, 8, 6, 16), {"enable_gqa": True}, **shapes),
        """\
batch 2: query[0], key[0], value[0] -> concatenate 0; alike; exact output, query, key, value
heads 4: query[1]*2, key[1], value[1], attn_mask[1]*2 -> concatenate 1; alike; exact output, query, key, value
queries 6: query[2], attn_mask[2] -> concatenate 2; alike; exact -
""",
    )


def test_what_works_row_by_row() -> None:
    assert_expected_inline(
        _table("layer_norm", (4, 6, 8), {"normalized_shape": (8,)}, input=(4, 6, 8), weight=(8,)),
        """\
rows 4: input[0] -> concatenate 0; alike; exact output, input
rows 6: input[1] -> concatenate 1; alike; exact output, input
""",
    )
    assert_expected_inline(
        _table("element_wise", (4, 6), operand_0=(4, 6), operand_1=(6,)),
        """\
elements 4: operand_0[0] -> concatenate 0; alike; exact -
elements 6: operand_0[1], operand_1[0] -> concatenate 1; alike; exact -
""",
    )


@pytest.mark.parametrize(
    ("target", "args", "options"),
    [
        (F.embedding, (torch.zeros(4, dtype=torch.int64), torch.ones(5, 3)), {"max_norm": 1.0}),
        (F.embedding, (torch.zeros(4, dtype=torch.int64), torch.ones(5, 3)), {"sparse": True}),
        (F.scaled_dot_product_attention, 3 * (torch.ones(2, 4, 6, 8),), {"dropout_p": 0.5}),
        (F.silu, (torch.ones(4, 6),), {"inplace": True}),
        (F.silu, (torch.ones(4, 6), True), {}),
        (F.dropout, (torch.ones(4, 6),), {}),
        ("to", (torch.ones(4, 6), torch.ones(8, 9)), {}),
        (torch.neg, (torch.ones(1, 1),), {}),
    ],
    ids=[
        "renormed",
        "sparse",
        "random",
        "in place",
        "in place by position",
        "unknown",
        "dtype of another",
        "one index",
    ],
)
def test_what_may_not_be_tiled(
    target: Callable[..., Tensor] | str,
    args: tuple[Any, ...],
    options: dict[str, Any],
    capture_call: Callable[..., Any],
) -> None:
    assert legal_tilings(capture_call(target, args, options).result) == ()


@pytest.mark.parametrize(
    ("target", "args", "axes"),
    [
        ("matmul", (torch.ones(4, 6), torch.ones(6, 5)), {"rows", "columns", "inner"}),
        ("relu", (torch.ones(4, 6),), {"elements"}),
        ("to", (torch.ones(4, 6), torch.float64), {"elements"}),
        ("__add__", (torch.ones(4, 6), 2.0), {"elements"}),
    ],
)
def test_methods_are_the_ops_they_name(
    target: str, args: tuple[Any, ...], axes: set[str], capture_call: Callable[..., Any]
) -> None:
    assert {tiling.axis for tiling in legal_tilings(capture_call(target, args, {}).result)} == axes


def test_a_size_that_changes_is_not_tiled(capture_call: Callable[..., Any]) -> None:
    captured = capture_call(torch.neg, (torch.ones(4, 6),), {})
    sizes = []

    def backend(graph_module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        sizes.extend(
            legal_tilings(node) for node in graph_module.graph.find_nodes(op="call_function", target=torch.neg)
        )
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(torch.neg, backend=backend, dynamic=True)(*captured.inputs)
    assert sizes == [()]


def test_tiles_differ_by_one_at_most() -> None:
    (tiling,) = tilings_of_call(Call(op="element_wise", output=(7,), shapes={"operand_0": (7,)}))
    assert tiling.tile_sizes(3) == (3, 2, 2)
    assert tiling.tile_sizes(7) == (1,) * 7
    for num_tiles in (0, 8):
        with pytest.raises(ValueError, match=f"axis 'elements' has 7 indices and cannot have {num_tiles} tiles"):
            tiling.tile_sizes(num_tiles)
