"""The meter counts what happened, from every thread."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.ram import anonymous_rss
from zinf_compile.terms import Phase, Tier


def test_moved_bytes_are_summed_by_route_from_many_threads() -> None:
    meter = Meter()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(500):
            threads.submit(meter.add_moved, Tier.NVME, Tier.HOST, 3)
            threads.submit(meter.add_moved, Tier.HOST, Tier.NVME, 5)
    assert meter.moved == (("host -> nvme", 2500), ("nvme -> host", 1500))


def test_stalls_are_summed_by_name_and_sorted_by_length() -> None:
    meter = Meter()
    assert meter.stalls == ()
    for name, seconds in (("short", 0.001), ("long", 0.02), ("short", 0.001)):
        with meter.stall(name):
            time.sleep(seconds)
    assert [(stall.name, stall.count) for stall in meter.stalls] == [("long", 1), ("short", 2)]
    assert meter.stalls[0].seconds >= 0.02
    assert meter.stalls[1].seconds >= 0.002


def test_phases_are_kept_in_order() -> None:
    meter = Meter()
    assert meter.phase_seconds(Phase.STEP) == ()
    for seconds in (0.01, 0.0):
        with meter.phase(Phase.FORWARD):
            time.sleep(seconds)
    first, second = meter.phase_seconds(Phase.FORWARD)
    assert first >= 0.01
    assert first > second >= 0
    assert meter.phase_seconds(Phase.BACKWARD) == ()


def test_a_phase_that_failed_is_not_a_run() -> None:
    meter = Meter()
    with pytest.raises(ValueError, match="compute"), meter.phase(Phase.FORWARD):
        raise ValueError("compute")
    assert meter.phase_seconds(Phase.FORWARD) == ()


def test_anonymous_rss_sees_memory_that_was_touched() -> None:
    before = anonymous_rss()
    nbytes = 64 * 2**20
    held = torch.ones(nbytes, dtype=torch.uint8)
    assert anonymous_rss() - before >= 0.9 * nbytes
    del held
    assert anonymous_rss() - before < 0.5 * nbytes
