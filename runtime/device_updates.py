"""Updates on the device that computes: chunks of what an update reads go there over the link, and what it writes comes back.

    to_device   free -> gradient, master copy, moments of chunk 1 | of chunk 2 | ...
    update              arrived -> the user's optimizer on chunk 1 | ...
    to_host                        done -> master copy, moments, compute copy of chunk 1 | ...

A few sets of buffers take turns, so that the next chunk arrives while one is updated and the one before leaves.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from zinf_compile.plans import UPDATE_SETS
from zinf_compile.runtime.device import Event, StreamDevice, Timing, alias_bytes
from zinf_compile.runtime.link import Link
from zinf_compile.runtime.meter import Meter
from zinf_compile.runtime.nvme.engine import whole_sectors
from zinf_compile.terms import Tier


@dataclass(slots=True, kw_only=True, eq=False)
class _Buffers:
    """Device memory of one chunk, and the event behind which it may be written again."""

    memory: Tensor
    free: Event


class DeviceUpdates:
    """Runs updates of one store on its device. Called on one thread at a time."""

    def __init__(self, device: StreamDevice, link: Link, meter: Meter) -> None:
        self._device, self._link, self._meter = device, link, meter
        self._sets: deque[_Buffers] = deque()

    def run(
        self,
        name: str,
        host: Mapping[str, Tensor],
        read: Collection[str],
        written: Collection[str],
        update: Callable[[Mapping[str, Tensor]], object],
    ) -> dict[str, Future[None]]:
        """Start updating flat tensors of ``name`` in host memory, for which there is room: some are read and some written.

        ``update`` gets their copies on the device, and tells ops that change them in place. Returns what is done when each
        that is written has come back; until then nobody may look at them, or change those that are read.
        """
        buffers = self._sets.popleft()
        there: dict[str, Tensor] = {}
        cursor = 0
        for role, tensor in host.items():
            there[role] = alias_bytes(buffers.memory, cursor, tensor.numel(), tensor.dtype)
            cursor += _room(tensor)
            if role in read:
                # Hazard: the chunk before in these buffers may still be leaving; its last copy ends at ``free``.
                timing = self._count(Tier.HOST, Tier.DEVICE, tensor, f"{name} ({role})")
                arrival = self._link.bring(
                    _as_bytes(tensor), _as_bytes(there[role]), behind=buffers.free, timing=timing
                )
                # Hazard: the update reads what arrives.
                self._device.update.wait(arrival.event)
        # Hazard: what is written and not read has no arrival to wait for.
        self._device.update.wait(buffers.free)
        try:
            with self._device.updating():
                update(there)
        except BaseException:
            self._device.synchronize()  # whoever gives up the host's tensors must not do so under a copy
            raise
        # Hazard: copies back read what the update writes.
        done = self._device.update.record()
        back: dict[str, Future[None]] = {}
        for role in written:
            timing = self._count(Tier.DEVICE, Tier.HOST, host[role], f"{name} ({role})")
            departure = self._link.take(_as_bytes(there[role]), _as_bytes(host[role]), behind=done, timing=timing)
            buffers.free = departure.event  # of one stream: the last is behind all others
            back[role] = departure.left
        self._sets.append(buffers)
        return back

    def _count(self, source: Tier, destination: Tier, tensor: Tensor, name: str) -> Timing | None:
        nbytes = tensor.numel() * tensor.dtype.itemsize
        self._meter.add_moved(source, destination, nbytes)
        return self._meter.copying(source, destination, nbytes, name)

    def make_room(self, sizes: Iterable[int]) -> None:
        """Let the next chunk find buffers for tensors of so many bytes each. CapacityError if the device has no room."""
        needed = sum(map(whole_sectors, sizes))
        if len(self._sets) >= UPDATE_SETS:
            if self._sets[0].memory.numel() >= needed:
                return
            self._sets.popleft().free.wait()  # their memory goes back to the allocator, which knows nothing of copies
        with self._device.updating():  # of whose stream the allocator then takes it to be
            memory = self._device.allocate([needed], torch.uint8)
            self._sets.appendleft(_Buffers(memory=memory, free=self._device.update.record()))

    @property
    def nbytes(self) -> int:
        """Return what the buffers take of the device."""
        return sum(buffers.memory.numel() for buffers in self._sets)

    def drop(self) -> None:
        """Give the buffers back, once nothing uses them."""
        while self._sets:
            self._sets.popleft().free.wait()


def _room(tensor: Tensor) -> int:
    return whole_sectors(tensor.numel() * tensor.dtype.itemsize)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
