"""SWAP_ACTIVATIONS: forward saves a token for an offloaded value, and backward reloads the value before its first use."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from tests.support.hand_made_plans import make_swap, with_transfers
from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.transfers import Swap
from zinf_compile.passes.contract import LowerInputs, run_pipeline
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.properties import SWAPS_GONE, VALUES_KNOWN
from zinf_compile.passes.transforms.lowering.bind_outputs import BIND_OUTPUTS
from zinf_compile.passes.transforms.lowering.box_inputs import BOX_INPUTS
from zinf_compile.passes.transforms.lowering.release_transfers import RELEASE_TRANSFERS
from zinf_compile.passes.transforms.lowering.start_transfers import START_TRANSFERS
from zinf_compile.passes.transforms.lowering.swap_activations import SWAP_ACTIVATIONS

Function = Callable[..., fx.GraphModule]


def make_sin(*, out: int = 2, gone: int = 5, issue: int = 8, need_by: int = 11, release: int = 13) -> Swap:
    return make_swap(
        "sin", Tier.NVME, 4096, out=out, gone=gone, issue=issue, need_by=need_by, release=release, offset=8192
    )


SWAP = make_sin()


@pytest.fixture
def swap(analyze: Callable[..., GraphFacts], hand_made_plan: Callable[..., Plan]) -> Callable[..., list[str]]:
    """Return ``swap(forward, backward, swap)``, which lowers both graphs and returns their dumps."""

    def run(forward: fx.GraphModule, backward: fx.GraphModule, *swaps: Swap) -> list[str]:
        plan = with_transfers(hand_made_plan(analyze(forward, backward)), swaps=swaps, bound=())
        inputs = LowerInputs(plan=plan, store_id=7, param_ids={})
        passes = [SWAP_ACTIVATIONS, START_TRANSFERS, BIND_OUTPUTS, RELEASE_TRANSFERS, BOX_INPUTS]
        for graph_module in (forward, backward):
            run_pipeline(graph_module, passes, inputs, given=frozenset({VALUES_KNOWN}))
        return [dump_graph(graph_module.graph) for graph_module in (forward, backward)]

    return run


@pytest.fixture
def graphs(trace: Function) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a forward that saves a value and returns a result computed from it, and a backward that reads the value."""

    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x)  # anchor 0, x 1, sin 2
        return torch.cos(y) * torch.exp(x), y  # cos 3, exp 4, mul 5, output 6

    def backward(anchor: Tensor, y: Tensor, dy: Tensor) -> Tensor:  # 7, 8, 9
        return torch.mm(torch.exp(dy), y) + 1  # exp 10, mm 11, add 12, output 13

    traced = trace(backward, (2, 2), (2, 2))
    traced.graph.find_nodes(op="placeholder")[1].name = "sin"
    return trace(forward, (2, 2)), traced


def test_a_token_takes_its_place(graphs: tuple[fx.GraphModule, fx.GraphModule], swap: Callable[..., list[str]]) -> None:
    forward, backward = swap(*graphs, SWAP)
    assert_expected_inline(
        forward,
        """\
boxed_inputs = placeholder[boxed_inputs]
anchor_1 = take_input(boxed_inputs, 0)
x_1 = take_input(boxed_inputs, 1)
sin = aten.sin(x_1)
sin_token = zinf.swap_out(sin, 7, sin, nvme, [2, 1])
cos = aten.cos(sin)
exp = aten.exp(x_1)
sin_gone = zinf.wait_swap_out(sin_token, 7)
mul = aten.mul.Tensor(cos, exp)
return (mul, sin_token)
""",
    )
    assert_expected_inline(
        backward,
        """\
boxed_inputs = placeholder[boxed_inputs]
anchor_1 = take_input(boxed_inputs, 0)
sin = take_input(boxed_inputs, 1)
dy_1 = take_input(boxed_inputs, 2)
sin_swap = zinf.issue_swap_in(sin, 7, 8192)
exp = aten.exp(dy_1)
sin_back = zinf.wait_swap_in(sin_swap, 7, 8192, [2, 2], [2, 1], 0, float32, cpu)
mm = aten.mm(exp, sin_back)
add = aten.add.Tensor(mm, 1)
sin_release = zinf.release(sin_swap, 7)
return add
""",
    )


def test_what_rests_in_host_memory_may_be_read_there(
    graphs: tuple[fx.GraphModule, fx.GraphModule], swap: Callable[..., list[str]]
) -> None:
    offload, reload = make_sin()
    there = Swap(
        replace(offload, destination=Tier.HOST),
        replace(reload, source=Tier.HOST, destination=Tier.HOST, issue=reload.need_by, offsets=()),
    )
    forward, backward = swap(*graphs, there)
    assert "sin_token = zinf.swap_out(sin, 7, sin, host, [2, 1])" in forward
    assert_expected_inline(
        backward,
        """\
boxed_inputs = placeholder[boxed_inputs]
anchor_1 = take_input(boxed_inputs, 0)
sin = take_input(boxed_inputs, 1)
dy_1 = take_input(boxed_inputs, 2)
exp = aten.exp(dy_1)
sin_back = zinf.read_swapped(sin, 7, [2, 2], [2, 1], 0, float32, cpu)
mm = aten.mm(exp, sin_back)
add = aten.add.Tensor(mm, 1)
return add
""",
    )


def test_without_swaps_nothing_changes(
    graphs: tuple[fx.GraphModule, fx.GraphModule], swap: Callable[..., list[str]]
) -> None:
    assert all("swap" not in dump for dump in swap(*graphs))


def test_a_way_back_starts_behind_the_inputs(
    graphs: tuple[fx.GraphModule, fx.GraphModule], swap: Callable[..., list[str]]
) -> None:
    _, backward = swap(*graphs, make_sin(issue=7))
    lines = backward.splitlines()
    assert lines.index("sin_swap = zinf.issue_swap_in(sin, 7, 8192)") > max(
        index for index, line in enumerate(lines) if "take_input" in line
    )


def test_each_saved_view_comes_back_as_it_was(trace: Function, swap: Callable[..., list[str]]) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.sin(x)  # sin 2
        _, right = y.t().split(2)  # t 3, split 4, getitem 5, getitem_1 6
        return torch.exp(x), right, y  # exp 7, output 8

    def backward(anchor: Tensor, right: Tensor, y: Tensor) -> Tensor:  # 9, 10, 11
        return torch.mm(torch.cos(right), y)  # cos 12, mm 13, output 14

    traced = trace(backward, (2, 3), (3, 4))
    placeholders = traced.graph.find_nodes(op="placeholder")
    graph_module = trace(forward, (3, 4))
    for placeholder, name in zip(placeholders[1:], ("getitem_1", "sin"), strict=True):
        (saved,) = (node for node in graph_module.graph.nodes if node.name == name)
        value = saved.meta["val"]
        with placeholder.meta["val"].fake_mode:
            view = torch.empty(12).as_strided(value.shape, value.stride(), value.storage_offset())
        placeholder.name, placeholder.meta["val"] = name, view
    first, second = swap(graph_module, traced, make_sin(gone=8, issue=12, need_by=12, release=14))
    assert first.splitlines()[-1] == "return (exp, sin_token, sin_token)"
    assert_expected_inline(
        second,
        """\
boxed_inputs = placeholder[boxed_inputs]
anchor_1 = take_input(boxed_inputs, 0)
getitem_1 = take_input(boxed_inputs, 1)
sin = take_input(boxed_inputs, 2)
sin_swap = zinf.issue_swap_in(getitem_1, 7, 8192)
getitem_1_back = zinf.wait_swap_in(sin_swap, 7, 8192, [2, 3], [1, 4], 2, float32, cpu)
cos = aten.cos(getitem_1_back)
sin_back = zinf.wait_swap_in(sin_swap, 7, 8192, [3, 4], [4, 1], 0, float32, cpu)
mm = aten.mm(cos, sin_back)
sin_release = zinf.release(sin_swap, 7)
return mm
""",
    )


def test_what_is_not_there_is_a_bug_of_ours(
    graphs: tuple[fx.GraphModule, fx.GraphModule], swap: Callable[..., list[str]]
) -> None:
    with pytest.raises(VerifyError, match="'sin' is to be offloaded at tick 3, but is not computed there"):
        swap(*graphs, make_sin(out=3))


def test_a_reader_before_the_value_is_back(
    graphs: tuple[fx.GraphModule, fx.GraphModule], swap: Callable[..., list[str]]
) -> None:
    with pytest.raises(VerifyError, match="'mm' reads 'sin' before it is reloaded, at tick 12"):
        swap(*graphs, make_sin(need_by=12))


def test_a_reader_after_the_release(
    graphs: tuple[fx.GraphModule, fx.GraphModule], swap: Callable[..., list[str]]
) -> None:
    with pytest.raises(VerifyError, match="'mm' reads 'sin_back' after its release"):
        swap(*graphs, make_sin(release=11))


def test_a_reader_when_the_value_is_gone(
    graphs: tuple[fx.GraphModule, fx.GraphModule], swap: Callable[..., list[str]]
) -> None:
    with pytest.raises(
        VerifyError, match=f"property '{SWAPS_GONE.name}' does not hold: 'cos' reads 'sin' after it was offloaded"
    ):
        swap(*graphs, make_sin(gone=3))
