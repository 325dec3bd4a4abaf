"""Floating-point operations against formulas, bytes accessed against sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from zinf_compile.passes.analysis.costs import count_bytes_accessed, count_flops

Function = Callable[..., object]
aten = torch.ops.aten


def _only(graph_module: fx.GraphModule, target: object) -> fx.Node:
    (node,) = graph_module.graph.find_nodes(op="call_function", target=target)
    return node


def test_a_matrix_product(trace: Function) -> None:
    node = _only(trace(lambda anchor, x, y: torch.mm(x, y), (2, 3), (3, 5)), aten.mm.default)
    assert count_flops(node) == 2 * 2 * 3 * 5
    assert count_bytes_accessed(node) == 4 * (2 * 3 + 3 * 5 + 2 * 5)


def test_a_matrix_product_with_bias(trace: Function) -> None:
    node = _only(trace(lambda anchor, b, x, y: torch.addmm(b, x, y), (5,), (2, 3), (3, 5)), aten.addmm.default)
    assert count_flops(node) == 2 * 2 * 3 * 5
    assert count_bytes_accessed(node) == 4 * (5 + 2 * 3 + 3 * 5 + 2 * 5)


def test_a_batch_of_matrix_products(trace: Function) -> None:
    node = _only(trace(lambda anchor, x, y: torch.bmm(x, y), (7, 2, 3), (7, 3, 5)), aten.bmm.default)
    assert count_flops(node) == 7 * 2 * 2 * 3 * 5


def test_a_convolution(trace: Function) -> None:
    def forward(anchor: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, weight)

    node = _only(trace(forward, (1, 3, 8, 8), (5, 3, 3, 3)), aten.convolution.default)
    assert count_flops(node) == 2 * (6 * 6) * 5 * (3 * 3 * 3)


def test_an_elementwise_op_is_all_traffic(trace: Function) -> None:
    node = _only(trace(lambda anchor, x: torch.sin(x), (4, 4)), aten.sin.default)
    assert count_flops(node) == 0
    assert count_bytes_accessed(node) == 2 * 64


def test_a_result_of_several_tensors_counts_all(trace: Function) -> None:
    node = _only(trace(lambda anchor, x: torch.ops.aten.max.dim(x, 1)[0], (2, 3)), aten.max.dim)
    assert count_bytes_accessed(node) == 2 * 3 * 4 + 2 * 4 + 2 * 8


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x.split(2), lambda x: x.view(8)], ids=["t", "split", "view"]
)
def test_a_view_costs_nothing(trace: Function, view: Callable[[Tensor], object]) -> None:
    graph_module = trace(lambda anchor, x: view(x), (4, 2))
    for node in graph_module.graph.nodes:
        assert count_bytes_accessed(node) == 0
        assert count_flops(node) == 0
