"""Calls that move bytes: reads and writes of the disk and copies, on background threads or over the link to the device.

One pool of threads does all disk calls.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from zinf_compile.errors import StoreError, VerifyError
from zinf_compile.runtime.background import run_alone
from zinf_compile.runtime.futures import wait_all
from zinf_compile.runtime.in_flight import Named
from zinf_compile.runtime.link import Link
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import ALIGN, Engine
from zinf_compile.runtime.staging import StagingBuffer, StagingPool
from zinf_compile.terms import Tier

_NUM_THREADS = 4  # enough calls in flight for a disk's full bandwidth; more only take cores from compute
_BLOCK_NBYTES = 4 * 2**20  # one call: long enough for full bandwidth, short enough to spread a parameter over threads


class Calls:
    """Reads, writes and copies of one store."""

    def __init__(self, *, engine: Engine | None, staging: StagingPool, meter: Meter, link: Link | None) -> None:
        """``link`` leads to the device; None on a CPU, whose device tier is host memory too."""
        self._engine = engine
        self.staging = staging
        self._meter = meter
        self.link = link
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="zinf-transfer", initializer=run_alone)

    def copy(self, source: list[Tensor], destination: Tensor, home: Tier, goal: Tier, name: str) -> Future[None]:
        """Start copying the one tensor in ``source``, which is taken out: who waits for the copy finds its memory free."""
        nbytes = destination.numel() * destination.dtype.itemsize
        self._meter.add_moved(home, goal, nbytes)
        return self._pool.submit(self._copy, source, destination, home, goal, name)

    def _copy(self, source: list[Tensor], destination: Tensor, home: Tier, goal: Tier, name: str) -> None:
        with self._meter.moving(home, goal, destination.numel() * destination.dtype.itemsize, name):
            destination.copy_(source.pop())

    def copy_out(self, value: Tensor, destination: Tensor, name: str) -> None:
        """Copy flat elements of the device to host memory; blocks."""
        if self.link is None:
            destination.copy_(value)
            return
        self._meter.add_moved(Tier.DEVICE, Tier.HOST, destination.numel() * destination.dtype.itemsize)
        departure = self.link.take(value.contiguous().view(torch.uint8), destination.view(torch.uint8))
        self.wait([departure.left], name)

    def wait(self, futures: Sequence[Future[None]], name: str) -> None:
        """Wait for all futures, then raise their first error; a stall by this name, unless all are done."""
        if not all(future.done() for future in futures):
            with self._meter.stall(name):
                wait_all(futures)
        wait_all(futures)

    def lease(self, nbytes: int, name: str) -> StagingBuffer:
        """Lease staging memory; a stall by this name if there is no room at once. Raises what ``StagingPool.lease`` does."""
        lease = self.staging.try_lease(nbytes)
        if lease is None:
            with self._meter.stall(name):
                lease = self.staging.lease(nbytes)
        return lease

    def read(self, slot: Named, offset: int, buffer: memoryview, destination: Tier = Tier.HOST) -> list[Future[None]]:
        """Start reading bytes of a slot or an activation; the buffer is filled when every future is done."""
        if (home := slot.device_bytes) is not None:
            return [self._across(slot.name, home, offset, buffer, to_host=True)]
        self._meter.add_moved(Tier.NVME, destination, len(buffer))
        return self._submit(self._file().read, slot, offset, buffer, (Tier.NVME, destination))

    def write(self, slot: Named, offset: int, buffer: memoryview, source: Tier = Tier.HOST) -> list[Future[None]]:
        """Start writing bytes of a slot; the buffer is free when every future is done."""
        if (home := slot.device_bytes) is not None:
            return [self._across(slot.name, home, offset, buffer, to_host=False)]
        self._meter.add_moved(source, Tier.NVME, len(buffer))
        return self._submit(self._file().write, slot, offset, buffer, (source, Tier.NVME))

    def _across(self, name: str, home: Tensor, offset: int, buffer: memoryview, *, to_host: bool) -> Future[None]:
        """Start copying between a home on the device and a buffer of whole sectors, which may be longer than the rest."""
        assert self.link is not None
        nbytes = min(len(buffer), home.numel() - offset)
        there, here = home[offset : offset + nbytes], torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)
        way = (Tier.DEVICE, Tier.HOST) if to_host else (Tier.HOST, Tier.DEVICE)
        self._meter.add_moved(*way, nbytes)
        timing = self._meter.copying(*way, nbytes, name)
        if to_host:
            return self.link.take(there, here, timing=timing).left
        return self.link.bring(here, there, behind=self.link.mark(), timing=timing).landed

    def _submit(
        self,
        call: Callable[[int, memoryview], None],
        slot: Named,
        offset: int,
        buffer: memoryview,
        way: tuple[Tier, Tier],
    ) -> list[Future[None]]:
        return [
            self._pool.submit(self._call, call, slot.name, offset + start, buffer[start : start + _BLOCK_NBYTES], way)
            for start in range(0, len(buffer), _BLOCK_NBYTES)
        ]

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
            except StoreError as error:
                raise StoreError(f"{name}: {error}") from error

    def _file(self) -> Engine:
        if self._engine is None:
            raise VerifyError("a slot is on nvme, and the store has no nvme folder")
        return self._engine

    def piece_elements(self, dtype: torch.dtype) -> int:
        """Return how many elements move per staging buffer: a quarter of staging, in whole sectors, 16 MiB at most."""
        nbytes = min(self.staging.capacity // 4, 4 * _BLOCK_NBYTES)
        return max(ALIGN, nbytes - nbytes % ALIGN) // dtype.itemsize

    def close(self) -> None:
        """Wait for every call in flight and end the threads."""
        if self.link is not None:
            self.link.close()  # first: what has left the device goes on to the disk
        self._pool.shutdown(wait=True)
