"""The step inside backward: a parameter is updated as soon as its gradient is complete; the gradient is never stored.

The optimizer of a parameter is known from its first ``step()``, an ordinary one. Whatever is not supported is refused
there, before anything was updated: reading gradients, as clipping and GradScaler do, and accumulation. From the second
backward on::

    a gradient is complete  it is copied to staging, and a job for it is given to the update thread
    optimizer.step()        checks that nothing changed in between, and ends the step
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.optim.element_wise import is_same_value
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.optim.shadow import is_element_wise
from zinf_compile.runtime.optim.step_jobs import Group, Job, JobCollector
from zinf_compile.runtime.params.home import HomeParameter
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.process.waiting import wait_until
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.storage.futures import call_when_done
from zinf_compile.runtime.storage.staging import StagingBuffer
from zinf_compile.runtime.store.store import Store, store_of

_IDLE_SECONDS = 0.2  # how long the update thread waits for the next gradient before it ends its run


class JobFeed:
    """A queue of jobs for the update thread. It ends by itself when no job has come for a while."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # guards what follows
        self._jobs: deque[Job] = deque()
        self._is_ended = False

    def put(self, job: Job) -> bool:
        """Append a job; return False if the feed has ended, so that the job would never run."""
        with self._condition:
            if not self._is_ended:
                self._jobs.append(job)
                self._condition.notify()
            return not self._is_ended

    def end_when_done(self) -> None:
        """End after the jobs that are queued."""
        with self._condition:
            self._is_ended = True
            self._condition.notify()

    def end(self) -> Sequence[Job]:
        """Accept no more jobs, and return those that were not started."""
        self.end_when_done()
        with self._condition:
            left = list(self._jobs)
            self._jobs.clear()
        return left

    def __iter__(self) -> Iterator[Job | None]:
        """Yield jobs; None if the next has not come yet, so that the caller finishes what it has begun."""
        while True:
            with self._condition:
                job = self._jobs.popleft() if self._jobs else None
            yield job
            if job is None:
                with self._condition:
                    is_next = lambda: self._jobs or self._is_ended  # noqa: E731
                    wait_until(self._condition, is_next, "the next gradient", timeout=_IDLE_SECONDS)
                    if not self._jobs:
                        self._is_ended = True
                        return


class BackwardStep:
    """Updates the parameters of one store inside backward."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._steppers: dict[int, weakref.ref[Optimizer]] = {}  # by parameter id
        self._collectors: dict[int, JobCollector] = {}  # of the steps that are open, by the id of the optimizer
        self._open_backwards: set[int] = set()  # by torch's numbers, of those that may update and have not ended
        self._updating_backwards: set[int] = set()  # in which, or in a backward nested in which, an update was made
        self._feed = JobFeed()
        self._feed.end_when_done()
        self._condition = threading.Condition()  # guards what follows
        self._queued_nbytes = 0  # of gradients copied into staging
        self._in_chunks = 0  # of staging, the most that the chunks of one of them take

    def take(self, record: StoredParameter, grad: Tensor, source: Tier) -> bool:
        """Update a parameter from its complete gradient, which is on the device or the host.

        Returns False if it is not known yet which optimizer steps it.
        """
        owner = self._steppers.get(record.param)
        optimizer = owner() if owner is not None else None
        if optimizer is None:
            return False
        if record.update.is_early:
            raise UnsupportedError(
                f"a second gradient of '{record.name}' arrived before optimizer.step(), which with step_in_backward has "
                "already updated it: gradients cannot be accumulated so, nor come from several graphs; say "
                "step_in_backward=False"
            )
        self.note_backward()
        self._updating_backwards |= self._open_backwards
        store, dtype = store_of(record), record.dtype
        if id(optimizer) not in self._collectors:
            self._collectors[id(optimizer)] = JobCollector(store, optimizer, in_backward=True)
        collector = self._collectors[id(optimizer)]
        if not collector.has(record):
            return False
        if not collector.is_element_wise:
            raise _needs_whole_tensors(optimizer)
        with torch.no_grad():
            job = collector.collect_one(record, grad.to(dtype))
            job.show_next_state()
            step = StreamedStep(store, [job], element_wise=True)
            nbytes = whole_sectors(grad.numel() * dtype.itemsize)
            in_chunks = step.largest_lease_nbytes
            record.update.begin_early()
            step.begin()
            has_room = step.fits_beside_compute and nbytes + in_chunks <= store.staging.capacity
            if not has_room or job.is_block_wise or (in_chunks == 0 and store.device.memory.unified):
                if in_chunks > 0 or not store.device.memory.unified:  # one thread at a time updates on a device
                    self._wait_for_others(store, job)
                if source is Tier.DEVICE and not store.device.memory.unified:
                    copy = torch.empty(job.num_elements, dtype=job.grad.dtype, device="cpu")
                    self._copy_out(store, job, copy, source)
                step.run()  # nothing to overlap, or no room for a copy or for temporaries
            else:
                self._hand_over(store, job, nbytes, in_chunks, source)
        return True

    def _wait_for_others(self, store: Store, job: Job) -> None:
        """Wait until all gradients that were handed over are processed.

        Their copies return staging only after their update, whose chunks need staging too. A larger request that is
        queued before those would block them, and itself, for ever.
        """
        with self._condition:
            if self._queued_nbytes > 0:
                what = f"room to update {job.record.name}"
                with store.meter.stall(what):
                    wait_until(self._condition, lambda: self._queued_nbytes == 0, what, gone=store.updates.why_gone)

    def _hand_over(self, store: Store, job: Job, nbytes: int, in_chunks: int, source: Tier) -> None:
        with self._condition:

            def has_room() -> bool:
                # Copies return staging only after their update, whose chunks need staging too.
                in_all = self._queued_nbytes + nbytes + max(self._in_chunks, in_chunks)
                return self._queued_nbytes == 0 or in_all <= store.staging.capacity

            if not has_room():
                what = f"room for the gradient of {job.record.name}"
                with store.meter.stall(what):
                    wait_until(self._condition, has_room, what, gone=store.updates.why_gone)
            self._in_chunks = max(self._in_chunks, in_chunks) if self._queued_nbytes else in_chunks
            self._queued_nbytes += nbytes
        try:
            lease = store.io_pool.lease(nbytes, f"room for the gradient of {job.record.name}")
            with lease.handed_on():
                copy = torch.frombuffer(lease.view, dtype=job.grad.dtype, count=job.num_elements)
                self._copy_out(store, job, copy, source)
        except BaseException:
            self._forget_queued(nbytes)
            raise
        # An update that never began ends while its gradient may still be on its way into the buffer.
        call_when_done([job.update, *job.after], partial(self._give_back, store, job, lease))
        if not self._feed.put(job):
            self._feed = JobFeed()
            self._feed.put(job)
            store.updates.submit(StreamedStep(store, self._feed, element_wise=True).run)

    @staticmethod
    def _copy_out(store: Store, job: Job, copy: Tensor, source: Tier) -> None:
        """Have a job update from a copy of its gradient, once that is there."""
        gradient, job.grad = job.grad, copy
        job.after = store.tensor_io.copy_out(gradient, copy, job.record.name, source)

    def _give_back(self, store: Store, job: Job, lease: StagingBuffer, _: object) -> None:
        job.grad = torch.empty(0)  # a reference to the job must not keep a view of memory that the pool leases again
        store.staging.return_(lease)
        self._forget_queued(lease.reserved_nbytes)

    def _forget_queued(self, nbytes: int) -> None:
        with self._condition:
            self._queued_nbytes -= nbytes
            self._condition.notify_all()

    def close(self, optimizer: Optimizer) -> JobCollector | None:
        """End the step of an optimizer; return the collector of its jobs, if there were any.

        UnsupportedError if its options have changed since the updates were made, or if it needs whole tensors.
        """
        self.flush()
        collector = self._collectors.pop(id(optimizer), None)
        if collector is None and not is_element_wise(optimizer):
            raise _needs_whole_tensors(optimizer)
        if (store := self._store()) is not None:
            store.held.settle(again=True)
        changed = set()
        for index, group in enumerate(optimizer.param_groups):
            if collector is not None:
                changed |= _changed_options(collector, index, group)
            for parameter in group["params"]:
                record = record_of(parameter)
                if record is None or record.store is not self._store():
                    continue
                if record.update.is_early:
                    record.update.end_early()
                    if record.is_aliased or not isinstance(parameter, HomeParameter):
                        record.store.finish(record, may_leave=False)
                        record.store.check_usable(record)
                self._steppers[record.param] = weakref.ref(optimizer)
        if changed:
            raise UnsupportedError(
                f"{', '.join(sorted(changed))} of {type(optimizer).__name__} changed between backward() and step(), and "
                "with step_in_backward the update is made in backward; change it after step(), or say step_in_backward=False"
            )
        return collector

    def note_backward(self) -> None:
        """Remember that the backward that runs now may update parameters, until it has ended without an error.

        Called at a gradient, and where activation checkpointing recomputes a forward: its gradients may come in a nested
        backward, which ends while the outer one may still fail.
        """
        backward = torch._C._current_graph_task_id()
        if backward != -1 and backward not in self._open_backwards:
            self._open_backwards.add(backward)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._open_backwards.discard, backward))

    def find_broken(self) -> Sequence[StoredParameter]:
        """Return the parameters that were updated by a backward that did not end; others were not updated."""
        if not self._open_backwards or torch._C._current_graph_task_id() != -1:
            return ()
        is_broken = not self._open_backwards.isdisjoint(self._updating_backwards)
        self._forget_backwards()
        if not is_broken or (store := self._store()) is None:
            return ()
        return [record for record in store.records.values() if record.update.is_early]

    def flush(self) -> None:
        """Let the update thread end its run after the jobs that are queued."""
        self._feed.end_when_done()

    def forget(self) -> None:
        """Forget the open step: every parameter has a new value."""
        self._collectors.clear()
        self._forget_backwards()

    def _forget_backwards(self) -> None:
        self._open_backwards.clear()
        self._updating_backwards.clear()


def _needs_whole_tensors(optimizer: Optimizer) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} does not update element by element, which step_in_backward needs; say "
        "step_in_backward=False, or use AdamW"
    )


def _changed_options(collector: JobCollector, index: int, group: Group) -> set[str]:
    """Return the names of a group's options that are not what they were when its first gradient came."""
    if index >= len(collector.frozen.param_groups):
        return set()  # added since
    was = collector.options_of(index)
    return {key for key, value in group.items() if key != "params" and not is_same_value(value, was.get(key))}
