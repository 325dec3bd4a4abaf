"""MERGE_SUBEXPRESSIONS: equal ops become one, and gradients of equal value stay as many as they were."""

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.contract import JointInputs, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.pipeline import JOINT
from zinf_compile.passes.properties import VALUES_KNOWN

Function = Callable[..., object]


def test_equal_ops_become_one_and_unread_ones_none(trace: Function, store_grad: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        torch.exp(x)
        return store_grad(torch.sin(x) * torch.cos(x), "a") + store_grad(torch.sin(x), "b")

    graph_module = trace(joint, (2,))
    run_pipeline(graph_module, JOINT, JointInputs(), given=frozenset({VALUES_KNOWN}))
    assert_expected_inline(
        dump_graph(graph_module.graph),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
sin = aten.sin(x_1)
cos = aten.cos(x_1)
mul = aten.mul.Tensor(sin, cos)
store_grad = zinf.store_grad(mul, 1)
store_grad_1 = zinf.store_grad(sin, 2)
return store_grad_1
""",
    )


def test_random_numbers_are_drawn_as_often_as_before(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.rand_like(x) - torch.rand_like(x), (2,))
    run_pipeline(graph_module, JOINT, JointInputs(), given=frozenset({VALUES_KNOWN}))
    assert len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.rand_like.default)) == 2


def test_two_reads_of_a_parameter_are_one_gather(trace: Function, gather: Function) -> None:
    graph_module = trace(lambda anchor, x: gather(anchor, "a", 2) + x - gather(anchor, "a", 2), (2,))
    assert len(graph_module.graph.find_nodes(op="call_function", target=GATHER)) == 2
    run_pipeline(graph_module, JOINT, JointInputs(), given=frozenset({VALUES_KNOWN}))
    assert len(graph_module.graph.find_nodes(op="call_function", target=GATHER)) == 1
