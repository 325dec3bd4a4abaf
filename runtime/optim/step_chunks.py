"""Chunks of a streamed step: slices of parameters on their way through staging, and the update of one, or of a part."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zinf_compile.ir.copies import GRADIENT, CopyKey
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.optim.fused_adamw import Kernel, find_kernel
from zinf_compile.runtime.optim.shadow import copy_value, shadow_step
from zinf_compile.runtime.optim.step_jobs import Job
from zinf_compile.runtime.storage.slots import Slot, elements_of, local_of
from zinf_compile.runtime.storage.staging import StagingBuffer


@dataclass(slots=True, kw_only=True, eq=False)
class Chunk:
    """A slice of a job's parameter on its way through staging."""

    job: Job
    slice: Slice  # flat
    lease: StagingBuffer | None
    views: dict[CopyKey, memoryview]  # of the lease
    reads: list[Future[None]]

    def tensor(self, key: CopyKey, slot: Slot) -> Tensor:
        """Return this chunk of a slot: staged, or in place where its home is memory."""
        if key in self.views:
            return torch.frombuffer(self.views[key], dtype=slot.tensor.dtype, count=self.slice.num_elements)
        return slot.elements(self.slice)

    def reload(self) -> Mapping[CopyKey, Future[None]]:
        """Copy what was read of shadows into the copies in memory; nothing has to come back."""
        for key, slot in self.job.reloaded.items():
            slot.elements(self.slice).copy_(self.tensor(key, slot))
        return {}

    def gradient(self) -> Tensor:
        """Return its gradient, with deferred operations applied."""
        gradient = self.raw_gradient()
        for operation in self.job.deferred:  # to the staged copy; for the one at home they stay deferred
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
    master: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]
    compute: Tensor | None

    def part(self, part: Slice) -> "Operands":
        """Return those of a part of the slice, in the same memory."""
        return Operands(
            slice=part,
            master=elements_of(self.master, self.slice, part),
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
    state = job.scalars | {key: slot.tensor for key, slot in record.copies.states.items()}
    return kernel if kernel is not None and kernel.takes(state) else None


def update_slice(job: Job, operands: Operands, *, shape: torch.Size | None) -> dict[str, Any]:
    """Update a slice in place as the user's optimizer does, which sees tensors of ``shape``; return its state."""
    scalars = copied(job.scalars)
    if job.group.get("fused"):  # its kernel reads them where the master copy is
        scalars = {key: moved_to(operands.master.device, value) for key, value in scalars.items()}
    state = scalars | {key: _shaped(operands.states[key], shape) for key in job.kept_states}
    gradient = _shaped(operands.gradient.to(operands.master.dtype), shape)
    master = _shaped(operands.master, shape).detach()
    new_state = shadow_step(job.optimizer, job.group, master, gradient, state, job.place, job.ledger)
    if job.changes_gradient and gradient.dtype != operands.gradient.dtype:
        operands.gradient.copy_(gradient.reshape(-1))
    for key, tensor in operands.states.items():
        if key in new_state and new_state[key].data_ptr() != tensor.data_ptr():
            tensor.copy_(new_state[key].detach().reshape(-1))
    if operands.compute is not None:
        operands.compute.copy_(operands.master)
    return new_state


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
