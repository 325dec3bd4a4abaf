"""Chunks of a streamed step: elements on their way through staging, and the update of such elements, or of some of them."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zinf_compile.runtime.fused_adamw import Kernel, find_kernel
from zinf_compile.runtime.shadow import shadow_step
from zinf_compile.runtime.slots import Slot
from zinf_compile.runtime.staging import StagingBuffer
from zinf_compile.runtime.step_jobs import GRADIENT, Job, copy_value


@dataclass(slots=True, kw_only=True, eq=False)
class Chunk:
    """Elements [start, stop) of a job on their way through staging."""

    job: Job
    start: int
    stop: int
    lease: StagingBuffer | None
    views: dict[str, memoryview]  # of the lease, by role
    reads: list[Future[None]]

    def tensor(self, role: str, slot: Slot) -> Tensor:
        """Return this chunk of a slot: staged, or in place where its home is memory."""
        if role in self.views:
            return torch.frombuffer(self.views[role], dtype=slot.tensor.dtype, count=self.stop - self.start)
        return slot.tensor.view(-1)[self.start : self.stop]

    def gradient(self) -> Tensor:
        """Return its gradient, with what was put off done to it."""
        gradient = self.raw_gradient()
        for operation in self.job.deferred:  # on the staged copy; the one at home keeps it put off
            operation(gradient)
        return gradient

    def raw_gradient(self) -> Tensor:
        """Return its gradient without what was put off."""
        if self.job.home_gradient is not None:
            return self.tensor(GRADIENT, self.job.home_gradient)
        return self.job.grad.detach().reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some elements of all that an update reads and writes, one-dimensional."""

    master: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]
    compute: Tensor | None

    def cut(self, start: int, stop: int) -> "Part":
        """Return elements [start, stop) of these, in the same memory."""
        return Part(
            master=self.master[start:stop],
            gradient=self.gradient[start:stop],
            states={key: state[start:stop] for key, state in self.states.items()},
            compute=None if self.compute is None else self.compute[start:stop],
        )


def find_job_kernel(job: Job) -> Kernel | None:
    """Return the compiled update for a job; None where there is none for its options, dtypes or state."""
    record = job.record
    kernel = find_kernel(
        job.optimizer,
        job.group,
        master_dtype=record.master.tensor.dtype,
        gradient_dtype=job.grad.dtype,
        compute_dtype=record.compute.tensor.dtype if record.has_compute_copy else None,
    )
    state = job.scalars | {key: slot.tensor for key, slot in record.states.items()}
    return kernel if kernel is not None and kernel.takes(state) else None


def update_part(job: Job, part: Part, *, shape: torch.Size | None) -> dict[str, Any]:
    """Update some elements in place as the user's optimizer does, which sees tensors of ``shape``; return their state."""
    scalars = copied(job.scalars)
    if job.group.get("fused"):  # a kernel that reads them where it computes
        scalars = {
            key: value.to(part.master.device) if isinstance(value, Tensor) else value for key, value in scalars.items()
        }
    state = scalars | {key: _shaped(part.states[key], shape) for key in job.kept_states}
    gradient = _shaped(part.gradient.to(part.master.dtype), shape)
    new_state = shadow_step(job.optimizer, job.group, _shaped(part.master, shape).detach(), gradient, state)
    for key, tensor in part.states.items():
        if key in new_state and new_state[key].data_ptr() != tensor.data_ptr():
            tensor.copy_(new_state[key].detach().reshape(-1))
    if part.compute is not None:
        part.compute.copy_(part.master)
    return new_state


def copied(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return scalars of a state that share nothing with it."""
    return {key: copy_value(value) for key, value in scalars.items()}


def _shaped(tensor: Tensor, shape: torch.Size | None) -> Tensor:
    return tensor if shape is None else tensor.view(shape)
