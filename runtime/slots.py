"""Slots: one stored tensor each, on one tier, with the home tensor people see; and the record of a parameter's slots."""

import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from zinf_compile.runtime.nvme.engine import whole_sectors
from zinf_compile.runtime.nvme.layout import Extent, FileLayout
from zinf_compile.terms import Tier

if TYPE_CHECKING:
    from zinf_compile.runtime.in_flight import InFlight
    from zinf_compile.runtime.store import Store


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One tensor's home. On nvme it has an extent of the store file, and ``tensor`` is a mapping of it."""

    name: str  # "layers.3.up.weight (gradient)", for messages
    tier: Tier
    tensor: Tensor  # the home tensor, for us: whoever uses it knows that nothing of it is in flight
    extent: Extent | None = None
    on_device: bool = False  # in memory that only the device's streams reach; that of a CPU is host memory
    shown: Tensor | None = None  # the home tensor for people, of a gradient or optimizer state: using it waits
    num_own_references: int = field(init=False)  # to its bytes, by our tensors; any more are aliases that others hold

    def __post_init__(self) -> None:
        self.num_own_references = self.num_references

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.tensor.numel() * self.tensor.dtype.itemsize

    @property
    def whole(self) -> "Slot":
        """Return the slot itself: some rows of a slot answer with the slot that they are of."""
        return self

    @property
    def in_memory(self) -> bool:
        """Return whether the home is RAM, so that the home tensor may be computed on by the CPU."""
        return self.tier is not Tier.NVME and not self.on_device

    @property
    def device_bytes(self) -> Tensor | None:
        """Return the bytes of a home on the device, flat; None of any other."""
        return self.tensor.detach().view(-1).view(torch.uint8) if self.on_device else None

    def is_home_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor begins at this home's bytes."""
        with torch._C.DisableTorchFunctionSubclass():  # a look at the address is not a look at the value
            return tensor.data_ptr() == self.tensor.data_ptr()

    @property
    def num_references(self) -> int:
        """Return how many tensors and arrays hold the bytes of this home, its own home tensors among them."""
        count: int = torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata)
        return count

    @property
    def is_aliased(self) -> bool:
        """Return whether somebody holds a plain tensor or an array over these bytes, which nobody can watch."""
        return self.num_references > self.num_own_references + (self.shown is not None)

    @property
    def is_forgotten(self) -> bool:
        """Return whether nobody but us holds the home tensor for people, or any other tensor over these bytes."""
        # The slot's own reference, and the call's.
        is_shown_to_others = self.shown is not None and sys.getrefcount(self.shown) > 2
        return not is_shown_to_others and not self.is_aliased

    def give_back(self, layout: FileLayout) -> None:
        """Let its extent be used again, now that its value is elsewhere, or wanted no more.

        Not if somebody holds an alias of the mapping, who would read, or write, whatever came to lie there.
        """
        if self.extent is not None and self.is_forgotten:
            layout.free(self.extent)

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the offset in file or device memory and the sector-rounded length of elements [start, stop).

        ``start`` must be aligned.
        """
        assert self.extent is not None or self.on_device
        first = 0 if self.extent is None else self.extent.offset
        itemsize = self.tensor.dtype.itemsize
        return first + start * itemsize, whole_sectors((stop - start) * itemsize)


class Seat:
    """What captured gathers of one parameter hang on in the autograd graph.

    Dynamo guards the anchor it finds here: another one means that the model is captured again.
    """

    def __init__(self, anchor: Tensor) -> None:
        self.anchor = anchor


class Owner(Protocol):
    """Who made a store, and knows its budgets."""

    def thaw(self, record: "StoredParameter") -> None:
        """Let a parameter be trained that was frozen so far. CapacityError if there is no room for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredOp:
    """An in-place operation on every element of a gradient by itself, to be done when the gradient is next read."""

    call: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, gradient: Tensor) -> Tensor:
        """Change a gradient, or a part of one, in place."""
        return self.call(gradient, *self.args, **self.kwargs)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class StoredParameter:
    """A parameter and all that belongs to it. ``master`` is ``compute`` itself where there is only one copy.

    The compute copy has ``dtype``, or is narrower, for captured graphs that cast every read of the parameter.
    """

    param: int  # the id in the graph
    name: str
    parameter: torch.nn.Parameter
    store: "Store"
    compute: Slot
    master: Slot
    gradient: Slot | None
    seat: Seat
    dtype: torch.dtype  # that the model's own code computes with, and of the gradient
    states: dict[str, Slot] = field(default_factory=dict)  # of the optimizer that stepped it last
    states_owner: "weakref.ref[torch.optim.Optimizer] | None" = None  # that optimizer
    other_states: "list[tuple[weakref.ref[torch.optim.Optimizer], dict[str, Slot]]]" = field(default_factory=list)
    synced_version: int = 0  # of the parameter, when the compute copy was last made from the master
    exposed: bool = False  # a writable alias of the master was handed out since
    torn: bool = False  # an update of it began and did not finish
    update_count: int = 0  # of optimizer steps; backward compares it with its forward's
    forward_update_count: int = 0  # at the last forward of a captured graph that reads it
    uses: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)  # autograd nodes that give it gradients
    home_backward: int = -1  # the last backward, by its number, whose gradient went straight home
    deferred: list[DeferredOp] = field(default_factory=list)  # what the user did to the gradient, not yet done
    norms: dict[float, Tensor] = field(default_factory=dict)  # of the gradient at home, by order
    held_gradients: list[Slot] = field(default_factory=list)  # earlier ones that somebody held on to
    handed: Tensor | None = None  # a gradient on its way from a captured backward to autograd
    is_updated_early: bool = False  # in backward, by the step that optimizer.step() is to end
    update: "Future[None] | None" = None  # of an optimizer step in the background; done when all of it is home
    gathers: "list[InFlight]" = field(default_factory=list)  # over a link, which may still read its homes
    lent: bool = False  # full_parameters() holds its value
    tiles_home: dict[int, int] | None = (
        None  # of a gradient not complete yet: first row and number of rows of each tile
    )

    @property
    def whole(self) -> "StoredParameter":
        """Return the parameter itself: a tile of one answers with the parameter that it is of."""
        return self

    @property
    def has_compute_copy(self) -> bool:
        """Return whether compute and master are two slots."""
        return self.compute is not self.master

    def copy_in(self, dtype: torch.dtype) -> Slot:
        """Return the copy that a gather of ``dtype`` moves."""
        return self.compute if dtype == self.compute.tensor.dtype else self.master

    @property
    def is_aliased(self) -> bool:
        """Return whether somebody holds a plain tensor or an array over the bytes of the master, gradient or state."""
        with_parameter = self.master.num_references > self.master.num_own_references + 1
        others = [*self.states.values(), *([self.gradient] if self.gradient is not None else [])]
        return with_parameter or any(slot.is_aliased for slot in others)

    def is_home_gradient(self, grad: Tensor) -> bool:
        """Return whether a gradient is the one at home, and not a tensor that the user put there."""
        return self.gradient is not None and self.gradient.is_home_of(grad)

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
        slots = [self.compute, *([self.master] if self.has_compute_copy else [])]
        return (*slots, *([self.gradient] if self.gradient is not None else []), *self.states.values())


RECORD = "_zinf_record"  # the attribute of a parameter that leads to its StoredParameter


def record_of(parameter: object) -> StoredParameter | None:
    """Return the record of a parameter that some store holds; None for any other object."""
    if not isinstance(parameter, Tensor):
        return None
    record = getattr(parameter, RECORD, None)
    assert record is None or isinstance(record, StoredParameter)
    return record


_LENT = "_zinf_lent"  # the attribute of a plain parameter that stands for a stored one meanwhile


def mark_lent(parameter: torch.nn.Parameter, record: StoredParameter) -> None:
    """Let a plain parameter lead to the stored one that it stands for, without making it one."""
    setattr(parameter, _LENT, record)


def owner_of(parameter: object) -> StoredParameter | None:
    """Return the record of a parameter that some store holds, or has lent; None for any other object."""
    record = record_of(parameter) or getattr(parameter, _LENT, None)
    assert record is None or isinstance(record, StoredParameter)
    return record


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that facts name, as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def map_tensor(buffer: memoryview, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor over mapped file bytes."""
    return torch.frombuffer(buffer, dtype=dtype, count=shape.numel()).view(shape)


def give_memory(parameter: torch.nn.Parameter, memory: Tensor) -> None:
    """Give memory to a parameter on meta, which stays the object it is wherever it is registered."""
    successor = torch.nn.Parameter(memory, parameter.requires_grad)
    successor.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, successor)  # other than ``.data``, it may cross devices


def return_to_meta(parameter: torch.nn.Parameter) -> None:
    """Undo ``give_memory`` and adoption for a parameter that was on meta. It need not have been adopted."""
    if (record := record_of(parameter)) is None:
        return
    parameter.__class__ = torch.nn.Parameter
    delattr(parameter, RECORD)
    parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # the swap would keep the dictionary alone
    empty = torch.empty(record.master.tensor.shape, dtype=record.original_dtype, device="meta")
    predecessor = torch.nn.Parameter(empty, parameter.requires_grad)
    predecessor.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, predecessor)
