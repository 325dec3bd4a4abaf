"""The meter counts what happened, from every thread."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.runtime.observe.meter import Meter


def test_moved_bytes_are_summed_by_route_from_many_threads() -> None:
    meter = Meter()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(500):
            threads.submit(meter.add_moved, Tier.NVME, Tier.HOST, 3)
            threads.submit(meter.add_moved, Tier.HOST, Tier.NVME, 5)
    assert meter.moved == (("host -> nvme", 2500), ("nvme -> host", 1500))


def test_stalls_are_summed_by_name_and_sorted_by_length(clock: Any) -> None:
    meter = Meter()
    assert meter.stalls == ()
    for name, seconds in (("short", 0.25), ("long", 2.0), ("short", 0.5)):
        with meter.stall(name):
            clock.seconds += seconds
    assert [(stall.name, stall.seconds, stall.count) for stall in meter.stalls] == [
        ("long", 2.0, 1),
        ("short", 0.75, 2),
    ]


def test_waits_of_a_thread_set_aside_are_no_stalls(clock: Any) -> None:
    meter = Meter()

    def wait() -> None:
        with meter.stall("w"):
            clock.seconds += 1.0

    with ThreadPoolExecutor(1, initializer=meter.set_aside_this_thread) as aside:
        aside.submit(wait).result()
    assert meter.stalls == ()
    wait()
    assert [(stall.name, stall.seconds, stall.count) for stall in meter.stalls] == [("w", 1.0, 1)]


def test_phases_are_kept_in_order(clock: Any) -> None:
    meter = Meter()
    assert meter.phase_seconds(Phase.STEP) == ()
    for seconds in (2.0, 0.5):
        with meter.phase(Phase.FORWARD):
            clock.seconds += seconds
    assert meter.phase_seconds(Phase.FORWARD) == (2.0, 0.5)
    assert meter.phase_seconds(Phase.BACKWARD) == ()


def test_a_phase_that_failed_is_not_a_run() -> None:
    meter = Meter()
    with pytest.raises(ValueError, match="compute"), meter.phase(Phase.FORWARD):
        raise ValueError("compute")
    assert meter.phase_seconds(Phase.FORWARD) == ()


def test_a_whole_step_lasts_from_one_to_the_next(clock: Any) -> None:
    meter = Meter()
    for seconds in (2.0, 3.0, 5.0):
        with meter.phase(Phase.FORWARD):
            clock.seconds += seconds
        with meter.phase(Phase.STEP):
            clock.seconds += 1.0
    assert meter.step_seconds == (4.0, 6.0)


def test_a_route_is_busy_once_however_many_calls_move_bytes(clock: Any) -> None:
    meter = Meter()
    with meter.moving(Tier.NVME, Tier.DEVICE, 100, "w"):
        clock.seconds += 1.0
        with meter.moving(Tier.NVME, Tier.DEVICE, 50, "w"):
            clock.seconds += 2.0
            with meter.moving(Tier.HOST, Tier.NVME, 30, "w"):
                clock.seconds += 4.0
    clock.seconds += 8.0
    with meter.moving(Tier.HOST, Tier.NVME, 5, "w"):
        clock.seconds += 16.0
    assert meter.arrived == (("host -> nvme", 35), ("nvme -> device", 150))
    assert meter.busy == (
        (("host -> nvme",), 16.0),
        (("host -> nvme", "nvme -> device"), 4.0),
        (("nvme -> device",), 3.0),
    )


def test_a_move_that_failed_took_time_and_brought_nothing(clock: Any) -> None:
    meter = Meter()

    def fail() -> None:
        with meter.moving(Tier.NVME, Tier.HOST, 100, "w"):
            clock.seconds += 1.0
            raise ValueError("disk")

    with pytest.raises(ValueError, match="disk"):
        fail()
    assert meter.arrived == ()
    assert meter.busy == ((("nvme -> host",), 1.0),)


def test_seconds_of_phases_can_be_forgotten(clock: Any) -> None:
    meter = Meter()
    for _ in range(3):
        with meter.phase(Phase.STEP):
            clock.seconds += 1.0
    meter.forget_phases()
    assert (meter.phase_seconds(Phase.STEP), meter.step_seconds, meter.num_steps) == ((), (), 3)
