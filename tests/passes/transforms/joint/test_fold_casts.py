"""FOLD_CASTS: if every read of a gather is a cast to one dtype, the gather moves that dtype."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.passes.analysis.casts import find_narrow_reads
from zinf_compile.passes.contract import FormInputs, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.properties import VALUES_KNOWN
from zinf_compile.passes.transforms.joint.fold_casts import FOLD_CASTS

Function = Callable[..., object]
BF16 = torch.bfloat16


def _fold(graph_module: fx.GraphModule, narrowed: dict[int, torch.dtype]) -> str:
    inputs = FormInputs(policy=ActivationPolicy.SAVE, narrowed=narrowed)
    run_pipeline(graph_module, [FOLD_CASTS], inputs, given=frozenset({VALUES_KNOWN}))
    return dump_graph(graph_module.graph)


def test_a_gather_that_is_cast_moves_what_the_cast_gives(
    trace: Function, gather: Function, store_grad: Function
) -> None:
    """Its gradient stays as autograd computes it: cast back to the dtype of the parameter."""

    def joint(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = gather(anchor, "a", 4, 4).to(BF16)
        y = torch.mm(x.to(BF16), weight.t())
        return y, store_grad(torch.mm(y.t(), x.to(BF16)).float(), "a")

    graph_module = trace(joint, (4, 4))
    narrowed = find_narrow_reads(graph_module.graph)
    assert narrowed == {1: BF16}
    assert_expected_inline(
        _fold(graph_module, narrowed),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
gather = zinf.gather(anchor_1, 1, [4, 4], bfloat16, cpu)
_to_copy_1 = aten._to_copy(x_1, dtype=bfloat16)
t = aten.t(gather)
mm = aten.mm(_to_copy_1, t)
t_1 = aten.t(mm)
_to_copy_2 = aten._to_copy(x_1, dtype=bfloat16)
mm_1 = aten.mm(t_1, _to_copy_2)
_to_copy_3 = aten._to_copy(mm_1, dtype=float32)
store_grad = zinf.store_grad(_to_copy_3, 1)
return (mm, store_grad)
""",
    )
    (weight,) = (node for node in graph_module.graph.nodes if node.name == "gather")
    assert weight.meta["val"].dtype == BF16


def test_views_between_gather_and_cast_are_made_of_the_narrower_value(trace: Function, gather: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        left, right = gather(anchor, "a", 4, 4).t().split(4, dim=1)[0], gather(anchor, "a", 4, 4)
        return torch.mm(x.to(BF16), left.to(BF16)) + right.to(BF16)

    graph_module = trace(joint, (4, 4))
    assert_expected_inline(
        _fold(graph_module, find_narrow_reads(graph_module.graph)),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
gather = zinf.gather(anchor_1, 1, [4, 4], bfloat16, cpu)
t = aten.t(gather)
split = aten.split.Tensor(t, 4, 1)
getitem = getitem(split, 0)
gather_1 = zinf.gather(anchor_1, 1, [4, 4], bfloat16, cpu)
_to_copy = aten._to_copy(x_1, dtype=bfloat16)
mm = aten.mm(_to_copy, getitem)
add = aten.add.Tensor(mm, gather_1)
return add
""",
    )
    assert {node.meta["val"].dtype for node in graph_module.graph.nodes if node.name in ("gather", "t")} == {BF16}


def test_parameters_that_are_not_named_stay_as_they_are(trace: Function, gather: Function) -> None:
    graph_module = trace(lambda anchor, x: x.to(BF16) + gather(anchor, "a", 4).to(BF16), (4,))
    before = dump_graph(graph_module.graph)
    assert _fold(graph_module, {2: BF16}) == before


@pytest.mark.parametrize(
    "read",
    [
        lambda weight, x: (weight.to(BF16) + x, weight + x),  # it is also read without a cast
        lambda weight, x: weight.to(BF16) + weight.half(),  # two dtypes
        lambda weight, x: weight.double() + x,  # not narrower
        lambda weight, x: weight.to(torch.int16) + x,
        lambda weight, x: weight[:, :2].to(BF16) + 1,  # the cast changes the layout
        lambda weight, x: (weight.to(BF16), x),  # returned to the caller, who may write to it
        lambda weight, x: (weight.to(BF16).t(), x),
        lambda weight, x: (weight, weight.to(BF16) + x),
        lambda weight, x: weight.view(torch.int32) + 1,
    ],
)
def test_what_is_not_only_cast_to_one_narrower_dtype_is_not_found(
    trace: Function, gather: Function, read: Callable[[Tensor, Tensor], object]
) -> None:
    graph_module = trace(lambda anchor, x: read(gather(anchor, "a", 4, 4), x), (4, 4))
    assert find_narrow_reads(graph_module.graph) == {}


def test_every_gather_of_a_parameter_counts(trace: Function, gather: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        return gather(anchor, "a", 4).to(BF16) + (gather(anchor, "a", 4) + x) + gather(anchor, "b", 4).to(BF16)

    assert find_narrow_reads(trace(joint, (4,)).graph) == {2: BF16}


def test_folding_what_is_read_otherwise_is_refused(trace: Function, gather: Function) -> None:
    graph_module = trace(lambda anchor, x: gather(anchor, "a", 4) + x, (4,))
    with pytest.raises(VerifyError, match=r"'gather' cannot move torch\.bfloat16: not every read of it is a cast"):
        _fold(graph_module, {1: BF16})
