"""Updates ahead of ``step()``: they begin in backward, when a gradient is complete, and ``step()`` takes or drops them.

The disk, or the link to a GPU, would rest during backward otherwise, and be late in the next forward. Such an update reads
the old copies and writes *shadows*: other extents of the store file, or, of what lives in host memory beside a GPU, on which
these updates run, other host memory::

    a gradient is complete  as many have arrived as in the last step: a job for it is queued for the update thread
    the update thread       takes the newest; reads the gradient, the master copy and the states; writes their successors
                            to shadows
    optimizer.step()        if all is still as the job assumed, the bytes of copies and shadows are exchanged, and nothing
                            moves but what lives elsewhere; if not, the job is dropped, and the parameter updated as ever
                            what has not begun by then is updated as ever too

Until ``step()`` every look at parameters, states and gradients sees the old values, and an error of an update ahead is
none of the step: it reads and writes again.
"""

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.ir.copies import GRADIENT, CopyKey
from zinf_compile.ir.errors import CapacityError, StoreError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.observe.progress import say
from zinf_compile.runtime.optim.block_wise import is_block_wise
from zinf_compile.runtime.optim.element_wise import is_same_value
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.optim.shadow import copy_scalars, is_element_wise, is_known, is_scaled
from zinf_compile.runtime.optim.step_jobs import Job, JobCollector
from zinf_compile.runtime.params.home import HomeParameter
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.process.waiting import wait_future
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.store.store import Store, store_of

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 64  # steps without updates ahead, where they are dropped again and again


@dataclass(slots=True, kw_only=True, eq=False)
class Begun:
    """One update ahead of its step, and what it assumes."""

    job: Job
    step: StreamedStep
    optimizer: "weakref.ref[Optimizer]"
    shadows: Mapping[CopyKey, Slot]  # by copy; after the exchange they hold the old bytes
    num_looks: int
    num_updates: int
    version: int
    over: "Future[None]" = field(default_factory=Future)  # done when nothing of it is in flight


@dataclass(slots=True, kw_only=True)
class _Habit:
    """What is known of the steps of one optimizer."""

    collector: JobCollector | None = None  # of the step that is open, with the options at its first gradient
    pause: int = 0  # steps to go without updates ahead
    last_pause: int = 0

    def learn(self, *, num_taken: int, num_dropped: int, are_gradients_edited: bool) -> None:
        """Pause after a step that dropped updates, longer each time; as long as gradients are edited, do not begin again."""
        self.collector = None
        if num_dropped:
            self.last_pause = min(_LONGEST_PAUSE, max(1, 2 * self.last_pause))
            self.pause = self.last_pause
        elif num_taken:
            self.last_pause = 0
        elif self.pause:
            self.pause = max(self.pause - 1, 1 if are_gradients_edited else 0)


@dataclass(slots=True, kw_only=True)
class AheadCounts:
    """How many updates ahead of ``step()`` were taken, came too late, and were dropped, and why."""

    num_taken: int = 0
    num_late: int = 0  # queued, and not begun by the time of the step
    dropped: Counter[str] = field(default_factory=Counter)


class UpdatesAhead:
    """Begins the updates of one store in backward."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self.counts = AheadCounts()
        self._planned: dict[str, frozenset[str]] = {}  # parameters, by plan
        self._steppers: dict[int, weakref.ref[Optimizer]] = {}  # by parameter id
        self._habits: weakref.WeakKeyDictionary[Optimizer, _Habit] = weakref.WeakKeyDictionary()
        self._begun: dict[int, Begun] = {}  # by parameter id, until its step
        self._last: dict[int, Future[None]] = {}  # by parameter id: of the last one, which may still write to shadows
        self._shadows: dict[int, dict[CopyKey, Slot]] = {}  # by parameter id
        self._has_room = True  # for further shadows
        self._has_said = False  # that room is made for them, which takes seconds where memory is pinned
        self._lock = threading.Lock()  # guards what follows
        self._queue: deque[Begun] = deque()
        self._is_running = False

    def plan(self, name: str, parameters: frozenset[str]) -> None:
        """See UpdatesAhead in ``records``."""
        self._planned[name] = parameters
        if (store := self._store()) is not None:
            store.tensor_io.keeps_gradients = self.is_planned

    @property
    def is_planned(self) -> bool:
        """Return whether some plan has updates ahead of ``step()``."""
        return any(self._planned.values())

    def covers(self, record: StoredParameter, optimizer: Optimizer) -> bool:
        """Return whether updates of a parameter by an optimizer begin ahead of ``step()``, if nothing is in their way.

        Those that do not after all run on the same processors, so that results are the same.
        """
        is_planned = any(record.name in names for names in self._planned.values())
        return is_planned and len(record.copies.states) > 0 and _may_run_ahead(optimizer)

    # In backward

    def take(self, record: StoredParameter) -> None:
        """See UpdatesAhead in ``records``."""
        if record.param in self._begun:
            self._drop(self._begun.pop(record.param), "more gradients came than in the step before")
        if not record.gradient.may_be_complete or not any(record.name in names for names in self._planned.values()):
            return
        stepper = self._steppers.get(record.param)
        optimizer = None if stepper is None else stepper()
        if optimizer is None or self._habits[optimizer].pause or not self._may_begin(record, optimizer):
            return
        with torch.no_grad():
            self._begin(record, optimizer)

    def _may_begin(self, record: StoredParameter, optimizer: Optimizer) -> bool:
        last, gradient, copies = self._last.get(record.param), record.gradient, record.copies
        return (
            (last is None or last.done())
            and not gradient.deferred
            and gradient.unreduced is None
            and isinstance(record.parameter, HomeParameter)
            and not self._is_aliased(record)
            and not record.update.is_torn
            and copies.is_synced(record.version)
            and all(gather.is_done for gather in record.update.gathers)
            and copies.states_owner is not None
            and copies.states_owner() is optimizer
            and len(copies.states) > 0
            and self._is_worth_it(record)
            and all(_is_shown(optimizer, record, key) for key in copies.states)
        )

    def _is_aliased(self, record: StoredParameter) -> bool:
        """Return whether somebody may write to the copies or to the gradient unseen.

        Beside a GPU the gradient is on its way, and the copy refers to its bytes too. Nobody else does when a gradient
        begins, so that it matters what users got of it since.
        """
        if store_of(record).device.memory.unified:
            return record.is_aliased
        states = record.copies.states.values()
        return (
            record.gradient.was_edited
            or record.copies.master.may_change_unseen
            or any(slot.is_aliased for slot in states)
        )

    def _is_worth_it(self, record: StoredParameter) -> bool:
        """Return whether an update moves bytes to or from the disk; beside a GPU, none, and none to states there."""
        copies = record.copies
        slots = (*copies.all, *copies.states.values())
        if store_of(record).device.memory.unified:
            return any(slot.extent is not None for slot in slots)
        others = (*((copies.master,) if copies.are_two else copies.all), *copies.states.values())
        return all(slot.tier is not Tier.NVME for slot in slots) and not any(slot.on_device for slot in others)

    def _begin(self, record: StoredParameter, optimizer: Optimizer) -> None:
        store, habit = store_of(record), self._habits[optimizer]
        slot = record.gradient.slot
        assert slot is not None
        if habit.collector is None:
            habit.collector = JobCollector(store, optimizer, in_backward=True)
        grad = slot.shown
        if grad is None or not habit.collector.has(record):
            return
        job = habit.collector.collect_one(record, grad)
        shadows = None if job.changes_gradient else self._find_shadows(store, record, job)
        if shadows is None:
            return
        job.update_ahead(shadows, store.tensor_io.writes_of(slot))
        with suppress(CapacityError):  # the step says so
            step = StreamedStep(store, [job], element_wise=True)
            if step.fits_beside_compute:
                begun = Begun(
                    job=job,
                    step=step,
                    optimizer=weakref.ref(optimizer),
                    shadows=shadows,
                    num_looks=record.update.num_looks,
                    num_updates=record.update.count,
                    version=record.version,
                )
                self._begun[record.param], self._last[record.param] = begun, begun.over
                self._enqueue(store, begun)

    def _find_shadows(self, store: Store, record: StoredParameter, job: Job) -> Mapping[CopyKey, Slot] | None:
        """Return the shadows of all that an update writes; None if there is no room for them."""
        shadows = self._shadows.setdefault(record.param, {})
        tier = Tier.NVME if store.device.memory.unified else Tier.HOST
        for key, slot in job.home_slots.items():
            if key == GRADIENT or (key in shadows and shadows[key].dtype == slot.dtype):
                continue
            if not self._has_room or not _is_within(store, slot, tier):
                return None
            if tier is Tier.HOST and not self._has_said:
                self._has_said = True
                say("pinning host memory for updates ahead of step(), once")
            try:
                shadows[key] = store.new_slot(record.name, record.shape, slot.dtype, tier, key, code=slot.code)
            except (CapacityError, StoreError) as error:
                self._has_room = False
                _log.warning("updates do not begin ahead of step(), for which %s has no room: %s", tier, error)
                return None
        return {key: shadow for key, shadow in shadows.items() if key in job.home_slots}

    # On the update thread

    def _enqueue(self, store: Store, begun: Begun) -> None:
        with self._lock:
            self._queue.append(begun)
            is_new, self._is_running = not self._is_running, True
        if is_new:
            store.updates.submit(self._run)

    def _run(self) -> None:
        """Run what is queued. The writes of one update go on while the next one reads."""
        unended: deque[Begun] = deque()
        while True:
            with self._lock:
                begun = self._next()
                self._is_running = begun is not None or bool(unended)
                if begun is not None:
                    begun.job.is_begun = True  # from here on step() takes it
            if begun is not None:
                self._update(begun)
                unended.append(begun)
            if unended and (begun is None or len(unended) > 1):
                self._end(unended.popleft())
            elif begun is None:
                return

    def _next(self) -> Begun | None:
        """Remove from the queue what to begin next: the newest of those whose gradients are home. The lock is held.

        What has not begun by ``step()`` is then of the parameters that the next forward needs last.
        """
        if not self._queue:
            return None
        newest_first = range(len(self._queue) - 1, -1, -1)
        ready = (number for number in newest_first if all(each.done() for each in self._queue[number].job.after))
        number = next(ready, 0)  # the oldest gradient arrives first
        begun = self._queue[number]
        del self._queue[number]
        return begun

    def _update(self, begun: Begun) -> None:
        store = self._store()
        if store is None:  # the model was dropped
            return
        try:
            begun.step.update_ahead()
        except BaseException as error:  # noqa: BLE001  # the step meets it again, if it still needs the update
            self._fail(begun, error)

    def _end(self, begun: Begun) -> None:
        """Wait until nothing of an update is in flight."""
        store, job = self._store(), begun.job
        if store is not None:
            try:
                store.io_pool.wait(job.writes, "optimizer state on its way to shadows")
            except BaseException as error:  # noqa: BLE001
                self._fail(begun, error)
        job.writes.clear()
        begun.over.set_result(None)

    def _fail(self, begun: Begun, error: BaseException) -> None:
        """Let an update have failed: if ``step()`` has taken it, the store has failed."""
        job, store = begun.job, self._store()
        if job.is_updated:  # a callback of its last write notes the error; until then step() could take it
            wait_future(job.update, f"the end of the update of {job.record.name}")
        else:
            job.end(error)
        assert job.ahead is not None
        if job.ahead.is_taken and store is not None:
            store.fail(error)

    # At step()

    def claim(self, optimizer: Optimizer, jobs: JobCollector) -> list[Begun]:
        """Return the updates that a step of an optimizer takes, if they do not fail; drop the others of its parameters."""
        with self._lock:
            late = [begun for begun in self._queue if begun.optimizer() is optimizer]
            self._queue = deque(begun for begun in self._queue if begun.optimizer() is not optimizer)
        for begun in late:
            begun.over.set_result(None)
            self._begun.pop(begun.job.record.param, None)
        self.counts.num_late += len(late)
        store = self._store()
        if not _may_run_ahead(optimizer):
            if store is not None and store.config.speculate:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} is not one of torch's optimizers that update element by element, which "
                    "speculate=True needs; leave out speculate, or use AdamW"
                )
            return []
        habit = self._habits.setdefault(optimizer, _Habit())
        claimed, num_dropped, are_edited = [], 0, False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                record = record_of(parameter)
                if record is None or record.store is not self._store():
                    continue
                self._steppers[record.param] = weakref.ref(optimizer)
                are_edited |= record.gradient.num_arrivals > 0 and not record.gradient.is_untouched
                record.gradient.end_step()
                if record.param not in self._begun:
                    continue
                begun = self._begun.pop(record.param)
                if why := _find_difference(begun, optimizer, habit, jobs):
                    self._drop(begun, why)
                    num_dropped += 1
                else:
                    claimed.append(begun)
        habit.learn(num_taken=len(claimed), num_dropped=num_dropped, are_gradients_edited=are_edited)
        return claimed

    def commit(self, claimed: Sequence[Begun], jobs: JobCollector) -> list[Job]:
        """Let parameters have what was updated ahead; return the jobs that the step has to do yet.

        These update again what has failed, or copy home what was written of copies that live elsewhere than shadows.
        """
        left = []
        for begun in claimed:
            job, record = begun.job, begun.job.record
            assert job.ahead is not None
            to_reload = job.slots_to_reload
            is_reloaded = bool(to_reload)
            if not job.ahead.take(record, is_reloaded=is_reloaded):
                self.counts.dropped["it failed"] += 1
                assert job.home_gradient is not None
                assert job.home_gradient.shown is not None
                left.append(jobs.collect_one(record, job.home_gradient.shown))
                continue
            self.counts.num_taken += 1
            for key in begun.shadows.keys() - to_reload.keys():
                self._exchange(record, key, begun.shadows[key])
            job.note_form()
            job.show_next_state()
            if is_reloaded:
                left.append(job.reload())
            else:
                record.update.begin(job.update)
        return left

    def _exchange(self, record: StoredParameter, key: CopyKey, shadow: Slot) -> None:
        copies, views = record.copies, record.views
        slot = copies.slot_of(key)
        slot.exchange(shadow)
        if slot is copies.master:
            views.move(record.parameter, record.home)
        elif slot.shown is not None:
            views.move(slot.shown, slot.tensor)

    # Dropping

    def drop(self, why: str) -> None:
        """See UpdatesAhead in ``records``."""
        with self._lock:
            for begun in self._queue:
                begun.over.set_result(None)
            self._queue.clear()
        for begun in self._begun.values():
            self._drop(begun, why)
        self._begun.clear()
        for habit in self._habits.values():
            habit.collector = None

    def drop_shadows(self) -> None:
        """See UpdatesAhead in ``records``."""
        store = self._store()
        assert store is not None
        self.drop("a new plan moved the parameters")
        store.synchronize()
        for shadows in self._shadows.values():
            for shadow in shadows.values():
                store.held.count_home(shadow.tier, -shadow.nbytes)
                shadow.give_back(store.layout)
        self._shadows.clear()
        self._last.clear()
        self._has_room = True

    def _drop(self, begun: Begun, why: str) -> None:
        assert begun.job.ahead is not None
        begun.job.ahead.is_dropped = True
        self.counts.dropped[why] += 1


def _find_difference(begun: Begun, optimizer: Optimizer, habit: _Habit, jobs: JobCollector) -> str | None:
    """Return what is not as an update ahead has assumed; None if it is what this step would do."""
    job, record = begun.job, begun.job.record
    gradient, slot = record.gradient, record.gradient.slot
    if begun.optimizer() is not optimizer or habit.collector is None or not jobs.has(record):
        return "another optimizer took the step"
    with torch._C.DisableTorchFunctionSubclass():
        grad = record.parameter.grad
    if slot is None or grad is None or grad is not slot.shown or slot is not job.home_gradient:
        return "the gradient was replaced"
    if not gradient.is_untouched:
        return "the gradient was changed"
    if record.update.num_looks != begun.num_looks or record.version != begun.version:
        return "the parameter or its state was looked at or changed"
    if record.update.count != begun.num_updates or record.update.is_torn:
        return "the parameter was updated meanwhile"
    if is_scaled(optimizer):
        return "a gradient scaler takes the step"
    index = job.place[0]
    if jobs.place_of(record) != job.place or not _are_same_options(jobs.options_of(index), job.group):
        return "options of its group were changed"
    state = optimizer.state.get(record.parameter, {})
    scalars = copy_scalars(state, record.parameter.shape)
    if not is_same_value(scalars, job.scalars) or not all(
        _is_shown(optimizer, record, key) for key in record.copies.states
    ):
        return "the optimizer's state was changed"
    return None


def _are_same_options(now: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    return now.keys() == was.keys() and all(
        is_same_value(value, was[key]) for key, value in now.items() if key != "params"
    )


def _is_shown(optimizer: Optimizer, record: StoredParameter, key: str) -> bool:
    """Return whether an optimizer's state shows a slot, and has not another tensor in its place."""
    shown = record.copies.states[key].shown
    return shown is not None and optimizer.state.get(record.parameter, {}).get(key) is shown


def _is_within(store: Store, slot: Slot, tier: Tier) -> bool:
    """Return whether a slot like another one fits the budget on a tier."""
    if tier is Tier.HOST:
        return store.held.host_peak_nbytes + slot.nbytes <= store.config.host_memory
    budget = store.config.nvme_memory
    return budget is None or store.held.nbytes_on(tier) + slot.nbytes <= budget


def _may_run_ahead(optimizer: Optimizer) -> bool:
    """Return whether it is one of torch's that update element by element. torchao's compile, which is done in ``step()``."""
    return is_known(optimizer) and not is_block_wise(optimizer) and is_element_wise(optimizer)
