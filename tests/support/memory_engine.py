"""An in-memory disk with configurable latency, bandwidth and faults."""

import mmap
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from zinf_compile.ir.errors import CapacityError, ConfigError, StoreError
from zinf_compile.runtime.storage.engine import ALIGN, Gate, check_range, check_transfer, whole_sectors

_GIB = 1 << 30
_MAP_NORESERVE = 0x4000  # asm-generic/mman.h; the mmap module names it from Python 3.13 on

Operation = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Make the ``nth`` operation of its kind, counted from 0, raise StoreError.

    "error" moves no byte; "short" moves only the first half, rounded down to a multiple of ``ALIGN``.
    """

    operation: Operation
    nth: int
    kind: Literal["error", "short"]


class MemoryEngine:
    """Engine over anonymous memory. Pages take memory when first written.

    Each operation takes ``latency_seconds``, in parallel between threads, plus its time at ``bytes_per_second``, a bandwidth
    that all threads share. ``max_nbytes`` is the size of the "disk": reserving more raises CapacityError.
    """

    def __init__(
        self,
        *,
        latency_seconds: float = 0.0,
        bytes_per_second: float | None = None,
        faults: Iterable[Fault] = (),
        max_nbytes: int = 4 * _GIB,
    ) -> None:
        if max_nbytes < ALIGN:
            raise ConfigError(f"max_nbytes is {max_nbytes}; it must be at least {ALIGN}")
        if latency_seconds < 0 or (bytes_per_second is not None and bytes_per_second <= 0):
            raise ConfigError(
                f"latency_seconds is {latency_seconds} and bytes_per_second {bytes_per_second}; "
                "the first must not be negative, the second must be positive or None"
            )
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._faults = {(fault.operation, fault.nth): fault for fault in faults}
        self._max_nbytes = max_nbytes // ALIGN * ALIGN
        # Map the whole range at once: growing it later would move it under the views that ``map`` returned.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._region: memoryview | None = memoryview(mmap.mmap(-1, self._max_nbytes, flags=flags))
        self._gate = Gate()
        self._lock = threading.Lock()  # guards everything below
        self._nbytes = 0
        self._num_started: dict[Operation, int] = {"read": 0, "write": 0}
        self._num_moved: dict[Operation, int] = {"read": 0, "write": 0}
        self._busy_until_seconds = 0.0

    @property
    def path(self) -> None:
        """There is no file."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes reserved so far."""
        return self._nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes moved by completed reads."""
        return self._num_moved["read"]

    @property
    def bytes_written(self) -> int:
        """Bytes moved by completed writes."""
        return self._num_moved["write"]

    def read(self, offset: int, buffer: memoryview) -> None:
        """See Engine.read."""
        self._transfer("read", offset, buffer)

    def write(self, offset: int, buffer: memoryview) -> None:
        """See Engine.write."""
        self._transfer("write", offset, buffer)

    def reserve(self, nbytes: int) -> None:
        """See Engine.reserve."""
        with self._gate.enter(f"reserve {nbytes} bytes in {self.describe()}"), self._lock:
            wanted = max(self._nbytes, whole_sectors(nbytes))
            if wanted > self._max_nbytes:
                free = self._max_nbytes - self._nbytes
                raise CapacityError(
                    f"the store needs {wanted / _GIB:.2f} GiB in {self.describe()}, holds "
                    f"{self._nbytes / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB are free there; "
                    "raise max_nbytes, set `nvme` to a folder, or train a smaller model"
                )
            self._nbytes = wanted

    def cut(self, nbytes: int) -> None:
        """See Engine.cut."""
        with self._gate.enter(f"cut {self.describe()} to {nbytes} bytes"), self._lock:
            self._nbytes = min(self._nbytes, whole_sectors(nbytes))

    def give_back(self, offset: int, nbytes: int) -> bool:
        """Only check the arguments and keep the bytes: there is no disk."""
        with self._gate.enter(f"give back {nbytes} bytes at offset {offset} in {self.describe()}"):
            check_range(self.describe(), "give back", offset, nbytes, self._nbytes)
            return False

    def map(self, offset: int, nbytes: int) -> memoryview:
        """See Engine.map."""
        with self._gate.enter(f"map {nbytes} bytes at offset {offset} in {self.describe()}"):
            check_range(self.describe(), "map", offset, nbytes, self._nbytes)
            return self._slice(offset, nbytes)

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing: this engine verifies nothing."""

    def drop_cache(self, offset: int, nbytes: int) -> None:
        """Only check the arguments: there is no cache."""
        with self._gate.enter(f"drop {nbytes} cached bytes at offset {offset} in {self.describe()}"):
            check_range(self.describe(), "drop_cache", offset, nbytes, self._nbytes)

    def close(self) -> None:
        """See Engine.close. The memory is freed with the last view that ``map`` returned."""
        self._gate.close()
        self._region = None

    def leave_to_parent(self) -> list[int]:
        """See Engine.leave_to_parent. The child has its own copy of all bytes."""
        self._gate.shut_in_child()
        return []

    def describe(self) -> str:
        """See Engine.describe."""
        return f"memory ({self._max_nbytes / _GIB:.2f} GiB)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _transfer(self, operation: Operation, offset: int, buffer: memoryview) -> None:
        nbytes = buffer.nbytes
        with self._gate.enter(f"{operation} {nbytes} bytes at offset {offset} in {self.describe()}"):
            check_transfer(self.describe(), operation, offset, buffer, self._nbytes)
            with self._lock:
                fault = self._faults.get((operation, self._num_started[operation]))
                self._num_started[operation] += 1
                remaining_seconds = self._occupy(nbytes)
            if remaining_seconds > 0:
                time.sleep(remaining_seconds)
            if fault is None:
                done, reason = nbytes, ""
            elif fault.kind == "error":
                done, reason = 0, "Input/output error (EIO)"
            else:
                done, reason = nbytes // 2 // ALIGN * ALIGN, "the system moved no more bytes; was the file cut?"
            stored = self._slice(offset, done)
            if operation == "read":
                buffer[:done] = stored
            else:
                stored[:] = buffer[:done]
            if fault is not None:
                raise StoreError(
                    f"{operation} of the store file in {self.describe()} at offset {offset} failed "
                    f"after {done} of {nbytes} bytes: {reason}"
                )
            with self._lock:
                self._num_moved[operation] += nbytes

    def _occupy(self, nbytes: int) -> float:
        """Return the seconds until this operation ends. The caller holds the lock."""
        if self._bytes_per_second is None:
            return self._latency_seconds
        now = time.monotonic()
        self._busy_until_seconds = max(now, self._busy_until_seconds) + nbytes / self._bytes_per_second
        return self._busy_until_seconds - now + self._latency_seconds

    def _slice(self, offset: int, nbytes: int) -> memoryview:
        assert self._region is not None  # the gate is held
        return self._region[offset : offset + nbytes]
