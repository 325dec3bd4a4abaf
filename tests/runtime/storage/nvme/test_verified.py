"""However reads and writes are cut, a read returns what was written, or raises."""

import ctypes
import random
import sys
from collections.abc import Callable

import pytest

from tests.support.memory_engine import Fault, MemoryEngine
from zinf_compile.ir.errors import ConfigError, DamageError
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.nvme.verified import VerifiedEngine
from zinf_compile.runtime.storage.staging import StagingPool

NUM_SECTORS = 24


@pytest.fixture
def inner() -> MemoryEngine:
    engine = MemoryEngine(max_nbytes=NUM_SECTORS * ALIGN)
    engine.reserve(NUM_SECTORS * ALIGN)
    return engine


@pytest.fixture
def engine(inner: MemoryEngine) -> VerifiedEngine:
    return VerifiedEngine(inner, name_at=lambda offset: f"sector {offset // ALIGN}")


@pytest.fixture
def buffer() -> Callable[[int, int], memoryview]:
    """Return a function that returns aligned bytes: a number of sectors with random content from a seed."""
    pool = StagingPool(4 * NUM_SECTORS * ALIGN)

    def make(num_sectors: int, seed: int = 0) -> memoryview:
        view = pool.lease(num_sectors * ALIGN).view
        assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGN == 0
        view[:] = random.Random(seed).randbytes(len(view))
        return view

    return make


Buffer = Callable[..., memoryview]


@pytest.mark.parametrize("seed", range(20))
def test_any_cuts(engine: VerifiedEngine, inner: MemoryEngine, seed: int) -> None:
    """Compare with bytes in memory. Then flip one bit: reads of its piece find it, and reads of other pieces do not."""
    rng = random.Random(seed)
    known = bytearray(NUM_SECTORS * ALIGN)
    written = [False] * NUM_SECTORS
    pool = StagingPool(NUM_SECTORS * ALIGN)

    def a_range() -> tuple[int, int]:
        start = rng.randrange(NUM_SECTORS)
        return start, rng.randrange(start + 1, NUM_SECTORS + 1)

    for _ in range(60):
        start, stop = a_range()
        with pool.lease((stop - start) * ALIGN) as lease:
            match rng.randrange(5):
                case 0 | 1:
                    lease.view[:] = rng.randbytes(len(lease.view))
                    engine.write(start * ALIGN, lease.view)
                    known[start * ALIGN : stop * ALIGN] = lease.view
                    written[start:stop] = [True] * (stop - start)
                case 2 | 3:
                    engine.read(start * ALIGN, lease.view)
                    assert lease.view == known[start * ALIGN : stop * ALIGN]
                case _:
                    engine.forget(start * ALIGN, len(lease.view))
                    for sector in range(NUM_SECTORS):  # pieces that cross an end are forgotten whole
                        written[sector] = any(
                            piece.start <= sector * ALIGN < piece.stop for piece in engine._pieces.values()
                        )
    assert engine._starts == sorted(engine._pieces)
    sector = rng.choice([number for number in range(NUM_SECTORS) if written[number]] or [None])
    if sector is None:
        return
    inner._slice(sector * ALIGN, ALIGN)[rng.randrange(ALIGN)] ^= 1 << rng.randrange(8)
    damaged = next(piece for piece in engine._pieces.values() if piece.start <= sector * ALIGN < piece.stop)
    for start, stop in sorted([a_range() for _ in range(20)], key=lambda each: each[0] <= sector < each[1]):
        with pool.lease((stop - start) * ALIGN) as lease:
            if start <= sector < stop:
                with pytest.raises(DamageError, match=r"sector \d+: the store file in memory .* is damaged: bytes"):
                    engine.read(start * ALIGN, lease.view)
            elif start * ALIGN >= damaged.stop or stop * ALIGN <= damaged.start:
                engine.read(start * ALIGN, lease.view)


def test_after_a_cut_only_what_is_asked_for_is_read(
    engine: VerifiedEngine, inner: MemoryEngine, buffer: Buffer
) -> None:
    engine.write(0, buffer(16))
    for _ in range(2):
        before = inner.bytes_read
        engine.read(3 * ALIGN, buffer(4))
    assert inner.bytes_read - before == 4 * ALIGN
    engine.write(0, buffer(16, 1))  # the cuts stay
    before = inner.bytes_read
    engine.read(3 * ALIGN, buffer(4))
    assert inner.bytes_read - before == 4 * ALIGN


def test_a_damaged_part_stays_damaged_until_it_is_written(
    engine: VerifiedEngine, inner: MemoryEngine, buffer: Buffer
) -> None:
    """Even after a write of other sectors of the same piece: the rest must not then count as good."""
    engine.write(0, buffer(8))
    inner._slice(5 * ALIGN, 1)[0] ^= 1
    engine.write(0, buffer(2, 1))
    engine.read(0, buffer(2))
    with pytest.raises(DamageError):
        engine.read(4 * ALIGN, buffer(2))
    assert engine.damage is not None
    engine.write(2 * ALIGN, buffer(6, 2))
    engine.read(0, buffer(8))


def test_lost_and_misplaced_writes(engine: VerifiedEngine, inner: MemoryEngine, buffer: Buffer) -> None:
    engine.write(0, buffer(8))
    write = inner.write
    inner.write = lambda offset, view: None  # type: ignore[method-assign]
    engine.write(0, buffer(2, 1))
    inner.write = lambda offset, view: write(offset + 4 * ALIGN, view)  # type: ignore[method-assign]
    engine.write(2 * ALIGN, buffer(1, 2))
    for sector in (0, 2, 6):
        with pytest.raises(DamageError, match=f"sector {sector}: "):
            engine.read(sector * ALIGN, buffer(1))


def test_a_failed_write_leaves_no_checksum(buffer: Buffer) -> None:
    inner = MemoryEngine(max_nbytes=8 * ALIGN, faults=[Fault(operation="write", nth=1, kind="short")])
    inner.reserve(8 * ALIGN)
    engine = VerifiedEngine(inner, name_at=lambda offset: None)
    engine.write(0, buffer(4))
    with pytest.raises(OSError, match="failed after"):
        engine.write(0, buffer(4, 1))
    engine.read(0, buffer(4))  # unchecked: the writer has seen an error


def test_letting_go_checks_first(engine: VerifiedEngine, inner: MemoryEngine, buffer: Buffer) -> None:
    engine.write(0, buffer(4))
    inner._slice(ALIGN, 1)[0] ^= 1
    for _ in range(2):
        with pytest.raises(DamageError, match="sector 0: "):
            engine.let_go(0, 4 * ALIGN)
    engine.write(0, buffer(4))
    engine.let_go(0, 4 * ALIGN)
    inner._slice(ALIGN, 1)[0] ^= 1  # written past the engine
    engine.read(0, buffer(4))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, inner: MemoryEngine) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"pip install 'zinf_compile\[verify\]'"):
        VerifiedEngine(inner, name_at=lambda offset: None)
