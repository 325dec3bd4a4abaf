"""Chains of ops that can be tiled along one axis: which are found, their results, and that intermediates stay tiled."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition

from zinf_compile.passes.fx_edit import view_source
from zinf_compile.passes.transforms.tiling.chains import find_chains
from zinf_compile.passes.transforms.tiling.tile_chain import Chain, tile_chain

ROWS, WIDTH, HIDDEN = 6, 8, 40


def _mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


def _gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _matmul_mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up + up_bias).matmul(down)


def _make(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


X, UP, DOWN = (2, ROWS, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
MODELS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mlp": (_mlp, (X, UP, (HIDDEN,), DOWN, (WIDTH,))),
    "gated": (_gated_mlp, (X, UP, UP, DOWN)),
    "matmul": (_matmul_mlp, (X, (WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH))),
}


def _hidden_chains(captured: Any) -> list[Chain]:
    return list(find_chains(captured.graph_module.graph))


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_runs_along_rows_and_hidden_features(name: str, capture: Callable[..., Any]) -> None:
    function, shapes = MODELS[name]
    chains = _hidden_chains(capture(function, *_make(*shapes)))
    sizes = sorted(chain.result.tiling.size for chain in chains)
    assert sizes == [2, ROWS, HIDDEN]
    num_links = {"mlp": 3, "gated": 5, "matmul": 4}[name]
    assert {len(chain.links) for chain in chains} == {num_links}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_tiles", [2, 3, 7])
def test_a_tiled_chain_is_the_chain_and_what_lies_between_is_never_whole(
    name: str, num_tiles: int, capture: Callable[..., Any]
) -> None:
    function, shapes = MODELS[name]
    inputs = _make(*shapes)
    expected = capture(function, *inputs).run()
    num_chains = len(_hidden_chains(capture(function, *inputs)))
    num_checked = 0
    for number in range(num_chains):
        captured = capture(function, *inputs)
        chain = _hidden_chains(captured)[number]
        if chain.result.tiling.size < num_tiles:
            continue
        tile_chain(chain, num_tiles)
        made = [node for node in captured.graph_module.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
        largest = max(node.meta["val"].numel() for node in made)
        assert largest < 2 * ROWS * HIDDEN
        measured = captured.run()
        assert measured.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(measured[key], value, rtol=1e-10, atol=1e-10)
        num_checked += 1
    assert num_checked > 0


def test_what_someone_else_reads_stays_whole(capture: Callable[..., Any]) -> None:
    def model(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        wide = F.relu(F.linear(x, up))
        return F.linear(wide, down) + wide.sum()

    assert _hidden_chains(capture(model, *_make(X, UP, DOWN))) == []


def test_a_write_between_keeps_a_chain_where_it_is(capture: Callable[..., Any]) -> None:
    def model(x: Tensor, up: Tensor, down: Tensor, seen: Tensor) -> Tensor:
        wide = F.linear(x, up)
        seen.add_(1.0)
        return F.linear(F.relu(wide), down)

    inputs = _make(X, UP, DOWN)
    assert _hidden_chains(capture(model, *inputs, torch.zeros(1))) == []
    assert len(_hidden_chains(capture(lambda x, up, down: F.linear(F.relu(F.linear(x, up)), down), *inputs))) == 3


def test_a_mode_that_changes_between_keeps_a_chain_where_it_is(capture: Callable[..., Any]) -> None:
    def model(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wide = F.linear(x, up)
        return F.linear(F.relu(wide.double()), down)

    assert _hidden_chains(capture(model, *_make(X, UP, DOWN))) == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "rows", "hidden features"])
def test_what_lies_between_is_made_again_in_backward(name: str, axis: int, capture: Callable[..., Any]) -> None:
    """Without recomputation, every intermediate of a chain is saved for backward, tile by tile."""
    function, shapes = MODELS[name]
    inputs = _make(*shapes)
    expected = capture(function, *inputs).run()
    num_saved = {}
    for recompute in (False, True):
        captured = capture(function, *inputs)
        tile_chain(_hidden_chains(captured)[axis], 2, recompute=recompute)
        captured.graph_module.graph.output_node().args = ((captured.result,),)
        captured.graph_module.recompile()
        forwards: list[fx.GraphModule] = []

        def keep(graph_module: fx.GraphModule, _: object, forwards: list[fx.GraphModule] = forwards) -> Any:
            forwards.append(graph_module)
            return make_boxed_func(graph_module.forward)

        compiled = aot_module_simplified(
            captured.graph_module,
            captured.inputs,
            fw_compiler=keep,
            bw_compiler=lambda graph_module, _: make_boxed_func(graph_module.forward),
            partition_fn=min_cut_rematerialization_partition,
        )
        (output,) = compiled(*captured.inputs)
        torch.testing.assert_close(output, expected["output"], rtol=1e-10, atol=1e-10)
        (saved,) = forwards[0].graph.output_node().args
        made = [node for node in saved[1:] if isinstance(node, fx.Node) and _storage_of(node).op == "call_function"]
        num_saved[recompute] = sum(node.meta["val"].numel() for node in made)
    assert num_saved[True] == 0
    assert num_saved[False] >= 2 * ROWS * HIDDEN


def _storage_of(node: fx.Node) -> fx.Node:
    """Return the node that owns the storage of a view; a piece of a split is a view of the split tensor."""
    source = node.args[0] if node.target is operator.getitem else view_source(node)
    return _storage_of(source) if isinstance(source, fx.Node) else node
