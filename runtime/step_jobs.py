"""The jobs of a streamed step: what an optimizer is to do, written down when ``step()`` is called.

After that the user may change hyperparameters and drop gradients as they like. What ``optimizer.state`` shows is right at
once: home tensors, whose readers wait for the update, and step counts and the like, which are found by updating a few
zeros.
"""

import copy
import itertools
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.runtime.element_wise import SURPRISES
from zinf_compile.runtime.home import HomeParameter, HomeTensor
from zinf_compile.runtime.shadow import StateTensor, copy_scalars, is_element_wise, probe_state, shadow_step
from zinf_compile.runtime.slots import DeferredOp, Slot, StoredParameter, record_of
from zinf_compile.runtime.store import Store
from zinf_compile.runtime.temporaries import TemporaryCount, small_shape

Group = dict[str, Any]  # a parameter group of an optimizer, as torch has it

GRADIENT, MASTER, COMPUTE = "gradient", "master copy", "compute copy"


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One parameter to update: the options of its group, and the state its optimizer keeps for it."""

    record: StoredParameter
    optimizer: Optimizer  # with its attributes as they were
    grad: Tensor  # its home tensor, or a tensor the user put there
    deferred: tuple[DeferredOp, ...]  # to be done to the gradient at home first
    group: Mapping[str, Any]
    scalars: dict[str, Any]  # the entries of its state that are not per element, before the update
    kept_states: frozenset[str]  # the per-element ones that it has; the rest of the slots are undefined
    position: int  # among the jobs of the step, in the order of the optimizer's parameters
    next_state: Mapping[str, Any] = field(
        default_factory=dict
    )  # after the update, per-element tensors at a probe's shape
    temporary_nbytes: int = 0  # that updating an element takes beside its slots
    update: Future[None] = field(default_factory=Future)  # done when all of it is home
    writes: list[Future[None]] = field(default_factory=list)
    is_begun: bool = False  # some of its elements may have changed
    is_updated: bool = False  # all of them have
    home_gradient: Slot | None = field(init=False)  # of the gradient; none of a tensor that the user put there
    staged_slots: Mapping[str, Slot] = field(init=False)  # those on nvme that its chunks pass through, by role

    def __post_init__(self) -> None:
        record = self.record
        self.home_gradient = record.gradient if record.is_home_gradient(self.grad) else None
        slots = {MASTER: record.master, **record.states}
        if record.has_compute_copy:
            slots[COMPUTE] = record.compute
        if self.home_gradient is not None:
            slots[GRADIENT] = self.home_gradient
        self.staged_slots = {role: slot for role, slot in slots.items() if not slot.in_memory}

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the parameter."""
        return self.record.master.tensor.numel()

    @property
    def may_outlive_step(self) -> bool:
        """Return whether it may still be in flight when ``step()`` returns: whether nobody could see it half done."""
        is_watched = isinstance(self.record.parameter, HomeParameter) and not self.record.is_aliased
        return is_watched and self.home_gradient is not None

    def show_next_state(self) -> None:
        """Let ``optimizer.state`` show what it will be after the update."""
        record = self.record
        if self.next_state:
            state = self.optimizer.state[record.parameter]
            for key, value in self.next_state.items():
                state[key] = HomeTensor.show(record.states[key], record) if key in record.states else copy_value(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prediction:
    """What an update comes to, found by updating a few zeros."""

    state: dict[str, Any]
    temporary_nbytes: int  # of each element


class JobCollector:
    """Writes down the jobs of one optimizer step over the parameters of one store."""

    def __init__(self, store: Store, optimizer: Optimizer) -> None:
        self._store = store
        self._optimizer = optimizer
        self.is_element_wise = is_element_wise(optimizer)
        # Attributes as they are now: a gradient scaler takes its own away again when step() returns.
        self._frozen_optimizer: Optimizer = object.__new__(type(optimizer))
        self._frozen_optimizer.__dict__.update(optimizer.__dict__)
        self._options: dict[int, Mapping[str, Any]] = {}  # by the id of the group
        self._positions = itertools.count()
        self._predicted: dict[object, _Prediction] = {}
        self._counted: dict[object, int] = {}  # temporary bytes of an element, of whole tensors
        self._probed: dict[tuple[int, torch.dtype], tuple[StateTensor, ...]] = {}

    def collect(self) -> list[Job]:
        """Return a job for every parameter with a gradient: what ``step()`` must wait for, then as forward gathers."""
        self._store.await_compute()  # a gradient scaler's numbers come from there, with the optimizer's attributes
        wanted: list[tuple[StoredParameter, Tensor, Group]] = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                record = record_of(parameter)
                if record is not None and record.store is self._store:
                    self._store.check_usable(record)
                    if (grad := parameter.grad) is not None:
                        wanted.append((record, _as_plain_unless_own(record, grad), group))
                        self._copy_states_of_others(record)
        jobs = [self.collect_one(record, grad, group) for record, grad, group in wanted]
        order = self._store.update_order
        return sorted(jobs, key=lambda job: (job.may_outlive_step, order.get(job.record.name, len(order))))

    def options_of(self, group: Group) -> Mapping[str, Any]:
        """Return the options of a group as they were when they were first asked for."""
        if id(group) not in self._options:
            self._options[id(group)] = {key: copy_value(value) for key, value in group.items() if key != "params"}
        return self._options[id(group)]

    def collect_one(self, record: StoredParameter, grad: Tensor, group: Group) -> Job:
        """Return the job of one parameter, which knows what the optimizer's state will be afterwards."""
        self._store.check_usable(record)
        options = self.options_of(group)
        # Not state[parameter], which would make an entry where the user's optimizer makes none.
        state = self._optimizer.state.get(record.parameter, {})
        own_states(record, self._optimizer)
        if self.is_element_wise:
            self._make_state_slots(record, options)
        self._take_state_home(record, state)
        job = Job(
            record=record,
            optimizer=self._frozen_optimizer,
            grad=grad,
            deferred=tuple(record.deferred) if record.is_home_gradient(grad) else (),
            group=options,
            position=next(self._positions),
            scalars=copy_scalars(state, record.parameter.shape),
            kept_states=frozenset(key for key in record.states if isinstance(state.get(key), Tensor)),
        )
        if self.is_element_wise:
            prediction = self._predict(job)
            dtype = record.master.tensor.dtype
            job.next_state = prediction.state
            job.temporary_nbytes = prediction.temporary_nbytes + (0 if grad.dtype == dtype else dtype.itemsize)
        else:
            job.temporary_nbytes = self._count_temporaries(job)
        return job

    def _make_state_slots(self, record: StoredParameter, options: Mapping[str, Any]) -> None:
        """Give every per-element state tensor a slot before the first step, so that chunks have somewhere to go."""
        dtype = record.master.tensor.dtype
        if (id(options), dtype) not in self._probed:
            self._probed[id(options), dtype] = probe_state(self._frozen_optimizer, options, dtype)
        for wanted in self._probed[id(options), dtype]:
            if wanted.key not in record.states:
                state_slot(record, self._optimizer, wanted.key, wanted.dtype)

    def _predict(self, job: Job) -> "_Prediction":
        """Return what comes of updating a few zeros from the scalars of a job."""
        dtype = job.record.master.tensor.dtype
        per_element = {key: job.record.states[key].tensor.dtype for key in sorted(job.kept_states)}
        key = (id(job.group), dtype, tuple(per_element.items()), _scalar_key(job.scalars))
        if key not in self._predicted:
            state = {name: copy_value(value) for name, value in job.scalars.items()}
            state |= {name: torch.zeros(_PROBE_SHAPE, dtype=each) for name, each in per_element.items()}
            zeros = torch.zeros(_PROBE_SHAPE, dtype=dtype)
            gradient = torch.zeros_like(zeros)
            with TemporaryCount() as count:
                new_state = shadow_step(self._frozen_optimizer, job.group, zeros, gradient, state)
            nbytes = -(-count.most_nbytes // zeros.numel())
            self._predicted[key] = _Prediction(state=new_state, temporary_nbytes=nbytes)
        return self._predicted[key]

    def _count_temporaries(self, job: Job) -> int:
        """Return the bytes per element of what updating a whole tensor makes, by a small one of the same proportions."""
        record, group = job.record, job.group
        master = record.master.tensor
        shape = small_shape(master.shape)
        states = {key: record.states[key].tensor.dtype for key in sorted(job.kept_states)}
        key = (id(group), master.dtype, job.grad.dtype, shape, tuple(states))
        if key not in self._counted:
            with torch.random.fork_rng(devices=()):
                small, gradient = torch.rand(shape).to(master.dtype), torch.rand(shape).to(master.dtype)
                state = {name: copy_value(value) for name, value in job.scalars.items()}
                state |= {name: torch.rand(shape).to(dtype) for name, dtype in states.items()}
                if any(isinstance(value, Tensor) and value.numel() > 1 for value in job.scalars.values()):
                    state = {}  # of other shapes, which go with the large one
                with TemporaryCount() as count:
                    try:
                        shadow_step(self._frozen_optimizer, group, small, gradient, state)
                    except SURPRISES:  # a small tensor or a state as at first is not what it expects
                        count.most_nbytes = max(count.most_nbytes, _UNKNOWN * small.nbytes)
            widened = 0 if job.grad.dtype == master.dtype else master.dtype.itemsize
            self._counted[key] = -(-count.most_nbytes // max(1, shape.numel())) + widened
        return self._counted[key]

    def _copy_states_of_others(self, record: StoredParameter) -> None:
        """Copy what ``optimizer.state`` shows of another state's home, which this step is to write, as after a swap."""
        own_states(record, self._optimizer)
        state = self._optimizer.state.get(record.parameter, {})
        for key, value in state.items():
            if not isinstance(value, HomeTensor) or _is_shown(record, key, value):
                continue
            others = (slot for other, slot in record.states.items() if other != key)
            if value.record() is not record or any(slot.is_home_of(value) for slot in others):
                state[key] = value.plain().clone()

    def _take_state_home(self, record: StoredParameter, state: dict[str, Any]) -> None:
        """Write state that somebody else put there, as ``load_state_dict`` does, to its slot, and show the slot."""
        shape = record.master.tensor.shape
        for key, value in state.items():
            if not isinstance(value, Tensor) or _is_shown(record, key, value) or value.shape != shape:
                continue
            if value.dim() == 0 and key not in record.states:  # a step count, and no moment of a 0-dim parameter
                continue
            slot = state_slot(record, self._optimizer, key, value.dtype)
            if not slot.is_home_of(value):
                with self._store.failing_on_error():
                    self._store.transfers.write_value(slot, value)
                    self._store.transfers.wait_writes()
                state[key] = HomeTensor.show(slot, record)


_PROBE_SHAPE = torch.Size([3])
_UNKNOWN = 8  # tensors that an update is taken to make whose number cannot be found


def _as_plain_unless_own(record: StoredParameter, grad: Tensor) -> Tensor:
    """Return a gradient; as a plain tensor if it is the home tensor of something else.

    The step would wait there for itself, and has to find what was put off done, before it writes its jobs down.
    """
    return grad.plain() if isinstance(grad, HomeTensor) and not record.is_home_gradient(grad) else grad


def _is_shown(record: StoredParameter, key: str, value: Tensor) -> bool:
    """Return whether a value of a state is what people see of its own slot: then it is home."""
    slot = record.states.get(key)
    return slot is not None and slot.shown is value


def own_states(record: StoredParameter, optimizer: Optimizer) -> None:
    """Make ``record.states`` an optimizer's: another one keeps its own, and its slots are reused once it is gone."""
    if record.states_owner is not None:
        if record.states_owner() is optimizer:
            return
        record.other_states.append((record.states_owner, record.states))
    mine = next((states for owner, states in record.other_states if owner() is optimizer), {})
    record.other_states = [(owner, states) for owner, states in record.other_states if states is not mine]
    record.states, record.states_owner = mine, weakref.ref(optimizer)


def state_slot(record: StoredParameter, optimizer: Optimizer, key: str, dtype: torch.dtype) -> Slot:
    """Return the slot for a state tensor of an optimizer; the content of a new one is undefined."""
    own_states(record, optimizer)
    slot = record.states.get(key)
    if slot is None or slot.tensor.dtype != dtype:
        slot = record.states[key] = _new_state_slot(record, key, dtype)
    return slot


def _new_state_slot(record: StoredParameter, key: str, dtype: torch.dtype) -> Slot:
    """Return a slot that nobody looks at since its optimizer is gone, else a new one."""
    for owner, states in record.other_states:
        slot = states.get(key) if owner() is None else None
        if slot is not None and slot.tensor.dtype == dtype and slot.is_forgotten:
            return states.pop(key)
    tier = record.store.placements[record.name].optimizer_state
    return record.store.new_slot(f"{record.name} ({key})", record.master.tensor.shape, dtype, tier)


def copy_value(value: Any) -> Any:
    """Return a copy of an entry of an optimizer's state or options that shares nothing with it."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _scalar_key(scalars: Mapping[str, Any]) -> object:
    """Return something equal for equal scalars; a unique object where that cannot be told."""
    key: list[tuple[object, ...]] = []
    for name, value in scalars.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            key.append((name, value.dtype, value.shape, value.item()))
        elif isinstance(value, int | float | bool | None):
            key.append((name, value))
        else:
            return object()
    return tuple(key)
