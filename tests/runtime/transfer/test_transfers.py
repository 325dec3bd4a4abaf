"""Transfers: bytes arrive unchanged, errors are raised once, and nothing stays in flight."""

import time

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.memory_engine import Fault
from tests.support.transfer_bench import TransferBench
from tests.support.transfer_bench import benches as benches
from zinf_compile.ir.errors import StoreError, VerifyError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.params.copies import Copies, Seat
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.params.views import PlainViews
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.slots import Slot, map_tensor
from zinf_compile.runtime.transfer.transfers import Transfers


class Bench(TransferBench):
    """Transfers over an engine in memory, and slots to move."""

    def slot(self, name: str, *shape: int, tier: Tier = Tier.NVME, dtype: torch.dtype = torch.float32) -> Slot:
        size = torch.Size(shape)
        if tier is not Tier.NVME:
            return Slot(slice=Slice.of_whole(name, size), tier=tier, tensor=torch.zeros(size, dtype=dtype))
        extent = self.layout.allocate(size.numel() * dtype.itemsize)
        self.engine.reserve(self.layout.end)
        mapped = map_tensor(self.engine.map(extent.offset, extent.reserved_nbytes), size, dtype)
        return Slot(slice=Slice.of_whole(name, size), tier=tier, tensor=mapped, extent=extent)

    def record(self, slot: Slot) -> StoredParameter:
        parameter = Parameter(slot.tensor, requires_grad=False)
        return StoredParameter(
            param=0,
            name=slot.name,
            parameter=parameter,
            shape=parameter.shape,
            views=PlainViews(),
            store=None,  # type: ignore[arg-type]  # transfers do not use it
            dtype=slot.tensor.dtype,
            copies=Copies(compute=slot, master=slot, seat=Seat(torch.empty(0))),
        )


@pytest.fixture
def bench(benches: list[Bench]) -> Bench:
    benches.append(Bench())
    return benches[0]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (1023,), (4096,), (257, 193), (300, 700)])
def test_a_value_comes_back_as_it_was(bench: Bench, shape: tuple[int, ...], dtype: torch.dtype, tier: Tier) -> None:
    before, slot, after = (bench.slot(name, *shape, tier=tier, dtype=dtype) for name in ("before", "w", "after"))
    value = values(*shape, dtype=dtype)
    bench.transfers.tensors.write_value(slot, value)
    bench.transfers.tensors.wait_writes()
    read = torch.empty_like(value)
    bench.transfers.tensors.read_value(slot, read)
    assert torch.equal(read, value)
    assert torch.equal(slot.tensor, value)
    assert not before.tensor.any()
    assert not after.tensor.any()


@pytest.mark.parametrize(
    ("ends", "experts"),
    [
        ([0, 0, 0, 0], []),
        ([2, 2, 2, 5], [range(1), range(3, 4)]),
        ([1, 2, 2, 3], [range(2), range(3, 4)]),  # neighbours are one range
        ([0, 4, 5, 9], [range(1, 4)]),
        ([7, 7, 7, 7], [range(1)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_experts_with_rows_are_found(bench: Bench, ends: list[int], experts: list[range], dtype: torch.dtype) -> None:
    assert bench.transfers.find_experts(torch.tensor(ends, dtype=dtype)) == experts


def test_a_value_is_cast_to_the_slots_dtype_on_the_way(bench: Bench) -> None:
    slot = bench.slot("w", 70_001, dtype=torch.bfloat16)
    value = values(70_001)
    bench.transfers.tensors.write_value(slot, value)
    bench.transfers.tensors.wait_writes()
    assert torch.equal(slot.tensor, value.bfloat16())


def test_a_transposed_value_is_written_in_its_own_order(bench: Bench) -> None:
    slot = bench.slot("w", 300, 200)
    value = values(200, 300).t()
    bench.transfers.tensors.write_value(slot, value)
    bench.transfers.tensors.wait_writes()
    assert torch.equal(slot.tensor, value)


def test_the_value_may_change_once_it_was_given_away() -> None:
    bench = Bench(latency_seconds=0.02)
    slot, value = bench.slot("w", 1000), values(1000)
    kept = value.clone()
    bench.transfers.tensors.write_value(slot, value)
    value.zero_()
    bench.transfers.tensors.wait_writes()
    assert torch.equal(slot.tensor, kept)
    bench.transfers.close()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_adding_to_a_value(bench: Bench, tier: Tier) -> None:
    slot = bench.slot("w (gradient)", 70_001, tier=tier, dtype=torch.bfloat16)
    first, second = values(70_001, dtype=torch.bfloat16), values(70_001) * 3
    bench.transfers.tensors.write_value(slot, first)
    bench.transfers.tensors.wait_writes()
    bench.transfers.tensors.add_value(slot, second.bfloat16())
    bench.transfers.tensors.wait_writes()
    assert torch.equal(slot.tensor, first + second.bfloat16())


def test_additions_without_a_wait_between_them_all_count(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write = bench.engine.write

    def write_late(offset: int, buffer: memoryview) -> None:
        time.sleep(0.02)  # so that a read that does not wait for it would overtake it
        write(offset, buffer)

    monkeypatch.setattr(bench.engine, "write", write_late)
    slot = bench.slot("w (gradient)", 5000)
    bench.transfers.tensors.write_value(slot, torch.ones(5000))
    bench.transfers.tensors.add_value(slot, torch.ones(5000))
    bench.transfers.tensors.add_value(slot, torch.ones(5000))
    bench.transfers.tensors.wait_writes()
    assert torch.equal(slot.tensor, torch.full((5000,), 3.0))


def test_staging_smaller_than_a_value_is_enough(benches: list[Bench]) -> None:
    benches.append(Bench(staging=4 * ALIGN))
    bench = benches[0]
    slot, value, read = bench.slot("w", 100_003), values(100_003), torch.empty(100_003)
    bench.transfers.tensors.write_value(slot, value)
    bench.transfers.tensors.wait_writes()
    bench.transfers.tensors.read_value(slot, read)
    assert torch.equal(read, value)
    assert bench.staging.peak_nbytes <= 4 * ALIGN


@pytest.mark.parametrize("tier", Tier)
def test_gathers_arrive_in_the_arena(bench: Bench, tier: Tier) -> None:
    slots = [bench.slot(f"w{index}", size, tier=tier) for index, size in enumerate((5000, 3, 1024))]
    wanted = [values(slot.tensor.numel()) + index for index, slot in enumerate(slots)]
    for slot, value in zip(slots, wanted, strict=True):
        bench.transfers.tensors.write_value(slot, value)
    bench.transfers.tensors.wait_writes()
    offsets = [3 * ALIGN, 8 * ALIGN, 9 * ALIGN]
    ticket = bench.transfers.issue_gather([bench.record(slot) for slot in slots], [torch.float32] * 3, offsets)
    assert bench.arena.taken_nbytes == 7 * ALIGN
    assert bench.transfers.wait_gather(ticket)
    assert not bench.transfers.wait_gather(ticket), "only the first wait returns True"
    for slot, value, offset in zip(slots, wanted, offsets, strict=True):
        assert torch.equal(bench.arena.view(offset, slot.tensor.shape, torch.float32), value)
    bench.transfers.release(ticket)
    assert bench.arena.taken_nbytes == 0


def test_neighbours_in_the_file_are_one_read(bench: Bench) -> None:
    slots = [bench.slot(f"w{index}", 1024) for index in range(5)]
    before = bench.engine._num_started["read"]
    ticket = bench.transfers.issue_gather(
        [bench.record(slot) for slot in slots], [torch.float32] * 5, [ALIGN * i for i in range(5)]
    )
    bench.transfers.wait_gather(ticket)
    bench.transfers.release(ticket)
    assert bench.engine._num_started["read"] - before == 1


def test_neighbours_in_the_file_that_are_apart_in_the_arena_are_not(bench: Bench) -> None:
    slots = [bench.slot(f"w{index}", 1024) for index in range(2)]
    for index, slot in enumerate(slots):
        slot.tensor.fill_(index + 1)
    ticket = bench.transfers.issue_gather([bench.record(slot) for slot in slots], [torch.float32] * 2, [0, 3 * ALIGN])
    bench.transfers.wait_gather(ticket)
    for index, offset in enumerate((0, 3 * ALIGN)):
        assert bench.arena.view(offset, (1024,), torch.float32).unique().tolist() == [index + 1]
    bench.transfers.release(ticket)


def test_bytes_of_a_transfer_in_flight_are_not_given_to_another(bench: Bench) -> None:
    slots = [bench.record(bench.slot(f"w{index}", 2048)) for index in range(2)]
    ticket = bench.transfers.issue_gather(slots[:1], [torch.float32], [0])
    with pytest.raises(VerifyError, match="are taken by"):
        bench.transfers.issue_gather(slots[1:], [torch.float32], [ALIGN])
    with pytest.raises(VerifyError, match="transfer of w0 is released before it was waited for"):
        bench.transfers.release(ticket)
    bench.transfers.abandon_gathers()


def test_a_gather_that_compute_never_waits_for_is_abandoned(benches: list[Bench]) -> None:
    benches.append(Bench(latency_seconds=0.05))
    bench = benches[0]
    bench.transfers.issue_gather([bench.record(bench.slot("w", 5000))], [torch.float32], [0])
    bench.transfers.abandon_gathers()
    bench.check()


@pytest.mark.parametrize("kind", ["error", "short"])
def test_a_failed_read_names_parameter_file_and_offset_and_leaves_nothing(kind: str, benches: list[Bench]) -> None:
    benches.append(Bench(faults=[Fault(operation="read", nth=1, kind=kind)], latency_seconds=0.005))  # type: ignore[arg-type]
    bench = benches[0]
    bench.slot("first", 1024)
    slot, destination = bench.slot("layers.3.up.weight", 100_000), torch.zeros(100_000)
    with pytest.raises(
        StoreError, match=r"^layers\.3\.up\.weight: read of the store file in memory .* at offset \d+ fai"
    ):
        bench.transfers.tensors.read_value(slot, destination)
    bench.check()
    bench.transfers.tensors.read_value(slot, destination)


@pytest.mark.parametrize("kind", ["error", "short"])
def test_a_failed_write_is_raised_by_the_wait_and_once(kind: str, benches: list[Bench]) -> None:
    benches.append(Bench(faults=[Fault(operation="write", nth=2, kind=kind)]))  # type: ignore[arg-type]
    bench = benches[0]
    slot = bench.slot("w", 100_000)
    bench.transfers.tensors.write_value(slot, values(100_000))
    with pytest.raises(StoreError, match=r"^w: write of the store file in memory .* at offset \d+ failed after \d+ of"):
        bench.transfers.tensors.wait_writes()
    bench.transfers.tensors.wait_writes()
    bench.check()


def test_a_failed_read_while_adding_returns_the_staging_buffer(benches: list[Bench]) -> None:
    benches.append(Bench(faults=[Fault(operation="read", nth=0, kind="error")]))
    bench = benches[0]
    with pytest.raises(StoreError, match="w: read"):
        bench.transfers.tensors.add_value(bench.slot("w", 1000), values(1000))
    bench.check()


def test_bytes_moved_are_counted(bench: Bench) -> None:
    slot = bench.slot("w", 1024)
    bench.transfers.tensors.write_value(slot, values(1024), Tier.DEVICE)
    bench.transfers.tensors.wait_writes()
    bench.transfers.tensors.read_value(slot, torch.empty(1024))
    assert dict(bench.meter.moved) == {"device -> nvme": ALIGN, "nvme -> device": ALIGN}
    assert (bench.engine.bytes_read, bench.engine.bytes_written) == (ALIGN, ALIGN)


def test_without_a_disk_a_slot_on_nvme_is_a_bug_of_ours() -> None:
    bench = Bench()
    slot = bench.slot("w", 1024)
    transfers = Transfers(engine=None, staging=bench.staging, arena=bench.arena, meter=bench.meter)
    with pytest.raises(VerifyError, match="the store has no nvme folder"):
        transfers.tensors.read_value(slot, torch.empty(1024))
    transfers.close()
    bench.transfers.close()
    bench.check()


def test_waiting_for_room_in_staging_is_a_stall(benches: list[Bench]) -> None:
    bench = Bench(latency_seconds=0.05, staging=4 * ALIGN)
    benches.append(bench)
    slot = bench.slot("w", 8 * ALIGN, dtype=torch.uint8)
    bench.transfers.tensors.write_value(slot, values(8 * ALIGN).to(torch.uint8))  # in pieces of a quarter of staging
    assert [stall.name for stall in bench.meter.stalls] == ["room for w"]
    bench.transfers.tensors.wait_writes()


def test_a_value_that_is_read_whole_is_waited_for(benches: list[Bench]) -> None:
    bench = Bench(latency_seconds=0.05)
    benches.append(bench)
    slot = bench.slot("w", 1024)
    bench.transfers.tensors.read_value(slot, torch.empty(1024))
    assert [stall.name for stall in bench.meter.stalls] == ["w"]
