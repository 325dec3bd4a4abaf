"""Every invalid plan is caught, and the message names what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.hand_made_plans import narrow, with_transfers
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.facts import UseFact
from zinf_compile.ir.glossary import LiveRange, Phase, Tier
from zinf_compile.ir.plan import BoundValue, Placement, Plan, TierPlan
from zinf_compile.ir.transfers import Swap, Transfer
from zinf_compile.passes.planner.search.verify import verify_plan


def _with_transfer(plan: Plan, index: int, **changes: Any) -> Plan:
    gathers = list(plan.gathers)
    gathers[index] = replace(gathers[index], **changes)
    return with_transfers(plan, gathers=gathers)


def _with_tier(plan: Plan, tier: Tier, change: Callable[[TierPlan], TierPlan]) -> Plan:
    return replace(plan, tiers=tuple(change(item) if item.tier is tier else item for item in plan.tiers))


def _with_swap(plan: Plan, *, offload: dict[str, Any] | None = None, reload: dict[str, Any] | None = None) -> Plan:
    swap = plan.swaps[0]
    return with_transfers(
        plan, swaps=[Swap(replace(swap.offload, **(offload or {})), replace(swap.reload, **(reload or {})))]
    )


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
        item.moved({Role.COMPUTE: Tier.DEVICE}) if item.parameter == "layers.1.weight" else item
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
    _refused(_with_transfer(small_plan, 1, offsets=(offset,)), "'layers.1'.*leave the arena of 512")


def test_a_parameter_outside_of_its_transfer(small_plan: Plan) -> None:
    _refused(_with_transfer(small_plan, 1, nbytes=199), "'layers.1.weight' at offset 256 does not fit its transfer")


def test_a_transfer_that_nothing_reads(small_plan: Plan) -> None:
    plan = replace(small_plan, uses=small_plan.uses[:-1])
    _refused(plan, "'layers.1' .*: 'layers.1.weight' is gathered, but nothing reads it")


def test_a_transfer_moves_the_copy_in_the_dtype_that_is_read(small_plan: Plan) -> None:
    narrowed = tuple(
        narrow(item).moved({Role.COMPUTE: Tier.HOST}) if item.parameter == "layers.0.weight" else item
        for item in small_plan.placements
    )
    plan = replace(small_plan, placements=narrowed)
    verify_plan(plan)  # it reads float32, the master copy, whose home is nvme
    uses = tuple(
        replace(use, dtype="bfloat16") if use.parameter == "layers.0.weight" else use for use in small_plan.uses
    )
    _refused(replace(plan, uses=uses), "'layers.0.weight' lives on host, not on nvme")


def _with_half_a_compute_copy(placement: Placement) -> Placement:
    (compute,) = placement.by_role[Role.COMPUTE]
    half = replace(compute, slice=compute.slice.part(0, compute.slice.length // 2))
    return replace(placement, copies=(half, *placement.copies[1:]))


def test_parameters_of_one_transfer_that_share_bytes(small_plan: Plan) -> None:
    placements = tuple(
        _with_half_a_compute_copy(item) if item.parameter.endswith("weight") else item
        for item in small_plan.placements
        if item.parameter != "embed.weight"
    )
    tiers = _with_tier(
        small_plan,
        Tier.DEVICE,
        lambda item: replace(item, predicted_peak=688, parts=(("arena", 512), ("activations", 160), ("residents", 16))),
    ).tiers
    both = replace(small_plan.gathers[0], parameters=("layers.0.weight", "layers.1.weight"), offsets=(0, 99))
    uses = tuple(UseFact(parameter=name, dtype="float32", ticks=(1,)) for name in both.parameters)
    plan = replace(small_plan, placements=placements, tiers=tiers, transfers=(both,), uses=uses)
    _refused(plan, "'layers.1.weight' at offset 99 does not fit its transfer")
    verify_plan(replace(plan, transfers=(replace(both, offsets=(0, 100)),)))


def test_a_transfer_from_where_the_parameter_does_not_live(small_plan: Plan) -> None:
    _refused(_with_transfer(small_plan, 1, source=Tier.HOST), "'layers.1.weight' lives on nvme, not on host")


def test_two_live_transfers_on_one_byte(small_plan: Plan) -> None:
    plan = _with_transfer(small_plan, 1, offsets=(199,))
    _refused(plan, r"'layers.0' and .*'layers.1' are both live at tick 1 and share arena bytes \[199, 200\)")


def test_bytes_may_be_taken_at_the_tick_they_are_free(small_plan: Plan) -> None:
    verify_plan(_with_transfer(small_plan, 1, issue=3, offsets=(0,)))


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
    plan = with_transfers(small_plan, gathers=small_plan.gathers[1:])
    _refused(plan, "'layers.0.weight' is read at tick 1, where 0 transfers hold it instead of one")


def test_a_read_before_the_transfer_is_waited_for(small_plan: Plan) -> None:
    plan = _with_transfer(small_plan, 0, need_by=2)
    _refused(plan, "'layers.0.weight' is read at tick 1, where 0 transfers")


def test_a_read_after_the_release(small_plan: Plan) -> None:
    plan = _with_transfer(small_plan, 0, release=2)
    _refused(plan, "'layers.0.weight' is read at tick 2, where 0 transfers")


def test_a_read_of_two_transfers_at_once(small_plan: Plan) -> None:
    twice: Transfer = replace(small_plan.gathers[0], offsets=(256,), issue=1)
    plan = _with_transfer(small_plan, 1, issue=3)
    _refused(
        with_transfers(plan, gathers=(*plan.gathers, twice)),
        "'layers.0.weight' is read at tick 1, where 2 transfers hold it instead of one",
    )


def test_a_resident_needs_no_transfer(small_plan: Plan) -> None:
    uses = (*small_plan.uses, UseFact(parameter="layers.0.bias", dtype="float32", ticks=(1, 5, 11)))
    verify_plan(replace(small_plan, uses=uses))


@pytest.mark.parametrize(("out", "gone"), [(-1, 5), (2, 2), (2, 6)])
def test_a_swap_that_does_not_leave_within_forward(swapping_plan: Plan, out: int, gone: int) -> None:
    verify_plan(swapping_plan)
    plan = _with_swap(swapping_plan, offload={"issue": out + 1, "need_by": gone})
    _refused(
        plan, f"swap of 'gelu_1': it is offloaded after tick {out} and waited for at {gone}, in a forward of 6 ticks"
    )


@pytest.mark.parametrize("changes", [{"issue": 5}, {"issue": 11}, {"need_by": 8}, {"release": 10}, {"release": 13}])
def test_a_swap_whose_ticks_are_out_of_order(swapping_plan: Plan, changes: dict[str, int]) -> None:
    _refused(
        _with_swap(swapping_plan, reload=changes),
        r"swap of 'gelu_1': issue .* out of order, or not in backward.*\[6, 12",
    )


def test_a_swap_to_the_device(small_plan: Plan, swapping_plan: Plan) -> None:
    plan = replace(_with_swap(swapping_plan, offload={"destination": Tier.DEVICE}), tiers=small_plan.tiers)
    _refused(plan, "swap of 'gelu_1': it is offloaded to the device itself")


def test_a_swap_that_is_not_counted_where_it_rests(swapping_plan: Plan) -> None:
    message = "part 'swapped activations' says 24 bytes, the plan's swaps keep 48 there"
    _refused(_with_swap(swapping_plan, offload={"nbytes": 48}), f"host: {message}")
    _refused(
        _with_swap(swapping_plan, offload={"destination": Tier.NVME}),
        "host: .* says 24 bytes, the plan's swaps keep 0 there",
    )


def test_a_value_that_is_swapped_twice(swapping_plan: Plan) -> None:
    half = Swap(*(replace(transfer, nbytes=12) for transfer in swapping_plan.swaps[0]))
    _refused(with_transfers(swapping_plan, swaps=(half, half)), "swap of 'gelu_1': it is offloaded more than once")


def test_an_offload_without_its_reload(swapping_plan: Plan) -> None:
    transfers = swapping_plan.transfers
    lost = tuple(transfer for transfer in transfers if not transfer.is_reload)
    _refused(replace(swapping_plan, transfers=lost), "swap of 'gelu_1': it is offloaded 1 times and reloaded 0 times")


def test_a_reload_from_where_the_value_does_not_rest(swapping_plan: Plan) -> None:
    plan = _with_swap(swapping_plan, reload={"source": Tier.NVME})
    _refused(plan, "swap of 'gelu_1': 24 bytes are offloaded to host, and 24 are reloaded from nvme")


def test_transfers_in_another_order(small_plan: Plan) -> None:
    plan = replace(small_plan, transfers=small_plan.transfers[::-1])
    _refused(plan, "the transfers are not in the order in which they are issued")


def test_a_swap_back_to_bytes_of_a_live_value(swapping_plan: Plan) -> None:
    plan = _with_swap(swapping_plan, reload={"offsets": (487,)})
    _refused(
        plan, r"value 'mm_1' and swapped value 'gelu_1' are both live at tick 9 and share arena bytes \[487, 488\)"
    )
    _refused(_with_swap(swapping_plan, reload={"offsets": (489,)}), "swapped value 'gelu_1'.* leave the arena of 512")


@pytest.mark.parametrize("tick", [5, 12])
def test_a_gradient_that_leaves_outside_of_backward(small_plan: Plan, tick: int) -> None:
    sinks = (replace(small_plan.sinks[0], issue=tick + 1), *small_plan.sinks[1:])
    _refused(with_transfers(small_plan, sinks=sinks), f"gradient of 'layers.1.weight' is offloaded at tick {tick}")


def test_a_gradient_that_goes_elsewhere(small_plan: Plan) -> None:
    sinks = (replace(small_plan.sinks[0], destination=Tier.HOST), *small_plan.sinks[1:])
    _refused(
        with_transfers(small_plan, sinks=sinks), "gradient of 'layers.1.weight' goes to host, which is not its home"
    )


def test_a_phase_is_forward_until_backward_begins(small_plan: Plan) -> None:
    assert [small_plan.schedule.phase_of(tick) for tick in (0, 5, 6, 11)] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2
