"""The budget of a device with its own memory: measured and limited by the allocator, refused if others took the memory."""

import re
from contextlib import nullcontext

import pytest

from tests.support.fake_device import FakeDevice
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.runtime.device.allocations import DeviceAllocations, largest_budget, with_slack

GIB, MIB = 2**30, 2**20


class Counting(FakeDevice):
    """A device whose allocator reports what a test sets."""

    requested_nbytes = peak_requested_nbytes = 3 * GIB
    allocated_nbytes = 3 * GIB + MIB
    peak_reserved_nbytes = 4 * GIB
    num_forgotten = 0

    @property
    def free_nbytes(self) -> int:
        return self.nbytes

    def forget_peak(self) -> None:
        self.num_forgotten += 1
        self.peak_requested_nbytes = self.requested_nbytes


def test_the_peak_is_what_was_requested_beside_what_was_there() -> None:
    device = Counting()
    allocations = DeviceAllocations(device, budget=2 * GIB)
    allocations.sample(0)
    assert allocations.peak == 0, "nothing is counted before the first graph"
    allocations.promise(GIB)
    allocations.begin(homes_nbytes=GIB)  # two of the three GiB belong to others
    device.peak_requested_nbytes = 4 * GIB - MIB
    allocations.end()
    assert allocations.peak == 2 * GIB - MIB
    limit = 2 * GIB + MIB + 2 * GIB + 2 * GIB // 8 + 256 * MIB
    assert device.limits == [limit, None], "only while a graph runs; what others have is as the allocator rounds it"
    device.close()


def test_what_the_allocator_reserves_is_measured_apart_from_what_is_requested() -> None:
    """Plans promise bytes of tensors. Rounding and fragmentation are the allocator's, for which the limit has slack."""
    device = Counting()
    allocations = DeviceAllocations(device, budget=2 * GIB)
    assert allocations.reserved_peak == 0
    allocations.begin(homes_nbytes=GIB)
    device.peak_requested_nbytes, device.peak_reserved_nbytes = 4 * GIB, 4 * GIB + 256 * MIB
    allocations.end()
    device.peak_reserved_nbytes = 4 * GIB
    assert allocations.peak == 2 * GIB
    assert allocations.reserved_peak == 2 * GIB + 255 * MIB
    assert allocations.reserved_limit == 2 * GIB + 512 * MIB
    device.close()


def test_a_plan_needs_free_memory_for_its_slack_too() -> None:
    """The allocator may take as much as the limit leaves: what is not free then would be missed in the middle of a step."""
    needed = GIB + GIB // 8 + 256 * MIB
    for free, fits in ((needed - 1, False), (needed, True)):
        device = Counting(nbytes=free)
        device.requested_nbytes = device.allocated_nbytes = 0
        allocations = DeviceAllocations(device, budget=GIB)
        allocations.promise(GIB)
        with (
            nullcontext() if fits else pytest.raises(CapacityError, match=r"needs 1.00 GiB more .* to 384.0 MiB beside")
        ):
            allocations.begin(homes_nbytes=0)
        assert device.limits == [needed] * fits, "what the check asks for is what the limit allows"
        device.close()


@pytest.mark.parametrize("free", [512 * MIB, GIB, 1535 * MIB])
def test_memory_that_others_took_since_planning_is_an_error_before_anything_runs(free: int) -> None:
    """A plan that fills the budget that the error names is run."""
    device = Counting(nbytes=free)
    allocations = DeviceAllocations(device, budget=4 * GIB)
    allocations.promise(2 * GIB)
    with pytest.raises(CapacityError) as error:
        allocations.begin(homes_nbytes=GIB)
    assert re.match(
        rf"the plan needs 1.00 GiB more of cpu, and torch's allocator up to 512.0 MiB beside it .*, but "
        rf"{re.escape(format_bytes(free))} are free; end .*, or lower device_memory to \d+MiB$",
        str(error.value),
    )
    assert device.limits == []
    (named,) = re.findall(r"(\d+)MiB$", str(error.value))
    for more, fits in ((0, True), (1, False)):
        again = DeviceAllocations(device, budget=(int(named) + more) * MIB)
        with nullcontext() if fits else pytest.raises(CapacityError):
            again.begin(homes_nbytes=GIB)
    device.close()


def test_no_budget_fits_in_hardly_any_memory() -> None:
    device = Counting(nbytes=256 * MIB)
    allocations = DeviceAllocations(device, budget=2 * GIB)
    with pytest.raises(CapacityError, match=r"but 256.0 MiB are free; end what else takes memory of the device$"):
        allocations.begin(homes_nbytes=0)
    device.close()


def test_the_largest_budget_fits_with_its_slack() -> None:
    for free in (0, 256 * MIB, GIB, 80 * GIB + 1):
        fitting = largest_budget(free)
        assert (with_slack(fitting) <= free) == (free >= 256 * MIB)
        assert with_slack(fitting + 2) > free, "to the byte that is rounded"


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


def test_timing_kernels_does_not_count_and_is_told_where_the_budget_has_no_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Counting()
    allocations = DeviceAllocations(device, budget=2 * GIB)
    allocations.begin(homes_nbytes=GIB)
    device.peak_requested_nbytes = 3 * GIB + MIB
    allocations.end()
    for taken in (GIB - MIB, GIB):
        with allocations.compiling(homes_nbytes=GIB + 1):
            device.peak_requested_nbytes = 3 * GIB + taken
        assert allocations.peak == GIB + MIB
        assert [each.getMessage() for each in caplog.records] == [
            "compiling took 1.00 GiB of cpu for kernels that Inductor timed on tensors of full size, beside 1.00 GiB of the "
            "model: together more than the 2.00 GiB that device_memory leaves to it. Where that is too much, turn off "
            "torch._inductor.config.max_autotune and shape_padding"
        ] * (taken == GIB)
    device.close()


def test_memory_that_is_measured_apart_does_not_count() -> None:
    device = Counting()
    allocations = DeviceAllocations(device, budget=2 * GIB)
    allocations.begin(homes_nbytes=GIB)
    before = device.requested_nbytes
    device.peak_requested_nbytes = before + MIB
    with allocations.apart():
        device.peak_requested_nbytes = before + GIB
    allocations.end()
    assert allocations.peak == before + MIB - (before - GIB)
    device.close()
