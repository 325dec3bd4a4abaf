"""The engine over one unnamed file: preadv and pwritev with O_DIRECT, from as many threads as call."""

import ctypes
import errno
import functools
import mmap
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from zinf_compile.ir.errors import CapacityError, ConfigError, StoreError
from zinf_compile.runtime.storage.engine import ALIGN, Gate, check_range, check_transfer, whole_sectors
from zinf_compile.runtime.storage.nvme.mapping import FileMappings

_GIB = 1 << 30
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_TMPFILE = {
    errno.EOPNOTSUPP,
    errno.EISDIR,
    errno.ENOENT,
    errno.EINVAL,
}  # open(2), O_TMPFILE: the three ways to lack it
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_CANNOT_PUNCH = {errno.EOPNOTSUPP, errno.ENOSYS}  # fallocate(2): filesystems without holes


class PosixEngine:
    """Engine over an unnamed file in ``directory``; the file is gone when the process is, however it ends.

    With ``direct`` the bytes bypass the page cache; a filesystem that refuses (tmpfs) is used through the page cache,
    with one RuntimeWarning. ConfigError when the folder is missing, not a folder, or not writable.
    """

    def __init__(self, directory: str | os.PathLike[str], *, direct: bool = True) -> None:
        self._directory = os.fspath(directory)
        _check_directory(self._directory)
        self._gate = Gate()
        self._lock = threading.Lock()  # guards the three counts
        self._reserve_lock = threading.Lock()
        self._nbytes = 0
        self._bytes_read = 0
        self._bytes_written = 0
        # Two descriptors, since glibc emulates posix_fallocate with one-byte writes, which O_DIRECT refuses.
        self._buffered_fd = _open_unnamed(self._directory)
        descriptors = {self._buffered_fd}
        self._close_descriptors = weakref.finalize(self, _close_all, descriptors)
        # At interpreter exit the kernel closes them: doing it here could cut off a thread that is still writing.
        self._close_descriptors.atexit = False
        self._mappings = FileMappings(self._buffered_fd)
        direct_fd = _reopen_direct(self._buffered_fd, self._directory) if direct else None
        self._direct = direct_fd is not None
        self._io_fd = self._buffered_fd if direct_fd is None else direct_fd
        descriptors.add(self._io_fd)

    @property
    def path(self) -> str:
        """The path that opens the same file again: it has no name of its own."""
        return f"/proc/self/fd/{self._io_fd}"

    @property
    def nbytes(self) -> int:
        """Bytes reserved so far."""
        return self._nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes that completed reads moved."""
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes that completed writes moved."""
        return self._bytes_written

    def read(self, offset: int, buffer: memoryview) -> None:
        """See Engine.read."""
        with self._gate.enter(f"read {buffer.nbytes} bytes at offset {offset} in {self.describe()}"):
            check_transfer(self.describe(), "read", offset, buffer, self._nbytes)
            self._transfer("read", os.preadv, offset, buffer)
            with self._lock:
                self._bytes_read += buffer.nbytes

    def write(self, offset: int, buffer: memoryview) -> None:
        """See Engine.write."""
        with self._gate.enter(f"write {buffer.nbytes} bytes at offset {offset} in {self.describe()}"):
            check_transfer(self.describe(), "write", offset, buffer, self._nbytes)
            self._transfer("write", os.pwritev, offset, buffer)
            with self._lock:
                self._bytes_written += buffer.nbytes

    def reserve(self, nbytes: int) -> None:
        """See Engine.reserve. A failed call leaves the file as long as it was."""
        with self._gate.enter(f"reserve {nbytes} bytes in {self.describe()}"), self._reserve_lock:
            wanted = whole_sectors(nbytes)
            more = wanted - self._nbytes
            if more <= 0:
                return
            # Checked first, since a fallocate that fails half-way has filled the disk for everyone else meanwhile.
            if more > self._free_nbytes():
                raise self._out_of_room(wanted, "the folder's filesystem has too little free space")
            try:
                os.posix_fallocate(self._buffered_fd, self._nbytes, more)
            except OSError as error:
                os.ftruncate(self._buffered_fd, self._nbytes)
                if error.errno in _NO_ROOM:
                    raise self._out_of_room(wanted, _reason(error)) from error
                raise StoreError(f"reserving {wanted} bytes in {self.describe()} failed: {_reason(error)}") from error
            self._nbytes = wanted

    def cut(self, nbytes: int) -> None:
        """See Engine.cut."""
        with self._gate.enter(f"cut {self.describe()} to {nbytes} bytes"), self._reserve_lock:
            wanted = whole_sectors(nbytes)
            if wanted < self._nbytes:
                os.ftruncate(self._buffered_fd, wanted)
                self._nbytes = wanted

    def give_back(self, offset: int, nbytes: int) -> bool:
        """See Engine.give_back."""
        with self._gate.enter(f"give back {nbytes} bytes at offset {offset} in {self.describe()}"):
            check_range(self.describe(), "give back", offset, nbytes, self._nbytes)
            fallocate = _find_fallocate()
            if fallocate is None or nbytes == 0:
                return False
            if fallocate(self._buffered_fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes) == 0:
                return True
            error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if error.errno in _CANNOT_PUNCH:
                return False
            raise self._failure("give back", offset, nbytes, _reason(error)) from error

    def map(self, offset: int, nbytes: int) -> memoryview:
        """See Engine.map. The mapping outlives ``close``: it ends when the view and its slices are gone."""
        with self._gate.enter(f"map {nbytes} bytes at offset {offset} in {self.describe()}"):
            check_range(self.describe(), "map", offset, nbytes, self._nbytes)
            if nbytes == 0:
                return memoryview(bytearray())
            try:
                return self._mappings.map(offset, nbytes)
            except OSError as error:
                raise self._failure("map", offset, nbytes, _reason(error)) from error

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing: this engine verifies nothing."""

    def drop_cache(self, offset: int, nbytes: int) -> None:
        """See Engine.drop_cache. Writes back the whole file, and leaves pages that a live ``map`` view uses."""
        with self._gate.enter(f"drop {nbytes} cached bytes at offset {offset} in {self.describe()}"):
            check_range(self.describe(), "drop_cache", offset, nbytes, self._nbytes)
            if nbytes == 0:
                return  # to posix_fadvise, zero means "to the end"
            try:
                os.fdatasync(self._buffered_fd)  # DONTNEED skips pages that are dirty
                os.posix_fadvise(self._buffered_fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                raise self._failure("drop_cache", offset, nbytes, _reason(error)) from error

    def close(self) -> None:
        """See Engine.close."""
        self._gate.close()
        if self._close_descriptors.alive:
            self._mappings.make_private()  # a child that is forked later could not do it without a descriptor
            self._close_descriptors()

    def leave_to_parent(self) -> list[int]:
        """See Engine.leave_to_parent."""
        self._gate.shut_in_child()
        views = self._mappings.make_private() if self._close_descriptors.alive else []
        self._close_descriptors()
        return views

    def describe(self) -> str:
        """See Engine.describe."""
        return f"{self._directory} ({'O_DIRECT' if self._direct else 'page cache'})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _transfer(
        self, verb: str, call: Callable[[int, list[memoryview], int], int], offset: int, buffer: memoryview
    ) -> None:
        """Repeat ``call`` until all of ``buffer`` is moved: one call moves at most 2 GiB less a page (read(2))."""
        total = buffer.nbytes
        done = 0
        while done < total:
            try:
                moved = call(self._io_fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._failure(verb, offset, total, _reason(error), done) from error
            # O_DIRECT resumes only at a multiple of ALIGN: what lies past the last one is moved again.
            resume = done + moved if done + moved == total else (done + moved) // ALIGN * ALIGN
            if resume <= done:
                raise self._failure(verb, offset, total, "the system moved no more bytes; was the file cut?", done)
            done = resume

    def _failure(self, verb: str, offset: int, nbytes: int, reason: str, done: int = 0) -> StoreError:
        return StoreError(
            f"{verb} of the store file in {self.describe()} at offset {offset} failed "
            f"after {done} of {nbytes} bytes: {reason}"
        )

    def _free_nbytes(self) -> int:
        status = os.fstatvfs(self._buffered_fd)
        return status.f_bavail * status.f_frsize

    def _out_of_room(self, wanted: int, reason: str) -> CapacityError:
        return CapacityError(
            f"the store needs {wanted / _GIB:.2f} GiB in {self._directory}, holds {self._nbytes / _GIB:.2f} GiB, "
            f"and {self._free_nbytes() / _GIB:.2f} GiB are free there ({reason}); "
            "free some space, set `nvme` to another folder, or train a smaller model"
        )


@functools.cache
def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's fallocate, which Python has only in its portable form; None where the C library has none."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return None
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)  # off_t of 64-bit systems
    found: Callable[[int, int, int, int], int] = fallocate
    return found


def _check_directory(directory: str) -> None:
    if not os.path.exists(directory):
        raise ConfigError(f"nvme folder {directory!r} does not exist; create it or set `nvme` to one that does")
    if not os.path.isdir(directory):
        raise ConfigError(f"nvme folder {directory!r} is not a folder; set `nvme` to a folder")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"nvme folder {directory!r} is not writable; change its mode or set `nvme` to another folder")


def _open_unnamed(directory: str) -> int:
    """A new read-write descriptor of a file with no name in ``directory``."""
    flags = os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise _cannot_create(directory, error) from error
    path = os.path.join(directory, f".zinf-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _cannot_create(directory, error) from error
    os.unlink(path)
    return descriptor


def _reopen_direct(descriptor: int, directory: str) -> int | None:
    """A second descriptor of the same file with O_DIRECT, or None, with a warning, where that is refused."""
    reopened = None
    try:
        reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        # Some filesystems take the flag and refuse the first transfer.
        with mmap.mmap(-1, ALIGN) as page:
            os.pwritev(reopened, [page], 0)
            os.preadv(reopened, [page], 0)
        os.ftruncate(descriptor, 0)
        return reopened
    except OSError as error:
        if reopened is not None:
            os.close(reopened)
        if error.errno in _NO_ROOM:
            raise CapacityError(f"nvme folder {directory!r} is full: {_reason(error)}; free some space") from error
        warnings.warn(
            f"nvme folder {directory!r} refuses O_DIRECT ({_reason(error)}): reads and writes go through the page "
            "cache, which costs one more copy of every byte and host memory that the budget does not count; "
            "set `nvme` to a folder on a local ext4 or xfs drive",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _close_all(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _cannot_create(directory: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot create the store file in nvme folder {directory!r}: {_reason(error)}; set `nvme` to another folder"
    )


def _reason(error: OSError) -> str:
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"
