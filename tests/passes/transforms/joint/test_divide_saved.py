"""Dividing a split graph: tensor-parallel ranks save a part each of what all of them have. Graphs are hand-made."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.passes.analysis.collect import CapturedGraph
from zinf_compile.passes.contract import Division, TensorGroup
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.transforms.joint.divide_saved import divide_saved

Function = Callable[..., object]
c10d = torch.ops._c10d_functional
SIZE = (64, 64)  # 16 KiB


def _division(names: frozenset[str] | None = None, *, size: int = 2, rank: int = 1) -> Division:
    return Division(groups={"tp": TensorGroup(name="tp", size=size, rank=rank)}, names=names)


def _capture(trace: Function, forward: Function, backward: Function, num_outputs: int = 1) -> CapturedGraph:
    """Return the graphs of two functions; arguments of the second are named like what the first one saves."""
    graphs: list[fx.GraphModule] = [
        trace(forward, SIZE),
        trace(backward, *[SIZE] * (backward.__code__.co_argcount - 1)),
    ]
    saved = {node.name: node.meta["val"] for node in graphs[0].graph.nodes if "val" in node.meta}
    for node in graphs[1].graph.find_nodes(op="placeholder"):
        node.name = node.name.removesuffix("_1")
        node.target = node.name
        if node.name in saved:
            node.meta["val"] = node.meta["val"].as_strided(SIZE, saved[node.name].stride())
    return CapturedGraph(forward=graphs[0], backward=graphs[1], num_outputs=num_outputs, policy=ActivationPolicy.SAVE)


def _reduced(x: Tensor) -> Tensor:
    result: Tensor = c10d.wait_tensor(c10d.all_reduce(x, "sum", "tp"))
    return result


def _forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    relu = _reduced(x).relu()
    return relu.sum(), relu, relu.t(), x.cos()


def _backward(anchor: Tensor, relu: Tensor, t: Tensor, cos: Tensor, grad: Tensor) -> Tensor:
    return torch.mm(grad * cos, t) + relu


def test_a_part_is_saved_and_gathered_before_the_first_reader(trace: Function) -> None:
    captured = divide_saved(_capture(trace, _forward, _backward), _division())
    assert captured.divided == ("relu",)
    assert captured.backward is not None
    assert_expected_inline(
        dump_graph(captured.forward.graph),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
all_reduce = _c10d_functional.all_reduce(x_1, sum, tp)
wait_tensor = _c10d_functional.wait_tensor(all_reduce)
relu = aten.relu(wait_tensor)
relu_flat = aten.view(relu, [4096])
relu_mine = aten.slice.Tensor(relu_flat, 0, 2048, 4096)
relu_part = aten.clone(relu_mine)
sum_1 = aten.sum(relu)
t = aten.t(relu)
cos = aten.cos(x_1)
return (sum_1, relu_part, cos)
""",
    )
    assert_expected_inline(
        dump_graph(captured.backward.graph),
        """\
anchor = placeholder[anchor]
relu_part = placeholder[relu_part]
cos = placeholder[cos]
grad = placeholder[grad]
mul = aten.mul.Tensor(grad, cos)
relu_gathering = _c10d_functional.all_gather_into_tensor(relu_part, 2, tp)
relu_whole = _c10d_functional.wait_tensor(relu_gathering)
relu_again = aten.as_strided(relu_whole, [64, 64], [64, 1], 0)
t_again = aten.as_strided(relu_whole, [64, 64], [1, 64], 0)
mm = aten.mm(mul, t_again)
add = aten.add.Tensor(mm, relu_again)
return add
""",
    )


@pytest.mark.parametrize(
    ("size", "names", "divided"),
    [(2, frozenset({"relu"}), ("relu",)), (2, frozenset({"cos"}), ()), (3, None, ()), (8, None, ())],
)
def test_what_is_not_divided(
    trace: Function, size: int, names: frozenset[str] | None, divided: tuple[str, ...]
) -> None:
    """What is not named or not the same everywhere, an odd number of elements, and parts of less than a sector."""
    captured = divide_saved(_capture(trace, _forward, _backward), _division(names, size=size, rank=0))
    assert captured.divided == divided


def test_what_the_caller_gets_or_an_op_overwrites_is_whole(trace: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        relu, exp, sin = (each(_reduced(x)) for each in (torch.relu, torch.exp, torch.sin))
        return relu, relu, exp.add_(1), sin

    def backward(anchor: Tensor, relu: Tensor, exp: Tensor, sin: Tensor, grad: Tensor) -> Tensor:
        return relu * exp * sin * grad

    captured = divide_saved(_capture(trace, forward, backward), _division(frozenset()))
    assert captured.dividable == ("sin",)
    assert captured.divided == ()


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_join_to_the_whole(trace: Function, rank: int) -> None:
    """What ranks save are the halves of the value, in the order of the ranks."""
    captured = divide_saved(_capture(trace, _forward, _backward), _division(rank=rank))
    nodes = {node.name: node for node in captured.forward.graph.nodes}
    start, end = nodes["relu_mine"].args[2:]
    assert (start, end) == (rank * 2048, (rank + 1) * 2048)
    assert nodes["relu_part"].meta["val"].shape == (2048,)
