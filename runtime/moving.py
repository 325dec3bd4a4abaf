"""Moving: copies, gradients and optimizer state go to the homes that a new plan gives them."""

from collections.abc import Iterable

import torch

from zinf_compile.plans import Placement
from zinf_compile.runtime.home import HomeTensor
from zinf_compile.runtime.home_gradient import HomeGradient, settle_gradient
from zinf_compile.runtime.narrowing import narrow_parameter
from zinf_compile.runtime.ram import return_freed_memory
from zinf_compile.runtime.slots import Slot, StoredParameter, torch_dtype
from zinf_compile.runtime.store import Store
from zinf_compile.terms import Tier


def move_homes(store: Store, placements: Iterable[Placement]) -> None:
    """Move every slot of some parameters to the homes of a new plan. StoreError if bytes cannot be moved.

    A parameter whose compute copy is to have a narrower dtype gets one more slot.
    """
    store.synchronize()
    for placement in placements:
        record = store.records[placement.parameter]
        dtype = torch_dtype(placement.compute_dtype)
        if dtype != record.compute.tensor.dtype:
            narrow_parameter(record, dtype)
        _move(record, "compute", placement.compute)
        if record.has_compute_copy:
            _move(record, "master", placement.master)
        if record.gradient is not None:
            settle_gradient(record)
            _move(record, "gradient", placement.gradient)
        for key in record.states:
            _move_state(record, key, placement.optimizer_state)
        store.placements[placement.parameter] = placement
    with store.failing_on_error():
        store.transfers.wait_writes()
    return_freed_memory()


def _move(record: StoredParameter, role: str, tier: Tier) -> None:
    slot: Slot = getattr(record, role)
    moved = _moved_slot(record.store, slot, tier)
    if moved is slot:
        return
    grad = record.parameter.grad
    if role == "gradient" and grad is not None and slot.is_home_of(grad):
        record.parameter.grad = HomeGradient.show(moved, record)
    if slot is record.master:
        record.master = moved
        with torch._C.DisableTorchFunctionSubclass():
            record.parameter.data = moved.tensor
    setattr(record, role, moved)
    _give_back(record.store, slot)


def _move_state(record: StoredParameter, key: str, tier: Tier) -> None:
    """Move state that a checkpoint brought before there was a plan, and show it where its optimizer keeps it."""
    slot = record.states[key]
    owner = record.states_owner() if record.states_owner is not None else None
    if owner is None:  # nobody steps with it any more
        return
    moved = record.states[key] = _moved_slot(record.store, slot, tier)
    state = owner.state.get(record.parameter, {})
    if moved is not slot and slot.shown is not None and state.get(key) is slot.shown:
        state[key] = HomeTensor.show(moved, record)
    if moved is not slot:
        _give_back(record.store, slot)


def _give_back(store: Store, slot: Slot) -> None:
    """Let a slot's extent be used again, now that its value has moved.

    Not if somebody holds an alias of the old mapping, who would read, or write, whatever came to lie there.
    """
    if slot.extent is not None and slot.is_forgotten:
        store.layout.free(slot.extent)


def _moved_slot(store: Store, slot: Slot, tier: Tier) -> Slot:
    """Return a slot on ``tier`` with the value: the same one where nothing has to move."""
    if slot.tier is tier:
        return slot
    if slot.in_memory and tier is not Tier.NVME:  # on a CPU both tiers are RAM: nothing moves but the accounting
        store.count_home(slot.tier, -slot.nbytes)
        store.count_home(tier, slot.nbytes)
        slot.tier = tier
        return slot
    moved = store.new_slot(slot.name, slot.tensor.shape, slot.tensor.dtype, tier)
    store.count_home(slot.tier, -slot.nbytes)
    with store.failing_on_error():
        if slot.in_memory:
            store.transfers.write_value(moved, slot.tensor)
            store.transfers.wait_writes()
        else:
            store.transfers.read_value(slot, moved.tensor)
    return moved
