"""Steps of two ranks, by hand: the disk reads 100 bytes/s of shards, and links all-gather 200 bytes/s of full values."""

from dataclasses import replace

import pytest

from tests.support.hand_made_plans import with_transfers
from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.hardware import DEVICE_LINKS
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.schedule import Schedule
from zinf_compile.passes.planner.simulator.simulate import COMPUTE_LANE, Event, simulate
from zinf_compile.passes.planner.simulator.summary import measure_wear


@pytest.fixture
def pair(small_plan: Plan) -> Plan:
    """Return the small plan for two ranks, without its optimizer step."""
    hardware = replace(small_plan.hardware, devices_per_node=2, device_link_bytes_per_second=100.0)
    step = replace(small_plan.step, nbytes_read=0, nbytes_written=0, num_elements=0)
    return replace(small_plan, num_ranks=2, hardware=hardware, step=step)


def spell(events: tuple[Event, ...], lane: str) -> list[tuple[str, float, float]]:
    return [(event.name, event.start_seconds, event.end_seconds) for event in events if event.lane == lane]


def test_a_gather_lands_when_the_links_have_brought_all_of_it(pair: Plan) -> None:
    # Shards of 100 bytes take 1 s from disk. Full values of 200 take another second over the links, in parallel to the next
    # read.
    first, second = (replace(item, issue=0) for item in pair.gathers[:2])
    forward = tuple(span for span in pair.spans if span.phase is Phase.FORWARD)
    timeline = simulate(replace(pair, transfers=(first, second), schedule=Schedule.of_one_graph(6, 6), spans=forward))
    assert spell(timeline.events, "nvme -> device") == [("layers.0", 0.0, 1.0), ("layers.1", 1.0, 2.0)]
    assert spell(timeline.events, DEVICE_LINKS) == [("layers.0", 1.0, 2.0), ("layers.1", 2.0, 3.0)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.0", 1.0, 2.0)]


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
    before, read = replace(pair.gathers[1], issue=0), replace(pair.gathers[3], issue=7, need_by=11, release=12)
    sink = replace(pair.sinks[0], issue=8)
    timeline = simulate(with_transfers(pair, hardware=hardware, gathers=(before, read), sinks=(sink,)))
    assert spell(timeline.events, DEVICE_LINKS) == [
        ("layers.1", 2.0, 3.0),
        ("gradient layers.1.weight", 8.0, 9.0),
        ("layers.0", 9.0, 10.0),
    ]
    assert spell(timeline.events, "device -> nvme") == [("gradient layers.1.weight", 9.0, 11.0)]
    assert measure_wear(timeline).nbytes_per_step == 100  # of this rank's shard


def test_gradients_of_residents_are_reduced_and_gathered_again(pair: Plan) -> None:
    # The gradient is complete at 12: 2 x 64 bytes over the links, and then 32 to the host.
    sink = pair.sinks[2]
    timeline = simulate(replace(pair, transfers=(sink, replace(sink, destination=Tier.DEVICE))))
    moved = [(event.lane, event.nbytes) for event in timeline.events if event.nbytes]
    assert moved == [(DEVICE_LINKS, 128), ("device -> host", 32), (DEVICE_LINKS, 128)]
    assert timeline.step_seconds == pytest.approx(12 + 2 * 0.64)
