"""Offloaded activations come back as they were, and their memory is freed with their tokens."""

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.fake_device import FakeDevice
from tests.support.memory_engine import Fault, Operation
from tests.support.transfer_bench import TransferBench
from tests.support.transfer_bench import benches as benches
from zinf_compile.ir.errors import CapacityError, StoreError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.device.host_mapping import map_memory
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.layout import FileLayout
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.storage.tier_memory import TierMemory
from zinf_compile.runtime.transfer.activations import Activations
from zinf_compile.runtime.transfer.transfers import Transfers


class Bench(TransferBench):
    """Activations over an engine in memory, with room for 64 pages on host and on nvme."""

    def __init__(self, *, faults: Sequence[Fault] = (), latency_seconds: float = 0.0) -> None:
        super().__init__(faults=faults, latency_seconds=latency_seconds, staging=16 * ALIGN)
        self.activations = Activations(
            transfers=self.transfers,
            arena=self.arena,
            meter=self.meter,
            layout=self.layout,
            engine=self.engine,
            room=lambda tier: 64 * ALIGN,
        )

    def out(self, value: Tensor, tier: Tier, *, name: str = "sin") -> Tensor:
        return self.activations.swap_out(value, value.stride(), name, tier)

    def back(self, token: Tensor, like: Tensor, *, offset: int = ALIGN) -> Tensor:
        ticket = self.activations.issue_back(token, offset)
        try:
            self.transfers.wait_gather(ticket)
            return self.arena.strided_view(offset, tuple(like.shape), like.stride(), like.dtype).clone()
        finally:
            self.transfers.abandon_gathers()

    def check(self) -> None:
        self.activations.check_integrity()
        super().check()


@pytest.fixture
def bench(benches: list[Bench]) -> Bench:
    benches.append(Bench())
    return benches[0]


@pytest.fixture(params=[Tier.HOST, Tier.NVME], ids=str)
def tier(request: pytest.FixtureRequest) -> Tier:
    found: Tier = request.param
    return found


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (), (1023,), (100, 300)])
def test_a_value_comes_back_as_it_was(bench: Bench, shape: tuple[int, ...], dtype: torch.dtype, tier: Tier) -> None:
    value = (10 * values(*shape)).to(dtype)
    token = bench.out(value, tier)
    expected = value.clone()
    bench.activations.wait_out(token)
    value.zero_()  # its memory may be reused by now
    assert torch.equal(bench.back(token, expected), expected)


def test_the_layout_of_a_value_is_kept(bench: Bench, tier: Tier) -> None:
    value = values(30, 20, 10).permute(2, 0, 1)
    assert torch.equal(bench.back(bench.out(value, tier), value), value)


def test_a_kernel_may_lay_its_result_out_otherwise_than_it_was_traced(bench: Bench, tier: Tier) -> None:
    traced = torch.empty(30, 20)
    token = bench.activations.swap_out(values(20, 30).t(), traced.stride(), "sin", tier)
    assert torch.equal(bench.back(token, traced), values(20, 30).t())


def test_what_ops_read_in_place_is_kept_until_they_are_done() -> None:
    """Its memory is free when its token is dropped, no tensor is over it, and all that was enqueued by then has run."""
    device, ran = FakeDevice(integrated=True), threading.Event()
    memory, staging = TierMemory(device), StagingPool(16 * ALIGN, map_memory)
    transfers = Transfers(
        engine=None, staging=staging, arena=Arena(device), meter=Meter(), device=device, reads_in_place=lambda: True
    )
    activations = Activations(
        transfers=transfers,
        arena=Arena(device),
        meter=Meter(),
        layout=FileLayout(),
        engine=None,
        room=lambda tier: 64 * ALIGN,
        allocate=memory.allocate,
        device=device,
    )
    value = values(500, 7)
    token = activations.swap_out(device.own_memory.make(value.clone(), device.compute), (7, 1), "sin", Tier.HOST)
    activations.wait_out(token)
    there = activations.read_in_place(token, torch.float32)
    device.compute.drain()
    assert torch.equal(there.view(500, 7), value)
    assert device.copies.to_device.num_copied == 0

    def num_taken() -> int:
        activations.give_back_dropped()
        return len(activations._swapped)

    del token
    assert num_taken() == 1, "ops that are enqueued next may read it"
    device.compute.enqueue(lambda: ran.wait(10))
    del there
    threading.Timer(0.05, ran.set).start()
    assert num_taken() == 0
    assert ran.is_set()
    transfers.close()
    memory.close()
    device.close()


def test_backward_may_run_twice(bench: Bench, tier: Tier) -> None:
    value = values(500, 7)
    token = bench.out(value, tier)
    for offset in (0, 8 * ALIGN):
        assert torch.equal(bench.back(token, value, offset=offset), value)


def test_two_forwards_before_their_backwards(bench: Bench, tier: Tier) -> None:
    first, second = values(4000), -values(4000)
    tokens = [bench.out(first, tier), bench.out(second, tier)]
    assert torch.equal(bench.back(tokens[1], second), second)
    assert torch.equal(bench.back(tokens[0], first), first)


def test_what_a_token_stood_for_is_given_back_with_it(bench: Bench, tier: Tier) -> None:
    for _ in range(40):  # 10 pages each, where 64 fit
        token = bench.out(values(10 * ALIGN // 4), tier)
        saved = token.detach().view(1)
        del token
        assert bench.activations.is_token(saved)
        bench.activations.wait_out(saved)
        for future in bench.activations._find(saved).leaving:
            future.result()
        del saved
    bench.check()
    assert bench.layout.end == 0
    if tier is Tier.HOST:
        assert bench.activations.peak_host_nbytes == 10 * ALIGN
    else:
        assert bench.activations.peak_file_nbytes == 10 * ALIGN


def test_a_value_that_is_dropped_on_its_way_out_is_given_back_when_it_is_there(benches: list[Bench]) -> None:
    benches.append(bench := Bench(latency_seconds=0.2))
    bench.out(values(ALIGN), Tier.NVME)
    bench.activations.check_integrity()
    assert bench.layout.end == 4 * ALIGN
    bench.transfers.close()
    bench.check()
    assert bench.layout.end == 0


def test_too_many_forwards_at_once_are_refused(bench: Bench, tier: Tier) -> None:
    tokens = [bench.out(values(20 * ALIGN // 4), tier) for _ in range(3)]
    with pytest.raises(
        CapacityError,
        match=f"activation 'cos' needs 80.0 KiB on {tier}, where activations may take 256.0 KiB and 240.0 KiB are taken by "
        f"forwards whose backward has not run; run backward after each forward, or raise {tier}_memory by 1MiB",
    ):
        bench.out(values(20 * ALIGN // 4), tier, name="cos")
    tokens.pop()
    bench.activations.wait_out(tokens[0])
    for token in tokens:
        bench.back(token, torch.empty(20 * ALIGN // 4))
    while True:
        try:
            tokens.append(bench.out(values(20 * ALIGN // 4), tier))
        except CapacityError:
            continue  # the write of the last one was still in flight when its token was dropped
        break
    assert torch.equal(bench.back(tokens[-1], values(20 * ALIGN // 4)), values(20 * ALIGN // 4))


def test_bytes_are_counted_by_route(bench: Bench, tier: Tier) -> None:
    value = values(2 * ALIGN)
    bench.back(bench.out(value, tier), value)
    assert dict(bench.meter.moved) == {f"device -> {tier}": 8 * ALIGN, f"{tier} -> device": 8 * ALIGN}


def test_a_wait_names_the_activation(benches: list[Bench]) -> None:
    benches.append(bench := Bench(latency_seconds=0.05))
    value = values(1000)
    bench.back(bench.out(value, Tier.NVME, name="gelu_3"), value)
    assert [stall.name for stall in bench.meter.stalls] == ["gelu_3 (activation)"]


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_disk_that_fails_is_told_by_the_way_back(benches: list[Bench], operation: Operation) -> None:
    benches.append(bench := Bench(faults=[Fault(operation=operation, nth=0, kind="short")]))
    value = values(1000)
    token = bench.out(value, Tier.NVME, name="gelu_3")
    with pytest.raises(StoreError, match=rf"^gelu_3 \(activation\): {operation} of the store file"):
        bench.back(token, value)


def test_a_copy_of_a_token_outlives_nothing(bench: Bench) -> None:
    token = bench.out(values(10), Tier.HOST)
    copied = token.clone()
    assert not bench.activations.is_token(copied)
    assert not bench.activations.is_token(torch.zeros(1))
    bench.activations.wait_out(token)
    bench.back(copied, values(10))  # works as long as the token exists
    del token
    bench.activations.check_integrity()
    with pytest.raises(UnsupportedError, match=r"activation number 1 no longer exists: .* hooks on saved tensors"):
        bench.back(copied, values(10))
