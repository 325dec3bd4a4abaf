"""Transfers in the order of issue, and found by tick and by parameter."""

from dataclasses import replace

import pytest

from tests.support.hand_made_plans import make_swap
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.transfers import Moved, TransferIndex, order_transfers, pair_swaps


def test_the_views_of_a_plan_are_all_of_its_transfers(swapping_plan: Plan) -> None:
    plan = swapping_plan
    swaps = [transfer for swap in plan.swaps for transfer in swap]
    assert order_transfers([*swaps, *plan.sinks, *plan.gathers]) == plan.transfers
    assert [transfer.issue for transfer in plan.transfers] == sorted(transfer.issue for transfer in plan.transfers)


def test_what_leaves_is_issued_before_what_arrives(small_plan: Plan) -> None:
    swap = make_swap("gelu", Tier.HOST, 8, out=8, gone=9, issue=9, need_by=9, release=10)
    gather, sink = replace(small_plan.gathers[3], issue=9), small_plan.sinks[0]
    ordered = order_transfers([swap.reload, gather, swap.offload, sink])
    assert ordered == (sink, swap.offload, gather, swap.reload)


def test_equal_transfers_stay_in_the_order_given(small_plan: Plan) -> None:
    first, second = (replace(gather, issue=0) for gather in small_plan.gathers[:2])
    assert order_transfers([second, first]) == (second, first)


def test_a_gather_holds_its_parameters_from_its_wait_to_its_release(small_plan: Plan) -> None:
    index, first = small_plan.by_tick, small_plan.gathers[0]
    assert [bool(index.holding("layers.0.weight", tick)) for tick in range(4)] == [False, True, True, False]
    assert index.holding("layers.0.weight", 1) == [first]
    assert index.holding("embed.weight", 1) == []
    assert index.gathers_of("layers.0.weight") == [first, small_plan.gathers[3]]
    assert index.gathered == {"layers.0.weight", "layers.1.weight"}


def test_transfers_by_the_tick_of_their_issue(small_plan: Plan) -> None:
    index = small_plan.by_tick
    assert sum(len(index.issued_at(tick)) for tick in range(small_plan.num_ticks + 1)) == len(small_plan.transfers)
    assert [transfer.label for transfer in index.issued_at(9)] == ["gradient layers.1.weight"]
    assert index.issued_at(5) == ()
    assert TransferIndex(()).gathered == frozenset()


def test_an_activation_is_one_swap_of_two_transfers(swapping_plan: Plan) -> None:
    (swap,) = pair_swaps(swapping_plan.transfers)
    assert (swap.value, swap.rests_on, swap.nbytes) == ("gelu_1", Tier.HOST, 24)
    assert (swap.offload.label, swap.reload.label) == ("gelu_1 out", "gelu_1 back")
    assert swap.offload.made_at == 2


@pytest.mark.parametrize(("destination", "stays"), [(Tier.DEVICE, True), (Tier.HOST, False)])
def test_a_gradient_whose_home_is_the_device_stays(small_plan: Plan, destination: Tier, stays: bool) -> None:
    sink = replace(small_plan.sinks[0], destination=destination)
    assert (sink.what, sink.stays) == (Moved.GRADIENT, stays)
