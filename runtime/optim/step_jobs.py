"""The jobs of a streamed step (``optimizer.py``): the updates of an optimizer, recorded when ``step()`` is called.

After that the user may change hyperparameters and drop gradients. ``optimizer.state`` shows the state after the step at
once: home tensors, whose readers wait for the update, and step counts and the like, which are computed by updating a
few zeros.
"""

import copy
import itertools
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.ir.copies import (
    COMPUTE,
    GRADIENT,
    LOW_HALVES,
    MASTER,
    Blocks,
    CopyKey,
    chunk_multiple,
    code_of_state,
    low_halves_nbytes,
    state_key,
)
from zinf_compile.ir.errors import ConfigError, StoreError, UnsupportedError
from zinf_compile.ir.glossary import Tier, dtype_name
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.device.cpu import emulates_bfloat16
from zinf_compile.runtime.device.device import Event
from zinf_compile.runtime.optim.block_wise import (
    first_scalars,
    is_block_wise,
    next_scalars,
    states_of,
    temporary_nbytes,
)
from zinf_compile.runtime.optim.bookkeeping import Bookkeeping, Ledger
from zinf_compile.runtime.optim.element_wise import SURPRISES
from zinf_compile.runtime.optim.periodic import (
    Due,
    Streamed,
    Trial,
    find_due,
    is_pending,
    kept_by,
    periodics_of,
)
from zinf_compile.runtime.optim.shadow import (
    Place,
    Shadow,
    StateTensor,
    copy_scalars,
    copy_value,
    freeze,
    is_element_wise,
    is_known,
    probe_state,
    tells_parameters_apart,
    traits_of,
)
from zinf_compile.runtime.optim.temporaries import TemporaryCount, small_shape
from zinf_compile.runtime.params.coded_state import coded_home
from zinf_compile.runtime.params.gradient_state import DeferredOp
from zinf_compile.runtime.params.home import HomeParameter, HomeTensor
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.process.failure import describe_error
from zinf_compile.runtime.process.random_state import keeping_random_state
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.storage.slots import Slot, local_of
from zinf_compile.runtime.storage.state_blocks import blocks_of
from zinf_compile.runtime.store.store import Store, store_of
from zinf_compile.runtime.transfer.tensor_io import TensorIO

Group = dict[str, Any]  # a parameter group of an optimizer, as torch has it


NOTHING_DUE = Due(begins=False, runs=False, adopts=())


class Ahead:
    """Whether ``step()`` takes an update that began before it, and whether the update has ended by then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._is_taken = self._is_ended = self._is_reloaded = False
        self._error: BaseException | None = None
        self.is_dropped = False  # nobody wants it: what is left of it need not run

    @property
    def is_taken(self) -> bool:
        """Return whether ``step()`` has taken it."""
        return self._is_taken

    def take(self, record: StoredParameter, *, is_reloaded: bool) -> bool:
        """Let the parameter have the value that is written, or is being written; return False if that has failed.

        ``is_reloaded``: some of it is read back into memory after that.
        """
        with self._lock:
            self._is_taken, self._is_reloaded = self._error is None and not self.is_dropped, is_reloaded
            if self._is_taken and (is_reloaded or not self._is_ended):
                record.update.tear()
            return self._is_taken

    def end(self, record: StoredParameter, error: BaseException | None) -> None:
        """Note that the update has ended, or failed."""
        with self._lock:
            self._is_ended, self._error = True, error
            if self._is_taken and error is not None:
                record.update.tear(describe_error(error))
            elif self._is_taken and not self._is_reloaded:
                record.update.mend()


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One parameter to update: the options of its group, and the state its optimizer keeps for it."""

    record: StoredParameter
    optimizer: Optimizer  # frozen: as it was
    real_optimizer: Optimizer
    place: Place
    changes_gradient: bool = False  # its update changes the gradient, which is written back
    ledger: Ledger | None = None  # for whole tensors, where what else an update writes is known only afterwards
    grad: Tensor  # its home tensor, or a tensor the user put there
    deferred: tuple[DeferredOp, ...]  # to be applied to the gradient at home first
    group: Mapping[str, Any]
    scalars: dict[str, Any]  # the entries of its state that are not per element, before the update
    kept_states: frozenset[str]  # the per-element ones that it has; the rest of the slots are undefined
    zero_states: frozenset[str] = frozenset()  # of the rest, those that its update gets as zeros
    is_block_wise: bool = False  # by one of torchao's optimizers, which compile it for its number of elements
    position: int  # among the jobs of the step, in the order of the optimizer's parameters
    next_state: Mapping[str, Any] = field(
        default_factory=dict
    )  # after the update, per-element tensors at a probe's shape
    temporary_nbytes: int = 0  # of each element, while it is updated
    due: Due = NOTHING_DUE  # of the work that the optimizer does every few steps
    work: Streamed = field(default_factory=Streamed)
    work_growth: float = 0.0  # bytes that such work takes in the background for each byte that it reads
    update: Future[None] = field(default_factory=Future)  # done when all of it is home
    writes: list[Future[None]] = field(default_factory=list)
    is_begun: bool = False  # some of its elements may have changed
    is_updated: bool = False  # all of them have
    elements: Slice = field(init=False)  # what is updated: all elements that the master copy has, flat
    home_gradient: Slot | None = field(init=False)  # of the gradient; none of a tensor that the user put there
    home_slots: Mapping[CopyKey, Slot] = field(init=False)  # of all that it reads and writes
    staged_slots: Mapping[CopyKey, Slot] = field(init=False)  # those whose chunks pass through staging
    device_slots: Mapping[CopyKey, Slot] = field(default_factory=dict)  # on the device, updated in place there
    is_on_device: bool = False  # updated on the device
    before: Event | None = None  # of the compute stream: what was enqueued before it may still read these slots
    ahead: Ahead | None = None  # of an update that began before its step
    shadows: Mapping[CopyKey, Slot] = field(default_factory=dict)  # written in the place of what is read
    reloaded: Mapping[CopyKey, Slot] = field(default_factory=dict)  # all it does is copy shadows to these
    after: Sequence[Future[None]] = ()  # what is to end before anything is read
    splits: bool = False  # of the master copy it writes what the compute copy lacks
    reads_split: bool = field(init=False)  # and so was the master copy written last

    def __post_init__(self) -> None:
        record = self.record
        self.reads_split = record.copies.master.upper is not None
        self.elements = record.shard.flat
        self.home_gradient = record.gradient.slot if record.gradient.is_home(self.grad) else None
        slots = {MASTER: record.copies.master}
        slots |= {state_key(name): slot for name, slot in record.copies.updated_states.items()}
        if record.copies.are_two:
            slots[COMPUTE] = record.copies.compute
        if self.home_gradient is not None:
            slots[GRADIENT] = self.home_gradient
        self.home_slots = slots
        self.staged_slots = {key: slot for key, slot in slots.items() if not slot.in_memory}

    def update_on_device(self, before: Event) -> None:
        """Update it on the device, behind ``before``; slots that live there are updated in place, but ahead of its step."""
        self.is_on_device, self.before = True, self.before or before
        in_place = {} if self.shadows else self.home_slots
        self.device_slots = {key: slot for key, slot in in_place.items() if slot.on_device}
        self.staged_slots = {key: slot for key, slot in self.staged_slots.items() if key not in self.device_slots}

    def update_ahead(self, shadows: Mapping[CopyKey, Slot], after: Sequence[Future[None]]) -> None:
        """Write what changes to shadows, and leave the old copies as they are; begin once ``after`` is done."""
        self.ahead, self.after = Ahead(), after
        # Of its own: ``step()`` exchanges the bytes of the parameter's slots and shadows while it may still run.
        self.shadows = {key: replace(slot, shown=None) for key, slot in shadows.items()}
        self.home_slots = slots = {key: replace(slot, shown=None) for key, slot in self.home_slots.items()}
        self.staged_slots = {key: slot for key, slot in slots.items() if not shadows.get(key, slot).in_memory}

    def takes_from_staging(self, tensor_io: TensorIO, part: Slice, buffer: memoryview) -> bool:
        """Fill a buffer with a part of its gradient, if it is an update ahead and staging still has what arrived."""
        return (
            self.ahead is not None
            and self.home_gradient is not None
            and not self.record.gradient.was_edited  # perhaps unseen, between its tiles
            and tensor_io.copy_landed(self.home_gradient, part, buffer)
        )

    @property
    def slots_to_reload(self) -> Mapping[CopyKey, Slot]:
        """Return the slots that cannot exchange their bytes with the shadows that its update has written."""
        return {key: slot for key, slot in self.home_slots.items() if not slot.lives_like(self.shadows.get(key, slot))}

    def reload(self) -> "Job":
        """Return the job that copies what this one, ahead of its step, has written elsewhere than home to these homes."""
        reload = copy.copy(self)
        reload.update, reload.writes = Future(), []
        reload.is_begun = reload.is_updated = reload.changes_gradient = False
        reload.splits = reload.reads_split = False
        reload.ahead, reload.shadows, reload.deferred, reload.next_state = None, {}, (), {}
        reload.is_on_device, reload.before = False, None
        reload.after = (self.update,)
        reload.reloaded = self.slots_to_reload
        reload.home_slots = {key: self.shadows[key] for key in reload.reloaded}
        reload.staged_slots = {key: slot for key, slot in reload.home_slots.items() if not slot.in_memory}
        return reload

    def slot_written(self, key: CopyKey) -> Slot:
        """Return where its update writes a copy that passes through staging."""
        return self.shadows.get(key) or self.staged_slots[key]

    def begin(self) -> None:
        """Note that some of its elements may change from now on."""
        self.is_begun = True
        if self.ahead is None:
            self.record.update.tear()
            if not self.reloaded:
                self.note_form()

    def note_form(self) -> None:
        """Note, for whoever reads the master copy, what it writes of it. They wait for its end."""
        copies = self.record.copies
        copies.master.upper = copies.compute if self.splits else None

    def end(self, error: BaseException | None) -> None:
        """Wake whoever waits for the parameter: all of it is home, or the update has failed."""
        update = self.record.update
        if self.ahead is not None:
            self.ahead.end(self.record, error)
        elif error is None:
            update.mend()
        else:
            update.tear(describe_error(error))
        if error is None:
            self.update.set_result(None)
        else:
            self.update.set_exception(error)

    def reads(self, key: CopyKey) -> bool:
        """Return whether its update reads a copy: all but state that is not there yet, and most compute copies."""
        if self.reloaded:
            return True
        if key == COMPUTE:
            return self.reads_split
        return key in (MASTER, GRADIENT) or key.state in self.kept_states

    @property
    def has_device_state(self) -> bool:
        """Return whether some of its optimizer state lives on the device."""
        return any(slot.on_device for slot in self.record.copies.states.values())

    @property
    def num_elements(self) -> int:
        """Return the number of elements to update."""
        return self.elements.num_elements

    def lease_nbytes(self, num_elements: int) -> int:
        """Return the bytes of staging that so many elements of it take."""
        return sum(self.staged_nbytes(key, num_elements) for key in self.staged_slots)

    def staged_nbytes(self, key: CopyKey, num_elements: int) -> int:
        """Return the bytes of staging that so many elements of one of its copies take."""
        if key == MASTER and self.reads_split:
            return low_halves_nbytes(num_elements)
        return self.staged_slots[key].staged_nbytes(num_elements)

    def range_read(self, key: CopyKey, part: Slice) -> tuple[int, int]:
        """Return where in the file a part of a copy is that it reads, and its bytes."""
        slot = self.staged_slots[key]
        if key == MASTER and self.reads_split:
            return slot.low_halves_range(part)
        return slot.byte_range(slot.stored(part))

    def range_written(self, key: CopyKey, part: Slice) -> tuple[int, int]:
        """Return where in the file it writes a part of a copy, and its bytes."""
        slot = self.slot_written(key)
        if key == MASTER and self.splits:
            return slot.low_halves_range(part)
        return slot.byte_range(slot.stored(part))

    @property
    def coded_states(self) -> Mapping[str, Slot]:
        """Return the states that are stored in codes."""
        return {name: slot for name, slot in self.record.copies.states.items() if slot.coded is not None}

    @property
    def multiple(self) -> int:
        """Return of how many elements every part of it but the last is a multiple."""
        slots = self.home_slots.values()
        pages = {slot.coded.code.page_elements for slot in slots if slot.coded is not None}
        if self.splits or self.reads_split:
            pages.add(LOW_HALVES)
        return chunk_multiple(pages, {slot.tensor.dtype.itemsize for slot in slots if slot.coded is None})

    @property
    def whole_nbytes(self) -> int:
        """Return the bytes of all that its update reads and writes of the whole parameter, but for the compute copy."""
        record = self.record
        dtypes = [record.copies.master.tensor.dtype, self.grad.dtype]
        dtypes += [slot.dtype for slot in record.copies.states.values()]
        return record.shape.numel() * sum(dtype.itemsize for dtype in dtypes)

    @property
    def may_outlive_step(self) -> bool:
        """Return whether it may be in flight when ``step()`` returns, since every access to the parameter waits for it."""
        is_watched = isinstance(self.record.parameter, HomeParameter) and not self.record.is_aliased
        return is_watched and self.home_gradient is not None

    def show_next_state(self) -> None:
        """Let ``optimizer.state`` show what it will be after the update."""
        record = self.record
        if self.next_state:
            state, slots = self.real_optimizer.state[record.parameter], record.copies.states
            for key, value in self.next_state.items():
                state[key] = HomeTensor.show(slots[key], record) if key in slots else copy_value(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prediction:
    """The result of an update, found by updating a few zeros."""

    state: dict[str, Any]
    books: Bookkeeping | None  # what else the update writes; None for classes that write nothing else
    temporary_nbytes: int  # of each element


class JobCollector:
    """Collects the jobs of one optimizer step over the parameters of one store."""

    def __init__(self, store: Store, optimizer: Optimizer, *, in_backward: bool = False) -> None:
        """``in_backward``: gradients of all its parameters may still arrive."""
        self._store = store
        self._optimizer = optimizer
        self.known_states = list(optimizer.state)
        self.frozen = freeze(optimizer)
        if not store.device.memory.unified:
            # Plain PyTorch accepts it on a GPU, but some of our updates run on a CPU, where it is refused.
            for group in self.frozen.param_groups:
                if "capturable" in group:
                    group["capturable"] = False
        has_gradient = (lambda parameter: parameter.requires_grad) if in_backward else None
        self.is_element_wise = is_element_wise(optimizer, self.frozen, has_gradient=has_gradient)
        self.is_block_wise = is_block_wise(optimizer)
        if self.is_block_wise:
            _check_block_wise(store, optimizer)
        if self.is_block_wise or not self.is_element_wise:
            _refuse_distributed(optimizer)
        if (code := store.config.state_dtype) is not None and not self.is_element_wise:
            raise UnsupportedError(
                f"state_dtype='{code}' encodes the state of optimizers that update element by element, and "
                f"{type(optimizer).__name__} gets whole tensors; leave state_dtype out, or use AdamW"
            )
        methods = periodics_of(optimizer).values()
        stale = next((method for method in methods if method.numbers(optimizer)[1] > 0), None)
        if stale is not None and not store.ranks.is_alone:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.{stale.name}() runs in the background, with a staleness of "
                f"{stale.numbers(optimizer)[1]}, which is for one process, and these are {store.ranks.mesh_size} ranks; use "
                "staleness=0"
            )
        self.ledger = Ledger(type(optimizer).__name__)
        self._places: dict[int, Place] = {
            id(parameter): (index, position)
            for index, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
        }
        self._positions = itertools.count()
        self._predicted: dict[object, _Prediction] = {}
        # Of whole tensors: temporary bytes of an element, and the growth of a Trial.
        self._counted: dict[object, tuple[int, float]] = {}
        self._probed: dict[tuple[object, torch.dtype, frozenset[str]], tuple[StateTensor, ...]] = {}

    def collect(self, *, but: Container[StoredParameter] = ()) -> list[Job]:
        """Return a job for every parameter with a gradient: first those that ``step()`` waits for, then in gather order.

        ``but`` for those that are updated otherwise.
        """
        if traits_of(self._optimizer).draws and not self._store.ranks.is_alone:
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} draws random numbers in its step, and each of "
                f"{self._store.ranks.mesh_size} ranks, which update different parameters, has its own; use an optimizer "
                "that draws none, such as AdamW"
            )
        self._store.follow_compute()  # updates on the device come behind what the caller's stream has so far
        self._store.finish_gradients()  # of a backward that was broken off
        wanted: list[tuple[StoredParameter, Tensor]] = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                record = record_of(parameter)
                if record is not None and record.store is self._store and record not in but:
                    self._store.check_usable(record)
                    if (grad := parameter.grad) is not None:
                        _check_whole(record, grad)
                        wanted.append((record, _as_plain_unless_own(record, grad)))
                        self._copy_states_of_others(record)
        jobs = [self.collect_one(record, grad) for record, grad in wanted]
        if not self.is_element_wise:
            return jobs  # none is in flight when step() returns, and random numbers are drawn in this order
        return in_gather_order(self._store, jobs)

    def has(self, record: StoredParameter) -> bool:
        """Return whether the optimizer has a parameter."""
        return id(record.parameter) in self._places

    def place_of(self, record: StoredParameter) -> Place:
        """Return the group of a parameter that the optimizer has, and its position there."""
        return self._places[id(record.parameter)]

    def options_of(self, index: int) -> Mapping[str, Any]:
        """Return the options of a group as they were."""
        return self.frozen.param_groups[index]

    def collect_one(self, record: StoredParameter, grad: Tensor) -> Job:
        """Return the job of one parameter, which knows what the optimizer's state will be afterwards."""
        self._store.check_usable(record)
        place = self._places[id(record.parameter)]
        # Not state[parameter], which would make an entry where the user's optimizer makes none.
        state = self._optimizer.state.get(record.parameter, {})
        record.copies.own_states(self._optimizer)
        for slot in record.copies.take_odd_of_gone():
            free_slot(self._store, slot)
        for slot in record.copies.states.values():
            if (shown := coded_home(slot.shown)) is not None and shown.is_aliased:
                self._store.finish(record)
                shown.flush()
                shown.forget_aliases()
        if self.is_block_wise:
            self._make_block_slots(record, place)
        elif self.is_element_wise:
            self._make_state_slots(record, place)
        self._take_state_home(record, state)
        changes_gradient = traits_of(self._optimizer).changes_gradients and self._store.early_step is None
        at_home = record.gradient.slot
        copies_whole = not self.is_element_wise and at_home is not None and at_home.in_memory  # which no plan counts
        if record.gradient.is_home(grad) and (changes_gradient or (copies_whole and record.gradient.deferred)):
            self._store.await_gradient(record)  # applies deferred operations
            record.gradient.forget_norms()
        splits = self._splits(record)
        if not splits:
            self._store.join_master(record)
        slots = record.copies.states
        with_home = [key for key, slot in slots.items() if _is_home_of(slot, state.get(key))]
        kept = frozenset(key for key in with_home if not slots[key].is_aside)
        left_out = {key for key in with_home if not slots[key].per_element}
        if self._store.ranks.is_alone:
            left_out |= {key for key in state if is_pending(self._optimizer, key)}
        job = Job(
            record=record,
            splits=splits,
            optimizer=self.frozen,
            real_optimizer=self._optimizer,
            place=place,
            changes_gradient=changes_gradient,
            ledger=None if self.is_element_wise or is_known(self._optimizer) else self.ledger,
            grad=grad,
            deferred=tuple(record.gradient.deferred) if record.gradient.is_home(grad) else (),
            group=self.options_of(place[0]),
            position=next(self._positions),
            scalars=copy_scalars(state, record.parameter.shape, but=left_out),
            kept_states=kept,
            is_block_wise=self.is_block_wise,
        )
        if self.is_block_wise:
            if not state:
                job.scalars, job.zero_states = first_scalars(), frozenset(slots)
            job.next_state = {**next_scalars(job.scalars), **dict.fromkeys(slots)}
            job.temporary_nbytes = temporary_nbytes(self._optimizer)
        elif self.is_element_wise:
            prediction = self._predict(job)
            if prediction.books is not None:
                self.ledger.note(place[0], prediction.books)
            dtype = record.copies.master.tensor.dtype
            job.next_state = prediction.state
            job.temporary_nbytes = prediction.temporary_nbytes + (0 if grad.dtype == dtype else dtype.itemsize)
        else:
            job.due = find_due(self._optimizer, job.scalars)
            now = Trial(runs=job.due.runs or len(job.due.adopts) > 0, copies=job.due.begins)
            job.temporary_nbytes = self._count_temporaries(job, now)
            if job.due.begins:
                self._count_temporaries(job, behind := Trial(runs=True))
                job.work_growth = behind.growth
        return job

    def _splits(self, record: StoredParameter) -> bool:
        """Return whether an update leaves of the master copy what the compute copy lacks: not where others see it whole."""
        placement, copies = self._store.placements.get(record.name), record.copies
        return (
            placement is not None
            and placement.splits_master
            and self.is_element_wise
            and self._store.ranks.is_alone
            and copies.may_split(record.update.count)
            and isinstance(record.parameter, HomeParameter)
            and not copies.master.may_change_unseen
        )

    def _make_state_slots(self, record: StoredParameter, place: Place) -> None:
        """Give every per-element state tensor a slot before the first step, so that chunks have somewhere to go."""
        made = self._optimizer.state.get(record.parameter, {})
        key = self._kind_of(place), record.copies.master.tensor.dtype, frozenset(made)
        if key not in self._probed:
            options, shape = self.options_of(place[0]), record.parameter.shape
            self._probed[key] = probe_state(self.frozen, options, place, key[1], made, shape)
        for wanted in self._probed[key]:
            if wanted.key not in record.copies.states:
                state_slot(record, self._optimizer, wanted.key, wanted.dtype, record.shape)

    def _make_block_slots(self, record: StoredParameter, place: Place) -> None:
        """Give every state tensor a slot before the first step, in the code that the optimizer would keep it in."""
        if self._optimizer.state.get(record.parameter):
            return  # they are taken as they are
        dtype = record.copies.master.tensor.dtype
        wanted = states_of(self._optimizer, self.options_of(place[0]), record.shape.numel())
        for key in record.copies.states.keys() - {each.key for each in wanted}:
            drop_state(record, key)
        for each in wanted:
            state_slot(record, self._optimizer, each.key, dtype, record.shape, code=each.code)

    def _kind_of(self, place: Place) -> object:
        """Return a key that is equal for parameters that the optimizer treats alike: those of a group, if possible."""
        is_alike = is_known(self._optimizer) or not tells_parameters_apart(self.options_of(place[0]))
        return place[0] if is_alike else place

    def _predict(self, job: Job) -> "_Prediction":
        """Return the result of updating a few zeros from the scalars of a job."""
        dtype = job.record.copies.master.tensor.dtype
        per_element = {key: job.record.copies.states[key].dtype for key in sorted(job.kept_states)}
        key = (self._kind_of(job.place), dtype, tuple(per_element.items()), _scalar_key(job.scalars))
        if key not in self._predicted:
            state = {name: copy_value(value) for name, value in job.scalars.items()}
            state |= {name: torch.zeros(_PROBE_SHAPE, dtype=each) for name, each in per_element.items()}
            zeros = torch.zeros(_PROBE_SHAPE, dtype=dtype)
            gradient = torch.zeros_like(zeros)
            shadow = Shadow(self.frozen, job.group, job.place, zeros, gradient, state, is_trial=True)
            with keeping_random_state(), TemporaryCount() as count:
                new_state = shadow.run()
            books = None if is_known(self._optimizer) else shadow.books()
            nbytes = -(-count.most_nbytes // zeros.numel())
            self._predicted[key] = _Prediction(state=new_state, books=books, temporary_nbytes=nbytes)
        return self._predicted[key]

    def _count_temporaries(self, job: Job, trial: Trial) -> int:
        """Return the temporary bytes per element of a whole-tensor update.

        ``trial`` says whether what is due every few steps belongs to it, and measures that.
        """
        record, slots = job.record, job.record.copies.states
        states = tuple((key, slots[key].dtype, _shape_of(slots[key], record)) for key in sorted(job.kept_states))
        dtypes = (record.copies.master.tensor.dtype, job.grad.dtype)
        key = (self._kind_of(job.place), dtypes, record.shape, states, trial.runs, trial.copies)
        if key not in self._counted:
            nbytes = self._count_without_memory(job, trial)
            if nbytes is None:
                nbytes = self._count_on_small_tensor(job, trial)
            self._counted[key] = nbytes, trial.growth
        nbytes, trial.growth = self._counted[key]
        return nbytes

    def _count_without_memory(self, job: Job, trial: Trial) -> int | None:
        """Return these bytes, counted on tensors of the very shapes that have no memory; None if it does not accept them."""
        record = job.record
        dtype = record.copies.master.tensor.dtype
        parameter, gradient = (torch.empty(record.shape, dtype=dtype, device="meta") for _ in range(2))
        state = {
            name: torch.empty_like(value, device="meta")
            if isinstance(value, Tensor) and value.numel() > 1
            else copy_value(value)
            for name, value in job.scalars.items()
        }
        for name in sorted(job.kept_states):
            slot = record.copies.states[name]
            state[name] = torch.empty(_shape_of(slot, record), dtype=slot.dtype, device="meta")
        try:
            with keeping_random_state(), kept_by(trial), self._new_count() as count:
                Shadow(self.frozen, job.group, job.place, parameter, gradient, state, is_trial=True).run()
        except (UnsupportedError, ConfigError):
            raise
        except SURPRISES:
            trial.growth = 0.0
            return None
        return _each(count.most_nbytes, job, record.shape)

    def _new_count(self) -> TemporaryCount:
        unified = self._store.device.memory.unified
        return TemporaryCount(emulates_bfloat16=unified and emulates_bfloat16())

    def _count_on_small_tensor(self, job: Job, trial: Trial) -> int:
        """Return these bytes, measured on a small tensor."""
        record = job.record
        master, shape = record.copies.master.tensor, small_shape(record.shape)
        states = {key: record.copies.states[key].dtype for key in sorted(job.kept_states)}
        with keeping_random_state(), kept_by(trial):
            small, gradient = torch.rand(shape).to(master.dtype), torch.rand(shape).to(master.dtype)
            state = {name: copy_value(value) for name, value in job.scalars.items()}
            state |= {name: torch.rand(shape).to(dtype) for name, dtype in states.items()}
            has_odd = any(isinstance(value, Tensor) and value.numel() > 1 for value in job.scalars.values())
            has_odd |= any(not record.copies.states[name].per_element for name in states)

            def run(state: dict[str, Any]) -> dict[str, Any]:
                return Shadow(self.frozen, job.group, job.place, small, gradient, state, is_trial=True).run()

            count = self._new_count()
            try:
                if has_odd:  # it fits the large tensor only, and a first step makes some that fits the small one
                    state = run({}) if job.kept_states else {}
                with count:
                    run(state)
            except (UnsupportedError, ConfigError):
                raise
            except SURPRISES:  # it does not accept a small tensor, or an empty state
                count.most_nbytes = max(count.most_nbytes, _UNKNOWN * small.nbytes)
                trial.growth = max(trial.growth, _UNKNOWN)
        return _each(count.most_nbytes, job, shape)

    def _copy_states_of_others(self, record: StoredParameter) -> None:
        """Copy state whose home belongs to another parameter or key, as after a swap, since this step writes that home."""
        record.copies.own_states(self._optimizer)
        state = self._optimizer.state.get(record.parameter, {})
        for key, value in state.items():
            if not isinstance(value, HomeTensor) or _is_shown(record, key, value):
                continue
            others = (slot for other, slot in record.copies.states.items() if other != key)
            if value.record() is not record or any(slot.is_home_of(value) for slot in others):
                state[key] = value.plain().clone()

    def _take_state_home(self, record: StoredParameter, state: dict[str, Any]) -> None:
        """Write state that was put into ``optimizer.state``, as ``load_state_dict`` does, to its slot, and show the slot."""
        for key, slot in list(record.copies.states.items()):
            if not slot.per_element and not _is_home_of(slot, state.get(key)):
                drop_state(record, key)
        for key, value in state.items():
            if not isinstance(value, Tensor) or _is_shown(record, key, value):
                continue
            if not has_slot(record, self._optimizer, record.stored_shape(value.shape)):
                continue
            if value.shape != record.parameter.shape and not (is_plain(value) or isinstance(value, HomeTensor)):
                continue
            if value.dim() == 0 and key not in record.copies.states:  # a step count, and no moment of a 0-dim parameter
                continue
            take_state_home(record, self._optimizer, state, key)


def _shape_of(slot: Slot, record: StoredParameter) -> torch.Size:
    """Return the shape of all of a state, of which several ranks have rows each."""
    return record.shape if slot.per_element else slot.tensor.shape


def _each(nbytes: int, job: Job, shape: torch.Size) -> int:
    """Return temporary bytes per element, given those of all of a shape; a gradient of another dtype is converted before."""
    dtype = job.record.copies.master.tensor.dtype
    return -(-nbytes // max(1, shape.numel())) + (0 if job.grad.dtype == dtype else dtype.itemsize)


def _refuse_distributed(optimizer: Optimizer) -> None:
    """Raise UnsupportedError if an optimizer that needs more than elements has a DTensor of the user's."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (record := record_of(parameter)) is not None and record.views.distribution is not None:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} does not update element by element, and of '{record.name}', a DTensor "
                    f"({record.views.distribution}), a store has the local tensor only; use an optimizer that does, such as "
                    "AdamW"
                )


def _check_block_wise(store: Store, optimizer: Optimizer) -> None:
    """Raise UnsupportedError where torchao's optimizers do not run."""
    name, config = type(optimizer).__name__, store.config
    if not store.ranks.is_alone:
        raise UnsupportedError(
            f"torchao's {name} is for one process, and these are {store.ranks.mesh_size} ranks, each of which would have "
            "some rows of its blocks; use torch.optim.AdamW"
        )
    if not store.device.memory.unified:
        raise UnsupportedError(
            f"torchao's {name} is updated on CPUs only, and the model computes on {store.device.torch_device}; use "
            "torch.optim.AdamW, and state_dtype for state in fewer bits"
        )
    if config.state_dtype is not None:
        raise UnsupportedError(
            f"state_dtype='{config.state_dtype}' encodes state in fewer bits, and torchao's {name} does so itself; leave "
            "state_dtype out, or use torch.optim.AdamW"
        )


def in_gather_order(store: Store, jobs: Iterable[Job]) -> list[Job]:
    """Return jobs in the order in which a step makes them: first those that ``step()`` waits for."""
    order = store.update_order
    return sorted(jobs, key=lambda job: (job.may_outlive_step, order.get(job.record.name, len(order))))


_PROBE_SHAPE = torch.Size([3])
LEAST_OWN_SHAPE = 4096  # elements of a state of a shape of its own that has a slot
_UNKNOWN = 8  # temporaries assumed for an update that cannot be measured


def _check_whole(record: StoredParameter, grad: Tensor) -> None:
    """Raise StoreError for a gradient that lacks tiles, since its backward was broken off."""
    if record.gradient.rows_home is not None and record.gradient.is_home(grad):
        found = sum(rows.length for rows in record.gradient.rows_home)
        num_rows = record.copies.master.tensor.shape[0]
        raise StoreError(
            f"the gradient of '{record.name}' has {found} of its {num_rows} rows, since backward was "
            "broken off; call zero_grad(), and run forward and backward again"
        )


def _as_plain_unless_own(record: StoredParameter, grad: Tensor) -> Tensor:
    """Return a gradient; as a plain tensor if it is the home tensor of something else.

    Reading that home tensor during the step would wait for the step itself, and operations deferred on it have to be
    applied before the jobs are collected.
    """
    return grad.plain() if isinstance(grad, HomeTensor) and not record.gradient.is_home(grad) else grad


def _is_home_of(slot: Slot, value: object) -> bool:
    """Return whether an entry of a state shows a slot."""
    return value is slot.shown or slot.is_home_of(value) if isinstance(value, Tensor) else False


def _is_shown(record: StoredParameter, key: str, value: Tensor) -> bool:
    """Return whether a value of a state is the home tensor of its own slot."""
    slot = record.copies.states.get(key)
    return slot is not None and slot.shown is value


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Return whether an entry of a state is a tensor of torch's own class with its elements in memory."""
    return type(value) is Tensor and value.layout is torch.strided and not value.is_meta


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Return whether it is on the CPU, and its elements are all its bytes, in the order in which a slot has them."""
    if not is_dense(value) or value.device.type != "cpu":
        return False
    return value.is_contiguous() and not value.is_conj() and not value.is_neg()


def has_slot(record: StoredParameter, optimizer: Optimizer, shape: torch.Size) -> bool:
    """Return whether a state tensor of this shape has a slot of its parameter's store.

    Those with an element for each of the parameter's do. Of optimizers that get whole tensors, others do that are worth
    it: step counts and small tables stay in memory, and with several ranks all of them, which only a parameter's owner has.
    """
    if shape == record.shape:
        return True
    is_cut = is_known(optimizer) and is_element_wise(optimizer)
    return shape.numel() >= LEAST_OWN_SHAPE and record.store.ranks.is_alone and not is_cut


def state_slot(
    record: StoredParameter,
    optimizer: Optimizer,
    key: str,
    dtype: torch.dtype,
    shape: torch.Size,
    *,
    code: Blocks | None = None,
) -> Slot:
    """Return the slot for a state tensor of an optimizer; the content of a new one is undefined.

    ``code`` is that of the optimizer itself, if it keeps the state in one.
    """
    record.copies.own_states(optimizer)
    slot = record.copies.states.get(key)
    if slot is None or not _can_hold(slot, record, dtype, shape) or _own_code(slot) != code:
        if slot is not None:
            drop_state(record, key)
        slot = _new_state_slot(record, key, dtype, shape, code, is_aside=is_pending(optimizer, key))
        record.copies.put_state(key, slot)
    return slot


def drop_state(record: StoredParameter, key: str) -> None:
    """Free the slot of a state tensor that the optimizer does not keep any more."""
    free_slot(store_of(record), record.copies.drop_state(key))


def free_slot(store: Store, slot: Slot) -> None:
    store.held.count_home(slot.tier, -slot.nbytes)
    slot.give_back(store.layout)


def is_held(value: Any, slot: Slot, record: StoredParameter) -> bool:
    """Return whether a slot is one for an entry of a state after an update."""
    if isinstance(value, Tensor):
        return _can_hold(slot, record, value.dtype, value.shape)
    return isinstance(value, StateTensor)


def _can_hold(slot: Slot, record: StoredParameter, dtype: torch.dtype, shape: torch.Size) -> bool:
    return slot.dtype == dtype and shape == (record.shape if slot.per_element else slot.tensor.shape)


def _own_code(slot: Slot) -> Blocks | None:
    """Return the code of an optimizer's own that a slot holds."""
    return slot.code if isinstance(slot.code, Blocks) else None


def _new_state_slot(
    record: StoredParameter,
    key: str,
    dtype: torch.dtype,
    shape: torch.Size,
    own_code: Blocks | None,
    *,
    is_aside: bool,
) -> Slot:
    """Return a slot of an optimizer that is gone, if no user holds its tensor, else a new one."""
    if is_aside:  # no update stages it, and it is there for a few steps only: no plan counts it
        tier = Tier.HOST if record.store.config.nvme is None else Tier.NVME
        slot = store_of(record).new_slot(
            record.name, shape, dtype, tier, state_key(key), per_element=shape == record.shape
        )
        slot.is_aside = True
        return slot
    store, master, per_element = store_of(record), record.copies.master, shape == record.shape
    asked = store.config.state_code_of(record.name) if per_element else None
    code = own_code or code_of_state(asked, dtype=dtype_name(dtype), num_elements=shape.numel())
    forgotten = record.copies.take_forgotten_state(
        key, lambda slot: _can_hold(slot, record, dtype, shape) and _own_code(slot) == own_code
    )
    if forgotten is not None:
        return forgotten
    # Nothing is planned for the state of a frozen parameter, which a checkpoint may have.
    placement = store.placements[record.name]
    tier = placement.optimizer_state or master.tier
    nbytes = shape.numel() * dtype.itemsize if own_code is None else own_code.nbytes(shape.numel())
    made = sum(slot.nbytes for slot in record.copies.updated_states.values())
    is_planned = per_element and made + nbytes <= placement.optimizer_state_nbytes
    if not is_planned and (code is None or own_code is not None) and store.ranks.is_alone:
        tier = _tier_of_unplanned(record, tier, nbytes, is_odd=not per_element)
    return store.new_slot(record.name, shape, dtype, tier, state_key(key), code=code, per_element=per_element)


def _tier_of_unplanned(record: StoredParameter, tier: Tier, nbytes: int, *, is_odd: bool) -> Tier:
    """Return where more state than was planned goes, until there is a plan that knows of it.

    Where other state is, or to nvme if host memory has no room for it beside the state that is planned there. State of a
    shape of its own that staging could not hold beside all else that an update of the parameter moves goes to host memory,
    which it may exceed; the report says so.
    """
    store, slots = store_of(record), record.slots
    staged = whole_sectors(nbytes)
    staged += sum(whole_sectors(slot.nbytes) for slot in slots if not (slot.in_memory or slot.is_aside))
    if store.config.nvme is None or (is_odd and staged > store.staging.capacity):
        return Tier.HOST
    room = store.held.host_room_nbytes
    if tier is Tier.NVME or nbytes > room:  # without looking at all parameters
        return Tier.NVME
    return Tier.HOST if nbytes <= room - _host_state_to_come(store) else Tier.NVME


def _host_state_to_come(store: Store) -> int:
    """Return the bytes of state that are planned on the host and have no slots yet, as most have none in the first step."""
    return sum(
        max(0, placement.optimizer_state_nbytes - sum(slot.nbytes for slot in record.copies.updated_states.values()))
        for name, record in store.records.items()
        if (placement := store.placements[name]).optimizer_state is Tier.HOST
    )


def take_state_home(record: StoredParameter, optimizer: Optimizer, state: dict[str, Any], key: str) -> None:
    """Write an entry of a parameter's state to its slot, and let the state show the slot."""
    store, value = record.store, state[key]
    code = blocks_of(value) if is_block_wise(optimizer) else None
    slot = state_slot(record, optimizer, key, value.dtype, record.stored_shape(value.shape), code=code)
    if slot.is_home_of(value):
        return
    if record.views.distribution is not None and own_rows(slot, value).shape != slot.tensor.shape:
        raise UnsupportedError(
            f"'{key}' of '{record.name}' is not divided among ranks as the parameter is, a DTensor; load DTensors with "
            "the mesh and placements of the parameter, as torch.distributed.checkpoint does"
        )
    if slot.is_aside and store.background_work is not None:
        store.background_work.forget(slot)
    with store.failing_on_error():
        if slot.coded is None:
            store.tensor_io.write_value(slot, own_rows(slot, value))
        else:
            store.tensor_io.encode_value(slot, own_rows(slot, value))
        store.tensor_io.wait_writes()
    state[key] = HomeTensor.show(slot, record)


def own_rows(slot: Slot, value: Tensor) -> Tensor:
    """Return what a slot holds of a value that a user gave: of a DTensor this rank's shard, of a plain one its rows."""
    local = local_of(value)
    return local if local is not value else slot.rows_of(value)


def _scalar_key(scalars: Mapping[str, Any]) -> object:
    """Return a key that is equal for equal scalars; a unique object if equality cannot be decided."""
    key: list[tuple[object, ...]] = []
    for name, value in scalars.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            key.append((name, value.dtype, value.shape, value.item()))
        elif isinstance(value, int | float | bool | None):
            key.append((name, value))
        else:
            return object()
    return tuple(key)
