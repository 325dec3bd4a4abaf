"""What is on its way to the arena, and how it gets there: from disk or from host memory, on a CPU or over a link.

On a CPU the arena is host memory: disk calls read into it, and a thread copies. A device with memory of its own is reached
by copies on its streams, which compute waits for there; what is on disk is read into staging first, a piece at a time::

    disk -> staging   a pool thread, as soon as there is room in staging
    staging -> arena  the stream, behind the mark of the issue; staging is returned when it has landed
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zinf_compile.errors import ZinfError
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.device import Event
from zinf_compile.runtime.futures import call_when_done, wait_all
from zinf_compile.runtime.link import Link
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import whole_sectors
from zinf_compile.runtime.staging import StagingBuffer, StagingPool
from zinf_compile.terms import Tier


class Named(Protocol):
    """What an error of a read or a write names: a slot, or an activation that has left the device."""

    @property
    def name(self) -> str:
        """Its name, for messages."""

    @property
    def device_bytes(self) -> Tensor | None:
        """Its bytes, flat, if they are at home on a device that no CPU op reaches."""


@dataclass(slots=True, kw_only=True, eq=False)
class InFlight:
    """One transfer that was issued to the arena, and the calls that are not yet known to be done.

    It starts when what it has to wait for is done; ``futures`` are complete once ``started`` is done. Over a link these tell
    that copies have been told to their stream, and ``arrivals`` and ``landings`` are complete once they are done.
    """

    name: str
    offset: int
    started: Future[None]
    futures: list[Future[None]]
    mark: Event | None = None  # of compute, at the issue
    arrivals: list[Event] = field(default_factory=list)  # that compute waits for on its stream
    landings: list[Future[None]] = field(default_factory=list)  # of the same copies
    is_awaited: bool = False

    @property
    def is_ready(self) -> bool:
        """Return whether waiting for it would not block."""
        return self.started.done() and all(future.done() for future in self.futures)

    @property
    def is_done(self) -> bool:
        """Return whether all of it is there, and nothing reads its source any more."""
        return self.is_ready and all(landing.done() for landing in self.landings)

    def wait_landed(self) -> None:
        """Block until nothing reads its source any more, however it ended. Called when it has been waited for."""
        for landing in self.landings:
            landing.exception()

    def wait(self) -> None:
        """Block until it has landed, or compute can be told to wait for it; raise its first error."""
        wait_all([self.started])
        wait_all(self.futures)


Read = Callable[[Named, int, memoryview, Tier], list[Future[None]]]


class Filler(Protocol):
    """Fills arena bytes for a transfer that has started."""

    def fill_from_file(self, moving: InFlight, slot: Named, file_offset: int, arena_offset: int, nbytes: int) -> None:
        """Start moving bytes of the file, in whole sectors."""

    def fill_from_memory(self, moving: InFlight, source: Tensor, arena_offset: int, home: Tier, slot: Named) -> None:
        """Start moving a tensor in host memory."""

    def close(self) -> None:
        """End the threads it has."""


Copy = Callable[[list[Tensor], Tensor, Tier, Tier, str], Future[None]]


class DirectFiller:
    """Fills the arena of a CPU."""

    def __init__(self, arena: Arena, read: Read, copy: Copy) -> None:
        self._arena, self._read, self._copy = arena, read, copy

    def fill_from_file(self, moving: InFlight, slot: Named, file_offset: int, arena_offset: int, nbytes: int) -> None:
        """Start reading into the arena itself."""
        moving.futures += self._read(slot, file_offset, self._arena.buffer(arena_offset, nbytes), Tier.DEVICE)

    def fill_from_memory(self, moving: InFlight, source: Tensor, arena_offset: int, home: Tier, slot: Named) -> None:
        """Start copying on a thread."""
        destination = self._arena.view(arena_offset, source.shape, source.dtype)
        moving.futures.append(self._copy([source], destination, home, Tier.DEVICE, slot.name))

    def close(self) -> None:
        """Do nothing: it has no threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """File bytes that pass through one staging buffer."""

    file_offset: int
    arena_offset: int
    nbytes: int
    told: Future[None]  # done when the copy to the device has been told to its stream


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
        """``piece_nbytes`` is what moves per staging buffer."""
        self._arena, self._link, self._staging, self._read = arena, link, staging, read
        self._piece_nbytes = piece_nbytes
        self._meter = meter
        # A thread that waits for staging. Those that read must not: others wait for their calls to give staging back.
        self._feeder = ThreadPoolExecutor(1, thread_name_prefix="zinf-transfer-feed")

    def fill_from_file(self, moving: InFlight, slot: Named, file_offset: int, arena_offset: int, nbytes: int) -> None:
        """Start reading by way of staging."""
        pieces = [
            _Piece(
                file_offset=file_offset + start,
                arena_offset=arena_offset + start,
                nbytes=min(self._piece_nbytes, nbytes - start),
                told=Future(),
            )
            for start in range(0, nbytes, self._piece_nbytes)
        ]
        moving.futures += (piece.told for piece in pieces)
        self._feeder.submit(self._feed, moving, slot, pieces)

    def fill_from_memory(self, moving: InFlight, source: Tensor, arena_offset: int, home: Tier, slot: Named) -> None:
        """Tell the stream to copy."""
        flat = source.detach().view(-1).view(torch.uint8)
        self._meter.add_moved(home, Tier.DEVICE, flat.numel())
        self._bring(moving, flat, arena_offset)

    def _bring(self, moving: InFlight, source: Tensor, arena_offset: int) -> Future[None]:
        assert moving.mark is not None
        destination = self._arena.bytes_at(arena_offset, source.numel())
        timing = self._meter.copying(Tier.HOST, Tier.DEVICE, source.numel(), moving.name)
        arrival = self._link.bring(source, destination, behind=moving.mark, timing=timing)
        moving.landings.append(arrival.landed)
        moving.arrivals.append(arrival.event)
        return arrival.landed

    def _feed(self, moving: InFlight, slot: Named, pieces: list[_Piece]) -> None:
        """Read piece after piece, as staging has room."""
        for number, piece in enumerate(pieces):
            lease = None
            try:
                lease = self._staging.lease(whole_sectors(piece.nbytes))
                reads = self._read(slot, piece.file_offset, lease.view, Tier.DEVICE)
            except (ZinfError, RuntimeError) as error:  # closed, or shut down: who waits must hear of it
                if lease is not None:
                    self._staging.return_(lease)
                for left in pieces[number:]:
                    left.told.set_exception(error)
                return
            call_when_done(reads, partial(self._send, moving, piece, lease))

    def _send(self, moving: InFlight, piece: _Piece, lease: StagingBuffer, error: BaseException | None) -> None:
        """Tell the stream to copy a piece that has been read."""
        if error is not None:
            self._staging.return_(lease)
            piece.told.set_exception(error)
            return
        try:
            landed = self._bring(moving, torch.frombuffer(lease.view, dtype=torch.uint8), piece.arena_offset)
        except RuntimeError as refused:  # of CUDA, after an earlier kernel failed: who waits must hear of it
            self._staging.return_(lease)
            piece.told.set_exception(refused)
            return
        landed.add_done_callback(lambda _: self._staging.return_(lease))
        piece.told.set_result(None)

    def close(self) -> None:
        """Wait for what is being fed, and end the thread."""
        self._feeder.shutdown(wait=True)
