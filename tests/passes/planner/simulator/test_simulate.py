"""Timelines computed by hand. Nothing here is measured: rates are chosen so that seconds are small whole numbers."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.support.hand_made_plans import make_sink, with_transfers
from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import Phase, StepTiming, Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import COMPUTE_LANE, Event, Timeline, simulate


def spell(events: tuple[Event, ...], lane: str) -> list[tuple[str, float, float]]:
    return [(event.name, event.start_seconds, event.end_seconds) for event in events if event.lane == lane]


def make_inference(plan: Plan, *transfers: Transfer) -> Plan:
    """Return the forward half of a plan, with these transfers."""
    return replace(
        plan,
        schedule=Schedule.of_one_graph(6, 6),
        spans=tuple(span for span in plan.spans if span.phase is Phase.FORWARD),
        transfers=transfers,
    )


def check_consistent(timeline: Timeline) -> None:
    """Assert the properties of every timeline: no overlap within a lane, and phases that add up."""
    lanes: dict[str, list[Event]] = defaultdict(list)
    for event in (*timeline.events, *timeline.stalls):
        assert 0 <= event.start_seconds <= event.end_seconds
        lanes[event.lane].append(event)
    for events in lanes.values():
        events.sort(key=lambda event: (event.start_seconds, event.end_seconds))
        for before, after in pairwise(events):
            assert before.end_seconds <= after.start_seconds
    assert sum(event.seconds for event in lanes[COMPUTE_LANE]) == pytest.approx(timeline.step_seconds)
    stalls = [stall for phase in Phase for stall in timeline.stalls_in(phase)]
    assert stalls == sorted(timeline.stalls, key=lambda stall: stall.start_seconds)


def test_the_hand_made_plans_are_valid(small_plan: Plan, layered_plan: Plan) -> None:
    verify_plan(small_plan)
    verify_plan(layered_plan)


def test_a_hidden_transfer_costs_nothing(small_plan: Plan) -> None:
    hidden = replace(small_plan.gathers[1], issue=0, need_by=3)  # 2 s of disk, 3 s of compute before it
    timeline = simulate(make_inference(small_plan, hidden))
    assert spell(timeline.events, "nvme -> device") == [("layers.1", 0.0, 2.0)]
    assert timeline.stalls == ()
    assert timeline.phase_seconds == ((Phase.FORWARD, 6.0),)


def test_a_late_transfer_stalls_by_what_is_missing(small_plan: Plan) -> None:
    late = replace(small_plan.gathers[1], issue=2, need_by=3, nbytes=350)  # 3.5 s of disk, 1 s of compute before it
    timeline = simulate(make_inference(small_plan, late))
    assert spell(timeline.events, "nvme -> device") == [("layers.1", 2.0, 5.5)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.1", 3.0, 5.5)]
    assert timeline.stall_seconds == 2.5
    assert timeline.phase_seconds == ((Phase.FORWARD, 8.5),)


def test_a_stall_splits_the_span_it_falls_into(small_plan: Plan) -> None:
    late = replace(small_plan.gathers[1], issue=3, need_by=4)
    timeline = simulate(make_inference(small_plan, late))
    assert spell(timeline.events, COMPUTE_LANE)[2:] == [
        ("layers.1 (forward)", 3.0, 4.0),
        ("layers.1 (forward)", 5.0, 6.0),
        ("loss (forward)", 6.0, 7.0),
    ]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.1", 4.0, 5.0)]


def test_a_route_moves_one_transfer_at_a_time(small_plan: Plan) -> None:
    first = replace(small_plan.gathers[0], issue=0, need_by=3)
    second = replace(small_plan.gathers[1], issue=0, need_by=3)
    timeline = simulate(make_inference(small_plan, first, second))
    assert spell(timeline.events, "nvme -> device") == [("layers.0", 0.0, 2.0), ("layers.1", 2.0, 4.0)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.1", 3.0, 4.0)]


def test_routes_without_the_disk_move_at_the_same_time(small_plan: Plan) -> None:
    disk = replace(small_plan.gathers[0], issue=0, need_by=3)
    memory = replace(small_plan.gathers[1], issue=0, need_by=3, source=Tier.HOST)
    timeline = simulate(make_inference(small_plan, disk, memory))
    assert spell(timeline.events, "nvme -> device") == [("layers.0", 0.0, 2.0)]
    assert spell(timeline.events, "host -> device") == [("layers.1", 0.0, 0.2)]
    assert timeline.stalls == ()


def test_two_transfers_needed_at_one_tick_are_waited_for_in_turn(small_plan: Plan) -> None:
    first = replace(small_plan.gathers[0], issue=1, need_by=1)
    second = replace(small_plan.gathers[1], issue=1, need_by=1)
    timeline = simulate(make_inference(small_plan, first, second))
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.0", 1.0, 3.0), ("stall: layers.1", 3.0, 5.0)]


def test_inference_has_no_backward_and_no_step(small_plan: Plan) -> None:
    timeline = simulate(make_inference(small_plan, *small_plan.gathers[:2]))
    assert timeline.phase_seconds == ((Phase.FORWARD, 7.0),)
    assert timeline.stalls_in(Phase.BACKWARD) == ()
    check_consistent(timeline)


def test_the_small_plan_by_hand(small_plan: Plan) -> None:
    timeline = simulate(small_plan)
    # Reads of 2 s and writes of 4 s share the disk: the read of layers.0 ends at 11, when the first gradient is offloaded.
    assert spell(timeline.events, "nvme -> device") == [
        ("layers.0", 0.0, 2.0),
        ("layers.1", 2.0, 4.0),
        ("layers.1", 7.0, 9.0),
        ("layers.0", 9.0, 11.0),
    ]
    assert spell(timeline.events, "device -> nvme") == [
        ("gradient layers.1.weight", 11.0, 15.0),
        ("gradient layers.0.weight", 15.0, 19.0),
    ]
    assert spell(timeline.events, "device -> host") == [("gradient embed.weight", 14.0, 14.064)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [
        ("stall: layers.0", 1.0, 2.0),
        ("stall: layers.1", 8.0, 9.0),
        ("stall: gradient layers.0.weight", 14.0, 19.0),
        ("stall: optimizer state", 31.0, 59.0),
    ]
    assert timeline.phase_seconds == ((Phase.FORWARD, 7.0), (Phase.BACKWARD, 12.0), (Phase.STEP, 40.0))
    assert timeline.step_seconds == 59.0
    check_consistent(timeline)


def test_sinks_delay_the_end_of_backward(small_plan: Plan) -> None:
    without = simulate(with_transfers(small_plan, sinks=()))
    last = make_sink("embed.weight", 11, Tier.HOST, 1500)
    delayed = simulate(with_transfers(small_plan, sinks=(last,)))
    assert dict(without.phase_seconds)[Phase.BACKWARD] == 7.0
    assert dict(delayed.phase_seconds)[Phase.BACKWARD] == 8.5
    assert delayed.stalls_in(Phase.BACKWARD)[-1].name == "stall: gradient embed.weight"


def test_a_gradient_that_stays_on_the_device_does_not_move(small_plan: Plan) -> None:
    stays = make_sink("embed.weight", 11, Tier.DEVICE, 10**9)
    assert simulate(with_transfers(small_plan, sinks=(stays,))) == simulate(with_transfers(small_plan, sinks=()))


def test_a_gradient_being_written_holds_up_the_next_read(small_plan: Plan) -> None:
    sink = make_sink("layers.1.weight", 7, Tier.NVME, 200)
    read = replace(small_plan.gathers[3], issue=8)
    timeline = simulate(with_transfers(small_plan, sinks=(sink,), gathers=(*small_plan.gathers[:3], read)))
    assert spell(timeline.events, "device -> nvme") == [("gradient layers.1.weight", 10.0, 14.0)]
    assert spell(timeline.events, "nvme -> device")[-1] == ("layers.0", 14.0, 16.0)


def test_a_step_bounded_by_the_disk_takes_reads_and_writes(small_plan: Plan) -> None:
    timeline = simulate(small_plan)  # 1600 bytes at 100, 1200 bytes at 50, 120 elements at 10
    assert dict(timeline.phase_seconds)[Phase.STEP] == 16.0 + 24.0
    assert [stall.seconds for stall in timeline.stalls_in(Phase.STEP)] == [28.0]


def test_a_step_bounded_by_the_update_does_not_stall(small_plan: Plan) -> None:
    timeline = simulate(replace(small_plan, step=replace(small_plan.step, num_elements=500)))
    assert dict(timeline.phase_seconds)[Phase.STEP] == 50.0
    assert timeline.stalls_in(Phase.STEP) == ()
    check_consistent(timeline)


def test_memory_is_what_stands_plus_the_span(small_plan: Plan) -> None:
    memory = simulate(small_plan).memory
    device = [(point.seconds, point.nbytes) for point in memory if point.tier is Tier.DEVICE]
    assert device[0] == (0.0, 752 - 160 + 40)
    assert max(nbytes for _, nbytes in device) == small_plan.tier(Tier.DEVICE).predicted_peak
    assert device[-1] == (19.0, 752 - 160)
    others = {point.tier: point.nbytes for point in memory if point.tier is not Tier.DEVICE}
    assert others == {Tier.HOST: 1040, Tier.NVME: 1600}


def test_a_hundred_layers_are_consistent(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(100, ticks_per_layer=33)
    timeline = simulate(plan)
    check_consistent(timeline)
    moved = sum(event.nbytes for event in timeline.events if event.lane == "nvme -> device")
    assert moved == sum(transfer.nbytes for transfer in plan.gathers if transfer.source is Tier.NVME)


def test_an_overlapped_step_moves_when_the_disk_is_free(small_plan: Plan) -> None:
    """The updates of the previous step run first. A gather waits for the updates of its parameters."""
    plan = with_transfers(small_plan, step=replace(small_plan.step, timing=StepTiming.OVERLAPPED), sinks=())
    timeline = simulate(plan)
    check_consistent(timeline)
    updates = [event for event in timeline.events if event.name.startswith("update of")]
    placements = {placement.parameter: placement for placement in plan.placements}
    assert {event.name.removeprefix("update of ") for event in updates} == {
        name for name, placement in placements.items() if placement.update_nbytes_written
    }
    assert sum(event.nbytes for event in updates) == sum(
        placement.update_nbytes_read + placement.update_nbytes_written for placement in plan.placements
    )
    for transfer in plan.gathers[:2]:
        (moved, *_) = [event for event in timeline.events if event.name == transfer.name]
        ends = [event.end_seconds for event in updates if event.name.removeprefix("update of ") in transfer.parameters]
        assert not ends or moved.start_seconds >= max(ends)
    assert timeline.step_seconds <= simulate(replace(plan, step=small_plan.step)).step_seconds


def test_a_step_inside_backward_writes_no_gradient(small_plan: Plan) -> None:
    sinks = tuple(
        replace(sink, destination=Tier.HOST) if sink.destination is Tier.NVME else sink for sink in small_plan.sinks
    )
    plan = with_transfers(small_plan, step=replace(small_plan.step, timing=StepTiming.IN_BACKWARD), sinks=sinks)
    timeline = simulate(plan)
    check_consistent(timeline)
    assert spell(timeline.events, "device -> nvme") == []
    forward = dict(timeline.phase_seconds)[Phase.FORWARD]
    updates = [event for event in timeline.events if event.name.startswith("update of")]
    assert updates
    assert all(event.start_seconds >= forward for event in updates), "an update began before its gradient was complete"
    gradients = sum(item.gradient_nbytes for item in plan.placements if item.gradient is Tier.NVME)
    assert sum(event.nbytes for event in updates) + gradients == sum(
        placement.update_nbytes_read + placement.update_nbytes_written for placement in plan.placements
    )


def test_a_gather_from_the_host_waits_for_its_update_to_be_home(small_plan: Plan) -> None:
    """Only layers.0 is trained: 600 bytes of gradient and state read, 400 of state written, its copy on the host."""
    placements = tuple(
        item.moved({Role.COMPUTE: Tier.HOST, Role.MASTER: Tier.HOST})
        if item.parameter == "layers.0.weight"
        else replace(item, copies=item.by_role[Role.COMPUTE])
        for item in small_plan.placements
    )
    step = replace(small_plan.step, timing=StepTiming.OVERLAPPED, num_elements=50)
    hardware = replace(small_plan.hardware, updates_take_of_compute=0.0)
    from_host = replace(small_plan.gathers[0], source=Tier.HOST, need_by=2)
    plan = replace(small_plan, hardware=hardware, placements=placements, step=step, transfers=(from_host,))
    timeline = simulate(plan)
    check_consistent(timeline)
    assert spell(timeline.events, "nvme -> host") == [("update of layers.0.weight", 0.0, 6.0)]
    assert spell(timeline.events, "host -> nvme") == [("update of layers.0.weight", 6.0, 14.0)]
    assert spell(timeline.events, "host -> device") == [("layers.0", 14.0, 14.2)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.0", 2.0, 14.2)]


def test_a_gradient_that_stays_on_the_device_is_updated_inside_backward_too(small_plan: Plan) -> None:
    timing = replace(small_plan.step, timing=StepTiming.IN_BACKWARD)
    placements = tuple(item.moved({Role.GRADIENT: Tier.DEVICE}) for item in small_plan.placements)
    sinks = tuple(replace(sink, destination=Tier.DEVICE) for sink in small_plan.sinks)
    timeline = simulate(with_transfers(small_plan, step=timing, placements=placements, sinks=sinks))
    check_consistent(timeline)
    assert spell(timeline.events, "device -> nvme") == spell(timeline.events, "device -> host") == []
    moved = sum(event.nbytes for event in timeline.events if event.name.startswith("update of"))
    assert moved == sum(item.update_nbytes_read + item.update_nbytes_written for item in placements) > 0
