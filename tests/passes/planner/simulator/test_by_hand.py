"""Steps computed by hand: a tick of the small plan takes 1 s; the disk reads 100 and writes 50 bytes/s, RAM moves 1000."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.support.hand_made_plans import make_sink, make_swap, with_transfers
from zinf_compile.ir.glossary import Phase, StepTiming, Tier
from zinf_compile.ir.hardware import make_route
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.timeline import UPDATE_LANE
from zinf_compile.ir.transfers import Transfer
from zinf_compile.passes.planner.simulator.critical_path import critical_path, share_path
from zinf_compile.passes.planner.simulator.memory import MemoryRole, live_set, memory_by_role
from zinf_compile.passes.planner.simulator.simulate import COMPUTE_LANE, Event, simulate
from zinf_compile.passes.planner.simulator.summary import Use, busy_lanes, measure_wear, tell_bound


def spell(events: tuple[Event, ...], lane: str) -> list[tuple[str, float, float]]:
    return [(event.name, event.start_seconds, event.end_seconds) for event in events if event.lane == lane]


def with_routes(
    plan: Plan, *, latency_seconds: float = 0.0, is_duplex: bool = False, takes_of_compute: float = 0.0
) -> Plan:
    """Return the small plan with changed routes of the same bandwidths."""
    rates = {Tier.NVME: {True: 50.0, False: 100.0}}
    routes = tuple(
        make_route(
            source,
            destination,
            rates[Tier.NVME][destination is Tier.NVME] if Tier.NVME in (source, destination) else 1000.0,
            latency_seconds=latency_seconds,
            is_duplex=is_duplex,
            takes_of_compute=takes_of_compute,
        )
        for source in Tier
        for destination in Tier
        if source is not destination
    )
    return replace(plan, hardware=replace(plan.hardware, routes=routes))


def make_forward(plan: Plan, *transfers: Transfer) -> Plan:
    """Return the forward half of the plan, with these transfers."""
    spans = tuple(span for span in plan.spans if span.phase is Phase.FORWARD)
    return replace(plan, schedule=Schedule.of_one_graph(6, 6), spans=spans, transfers=transfers)


def make_bare(plan: Plan, **changes: object) -> Plan:
    """Return a plan of 6 s of forward and 6 s of backward without transfers, except those in ``changes``."""
    step = replace(plan.step, nbytes_read=0, nbytes_written=0, num_elements=0)
    return replace(plan, **{"transfers": (), "step": step, **changes})


def test_every_transfer_takes_its_latency(small_plan: Plan) -> None:
    first, second = (replace(item, issue=0, need_by=3) for item in small_plan.gathers[:2])
    timeline = simulate(with_routes(make_forward(small_plan, first, second), latency_seconds=0.5))
    assert spell(timeline.events, "nvme -> device") == [("layers.0", 0.0, 2.5), ("layers.1", 2.5, 5.0)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.1", 3.0, 5.0)]


@pytest.mark.parametrize(("share", "ends"), [(0.0, 6.0), (0.25, 6.5), (0.5, 7.0), (1.0, 8.0)])
def test_a_transfer_takes_a_share_of_compute_while_it_moves(small_plan: Plan, share: float, ends: float) -> None:
    # It moves from 0 to 2 and slows compute down meanwhile. It is needed at tick 4, so nothing stalls.
    transfer = replace(small_plan.gathers[0], issue=0, need_by=4)
    timeline = simulate(with_routes(make_forward(small_plan, transfer), takes_of_compute=share))
    assert spell(timeline.events, "nvme -> device") == [("layers.0", 0.0, 2.0)]
    assert timeline.stalls == ()
    assert timeline.phase_seconds == ((Phase.FORWARD, ends),)


def test_a_transfer_takes_nothing_of_compute_that_waits(small_plan: Plan) -> None:
    # Compute waits for the first from 0 to 2. The second moves from 2 to 4 and takes half of compute, until tick 1 at 4.
    first, second = (replace(item, issue=0) for item in small_plan.gathers[:2])
    plan = make_forward(small_plan, replace(first, need_by=0), replace(second, need_by=4))
    timeline = simulate(with_routes(plan, takes_of_compute=0.5))
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: layers.0", 0.0, 2.0)]
    assert timeline.seconds_at(1) == 4.0
    assert timeline.phase_seconds == ((Phase.FORWARD, 9.0),)


def test_what_two_routes_take_is_no_more_than_all(small_plan: Plan) -> None:
    # Both move from 0 to 2; compute begins at 2.
    first, second = (replace(item, issue=0, need_by=6) for item in small_plan.gathers[:2])
    plan = make_forward(small_plan, first, replace(second, source=Tier.HOST, nbytes=2000))
    plan = with_routes(plan, takes_of_compute=0.75)
    assert simulate(plan).phase_seconds == ((Phase.FORWARD, 8.0),)


@pytest.mark.parametrize(("is_duplex", "read", "stall"), [(False, (14.0, 16.0), 16.0), (True, (10.0, 12.0), 12.0)])
def test_a_duplex_disk_reads_while_it_writes(
    small_plan: Plan, is_duplex: bool, read: tuple[float, float], stall: float
) -> None:
    # Backward begins at 7 and waits for layers.1 from 8 to 9. Its gradient is offloaded from 10 on and written in 4 s. The
    # read of layers.0 is also issued at 10 and takes 2 s. It is needed at 11.
    sink = make_sink("layers.1.weight", 7, Tier.NVME, 200)
    late = replace(small_plan.gathers[3], issue=8)
    plan = with_transfers(small_plan, sinks=(sink,), gathers=(*small_plan.gathers[:3], late))
    timeline = simulate(with_routes(plan, is_duplex=is_duplex))
    assert spell(timeline.events, "device -> nvme") == [("gradient layers.1.weight", 10.0, 14.0)]
    assert spell(timeline.events, "nvme -> device")[-1] == ("layers.0", *read)
    assert ("stall: layers.0", 11.0, stall) in spell(timeline.stalls, COMPUTE_LANE)


def test_a_swapped_value_leaves_behind_compute_and_comes_back(small_plan: Plan) -> None:
    # It is computed at tick 2, so its offload starts at 3 and takes 2 s. It must be gone before tick 4, at 4. Forward ends
    # at 7. Its reload is issued at tick 7, at 8, takes 1 s, and is needed at once.
    swap = make_swap("gelu", Tier.NVME, 100, out=2, gone=4, issue=7, need_by=7, release=9)
    timeline = simulate(make_bare(small_plan, transfers=swap))
    assert spell(timeline.events, "device -> nvme") == [("gelu out", 3.0, 5.0)]
    assert spell(timeline.events, "nvme -> device") == [("gelu back", 8.0, 9.0)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: gelu out", 4.0, 5.0), ("stall: gelu back", 8.0, 9.0)]
    assert timeline.phase_seconds == ((Phase.FORWARD, 7.0), (Phase.BACKWARD, 7.0), (Phase.STEP, 0.0))


@pytest.mark.parametrize(("share", "computed"), [(0.0, 12.0), (0.5, 13.0), (1.0, 14.0)])
def test_updates_take_from_compute_what_they_share(small_plan: Plan, share: float, computed: float) -> None:
    # One parameter is trained: 200 bytes of gradient, 200 of weight and 400 of state are read in 8 s, and all but the
    # gradient written in 12. Its 20 elements take 2 s of update, chunk by chunk beside the read. No op reads it.
    plan = make_bare(
        small_plan,
        placements=(small_plan.placement("layers.0.weight"),),
        uses=(),
        hardware=replace(small_plan.hardware, updates_take_of_compute=share),
    )
    plan = replace(plan, step=replace(plan.step, timing=StepTiming.OVERLAPPED, num_elements=20))
    timeline = simulate(plan)
    assert spell(timeline.events, "nvme -> host") == [("update of layers.0.weight", 0.0, 8.0)]
    assert spell(timeline.events, UPDATE_LANE) == [("optimizer (layers.0.weight)", 0.0, 2.0)]
    assert spell(timeline.events, "host -> nvme") == [("update of layers.0.weight", 8.0, 20.0)]
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: optimizer state", computed, 20.0)]
    assert dict(timeline.phase_seconds)[Phase.STEP] == 20.0 - computed


def test_an_update_takes_nothing_of_compute_that_waits(small_plan: Plan) -> None:
    # The update lasts from 0 to 6 and takes half of compute, which reaches tick 2 at 4. There compute waits for layers.1,
    # which is read once the update's 8 s of reading are over.
    plan = make_bare(
        small_plan,
        transfers=(replace(small_plan.gathers[1], issue=1, need_by=2),),
        placements=(small_plan.placement("layers.0.weight"),),
        uses=(),
        hardware=replace(small_plan.hardware, updates_take_of_compute=0.5),
    )
    plan = replace(plan, step=replace(plan.step, timing=StepTiming.OVERLAPPED, num_elements=60))
    timeline = simulate(plan)
    assert spell(timeline.events, UPDATE_LANE) == [("optimizer (layers.0.weight)", 0.0, 6.0)]
    assert spell(timeline.events, "nvme -> device") == [("layers.1", 8.0, 10.0)]
    assert spell(timeline.stalls, COMPUTE_LANE)[0] == ("stall: layers.1", 4.0, 10.0)


def test_what_is_due_is_issued_although_updates_make_compute_late(small_plan: Plan) -> None:
    """Regression: a transfer that was due just as an update slowed compute down was skipped."""
    forward, backward = small_plan.spans[0], small_plan.spans[-1]
    plan = replace(
        small_plan,
        spans=(replace(forward, end=6, seconds=6.0), replace(backward, start=6, seconds=6.0)),
        step=replace(small_plan.step, timing=StepTiming.OVERLAPPED),
    )
    names = Counter(event.name for event in simulate(plan).events if Tier.DEVICE in event.lane)
    assert names == Counter(item.name for item in plan.gathers) + Counter(
        f"gradient {sink.name}" for sink in plan.sinks
    )


def test_with_nothing_on_nvme_an_overlapped_step_is_at_the_end(small_plan: Plan) -> None:
    plan = make_bare(small_plan)
    step = replace(plan.step, timing=StepTiming.OVERLAPPED, num_chunks=0, num_elements=30)  # 3 s of update
    assert dict(simulate(replace(plan, step=step)).phase_seconds)[Phase.STEP] == 3.0


def test_the_clock_waits_at_a_tick(small_plan: Plan) -> None:
    timeline = simulate(make_forward(small_plan, *small_plan.gathers[:2]))  # waits at tick 1 from 1 to 2
    assert [timeline.seconds_at(tick) for tick in range(7)] == [0.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_the_longer_side_of_a_diamond_is_critical(small_plan: Plan) -> None:
    # Tick 3 comes after 3 s of compute, a read of 3.5 s and a copy of 0.2 s.
    disk = replace(small_plan.gathers[0], issue=0, need_by=3, nbytes=350)
    memory = replace(small_plan.gathers[1], issue=0, need_by=3, source=Tier.HOST)
    path = critical_path(simulate(make_forward(small_plan, disk, memory)))
    assert [(event.lane, event.seconds) for event in path] == [
        ("nvme -> device", 3.5),
        (COMPUTE_LANE, 2.0),
        (COMPUTE_LANE, 1.0),
    ]
    assert [(share.lane, share.seconds) for share in share_path(path)] == [("nvme -> device", 3.5), (COMPUTE_LANE, 3.0)]
    hidden = replace(disk, nbytes=250)
    path = critical_path(simulate(make_forward(small_plan, hidden, memory)))
    assert {event.lane for event in path} == {COMPUTE_LANE}


def test_the_disk_bounds_the_small_plan(small_plan: Plan) -> None:
    timeline = simulate(small_plan)
    lanes = {lane.name: lane for lane in busy_lanes(timeline)}
    # Four reads of 200 bytes, two gradients of 200; a step that reads 1600 and writes 1200.
    assert lanes["nvme"].uses == (
        Use(name="host -> nvme", seconds=24.0, nbytes=1200),
        Use(name="nvme -> host", seconds=16.0, nbytes=1600),
        Use(name="device -> nvme", seconds=8.0, nbytes=400),
        Use(name="nvme -> device", seconds=8.0, nbytes=800),
    )
    assert lanes[COMPUTE_LANE].seconds == 12.0 + 12.0  # the update is included
    assert busy_lanes(timeline)[0].seconds == 56.0
    assert tell_bound(timeline) == "nvme, busy 56.0 s of 59.0 s (95%)"


def test_compute_bounds_what_hides_its_transfers(small_plan: Plan) -> None:
    hidden = replace(small_plan.gathers[1], issue=0, need_by=3)
    assert tell_bound(simulate(make_forward(small_plan, hidden))) == "compute, busy 6.00 s of 6.00 s (100%)"


def test_wear_counts_gradients_and_updates(small_plan: Plan) -> None:
    wear = measure_wear(simulate(small_plan))
    assert wear.nbytes_per_step == 400 + 1200
    assert wear.nbytes_per_day == 1600 * 24 * 3600 / 59
    assert measure_wear(simulate(make_forward(small_plan))).nbytes_per_step == 0


def test_the_peak_is_made_of_what_is_live_there(small_plan: Plan) -> None:
    timeline = simulate(small_plan)
    live = live_set(timeline, Tier.DEVICE)
    assert (live.tick, live.seconds, live.nbytes) == (5, 6.0, 752)
    assert [(item.name, item.role, item.nbytes) for item in live.held] == [
        ("idle arena", MemoryRole.RESERVE, 512 - 40),
        ("outside of the arena, in loss", MemoryRole.ACTIVATION, 160),
        ("embed.weight", MemoryRole.PARAMETER, 64),
        ("linear_1", MemoryRole.ACTIVATION, 40),
        ("layers.0.bias", MemoryRole.PARAMETER, 8),
        ("layers.1.bias", MemoryRole.PARAMETER, 8),
    ]
    host = dict(memory_by_role(timeline, Tier.HOST)[0].nbytes)
    # Three small parameters of 80 bytes have gradients and twice as much state there.
    assert host == dict.fromkeys(MemoryRole, 0) | {
        MemoryRole.GRADIENT: 80,
        MemoryRole.OPTIMIZER_STATE: 160,
        MemoryRole.STAGING: 800,
    }


def test_memory_by_role_follows_transfers(small_plan: Plan) -> None:
    points = memory_by_role(simulate(small_plan), Tier.DEVICE)
    parameters = [(point.seconds, dict(point.nbytes)[MemoryRole.PARAMETER]) for point in points]
    # 80 bytes are resident. layers.0 is on the device in ticks [0, 3), layers.1 in [1, 5), etc. Compute waits at tick 1.
    assert parameters[:5] == [(0.0, 280), (1.0, 480), (3.0, 480), (4.0, 280), (5.0, 280)]


def test_the_first_read_of_a_resident_parameter_waits_for_its_update(small_plan: Plan) -> None:
    # 800 bytes are read in 8 s, and 600 written in 12: stored at 20. It is first read at tick 1, which compute reaches at 1.
    (use,) = (item for item in small_plan.uses if item.parameter == "layers.0.weight")
    plan = make_bare(
        small_plan,
        placements=(small_plan.placement("layers.0.weight"),),
        uses=(replace(use, ticks=(1,)),),
        hardware=replace(small_plan.hardware, updates_take_of_compute=0.0),
    )
    plan = replace(plan, step=replace(plan.step, timing=StepTiming.OVERLAPPED, num_elements=20))
    timeline = simulate(plan)
    assert spell(timeline.stalls, COMPUTE_LANE) == [("stall: update of layers.0.weight", 1.0, 20.0)]
    assert timeline.phase_seconds == ((Phase.FORWARD, 25.0), (Phase.BACKWARD, 6.0), (Phase.STEP, 0.0))
