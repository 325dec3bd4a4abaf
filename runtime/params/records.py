"""The record of a stored parameter, and how it is found from the parameter."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import COMPUTE, AnyCode, CopyKey
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Placement
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.observe.meter import Meter
from zinf_compile.runtime.params.copies import Copies
from zinf_compile.runtime.params.gradient_state import GradientState, WantedNorms
from zinf_compile.runtime.params.remote import Elsewhere
from zinf_compile.runtime.params.update_state import UpdateState
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.ranks.reductions import Reductions
from zinf_compile.runtime.storage.slots import Slot, SlotPart, torch_dtype
from zinf_compile.runtime.storage.state_codes import Paged
from zinf_compile.runtime.storage.tier_memory import TierMemory
from zinf_compile.runtime.transfer.tensor_io import TensorIO


class Owner(Protocol):
    """The owner of a store, which knows its budgets."""

    def unfreeze(self, record: "StoredParameter") -> None:
        """Let a parameter be trained that was frozen so far. CapacityError if there is no room for that."""

    def check_leaving(self, records: "Sequence[StoredParameter]") -> None:
        """Raise CapacityError if there is no room for these parameters outside of weight files. Reserves it on the disk."""

    def leave_weights(self, record: "StoredParameter", *, with_value: bool = True) -> None:
        """Let no weight file have the value of a parameter from now on. CapacityError if there is no room for it.

        If it is in place it gets a home of its own; its content is undefined without ``with_value``.
        """


class EarlyStep(Protocol):
    """What updates a parameter when its gradient is complete."""

    def take(self, record: "StoredParameter", grad: Tensor, source: Tier) -> bool:
        """Update a parameter; return False if the gradient, on the device or the host, is to be stored for ``step()``."""

    def note_backward(self) -> None:
        """Remember that the backward that runs now may update parameters, until it has ended without an error."""

    def find_broken(self) -> "Sequence[StoredParameter]":
        """Return the parameters that were updated by a backward that did not end."""

    def flush(self) -> None:
        """Finish the updates that were taken, without waiting for more."""

    def forget(self) -> None:
        """Forget the open step: every parameter has a new value."""


class UpdatesAhead(Protocol):
    """What begins updates ahead of ``step()``."""

    def plan(self, name: str, parameters: frozenset[str]) -> None:
        """Update these parameters ahead of ``step()``, as the plan of a captured graph says."""

    def covers(self, record: "StoredParameter", optimizer: Optimizer) -> bool:
        """Return whether updates of a parameter by an optimizer begin ahead of ``step()``, if nothing is in their way."""

    def take(self, record: "StoredParameter") -> None:
        """Begin the update of a parameter, whose gradient has just arrived, if it is complete and nothing speaks against."""

    def drop(self, why: str) -> None:
        """Drop the updates that ``step()`` has not taken."""

    def drop_shadows(self) -> None:
        """Drop these, and give back the room that they are written to. What ``step()`` has taken has ended."""


class BackgroundWork(Protocol):
    """Work of optimizers that threads do beside the steps."""

    def forget(self, slot: Slot) -> None:
        """Let what was computed from a slot be computed again: it gets another value."""

    def drop(self) -> None:
        """Forget all of it. Waits for what runs."""

    def wait(self) -> None:
        """Block until nothing of it runs or waits."""


class Stored(Protocol):
    """A parameter, or a tile of one."""

    @property
    def whole(self) -> "StoredParameter":
        """The parameter."""

    @property
    def shape(self) -> torch.Size:
        """The shape of its whole value."""

    def copy_in(self, dtype: torch.dtype) -> Slot | SlotPart:
        """Return what a gather of ``dtype`` moves."""


class Views(Protocol):
    """What users, and the model's own code, see of a stored parameter: tensors over the bytes of its slots."""

    @property
    def distribution(self) -> str | None:
        """Return how the user has distributed it, as a DTensor whose local tensor is stored; None if it is a plain one."""

    def show(
        self, kind: type[Tensor], home: Tensor, record: "StoredParameter", *, coded: Paged | None = None
    ) -> Tensor:
        """Return a home tensor of this kind, a gradient or optimizer state, over the bytes, or codes, of a slot's tensor."""

    def seat(self, parameter: torch.nn.Parameter, home: Tensor, *, as_home: bool) -> torch.nn.Parameter:
        """Return the parameter that users see from now on in place of ``parameter``, over the bytes of ``home``."""

    def move(self, shown: Tensor, home: Tensor) -> None:
        """Let a parameter that was seated, or a home tensor that is shown, show the bytes of another home."""

    def of_whole(self, value: Tensor) -> Tensor:
        """Return a gathered value as the model's own code computes with it."""

    def in_graph(self) -> Callable[[Tensor], Tensor] | None:
        """Return ``of_whole`` for a value gathered in a captured graph; None if it is the value itself."""

    def of_shard(self, shard: Tensor) -> Tensor:
        """Return this rank's part of a gradient as autograd expects it for the parameter."""

    def of_norm(self, norm: Tensor, order: float) -> Tensor:
        """Return the norm of a gradient, given that of what this rank has of it."""

    def spread_largest(self, number: Tensor) -> None:
        """Let a number be the largest of all ranks among which the user has distributed the parameter, in place."""


class RecordStore(Protocol):
    """What a record, and code that finds it from its parameter or gradient, needs of the store that holds it."""

    store_id: int
    config: Config
    session: Owner | None
    early_step: EarlyStep | None
    updates_ahead: UpdatesAhead | None
    background_work: BackgroundWork | None
    wanted_norms: WantedNorms
    unreduced: dict[str, "StoredParameter"]
    facts: dict[str, ParameterFact]
    placements: dict[str, Placement]
    memory: TierMemory
    meter: Meter
    tensor_io: TensorIO
    ranks: Ranks
    reductions: Reductions
    elsewhere: Elsewhere | None

    @property
    def is_open(self) -> bool:
        """Return whether bytes can move: the store was neither closed nor forked, and has not failed."""

    @property
    def is_forked(self) -> bool:
        """Return whether this process was forked from the one that has the store."""

    def new_slot(
        self,
        parameter: str,
        shape: torch.Size,
        dtype: torch.dtype,
        tier: Tier,
        key: CopyKey = COMPUTE,
        *,
        is_whole: bool = False,
        code: AnyCode | None = None,
    ) -> Slot:
        """Return a slot for this rank's shard of a copy of a parameter of this shape, or for all of it."""

    def gather_value(self, record: "Stored", dtype: torch.dtype) -> Tensor:
        """Return the full value in one of its dtypes; blocks."""

    def finish(self, record: "StoredParameter", *, may_leave: bool = True) -> None:
        """Block until nothing is in flight for a parameter."""

    def join_master(self, record: "StoredParameter") -> None:
        """Make the master copy whole, where an update has left only what the compute copy lacks; blocks."""

    def show_rows(self, record: "StoredParameter") -> None:
        """Let the view of a weight in rows of int8 have its values, for somebody who looks at them; blocks."""

    def finish_gradients(self, record: "StoredParameter | None" = None) -> None:
        """Block until all gradients that are on their way home, or that of one parameter, are there."""

    def await_gradient(self, record: "StoredParameter") -> None:
        """Block until the gradient at home may be added to, with deferred operations applied."""

    def await_compute(self) -> None:
        """Block until the device has done what was enqueued on its compute stream."""

    def follow_compute(self) -> None:
        """Take the caller's stream for that of compute."""

    def check_usable(self, record: "StoredParameter | None" = None) -> None:
        """Raise StoreError if the store was closed or has failed, or if a parameter holds half an update."""

    def check_whole(self) -> None:
        """Raise StoreError if the store has failed, once no update is in flight."""

    def check_not_failed(self) -> None:
        """Raise StoreError if the store has failed so far."""

    def failing_on_error(self) -> AbstractContextManager[None]:
        """Fail when a read or write inside does."""

    def keep_writes(self, record: "StoredParameter") -> None:
        """Give a parameter in place a home of its own if somebody has written to it. CapacityError if there is no room."""

    def let_go(self, record: "StoredParameter", home: Tensor) -> None:
        """Note that a user reads a home tensor, and may change it."""

    def take_into_child(self, record: "StoredParameter", home: Tensor) -> None:
        """In a forked child: make a private copy of the bytes of a home tensor."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class StoredParameter:
    """A parameter and the owners of what belongs to it: its copies, the state of its gradient, the state of its update.

    The compute copy has ``dtype``, or is narrower, for captured graphs that cast every read of the parameter.
    """

    param: int  # the id in the graph
    name: str
    parameter: torch.nn.Parameter
    shape: torch.Size  # of what the ranks of the store have together: of a DTensor of the user's, its local tensor
    views: Views
    store: RecordStore
    dtype: torch.dtype  # that the model's own code computes with, and of the gradient
    copies: Copies
    gradient: GradientState = field(default_factory=GradientState)
    update: UpdateState = field(default_factory=UpdateState)

    @property
    def whole(self) -> "StoredParameter":
        """Return the parameter itself: a tile of one answers with the parameter that it is of."""
        return self

    def copy_in(self, dtype: torch.dtype) -> Slot:
        """Return the copy that a gather of ``dtype`` moves."""
        return self.copies.of_dtype(dtype)

    def stored_shape(self, shown: torch.Size) -> torch.Size:
        """Return the shape in which a tensor is stored, such as optimizer state, that users see in this one."""
        return self.shape if shown == self.parameter.shape else shown

    @property
    def shard(self) -> Slice:
        """Return what this rank updates: its rows, or all of the parameter in a process that trains alone."""
        master = self.copies.master
        return master.slice if master.num_ranks > 1 else self.store.ranks.shard_of(master.slice)

    @property
    def home(self) -> Tensor:
        """Return the home tensor of the parameter: what this rank updates of the master copy."""
        master, shard = self.copies.master, self.shard
        return master.tensor if shard == master.slice else master.elements(shard).view(shard.sizes)

    @property
    def is_aliased(self) -> bool:
        """Return whether somebody holds a plain tensor or an array over the bytes of the master, gradient or state."""
        gradient = [self.gradient.slot] if self.gradient.slot is not None else []
        others = [*self.copies.states.values(), *gradient]
        return self.copies.master.may_change_unseen or any(slot.is_aliased for slot in others)

    @property
    def original_dtype(self) -> torch.dtype:
        """Return the dtype it had before ``optimize``: a frozen one is kept in the compute dtype only."""
        return torch_dtype(self.store.facts[self.name].dtype)

    @property
    def version(self) -> int:
        """Return autograd's version of the parameter, which every in-place operation raises."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter._version

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return every slot once."""
        gradient = [self.gradient.slot] if self.gradient.slot is not None else []
        return (*self.copies.all, *gradient, *self.copies.states.values())


RECORD = "_zinf_record"  # the attribute of a parameter that leads to its StoredParameter


def record_of(parameter: object) -> StoredParameter | None:
    """Return the record of a parameter that some store holds; None for any other object."""
    if not isinstance(parameter, Tensor):
        return None
    record = getattr(parameter, RECORD, None)
    assert record is None or isinstance(record, StoredParameter)
    return record


_FULL_OF = "_zinf_full_of"  # the attribute of a plain parameter that holds the full value of a stored one


def mark_full(parameter: torch.nn.Parameter, record: StoredParameter) -> None:
    """Let a plain parameter lead to the stored one whose full value it holds, without making it a stored one."""
    setattr(parameter, _FULL_OF, record)


def owner_of(parameter: object) -> StoredParameter | None:
    """Return the record of a parameter that some store holds, or whose full value it is; None for any other object."""
    record = record_of(parameter) or getattr(parameter, _FULL_OF, None)
    assert record is None or isinstance(record, StoredParameter)
    return record


_HOLDERS = "_zinf_holders"  # the attribute of a component with the tensors that show it


def set_holders(component: torch.nn.Parameter, holders: Sequence[Tensor]) -> None:
    """Make a parameter a component of a quantised one: tensors of another library are views of the same bytes."""
    setattr(component, _HOLDERS, tuple(holders))


def holders_of(parameter: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that show the bytes of a component, wherever they are; none of any other parameter."""
    holders: tuple[Tensor, ...] = getattr(parameter, _HOLDERS, ())
    return holders


_DISTRIBUTED = "_zinf_distributed"  # the attribute of a plain parameter with the DTensor whose local tensor it is


def mark_local(parameter: torch.nn.Parameter, of: torch.nn.Parameter) -> None:
    """Let a plain parameter stand for the local tensor of a DTensor of the user's, to which it leads."""
    setattr(parameter, _DISTRIBUTED, of)


def distributed_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
    """Return the DTensor whose local tensor a parameter stands for; None for any other parameter."""
    of = getattr(parameter, _DISTRIBUTED, None)
    assert of is None or isinstance(of, torch.nn.Parameter)
    return of


_REPLACED = "_zinf_replaced_by"  # the attribute of a parameter in whose place a DTensor is registered


def mark_replaced(parameter: torch.nn.Parameter, by: torch.nn.Parameter) -> None:
    """Let a parameter lead to the one that is registered in its place."""
    setattr(parameter, _REPLACED, by)


def replacement_of(parameter: object) -> torch.nn.Parameter | None:
    """Return the parameter that is registered in the place of one; None if it was not replaced."""
    by = getattr(parameter, _REPLACED, None)
    assert by is None or isinstance(by, torch.nn.Parameter)
    return by


def give_memory(parameter: torch.nn.Parameter, memory: Tensor) -> None:
    """Give memory to a parameter on meta. It stays the same object wherever it is registered."""
    successor = torch.nn.Parameter(memory, parameter.requires_grad)
    successor.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, successor)  # unlike assigning ``.data``, this may change the device


def return_to_meta(parameter: torch.nn.Parameter) -> None:
    """Undo ``give_memory`` and adoption for a parameter that was on meta. It need not have been adopted."""
    if (record := record_of(parameter)) is None:
        return
    parameter.__class__ = torch.nn.Parameter
    delattr(parameter, RECORD)
    parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # the swap would keep the dictionary only
    empty = torch.empty(record.copies.master.tensor.shape, dtype=record.original_dtype, device="meta")
    predecessor = torch.nn.Parameter(empty, parameter.requires_grad)
    predecessor.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, predecessor)
