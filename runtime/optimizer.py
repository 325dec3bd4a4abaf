"""The streamed step: the user's own optimizer, chunk by chunk, from and to the store.

Before a step of any optimizer, a hook looks for parameters that live in a store. Each of their chunks is read into
staging memory, updated by a shadow of the user's optimizer, and written back, while the next chunks are read and the
last ones written. During the step itself those parameters have no gradient, so the user's optimizer passes over them;
afterwards their gradients are shown again.
"""

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.errors import CapacityError, StoreError
from zinf_compile.runtime.fused_adamw import find_kernel
from zinf_compile.runtime.nvme.engine import ALIGN
from zinf_compile.runtime.shadow import copy_scalars, is_element_wise, probe_state, shadow_step
from zinf_compile.runtime.slots import Slot, StoredParameter, record_of
from zinf_compile.runtime.staging import StagingBuffer
from zinf_compile.runtime.store import Store
from zinf_compile.runtime.transfers import return_when_done, wait_all
from zinf_compile.terms import format_bytes

_READ_AHEAD = 2  # chunks being read while one is updated; the rest of staging holds what is being written
_GRADIENT, _MASTER, _COMPUTE = "gradient", "master copy", "compute copy"


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """One parameter to update: the options of its group, and the state its optimizer keeps for it."""

    record: StoredParameter
    grad: Tensor  # as the user sees it: its home tensor, or a tensor the user put there
    group: dict[str, Any]
    state: dict[str, Any]
    old_scalars: dict[str, Any]
    has_state: bool
    writes: list[Future[None]] = field(default_factory=list)
    is_begun: bool = False  # some of its elements may have changed
    is_updated: bool = False  # all of them have

    @property
    def num_elements(self) -> int:
        return self.record.master.tensor.numel()

    def is_torn(self) -> bool:
        """Return whether it holds neither its old nor its new value, after waiting for its writes."""
        failed = sum(write.exception() is not None for write in self.writes)  # not any(): waits for each
        return self.is_begun and (failed > 0 or not self.is_updated)

    def staged_slots(self) -> dict[str, Slot]:
        """Return the slots on nvme that a chunk of this parameter passes through, by role."""
        record = self.record
        slots = {_MASTER: record.master, **record.states}
        if record.has_compute_copy:
            slots[_COMPUTE] = record.compute
        if record.gradient is not None and _is_home(self.grad, record.gradient):
            slots[_GRADIENT] = record.gradient
        return {role: slot for role, slot in slots.items() if not slot.in_memory}


@dataclass(slots=True, kw_only=True, eq=False)
class _Chunk:
    """Elements [start, stop) of a job on their way through staging."""

    job: _Job
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


def _is_home(grad: Tensor, slot: Slot) -> bool:
    return grad.data_ptr() == slot.tensor.data_ptr()


class StreamedStep:
    """One step of one optimizer over the parameters of one store."""

    def __init__(self, store: Store, optimizer: Optimizer) -> None:
        self._store = store
        self._optimizer = optimizer
        self._element_wise = is_element_wise(optimizer)
        self._wide: StagingBuffer | None = None  # where gradients are widened to the master's dtype

    def run(self) -> None:
        """Update every parameter that has a gradient. An error on the way fails the store, half updates torn."""
        with self._store.failing_on_error():
            jobs = list(self._jobs())
        for job in jobs:
            self._check_fits(job)
        self._lease_wide(jobs)
        pending: deque[_Chunk] = deque()
        try:
            for job in jobs:
                for start in range(0, job.num_elements, self._chunk_elements(job)):
                    stop = min(job.num_elements, start + self._chunk_elements(job))
                    self._make_room(job, stop - start, pending)
                    pending.append(self._read(job, start, stop))
            while pending:
                self._update(pending.popleft())
            wait_all([write for job in jobs for write in job.writes])
            for job in jobs:
                job.record.torn = False
        except BaseException as error:  # an error of the user's optimizer too: nothing may stay in flight
            self._abandon(pending)
            begun = [job for job in jobs if job.is_begun]
            for job in begun:
                job.record.torn = job.is_torn()
            if begun or isinstance(error, StoreError):
                self._store.fail(error, updated=[job.record for job in begun if not job.record.torn])
            raise
        finally:
            if self._wide is not None:
                self._store.staging.return_(self._wide)
                self._wide = None
        for job in jobs:
            job.record.update_count += 1
        self._store.sample_memory()

    def _jobs(self) -> Iterator[_Job]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                record = record_of(parameter)
                if record is None or record.store is not self._store:
                    continue
                self._store.check_usable(record)
                grad = parameter.grad
                if grad is None:
                    continue
                # Not state[parameter], which would make an entry where the user's optimizer makes none.
                state = self._optimizer.state.get(parameter, {})
                had_state = bool(state)
                self._own_states(record)
                if self._element_wise:
                    self._make_state_slots(record, group)
                self._take_state_home(record, state)
                yield _Job(
                    record=record,
                    grad=grad,
                    group=group,
                    state=state,
                    old_scalars=copy_scalars(state, parameter.shape),
                    has_state=had_state,
                )

    def state_slot(self, record: StoredParameter, key: str, dtype: torch.dtype) -> Slot:
        """Return the slot for a state tensor of this optimizer; a new one has undefined content."""
        self._own_states(record)
        slot = record.states.get(key)
        if slot is None or slot.tensor.dtype != dtype:
            slot = record.states[key] = self._state_slot(record, key, dtype)
        return slot

    def _own_states(self, record: StoredParameter) -> None:
        """Make ``record.states`` this optimizer's: another one keeps its own, and its slots are reused once it is gone."""
        if record.states_owner is not None:
            if record.states_owner() is self._optimizer:
                return
            record.other_states.append((record.states_owner, record.states))
        mine = next((states for owner, states in record.other_states if owner() is self._optimizer), {})
        record.other_states = [(owner, states) for owner, states in record.other_states if states is not mine]
        record.states, record.states_owner = mine, weakref.ref(self._optimizer)

    def _state_slot(self, record: StoredParameter, key: str, dtype: torch.dtype) -> Slot:
        """Return a slot for a state tensor: one that nobody looks at since its optimizer is gone, else a new one."""
        for owner, states in record.other_states:
            slot = states.get(key) if owner() is None else None
            # Two references are the slot's and this call's own; a third is a state_dict that somebody kept.
            if slot is not None and slot.tensor.dtype == dtype and sys.getrefcount(slot.tensor) == 2:
                return states.pop(key)
        tier = self._store.placements[record.name].optimizer_state
        return self._store.new_slot(f"{record.name} ({key})", record.master.tensor.shape, dtype, tier)

    def _make_state_slots(self, record: StoredParameter, group: dict[str, Any]) -> None:
        """Give every per-element state tensor a slot before the first step, so that chunks have somewhere to go."""
        for wanted in probe_state(self._optimizer, group, record.master.tensor.dtype):
            if wanted.key not in record.states:
                record.states[wanted.key] = self._state_slot(record, wanted.key, wanted.dtype)

    def _take_state_home(self, record: StoredParameter, state: dict[str, Any]) -> None:
        """Write state that somebody else put there, as ``load_state_dict`` does, to its slot, and show the slot."""
        shape = record.master.tensor.shape
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != shape:
                continue
            if value.dim() == 0 and key not in record.states:  # a step count, and no moment of a 0-dim parameter
                continue
            slot = self.state_slot(record, key, value.dtype)
            if value.data_ptr() != slot.tensor.data_ptr():
                self._store.transfers.write_value(slot, value)
                self._store.transfers.wait_writes()
                state[key] = slot.tensor

    def _chunk_elements(self, job: _Job) -> int:
        if not self._element_wise:
            return max(1, job.num_elements)
        wanted = self._store.chunk_elements
        slots = job.staged_slots()
        if not slots:
            return wanted
        per_element = sum(slot.tensor.dtype.itemsize for slot in slots.values())
        fitting = self._store.staging.capacity // per_element
        return min(wanted, max(ALIGN, fitting - fitting % ALIGN))

    def _check_fits(self, job: _Job) -> None:
        needed = self._lease_nbytes(job, min(job.num_elements, self._chunk_elements(job)))
        if needed > self._store.staging.capacity:
            why = "" if self._element_wise else f", because {type(self._optimizer).__name__} needs whole tensors"
            raise CapacityError(
                f"updating '{job.record.name}' needs {format_bytes(needed)} of staging at once{why}; host_memory leaves "
                f"{format_bytes(self._store.staging.capacity)}; raise host_memory to {-(-2 * needed // 2**20)}MiB"
            )

    @staticmethod
    def _lease_nbytes(job: _Job, num_elements: int) -> int:
        return sum(
            -(-num_elements * slot.tensor.dtype.itemsize // ALIGN) * ALIGN for slot in job.staged_slots().values()
        )

    def _lease_wide(self, jobs: list[_Job]) -> None:
        """Lease room for the widest chunk's gradient, so that no chunk allocates: heaps fragment under such sizes."""
        widths = [
            min(job.num_elements, self._chunk_elements(job)) * job.record.master.tensor.dtype.itemsize
            for job in jobs
            if job.record.has_compute_copy and job.staged_slots()
        ]
        needed = max(widths, default=0)
        largest = max((self._lease_nbytes(job, self._chunk_elements(job)) for job in jobs), default=0)
        if needed and needed + largest <= self._store.staging.capacity:
            self._wide = self._store.staging.lease(needed)

    def _widen(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        if gradient.dtype == dtype:
            return gradient
        if self._wide is None or gradient.numel() * dtype.itemsize > self._wide.nbytes:
            return gradient.to(dtype)
        return torch.frombuffer(self._wide.view, dtype=dtype, count=gradient.numel()).copy_(gradient)

    def _make_room(self, job: _Job, num_elements: int, pending: deque[_Chunk]) -> None:
        """Update chunks that have been read until the next one may be: a lease must never wait for this very thread."""
        needed = self._lease_nbytes(job, num_elements)
        staging = self._store.staging
        while pending and (len(pending) >= _READ_AHEAD or staging.leased_nbytes + needed > staging.capacity):
            self._update(pending.popleft())

    def _read(self, job: _Job, start: int, stop: int) -> _Chunk:
        chunk = _Chunk(job=job, start=start, stop=stop, lease=None, views={}, reads=[])
        nbytes = self._lease_nbytes(job, stop - start)
        if nbytes == 0:
            return chunk
        if self._store.staging.leased_nbytes + nbytes > self._store.staging.capacity:
            with self._store.meter.stall("optimizer state on its way home"):
                chunk.lease = self._store.staging.lease(nbytes)
        else:
            chunk.lease = self._store.staging.lease(nbytes)
        cursor = 0
        for role, slot in job.staged_slots().items():
            offset, padded = slot.byte_range(start, stop)
            chunk.views[role] = chunk.lease.view[cursor : cursor + padded]
            cursor += padded
            if role in (_MASTER, _GRADIENT) or (role != _COMPUTE and job.has_state):
                chunk.reads += self._store.transfers.read(slot, offset, chunk.views[role])
        return chunk

    def _update(self, chunk: _Chunk) -> None:
        job, record, transfers = chunk.job, chunk.job.record, self._store.transfers
        try:
            if not all(read.done() for read in chunk.reads):
                with self._store.meter.stall("optimizer state on its way in"):
                    wait_all(chunk.reads)
            wait_all(chunk.reads)
            job.is_begun = record.torn = True
            self._compute(chunk)
        except BaseException:
            self._return(chunk)
            raise
        writes: list[Future[None]] = []
        for role, slot in job.staged_slots().items():
            if role != _GRADIENT:
                offset, _ = slot.byte_range(chunk.start, chunk.stop)
                writes += transfers.write(slot, offset, chunk.views[role])
        job.writes += writes
        job.is_updated = chunk.stop == job.num_elements
        if chunk.lease is None:
            return
        if writes:
            return_when_done(self._store.staging, chunk.lease, writes)
        else:
            self._return(chunk)

    def _compute(self, chunk: _Chunk) -> None:
        """Run the user's optimizer on a chunk whose reads are done."""
        job, record = chunk.job, chunk.job.record
        shape = None if self._element_wise else record.master.tensor.shape
        master = _shaped(chunk.tensor(_MASTER, record.master), shape)
        gradient = self._gradient(chunk)
        state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in job.old_scalars.items()}
        staged = {key: chunk.tensor(key, slot) for key, slot in record.states.items()}
        compute = chunk.tensor(_COMPUTE, record.compute) if record.has_compute_copy else None
        kernel = find_kernel(
            self._optimizer,
            job.group,
            master_dtype=master.dtype,
            gradient_dtype=gradient.dtype,
            compute_dtype=None if compute is None else compute.dtype,
        )
        if kernel is not None and kernel.takes(state | staged):
            num_threads = torch.get_num_threads()
            new_state = kernel.update(job.group, state | staged, master, gradient, compute, num_threads=num_threads)
        else:
            if job.has_state:
                state |= {key: _shaped(tensor, shape) for key, tensor in staged.items()}
            wide = _shaped(self._widen(gradient, master.dtype), shape)
            new_state = shadow_step(self._optimizer, job.group, master.detach(), wide, state)
            for key, tensor in staged.items():
                if new_state[key].data_ptr() != tensor.data_ptr():
                    tensor.copy_(new_state[key].detach().reshape(-1))
            if compute is not None:
                compute.copy_(master.detach().reshape(-1))
        if chunk.stop == job.num_elements:
            self._show_state(job, new_state)

    def _gradient(self, chunk: _Chunk) -> Tensor:
        record = chunk.job.record
        assert record.gradient is not None
        if _is_home(chunk.job.grad, record.gradient):
            return chunk.tensor(_GRADIENT, record.gradient)
        return chunk.job.grad.reshape(-1)[chunk.start : chunk.stop]

    def _show_state(self, job: _Job, new_state: dict[str, Any]) -> None:
        """Let ``optimizer.state`` show home tensors and the entries that are not per element."""
        record = job.record
        if new_state:
            self._optimizer.state[record.parameter] = job.state
        for key, value in new_state.items():
            # State of a whole-tensor optimizer that has no slot yet is taken home at the beginning of its next step.
            job.state[key] = record.states[key].tensor if key in record.states else value

    def _return(self, chunk: _Chunk) -> None:
        for read in chunk.reads:
            read.exception()  # waits: the buffer must not be reused under a read
        if chunk.lease is not None:
            self._store.staging.return_(chunk.lease)
            chunk.lease = None

    def _abandon(self, pending: deque[_Chunk]) -> None:
        while pending:
            self._return(pending.popleft())


def _shaped(tensor: Tensor, shape: torch.Size | None) -> Tensor:
    return tensor if shape is None else tensor.view(shape)
