"""START_TRANSFERS: a gather becomes a transfer issued at its tick and a wait before the first reader."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.ops import GATHER, ISSUE_GATHER, WAIT_GATHER
from zinf_compile.passes.contract import NODE_FACTS, NodeFacts
from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.properties import TICKS_IN_ORDER, TRANSFERS_STARTED
from zinf_compile.passes.transforms.lowering.start_transfers import START_TRANSFERS

Function = Callable[..., object]


def test_a_transfer_is_issued_at_its_tick_and_waited_for_before_its_first_reader(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        a = gather(anchor, "a", 4, 4)
        return torch.mm(torch.cos(torch.sin(x)), a)

    graph_module = trace(forward, (2, 4))  # anchor 0, x 1, gather 2, sin 3, cos 4, mm 5
    assert_expected_inline(
        lower(graph_module, [START_TRANSFERS], [make_transfer({"a": 8192}, issue=4, need_by=5, release=6)]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
sin = aten.sin(x_1)
a_transfer = zinf.issue_gather(7, [1], [float32], [8192])
cos = aten.cos(sin)
a = zinf.wait_gather(a_transfer, 7, 8192, [4, 4], float32, cpu)
mm = aten.mm(cos, a)
return mm
""",
    )


def test_an_op_waits_for_its_transfers_in_the_order_in_which_ranks_exchange_them(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        a, b = gather(anchor, "a", 4, 4), gather(anchor, "b", 4, 4)
        return torch.addmm(b, x, a)

    graph_module = trace(forward, (4, 4))  # anchor 0, x 1, gathers 2 and 3, addmm 4
    transfers = [
        make_transfer({name: offset}, issue=2, need_by=4, release=5) for name, offset in (("a", 0), ("b", 4096))
    ]
    text = lower(graph_module, [START_TRANSFERS], transfers)  # the op reads b first
    assert [line.partition(" ")[0] for line in text.splitlines() if "wait_gather" in line] == ["a", "b"]


def test_views_are_made_again_in_each_residency(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        a = gather(anchor, "a", 4, 4)
        turned = a.t()
        y = torch.mm(x, turned)
        return torch.mm(torch.cos(torch.sin(y)), turned)

    graph_module = trace(forward, (2, 4))  # gather 2, t 3, mm 4, sin 5, cos 6, mm 7
    first = make_transfer({"a": 0}, issue=0, need_by=4, release=5)
    second = make_transfer({"a": 4096}, issue=6, need_by=7, release=8)
    assert_expected_inline(
        lower(graph_module, [START_TRANSFERS], [first, second]),
        """\
a_transfer = zinf.issue_gather(7, [1], [float32], [0])
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
a = zinf.wait_gather(a_transfer, 7, 0, [4, 4], float32, cpu)
t_1 = aten.t(a)
mm = aten.mm(x_1, t_1)
sin = aten.sin(mm)
a_transfer_1 = zinf.issue_gather(7, [1], [float32], [4096])
cos = aten.cos(sin)
a_1 = zinf.wait_gather(a_transfer_1, 7, 4096, [4, 4], float32, cpu)
t_2 = aten.t(a_1)
mm_1 = aten.mm(cos, t_2)
return mm_1
""",
    )


def test_a_gather_read_twice_in_one_residency_is_waited_for_once(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        a = gather(anchor, "a", 4, 4)
        return torch.mm(torch.mm(x, a), a)

    graph_module = trace(forward, (2, 4))
    assert_expected_inline(
        lower(graph_module, [START_TRANSFERS], [make_transfer({"a": 0}, issue=3, need_by=3, release=5)]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
a_transfer = zinf.issue_gather(7, [1], [float32], [0])
a = zinf.wait_gather(a_transfer, 7, 0, [4, 4], float32, cpu)
mm = aten.mm(x_1, a)
mm_1 = aten.mm(mm, a)
return mm_1
""",
    )


def test_one_transfer_brings_several_parameters(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(gather(anchor, "b", 4), x, gather(anchor, "a", 4, 4))

    graph_module = trace(forward, (2, 4))
    assert_expected_inline(
        lower(graph_module, [START_TRANSFERS], [make_transfer({"a": 0, "b": 4096}, issue=1, need_by=4, release=5)]),
        """\
anchor_1 = placeholder[anchor_1]
a_b_transfer = zinf.issue_gather(7, [1, 2], [float32, float32], [0, 4096])
x_1 = placeholder[x_1]
b = zinf.wait_gather(a_b_transfer, 7, 4096, [4], float32, cpu)
a = zinf.wait_gather(a_b_transfer, 7, 0, [4, 4], float32, cpu)
addmm = aten.addmm(b, x_1, a)
return addmm
""",
    )


def test_a_transfer_of_experts_is_issued_with_what_says_which_have_rows(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        ends = torch.cumsum(x[0] > 0, 0)  # anchor 0, x 1, select 2, gt 3, cumsum 4
        return torch.mm(torch.sin(x) * ends[0], gather(anchor, "a", 4, 4))

    by_expert = replace(make_transfer({"a": 0}, issue=5, need_by=9, release=10), ends=4)
    assert_expected_inline(
        lower(trace(forward, (2, 4)), [START_TRANSFERS], [by_expert]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
select = aten.select.int(x_1, 0, 0)
gt = aten.gt.Scalar(select, 0)
cumsum = aten.cumsum(gt, 0)
a_transfer = zinf.issue_gather(7, [1], [float32], [0], cumsum)
sin = aten.sin(x_1)
select_1 = aten.select.int(cumsum, 0, 0)
mul = aten.mul.Tensor(sin, select_1)
a = zinf.wait_gather(a_transfer, 7, 0, [4, 4], float32, cpu)
mm = aten.mm(mul, a)
return mm
""",
    )


def test_an_unpacked_split_is_made_again_with_its_list(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        left, right = gather(anchor, "a", 4, 4).split(2)
        return torch.sin(left) + torch.cos(right) + x

    graph_module = trace(forward, (2, 4))  # gather 2, split 3, getitem 4, getitem 5, sin 6, cos 7
    first = make_transfer({"a": 0}, issue=0, need_by=6, release=7)
    second = make_transfer({"a": 0}, issue=7, need_by=7, release=8)
    assert_expected_inline(
        lower(graph_module, [START_TRANSFERS], [first, second]),
        """\
a_transfer = zinf.issue_gather(7, [1], [float32], [0])
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
a = zinf.wait_gather(a_transfer, 7, 0, [4, 4], float32, cpu)
split_1 = aten.split.Tensor(a, 2)
getitem_2 = getitem(split_1, 0)
sin = aten.sin(getitem_2)
a_transfer_1 = zinf.issue_gather(7, [1], [float32], [0])
a_1 = zinf.wait_gather(a_transfer_1, 7, 0, [4, 4], float32, cpu)
split_2 = aten.split.Tensor(a_1, 2)
getitem_3 = getitem(split_2, 1)
cos = aten.cos(getitem_3)
add = aten.add.Tensor(sin, cos)
add_1 = aten.add.Tensor(add, x_1)
return add_1
""",
    )


def test_resident_gathers_stay(trace: Function, lower: Function, gather: Function, make_transfer: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, gather(anchor, "a", 4, 4)), gather(anchor, "b", 4, 4))

    graph_module = trace(forward, (2, 4))
    assert_expected_inline(
        lower(graph_module, [START_TRANSFERS], [make_transfer({"b": 0}, issue=0, need_by=5, release=6)]),
        """\
b_transfer = zinf.issue_gather(7, [2], [float32], [0])
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
gather = zinf.gather(anchor_1, 1, [4, 4], float32, cpu)
mm = aten.mm(x_1, gather)
b = zinf.wait_gather(b_transfer, 7, 0, [4, 4], float32, cpu)
mm_1 = aten.mm(mm, b)
return mm_1
""",
    )


def test_transfers_of_the_other_graph_are_left_to_it(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return torch.mm(x, gather(anchor, "a", 4, 4))

    graph_module = trace(forward, (2, 4))
    here = make_transfer({"a": 0}, issue=0, need_by=3, release=4)
    lower(graph_module, [START_TRANSFERS], [here, make_transfer({"a": 0}, issue=9, need_by=9, release=10)])
    assert len(graph_module.graph.find_nodes(op="call_function", target=ISSUE_GATHER)) == 1


def test_a_reader_that_no_transfer_covers_is_named(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return torch.mm(x, gather(anchor, "a", 4, 4))

    late = make_transfer({"a": 0}, issue=0, need_by=4, release=5)
    with pytest.raises(VerifyError, match=r"'mm' reads 'a' at tick 3, where no transfer holds it"):
        lower(trace(forward, (2, 4)), [START_TRANSFERS], [late])


def test_every_node_made_has_its_fake_value(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return torch.mm(x, gather(anchor, "a", 8, 4).t())

    graph_module = trace(forward, (2, 4))
    lower(graph_module, [START_TRANSFERS], [make_transfer({"a": 0}, issue=0, need_by=4, release=5)])
    (wait,) = graph_module.graph.find_nodes(op="call_function", target=WAIT_GATHER)
    (turned,) = wait.users
    assert tuple(wait.meta["val"].shape) == (8, 4)
    assert tuple(turned.meta["val"].shape) == (4, 8)


def test_a_wait_on_anything_but_an_issue_is_refused(trace: Function) -> None:
    def forward(anchor: Tensor, ticket: Tensor) -> Tensor:
        waited = WAIT_GATHER(ticket, 7, 0, [2], torch.float32, torch.device("cpu"))
        return waited + 1

    with pytest.raises(VerifyError, match=r"wait 'wait_gather' does not depend on an issue_gather but on 'ticket_1'"):
        TRANSFERS_STARTED.check(trace(forward, (1,)))


def test_ticks_out_of_order_are_refused(trace: Function) -> None:
    graph_module: fx.GraphModule = trace(lambda anchor, x: torch.cos(torch.sin(x)), (2,))
    for tick, node in zip((0, 1, 3, 2, 4), graph_module.graph.nodes, strict=True):
        node.meta[NODE_FACTS] = NodeFacts(tick=tick)
    with pytest.raises(VerifyError, match="node 'cos' of tick 2 comes after tick 3"):
        TICKS_IN_ORDER.check(graph_module)


def test_the_dump_shows_targets_arguments_and_keywords() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.empty.memory_format, ([2, 3],), {"dtype": torch.float32})
    gathered = graph.call_function(GATHER, (x, 1, [2], torch.bfloat16, torch.device("cpu")))
    graph.output((made, gathered))
    assert_expected_inline(
        dump_graph(graph),
        """\
x = placeholder[x]
empty_memory_format = aten.empty.memory_format([2, 3], dtype=float32)
gather_default = zinf.gather(x, 1, [2], bfloat16, cpu)
return (empty_memory_format, gather_default)
""",
    )


def test_what_the_caller_gets_outlives_the_arena(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        a = gather(anchor, "a", 4, 4)
        return torch.mm(x, a), a.t()

    graph_module = trace(forward, (2, 4))
    assert_expected_inline(
        lower(graph_module, [START_TRANSFERS], [make_transfer({"a": 0}, issue=0, need_by=3, release=4)]),
        """\
a_transfer = zinf.issue_gather(7, [1], [float32], [0])
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
gather = zinf.gather(anchor_1, 1, [4, 4], float32, cpu)
a = zinf.wait_gather(a_transfer, 7, 0, [4, 4], float32, cpu)
mm = aten.mm(x_1, a)
t = aten.t(gather)
return (mm, t)
""",
    )
