"""When a copy over the link has landed: who asks hears it from the event, and a thread waits only for who waits."""

import signal
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.fake_device import FakeDevice, FakeEvent, on_fake_device
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.process.interrupts import uninterrupted
from zinf_compile.runtime.process.waiting import wait_future
from zinf_compile.runtime.transfer.link import EnqueuedCopy, Link


class Bench:
    """A link whose copies to the device wait for gates."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.link = device, Link(device)

    def bring(self, source: Tensor | None = None) -> tuple[EnqueuedCopy, FakeEvent]:
        """Enqueue a copy, and return it with the gate that it waits for."""
        source = torch.ones(64, dtype=torch.uint8) if source is None else source
        gate = FakeEvent(self.device.compute)
        return self.link.bring(source, torch.zeros_like(source), behind=gate), gate


@pytest.fixture
def bench() -> Iterator[Bench]:
    with on_fake_device(FakeDevice(most_seconds=0.0)) as device:
        yield Bench(device)


def watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("zinf-to-device", "zinf-to-host")]


def land(copy: EnqueuedCopy, gate: FakeEvent) -> None:
    gate.happen()
    copy.event.wait()


def test_a_copy_that_is_only_asked_for_starts_no_thread(bench: Bench) -> None:
    copy, gate = bench.bring()
    assert not copy.done.done()
    land(copy, gate)
    assert copy.done.done()
    copy.done.result()
    called: list[str] = []
    copy.done.add_done_callback(lambda _: called.append(threading.current_thread().name))
    assert called == ["MainThread"]
    assert watchers() == []
    bench.link.close()


def test_the_source_lives_until_its_copy_has_landed(bench: Bench) -> None:
    source = torch.ones(64, dtype=torch.uint8)
    freed = weakref.ref(source)
    copy, gate = bench.bring(source)
    bench.device.copies.to_device.copy_all = lambda pairs: None  # type: ignore[method-assign]  # keeps none alive
    del source
    other, other_gate = bench.bring(torch.ones(64, dtype=torch.uint8))
    kept = weakref.ref(other.memory[0])
    assert freed() is not None
    assert kept() is not None
    land(copy, gate)
    last, last_gate = bench.bring()  # lets go of what has landed, whether somebody asks for it or not
    assert freed() is None
    assert kept() is not None
    land(other, other_gate)
    assert other.done.done()
    assert kept() is None
    land(last, last_gate)
    bench.link.close()


def test_a_source_is_let_go_of_before_what_left_later_is_done(bench: Bench) -> None:
    copy, gate = bench.bring()
    freed = weakref.ref(copy.memory[0])
    leaving = torch.ones(64, dtype=torch.uint8)
    left = bench.link.take(leaving, torch.zeros_like(leaving), behind=copy.event)
    found: list[bool] = []
    left.done.add_done_callback(lambda _: found.append(freed() is None))
    land(copy, gate)
    left.done.result(timeout=20)
    bench.link.close()
    assert found == [True]


def test_who_hears_of_a_copy_finds_the_memory_of_those_before_it_let_go(bench: Bench) -> None:
    (first, first_gate), (last, last_gate) = bench.bring(), bench.bring()
    freed = weakref.ref(first.memory[0])
    bench.device.copies.to_device.copy_all = lambda pairs: None  # type: ignore[method-assign]
    land(first, first_gate)
    land(last, last_gate)
    assert freed() is not None
    assert last.done.done()
    assert freed() is None
    bench.link.close()


def test_a_copy_that_is_waited_for_is_done_before_later_ones_have_landed(bench: Bench) -> None:
    (first, first_gate), (second, second_gate) = bench.bring(), bench.bring()
    ended = threading.Event()
    second.done.add_done_callback(lambda _: None)  # watched before the first is asked for
    first.done.add_done_callback(lambda _: ended.set())
    first_gate.happen()
    assert ended.wait(timeout=20)
    assert not second.done.done()
    second_gate.happen()
    second.done.result(timeout=20)
    bench.link.close()
    assert watchers() == []


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_an_error_of_a_copy_is_heard_of_by_who_asks(bench: Bench, is_waited_for: bool) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    copy, gate = bench.bring()
    copy.event.has_happened = fail if not is_waited_for else lambda: False  # type: ignore[method-assign]
    copy.event.wait = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError, match="a copy between host memory and the device failed: CUDA error: device-side"):
        copy.done.result(timeout=20)
    assert copy.done.done()
    gate.happen()
    bench.link.close()


def test_an_interrupt_breaks_off_a_wait_for_a_copy(bench: Bench) -> None:
    copy, gate = bench.bring()
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        wait_future(copy.done, "a copy", may_leave=True)
    assert not copy.done.done()
    gate.happen()
    copy.done.result(timeout=20)
    bench.link.close()


def test_closing_waits_for_copies_that_nobody_waited_for(bench: Bench) -> None:
    (first, first_gate), (second, second_gate) = bench.bring(), bench.bring()
    first_gate.happen()
    timer = threading.Timer(0.2, second_gate.happen)
    timer.start()
    bench.link.close()
    assert first.event.has_happened()
    assert second.event.has_happened()
    assert watchers() == []


def test_many_threads_may_ask_and_wait_for_the_same_copies(bench: Bench) -> None:
    for _ in range(100):
        copies = [bench.bring() for _ in range(4)]
        threads = [threading.Thread(target=copy.done.result, args=[20]) for copy, _ in copies for _ in range(2)]
        for thread in threads:
            thread.start()
        for copy, gate in copies:
            gate.happen()
            copy.done.done()
        for thread in threads:
            thread.join(timeout=20)
        assert all(copy.done.done() for copy, _ in copies)
    bench.link.close()
