"""The gradient of a stored parameter: its slot, what is known of its value, and operations that are deferred.

Only this file writes the fields of ``GradientState``.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.storage.slots import Slot, elements_of

_USES = "zinf_compile's parameters"  # in the metadata of an autograd node


class _Use:
    """Lives as long as the autograd node that has it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredOp:
    """An element-wise in-place operation on a gradient, to be applied when the gradient is next read."""

    call: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, gradient: Tensor) -> Tensor:
        """Change a gradient, or a part of one, in place."""
        return self.call(gradient, *self.args, **self.kwargs)


@dataclass(slots=True, kw_only=True, eq=False)
class WantedNorms:
    """Orders of the norms of gradients that were asked for, which are taken where gradients pass by."""

    as_they_are: set[float] = field(default_factory=set)
    unscaled: set[float] = field(default_factory=set)  # of gradients that GradScaler has unscaled
    inverse_scale: float | None = None  # by which it did so last

    @property
    def are_any(self) -> bool:
        """Return whether a norm is to be taken."""
        return bool(self.as_they_are or self.unscaled)


@dataclass(slots=True, kw_only=True, eq=False)
class GradientState:
    """The gradient of one parameter; without a slot while the parameter is frozen."""

    slot: Slot | None = None
    held: list[Slot] = field(default_factory=list)  # earlier ones, whose tensors users still hold
    deferred: list[DeferredOp] = field(default_factory=list)  # operations of the user, not yet applied
    norms: dict[float, Tensor] = field(default_factory=dict)  # of the gradient with these applied, by order
    unscaled_norms: dict[tuple[float, float], Tensor] = field(default_factory=dict)  # times a factor; by it, and order
    noted_edits: int = 0  # of ``num_edits``, those that the norms know of
    rows_home: list[Slice] | None = (
        None  # the tiles that have arrived of an incomplete gradient; None if it is complete
    )
    uses: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)  # autograd nodes that give it gradients
    uses_outside: "weakref.WeakSet[_Use]" = field(default_factory=weakref.WeakSet)  # of the forward, that still live
    home_backward: int = -1  # the last backward, by its number, whose gradient went straight home
    handed: Tensor | None = None  # a gradient that a captured backward leaves for autograd
    handed_backward: int = -1  # the backward, by its number, that left it: one that was broken off may leave it behind
    unreduced: Tensor | None = None  # with stage=1: the whole gradient of this rank's batches, until it is reduced
    num_arrivals: int = 0  # of gradients that were stored or added, since the last step or zero_grad()
    num_expected: int = 0  # of them in a step, as the last one had
    arrival_version: int = 0  # of the tensor at home, by autograd's count, when the last one had arrived
    num_edits: int = 0  # changes by users since then that autograd may not count
    was_edited: bool = False  # by such changes, since its first part arrived
    is_at_home: bool = True  # False: all of the gradient is unreduced, and its slot has no value yet

    def is_home(self, grad: Tensor) -> bool:
        """Return whether a gradient is the one at home, and not a tensor that the user put there."""
        return self.slot is not None and self.slot.is_home_of(grad)

    def train(self, slot: Slot) -> None:
        """Give the parameter a slot for its gradients."""
        self.slot = slot

    def replace(self, moved: Slot) -> None:
        """Use a slot that has the same value elsewhere."""
        self.slot = moved

    # A new gradient

    def find_forgotten(self) -> Slot | None:
        """Return a slot whose gradient nobody holds any more."""
        slots = [*self.held, *([self.slot] if self.slot is not None else [])]
        return next((slot for slot in slots if slot.is_forgotten), None)

    def begin(self, slot: Slot) -> None:
        """Begin a new gradient in a slot. What was known of the last one is forgotten; users may still hold its tensor."""
        was = self.slot
        if slot is not was:
            self.held = [each for each in (*self.held, *([was] if was is not None else [])) if each is not slot]
            self.slot = slot
        self.deferred.clear()
        self.forget_norms()
        self.num_arrivals, self.was_edited = 0, False

    def note_arrival(self) -> None:
        """Note that a gradient, or a tile of one, has been stored or added."""
        assert self.slot is not None
        self.num_arrivals += 1
        self.arrival_version, self.num_edits, self.noted_edits = self.slot.tensor._version, 0, 0

    def note_edit(self) -> None:
        """Note that a user changes the value, or may do so unseen."""
        self.num_edits += 1
        self.was_edited = True

    def end_step(self) -> None:
        """Expect as many gradients in the next step as there were in this one."""
        self.num_expected, self.num_arrivals = self.num_arrivals, 0

    @property
    def may_be_complete(self) -> bool:
        """Return whether as many gradients have arrived as the last step had, and of all rows."""
        return 0 < self.num_arrivals == self.num_expected and self.rows_home is None

    @property
    def is_untouched(self) -> bool:
        """Return whether nobody has changed the value since the last gradient arrived."""
        return not self.num_edits and self.is_as_noted

    @property
    def is_as_noted(self) -> bool:
        """Return whether nobody has changed the value since the last gradient arrived, or only as the norms know."""
        slot = self.slot
        return slot is not None and self.num_edits == self.noted_edits and slot.tensor._version == self.arrival_version

    def begin_tiles(self) -> None:
        """Note that the new gradient comes in tiles, none of which is there."""
        assert self.slot is not None
        self.rows_home = [] if self.slot.slice.length else None  # the last of several ranks may have no row

    def find_missing(self, rows: Slice) -> list[Slice]:
        """Return which of some rows of the gradient are not there yet: these are written, and others added to."""
        return [] if self.rows_home is None else list(rows.without(self.rows_home))

    def add_rows(self, rows: Slice) -> None:
        """Note that rows have arrived that were missing; with the last ones the gradient is complete."""
        assert self.slot is not None
        assert self.rows_home is not None
        self.rows_home.append(rows)
        if not list(self.slot.slice.without(self.rows_home)):
            self.rows_home = None

    # What is known of it, and deferred operations

    def note_norm(self, order: float, norm: Tensor) -> None:
        """Remember a norm of the gradient as it is at home, with deferred operations applied."""
        self.norms[order] = norm

    def note_unscaled_norm(self, inverse_scale: float, order: float, norm: Tensor) -> None:
        """Remember a norm that the gradient will have if it is unscaled by a factor."""
        self.unscaled_norms[inverse_scale, order] = norm

    def forget_norms(self) -> None:
        """Forget what is known of the value, which is about to change."""
        self.norms.clear()
        self.unscaled_norms.clear()

    def defer(self, operation: DeferredOp) -> None:
        """Defer an operation until the gradient is read."""
        self.forget_norms()
        self.note_edit()
        self.deferred.append(operation)

    def defer_unscaling(self, operation: DeferredOp, inverse_scale: float) -> None:
        """Defer the multiplication by a factor. Norms that were taken for it are those of the gradient from now on."""
        norms = self.unscaled_norms if self.is_as_noted else {}
        known = {order: norm for (factor, order), norm in norms.items() if factor == inverse_scale}
        self.defer(operation)
        self.norms, self.noted_edits = known, self.num_edits

    def take_deferred(self) -> list[DeferredOp]:
        """Return the deferred operations, which the caller applies at once; nothing is known of the value any more."""
        self.forget_norms()
        self.noted_edits = 0
        operations = self.deferred.copy()
        self.deferred.clear()
        return operations

    # Reduced once per step

    def begin_unreduced(self) -> None:
        """Note that the new gradient is not at home until it has been reduced."""
        self.is_at_home = False

    def add_unreduced(self, grad: Tensor, memory: Callable[[torch.Size, torch.dtype], Tensor]) -> None:
        """Add a whole gradient of this rank to those that wait to be reduced."""
        assert self.slot is not None
        if self.unreduced is None:
            self.unreduced = memory(grad.shape, self.slot.tensor.dtype)
            self.unreduced.copy_(grad)
        else:
            self.unreduced.add_(grad)

    def take_unreduced(self) -> tuple[Tensor, bool]:
        """Return what waits to be reduced, and whether its rows are to be added to a value at home; forget it."""
        assert self.unreduced is not None
        taken, self.unreduced = self.unreduced, None
        adds, self.is_at_home = self.is_at_home, True
        return taken, adds

    # Through autograd

    def add_use(self, node: Any) -> None:
        """Note an autograd node that gives the parameter gradients, as long as it lives."""
        self.uses.add(node)

    @property
    def has_uses(self) -> bool:
        """Return whether an autograd node stands for the parameter; the length of a weak set may count what is gone."""
        return next(iter(self.uses), None) is not None

    def note_use_outside(self, node: Any) -> None:
        """Note an autograd node of what was computed of the parameter outside of the forward, as long as it lives."""
        use = _Use()
        node.metadata.setdefault(_USES, []).append(use)  # its wrapper may be gone at once, what is kept here is not
        self.uses_outside.add(use)

    @property
    def is_used_outside(self) -> bool:
        """Return whether there is something computed outside of the forward that a backward may reach."""
        return next(iter(self.uses_outside), None) is not None

    def go_home(self, backward: int) -> None:
        """Note that its gradient of a backward goes straight home."""
        self.home_backward = backward

    def hand_over(self, backward: int, grad: Tensor) -> None:
        """Keep a gradient until autograd takes it: a copy, since what a graph computed may lie in the arena."""
        self._forget_broken(backward)
        self.handed = grad.clone() if self.handed is None else self.handed + grad

    def hand_over_rows(self, backward: int, held: Slice, rows: Slice, grad: Tensor) -> None:
        """Keep some of the rows that are held of a gradient until autograd takes it; on the CPU."""
        self._forget_broken(backward)
        if self.handed is None:
            self.handed = torch.zeros(held.sizes, dtype=grad.dtype)
        elements_of(self.handed, held, rows).view(rows.sizes).add_(grad.to(self.handed.device))

    def _forget_broken(self, backward: int) -> None:
        if self.handed_backward != backward:
            self.handed, self.handed_backward = None, backward

    def take_handed(self, backward: int) -> Tensor | None:
        """Return what a backward has handed over, and forget it."""
        self._forget_broken(backward)
        handed, self.handed = self.handed, None
        return handed
