"""What counts as the device tier's memory on a CPU."""

import mmap

import pytest

from zinf_compile.runtime.process import ram
from zinf_compile.runtime.process.ram import DeviceRam, anonymous_rss, return_freed_memory

HOMES, HOST = 30, 20


class Machine:
    """Memory of a process: bytes held, of which some were freed and go back to the system on request."""

    def __init__(self) -> None:
        self.held, self.freed, self.num_asked = 100, 0, 0

    def give_back(self) -> None:
        self.held, self.freed, self.num_asked = self.held - self.freed, 0, self.num_asked + 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(ram, "anonymous_rss", lambda: machine.held)
    monkeypatch.setattr(ram, "return_freed_memory", machine.give_back)
    return machine


def test_memory_that_was_touched_is_seen() -> None:
    """In pages mapped for the test: malloc may reuse freed memory that still counts as resident."""
    return_freed_memory()
    nbytes = 64 * 2**20
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        before = anonymous_rss()
        for page in range(0, nbytes, mmap.PAGESIZE):
            held[page] = 1
        assert anonymous_rss() - before >= 0.9 * nbytes
    assert anonymous_rss() - before < 0.5 * nbytes


def test_what_was_there_before_is_not_ours(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(HOMES)
    machine.held += 50
    device.sample(HOST)
    assert device.peak == 100 + 50 - (100 - HOMES) - HOST


def test_what_the_first_step_has_made_is_not_ours_either(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(HOMES)
    machine.held += 50 + 7
    device.sample(0)
    machine.held -= 50
    device.settle(HOMES)
    assert device.peak == HOMES + 50
    machine.held += 60
    device.sample(0)
    assert device.peak == HOMES + 60
    machine.held += 9
    device.settle(HOMES)
    device.sample(0)
    assert device.peak == HOMES + 60 + 9, "growth after the first step is counted"


def test_freed_memory_is_given_back_above_what_is_promised(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(0)
    device.promise(40)
    machine.held, machine.freed = 100 + 45, 10
    device.sample(0)
    assert (device.peak, machine.num_asked) == (35, 1)
    device.sample(0)
    assert machine.num_asked == 1, "below the promise, no memory is returned"


def test_kernels_have_their_workspace_above_what_is_held_between_them(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(0)
    device.promise(40, workspace_nbytes=10)
    machine.held, machine.freed = 100 + 30, 10
    device.sample(0)
    assert machine.num_asked == 0, "the workspace fits"
    machine.held += 5
    device.sample(0)
    assert (machine.num_asked, machine.held) == (1, 100 + 25)
    machine.held += 7
    device.sample(0)
    assert machine.num_asked == 2, "the workspace does not fit any more"
    device.sample(0)
    machine.held += 4
    device.sample(0)
    assert machine.num_asked == 2, "returning memory would free too little"
    machine.held += 5
    device.sample(0)
    assert machine.num_asked == 3


def test_over_the_budget_only_what_has_grown_is_given_back(machine: Machine) -> None:
    device = DeviceRam(budget=10)
    device.begin(0)
    machine.held += 50  # kept for good by the first step, cannot be returned
    device.settle(0)
    device.promise(40, workspace_nbytes=10)
    asked = machine.num_asked
    device.sample(0)
    machine.held += 4
    device.sample(0)
    assert machine.num_asked == asked + 1, "memory is returned for the first growth"
    machine.held += 6
    device.sample(0)
    assert machine.num_asked == asked + 2


def test_memory_of_others_does_not_have_freed_memory_returned_over_and_over(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(0)
    device.promise(80, workspace_nbytes=4)
    machine.held += 60
    device.sample(0)
    machine.held += 500  # a second model of the process
    device.sample(0)
    assert machine.num_asked == 1, "it might have been freed memory"
    for _ in range(10):
        machine.held, machine.freed = machine.held + 9, 9
        device.sample(0)
        machine.held, machine.freed = machine.held - 9, 0  # used again
    assert machine.num_asked == 1, "that would not bring the model within the promise"
    machine.held, machine.freed = machine.held + 10, 10
    device.sample(0)
    assert machine.num_asked == 2, "an eighth of the promise"


def test_what_making_another_plan_has_left_is_not_ours(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(HOMES)
    device.settle(HOMES)
    machine.held += 40
    device.sample(0)
    machine.held -= 40
    device.begin_again()
    machine.held += 3 + 60
    device.sample(0)
    machine.held -= 60
    device.settle(HOMES)
    assert device.peak == HOMES + 60
    machine.held += 20
    device.sample(0)
    assert device.peak == HOMES + 60, "the peak is the largest under any plan"


def test_what_looking_for_another_plan_has_left_is_not_ours_though_the_plan_stays(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(0)
    device.sample(0)
    device.settle(0)
    machine.held += 30
    device.sample(0)
    device.end()
    machine.freed = 5  # earlier, by compute
    with device.apart():
        machine.held += 500
        device.sample(0)  # by updates that run meanwhile
        machine.held -= 490
    machine.held += 8
    device.sample(0)
    assert device.peak == max(30, 30 - 5 + 8)


def test_what_a_later_capture_has_left_is_not_ours(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(HOMES)
    device.settle(HOMES)
    machine.held += 40
    device.sample(0)
    device.end()
    machine.held -= 40
    machine.held += 300  # an update samples during a capture, most of whose nodes are freed afterwards
    device.sample(0)
    machine.held -= 200
    machine.freed = 80
    device.begin_again(after_capture=True)
    device.begin(HOMES)
    assert machine.freed == 0, "freed memory is returned before the graph runs"
    machine.held += 60
    device.sample(0)
    device.end()
    machine.held -= 60
    device.settle(HOMES)
    assert device.peak == HOMES + 60


def test_what_capturing_in_the_first_step_has_left_is_settled_with_the_step(machine: Machine) -> None:
    device = DeviceRam(budget=1000)
    device.begin(HOMES)
    machine.held += 7 + 40  # a kernel, and its data
    device.sample(0)
    device.end()
    device.begin_again(after_capture=True)
    machine.held += 5
    device.begin(HOMES)
    device.sample(0)
    device.end()
    machine.held -= 40
    device.settle(HOMES)
    assert device.peak == HOMES + 40
