"""HOIST_VIEWS: a value may leave once nothing computes with it, though backward reads it through a view."""

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.passes.contract import FormInputs, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.transforms.joint.hoist_views import HOIST_VIEWS

Function = Callable[..., object]
Trace = Callable[..., torch.fx.GraphModule]


def _hoisted(trace: Trace, function: Function) -> str:
    graph_module = trace(function, (2, 3))
    run_pipeline(graph_module, [HOIST_VIEWS], FormInputs(policy=ActivationPolicy.SAVE))
    return dump_graph(graph_module.graph)


def test_views_that_are_only_saved_are_taken_at_once(trace: Trace) -> None:
    """Views of views too, in their order; those that forward computes with, and copies, stay where they are."""

    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        sin = x.sin()
        cos = sin.cos()
        exp = cos.exp()
        used = sin.t()
        return used.tan(), exp, sin.view(3, 2).t(), used[0], x.t(), sin[1].clone()

    assert_expected_inline(
        _hoisted(trace, forward),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
t_2 = aten.t(x_1)
sin = aten.sin(x_1)
view = aten.view(sin, [3, 2])
t_1 = aten.t(view)
cos = aten.cos(sin)
exp = aten.exp(cos)
t = aten.t(sin)
select = aten.select.int(t, 0, 0)
tan = aten.tan(t)
select_1 = aten.select.int(sin, 0, 1)
clone = aten.clone(select_1)
return (tan, exp, t_1, select, t_2, clone)
""",
    )


def test_what_backward_reads_through_a_view_may_leave_early(trace: Trace, analyze: Callable[..., GraphFacts]) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        sin = x.sin()
        return sin.cos().exp().tan(), sin.t()

    def backward(anchor: Tensor, t: Tensor, grad: Tensor) -> Tensor:
        return t * grad

    ends = []
    for passes in ([], [HOIST_VIEWS]):
        graph_module = trace(forward, (2, 3))
        run_pipeline(graph_module, passes, FormInputs(policy=ActivationPolicy.SAVE))
        reads = trace(backward, (3, 2), (3, 2))
        reads.graph.find_nodes(op="placeholder")[1].name = "t"
        names = [node.name for node in graph_module.graph.nodes]
        (idle,) = [value.idle for value in analyze(graph_module, reads).values if value.name == "sin"]
        assert idle is not None
        ends.append(names[idle.start - 1])
    assert ends == ["t", "cos"]
