"""The copies of a stored parameter: the slots of its values and of its optimizer state, and whether they agree.

Only this file writes the fields of ``Copies`` and ``Seat``.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from zinf_compile.ir.copies import MASTER, CopyKey
from zinf_compile.runtime.storage.nvme.weight_file import WeightSpan
from zinf_compile.runtime.storage.slots import Slot

_MOST_WHOLE = 64  # updates that leave a master copy whole, where it is looked at again and again


class Seat:
    """What connects the captured gathers of one parameter to the autograd graph.

    Dynamo guards on the anchor here: with another one the model is captured again.
    """

    def __init__(self, anchor: Tensor) -> None:
        self.anchor = anchor
        self.is_held = False  # full_parameters() holds its parameter's value

    def hang_on(self, anchor: Tensor) -> None:
        """Let gathers hang on another anchor from now on."""
        self.anchor = anchor


@dataclass(slots=True, kw_only=True, eq=False)
class Copies:
    """The copies of one parameter. ``master`` is ``compute`` itself where there is only one copy."""

    compute: Slot
    master: Slot
    seat: Seat
    states: dict[str, Slot] = field(default_factory=dict)  # of the optimizer that stepped it last
    states_owner: "weakref.ref[Optimizer] | None" = None  # that optimizer
    other_states: "list[tuple[weakref.ref[Optimizer], dict[str, Slot]]]" = field(default_factory=list)
    synced_version: int = 0  # of the parameter, when the compute copy was last cast from the master
    spread_count: int = 0  # of updates, when the rows of other ranks were last gathered into copies that are whole here
    weights: WeightSpan | None = None  # where a weight file has the value, of a frozen parameter that was not written
    is_exposed: bool = False  # a writable alias of the master was handed out since
    joined_at: int | None = None  # the number of updates when somebody wanted the master copy whole last
    whole_for: int = 1  # the updates that leave it whole after that

    @property
    def are_two(self) -> bool:
        """Return whether compute and master are two slots."""
        return self.compute is not self.master

    @property
    def in_place(self) -> Slot | None:
        """Return the copy that lies in a weight file; None if there is none."""
        return None if self.master.weights is None else self.master

    @property
    def all(self) -> tuple[Slot, ...]:
        """Return the slots of the values, each once."""
        return (self.compute, self.master) if self.are_two else (self.compute,)

    def of_dtype(self, dtype: torch.dtype) -> Slot:
        """Return the copy that a gather of ``dtype`` moves."""
        return self.compute if dtype == self.compute.tensor.dtype else self.master

    def slot_of(self, key: CopyKey) -> Slot:
        """Return the slot of a copy, or of a state of the optimizer that owns the states."""
        if key.state is not None:
            return self.states[key.state]
        return self.master if key == MASTER else self.compute

    def train(self, master: Slot, anchor: Tensor) -> None:
        """Give the parameter the master copy that an optimizer steps, and the anchor of captured graphs that train."""
        self.master, self.seat.anchor = master, anchor

    def drop_compute(self) -> Slot | None:
        """Make the master copy the only one; return the separate compute copy that there was, whose bytes are free now."""
        if not self.are_two:
            return None
        dropped, self.compute = self.compute, self.master
        return dropped

    def narrow(self, compute: Slot) -> None:
        """Use a compute copy that was cast from the master copy."""
        self.compute = compute

    def replace(self, slot: Slot, moved: Slot) -> None:
        """Put ``moved``, which has the same value elsewhere, in the place of a slot."""
        if self.master is slot:
            self.master = moved
        if self.compute is slot:
            self.compute = moved
        if self.master.upper is slot:
            self.master.upper = moved

    # Whether a weight file has the value

    def serve(self, weights: WeightSpan) -> None:
        """Note where a weight file has the value."""
        self.weights = weights

    def leave_weights(self) -> None:
        """Note that no weight file has the value, from now on."""
        self.weights = None

    # Whether updates leave, of the master copy, only what the compute copy lacks

    def may_split(self, count: int) -> bool:
        """Return whether update number ``count`` may: one leaves it whole where the one before was looked at, or more."""
        is_f32 = (self.master.dtype, self.compute.dtype) == (torch.float32, torch.bfloat16)
        are_on_disk = (
            self.are_two and is_f32 and self.master.extent is not None and self.compute.slice == self.master.slice
        )
        return are_on_disk and (self.joined_at is None or count - self.joined_at >= self.whole_for)

    def note_joined(self, count: int) -> None:
        """Note that the master copy had to be made whole after ``count`` updates; where that happens often, it stays so."""
        is_again = self.joined_at is not None and count - self.joined_at <= 2 * self.whole_for
        self.whole_for = min(_MOST_WHOLE, 2 * self.whole_for) if is_again else 1
        self.joined_at = count

    # Whether the compute copy is the master's value

    def expose(self) -> None:
        """Note that a writable alias of the master copy is handed out."""
        self.is_exposed = True

    def sync(self, version: int) -> None:
        """Note that the compute copy is the value that the master copy has at this version of the parameter."""
        if not self.is_synced(version):
            self.spread_count = -1  # other ranks have written their rows too
        self.synced_version, self.is_exposed = version, False

    def is_synced(self, version: int) -> bool:
        """Return whether the master copy was not written since the compute copy was made from it."""
        return version == self.synced_version and not self.is_exposed

    def is_behind(self, count: int) -> bool:
        """Return whether a copy that is whole on each of several ranks lacks their last updates, ``count`` so far."""
        return self.spread_count != count and any(slot.num_ranks == 1 for slot in self.all)

    def note_spread(self, count: int) -> None:
        """Note that the rows of all ranks are gathered, after so many updates."""
        self.spread_count = count

    # Full values of it, held by full_parameters()

    def hold(self) -> None:
        """Note that ``full_parameters()`` holds its value."""
        self.seat.is_held = True

    def release(self) -> None:
        """Note that its value is at home again."""
        self.seat.is_held = False

    # Optimizer state

    @property
    def updated_states(self) -> dict[str, Slot]:
        """Return the slots of the state that updates read and write."""
        return {key: slot for key, slot in self.states.items() if not slot.is_aside}

    def own_states(self, optimizer: Optimizer) -> None:
        """Make ``states`` an optimizer's: another one keeps its own, and its slots are reused once it is gone."""
        if self.states_owner is not None:
            if self.states_owner() is optimizer:
                return
            self.other_states.append((self.states_owner, self.states))
        mine: dict[str, Slot] = next((states for owner, states in self.other_states if owner() is optimizer), {})
        self.other_states = [(owner, states) for owner, states in self.other_states if states is not mine]
        self.states, self.states_owner = mine, weakref.ref(optimizer)

    def take_forgotten_state(self, key: str, holds: Callable[[Slot], bool]) -> Slot | None:
        """Remove and return the slot of a state tensor that is not referenced any more, since its optimizer is gone.

        ``holds`` returns whether a slot can hold what is wanted.
        """
        for owner, states in self.other_states:
            slot = states.get(key) if owner() is None else None
            if slot is not None and holds(slot) and slot.is_forgotten:
                return states.pop(key)
        return None

    def take_odd_of_gone(self) -> list[Slot]:
        """Remove and return the slots of shapes of their own, which are not reused, of optimizers that are gone."""
        odd = []
        for owner, states in self.other_states:
            if owner() is None:
                keys = [key for key, slot in states.items() if not slot.per_element and slot.is_forgotten]
                odd += [states.pop(key) for key in keys]
        return odd

    def put_state(self, key: str, slot: Slot) -> None:
        """Give a state tensor of the optimizer that owns the states its slot."""
        self.states[key] = slot

    def drop_state(self, key: str) -> Slot:
        """Remove and return the slot of a state tensor of the optimizer that owns the states."""
        return self.states.pop(key)

    @property
    def states_of_others(self) -> tuple[Mapping[str, Slot], ...]:
        """Return the slots of optimizers that stepped the parameter earlier."""
        return tuple(states for _, states in self.other_states)
