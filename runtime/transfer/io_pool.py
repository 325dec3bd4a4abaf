"""The I/O pool: disk reads and writes on one pool of background threads, and copies there or over the device's link.

What compute waits for goes first: values on their way to the device, then those that leave it, whose memory is wanted, and
then the reads and writes of optimizer updates. These would otherwise hold up a gather by as much as staging holds.
"""

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from zinf_compile.ir.errors import DamageError, StoreError, VerifyError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.process.background import run_alone
from zinf_compile.runtime.process.forking import UseCount
from zinf_compile.runtime.process.waiting import end_pool, why_pool_is_gone
from zinf_compile.runtime.storage.engine import ALIGN, Engine
from zinf_compile.runtime.storage.futures import wait_all
from zinf_compile.runtime.storage.slots import Slot, SlotPart, weights_of
from zinf_compile.runtime.storage.staging import StagingBuffer, StagingPool
from zinf_compile.runtime.transfer.in_flight import Named
from zinf_compile.runtime.transfer.link import Link

_NUM_THREADS = 4  # enough calls in flight for a disk's full bandwidth; more would only take cores from compute
_BLOCK_NBYTES = 4 * 2**20  # one call: long enough for full bandwidth, short enough to spread a parameter over threads


def _begin_thread(link: Link) -> None:
    run_alone()
    link.begin_thread()


def _urgency(source: Tier, destination: Tier) -> int:
    """Return the rank of a movement among those that wait for a thread: the lowest goes first."""
    if destination is Tier.DEVICE:
        return 0
    return 1 if source is Tier.DEVICE else 2


class IOPool:
    """Reads, writes and copies of one store."""

    def __init__(self, *, engine: Engine | None, staging: StagingPool, meter: Meter, link: Link) -> None:
        """``link`` leads to the device."""
        self._engine = engine
        self.staging = staging
        self._meter = meter
        self.link = link
        self.uses = UseCount()  # of homes, for children that are forked
        self._pool = ThreadPoolExecutor(
            _NUM_THREADS, thread_name_prefix="zinf-transfer", initializer=partial(_begin_thread, link)
        )
        self._lock = threading.Lock()  # guards what follows
        self._waiting: list[tuple[int, int, Callable[[], None], Future[None]]] = []  # a heap: by urgency, then by age
        self._ages = itertools.count()

    def copy(self, source: list[Tensor], destination: Tensor, home: Tier, goal: Tier, name: str) -> Future[None]:
        """Start copying the one tensor in ``source``. It is removed from the list, and freed after the copy."""
        nbytes = destination.numel() * destination.dtype.itemsize
        self._meter.add_moved(home, goal, nbytes)
        return self._enqueue(_urgency(home, goal), partial(self._copy, source, destination, home, goal, name))

    def _copy(self, source: list[Tensor], destination: Tensor, home: Tier, goal: Tier, name: str) -> None:
        with self._meter.moving(home, goal, destination.numel() * destination.dtype.itemsize, name):
            destination.copy_(source.pop())

    def decode(self, decode: Callable[[], None], nbytes: int, home: Tier, name: str) -> Future[None]:
        """Start decoding ``nbytes`` that are in memory into the arena, for a gather from ``home``."""
        return self._enqueue(_urgency(home, Tier.DEVICE), partial(self._decode, decode, nbytes, home, name))

    def _decode(self, decode: Callable[[], None], nbytes: int, home: Tier, name: str) -> None:
        with self._meter.moving(home, Tier.DEVICE, nbytes, name):
            decode()

    def wait(self, futures: Sequence[Future[None]], name: str) -> None:
        """Wait for all futures, then raise their first error; recorded as a stall with this name, unless all are done."""
        if not futures:
            return
        if not all(future.done() for future in futures):
            with self._meter.stall(name):
                wait_all(futures, name, gone=self._why_gone)
        wait_all(futures, name)

    def _why_gone(self) -> str | None:
        return why_pool_is_gone(self._pool)

    def lease(self, nbytes: int, name: str, *, leaves: int = 0, in_shares: bool = False) -> StagingBuffer:
        """Lease staging memory; a stall with this name if it has to wait. Arguments and errors of ``StagingPool.lease``."""
        lease = self.staging.try_lease(nbytes, leaves=leaves, in_shares=in_shares)
        if lease is None:
            with self._meter.stall(name):
                lease = self.staging.lease(nbytes, leaves=leaves, in_shares=in_shares)
        return lease

    def read(self, slot: Named, offset: int, buffer: memoryview, destination: Tier = Tier.HOST) -> list[Future[None]]:
        """Start reading bytes of a slot or activation; the buffer is filled when all futures are done."""
        if (home := slot.device_bytes) is not None:
            return [self._across(slot.name, home, offset, buffer, to_host=True)]
        self._meter.add_moved(Tier.NVME, destination, len(buffer))
        weights = weights_of(slot)
        read = self._file().read if weights is None else weights.file.read
        return self._submit(read, slot, offset, buffer, (Tier.NVME, destination))

    def write(self, slot: Named, offset: int, buffer: memoryview, source: Tier = Tier.HOST) -> list[Future[None]]:
        """Start writing bytes of a slot; the buffer may be reused when all futures are done."""
        if (home := slot.device_bytes) is not None:
            return [self._across(slot.name, home, offset, buffer, to_host=False)]
        if (weights := weights_of(slot)) is not None:
            raise VerifyError(f"{slot.name} lies in {weights.file.path}, which is never written")
        self._meter.add_moved(source, Tier.NVME, len(buffer))
        for _ in range(0, len(buffer), _BLOCK_NBYTES):
            self.uses.begin_write()
        may_change = isinstance(slot, Slot | SlotPart) and slot.whole.may_change_unseen
        call = self._write_and_forget if may_change else self._write
        return self._submit(call, slot, offset, buffer, (source, Tier.NVME))

    def _write(self, offset: int, buffer: memoryview) -> None:
        try:
            self._file().write(offset, buffer)
        finally:
            self.uses.end_write()

    def _write_and_forget(self, offset: int, buffer: memoryview) -> None:
        self._write(offset, buffer)
        self._file().forget(offset, len(buffer))

    def _across(self, name: str, home: Tensor, offset: int, buffer: memoryview, *, to_host: bool) -> Future[None]:
        """Start copying between a home on the device and a buffer of whole sectors, which may be longer than the rest."""
        nbytes = min(len(buffer), home.numel() - offset)
        there, here = home[offset : offset + nbytes], torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)
        way = (Tier.DEVICE, Tier.HOST) if to_host else (Tier.HOST, Tier.DEVICE)
        self._meter.add_moved(*way, nbytes)
        timing = self._meter.copying(*way, nbytes, name)
        if to_host:
            return self.link.take(there, here, timing=timing).done
        return self.link.bring(here, there, behind=self.link.mark(), timing=timing).done

    def _submit(
        self,
        call: Callable[[int, memoryview], None],
        slot: Named,
        offset: int,
        buffer: memoryview,
        way: tuple[Tier, Tier],
    ) -> list[Future[None]]:
        return [
            self._enqueue(
                _urgency(*way),
                partial(self._call, call, slot.name, offset + start, buffer[start : start + _BLOCK_NBYTES], way),
            )
            for start in range(0, len(buffer), _BLOCK_NBYTES)
        ]

    def _enqueue(self, urgency: int, call: Callable[[], None]) -> Future[None]:
        """Let a thread run a call, once nothing more urgent waits. RuntimeError if the pool was shut down."""
        future: Future[None] = Future()
        with self._lock:
            self._pool.submit(
                self._run_next
            )  # first: an interrupt behind it leaves a thread without a call, which is well
            heapq.heappush(self._waiting, (urgency, next(self._ages), call, future))
        return future

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            _, _, call, future = heapq.heappop(self._waiting)
        if not future.set_running_or_notify_cancel():
            return
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # whoever waits for the future raises it
            future.set_exception(error)
        else:
            future.set_result(None)
        finally:
            del call, future  # an error refers to this frame

    def _call(
        self,
        call: Callable[[int, memoryview], None],
        name: str,
        offset: int,
        buffer: memoryview,
        way: tuple[Tier, Tier],
    ) -> None:
        """Call the engine; an error names the parameter as well as the file and the offset."""
        with self._meter.moving(*way, len(buffer), name):
            try:
                call(offset, buffer)
            except DamageError as error:
                if error.is_named:
                    raise
                raise DamageError(f"{name}: {error}", is_named=True) from error
            except StoreError as error:
                raise StoreError(f"{name}: {error}") from error

    def _file(self) -> Engine:
        if self._engine is None:
            raise VerifyError("a slot is on nvme, but the store has no nvme folder")
        return self._engine

    def submit(self, call: Callable[..., None], *args: object) -> Future[None]:
        """Let a thread run a call on what has left the device."""
        return self._enqueue(_urgency(Tier.DEVICE, Tier.HOST), partial(call, *args))

    def piece_elements(self, dtype: torch.dtype) -> int:
        """Return the elements per staging buffer: a quarter of staging, in whole sectors, at most 16 MiB."""
        nbytes = min(self.staging.capacity // 4, 4 * _BLOCK_NBYTES)
        return max(ALIGN, nbytes - nbytes % ALIGN) // dtype.itemsize

    def close(self) -> None:
        """Wait for every call in flight and end the threads."""
        self.link.close()  # first: copies from the device continue as writes to the disk
        end_pool(self._pool, "reads and writes of the store")
