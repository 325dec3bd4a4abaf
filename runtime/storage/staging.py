"""The staging pool: page-aligned host memory for transfers, leased and returned within a byte budget."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from zinf_compile.ir.errors import CapacityError, StoreError, VerifyError
from zinf_compile.runtime.device.host_mapping import map_memory
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.process.waiting import wait_until
from zinf_compile.runtime.storage.engine import ALIGN, whole_sectors
from zinf_compile.runtime.storage.host_memory import Allocate, Memory

_MIB = 1 << 20
_RETURN_SECONDS = 1.0
# Leases of a 32nd of the capacity or more take one of these parts of it. Chunks and pieces are planned as such.
_LEAST_SHARED, _SHARES = 32, (16, 8, 4, 2)


class _Ticket:
    """A place in the queue for leases."""

    __slots__ = ("leaves",)

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves  # bytes that the lease leaves to others


class _Idle(NamedTuple):
    """Memory that is not leased."""

    memory: Memory
    holds: object | None  # what somebody may want of its bytes, until it is leased again


class StagingBuffer:
    """One leased staging buffer; leaving its ``with`` block returns it."""

    __slots__ = ("_pool", "_view", "nbytes", "reserved_nbytes")

    def __init__(self, pool: "StagingPool", memory: Memory, nbytes: int) -> None:
        self._pool = pool
        self._view: memoryview | None = memoryview(memory).cast("B")[:nbytes]
        self.nbytes = nbytes
        self.reserved_nbytes = len(memory)

    @property
    def view(self) -> memoryview:
        """The buffer's bytes, ``nbytes`` long, at an address that is a multiple of 4096.

        Reused memory holds what its last lease left there. VerifyError once the buffer is returned: then neither the
        view nor a tensor over it may be used, since the same bytes are leased to someone else.
        """
        if self._view is None:
            raise VerifyError(f"a staging buffer of {self.nbytes} bytes was used after it was returned")
        return self._view

    @contextmanager
    def handed_on(self) -> Iterator[None]:
        """Let the block give the buffer to who will return it; return it here if the block raises before that."""
        try:
            yield
        except BaseException:
            self._pool.return_(self)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.return_(self)


class StagingPool:
    """Staging buffers whose bytes, leased and cached together, never exceed ``capacity``. Thread-safe.

    A lease takes whole pages. Returned buffers are kept and given to the next lease with the same number of pages,
    since the first touch of fresh memory costs more than a copy into it; the longest unused are dropped when room is
    needed. Leases are served in the order they were asked for, so a big one is not starved by small ones. Those that leave
    some of the capacity to others let these go first.

    A buffer may be returned with a note of what its bytes hold. It can be leased by that note, with these bytes, as long as
    no other lease has taken its memory, which happens last to the memory that was returned last.
    """

    def __init__(self, capacity: int, allocate: Allocate = map_memory) -> None:
        self.capacity = capacity
        self._allocate = allocate
        self._condition = threading.Condition()  # guards everything below
        self._leased: dict[StagingBuffer, Memory] = {}
        self._idle: deque[_Idle] = deque()  # the longest unused first
        self._waiting: deque[_Ticket] = deque()
        self._leased_nbytes = 0
        self._idle_nbytes = 0
        self._peak_nbytes = 0
        self._closed = False

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that were held at once, leased and cached."""
        return self._peak_nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes held now, leased and cached."""
        return self._leased_nbytes + self._idle_nbytes

    @without_interrupts
    def lease(
        self, nbytes: int, *, leaves: int = 0, in_shares: bool = False, timeout_seconds: float | None = None
    ) -> StagingBuffer:
        """A buffer of ``nbytes``; blocks until it fits beside what is leased.

        ``leaves`` are bytes of the capacity that must stay free for others beside it; as many as there can be.

        With ``in_shares`` a large one takes the smallest share of the capacity that holds it, so that buffers of nearly
        the same size reuse memory. Do not use it for buffers that are held at once and whose sum has to fit.

        Raises CapacityError when it can never fit or did not within ``timeout_seconds``, StoreError when the pool is
        closed, before or meanwhile.
        """
        if nbytes <= 0:
            raise VerifyError(f"cannot lease {nbytes} bytes: a staging buffer has at least one")
        reserved = self._room_for(nbytes, in_shares=in_shares)
        if reserved > self.capacity:
            raise CapacityError(
                f"a staging buffer of {reserved / _MIB:.2f} MiB does not fit in a pool of {self.capacity / _MIB:.2f} "
                f"MiB; raise the pool's capacity to {reserved} bytes"
            )
        ticket = _Ticket(min(leaves, self.capacity - reserved))
        with self._condition:
            self._waiting.append(ticket)
            try:
                served = wait_until(
                    self._condition,
                    lambda: self._closed or self._may_lease(ticket, reserved),
                    f"room for {nbytes} bytes of staging",
                    timeout=timeout_seconds,
                )
                if self._closed:
                    raise StoreError(f"cannot lease {nbytes} bytes: the staging pool is closed")
                if not served:
                    raise CapacityError(
                        f"no room for a staging buffer of {reserved / _MIB:.2f} MiB within {timeout_seconds} seconds: "
                        f"{self._leased_nbytes / _MIB:.2f} of {self.capacity / _MIB:.2f} MiB are leased in "
                        f"{len(self._leased)} buffers, {len(self._waiting) - 1} others wait; "
                        "return buffers earlier or raise the pool's capacity"
                    )
                return self._grant(nbytes, reserved)
            finally:
                self._waiting.remove(ticket)
                self._condition.notify_all()  # the next in line may fit as well

    @without_interrupts
    def try_lease(self, nbytes: int, *, leaves: int = 0, in_shares: bool = False) -> StagingBuffer | None:
        """A buffer as of ``lease``; None if there is none at once, or others wait. StoreError when the pool is closed."""
        reserved = self._room_for(nbytes, in_shares=in_shares)
        leaves = max(0, min(leaves, self.capacity - reserved))
        with self._condition:
            if self._closed:
                raise StoreError(f"cannot lease {nbytes} bytes: the staging pool is closed")
            has_room = self._leased_nbytes + reserved + leaves <= self.capacity
            is_first = all(other.leaves > leaves for other in self._waiting)
            return self._grant(nbytes, reserved) if has_room and is_first else None

    @without_interrupts
    def lease_holding(self, what: object) -> StagingBuffer | None:
        """The buffer that was returned with the note ``what``, leased again; None if other leases have taken its memory."""
        with self._condition:
            for index, idle in enumerate(self._idle):
                if idle.holds is what and not self._closed:
                    del self._idle[index]
                    self._idle_nbytes -= len(idle.memory)
                    return self._hand_out(idle.memory, len(idle.memory))
        return None

    @without_interrupts
    def return_(self, buffer: StagingBuffer, *, holds: object | None = None) -> None:
        """Take ``buffer`` back; VerifyError when it is not leased from this pool.

        ``holds`` notes what its bytes are: see ``lease_holding``.
        """
        with self._condition:
            memory = self._leased.pop(buffer, None)
            if memory is None:
                raise VerifyError(
                    f"a staging buffer of {buffer.nbytes} bytes was returned twice, or to a pool it is not from"
                )
            # Only the reference is dropped. Releasing the view would let the memory be unmapped under a tensor made
            # by torch.frombuffer, which keeps the view but not its export.
            buffer._view = None
            self._leased_nbytes -= len(memory)
            if not self._closed:
                self._idle.append(_Idle(memory, holds))
                self._idle_nbytes += len(memory)
            self._condition.notify_all()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Block leases and returns inside the block, so that what is held can be compared with what the system says."""
        with self._condition:
            yield

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let the peak be afterwards what it was before, and hold nothing that is not leased."""
        peak = self._peak_nbytes
        try:
            yield
        finally:
            self.drop_idle()
            self._peak_nbytes = peak

    @without_interrupts
    def forget_peak(self) -> None:
        """Give the cached memory back, and let the peak be what is leased now."""
        with self._condition:
            self.drop_idle()
            self._peak_nbytes = self._leased_nbytes

    @without_interrupts
    def drop_idle(self) -> None:
        """Give the cached memory back to the system; later leases take it again."""
        with self._condition:
            self._idle.clear()
            self._idle_nbytes = 0

    @without_interrupts
    def close(self) -> None:
        """Drop the cached memory and make waiting and later leases raise. What is leased can still be returned."""
        with self._condition:
            self._closed = True
            self.drop_idle()
            self._condition.notify_all()

    @without_interrupts
    def check_integrity(self, *, expect_idle: bool = False) -> None:
        """Raise VerifyError if memory is leased twice or the sums are wrong; or, if asked, when anything is leased."""
        with self._condition:
            if expect_idle:  # whoever waited for a call goes on a moment before that call's buffer is returned
                wait_until(self._condition, lambda: not self._leased, "staging to come back", timeout=_RETURN_SECONDS)
            memories = [*self._leased.values(), *(idle.memory for idle in self._idle)]
            if len({id(memory) for memory in memories}) != len(memories):
                raise VerifyError("the same staging memory is leased twice, or both leased and idle")
            leased = sum(len(memory) for memory in self._leased.values())
            idle = sum(len(each.memory) for each in self._idle)
            if (leased, idle) != (self._leased_nbytes, self._idle_nbytes):
                raise VerifyError(
                    f"the staging pool counts {self._leased_nbytes} bytes leased and {self._idle_nbytes} idle, "
                    f"but holds {leased} and {idle}"
                )
            if self._peak_nbytes > self.capacity:
                raise VerifyError(f"the staging pool held {self._peak_nbytes} bytes, its capacity is {self.capacity}")
            if expect_idle and self._leased:
                raise VerifyError(f"{len(self._leased)} staging buffers ({leased} bytes) were not returned")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _room_for(self, nbytes: int, *, in_shares: bool) -> int:
        """Return the bytes that a lease takes: whole pages, or the smallest share of the capacity that holds them."""
        wanted = whole_sectors(nbytes)
        if not in_shares or wanted < self.capacity // _LEAST_SHARED:
            return wanted
        shares = (self.capacity // share // ALIGN * ALIGN for share in _SHARES)
        return next((share for share in shares if wanted <= share), wanted)

    def _grant(self, nbytes: int, reserved: int) -> StagingBuffer:
        return self._hand_out(self._take_memory(reserved), nbytes)

    def _hand_out(self, memory: Memory, nbytes: int) -> StagingBuffer:
        buffer = StagingBuffer(self, memory, nbytes)
        self._leased[buffer] = memory
        self._leased_nbytes += len(memory)
        self._peak_nbytes = max(self._peak_nbytes, self._leased_nbytes + self._idle_nbytes)
        return buffer

    def _may_lease(self, ticket: _Ticket, reserved: int) -> bool:
        first = min(self._waiting, key=lambda each: each.leaves)  # of those that leave the least, the longest waiting
        return first is ticket and self._leased_nbytes + reserved + ticket.leaves <= self.capacity

    def _take_memory(self, reserved: int) -> Memory:
        """Idle memory of exactly this size, or new memory, after dropping idle memory for room.

        Of idle memory what holds nothing goes first, the last used before others; then, if there is no room for more, what
        holds something, the longest unused first.
        """
        fitting = [index for index, idle in enumerate(self._idle) if len(idle.memory) == reserved]
        index = next((index for index in reversed(fitting) if self._idle[index].holds is None), None)
        if index is None and fitting and self._leased_nbytes + self._idle_nbytes + reserved > self.capacity:
            index = fitting[0]
        if index is not None:
            memory = self._idle[index].memory
            del self._idle[index]
            self._idle_nbytes -= reserved
            return memory
        while self._leased_nbytes + self._idle_nbytes + reserved > self.capacity:
            # Not mmap.close(): it raises BufferError as long as someone kept a view.
            self._idle_nbytes -= len(self._idle.popleft().memory)
        return self._allocate(reserved)
