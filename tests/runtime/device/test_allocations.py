"""The budget of a device with its own memory: measured and limited by the allocator, refused if others took the memory."""

import pytest

from tests.support.fake_device import FakeDevice
from zinf_compile.ir.errors import CapacityError
from zinf_compile.runtime.device.allocations import DeviceAllocations

GIB, MIB = 2**30, 2**20


class Counting(FakeDevice):
    """A device whose allocator reports what a test sets."""

    allocated_nbytes = 3 * GIB
    peak_allocated_nbytes = 3 * GIB
    num_forgotten = 0

    @property
    def free_nbytes(self) -> int:
        return self.nbytes

    def forget_peak(self) -> None:
        self.num_forgotten += 1
        self.peak_allocated_nbytes = self.allocated_nbytes


def test_the_peak_is_what_was_allocated_beside_what_was_there() -> None:
    device = Counting()
    allocations = DeviceAllocations(device, budget=2 * GIB)
    allocations.sample(0)
    assert allocations.peak == 0, "nothing is counted before the first graph"
    allocations.promise(GIB)
    allocations.begin(homes_nbytes=GIB)  # two of the three GiB belong to others
    device.peak_allocated_nbytes = 4 * GIB - MIB
    allocations.end()
    assert allocations.peak == 2 * GIB - MIB
    assert device.limits == [2 * GIB + 2 * GIB + 2 * GIB // 8 + 256 * MIB, None], "only while a graph runs"
    device.close()


def test_memory_that_others_took_since_planning_is_an_error_before_anything_runs() -> None:
    device = Counting(nbytes=512 * MIB)
    allocations = DeviceAllocations(device, budget=2 * GIB)
    allocations.promise(GIB)
    with pytest.raises(
        CapacityError,
        match=r"needs 1.00 GiB more of cpu, but 512.0 MiB are free: .* lower device_memory to 1536MiB",
    ):
        allocations.begin(homes_nbytes=0)
    assert device.limits == []
    device.close()


def test_more_may_be_promised_than_plans_say() -> None:
    device = Counting()
    allocations = DeviceAllocations(device, budget=2 * GIB)
    allocations.promise(GIB)
    allocations.promise_at_least(GIB + MIB)
    assert allocations.promised == GIB + MIB
    allocations.promise(MIB)
    assert allocations.promised == GIB + MIB
    allocations.begin_again()
    assert device.num_forgotten == 1


def test_memory_that_is_measured_apart_does_not_count() -> None:
    device = Counting()
    allocations = DeviceAllocations(device, budget=2 * GIB)
    allocations.begin(homes_nbytes=GIB)
    before = device.allocated_nbytes
    device.peak_allocated_nbytes = before + MIB
    with allocations.apart():
        device.peak_allocated_nbytes = before + GIB
    allocations.end()
    assert allocations.peak == before + MIB - (before - GIB)
    device.close()
