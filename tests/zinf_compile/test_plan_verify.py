"""Every broken promise of a plan is caught, and the message names the culprit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zinf_compile.errors import VerifyError
from zinf_compile.facts import UseFact
from zinf_compile.plan_verify import verify_plan
from zinf_compile.plans import BoundValue, GatherTransfer, Plan, TierPlan
from zinf_compile.terms import LiveRange, Phase, Tier


def _with_transfer(plan: Plan, index: int, **changes: Any) -> Plan:
    transfers = list(plan.transfers)
    transfers[index] = replace(transfers[index], **changes)
    return replace(plan, transfers=tuple(transfers))


def _with_tier(plan: Plan, tier: Tier, change: Callable[[TierPlan], TierPlan]) -> Plan:
    return replace(plan, tiers=tuple(change(item) if item.tier is tier else item for item in plan.tiers))


def _with_swap(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, swaps=(replace(plan.swaps[0], **changes),))


def _refused(plan: Plan, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_plan(plan)


def test_the_plan_that_is_broken_below_holds(small_plan: Plan, layered_plan: Plan) -> None:
    verify_plan(small_plan)
    verify_plan(layered_plan)


@pytest.mark.parametrize("tier", Tier)
def test_a_peak_that_is_not_the_sum_of_its_parts(small_plan: Plan, tier: Tier) -> None:
    plan = _with_tier(small_plan, tier, lambda item: replace(item, predicted_peak=item.predicted_peak + 1))
    _refused(plan, f"{tier}: the parts add up to")


def test_a_peak_over_its_capacity(small_plan: Plan) -> None:
    plan = _with_tier(small_plan, Tier.HOST, lambda item: replace(item, capacity=1039))
    _refused(plan, "host: predicted peak 1.0 KiB is over its capacity")


@pytest.mark.parametrize("part", ["arena", "activations", "residents"])
def test_a_device_part_that_is_not_what_the_plan_needs(small_plan: Plan, part: str) -> None:
    def shrink(item: TierPlan) -> TierPlan:
        parts = tuple((name, nbytes - (1 if name == part else 0)) for name, nbytes in item.parts)
        return replace(item, parts=parts, predicted_peak=item.predicted_peak - 1)

    _refused(_with_tier(small_plan, Tier.DEVICE, shrink), f"device: part '{part}' says")


def test_a_resident_that_is_not_counted(small_plan: Plan) -> None:
    placements = tuple(
        replace(item, compute=Tier.DEVICE, master=Tier.DEVICE) if item.parameter == "layers.1.weight" else item
        for item in small_plan.placements
    )
    _refused(replace(small_plan, placements=placements), "device: part 'residents' says 80 bytes, the plan needs 280")


def test_a_hole_between_spans(small_plan: Plan) -> None:
    plan = replace(small_plan, spans=(*small_plan.spans[:2], *small_plan.spans[3:]))
    _refused(plan, r"span of loss covers \[5, 6\), expected it to begin at 3")


def test_spans_that_end_early(small_plan: Plan) -> None:
    _refused(replace(small_plan, spans=small_plan.spans[:-1]), "spans end at tick 11, the graph has 12 ticks")


def test_an_empty_span(small_plan: Plan) -> None:
    empty = replace(small_plan.spans[0], end=0)
    _refused(replace(small_plan, spans=(empty, *small_plan.spans[1:])), r"span of embed covers \[0, 0\)")


@pytest.mark.parametrize(
    "changes",
    [{"issue": -1}, {"issue": 4, "need_by": 3}, {"release": 3}, {"need_by": 5}, {"release": 13}],
    ids=str,
)
def test_a_transfer_out_of_order(small_plan: Plan, changes: dict[str, int]) -> None:
    _refused(_with_transfer(small_plan, 1, **changes), "transfer 'layers.1' .*out of order")


def test_a_transfer_that_reaches_into_backward(small_plan: Plan) -> None:
    _refused(_with_transfer(small_plan, 1, release=7), "'layers.1' .*reaches beyond its phase, from tick 1 to 7")


def test_a_transfer_issued_in_forward_for_backward(small_plan: Plan) -> None:
    _refused(_with_transfer(small_plan, 2, issue=5), r"'layers.1' \(backward.*reaches beyond its phase")


@pytest.mark.parametrize("offset", [-1, 313])
def test_a_transfer_outside_of_the_arena(small_plan: Plan, offset: int) -> None:
    _refused(_with_transfer(small_plan, 1, offset=offset, offsets=(offset,)), "'layers.1'.*leave the arena of 512")


def test_a_parameter_outside_of_its_transfer(small_plan: Plan) -> None:
    _refused(_with_transfer(small_plan, 1, offsets=(257,)), "'layers.1.weight' at offset 257 does not fit its transfer")


def test_a_transfer_that_nothing_reads(small_plan: Plan) -> None:
    plan = replace(small_plan, uses=small_plan.uses[:-1])
    _refused(plan, "'layers.1' .*: 'layers.1.weight' moves, and nothing reads it")


def test_a_transfer_moves_the_copy_in_the_dtype_that_is_read(small_plan: Plan) -> None:
    narrowed = tuple(
        replace(item, compute_dtype="bfloat16", compute_nbytes=100, compute=Tier.HOST, master_nbytes=200)
        if item.parameter == "layers.0.weight"
        else item
        for item in small_plan.placements
    )
    plan = replace(small_plan, placements=narrowed)
    verify_plan(plan)  # it reads float32: the master copy, at home on nvme
    uses = tuple(
        replace(use, dtype="bfloat16") if use.parameter == "layers.0.weight" else use for use in small_plan.uses
    )
    _refused(replace(plan, uses=uses), "'layers.0.weight' lives on host, not on nvme")


def test_parameters_of_one_transfer_that_share_bytes(small_plan: Plan) -> None:
    placements = tuple(
        replace(item, compute_nbytes=100) if item.parameter.endswith("weight") else item
        for item in small_plan.placements
        if item.parameter != "embed.weight"
    )
    tiers = _with_tier(
        small_plan,
        Tier.DEVICE,
        lambda item: replace(item, predicted_peak=688, parts=(("arena", 512), ("activations", 160), ("residents", 16))),
    ).tiers
    both = replace(
        small_plan.transfers[0], parameters=("layers.0.weight", "layers.1.weight"), offsets=(0, 99), offset=0
    )
    uses = tuple(UseFact(parameter=name, dtype="float32", ticks=(1,)) for name in both.parameters)
    plan = replace(small_plan, placements=placements, tiers=tiers, transfers=(both,), uses=uses, sinks=())
    _refused(plan, "'layers.1.weight' at offset 99 does not fit its transfer")
    verify_plan(replace(plan, transfers=(replace(both, offsets=(0, 100)),)))


def test_a_transfer_from_where_the_parameter_does_not_live(small_plan: Plan) -> None:
    _refused(_with_transfer(small_plan, 1, source=Tier.HOST), "'layers.1.weight' lives on nvme, not on host")


def test_two_live_transfers_on_one_byte(small_plan: Plan) -> None:
    plan = _with_transfer(small_plan, 1, offset=199, offsets=(199,))
    _refused(plan, r"'layers.0' and .*'layers.1' are both live at tick 1 and share arena bytes \[199, 200\)")


def test_bytes_may_be_taken_at_the_tick_they_are_free(small_plan: Plan) -> None:
    verify_plan(_with_transfer(small_plan, 1, issue=3, offset=0, offsets=(0,)))


def test_a_bound_value_on_bytes_of_a_live_transfer(small_plan: Plan) -> None:
    value = BoundValue(name="mm", offset=100, nbytes=100, live=LiveRange(start=2, end=3))
    plan = replace(small_plan, bound=(value,))
    _refused(plan, r"transfer 'layers.0' and value 'mm' are both live at tick 2 and share arena bytes \[100, 200\)")
    verify_plan(replace(plan, bound=(replace(value, live=LiveRange(start=3, end=7)),)))


def test_two_bound_values_on_one_byte(small_plan: Plan) -> None:
    first = BoundValue(name="mm", offset=456, nbytes=50, live=LiveRange(start=0, end=3))
    second = BoundValue(name="add", offset=505, nbytes=7, live=LiveRange(start=2, end=4))
    _refused(replace(small_plan, bound=(first, second)), r"value 'mm' and value 'add' .*\[505, 506\)")


def test_a_bound_value_outside_of_the_arena(small_plan: Plan) -> None:
    value = BoundValue(name="mm", offset=500, nbytes=13, live=LiveRange(start=2, end=3))
    _refused(replace(small_plan, bound=(value,)), "value 'mm'.* leave the arena of 512")


def test_a_read_without_a_transfer(small_plan: Plan) -> None:
    plan = replace(small_plan, transfers=small_plan.transfers[1:])
    _refused(plan, "'layers.0.weight' is read at tick 1, where 0 transfers hold it instead of one")


def test_a_read_before_the_transfer_is_waited_for(small_plan: Plan) -> None:
    plan = _with_transfer(small_plan, 0, need_by=2)
    _refused(plan, "'layers.0.weight' is read at tick 1, where 0 transfers")


def test_a_read_after_the_release(small_plan: Plan) -> None:
    plan = _with_transfer(small_plan, 0, release=2)
    _refused(plan, "'layers.0.weight' is read at tick 2, where 0 transfers")


def test_a_read_of_two_transfers_at_once(small_plan: Plan) -> None:
    twice: GatherTransfer = replace(small_plan.transfers[0], offset=256, offsets=(256,), issue=1)
    plan = _with_transfer(small_plan, 1, issue=3)
    _refused(
        replace(plan, transfers=(*plan.transfers, twice)),
        "'layers.0.weight' is read at tick 1, where 2 transfers hold it instead of one",
    )


def test_a_resident_needs_no_transfer(small_plan: Plan) -> None:
    uses = (*small_plan.uses, UseFact(parameter="layers.0.bias", dtype="float32", ticks=(1, 5, 11)))
    verify_plan(replace(small_plan, uses=uses))


@pytest.mark.parametrize(("out", "gone"), [(-1, 5), (2, 2), (2, 6)])
def test_a_swap_that_does_not_leave_within_forward(swapping_plan: Plan, out: int, gone: int) -> None:
    verify_plan(swapping_plan)
    plan = _with_swap(swapping_plan, out=out, gone=gone)
    _refused(plan, f"swap of 'gelu_1': it leaves after tick {out} and is gone by {gone}, in a forward of 6 ticks")


@pytest.mark.parametrize("changes", [{"issue": 5}, {"issue": 11}, {"need_by": 8}, {"release": 10}, {"release": 13}])
def test_a_swap_whose_ticks_are_out_of_order(swapping_plan: Plan, changes: dict[str, int]) -> None:
    _refused(
        _with_swap(swapping_plan, **changes), r"swap of 'gelu_1': issue .* out of order, or not in backward.*\[6, 12"
    )


def test_a_swap_to_the_device(small_plan: Plan, swapping_plan: Plan) -> None:
    plan = replace(_with_swap(swapping_plan, destination=Tier.DEVICE), tiers=small_plan.tiers)
    _refused(plan, "swap of 'gelu_1': it goes to the device")


def test_a_swap_that_is_not_counted_where_it_rests(swapping_plan: Plan) -> None:
    message = "part 'swapped activations' says 24 bytes, the plan's swaps rest 48 there"
    _refused(_with_swap(swapping_plan, nbytes=48), f"host: {message}")
    _refused(_with_swap(swapping_plan, destination=Tier.NVME), "host: .* says 24 bytes, the plan's swaps rest 0 there")


def test_a_value_that_is_swapped_twice(swapping_plan: Plan) -> None:
    half = replace(swapping_plan.swaps[0], nbytes=12)
    _refused(replace(swapping_plan, swaps=(half, half)), "swap of 'gelu_1': it leaves more than once")


def test_a_swap_back_to_bytes_of_a_live_value(swapping_plan: Plan) -> None:
    plan = _with_swap(swapping_plan, offset=487)
    _refused(
        plan, r"value 'mm_1' and swapped value 'gelu_1' are both live at tick 9 and share arena bytes \[487, 488\)"
    )
    _refused(_with_swap(swapping_plan, offset=489), "swapped value 'gelu_1'.* leave the arena of 512")


@pytest.mark.parametrize("tick", [5, 12])
def test_a_gradient_that_leaves_outside_of_backward(small_plan: Plan, tick: int) -> None:
    sinks = (replace(small_plan.sinks[0], tick=tick), *small_plan.sinks[1:])
    _refused(replace(small_plan, sinks=sinks), f"gradient of 'layers.1.weight' leaves at tick {tick}")


def test_a_gradient_that_goes_elsewhere(small_plan: Plan) -> None:
    sinks = (replace(small_plan.sinks[0], destination=Tier.HOST), *small_plan.sinks[1:])
    _refused(replace(small_plan, sinks=sinks), "gradient of 'layers.1.weight' goes to host, which is not its home")


def test_a_phase_is_forward_until_backward_begins(small_plan: Plan) -> None:
    assert [small_plan.phase_of(tick) for tick in (0, 5, 6, 11)] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2
