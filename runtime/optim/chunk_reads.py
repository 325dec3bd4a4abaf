"""Starts reading the chunks of a streamed step: at once, or as soon as the writes of another chunk have made room.

A whole tensor with its state takes much of staging, half of it or more. Then there is no room for the next but one until
what was updated last is home, and by that time the thread of updates is busy with the one between them. So the thread
whose write ends starts the read::

    updates   | a       | b               | c
    disk      | read b  | write a, read c | write b, read d
"""

import threading
from concurrent.futures import Future
from typing import NamedTuple

from zinf_compile.ir.copies import GRADIENT
from zinf_compile.ir.errors import ZinfError
from zinf_compile.runtime.optim.step_chunks import Chunk
from zinf_compile.runtime.optim.step_jobs import Job
from zinf_compile.runtime.storage.staging import StagingBuffer
from zinf_compile.runtime.store.store import Store


class _Wanted(NamedTuple):
    """The arguments of a lease."""

    nbytes: int
    leaves: int
    in_shares: bool


class ChunkReads:
    """Leases staging for the chunks of a step, one after another, and starts reading them. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()  # guards what follows, and whether its reads have begun
        self._next: Chunk | None = None  # has no room yet

    def shares_staging(self, job: Job) -> bool:
        """Return whether an update leaves half of staging to gradients on their way to the disk."""
        return job.ahead is not None and self._store.device.memory.unified

    def try_start(self, chunk: Chunk) -> bool:
        """Start reading a chunk, unless that has begun; return False if staging has no room.

        Then it begins when ``return_`` makes room, if all of it is in the file, or with the next call.
        """
        with self._lock:
            self._next = None
            has_begun = chunk.lease is not None or self._try_start(chunk)
            if not has_begun and _is_in_file(chunk.job):
                self._next = chunk
            return has_begun

    def start(self, chunk: Chunk) -> None:
        """Start reading a chunk, unless that has begun; wait for room."""
        if not self.try_start(chunk):
            self.forget_next()
            if chunk.lease is None:
                wanted, what = self._wanted_by(chunk), "optimizer state on its way home"
                room = self._store.io_pool.lease(wanted.nbytes, what, leaves=wanted.leaves, in_shares=wanted.in_shares)
                self._start(chunk, room)

    def forget_next(self) -> None:
        """Let the chunk that waits for room not begin by itself any more."""
        with self._lock:
            self._next = None

    def return_(self, lease: StagingBuffer) -> None:
        """Return the staging of a chunk, and start reading the one that waits for room: who waits for it gets an error."""
        self._store.staging.return_(lease)
        with self._lock:
            if (chunk := self._next) is None:
                return
            try:
                if self._try_start(chunk):
                    self._next = None
            except (ZinfError, RuntimeError) as refused:  # a pool that was shut down, say
                self._next, failed = None, Future[None]()
                failed.set_exception(refused)
                chunk.reads.append(failed)

    def _try_start(self, chunk: Chunk) -> bool:
        wanted = self._wanted_by(chunk)
        lease = self._store.staging.try_lease(wanted.nbytes, leaves=wanted.leaves, in_shares=wanted.in_shares)
        if lease is not None:
            self._start(chunk, lease)
        return lease is not None

    def _wanted_by(self, chunk: Chunk) -> _Wanted:
        is_shared = self.shares_staging(chunk.job)
        leaves = self._store.staging.capacity // 2 if is_shared else 0
        return _Wanted(chunk.job.lease_nbytes(chunk.slice.num_elements), leaves, is_shared)

    def _start(self, chunk: Chunk, lease: StagingBuffer) -> None:
        job, part, io_pool = chunk.job, chunk.slice, self._store.io_pool
        chunk.lease, cursor = lease, 0
        for key, slot in job.staged_slots.items():
            padded = job.staged_nbytes(key, part.num_elements)
            chunk.views[key] = lease.view[cursor : cursor + padded]
            cursor += padded
            if not job.reads(key):
                continue
            if slot.in_memory:  # of an update ahead, which leaves it as it is
                chunk.tensor(key, slot).copy_(slot.elements(slot.stored(part)))
            elif not (key == GRADIENT and job.takes_from_staging(self._store.tensor_io, part, chunk.views[key])):
                offset, _ = job.range_read(key, part)
                chunk.reads += io_pool.read(slot, offset, chunk.views[key])


def _is_in_file(job: Job) -> bool:
    """Return whether all that an update reads comes from the disk: copies are made or enqueued by the thread of updates."""
    return job.ahead is None and all(
        slot.device_bytes is None for key, slot in job.staged_slots.items() if job.reads(key)
    )
