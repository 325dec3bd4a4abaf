"""PLACE_STORES: nothing reads a parameter once its gradient is stored."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.ir.ops import STORE_GRAD
from zinf_compile.passes.contract import FormInputs, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.properties import STORED_LAST
from zinf_compile.passes.transforms.joint.place_stores import PLACE_STORES

Function = Callable[..., object]


def _run(graph_module: fx.GraphModule) -> str:
    run_pipeline(graph_module, [PLACE_STORES], FormInputs(policy=ActivationPolicy.SAVE))
    return dump_graph(graph_module.graph)


def test_a_gradient_that_is_stored_too_early_moves(trace: Function, gather: Function, store_grad: Function) -> None:
    def backward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = gather(anchor, "a", 2, 2)
        token = store_grad(torch.sin(x), "a")
        return token, torch.mm(x, weight.t())

    graph_module = trace(backward, (2, 2))
    with pytest.raises(VerifyError, match="after the gradient of its parameter was stored"):
        STORED_LAST.check(graph_module)
    assert_expected_inline(
        _run(graph_module),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
gather = zinf.gather(anchor_1, 1, [2, 2], float32, cpu)
sin = aten.sin(x_1)
t = aten.t(gather)
mm = aten.mm(x_1, t)
store_grad = zinf.store_grad(sin, 1)
return (store_grad, mm)
""",
    )
    STORED_LAST.check(graph_module)


def test_gradients_of_a_tile_leave_as_they_come(trace: Function, gather: Function, store_grad: Function) -> None:
    """Only the last of them completes it."""

    def backward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = gather(anchor, "a", 2, 2)
        first, other = torch.sin(x), torch.mm(x, weight)
        second = torch.cos(x)
        return store_grad(first, "a"), store_grad(second, "a"), torch.mm(other, weight)

    graph_module = trace(backward, (2, 2))
    store = graph_module.graph.find_nodes(op="call_function", target=STORE_GRAD)[1]
    store.args = (*store.args, 1)
    assert_expected_inline(
        _run(graph_module),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
gather = zinf.gather(anchor_1, 1, [2, 2], float32, cpu)
sin = aten.sin(x_1)
store_grad = zinf.store_grad(sin, 1)
mm = aten.mm(x_1, gather)
cos = aten.cos(x_1)
mm_1 = aten.mm(mm, gather)
store_grad_1 = zinf.store_grad(cos, 1, 1)
return (store_grad, store_grad_1, mm_1)
""",
    )
    STORED_LAST.check(graph_module)
