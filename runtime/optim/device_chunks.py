"""Chunks of a parameter that is updated on the device: what they have in common is prepared once.

One thread enqueues everything here, so that its Python limits how many chunks are updated in a second.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zinf_compile.ir.copies import COMPUTE, GRADIENT, MASTER, CopyKey, state_key
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.optim.fused_ops import FusedOp, FusedOps
from zinf_compile.runtime.optim.shadow import is_scaled
from zinf_compile.runtime.optim.step_chunks import Chunk, Operands, decoding, update_slice
from zinf_compile.runtime.optim.step_jobs import Job
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.store.store import Store
from zinf_compile.runtime.transfer.device_updates import ChunkForm
from zinf_compile.runtime.transfer.link import EnqueuedCopy


class _Place(NamedTuple):
    """Where the chunks of a copy are."""

    key: CopyKey
    slot: Slot
    first: int | None  # the element of its storage where element 0 of the flat parameter is; None if chunks are staged


class DeviceChunks:
    """Updates the chunks of one job on the device, one after the other."""

    def __init__(self, store: Store, job: Job, ops: FusedOps) -> None:
        assert job.before is not None
        self._updates, self._job, self._before = store.device_updates, job, job.before
        self._name = job.record.name
        self._device = store.device
        in_place = _slots_in_place(store, job)
        self._in_place = _places_of(job, in_place)
        away = [
            key for key in job.home_slots if key != GRADIENT and key not in job.device_slots and key not in in_place
        ]
        self._away = [job.home_slots[key] for key in away]
        gradient_dtype = job.grad.dtype if job.home_gradient is None else job.home_gradient.tensor.dtype
        self._gradient_itemsize = gradient_dtype.itemsize
        self._here = _places_of(job, job.device_slots)
        self._written = _places_of(job, {key: job.shadows.get(key, job.home_slots[key]) for key in away})
        self._length, self._nbytes = -1, 0  # elements of the last chunk, and bytes of its buffers
        self._form: ChunkForm | None = None  # of the last chunk, once it was updated
        instead = [key for key in away if key in job.shadows and job.reads(key)]
        self._instead = _places_of(job, {key: job.home_slots[key] for key in instead})
        self._gradient = _places_of(job, {} if job.home_gradient is None else {GRADIENT: job.home_gradient})
        self._copies_gradient = GRADIENT not in in_place
        self._read = tuple(key for key in (*away, *([GRADIENT] * self._copies_gradient)) if job.reads(key))
        self._states = [(name, state_key(name)) for name in job.record.copies.states]
        self._is_coded = bool(job.coded_states)
        self._op = ops.find(job)
        self._widened: Tensor | None = None  # memory for a chunk's gradient in the dtype of the master copy

    def make_room(self, chunk: Chunk) -> None:
        """Prepare buffers for a chunk. CapacityError if the device has no room."""
        length = chunk.slice.length
        if length != self._length:
            away = sum(whole_sectors(slot.staged_nbytes(length)) for slot in self._away)
            gradient = whole_sectors(self._gradient_itemsize * length) if self._copies_gradient else 0
            self._length, self._nbytes = length, away + gradient
            self._form = None
        if self._nbytes:
            self._updates.make_room(self._nbytes)

    def update(self, chunk: Chunk) -> EnqueuedCopy | None:
        """Enqueue the update of a chunk whose reads are done; return what is done when host memory has the results.

        Call ``make_room`` for it first.
        """
        written = _tensors_at(self._written, chunk)
        host = written.copy()
        if self._instead:
            host |= _tensors_at(self._instead, chunk)
        if self._copies_gradient:
            host |= _tensors_at(self._gradient, chunk) if self._gradient else {GRADIENT: chunk.raw_gradient()}
        here = _tensors_at(self._here, chunk) if self._here else {}
        homes: Mapping[CopyKey, Tensor] = {}
        if self._in_place:
            homes = _tensors_at(self._in_place, chunk)
            here |= {key: self._device.in_place(home.detach()) for key, home in homes.items()}
        if self._form is None:
            self._form = self._updates.form_of(host, self._read, written)
        change = partial(self._change, chunk)
        return self._updates.run(
            self._name,
            host,
            self._form,
            written,
            change,
            here=here,
            before=self._before,
            in_place=[*homes.values()],
        )

    def _change(self, chunk: Chunk, there: Mapping[CopyKey, Tensor]) -> None:
        """Update a chunk that is on the device."""
        master, gradient, compute = there[MASTER], there[GRADIENT], there.get(COMPUTE)
        for operation in self._job.deferred:
            operation(gradient)
        states = {name: there[key] for name, key in self._states}
        if self._op is not None and not self._is_coded:
            self._run(self._op, master, gradient, states, compute)
            return
        operands = Operands(slice=chunk.slice, master=master, gradient=gradient, states=states, compute=compute)
        decoded = decoding(self._job, operands, None, num_threads=1, at_once=None) if self._is_coded else [operands]
        for each in decoded:
            if self._op is None:
                update_slice(self._job, each, shape=None)
            else:
                self._run(self._op, each.master, each.gradient, each.states, each.compute)

    def _run(
        self, op: FusedOp, master: Tensor, gradient: Tensor, states: Mapping[str, Tensor], compute: Tensor | None
    ) -> None:
        """Update what is on the device by one op."""
        if gradient.dtype != master.dtype:
            gradient = self._widen(gradient, master.dtype)
        op.update(master.detach() if master.requires_grad else master, gradient, states)
        if compute is not None:
            compute.copy_(master)

    def _widen(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a gradient in a dtype; in memory that all chunks share, since they are updated in order."""
        size = gradient.numel()
        if self._widened is None or self._widened.numel() < size:
            self._widened = torch.empty_like(gradient, dtype=dtype)
        widened = self._widened if self._widened.numel() == size else self._widened[:size]
        return widened.copy_(gradient)


def _slots_in_place(store: Store, job: Job) -> Mapping[CopyKey, Slot]:
    """Return the slots of a job whose chunks an integrated device updates in host memory: homes there, or staging."""
    # What an update ahead of its step writes are other copies than those that it reads.
    if not store.memory.reads_in_place(Tier.HOST) or job.shadows:
        return {}
    keeps_gradient = bool(job.deferred) or is_scaled(job.optimizer)  # as it is at home, while the update changes it
    return {
        key: slot
        for key, slot in job.home_slots.items()
        if key not in job.device_slots
        and slot.num_ranks == 1
        and not slot.is_mapped
        and not (key == GRADIENT and keeps_gradient)
    }


def _places_of(job: Job, slots: Mapping[CopyKey, Slot]) -> list[_Place]:
    """Return where the chunks of a job's copies are."""
    return [
        _Place(key, slot, _first_of(job, slot) if key not in job.staged_slots else None) for key, slot in slots.items()
    ]


def _first_of(job: Job, slot: Slot) -> int | None:
    if slot.coded is not None or not slot.per_element or not slot.tensor.is_contiguous():
        return None
    return int(slot.tensor.storage_offset()) + job.elements.offset_in(slot.slice) - job.elements.start


def _tensors_at(places: Sequence[_Place], chunk: Chunk) -> dict[CopyKey, Tensor]:
    """Return a chunk of each of some copies, flat."""
    size, start = (chunk.slice.length,), chunk.slice.start
    # Of the home tensor each time: a flat one that is kept would count as an alias that others hold. A slice of a view of it
    # takes twice as long.
    return {
        key: chunk.tensor(key, slot) if first is None else slot.tensor.as_strided(size, (1,), first + start)
        for key, slot, first in places
    }
