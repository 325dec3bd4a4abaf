"""The movement of bytes: gathers into the arena and gradients out of compute, on background threads.

One pool of threads does all disk calls. Compute (the thread that runs the model) issues and waits; on a CPU it is
synchronous, so what it did before an issue is done, and arena bytes released before an issue may be written by it.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from zinf_compile.errors import StoreError, VerifyError, ZinfError
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.background import run_alone
from zinf_compile.runtime.futures import call_when_done, return_when_done, wait_all
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import ALIGN, Engine, whole_sectors
from zinf_compile.runtime.slots import Slot, StoredParameter
from zinf_compile.runtime.staging import StagingBuffer, StagingPool
from zinf_compile.runtime.tiles import SlotRows, StoredTile
from zinf_compile.terms import Tier

_NUM_THREADS = 4  # enough calls in flight for a disk's full bandwidth; more only take cores from compute
_BLOCK_NBYTES = 4 * 2**20  # one call: long enough for full bandwidth, short enough to spread a parameter over threads


class Named(Protocol):
    """What an error of a read or a write names: a slot, or an activation that has left the device."""

    @property
    def name(self) -> str:
        """Its name, for messages."""


@dataclass(slots=True, kw_only=True, eq=False)
class InFlight:
    """One transfer that was issued to the arena, and the calls that are not yet known to be done.

    It starts when what it has to wait for is done; ``futures`` are complete once ``started`` is done.
    """

    name: str
    offset: int
    started: Future[None]
    futures: list[Future[None]]
    is_awaited: bool = False

    @property
    def is_done(self) -> bool:
        """Return whether waiting for it would not block."""
        return self.started.done() and all(future.done() for future in self.futures)

    def wait(self) -> None:
        """Block until it has landed; raise its first error."""
        wait_all([self.started])
        wait_all(self.futures)


class Transfers:
    """Everything in flight for one store."""

    def __init__(self, *, engine: Engine | None, staging: StagingPool, arena: Arena, meter: Meter) -> None:
        self._engine = engine
        self.staging = staging
        self._arena = arena
        self._meter = meter
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="zinf-transfer", initializer=run_alone)
        self._in_flight: dict[int, InFlight] = {}
        self._next_ticket = 0
        self._writes: list[tuple[Slot, Future[None]]] = []
        self.failed_slots: list[Slot] = []  # whose value did not get home: what they hold is undefined

    # Gathers

    def issue_gather(
        self, records: Sequence[StoredParameter | StoredTile], dtypes: Sequence[torch.dtype], offsets: Sequence[int]
    ) -> int:
        """Start moving the copies of these dtypes into consecutive arena bytes; return the ticket to wait with."""
        slots = [record.copy_in(dtype) for record, dtype in zip(records, dtypes, strict=True)]
        first, last = offsets[0], offsets[-1]
        return self.issue(
            records[0].name if len(records) == 1 else f"{records[0].name} and {len(records) - 1} more",
            first,
            last + whole_sectors(slots[-1].nbytes) - first,
            # Behind updates of these parameters, without waiting for them: compute may have long to go until it needs this.
            after=[record.update for record in records if record.update is not None],
            start=lambda futures: self._start_gather(slots, offsets, futures),
        )

    def issue(
        self,
        name: str,
        offset: int,
        nbytes: int,
        *,
        after: Sequence[Future[None]],
        start: Callable[[list[Future[None]]], None],
    ) -> int:
        """Take arena bytes; when all of ``after`` are done, call ``start``, which begins to fill them and appends its calls.

        Returns the ticket to wait with. An error, of what came before or of ``start``, is raised by that wait.
        """
        self._arena.take(offset, nbytes)
        self._next_ticket += 1
        moving = InFlight(name=name, offset=offset, started=Future(), futures=[])
        self._in_flight[self._next_ticket] = moving

        def go(error: BaseException | None) -> None:
            if error is not None:
                moving.started.set_exception(error)
                return
            try:
                start(moving.futures)
            except (ZinfError, RuntimeError) as refused:  # a pool that was shut down, say: who waits must hear of it
                moving.started.set_exception(refused)
            else:
                moving.started.set_result(None)

        call_when_done(after, go)
        return self._next_ticket

    def in_flight(self, ticket: int) -> InFlight:
        """Return a transfer that was issued and not yet released."""
        return self._in_flight[ticket]

    def _start_gather(
        self, slots: Sequence[Slot | SlotRows], offsets: Sequence[int], futures: list[Future[None]]
    ) -> None:
        for run in _file_runs(slots, offsets):
            buffer = self._arena.buffer(run.arena_offset, run.nbytes)
            futures += self.read(run.slot, run.file_offset, buffer, Tier.DEVICE)
        for slot, offset in zip(slots, offsets, strict=True):
            if slot.in_memory:
                destination = self._arena.view(offset, slot.tensor.shape, slot.tensor.dtype)
                futures.append(self.copy([slot.tensor], destination, slot.tier, Tier.DEVICE, slot.name))

    def wait_gather(self, ticket: int) -> bool:
        """Block until a transfer has landed; return whether this was its first wait. Raises its first error."""
        gather = self._in_flight[ticket]
        if gather.is_awaited:
            return False
        if gather.is_done:
            gather.wait()
        else:
            with self._meter.stall(gather.name):
                gather.wait()
        gather.is_awaited = True
        self._meter.arrive(gather.name)
        return True

    def release(self, ticket: int) -> None:
        """Let later transfers use the bytes. Compute calls this after the last op that reads them."""
        gather = self._in_flight[ticket]
        if not gather.is_awaited:
            raise VerifyError(f"transfer of {gather.name} is released before it was waited for")
        del self._in_flight[ticket]
        self._arena.give_back(gather.offset)

    def abandon_gathers(self) -> None:
        """Wait for and forget whatever is in flight, after compute failed between an issue and its release."""
        for ticket in list(self._in_flight):
            gather = self._in_flight[ticket]
            gather.started.exception()  # waits; only then is the list of calls complete
            for future in gather.futures:
                future.exception()
            gather.is_awaited = True
            self.release(ticket)
        self._arena.give_back_all()  # also what an interrupted issue_gather took

    # Plain copies, reads and writes

    def copy(self, source: list[Tensor], destination: Tensor, home: Tier, goal: Tier, name: str) -> Future[None]:
        """Start copying the one tensor in ``source``, which is taken out: who waits for the copy finds its memory free."""
        nbytes = destination.numel() * destination.dtype.itemsize
        self._meter.add_moved(home, goal, nbytes)
        return self._pool.submit(self._copy, source, destination, home, goal, name)

    def _copy(self, source: list[Tensor], destination: Tensor, home: Tier, goal: Tier, name: str) -> None:
        with self._meter.moving(home, goal, destination.numel() * destination.dtype.itemsize, name):
            destination.copy_(source.pop())

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
        """Start reading file bytes of a slot or an activation; the buffer is filled when every future is done."""
        self._meter.add_moved(Tier.NVME, destination, len(buffer))
        return self._submit(self._file().read, slot, offset, buffer, (Tier.NVME, destination))

    def write(self, slot: Named, offset: int, buffer: memoryview, source: Tier = Tier.HOST) -> list[Future[None]]:
        """Start writing file bytes of a slot; the buffer is free when every future is done."""
        self._meter.add_moved(source, Tier.NVME, len(buffer))
        return self._submit(self._file().write, slot, offset, buffer, (source, Tier.NVME))

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

    # Values: whole tensors in and out, a staging buffer at a time

    def piece_elements(self, dtype: torch.dtype) -> int:
        """Return how many elements move per staging buffer: a quarter of staging, in whole sectors, 16 MiB at most."""
        nbytes = min(self.staging.capacity // 4, 4 * _BLOCK_NBYTES)
        return max(ALIGN, nbytes - nbytes % ALIGN) // dtype.itemsize

    def write_value(self, slot: Slot, value: Tensor, source: Tier = Tier.HOST, *, first: int = 0) -> None:
        """Start writing ``value`` to a slot. It is copied at once; ``wait_writes`` makes it home.

        It may be a piece: its elements then go to [first, first + its length) of the flat tensor, at a whole sector.
        """
        if slot.in_memory:
            home = slot.tensor.view(-1)[first : first + value.numel()].view(value.shape)
            home.copy_(value)
            self._meter.add_moved(source, slot.tier, home.numel() * home.dtype.itemsize)
            return
        flat = value.reshape(-1)
        step = self.piece_elements(slot.tensor.dtype)
        for start in range(0, flat.numel(), step):
            stop = min(flat.numel(), start + step)
            lease = self.lease(slot.byte_range(first + start, first + stop)[1], f"room for {slot.name}")
            torch.frombuffer(lease.view, dtype=slot.tensor.dtype, count=stop - start).copy_(flat[start:stop])
            self.send_home(slot, first + start, first + stop, lease, source)

    def add_value(
        self,
        slot: Slot | SlotRows,
        value: Tensor,
        source: Tier = Tier.HOST,
        *,
        on_sum: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Start adding ``value`` to a slot; ``wait_writes`` makes the sum home.

        ``on_sum`` is called with the whole sum where that is on nvme and half of staging can hold it.
        """
        if slot.in_memory:
            slot.tensor.add_(value.to(slot.tensor.dtype))
            self._meter.add_moved(source, slot.tier, slot.nbytes)
            return
        flat = value.reshape(-1)

        def add(piece: Tensor, start: int) -> None:
            piece.add_(flat[start : start + piece.numel()].to(piece.dtype))
            if on_sum is not None and piece.numel() == flat.numel():
                on_sum(piece.view(slot.tensor.shape))

        self.rewrite_value(slot, add, source, whole=on_sum is not None and slot.nbytes <= self.staging.capacity // 2)

    def rewrite_value(
        self,
        slot: Slot | SlotRows,
        change: Callable[[Tensor, int], object],
        source: Tier = Tier.HOST,
        *,
        whole: bool = False,
    ) -> None:
        """Read a slot on nvme a staging buffer at a time, or ``whole``, and start writing it back; ``wait_writes`` ends it.

        ``change`` gets flat elements, to be changed in place, and the number of the first one.
        """
        self.wait(
            [future for written, future in self._writes if written is slot.whole], slot.name
        )  # by an earlier call
        num_elements = slot.tensor.numel()
        step = max(1, num_elements) if whole else self.piece_elements(slot.tensor.dtype)
        for start in range(0, num_elements, step):
            stop = min(num_elements, start + step)
            offset, nbytes = slot.byte_range(start, stop)
            lease = self.lease(nbytes, f"room for {slot.name}")
            try:
                self.wait(self.read(slot, offset, lease.view), slot.name)
                change(torch.frombuffer(lease.view, dtype=slot.tensor.dtype, count=stop - start), start)
            except BaseException:
                self.staging.return_(lease)
                raise
            self.send_home(slot, start, stop, lease, source)

    def send_home(
        self, slot: Slot | SlotRows, start: int, stop: int, lease: StagingBuffer, source: Tier = Tier.HOST
    ) -> None:
        """Start writing elements [start, stop) of a slot from ``lease``, and return that; ``wait_writes`` makes it home."""
        futures = self.write(slot, slot.byte_range(start, stop)[0], lease.view, source)
        return_when_done(self.staging, lease, futures)
        self._writes += [(slot.whole, future) for future in futures]

    def wait_writes(self) -> None:
        """Block until every value written so far is home; raise the StoreError of the first that failed."""
        pending = self._writes.copy()
        self._writes.clear()
        writes = [future for _, future in pending]
        try:
            self.wait(writes, "gradients on their way home")
        except StoreError:
            self.failed_slots += [slot for slot, future in pending if future.exception() is not None]
            raise

    def read_value(self, slot: Slot | SlotRows, destination: Tensor) -> None:
        """Fill ``destination``, a contiguous tensor of the slot's dtype, with the whole value; blocks."""
        if slot.in_memory:
            destination.copy_(slot.tensor)
            self._meter.add_moved(slot.tier, Tier.DEVICE, slot.nbytes)
            return
        start = 0
        for piece in self.read_pieces(slot, Tier.DEVICE):
            destination.view(-1)[start : start + piece.numel()].copy_(piece)
            start += piece.numel()

    def read_pieces(self, slot: Slot | SlotRows, destination: Tier = Tier.HOST) -> Iterator[Tensor]:
        """Yield a slot's value as flat tensors, in order; each is valid until the next is asked for. Blocks."""
        num_elements, dtype = slot.tensor.numel(), slot.tensor.dtype
        step = self.piece_elements(dtype)
        for start in range(0, num_elements, step):
            stop = min(num_elements, start + step)
            if slot.in_memory:
                yield slot.tensor.view(-1)[start:stop]
                continue
            offset, nbytes = slot.byte_range(start, stop)
            with self.lease(nbytes, f"room for {slot.name}") as lease:
                self.wait(self.read(slot, offset, lease.view, destination), slot.name)
                yield torch.frombuffer(lease.view, dtype=dtype, count=stop - start)

    def close(self) -> None:
        """Wait for every call in flight and end the threads."""
        self._pool.shutdown(wait=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileRun:
    """Bytes that are consecutive both in the file and in the arena: one read, however many parameters it covers."""

    slot: Slot | SlotRows  # the first one, for messages
    file_offset: int
    arena_offset: int
    nbytes: int


def _file_runs(slots: Sequence[Slot | SlotRows], offsets: Sequence[int]) -> list[_FileRun]:
    runs: list[_FileRun] = []
    for slot, offset in zip(slots, offsets, strict=True):
        if slot.in_memory:
            continue
        file_offset, nbytes = slot.byte_range(0, slot.tensor.numel())
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.file_offset + last.nbytes == file_offset
            and last.arena_offset + last.nbytes == offset
        ):
            runs[-1] = replace(last, nbytes=last.nbytes + nbytes)
        else:
            runs.append(_FileRun(slot=slot, file_offset=file_offset, arena_offset=offset, nbytes=nbytes))
    return runs
