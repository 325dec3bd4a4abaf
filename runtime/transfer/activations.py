"""Offloaded activations: they stay in host memory or in the store file as long as their token is alive.

A token is a tensor of one number that autograd saves in place of the value. Each forward gets its own tokens. The bytes
of an activation are freed when the last tensor over its token's storage is freed: after backward, after the last
backward with ``retain_graph``, or when the autograd graph is dropped.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from zinf_compile.ir.errors import CapacityError, UnsupportedError
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.device import Device, Event
from zinf_compile.runtime.device.host_mapping import map_memory
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.process.waiting import wait_future
from zinf_compile.runtime.storage.arena import Arena
from zinf_compile.runtime.storage.engine import Engine, whole_sectors
from zinf_compile.runtime.storage.futures import return_when_done, then_start
from zinf_compile.runtime.storage.host_memory import Allocate
from zinf_compile.runtime.storage.layout import Extent, FileLayout
from zinf_compile.runtime.storage.staging import StagingBuffer, StagingPool
from zinf_compile.runtime.transfer.in_flight import InFlight, Source
from zinf_compile.runtime.transfer.transfers import Transfers


class _TokenBytes(bytearray):
    """The bytes of a token tensor. Its storage holds them, so they live exactly as long as any tensor over it."""


@dataclass(slots=True, kw_only=True, eq=False)
class SwappedValue:
    """One value of one forward that was offloaded, or is being offloaded."""

    name: str  # "gelu_3 (activation)", for messages and stalls
    nbytes: int
    token_address: int
    # Polled instead of a finalizer: an interrupt inside a finalizer is lost, and so is the finalizer's work.
    token: "weakref.ref[_TokenBytes]"
    buffer: StagingBuffer | None = None  # its bytes, if it is in host memory
    extent: Extent | None = None  # its bytes, if it is in the file
    leaving: list[Future[None]] = field(default_factory=list)  # of the offload, which is complete when all are done
    returning: list[InFlight] = field(default_factory=list)  # reloads that may be in flight
    on_device: Tensor | None = None  # over a link: the value itself, until the compute stream waits for its copies
    left: Event | None = None  # the end of the last of these copies
    is_read_in_place: bool = False  # by ops of a device, in host memory, which may not be done when its token is freed

    @property
    def device_bytes(self) -> None:
        """Return None: its bytes are in host memory or on disk."""
        return None

    @property
    def is_at_rest(self) -> bool:
        """Return whether none of its bytes are in flight."""
        return all(future.done() for future in self.leaving) and all(back.is_done for back in self.returning)


class Activations:
    """The offloaded activations of one store, within what homes and staging leave of the host and nvme budgets."""

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
        device: Device = CPU,
    ) -> None:
        """``room`` returns the bytes that activations may take of a tier now; None if only the disk is the limit."""
        self._transfers = transfers
        self._device = device
        self._arena = arena
        self._meter = meter
        self._layout = layout
        self._engine = engine
        self._room = room
        self._memory = StagingPool(room(Tier.HOST) or 0, allocate)
        self._numbers = itertools.count(1)
        self._swapped: dict[int, SwappedValue] = {}
        self.peak_file_nbytes = 0  # of the whole file, while it held activations
        self.reserved_nbytes = 0  # of the disk, for one forward's values

    @property
    def host_nbytes(self) -> int:
        """Return the bytes of host memory held now, for values and as free buffers."""
        return self._memory.held_nbytes

    @property
    def peak_host_nbytes(self) -> int:
        """Return the peak bytes of host memory."""
        return self._memory.peak_nbytes

    def reserve(self, nbytes: int) -> None:
        """Reserve disk space for the values of one forward, so that a full disk is an error before anything runs."""
        self.reserved_nbytes = nbytes
        if nbytes and self._engine is not None:
            self._engine.reserve(self._layout.end + nbytes)

    def swap_out(self, value: Tensor, stride: Sequence[int], name: str, destination: Tier) -> Tensor:
        """Start offloading a value, stored with ``stride``; return its token. CapacityError if the tier has no room."""
        self.give_back_dropped()
        nbytes = value.numel() * value.dtype.itemsize
        self._check_room(name, nbytes, destination)
        number = next(self._numbers)
        token_bytes = _TokenBytes(number.to_bytes(8, sys.byteorder))
        token = torch.frombuffer(token_bytes, dtype=torch.int64)
        swapped = SwappedValue(
            name=f"{name} (activation)", nbytes=nbytes, token_address=token.data_ptr(), token=weakref.ref(token_bytes)
        )
        # Registered before anything is allocated: after an error below, it is freed with the token.
        self._swapped[number] = swapped
        if destination is Tier.HOST:
            self._copy_out(swapped, value.detach(), stride)
        else:
            self._write_out(swapped, value.detach(), stride)
        return token

    def wait_out(self, token: Tensor) -> None:
        """Block until the device bytes of a value may be reused: it was copied to host memory or to staging."""
        swapped = self._find(token)
        if self._transfers.link.is_crossed:
            assert swapped.left is not None
            # Hazard: the next op of compute gets this memory, and would overwrite it while it is being copied.
            self._transfers.link.join(swapped.left)
            swapped.on_device = None
        elif swapped.buffer is not None and not swapped.is_at_rest:
            with self._meter.stall(f"{swapped.name} on its way out"):
                wait_future(swapped.leaving[0], swapped.name)  # the reload raises its error

    def issue_back(self, token: Tensor, offset: int) -> int:
        """Start reloading a value to arena bytes, after its offload; return the ticket to wait with."""
        swapped = self._find(token)

        def start(moving: InFlight) -> None:
            filler = self._transfers.filler
            if (extent := swapped.extent) is not None:
                filler.fill_from_file(moving, swapped, extent.offset, offset, extent.reserved_nbytes)
            elif swapped.buffer is not None:
                source = torch.frombuffer(swapped.buffer.view, dtype=torch.uint8, count=swapped.nbytes)
                filler.fill_from_memory(moving, [Source(source, offset, Tier.HOST, swapped.name)])

        ticket = self._transfers.issue(
            swapped.name, offset, whole_sectors(swapped.nbytes), after=swapped.leaving, start=start
        )
        swapped.returning = [back for back in swapped.returning if not back.is_done]
        swapped.returning.append(self._transfers.in_flight(ticket))
        return ticket

    def read_in_place(self, token: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a value that rests in host memory, flat, for ops of the device: there, or in a copy if it is not pinned.

        ``wait_out`` comes first.
        """
        swapped = self._find(token)
        assert swapped.buffer is not None
        for copied in swapped.leaving:
            if copied.done():
                copied.result(timeout=0)  # raises its error
        home = torch.frombuffer(swapped.buffer.view, dtype=dtype, count=swapped.nbytes // dtype.itemsize)
        link = self._transfers.link
        if not link.reads_in_place():
            value = self._device.allocate(home.shape, dtype)
            # Hazard: ops that had this memory before may be enqueued and not yet done, and the next ones read it.
            link.join(link.bring(home.view(torch.uint8), value.view(torch.uint8), behind=link.mark()).event)
            self._meter.add_moved(Tier.HOST, Tier.DEVICE, swapped.nbytes)
            return value
        value, swapped.is_read_in_place = self._device.in_place(home), True
        # Hazard: ops that read it are enqueued as long as there is a tensor over it. So long its token counts as alive.
        weakref.finalize(value.untyped_storage(), _let_go, swapped.token()).atexit = False
        return value

    def forget_peak(self) -> None:
        """Free unused host memory, and reset its peak to what is taken now."""
        self._memory.forget_peak()

    def is_token(self, candidate: object) -> bool:
        """Return whether an input of backward is the token of an offloaded value."""
        if not isinstance(candidate, Tensor) or candidate.dtype is not torch.int64 or candidate.numel() != 1:
            return False
        if (
            candidate.device.type != "cpu"
        ):  # reading a number on the device would block until the compute stream is done
            return False
        swapped = self._swapped.get(int(candidate))
        return swapped is not None and swapped.token_address == candidate.data_ptr()

    def check_integrity(self) -> None:
        """Raise VerifyError if host memory is leased for which there is no live token."""
        self.give_back_dropped()
        self._memory.check_integrity(expect_idle=not self._swapped)

    def _find(self, token: Tensor) -> SwappedValue:
        swapped = self._swapped.get(int(token))
        if swapped is None:
            raise UnsupportedError(
                f"activation number {int(token)} no longer exists: backward received a copy of its token, as hooks on saved "
                "tensors make; remove them, zinf_compile offloads activations by itself"
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
        if (link := self._transfers.link).is_crossed:
            self._meter.add_moved(Tier.DEVICE, Tier.HOST, swapped.nbytes)
            flat = swapped.on_device = _flat_in(value, stride)
            timing = self._meter.copying(Tier.DEVICE, Tier.HOST, swapped.nbytes, swapped.name)
            copy = link.take(flat.view(torch.uint8), home.view(torch.uint8), timing=timing)
            swapped.left = copy.event
            swapped.leaving.append(copy.done)
            return
        leaving = home.as_strided(value.shape, tuple(stride))
        swapped.leaving.append(self._transfers.pool.copy([value], leaving, Tier.DEVICE, Tier.HOST, swapped.name))

    def _write_out(self, swapped: SwappedValue, value: Tensor, stride: Sequence[int]) -> None:
        """Copy a value to staging, a buffer at a time, and start writing it; then its device bytes may be reused."""
        assert self._engine is not None
        swapped.extent = extent = self._layout.allocate(swapped.nbytes)
        self._engine.reserve(self._layout.end)
        self.peak_file_nbytes = max(self.peak_file_nbytes, self._layout.taken_nbytes)
        flat = _flat_in(value, stride)
        link = self._transfers.link
        swapped.on_device = flat if link.is_crossed else None
        step = self._transfers.pool.piece_elements(value.dtype)
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            nbytes = whole_sectors(piece.numel() * piece.dtype.itemsize)
            lease = self._transfers.pool.lease(nbytes, f"room for {swapped.name}")
            with lease.handed_on():
                staged = torch.frombuffer(lease.view, dtype=piece.dtype, count=piece.numel())
                write = partial(
                    self._transfers.pool.write,
                    swapped,
                    extent.offset + start * piece.dtype.itemsize,
                    lease.view,
                    Tier.DEVICE,
                )
                if link.is_crossed:
                    timing = self._meter.copying(Tier.DEVICE, Tier.HOST, nbytes, swapped.name)
                    copy = link.take(piece.view(torch.uint8), staged.view(torch.uint8), timing=timing)
                    swapped.left = copy.event
                    writes = [then_start([copy.done], write)]
                else:
                    staged.copy_(piece)
                    writes = write()
                return_when_done(self._transfers.pool.staging, lease, writes)
            swapped.leaving += writes

    def give_back_dropped(self) -> None:
        """Free the bytes of activations whose tokens were freed, unless some are still in flight."""
        are_read = False
        for number, swapped in list(self._swapped.items()):
            if swapped.token() is not None or not swapped.is_at_rest:
                continue
            if swapped.is_read_in_place and not are_read:
                # Hazard: ops that are enqueued and not yet done may still read these bytes, and copies would overwrite them.
                self._transfers.link.compute.record().wait()
                are_read = True
            del self._swapped[number]
            if swapped.buffer is not None:
                self._memory.return_(swapped.buffer)
            if swapped.extent is not None:
                self._layout.free(swapped.extent)


def _let_go(token: _TokenBytes | None) -> None:
    """Drop the last reference to a token that a finalizer kept alive."""


def _flat_in(value: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a value as flat elements, in the memory order of ``stride``."""
    if value.stride() != tuple(stride):  # a kernel whose result has other strides than at capture
        value = torch.empty_strided(value.shape, tuple(stride), dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((value.numel(),), (1,))
