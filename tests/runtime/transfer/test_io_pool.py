"""The I/O pool: what compute waits for goes first, and errors arrive where they are waited for."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import delays
from zinf_compile.ir.errors import StoreError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.storage.futures import wait_all
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.transfer import io_pool
from zinf_compile.runtime.transfer.io_pool import IOPool


class Disk:
    """An engine whose first call lasts until it is let go, and which fails at offset 13."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.has_begun = threading.Event()
        self.goes_on = threading.Event()

    def read(self, offset: int, buffer: memoryview) -> None:
        self.calls.append(offset)
        self.has_begun.set()
        assert self.goes_on.wait(60)
        if offset == 13:
            raise StoreError("no such bytes")

    write = read


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def pool(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[IOPool]:
    """A pool with one thread, whose order can be seen."""
    monkeypatch.setattr(io_pool, "_NUM_THREADS", 1)
    link: Any = SimpleNamespace(close=lambda: None, begin_thread=lambda: None)
    engine: Any = disk
    pool = IOPool(engine=engine, staging=StagingPool(2**20), meter=Meter(), link=link)
    yield pool
    disk.goes_on.set()
    pool.close()


def slot(name: str = "a.weight") -> Any:
    return SimpleNamespace(name=name, device_bytes=None)


def test_what_compute_waits_for_goes_first(pool: IOPool, disk: Disk) -> None:
    room = memoryview(bytearray(8))
    first = pool.read(slot(), 0, room)  # holds up the others
    assert disk.has_begun.wait(60)
    futures = [
        *first,
        *pool.read(slot(), 1, room),  # of an update
        *pool.write(slot(), 2, room),  # of an update
        *pool.write(slot(), 3, room, Tier.DEVICE),  # of a gradient
        *pool.read(slot(), 4, room, Tier.DEVICE),  # of a gather
        *pool.write(slot(), 5, room, Tier.DEVICE),
        *pool.read(slot(), 6, room, Tier.DEVICE),
        pool.submit(lambda: disk.calls.append(7)),
    ]
    disk.goes_on.set()
    wait_all(futures, "all of it")
    assert disk.calls == [0, 4, 6, 3, 5, 7, 1, 2]


def test_a_value_is_read_block_by_block(pool: IOPool, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_pool, "_BLOCK_NBYTES", 4)
    disk.goes_on.set()
    wait_all(pool.read(slot(), 100, memoryview(bytearray(10))), "all of it")
    assert disk.calls == [100, 104, 108]


def test_an_error_names_the_slot(pool: IOPool, disk: Disk) -> None:
    disk.goes_on.set()
    futures = [
        *pool.read(slot("b.bias"), 13, memoryview(bytearray(8))),
        *pool.read(slot(), 0, memoryview(bytearray(8))),
    ]
    with pytest.raises(StoreError, match=r"b\.bias: no such bytes"):
        wait_all(futures, "them")
    assert disk.calls == [13, 0]  # the thread goes on


def test_a_closed_pool_refuses_calls_and_has_run_the_others(pool: IOPool, disk: Disk) -> None:
    futures = [*pool.read(slot(), 0, memoryview(bytearray(8))), *pool.read(slot(), 1, memoryview(bytearray(8)))]
    disk.goes_on.set()
    pool.close()
    assert all(future.done() for future in futures)
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.read(slot(), 2, memoryview(bytearray(8)))
    assert disk.calls == [0, 1]
    assert pool._waiting == []


def test_transfers_are_late_before_or_after_they_move_bytes_where_a_test_asks(
    pool: IOPool, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.goes_on.set()
    sleeps = list[tuple[int, float]]()  # with the calls that the disk had by then
    monkeypatch.setattr(
        delays, "time", SimpleNamespace(sleep=lambda seconds: sleeps.append((len(disk.calls), seconds)))
    )
    with delays.delayed(seed=0):
        for number in range(30):
            wait_all(pool.read(slot(), 100 * number, memoryview(bytearray(8))), "it")
    assert disk.calls == [100 * number for number in range(30)]
    assert [count for count, _ in sleeps] == [each for number in range(30) for each in (number, number + 1)]
    for late in ([seconds for _, seconds in sleeps[::2]], [seconds for _, seconds in sleeps[1::2]]):
        assert 5 <= sum(seconds > 0 for seconds in late) <= 15
        assert max(late) <= 0.01
