"""Whole tensors of slots in and out, a staging buffer at a time: written, added to, changed in place, read."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from zinf_compile.errors import StoreError
from zinf_compile.runtime.arena import Arena
from zinf_compile.runtime.calls import Calls
from zinf_compile.runtime.futures import return_when_done, then_start
from zinf_compile.runtime.link import Link
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import Engine
from zinf_compile.runtime.slots import Slot
from zinf_compile.runtime.staging import StagingBuffer, StagingPool
from zinf_compile.runtime.tiles import SlotRows
from zinf_compile.terms import Tier


class Values(Calls):
    """The values of one store's slots. Writes go on in the background until somebody waits for all of them."""

    def __init__(
        self, *, engine: Engine | None, staging: StagingPool, arena: Arena, meter: Meter, link: Link | None
    ) -> None:
        """``link`` leads to the device; None on a CPU, whose device tier is host memory too."""
        super().__init__(engine=engine, staging=staging, meter=meter, link=link)
        self._arena = arena
        self._writes: list[tuple[Slot, Future[None]]] = []
        self.failed_slots: list[Slot] = []  # whose value did not get home: what they hold is undefined

    def write_value(self, slot: Slot, value: Tensor, source: Tier = Tier.HOST, *, first: int = 0) -> None:
        """Start writing ``value`` to a slot. It is copied at once; ``wait_writes`` makes it home.

        It may be a piece: its elements then go to [first, first + its length) of the flat tensor, at a whole sector. What
        comes from a device with memory of its own is copied behind what makes it, and nobody may change it any more.
        """
        if self.link is not None and source is Tier.DEVICE:
            self._write_from_device(self.link, slot, value, first)
            return
        if slot.in_memory:
            home = slot.tensor.view(-1)[first : first + value.numel()].view(value.shape)
            home.copy_(value)
            self._meter.add_moved(source, slot.tier, home.numel() * home.dtype.itemsize)
            return
        flat = value.reshape(-1)
        for start, stop, lease in self._leases(slot, flat.numel(), first):
            torch.frombuffer(lease.view, dtype=slot.tensor.dtype, count=stop - start).copy_(flat[start:stop])
            self.send_home(slot, first + start, first + stop, lease, source)

    def _write_from_device(self, link: Link, slot: Slot, value: Tensor, first: int) -> None:
        flat = self._outliving(value, slot.tensor.dtype)
        if slot.in_memory:
            home = slot.tensor.view(-1)[first : first + flat.numel()]
            self._meter.add_moved(Tier.DEVICE, slot.tier, home.numel() * home.dtype.itemsize)
            timing = self._meter.copying(Tier.DEVICE, slot.tier, slot.nbytes, slot.name)
            self._writes.append((slot, link.take(_as_bytes(flat), _as_bytes(home), timing=timing).left))
        else:
            for start, stop, lease in self._leases(slot, flat.numel(), first):
                here = torch.frombuffer(lease.view, dtype=flat.dtype, count=stop - start)
                timing = self._meter.copying(Tier.DEVICE, Tier.HOST, lease.nbytes, slot.name)
                left = link.take(_as_bytes(flat[start:stop]), _as_bytes(here), timing=timing).left
                self.send_home(slot, first + start, first + stop, lease, Tier.DEVICE, after=left)
        link.let_go(flat)

    def _outliving(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a value of the device, flat, in memory that is not written again before its copies have been let go."""
        assert self.link is not None
        if self._arena.holds(value) or value.dtype != dtype or not value.is_contiguous():
            self.link.make_room(value.numel() * dtype.itemsize)  # for a copy
        flat = value.detach().to(dtype).contiguous().view(-1)
        return flat.clone() if self._arena.holds(flat) else flat

    def _leases(self, slot: Slot | SlotRows, num_elements: int, first: int) -> Iterator[tuple[int, int, StagingBuffer]]:
        """Yield ranges of elements of a value, whose first is number ``first`` of its slot, each with staging for it."""
        step = self.piece_elements(slot.tensor.dtype)
        for start in range(0, num_elements, step):
            stop = min(num_elements, start + step)
            yield start, stop, self.lease(slot.byte_range(first + start, first + stop)[1], f"room for {slot.name}")

    def add_value(
        self,
        slot: Slot | SlotRows,
        value: Tensor,
        source: Tier = Tier.HOST,
        *,
        on_sum: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Start adding ``value`` to a slot; ``wait_writes`` makes the sum home.

        ``on_sum`` is called with the whole sum where that is on nvme and half of staging can hold it; not over a link.
        """
        if self.link is not None and source is Tier.DEVICE:
            self._add_from_device(self.link, slot, value)
            return
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

    def _add_from_device(self, link: Link, slot: Slot | SlotRows, value: Tensor) -> None:
        flat = self._outliving(value, slot.tensor.dtype)
        self._wait_writes_of(slot)
        step = self.piece_elements(flat.dtype)
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            lease = self.lease(piece.numel() * piece.dtype.itemsize, f"room for {slot.name}")
            here = torch.frombuffer(lease.view, dtype=piece.dtype, count=piece.numel())
            timing = self._meter.copying(Tier.DEVICE, Tier.HOST, lease.nbytes, slot.name)
            try:
                left = link.take(_as_bytes(piece), _as_bytes(here), timing=timing).left
            except RuntimeError:  # of CUDA, after an earlier kernel failed
                self.staging.return_(lease)
                raise
            if slot.in_memory:
                home = slot.tensor.view(-1)[start : start + step]
                self._meter.add_moved(Tier.DEVICE, slot.tier, lease.nbytes)
                added = then_start(left, partial(self._add_on_thread, home, here))
                return_when_done(self.staging, lease, [added])
                self._writes.append((slot.whole, added))
                continue
            try:
                self.wait([left], slot.name)
                self._rewrite(slot, start, start + piece.numel(), partial(_add, here))
            finally:
                self.staging.return_(lease)
        link.let_go(flat)

    def _add_on_thread(self, home: Tensor, addend: Tensor) -> list[Future[None]]:
        return [self._pool.submit(_add, addend, home, 0)]

    def _wait_writes_of(self, slot: Slot | SlotRows) -> None:
        """Wait for what earlier calls have begun to write to a slot."""
        self.wait([future for written, future in self._writes if written is slot.whole], slot.name)

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
        self._wait_writes_of(slot)
        num_elements = slot.tensor.numel()
        step = max(1, num_elements) if whole else self.piece_elements(slot.tensor.dtype)
        for start in range(0, num_elements, step):
            self._rewrite(slot, start, min(num_elements, start + step), change, source)

    def _rewrite(
        self,
        slot: Slot | SlotRows,
        start: int,
        stop: int,
        change: Callable[[Tensor, int], object],
        source: Tier = Tier.HOST,
    ) -> None:
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
        self,
        slot: Slot | SlotRows,
        start: int,
        stop: int,
        lease: StagingBuffer,
        source: Tier = Tier.HOST,
        *,
        after: Future[None] | None = None,
    ) -> None:
        """Start writing elements [start, stop) of a slot from ``lease``, and return that; ``wait_writes`` makes it home.

        The lease has got its bytes when ``after`` is done.
        """
        offset = slot.byte_range(start, stop)[0]
        if after is None:
            futures = self.write(slot, offset, lease.view, source)
        else:
            view = lease.view
            futures = [then_start(after, lambda: self.write(slot, offset, view, source))]
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


def _add(addend: Tensor, home: Tensor, start: int) -> None:
    home.add_(addend)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
