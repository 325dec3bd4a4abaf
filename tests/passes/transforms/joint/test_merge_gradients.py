"""MERGE_GRADIENTS: one gradient per parameter, summed in the order of arrival; the output returns one token."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.ops import STORE_GRAD
from zinf_compile.passes.contract import JointInputs, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.properties import ONE_GRADIENT_EACH, VALUES_KNOWN
from zinf_compile.passes.transforms.joint.merge_gradients import MERGE_GRADIENTS

Function = Callable[..., object]


def _merge(graph_module: fx.GraphModule) -> str:
    inputs = JointInputs()
    run_pipeline(graph_module, [MERGE_GRADIENTS], inputs, given=frozenset({VALUES_KNOWN}))
    return dump_graph(graph_module.graph)


def test_three_uses_are_summed_in_the_order_of_arrival(trace: Function, store_grad: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        first = store_grad(torch.sin(x), "a")
        second = store_grad(torch.cos(x), "a")
        return first + second + store_grad(torch.tan(x), "a")

    assert_expected_inline(
        _merge(trace(joint, (2,))),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
sin = aten.sin(x_1)
cos = aten.cos(x_1)
tan = aten.tan(x_1)
grad_sum = aten.add.Tensor(sin, cos)
grad_sum_1 = aten.add.Tensor(grad_sum, tan)
store_grad_2 = zinf.store_grad(grad_sum_1, 1)
return store_grad_2
""",
    )


@pytest.mark.parametrize("at_home", [False, True])
def test_equal_contributions_stay_two_when_repeats_are_eliminated(
    trace: Function, store_grad: Function, *, at_home: bool
) -> None:
    """The partitioner does so after this pass. Before it, two stores of the same tensor would become one."""

    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        return store_grad(torch.sin(x), "a") + store_grad(torch.sin(x), "a")

    graph_module = trace(joint, (2,))
    (param,) = {node.args[1] for node in graph_module.graph.nodes if node.target is STORE_GRAD}
    inputs = JointInputs(added_at_home=frozenset({param} if at_home else ()))
    run_pipeline(graph_module, [MERGE_GRADIENTS], inputs, given=frozenset({VALUES_KNOWN}))
    graph = fx_graph_cse(graph_module.graph)
    stores = [node for node in graph.nodes if node.target is STORE_GRAD]
    assert len(stores) == (2 if at_home else 1)
    if not at_home:
        total = stores[0].args[0]
        assert total.target is torch.ops.aten.add.Tensor
        assert total.args[0] is total.args[1]


def test_parameters_used_once_keep_their_stores_and_lose_the_token_sum(trace: Function, store_grad: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return store_grad(torch.sin(x), "a") + store_grad(torch.cos(x), "b"), x

    assert_expected_inline(
        _merge(trace(joint, (2,))),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
sin = aten.sin(x_1)
store_grad = zinf.store_grad(sin, 1)
cos = aten.cos(x_1)
store_grad_1 = zinf.store_grad(cos, 2)
return (store_grad_1, x_1)
""",
    )


def test_uses_of_two_parameters_in_turn(trace: Function, store_grad: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        token = store_grad(torch.sin(x), "a") + store_grad(torch.cos(x), "b")
        return token + store_grad(torch.tan(x), "a") + store_grad(torch.exp(x), "b")

    assert_expected_inline(
        _merge(trace(joint, (2,))),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
sin = aten.sin(x_1)
cos = aten.cos(x_1)
tan = aten.tan(x_1)
grad_sum = aten.add.Tensor(sin, tan)
store_grad_2 = zinf.store_grad(grad_sum, 1)
exp = aten.exp(x_1)
grad_sum_1 = aten.add.Tensor(cos, exp)
store_grad_3 = zinf.store_grad(grad_sum_1, 2)
return store_grad_3
""",
    )


def test_a_graph_without_gradients_stays(trace: Function) -> None:
    graph_module: fx.GraphModule = trace(lambda anchor, x: torch.sin(x) + x, (2,))
    before = dump_graph(graph_module.graph)
    assert _merge(graph_module) == before


def test_autograd_gives_the_same_sum(trace: Function) -> None:
    """The order of summation is autograd's: compare bitwise with autograd's own accumulation."""
    torch.manual_seed(0)
    weight = torch.randn(50, requires_grad=True)
    contributions = [torch.randn(50) * 10.0**scale for scale in (0, 6, 3)]
    seen: list[int] = []
    uses = []
    for index, contribution in enumerate(contributions):
        use = weight * 1.0
        use.register_hook(lambda grad, index=index: seen.append(index))
        uses.append((use * contribution).sum())
    torch.stack(uses).sum().backward()
    first, second, third = (contributions[index] for index in seen)
    assert weight.grad is not None
    assert torch.equal(weight.grad, first + second + third)


def test_two_stores_of_one_gradient_are_refused(trace: Function, store_grad: Function) -> None:
    graph_module = trace(lambda anchor, x: store_grad(torch.sin(x), "a") + store_grad(x, "a"), (2,))
    with pytest.raises(VerifyError, match="'store_grad_1' stores a gradient that 'store_grad' stores already"):
        ONE_GRADIENT_EACH.check(graph_module)
