"""The streamed step: the user's own optimizer, chunk by chunk, from and to the store.

Each chunk of a parameter is read into staging memory, updated by a shadow of the user's optimizer, and written back,
while the next chunks are read and the last ones written. ``step_hooks`` decides when; ``step_jobs`` says what.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zinf_compile.errors import CapacityError, StoreError
from zinf_compile.plans import UPDATE_NBYTES
from zinf_compile.runtime.fused_adamw import Kernel
from zinf_compile.runtime.futures import call_when_done, return_when_done, then_start
from zinf_compile.runtime.home import HomeTensor
from zinf_compile.runtime.nvme.engine import ALIGN, whole_sectors
from zinf_compile.runtime.staging import StagingBuffer
from zinf_compile.runtime.step_chunks import Chunk, Part, copied, find_job_kernel, update_part
from zinf_compile.runtime.step_jobs import COMPUTE, GRADIENT, MASTER, Job
from zinf_compile.runtime.store import Store
from zinf_compile.runtime.temporaries import piece_elements
from zinf_compile.terms import Phase, Tier, format_bytes

_ROUNDED = 8  # one part in so many of a whole tensor's temporaries is lost to rounding up
_PIECE_NBYTES = UPDATE_NBYTES // 2  # of what is allocated at once: the system's allocator comes to hold more
_READ_AHEAD = 3  # chunks in or on their way: an update that has to share its cores must not let the disk run dry


class JobSource(Protocol):
    """Jobs that come while others are done."""

    def __iter__(self) -> Iterator[Job | None]:
        """Yield jobs; None where the next has not come yet."""

    def end(self) -> Sequence[Job]:
        """Take no more, and return those that nobody has taken."""


class StreamedStep:
    """One step of one optimizer over parameters of one store."""

    def __init__(self, store: Store, jobs: Sequence[Job] | JobSource, *, element_wise: bool) -> None:
        """Take over ``jobs``; CapacityError if staging cannot hold a chunk of one. Nothing is in flight before ``run``."""
        self._store = store
        self._source = jobs
        self._element_wise = element_wise
        self._num_threads = torch.get_num_threads()  # of who asks: the thread that updates in the background has one
        self._is_cut = True  # into pieces, where it allocates
        self._jobs: list[Job] = []
        self._kernels: dict[Job, Kernel | None] = {}
        self._device_jobs: set[Job] = set()  # those updated on the device
        self._num_elements = self._num_on_device = 0
        if isinstance(jobs, Sequence):
            for job in jobs:
                self._admit(job)

    def _admit(self, job: Job) -> None:
        if self._goes_to_device(job):
            self._device_jobs.add(job)
        self._kernels[job] = None if job in self._device_jobs else find_job_kernel(job)
        self._check_fits(job)
        self._jobs.append(job)

    def _goes_to_device(self, job: Job) -> bool:
        """Return whether a job is updated on the device, by the share of all elements that are."""
        if self._store.device_updates is None or not self._element_wise:
            return False
        self._num_elements += job.num_elements
        wanted = self._num_on_device + job.num_elements <= self._store.device_share * self._num_elements
        self._num_on_device += job.num_elements if wanted else 0
        return wanted

    @property
    def largest_lease_nbytes(self) -> int:
        """Return the bytes of staging that the largest chunk takes; 0 if nothing is on nvme."""
        return max((self._lease_nbytes(job, self._chunk_elements(job)) for job in self._jobs), default=0)

    def begin(self) -> None:
        """From now on, whoever looks at one of the parameters waits for its update."""
        for job in self._jobs:
            job.record.update = job.update
            job.record.update_count += 1

    def start(self) -> None:
        """Run it in the background, as far as nobody could see it half done; or now, if that would hide nothing."""
        with self._store.meter.phase(Phase.STEP):
            if self._may_overlap():
                self._store.settle_memory(again=True)
            for job in sorted(self._jobs, key=lambda job: job.position):
                job.show_next_state()
            self.begin()
            if not self._may_overlap():
                self._make_room()
                self.run()
            else:
                in_sight = [job.record for job in self._jobs if not job.may_outlive_step]  # before a thread holds them
                self._store.updates.submit(self.run)
                for record in in_sight:
                    self._store.check_usable(record)  # waits
            self._store.sample_memory()
            self._store.settle_memory()

    def _may_overlap(self) -> bool:
        """Return whether it may go on while compute does, and has bytes to move meanwhile, or other processors to run on."""
        moves_bytes = self._store.device is not None or any(job.staged_slots for job in self._jobs)
        return self._store.config.overlap_step and self._element_wise and moves_bytes and self.fits_beside_compute

    def _make_room(self) -> None:
        """Let what allocates do so within what is promised: in place of the arena, if there is no other room.

        Plans do not know the optimizer: if that is not enough, more is promised from now on.
        """
        store, held = self._store, self._held_nbytes
        if store.device is not None:  # updates run in host memory
            return
        whole = 2 * max((job.temporary_nbytes * self._chunk_elements(job) for job in self._jobs), default=0)
        if self._element_wise and held + store.arena.nbytes + whole <= store.ram.promised:
            self._is_cut = False  # pieces would be cut elsewhere between threads, at which some kernels round otherwise
            return
        needed = max((self._temporary_nbytes(job) for job in self._jobs if self._kernels[job] is None), default=0)
        if needed > 0 and held + store.arena.nbytes + needed > store.ram.promised:
            if store.arena.taken_nbytes == 0:
                store.arena.drop()
            store.ram.promise_at_least(held + store.arena.nbytes + needed)

    @property
    def _held_nbytes(self) -> int:
        """Return what the device tier holds between runs of graphs, beside the arena."""
        return self._store.nbytes_on(Tier.DEVICE) + self._store.open_forwards.nbytes_beside()

    def _temporary_nbytes(self, job: Job) -> int:
        """Return what an update allocates at most, with what the system's allocator makes of it."""
        nbytes = job.temporary_nbytes * job.num_elements
        return min(UPDATE_NBYTES, 2 * nbytes) if self._element_wise else nbytes + nbytes // _ROUNDED

    @property
    def fits_beside_compute(self) -> bool:
        """Return whether what it allocates is counted with what compute takes; kernels allocate nothing."""
        return self._store.updates.may_allocate or all(self._kernels[job] is not None for job in self._jobs)

    def run(self) -> None:
        """Update every parameter. An error on the way fails the store, half updates torn."""
        pending: deque[Chunk] = deque()
        try:
            for job in self._source:
                if job is None:
                    self._update_all(pending)
                    continue
                if job not in self._kernels:
                    self._admit(job)
                for start in range(0, job.num_elements, self._chunk_elements(job)):
                    stop = min(job.num_elements, start + self._chunk_elements(job))
                    if len(pending) >= _READ_AHEAD:
                        self._update(pending.popleft())
                    pending.append(self._read(job, start, stop, pending))
                if job.num_elements == 0:
                    self._complete_when_home(job)
            self._update_all(pending)
            writes = [write for job in self._jobs for write in job.writes]
            self._store.transfers.wait(writes, "optimizer state on its way home")
        except BaseException as error:  # an error of the user's optimizer too: nothing may stay in flight
            if not isinstance(self._source, Sequence):
                self._jobs += self._source.end()
            self._abandon(pending)
            begun = [job.record for job in self._jobs if job.is_begun]
            if begun or isinstance(error, StoreError):
                self._store.fail(error, updated=[record for record in begun if not record.torn])
            self._let_go()
            raise
        finally:
            for job in self._jobs:  # writes hold the job by their callbacks, and it a gradient that is to be let go
                job.writes.clear()

    def _complete_when_home(self, job: Job) -> None:
        """Let go whoever waits for a parameter once its last write is done."""
        job.is_updated = True

        def complete(error: BaseException | None) -> None:
            job.record.torn = error is not None
            if error is None:
                job.update.set_result(None)
            else:
                job.update.set_exception(error)

        call_when_done(job.writes, complete)

    def _abandon(self, pending: deque[Chunk]) -> None:
        """Wait for what is in flight, and mark what was begun and will not be ended."""
        while pending:
            self._return(pending.popleft())
        for job in self._jobs:
            for write in job.writes:
                write.exception()  # waits
            if not job.is_updated:
                job.record.torn = job.is_begun

    def _let_go(self) -> None:
        """Wake whoever waits for a parameter that will not be updated."""
        for job in self._jobs:
            if not job.is_updated:
                job.update.set_exception(StoreError(f"the update of '{job.record.name}' was given up after an error"))

    def _chunk_elements(self, job: Job) -> int:
        if not self._element_wise:
            return max(1, job.num_elements)
        wanted = self._store.chunk_elements
        slots = job.staged_slots
        if not slots:  # a kernel allocates nothing per element, and shares what it gets among its threads
            return wanted if self._kernels.get(job) is None else max(1, job.num_elements)
        per_element = sum(slot.tensor.dtype.itemsize for slot in slots.values())
        fitting = self._store.staging.capacity // per_element
        return min(wanted, max(ALIGN, fitting - fitting % ALIGN))

    def _check_fits(self, job: Job) -> None:
        needed = self._lease_nbytes(job, min(job.num_elements, self._chunk_elements(job)))
        self._check_temporaries(job)
        if needed > self._store.staging.capacity:
            why = "" if self._element_wise else f", because {type(job.optimizer).__name__} needs whole tensors"
            raise CapacityError(
                f"updating '{job.record.name}' needs {format_bytes(needed)} of staging at once{why}; host_memory leaves "
                f"{format_bytes(self._store.staging.capacity)}; raise host_memory to {-(-2 * needed // 2**20)}MiB"
            )

    def _check_temporaries(self, job: Job) -> None:
        if self._element_wise or self._store.device is not None:
            return
        held, needed, budget = self._held_nbytes, self._temporary_nbytes(job), self._store.ram.budget
        if held + needed > budget:
            homes = self._store.placements.values()
            everything = sum(placement.nbytes_on(tier) for placement in homes for tier in Tier)
            raise CapacityError(
                f"{type(job.optimizer).__name__} needs whole tensors, and {format_bytes(needed)} to update "
                f"'{job.record.name}', beside {format_bytes(held)} that are on device; device_memory leaves "
                f"{format_bytes(budget)}; use an optimizer that updates element by element, such as AdamW, or raise "
                f"device_memory to {-(-(everything + needed) // 2**20)}MiB, beside which all parameters can reside"
            )

    @staticmethod
    def _lease_nbytes(job: Job, num_elements: int) -> int:
        return sum(whole_sectors(num_elements * slot.tensor.dtype.itemsize) for slot in job.staged_slots.values())

    def _lease(self, nbytes: int, pending: deque[Chunk]) -> StagingBuffer:
        """Lease room for a chunk; as long as there is none, update what has been read, which would else never give any."""
        while True:
            lease = self._store.staging.try_lease(nbytes)
            if lease is not None:
                return lease
            if not pending:
                break
            self._update(pending.popleft())
        return self._store.transfers.lease(nbytes, "optimizer state on its way home")

    def _update_all(self, pending: deque[Chunk]) -> None:
        while pending:
            self._update(pending.popleft())

    def _read(self, job: Job, start: int, stop: int, pending: deque[Chunk]) -> Chunk:
        chunk = Chunk(job=job, start=start, stop=stop, lease=None, views={}, reads=[])
        nbytes = self._lease_nbytes(job, stop - start)
        if nbytes == 0:
            return chunk
        chunk.lease = self._lease(nbytes, pending)
        cursor = 0
        for role, slot in job.staged_slots.items():
            offset, padded = slot.byte_range(start, stop)
            chunk.views[role] = chunk.lease.view[cursor : cursor + padded]
            cursor += padded
            if role in (MASTER, GRADIENT) or role in job.kept_states:
                chunk.reads += self._store.transfers.read(slot, offset, chunk.views[role])
        return chunk

    def _update(self, chunk: Chunk) -> None:
        job, record, transfers = chunk.job, chunk.job.record, self._store.transfers
        try:
            transfers.wait(chunk.reads, "optimizer state on its way in")
            on_device = job in self._device_jobs
            if on_device:
                self._make_device_room(chunk)  # a refusal leaves everything as it was
            job.is_begun = record.torn = True
            with self._store.meter.updating(record.name):
                back = self._update_on_device(chunk) if on_device else self._compute(chunk)
            if self._kernels[job] is None:  # which would have allocated nothing
                self._store.sample_memory()
        except BaseException:
            self._return(chunk)
            raise
        writes: list[Future[None]] = []
        for role, slot in job.staged_slots.items():
            if role != GRADIENT:
                offset, _ = slot.byte_range(chunk.start, chunk.stop)
                write = partial(transfers.write, slot, offset, chunk.views[role])
                writes += [then_start(back[role], write)] if role in back else write()
        writes += (done for role, done in back.items() if role not in job.staged_slots)
        job.writes += writes
        if chunk.lease is not None:
            return_when_done(self._store.staging, chunk.lease, writes)
        if chunk.stop == job.num_elements:
            self._complete_when_home(job)

    def _make_device_room(self, chunk: Chunk) -> None:
        record = chunk.job.record
        slots = [record.master, *record.states.values(), *([record.compute] if record.has_compute_copy else [])]
        dtypes = [*(slot.tensor.dtype for slot in slots), chunk.job.grad.dtype]
        assert self._store.device_updates is not None
        self._store.device_updates.make_room([dtype.itemsize * (chunk.stop - chunk.start) for dtype in dtypes])

    def _update_on_device(self, chunk: Chunk) -> Mapping[str, Future[None]]:
        """Tell the device to update a chunk whose reads are done; return what is done when each role has come back."""
        job, record = chunk.job, chunk.job.record
        host = {role: chunk.tensor(role, slot) for role, slot in {MASTER: record.master, **record.states}.items()}
        if record.has_compute_copy:
            host[COMPUTE] = chunk.tensor(COMPUTE, record.compute)
        written = tuple(host)
        host[GRADIENT] = chunk.raw_gradient()

        def update(there: Mapping[str, Tensor]) -> None:
            for operation in job.deferred:
                operation(there[GRADIENT])
            states = {key: there[key] for key in record.states}
            part = Part(master=there[MASTER], gradient=there[GRADIENT], states=states, compute=there.get(COMPUTE))
            update_part(job, part, shape=None)

        assert self._store.device_updates is not None
        return self._store.device_updates.run(record.name, host, {MASTER, GRADIENT, *job.kept_states}, written, update)

    def _compute(self, chunk: Chunk) -> Mapping[str, Future[None]]:
        """Run the user's optimizer on a chunk whose reads are done. Nothing has to come back."""
        job, record = chunk.job, chunk.job.record
        part = Part(
            master=chunk.tensor(MASTER, record.master),
            gradient=chunk.gradient(),
            states={key: chunk.tensor(key, slot) for key, slot in record.states.items()},
            compute=chunk.tensor(COMPUTE, record.compute) if record.has_compute_copy else None,
        )
        kernel = self._kernels[job]
        if kernel is not None:
            state = {**copied(job.scalars), **part.states}
            kernel.update(job.group, state, part.master, part.gradient, part.compute, num_threads=self._num_threads)
        elif self._element_wise:
            num_elements = chunk.stop - chunk.start
            piece = (self._is_cut and piece_elements(_PIECE_NBYTES, job.temporary_nbytes)) or num_elements
            for start in range(0, num_elements, piece):
                update_part(job, part.cut(start, min(start + piece, num_elements)), shape=None)
        else:
            self._show_state(job, update_part(job, part, shape=record.master.tensor.shape))
        return {}

    def _show_state(self, job: Job, new_state: dict[str, Any]) -> None:
        """Let ``optimizer.state`` show the state of a whole tensor. What has no slot yet gets one at the next step."""
        if new_state:
            state = job.optimizer.state[job.record.parameter]
            for key, value in new_state.items():
                slot = job.record.states.get(key)
                state[key] = value if slot is None else HomeTensor.show(slot, job.record)

    def _return(self, chunk: Chunk) -> None:
        for read in chunk.reads:
            read.exception()  # waits: the buffer must not be reused under a read
        if chunk.lease is not None:
            self._store.staging.return_(chunk.lease)
            chunk.lease = None
