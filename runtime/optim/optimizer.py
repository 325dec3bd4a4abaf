"""The streamed step: the user's own optimizer, chunk by chunk, from and to the store.

Each chunk of a parameter is read into staging memory, updated by a shadow of the user's optimizer, and written back,
while the next chunks are read and the last ones written. ``step_hooks`` decides when; ``step_jobs`` says what.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from zinf_compile.ir.copies import COMPUTE, GRADIENT, MASTER, Code, CopyKey, state_key
from zinf_compile.ir.errors import CapacityError, RankError, StoreError, UnsupportedError
from zinf_compile.ir.glossary import Phase, Tier, format_bytes, printable
from zinf_compile.ir.plan import UPDATE_NBYTES
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.optim.background_work import work_of
from zinf_compile.runtime.optim.chunk_reads import ChunkReads
from zinf_compile.runtime.optim.device_chunks import DeviceChunks
from zinf_compile.runtime.optim.fused_adamw import Kernel, update_threads
from zinf_compile.runtime.optim.fused_ops import FusedOps
from zinf_compile.runtime.optim.owners import (
    OwnedUpdate,
    check_updates_alike,
    deal_out,
    load_of,
    share_ledger,
    update_round,
)
from zinf_compile.runtime.optim.step_chunks import (
    Chunk,
    Operands,
    copied,
    decoding,
    elements_at_once,
    find_job_kernel,
    number_of,
    seed_of,
    update_slice,
)
from zinf_compile.runtime.optim.step_jobs import (
    Job,
    drop_state,
    has_slot,
    in_gather_order,
    is_held,
    is_plain,
    state_slot,
    take_state_home,
)
from zinf_compile.runtime.optim.temporaries import piece_elements
from zinf_compile.runtime.params.home import HomeTensor
from zinf_compile.runtime.process.failure import describe_error
from zinf_compile.runtime.process.interrupts import check_interrupt
from zinf_compile.runtime.process.waiting import wait_future
from zinf_compile.runtime.storage.futures import call_when_done, then_start
from zinf_compile.runtime.storage.staging import StagingBuffer
from zinf_compile.runtime.store.store import Store
from zinf_compile.runtime.transfer.link import EnqueuedCopy

_ROUNDED = 8  # one part in so many of a whole tensor's temporaries is lost to rounding up
_PIECE_NBYTES = UPDATE_NBYTES // 2  # of temporaries at once: the system's allocator holds more than that
_READ_AHEAD = 3  # chunks read or being read: an update that shares its cores must not leave the disk idle
# A kernel, which allocates nothing, gets 4 planned chunks at once if staging has room for 4 times as many: that costs less
# Python and fewer threads, 0.44 s of a step of 6.3 s on 2 cores. Not where a copy of a gradient not at home needs it.
_PLANNED_AT_ONCE, _IN_FLIGHT = 4, 4
_log = logging.getLogger(__name__)


class JobSource(Protocol):
    """Jobs that arrive while others run."""

    def __iter__(self) -> Iterator[Job | None]:
        """Yield jobs; None if the next has not come yet."""

    def end(self) -> Sequence[Job]:
        """Accept no more jobs, and return those that were not started."""


class StreamedStep:
    """One step of one optimizer over parameters of one store."""

    def __init__(self, store: Store, jobs: Sequence[Job] | JobSource, *, element_wise: bool) -> None:
        """Take over ``jobs``; CapacityError if staging cannot hold a chunk of one. Nothing is in flight before ``run``."""
        self._store = store
        self._source = jobs
        self._element_wise = element_wise
        self._has_owners = not (element_wise or store.ranks.is_alone)  # a rank updates the whole tensors of all ranks
        # Asked of the calling thread: the update thread has one.
        self._num_threads = update_threads(unified=store.device.memory.unified)
        self._is_shown = False  # whether optimizer.state shows the state after the step
        self._is_cut = True  # chunks are updated in pieces where the update allocates
        self._jobs: list[Job] = []
        self._reads = ChunkReads(store, apart=not (element_wise or self._has_owners))
        self._kernels: dict[Job, Kernel | None] = {}
        self._on_device: dict[Job, DeviceChunks] = {}  # from the first chunk of a job to its last
        # The last copies of jobs that are not staged, until they are among their writes: all chunks leave on one stream.
        self._left: dict[Job, EnqueuedCopy] = {}
        self._fused_ops = FusedOps(store.device)
        self._new_states: list[tuple[Job, str]] = []  # of whole tensors, by key: not home yet
        self._beginning: list[Job] = []  # updates that have begun work in the background, whose copies are not home yet
        self._num_elements = self._num_on_device = 0
        if isinstance(jobs, Sequence):
            for job in jobs:
                self._admit(job)

    def _admit(self, job: Job) -> None:
        if self._goes_to_device(job):
            job.update_on_device(self._store.device.compute.record())
        self._kernels[job] = None if job.is_on_device or job.reloaded else find_job_kernel(job)
        self._check_fits(job)
        self._jobs.append(job)

    def _goes_to_device(self, job: Job) -> bool:
        """Return whether a job is updated on the device: where its state lives, or by the share of all others that are."""
        if self._store.device.memory.unified or not self._element_wise or job.changes_gradient:
            return False
        ahead = self._store.updates_ahead
        if job.has_device_state or job.reloaded or (ahead is not None and ahead.covers(job.record, job.real_optimizer)):
            return True
        if not self._store.device_share:
            return False
        self._num_elements += job.num_elements
        wanted = self._num_on_device + job.num_elements <= self._store.device_share * self._num_elements
        self._num_on_device += job.num_elements if wanted else 0
        return wanted

    def add(self, jobs: Sequence[Job]) -> None:
        """Take over further jobs; each has its place in the order of gathers."""
        assert isinstance(self._source, Sequence)
        for job in jobs:
            self._admit(job)
        if jobs:
            self._source = self._jobs = in_gather_order(self._store, self._jobs)

    @property
    def largest_lease_nbytes(self) -> int:
        """Return the bytes of staging that the largest chunk takes; 0 if nothing is on nvme."""
        return max((job.lease_nbytes(self._chunk_elements(job)) for job in self._jobs), default=0)

    def begin(self) -> None:
        """Make every access to one of the parameters wait for its update from now on."""
        for job in self._jobs:
            job.record.update.begin(job.update)

    def start(self) -> None:
        """Run it in the background where an unfinished update cannot be observed; or now, if nothing would overlap."""
        with self._store.meter.phase(Phase.STEP):
            if self._may_overlap():
                self._store.held.settle(again=True)
                self._show_next_states()
                self.begin()
                in_sight = [job.record for job in self._jobs if not job.may_outlive_step]  # before a thread holds them
                self._store.updates.submit(self.run)
                for record in in_sight:
                    self._store.finish(record, may_leave=False)
                    self._store.check_usable(record)
            else:
                with self._store.busy("an optimizer step"):
                    if self._has_owners:
                        check_updates_alike(self._store, self._jobs)
                    self.begin()
                    self._make_room()
                    self.run()
                    self._show_next_states()
            self._store.held.sample()
            self._store.held.settle()

    def _show_next_states(self) -> None:
        """Let ``optimizer.state`` show what it is after the step. An error of the step from then on stops the model."""
        self._is_shown = True
        for job in sorted(self._jobs, key=lambda job: job.position):
            job.show_next_state()

    def _may_overlap(self) -> bool:
        """Return whether it may run beside compute, and something overlaps: bytes to move, or a device of its own."""
        moves_bytes = not self._store.device.memory.unified or any(job.staged_slots for job in self._jobs)
        compiles = any(job.is_block_wise for job in self._jobs)
        is_allowed = self._store.config.overlap_step and self._element_wise and not compiles
        return is_allowed and moves_bytes and self.fits_beside_compute

    def _make_room(self) -> None:
        """Make room for temporaries within the promised memory: drop the arena if there is no other room.

        Plans do not know the optimizer: if that is not enough, the promise is raised.
        """
        store, held = self._store, self._held_nbytes
        if not store.device.memory.unified:  # updates on the host allocate host memory, which the arena is no part of
            return
        cut = (job.temporary_nbytes * self._chunk_elements(job) for job in self._jobs if self._allocates(job))
        whole = 2 * max(cut, default=0)
        if self._element_wise and held + store.arena.nbytes + whole <= store.ram.promised:
            self._is_cut = False  # threads would split pieces at other elements, where some kernels round differently
            return
        needed = max((self._temporary_nbytes(job) for job in self._jobs if self._allocates(job)), default=0)
        if needed > 0 and held + store.arena.nbytes + needed > store.ram.promised:
            if store.arena.taken_nbytes == 0:
                store.arena.drop()
            store.ram.promise_at_least(held + store.arena.nbytes + needed)

    @property
    def _held_nbytes(self) -> int:
        """Return the bytes on the device tier between runs of graphs, without the arena."""
        return self._store.held.nbytes_on(Tier.DEVICE) + self._store.open_forwards.nbytes_beside()

    def _temporary_nbytes(self, job: Job) -> int:
        """Return what an update allocates at most, with the overhead of the system's allocator."""
        if self._element_wise and job.is_block_wise:
            return job.temporary_nbytes * min(elements_at_once(job), job.num_elements)
        if self._element_wise:
            return min(UPDATE_NBYTES, 2 * job.temporary_nbytes * job.num_elements)
        nbytes = job.temporary_nbytes * job.record.shape.numel()
        return nbytes + nbytes // _ROUNDED + (job.whole_nbytes if self._has_owners else 0)

    @property
    def fits_beside_compute(self) -> bool:
        """Return whether its temporaries fit beside those of compute; kernels allocate nothing."""
        return self._store.updates.may_allocate or not any(map(self._allocates, self._jobs))

    def _allocates(self, job: Job) -> bool:
        return self._kernels[job] is None and not job.reloaded

    def run(self) -> None:
        """Update every parameter. An error fails the store, and marks parameters with unfinished updates as torn."""
        pending: deque[Chunk] = deque()
        try:
            if self._has_owners:
                self._run_rounds(pending)
            else:
                self._run_chunks(pending)
            writes = [write for job in self._jobs for write in job.writes]
            self._store.io_pool.wait(writes, "optimizer state on its way home")
        except BaseException as error:  # an error of the user's optimizer too: nothing may stay in flight
            if self._has_owners and not isinstance(error, UnsupportedError | RankError):  # which all ranks raise
                self._store.ranks.fail(describe_error(error))
            if not isinstance(self._source, Sequence):
                self._jobs += self._source.end()
            self._abandon(pending, error)
            begun = [job.record for job in self._jobs if job.is_begun]
            if begun or self._is_shown or isinstance(error, StoreError):
                self._store.fail(error, updated=[record for record in begun if not record.update.is_torn])
            self._let_go()
            raise
        finally:
            self._on_device.clear()
            for job in self._jobs:  # callbacks of writes refer to the job, and it to a gradient that should be freed
                job.writes.clear()

    def update_ahead(self) -> None:
        """Update the one parameter ahead of its step, up to the start of the last write; raises what goes wrong.

        Nothing is left in flight after an error, but for writes.
        """
        pending: deque[Chunk] = deque()
        try:
            self._run_chunks(pending)
        except BaseException:
            while pending:
                self._return(pending.popleft())
            raise
        finally:
            self._note_left()

    def _run_chunks(self, pending: deque[Chunk]) -> None:
        for job in self._source:
            if job is None:
                self._update_all(pending)
                continue
            if job not in self._kernels:
                self._admit(job)
            self._store.io_pool.wait(job.after, f"what the update of {job.record.name} follows")
            if job.due.adopts and not self._has_owners:
                self._update_all(pending)  # which gives back all of staging, part of which may be waited for
                self._take_states_home(pending)
                work_of(self._store).prepare(job)
            for part in job.elements.pieces(self._chunk_elements(job)):
                # An interrupt waits for the end of a step that is not in the background; a second one breaks it off.
                check_interrupt(only_if_impatient=True)
                if job.ahead is not None and job.ahead.is_dropped:
                    break
                # New state of whole tensors is in memory until it is home: that of one parameter at a time.
                most = _READ_AHEAD if self._element_wise or (job.kept_states and not job.due.begins) else 1
                while len(pending) >= most:
                    self._update(pending.popleft())
                    self._take_states_home(pending)
                chunk = self._read(job, part, pending)
                if job.is_on_device and not chunk.leases and not pending:  # nothing is read ahead
                    self._update(chunk)
                    self._take_states_home(pending)
                else:
                    pending.append(chunk)
            if job.num_elements == 0:
                self._complete_when_home(job)
        self._update_all(pending)
        self._take_states_home(pending)

    def _run_rounds(self, pending: deque[Chunk]) -> None:
        """Update whole tensors of which each of several ranks has some rows: in rounds, each by its owner."""
        ranks = self._store.ranks
        loads = [load_of(job, ranks) for job in self._jobs]
        for owned in deal_out(loads, ranks.size, self._store.staging.capacity):
            check_interrupt(only_if_impatient=True)
            for number, _ in owned:
                job = self._jobs[number]
                pending.append(self._read(job, job.elements, deque()))
            for chunk in pending:
                self._store.io_pool.wait(chunk.reads, "optimizer state on its way in")
            updates = [OwnedUpdate(self._store, chunk, owner) for chunk, (_, owner) in zip(pending, owned, strict=True)]
            for update, state in zip(updates, update_round(ranks, updates), strict=True):
                self._show_state(update.chunk.job, state)
                self._write_back(pending.popleft(), None)
            with self._store.failing_on_error():
                for update in updates:
                    update.write_new_states()
                self._store.tensor_io.wait_writes()
        ledgers = {id(job.ledger): job.ledger for job in self._jobs if job.ledger is not None}
        for ledger in ledgers.values():
            share_ledger(ranks, ledger)

    def _complete_when_home(self, job: Job) -> None:
        """Wake whoever waits for a parameter once its last write is done."""
        job.is_updated = True
        call_when_done(job.writes, job.end)

    def _abandon(self, pending: deque[Chunk], error: BaseException) -> None:
        """Wait for what is in flight, and mark parameters whose update was begun and will not end as torn by ``error``."""
        while pending:
            self._return(pending.popleft())
        self._note_left()
        for job in self._jobs:
            for write in job.writes:
                wait_future(write, f"a write of {job.record.name}")
            if not job.is_updated:
                if job.is_begun:
                    job.record.update.tear(describe_error(error))
                else:
                    job.record.update.mend()

    def _let_go(self) -> None:
        """Wake whoever waits for a parameter that will not be updated."""
        for job in self._jobs:
            if not job.is_updated:
                job.update.set_exception(StoreError(f"the update of '{job.record.name}' was given up after an error"))

    def _chunk_elements(self, job: Job) -> int:
        if not self._element_wise:
            return max(1, job.num_elements)
        multiple, wanted = job.multiple, self._store.chunk_elements
        if job.is_block_wise:
            return self._block_chunk_elements(job, wanted)
        if not job.staged_slots:  # a kernel allocates nothing per element, and splits a chunk among its threads
            kernel = self._kernels.get(job)
            is_cut = kernel is None or bool(job.deferred)  # which copy the gradient of each chunk
            return max(multiple, wanted - wanted % multiple) if is_cut else max(1, job.num_elements)
        if self._kernels.get(job) is not None and job.home_gradient is not None and not job.deferred:
            room = self._store.staging.capacity * multiple // (_IN_FLIGHT * job.lease_nbytes(multiple))
            wanted = max(wanted, min(_PLANNED_AT_ONCE * wanted, room))
        if self._reads.shares_staging(job):
            wanted //= 2
        fitting = min(wanted, self._store.staging.capacity * multiple // job.lease_nbytes(multiple))
        return max(multiple, fitting - fitting % multiple)

    def _block_chunk_elements(self, job: Job, wanted: int) -> int:
        """Return the elements of a chunk of which all parts have one size, since each size is compiled."""
        multiple, at_once = job.multiple, elements_at_once(job)
        if job.staged_slots:
            wanted = min(wanted, self._store.staging.capacity * multiple // job.lease_nbytes(multiple))
        if wanted >= at_once:
            return wanted - wanted % at_once
        return max(multiple, wanted - wanted % multiple)

    def _check_fits(self, job: Job) -> None:
        needed = job.lease_nbytes(min(job.num_elements, self._chunk_elements(job)))
        self._check_temporaries(job)
        if needed > self._store.staging.capacity:
            why = "" if self._element_wise else f", because {type(job.optimizer).__name__} needs whole tensors"
            raise CapacityError(
                f"updating '{job.record.name}' needs {format_bytes(needed)} of staging at once{why}; host_memory leaves "
                f"{format_bytes(self._store.staging.capacity)}; raise host_memory to {-(-2 * needed // 2**20)}MiB"
            )

    def _check_temporaries(self, job: Job) -> None:
        if self._element_wise or not self._store.device.memory.unified:
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

    def _update_all(self, pending: deque[Chunk]) -> None:
        while pending:
            self._update(pending.popleft())

    def _read(self, job: Job, part: Slice, pending: deque[Chunk]) -> Chunk:
        """Start reading a chunk; while staging has no room, update chunks that have been read, which returns theirs."""
        chunk = Chunk(job=job, slice=part)
        if not job.staged_slots or job.lease_nbytes(part.num_elements) == 0:
            return chunk
        try:
            while pending and not self._reads.try_start(chunk):
                self._update(pending.popleft())
            self._reads.start(chunk)
        except BaseException:
            self._reads.forget_next()
            self._return(chunk)
            raise
        return chunk

    def _update(self, chunk: Chunk) -> None:
        job, record, io_pool = chunk.job, chunk.job.record, self._store.io_pool
        try:
            if chunk.reads:
                io_pool.wait(chunk.reads, "optimizer state on its way in")
            on_device = self._chunks_on_device(job) if job.is_on_device and not job.reloaded else None
            if on_device is not None:
                on_device.make_room(chunk)  # a refusal leaves everything as it was
            job.begin()
            with self._store.meter.updating(record.name):
                back: EnqueuedCopy | None = None
                if on_device is not None:
                    back = on_device.update(chunk)
                elif not job.reloaded:
                    self._compute(chunk)
                elif job.is_on_device:
                    back = self._reload_to_device(chunk)
                else:
                    chunk.reload()
            if not job.is_on_device and self._allocates(job):
                self._store.held.sample()
        except BaseException:
            self._return(chunk)
            raise
        self._write_back(chunk, back)

    def _write_back(self, chunk: Chunk, back: EnqueuedCopy | None) -> None:
        """Start writing what was updated; of what comes back from a device, as soon as it is there."""
        job, io_pool = chunk.job, self._store.io_pool
        if not chunk.leases:
            if back is not None:
                self._left[job] = back
            self._end_chunk(chunk)
            return
        writes: dict[CopyKey, list[Future[None]]] = {}
        try:
            for key in () if job.reloaded else job.staged_slots:
                if key != GRADIENT or job.changes_gradient:
                    offset, nbytes = job.range_written(key, chunk.slice)
                    write = partial(io_pool.write, job.slot_written(key), offset, chunk.views[key][:nbytes])
                    writes[key] = write() if back is None else [then_start([back.done], write)]
        finally:  # reached also when a pool that was shut down refuses a write
            for leased in chunk.leases:
                of_lease = [write for key in leased.keys for write in writes.get(key, [])]
                if back is not None:
                    of_lease.append(back.done)
                job.writes += of_lease
                call_when_done(of_lease, partial(self._return_lease, leased.buffer))
        self._end_chunk(chunk)

    def _return_lease(self, buffer: StagingBuffer, error: BaseException | None) -> None:
        self._reads.return_(buffer)

    def _end_chunk(self, chunk: Chunk) -> None:
        if chunk.slice.stop == chunk.job.elements.stop:
            self._note_left()
            self._on_device.pop(chunk.job, None)
            self._complete_when_home(chunk.job)

    def _note_left(self) -> None:
        """Note what has left the device for homes in memory among the writes of its job."""
        for job, left in self._left.items():
            job.writes.append(left.done)
        self._left.clear()

    def _chunks_on_device(self, job: Job) -> DeviceChunks:
        """Return what updates the chunks of a job on the device."""
        if job not in self._on_device:
            self._on_device[job] = DeviceChunks(self._store, job, self._fused_ops)
        return self._on_device[job]

    def _reload_to_device(self, chunk: Chunk) -> EnqueuedCopy:
        """Enqueue copies to the device of what an update ahead of its step wrote to host memory."""
        job = chunk.job
        assert job.before is not None
        # Hazard: compute enqueued before the step may still read the copies there.
        return self._store.device_updates.copy_there(
            job.record.name,
            {
                key: (chunk.tensor(key, slot), job.reloaded[key].elements(chunk.slice))
                for key, slot in job.home_slots.items()
            },
            before=job.before,
        )

    def _compute(self, chunk: Chunk) -> None:
        """Run the user's optimizer on a chunk whose reads are done, on the host."""
        job, record = chunk.job, chunk.job.record
        operands = Operands(
            slice=chunk.slice,
            master=chunk.low_halves() if job.reads_split else chunk.tensor(MASTER, job.home_slots[MASTER]),
            gradient=chunk.gradient(),
            states={name: chunk.tensor(state_key(name), slot) for name, slot in record.copies.updated_states.items()},
            compute=chunk.tensor(COMPUTE, record.copies.compute) if record.copies.are_two else None,
        )
        # The kernel joins what is split and splits it again by itself.
        is_kernels = job.reads_split and self._kernels[job] is not None
        if (code := self._code_of_kernel(job)) is not None:
            self._update_codes(job, operands, code)
        elif job.coded_states or (job.splits and not is_kernels):
            low_halves = chunk.low_halves() if job.splits else None
            whole = {} if self._element_wise else {"at_once": None}
            for decoded in decoding(job, operands, low_halves, num_threads=self._num_threads, **whole):
                self._update_operands(job, decoded)
        else:
            self._update_operands(job, operands)

    def _code_of_kernel(self, job: Job) -> Code | None:
        """Return the code of a job's state if its kernel decodes and encodes that in its own pass, and there is any."""
        if not job.coded_states or self._kernels[job] is None or job.splits != job.reads_split:
            return None
        states, codes = job.record.copies.states.keys(), {slot.code for slot in job.coded_states.values()}
        is_complete = job.coded_states.keys() == states and len(codes) == 1
        knows_all = (job.kept_states, "step" in job.scalars) in ((frozenset(), False), (states, True))
        code = codes.pop()
        return code if is_complete and knows_all and isinstance(code, Code) else None

    def _update_codes(self, job: Job, operands: Operands, code: Code) -> None:
        kernel, step = self._kernels[job], job.scalars.get("step")
        assert kernel is not None
        kernel.update_coded(
            job.group,
            None if step is None else number_of(step),
            operands.states,
            code,
            operands.master,
            operands.gradient,
            operands.compute,
            first=operands.slice.start,
            seeds={name: seed_of(operands.slice, name, number_of(step)) for name in operands.states},
            num_threads=self._num_threads,
        )

    def _update_operands(self, job: Job, operands: Operands) -> None:
        if self._element_wise:
            self._update_elements(job, operands)
        else:
            self._show_state(job, update_slice(job, operands, shape=job.record.copies.master.tensor.shape))

    def _update_elements(self, job: Job, operands: Operands) -> None:
        """Update a slice element by element: by the kernel, or by the user's optimizer."""
        if (kernel := self._kernels[job]) is not None:
            state = {**copied(job.scalars), **operands.states}
            master, gradient, compute = operands.master, operands.gradient, operands.compute
            kernel.update(job.group, state, master, gradient, compute, num_threads=self._num_threads)
            return
        if job.is_block_wise:
            update_slice(job, operands, shape=None)
            return
        most = (self._is_cut and piece_elements(_PIECE_NBYTES, job.temporary_nbytes)) or operands.slice.length
        for part in operands.slice.pieces(most):
            update_slice(job, operands.part(part), shape=None)

    def _show_state(self, job: Job, new_state: dict[str, Any]) -> None:
        """Let ``optimizer.state`` show the state of a whole tensor, and note what has no slot yet."""
        record = job.record
        if not new_state:
            return
        state = job.real_optimizer.state[record.parameter]
        for key in (job.scalars.keys() | job.kept_states) - new_state.keys():
            state.pop(key, None)
        for method in job.work.adopted:
            # Not their values: an extent is freed only if nobody holds a tensor over it.
            for key in [key for key in state if key.startswith(method.pending_prefix)]:
                del state[key]
                if key in record.copies.states:
                    drop_state(record, key)
        if job.work.begun:
            self._beginning.append(job)
        for key, value in new_state.items():
            slot = record.copies.states.get(key)
            if slot is not None and is_held(value, slot, record):
                state[key] = HomeTensor.show(slot, record)
                continue
            state[key] = value
            if is_plain(value) and value.dim() > 0 and has_slot(record, job.real_optimizer, value.shape):
                self._new_states.append((job, key))

    def _take_states_home(self, pending: deque[Chunk]) -> None:
        """Write new state of whole tensors home, through staging: not while chunks hold some of it."""
        if self._new_states:
            self._update_all(pending)
            for job, key in self._new_states:
                # Hazard: a write of what its slot had before may still go where a new slot of it is.
                self._store.io_pool.wait(job.writes, "optimizer state on its way home")
                optimizer, state = job.real_optimizer, job.real_optimizer.state[job.record.parameter]
                try:
                    state_slot(job.record, optimizer, key, state[key].dtype, state[key].shape)
                except StoreError as error:  # it stays in memory; the next step raises this before anything has changed
                    _log.warning("%s of %s stays in memory: %s", printable(key), printable(job.record.name), error)
                    continue
                take_state_home(job.record, optimizer, state, key)
            self._new_states.clear()
        for job in self._beginning:
            work_of(self._store).begin(job)
        self._beginning.clear()

    def _return(self, chunk: Chunk) -> None:
        for read in chunk.reads:
            wait_future(read, f"a read of {chunk.job.record.name}")  # the buffer must not be reused under it
        for leased in chunk.leases:
            self._store.staging.return_(leased.buffer)
        chunk.leases.clear()
