"""Weight files: reads from any byte, what is noticed of changes, and that nothing is written."""

import ctypes
import gc
import mmap
import os
from pathlib import Path

import pytest

from zinf_compile.ir.errors import DamageError, StoreError, VerifyError
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.nvme import weight_file
from zinf_compile.runtime.storage.nvme.mapping import has_private_pages
from zinf_compile.runtime.storage.nvme.weight_file import WeightFile

CONTENT = os.urandom(11 * ALIGN + 1234)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=["direct", "page cache"])
def file(path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> WeightFile:
    if request.param == "page cache":
        monkeypatch.setattr(weight_file, "_reopen_direct", lambda descriptor, path: None)
    return WeightFile(path)


def make_buffer(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


@pytest.mark.parametrize(
    "offset", [0, 1, 8, 4095, 4096, 4097, 5 * ALIGN - 3, len(CONTENT) - 3 * ALIGN, len(CONTENT) - 1]
)
@pytest.mark.parametrize("sectors", [1, 3])
def test_reads_begin_at_any_byte(file: WeightFile, offset: int, sectors: int) -> None:
    buffer = make_buffer(sectors * ALIGN)
    file.read(offset, buffer)
    expected = CONTENT[offset : offset + sectors * ALIGN]
    assert bytes(buffer[: len(expected)]) == expected
    assert file.bytes_read == len(expected)


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, preadv = WeightFile(path), os.preadv

    def read_little(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [pieces[0][:ALIGN]], offset)

    monkeypatch.setattr(os, "preadv", read_little)
    buffer = make_buffer(3 * ALIGN)
    file.read(100, buffer)
    assert bytes(buffer) == CONTENT[100 : 100 + 3 * ALIGN]


def test_a_buffer_that_is_not_aligned_is_our_bug(file: WeightFile) -> None:
    with pytest.raises(VerifyError, match="buffer address"):
        file.read(0, make_buffer(2 * ALIGN)[8 : ALIGN + 8])


def cut(path: Path) -> None:
    os.truncate(path, len(CONTENT) - 1)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(6)
        file.write(bytes([CONTENT[6] ^ 1]))


def touch(path: Path) -> None:
    os.utime(path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (cut, f"had {len(CONTENT)} bytes, and has {len(CONTENT) - 1}"),
        (rewrite, "was last written"),
        (touch, "and again"),
    ],
)
def test_changes_are_named(file: WeightFile, path: Path, change, what: str) -> None:
    file.check_unchanged()
    change(path)
    for look in (file.check_unchanged, lambda: file.read(0, make_buffer(ALIGN))):
        with pytest.raises(StoreError, match=rf"weights.bin has changed since optimize.*{what}.*nobody writes to"):
            look()


def test_a_file_that_is_replaced_stays_as_it_was(file: WeightFile, path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(len(CONTENT)))
    other.rename(path)
    buffer = make_buffer(ALIGN)
    file.read(3, buffer)
    assert bytes(buffer) == CONTENT[3 : 3 + ALIGN]


def test_writes_to_a_mapping_stay_in_the_process(file: WeightFile, path: Path) -> None:
    views = [file.map(offset, 2 * ALIGN) for offset in (7, 7, 4 * ALIGN)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views]
    assert bytes(views[0]) == CONTENT[7 : 7 + 2 * ALIGN]
    assert not any(has_private_pages(address, 2 * ALIGN) for address in addresses)
    views[0][-1] = views[0][-1] ^ 1
    assert [has_private_pages(address, 2 * ALIGN) for address in addresses] == [True, False, False]
    assert path.read_bytes() == CONTENT
    file.check_unchanged()


def test_bytes_that_a_disk_changes_are_named(path: Path) -> None:
    file = WeightFile(path, digest=lambda view: hash(bytes(view)))
    buffer, was = make_buffer(2 * ALIGN), path.stat().st_mtime_ns
    for _ in range(2):
        file.read(5, buffer)
    rewrite(path)
    os.utime(path, ns=(was, was))
    file.read(ALIGN, buffer)  # which was not read before
    with pytest.raises(
        DamageError, match=r"weights.bin is damaged: bytes 5 to 8197 are not those that were read before"
    ):
        file.read(5, buffer)


def test_no_descriptor_is_left(path: Path) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    files = [WeightFile(path) for _ in range(3)]
    view = files[0].map(9, 100)
    files[0].close()
    files[0].close()
    with pytest.raises(StoreError, match="is closed"):
        files[0].read(0, make_buffer(ALIGN))
    assert bytes(view) == CONTENT[9:109]
    del files
    assert count() == before


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="FIFO"):
        WeightFile(tmp_path / "pipe")
