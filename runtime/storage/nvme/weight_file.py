"""A weight file of the user's, from which frozen parameters are served: read-only, where its tensors lie in it.

Tensors of a safetensors file begin at any byte, and O_DIRECT reads whole sectors. So a read begins at the sector before,
with one more sector behind, and is moved to the front of the buffer::

    file      |---- sector ----|---- sector ----|---- sector ----|
    wanted            |------------- buffer -------------|
    read      |------------- buffer ------------|- page -|

That costs no memory beside a page, and one copy within RAM, as a read through the page cache does; but it leaves nothing in
the page cache, which a container counts as its memory, and evicts nothing that others have there.
"""

import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.ir.errors import DamageError, StoreError
from zinf_compile.ir.user_files import open_regular
from zinf_compile.runtime.storage.engine import ALIGN, Gate, check_transfer
from zinf_compile.runtime.storage.nvme.mapping import FileMappings, has_private_pages

Digest = Callable[[memoryview], int]

_log = logging.getLogger(__name__)


class WeightFile:
    """A file that is read and never written. Several threads may read at once.

    What is read is what the file had when it was opened: every read, and ``check_unchanged``, compares its size and its
    time of modification with those of then. A file that is replaced, by a rename, stays as it was for who has it open.
    """

    def __init__(self, path: str | os.PathLike[str], *, digest: Digest | None = None) -> None:
        """With ``digest`` a read is compared with the first one of the same bytes. OSError if the file cannot be opened."""
        self.path = os.fspath(path)
        self._gate = Gate()
        self._lock = threading.Lock()  # guards the counts and digests
        self._bytes_read = 0
        self._digest = digest
        self._digests: dict[tuple[int, int], int] = {}
        self._buffered_fd = open_regular(path)
        descriptors = {self._buffered_fd}
        self._close_descriptors = weakref.finalize(self, _close_all, descriptors)
        self._close_descriptors.atexit = False  # as for the store file: a thread may still read
        status = os.fstat(self._buffered_fd)
        self.nbytes, self._mtime_ns = status.st_size, status.st_mtime_ns
        self._mappings = FileMappings(self._buffered_fd, private=True)
        direct_fd = _reopen_direct(self._buffered_fd, self.path)
        self._is_direct = direct_fd is not None
        self._io_fd = self._buffered_fd if direct_fd is None else direct_fd
        descriptors.add(self._io_fd)

    @property
    def open_path(self) -> str:
        """The path that opens the same file again, whatever its name leads to by now."""
        return f"/proc/self/fd/{self._buffered_fd}"

    @property
    def bytes_read(self) -> int:
        """Bytes that completed reads moved."""
        return self._bytes_read

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill an aligned buffer of whole sectors with the bytes from ``offset``, which is any byte.

        Behind the end of the file the buffer's content is undefined. StoreError if the file has changed or a read fails,
        DamageError for bytes that differ from those of the first read.
        """
        with self._gate.enter(f"read {buffer.nbytes} bytes at offset {offset} of {self.path}"):
            check_transfer(self.path, "read", 0, buffer, buffer.nbytes)
            nbytes = min(buffer.nbytes, self.nbytes - offset)
            if self._is_direct:
                self._read_sectors(offset, buffer, nbytes)
            else:
                self._fill([buffer[:nbytes]], offset, nbytes)
                # What stayed in the page cache would count as memory of this process's container.
                os.posix_fadvise(self._buffered_fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
            self.check_unchanged()  # behind the read: whatever changed the bytes that it has seen is noticed
            with self._lock:
                self._bytes_read += nbytes
        if self._digest is not None:
            self._compare(offset, buffer[:nbytes], self._digest)

    def _read_sectors(self, offset: int, buffer: memoryview, nbytes: int) -> None:
        skip = offset % ALIGN
        if skip == 0:
            self._fill([buffer], offset, nbytes)
            return
        page = memoryview(mmap.mmap(-1, ALIGN))
        self._fill([buffer, page], offset - skip, skip + nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        ctypes.memmove(address, address + skip, buffer.nbytes - skip)  # other threads run meanwhile
        buffer[-skip:] = page[:skip]

    def _fill(self, pieces: list[memoryview], offset: int, nbytes: int) -> None:
        """Fill pieces, one after another, with at least ``nbytes`` from an offset, if the file has them."""
        done = 0
        while done < nbytes:
            try:
                moved = os.preadv(self._io_fd, _behind(pieces, done), offset + done)
            except OSError as error:
                raise StoreError(
                    f"reading {nbytes} bytes at offset {offset} of {self.path} failed after {done}: "
                    f"{error.strerror or error}; look at the disk that it is on"
                ) from error
            resume = done + moved if done + moved >= nbytes or not self._is_direct else (done + moved) // ALIGN * ALIGN
            if resume <= done:
                self.check_unchanged()
                raise StoreError(f"{self.path} ends at byte {offset + done}, and has {self.nbytes} by its size")
            done = resume

    def _compare(self, offset: int, found: memoryview, digest: Digest) -> None:
        value = digest(found)
        with self._lock:
            expected = self._digests.setdefault((offset, found.nbytes), value)
        if value != expected:
            raise DamageError(
                f"{self.path} is damaged: bytes {offset} to {offset + found.nbytes} are not those that were read before, "
                "and nobody has written the file since; look at the disk before you trust it again",
                is_named=False,
            )

    def map(self, offset: int, nbytes: int) -> memoryview:
        """A view of bytes of the file. What is written to it stays in this process, and ``is_written`` tells.

        The mapping ends when the view and its slices are gone. StoreError if the system refuses.
        """
        with self._gate.enter(f"map {nbytes} bytes at offset {offset} of {self.path}"):
            try:
                return self._mappings.map(offset, nbytes)
            except OSError as error:
                raise StoreError(
                    f"mapping {nbytes} bytes at offset {offset} of {self.path} failed: {error.strerror}"
                ) from error

    def check_unchanged(self) -> None:
        """Raise StoreError if the file has another size, or was written, since it was opened. Nothing to say once closed."""
        if not self._close_descriptors.alive:
            return
        status = os.fstat(self._buffered_fd)
        if (status.st_size, status.st_mtime_ns) == (self.nbytes, self._mtime_ns):
            return
        what = (
            f"it had {self.nbytes} bytes, and has {status.st_size}"
            if status.st_size != self.nbytes
            else f"it was last written {_say_time(self._mtime_ns)}, and again {_say_time(status.st_mtime_ns)}"
        )
        raise StoreError(
            f"{self.path} has changed since optimize() opened it: {what}; frozen parameters are read from it while the "
            "model trains. Build and optimize the model again, from a file that nobody writes to"
        )

    def leave_to_parent(self) -> None:
        """In a forked child: refuse reads. Mappings, which are private, stay."""
        self._gate.shut_in_child()

    def close(self) -> None:
        """Wait for reads in flight, then close the file; later reads raise StoreError. Safe to call twice."""
        self._gate.close()
        self._close_descriptors()


@dataclass(frozen=True, slots=True, eq=False)
class WeightSpan:
    """Where a weight file has the value of a tensor: row by row, from a byte on, which is a multiple of its element."""

    file: WeightFile
    start: int
    dtype: torch.dtype

    def is_written(self, mapped: Tensor) -> bool:
        """Return whether somebody has written to a mapping of it, so that the value is in memory only."""
        return has_private_pages(mapped.data_ptr(), mapped.nbytes)


def _behind(pieces: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of pieces of which so many bytes are filled."""
    left = []
    for piece in pieces:
        if done < piece.nbytes:
            left.append(piece[done:])
        done = max(0, done - piece.nbytes)
    return left


def _reopen_direct(descriptor: int, path: str) -> int | None:
    """Return a second descriptor of the file with O_DIRECT; None where that is refused."""
    reopened = None
    try:
        reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        os.preadv(reopened, [mmap.mmap(-1, ALIGN)], 0)  # some filesystems take the flag and refuse the first read
    except OSError as error:
        if reopened is not None:
            os.close(reopened)
        _log.info("%s refuses O_DIRECT (%s): it is read through the page cache", path, error.strerror or error)
        return None
    return reopened


def _close_all(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _say_time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}.{rest:09d}"
