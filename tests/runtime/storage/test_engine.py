"""What every engine promises, run on each of them."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory_engine import Fault, MemoryEngine
from zinf_compile.ir.errors import CapacityError, ConfigError, StoreError, VerifyError
from zinf_compile.runtime.storage.engine import ALIGN, Engine
from zinf_compile.runtime.storage.nvme.posix import PosixEngine

ENGINES: list[tuple[str, Callable[[Path], Engine]]] = [
    ("memory", lambda folder: MemoryEngine(max_nbytes=64 << 20)),
    ("posix", lambda folder: PosixEngine(folder, direct=False)),
    ("posix_direct", lambda folder: PosixEngine(folder)),
]


@pytest.fixture(params=[make for _, make in ENGINES], ids=[name for name, _ in ENGINES])
def engine(request: pytest.FixtureRequest, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> Iterator[Engine]:
    """Return an empty engine; O_DIRECT falls back with a warning if the temporary folder does not support it."""
    with request.param(tmp_path) as made:
        yield made


def make_buffer(nbytes: int, fill: int = 0) -> memoryview:
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = bytes([fill]) * nbytes
    return view


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_read_gives_what_was_written(engine: Engine) -> None:
    engine.reserve(8 * ALIGN)
    engine.write(ALIGN, make_buffer(2 * ALIGN, 7))
    engine.write(3 * ALIGN, make_buffer(ALIGN, 9))
    found = make_buffer(4 * ALIGN, 255)
    engine.read(ALIGN, found)
    assert bytes(found[: 2 * ALIGN]) == b"\x07" * 2 * ALIGN
    assert bytes(found[2 * ALIGN : 3 * ALIGN]) == b"\x09" * ALIGN
    assert bytes(found[3 * ALIGN :]) == bytes(ALIGN), "reserved bytes that were never written read as zeros"


def test_write_takes_a_read_only_buffer_and_read_does_not(engine: Engine) -> None:
    engine.reserve(ALIGN)
    buffer = make_buffer(ALIGN, 3)
    engine.write(0, buffer.toreadonly())
    with pytest.raises(VerifyError, match="the buffer is read-only"):
        engine.read(0, buffer.toreadonly())


def test_counters_count_completed_bytes_only(engine: Engine) -> None:
    engine.reserve(4 * ALIGN)
    engine.write(0, make_buffer(3 * ALIGN))
    engine.read(0, make_buffer(ALIGN))
    with pytest.raises(VerifyError):
        engine.read(4 * ALIGN, make_buffer(ALIGN))
    assert (engine.bytes_read, engine.bytes_written) == (ALIGN, 3 * ALIGN)


def test_reserve_rounds_up_grows_and_never_shrinks(engine: Engine) -> None:
    assert engine.nbytes == 0
    engine.reserve(ALIGN + 1)
    assert engine.nbytes == 2 * ALIGN
    engine.write(0, make_buffer(2 * ALIGN, 5))
    engine.reserve(1)
    assert engine.nbytes == 2 * ALIGN
    engine.reserve(16 << 20)
    found = make_buffer(2 * ALIGN)
    engine.read(0, found)
    assert bytes(found) == b"\x05" * 2 * ALIGN, "growing keeps what was written"


def test_reserve_says_what_is_missing(engine: Engine) -> None:
    engine.reserve(ALIGN)
    with pytest.raises(CapacityError, match=r"needs 4194304\.00 GiB in .*GiB are free there.* train a smaller model"):
        engine.reserve(1 << 52)
    assert engine.nbytes == ALIGN
    engine.write(0, make_buffer(ALIGN))


def test_map_and_transfers_see_each_others_bytes(engine: Engine) -> None:
    engine.reserve(8 * ALIGN)
    view = engine.map(ALIGN, 2 * ALIGN)
    assert (len(view), view.readonly) == (2 * ALIGN, False)
    engine.write(2 * ALIGN, make_buffer(ALIGN, 11))
    assert bytes(view[ALIGN:]) == b"\x0b" * ALIGN
    view[:4] = b"here"
    found = make_buffer(ALIGN)
    engine.read(ALIGN, found)
    assert bytes(found[:5]) == b"here\x00"
    engine.write(ALIGN, make_buffer(ALIGN, 12))
    assert bytes(view[:4]) == b"\x0c" * 4
    engine.reserve(1 << 20)
    assert bytes(view[:4]) == b"\x0c" * 4, "a view stays valid when the file grows"


def test_views_cost_no_descriptors_and_end_with_their_slices(engine: Engine) -> None:
    """Most systems limit a process to 1024 descriptors, and a model has more parameters."""

    def shared_mappings() -> int:
        return sum(" rw-s " in line for line in Path("/proc/self/maps").read_text().splitlines())

    engine.reserve(64 * ALIGN)
    num_open, num_mapped = len(os.listdir("/proc/self/fd")), shared_mappings()
    views = [engine.map(2 * each * ALIGN, ALIGN) for each in range(32)]
    assert len(os.listdir("/proc/self/fd")) == num_open
    last = views[-1][8:16]
    last[:] = b"kept for"
    del views
    assert bytes(last) == b"kept for"
    assert shared_mappings() <= num_mapped + 1
    del last
    assert shared_mappings() == num_mapped


def test_a_file_that_was_cut_grows_again(engine: Engine) -> None:
    engine.reserve(4 * ALIGN)
    engine.cut(2 * ALIGN)
    engine.cut(3 * ALIGN)
    assert engine.nbytes == 2 * ALIGN
    with pytest.raises(VerifyError, match="is outside the 8192 reserved bytes"):
        engine.write(2 * ALIGN, make_buffer(ALIGN))
    engine.reserve(3 * ALIGN)
    engine.write(2 * ALIGN, make_buffer(ALIGN))


def test_what_is_given_back_leaves_its_neighbours_alone(engine: Engine) -> None:
    engine.reserve(3 * ALIGN)
    engine.write(0, make_buffer(3 * ALIGN, fill=7))
    engine.give_back(ALIGN, ALIGN)
    found = make_buffer(3 * ALIGN)
    engine.read(0, found)
    assert engine.nbytes == 3 * ALIGN
    assert bytes(found[:ALIGN]) == bytes(found[2 * ALIGN :]) == b"\x07" * ALIGN


def test_drop_cache_keeps_the_bytes(engine: Engine) -> None:
    engine.reserve(4 * ALIGN)
    engine.map(0, ALIGN)[:4] = b"kept"
    engine.drop_cache(0, 4 * ALIGN)
    engine.drop_cache(ALIGN, 0)
    found = make_buffer(ALIGN)
    engine.read(0, found)
    assert bytes(found[:4]) == b"kept"


@pytest.mark.parametrize("verb", ["read", "write"])
def test_misaligned_and_outside_ranges_are_refused(engine: Engine, verb: str) -> None:
    engine.reserve(4 * ALIGN)
    call = getattr(engine, verb)
    with pytest.raises(VerifyError, match=r"offset 512 and length 4096 must be multiples of 4096"):
        call(512, make_buffer(ALIGN))
    with pytest.raises(VerifyError, match=r"offset 0 and length 100 must be multiples"):
        call(0, make_buffer(ALIGN)[:100])
    with pytest.raises(VerifyError, match=r"range \[12288, 20480\) is outside the 16384 reserved bytes"):
        call(3 * ALIGN, make_buffer(2 * ALIGN))
    with pytest.raises(VerifyError, match=r"range \[-4096, 0\) is outside"):
        call(-ALIGN, make_buffer(ALIGN))
    with pytest.raises(VerifyError, match=r"buffer address 0x[0-9a-f]+ is not a multiple of 4096"):
        call(0, make_buffer(2 * ALIGN)[8 : ALIGN + 8])
    with pytest.raises(VerifyError, match="cast it to contiguous bytes"):
        call(0, make_buffer(ALIGN).cast("f"))
    with pytest.raises(VerifyError, match="is outside the 16384 reserved bytes"):
        engine.map(0, 5 * ALIGN)
    assert engine.bytes_read == engine.bytes_written == 0


def test_closed_engine_refuses_and_says_why(engine: Engine) -> None:
    engine.reserve(ALIGN)
    view = engine.map(0, ALIGN)
    engine.close()
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: engine.read(0, make_buffer(ALIGN)),
        lambda: engine.write(0, make_buffer(ALIGN)),
        lambda: engine.reserve(1 << 20),
        lambda: engine.map(0, ALIGN),
        lambda: engine.drop_cache(0, ALIGN),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="the store is closed"):
            call()
    view[0] = 1  # a view outlives the engine


def test_four_threads_keep_their_bytes_apart(engine: Engine) -> None:
    nbytes, num_rounds = 16 * ALIGN, 20
    engine.reserve(4 * nbytes)

    def work(worker: int) -> None:
        found = make_buffer(nbytes)
        for round_ in range(num_rounds):
            engine.write(worker * nbytes, make_buffer(nbytes, 4 * round_ + worker))
            engine.read(worker * nbytes, found)
            assert bytes(found) == bytes([4 * round_ + worker]) * nbytes

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert engine.bytes_read == engine.bytes_written == 4 * nbytes * num_rounds


def test_close_under_four_threads_ends_each_with_store_error(engine: Engine) -> None:
    engine.reserve(64 * ALIGN)
    started = threading.Barrier(5)

    def work(worker: int) -> str:
        buffer = make_buffer(16 * ALIGN, worker)
        engine.write(worker * 16 * ALIGN, buffer)
        started.wait()
        while True:
            try:
                engine.read(worker * 16 * ALIGN, buffer)
            except StoreError as error:
                return str(error)
            assert bytes(buffer) == bytes([worker]) * 16 * ALIGN

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(work, worker) for worker in range(4)]
        started.wait()
        engine.close()
        assert all("the store is closed" in future.result(timeout=60) for future in running)


def test_close_waits_for_the_call_in_flight() -> None:
    engine = MemoryEngine(latency_seconds=0.2, max_nbytes=1 << 20)
    engine.reserve(ALIGN)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(engine.write, 0, make_buffer(ALIGN))
        while engine._gate._num_inside == 0:
            assert not running.done()
        engine.close()
        assert engine.bytes_written == ALIGN, "close returned before the write had ended"
        running.result(timeout=60)


def test_faults_hit_the_nth_operation_of_their_kind() -> None:
    faults = [Fault(operation="read", nth=1, kind="error"), Fault(operation="write", nth=0, kind="short")]
    engine = MemoryEngine(faults=faults, max_nbytes=1 << 20)
    engine.reserve(4 * ALIGN)
    with pytest.raises(StoreError, match=r"write .* at offset 0 failed after 8192 of 16384 bytes: .* no more bytes"):
        engine.write(0, make_buffer(4 * ALIGN, 1))
    found = make_buffer(4 * ALIGN)
    engine.read(0, found)
    assert bytes(found) == b"\x01" * 2 * ALIGN + bytes(2 * ALIGN), "a short write leaves its first half"
    with pytest.raises(StoreError, match=r"read .* at offset 0 failed after 0 of 16384 bytes: Input/output error"):
        engine.read(0, found)
    engine.read(0, found)
    engine.write(0, found)
    assert (engine.bytes_read, engine.bytes_written) == (8 * ALIGN, 4 * ALIGN)


def test_memory_engine_refuses_settings_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="max_nbytes is 5; it must be at least 4096"):
        MemoryEngine(max_nbytes=5)
    with pytest.raises(ConfigError, match="must be positive or None"):
        MemoryEngine(bytes_per_second=0)


def test_memory_engine_is_one_range_of_its_full_size_from_the_start() -> None:
    with MemoryEngine() as engine:
        engine.reserve(4 << 30)
        assert address_of(engine.map(4096 << 10, ALIGN)) == address_of(engine.map(0, ALIGN)) + (4096 << 10)
        with pytest.raises(CapacityError, match="raise max_nbytes"):
            engine.reserve((4 << 30) + 1)
