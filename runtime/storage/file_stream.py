"""Sequential writes and reads of whole files, past the page cache, through a few staging buffers."""

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from zinf_compile.ir.errors import CapacityError, CheckpointError, StoreError
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.ir.user_files import open_regular
from zinf_compile.runtime.process.interrupts import check_interrupt
from zinf_compile.runtime.process.waiting import end_pool, future_result
from zinf_compile.runtime.storage.engine import ALIGN, whole_sectors
from zinf_compile.runtime.storage.futures import wait_all
from zinf_compile.runtime.storage.staging import StagingBuffer, StagingPool

_BLOCK_NBYTES = 4 * 2**20  # one call: long enough for full bandwidth
_NUM_BLOCKS = 2  # in flight, while another is filled or read
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def block_nbytes(staging: StagingPool) -> int:
    """Return the bytes of one call: an eighth of staging, in whole sectors, 4 MiB at most."""
    return max(ALIGN, min(staging.capacity // 8, _BLOCK_NBYTES) // ALIGN * ALIGN)


class FileWriter:
    """Writes a new file of a known length. Leaving its ``with`` block waits for its calls, and closes it.

    Raises CapacityError where the disk has no room, before a byte is written, and StoreError for one that fails.
    """

    def __init__(self, path: str, nbytes: int, staging: StagingPool) -> None:
        self._path = path
        self._nbytes = nbytes
        self._staging = staging
        self._block = block_nbytes(staging)
        self._lease: StagingBuffer | None = None
        self._filled = 0
        self._offset = 0
        self._writes: deque[Future[None]] = deque()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot create {path}: {error.strerror}") from error
        self._direct: int | None = None
        try:
            if nbytes:
                os.posix_fallocate(self._file, 0, nbytes)
            self._direct = _open_direct(self._file, os.O_RDWR)
        except OSError as error:
            self._close()
            if error.errno in _NO_ROOM:
                raise CapacityError(
                    f"{path} needs {format_bytes(nbytes)}, and the disk is full; free some space"
                ) from error
            raise StoreError(f"reserving {nbytes} bytes for {path} failed: {error.strerror}") from error
        self._pool = ThreadPoolExecutor(_NUM_BLOCKS, thread_name_prefix="zinf-file")

    def write(self, view: memoryview) -> None:
        """Append bytes; they are copied before this returns."""
        while len(view):
            check_interrupt()
            if self._lease is None:
                while len(self._writes) >= _NUM_BLOCKS:  # wait here, not in lease()
                    future_result(self._writes.popleft(), f"a write of {self._path}")
                self._lease, self._filled = self._staging.lease(self._block), 0
            taken = min(len(view), self._block - self._filled)
            self._lease.view[self._filled : self._filled + taken] = view[:taken]
            self._filled += taken
            view = view[taken:]
            if self._filled == self._block:
                self._submit()

    def finish(self) -> None:
        """Block until all bytes are on the disk."""
        if self._lease is not None:
            padded = whole_sectors(self._filled)
            self._lease.view[self._filled : padded] = bytes(padded - self._filled)
            self._filled = padded
            self._submit()
        wait_all(self._writes, f"writes of {self._path}")
        try:
            os.ftruncate(self._file, self._nbytes)
            os.fsync(self._file)
        except OSError as error:
            raise StoreError(f"writing {self._path} failed: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_pool(self._pool, f"reads and writes of {self._path}")
        if self._lease is not None:
            self._staging.return_(self._lease)
        self._close()

    def _submit(self) -> None:
        assert self._lease is not None
        lease, self._lease = self._lease, None
        self._writes.append(self._pool.submit(self._write_block, lease, self._offset, self._filled))
        self._offset += self._filled

    def _write_block(self, lease: StagingBuffer, offset: int, nbytes: int) -> None:
        descriptor = self._file if self._direct is None else self._direct

        def write_from(done: int) -> int:
            moved = os.pwritev(descriptor, [lease.view[done:nbytes]], offset + done)
            if self._direct is None:
                os.fdatasync(descriptor)  # DONTNEED skips pages that are dirty
                os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
            return moved

        with lease:
            _move_all(write_from, nbytes, f"write of {self._path} at offset {offset}", StoreError)

    def _close(self) -> None:
        for descriptor in (self._file, self._direct):
            if descriptor is not None:
                os.close(descriptor)


@dataclass(slots=True, kw_only=True, eq=False)
class _Block:
    """Bytes of the file from ``offset`` on their way in."""

    lease: StagingBuffer
    offset: int
    nbytes: int
    read: Future[None]


class FileReader:
    """Reads a file from ``start`` up to ``stop``. Leaving its ``with`` block ends its calls, and closes it.

    Raises CheckpointError, which names the file and the offset, for bytes that cannot be read.
    """

    def __init__(self, path: str, staging: StagingPool, *, start: int, stop: int) -> None:
        self._path = path
        self._staging = staging
        self._size = block_nbytes(staging)
        self._position = start
        self._issued = start // ALIGN * ALIGN
        self._blocks: deque[_Block] = deque()
        try:
            self._file = open_regular(path, follow=False)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self._nbytes = min(os.fstat(self._file).st_size, stop)
        self._direct = _open_direct(self._file, os.O_RDONLY)
        self._pool = ThreadPoolExecutor(_NUM_BLOCKS, thread_name_prefix="zinf-file")

    def take(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next ``nbytes`` bytes, in pieces that are valid until the next one is asked for."""
        while nbytes:
            block = self._current()
            skipped = self._position - block.offset
            piece = block.lease.view[skipped : min(block.nbytes, skipped + nbytes)]
            yield piece
            self._position += len(piece)
            nbytes -= len(piece)

    def read_into(self, buffer: memoryview) -> None:
        """Fill ``buffer`` with the next bytes."""
        filled = 0
        for piece in self.take(len(buffer)):
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_pool(self._pool, f"reads and writes of {self._path}")
        for block in self._blocks:
            self._staging.return_(block.lease)
        for descriptor in (self._file, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def _current(self) -> _Block:
        """Return the block that holds the next byte, read; more are on their way behind it."""
        check_interrupt()
        while self._blocks and self._position >= self._blocks[0].offset + self._blocks[0].nbytes:
            self._staging.return_(self._blocks.popleft().lease)
        while len(self._blocks) < _NUM_BLOCKS and self._issued < self._nbytes:
            nbytes = min(self._size, self._nbytes - self._issued)
            lease = self._staging.lease(self._size)
            with lease.handed_on():
                read = self._pool.submit(self._read_block, lease.view, self._issued, nbytes)
            self._blocks.append(_Block(lease=lease, offset=self._issued, nbytes=nbytes, read=read))
            self._issued += nbytes
        if not self._blocks:
            raise CheckpointError(f"{self._path} is damaged: it ends at byte {self._nbytes}; use another copy")
        future_result(self._blocks[0].read, f"a read of {self._path}")
        return self._blocks[0]

    def _read_block(self, view: memoryview, offset: int, nbytes: int) -> None:
        descriptor = self._file if self._direct is None else self._direct

        def read_from(done: int) -> int:
            moved = os.preadv(descriptor, [view[done:]], offset + done)
            if self._direct is None:
                os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
            return moved

        _move_all(read_from, nbytes, f"read of {self._path} at offset {offset}", CheckpointError)


def _move_all(
    move_from: Callable[[int], int], nbytes: int, what: str, failure: type[CheckpointError] | type[StoreError]
) -> None:
    """Call ``move_from`` with the bytes that are done, until all are; it returns how many more it moved."""
    done = 0
    while done < nbytes:
        try:
            moved = move_from(done)
        except OSError as error:
            raise failure(f"{what} failed after {done} of {nbytes} bytes: {error.strerror}") from error
        # O_DIRECT resumes at whole sectors only.
        resumed = nbytes if done + moved >= nbytes else (done + moved) // ALIGN * ALIGN
        if resumed <= done:
            raise failure(f"{what} ended after {done} of {nbytes} bytes")
        done = resumed


def _open_direct(file: int, flags: int) -> int | None:
    """Return another descriptor of an open file, with O_DIRECT, or None where the filesystem refuses it."""
    descriptor = None
    try:
        descriptor = os.open(f"/proc/self/fd/{file}", flags | os.O_DIRECT | os.O_CLOEXEC)
        with mmap.mmap(-1, ALIGN) as page:  # some filesystems take the flag and refuse the first transfer
            os.preadv(descriptor, [page], 0)
        return descriptor
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
