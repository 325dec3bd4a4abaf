"""RELEASE_TRANSFERS: the bytes of every transfer are released after the last node that reads them."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.ops import ISSUE_GATHER, RELEASE, WAIT_GATHER
from zinf_compile.passes.properties import TRANSFERS_RELEASED
from zinf_compile.passes.transforms.lowering.release_transfers import RELEASE_TRANSFERS
from zinf_compile.passes.transforms.lowering.start_transfers import START_TRANSFERS

Function = Callable[..., object]


def test_a_release_follows_the_last_reader(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        a = gather(anchor, "a", 4, 4)
        return torch.sin(torch.mm(torch.mm(x, a), a))

    graph_module = trace(forward, (2, 4))  # gather 2, mm 3, mm 4, sin 5
    assert_expected_inline(
        lower(
            graph_module,
            [START_TRANSFERS, RELEASE_TRANSFERS],
            [make_transfer({"a": 0}, issue=0, need_by=3, release=5)],
        ),
        """\
a_transfer = zinf.issue_gather(7, [1], [float32], [0])
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
a = zinf.wait_gather(a_transfer, 7, 0, [4, 4], float32, cpu)
mm = aten.mm(x_1, a)
mm_1 = aten.mm(mm, a)
a_release = zinf.release(a_transfer, 7)
sin = aten.sin(mm_1)
return sin
""",
    )


def test_a_reader_through_views_keeps_the_bytes(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        turned = gather(anchor, "a", 4, 4).t()
        y = torch.mm(x, turned)
        return torch.mm(torch.sin(y), turned.view(4, 2, 2).flatten(1))

    graph_module = trace(forward, (2, 4))
    last = next(node for node in graph_module.graph.nodes if node.op == "output").prev
    tick = list(graph_module.graph.nodes).index(last)
    dump = lower(
        graph_module,
        [START_TRANSFERS, RELEASE_TRANSFERS],
        [make_transfer({"a": 0}, issue=0, need_by=4, release=tick + 1)],
    )
    assert_expected_inline(
        dump,
        """\
a_transfer = zinf.issue_gather(7, [1], [float32], [0])
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
a = zinf.wait_gather(a_transfer, 7, 0, [4, 4], float32, cpu)
t_1 = aten.t(a)
mm = aten.mm(x_1, t_1)
sin = aten.sin(mm)
view_3 = aten.view(t_1, [4, 2, 2])
view_2 = aten.view(view_3, [4, 4])
mm_1 = aten.mm(sin, view_2)
a_release = zinf.release(a_transfer, 7)
return mm_1
""",
    )


def test_a_transfer_to_the_end_is_released_before_the_output(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return torch.mm(x, gather(anchor, "a", 4, 4))

    dump = lower(
        trace(forward, (2, 4)),
        [START_TRANSFERS, RELEASE_TRANSFERS],
        [make_transfer({"a": 0}, issue=0, need_by=3, release=5)],
    )
    assert dump.splitlines()[-2:] == ["a_release = zinf.release(a_transfer, 7)", "return mm"]


def test_the_pass_needs_started_transfers(trace: Function, lower: Function, gather: Function) -> None:
    with pytest.raises(VerifyError, match="pass 'release_transfers' requires transfers_started"):
        lower(trace(lambda anchor, x: torch.sin(x), (2,)), [RELEASE_TRANSFERS])


def _read(ticket: Tensor) -> Tensor:
    waited: Tensor = WAIT_GATHER(ticket, 7, 0, [4, 4], torch.float32, torch.device("cpu"))
    return waited


def test_a_reader_after_the_release_is_named(trace: Function) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        ticket = ISSUE_GATHER(7, [1], ["float32"], [0])
        waited = _read(ticket)
        y = torch.mm(x, waited)
        RELEASE(ticket, 7)
        return torch.mm(y, torch.sin(waited))

    with pytest.raises(VerifyError, match="'sin' reads 'wait_gather' after its release"):
        TRANSFERS_RELEASED.check(trace(forward, (2, 4)))


@pytest.mark.parametrize("view", ["t", "split"])
def test_a_reader_of_a_view_after_the_release_is_named(trace: Function, view: str) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        ticket = ISSUE_GATHER(7, [1], ["float32"], [0])
        waited = _read(ticket)
        seen = waited.t() if view == "t" else waited.split(2)[0]
        RELEASE(ticket, 7)
        return torch.sin(seen)

    with pytest.raises(VerifyError, match="'sin' reads 'wait_gather' after its release"):
        TRANSFERS_RELEASED.check(trace(forward, (2, 4)))


@pytest.mark.parametrize("num_releases", [0, 2])
def test_a_transfer_is_released_once(trace: Function, num_releases: int) -> None:
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        ticket = ISSUE_GATHER(7, [1], ["float32"], [0])
        y = torch.mm(x, _read(ticket))
        for _ in range(num_releases):
            RELEASE(ticket, 7)
        return y

    message = f"transfer 'issue_gather' is released {num_releases} times instead of once"
    with pytest.raises(VerifyError, match=message):
        TRANSFERS_RELEASED.check(trace(forward, (2, 4)))


def test_a_release_comes_before_an_issue_at_its_tick(
    trace: Function, lower: Function, gather: Function, make_transfer: Function
) -> None:
    """The plan may give the same bytes to the next transfer."""

    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        a, b = gather(anchor, "a", 4, 4), gather(anchor, "b", 4, 4)
        return torch.mm(torch.mm(x, a), b)

    graph_module = trace(forward, (2, 4))  # gather 2, gather 3, mm 4, mm 5
    first = make_transfer({"a": 0}, issue=4, need_by=4, release=5)
    second = make_transfer({"b": 0}, issue=5, need_by=5, release=6)
    assert_expected_inline(
        lower(graph_module, [START_TRANSFERS, RELEASE_TRANSFERS], [first, second]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
a_transfer = zinf.issue_gather(7, [1], [float32], [0])
a = zinf.wait_gather(a_transfer, 7, 0, [4, 4], float32, cpu)
mm = aten.mm(x_1, a)
a_release = zinf.release(a_transfer, 7)
b_transfer = zinf.issue_gather(7, [2], [float32], [0])
b = zinf.wait_gather(b_transfer, 7, 0, [4, 4], float32, cpu)
mm_1 = aten.mm(mm, b)
b_release = zinf.release(b_transfer, 7)
return mm_1
""",
    )


def test_reading_the_result_of_a_reader_is_not_reading(trace: Function) -> None:
    """An out variant returns an alias of its ``out`` memory, not of its inputs."""

    def forward(anchor: Tensor, x: Tensor, memory: Tensor) -> Tensor:
        ticket = ISSUE_GATHER(7, [1], ["float32"], [0])
        product = torch.ops.aten.mm.out(x, _read(ticket), out=memory)
        RELEASE(ticket, 7)
        return torch.sin(product)

    graph = trace(forward, (2, 4), (2, 4))
    TRANSFERS_RELEASED.check(graph)
