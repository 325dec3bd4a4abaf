"""Gathers into the arena: issued, waited for, released.

Compute (the thread that runs the model) issues and waits. On a CPU it is synchronous, so what it did before an issue is
done, and arena bytes released before an issue may be written by it. Ops told to a device with streams may not be done: there
copies wait for the mark that compute's stream gets at the issue.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from zinf_compile.errors import VerifyError, ZinfError
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.futures import call_when_done
from zinf_compile.runtime.gpu_direct import DirectReads, GpuDirectFiller
from zinf_compile.runtime.in_flight import DirectFiller, Filler, InFlight, LinkFiller
from zinf_compile.runtime.link import Link
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import Engine, whole_sectors
from zinf_compile.runtime.slots import Slot, StoredParameter
from zinf_compile.runtime.staging import StagingPool
from zinf_compile.runtime.tiles import SlotRows, StoredTile
from zinf_compile.runtime.values import Values


class Transfers(Values):
    """Everything in flight for one store."""

    def __init__(
        self, *, engine: Engine | None, staging: StagingPool, arena: Arena, meter: Meter, link: Link | None = None
    ) -> None:
        """``link`` leads to the device; None on a CPU, whose device tier is host memory too."""
        super().__init__(engine=engine, staging=staging, arena=arena, meter=meter, link=link)
        self._in_flight: dict[int, InFlight] = {}
        self._next_ticket = 0
        self.filler: Filler = DirectFiller(arena, self.read, self.copy)
        if link is not None:
            piece_nbytes = self.piece_elements(torch.uint8)
            self.filler = LinkFiller(arena, link, staging, self.read, piece_nbytes=piece_nbytes, meter=meter)

    def read_directly(self, reads: DirectReads) -> None:
        """Read the file into the device's memory from now on, past staging. Nothing may be in flight."""
        self.filler = GpuDirectFiller(self._arena, self.filler, reads, self._meter)

    def issue_gather(
        self, records: Sequence[StoredParameter | StoredTile], dtypes: Sequence[torch.dtype], offsets: Sequence[int]
    ) -> int:
        """Start moving the copies of these dtypes into consecutive arena bytes; return the ticket to wait with."""
        slots = [record.copy_in(dtype) for record, dtype in zip(records, dtypes, strict=True)]
        first, last = offsets[0], offsets[-1]
        ticket = self.issue(
            records[0].name if len(records) == 1 else f"{records[0].name} and {len(records) - 1} more",
            first,
            last + whole_sectors(slots[-1].nbytes) - first,
            # Behind updates of these parameters, without waiting for them: compute may have long to go until it needs this.
            after=[record.update for record in records if record.update is not None],
            start=lambda moving: self._start_gather(slots, offsets, moving),
        )
        if self.link is not None:  # compute goes on while copies read the homes: who writes there has to wait for them
            for whole in {record.param: record for record in (record.whole for record in records)}.values():
                whole.gathers = [gather for gather in whole.gathers if not gather.is_done]
                whole.gathers.append(self._in_flight[ticket])
        return ticket

    def issue(
        self,
        name: str,
        offset: int,
        nbytes: int,
        *,
        after: Sequence[Future[None]],
        start: Callable[[InFlight], None],
    ) -> int:
        """Take arena bytes; when all of ``after`` are done, call ``start``, which begins to fill them and notes its calls.

        Returns the ticket to wait with. An error, of what came before or of ``start``, is raised by that wait.
        """
        self._arena.take(offset, nbytes)
        self._next_ticket += 1
        mark = None if self.link is None else self.link.mark()
        moving = InFlight(name=name, offset=offset, started=Future(), futures=[], mark=mark)
        self._in_flight[self._next_ticket] = moving

        def go(error: BaseException | None) -> None:
            if error is not None:
                moving.started.set_exception(error)
                return
            try:
                start(moving)
            except (ZinfError, RuntimeError) as refused:  # a pool that was shut down, say: who waits must hear of it
                moving.started.set_exception(refused)
            else:
                moving.started.set_result(None)

        call_when_done(after, go)
        return self._next_ticket

    def in_flight(self, ticket: int) -> InFlight:
        """Return a transfer that was issued and not yet released."""
        return self._in_flight[ticket]

    def _start_gather(self, slots: Sequence[Slot | SlotRows], offsets: Sequence[int], moving: InFlight) -> None:
        for run in _file_runs(slots, offsets):
            self.filler.fill_from_file(moving, run.slot, run.file_offset, run.arena_offset, run.nbytes)
        for slot, offset in zip(slots, offsets, strict=True):
            if slot.in_memory:
                self.filler.fill_from_memory(moving, slot.tensor, offset, slot.tier, slot)

    def wait_gather(self, ticket: int) -> bool:
        """Block until a transfer has landed; return whether this was its first wait. Raises its first error.

        Over a link compute waits for it on its stream, and the caller only until that can be told.
        """
        gather = self._in_flight[ticket]
        if gather.is_awaited:
            return False
        if gather.is_ready:
            gather.wait()
        else:
            with self._meter.stall(gather.name):
                gather.wait()
        if self.link is None:
            self._meter.arrive(gather.name)
        else:
            with self._meter.stall_on(self.link.compute, gather.name):
                self._join(gather)
        gather.is_awaited = True
        return True

    def _join(self, gather: InFlight) -> None:
        if self.link is not None:
            for event in gather.arrivals:
                self.link.join(event)

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
            with suppress(RuntimeError):  # of CUDA, which has said so already
                self._join(
                    gather
                )  # what compute does next with these bytes comes behind copies that nobody wants any more
            gather.is_awaited = True
            self.release(ticket)
        self._arena.give_back_all()  # also what an interrupted issue_gather took

    def close(self) -> None:
        """Wait for every call in flight and end the threads."""
        self.filler.close()  # first, since it submits reads
        super().close()


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
