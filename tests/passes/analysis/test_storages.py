"""Which nodes share storage, and how many bytes a storage has."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.passes.analysis.storages import find_roots, raw_size, tensor_nbytes
from zinf_compile.passes.fx_edit import view_source

Function = Callable[..., object]


def _root_names(graph_module: fx.GraphModule) -> dict[str, str]:
    """Return, for each call that does not allocate its result, the name of the node that did."""
    roots = find_roots(graph_module.graph)
    return {node.name: root.node.name for node, root in roots.items() if root.node is not node}


def test_views_lead_back_through_views(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.sin(x).t().view(2, 2, 2)[0], (4, 2))
    roots = _root_names(graph_module)
    assert set(roots.values()) == {"sin"}
    assert {"t", "view", "select"} <= set(roots)


def test_a_copy_is_storage_of_its_own(trace: Function) -> None:
    assert _root_names(trace(lambda anchor, x: x.t().clone(), (2, 3))) == {"t": "x_1"}


def test_unsafe_views_are_views() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.aten._unsafe_view.default, (x, [4]))
    pieces = graph.call_function(torch.ops.aten.unsafe_split.Tensor, (x, 2))
    assert view_source(view) is x
    assert view_source(pieces) is x


@pytest.mark.parametrize(
    "split",
    [
        lambda x: x.split(2),
        lambda x: x.split([1, 3]),
        lambda x: x.chunk(2),
        lambda x: x.unbind(0),
        lambda x: x.tensor_split(2),
    ],
    ids=["split", "split_with_sizes", "chunk", "unbind", "tensor_split"],
)
def test_pieces_of_a_tensor_are_views_of_it(trace: Function, split: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """Schemas of ops that return lists of views have no alias set, only the wildcard ``(a -> *)`` on the argument."""
    graph_module = trace(lambda anchor, x: torch.sin(split(torch.cos(x))[1]), (4, 2))
    roots = find_roots(graph_module.graph)
    (sin,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    (read,) = sin.all_input_nodes
    assert roots[read].node.name == "cos"


def test_an_in_place_result_is_its_argument(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.sin(x).add_(1).mul_(2), (4,))
    assert _root_names(graph_module) == {"add_": "sin", "mul_": "sin"}


def test_results_of_one_node_are_storages_of_their_own(trace: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        values, indices = torch.ops.aten.max.dim(x, 1)
        return values + indices

    graph_module = trace(forward, (2, 3))
    roots = find_roots(graph_module.graph)
    items = [root for node, root in roots.items() if node.name.startswith("getitem")]
    assert [root.node.name for root in items] == ["max_1", "max_1"]
    assert len(set(items)) == 2
    assert [root.nbytes for root in items] == [2 * 4, 2 * 8]  # float32 values, int64 indices


def test_a_view_given_by_keyword() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.view.default, (), {"self": x, "size": [4]})
    assert view_source(node) is x


def test_a_gather_is_no_view(trace: Function, gather: Function) -> None:
    graph_module = trace(lambda anchor, x: gather(anchor, "a", 4).view(2, 2) @ x, (2, 2))
    roots = find_roots(graph_module.graph)
    gathered = [node.name for node, root in roots.items() if root.is_gathered]
    assert gathered == ["gather", "view"]


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [((), torch.float32, 4), ((0, 7), torch.float32, 0), ((3, 5), torch.bfloat16, 30), ((2,), torch.bool, 2)],
)
def test_bytes_of_a_tensor(shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> None:
    assert tensor_nbytes(torch.empty(shape, dtype=dtype, device="meta")) == nbytes


def test_a_size_that_depends_on_values_is_not_guessed() -> None:
    with pytest.raises(UnsupportedError, match="depends on values, not on shapes"):
        raw_size(ShapeEnv().create_unbacked_symint())
