"""The step inside backward: a parameter is updated as soon as its gradient is complete, and the gradient never rests.

Which optimizer steps a parameter is known from its first ``step()``. That is an ordinary one, and whatever cannot be
honoured is refused there, before anything was updated: looking at gradients, as clipping and GradScaler do, and
accumulation. From the second backward on::

    a gradient arrives      it is copied into staging, and a job for it goes to the update thread
    optimizer.step()        checks that nothing changed in between, and closes the step
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.errors import UnsupportedError
from zinf_compile.runtime.element_wise import is_same_value
from zinf_compile.runtime.home import HomeParameter
from zinf_compile.runtime.nvme.engine import whole_sectors
from zinf_compile.runtime.optimizer import StreamedStep
from zinf_compile.runtime.shadow import is_element_wise
from zinf_compile.runtime.slots import StoredParameter, record_of
from zinf_compile.runtime.staging import StagingBuffer
from zinf_compile.runtime.step_jobs import Group, Job, JobCollector
from zinf_compile.runtime.store import Store

_IDLE_SECONDS = 0.2  # how long the update thread waits for the next gradient before it ends its run


class JobFeed:
    """Jobs handed to the update thread as they come. It ends by itself when none has come for a while."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # guards what follows
        self._jobs: deque[Job] = deque()
        self._is_ended = False

    def put(self, job: Job) -> bool:
        """Append a job; return False if the feed has ended, and nobody would do it."""
        with self._condition:
            if not self._is_ended:
                self._jobs.append(job)
                self._condition.notify()
            return not self._is_ended

    def end_when_done(self) -> None:
        """Let it end after the jobs there are."""
        with self._condition:
            self._is_ended = True
            self._condition.notify()

    def end(self) -> Sequence[Job]:
        """Take no more, and return those that nobody has taken."""
        self.end_when_done()
        with self._condition:
            left = list(self._jobs)
            self._jobs.clear()
        return left

    def __iter__(self) -> Iterator[Job | None]:
        """Yield jobs; None where the next has not come yet, so that what was begun is done first."""
        while True:
            with self._condition:
                job = self._jobs.popleft() if self._jobs else None
            yield job
            if job is None:
                with self._condition:
                    self._condition.wait_for(lambda: self._jobs or self._is_ended, _IDLE_SECONDS)
                    if not self._jobs:
                        self._is_ended = True
                        return


class BackwardStep:
    """What updates the parameters of one store inside backward."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._steppers: dict[int, tuple[weakref.ref[Optimizer], Group]] = {}  # by parameter id
        self._collectors: dict[int, JobCollector] = {}  # of the steps that are open, by the id of the optimizer
        self._feed = JobFeed()
        self._feed.end_when_done()
        self._condition = threading.Condition()  # guards what follows
        self._queued_nbytes = 0  # of gradients copied into staging
        self._in_chunks = 0  # the most that the chunks of one of them take

    def take(self, record: StoredParameter, grad: Tensor) -> bool:
        """Update a parameter from its complete gradient; return False if it is not known yet which optimizer steps it."""
        owner, group = self._steppers.get(record.param, (None, None))
        optimizer = owner() if owner is not None else None
        if optimizer is None or group is None:
            return False
        if record.is_updated_early:
            raise UnsupportedError(
                f"a second gradient of '{record.name}' arrived before optimizer.step(), which with step_in_backward has "
                "already updated it: gradients cannot be accumulated so, nor come from several graphs; say "
                "step_in_backward=False"
            )
        store, dtype = record.store, record.dtype
        if id(optimizer) not in self._collectors:
            self._collectors[id(optimizer)] = JobCollector(store, optimizer)
        with torch.no_grad():
            job = self._collectors[id(optimizer)].collect_one(record, grad.to(dtype), group)
            job.show_next_state()
            step = StreamedStep(store, [job], element_wise=True)
            nbytes = whole_sectors(grad.numel() * dtype.itemsize)
            in_chunks = step.largest_lease_nbytes
            record.is_updated_early = True
            step.begin()
            has_room = step.fits_beside_compute and nbytes + in_chunks <= store.staging.capacity
            if not has_room or (in_chunks == 0 and store.device is None):
                if in_chunks > 0:
                    self._wait_for_others(store, job)
                job.grad = job.grad.cpu()
                step.run()  # nothing to wait for, or no room for a copy or for what it allocates
            else:
                self._hand_over(store, job, nbytes, in_chunks)
        return True

    def _wait_for_others(self, store: Store, job: Job) -> None:
        """Wait until all that was handed over is updated.

        Copies give back their room only then, for which there must be room for their chunks: who asks for more than copies
        leave stands in line before these, and neither would get any.
        """
        with self._condition:
            if self._queued_nbytes > 0:
                with store.meter.stall(f"room to update {job.record.name}"):
                    self._condition.wait_for(lambda: self._queued_nbytes == 0)

    def _hand_over(self, store: Store, job: Job, nbytes: int, in_chunks: int) -> None:
        with self._condition:

            def has_room() -> bool:
                # Copies give back their room only when they are updated, for which there must be room for their chunks.
                in_all = self._queued_nbytes + nbytes + max(self._in_chunks, in_chunks)
                return self._queued_nbytes == 0 or in_all <= store.staging.capacity

            if not has_room():
                with store.meter.stall(f"room for the gradient of {job.record.name}"):
                    self._condition.wait_for(has_room)
            self._in_chunks = max(self._in_chunks, in_chunks) if self._queued_nbytes else in_chunks
            self._queued_nbytes += nbytes
        lease = store.transfers.lease(nbytes, f"room for the gradient of {job.record.name}")
        copy = torch.frombuffer(lease.view, dtype=job.grad.dtype, count=job.num_elements)
        store.transfers.copy_out(job.grad.detach().reshape(-1), copy, job.record.name)
        job.grad = copy
        job.update.add_done_callback(partial(self._give_back, store, job, lease))
        if not self._feed.put(job):
            self._feed = JobFeed()
            self._feed.put(job)
            store.updates.submit(StreamedStep(store, self._feed, element_wise=True).run)

    def _give_back(self, store: Store, job: Job, lease: StagingBuffer, _: object) -> None:
        job.grad = torch.empty(0)  # who still knows of the job would keep the memory, which the pool takes for free
        store.staging.return_(lease)
        with self._condition:
            self._queued_nbytes -= lease.reserved_nbytes
            self._condition.notify_all()

    def close(self, optimizer: Optimizer) -> None:
        """End the step of an optimizer.

        UnsupportedError if what it was made with is no longer what the optimizer says, or if that needs whole tensors.
        """
        self.flush()
        if not is_element_wise(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} does not update element by element, which step_in_backward needs; say "
                "step_in_backward=False, or use AdamW"
            )
        if (store := self._store()) is not None:
            store.settle_memory(again=True)
        collector = self._collectors.pop(id(optimizer), None)
        changed = set()
        for group in optimizer.param_groups:
            if collector is not None:
                changed |= _changed_options(collector, group)
            for parameter in group["params"]:
                record = record_of(parameter)
                if record is None or record.store is not self._store():
                    continue
                if record.is_updated_early:
                    record.is_updated_early = False
                    if record.is_aliased or not isinstance(parameter, HomeParameter):
                        record.store.check_usable(record)  # waits
                self._steppers[record.param] = (weakref.ref(optimizer), group)
        if changed:
            raise UnsupportedError(
                f"{', '.join(sorted(changed))} of {type(optimizer).__name__} changed between backward() and step(), and "
                "with step_in_backward the update is made in backward; change it after step(), or say step_in_backward=False"
            )

    def flush(self) -> None:
        """Let the update thread end its run when it has done what it was given."""
        self._feed.end_when_done()

    def forget(self) -> None:
        """Forget the step that is open: every parameter has got another value."""
        self._collectors.clear()


def _changed_options(collector: JobCollector, group: Group) -> set[str]:
    """Return the names of a group's options that are not what they were when its first gradient came."""
    was = collector.options_of(group)
    return {key for key, value in group.items() if key != "params" and not is_same_value(value, was.get(key))}
