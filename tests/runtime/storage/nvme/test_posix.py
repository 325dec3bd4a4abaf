"""The posix engine: its file, its descriptors, and what the system can do to it."""

import errno
import fcntl
import gc
import mmap
import os
import signal
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from zinf_compile.ir.errors import CapacityError, ConfigError, StoreError
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.nvme.posix import PosixEngine


def make_buffer(nbytes: int, fill: int = 0) -> memoryview:
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = bytes([fill]) * nbytes
    return view


def count_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def direct_engine(tmp_path: Path) -> PosixEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PosixEngine(tmp_path)
    if "O_DIRECT" not in engine.describe():
        pytest.skip(f"the filesystem of {tmp_path} does not take O_DIRECT")
    return engine


def refuse_tmpfile(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_)


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_no_name_and_no_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tmpfile: bool) -> None:
    if not has_tmpfile:
        refuse_tmpfile(monkeypatch)
    before = count_descriptors()
    for _ in range(50):
        with PosixEngine(tmp_path, direct=False) as engine:
            assert os.listdir(tmp_path) == []
            engine.reserve(ALIGN)
            engine.map(0, ALIGN)[:4] = b"here"
    assert os.listdir(tmp_path) == []
    assert count_descriptors() == before


def test_forgotten_engine_gives_its_descriptors_back(tmp_path: Path) -> None:
    before = count_descriptors()
    engine = PosixEngine(tmp_path, direct=False)
    assert count_descriptors() > before
    del engine
    assert count_descriptors() == before


def test_warning_turned_error_leaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(os, "preadv", raise_oserror(errno.EINVAL))
    before = count_descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="refuses O_DIRECT"):
            PosixEngine(tmp_path)
    assert count_descriptors() == before


def raise_oserror(number: int) -> Callable[..., int]:
    def call(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def test_descriptors_do_not_pass_to_a_started_program(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    with PosixEngine(tmp_path) as engine:
        for descriptor in {engine._buffered_fd, engine._io_fd}:
            assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
            assert os.fstat(descriptor).st_nlink == 0


def test_nothing_is_left_after_kill(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from zinf_compile.runtime.storage.nvme.posix import PosixEngine\n"
        "engine = PosixEngine(sys.argv[1], direct=False)\n"
        "engine.reserve(64 << 20)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert any("deleted" in os.readlink(entry) for entry in Path(f"/proc/{child.pid}/fd").iterdir())
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"missing' does not exist; create it"):
        PosixEngine(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"file' is not a folder"):
        PosixEngine(file)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to a folder of any mode
    with pytest.raises(ConfigError, match="is not writable; change its mode"):
        PosixEngine(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_refused_direct_falls_back_and_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv = os.preadv
    monkeypatch.setattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(os, "preadv", raise_oserror(errno.EINVAL))
    with pytest.warns(RuntimeWarning, match=r"refuses O_DIRECT \(Invalid argument \(EINVAL\)\).* page cache") as caught:
        engine = PosixEngine(tmp_path)
    assert len(caught) == 1
    assert str(tmp_path) in str(caught[0].message)
    assert caught[0].filename == __file__
    monkeypatch.setattr(os, "preadv", real_preadv)
    assert engine.describe() == f"{tmp_path} (page cache)"
    engine.reserve(ALIGN)
    engine.write(0, make_buffer(ALIGN, 4))
    found = make_buffer(ALIGN)
    engine.read(0, found)
    assert bytes(found) == b"\x04" * ALIGN
    engine.close()


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv, real_pwritev = os.preadv, os.pwritev
    calls: list[tuple[str, int]] = []

    def shorten(buffers: Sequence[memoryview]) -> list[memoryview]:
        return [buffers[0][: ALIGN + 100]]  # not a multiple of ALIGN, as at a medium error

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(("read", offset))
        return real_preadv(fd, shorten(buffers), offset)

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(("write", offset))
        return real_pwritev(fd, shorten(buffers), offset)

    with PosixEngine(tmp_path, direct=False) as engine:
        engine.reserve(4 * ALIGN)
        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(os, "pwritev", pwritev)
        buffer = make_buffer(3 * ALIGN)
        buffer[:] = os.urandom(3 * ALIGN)
        engine.write(ALIGN, buffer)
        found = make_buffer(3 * ALIGN)
        engine.read(ALIGN, found)
    assert found == buffer
    assert calls == [(verb, offset * ALIGN) for verb in ("write", "read") for offset in (1, 2, 3)]


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    with PosixEngine(tmp_path, direct=False) as engine:
        engine.reserve(4 * ALIGN)
        os.ftruncate(engine._buffered_fd, 2 * ALIGN)
        with pytest.raises(StoreError, match=r"at offset 4096 failed after 4096 of 8192 bytes: .* was the file cut\?"):
            engine.read(ALIGN, make_buffer(2 * ALIGN))
        assert engine.bytes_read == 0


@pytest.mark.parametrize(("verb", "function"), [("read", "preadv"), ("write", "pwritev")])
def test_system_errors_name_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, function: str
) -> None:
    with PosixEngine(tmp_path, direct=False) as engine:
        engine.reserve(2 * ALIGN)
        monkeypatch.setattr(os, function, raise_oserror(errno.EIO))
        message = rf"{verb} .*{tmp_path} .* at offset 4096 failed after 0 of 4096 bytes: Input/output error \(EIO\)"
        with pytest.raises(StoreError, match=message) as caught:
            getattr(engine, verb)(ALIGN, make_buffer(ALIGN))
        assert isinstance(caught.value.__cause__, OSError)


def test_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PosixEngine(tmp_path, direct=False) as engine:
        engine.reserve(ALIGN)

        def fill(fd: int, offset: int, nbytes: int) -> None:
            os.ftruncate(fd, offset + nbytes // 2)  # what was allocated before the error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", fill)
        with pytest.raises(
            CapacityError, match=r"needs 0\.25 GiB .*No space left on device.* `nvme` to another folder"
        ):
            engine.reserve(256 << 20)
        assert engine.nbytes == os.fstat(engine._buffered_fd).st_size == ALIGN


def test_reserve_allocates(tmp_path: Path) -> None:
    with PosixEngine(tmp_path, direct=False) as engine:
        engine.reserve(1 << 20)
        status = os.fstat(engine._buffered_fd)
        assert status.st_size == 1 << 20
        assert status.st_blocks * 512 >= 1 << 20


@pytest.mark.nvme
def test_direct_engine_bypasses_the_page_cache(direct_engine: PosixEngine) -> None:
    with direct_engine as engine:
        assert fcntl.fcntl(engine._io_fd, fcntl.F_GETFL) & os.O_DIRECT
        assert not fcntl.fcntl(engine._buffered_fd, fcntl.F_GETFL) & os.O_DIRECT
        engine.reserve(1 << 20)
        engine.write(0, make_buffer(1 << 20, 8))
        found = make_buffer(1 << 20)
        engine.read(0, found)
        assert bytes(found) == b"\x08" * (1 << 20)


@pytest.mark.nvme
def test_direct_transfers_leave_no_name_and_no_descriptor(direct_engine: PosixEngine, tmp_path: Path) -> None:
    direct_engine.close()
    before = count_descriptors()
    for _ in range(50):
        with PosixEngine(tmp_path) as engine:
            assert engine.nbytes == os.fstat(engine._buffered_fd).st_size == 0, "the page that the probe wrote is gone"
            engine.reserve(ALIGN)
            engine.write(0, make_buffer(ALIGN))
    assert os.listdir(tmp_path) == []
    assert count_descriptors() == before
