"""The staging pool: its budget, its order, and its memory."""

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from zinf_compile.ir.errors import CapacityError, StoreError, VerifyError
from zinf_compile.runtime.storage.staging import StagingBuffer, StagingPool, _Idle

PAGE = 4096


def address_of(buffer: StagingBuffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer.view))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for_waiting(pool: StagingPool, num_waiting: int) -> None:
    wait_for(lambda: len(pool._waiting) == num_waiting)


def test_view_is_aligned_writable_and_of_the_asked_length() -> None:
    pool = StagingPool(1 << 20)
    with pool.lease(PAGE + 5) as buffer, pool.lease(1) as other:
        assert (len(buffer.view), buffer.nbytes, buffer.reserved_nbytes) == (PAGE + 5, PAGE + 5, 2 * PAGE)
        assert buffer.view.format == "B"
        assert address_of(buffer) % PAGE == address_of(other) % PAGE == 0
        buffer.view[:] = b"\x05" * (PAGE + 5)
        other.view[0] = 6
        assert bytes(buffer.view) == b"\x05" * (PAGE + 5)
        pool.check_integrity()
    pool.check_integrity(expect_idle=True)


def test_memory_of_the_same_size_is_reused() -> None:
    pool = StagingPool(64 * PAGE)
    with pool.lease(4 * PAGE) as buffer:
        first = address_of(buffer)
    with pool.lease(4 * PAGE - 7) as buffer:
        assert address_of(buffer) == first
        assert len(buffer.view) == 4 * PAGE - 7
        with pool.lease(4 * PAGE) as other:
            assert address_of(other) != first
    assert pool.peak_nbytes == 8 * PAGE


def test_idle_memory_counts_and_is_dropped_for_room() -> None:
    pool = StagingPool(8 * PAGE)
    for num_pages in (1, 2, 3):
        with pool.lease(num_pages * PAGE):
            pass
    assert pool.peak_nbytes == 6 * PAGE
    with pool.lease(5 * PAGE):
        assert [len(idle.memory) for idle in pool._idle] == [3 * PAGE], "the oldest go first, and only as needed"
        pool.check_integrity()
    with pool.lease(8 * PAGE):
        assert not pool._idle
    assert pool.peak_nbytes == 8 * PAGE
    pool.check_integrity(expect_idle=True)


def test_a_returned_buffer_can_be_leased_again_with_its_bytes() -> None:
    pool = StagingPool(4 * PAGE)
    notes = [object() for _ in range(3)]
    for number, note in enumerate(notes):
        buffer = pool.lease(PAGE)
        buffer.view[:] = bytes([number]) * PAGE
        pool.return_(buffer, holds=note)
    assert pool.lease_holding(object()) is None
    for _ in range(2):
        for number, note in enumerate(notes):
            again = pool.lease_holding(note)
            assert again is not None
            assert pool.lease_holding(note) is None, "it is leased"
            assert bytes(again.view) == bytes([number]) * PAGE
            pool.check_integrity()
            pool.return_(again, holds=note)
    assert pool.peak_nbytes == 3 * PAGE
    pool.drop_idle()
    assert pool.lease_holding(notes[0]) is None
    pool.check_integrity(expect_idle=True)


def test_other_leases_take_memory_that_holds_something_last_and_the_longest_unused_first() -> None:
    pool = StagingPool(4 * PAGE)
    empty, first, second = (pool.lease(PAGE) for _ in range(3))
    notes = [object(), object()]
    pool.return_(empty)
    pool.return_(first, holds=notes[0])
    pool.return_(second, holds=notes[1])
    taken = [pool.lease(PAGE)]
    assert pool.held_nbytes == 3 * PAGE, "memory that holds nothing was there"
    taken.append(pool.lease(PAGE))
    assert pool.held_nbytes == 4 * PAGE, "there was room for more"
    taken.append(pool.lease(PAGE))
    assert pool.lease_holding(notes[0]) is None
    kept = pool.lease_holding(notes[1])
    assert kept is not None
    for buffer in (*taken, kept):
        pool.return_(buffer)
    pool.check_integrity(expect_idle=True)


def test_dropped_memory_stays_valid_for_who_kept_a_view() -> None:
    pool = StagingPool(2 * PAGE)
    buffer = pool.lease(PAGE)
    kept = buffer.view
    kept[0] = 7
    pool.return_(buffer)
    with pool.lease(2 * PAGE) as other:
        other.view[:] = bytes(2 * PAGE)
    pool.close()
    assert kept[0] == 7


def test_use_after_return_is_refused() -> None:
    pool = StagingPool(PAGE)
    buffer = pool.lease(9)
    pool.return_(buffer)
    with pytest.raises(VerifyError, match="a staging buffer of 9 bytes was used after it was returned"):
        _ = buffer.view
    with pytest.raises(VerifyError, match="a staging buffer of 9 bytes was returned twice"):
        pool.return_(buffer)
    pool.check_integrity(expect_idle=True)


def test_another_pools_buffer_is_refused() -> None:
    pool, other = StagingPool(PAGE), StagingPool(PAGE)
    with pool.lease(1) as buffer:
        with pytest.raises(VerifyError, match="to a pool it is not from"):
            other.return_(buffer)
        assert len(buffer.view) == 1


def test_what_can_never_fit_fails_at_once() -> None:
    pool = StagingPool(2 * PAGE)
    with pool.lease(PAGE):
        with pytest.raises(
            CapacityError, match=r"does not fit in a pool of .* raise the pool's capacity to 12288 bytes"
        ):
            pool.lease(2 * PAGE + 1)
        with pytest.raises(VerifyError, match="cannot lease 0 bytes"):
            pool.lease(0)


def test_timeout_says_who_holds_the_room_and_leaves_the_queue() -> None:
    pool = StagingPool(2 * PAGE)
    with pool.lease(PAGE):
        with pytest.raises(CapacityError, match=r"within 0\.01 seconds: .* are leased in 1 buffers, 0 others wait"):
            pool.lease(2 * PAGE, timeout_seconds=0.01)
        with pool.lease(PAGE, timeout_seconds=0):
            pass


def test_a_waiter_that_gives_up_lets_the_next_one_in() -> None:
    pool = StagingPool(2 * PAGE)
    held = pool.lease(PAGE)
    with ThreadPoolExecutor(2) as threads:
        big = threads.submit(pool.lease, 2 * PAGE, timeout_seconds=0.3)
        wait_for_waiting(pool, 1)
        small = threads.submit(pool.lease, PAGE)
        assert isinstance(big.exception(timeout=60), CapacityError)
        pool.return_(small.result(timeout=60))
    pool.return_(held)
    pool.check_integrity(expect_idle=True)


def test_leases_are_served_in_order() -> None:
    pool = StagingPool(4 * PAGE)
    held = pool.lease(2 * PAGE)
    with ThreadPoolExecutor(2) as threads:
        big = threads.submit(pool.lease, 4 * PAGE)
        wait_for_waiting(pool, 1)
        small = threads.submit(pool.lease, PAGE)
        wait_for_waiting(pool, 2)
        assert not big.done()
        assert not small.done(), "a small lease that would fit overtook the big one before it"
        pool.return_(held)
        leased = big.result(timeout=60)
        assert not small.done()
        pool.return_(leased)
        pool.return_(small.result(timeout=60))
    pool.check_integrity(expect_idle=True)


def test_who_leaves_room_lets_others_go_first() -> None:
    pool = StagingPool(4 * PAGE)
    held = [pool.lease(PAGE, leaves=2 * PAGE) for _ in range(2)]
    assert pool.try_lease(PAGE, leaves=2 * PAGE) is None
    with ThreadPoolExecutor(3) as threads:
        patient = [threads.submit(pool.lease, PAGE, leaves=2 * PAGE) for _ in range(2)]
        wait_for_waiting(pool, 2)
        urgent = pool.try_lease(2 * PAGE)
        assert urgent is not None
        other = threads.submit(pool.lease, 2 * PAGE)
        wait_for_waiting(pool, 3)
        pool.return_(held.pop())
        pool.return_(held.pop())
        held.append(other.result(timeout=60))  # before those that have waited for longer
        assert not any(each.done() for each in patient)
        pool.return_(urgent)
        pool.return_(held.pop())
        held += [each.result(timeout=60) for each in patient]
    for each in held:
        pool.return_(each)
    pool.check_integrity(expect_idle=True)


def test_room_is_left_only_where_there_can_be_some() -> None:
    pool = StagingPool(4 * PAGE)
    pool.return_(pool.lease(4 * PAGE, leaves=3 * PAGE))
    lease = pool.try_lease(3 * PAGE, leaves=3 * PAGE)
    assert lease is not None
    pool.return_(lease)


def test_leases_in_shares_reuse_memory_of_other_leases() -> None:
    pool = StagingPool(64 * PAGE)
    for num_pages, taken in ((1, 1), (2, 4), (3, 4), (5, 8), (8, 8), (9, 16), (17, 32), (33, 33), (64, 64)):
        with pool.lease(num_pages * PAGE, in_shares=True) as buffer:
            assert (buffer.nbytes, buffer.reserved_nbytes) == (num_pages * PAGE, taken * PAGE)
    pool.drop_idle()
    addresses = []
    for num_pages in (9, 16, 12):
        with pool.lease(num_pages * PAGE, in_shares=True) as buffer:
            addresses.append(address_of(buffer))
    assert len(set(addresses)) == 1
    four = [pool.lease(13 * PAGE, in_shares=True) for _ in range(4)]
    assert pool.try_lease(1) is None
    for buffer in four:
        pool.return_(buffer)
    pool.check_integrity(expect_idle=True)


def test_close_wakes_the_waiting_and_takes_back_the_leased() -> None:
    pool = StagingPool(PAGE)
    held = pool.lease(PAGE)
    with ThreadPoolExecutor(2) as threads:
        waiting: list[Future[StagingBuffer]] = [threads.submit(pool.lease, PAGE) for _ in range(2)]
        wait_for_waiting(pool, 2)
        pool.close()
        for future in waiting:
            error = future.exception(timeout=60)
            assert isinstance(error, StoreError)
            assert "the staging pool is closed" in str(error)
    pool.close()
    held.view[0] = 1
    pool.return_(held)
    assert not pool._idle
    with pytest.raises(StoreError, match="the staging pool is closed"):
        pool.lease(1)
    pool.check_integrity(expect_idle=True)


def test_check_integrity_finds_what_was_not_returned_and_wrong_sums() -> None:
    pool = StagingPool(4 * PAGE)
    buffer = pool.lease(PAGE)
    pool.check_integrity()
    with pytest.raises(VerifyError, match=r"1 staging buffers \(4096 bytes\) were not returned"):
        pool.check_integrity(expect_idle=True)
    pool._idle.append(_Idle(pool._leased[buffer], None))
    with pytest.raises(VerifyError, match="leased twice, or both leased and idle"):
        pool.check_integrity()
    pool._idle.clear()
    pool._leased_nbytes += 1
    with pytest.raises(VerifyError, match="counts 4097 bytes leased and 0 idle, but holds 4096 and 0"):
        pool.check_integrity()


def test_an_exception_in_the_block_returns_the_buffer() -> None:
    pool = StagingPool(PAGE)
    with pytest.raises(KeyError), pool.lease(1):
        raise KeyError
    pool.check_integrity(expect_idle=True)


def test_eight_threads_stay_within_the_budget() -> None:
    pool = StagingPool(16 * PAGE)
    owners: dict[int, int] = {}
    lock = threading.Lock()

    def work(worker: int) -> None:
        chance = random.Random(worker)
        for _ in range(200):
            with pool.lease(chance.randint(1, 16 * PAGE)) as buffer:
                address = address_of(buffer)
                with lock:
                    assert owners.setdefault(address, worker) == worker, "the same memory is leased twice"
                buffer.view[0] = buffer.view[-1] = worker
                pool.check_integrity()
                assert pool.held_nbytes <= 16 * PAGE
                assert buffer.view[-1] == worker
                with lock:
                    del owners[address]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert pool.peak_nbytes <= 16 * PAGE
    pool.check_integrity(expect_idle=True)


def test_a_forked_child_does_not_get_the_memory() -> None:
    def is_mapped(address: int) -> bool:
        with open("/proc/self/maps") as maps:
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        return any(start <= address < stop for start, stop in ranges)

    with StagingPool(PAGE).lease(PAGE) as buffer:
        address = address_of(buffer)
        assert is_mapped(address)
        child = os.fork()
        if child == 0:
            os._exit(is_mapped(address))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
