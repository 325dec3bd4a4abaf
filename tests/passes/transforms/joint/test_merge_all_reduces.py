"""MERGE_ALL_REDUCES: tensor-parallel ranks add up the gradient of what several layers read once."""

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from zinf_compile.passes.contract import JointInputs, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.pipeline import JOINT
from zinf_compile.passes.properties import VALUES_KNOWN

Function = Callable[..., object]
zinf = torch.ops.zinf


def edited(trace: Function, function: Function) -> str:
    graph_module = trace(function, (2,))
    run_pipeline(graph_module, JOINT, JointInputs(), given=frozenset({VALUES_KNOWN}))
    return dump_graph(graph_module.graph)


def test_partial_sums_are_added_before_ranks_exchange_them(trace: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        entered = zinf.enter_columns(x, 4)
        parts = [torch.sin(entered), torch.cos(entered), torch.exp(zinf.enter_columns(x, 4))]
        q, k, v = (zinf.all_reduce(part, 4) for part in parts)
        return q + k + v

    assert_expected_inline(
        edited(trace, joint),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
sin = aten.sin(x_1)
cos = aten.cos(x_1)
exp = aten.exp(x_1)
partial_sum = aten.add.Tensor(sin, cos)
partial_sum_1 = aten.add.Tensor(partial_sum, exp)
reduced_sum_1 = zinf.all_reduce(partial_sum_1, 4)
return reduced_sum_1
""",
    )


def test_a_sum_that_is_read_elsewhere_or_added_to_something_whole_stays(trace: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        first, second = zinf.all_reduce(torch.sin(x), 4), zinf.all_reduce(torch.cos(x), 4)
        return (first + second) * second + x

    assert edited(trace, joint).count("zinf.all_reduce(") == 2
    assert edited(trace, lambda anchor, x: zinf.all_reduce(torch.sin(x), 4) + x).count("zinf.all_reduce(") == 1
