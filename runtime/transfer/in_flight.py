"""Transfers to the arena that are in flight, and how the arena is filled: from disk or host memory, on a CPU or over a link.

On a CPU the arena is host memory: the disk is read directly into it, and a thread copies from RAM. A device with its own
memory is filled by copies on its streams, for which the compute stream waits. Bytes on disk are read into staging first,
a piece at a time::

    disk -> staging   a pool thread, as soon as there is room in staging
    staging -> arena  the stream, after the mark of the issue; staging is returned when the copy is done
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zinf_compile.ir.errors import ZinfError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.device.device import Event, Pair
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.process.waiting import end_pool, wait_future
from zinf_compile.runtime.ranks.ranks import Collective
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.storage.futures import call_when_done, wait_all
from zinf_compile.runtime.storage.staging import StagingBuffer, StagingPool
from zinf_compile.runtime.transfer.link import EnqueuedCopy, Link
from zinf_compile.runtime.transfer.shared_arena import SharedArena


class Named(Protocol):
    """What an error of a read or write names: a slot, or an offloaded activation."""

    @property
    def name(self) -> str:
        """Its name, for messages."""

    @property
    def device_bytes(self) -> Tensor | None:
        """Its bytes, flat, if its home is the memory of a device that CPU ops cannot access."""


@dataclass(slots=True, kw_only=True, eq=False)
class InFlight:
    """One transfer to the arena that was issued, with the futures of its calls.

    ``started`` is done when the calls were submitted; then the list ``futures`` is complete. Over a link a future is done
    when its copy is enqueued; when all are done, the list ``copies`` is complete.
    """

    name: str
    offset: int
    started: Future[None]
    futures: list[Future[None]]
    mark: Event  # end of the compute stream at the issue
    copies: list[EnqueuedCopy] = field(default_factory=list)  # over a link
    shared: Sequence[SharedArena] = ()  # of several ranks: where shards arrive, and where they are gathered
    collective: Collective | None = None  # that gathers them, once it is launched
    gathered: Event | None = None  # or, over a link, its end on the stream of all-gathers
    is_awaited: bool = False

    @property
    def is_ready(self) -> bool:
        """Return whether waiting for it would not block."""
        if not self.started.done():
            return False
        for future in self.futures:  # noqa: SIM110  # asked for each parameter of each transfer: a generator takes longer
            if not future.done():
                return False
        return True

    @property
    def is_done(self) -> bool:
        """Return whether all bytes have arrived, and nothing reads its source any more."""
        if not self.is_ready:
            return False
        for copy in self.copies:  # noqa: SIM110
            if not copy.done.done():
                return False
        return True

    def wait_landed(self) -> None:
        """Block until nothing reads its source any more, even if it failed. Called after ``wait``."""
        for copy in self.copies:
            wait_future(copy.done, self.name)

    def wait(self) -> None:
        """Block until all bytes have arrived or, over a link, all copies are enqueued; raise the first error."""
        wait_all([self.started], self.name)
        wait_all(self.futures, self.name)


Read = Callable[[Named, int, memoryview, Tier], list[Future[None]]]  # IOPool.read


class Source(NamedTuple):
    """A tensor in host memory that is copied into the arena."""

    tensor: Tensor
    arena_offset: int
    home: Tier
    name: str  # for errors


class Filler(Protocol):
    """Fills arena bytes for a transfer that has started."""

    def fill_from_file(self, moving: InFlight, slot: Named, file_offset: int, arena_offset: int, nbytes: int) -> None:
        """Start reading bytes of the file, in whole sectors."""

    def fill_from_memory(self, moving: InFlight, sources: Sequence[Source]) -> None:
        """Start copying tensors from host memory."""

    def close(self) -> None:
        """End its threads."""


Copy = Callable[[list[Tensor], Tensor, Tier, Tier, str], Future[None]]  # IOPool.copy


class DirectFiller:
    """Fills the arena of a CPU."""

    def __init__(self, arena: Arena, read: Read, copy: Copy) -> None:
        self._arena, self._read, self._copy = arena, read, copy

    def fill_from_file(self, moving: InFlight, slot: Named, file_offset: int, arena_offset: int, nbytes: int) -> None:
        """Start reading into the arena itself."""
        moving.futures += self._read(slot, file_offset, self._arena.buffer(arena_offset, nbytes), Tier.DEVICE)

    def fill_from_memory(self, moving: InFlight, sources: Sequence[Source]) -> None:
        """Start copying on a thread."""
        for tensor, arena_offset, home, name in sources:
            destination = self._arena.view(arena_offset, tensor.shape, tensor.dtype)
            moving.futures.append(self._copy([tensor], destination, home, Tier.DEVICE, name))

    def close(self) -> None:
        """Do nothing: it has no threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """File bytes that pass through one staging buffer."""

    file_offset: int
    arena_offset: int
    nbytes: int
    enqueued: Future[None]  # done when the copy to the device is enqueued on its stream


class LinkFiller:
    """Fills the arena of a device over its link."""

    def __init__(
        self,
        arena: Arena,
        link: Link,
        staging: StagingPool,
        read: Read,
        *,
        piece_nbytes: int,
        meter: Meter,
    ) -> None:
        """``piece_nbytes`` is the size of a piece, which takes one staging buffer."""
        self._arena, self._link, self._staging, self._read = arena, link, staging, read
        self._piece_nbytes = piece_nbytes
        self._meter = meter
        # One thread waits for staging. Threads that read must not wait: staging is returned only when their calls are done.
        self._feeder = ThreadPoolExecutor(1, thread_name_prefix="zinf-transfer-feed", initializer=link.begin_thread)

    def fill_from_file(self, moving: InFlight, slot: Named, file_offset: int, arena_offset: int, nbytes: int) -> None:
        """Start reading through staging."""
        pieces = [
            _Piece(
                file_offset=file_offset + start,
                arena_offset=arena_offset + start,
                nbytes=min(self._piece_nbytes, nbytes - start),
                enqueued=Future(),
            )
            for start in range(0, nbytes, self._piece_nbytes)
        ]
        moving.futures += (piece.enqueued for piece in pieces)
        self._feeder.submit(self._feed, moving, slot, pieces)

    def fill_from_memory(self, moving: InFlight, sources: Sequence[Source]) -> None:
        """Enqueue the copies, with one event behind all of them."""
        pairs = []
        for tensor, arena_offset, home, _ in sources:
            flat = tensor.detach().view(-1).view(torch.uint8)
            self._meter.add_moved(home, Tier.DEVICE, flat.numel())
            pairs.append((flat, self._arena.bytes_at(arena_offset, flat.numel())))
        self._bring(moving, pairs)

    def _bring(self, moving: InFlight, pairs: Sequence[Pair]) -> EnqueuedCopy:
        timings = [self._meter.copying(Tier.HOST, Tier.DEVICE, source.numel(), moving.name) for source, _ in pairs]
        copy = self._link.bring_all(pairs, behind=moving.mark, timings=timings)
        moving.copies.append(copy)
        return copy

    def _feed(self, moving: InFlight, slot: Named, pieces: list[_Piece]) -> None:
        """Read piece after piece, as staging becomes free."""
        for number, piece in enumerate(pieces):
            lease = None
            try:
                lease = self._staging.lease(whole_sectors(piece.nbytes))
                reads = self._read(slot, piece.file_offset, lease.view, Tier.DEVICE)
            except (ZinfError, RuntimeError) as error:  # closed, or shut down: pass the error to the waiter
                if lease is not None:
                    self._staging.return_(lease)
                for left in pieces[number:]:
                    left.enqueued.set_exception(error)
                return
            call_when_done(reads, partial(self._send, moving, piece, lease))

    def _send(self, moving: InFlight, piece: _Piece, lease: StagingBuffer, error: BaseException | None) -> None:
        """Enqueue the copy of a piece that has been read."""
        if error is not None:
            self._staging.return_(lease)
            piece.enqueued.set_exception(error)
            return
        try:
            source = torch.frombuffer(lease.view, dtype=torch.uint8)
            copy = self._bring(moving, [(source, self._arena.bytes_at(piece.arena_offset, source.numel()))])
        except RuntimeError as refused:  # of CUDA, after an earlier kernel failed: pass the error to the waiter
            self._staging.return_(lease)
            piece.enqueued.set_exception(refused)
            return
        copy.done.add_done_callback(lambda _: self._staging.return_(lease))
        piece.enqueued.set_result(None)

    def close(self) -> None:
        """Wait for reads in flight, and end the thread."""
        end_pool(self._feeder, "reads on their way to the device")
