"""Chunks of a streamed step: slices of parameters on their way through staging, and the update of one, or of a part."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zinf_compile.ir.copies import GRADIENT, MASTER, CopyKey, low_halves_nbytes
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.optim.fused_adamw import Kernel, find_kernel
from zinf_compile.runtime.optim.periodic import kept_by
from zinf_compile.runtime.optim.shadow import copy_value, shadow_step
from zinf_compile.runtime.optim.step_jobs import Job, is_dense
from zinf_compile.runtime.storage.low_halves import join, split
from zinf_compile.runtime.storage.slots import Slot, elements_of, local_of
from zinf_compile.runtime.storage.staging import StagingBuffer

_DECODED_NBYTES = 2 * 2**20  # of all states, and of a split master copy, at once on the host; no plan counts them
_MASTER = torch.float32  # what a master copy is that can be split


class Leased(NamedTuple):
    """Staging that some copies of a chunk have."""

    buffer: StagingBuffer
    keys: Sequence[CopyKey]


@dataclass(slots=True, kw_only=True, eq=False)
class Chunk:
    """A slice of a job's parameter on its way through staging."""

    job: Job
    slice: Slice  # flat
    leases: list[Leased] = field(default_factory=list)
    views: dict[CopyKey, memoryview] = field(default_factory=dict)  # of the leases
    reads: list[Future[None]] = field(default_factory=list)

    def staged_nbytes(self, key: CopyKey) -> int:
        """Return the bytes of staging that one of its copies takes."""
        return self.job.staged_nbytes(key, self.slice.num_elements)

    def tensor(self, key: CopyKey, slot: Slot) -> Tensor:
        """Return this chunk of a slot: staged, or in place where its home is memory. Of codes, their pages."""
        stored = slot.stored(self.slice)
        if key in self.views:
            return torch.frombuffer(self.views[key], dtype=slot.tensor.dtype, count=stored.num_elements)
        return slot.elements(stored)

    def low_halves(self) -> Tensor:
        """Return the staged pages of what the compute copy lacks of the master copy: read, or to be written."""
        nbytes = low_halves_nbytes(self.slice.num_elements)
        return torch.frombuffer(self.views[MASTER], dtype=torch.uint8, count=nbytes)

    def reload(self) -> None:
        """Copy what was read of shadows into the copies in memory."""
        for key, slot in self.job.reloaded.items():
            slot.elements(slot.stored(self.slice)).copy_(self.tensor(key, slot))

    def gradient(self) -> Tensor:
        """Return its gradient, with deferred operations applied."""
        gradient = self.raw_gradient()
        if self.job.deferred and GRADIENT not in self.views:
            gradient = gradient.clone()
        for operation in self.job.deferred:  # to the copy; for the one at home they stay deferred
            operation(gradient)
        return gradient

    def raw_gradient(self) -> Tensor:
        """Return its gradient without deferred operations."""
        if self.job.home_gradient is not None:
            return self.tensor(GRADIENT, self.job.home_gradient)
        return elements_of(local_of(self.job.grad).detach().reshape(-1), self.job.elements, self.slice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What an update reads and writes of a slice of a parameter, as flat tensors."""

    slice: Slice
    master: Tensor  # or pages of what the compute copy lacks of it, uint8
    gradient: Tensor
    states: Mapping[str, Tensor]
    compute: Tensor | None

    def part(self, part: Slice) -> "Operands":
        """Return those of a part of the slice, in the same memory."""
        return Operands(
            slice=part,
            master=_pages_of(self.master, self.slice, part)
            if self.master.dtype == torch.uint8
            else elements_of(self.master, self.slice, part),
            gradient=elements_of(self.gradient, self.slice, part),
            states={key: elements_of(state, self.slice, part) for key, state in self.states.items()},
            compute=None if self.compute is None else elements_of(self.compute, self.slice, part),
        )


def find_job_kernel(job: Job) -> Kernel | None:
    """Return the compiled update for a job; None where there is none for its options, dtypes or state."""
    record = job.record
    kernel = find_kernel(
        job.optimizer,
        job.group,
        master_dtype=record.copies.master.tensor.dtype,
        gradient_dtype=job.grad.dtype,
        compute_dtype=record.copies.compute.tensor.dtype if record.copies.are_two else None,
    )
    moments = {key: slot.dtype for key, slot in record.copies.states.items()}
    return kernel if kernel is not None and kernel.takes(job.scalars, moments) else None


def update_slice(job: Job, operands: Operands, *, shape: torch.Size | None) -> dict[str, Any]:
    """Update a slice in place as the user's optimizer does, which sees tensors of ``shape``; return its state.

    State of a shape of its own has that shape. Where an update gives it another, it is returned as it is. Returned tensors
    share no memory with the operands, but for state that is updated in place.
    """
    scalars = copied(job.scalars)
    if job.group.get("fused"):  # its kernel reads them where the master copy is
        scalars = {key: moved_to(operands.master.device, value) for key, value in scalars.items()}
    slots = job.record.copies.states
    given = {key: _shaped_state(slots[key], operands.states[key], shape) for key in job.kept_states | job.zero_states}
    for key in job.zero_states:
        if is_dense(operands.states[key]):
            operands.states[key].zero_()
    state = scalars | given
    gradient = _shaped(operands.gradient.to(operands.master.dtype), shape)
    master = _shaped(operands.master, shape).detach()
    with kept_by(job.work):
        new_state = shadow_step(job.optimizer, job.group, master, gradient, state, job.place, job.ledger)
    if job.changes_gradient and gradient.dtype != operands.gradient.dtype:
        operands.gradient.copy_(gradient.reshape(-1))
    dense = [each for each in operands.states.values() if is_dense(each)]
    shared = {_storage(each) for each in (operands.master, operands.gradient, *dense)}
    for key, value in new_state.items():  # before anything is copied over what they are
        if is_dense(value) and _storage(value) in shared and not (key in given and _is_same(value, given[key])):
            new_state[key] = value.clone()
    for key, tensor in operands.states.items():
        value = new_state.get(key)
        if isinstance(value, Tensor) and value.data_ptr() != tensor.data_ptr() and value.numel() == tensor.numel():
            tensor.copy_(value.detach().reshape(-1))
    if operands.compute is not None:
        operands.compute.copy_(operands.master)
    return new_state


def _shaped_state(slot: Slot, state: Tensor, shape: torch.Size | None) -> Tensor:
    """Return a state as the user's optimizer sees it: in the shape of what it updates, or in one of its own."""
    if not slot.per_element:
        return state.view(slot.tensor.shape)
    if slot.coded is None or shape is None:
        return _shaped(state, shape)
    return slot.coded.shaped(state, shape)


def _is_same(value: Tensor, given: Tensor) -> bool:
    """Return whether an entry of a state is the tensor that an update was given, or another one over just its elements."""
    if value is given:
        return True
    forms = [(each.data_ptr(), each.shape, each.stride(), each.dtype, each.is_conj()) for each in (value, given)]
    return forms[0] == forms[1]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _pages_of(pages: Tensor, held: Slice, part: Slice) -> Tensor:
    """Return the pages of lower halves of a part, which begins with a page, among those of a slice."""
    first = low_halves_nbytes(part.offset_in(held))
    return pages[first : first + low_halves_nbytes(part.num_elements)]


def decoding(
    job: Job, operands: Operands, low_halves: Tensor | None, *, num_threads: int, at_once: int | None = _DECODED_NBYTES
) -> Iterator[Operands]:
    """Yield parts of a slice with states decoded from their codes, and encode what was made of each before the next.

    A part has ``at_once`` bytes of values, so that they are decoded, updated and encoded in the cache of a CPU. With None
    the slice is one part, as on a device, where plans count the memory of its values. A master copy is joined from its
    compute copy and what that lacks, if it is split, and split into ``low_halves``, if these are given. They may lie over a
    master copy that is whole: a part is read before its pages are written, and they end no later.
    """
    coded = {name: slot.coded for name, slot in job.coded_states.items() if slot.coded is not None}
    whole, step = operands.slice, number_of(job.scalars.get("step"))
    exact = replace(operands, states={name: each for name, each in operands.states.items() if name not in coded})
    itemsizes = [each.dtype.itemsize for each in coded.values()] + [_MASTER.itemsize] * (low_halves is not None)
    size = max(1, whole.length)
    if job.is_block_wise and at_once is not None:
        size = min(size, elements_at_once(job))
    elif at_once is not None:
        most = at_once // sum(itemsizes)
        size = min(size, max(job.multiple, most - most % job.multiple))
    values = {name: each.room(size, operands.master.device) for name, each in coded.items()}
    room = None if low_halves is None else torch.empty(size, dtype=_MASTER, device="cpu")
    for part in whole.pieces(size):
        pages, states = {}, {}
        for name, each in coded.items():
            first, nbytes = each.pages_of(part)
            first -= each.pages_of(whole)[0]
            pages[name] = operands.states[name][first : first + nbytes]
            if name in job.zero_states:
                values[name] = each.room(part.length, operands.master.device)
            states[name] = each.first_of(values[name], part.length)
            if name in job.kept_states:
                each.decode(pages[name], states[name], num_threads=num_threads)
        decoded = exact.part(part)
        decoded = replace(decoded, states={**decoded.states, **states})
        if room is not None:
            decoded = replace(decoded, master=_joined(decoded, room[: part.length], num_threads=num_threads))
        yield decoded
        if low_halves is not None:
            assert decoded.compute is not None
            split(decoded.master, decoded.compute, _pages_of(low_halves, whole, part), num_threads=num_threads)
        for name, each in coded.items():
            each.encode(
                states[name],
                pages[name],
                first=part.start,
                seed=seed_of(part, name, step),
                drawn_from=decoded.master if decoded.master.dtype == torch.float32 else None,
                num_threads=num_threads,
            )


def seed_of(part: Slice, state: str, step: float) -> int:
    """Return the seed by which a state of a parameter is rounded after so many steps."""
    return zlib.crc32(f"{part.parameter}/{state}/{step}".encode())


def elements_at_once(job: Job) -> int:
    """Return how many elements an update by one of torchao's optimizers gets: as many for all parts of a job but the last.

    So many that calls cost little beside what they compute, with at most 2 MiB of temporaries.
    """
    most = _DECODED_NBYTES // job.temporary_nbytes
    return max(job.multiple, most - most % job.multiple)


def _joined(operands: Operands, room: Tensor, *, num_threads: int) -> Tensor:
    """Return the values of a master copy in ``room``."""
    if operands.master.dtype != torch.uint8:
        return room.copy_(operands.master)
    assert operands.compute is not None
    join(operands.master, operands.compute, room, num_threads=num_threads)
    return room


def number_of(step: object) -> float:
    """Return the step count in a state; 0 where there is none, or none that is a number."""
    if isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex():
        return float(step)
    return float(step) if isinstance(step, int | float) else 0.0


def moved_to(device: torch.device, value: Any) -> Any:
    """Return a scalar of a state on a device, without waiting for what is enqueued there."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    if value.numel() != 1:
        return value.to(device)
    return torch.full(value.shape, value.item(), dtype=value.dtype, device=device)


def copied(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return scalars of a state that share nothing with it."""
    return {key: copy_value(value) for key, value in scalars.items()}


def _shaped(tensor: Tensor, shape: torch.Size | None) -> Tensor:
    return tensor if shape is None else tensor.view(shape)
