"""Starts reading the chunks of a streamed step: at once, or as soon as the writes of another chunk have made room.

A whole tensor with its state takes much of staging, half of it or more. Then there is no room for the next but one until
what was updated last is home, and by that time the thread of updates is busy with the one between them. So the thread
whose write ends starts the read::

    updates   | a       | b               | c
    disk      | read b  | write a, read c | write b, read d

Each copy of a whole tensor has a lease of its own: as soon as it is home there is room for a copy of the next one, and all
of staging is used where it holds one and a half.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from zinf_compile.ir.copies import GRADIENT, CopyKey
from zinf_compile.ir.errors import ZinfError
from zinf_compile.runtime.optim.step_chunks import Chunk, Leased
from zinf_compile.runtime.optim.step_jobs import Job
from zinf_compile.runtime.storage.staging import StagingBuffer
from zinf_compile.runtime.store.store import Store


class _Wanted(NamedTuple):
    """A lease of staging for some copies of a chunk."""

    keys: Sequence[CopyKey]
    nbytes: int
    leaves: int  # arguments of ``StagingPool.lease``
    in_shares: bool


class ChunkReads:
    """Leases staging for the chunks of a step, one after another, and starts reading them. Thread-safe."""

    def __init__(self, store: Store, *, apart: bool) -> None:
        """``apart``: each copy of a chunk has a lease of its own."""
        self._store = store
        self._apart = apart
        self._lock = threading.Lock()  # guards what follows, and what of it is staged
        self._next: Chunk | None = None  # has no room yet, or not for all of it

    def shares_staging(self, job: Job) -> bool:
        """Return whether an update leaves half of staging to gradients on their way to the disk."""
        return job.ahead is not None and self._store.device.memory.unified

    def try_start(self, chunk: Chunk) -> bool:
        """Start reading a chunk as far as staging has room; return whether all of it is read, or being read.

        The rest begins when ``return_`` makes room, if all of it is in the file, or with the next call.
        """
        with self._lock:
            has_begun = self._try_start(chunk)
            self._next = None if has_begun or not _is_in_file(chunk.job) else chunk
            return has_begun

    def start(self, chunk: Chunk) -> None:
        """Start reading what is left of a chunk; wait for room."""
        self.forget_next()
        for wanted in self._left_of(chunk):
            what = "optimizer state on its way home"
            room = self._store.io_pool.lease(wanted.nbytes, what, leaves=wanted.leaves, in_shares=wanted.in_shares)
            self._start(chunk, wanted.keys, room)

    def forget_next(self) -> None:
        """Let what has no room yet not begin by itself any more."""
        with self._lock:
            self._next = None

    def return_(self, lease: StagingBuffer) -> None:
        """Return staging of a chunk, and start reading the one that waits for room: who waits for it gets an error."""
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
        for wanted in self._left_of(chunk):
            lease = self._store.staging.try_lease(wanted.nbytes, leaves=wanted.leaves, in_shares=wanted.in_shares)
            if lease is None:
                return False
            self._start(chunk, wanted.keys, lease)
        return True

    def _left_of(self, chunk: Chunk) -> list[_Wanted]:
        """Return the leases that a chunk lacks."""
        left = [key for key in chunk.job.staged_slots if key not in chunk.views]
        is_shared = self.shares_staging(chunk.job)
        leaves = self._store.staging.capacity // 2 if is_shared else 0
        return [
            _Wanted(keys, sum(chunk.staged_nbytes(key) for key in keys), leaves, is_shared)
            for keys in ([[key] for key in left] if self._apart else [left] if left else [])
        ]

    def _start(self, chunk: Chunk, keys: Sequence[CopyKey], lease: StagingBuffer) -> None:
        job, part, io_pool = chunk.job, chunk.slice, self._store.io_pool
        chunk.leases.append(Leased(lease, keys))
        cursor = 0
        for key in keys:
            slot, padded = job.staged_slots[key], chunk.staged_nbytes(key)
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
