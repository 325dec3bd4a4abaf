"""Activations that have left the device: they rest in host memory or in the store file as long as a token stands for them.

A token is a tensor of one number that autograd keeps in place of the value. Each forward gets tokens of its own, and the
bytes behind one are given back when the last tensor over its storage is gone: after backward, after the last backward of
``retain_graph``, or when the graph is dropped without one.
"""

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from zinf_compile.errors import CapacityError, UnsupportedError
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.device import Event
from zinf_compile.runtime.futures import return_when_done, then_start
from zinf_compile.runtime.host_memory import Allocate, map_memory
from zinf_compile.runtime.in_flight import InFlight
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import Engine, whole_sectors
from zinf_compile.runtime.nvme.layout import Extent, FileLayout
from zinf_compile.runtime.staging import StagingBuffer, StagingPool
from zinf_compile.runtime.transfers import Transfers
from zinf_compile.terms import Tier, format_bytes


class _TokenBytes(bytearray):
    """The bytes of a token tensor. Its storage holds them, so they die with the last tensor over it, however it was made."""


@dataclass(slots=True, kw_only=True, eq=False)
class SwappedValue:
    """One value of one forward that has left the device, or is leaving."""

    name: str  # "gelu_3 (activation)", for messages and stalls
    nbytes: int
    token_address: int
    buffer: StagingBuffer | None = None  # where it rests in host memory
    extent: Extent | None = None  # where it rests in the file
    leaving: list[Future[None]] = field(default_factory=list)  # until they are done, it has not all arrived there
    returning: list[InFlight] = field(default_factory=list)  # ways back that may not be over yet
    on_device: Tensor | None = None  # itself, while compute has not been told to wait for its copies over the link
    left: Event | None = None  # where the last of these ends

    @property
    def device_bytes(self) -> None:
        """Return that it is at home in host memory or on disk."""
        return None

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing of it is in flight."""
        return all(future.done() for future in self.leaving) and all(back.is_done for back in self.returning)


class Activations:
    """The activations of one store that have left the device, within what homes and staging leave of host and nvme."""

    def __init__(
        self,
        *,
        transfers: Transfers,
        arena: Arena,
        meter: Meter,
        layout: FileLayout,
        engine: Engine | None,
        room: Callable[[Tier], int | None],
        allocate: Allocate = map_memory,
    ) -> None:
        """``room`` returns the bytes of a tier that may hold activations now, None where only the disk is the limit."""
        self._transfers = transfers
        self._arena = arena
        self._meter = meter
        self._layout = layout
        self._engine = engine
        self._room = room
        self._memory = StagingPool(room(Tier.HOST) or 0, allocate)
        self._numbers = itertools.count(1)
        self._swapped: dict[int, SwappedValue] = {}
        # Numbers of tokens that are gone. They come from finalizers, which run anywhere, even inside of a pool's own code.
        self._dropped: deque[int] = deque()
        self.peak_file_nbytes = 0  # that the whole file took, when something was there
        self.reserved_nbytes = 0  # of the disk, for one forward's values

    @property
    def host_nbytes(self) -> int:
        """Return the host memory held now, for values and for those to come."""
        return self._memory.held_nbytes

    @property
    def peak_host_nbytes(self) -> int:
        """Return the most host memory held at once."""
        return self._memory.peak_nbytes

    def reserve(self, nbytes: int) -> None:
        """Take disk space for one forward's values now, so that a full disk is an error before anything runs."""
        self.reserved_nbytes = nbytes
        if nbytes and self._engine is not None:
            self._engine.reserve(self._layout.end + nbytes)

    def swap_out(self, value: Tensor, stride: Sequence[int], name: str, destination: Tier) -> Tensor:
        """Start moving a value out, laid out in ``stride``; return its token. CapacityError where the tier has no room."""
        self.give_back_dropped()
        nbytes = value.numel() * value.dtype.itemsize
        self._check_room(name, nbytes, destination)
        number = next(self._numbers)
        token_bytes = _TokenBytes(number.to_bytes(8, sys.byteorder))
        token = torch.frombuffer(token_bytes, dtype=torch.int64)
        swapped = SwappedValue(name=f"{name} (activation)", nbytes=nbytes, token_address=token.data_ptr())
        # Known before anything is taken: after an error below, it is given back with the token.
        self._swapped[number] = swapped
        weakref.finalize(token_bytes, self._dropped.append, number).atexit = False
        if destination is Tier.HOST:
            self._copy_out(swapped, value.detach(), stride)
        else:
            self._write_out(swapped, value.detach(), stride)
        return token

    def wait_out(self, token: Tensor) -> None:
        """Block until the device bytes of a value are free: host memory has it, or the writes from staging do."""
        swapped = self._find(token)
        if (link := self._transfers.link) is not None:
            assert swapped.left is not None
            # Hazard: its memory goes to the next op of compute, which would write over it while it is being copied.
            link.join(swapped.left)
            swapped.on_device = None
        elif swapped.buffer is not None and not swapped.is_at_rest:
            with self._meter.stall(f"{swapped.name} on its way out"):
                swapped.leaving[0].exception()  # waits; the way back raises

    def issue_back(self, token: Tensor, offset: int) -> int:
        """Start moving a value back to arena bytes, once all of it is out; return the ticket to wait with."""
        swapped = self._find(token)

        def start(moving: InFlight) -> None:
            filler = self._transfers.filler
            if (extent := swapped.extent) is not None:
                filler.fill_from_file(moving, swapped, extent.offset, offset, extent.reserved_nbytes)
            elif swapped.buffer is not None:
                source = torch.frombuffer(swapped.buffer.view, dtype=torch.uint8, count=swapped.nbytes)
                filler.fill_from_memory(moving, source, offset, Tier.HOST, swapped)

        ticket = self._transfers.issue(
            swapped.name, offset, whole_sectors(swapped.nbytes), after=swapped.leaving, start=start
        )
        swapped.returning = [back for back in swapped.returning if not back.is_done]
        swapped.returning.append(self._transfers.in_flight(ticket))
        return ticket

    def forget_peak(self) -> None:
        """Give free host memory back, and let the peak there be what is taken now."""
        self._memory.forget_peak()

    def is_token(self, candidate: object) -> bool:
        """Return whether something that backward is given stands for a value that has left the device."""
        if not isinstance(candidate, Tensor) or candidate.dtype is not torch.int64 or candidate.numel() != 1:
            return False
        if candidate.device.type != "cpu":  # a look at its number would wait for all that compute was told
            return False
        swapped = self._swapped.get(int(candidate))
        return swapped is not None and swapped.token_address == candidate.data_ptr()

    def check_integrity(self) -> None:
        """Raise VerifyError if host memory is leased that no live token stands for."""
        self.give_back_dropped()
        self._memory.check_integrity(expect_idle=not self._swapped)

    def _find(self, token: Tensor) -> SwappedValue:
        swapped = self._swapped.get(int(token))
        if swapped is None:
            raise UnsupportedError(
                f"activation number {int(token)} is no longer there: backward was given a copy of what stood for it, as "
                "hooks on saved tensors make; leave them out, zinf_compile moves activations by itself"
            )
        return swapped

    def _check_room(self, name: str, nbytes: int, tier: Tier) -> None:
        room = self._room(tier)
        taken = sum(
            whole_sectors(other.nbytes)
            for other in self._swapped.values()
            if (other.extent is None) == (tier is Tier.HOST)
        )
        if room is None or taken + whole_sectors(nbytes) <= room:
            return
        raise CapacityError(
            f"activation '{name}' needs {format_bytes(nbytes)} on {tier}, where activations may take {format_bytes(room)} "
            f"and {format_bytes(taken)} are taken by forwards whose backward has not run; run backward after each forward, "
            f"or raise {tier}_memory by {-(-(taken + nbytes - room) // 2**20)}MiB"
        )

    def _copy_out(self, swapped: SwappedValue, value: Tensor, stride: Sequence[int]) -> None:
        room = self._room(Tier.HOST) or 0
        if self._memory.held_nbytes + whole_sectors(swapped.nbytes) > room:
            self._memory.drop_idle()
        swapped.buffer = self._memory.lease(swapped.nbytes, timeout_seconds=0)
        home = torch.frombuffer(swapped.buffer.view, dtype=value.dtype, count=value.numel())
        if (link := self._transfers.link) is not None:
            self._meter.add_moved(Tier.DEVICE, Tier.HOST, swapped.nbytes)
            flat = swapped.on_device = _flat_in(value, stride)
            timing = self._meter.copying(Tier.DEVICE, Tier.HOST, swapped.nbytes, swapped.name)
            departure = link.take(flat.view(torch.uint8), home.view(torch.uint8), timing=timing)
            swapped.left = departure.event
            swapped.leaving.append(departure.left)
            return
        leaving = home.as_strided(value.shape, tuple(stride))
        swapped.leaving.append(self._transfers.copy([value], leaving, Tier.DEVICE, Tier.HOST, swapped.name))

    def _write_out(self, swapped: SwappedValue, value: Tensor, stride: Sequence[int]) -> None:
        """Copy a value to staging, a buffer at a time, and start writing it: afterwards the device has no need of it."""
        assert self._engine is not None
        swapped.extent = extent = self._layout.allocate(swapped.nbytes)
        self._engine.reserve(self._layout.end)
        self.peak_file_nbytes = max(self.peak_file_nbytes, self._layout.taken_nbytes)
        flat = _flat_in(value, stride)
        link = self._transfers.link
        swapped.on_device = None if link is None else flat
        step = self._transfers.piece_elements(value.dtype)
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            nbytes = whole_sectors(piece.numel() * piece.dtype.itemsize)
            lease = self._transfers.lease(nbytes, f"room for {swapped.name}")
            staged = torch.frombuffer(lease.view, dtype=piece.dtype, count=piece.numel())
            write = partial(
                self._transfers.write, swapped, extent.offset + start * piece.dtype.itemsize, lease.view, Tier.DEVICE
            )
            if link is None:
                staged.copy_(piece)
                writes = write()
            else:
                timing = self._meter.copying(Tier.DEVICE, Tier.HOST, nbytes, swapped.name)
                departure = link.take(piece.view(torch.uint8), staged.view(torch.uint8), timing=timing)
                swapped.left = departure.event
                writes = [then_start(departure.left, write)]
            return_when_done(self._transfers.staging, lease, writes)
            swapped.leaving += writes

    def give_back_dropped(self) -> None:
        """Give back what tokens stood for that are gone, unless something of it is still in flight."""
        for _ in range(len(self._dropped)):
            number = self._dropped.popleft()
            swapped = self._swapped[number]
            if not swapped.is_at_rest:
                self._dropped.append(number)
                continue
            del self._swapped[number]
            if swapped.buffer is not None:
                self._memory.return_(swapped.buffer)
            if swapped.extent is not None:
                self._layout.free(swapped.extent)


def _flat_in(value: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a value as flat elements, in the order in memory that ``stride`` says."""
    if value.stride() != tuple(stride):  # a kernel that lays its result out otherwise than it was traced
        value = torch.empty_strided(value.shape, tuple(stride), dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((value.numel(),), (1,))
