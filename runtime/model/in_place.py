"""Frozen parameters in place: they lie in a weight file of the user's, until somebody writes to them."""

import torch
from torch import Tensor

from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params.records import StoredParameter, holders_of
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.storage.nvme.weight_file import WeightSpan
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.store.store import Store


@without_interrupts
def move_out_of_weights(store: Store, record: StoredParameter, *, with_value: bool = True) -> None:
    """Give a parameter that is in place a home in the store's file. StoreError if bytes cannot be moved.

    What users have written to its mapping is part of its value. If somebody holds an alias of that, the mapping itself
    becomes its home, in memory, so that later writes through the alias count too. Without ``with_value`` the content is
    undefined.
    """
    slot = record.copies.in_place
    if slot is not None and slot.weights is not None:
        if with_value:
            slot.weights.file.check_unchanged()
        if stays_in_memory(record):
            slot.stay_in_memory()
            store.held.count_home(slot.tier, slot.nbytes)
        else:
            _copy_out(store, record, slot, is_written=slot.is_written_in_place, with_value=with_value)
    record.copies.leave_weights()


def stays_in_memory(record: StoredParameter) -> bool:
    """Return whether a parameter that leaves its file stays where it is mapped: somebody has written to it, and holds it."""
    slot = record.copies.in_place
    if slot is None or not slot.is_written_in_place:
        return False
    num_shown = 1 + len(holders_of(record.parameter))  # of tensors that move with the parameter
    return slot.num_references > slot.num_own_references + num_shown


def _copy_out(store: Store, record: StoredParameter, slot: Slot, *, is_written: bool, with_value: bool) -> None:
    moved = store.new_slot(record.name, record.shape, slot.dtype, Tier.NVME, slot.key)
    with store.failing_on_error():
        if with_value and is_written:
            store.tensor_io.write_value(moved, slot.tensor)
        elif with_value:
            for part, piece in store.tensor_io.read_pieces(slot):
                store.tensor_io.write_value(moved.part(part), piece)
        store.tensor_io.wait_writes()
    record.copies.replace(slot, moved)
    record.views.move(record.parameter, record.home)


def is_still_in(weights: WeightSpan, slot: Slot, store: Store) -> bool:
    """Return whether a slot in memory has, bit by bit, the value that lies in a weight file. StoreError if a read fails."""
    served = store.new_slot(slot.slice.parameter, slot.tensor.shape, slot.dtype, Tier.NVME, slot.key, weights=weights)
    return has_value(store, served, slot.tensor)


def has_value(store: Store, slot: Slot, value: Tensor) -> bool:
    """Return whether a slot on nvme has a value, bit by bit; blocks. StoreError if a read fails."""
    flat = value.detach().cpu().contiguous().view(-1)
    with store.failing_on_error():
        for part, piece in store.tensor_io.read_pieces(slot):
            start = part.offset_in(slot.slice)
            other = flat[start : start + part.num_elements]
            if not torch.equal(piece.view(torch.uint8), other.view(torch.uint8)):
                return False
    return True
