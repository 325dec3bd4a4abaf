"""The tests' own GPU is as strict as a real one: compute is late, memory is reused, and no wait is hidden."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import zinf_compile
from tests.support import fake_device
from tests.support.caching_allocator import CachingAllocator
from tests.support.fake_device import AutogradThread, FakeDevice, on_fake_device
from tests.support.late_compute import LateCompute
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.device import allocations
from zinf_compile.runtime.device.allocations import with_slack
from zinf_compile.runtime.execute import op_bodies, segments
from zinf_compile.runtime.storage import state_codes
from zinf_compile.runtime.transfer.link import Link

MIB = 2**20


@pytest.fixture
def device() -> Any:
    with on_fake_device(FakeDevice(most_seconds=1e-3)) as made:
        yield made


def optimized(model: nn.Module | None = None, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96))
    given = {"device": "cuda", "device_memory": 8 * MIB, "host_memory": 16 * MIB, "tiles": False, "compute": "aten"}
    return zinf_compile.optimize(model, **{**given, **options})


def test_results_are_late(device: FakeDevice) -> None:
    gate = threading.Event()
    x = device.allocate([4], torch.float32).fill_(1.0)
    device.compute.enqueue(lambda: gate.wait() and None)
    with LateCompute(device.compute, device.own_memory):
        y = (x + 1).exp()
        view = y[:2]
    assert y.isnan().all()
    gate.set()
    device.compute.drain()
    assert torch.equal(y, torch.full([4], 2.0).exp())
    assert torch.equal(view, y[:2])


def test_compiled_code_is_enqueued_once_on_a_device_inside_another(device: FakeDevice) -> None:
    ran: list[int] = []
    library = SimpleNamespace(call=ran.append)
    with mock.patch.object(fake_device, "_find_library", return_value=library), on_fake_device() as inner:
        with LateCompute(inner.compute, inner.own_memory):
            state_codes._library_on(inner.torch_device).call(1)
            inner.compute.enqueue(lambda: ran.append(2))
        inner.compute.drain()
    assert ran == [1, 2]


def test_a_copy_that_does_not_wait_for_compute_brings_nonsense(device: FakeDevice) -> None:
    def leave(take: Callable[[Link, Tensor, Tensor], Any]) -> Tensor:
        link, gate, home = Link(device), threading.Event(), torch.zeros(4)
        x = device.allocate([4], torch.float32).fill_(1.0)
        device.compute.enqueue(lambda: gate.wait(0.1) and None)
        with LateCompute(device.compute, device.own_memory):
            y = x + 1
            take(link, y.view(torch.uint8), home.view(torch.uint8))
            link.let_go(y)
        link.close()
        return home

    assert torch.equal(leave(Link.take), torch.full([4], 2.0))
    at_once = device.compute.record()
    at_once.wait()
    assert leave(lambda link, source, home: link.take(source, home, behind=at_once)).isnan().all()


def test_memory_that_is_freed_is_reused_and_may_not_be_copied(device: FakeDevice) -> None:
    gate, home = threading.Event(), torch.zeros(1024, dtype=torch.uint8)
    value = device.allocate([1024], torch.uint8).fill_(7)
    device.copies.to_host.enqueue(lambda: gate.wait() and None)
    device.copies.to_host.copy_all([(value, home)])
    del value
    with pytest.raises(
        AssertionError, match="1024 bytes are free on the compute stream while a copy of them has not run"
    ):
        device.compute.drain()
    gate.set()
    device.copies.to_host.drain()


def test_what_is_freed_before_its_reader_has_run_is_free_at_once(device: FakeDevice) -> None:
    gate = threading.Event()
    device.compute.enqueue(lambda: gate.wait() and None)
    with LateCompute(device.compute, device.own_memory):
        x = device.allocate([1024], torch.float32)
        x.fill_(1.0)
        y = x[512:] + 1
        held = device.requested_nbytes
        del x
        freed = held - device.requested_nbytes
    gate.set()
    device.compute.drain()
    assert freed == 4096
    assert torch.equal(y, torch.full([512], 2.0))


def test_an_error_that_nobody_asks_for_is_raised_at_the_end() -> None:
    device, gate, home = FakeDevice(), threading.Event(), torch.zeros(1024, dtype=torch.uint8)
    value = device.allocate([1024], torch.uint8).fill_(7)
    device.copies.to_host.enqueue(lambda: gate.wait() and None)
    device.copies.to_host.copy_all([(value, home)])
    del value
    device.compute.enqueue(gate.set)
    with pytest.raises(AssertionError, match="are free on the compute stream while"):
        device.close()


def test_what_is_freed_is_overwritten(device: FakeDevice) -> None:
    kept = torch.empty(256)
    value = device.own_memory.make(kept, device.compute)
    value.fill_(1.0)
    del value
    device.compute.drain()
    assert kept.isnan().all()


@pytest.mark.parametrize(
    ("look", "op"),
    [
        (lambda grad: float(grad.sum()), "_local_scalar_dense"),
        (lambda grad: grad.nonzero(), "nonzero"),
        (lambda grad: torch.empty(grad.shape).copy_(grad), "copy_"),
        (lambda grad: torch.equal(grad, grad), "equal"),
    ],
    ids=["a number", "indices", "a copy", "a comparison"],
)
def test_a_hidden_wait_is_an_error(device: FakeDevice, look: Callable[[Tensor], object], op: str) -> None:
    store_gradient = op_bodies.store_gradient

    def store(record: Any, grad: Tensor, experts: Any) -> None:
        look(grad)
        store_gradient(record, grad, experts)

    model = optimized()
    with (
        mock.patch.object(op_bodies, "store_gradient", store),
        pytest.raises(AssertionError, match=rf"aten\.{op}.* wait"),
    ):
        model(torch.randn(4, 96)).sum().backward()
    zinf_compile.close(model)


def test_backward_runs_on_another_thread(device: FakeDevice) -> None:
    model, threads = optimized(), []
    x = torch.randn(4, 96, requires_grad=True)
    x.register_hook(lambda grad: threads.append(threading.current_thread().name))
    model(x).sum().backward()
    zinf_compile.close(model)
    assert threads == ["fake-autograd_0"]


def test_an_interrupt_of_backward_is_raised_when_that_has_ended() -> None:
    interrupted, ended = threading.Event(), []
    autograd = AutogradThread()

    def backward() -> None:
        assert interrupted.wait(10)
        ended.append(True)

    def interrupt(waited: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    with mock.patch("tests.support.fake_device.futures.wait", interrupt), pytest.raises(KeyboardInterrupt):
        autograd.run(backward)
    assert ended == [True]
    autograd.close()


def test_the_peak_that_the_allocator_measures_is_within_the_plans(device: FakeDevice) -> None:
    model = optimized(device_memory=2 * MIB)
    adamw = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 96)).square().sum().backward()
        adamw.step()
        adamw.zero_grad()
    report = zinf_compile.report(model)
    (tier,) = (each for each in report.tiers if each.tier is Tier.DEVICE)
    zinf_compile.close(model)
    assert tier.predicted_peak is not None
    assert 96 * 192 * 4 < tier.measured_peak <= tier.predicted_peak <= 2 * MIB
    assert report.allocator is not None
    assert report.allocator.measured_peak in range(2 * MIB, report.allocator.limit), "a segment at least"
    assert report.allocator.limit == with_slack(2 * MIB)
    assert str(report.allocator) in str(report)


def test_what_the_allocator_rounds_up_is_not_the_plans(device: FakeDevice) -> None:
    """A plan counts what tensors have. That of 800 bytes takes 1 KiB, and one of 11 MiB a segment of 12."""
    before = device.requested_nbytes, device.allocated_nbytes
    kept = [device.allocate([800], torch.uint8), device.allocate([11 * MIB + 5], torch.uint8)]
    assert device.requested_nbytes - before[0] == sum(each.numel() for each in kept) == 11 * MIB + 805
    assert device.allocated_nbytes - before[1] == 1024 + 12 * MIB
    assert device.peak_requested_nbytes < 12 * MIB < device.peak_reserved_nbytes


def test_what_timing_kernels_takes_is_not_the_models(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a second graph, which is compiled when the first has run."""
    timed: list[int] = []

    def compile_as_max_autotune(number: int, segment: Any) -> None:
        with _disable_current_modes():  # as Inductor does, which has fake tensors otherwise
            timed.append(device.allocate([24 * MIB], torch.uint8).numel())

    monkeypatch.setattr(segments, "_compile", compile_as_max_autotune)
    layers = [nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(2)]
    model = optimized(nn.Sequential(*layers), device_memory=3 * MIB, compute="inductor")
    model(torch.randn(64, 96)).square().sum().backward()
    first = len(timed)
    model(torch.randn(16, 4, 96)).square().sum().backward()
    report = zinf_compile.report(model)
    (tier,) = (each for each in report.tiers if each.tier is Tier.DEVICE)
    zinf_compile.close(model)
    assert len(report.plans) == 2
    assert len(timed) > first > 0
    assert tier.measured_peak <= tier.predicted_peak
    told = [each.getMessage() for each in caplog.records if "compiling took 24.0 MiB" in each.getMessage()]
    assert len(told) == 2


def test_a_graph_that_takes_more_than_its_limit_is_refused(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on what the allocator reserves, whose segments are larger than such models."""
    monkeypatch.setattr(allocations, "_SEGMENTS_NBYTES", -60 * MIB)
    model = optimized(device_memory=80 * MIB)
    with pytest.raises(CapacityError, match=r"needs more device memory than the plan reserves for it"):
        model(torch.randn(16384, 96)).sum().backward()
    assert device.limits[-1] is None
    zinf_compile.close(model)


def test_another_gpu_than_the_first() -> None:
    with on_fake_device(FakeDevice(name="cuda:1")) as second:
        model = optimized(device="cuda:1")
        model(torch.randn(4, 96)).sum().backward()
        zinf_compile.close(model)
        assert second.limits
        with pytest.raises(AssertionError, match="cuda is asked for, and the device is cuda:1"):
            optimized(device="cuda")


# The allocator


def test_sizes_are_rounded_and_segments_are_cut() -> None:
    allocator = CachingAllocator(2**30)
    small, medium = allocator.allocate(1, "compute"), allocator.allocate(MIB + 1, "compute")
    assert (small.nbytes, medium.nbytes) == (512, MIB + 512)
    assert allocator.allocated_nbytes == MIB + 1024
    assert allocator.reserved_nbytes == 2 * MIB + 20 * MIB
    large = allocator.allocate(11 * MIB, "compute")
    assert allocator.reserved_nbytes == 22 * MIB, "it is cut from what is left of the segment"
    huge = allocator.allocate(31 * MIB + 1, "compute")
    assert allocator.reserved_nbytes == 22 * MIB + 32 * MIB
    assert huge.nbytes == 32 * MIB, "what is left is too little to be cut off"
    for block in (small, medium, large, huge):
        allocator.free(block)
    assert allocator.allocated_nbytes == 0
    allocator.give_back()
    assert allocator.reserved_nbytes == 0, "neighbours that are free are one block again"
    assert allocator.peak_allocated_nbytes == MIB + 1024 + 11 * MIB + 32 * MIB


def test_each_stream_has_blocks_of_its_own() -> None:
    allocator = CachingAllocator(2**30)
    allocator.free(allocator.allocate(4 * MIB, "compute"))
    allocator.allocate(4 * MIB, "update")
    assert allocator.reserved_nbytes == 40 * MIB
    allocator.allocate(4 * MIB, "compute")
    assert allocator.reserved_nbytes == 40 * MIB


def test_expandable_segments_take_pages_where_they_are_missing() -> None:
    allocator = CachingAllocator(2**30, is_expandable=True)
    first, second = allocator.allocate(31 * MIB + 1, "compute"), allocator.allocate(8 * MIB, "compute")
    assert (first.nbytes, first.requested_nbytes) == (31 * MIB + 512, 31 * MIB + 1), "everything is cut off"
    assert allocator.reserved_nbytes == 40 * MIB, "two pages of 20 MiB"
    allocator.free(first)
    third = allocator.allocate(36 * MIB, "compute")
    assert allocator.reserved_nbytes == 80 * MIB
    assert third.start == second.start + second.nbytes, "behind the second, with what is left of its page"
    small = allocator.allocate(5, "compute")
    assert (allocator.reserved_nbytes, small.start) == (82 * MIB, 0)
    allocator.free(second)
    allocator.give_back()
    assert allocator.reserved_nbytes == 62 * MIB, "the first page, where nothing is any more"
    again = allocator.allocate(24 * MIB, "compute")
    assert (again.start, allocator.reserved_nbytes) == (0, 82 * MIB), (
        "a page at the lowest addresses, before one in part"
    )
    for block in (third, small, again):
        allocator.free(block)
    allocator.give_back()
    assert (allocator.reserved_nbytes, allocator.allocated_nbytes, allocator.requested_nbytes) == (0, 0, 0)


def test_expandable_segments_keep_to_the_limit() -> None:
    allocator = CachingAllocator(100 * MIB, is_expandable=True)
    allocator.set_limit(50 * MIB)
    allocator.free(allocator.allocate(24 * MIB, "compute"))
    allocator.allocate(30 * MIB, "update")
    assert (allocator.reserved_nbytes, allocator.num_given_back) == (40 * MIB, 1)
    with pytest.raises(torch.OutOfMemoryError, match="41943040 of 52428800 are reserved"):
        allocator.allocate(12 * MIB, "compute")
    allocator.set_limit(None)
    allocator.allocate(50 * MIB, "compute")
    with pytest.raises(torch.OutOfMemoryError, match="are reserved"):
        allocator.allocate(12 * MIB, "update2")


def test_what_is_cached_is_given_back_before_memory_is_refused() -> None:
    allocator = CachingAllocator(2**30)
    allocator.set_limit(50 * MIB)
    allocator.free(allocator.allocate(24 * MIB, "compute"))
    allocator.allocate(40 * MIB, "update")
    assert allocator.reserved_nbytes == 40 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="41943040 of 52428800 are reserved"):
        allocator.allocate(12 * MIB, "compute")
    allocator.set_limit(None)
    allocator.allocate(12 * MIB, "compute")
