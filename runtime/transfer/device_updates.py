"""Optimizer updates on the device: chunks of their inputs are copied there over the link, and results are copied back.

    to_device   free -> gradient, master copy, moments of chunk 1 | of chunk 2 | ...
    update              arrived -> the user's optimizer on chunk 1 | ...
    to_host                        done -> master copy, moments, compute copy of chunk 1 | ...

Of a device that reads host memory in place only what must not change there is copied, such as a gradient that is scaled.

A few sets of buffers take turns: the next chunk arrives while one is updated and the previous one is copied back. Small
chunks, as of norms, take turns of their own: else a large one behind two of them would wait for its predecessor to leave.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zinf_compile.ir.copies import CopyKey
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import SMALL_UPDATE_PART, SMALL_UPDATE_SETS, UPDATE_SETS
from zinf_compile.runtime.device.device import Device, Event, Pair, Timing
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.transfer.link import EnqueuedCopy, Link


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkForm:
    """What is the same for all chunks of one length, of parameters whose copies have the same dtypes and homes."""

    layout: Sequence[tuple[CopyKey, torch.dtype, int]]  # keys, dtypes and lengths of what is in buffers
    read: Collection[CopyKey]  # what is copied to the device
    nbytes_read: int
    nbytes_written: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Buffers:
    """Device memory of one chunk, and the event after which it may be overwritten."""

    memory: Tensor
    nbytes: int
    free: Event
    form: ChunkForm | None = None  # of the chunk for which it was last cut into tensors
    tensors: Mapping[CopyKey, Tensor] = field(default_factory=dict)

    def cut(self, form: ChunkForm) -> Mapping[CopyKey, Tensor]:
        """Return flat tensors in the memory for a chunk, each from a sector on."""
        if form is not self.form:  # most chunks are alike, and a view costs as much as enqueueing a copy
            tensors, cursor = {}, 0
            for key, dtype, length in form.layout:
                tensors[key] = self.memory[cursor : cursor + length * dtype.itemsize].view(dtype)
                cursor += whole_sectors(length * dtype.itemsize)
            self.form, self.tensors = form, tensors
        return self.tensors


class DeviceUpdates:
    """Runs updates of one store on its device. Called from one thread at a time."""

    def __init__(self, device: Device, meter: Meter) -> None:
        self._device, self._meter = device, meter
        # Its own streams: behind a prefetch or a gradient that waits for compute, updates would wait too.
        self._link = Link(device, for_updates=True)
        self._large: deque[_Buffers] = deque()
        self._small: deque[_Buffers] = deque()  # each at most a small part of a large one
        self._sets = self._large  # those of the next chunk
        self._forms: dict[tuple[object, ...], ChunkForm] = {}  # by all that they are made of

    def form_of(
        self, host: Mapping[CopyKey, Tensor], read: Collection[CopyKey], written: Mapping[CopyKey, Tensor]
    ) -> ChunkForm:
        """Return the form of a chunk with these tensors, the same object for all that are alike: see ``run``."""
        layout = tuple((key, each.dtype, each.numel()) for key, each in host.items())
        key = layout, tuple(read), tuple(written)
        if key not in self._forms:
            self._forms[key] = ChunkForm(
                layout=layout,
                read=read,
                nbytes_read=sum(host[each].nbytes for each in read),
                nbytes_written=sum(each.nbytes for each in written.values()),
            )
        return self._forms[key]

    def run(
        self,
        name: str,
        host: Mapping[CopyKey, Tensor],
        form: ChunkForm,
        written: Mapping[CopyKey, Tensor],
        update: Callable[[Mapping[CopyKey, Tensor]], object],
        *,
        here: Mapping[CopyKey, Tensor],
        before: Event,
        in_place: Sequence[Tensor] = (),
    ) -> EnqueuedCopy | None:
        """Start updating the flat ``host`` tensors of ``name``; call ``make_room`` first, if there are any.

        ``form`` says which of them are copied to the device, and ``written`` is where they are copied back: the same
        tensors, or others. ``here`` are tensors on the device, updated in place after the event ``before``; some may be host
        memory, which ``in_place`` names, and then nothing is ``written``. ``update`` receives all of them on the device, and
        enqueues ops that change them in place. Returns the copies of what is written back to host memory, or the end of
        writes in place; None if there are none. Until they are done no host tensor may be read or written by others.
        """
        buffers, read = self._sets.popleft() if host else None, form.read
        there: Mapping[CopyKey, Tensor] = {}
        if here:
            # Hazard: compute enqueued earlier may still read a copy that is updated in place.
            self._device.update.wait(before)
        if buffers is not None:
            there = buffers.cut(form)
            # Hazard: the previous chunk in these buffers may still be copied back; its last copy ends at ``free``.
            arrived = buffers.free
            if read:
                arriving = [(host[key], there[key]) for key in read]
                timings = self._count(name, read, arriving, form.nbytes_read, Tier.HOST, Tier.DEVICE)
                arrived = self._link.bring_all(arriving, behind=buffers.free, timings=timings).event
            # Hazard: the update reads the copied tensors, and writes others that are not copied.
            self._device.update.wait(arrived)
        try:
            with self._device.updating():
                update({**there, **here} if here else there)
        except BaseException:
            self._device.synchronize()  # the caller may free the host tensors, so no copy may be in flight
            raise
        # Hazard: the copies back read what the update writes.
        done = self._device.update.record()
        copies: EnqueuedCopy | None = None
        if written:
            leaving = [(there[key], home) for key, home in written.items()]
            timings = self._count(name, written, leaving, form.nbytes_written, Tier.DEVICE, Tier.HOST)
            copies = self._link.take_all(leaving, behind=done, timings=timings)
        elif in_place:
            copies = self._link.note_written(in_place)
        if buffers is not None:
            buffers.free = done if copies is None else copies.event
            self._sets.append(buffers)
        return copies

    def copy_there(self, name: str, copies: Mapping[CopyKey, tuple[Tensor, Tensor]], *, before: Event) -> EnqueuedCopy:
        """Start copying flat host tensors to flat tensors on the device, behind ``before``."""
        pairs = list(copies.values())
        nbytes = sum(start.nbytes for start, _ in pairs)
        timings = self._count(name, copies, pairs, nbytes, Tier.HOST, Tier.DEVICE)
        return self._link.bring_all(pairs, behind=before, timings=timings)

    def _count(
        self, name: str, keys: Iterable[CopyKey], pairs: Sequence[Pair], nbytes: int, source: Tier, destination: Tier
    ) -> Sequence[Timing | None]:
        """Count copies of ``nbytes`` in all between two tiers; return how they are timed, while something is recorded."""
        self._meter.add_moved(source, destination, nbytes)
        if self._meter.recorder is None:
            return ()
        return [
            self._meter.copying(source, destination, start.nbytes, f"{name} ({key.label})")
            for key, (start, _) in zip(keys, pairs, strict=True)
        ]

    def make_room(self, needed: int) -> None:
        """Prepare buffers for the next chunk, of so many bytes in whole sectors. CapacityError if the device has no room."""
        largest = max([buffers.nbytes for buffers in self._large], default=0)
        is_small = needed * SMALL_UPDATE_PART <= largest
        self._sets = self._small if is_small else self._large
        if len(self._sets) >= (SMALL_UPDATE_SETS if is_small else UPDATE_SETS):
            if self._sets[0].nbytes >= needed:
                return
            _free_first(self._sets)
        with self._device.updating():  # so the allocator assigns the memory to the update stream
            memory = self._device.allocate([needed], torch.uint8)
            self._sets.appendleft(_Buffers(memory=memory, nbytes=needed, free=self._device.update.record()))

    @property
    def nbytes(self) -> int:
        """Return the device bytes of the buffers."""
        return sum(buffers.nbytes for buffers in (*self._large, *self._small))

    def close(self) -> None:
        """Wait for all copies, and end the threads that watch them."""
        self.drop()
        self._link.close()

    def drop(self) -> None:
        """Free the buffers, once nothing uses them."""
        self._forms.clear()
        for sets in (self._large, self._small):
            while sets:
                _free_first(sets)


def _free_first(sets: deque[_Buffers]) -> None:
    """Free the first buffers once their last copy has landed."""
    # Hazard: the allocator that gets their memory does not track copies from it. So it is held until they have landed.
    buffers = sets.popleft()
    buffers.free.wait()
