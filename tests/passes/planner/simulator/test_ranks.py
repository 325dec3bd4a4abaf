"""Steps of two ranks, by hand: the disk reads 100 bytes/s of shards, and links all-gather 200 bytes/s of full values.

Between replicas a device sends 100 bytes/s.
"""

from dataclasses import replace

import pytest

from tests.support.hand_made_plans import with_transfers
from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import Phase, StepTiming, Tier
from zinf_compile.ir.hardware import DEVICE_LINKS
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.ir.schedule import Schedule
from zinf_compile.passes.planner.simulator.bound import least_seconds
from zinf_compile.passes.planner.simulator.simulate import COMPUTE_LANE, Event, simulate
from zinf_compile.passes.planner.simulator.summary import LinkUse, measure_links, measure_wear


@pytest.fixture
def pair(small_plan: Plan) -> Plan:
    """Return the small plan for two ranks, without its optimizer step and with frozen residents."""
    placements = [item if item.compute is not Tier.DEVICE else frozen(item) for item in small_plan.placements]
    return replace(of_two(small_plan), placements=tuple(placements))


def frozen(placement: Placement) -> Placement:
    return replace(placement, copies=placement.by_role[Role.COMPUTE])


def of_two(small_plan: Plan) -> Plan:
    hardware = replace(small_plan.hardware, devices_per_node=2, device_link_bytes_per_second=100.0)
    step = replace(small_plan.step, nbytes_read=0, nbytes_written=0, num_elements=0)
    return replace(small_plan, num_ranks=2, hardware=hardware, step=step)


def spell(events: tuple[Event, ...], lane: str) -> list[tuple[str, float, float]]:
    return [(event.name, event.start_seconds, event.end_seconds) for event in events if event.lane == lane]


def test_a_gather_lands_when_the_links_have_brought_all_of_it(pair: Plan) -> None:
    # Shards of 100 bytes take 1 s from disk. Full values of 200 take another second over the links, in parallel to the next
    # read.
    first, second = (replace(item, issue=0, launch=1) for item in pair.gathers[:2])
    forward = tuple(span for span in pair.spans if span.phase is Phase.FORWARD)
    timeline = simulate(replace(pair, transfers=(first, second), schedule=Schedule.of_one_graph(6, 6), spans=forward))
    assert spell(timeline.events, "nvme -> device") == [("layers.0", 0.0, 1.0), ("layers.1", 1.0, 2.0)]
    assert spell(timeline.events, DEVICE_LINKS) == [("layers.0", 1.0, 2.0), ("layers.1", 2.0, 3.0)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.0", 1.0, 2.0)]
    assert measure_links(timeline) == LinkUse(seconds=2.0, exposed_seconds=1.0)


def test_ranks_exchange_shards_at_the_launch_and_not_before(pair: Plan) -> None:
    # The shard is there at 1, and nobody exchanges shards before tick 4: the last reader but one waits there from 5 to 6.
    gather = replace(pair.gathers[1], issue=0, need_by=5, release=6)
    forward = tuple(span for span in pair.spans if span.phase is Phase.FORWARD)
    for launch, moved in ((4, (4.0, 5.0)), (3, (3.0, 4.0)), (None, (5.0, 6.0))):
        plan = replace(
            pair,
            transfers=(replace(gather, launch=launch),),
            schedule=Schedule.of_one_graph(6, 6),
            spans=forward,
        )
        timeline = simulate(plan)
        assert spell(timeline.events, DEVICE_LINKS) == [("layers.1", *moved)]
        assert spell(timeline.events, "nvme -> device") == [("layers.1", 0.0, 1.0)]
        assert timeline.step_seconds == (6.0 if launch else 7.0)
        assert least_seconds(plan).step <= timeline.step_seconds


def test_a_launch_waits_for_shards_that_have_not_arrived(pair: Plan) -> None:
    # Issued at 0 and launched at 0: compute waits until 1 for the disk, and then computes beside the links.
    gather = replace(pair.gathers[1], issue=0, launch=0, need_by=3, release=6)
    forward = tuple(span for span in pair.spans if span.phase is Phase.FORWARD)
    timeline = simulate(replace(pair, transfers=(gather,), schedule=Schedule.of_one_graph(6, 6), spans=forward))
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.1", 0.0, 1.0)]
    assert spell(timeline.events, DEVICE_LINKS) == [("layers.1", 1.0, 2.0)]
    assert measure_links(timeline).exposed_seconds == 0


def test_a_gradient_waits_for_the_reduction_before_it(pair: Plan) -> None:
    # Both pass through the same buffers. The first takes from 9 to 14, so compute waits there at 10.
    hardware = replace(pair.hardware, device_link_bytes_per_second=20.0)
    sinks = [replace(sink, destination=Tier.DEVICE) for sink in pair.sinks[:2]]
    first, second = replace(sinks[0], issue=9), replace(sinks[1], issue=10)
    timeline = simulate(replace(pair, hardware=hardware, transfers=(first, second)))
    assert spell(timeline.events, DEVICE_LINKS) == [
        ("gradient layers.1.weight", 9.0, 14.0),
        ("gradient layers.0.weight", 14.0, 19.0),
    ]
    assert spell(timeline.stalls, COMPUTE_LANE) == [
        ("stall: gradient layers.1.weight", 10.0, 14.0),
        ("stall: gradient layers.0.weight", 16.0, 19.0),
    ]
    assert measure_links(timeline) == LinkUse(seconds=10.0, exposed_seconds=7.0)


def test_a_gradient_does_not_wait_for_what_is_still_read(pair: Plan) -> None:
    # Backward begins at 6. At 7 layers.0 is issued, with a disk half as fast: read until 9, all-gathered from 9 to 10. The
    # gradient that is complete at 8 is reduced before that, and its shard is written from 9 on, after the read.
    hardware = replace(
        pair.hardware,
        routes=tuple(
            replace(route, bytes_per_second=50.0) if route.name == "nvme -> device" else route
            for route in pair.hardware.routes
        ),
    )
    before = replace(pair.gathers[1], issue=0, launch=2)
    read = replace(pair.gathers[3], issue=7, launch=9, need_by=11, release=12)
    sink = replace(pair.sinks[0], issue=8)
    timeline = simulate(with_transfers(pair, hardware=hardware, gathers=(before, read), sinks=(sink,)))
    assert spell(timeline.events, DEVICE_LINKS) == [
        ("layers.1", 2.0, 3.0),
        ("gradient layers.1.weight", 8.0, 9.0),
        ("layers.0", 9.0, 10.0),
    ]
    assert spell(timeline.events, "device -> nvme") == [("gradient layers.1.weight", 9.0, 11.0)]
    assert measure_wear(timeline).nbytes_per_step == 100  # of this rank's shard


def test_residents_are_reduced_and_their_updates_gathered_before_forward(small_plan: Plan) -> None:
    # 80 bytes of residents come over the links before anything is computed. The gradient is complete at 12.4: 64 bytes over
    # the links, and then 32 to the host.
    pair = of_two(small_plan)
    timeline = simulate(replace(pair, transfers=(pair.sinks[2],)))
    moved = [(event.lane, event.name, event.nbytes) for event in timeline.events if event.nbytes]
    assert moved == [
        (DEVICE_LINKS, "updated residents", 80),
        (DEVICE_LINKS, "gradient embed.weight", 64),
        ("device -> host", "gradient embed.weight", 32),
    ]
    assert measure_links(timeline).exposed_seconds == pytest.approx(0.4 + 0.32)
    assert timeline.step_seconds == pytest.approx(0.4 + 12 + 0.32 + 0.032)


def of_replicas(pair: Plan, num_ranks: int, num_replicas: int) -> Plan:
    """Return a plan of two ranks for several replicas in one node, with gradients that stay on the device."""
    hardware = replace(pair.hardware, devices_per_node=num_ranks * num_replicas)
    sinks = tuple(replace(sink, destination=Tier.DEVICE) for sink in pair.sinks[:2])
    return replace(pair, hardware=hardware, num_ranks=num_ranks, num_replicas=num_replicas, transfers=sinks)


def test_a_gradient_passes_between_replicas_beside_compute(pair: Plan) -> None:
    # The first gradient is reduced from 9 to 10. Until 12 its shard goes to the other replica and back. The second is
    # complete at 11, but buffers have room for one: compute waits until 12. The second is reduced beside the last second of
    # compute, and then passes between replicas as well.
    first, second = (replace(sink, issue=issue) for sink, issue in zip(pair.sinks[:2], (9, 11), strict=True))
    plan = replace(of_replicas(pair, 2, 2), transfers=())
    plan = with_transfers(plan, sinks=[replace(sink, destination=Tier.DEVICE) for sink in (first, second)])
    timeline = simulate(plan)
    assert spell(timeline.events, DEVICE_LINKS) == [
        ("gradient layers.1.weight", 9.0, 10.0),
        ("gradient layers.1.weight", 10.0, 12.0),
        ("gradient layers.0.weight", 12.0, 13.0),
        ("gradient layers.0.weight", 13.0, 15.0),
    ]
    assert spell(timeline.stalls, COMPUTE_LANE) == [
        ("stall: gradient layers.1.weight", 11.0, 12.0),
        ("stall: gradient layers.0.weight", 13.0, 15.0),
    ]
    assert measure_links(timeline) == LinkUse(seconds=6.0, exposed_seconds=3.0)
    assert timeline.step_seconds == 15.0
    assert least_seconds(plan).step <= 15.0


def test_replicas_of_one_rank_reduce_between_them_only(pair: Plan) -> None:
    # Plain data parallelism: 200 bytes go to three others one after the other, and back in two rounds.
    plan = of_replicas(pair, 1, 4)
    plan = replace(plan, transfers=(replace(plan.sinks[0], issue=9),))
    timeline = simulate(plan)
    assert spell(timeline.events, DEVICE_LINKS) == [("gradient layers.1.weight", 9.0, 19.0)]
    assert timeline.step_seconds == 19.0
    assert least_seconds(plan).step <= 19.0


@pytest.mark.parametrize(("num_ranks", "start", "seconds"), [(1, 9.0, 2.0), (2, 10.0, 1.0)])
def test_a_fast_reduction_between_two_replicas_moves_every_byte_once(
    pair: Plan, num_ranks: int, start: float, seconds: float
) -> None:
    plan = replace(of_replicas(pair, num_ranks, 2), is_reduced_in_order=False)
    timeline = simulate(replace(plan, transfers=(replace(plan.sinks[0], issue=9),)))
    *_, between = spell(timeline.events, DEVICE_LINKS)
    assert between == ("gradient layers.1.weight", start, start + seconds)


def test_a_shard_leaves_when_all_replicas_have_added_it_up(pair: Plan) -> None:
    plan = of_replicas(pair, 2, 2)
    timeline = simulate(replace(plan, transfers=(replace(pair.sinks[0], issue=9),)))
    assert spell(timeline.events, DEVICE_LINKS) == [
        ("gradient layers.1.weight", 9.0, 10.0),
        ("gradient layers.1.weight", 10.0, 12.0),
    ]
    assert spell(timeline.events, "device -> nvme") == [("gradient layers.1.weight", 12.0, 14.0)]
    assert timeline.step_seconds == 14.0


def test_an_update_in_backward_begins_with_the_sum_of_all_replicas(pair: Plan) -> None:
    plan = of_replicas(pair, 2, 2)
    sink = replace(plan.sinks[0], issue=9, destination=Tier.HOST)
    plan = replace(plan, transfers=(sink,), step=replace(plan.step, timing=StepTiming.IN_BACKWARD))
    timeline = simulate(plan)
    ((name, begin, _),) = spell(timeline.events, "nvme -> host")
    assert (name, begin) == ("update of layers.1.weight", 12.0)


def test_replicas_of_one_rank_need_no_rows_of_residents(small_plan: Plan) -> None:
    plan = replace(of_two(small_plan), num_ranks=1, num_replicas=2)
    names = {event.name for event in simulate(plan).events}
    assert "updated residents" not in names
    assert "updated residents" in {event.name for event in simulate(of_two(small_plan)).events}
