"""SINK_GRADIENTS: gradients are offloaded asynchronously, the token is an empty tensor, and the graph waits at its end."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.ops import SINK_GRAD, WAIT_SINKS
from zinf_compile.ir.transfers import Moved
from zinf_compile.passes.properties import GRADIENTS_SUNK
from zinf_compile.passes.transforms.lowering.sink_gradients import SINK_GRADIENTS

Function = Callable[..., object]


def test_stores_become_sinks_and_the_end_waits(trace: Function, lower: Function, store_grad: Function) -> None:
    def backward(anchor: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        store_grad(torch.mm(dy.t(), x), "b")
        return store_grad(dy.sum(0), "a"), torch.sin(dy)

    assert_expected_inline(
        lower(trace(backward, (2, 4), (2, 3)), [SINK_GRADIENTS]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
dy_1 = placeholder[dy_1]
t = aten.t(dy_1)
mm = aten.mm(t, x_1)
token = aten.empty.memory_format([0])
b_grad_sink = zinf.sink_grad(mm, 7, 2)
sum_1 = aten.sum.dim_IntList(dy_1, [0])
a_grad_sink = zinf.sink_grad(sum_1, 7, 1)
sin = aten.sin(dy_1)
wait_sinks = zinf.wait_sinks(7)
return (token, sin)
""",
    )


def test_the_gradient_of_experts_leaves_with_what_says_which_have_rows(
    trace: Function, lower: Function, store_grad: Function, make_transfer: Function
) -> None:
    def backward(anchor: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        ends = torch.cumsum(x[0] > 0, 0)  # anchor 0, x 1, dy 2, select 3, gt 4, cumsum 5
        return store_grad(torch.sin(dy) * ends[0], "a")

    leaving = replace(make_transfer({"a": 0}, issue=8, need_by=10, release=10), what=Moved.GRADIENT, ends=5)
    assert_expected_inline(
        lower(trace(backward, (2, 4), (2, 3)), [SINK_GRADIENTS], [leaving]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
dy_1 = placeholder[dy_1]
select = aten.select.int(x_1, 0, 0)
gt = aten.gt.Scalar(select, 0)
cumsum = aten.cumsum(gt, 0)
sin = aten.sin(dy_1)
select_1 = aten.select.int(cumsum, 0, 0)
mul = aten.mul.Tensor(sin, select_1)
token = aten.empty.memory_format([0])
a_grad_sink = zinf.sink_grad(mul, 7, 1, cumsum)
wait_sinks = zinf.wait_sinks(7)
return token
""",
    )


def test_a_graph_without_gradients_stays(trace: Function, lower: Function) -> None:
    assert_expected_inline(
        lower(trace(lambda anchor, x: torch.sin(x), (2,)), [SINK_GRADIENTS]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
sin = aten.sin(x_1)
return sin
""",
    )


def test_a_gradient_stored_synchronously_is_refused(trace: Function, store_grad: Function) -> None:
    graph_module = trace(lambda anchor, dy: store_grad(dy, "a"), (2,))
    with pytest.raises(VerifyError, match="gradient 'store_grad' is still stored synchronously"):
        GRADIENTS_SUNK.check(graph_module)


@pytest.mark.parametrize("waits", [False, True])
def test_a_sink_that_nothing_waits_for_is_refused(trace: Function, *, waits: bool) -> None:
    def backward(anchor: Tensor, dy: Tensor) -> Tensor:
        if waits:
            WAIT_SINKS(7)
        SINK_GRAD(dy, 7, 1)
        return torch.sin(dy)

    with pytest.raises(VerifyError, match="gradient sink 'sink_grad' is not followed by a wait"):
        GRADIENTS_SUNK.check(trace(backward, (2,)))
