"""The recorder: what a store did and when, on the lanes of a timeline."""

from typing import Any

import pytest

from zinf_compile.ir.glossary import Phase, Tier
from zinf_compile.ir.timeline import Event
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.observe.recorder import Recorder


def test_compute_is_cut_where_it_waits_and_named_after_what_came(clock: Any) -> None:
    meter = Meter()
    meter.recorder = recorder = Recorder()
    clock.seconds = 10
    with meter.phase(Phase.FORWARD):
        clock.seconds = 11
        with meter.stall("a"):
            clock.seconds = 13
        meter.arrive("a")
        clock.seconds = 16
        meter.arrive("b")
        clock.seconds = 20
    clock.seconds = 25
    with meter.phase(Phase.STEP), meter.updating("a"):
        clock.seconds = 27
    events, stalls = recorder.take()
    assert events == (
        Event("compute", "forward", 0, 1),
        Event("compute", "a (forward)", 3, 6),
        Event("compute", "b (forward)", 6, 10),
        Event("updates", "a", 15, 17),
        Event("compute", "step", 15, 17),
    )
    assert stalls == (Event("compute", "a", 1, 3),)


def test_moves_are_on_the_lanes_of_their_routes(clock: Any) -> None:
    meter = Meter()
    with meter.moving(Tier.NVME, Tier.DEVICE, 5, "before"):
        clock.seconds = 1
    meter.recorder = recorder = Recorder()
    with meter.moving(Tier.NVME, Tier.DEVICE, 7, "a"):
        clock.seconds = 2
        with meter.moving(Tier.HOST, Tier.NVME, 3, "b"):
            clock.seconds = 5
    assert recorder.take() == (
        (Event("nvme -> device", "a", 0, 4, 7), Event("host -> nvme", "b", 1, 4, 3)),
        (),
    )


def test_what_failed_on_its_way_is_not_told_as_moved(clock: Any) -> None:
    meter = Meter()
    meter.recorder = recorder = Recorder()
    with pytest.raises(OSError, match="unplugged"), meter.moving(Tier.NVME, Tier.HOST, 7, "a"):
        raise OSError("unplugged")
    assert recorder.take() == ((), ())
