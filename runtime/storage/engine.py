"""The engine protocol: blocking reads and writes of one store file, and the two checks that every engine shares."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from zinf_compile.ir.errors import StoreError, VerifyError
from zinf_compile.runtime.process.waiting import wait_until

ALIGN = 4096  # what O_DIRECT asks of offsets, lengths and addresses on drives with 4 KiB sectors; also the page size


class Engine(Protocol):
    """The storage of one store file. Every call blocks, and several threads may call at once.

    Offsets, lengths and buffer addresses of ``read``, ``write`` and ``map`` are multiples of ``ALIGN`` and lie within
    the reserved bytes; a call that breaks this is a VerifyError. Buffers are contiguous bytes (format "B").
    """

    @property
    def path(self) -> str | None:
        """The path that opens the same file again while the engine is open; None if there is no file."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved so far; a multiple of ``ALIGN``."""

    @property
    def bytes_read(self) -> int:
        """Bytes that completed reads moved."""

    @property
    def bytes_written(self) -> int:
        """Bytes that completed writes moved."""

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` completely with the file's bytes from ``offset``, or raise StoreError."""

    def write(self, offset: int, buffer: memoryview) -> None:
        """Write all of ``buffer`` at ``offset``, or raise StoreError."""

    def reserve(self, nbytes: int) -> None:
        """Grow the file so that at least ``nbytes`` are allocated; never shrinks. CapacityError when out of room."""

    def cut(self, nbytes: int) -> None:
        """Shorten the file to ``nbytes``, in whole sectors, if it is longer: nothing behind them is used."""

    def give_back(self, offset: int, nbytes: int) -> bool:
        """Punch a hole: return the bytes of an unused range to the disk. The length of the file does not change.

        Returns False, and keeps them, if the filesystem cannot do that.
        """

    def map(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of file bytes, for users who inspect the store; ``read`` and ``write`` see the same bytes.

        It is not coherent with a ``read`` or ``write`` of the same bytes that runs at the same time.
        """

    def forget(self, offset: int, nbytes: int) -> None:
        """Do not verify a range from now on: somebody may write to a mapping of it, unobserved."""

    def drop_cache(self, offset: int, nbytes: int) -> None:
        """Write back a range and drop its pages from the system's page cache."""

    def close(self) -> None:
        """Wait for calls in flight, then close the file; later calls raise StoreError. Safe to call twice.

        What is written to a mapping afterwards does not reach the file.
        """

    def leave_to_parent(self) -> list[int]:
        """In a forked child: stop writing to the file. Takes no lock, and ignores calls in flight.

        Returns the addresses of the views of the file that somebody holds: what is written to them stays in this process.
        """

    def describe(self) -> str:
        """Where the bytes lie, for messages: "/mnt/nvme (O_DIRECT)"."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Gate:
    """Admits calls until it is closed; ``close`` returns once all admitted calls have ended.

    The hazard it prevents: a descriptor closed while another thread is inside preadv can be handed to a new file by
    the next open, and the bytes go there.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_inside = 0
        self._closed = False

    @contextmanager
    def enter(self, what: str) -> Iterator[None]:
        """Hold the gate open for one call; StoreError, naming ``what`` was tried, when it is closed."""
        with self._condition:
            if self._closed:
                raise StoreError(f"cannot {what}: the store is closed; keep it open until the last transfer has ended")
            self._num_inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_inside -= 1
                if self._num_inside == 0:
                    self._condition.notify_all()

    def shut_in_child(self) -> None:
        """In a forked child: refuse new calls. The threads of the calls inside, and of the lock, do not exist here."""
        self._condition = threading.Condition()
        self._num_inside, self._closed = 0, True

    def close(self) -> None:
        """Refuse new calls, then wait for those inside."""
        with self._condition:
            self._closed = True
            wait_until(self._condition, lambda: self._num_inside == 0, "calls of the store file")


def whole_sectors(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole sectors."""
    return -(-nbytes // ALIGN) * ALIGN


def check_transfer(where: str, verb: str, offset: int, buffer: memoryview, limit: int) -> None:
    """Raise VerifyError unless ``buffer`` may be transferred at ``offset`` of a file with ``limit`` reserved bytes."""
    check_range(where, verb, offset, buffer.nbytes, limit)
    if buffer.ndim != 1 or buffer.itemsize != 1 or not buffer.c_contiguous:
        raise VerifyError(f"{verb} in {where}: the buffer has format {buffer.format!r}; cast it to contiguous bytes")
    if buffer.readonly:
        # ctypes tells no address of read-only memory; the kernel checks that one itself when it is written from.
        if verb == "read":
            raise VerifyError(f"read in {where} at offset {offset}: the buffer is read-only")
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer.nbytes else 0
    if address % ALIGN:
        raise VerifyError(
            f"{verb} in {where} at offset {offset}: buffer address {address:#x} is not a multiple of {ALIGN}; "
            "lease it from a StagingPool"
        )


def check_range(where: str, verb: str, offset: int, nbytes: int, limit: int) -> None:
    """Raise VerifyError unless [offset, offset + nbytes) is aligned and within ``limit`` reserved bytes."""
    if offset % ALIGN or nbytes % ALIGN:
        raise VerifyError(f"{verb} in {where}: offset {offset} and length {nbytes} must be multiples of {ALIGN}")
    if offset < 0 or nbytes < 0 or offset + nbytes > limit:
        raise VerifyError(
            f"{verb} in {where}: range [{offset}, {offset + nbytes}) is outside the {limit} reserved bytes; "
            "reserve the layout's end first"
        )
